//! Completions that are held back until their time.

use pvblk_block::Completion;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::Instant;

/// Held completions by time; equal times keep their order.
#[derive(Default)]
pub(crate) struct Held {
    heap: BinaryHeap<Reverse<Entry>>,
    sequence: u64,
}

struct Entry {
    due: Instant,
    sequence: u64,
    completion: Completion,
}

impl Held {
    /// Room for `depth` without allocating.
    pub(crate) fn with_capacity(depth: usize) -> Held {
        Held {
            heap: BinaryHeap::with_capacity(depth),
            sequence: 0,
        }
    }

    pub(crate) fn push(&mut self, due: Instant, completion: Completion) {
        self.sequence += 1;
        self.heap.push(Reverse(Entry {
            due,
            sequence: self.sequence,
            completion,
        }));
    }

    /// Moves everything that is due at `now` to `out`.
    pub(crate) fn take_due(&mut self, now: Instant, out: &mut Vec<Completion>) {
        while self.next_due().is_some_and(|due| due <= now) {
            if let Some(Reverse(entry)) = self.heap.pop() {
                out.push(entry.completion);
            }
        }
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse(entry)| entry.due)
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> Ordering {
        (self.due, self.sequence).cmp(&(other.due, other.sequence))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}
