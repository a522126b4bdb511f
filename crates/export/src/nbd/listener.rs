//! Sockets that a server listens at: private unless the user says otherwise.

use super::window;
use crate::socket_file::{SocketFile, SocketType};
use pvblk_block::Error;
use pvblk_protocol::nbd::NbdAddr;
use rustix::net::sockopt;
use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A listening socket.
pub(super) enum Listener {
    Unix(SocketFile),
    Tcp(TcpListener),
}

impl Listener {
    pub(super) fn bind(addr: &NbdAddr, allow_remote: bool) -> Result<Listener, Error> {
        match addr {
            NbdAddr::Unix(path) => SocketFile::bind(path, SocketType::STREAM).map(Listener::Unix),
            NbdAddr::Tcp { host, port } => bind_tcp(host, *port, allow_remote).map(Listener::Tcp),
        }
    }

    /// The address with the port that was really taken.
    pub(super) fn local_addr(&self) -> Result<NbdAddr, Error> {
        match self {
            Listener::Unix(file) => Ok(NbdAddr::Unix(file.path().to_owned())),
            Listener::Tcp(l) => {
                let a = l
                    .local_addr()
                    .map_err(|e| Error::os("asking for the TCP port", e))?;
                Ok(NbdAddr::Tcp {
                    host: a.ip().to_string(),
                    port: a.port(),
                })
            }
        }
    }

    /// The next connection, if there is one, as a blocking socket.
    pub(super) fn accept(&self) -> std::io::Result<Option<(OwnedFd, Peer)>> {
        match self {
            Listener::Unix(file) => {
                let Some(s) = file.accept()? else {
                    return Ok(None);
                };
                let s = UnixStream::from(s);
                s.set_nonblocking(false)?;
                let peer = match pvblk_sys::socket::peer(s.as_fd()) {
                    Ok((user, process)) => Peer::Process(user, process),
                    Err(_) => Peer::Unknown,
                };
                // Best effort, as all of the window.
                let _ = sockopt::set_socket_send_buffer_size(&s, window::NARROW);
                Ok(Some((s.into(), peer)))
            }
            Listener::Tcp(l) => {
                let (s, from) = match l.accept() {
                    Ok(accepted) => accepted,
                    // A peer that gave up meanwhile isn't our error.
                    Err(e) if matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted) => {
                        return Ok(None);
                    }
                    Err(e) => return Err(e),
                };
                s.set_nonblocking(false)?;
                s.set_nodelay(true)?;
                notice_death(&s)?;
                Ok(Some((s.into(), Peer::of(from.ip()))))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(file) => file.as_fd(),
            Listener::Tcp(l) => l.as_fd(),
        }
    }
}

/// The peer of a connection, as far as it can be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    /// A process of this machine: its user and its number.
    Process(u32, i32),
    /// A host. Of IPv6 addresses, those of one network (64 bits) are one.
    Host(u128),
    Unknown,
}

impl Peer {
    fn of(address: IpAddr) -> Peer {
        Peer::Host(match address.to_canonical() {
            IpAddr::V4(a) => u128::from(u32::from(a)),
            IpAddr::V6(a) => u128::from(a) >> 64 << 64,
        })
    }
}

/// A host that is silent is asked for a sign of life after this time,
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
/// again after this one,
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(15);
/// and so often; then the connection is over: two minutes after the last sign at most.
const KEEPALIVE_TIMES: u32 = 4;
/// So is one that doesn't acknowledge for so long what was sent to it.
const UNACKNOWLEDGED: Duration = Duration::from_secs(60);

/// Has the system notice that the client's host is gone.
fn notice_death(s: &TcpStream) -> std::io::Result<()> {
    sockopt::set_socket_keepalive(s, true)?;
    sockopt::set_tcp_keepidle(s, KEEPALIVE_AFTER)?;
    sockopt::set_tcp_keepintvl(s, KEEPALIVE_AGAIN)?;
    sockopt::set_tcp_keepcnt(s, KEEPALIVE_TIMES)?;
    sockopt::set_tcp_user_timeout(s, UNACKNOWLEDGED.as_millis() as u32)?;
    Ok(())
}

/// Listens at a TCP port, without blocking; an address that other machines reach is refused unless `allow_remote`.
pub fn bind_tcp(host: &str, port: u16, allow_remote: bool) -> Result<TcpListener, Error> {
    let addrs: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Error::os(format!("looking up {host}"), e))?
        .collect();
    if !allow_remote && let Some(a) = addrs.iter().find(|a| !a.ip().is_loopback()) {
        return Err(Error::config(format!(
            "{} is reachable from other machines, and NBD without TLS has no authentication: use 127.0.0.1, add tls=DIR, or give --allow-remote",
            a.ip()
        )));
    }
    let listener = TcpListener::bind(addrs.as_slice())
        .map_err(|e| Error::os(format!("listening on {host} port {port}"), e))?;
    listener
        .set_nonblocking(true)
        .map_err(|e| Error::os("making the listener non-blocking", e))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_is_gone_is_noticed() {
        let addr: NbdAddr = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(&addr, false).unwrap();
        let NbdAddr::Tcp { port, .. } = listener.local_addr().unwrap() else {
            panic!("not TCP");
        };
        let _client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (s, peer) = loop {
            match listener.accept().unwrap() {
                None => std::thread::yield_now(),
                Some(accepted) => break accepted,
            }
        };
        assert_eq!(peer, Peer::of("::ffff:127.0.0.1".parse().unwrap()));
        assert!(sockopt::socket_keepalive(&s).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&s).unwrap(), KEEPALIVE_AFTER);
        assert_eq!(sockopt::tcp_keepintvl(&s).unwrap(), KEEPALIVE_AGAIN);
        assert_eq!(sockopt::tcp_keepcnt(&s).unwrap(), KEEPALIVE_TIMES);
        assert_eq!(sockopt::tcp_user_timeout(&s).unwrap(), 60_000);
    }

    #[test]
    fn remote_addresses_need_permission() {
        let any: NbdAddr = "tcp:0.0.0.0:0".parse().unwrap();
        let e = Listener::bind(&any, false).err().unwrap();
        assert!(e.to_string().contains("other machines"), "{e}");
        let l = Listener::bind(&any, true).unwrap();
        let NbdAddr::Tcp { port, .. } = l.local_addr().unwrap() else {
            panic!("not TCP");
        };
        assert_ne!(port, 0);
    }
}
