//! Flushes that have to fail, because writes that completed before them may be lost (decision 6).
//!
//! A session that takes a front end over from a server that is gone compares the disk's incarnation. If
//! completed writes may be lost, it makes a [`LostWrites`] for that front end, and each of its sources gets a
//! [`LostWritesQueue`]. Their lanes then fail flushes with an I/O error, and don't give them to the disk,
//! until the front end was told once. The flushes that it had submitted by then fail as well, on every queue:
//! they may cover lost writes, and their success would hide the loss.
//!
//! ```text
//! owed ──a lane's failed flush is in the ring──▶ told ──each lane, at what its peer had submitted by then──▶ over
//! ```

use parking_lot::Mutex;
use pvblk_block::{Op, Request, RequestFlags};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The index behind the last request that a peer has submitted to its ring, modulo 2^16; called from any
/// thread.
pub type Submitted = Box<dyn Fn() -> u16 + Send + Sync>;

/// Writes of one front end that may be lost, and whether it has been told.
pub struct LostWrites {
    told: AtomicBool,
    table: Mutex<QueueList>,
}

struct QueueList {
    on_told: Option<Box<dyn FnOnce() + Send>>,
    queues: Vec<TrackedQueue>,
}

struct TrackedQueue {
    submitted: Submitted,
    /// The index up to which requests had been submitted when the front end was told, or when the
    /// queue was added, if that was later.
    limit: u16,
}

/// One queue of a front end that may have lost writes.
pub struct LostWritesQueue {
    lost: Arc<LostWrites>,
    index: usize,
}

impl LostWrites {
    /// The front end hasn't been told. `on_told` is called once, when the first failed flush has
    /// its response.
    pub fn new(on_told: impl FnOnce() + Send + 'static) -> Arc<LostWrites> {
        Arc::new(LostWrites {
            told: AtomicBool::new(false),
            table: Mutex::new(QueueList {
                on_told: Some(Box::new(on_told)),
                queues: Vec::new(),
            }),
        })
    }

    /// Adds a queue, before any request is pulled from it.
    pub fn queue(self: &Arc<LostWrites>, submitted: Submitted) -> LostWritesQueue {
        let mut table = self.table.lock();
        let limit = submitted();
        table.queues.push(TrackedQueue { submitted, limit });
        LostWritesQueue {
            index: table.queues.len() - 1,
            lost: Arc::clone(self),
        }
    }

    /// True once a failed flush has its response.
    pub fn is_told(&self) -> bool {
        self.told.load(Ordering::Acquire)
    }
}

impl LostWritesQueue {
    /// True if flushes that were pulled from index `position` on have to fail.
    pub(crate) fn fails(&self, position: u16) -> bool {
        if !self.lost.is_told() {
            return true;
        }
        let limit = self.lost.table.lock().queues[self.index].limit;
        // A ring has at most 2^15 entries.
        (1..=1 << 15).contains(&limit.wrapping_sub(position))
    }

    /// Notes that the response to a failed flush is visible to the front end.
    pub(crate) fn tell(&self) {
        let mut table = self.lost.table.lock();
        let Some(on_told) = table.on_told.take() else {
            return;
        };
        for queue in &mut table.queues {
            queue.limit = (queue.submitted)();
        }
        self.lost.told.store(true, Ordering::Release);
        on_told();
    }
}

/// True if the request's success means that earlier writes are stable.
pub(crate) fn promises(request: &Request) -> bool {
    let ordered = RequestFlags::PREFLUSH | RequestFlags::BARRIER;
    request.op == Op::Flush || request.flags.intersects(ordered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU16, AtomicU32};

    #[test]
    fn what_was_submitted_before_it_was_told_fails_on_every_queue_and_nothing_later() {
        let rings: [Arc<AtomicU16>; 2] = [65534, 7].map(|n| Arc::new(AtomicU16::new(n)));
        let told = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&told);
        let lost = LostWrites::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let queue = |i: usize| {
            let ring = Arc::clone(&rings[i]);
            lost.queue(Box::new(move || ring.load(Ordering::Relaxed)))
        };
        let (a, b) = (queue(0), queue(1));
        assert!(a.fails(65534) && b.fails(7));
        rings[0].store(1, Ordering::Relaxed);
        a.tell();
        rings[1].store(9, Ordering::Relaxed);
        a.tell();
        b.tell();
        assert_eq!(told.load(Ordering::Relaxed), 1);
        // On the first queue three requests were in flight, across the end of the indices; on the
        // second none.
        assert!(a.fails(65534) && a.fails(0) && !a.fails(1) && !a.fails(2));
        assert!(!b.fails(7) && !b.fails(8));
        // The requests of a queue that starts later were submitted before, if they are in it
        // already.
        let late = queue(1);
        assert!(late.fails(8) && !late.fails(9));
    }
}
