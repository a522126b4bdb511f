//! [`Buffer`]: a checked piece of a [`Region`] that keeps it mapped.

use crate::Region;
use std::sync::Arc;

/// One segment of a request's data: `len` bytes at `offset` of a region.
///
/// Cloning costs one atomic increment. Each queue has an `Arc` of its own, so that CPUs don't share this counter.
#[derive(Clone, Debug)]
pub struct Buffer {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl Buffer {
    /// Describes `len` bytes at `offset`; `None` if the range is not inside the region.
    #[inline]
    pub fn new(region: &Arc<Region>, offset: usize, len: usize) -> Option<Buffer> {
        if offset > region.len() || len > region.len() - offset {
            return None;
        }
        Some(Buffer {
            region: Arc::clone(region),
            offset,
            len,
        })
    }

    /// As [`Buffer::new`], for a range that was checked before.
    pub(crate) fn from_checked(region: Arc<Region>, offset: usize, len: usize) -> Buffer {
        debug_assert!(offset <= region.len() && len <= region.len() - offset);
        Buffer {
            region,
            offset,
            len,
        }
    }

    pub(crate) fn into_region(self) -> Arc<Region> {
        self.region
    }

    /// Allocates a private buffer of `len` zero bytes on pages of its own.
    pub fn anonymous(len: usize) -> Result<Buffer, crate::RegionError> {
        let region = Arc::new(Region::anonymous(len)?);
        Ok(Buffer {
            region,
            offset: 0,
            len,
        })
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Offset in the region, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The region that the range lies in.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns `len` bytes from `skip` of this buffer on; `None` if the buffer is shorter.
    pub fn slice(&self, skip: usize, len: usize) -> Option<Buffer> {
        if skip > self.len || len > self.len - skip {
            return None;
        }
        Some(Buffer {
            region: Arc::clone(&self.region),
            offset: self.offset + skip,
            len,
        })
    }

    /// Makes this buffer longer by `next` if `next` follows it directly in the same region.
    /// Returns false (and changes nothing) otherwise.
    #[inline]
    pub fn try_extend(&mut self, next: &Buffer) -> bool {
        if Arc::ptr_eq(&self.region, &next.region) && self.offset + self.len == next.offset {
            self.len += next.len;
            return true;
        }
        false
    }

    /// Copies `dst.len()` bytes out, from `skip` bytes into the buffer. Panics if it is shorter.
    #[inline]
    pub fn read(&self, skip: usize, dst: &mut [u8]) {
        assert!(
            skip <= self.len && dst.len() <= self.len - skip,
            "range outside the buffer"
        );
        self.region.read(self.offset + skip, dst);
    }

    /// Copies `src` in, `skip` bytes into the buffer. Panics if it is shorter.
    #[inline]
    pub fn write(&self, skip: usize, src: &[u8]) {
        assert!(
            skip <= self.len && src.len() <= self.len - skip,
            "range outside the buffer"
        );
        self.region.write(self.offset + skip, src);
    }

    /// Copies the whole buffer to `offset` of `to`. Panics if `to` is too short.
    #[inline]
    pub fn copy_to(&self, to: &Region, offset: usize) {
        to.copy_from(offset, &self.region, self.offset, self.len);
    }

    /// Fills the whole buffer from `offset` of `from`. Panics if `from` is too short.
    #[inline]
    pub fn copy_from(&self, from: &Region, offset: usize) {
        self.region.copy_from(self.offset, from, offset, self.len);
    }

    /// Fills the buffer with zeros.
    #[inline]
    pub fn zero(&self) {
        self.region.zero(self.offset, self.len);
    }

    /// Copies the buffer's bytes into a vector, for tests and control paths.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut v = vec![0; self.len];
        self.read(0, &mut v);
        v
    }

    /// Address of the buffer, for system calls that take bare addresses. Panics if the kernel is to write to a
    /// read-only region.
    pub(crate) fn address(&self, for_write_by_kernel: bool) -> usize {
        self.iovec(0, for_write_by_kernel).iov_base as usize
    }

    pub(crate) fn iovec(&self, skip: usize, for_write_by_kernel: bool) -> libc::iovec {
        assert!(skip <= self.len);
        let len = self.len - skip;
        let p = if for_write_by_kernel {
            self.region.at_mut(self.offset + skip, len)
        } else {
            self.region.at(self.offset + skip, len)
        };
        libc::iovec {
            iov_base: p.cast(),
            iov_len: len,
        }
    }
}

/// Sum of the lengths, in bytes.
#[inline]
pub fn total_len(buffers: &[Buffer]) -> usize {
    buffers.iter().map(Buffer::len).sum()
}

/// Copies the data of all buffers, one behind the other, to `region` from byte `at` on.
#[inline]
pub fn gather(buffers: &[Buffer], region: &Region, mut at: usize) {
    for buffer in buffers {
        buffer.copy_to(region, at);
        at += buffer.len();
    }
}

/// Fills all buffers, in order, with the bytes of `region` from byte `at` on: the reverse of [`gather`].
#[inline]
pub fn scatter(buffers: &[Buffer], region: &Region, mut at: usize) {
    for buffer in buffers {
        buffer.copy_from(region, at);
        at += buffer.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_checked_and_joined() {
        let r = Arc::new(Region::anonymous(8192).unwrap());
        assert!(Buffer::new(&r, 8192, 1).is_none());
        assert!(Buffer::new(&r, usize::MAX, 2).is_none());
        let mut a = Buffer::new(&r, 0, 4096).unwrap();
        let b = Buffer::new(&r, 4096, 4096).unwrap();
        assert!(a.try_extend(&b));
        assert_eq!(a.len(), 8192);
        assert!(!a.try_extend(&b));
        b.write(10, b"hi");
        let mut got = [0; 2];
        a.read(4106, &mut got);
        assert_eq!(&got, b"hi");
        assert!(a.slice(8000, 193).is_none());
    }
}
