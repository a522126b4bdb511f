//! The negotiation with one client, on a thread of its own: it waits for the client until a deadline.

use super::access::{Identity, Rules};
use super::config::NbdConfig;
use super::handshake::{Handshake, Negotiated, Step, TlsUse};
use super::stream::{Stream, TlsStream};
use super::tls::{self, Tls, TlsSession};
use pvblk_block::Error;
use pvblk_protocol::tls::Shaken;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// Bytes taken from a negotiating client at once.
const PIECE: usize = 4096;

/// A client that has negotiated.
pub(super) struct Met {
    pub negotiated: Box<Negotiated>,
    pub stream: Stream,
}

/// The part that TLS has at a listener.
pub(super) fn tls_use(config: &NbdConfig) -> TlsUse {
    match &config.tls {
        None => TlsUse::Absent,
        Some(tls) if tls.is_required() => TlsUse::Required,
        Some(_) => TlsUse::Offered,
    }
}

/// A client before TLS: its user and groups, if a rule asks for them.
pub(super) fn identity(socket: &OwnedFd, rules: &Rules) -> Identity {
    if !rules.need_processes() {
        return Identity::default();
    }
    // Other sockets than Unix ones have neither.
    Identity {
        user: pvblk_sys::socket::peer(socket.as_fd()).ok().map(|p| p.0),
        groups: pvblk_sys::socket::peer_groups(socket.as_fd()).unwrap_or_default(),
        names: Vec::new(),
    }
}

/// Negotiates; `None` if the client left in order. `denied` is told the disks that the client asked for and may not use, and who it is.
pub(super) fn negotiate(
    name: &str,
    socket: Arc<OwnedFd>,
    handshake: &mut Handshake<'_>,
    credentials: Option<&Tls>,
    deadline: Instant,
    denied: &dyn Fn(&str, &str),
) -> Result<Option<Met>, Error> {
    let mut stream = Stream::Plain(Arc::clone(&socket));
    let mut piece = [0; PIECE];
    send_all(&mut stream, &handshake.take_output(), deadline)?;
    loop {
        let n = match stream.receive(&[], 0, &mut piece, PIECE) {
            Ok(0) => return Ok(None),
            Ok(n) => n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                wait(&socket, PollFlags::IN, deadline)?;
                continue;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(Error::os("receiving options", e)),
        };
        let mut bytes = &piece[..n];
        loop {
            // On an error the client still gets what was to be said before it.
            let step = handshake.feed(std::mem::take(&mut bytes));
            if let Some(disk) = handshake.take_denied() {
                denied(&disk, &handshake.client().to_string());
            }
            send_all(&mut stream, &handshake.take_output(), deadline)?;
            match step? {
                Step::More => break,
                Step::Output => {}
                Step::StartTls => {
                    let credentials =
                        credentials.ok_or_else(|| Error::protocol("TLS without credentials"))?;
                    let (session, data) = start_tls(&socket, credentials, deadline)?;
                    handshake.secured(tls::client_names(&session));
                    let session = TlsStream::new(name, Arc::clone(&socket), session, data);
                    stream = Stream::Tls(Box::new(session));
                    break;
                }
                Step::Done(negotiated) => return Ok(Some(Met { negotiated, stream })),
                Step::Aborted => return Ok(None),
            }
        }
    }
}

/// The handshake of TLS. Returns data that came with its end.
fn start_tls(
    socket: &OwnedFd,
    credentials: &Tls,
    deadline: Instant,
) -> Result<(TlsSession, Vec<u8>), Error> {
    let mut session = tls::session(credentials.config())?;
    loop {
        let shaken = session.shake();
        // After a failure, too: it says why.
        while !session.output().is_empty() {
            wait(socket, PollFlags::OUT, deadline)?;
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(socket, session.output(), flags) {
                Ok(n) => session.sent(n),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(e) => return Err(Error::os("sending TLS messages", e)),
            }
        }
        if let Shaken::Done(data) = shaken? {
            return Ok((session, data));
        }
        wait(socket, PollFlags::IN, deadline)?;
        match rustix::net::recv(socket, session.room(), RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(Error::protocol("the client left during the TLS handshake")),
            Ok((n, _)) => session.filled(n),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(e) => return Err(Error::os("receiving TLS messages", e)),
        }
    }
}

fn send_all(stream: &mut Stream, mut bytes: &[u8], deadline: Instant) -> Result<(), Error> {
    while !bytes.is_empty() || stream.has_unsent() {
        let sent = match bytes.is_empty() {
            true => stream.flush().map(|()| 0),
            false => stream.send(bytes),
        };
        match sent {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                wait(stream.fd(), PollFlags::OUT, deadline)?;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::os("sending option replies", e)),
        }
    }
    Ok(())
}

/// Waits until the socket is ready, or errors when the negotiation's time is over.
fn wait(socket: impl AsFd, events: PollFlags, deadline: Instant) -> Result<(), Error> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    let socket: BorrowedFd<'_> = socket.as_fd();
    let mut fds = [PollFd::new(&socket, events)];
    match rustix::event::poll(&mut fds, Some(&timeout)) {
        Ok(0) => Err(Error::protocol("the client took too long to negotiate")),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(Error::os("waiting for the client", e)),
    }
}
