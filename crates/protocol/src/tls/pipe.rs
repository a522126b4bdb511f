//! TLS over a byte stream that its user sends and receives: data in requests' memory on one side, messages on the other.

use super::session::{TlsEnd, TlsSession};
use pvblk_block::memory::Gauge;
use pvblk_block::{Buffer, Error};
use pvblk_sys::socket::Part;
use std::io;

/// Bytes that are encrypted at a time: others on the same thread wait for it.
pub const MOST_ENCRYPTED: usize = 64 << 10;

/// See the module's documentation. Its calls take a function that sends or receives as a socket does: bytes in, their number out, `WouldBlock`.
pub struct TlsPipe<E> {
    session: TlsSession<E>,
    /// Data of a message that nobody had room for, from `taken` on.
    left: Vec<u8>,
    taken: usize,
    /// Room for data that are gathered before they are encrypted; empty until it is needed.
    gathered: Vec<u8>,
    gauge: Gauge,
}

fn io_error(e: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e)
}

impl<E: TlsEnd> TlsPipe<E> {
    /// A session after its handshake, with which the data in `left` came. `gauge` is told its memory.
    pub fn new(session: TlsSession<E>, left: Vec<u8>, gauge: Gauge) -> TlsPipe<E> {
        TlsPipe {
            session,
            left,
            taken: 0,
            gathered: Vec::new(),
            gauge,
        }
    }

    /// True if data are here already, of which the socket can't tell.
    #[inline]
    pub fn has_data(&self) -> bool {
        self.taken < self.left.len() || self.session.has_message()
    }

    /// True if bytes that were taken wait for the socket.
    #[inline]
    pub fn has_unsent(&self) -> bool {
        !self.session.output().is_empty()
    }

    /// Receives once at most, unless data are here. 0 at the end of the stream; `WouldBlock` also for a part of a message.
    pub fn receive(
        &mut self,
        room: &mut Room<'_>,
        receive: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut receive = Some(receive);
        let mut ended = false;
        while !room.is_full() {
            if self.taken < self.left.len() {
                self.taken += room.put(&self.left[self.taken..]);
                continue;
            }
            self.left.clear();
            self.taken = 0;
            if self.session.has_message() {
                let left = &mut self.left;
                let decrypted = self.session.decrypt(&mut |data| {
                    let n = room.put(data);
                    left.extend_from_slice(&data[n..]);
                });
                decrypted.map_err(io_error)?;
                if self.session.is_closed() {
                    ended = true;
                    break;
                }
                continue;
            }
            let Some(receive) = receive.take() else {
                break;
            };
            match receive(self.session.room()) {
                Ok(0) => {
                    ended = true;
                    break;
                }
                Ok(n) => self.session.filled(n),
                Err(e) if room.taken == 0 => return Err(e),
                Err(_) => break,
            }
        }
        self.gauge.set(self.memory() as u64);
        match room.taken {
            // A part of a message is no data yet.
            0 if !ended => Err(io::ErrorKind::WouldBlock.into()),
            n => Ok(n),
        }
    }

    /// Takes parts to be sent, without the first `skip` bytes and at most `most`. Returns the bytes of them, and how many were taken: all, or `WouldBlock` while
    /// earlier ones wait for the socket.
    pub fn send_parts(
        &mut self,
        skip: usize,
        most: usize,
        fill: impl FnOnce(&mut Gather<'_>),
        send: impl Fn(&[u8]) -> io::Result<usize>,
    ) -> (usize, io::Result<usize>) {
        if let Err(e) = self.flush(&send) {
            return (0, Err(e));
        }
        let mut gathered = std::mem::take(&mut self.gathered);
        if gathered.is_empty() {
            gathered.resize(MOST_ENCRYPTED, 0);
        }
        let mut gather = Gather {
            out: &mut gathered[..most.min(MOST_ENCRYPTED)],
            len: 0,
            skip,
        };
        fill(&mut gather);
        let n = gather.len;
        let sent = self.encrypt(&gathered[..n], send);
        self.gathered = gathered;
        self.gauge.set(self.memory() as u64);
        (n, sent)
    }

    /// Takes bytes to be sent, and returns how many; `WouldBlock` while earlier ones wait for the socket.
    pub fn send(
        &mut self,
        bytes: &[u8],
        send: impl Fn(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.flush(&send)?;
        self.encrypt(&bytes[..bytes.len().min(MOST_ENCRYPTED)], send)
    }

    /// Encrypts bytes, all of them, and sends what the socket takes.
    fn encrypt(
        &mut self,
        bytes: &[u8],
        send: impl Fn(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.session.encrypt(bytes).map_err(io_error)?;
        match self.flush(send) {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => Err(e),
            _ => Ok(bytes.len()),
        }
    }

    /// Sends what waits for the socket; `WouldBlock` if it doesn't take all.
    pub fn flush(&mut self, send: impl Fn(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while self.has_unsent() {
            match send(self.session.output()) {
                Ok(n) => self.session.sent(n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Tells the peer that nothing follows, as far as the socket takes that.
    pub fn close(&mut self, send: impl Fn(&[u8]) -> io::Result<usize>) {
        self.session.close();
        let _ = self.flush(send);
    }

    /// Gives memory back that isn't needed.
    pub fn release(&mut self) {
        self.session.release();
        if self.taken == self.left.len() {
            self.left = Vec::new();
            self.taken = 0;
        }
        self.gathered = Vec::new();
        self.gauge.set(self.memory() as u64);
    }

    fn memory(&self) -> usize {
        self.session.memory() + self.left.capacity() + self.gathered.capacity()
    }
}

/// Collects parts, without the first bytes of them, as far as there is room.
pub struct Gather<'a> {
    out: &'a mut [u8],
    len: usize,
    /// Bytes that are still to be skipped.
    skip: usize,
}

impl Gather<'_> {
    pub fn push(&mut self, part: Part<'_>) {
        let skipped = self.skip.min(part.size());
        self.skip -= skipped;
        let n = (part.size() - skipped).min(self.out.len() - self.len);
        let to = &mut self.out[self.len..self.len + n];
        match part {
            Part::Bytes(bytes) => to.copy_from_slice(&bytes[skipped..skipped + n]),
            Part::Buffer(buffer, at) => buffer.read(at + skipped, to),
        }
        self.len += n;
    }

    pub fn is_full(&self) -> bool {
        self.len == self.out.len()
    }
}

/// Memory for received data: buffers, then a spill.
pub struct Room<'a> {
    buffers: &'a [Buffer],
    /// Bytes of the first buffer that are filled.
    at: usize,
    spill: &'a mut [u8],
    spilled: usize,
    /// Bytes that may still be taken.
    most: usize,
    taken: usize,
}

impl<'a> Room<'a> {
    /// At most `most` bytes: into `buffers` from byte `at` of them on, then into `spill`.
    pub fn new(
        mut buffers: &'a [Buffer],
        mut at: usize,
        spill: &'a mut [u8],
        most: usize,
    ) -> Room<'a> {
        while let Some((first, rest)) = buffers.split_first()
            && at >= first.len()
        {
            at -= first.len();
            buffers = rest;
        }
        Room {
            buffers,
            at,
            spill,
            spilled: 0,
            most,
            taken: 0,
        }
    }

    fn is_full(&self) -> bool {
        self.most == 0 || (self.buffers.is_empty() && self.spilled == self.spill.len())
    }

    /// Takes bytes of `data`, and returns how many.
    fn put(&mut self, data: &[u8]) -> usize {
        let mut rest = &data[..data.len().min(self.most)];
        let whole = rest.len();
        while let Some((first, others)) = self.buffers.split_first()
            && !rest.is_empty()
        {
            let n = rest.len().min(first.len() - self.at);
            first.write(self.at, &rest[..n]);
            rest = &rest[n..];
            self.at += n;
            if self.at == first.len() {
                (self.buffers, self.at) = (others, 0);
            }
        }
        if !rest.is_empty() {
            let n = rest.len().min(self.spill.len() - self.spilled);
            self.spill[self.spilled..][..n].copy_from_slice(&rest[..n]);
            self.spilled += n;
            rest = &rest[n..];
        }
        let n = whole - rest.len();
        self.most -= n;
        self.taken += n;
        n
    }
}
