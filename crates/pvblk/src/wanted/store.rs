//! [`Store`]: the changes at run time in a file, of which a crash at any moment leaves the old one or the new one.

use super::Changes;
use anyhow::{Context, Result, anyhow, bail};
use pvblk_volume::FileOpener;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The file in the state's folder.
const NAME: &str = "state.json";
/// It while it is written. One that a crash left is written over.
const NEW: &str = "state.json.new";
/// The file whose lock keeps a second server out.
pub const LOCK: &str = "lock";
/// The version of the file's form that this program writes, and the newest that it reads.
const VERSION: u64 = 1;
/// Most bytes that are read: 10,000 disks take 2 MB.
const LONGEST: u64 = 256 << 20;

/// The operations on files that a [`Store`] makes, in one folder. Tests have a folder that loses what isn't stable.
pub trait Folder: Send {
    /// The folder's path, for messages.
    fn path(&self) -> &Path;
    /// The bytes of a file; `None`: there is none.
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;
    /// Makes a file, or empties it, and writes it. Nothing of that is stable.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()>;
    /// Makes the bytes of a file stable.
    fn sync_file(&self, name: &str) -> io::Result<()>;
    /// Gives a file another's name. A reader of that name finds the one or the other.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Makes names stable.
    fn sync_names(&self) -> io::Result<()>;
}

/// A real folder, with the lock that keeps a second server out. Its files are opened by their names in the folder that was opened at the start, whatever
/// is at its path by now.
pub struct RealFolder {
    path: PathBuf,
    folder: File,
    opener: Arc<dyn FileOpener>,
    /// Unlocked by the kernel when this process ends, however it ends.
    _lock: File,
}

/// Changes at run time, in a folder of which this process has the lock.
pub struct Store {
    folder: Box<dyn Folder>,
}

/// The file's form.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u64,
    changes: Changes,
}

/// The part of every version's form.
#[derive(Deserialize)]
struct Versioned {
    version: u64,
}

impl Store {
    /// Reads what is stored in a folder.
    pub fn on(folder: Box<dyn Folder>) -> Result<(Store, Changes)> {
        let store = Store { folder };
        let changes = store.load()?;
        // A server that was killed may not have come to this, and what is served from now on mustn't be lost with the machine.
        let stable = store.folder.sync_names();
        stable.with_context(|| format!("--state {}", store.folder.path().display()))?;
        Ok((store, changes))
    }

    fn load(&self) -> Result<Changes> {
        let file = self.folder.path().join(NAME).display().to_string();
        let bytes = self.folder.read(NAME);
        let Some(bytes) = bytes.with_context(|| format!("reading {file}"))? else {
            return Ok(Changes::default());
        };
        let damaged = |e: serde_json::Error| {
            anyhow!(
                "{file}: it is damaged ({e}): put a copy in its place; or move it away, and the disks that were added, changed or removed at run time are as \
                 configured"
            )
        };
        let Versioned { version } = serde_json::from_slice(&bytes).map_err(damaged)?;
        if version != VERSION {
            bail!(
                "{file}: it has version {version}, and this pvblk reads version {VERSION}: start the pvblk that wrote it, or move it away, and the disks \
                 that were added, changed or removed at run time are as configured"
            );
        }
        let document: Document = serde_json::from_slice(&bytes).map_err(damaged)?;
        Ok(document.changes)
    }

    /// Stores `changes` in place of what was there. They are stable when it returns.
    ///
    /// After an error the old ones are stored, or the new ones: see [`SaveError::is_new`].
    pub fn save(&self, changes: &Changes) -> Result<(), SaveError> {
        let document = Document {
            version: VERSION,
            changes: changes.clone(),
        };
        let mut is_new = false;
        let written = serde_json::to_vec_pretty(&document)
            .map_err(io::Error::from)
            .and_then(|bytes| self.replace(&bytes, &mut is_new));
        written.map_err(|cause| SaveError {
            file: self.folder.path().join(NAME),
            is_new,
            cause,
        })
    }

    fn replace(&self, bytes: &[u8], is_new: &mut bool) -> io::Result<()> {
        self.folder.write(NEW, bytes)?;
        self.folder.sync_file(NEW)?;
        // From here on a reader may find either.
        *is_new = true;
        self.folder.rename(NEW, NAME)?;
        self.folder.sync_names()
    }
}

/// Changes could not be stored.
#[derive(Debug)]
pub struct SaveError {
    file: PathBuf,
    /// The next start may find the new ones all the same.
    pub is_new: bool,
    cause: io::Error,
}

impl std::fmt::Display for SaveError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let advice = match self.cause.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ": make room there",
            _ => "",
        };
        write!(f, "storing {}: {}{advice}", self.file.display(), self.cause)
    }
}

impl std::error::Error for SaveError {}

/// Longest wait for the lock: a server that was killed just now has it for a moment.
const DYING: Duration = Duration::from_secs(3);

impl RealFolder {
    /// Takes the lock of the folder that was opened at `path`; `lock`: the file [`LOCK`] in it; `opener`: opens the others.
    pub fn locked(
        path: &Path,
        folder: File,
        lock: File,
        opener: &Arc<dyn FileOpener>,
    ) -> Result<RealFolder> {
        let failed = || format!("--state {}", path.display());
        let patience = Instant::now() + DYING;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < patience => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(TryLockError::WouldBlock) => bail!(
                    "--state {}: another server uses it: stop that one, or give this one a folder of its own",
                    path.display()
                ),
                Err(TryLockError::Error(e)) => return Err(e).with_context(failed),
            }
        }
        Ok(RealFolder {
            path: path.to_owned(),
            folder,
            opener: Arc::clone(opener),
            _lock: lock,
        })
    }

    fn open(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let mode = Mode::RUSR | Mode::WUSR;
        let opened = self.opener.open_in(self.folder.as_fd(), name, flags, mode);
        opened.map(File::from)
    }
}

impl Folder for RealFolder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let file = match self.open(name, OFlags::RDONLY) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(LONGEST).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
        self.open(name, flags)?.write_all(bytes)
    }

    fn sync_file(&self, name: &str) -> io::Result<()> {
        self.open(name, OFlags::RDONLY)?.sync_all()
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.opener.rename_in(self.folder.as_fd(), from, to)
    }

    fn sync_names(&self) -> io::Result<()> {
        self.folder.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wanted::{Configured, DiskWanted};

    fn changes() -> Changes {
        let mut changes = Changes::default();
        let disk = Some(DiskWanted::new("mem:1M"));
        changes.set(&Configured::default(), "a", disk);
        changes
    }

    fn open(path: &Path) -> Result<(Store, Changes)> {
        let opener = crate::opener::Opener::default();
        Store::on(Box::new(opener.state(path)?))
    }

    fn refused(path: &Path) -> String {
        let error = open(path).err().expect("it is refused");
        let text = format!("{error:#}");
        assert!(!text.contains('\n'), "{text}");
        text
    }

    #[test]
    fn changes_are_read_again_and_nobody_else_writes_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let (store, found) = open(&path).unwrap();
        assert_eq!(found, Changes::default());
        store.save(&changes()).unwrap();
        assert!(refused(&path).contains("another server uses it"));
        drop(store);
        let (_store, found) = open(&path).unwrap();
        assert_eq!(found, changes());
        let text = std::fs::read_to_string(path.join(NAME)).unwrap();
        assert!(text.contains("\"version\": 1"), "{text}");
        assert!(!path.join(NEW).exists());
    }

    #[test]
    fn the_next_server_waits_for_one_that_is_dying() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let (dying, _) = open(&path).unwrap();
        let end = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(dying);
        });
        assert!(open(&path).is_ok());
        end.join().unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_read_is_refused_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(NAME);
        for (text, expect) in [
            ("", "damaged"),
            ("{\"version\": 1, \"changes\": {\"dis", "damaged"),
            ("\0\0\0\0\0\0\0\0", "damaged"),
            (
                "{\"version\": 1, \"changes\": {\"colour\": 1}}",
                "unknown field `colour`",
            ),
            (
                "{\"version\": 2, \"disks\": []}",
                "has version 2, and this pvblk reads version 1",
            ),
        ] {
            std::fs::write(&file, text).unwrap();
            let e = refused(dir.path());
            assert!(e.contains(expect) && e.contains("move it away"), "{e}");
            assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
        }
    }

    /// The state goes on in the folder that was opened, and not in one that has its name by now.
    #[test]
    fn a_folder_that_was_moved_keeps_the_state() {
        let dir = tempfile::tempdir().unwrap();
        let (path, moved) = (dir.path().join("state"), dir.path().join("moved"));
        let (store, _) = open(&path).unwrap();
        std::fs::rename(&path, &moved).unwrap();
        std::fs::create_dir(&path).unwrap();
        store.save(&changes()).unwrap();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
        drop(store);
        assert_eq!(open(&moved).unwrap().1, changes());
    }

    #[test]
    fn the_folder_and_its_files_are_their_owners() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let (store, _) = open(&path).unwrap();
        store.save(&changes()).unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o700);
        assert_eq!(
            (mode(&path.join(NAME)), mode(&path.join(LOCK))),
            (0o600, 0o600)
        );
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for path in [file, dir.path().join("no/such")] {
            let e = refused(&path);
            assert!(e.contains(&path.display().to_string()), "{e}");
        }
    }
}
