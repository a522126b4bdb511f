//! Event channels: how one end wakes the other.

use pvblk_sys::PeerEvent;
use std::os::fd::{AsFd, BorrowedFd};

/// A two-way doorbell: `notify` rings the peer's, the descriptor becomes readable when the peer rings ours.
/// A handler only marks: the ring is drained elsewhere, in bounded batches.
pub trait EventChannel: Send + Sync {
    /// Wakes the peer. Never blocks.
    fn notify(&self);
    /// Forgets that we were woken; to be called before the ring is looked at for the last time.
    fn clear(&self);
    /// Lets the peer wake us again; to be called before sleep, after the ring was found empty. What came since [`EventChannel::clear`] wakes at once.
    fn rearm(&self) {}
    /// Readable while we are woken.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// An event channel between processes of one host: one eventfd for each direction.
#[derive(Debug)]
pub struct EventFdChannel {
    /// Rung by us.
    pub to_peer: PeerEvent,
    /// Rung by the peer.
    pub from_peer: PeerEvent,
}

impl EventChannel for EventFdChannel {
    #[inline]
    fn notify(&self) {
        self.to_peer.notify();
    }

    fn clear(&self) {
        self.from_peer.clear();
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.from_peer.as_fd()
    }
}
