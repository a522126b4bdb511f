//! The memory that is shared with the server, as buffers.

use parking_lot::Mutex;
use pvblk_block::{Buffer, BufferSource, Region};
use pvblk_sys::PAGE_SIZE;
use range_alloc::RangeAllocator;
use std::sync::Arc;

/// Shared memory behind the rings.
pub(super) struct Memory {
    region: Arc<Region>,
    /// Where the server has its first byte.
    guest: u64,
    free: Mutex<RangeAllocator<usize>>,
}

impl Memory {
    pub fn new(region: Arc<Region>, guest: u64) -> Memory {
        Memory {
            free: Mutex::new(RangeAllocator::new(0..region.len())),
            region,
            guest,
        }
    }

    /// Bytes of the whole file, rings included.
    pub fn file_bytes(&self) -> u64 {
        self.guest - super::GUEST + self.region.len() as u64
    }

    /// Bytes for buffers.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Where the server has a buffer; `None` if it is memory of somebody else.
    #[inline]
    pub fn address(&self, buffer: &Buffer) -> Option<u64> {
        let ours = Arc::ptr_eq(buffer.region(), &self.region);
        ours.then(|| self.guest + buffer.offset() as u64)
    }
}

impl BufferSource for Memory {
    fn allocate(&self, len: usize) -> Option<Buffer> {
        let whole = len.checked_next_multiple_of(PAGE_SIZE)?;
        let range = self.free.lock().allocate_range(whole).ok()?;
        Buffer::new(&self.region, range.start, len)
    }

    fn free(&self, buffer: Buffer) {
        let whole = buffer.len().next_multiple_of(PAGE_SIZE);
        let start = buffer.offset();
        drop(buffer);
        self.free.lock().free_range(start..start + whole);
    }
}
