//! Model checks of [`pvblk_raid5::words`]: every interleaving, up to a bound on preemptions, and every value that a weak memory may
//! show. A wake-up or a message that is lost is a deadlock; an order that lacks shows something stale.
//!
//! The negative controls break one rule each and must be found, otherwise the models prove nothing.

#[path = "../../block/tests/loom_model/explore.rs"]
mod explore;
mod loom_model;
#[path = "../../block/tests/loom_model/primitives.rs"]
mod primitives;

use explore::explore;
use loom_model::{Array, Fault, Sound, Words};
use primitives::{NO_ACQUIRE, NO_ACQUIRE_LOAD, NO_RELEASE};
use pvblk_block::stacked::Primitives;
use std::sync::Arc;

type NoAcquire = Words<NO_ACQUIRE, true>;
type NoRelease = Words<NO_RELEASE, true>;
type NoAcquireLoad = Words<NO_ACQUIRE_LOAD, true>;
type NoBarrier = Words<0, false>;

/// One step of a queue.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Write,
    /// A write with a log.
    Logged,
    /// The end of a batch that is open when the run begins.
    Finish,
    /// A claim of the word without a piece, if it is free.
    Idle,
    Kick,
}

use Step::{Finish, Idle, Kick, Logged, Write};

/// Queues take their steps side by side.
fn run<P: Primitives>(queues: &'static [&'static [Step]], fault: Fault) {
    let array = Array::<P>::new(queues.len(), fault);
    if let Some(queue) = queues.iter().position(|steps| steps.contains(&Finish)) {
        array.begin(queue);
    }
    let go = move |array: &Array<P>, queue: usize| {
        for step in queues[queue] {
            match step {
                Write => array.write(queue, false),
                Logged => array.write(queue, true),
                Finish => array.finish(queue),
                Idle => array.claim_idle(queue),
                Kick => array.kick(queue),
            }
        }
    };
    let spawn = |queue| {
        let array = Arc::clone(&array);
        loom::thread::spawn(move || go(&array, queue))
    };
    let threads: Vec<_> = (1..queues.len()).map(spawn).collect();
    go(&array, 0);
    for thread in threads {
        thread.join().expect("it ends");
    }
    array.check_end();
}

/// Checks queues without a fault.
fn sound(preemptions: usize, queues: &'static [&'static [Step]]) {
    explore(preemptions, move || run::<Sound>(queues, Fault::None));
}

/// Checks queues that break a rule.
fn with(fault: Fault, preemptions: usize, queues: &'static [&'static [Step]]) {
    explore(preemptions, move || run::<Sound>(queues, fault));
}

/// Checks queues whose primitives lack something.
fn without<P: Primitives>(preemptions: usize, queues: &'static [&'static [Step]]) {
    explore(preemptions, move || run::<P>(queues, Fault::None));
}

#[test]
fn one_of_two_writes_claims_the_stripe_and_the_other_joins() {
    sound(3, &[&[Write], &[Write]]);
}

#[test]
fn three_writes_are_done_once_each() {
    sound(2, &[&[Write], &[Write], &[Write]]);
}

#[test]
fn a_queue_writes_again_while_another_joins() {
    sound(2, &[&[Write, Write], &[Write]]);
}

#[test]
fn writes_arrive_while_a_batch_closes() {
    sound(2, &[&[Finish], &[Write], &[Write]]);
}

#[test]
fn an_idle_word_is_claimed_while_others_arrive() {
    sound(2, &[&[Finish], &[Idle], &[Write]]);
}

#[test]
fn a_claim_meets_a_stop() {
    sound(3, &[&[Kick], &[Write]]);
}

#[test]
fn a_release_meets_a_stop() {
    sound(3, &[&[Kick], &[Finish]]);
}

#[test]
fn a_word_is_handed_over_while_words_are_stopped() {
    sound(2, &[&[Kick], &[Finish], &[Write]]);
}

#[test]
fn a_stop_ends_before_somebody_parks_and_another_begins() {
    sound(2, &[&[Kick], &[Write], &[Kick]]);
}

#[test]
fn the_owner_of_a_word_kicks() {
    sound(2, &[&[Write, Kick], &[Kick, Write]]);
}

#[test]
fn a_log_meets_a_stop() {
    sound(3, &[&[Kick], &[Logged]]);
}

#[test]
fn a_second_batch_is_logged_after_a_stop() {
    sound(1, &[&[Kick], &[Logged], &[Logged]]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn control_without_acquiring_the_word_something_is_stale() {
    without::<NoAcquire>(2, &[&[Write], &[Write]]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn control_without_publishing_the_word_something_is_stale() {
    without::<NoRelease>(2, &[&[Write], &[Write]]);
}

#[test]
#[should_panic(expected = "members")]
fn control_without_acquiring_the_epoch_members_are_old() {
    without::<NoAcquireLoad>(2, &[&[Kick], &[Write]]);
}

#[test]
#[should_panic(expected = "under I/O")]
fn control_a_scan_that_does_not_acquire_misses_the_end_of_io() {
    without::<NoAcquireLoad>(4, &[&[Kick], &[Finish]]);
}

#[test]
#[should_panic(expected = "members")]
fn control_without_the_barrier_a_claim_misses_the_stop() {
    without::<NoBarrier>(2, &[&[Kick], &[Write]]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_without_the_barrier_a_release_is_not_told() {
    without::<NoBarrier>(2, &[&[Kick], &[Finish]]);
}

#[test]
#[should_panic(expected = "members")]
fn control_a_claim_that_does_not_look_is_planned_for_old_members() {
    with(Fault::NoLook, 2, &[&[Kick], &[Write]]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_kick_that_nobody_tells_waits_for_ever() {
    with(Fault::NotTold, 2, &[&[Kick], &[Finish]]);
}

#[test]
#[should_panic(expected = "members")]
fn control_a_kick_that_does_not_wait_changes_members_under_io() {
    with(Fault::NotDrained, 2, &[&[Kick], &[Finish]]);
}

#[test]
#[should_panic(expected = "members")]
fn control_members_that_change_after_the_stop_are_found_old() {
    with(Fault::ChangedLate, 2, &[&[Kick], &[Write]]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_who_is_not_told_to_go_on_waits_for_ever() {
    with(Fault::NotGoneOn, 2, &[&[Kick], &[Write]]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_word_that_is_not_posted_is_lost() {
    with(Fault::NotPosted, 2, &[&[Finish], &[Write]]);
}

#[test]
#[should_panic(expected = "members")]
fn control_data_without_the_logs_word_meets_a_stop() {
    with(Fault::NoLog, 2, &[&[Kick], &[Logged]]);
}

#[test]
#[should_panic(expected = "members")]
fn control_a_batch_that_is_older_than_its_log_is_for_old_members() {
    with(Fault::StalePlan, 2, &[&[Kick], &[Logged]]);
}
