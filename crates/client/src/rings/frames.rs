//! Frames of our memory: runs for buffers, single pages for bounces and indirect segments.

use parking_lot::Mutex;
use pvblk_block::{Buffer, BufferSource, Region};
use pvblk_sys::PAGE_SIZE;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Free runs of frames, by first frame. First fit; neighbours are joined when freed. Not on the hot
/// path: queues and pools keep what they took.
#[derive(Debug)]
pub struct Frames {
    memory: Arc<Region>,
    free: Mutex<BTreeMap<u32, u32>>,
}

impl Frames {
    /// All frames from `first` to the end of the memory, free.
    pub fn new(memory: Arc<Region>, first: u32) -> Frames {
        let count = (memory.len() / PAGE_SIZE) as u32;
        let mut free = BTreeMap::new();
        if first < count {
            free.insert(first, count - first);
        }
        Frames {
            memory,
            free: Mutex::new(free),
        }
    }

    pub fn memory(&self) -> &Arc<Region> {
        &self.memory
    }

    /// Takes `count` frames in one run.
    pub fn take(&self, count: u32) -> Option<u32> {
        let mut free = self.free.lock();
        let (&at, &len) = free.iter().find(|&(_, &len)| len >= count)?;
        free.remove(&at);
        if len > count {
            free.insert(at + count, len - count);
        }
        Some(at)
    }

    /// Gives a run back.
    pub fn give(&self, mut at: u32, mut count: u32) {
        let mut free = self.free.lock();
        if let Some((&before, &len)) = free.range(..at).next_back() {
            assert!(before + len <= at, "frames freed twice");
            if before + len == at {
                free.remove(&before);
                at = before;
                count += len;
            }
        }
        if let Some((&after, &len)) = free.range(at + 1..).next() {
            assert!(at + count <= after, "frames freed twice");
            if at + count == after {
                free.remove(&after);
                count += len;
            }
        }
        free.insert(at, count);
    }
}

impl BufferSource for Frames {
    fn allocate(&self, len: usize) -> Option<Buffer> {
        let at = self.take(u32::try_from(len.div_ceil(PAGE_SIZE)).ok()?)?;
        Buffer::new(&self.memory, at as usize * PAGE_SIZE, len)
    }

    fn free(&self, buffer: Buffer) {
        assert!(
            Arc::ptr_eq(buffer.region(), &self.memory),
            "a buffer of other memory"
        );
        self.give(
            (buffer.offset() / PAGE_SIZE) as u32,
            buffer.len().div_ceil(PAGE_SIZE) as u32,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_taken_and_joined_again() {
        let f = Frames::new(Arc::new(Region::anonymous(16 * PAGE_SIZE).unwrap()), 4);
        let (a, b, c) = (f.take(4).unwrap(), f.take(4).unwrap(), f.take(4).unwrap());
        assert_eq!((a, b, c), (4, 8, 12));
        assert!(f.take(1).is_none());
        f.give(a, 4);
        f.give(c, 4);
        assert!(f.take(5).is_none());
        f.give(b, 4);
        assert_eq!(f.take(12), Some(4));
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_double_free_panics() {
        let f = Frames::new(Arc::new(Region::anonymous(16 * PAGE_SIZE).unwrap()), 0);
        let a = f.take(4).unwrap();
        f.give(a, 4);
        f.give(a + 1, 1);
    }
}
