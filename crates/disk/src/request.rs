//! Requests, and their results.

use crate::{Buffer, Error};
use pvblk_block::{Op, RequestFlags};
use std::fmt;

/// One read, write, flush, discard or write-zeroes, to be put into a [`Queue`](crate::Queue). Offsets and lengths are in bytes, and multiples of
/// [`Limits::logical_sector_bytes`](crate::Limits::logical_sector_bytes).
#[derive(Debug)]
pub struct Request {
    pub(crate) op: Op,
    pub(crate) flags: RequestFlags,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) buffer: Option<Buffer>,
    pub(crate) tag: u64,
}

impl Request {
    fn new(op: Op, offset: u64, len: u64, buffer: Option<Buffer>) -> Request {
        Request {
            op,
            flags: RequestFlags::empty(),
            offset,
            len,
            buffer,
            tag: 0,
        }
    }

    /// Fills the buffer from the disk.
    #[inline]
    pub fn read(offset: u64, buffer: Buffer) -> Request {
        Request::new(Op::Read, offset, buffer.len() as u64, Some(buffer))
    }

    /// Writes the buffer to the disk. Of two writes to one place that are in flight at the same time, either may be the last.
    #[inline]
    pub fn write(offset: u64, buffer: Buffer) -> Request {
        Request::new(Op::Write, offset, buffer.len() as u64, Some(buffer))
    }

    /// Makes every write stable that was completed when this request is submitted, on any queue of the disk. It says nothing of writes in flight.
    #[inline]
    pub fn flush() -> Request {
        Request::new(Op::Flush, 0, 0, None)
    }

    /// Tells the disk that a range isn't needed. Reads of it return anything until it is written.
    #[inline]
    pub fn discard(offset: u64, len: u64) -> Request {
        Request::new(Op::Discard, offset, len, None)
    }

    /// Makes a range read as zeros, without sending them. Disks with [`Limits::write_zeroes`](crate::Limits::write_zeroes) only.
    #[inline]
    pub fn write_zeroes(offset: u64, len: u64) -> Request {
        Request::new(Op::WriteZeroes, offset, len, None)
    }

    /// Sets the number that the completion has, by which the submitter knows its requests; 0 otherwise.
    #[inline]
    #[must_use]
    pub fn tag(mut self, tag: u64) -> Request {
        self.tag = tag;
        self
    }

    /// Has a read or write use the first `len` bytes of its buffer only, which comes back whole.
    ///
    /// # Panics
    ///
    /// If the buffer is shorter, or the request has none.
    #[inline]
    #[must_use]
    pub fn first(mut self, len: usize) -> Request {
        let most = self.buffer.as_ref().map_or(0, Buffer::len);
        assert!(
            len <= most,
            "{len} bytes of a request with a buffer of {most}"
        );
        self.len = len as u64;
        self
    }

    /// Has a write or write-zeroes be stable when it completes (force unit access), without a flush after it.
    #[inline]
    #[must_use]
    pub fn fua(mut self) -> Request {
        self.flags |= RequestFlags::FUA;
        self
    }

    /// The buffer, of a request that isn't submitted after all.
    pub fn into_buffer(self) -> Option<Buffer> {
        self.buffer
    }
}

/// A request that was done, or failed.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion {
    /// The number that was given to the request: see [`Request::tag`].
    pub tag: u64,
    /// Success means for a read that the buffer is filled, for a write that the disk has the data; it is stable after a flush.
    pub result: Result<(), Error>,
    /// The buffer of the request, for the next one. After an error its contents are undefined.
    pub buffer: Option<Buffer>,
}

/// The error of a request for which its queue has no place: take completions, and try again.
pub struct Full {
    /// The request, with its buffer.
    pub request: Request,
    pub(crate) depth: u32,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let depth = self.depth;
        write!(
            f,
            "all {depth} places of the queue are taken: take completions first, or open a deeper queue"
        )
    }
}

impl fmt::Debug for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Full: {self}")
    }
}

impl std::error::Error for Full {}

/// The request and its buffer are dropped.
impl From<Full> for Error {
    fn from(full: Full) -> Error {
        Error::new(crate::ErrorKind::Exhausted, full.to_string())
    }
}

/// The name of an operation in messages.
pub(crate) fn name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::WriteZeroes => "write-zeroes",
    }
}
