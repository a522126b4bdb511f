//! The byte stream of a connection: the socket itself, or TLS over it.

use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Error};
use pvblk_protocol::tls::{Room, Shaken, TlsPipe, TlsSession};
use pvblk_sys::socket::{self, Part};
use rustix::net::{RecvFlags, SendFlags};
use rustls::client::UnbufferedClientConnection;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

type Pipe = TlsPipe<UnbufferedClientConnection>;

/// See the module's documentation. Its clones are the same stream; one thread at a time uses it.
#[derive(Clone)]
pub(super) struct Stream {
    pub socket: Arc<OwnedFd>,
    tls: Option<Arc<Tls>>,
}

/// TLS over a socket. Its end is told to the server, as far as the socket takes that without waiting.
struct Tls {
    socket: Arc<OwnedFd>,
    pipe: Mutex<Pipe>,
}

impl Drop for Tls {
    fn drop(&mut self) {
        self.pipe.get_mut().close(now(&self.socket));
    }
}

/// Sends without waiting.
fn now(socket: &OwnedFd) -> impl Fn(&[u8]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    move |bytes| Ok(rustix::net::send(socket, bytes, flags)?)
}

/// Sends, and waits as long as the socket's time allows.
fn patiently(socket: &OwnedFd) -> impl Fn(&[u8]) -> io::Result<usize> {
    move |bytes| Ok(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL)?)
}

/// The reason that a server gave before it hung up, which it may do before it has read anything; else the error of sending.
fn last_words(pipe: &mut Pipe, socket: &OwnedFd, e: io::Error) -> io::Error {
    if ![io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset].contains(&e.kind()) {
        return e;
    }
    let mut byte = [0];
    let received = pipe.receive(&mut Room::new(&[], 0, &mut byte, 1), |into| {
        let (_, n) = rustix::net::recv(socket, into, RecvFlags::DONTWAIT)?;
        Ok(n)
    });
    match received {
        Err(why) if why.kind() == io::ErrorKind::InvalidData => why,
        _ => e,
    }
}

impl Stream {
    pub fn plain(socket: OwnedFd) -> Stream {
        Stream {
            socket: Arc::new(socket),
            tls: None,
        }
    }

    /// TLS over the socket, with a handshake. Waits for the server as long as the socket's time allows.
    pub fn secured(
        self,
        name: &str,
        connection: UnbufferedClientConnection,
    ) -> Result<Stream, Error> {
        let lost = |e: io::Error| match e.kind() {
            io::ErrorKind::WouldBlock => Error::protocol("TLS: the server doesn't answer"),
            _ => Error::os("TLS", e),
        };
        let mut session = TlsSession::new(connection);
        let left = loop {
            let shaken = session.shake();
            // After a failure, too: it says why.
            while !session.output().is_empty() {
                let sent = patiently(&self.socket)(session.output());
                match sent {
                    Ok(n) => session.sent(n),
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    // The reason is the session's own, if it has one.
                    Err(e) => return Err(shaken.err().unwrap_or_else(|| lost(e))),
                }
            }
            if let Shaken::Done(data) = shaken? {
                break data;
            }
            match rustix::io::read(&self.socket, session.room()) {
                Ok(0) => return Err(Error::protocol("TLS: the server hung up")),
                Ok(n) => session.filled(n),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(lost(e.into())),
            }
        };
        let gauge = Gauge::new(format!("{name}: TLS"), MemoryKind::Heap, 256 << 10);
        let socket = Arc::clone(&self.socket);
        let pipe = Mutex::new(TlsPipe::new(session, left, gauge));
        Ok(Stream {
            tls: Some(Arc::new(Tls { socket, pipe })),
            ..self
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// False if the server has hung up, or says something in the clear that nobody asked for.
    pub fn is_alive(&self) -> bool {
        let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.socket, &mut [0u8; 1][..], look) {
            Err(rustix::io::Errno::AGAIN) => true,
            // TLS has messages of its own at any time.
            Ok((n, _)) => n > 0 && self.tls.is_some(),
            Err(_) => false,
        }
    }

    /// Sends some of the parts, without waiting. `WouldBlock` if the socket is full.
    pub fn send<'a>(&self, parts: impl Iterator<Item = Part<'a>>) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            return socket::send(self.fd(), parts, usize::MAX);
        };
        let fill = |all: &mut pvblk_protocol::tls::Gather<'_>| {
            for part in parts {
                all.push(part);
                if all.is_full() {
                    break;
                }
            }
        };
        let mut pipe = tls.pipe.lock();
        pipe.send_parts(0, usize::MAX, fill, now(&self.socket)).1
    }

    /// Sends bytes that were taken and wait for the socket; `WouldBlock` if it doesn't take all.
    pub fn flush_now(&self) -> io::Result<()> {
        match &self.tls {
            None => Ok(()),
            Some(tls) => tls.pipe.lock().flush(now(&self.socket)),
        }
    }

    /// True if bytes that were taken wait for the socket.
    pub fn has_unsent(&self) -> bool {
        self.tls
            .as_ref()
            .is_some_and(|tls| tls.pipe.lock().has_unsent())
    }

    /// True if data are here already, of which the socket can't tell.
    pub fn has_data(&self) -> bool {
        self.tls
            .as_ref()
            .is_some_and(|tls| tls.pipe.lock().has_data())
    }

    /// Receives without waiting: into `buffers` from byte `at` of them on, then into `spill`. 0 at the end of the stream.
    pub fn receive(&self, buffers: &[Buffer], at: usize, spill: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            return socket::recv(self.fd(), buffers, at, spill, usize::MAX);
        };
        let mut room = Room::new(buffers, at, spill, usize::MAX);
        tls.pipe.lock().receive(&mut room, |into| {
            let (_, n) = rustix::net::recv(&self.socket, into, RecvFlags::DONTWAIT)?;
            Ok(n)
        })
    }
}

/// Waits as long as the socket's time allows; then `WouldBlock`.
impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            return Ok(rustix::io::read(&self.socket, into)?);
        };
        let mut pipe = tls.pipe.lock();
        loop {
            pipe.flush(patiently(&self.socket))?;
            let mut came = false;
            let mut room = Room::new(&[], 0, &mut *into, usize::MAX);
            let received = pipe.receive(&mut room, |bytes| {
                let n = rustix::io::read(&self.socket, bytes)?;
                came = true;
                Ok(n)
            });
            match received {
                // A part of a message, or one without data.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && came => {}
                received => return received,
            }
        }
    }
}

/// Waits as long as the socket's time allows; then `WouldBlock`, with nothing taken.
impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.tls {
            None => patiently(&self.socket)(bytes),
            Some(tls) => {
                let mut pipe = tls.pipe.lock();
                let sent = pipe.send(bytes, patiently(&self.socket));
                sent.map_err(|e| last_words(&mut pipe, &self.socket, e))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &self.tls {
            None => Ok(()),
            Some(tls) => tls.pipe.lock().flush(patiently(&self.socket)),
        }
    }
}
