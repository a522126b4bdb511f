//! What the back end serves: anything that yields requests and takes completions.

use crate::losses::Seat;
use crate::worker::LaneWaker;
use pvblk_block::{Completion, Error, Readiness, Request};
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// How many requests a source takes in one pull: a quarter of the most that were there lately, 8 to 32. Enough to batch, few enough that the first answers
/// don't wait for the last: with all of them at a time both sides take turns instead of working side by side, which at 32 in flight cost
/// half of the rate.
#[derive(Clone, Copy, Debug, Default)]
pub struct PullBatch {
    lately: usize,
}

impl PullBatch {
    /// The number for this pull, with so many to be taken now.
    #[inline]
    pub fn next(&mut self, pending: usize) -> usize {
        self.lately = pending.max(self.lately - self.lately.div_ceil(16));
        (self.lately / 4).clamp(8, 32)
    }
}

/// Why a source yields no more requests.
#[derive(Debug)]
pub enum SourceEnd {
    /// The peer closed in order.
    Closed,
    /// The peer broke the protocol or the transport failed: this source stops, nothing else does.
    Broken(Error),
}

/// What one [`RequestSource::pull`] brought, besides the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// At least one of the requests has `PREFLUSH` or `BARRIER`.
    pub ordered: bool,
}

/// One stream of requests: a blkif ring, an NBD connection, a virtqueue. Owned by one worker at a time,
/// which calls, in this order and as often as there is something to do: `pull`, `complete`, `push`;
/// and before it sleeps, `arm`.
///
/// The source bounds what it has in flight (`depth`) and makes requests that are valid in form; the
/// [`pvblk_block::Queue`] handle checks them against the device. `tag` is the source's own. Nothing
/// here blocks, and nothing allocates once warm.
pub trait RequestSource: Send {
    /// For the log: which disk, which queue.
    fn describe(&self) -> String;

    /// Called once, before anything else: with `waker` other threads can have the source pulled from when they have
    /// something for it that [`RequestSource::wait_fd`] doesn't tell.
    fn bind(&mut self, _waker: LaneWaker) {}

    /// Tells the name of the disk that it belongs to, before the first `pull`.
    fn served_as(&mut self, _disk: &str) {}

    /// Most requests in flight at once, at least 1.
    fn depth(&self) -> u32;

    /// Appends up to `room` new requests to `out`. A request that is bad in form is answered by the
    /// source itself. After an end the worker lets requests in flight complete, then drops the source.
    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd>;

    /// Takes all of `done` and prepares their answers; keeps the requests for reuse.
    fn complete(&mut self, done: &mut Vec<Completion>);

    /// Makes prepared answers visible to the peer and wakes it if it asked for that. Cheap when there are none. Returns the bytes of data that it
    /// copied, at most 256 KiB.
    fn push(&mut self) -> Result<usize, SourceEnd>;

    /// Tells whether other disks have work on the same worker now: then `pull` and `push` copy at most 64 KiB each where they can. Called when that changes.
    fn in_company(&mut self, _company: bool) {}

    /// Asks the peer to wake us; the last check before the worker sleeps.
    fn arm(&mut self) -> Readiness;

    /// Readable when there may be something to pull.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// False while the source would take nothing even if there was something: the worker then doesn't wait for it.
    fn wants_read(&self) -> bool {
        true
    }

    /// True if answers are stuck until the descriptor is writable.
    fn wants_write(&self) -> bool {
        false
    }

    /// True if the next `pull` costs a system call, so that the worker shouldn't spin on it. Asked after each pull.
    fn poll_is_syscall(&self) -> bool {
        false
    }

    /// When to step it at the latest, though nothing happens: its peer may be let go then. Asked before the worker sleeps, also when the source has
    /// ended and when all of its requests are in flight.
    fn deadline(&mut self) -> Option<Instant> {
        None
    }

    /// The descriptor was readable: forget that, before the next `pull`.
    fn woken(&mut self) {}

    /// Nothing has come for 100 ms: what is kept for reuse goes.
    fn rest(&mut self) {}

    /// Its seat, if writes of its peer may be lost; asked once, before the first pull.
    fn seat(&mut self) -> Option<Seat> {
        None
    }

    /// The index of the request that is pulled next, modulo 2^16; asked only of sources that have a seat.
    fn position(&self) -> u16 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_takes_a_quarter_of_the_most_there_was_lately() {
        let mut batch = PullBatch::default();
        assert_eq!([0, 5, 32, 64].map(|n| batch.next(n)), [8, 8, 8, 16]);
        assert_eq!([500, 0].map(|n| batch.next(n)), [32, 32]);
        let after: Vec<_> = (0..100).map(|_| batch.next(1)).collect();
        assert!(after.is_sorted_by(|a, b| a >= b) && after[99] == 8);
    }
}
