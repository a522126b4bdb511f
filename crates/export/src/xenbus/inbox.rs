//! What other threads tell the control thread.

use parking_lot::Mutex;
use pvblk_sys::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// One thing that happened to the connection `id`. `generation` tells a connection's queues from those of its next connection.
#[derive(Debug)]
pub(crate) enum Note {
    /// A queue broke.
    Ended {
        id: u64,
        generation: u64,
        reason: String,
    },
    /// Detach is done.
    Drained { id: u64, generation: u64 },
    /// The device has another size.
    Resized { id: u64 },
    /// The disk's fence is open.
    FenceOpened { id: u64 },
    /// The device is gone.
    DeviceGone { id: u64 },
    /// The server is to stop.
    Stop,
}

/// Notes in order, and an event that wakes the control thread.
///
/// Bounded by construction: a connection has at most one note of each kind under way.
#[derive(Debug)]
pub(crate) struct Inbox {
    notes: Mutex<Vec<Note>>,
    wake: EventFd,
}

impl Inbox {
    pub fn new() -> io::Result<Inbox> {
        Ok(Inbox {
            notes: Mutex::new(Vec::new()),
            wake: EventFd::new()?,
        })
    }

    pub fn put(&self, note: Note) {
        self.notes.lock().push(note);
        self.wake.notify();
    }

    pub fn take(&self) -> Vec<Note> {
        self.wake.drain();
        std::mem::take(&mut self.notes.lock())
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
