//! Events that other threads report to a server's control thread.

use parking_lot::Mutex;
use pvblk_sys::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// An event of connection `id`. `generation` distinguishes a connection's queues from those of its next connection.
#[derive(Debug)]
pub(crate) enum ConnectionEvent {
    /// A queue ended because its ring is broken.
    Ended {
        id: u64,
        generation: u64,
        reason: String,
    },
    /// All queues are detached.
    Drained { id: u64, generation: u64 },
    /// The device's capacity changed.
    Resized { id: u64 },
    /// The disk's fence is open.
    FenceOpened { id: u64 },
    /// The device is gone.
    DeviceGone { id: u64 },
    /// The server is to stop.
    Stop,
}

/// Events in order, and an eventfd that wakes the control thread.
///
/// Bounded by construction: a connection has at most one event of each kind in the queue.
#[derive(Debug)]
pub(crate) struct Inbox {
    events: Mutex<Vec<ConnectionEvent>>,
    wake: EventFd,
}

impl Inbox {
    pub fn new() -> io::Result<Inbox> {
        Ok(Inbox {
            events: Mutex::new(Vec::new()),
            wake: EventFd::new()?,
        })
    }

    pub fn put(&self, event: ConnectionEvent) {
        self.events.lock().push(event);
        self.wake.notify();
    }

    pub fn take(&self) -> Vec<ConnectionEvent> {
        self.wake.drain();
        std::mem::take(&mut self.events.lock())
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
