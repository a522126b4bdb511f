//! Models of the bitmap's chunks.

use crate::explore::explore;
use crate::loom_model::Sound;
use crate::loom_model::chunks::{self, Marked};
use crate::{NoAcquireLoad, NoBarrier};
use loom::sync::atomic::{AtomicU32, Ordering};
use pvblk_block::stacked::Primitives;
use pvblk_raid5::words::Chunks;
use std::sync::Arc;

/// Steps at a chunk's bit.
#[derive(Clone, Copy, PartialEq)]
enum BitStep {
    Try,
    /// The end of a batch that is open when the run begins.
    End,
    /// The same, and it waits for its log before it writes.
    EndAfterLog,
    Sweep,
}

fn run_marked<P: Primitives>(queues: &'static [&'static [BitStep]], fault: chunks::Fault) {
    let array = Marked::<P>::new(fault);
    let ends =
        |steps: &&[BitStep]| steps.contains(&BitStep::End) || steps.contains(&BitStep::EndAfterLog);
    if let Some(queue) = queues.iter().position(ends) {
        array.begin(queue);
    }
    let go = move |array: &Marked<P>, queue: usize| {
        for step in queues[queue] {
            match step {
                BitStep::Try => array.try_write(queue),
                BitStep::End => array.finish(),
                BitStep::EndAfterLog => array.finish_after_log(),
                BitStep::Sweep => array.sweep(),
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

/// Something looks at memory that goes and comes with a chunk, without a word of its own.
fn run_peek<P: Primitives>(reloads: bool) {
    let chunks = Arc::new(Chunks::<P>::new(3, std::iter::once(true)));
    let memory = Arc::new(AtomicU32::new(RIGHT));
    let looks = {
        let (chunks, memory) = (Arc::clone(&chunks), Arc::clone(&memory));
        loom::thread::spawn(move || {
            let Some(seen) = chunks.peek(0) else { return };
            let found = memory.load(Ordering::Relaxed);
            if chunks.is_as_seen(&seen) {
                assert_eq!(found, RIGHT, "memory that was gone counts");
            }
        })
    };
    for _ in 0..2 {
        let marked = chunks.sweep(|_| true);
        // Nobody owns a word.
        for _ in chunks.clear_each(marked) {
            memory.store(0, Ordering::Relaxed);
            if reloads {
                memory.store(RIGHT, Ordering::Relaxed);
                chunks.set(&(0..8));
            }
        }
    }
    looks.join().expect("it ends");
}

const RIGHT: u32 = 7;

#[test]
fn a_look_without_a_word_meets_a_chunk_that_goes() {
    explore(3, || run_peek::<Sound>(false));
}

#[test]
fn a_look_without_a_word_meets_a_chunk_that_goes_and_comes() {
    explore(3, || run_peek::<Sound>(true));
}

#[test]
#[should_panic(expected = "memory that was gone counts")]
fn control_without_the_barrier_a_look_counts_on_memory_that_goes() {
    explore(3, || run_peek::<NoBarrier>(false));
}

const MEET: &[&[BitStep]] = &[&[BitStep::Sweep, BitStep::Sweep], &[BitStep::Try]];
const UNDER_WAY: &[&[BitStep]] = &[&[BitStep::Sweep, BitStep::Sweep], &[BitStep::End]];

const WAITS: &[&[BitStep]] = &[&[BitStep::Sweep, BitStep::Sweep], &[BitStep::EndAfterLog]];

fn marked(queues: &'static [&'static [BitStep]], fault: chunks::Fault) {
    explore(3, move || run_marked::<Sound>(queues, fault));
}

#[test]
fn a_batch_begins_while_its_bit_is_taken_away() {
    marked(MEET, chunks::Fault::None);
}

#[test]
fn a_batch_ends_while_its_bit_is_taken_away() {
    marked(UNDER_WAY, chunks::Fault::None);
}

#[test]
fn a_batch_waits_for_its_log_while_its_bit_is_taken_away() {
    marked(WAITS, chunks::Fault::None);
}

#[test]
#[should_panic(expected = "bit")]
fn control_a_sweep_that_takes_a_waiting_batch_for_done_takes_its_bit() {
    marked(WAITS, chunks::Fault::WaitingIsDone);
}

#[test]
fn sweeps_meet_two_batches() {
    explore(2, || {
        let steps: &[&[BitStep]] = &[
            &[BitStep::Sweep, BitStep::Sweep, BitStep::Sweep],
            &[BitStep::Try, BitStep::Try],
        ];
        run_marked::<Sound>(steps, chunks::Fault::None);
    });
}

#[test]
#[should_panic(expected = "bit")]
fn control_without_the_barrier_a_batch_counts_on_a_bit_that_goes() {
    explore(3, || run_marked::<NoBarrier>(MEET, chunks::Fault::None));
}

#[test]
#[should_panic(expected = "bit")]
fn control_a_scan_that_does_not_acquire_flushes_too_early() {
    explore(3, || {
        run_marked::<NoAcquireLoad>(UNDER_WAY, chunks::Fault::None);
    });
}

#[test]
#[should_panic(expected = "bit")]
fn control_a_batch_that_does_not_say_that_it_uses_its_chunk_loses_the_bit() {
    marked(MEET, chunks::Fault::NotUsed);
}

#[test]
#[should_panic(expected = "bit")]
fn control_a_sweep_that_does_not_wait_for_words_takes_a_bit_too_early() {
    marked(UNDER_WAY, chunks::Fault::NoGrace);
}

#[test]
#[should_panic(expected = "cached")]
fn control_a_sweep_that_does_not_flush_leaves_a_cached_write() {
    marked(UNDER_WAY, chunks::Fault::NoFlush);
}
