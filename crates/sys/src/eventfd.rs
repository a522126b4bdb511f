//! Event channels between local processes.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A counter that wakes its waiter: an event channel's local stand-in.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, not signalled, not inherited by children.
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// Takes a descriptor received from a peer. Errors if it is not an eventfd; makes it non-blocking,
    /// so that a peer can't hang us by filling the counter.
    pub fn from_peer(fd: OwnedFd) -> io::Result<EventFd> {
        use std::os::fd::AsRawFd;
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if link.to_string_lossy() != "anon_inode:[eventfd]" {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor is not an eventfd",
            ));
        }
        // A semaphore is drained by one, so a peer could keep it readable for ever.
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
        let is = |l: &str| l.starts_with("eventfd-semaphore:") && l.trim_end().ends_with('1');
        if info.lines().any(is) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the eventfd is a semaphore",
            ));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(EventFd(fd))
    }

    /// Its number, for files of the kernel that want it as text, such as `cgroup.event_control`.
    pub fn number(&self) -> i32 {
        std::os::fd::AsRawFd::as_raw_fd(&self.0)
    }

    /// Wakes the waiter. A full counter means that it is awake already: not an error.
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

    /// A second handle of the same counter.
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

    #[test]
    fn only_an_eventfd_is_taken_from_a_peer() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(EventFd::from_peer(file.into()).is_err());
        let e = EventFd::new().unwrap();
        assert!(EventFd::from_peer(e.0).is_ok());
        let semaphore = eventfd(1, EventfdFlags::SEMAPHORE).unwrap();
        assert!(EventFd::from_peer(semaphore).is_err());
    }
}
