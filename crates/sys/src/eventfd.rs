//! Wake-ups inside the process, and between processes that trust each other; for untrusted peers see
//! [`crate::PeerEvent`].

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A counter that wakes its waiter.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Creates an eventfd that is not signalled and not inherited by children.
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// The descriptor's number, for kernel files that take it as text, such as `cgroup.event_control`.
    pub fn number(&self) -> i32 {
        std::os::fd::AsRawFd::as_raw_fd(&self.0)
    }

    /// Wakes the waiter. A full counter is not an error: the waiter has a wake-up to see already.
    #[inline]
    pub fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears the counter; returns true if it was set.
    #[inline]
    pub fn drain(&self) -> bool {
        let mut b = [0u8; 8];
        rustix::io::read(&self.0, &mut b).is_ok()
    }

    /// Returns a second handle of the same counter.
    pub fn try_clone(&self) -> io::Result<EventFd> {
        Ok(EventFd(self.0.try_clone()?))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_event_is_seen_once() {
        let e = EventFd::new().unwrap();
        assert!(!e.drain());
        e.notify();
        e.notify();
        assert!(e.drain());
        assert!(!e.drain());
    }
}
