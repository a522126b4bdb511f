//! Bytes received and not yet understood.

use super::stream::Stream;
use pvblk_block::Buffer;
use std::io;

/// Room for headers and small payloads: one call takes about 32 writes of 4 KiB, or 4600 reads.
const CAPACITY: usize = 128 << 10;
/// A write from this size on gets its payload straight into its buffers.
const DIRECT: u32 = 32 << 10;
/// While writes are large: enough for a few headers, so that little of a payload is copied twice.
const NARROW: usize = 1024;

/// Bytes of one receive: a worker's other lanes wait for it.
pub(super) const MOST_AT_ONCE: usize = 128 << 10;

/// The receive buffer. It has no memory until the first byte and after [`Inbox::release`].
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    narrow: bool,
}

impl Inbox {
    /// Starts with bytes that came with the handshake.
    pub(super) fn new(first: Vec<u8>) -> Inbox {
        Inbox {
            start: 0,
            end: first.len(),
            bytes: first,
            narrow: false,
        }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    /// The bytes that are here.
    #[inline]
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Drops the first `n` bytes, or all if there are fewer; returns how many.
    #[inline]
    pub(super) fn skip(&mut self, n: usize) -> usize {
        let n = n.min(self.len());
        self.start += n;
        n
    }

    /// Moves bytes into `buffers` from byte `filled` on, as far as both last; returns how many.
    pub(super) fn copy_to(&mut self, buffers: &[Buffer], mut filled: usize) -> usize {
        let from = self.start;
        for b in buffers {
            if filled >= b.len() {
                filled -= b.len();
                continue;
            }
            let n = (b.len() - filled).min(self.len());
            b.write(filled, &self.bytes[self.start..self.start + n]);
            self.start += n;
            filled = 0;
            if self.len() == 0 {
                break;
            }
        }
        self.start - from
    }

    /// Tells the length of a write's payload (0 for other requests), from which the next reads learn how much to take.
    #[inline]
    pub(super) fn expect_like(&mut self, payload: u32) {
        self.narrow = payload >= DIRECT;
    }

    /// One receive: into `buffers` from byte `filled` on, what follows into here. Returns bytes for the
    /// buffers and bytes in all; (0, 0) at the end of the stream.
    pub(super) fn receive(
        &mut self,
        stream: &mut Stream,
        buffers: &[Buffer],
        filled: usize,
        missing: usize,
    ) -> io::Result<(usize, usize)> {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let room = if self.narrow { NARROW } else { CAPACITY };
        if self.bytes.len() < CAPACITY {
            self.bytes.resize(CAPACITY, 0);
        }
        let until = (self.end + room).min(CAPACITY);
        let spill = &mut self.bytes[self.end..until];
        let n = stream.receive(buffers, filled, spill, MOST_AT_ONCE)?;
        let direct = n.min(missing);
        self.end += n - direct;
        Ok((direct, n))
    }

    /// Gives the memory back, but for what is needed for the bytes in it.
    pub(super) fn release(&mut self) {
        *self = Inbox {
            narrow: self.narrow,
            ..Inbox::new(self.bytes[self.start..self.end].to_vec())
        };
    }

    /// Bytes of memory.
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}
