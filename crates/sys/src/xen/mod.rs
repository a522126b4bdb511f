//! Linux's devices for user space in a Xen domain: `/dev/xen/gntdev`, `/dev/xen/gntalloc` and `/dev/xen/evtchn`.
//!
//! Numbers and layouts are those of include/uapi/xen/{gntdev,gntalloc,evtchn}.h (dual licence, MIT taken) and
//! xen/include/public/grant_table.h.

mod evtchn;
mod gntalloc;
mod gntdev;

pub use evtchn::EventPort;
pub use gntalloc::{GrantAllocator, GrantedPage};
pub(crate) use gntdev::GrantMapping;
pub use gntdev::{CopyDirection, GrantCopy, GrantDevice, MAX_COPIES};

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `_IOC(_IOC_NONE, type, number, size)` (asm-generic/ioctl.h).
const fn request(kind: u8, number: u8, size: usize) -> u64 {
    (size as u64) << 16 | (kind as u64) << 8 | number as u64
}

/// Calls a driver with one argument: a structure of its header.
///
/// # Safety
/// `argument` is the type that the header requires for `request`; the driver reads and writes that many bytes.
unsafe fn ioctl<T: ?Sized>(fd: BorrowedFd<'_>, request: u64, argument: *mut T) -> io::Result<i32> {
    loop {
        // SAFETY: promised by the caller.
        let result = unsafe {
            libc::ioctl(
                fd.as_raw_fd(),
                request as libc::Ioctl,
                argument.cast::<u8>(),
            )
        };
        if result >= 0 {
            return Ok(result);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
