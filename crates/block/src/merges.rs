//! The number of requests of one queue that were merged into others.

use crate::Op;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the requests of one queue that a device merged into others of that queue. The device adds to it, one thread at a time; anybody reads it.
#[derive(Debug, Default)]
pub struct MergeCounts {
    reads: AtomicU64,
    writes: AtomicU64,
}

impl MergeCounts {
    /// One more request of this operation was merged. Only reads and writes are.
    #[inline]
    pub fn add(&self, op: Op) {
        if let Some(count) = self.count(op) {
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }

    /// Requests of this operation that were merged.
    pub fn of(&self, op: Op) -> u64 {
        self.count(op).map_or(0, |c| c.load(Ordering::Relaxed))
    }

    fn count(&self, op: Op) -> Option<&AtomicU64> {
        match op {
            Op::Read => Some(&self.reads),
            Op::Write => Some(&self.writes),
            Op::Flush | Op::Discard | Op::WriteZeroes => None,
        }
    }
}
