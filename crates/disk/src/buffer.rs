//! Memory of requests.

use crate::{Error, ErrorKind};
use pvblk_block::{BlockDevice, BufferSource};
use pvblk_sys::PAGE_SIZE;
use std::fmt;
use std::sync::Arc;

/// Where buffers of a disk come from, and go to.
pub(crate) struct Home(Option<Arc<dyn BufferSource>>);

impl Home {
    pub(crate) fn of(device: &dyn BlockDevice) -> Arc<Home> {
        Arc::new(Home(device.buffer_source()))
    }

    /// `None`: the shared memory is used up.
    pub(crate) fn allocate(self: &Arc<Home>, len: usize) -> Result<Option<Buffer>, Error> {
        let Some(pages) = len.checked_next_multiple_of(PAGE_SIZE) else {
            return Ok(None);
        };
        let memory = match &self.0 {
            Some(source) => source.allocate(pages),
            None => {
                let made = pvblk_block::Buffer::anonymous(pages);
                Some(made.map_err(|e| Error::os("memory for a buffer", e))?)
            }
        };
        let memory = memory.and_then(|m| m.slice(0, len));
        Ok(memory.map(|memory| Buffer::new(memory, Arc::clone(self))))
    }

    /// Takes back memory that [`Home::allocate`] gave.
    fn free(&self, memory: &pvblk_block::Buffer) {
        let Some(source) = &self.0 else { return };
        let pages = memory.len().next_multiple_of(PAGE_SIZE);
        // The same memory as was allocated, so there is such a range.
        if let Some(whole) = pvblk_block::Buffer::new(memory.region(), memory.offset(), pages) {
            source.free(whole);
        }
    }
}

/// Memory of one request: shared with the server where the disk is reached over shared memory, so that its data isn't copied on the way.
///
/// A request owns its buffer while it is in flight, and its [`Completion`](crate::Completion) gives it back: keep buffers and use them again, since
/// making one is no cheap step. Nobody gets a reference into the memory, which the server can write at any time; data is copied in and out.
///
/// Dropping a buffer gives its memory back to the disk.
pub struct Buffer {
    /// Taken when the buffer goes into a request, and when it is dropped.
    parts: Option<Parts>,
    len: usize,
}

/// Memory, and where it goes back to.
pub(crate) struct Parts {
    pub(crate) memory: pvblk_block::Buffer,
    pub(crate) home: Arc<Home>,
}

impl Buffer {
    fn new(memory: pvblk_block::Buffer, home: Arc<Home>) -> Buffer {
        Buffer {
            len: memory.len(),
            parts: Some(Parts { memory, home }),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: there are no buffers without memory.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the bytes from `at` on out of the buffer.
    ///
    /// # Panics
    ///
    /// If `to` is longer than the buffer from `at` on.
    pub fn copy_to(&self, at: usize, to: &mut [u8]) {
        self.check(at, to.len());
        if let Some(parts) = &self.parts {
            parts.memory.read(at, to);
        }
    }

    /// Copies bytes into the buffer, from `at` on.
    ///
    /// # Panics
    ///
    /// If `from` is longer than the buffer from `at` on.
    pub fn copy_from(&mut self, at: usize, from: &[u8]) {
        self.check(at, from.len());
        if let Some(parts) = &self.parts {
            parts.memory.write(at, from);
        }
    }

    /// Fills the buffer with zeros. A buffer that was just made may hold data of earlier requests of this disk.
    pub fn zero(&mut self) {
        if let Some(parts) = &self.parts {
            parts.memory.zero();
        }
    }

    /// A copy of all of its bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(0, &mut bytes);
        bytes
    }

    #[track_caller]
    fn check(&self, at: usize, len: usize) {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(
            fits,
            "{len} bytes at {at} of a buffer of {} bytes",
            self.len
        );
    }

    /// The parts of a buffer that goes into a request.
    pub(crate) fn into_parts(mut self) -> Option<Parts> {
        self.parts.take()
    }

    /// A buffer of `len` bytes that comes back from a request, which may have used its first part only.
    pub(crate) fn from_parts(memory: pvblk_block::Buffer, home: Arc<Home>, len: usize) -> Buffer {
        let whole = match memory.len() == len {
            true => None,
            false => pvblk_block::Buffer::new(memory.region(), memory.offset(), len),
        };
        Buffer::new(whole.unwrap_or(memory), home)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(Parts { memory, home }) = self.parts.take() {
            home.free(&memory);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// The error of a length that no request could use.
pub(crate) fn check_len(len: usize, sector_bytes: u32) -> Result<(), Error> {
    if len > 0 && (len as u64).is_multiple_of(u64::from(sector_bytes)) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!("a buffer of {len} bytes; ask for a multiple of {sector_bytes}"),
    ))
}
