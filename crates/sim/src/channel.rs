//! Event channels that the world looks into.

use crate::fuse::{Fuse, Side};
use pvblk_ring::EventChannel;
use pvblk_sys::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Both directions of one event channel. The front end waits on a descriptor that is in an epoll set of its own, so its
/// bell is a real one; the world asks for the back end's.
#[derive(Debug)]
pub struct Bells {
    front: EventFd,
    /// What `front` holds, to spare system calls.
    front_rung: AtomicBool,
    back_rung: AtomicBool,
}

impl Bells {
    /// Silent ones.
    pub fn new() -> io::Result<Arc<Bells>> {
        Ok(Arc::new(Bells {
            front: EventFd::new()?,
            front_rung: AtomicBool::new(false),
            back_rung: AtomicBool::new(false),
        }))
    }

    /// True if the back end was rung and hasn't cleared that.
    pub fn back_is_rung(&self) -> bool {
        self.back_rung.load(Ordering::Relaxed)
    }

    /// Rings the back end.
    pub fn ring_back(&self) {
        self.back_rung.store(true, Ordering::Relaxed);
    }

    /// Rings the front end.
    pub fn ring_front(&self) {
        if !self.front_rung.swap(true, Ordering::Relaxed) {
            self.front.notify();
        }
    }
}

/// One end of an event channel.
pub struct SimChannel {
    /// Both directions.
    pub bells: Arc<Bells>,
    /// Whose end it is.
    pub side: Side,
    /// Where its owner may die.
    pub fuse: Arc<Fuse>,
}

impl EventChannel for SimChannel {
    fn notify(&self) {
        self.fuse.tick(self.side);
        match self.side {
            Side::Front => self.bells.ring_back(),
            Side::Back => self.bells.ring_front(),
        }
        self.fuse.tick(self.side);
    }

    fn clear(&self) {
        match self.side {
            Side::Front => {
                if self.bells.front_rung.swap(false, Ordering::Relaxed) {
                    self.bells.front.drain();
                }
            }
            Side::Back => self.bells.back_rung.store(false, Ordering::Relaxed),
        }
        self.fuse.tick(self.side);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bells.front.as_fd()
    }
}
