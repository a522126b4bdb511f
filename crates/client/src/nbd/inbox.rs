//! Bytes received and not yet understood.

use super::stream::Stream;
use pvblk_block::Buffer;
use std::io;

/// Room for about 30 replies to reads of 4 KiB.
const CAPACITY: usize = 128 << 10;
/// Data from this size on is received straight into its buffers, and little else with it.
const DIRECT: usize = 32 << 10;
/// Bytes that are taken behind such data: a few headers.
const NARROW: usize = 1024;

/// The receive buffer of a connection.
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new() -> Inbox {
        Inbox {
            bytes: vec![0; CAPACITY],
            start: 0,
            end: 0,
        }
    }

    /// Forgets everything, for another connection.
    pub(super) fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    #[inline]
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    #[inline]
    pub(super) fn skip(&mut self, n: usize) {
        self.start += n;
        debug_assert!(self.start <= self.end);
    }

    /// Moves bytes into `buffers`, from byte `at` of them to before byte `end`; returns how many.
    pub(super) fn copy_to(&mut self, buffers: &[Buffer], at: usize, end: usize) -> usize {
        let total = (end - at).min(self.end - self.start);
        let (mut left, mut skip) = (total, at);
        for b in buffers {
            if skip >= b.len() {
                skip -= b.len();
                continue;
            }
            let n = left.min(b.len() - skip);
            b.write(skip, &self.bytes[self.start..self.start + n]);
            self.start += n;
            left -= n;
            skip = 0;
            if left == 0 {
                break;
            }
        }
        total
    }

    /// One receive. `wanted`: buffers whose bytes from `at` to their end come next. Returns how many bytes
    /// went there, and whether there may be more to receive. An end of the stream is an error.
    pub(super) fn receive(
        &mut self,
        stream: &Stream,
        wanted: Option<(&[Buffer], usize, usize)>,
    ) -> io::Result<(usize, bool)> {
        self.bytes.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        // Only what comes first may go past what is here already.
        let (buffers, at, missing) = match wanted {
            Some(w) if self.end == 0 => w,
            _ => (&[][..], 0, 0),
        };
        let room = if missing >= DIRECT { NARROW } else { CAPACITY };
        let until = (self.end + room).min(CAPACITY);
        let asked = missing + until - self.end;
        let n = match stream.receive(buffers, at, &mut self.bytes[self.end..until]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok((0, false)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok((0, true)),
            Err(e) => return Err(e),
        };
        let direct = n.min(missing);
        self.end += n - direct;
        Ok((direct, n == asked || stream.has_data()))
    }
}
