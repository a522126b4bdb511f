//! The hypervisor as a back end needs it: access to guests' pages and event channels.

use pvblk_protocol::blkif::EventChannel;
use pvblk_sys::Region;
use pvblk_sys::xen::{CopyDirection, EventPort, GrantCopy, GrantDevice};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Access to the pages that one guest granted.
pub trait ForeignPages: Send {
    /// Maps pages side by side, all or none.
    fn map(&self, grefs: &[u32], writable: bool) -> io::Result<Region>;

    /// Copies to or from granted pages; `failed` of each copy is its result.
    fn copy(&self, direction: CopyDirection, copies: &mut [GrantCopy]);
}

/// Access to all guests' pages and event channels.
pub trait Hypervisor: Send + Sync {
    /// Opens access to the pages of domain `domid`, for one queue.
    fn pages(&self, domid: u16) -> io::Result<Box<dyn ForeignPages>>;

    /// Binds to a port that domain `domid` offers.
    fn bind(&self, domid: u16, port: u32) -> io::Result<Box<dyn EventChannel>>;
}

/// Xen through Linux's `/dev/xen/gntdev` and `/dev/xen/evtchn`.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinuxXen;

impl LinuxXen {
    /// Checks that the devices can be opened; errors say what to do.
    pub fn check() -> io::Result<LinuxXen> {
        for device in ["/dev/xen/gntdev", "/dev/xen/evtchn"] {
            if !std::path::Path::new(device).exists() {
                let why =
                    format!("there is no {device}; load the modules xen-gntdev and xen-evtchn");
                return Err(io::Error::new(io::ErrorKind::NotFound, why));
            }
        }
        GrantDevice::open()?;
        Ok(LinuxXen)
    }
}

impl Hypervisor for LinuxXen {
    fn pages(&self, domid: u16) -> io::Result<Box<dyn ForeignPages>> {
        let device = GrantDevice::open()?;
        Ok(Box::new(LinuxPages { device, domid }))
    }

    fn bind(&self, domid: u16, port: u32) -> io::Result<Box<dyn EventChannel>> {
        let port = EventPort::bind(domid, port)?;
        let masked = AtomicBool::new(false);
        Ok(Box::new(XenChannel { port, masked }))
    }
}

struct LinuxPages {
    device: GrantDevice,
    domid: u16,
}

impl ForeignPages for LinuxPages {
    fn map(&self, grefs: &[u32], writable: bool) -> io::Result<Region> {
        self.device.map(self.domid, grefs, writable)
    }

    fn copy(&self, direction: CopyDirection, copies: &mut [GrantCopy]) {
        self.device.copy(self.domid, direction, copies);
    }
}

/// An event channel that stays masked while its ring is drained: a guest that notifies without end wakes us once
/// (XSA-332).
struct XenChannel {
    port: EventPort,
    /// True after a notification was taken, until `rearm`.
    masked: AtomicBool,
}

impl EventChannel for XenChannel {
    #[inline]
    fn notify(&self) {
        // Fails only if the guest closed its end; xenstore reports that.
        let _ = self.port.notify();
    }

    fn clear(&self) {
        if self.port.take() {
            self.masked.store(true, Ordering::Relaxed);
        }
    }

    fn rearm(&self) {
        if self.masked.swap(false, Ordering::Relaxed) {
            self.port.unmask();
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.port.as_fd()
    }
}
