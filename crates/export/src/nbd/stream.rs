//! The byte stream of a connection: the socket itself, or TLS over it.

use super::tls::TlsSession;
use pvblk_block::Buffer;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_protocol::tls::{Gather, Room, TlsPipe};
use pvblk_sys::socket;
use rustix::net::{RecvFlags, SendFlags};
use rustls::server::UnbufferedServerConnection;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// See the module's documentation. None of its calls waits.
pub(super) enum Stream {
    Plain(Arc<OwnedFd>),
    Tls(Box<TlsStream>),
}

/// TLS over a socket. Its end is told to the client, as far as the socket takes that without waiting.
pub(super) struct TlsStream {
    socket: Arc<OwnedFd>,
    pipe: TlsPipe<UnbufferedServerConnection>,
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
            Stream::Tls(tls) => tls.pipe.has_data(),
        }
    }

    /// True if bytes that were taken wait for the socket.
    #[inline]
    pub fn has_unsent(&self) -> bool {
        match self {
            Stream::Plain(_) => false,
            Stream::Tls(tls) => tls.pipe.has_unsent(),
        }
    }

    /// Sends what waits for the socket; `WouldBlock` if it doesn't take all.
    pub fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(_) => Ok(()),
            Stream::Tls(tls) => tls.pipe.flush(now(&tls.socket)),
        }
    }

    /// Takes bytes to be sent, and returns how many; `WouldBlock` if the socket is full.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => now(socket)(bytes),
            Stream::Tls(tls) => tls.pipe.send(bytes, now(&tls.socket)),
        }
    }

    /// Gives memory back that isn't needed.
    pub fn release(&mut self) {
        if let Stream::Tls(tls) = self {
            tls.pipe.release();
        }
    }
}

/// Sends without waiting.
fn now(socket: &OwnedFd) -> impl Fn(&[u8]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    move |bytes| Ok(rustix::net::send(socket, bytes, flags)?)
}

impl TlsStream {
    /// TLS after its handshake, with which these data came.
    pub fn new(name: &str, socket: Arc<OwnedFd>, session: TlsSession, left: Vec<u8>) -> TlsStream {
        let gauge = Gauge::new(format!("{name}: TLS"), MemoryKind::Heap, 256 << 10);
        let pipe = TlsPipe::new(session, left, gauge);
        TlsStream { socket, pipe }
    }

    fn receive(&mut self, room: &mut Room<'_>) -> io::Result<usize> {
        self.pipe.receive(room, |into| {
            let (_, n) = rustix::net::recv(&self.socket, into, RecvFlags::DONTWAIT)?;
            Ok(n)
        })
    }

    /// As [`TlsPipe::send_parts`].
    pub fn send_parts(
        &mut self,
        skip: usize,
        most: usize,
        fill: impl FnOnce(&mut Gather<'_>),
    ) -> (usize, io::Result<usize>) {
        self.pipe.send_parts(skip, most, fill, now(&self.socket))
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        self.pipe.close(now(&self.socket));
    }
}
