//! What the back end serves: anything that yields requests and takes completions.

use pvblk_block::{Completion, Error, Readiness, Request};
use std::os::fd::BorrowedFd;

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

    /// Most requests in flight at once, at least 1.
    fn depth(&self) -> u32;

    /// Appends up to `room` new requests to `out`. A request that is bad in form is answered by the
    /// source itself. After an end the worker lets requests in flight complete, then drops the source.
    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd>;

    /// Takes all of `done` and prepares their answers; keeps the requests for reuse.
    fn complete(&mut self, done: &mut Vec<Completion>);

    /// Makes prepared answers visible to the peer and wakes it if it asked for that. Cheap when there are none.
    fn push(&mut self) -> Result<(), SourceEnd>;

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

    /// The descriptor was readable: forget that, before the next `pull`.
    fn woken(&mut self) {}

    /// Nothing has come for 100 ms: what is kept for reuse goes.
    fn rest(&mut self) {}
}
