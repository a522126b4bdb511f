//! [`FileOpener`]: the system calls by which volumes reach files and devices by their names.

mod holder;
mod loops;
mod passed;
#[cfg(test)]
mod tests;

pub use holder::LockHolder;
pub use passed::{FileAnswer, FileCall, PassCall, PassedOpener, carry_out};

use glob::MatchOptions;
use rustix::fs::{FileType, Mode, OFlags};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens and looks up files by their names, for volumes and for a server's own files. Nothing of this crate reaches a file by its name in another way.
///
/// A call takes names, numbers and descriptors, and returns the same, so that another process can carry it out and pass descriptors back over a socket.
/// An error is one of a system call and has its number; callers write the texts. Relative names start at the working directory of the server.
///
/// Any call may wait for a medium.
pub trait FileOpener: fmt::Debug + Send + Sync {
    /// `open(2)`; the descriptor is closed by `exec`.
    fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd>;
    /// A new open file description of the file behind a descriptor, whatever is at its path by now.
    fn reopen(&self, file: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd>;
    /// `openat(2)` of a name in a folder, without a `/`.
    fn open_in(
        &self,
        folder: BorrowedFd<'_>,
        name: &str,
        flags: OFlags,
        mode: Mode,
    ) -> io::Result<OwnedFd>;
    /// `renameat(2)` in one folder; names without a `/`.
    fn rename_in(&self, folder: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()>;
    /// `mkdir(2)`
    fn make_folder(&self, path: &Path, mode: Mode) -> io::Result<()>;
    /// `stat(2)`, which follows symbolic links.
    fn stat(&self, path: &Path) -> io::Result<PathStat>;
    /// The absolute path without symbolic links: `realpath(3)`.
    fn real_path(&self, path: &Path) -> io::Result<PathBuf>;
    /// Names that match a pattern as in a shell (`*` ends at a `/` and leaves out names that begin with a dot), at most `most` of them, with folders that
    /// can't be read. `EINVAL` if the text is no pattern.
    fn expand(&self, pattern: &str, most: usize) -> io::Result<Vec<Match>>;
    /// The holder of a lock on the file, other than this descriptor. Slow: it looks at all processes.
    fn lock_holder(&self, file: BorrowedFd<'_>) -> LockHolder;
    /// A loop device over the file; of those that can't be written to none if the file is `read_only` too.
    fn loop_over(&self, file: BorrowedFd<'_>, read_only: bool) -> Option<PathBuf>;
    /// The text of a file in the kernel's folder of a block device, or of the disk that it is a partition of, such as `queue/rotational`.
    fn device_text(&self, device: u64, leaf: &str) -> io::Result<String>;
    /// The rule by which it refuses files (`EACCES`) that the system would open, for errors.
    fn rule(&self) -> Option<&'static str> {
        None
    }
}

/// The file that a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStat {
    /// Kind and permissions: `st_mode`.
    pub mode: u32,
    /// The number of a device file: `st_rdev`.
    pub device: u64,
}

impl PathStat {
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }
}

/// An entry of [`FileOpener::expand`].
#[derive(Debug)]
pub enum Match {
    Path(PathBuf),
    /// A folder that can't be read.
    Unreadable(PathBuf, io::Error),
}

/// As a shell.
pub(crate) const PATTERNS: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// Opens files in this process.
pub fn in_process() -> Arc<dyn FileOpener> {
    Arc::new(InProcess)
}

#[derive(Debug)]
struct InProcess;

impl FileOpener for InProcess {
    fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        let open = || rustix::fs::open(path, flags, mode);
        Ok(rustix::io::retry_on_intr(open)?)
    }

    fn reopen(&self, file: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.open(Path::new(&path), flags, Mode::empty())
    }

    fn open_in(
        &self,
        folder: BorrowedFd<'_>,
        name: &str,
        flags: OFlags,
        mode: Mode,
    ) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(folder, is_name(name)?, flags, mode);
        Ok(rustix::io::retry_on_intr(open)?)
    }

    fn rename_in(&self, folder: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()> {
        let (from, to) = (is_name(from)?, is_name(to)?);
        Ok(rustix::fs::renameat(folder, from, folder, to)?)
    }

    fn make_folder(&self, path: &Path, mode: Mode) -> io::Result<()> {
        Ok(rustix::fs::mkdir(path, mode)?)
    }

    fn stat(&self, path: &Path) -> io::Result<PathStat> {
        let stat = rustix::fs::stat(path)?;
        Ok(PathStat {
            mode: stat.st_mode,
            device: stat.st_rdev,
        })
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        std::fs::canonicalize(path)
    }

    fn expand(&self, pattern: &str, most: usize) -> io::Result<Vec<Match>> {
        let found = glob::glob_with(pattern, PATTERNS);
        let found = found.map_err(|_| rustix::io::Errno::INVAL)?;
        let entries = found.take(most).map(|entry| match entry {
            Ok(path) => Match::Path(path),
            Err(e) => Match::Unreadable(e.path().to_owned(), e.into()),
        });
        Ok(entries.collect())
    }

    fn lock_holder(&self, file: BorrowedFd<'_>) -> LockHolder {
        holder::find(file)
    }

    fn loop_over(&self, file: BorrowedFd<'_>, read_only: bool) -> Option<PathBuf> {
        loops::find(file, read_only)
    }

    fn device_text(&self, device: u64, leaf: &str) -> io::Result<String> {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let folder = format!("/sys/dev/block/{major}:{minor}");
        // A partition has no queue of its own.
        std::fs::read_to_string(format!("{folder}/{leaf}"))
            .or_else(|_| std::fs::read_to_string(format!("{folder}/../{leaf}")))
    }
}

/// A name that leads nowhere else than into the folder.
fn is_name(name: &str) -> rustix::io::Result<&str> {
    match name {
        "" | "." | ".." => Err(rustix::io::Errno::INVAL),
        name if name.contains('/') => Err(rustix::io::Errno::INVAL),
        name => Ok(name),
    }
}
