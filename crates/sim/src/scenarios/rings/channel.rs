//! Event channels whose state the simulation can read.

use crate::fuse::{Fuse, Side};
use pvblk_protocol::blkif::EventChannel;
use pvblk_sys::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Both directions of one event channel. The front end waits for a descriptor in an epoll set of its own, so
/// its eventfd is a real one; the simulation reads the back end's directly.
#[derive(Debug)]
pub struct EventPair {
    front: EventFd,
    /// The state of `front`, kept to spare system calls.
    front_notified: AtomicBool,
    back_notified: AtomicBool,
}

impl EventPair {
    /// A channel without notifications.
    pub fn new() -> io::Result<Arc<EventPair>> {
        Ok(Arc::new(EventPair {
            front: EventFd::new()?,
            front_notified: AtomicBool::new(false),
            back_notified: AtomicBool::new(false),
        }))
    }

    /// True if the back end was notified and hasn't cleared that.
    pub fn back_is_notified(&self) -> bool {
        self.back_notified.load(Ordering::Relaxed)
    }

    /// Notifies the back end.
    pub fn notify_back(&self) {
        self.back_notified.store(true, Ordering::Relaxed);
    }

    /// Notifies the front end.
    pub fn notify_front(&self) {
        if !self.front_notified.swap(true, Ordering::Relaxed) {
            self.front.notify();
        }
    }
}

/// One end of an event channel.
pub struct SimChannel {
    /// Both directions of the channel.
    pub events: Arc<EventPair>,
    /// The process that has this end.
    pub side: Side,
    /// Counter of calls, at one of which that process may die.
    pub fuse: Arc<Fuse>,
}

impl EventChannel for SimChannel {
    fn notify(&self) {
        self.fuse.tick(self.side);
        match self.side {
            Side::Front => self.events.notify_back(),
            Side::Back => self.events.notify_front(),
        }
        self.fuse.tick(self.side);
    }

    fn clear(&self) {
        match self.side {
            Side::Front => {
                if self.events.front_notified.swap(false, Ordering::Relaxed) {
                    self.events.front.drain();
                }
            }
            Side::Back => self.events.back_notified.store(false, Ordering::Relaxed),
        }
        self.fuse.tick(self.side);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.events.front.as_fd()
    }
}
