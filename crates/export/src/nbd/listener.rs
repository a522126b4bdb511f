//! Where a server listens: addresses, and sockets that are private unless the user says otherwise.

use super::config::NbdConfig;
use super::window;
use crate::socket_file::{SocketFile, SocketType};
use pvblk_block::Error;
use std::fmt;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;

/// Where to listen: `unix:PATH` or `tcp:HOST:PORT` (IPv6 hosts in brackets; port 0: any free one).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddr {
    /// A Unix socket at this path.
    Unix(PathBuf),
    /// A TCP port of this host.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// Port; 0: any free one.
        port: u16,
    },
}

impl FromStr for NbdAddr {
    type Err = Error;

    fn from_str(s: &str) -> Result<NbdAddr, Error> {
        let bad = || {
            Error::config(format!(
                "NBD address {s:?}: write unix:PATH, tcp:HOST:PORT or tcp:[IPV6]:PORT"
            ))
        };
        if let Some(path) = s.strip_prefix("unix:") {
            return if path.is_empty() {
                Err(bad())
            } else {
                Ok(NbdAddr::Unix(path.into()))
            };
        }
        let rest = s.strip_prefix("tcp:").ok_or_else(bad)?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(bad)?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = match bare {
            Some(h) => h,
            None if host.contains(':') => return Err(bad()),
            None => host,
        };
        if host.is_empty() {
            return Err(bad());
        }
        Ok(NbdAddr::Tcp {
            host: host.to_owned(),
            port: port.parse().map_err(|_| bad())?,
        })
    }
}

impl fmt::Display for NbdAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdAddr::Unix(path) => write!(f, "unix:{}", path.display()),
            NbdAddr::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            NbdAddr::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

/// A listening socket.
pub(super) enum Listener {
    Unix(SocketFile),
    Tcp(TcpListener),
}

impl Listener {
    pub(super) fn bind(addr: &NbdAddr, config: &NbdConfig) -> Result<Listener, Error> {
        match addr {
            NbdAddr::Unix(path) => SocketFile::bind(path, SocketType::STREAM).map(Listener::Unix),
            NbdAddr::Tcp { host, port } => bind_tcp(host, *port, config.allow_remote),
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
    pub(super) fn accept(&self) -> std::io::Result<Stream> {
        match self {
            Listener::Unix(file) => {
                let none = std::io::ErrorKind::WouldBlock;
                let s = UnixStream::from(file.accept()?.ok_or(none)?);
                s.set_nonblocking(false)?;
                // Best effort, as all of the window.
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&s, window::NARROW);
                Ok(Stream::Unix(s))
            }
            Listener::Tcp(l) => {
                let (s, _) = l.accept()?;
                s.set_nonblocking(false)?;
                s.set_nodelay(true)?;
                Ok(Stream::Tcp(s))
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

/// An accepted connection.
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl From<Stream> for OwnedFd {
    fn from(s: Stream) -> OwnedFd {
        match s {
            Stream::Unix(s) => s.into(),
            Stream::Tcp(s) => s.into(),
        }
    }
}

fn bind_tcp(host: &str, port: u16, allow_remote: bool) -> Result<Listener, Error> {
    let addrs: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Error::os(format!("looking up {host}"), e))?
        .collect();
    if !allow_remote && let Some(a) = addrs.iter().find(|a| !a.ip().is_loopback()) {
        return Err(Error::config(format!(
            "{} is reachable from other machines and NBD has no authentication here: use 127.0.0.1, or allow remote clients in so many words",
            a.ip()
        )));
    }
    let listener = TcpListener::bind(addrs.as_slice())
        .map_err(|e| Error::os(format!("listening on {host} port {port}"), e))?;
    listener
        .set_nonblocking(true)
        .map_err(|e| Error::os("making the listener non-blocking", e))?;
    Ok(Listener::Tcp(listener))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_printed() {
        for s in [
            "unix:/run/x",
            "tcp:127.0.0.1:10809",
            "tcp:localhost:0",
            "tcp:[::1]:9",
        ] {
            assert_eq!(s.parse::<NbdAddr>().unwrap().to_string(), s);
        }
        for s in [
            "",
            "unix:",
            "tcp:1",
            "tcp::5",
            "tcp:::1:5",
            "tcp:h:99999",
            "udp:h:1",
        ] {
            assert!(s.parse::<NbdAddr>().is_err(), "{s}");
        }
    }

    #[test]
    fn remote_addresses_need_permission() {
        let config = NbdConfig::default();
        let any: NbdAddr = "tcp:0.0.0.0:0".parse().unwrap();
        let e = Listener::bind(&any, &config).err().unwrap();
        assert!(e.to_string().contains("other machines"), "{e}");
        let remote = NbdConfig {
            allow_remote: true,
            ..config
        };
        let l = Listener::bind(&any, &remote).unwrap();
        let NbdAddr::Tcp { port, .. } = l.local_addr().unwrap() else {
            panic!("not TCP");
        };
        assert_ne!(port, 0);
    }
}
