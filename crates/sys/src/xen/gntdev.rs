//! Pages that other domains granted: mapped, or copied to and from (`/dev/xen/gntdev`).

use super::{ioctl, request};
use crate::{Buffer, PAGE_SIZE, Region, RegionError};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Most copies of one call: a larger array would not fit on a stack, and the driver makes hypercalls of 16 copies
/// anyway.
pub const MAX_COPIES: usize = 1024;

const MAP: u64 = request(b'G', 0, size_of::<MapHead>() + size_of::<MapRef>());
const UNMAP: u64 = request(b'G', 1, size_of::<Unmap>());
const COPY: u64 = request(b'G', 8, size_of::<CopyCall>());

/// `GNTCOPY_source_gref` and `GNTCOPY_dest_gref`.
const SOURCE_IS_GRANT: u16 = 1;
const DEST_IS_GRANT: u16 = 2;

/// `struct ioctl_gntdev_map_grant_ref` without its array.
#[repr(C)]
#[derive(Clone, Copy)]
struct MapHead {
    count: u32,
    pad: u32,
    index: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MapRef {
    domid: u32,
    gref: u32,
}

#[repr(C)]
struct Unmap {
    index: u64,
    count: u32,
    pad: u32,
}

/// One side of a copy: a local address, or `gref | offset << 32 | domid << 48`.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Side(u64);

#[repr(C)]
#[derive(Clone, Copy)]
struct CopySegment {
    source: Side,
    dest: Side,
    len: u16,
    flags: u16,
    status: i16,
}

#[repr(C)]
struct CopyCall {
    count: u32,
    segments: *mut CopySegment,
}

/// An open `/dev/xen/gntdev`. The driver keeps the mappings of each in one list that it searches from the front, so
/// open one for each queue.
#[derive(Clone, Debug)]
pub struct GrantDevice(Arc<OwnedFd>);

impl GrantDevice {
    /// Opens the device. Errors outside a Xen domain, or without permission.
    pub fn open() -> io::Result<GrantDevice> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/dev/xen/gntdev", flags, Mode::empty())?;
        Ok(GrantDevice(Arc::new(fd)))
    }

    /// Maps pages of domain `domid` side by side, all or none. Errors if a reference doesn't grant this access.
    pub fn map(&self, domid: u16, grefs: &[u32], writable: bool) -> io::Result<Region> {
        let index = self.announce(domid, grefs)?;
        let mapping = GrantMapping {
            device: self.clone(),
            index,
            count: grefs.len() as u32,
            writable,
        };
        Region::granted(self.0.as_fd(), mapping).map_err(|e| match e {
            RegionError::Os(e) => e,
            RegionError::Range => io::Error::from(io::ErrorKind::InvalidInput),
        })
    }

    /// Announces the pages of the next mapping to the driver; returns the offset to map.
    fn announce(&self, domid: u16, grefs: &[u32]) -> io::Result<u64> {
        let count = u32::try_from(grefs.len())
            .ok()
            .filter(|&n| n > 0 && n <= 1024)
            .ok_or(io::ErrorKind::InvalidInput)?;
        // Units of 16 and 8 bytes, so as a whole aligned for the header's structure.
        let mut words = Vec::with_capacity(2 + grefs.len());
        words.extend([u64::from(count), 0]);
        let domid = u64::from(domid);
        words.extend(grefs.iter().map(|&gref| domid | u64::from(gref) << 32));
        // SAFETY: `words` is a `MapHead` and `count` times a `MapRef`, little-endian as all machines of Xen; the driver
        // writes `index`.
        unsafe { ioctl(self.0.as_fd(), MAP, words.as_mut_ptr())? };
        Ok(words[1])
    }

    /// Does all of `copies` (at most [`MAX_COPIES`]) in one call; `failed` of each shows its outcome. An error of the
    /// call itself fails all.
    pub fn copy(&self, domid: u16, direction: CopyDirection, copies: &mut [GrantCopy]) {
        assert!(copies.len() <= MAX_COPIES);
        let segment = |c: &GrantCopy| {
            let local = Side(c.buffer.address(direction == CopyDirection::FromGuest) as u64);
            let foreign =
                Side(u64::from(c.gref) | u64::from(c.offset) << 32 | u64::from(domid) << 48);
            let (source, dest, flags) = match direction {
                CopyDirection::FromGuest => (foreign, local, SOURCE_IS_GRANT),
                CopyDirection::ToGuest => (local, foreign, DEST_IS_GRANT),
            };
            CopySegment {
                source,
                dest,
                // The range lies on one page.
                len: c.buffer.len() as u16,
                flags,
                status: -1,
            }
        };
        let mut segments: Vec<CopySegment> = copies.iter().map(segment).collect();
        let mut call = CopyCall {
            count: segments.len() as u32,
            segments: segments.as_mut_ptr(),
        };
        // SAFETY: `count` segments lie at `segments`; their local addresses are those of buffers that `copies` keeps mapped,
        // `len` bytes each, writable where they are written.
        let result = unsafe { ioctl(self.0.as_fd(), COPY, &raw mut call) };
        for (copy, segment) in copies.iter_mut().zip(&segments) {
            copy.failed = result.is_err() || segment.status != 0;
        }
    }
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From granted pages to buffers of ours.
    FromGuest,
    /// From our buffers to granted pages.
    ToGuest,
}

/// One copy between a granted page and a buffer.
#[derive(Clone, Debug)]
pub struct GrantCopy {
    /// The grant reference.
    pub gref: u32,
    /// First byte on the granted page; with the buffer's length at most 4096.
    pub offset: u16,
    /// Our side, 1 to 4096 bytes.
    pub buffer: Buffer,
    /// The caller's number; not used here.
    pub tag: u32,
    /// Result: the hypervisor refused the copy (an invalid reference, or one that doesn't permit it).
    pub failed: bool,
}

/// The driver's record of a mapping; dropped after the mapping itself.
#[derive(Debug)]
pub(crate) struct GrantMapping {
    device: GrantDevice,
    index: u64,
    count: u32,
    writable: bool,
}

impl GrantMapping {
    pub fn index(&self) -> u64 {
        self.index
    }

    pub fn len(&self) -> usize {
        self.count as usize * PAGE_SIZE
    }

    pub fn is_writable(&self) -> bool {
        self.writable
    }
}

impl Drop for GrantMapping {
    fn drop(&mut self) {
        let mut call = Unmap {
            index: self.index,
            count: self.count,
            pad: 0,
        };
        // SAFETY: the header's structure. If a page is still mapped, the driver refuses and frees it with the
        // descriptor.
        let _ = unsafe { ioctl(self.device.0.as_fd(), UNMAP, &raw mut call) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_headers_numbers() {
        assert_eq!(MAP, 0x0018_4700);
        assert_eq!(UNMAP, 0x0010_4701);
        assert_eq!(COPY, 0x0010_4708);
        assert_eq!(size_of::<CopySegment>(), 24);
    }
}
