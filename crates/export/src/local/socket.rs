//! The socket file, and messages with a deadline.

use super::frame::{Frame, MAX_FRAME};
use crate::xenbus::number::sentence;
use pvblk_block::{Error, ErrorKind};
use pvblk_sys::{Poller, fdpass};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn address(path: &Path) -> Result<SocketAddrUnix, Error> {
    SocketAddrUnix::new(path).map_err(|_| {
        Error::config(format!(
            "{} can't be a socket: its path may have 107 bytes; use a shorter one",
            path.display()
        ))
    })
}

fn new_socket() -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| Error::os("making a socket", e))
}

/// Connects to a server's socket, waiting until `deadline` if its backlog is full.
pub fn dial(path: &Path, deadline: Instant) -> Result<OwnedFd, Error> {
    let at = address(path)?;
    let socket = new_socket()?;
    loop {
        let errno = match rustix::net::connect(&socket, &at) {
            Ok(()) => return Ok(socket),
            Err(e) => e,
        };
        if errno == Errno::AGAIN && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        }
        let what = match errno {
            Errno::NOENT | Errno::CONNREFUSED => "; is `pvblk serve` running there?",
            Errno::ACCESS => "; it is private to its owner",
            Errno::PROTOTYPE => "; it is not a pvblk socket",
            _ => "",
        };
        let kind = match errno {
            Errno::NOENT | Errno::CONNREFUSED => ErrorKind::Disconnected,
            _ => ErrorKind::Os,
        };
        return Err(Error::new(
            kind,
            format!("connecting to {}: {errno}{what}", path.display()),
        ));
    }
}

/// A listening socket and the file that names it; dropping it removes the file, if it is still ours.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    identity: (u64, u64),
}

impl Listener {
    /// Listens at `path`, mode 0600. A file left by a dead server is replaced; one that somebody answers at, or that is no socket, is an error.
    pub fn bind(path: &Path) -> Result<Listener, Error> {
        let os = |e: Errno| Error::os(format!("listening at {}", path.display()), e);
        let at = address(path)?;
        // Two servers that start together must not both find the other's fresh socket dead.
        let _guard = lock_directory(path);
        remove_stale(path, &at)?;
        let socket = new_socket()?;
        rustix::net::bind(&socket, &at).map_err(os)?;
        // Nobody can connect before `listen`, so the mode is in force in time.
        rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(os)?;
        let stat = rustix::fs::lstat(path).map_err(os)?;
        rustix::net::listen(&socket, 128).map_err(os)?;
        Ok(Listener {
            socket,
            path: path.to_owned(),
            identity: (stat.st_dev, stat.st_ino),
        })
    }

    /// The next front end; `None` if there is none now.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(fd) => Ok(Some(fd)),
            // A front end that gave up meanwhile isn't our error.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _guard = lock_directory(&self.path);
        if let Ok(stat) = rustix::fs::lstat(&self.path)
            && (stat.st_dev, stat.st_ino) == self.identity
        {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Locks the directory against other servers, for at most a second: somebody else may use the same lock for something longer.
fn lock_directory(path: &Path) -> Option<OwnedFd> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty()).ok()?;
    for _ in 0..100 {
        match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(dir),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(Duration::from_millis(10)),
            Err(_) => return None,
        }
    }
    None
}

fn remove_stale(path: &Path, at: &SocketAddrUnix) -> Result<(), Error> {
    let Ok(stat) = rustix::fs::lstat(path) else {
        return Ok(());
    };
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Err(Error::config(format!(
            "{} exists and is not a socket; choose another path",
            path.display()
        )));
    }
    match rustix::net::connect(new_socket()?, at) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path)
            .map_err(|e| Error::os(format!("removing the stale {}", path.display()), e)),
        Err(Errno::NOENT) => Ok(()),
        // Connected, backlog full, another socket type, no permission: somebody is there.
        _ => Err(Error::config(format!(
            "{} is in use by another server; stop it or choose another path",
            path.display()
        ))),
    }
}

/// Sends one message; with a deadline it waits for the peer to make room, without it a full socket is an error.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    frame: &Frame,
    fds: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> Result<(), Error> {
    let bytes = frame.encode().ok_or_else(|| {
        Error::config("a message of the handshake is too long; use shorter names or fewer queues")
    })?;
    let gone = |e: io::Error| Error::new(ErrorKind::Disconnected, format!("the peer is gone: {e}"));
    loop {
        match fdpass::send(socket, &bytes, fds) {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => match deadline {
                Some(deadline) => wait(socket, true, deadline)?,
                None => {
                    return Err(Error::new(
                        ErrorKind::Disconnected,
                        "the peer doesn't read its socket",
                    ));
                }
            },
            Err(e) => return Err(gone(e)),
        }
    }
}

/// What came in.
#[derive(Debug)]
pub(super) enum Received {
    Frame(Frame, Vec<OwnedFd>),
    Nothing,
    Closed,
}

/// Takes the next message without waiting. Errors if it isn't one, or has the wrong number of descriptors.
pub(super) fn receive(socket: BorrowedFd<'_>, scratch: &mut Vec<u8>) -> Result<Received, Error> {
    scratch.resize(MAX_FRAME, 0);
    let mut got = fdpass::recv(socket, scratch, false);
    // A peer that closed before it read all of ours: told once, and before what it sent last.
    if matches!(&got, Err(e) if e.kind() == io::ErrorKind::ConnectionReset) {
        got = fdpass::recv(socket, scratch, false);
    }
    let (n, fds) = match got {
        Ok(got) => got,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(Received::Nothing),
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            return Err(Error::protocol(format!(
                "a message of more than {MAX_FRAME} bytes or with too many descriptors"
            )));
        }
        Err(_) => return Ok(Received::Closed),
    };
    // An empty packet can't be told from the end; no peer of ours sends one.
    if n == 0 {
        return Ok(Received::Closed);
    }
    let frame = Frame::decode(&scratch[..n]).map_err(|e| Error::protocol(e.to_string()))?;
    if fds.len() != frame.descriptors() {
        return Err(Error::protocol(format!(
            "a message with {} descriptors that takes {}",
            fds.len(),
            frame.descriptors()
        )));
    }
    Ok(Received::Frame(frame, fds))
}

/// The reason that a peer gave before it closed, for an error that only says that it is gone.
pub(super) fn explain(socket: BorrowedFd<'_>, scratch: &mut Vec<u8>, error: Error) -> Error {
    if error.kind() == ErrorKind::Disconnected {
        while let Ok(Received::Frame(frame, _)) = receive(socket, scratch) {
            if let Frame::Error(text) = frame {
                return Error::new(ErrorKind::Disconnected, sentence(&text));
            }
        }
    }
    error
}

/// Waits until the socket can be read (or written). Errors at the deadline.
pub(super) fn wait(
    socket: BorrowedFd<'_>,
    for_write: bool,
    deadline: Instant,
) -> Result<(), Error> {
    let os = |e| Error::os("waiting for the peer", e);
    let poller = Poller::new().map_err(os)?;
    poller.add(socket, 0, for_write).map_err(os)?;
    // What can be read must not wake us while we wait to write.
    poller.set(socket, 0, !for_write, for_write).map_err(os)?;
    let mut events = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        poller.wait(&mut events, Some(left)).map_err(os)?;
        let ready = |e: &pvblk_sys::PollEvent| {
            if for_write {
                e.writable || e.hangup
            } else {
                e.readable
            }
        };
        if events.drain(..).any(|e| ready(&e)) {
            return Ok(());
        }
        if left.is_zero() {
            return Err(Error::new(
                ErrorKind::Disconnected,
                "the peer didn't answer in time",
            ));
        }
    }
}
