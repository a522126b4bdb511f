//! Pages of this domain that are granted to another one (`/dev/xen/gntalloc`).

use super::{ioctl, request};
use crate::{PAGE_SIZE, Region, RegionError};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

const ALLOC: u64 = request(b'G', 5, size_of::<Alloc>());
const DEALLOC: u64 = request(b'G', 6, size_of::<Dealloc>());
/// `GNTALLOC_FLAG_WRITABLE`.
const WRITABLE: u16 = 1;

/// `struct ioctl_gntalloc_alloc_gref`, which has room for one reference.
#[repr(C)]
struct Alloc {
    domid: u16,
    flags: u16,
    count: u32,
    index: u64,
    gref: u32,
}

/// `struct ioctl_gntalloc_dealloc_gref`.
#[repr(C)]
struct Dealloc {
    index: u64,
    count: u32,
}

/// An open `/dev/xen/gntalloc`: the source of pages of a front end in user space.
#[derive(Clone, Debug)]
pub struct GrantAllocator(Arc<OwnedFd>);

/// A page that is granted to another domain until it is dropped, and then until that domain unmaps it.
#[derive(Debug)]
pub struct GrantedPage {
    /// The page's contents.
    pub page: Arc<Region>,
    /// The grant reference.
    pub gref: u32,
    index: u64,
    allocator: GrantAllocator,
}

impl GrantAllocator {
    /// Opens the device. Errors outside a Xen domain, or without permission.
    pub fn open() -> io::Result<GrantAllocator> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/dev/xen/gntalloc", flags, Mode::empty())?;
        Ok(GrantAllocator(Arc::new(fd)))
    }

    /// Grants a fresh page to domain `domid`. Errors if the driver's `limit` is reached.
    pub fn page(&self, domid: u16, writable: bool) -> io::Result<GrantedPage> {
        let mut call = Alloc {
            domid,
            flags: if writable { WRITABLE } else { 0 },
            count: 1,
            index: 0,
            gref: 0,
        };
        // SAFETY: the header's structure, with room for the one reference that is asked for.
        unsafe { ioctl(self.0.as_fd(), ALLOC, &raw mut call)? };
        let page = self.map(call.index);
        if page.is_err() {
            self.free(call.index);
        }
        Ok(GrantedPage {
            page: Arc::new(page?),
            gref: call.gref,
            index: call.index,
            allocator: self.clone(),
        })
    }

    fn map(&self, index: u64) -> io::Result<Region> {
        Region::shared(self.0.as_fd(), index, PAGE_SIZE, true).map_err(|e| match e {
            RegionError::Os(e) => e,
            RegionError::Range => io::Error::from(io::ErrorKind::InvalidInput),
        })
    }

    fn free(&self, index: u64) {
        let mut call = Dealloc { index, count: 1 };
        // SAFETY: the header's structure. The driver keeps the page as long as either domain maps it.
        let _ = unsafe { ioctl(self.0.as_fd(), DEALLOC, &raw mut call) };
    }
}

impl GrantedPage {
    /// Maps the same page a second time, for callers that need to own a region.
    pub fn again(&self) -> io::Result<Region> {
        self.allocator.map(self.index)
    }
}

impl Drop for GrantedPage {
    fn drop(&mut self) {
        self.allocator.free(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_headers_numbers() {
        assert_eq!((ALLOC, DEALLOC), (0x0018_4705, 0x0010_4706));
    }
}
