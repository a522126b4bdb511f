//! The files that the process that serves may ask for.

use anyhow::{Context, Result};
use pvblk_backend::{RateLimit, ratelimited};
use pvblk_volume::{FileOpener, LockHolder, Match, PathStat, in_process};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens files that the configuration names, and those in folders that it allows. A path is judged by the file that it leads to: the file is looked up first, and
/// the one that was looked up is opened.
#[derive(Debug)]
pub struct Policy {
    opener: Arc<dyn FileOpener>,
    /// Without symbolic links, as all of these.
    files: Vec<PathBuf>,
    /// Files that may be read and not written to.
    read_only: Vec<PathBuf>,
    /// Everything below them is allowed.
    folders: Vec<PathBuf>,
    refused: RateLimit,
}

impl Policy {
    /// Files needn't exist yet. A folder that doesn't is an error.
    pub fn new(files: &[PathBuf], read_only: &[PathBuf], folders: &[PathBuf]) -> Result<Policy> {
        let opener = in_process();
        let missing = |path: &PathBuf| path.display().to_string();
        let found = |file: &PathBuf| real(&*opener, file).with_context(|| missing(file));
        let files: Result<_> = files.iter().map(found).collect();
        let read_only: Result<_> = read_only.iter().map(found).collect();
        let folders: Result<_> = folders
            .iter()
            .map(|f| opener.real_path(f).with_context(|| missing(f)))
            .collect();
        Ok(Policy {
            files: files?,
            read_only: read_only?,
            folders: folders?,
            opener,
            refused: RateLimit::default(),
        })
    }

    /// Fails unless a socket or folder may be made at `path`, whose folder is there.
    pub fn may_make(&self, path: &Path) -> io::Result<()> {
        self.judge(&real(&*self.opener, path)?, Access::Write)
    }

    fn judge(&self, real: &Path, access: Access) -> io::Result<()> {
        let is_it = |file: &PathBuf| file == real;
        let below = |folder: &PathBuf| real.starts_with(folder);
        if self.read_only.iter().any(is_it) {
            if access == Access::Read {
                return Ok(());
            }
        } else if self.files.iter().any(is_it) || self.folders.iter().any(below) {
            return Ok(());
        }
        ratelimited!(
            warn,
            self.refused,
            "the server asked for {}, which no disk of the configuration names and no --open-in allows",
            real.display()
        );
        Err(Errno::ACCESS.into())
    }

    /// Judges an open file.
    fn judge_opened(&self, file: BorrowedFd<'_>, access: Access) -> io::Result<()> {
        self.judge(&path_of(file)?, access)
    }
}

/// The use of a file that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl Access {
    fn of(flags: OFlags) -> Access {
        let writes = OFlags::CREATE | OFlags::TRUNC | OFlags::APPEND;
        match flags & OFlags::RWMODE == OFlags::RDONLY && !flags.intersects(writes) {
            true => Access::Read,
            false => Access::Write,
        }
    }
}

/// The path of an open file or folder.
pub(super) fn path_of(file: BorrowedFd<'_>) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Without rights to run it, which would be the parent's for whoever runs it if the file also set the user.
fn plain(mode: Mode) -> Mode {
    mode & Mode::from_raw_mode(0o666)
}

/// A path without symbolic links; the file itself needn't exist.
pub(super) fn real(opener: &dyn FileOpener, path: &Path) -> io::Result<PathBuf> {
    match opener.real_path(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let name = path.file_name().ok_or(Errno::INVAL)?;
            Ok(opener.real_path(folder_of(path))?.join(name))
        }
        found => found,
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

impl FileOpener for Policy {
    fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let seen = match self.opener.open(
            path,
            OFlags::PATH | (flags & OFlags::NOFOLLOW),
            Mode::empty(),
        ) {
            Ok(seen) => seen,
            Err(e) if e.kind() == io::ErrorKind::NotFound && flags.contains(OFlags::CREATE) => {
                let name = path.file_name().ok_or(Errno::INVAL)?;
                let is_folder = OFlags::PATH | OFlags::DIRECTORY;
                let folder = self
                    .opener
                    .open(folder_of(path), is_folder, Mode::empty())?;
                return self.open_in(
                    folder.as_fd(),
                    name.to_str().ok_or(Errno::INVAL)?,
                    flags,
                    mode,
                );
            }
            Err(e) => return Err(e),
        };
        self.judge_opened(seen.as_fd(), Access::of(flags))?;
        if flags.contains(OFlags::CREATE | OFlags::EXCL) {
            return Err(Errno::EXIST.into());
        }
        self.opener
            .reopen(seen.as_fd(), flags - OFlags::CREATE - OFlags::NOFOLLOW)
    }

    fn reopen(&self, file: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        self.judge_opened(file, Access::of(flags))?;
        self.opener.reopen(file, flags)
    }

    fn open_in(
        &self,
        folder: BorrowedFd<'_>,
        name: &str,
        flags: OFlags,
        mode: Mode,
    ) -> io::Result<OwnedFd> {
        self.judge(&path_of(folder)?.join(name), Access::of(flags))?;
        // A link in the folder may lead out of it.
        self.opener
            .open_in(folder, name, flags | OFlags::NOFOLLOW, plain(mode))
    }

    fn rename_in(&self, folder: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()> {
        let path = path_of(folder)?;
        self.judge(&path.join(from), Access::Write)?;
        self.judge(&path.join(to), Access::Write)?;
        self.opener.rename_in(folder, from, to)
    }

    fn make_folder(&self, path: &Path, mode: Mode) -> io::Result<()> {
        self.may_make(path)?;
        let mode = mode & Mode::from_raw_mode(0o777);
        self.opener.make_folder(path, mode)
    }

    fn stat(&self, path: &Path) -> io::Result<PathStat> {
        self.opener.stat(path)
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        self.opener.real_path(path)
    }

    fn expand(&self, pattern: &str, most: usize) -> io::Result<Vec<Match>> {
        let mut found = self.opener.expand(pattern, most)?;
        found.retain(|one| match one {
            Match::Path(path) => {
                // A link that leads nowhere is where it is.
                let path = real(&*self.opener, path);
                path.is_ok_and(|path| self.folders.iter().any(|f| path.starts_with(f)))
            }
            Match::Unreadable(..) => true,
        });
        Ok(found)
    }

    fn lock_holder(&self, file: BorrowedFd<'_>) -> LockHolder {
        self.opener.lock_holder(file)
    }

    fn loop_over(&self, file: BorrowedFd<'_>, read_only: bool) -> Option<PathBuf> {
        self.opener.loop_over(file, read_only)
    }

    fn device_text(&self, device: u64, leaf: &str) -> io::Result<String> {
        if leaf.split('/').any(|part| part == "..") {
            return Err(Errno::INVAL.into());
        }
        self.opener.device_text(device, leaf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn denied<T>(result: io::Result<T>) -> bool {
        result.is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied)
    }

    #[test]
    fn files_are_judged_by_where_they_are_and_not_by_their_names() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        let (allowed, other) = (at("allowed"), at("other"));
        for folder in [&allowed, &other] {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::write(other.join("secret"), "x").unwrap();
        std::fs::write(at("named"), "x").unwrap();
        std::fs::write(at("settings"), "x").unwrap();
        std::fs::write(allowed.join("in"), "x").unwrap();
        symlink(other.join("secret"), allowed.join("link")).unwrap();
        symlink(&other, allowed.join("way")).unwrap();
        symlink(at("named"), at("alias")).unwrap();
        let policy = Policy::new(
            &[at("named"), at("new")],
            &[at("settings")],
            std::slice::from_ref(&allowed),
        )
        .unwrap();
        let rw = OFlags::RDWR | OFlags::CREATE;
        let open = |path: PathBuf| policy.open(&path, rw, Mode::from(0o600));
        for right in [
            at("named"),
            at("new"),
            at("alias"),
            allowed.join("in"),
            allowed.join("made"),
        ] {
            open(right).unwrap();
        }
        for wrong in [
            other.join("secret"),
            other.join("made"),
            allowed.join("link"),
            allowed.join("way/secret"),
            allowed.join("way/made"),
            allowed.join("../other/secret"),
            at("else"),
            "/proc/self/mem".into(),
        ] {
            assert!(denied(open(wrong.clone())), "{}", wrong.display());
        }
        assert!(!other.join("made").exists());
        // Settings are read and not written to, by whatever way.
        policy
            .open(&at("settings"), OFlags::RDONLY, Mode::empty())
            .unwrap();
        for flags in [OFlags::RDWR, OFlags::WRONLY, OFlags::RDONLY | OFlags::TRUNC] {
            let opened = policy.open(&at("settings"), flags, Mode::empty());
            assert!(denied(opened), "{flags:?}");
        }
        let read = in_process().open(&at("settings"), OFlags::RDONLY, Mode::empty());
        assert!(denied(policy.reopen(read.unwrap().as_fd(), OFlags::RDWR)));
        assert!(denied(policy.may_make(&at("settings"))));
        // Nobody runs a file that was made.
        let all = Mode::from_raw_mode(0o6777);
        let made = policy.open(&allowed.join("program"), rw, all).unwrap();
        let mode = std::fs::File::from(made).metadata().unwrap().permissions();
        assert_eq!(mode.mode() & 0o7111, 0);
        let folder = |path: &Path| {
            in_process()
                .open(path, OFlags::RDONLY, Mode::empty())
                .unwrap()
        };
        let (inside, outside) = (folder(&allowed), folder(&other));
        policy
            .open_in(inside.as_fd(), "in", OFlags::RDONLY, Mode::empty())
            .unwrap();
        let link = policy.open_in(inside.as_fd(), "link", OFlags::RDONLY, Mode::empty());
        assert_eq!(
            link.unwrap_err().raw_os_error(),
            Some(Errno::LOOP.raw_os_error())
        );
        let secret = policy.open_in(outside.as_fd(), "secret", OFlags::RDONLY, Mode::empty());
        assert!(denied(secret));
        assert!(denied(policy.reopen(outside.as_fd(), OFlags::RDONLY)));
        assert!(denied(policy.rename_in(outside.as_fd(), "secret", "mine")));
        assert!(denied(policy.make_folder(&other.join("f"), Mode::RWXU)));
        policy.make_folder(&allowed.join("f"), Mode::RWXU).unwrap();
        let pattern = format!("{}/*", top.path().display());
        assert_eq!(policy.expand(&pattern, 100).unwrap().len(), 1, "allowed/");
        assert!(policy.device_text(0, "../../../x").is_err());
    }
}
