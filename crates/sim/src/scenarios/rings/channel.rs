//! Event channels that the world looks into.

use crate::fuse::{Fuse, Side};
use pvblk_protocol::blkif::EventChannel;
use pvblk_sys::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Both directions of one event channel. The front end waits on a descriptor that is in an epoll set of its own, so its
/// eventfd is a real one; the world asks for the back end's.
#[derive(Debug)]
pub struct EventPair {
    front: EventFd,
    /// What `front` holds, to spare system calls.
    front_notified: AtomicBool,
    back_notified: AtomicBool,
}

impl EventPair {
    /// Nobody is notified.
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
    /// Both directions.
    pub events: Arc<EventPair>,
    /// Whose end it is.
    pub side: Side,
    /// Where its owner may die.
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
