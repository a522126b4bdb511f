//! A Unix socket's file: private, and nobody else's.

use pvblk_block::Error;
use pvblk_sys::socket::unix;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
pub use rustix::net::SocketType;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn listening(path: &Path) -> String {
    format!("listening at {}", path.display())
}

/// A listening socket, its path, and the owner of the file that names it.
#[derive(Debug)]
pub struct SocketFile {
    socket: OwnedFd,
    path: PathBuf,
    #[expect(dead_code, reason = "its drop removes the file")]
    name: Box<dyn NameOwner>,
}

/// The processes that may connect to a socket's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// Permissions, as for chmod(2).
    pub mode: u32,
    /// The file's group; `None`: that of this process.
    pub group: Option<u32>,
}

impl Default for SocketAccess {
    /// Its owner alone.
    fn default() -> SocketAccess {
        SocketAccess {
            mode: 0o600,
            group: None,
        }
    }
}

/// The owner of a socket's file: dropping it removes the file.
pub trait NameOwner: fmt::Debug + Send + Sync {}

/// The file of a socket that this process made; dropping it removes the file, if it is still ours.
#[derive(Debug)]
pub struct SocketName {
    path: PathBuf,
    identity: (u64, u64),
}

impl NameOwner for SocketName {}

impl SocketFile {
    /// Listens at `path`, mode 0600. A file left by a dead server is replaced; one that somebody answers at, or that is
    /// no socket, is an error.
    pub fn bind(path: &Path, kind: SocketType) -> Result<SocketFile, Error> {
        SocketFile::bind_for(path, kind, SocketAccess::default())
    }

    /// As [`SocketFile::bind`], for these processes.
    pub fn bind_for(
        path: &Path,
        kind: SocketType,
        access: SocketAccess,
    ) -> Result<SocketFile, Error> {
        let (socket, name) = SocketFile::make(path, kind, access)?;
        Ok(SocketFile::passed(socket, path, Box::new(name)))
    }

    /// A socket that another process made and listens already; `name` removes its file.
    pub fn passed(socket: OwnedFd, path: &Path, name: Box<dyn NameOwner>) -> SocketFile {
        SocketFile {
            socket,
            path: path.to_owned(),
            name,
        }
    }

    /// As [`SocketFile::bind_for`], for another process: its socket, and the file.
    pub fn make(
        path: &Path,
        kind: SocketType,
        access: SocketAccess,
    ) -> Result<(OwnedFd, SocketName), Error> {
        let os = |e: Errno| Error::os(listening(path), e);
        let (socket, at) = unix(path, kind).map_err(|e| Error::os(listening(path), e))?;
        // Two servers that start together must not both find the other's fresh socket dead.
        let _guard = lock_directory(path);
        remove_stale(path, kind)?;
        rustix::net::bind(&socket, &at).map_err(os)?;
        // Nobody can connect before `listen`, so the mode is in force in time.
        if let Some(group) = access.group {
            let group = Some(rustix::fs::Gid::from_raw(group));
            rustix::fs::chown(path, None, group).map_err(os)?;
        }
        rustix::fs::chmod(path, Mode::from_raw_mode(access.mode & 0o666)).map_err(os)?;
        let stat = rustix::fs::lstat(path).map_err(os)?;
        rustix::net::listen(&socket, 128).map_err(os)?;
        let name = SocketName {
            path: path.to_owned(),
            identity: (stat.st_dev, stat.st_ino),
        };
        Ok((socket, name))
    }

    /// The next connection, which doesn't block; `None` if there is none now.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(fd) => Ok(Some(fd)),
            // A peer that gave up meanwhile isn't our error.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for SocketFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for SocketName {
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

fn remove_stale(path: &Path, kind: SocketType) -> Result<(), Error> {
    let Ok(stat) = rustix::fs::lstat(path) else {
        return Ok(());
    };
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Err(Error::config(format!(
            "{} exists and is not a socket; choose another path",
            path.display()
        )));
    }
    let (probe, at) = unix(path, kind).map_err(|e| Error::os(listening(path), e))?;
    match rustix::net::connect(&probe, &at) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sockets_are_private_and_only_stale_ones_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let bind = || SocketFile::bind(&path, SocketType::STREAM);
        let first = bind().unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let e = bind().unwrap_err().to_string();
        assert!(e.contains("in use by another server"), "{e}");
        drop(first);
        assert!(!path.exists());
        // A socket whose server is gone.
        drop(UnixListener::bind(&path).unwrap());
        let second = bind().unwrap();
        // Somebody else's file under our name stays.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "x").unwrap();
        drop(second);
        assert!(path.exists());
        let e = bind().unwrap_err().to_string();
        assert!(e.contains("is not a socket"), "{e}");
    }
}
