//! Event channels: how each side of a ring notifies the other.

use pvblk_sys::PeerEvent;
use std::os::fd::{AsFd, BorrowedFd};

/// Two-way notification between the sides of a ring. `notify` signals the peer; the descriptor becomes readable when
/// the peer signals us. A notification carries no data: the ring is drained later, in bounded batches.
pub trait EventChannel: Send + Sync {
    /// Notifies the peer. Never blocks.
    fn notify(&self);
    /// Clears a notification of the peer; call it before the last look at the ring.
    fn clear(&self);
    /// Enables notifications again; call it before sleeping, after the ring was found empty. A notification since
    /// [`EventChannel::clear`] is delivered at once.
    fn rearm(&self) {}
    /// Readable while there is a notification.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// An event channel between processes of one host: one eventfd for each direction.
#[derive(Debug)]
pub struct EventFdChannel {
    /// Signalled by us.
    pub to_peer: PeerEvent,
    /// Signalled by the peer.
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
