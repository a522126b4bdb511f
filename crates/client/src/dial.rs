//! Connections to servers' sockets: [`Dialer`] makes them, in this process or in another one.

use pvblk_block::{Error, ErrorKind};
pub use pvblk_protocol::nbd::NbdAddr;
use pvblk_sys::socket::unix;
use rustix::io::Errno;
pub use rustix::net::SocketType;
use std::fmt;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Makes the connections of clients, the first and those after the server went away. No client of this crate but `rbd` connects in another way, so that another
/// process can make the connection and pass it.
pub trait Dialer: fmt::Debug + Send + Sync {
    /// A socket that is connected and doesn't block. Waits at most `timeout` for each address of a host, and beside that for the look-up of its name.
    fn connection(
        &self,
        address: &NbdAddr,
        kind: SocketType,
        timeout: Duration,
    ) -> io::Result<OwnedFd>;
}

/// Connects in this process.
pub fn in_process() -> Arc<dyn Dialer> {
    Arc::new(InProcess)
}

#[derive(Debug)]
struct InProcess;

impl Dialer for InProcess {
    fn connection(
        &self,
        address: &NbdAddr,
        kind: SocketType,
        timeout: Duration,
    ) -> io::Result<OwnedFd> {
        match address {
            NbdAddr::Unix(path) => connect_unix(path, kind, Instant::now() + timeout),
            NbdAddr::Tcp { host, port } => connect_tcp(host, *port, timeout),
        }
    }
}

/// A server that isn't accepting has a backlog, and a blocking connect would wait for it without end.
fn connect_unix(path: &Path, kind: SocketType, deadline: Instant) -> io::Result<OwnedFd> {
    let (socket, at) = unix(path, kind)?;
    loop {
        match rustix::net::connect(&socket, &at) {
            Ok(()) => return Ok(socket),
            Err(Errno::AGAIN) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// Tries all addresses of a host, in order.
fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<OwnedFd> {
    let mut last = io::Error::other("the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                stream.set_nonblocking(true)?;
                return Ok(stream.into());
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Connects to a server's Unix socket in this process, waiting until `deadline` if its backlog is full. The socket doesn't block.
pub fn dial(path: &Path, kind: SocketType, deadline: Instant) -> Result<OwnedFd, Error> {
    dial_by(&InProcess, path, kind, deadline)
}

/// As [`dial`], by this dialer.
pub fn dial_by(
    dialer: &dyn Dialer,
    path: &Path,
    kind: SocketType,
    deadline: Instant,
) -> Result<OwnedFd, Error> {
    let address = NbdAddr::Unix(path.to_owned());
    let left = deadline.saturating_duration_since(Instant::now());
    let failed = match dialer.connection(&address, kind, left) {
        Ok(socket) => return Ok(socket),
        Err(e) => e,
    };
    let connecting = format!("connecting to {}", path.display());
    let errno = failed.raw_os_error().map(Errno::from_raw_os_error);
    let advice = match errno {
        Some(Errno::NOENT | Errno::CONNREFUSED) => Some("is `pvblk serve` running there?"),
        Some(Errno::ACCESS) => Some("it is private to its owner"),
        Some(Errno::PROTOTYPE) => Some("it is not such a socket of pvblk's"),
        _ => None,
    };
    let kind = match errno {
        Some(Errno::NOENT | Errno::CONNREFUSED) => ErrorKind::Disconnected,
        _ => ErrorKind::Os,
    };
    let failed = Error::caused(kind, connecting, failed);
    Err(match advice {
        Some(advice) => failed.advise(advice),
        None => failed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_connect_keeps_its_cause_and_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let e = dial(&path, SocketType::STREAM, Instant::now()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Disconnected);
        assert_eq!(e.raw_os_error(), Some(Errno::NOENT.raw_os_error()));
        let line = format!(
            "connecting to {}: {}; is `pvblk serve` running there?",
            path.display(),
            std::io::Error::from(Errno::NOENT)
        );
        assert_eq!(e.to_string(), line);
        // A disk's name before it changes neither.
        let e = e.context("disk a");
        assert_eq!(e.kind(), ErrorKind::Disconnected);
        assert_eq!(e.raw_os_error(), Some(Errno::NOENT.raw_os_error()));
        assert_eq!(e.to_string(), format!("disk a: {line}"));
    }
}
