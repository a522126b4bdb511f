//! Request sources: the back end serves any type that yields requests and takes completions.

use crate::lost_writes::LostWritesQueue;
use crate::worker::LaneWaker;
use pvblk_block::{Completion, Error, Readiness, Request};
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// Number of requests that a source takes in one pull: a quarter of the most that were there lately, 8 to 32.
/// That is enough to batch, and few enough that the first responses don't wait for the last: with all of them
/// at a time both sides take turns instead of working side by side, which at 32 in flight cost half of the
/// rate. The number is a half of them where there are many, and while the peer sleeps and is woken for each batch: a wake-up costs as much as several requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct PullBatch {
    lately: usize,
    /// Batches left for which the peer counts as one that sleeps.
    sleepy: u8,
}

/// More requests than these are many.
const MANY: usize = 40;
/// Batches after which a peer that needn't be woken counts as awake.
const SLEEPY: u8 = 8;

impl PullBatch {
    /// The number for this pull, of `pending` requests that could be taken now.
    #[inline]
    pub fn next(&mut self, pending: usize) -> usize {
        self.lately = pending.max(self.lately - self.lately.div_ceil(16));
        let parts = if self.lately > MANY || self.sleepy > 0 {
            2
        } else {
            4
        };
        (self.lately / parts).clamp(8, 32)
    }

    /// Notes that responses were made visible, and whether the peer was woken for them.
    #[inline]
    pub fn pushed(&mut self, woke: bool) {
        self.sleepy = if woke {
            SLEEPY
        } else {
            self.sleepy.saturating_sub(1)
        };
    }
}

/// The reason why a source yields no more requests.
#[derive(Debug)]
pub enum SourceEnd {
    /// The peer closed in order.
    Closed,
    /// The peer broke the protocol or the transport failed: this source stops, and no other.
    Broken(Error),
}

/// The result of one [`RequestSource::pull`], besides the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// At least one of the requests has `PREFLUSH` or `BARRIER`.
    pub ordered: bool,
}

/// One stream of requests: a blkif ring, an NBD connection, a virtqueue. One worker at a time owns it, and
/// calls `pull`, `complete`, `push` in this order, as often as there is work; and before it sleeps, `arm`.
///
/// The source bounds its requests in flight (`depth`) and makes requests whose form is valid; the
/// [`pvblk_block::Queue`] handle checks them against the device. `tag` is the source's own. No method blocks,
/// and none allocates once warm.
pub trait RequestSource: Send {
    /// Disk and queue, for the log.
    fn describe(&self) -> String;

    /// The connection that the source belongs to: queues of one front end have the same.
    fn connection(&self) -> String {
        let name = self.describe();
        match name.rsplit_once(", queue ") {
            Some((connection, _)) => connection.to_owned(),
            None => name,
        }
    }

    /// Called once, before anything else: through `waker` other threads can ask for a pull when they have
    /// something for the source that isn't seen on [`RequestSource::wait_fd`].
    fn bind(&mut self, _waker: LaneWaker) {}

    /// Passes the name of its disk, before the first `pull`.
    fn served_as(&mut self, _disk: &str) {}

    /// Most requests in flight at once, at least 1.
    fn depth(&self) -> u32;

    /// Appends up to `room` new requests to `out`. The source itself answers a request whose form is invalid.
    /// After an end the worker lets requests in flight complete, then drops the source.
    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd>;

    /// Takes all of `done` and prepares their responses; keeps the requests for reuse.
    fn complete(&mut self, done: &mut Vec<Completion>);

    /// Makes prepared responses visible to the peer and notifies it if it asked for that. Cheap when there
    /// are none. Returns the bytes of data that it copied, at most 256 KiB.
    fn push(&mut self) -> Result<usize, SourceEnd>;

    /// Tells the source whether other disks have work on the same worker now: then `pull` and `push` copy at
    /// most 64 KiB each where they can. Called when that changes.
    fn in_company(&mut self, _company: bool) {}

    /// Asks the peer for a notification; the last check before the worker sleeps.
    fn arm(&mut self) -> Readiness;

    /// The descriptor that is readable when there may be requests to pull.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// False while the source would take no request even if there was one: the worker then doesn't wait for
    /// it.
    fn wants_read(&self) -> bool {
        true
    }

    /// True if responses wait until the descriptor is writable.
    fn wants_write(&self) -> bool {
        false
    }

    /// True if the next `pull` costs a system call. Asked after each pull.
    fn poll_is_syscall(&self) -> bool {
        false
    }

    /// The time of the next step at the latest, even if nothing happens: the source may then drop its peer.
    /// Asked before the worker sleeps, also when the source has ended and when all of its requests are in
    /// flight.
    fn deadline(&mut self) -> Option<Instant> {
        None
    }

    /// Clears the descriptor, which was readable, before the next `pull`.
    fn woken(&mut self) {}

    /// No request has come for 100 ms: memory that is kept for reuse is given back.
    fn rest(&mut self) {}

    /// Its [`LostWritesQueue`], if writes of its peer may be lost; asked once, before the first
    /// pull.
    fn lost_writes(&mut self) -> Option<LostWritesQueue> {
        None
    }

    /// The index of the request that is pulled next, modulo 2^16; asked only of sources with a
    /// [`LostWritesQueue`].
    fn position(&self) -> u16 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_takes_a_part_of_the_most_there_was_lately() {
        let mut batch = PullBatch::default();
        assert_eq!([0, 5, 32, 40, 64].map(|n| batch.next(n)), [8, 8, 8, 10, 32]);
        assert_eq!([500, 0].map(|n| batch.next(n)), [32, 32]);
        let after: Vec<_> = (0..100).map(|_| batch.next(1)).collect();
        assert!(after.is_sorted_by(|a, b| a >= b) && after[99] == 8);
    }

    #[test]
    fn a_peer_that_sleeps_is_woken_for_more_at_a_time() {
        let mut batch = PullBatch::default();
        batch.pushed(false);
        assert_eq!(batch.next(32), 8);
        batch.pushed(true);
        assert_eq!(batch.next(32), 16);
        (0..SLEEPY).for_each(|_| batch.pushed(false));
        assert_eq!(batch.next(32), 8);
    }
}
