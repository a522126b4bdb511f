//! Where a server listens: addresses, and sockets that are private unless the user says otherwise.

use super::config::NbdConfig;
use super::window;
use pvblk_block::Error;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fmt;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

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

/// A listening socket. Dropping it removes a Unix socket's file.
pub(super) enum Listener {
    Unix {
        socket: UnixListener,
        path: PathBuf,
        /// Device and inode of the file that we made: another server's is not ours to remove.
        id: (u64, u64),
    },
    Tcp(TcpListener),
}

impl Listener {
    pub(super) fn bind(addr: &NbdAddr, config: &NbdConfig) -> Result<Listener, Error> {
        match addr {
            NbdAddr::Unix(path) => bind_unix(path),
            NbdAddr::Tcp { host, port } => bind_tcp(host, *port, config.allow_remote),
        }
    }

    /// The address with the port that was really taken.
    pub(super) fn local_addr(&self) -> Result<NbdAddr, Error> {
        match self {
            Listener::Unix { path, .. } => Ok(NbdAddr::Unix(path.clone())),
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
            Listener::Unix { socket, .. } => {
                let (s, _) = socket.accept()?;
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
            Listener::Unix { socket, .. } => socket.as_fd(),
            Listener::Tcp(l) => l.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix { path, id, .. } = self
            && file_id(path).is_some_and(|now| now == *id)
        {
            let _ = std::fs::remove_file(path);
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

fn file_id(path: &Path) -> Option<(u64, u64)> {
    let m = std::fs::symlink_metadata(path).ok()?;
    Some((m.dev(), m.ino()))
}

/// Removes a socket on which nobody answers; errors if somebody does, or if it is no socket.
fn remove_stale(path: &Path) -> Result<(), Error> {
    let Ok(meta) = std::fs::symlink_metadata(path) else {
        return Ok(());
    };
    let shown = path.display();
    if !meta.file_type().is_socket() {
        return Err(Error::config(format!(
            "{shown} exists and is no socket: choose another path"
        )));
    }
    match UnixStream::connect(path) {
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)
            .map_err(|e| Error::os(format!("removing the stale socket {shown}"), e)),
        Err(e) => Err(Error::os(format!("looking whether {shown} is in use"), e)),
        Ok(_) => Err(Error::config(format!(
            "another server answers on {shown}: stop it or choose another path"
        ))),
    }
}

fn bind_unix(path: &Path) -> Result<Listener, Error> {
    let shown = path.display();
    let failed = |e: rustix::io::Errno| Error::os(format!("listening on {shown}"), e);
    remove_stale(path)?;
    let addr = SocketAddrUnix::new(path)
        .map_err(|e| Error::os(format!("{shown}: a socket's path has at most 107 bytes"), e))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(failed)?;
    rustix::net::bind(&fd, &addr).map_err(failed)?;
    let socket = UnixListener::from(fd);
    let listener = Listener::Unix {
        socket,
        path: path.to_owned(),
        id: file_id(path).unwrap_or_default(),
    };
    // Nobody can connect before `listen`, so there is no moment at which others could.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(|e| Error::os(format!("making {shown} private"), e))?;
    rustix::net::listen(&listener, BACKLOG).map_err(failed)?;
    Ok(listener)
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

    fn temp(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("pvblk-nbd-{}-{name}", std::process::id()))
    }

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
    fn unix_sockets_are_private_and_only_stale_ones_are_replaced() {
        let path = temp("stale");
        let addr = NbdAddr::Unix(path.clone());
        let config = NbdConfig::default();
        let first = Listener::bind(&addr, &config).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let e = Listener::bind(&addr, &config).err().unwrap();
        assert!(e.to_string().contains("another server answers"), "{e}");
        drop(first);
        assert!(!path.exists());
        // A socket whose server is gone.
        drop(UnixListener::bind(&path).unwrap());
        let second = Listener::bind(&addr, &config).unwrap();
        // Somebody else's file under our name stays.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "x").unwrap();
        drop(second);
        assert!(path.exists());
        let e = Listener::bind(&addr, &config).err().unwrap();
        assert!(e.to_string().contains("no socket"), "{e}");
        std::fs::remove_file(&path).unwrap();
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
