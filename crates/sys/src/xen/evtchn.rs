//! Event channels of other domains.

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

/// One end of an event channel to another domain, at a `/dev/xen/evtchn` of its own. Readable after the peer rang; silent then until
/// [`EventPort::unmask`].
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

    /// Makes a port that waits for domain `domid` to bind to it. Errors outside a Xen domain.
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

    /// Binds to port `port` of domain `domid`. Errors if that port doesn't wait for us, or outside a Xen domain.
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

    /// Rings the peer. Errors only if the peer closed its end.
    #[inline]
    pub fn notify(&self) -> io::Result<()> {
        let mut port = self.port;
        // SAFETY: the header's structure is this one number.
        unsafe { ioctl(self.fd.as_fd(), NOTIFY, &raw mut port) }.map(drop)
    }

    /// Takes what the peer rang; true if it did. The port stays masked: it can't ring again until [`EventPort::unmask`].
    pub fn take(&self) -> bool {
        let mut port = [0; 4];
        match rustix::io::read(&self.fd, &mut port) {
            Ok(n) => n == 4,
            // The driver's buffer overflowed, which one port can't make it do; it is cleared and everything is looked at.
            Err(rustix::io::Errno::FBIG) => {
                // SAFETY: takes no argument.
                let _ = unsafe { ioctl(self.fd.as_fd(), RESET, std::ptr::null_mut::<u8>()) };
                true
            }
            Err(_) => false,
        }
    }

    /// Lets the peer ring again. What it rang meanwhile is reported at once.
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
