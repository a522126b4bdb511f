//! Completed writes that no completed flush covers yet.

use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts a queue's answered writes, and how many of them a completed flush covers. A queue counts under its own lock, so that
/// counting shares no cache line with other queues; flushes, which are rare, read them all.
pub struct Durability {
    /// One for each queue, and the last for what an earlier connection left.
    queues: Vec<CachePadded<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    answered: AtomicU64,
    covered: AtomicU64,
}

/// The writes that a flush covers if it succeeds.
pub type Coverage = Box<[u64]>;

impl Durability {
    /// For `queues` queues; `dirty` if an earlier connection left writes uncovered.
    pub fn new(queues: usize, dirty: bool) -> Durability {
        let all: Vec<CachePadded<Counts>> = (0..=queues).map(|_| CachePadded::default()).collect();
        all[queues]
            .answered
            .store(u64::from(dirty), Ordering::Relaxed);
        Durability { queues: all }
    }

    /// A write of queue `index` is answered. Before its submitter knows.
    #[inline]
    pub fn answered(&self, index: usize) {
        self.queues[index].answered.fetch_add(1, Ordering::Relaxed);
    }

    /// The writes that a flush covers which is issued now: all those whose completion its submitter knows of.
    pub fn now(&self) -> Coverage {
        let count = |c: &CachePadded<Counts>| c.answered.load(Ordering::Relaxed);
        self.queues.iter().map(count).collect()
    }

    /// A flush has succeeded.
    pub fn flushed(&self, coverage: &Coverage) {
        for (queue, &upto) in self.queues.iter().zip(coverage) {
            queue.covered.fetch_max(upto, Ordering::Relaxed);
        }
    }

    /// True if a write is answered that no flush covers.
    pub fn is_dirty(&self) -> bool {
        let dirty = |c: &CachePadded<Counts>| {
            c.answered.load(Ordering::Relaxed) > c.covered.load(Ordering::Relaxed)
        };
        self.queues.iter().any(dirty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_what_was_answered_before_it_on_all_queues() {
        let d = Durability::new(2, false);
        assert!(!d.is_dirty());
        d.answered(0);
        d.answered(1);
        let flush = d.now();
        d.answered(1);
        d.flushed(&flush);
        assert!(d.is_dirty(), "the second write of queue 1 came later");
        let later = d.now();
        d.flushed(&later);
        d.flushed(&flush); // answers may come in any order
        assert!(!d.is_dirty());
    }

    #[test]
    fn what_an_earlier_connection_left_is_covered_too() {
        let d = Durability::new(1, true);
        assert!(d.is_dirty());
        let flush = d.now();
        d.flushed(&flush);
        assert!(!d.is_dirty());
    }
}
