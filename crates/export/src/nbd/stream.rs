//! The byte stream of a connection: the socket itself, or TLS over it.

use super::tls::TlsSession;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Error};
use pvblk_sys::socket::{self, Part};
use rustix::net::{RecvFlags, SendFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Bytes that are encrypted at a time: a worker's other lanes wait for it.
pub(super) const MOST_ENCRYPTED: usize = 64 << 10;

/// See the module's documentation. None of its calls waits.
pub(super) enum Stream {
    Plain(Arc<OwnedFd>),
    Tls(Box<TlsStream>),
}

/// TLS over a socket. Its end is told to the client, as far as the socket takes that without waiting.
pub(super) struct TlsStream {
    socket: Arc<OwnedFd>,
    session: TlsSession,
    /// Data of a message that nobody had room for, from `taken` on.
    left: Vec<u8>,
    taken: usize,
    /// Room for data that are gathered before they are encrypted; empty until it is needed.
    gathered: Vec<u8>,
    gauge: Gauge,
}

impl Stream {
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Plain(socket) => socket.as_fd(),
            Stream::Tls(tls) => tls.socket.as_fd(),
        }
    }

    /// As [`socket::recv`].
    #[inline]
    pub fn receive(
        &mut self,
        buffers: &[Buffer],
        skip: usize,
        spill: &mut [u8],
        most: usize,
    ) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket::recv(socket.as_fd(), buffers, skip, spill, most),
            Stream::Tls(tls) => tls.receive(&mut Room::new(buffers, skip, spill, most)),
        }
    }

    /// True if data are here already, which the socket can't tell.
    #[inline]
    pub fn has_data(&self) -> bool {
        match self {
            Stream::Plain(_) => false,
            Stream::Tls(tls) => tls.taken < tls.left.len() || tls.session.has_message(),
        }
    }

    /// True if bytes that were taken wait for the socket.
    #[inline]
    pub fn has_unsent(&self) -> bool {
        match self {
            Stream::Plain(_) => false,
            Stream::Tls(tls) => !tls.session.output().is_empty(),
        }
    }

    /// Sends what waits for the socket; `WouldBlock` if it doesn't take all.
    pub fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(_) => Ok(()),
            Stream::Tls(tls) => tls.flush(),
        }
    }

    /// Takes bytes to be sent, and returns how many; `WouldBlock` if the socket is full.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => Ok(rustix::net::send(
                socket,
                bytes,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            )?),
            Stream::Tls(tls) => {
                tls.flush()?;
                tls.encrypt(&bytes[..bytes.len().min(MOST_ENCRYPTED)])
            }
        }
    }

    /// Gives memory back that isn't needed.
    pub fn release(&mut self) {
        if let Stream::Tls(tls) = self {
            tls.release();
        }
    }
}

fn io_error(e: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e)
}

impl TlsStream {
    /// TLS after its handshake, with which these data came.
    pub fn new(name: &str, socket: Arc<OwnedFd>, session: TlsSession, left: Vec<u8>) -> TlsStream {
        TlsStream {
            socket,
            session,
            left,
            taken: 0,
            gathered: Vec::new(),
            gauge: Gauge::new(format!("{name}: TLS"), MemoryKind::Heap, 256 << 10),
        }
    }

    fn receive(&mut self, room: &mut Room<'_>) -> io::Result<usize> {
        let mut may_receive = true;
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
            if !may_receive {
                break;
            }
            may_receive = false;
            match rustix::net::recv(&self.socket, self.session.room(), RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    ended = true;
                    break;
                }
                Ok((n, _)) => self.session.filled(n),
                Err(e) if room.taken == 0 => return Err(e.into()),
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
    ) -> (usize, io::Result<usize>) {
        if let Err(e) = self.flush() {
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
        let sent = self.encrypt(&gathered[..n]);
        self.gathered = gathered;
        self.gauge.set(self.memory() as u64);
        (n, sent)
    }

    /// Encrypts bytes, all of them, and sends what the socket takes.
    fn encrypt(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.session.encrypt(bytes).map_err(io_error)?;
        match self.flush() {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => Err(e),
            _ => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.session.output().is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, self.session.output(), flags) {
                Ok(n) => self.session.sent(n),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn release(&mut self) {
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

impl Drop for TlsStream {
    fn drop(&mut self) {
        self.session.close();
        let _ = self.flush();
    }
}

/// Collects parts, without the first bytes of them, as far as there is room.
pub(super) struct Gather<'a> {
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
struct Room<'a> {
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
    fn new(mut buffers: &'a [Buffer], mut at: usize, spill: &'a mut [u8], most: usize) -> Room<'a> {
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
