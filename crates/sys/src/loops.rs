//! Loop devices (loop(4)).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const LOOP_GET_STATUS64: libc::c_ulong = 0x4c05;
const LO_FLAGS_READ_ONLY: u32 = 1;

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    names: [u8; 64 + 64 + 32],
    init: [u64; 2],
}

/// The file behind a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    /// `st_dev` of the file.
    pub device: u64,
    /// `st_ino` of the file.
    pub inode: u64,
    /// `st_rdev` of the file: not 0 if the file is itself a device.
    pub rdevice: u64,
    /// True if the loop device can't be written to.
    pub read_only: bool,
}

/// Identifies the file behind the loop device `fd`; `ENXIO` if it has none.
pub fn backing(fd: BorrowedFd<'_>) -> io::Result<Backing> {
    // SAFETY: all zeros is a valid `Info`.
    let mut info: Info = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills the structure, which has the size and layout of the kernel's and lives over the call.
    let r = unsafe { libc::ioctl(fd.as_raw_fd(), LOOP_GET_STATUS64, &mut info) };
    if r != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Backing {
        device: info.device,
        inode: info.inode,
        rdevice: info.rdevice,
        read_only: info.flags & LO_FLAGS_READ_ONLY != 0,
    })
}

// A structure smaller than the kernel's would let the kernel write past its end.
const _: () = assert!(size_of::<Info>() == 232);
