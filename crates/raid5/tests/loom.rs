//! Model checks of [`pvblk_raid5::words`]: every interleaving, up to a bound on preemptions, and every value that a weak memory may
//! show. A wake-up or a message that is lost is a deadlock; an order that lacks shows something stale.
//!
//! The negative controls break one rule each and must be found, otherwise the models prove nothing.

#[path = "loom_model/chunk_tests.rs"]
mod chunk_tests;
#[path = "../../block/tests/loom_model/explore.rs"]
mod explore;
mod loom_model;
#[path = "../../block/tests/loom_model/primitives.rs"]
mod primitives;

use explore::explore;
use loom_model::logs::{self, Logged, Step as LogStep};
use loom_model::pages::{self, Locked, Short, Step as PageStep};
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
    /// The end of a batch that is open when the run begins.
    Finish,
    /// A claim of the word without a piece, if it is free.
    Idle,
    Kick,
}

use Step::{Finish, Idle, Kick, Write};

/// Queues take their steps side by side.
fn run<P: Primitives>(queues: &'static [&'static [Step]], fault: Fault) {
    let array = Array::<P>::new(queues.len(), fault);
    if let Some(queue) = queues.iter().position(|steps| steps.contains(&Finish)) {
        array.begin(queue);
    }
    let go = move |array: &Array<P>, queue: usize| {
        for step in queues[queue] {
            match step {
                Write => array.write(queue),
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

/// Queues that are short of pages take their steps side by side. `kept`: words that are free and have some at first. Batches whose ends
/// are among the steps have the others.
#[derive(Clone, Copy)]
struct Scarce {
    words: usize,
    kept: &'static [usize],
    queues: &'static [&'static [PageStep]],
}

impl Scarce {
    fn run<P: Primitives>(self, fault: pages::Fault) {
        let has_batch = |steps: &&&[PageStep]| {
            let ends = [PageStep::Finish, PageStep::FinishWhole];
            steps.iter().any(|step| ends.contains(step))
        };
        let open = self.queues.iter().take_while(has_batch).count();
        let queues = self.queues.len();
        let short = Short::<P>::new(queues, self.words, open, self.kept, fault);
        let spawn = |queue: usize| {
            let short = Arc::clone(&short);
            let steps = self.queues[queue].iter();
            loom::thread::spawn(move || steps.for_each(|step| short.step(queue, *step)))
        };
        let threads: Vec<_> = (1..self.queues.len()).map(spawn).collect();
        self.queues[0].iter().for_each(|step| short.step(0, *step));
        for thread in threads {
            thread.join().expect("it ends");
        }
        short.check_end();
    }

    fn sound(self, preemptions: usize) {
        explore(preemptions, move || {
            self.run::<Locked<true>>(pages::Fault::None)
        });
    }

    fn with(self, fault: pages::Fault, preemptions: usize) {
        explore(preemptions, move || self.run::<Locked<true>>(fault));
    }

    fn without_barrier(self, preemptions: usize) {
        explore(preemptions, move || {
            self.run::<Locked<false>>(pages::Fault::None)
        });
    }
}

/// The only pages are in a batch that ends while another one wants them.
const WAIT: Scarce = Scarce {
    words: 2,
    kept: &[],
    queues: &[&[PageStep::Finish], &[PageStep::Write(1)]],
};

/// The same, and they go to a reserve.
const WHOLE: Scarce = Scarce {
    words: 2,
    kept: &[],
    queues: &[&[PageStep::FinishWhole], &[PageStep::Write(1)]],
};

/// The queue that freed the word wants its pages for another one, while a piece arrives there.
const ARRIVAL: Scarce = Scarce {
    words: 2,
    kept: &[0],
    queues: &[&[PageStep::Write(1)], &[PageStep::Write(0)]],
};

/// Two queues want the pages that a third one has left in a word.
const WALK: Scarce = Scarce {
    words: 3,
    kept: &[0],
    queues: &[&[], &[PageStep::Write(1)], &[PageStep::Write(2)]],
};

/// Words are stopped while a queue claims one for its pages.
const STOP: Scarce = Scarce {
    words: 2,
    kept: &[0],
    queues: &[&[PageStep::Kick], &[PageStep::Write(1)]],
};

/// Words are stopped while a queue waits for the pages of a batch that may be parked.
const STOP_AND_WAIT: Scarce = Scarce {
    words: 2,
    kept: &[0],
    queues: &[
        &[PageStep::Kick],
        &[PageStep::Write(1)],
        &[PageStep::Write(0)],
    ],
};

#[test]
fn a_queue_that_waits_for_pages_is_woken() {
    WAIT.sound(3);
}

#[test]
fn a_reserve_is_filled_while_a_queue_begins_to_wait() {
    WHOLE.sound(3);
}

#[test]
fn a_word_is_claimed_for_its_pages_while_a_piece_arrives() {
    ARRIVAL.sound(3);
}

#[test]
fn two_queues_walk_the_table() {
    WALK.sound(2);
}

#[test]
fn each_of_two_queues_finds_pages() {
    let two = Scarce {
        words: 4,
        kept: &[0, 1],
        queues: &[&[], &[PageStep::Write(2)], &[PageStep::Write(3)]],
    };
    two.sound(2);
}

#[test]
fn pages_come_to_a_queue_that_has_found_some() {
    let two = Scarce {
        words: 3,
        kept: &[],
        queues: &[
            &[PageStep::Finish],
            &[PageStep::Finish],
            &[PageStep::Write(2)],
        ],
    };
    two.sound(2);
}

#[test]
fn queues_take_from_a_reserve_while_one_waits() {
    let three = Scarce {
        words: 3,
        kept: &[],
        queues: &[
            &[PageStep::FinishWhole],
            &[PageStep::Write(1)],
            &[PageStep::Write(2)],
        ],
    };
    three.sound(1);
}

#[test]
fn memory_is_given_back_while_a_queue_wants_pages() {
    let short = Scarce {
        words: 2,
        kept: &[0],
        queues: &[&[PageStep::GiveWay], &[PageStep::Write(1)]],
    };
    short.sound(2);
}

#[test]
fn a_claim_for_pages_meets_a_stop() {
    STOP.sound(3);
}

#[test]
fn a_queue_waits_for_pages_while_words_are_stopped() {
    STOP_AND_WAIT.sound(1);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_stop_that_is_not_told_of_a_claim_for_pages_waits_for_ever() {
    STOP.with(pages::Fault::NotTold, 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_batch_that_waits_for_pages_unparked_holds_up_the_stop() {
    STOP_AND_WAIT.with(pages::Fault::NotParked, 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_without_the_barrier_a_queue_that_waits_is_not_seen() {
    WAIT.without_barrier(2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_without_the_barrier_a_walk_misses_a_word() {
    WALK.without_barrier(2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_queue_that_nobody_wakes_waits_for_ever() {
    WAIT.with(pages::Fault::NotWoken, 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_batch_that_ends_without_a_look_leaves_others_waiting() {
    WAIT.with(pages::Fault::NoLook, 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_word_that_was_claimed_for_its_pages_is_lost() {
    ARRIVAL.with(pages::Fault::NotPosted, 2);
}

/// Queues whose batches meet at one log take their steps side by side.
fn run_logged<P: Primitives>(
    most: usize,
    queues: &'static [&'static [LogStep]],
    fault: logs::Fault,
) {
    let array = Logged::<P>::new(queues.len(), most, fault);
    let ends = |queue: &usize| queues[*queue].contains(&LogStep::Finish);
    let in_unit: Vec<usize> = (0..queues.len()).filter(ends).collect();
    array.begin(&in_unit);
    let spawn = |queue: usize| {
        let array = Arc::clone(&array);
        let steps = queues[queue].iter();
        loom::thread::spawn(move || steps.for_each(|step| array.step(queue, *step)))
    };
    let threads: Vec<_> = (1..queues.len()).map(spawn).collect();
    queues[0].iter().for_each(|step| array.step(0, *step));
    for thread in threads {
        thread.join().expect("it ends");
    }
    array.check_end();
}

/// Checks queues with a log, and without a fault. `most`: stripes of a unit.
fn sound_log(preemptions: usize, most: usize, queues: &'static [&'static [LogStep]]) {
    explore(preemptions, move || {
        run_logged::<Sound>(most, queues, logs::Fault::None)
    });
}

fn with_log(fault: logs::Fault, preemptions: usize, queues: &'static [&'static [LogStep]]) {
    explore(preemptions, move || run_logged::<Sound>(9, queues, fault));
}

fn without_log<P: Primitives>(preemptions: usize, queues: &'static [&'static [LogStep]]) {
    explore(preemptions, move || {
        run_logged::<P>(9, queues, logs::Fault::None)
    });
}

#[test]
fn two_batches_meet_at_a_log() {
    sound_log(4, 9, &[&[LogStep::Write], &[LogStep::Write]]);
}

#[test]
fn a_log_meets_a_stop() {
    sound_log(3, 9, &[&[LogStep::Kick], &[LogStep::Write]]);
}

#[test]
fn two_batches_meet_at_a_log_while_words_are_stopped() {
    let queues = &[
        &[LogStep::Kick] as &[_],
        &[LogStep::Write],
        &[LogStep::Write],
    ];
    sound_log(2, 9, queues);
}

#[test]
fn a_unit_ends_while_a_batch_arrives() {
    sound_log(5, 9, &[&[LogStep::Finish], &[LogStep::Write]]);
}

#[test]
fn two_parts_of_a_unit_end_while_words_are_stopped() {
    let queues = &[
        &[LogStep::Finish] as &[_],
        &[LogStep::Finish],
        &[LogStep::Kick],
    ];
    sound_log(2, 9, queues);
}

#[test]
fn two_parts_of_a_unit_end_while_a_batch_arrives() {
    let queues = &[
        &[LogStep::Finish] as &[_],
        &[LogStep::Finish],
        &[LogStep::Write],
    ];
    sound_log(3, 9, queues);
}

#[test]
fn a_unit_fails_while_another_batch_arrives() {
    sound_log(2, 9, &[&[LogStep::Fail], &[LogStep::Write]]);
}

#[test]
fn a_log_is_full_while_a_unit_ends() {
    let queues = &[
        &[LogStep::Finish] as &[_],
        &[LogStep::Write],
        &[LogStep::Write],
    ];
    sound_log(2, 1, queues);
}

#[test]
#[should_panic(expected = "members")]
fn control_data_without_the_logs_word_meets_a_stop() {
    with_log(
        logs::Fault::NoLog,
        2,
        &[&[LogStep::Kick], &[LogStep::Write]],
    );
}

#[test]
#[should_panic(expected = "members")]
fn control_a_writer_that_does_not_look_writes_for_old_members() {
    with_log(
        logs::Fault::NoLook,
        2,
        &[&[LogStep::Kick], &[LogStep::Write]],
    );
}

#[test]
#[should_panic(expected = "members")]
fn control_a_batch_that_is_older_than_its_log_is_for_old_members() {
    with_log(
        logs::Fault::StalePlan,
        2,
        &[&[LogStep::Kick], &[LogStep::Write]],
    );
}

#[test]
#[should_panic(expected = "under I/O")]
fn control_a_stop_misses_a_stripe_whose_part_came_back_early() {
    with_log(
        logs::Fault::EarlyPart,
        2,
        &[&[LogStep::Finish], &[LogStep::Kick]],
    );
}

#[test]
#[should_panic(expected = "unit before it")]
fn control_a_log_is_written_over_early() {
    with_log(
        logs::Fault::EarlyPart,
        2,
        &[&[LogStep::Finish], &[LogStep::Write]],
    );
}

#[test]
#[should_panic(expected = "under I/O")]
fn control_without_acquiring_the_count_a_stop_misses_the_other_part() {
    let queues = &[
        &[LogStep::Kick] as &[_],
        &[LogStep::Finish],
        &[LogStep::Finish],
    ];
    without_log::<NoAcquireLoad>(2, queues);
}

#[test]
#[should_panic(expected = "unit before it")]
fn control_without_publishing_the_end_of_a_part_the_next_unit_misses_it() {
    let queues = &[
        &[LogStep::Write] as &[_],
        &[LogStep::Finish],
        &[LogStep::Finish],
    ];
    without_log::<NoRelease>(2, queues);
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_batch_that_is_not_answered_waits_for_ever() {
    with_log(
        logs::Fault::NotAnswered,
        2,
        &[&[LogStep::Write], &[LogStep::Write]],
    );
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_log_that_is_not_posted_is_lost() {
    with_log(
        logs::Fault::NotPosted,
        2,
        &[&[LogStep::Finish], &[LogStep::Write]],
    );
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_stop_that_is_not_told_of_a_log_waits_for_ever() {
    with_log(
        logs::Fault::NotTold,
        2,
        &[&[LogStep::Finish], &[LogStep::Kick]],
    );
}

#[test]
#[should_panic(expected = "deadlock")]
fn control_a_log_that_is_not_told_to_go_on_waits_for_ever() {
    with_log(
        logs::Fault::NotGoneOn,
        2,
        &[&[LogStep::Kick], &[LogStep::Write]],
    );
}
