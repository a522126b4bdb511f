//! Request sources: the back end serves any type that yields requests and takes completions.

use crate::lost_writes::LostWritesQueue;
use crate::pull_batch::PullChoice;
use crate::worker::LaneWaker;
use pvblk_block::{Completion, Error, Readiness, Request};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

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
    /// Requests that the source has answered itself, and other work, as the number of requests that cost about as much: the lane is charged for them.
    pub answered: usize,
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

    /// The number of requests that it takes at a time, if it chooses one.
    fn pull_choice(&self) -> Option<Arc<PullChoice>> {
        None
    }

    /// Fixes the number of requests that it takes at a time, from 1 on, if it would choose one: it goes by the clock.
    fn fix_pull(&self, most: u32) {
        if let Some(choice) = self.pull_choice() {
            choice.fix(most);
        }
    }

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
