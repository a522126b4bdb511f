//! Connecting to a server's Unix socket.

use pvblk_block::{Error, ErrorKind};
use pvblk_sys::socket::unix;
use rustix::io::Errno;
pub use rustix::net::SocketType;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Connects to a server's socket, waiting until `deadline` if its backlog is full. The socket doesn't block.
pub fn dial(path: &Path, kind: SocketType, deadline: Instant) -> Result<OwnedFd, Error> {
    let connecting = || format!("connecting to {}", path.display());
    let (socket, at) = unix(path, kind).map_err(|e| Error::os(connecting(), e))?;
    loop {
        let errno = match rustix::net::connect(&socket, &at) {
            Ok(()) => return Ok(socket),
            Err(e) => e,
        };
        if errno == Errno::AGAIN && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        }
        let advice = match errno {
            Errno::NOENT | Errno::CONNREFUSED => Some("is `pvblk serve` running there?"),
            Errno::ACCESS => Some("it is private to its owner"),
            Errno::PROTOTYPE => Some("it is not such a socket of pvblk's"),
            _ => None,
        };
        let kind = match errno {
            Errno::NOENT | Errno::CONNREFUSED => ErrorKind::Disconnected,
            _ => ErrorKind::Os,
        };
        let failed = Error::caused(kind, connecting(), errno);
        return Err(match advice {
            Some(advice) => failed.advise(advice),
            None => failed,
        });
    }
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
