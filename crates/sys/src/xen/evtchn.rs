//! Event channels to other domains (`/dev/xen/evtchn`).

use super::{ioctl, request};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const BIND_INTERDOMAIN: u64 = request(b'E', 1, size_of::<Bind>());
const BIND_UNBOUND: u64 = request(b'E', 2, size_of::<u32>());
const NOTIFY: u64 = request(b'E', 4, size_of::<u32>());
const RESET: u64 = request(b'E', 5, 0);

/// `struct ioctl_evtchn_bind_interdomain`.
#[repr(C)]
struct Bind {
    domain: u32,
    port: u32,
}

/// One end of an event channel to another domain, on an open `/dev/xen/evtchn` of its own. The descriptor is readable
/// after a notification from the peer; the port is then masked until [`EventPort::unmask`].
#[derive(Debug)]
pub struct EventPort {
    fd: OwnedFd,
    port: u32,
}

impl EventPort {
    fn open() -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(rustix::fs::open("/dev/xen/evtchn", flags, Mode::empty())?)
    }

    /// Allocates a port that domain `domid` may bind to. Errors outside a Xen domain.
    pub fn offer(domid: u16) -> io::Result<EventPort> {
        let fd = EventPort::open()?;
        let mut domain = u32::from(domid);
        // SAFETY: the header's structure is this one number.
        let local = unsafe { ioctl(fd.as_fd(), BIND_UNBOUND, &raw mut domain)? };
        Ok(EventPort {
            fd,
            port: local as u32,
        })
    }

    /// The port's number in this domain.
    pub fn number(&self) -> u32 {
        self.port
    }

    /// Binds to port `port` of domain `domid`. Errors if that port isn't offered to this domain, or outside a Xen
    /// domain.
    pub fn bind(domid: u16, port: u32) -> io::Result<EventPort> {
        let fd = EventPort::open()?;
        let mut call = Bind {
            domain: u32::from(domid),
            port,
        };
        // SAFETY: the header's structure.
        let local = unsafe { ioctl(fd.as_fd(), BIND_INTERDOMAIN, &raw mut call)? };
        Ok(EventPort {
            fd,
            port: local as u32,
        })
    }

    /// Notifies the peer. Errors only if the peer closed its end.
    #[inline]
    pub fn notify(&self) -> io::Result<()> {
        let mut port = self.port;
        // SAFETY: the header's structure is this one number.
        unsafe { ioctl(self.fd.as_fd(), NOTIFY, &raw mut port) }.map(drop)
    }

    /// Takes a notification of the peer; true if there was one. The port stays masked until [`EventPort::unmask`].
    pub fn take(&self) -> bool {
        let mut port = [0; 4];
        match rustix::io::read(&self.fd, &mut port) {
            Ok(n) => n == 4,
            // The driver's buffer overflowed, which a single port can't cause; reset it and treat it as a
            // notification.
            Err(rustix::io::Errno::FBIG) => {
                // SAFETY: takes no argument.
                let _ = unsafe { ioctl(self.fd.as_fd(), RESET, std::ptr::null_mut::<u8>()) };
                true
            }
            Err(_) => false,
        }
    }

    /// Unmasks the port. A notification that arrived meanwhile is reported at once.
    pub fn unmask(&self) {
        let _ = rustix::io::write(&self.fd, &self.port.to_ne_bytes());
    }
}

impl AsFd for EventPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_headers_numbers() {
        assert_eq!((BIND_INTERDOMAIN, BIND_UNBOUND), (0x0008_4501, 0x0004_4502));
        assert_eq!((NOTIFY, RESET), (0x0004_4504, 0x0000_4505));
    }
}
