//! A file system whose requests are slow, hang or fail, as a test wants it.
//!
//! It is a FUSE mount that this process serves, so it goes on when a server under test is killed. Its files
//! are in memory or in a folder. Each request is treated by the rule for its file and kind ([`Rule`]); a
//! request that waits holds no thread here, so others go on. **The data of a write lands when the write
//! completes, not when it arrives**: a write that is held while its process dies lands afterwards, as on a
//! disk behind a network.
//!
//! The kernel, not this file system, keeps `flock` and `fcntl` locks, as it does for most.
//!
//! When a [`SlowMedium`] is dropped, all waiting requests complete with an error, the connection is cut,
//! which wakes every process that waits in the kernel for this mount, and the mount is removed. A small
//! process does that when this one is killed: a killed process whose own threads wait for its own mount would
//! never end.

mod control;
mod files;
mod rules;
mod schedule;

pub use rules::{Kind, Rule, Span};

use crate::Stop;
use files::{Files, SlowFs};
use fuser::{BackgroundSession, MountOption, SessionACL};
use rustix::mount::UnmountFlags;
use schedule::Schedule;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Limit of waits for the medium itself, far above what any of them takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Options of a medium.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder of the files, under their names; `None`: they are in memory.
    pub backing: Option<PathBuf>,
    /// Every read and write goes past the page cache, also without `O_DIRECT`.
    pub direct_io: bool,
    /// With `direct_io`: several writes to a file at a time. The kernel lets only one in otherwise, with a lock on the inode.
    pub parallel_writes: bool,
    /// `io_uring` and `aio` with `O_DIRECT` don't wait in the kernel for the completion, so writes to one
    /// file run side by side, and a killed process doesn't wait for its own.
    pub asynchronous: bool,
    /// The kernel keeps written data in its page cache and writes them back later.
    pub write_back: bool,
    /// The seed of random delays.
    pub seed: u64,
}

/// A mounted medium.
#[derive(Debug)]
pub struct SlowMedium {
    files: Arc<Files>,
    schedule: Arc<Schedule>,
    session: Option<BackgroundSession>,
    thread: Option<JoinHandle<()>>,
    guard: Child,
    point: PathBuf,
    /// Removed after the mount.
    own: Option<TempDir>,
}

impl SlowMedium {
    /// A medium in memory, in a folder of its own, with asynchronous direct I/O; skipped where FUSE is missing.
    pub fn new() -> Result<SlowMedium, Stop> {
        SlowMedium::with(Options {
            asynchronous: true,
            ..Options::default()
        })
    }

    /// As [`SlowMedium::new`], made otherwise.
    pub fn with(options: Options) -> Result<SlowMedium, Stop> {
        let own = tempfile::tempdir()?;
        let mut medium = SlowMedium::mount(own.path(), options)?;
        medium.own = Some(own);
        Ok(medium)
    }

    /// A medium mounted on `point`, an empty folder.
    pub fn mount(point: &Path, options: Options) -> Result<SlowMedium, Stop> {
        let device = Path::new("/dev/fuse");
        if !device.exists() {
            return Stop::skip("there is no /dev/fuse");
        }
        if !rustix::process::geteuid().is_root() {
            return Stop::skip("a FUSE file system is mounted by root only");
        }
        if let Err(e) = File::options().read(true).write(true).open(device) {
            return Stop::skip(format!("/dev/fuse can't be used: {e}"));
        }
        let schedule = Schedule::new(options.seed);
        let files = Arc::new(Files::new(options)?);
        let fs = SlowFs {
            files: Arc::clone(&files),
            schedule: Arc::clone(&schedule),
        };
        let mut config = fuser::Config::default();
        config.mount_options = vec![MountOption::FSName("slow-medium".into())];
        config.acl = SessionACL::All;
        let session = match fuser::spawn_mount(fs, point, &config) {
            Ok(session) => session,
            // The kernel says so to a root without the right to mount, as in a container.
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
                return Stop::skip(format!("a FUSE file system can't be mounted here: {e}"));
            }
            Err(e) => return Err(e.into()),
        };
        let thread = schedule.start()?;
        Ok(SlowMedium {
            files,
            schedule,
            session: Some(session),
            thread: Some(thread),
            guard: guard(point)?,
            point: point.to_owned(),
            own: None,
        })
    }

    /// Where it is mounted.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Makes the file `name` of zeros, and says where it is.
    pub fn add(&self, name: &str, bytes: u64) -> Result<PathBuf, Stop> {
        self.files.add(name)?.file.set_len(bytes)?;
        Ok(self.point.join(name))
    }

    /// The current contents of `name`, past all rules and caches.
    pub fn data(&self, name: &str) -> Result<File, Stop> {
        match self.files.get(name) {
            Some(node) => Ok(node.file.try_clone()?),
            None => Stop::fail(format!("the slow medium has no file {name}")),
        }
    }

    /// Sets the rule for requests of these kinds to `file` (`*`: to all files) from now on. Waiting requests
    /// go on waiting.
    pub fn set(&self, file: &str, kinds: &[Kind], rule: Rule) {
        self.schedule.set(file, kinds, rule);
    }

    /// Lets waiting requests go on, and returns their number.
    pub fn release(&self, file: &str, kinds: &[Kind]) -> usize {
        self.schedule.release(file, kinds, None)
    }

    /// Completes waiting requests with an error number, without having done them, and returns their number.
    pub fn fail_held(&self, file: &str, kinds: &[Kind], errno: i32) -> usize {
        self.schedule.release(file, kinds, Some(errno))
    }

    /// No rules any more for `file` (`*`: for all), and nothing of it waits.
    pub fn heal(&self, file: &str) {
        self.set(file, &Kind::ALL, Rule::Now);
        self.release(file, &Kind::ALL);
    }

    /// Requests of these kinds that wait until they are released.
    pub fn held(&self, file: &str, kinds: &[Kind]) -> usize {
        self.schedule.waiting(file, kinds).0
    }

    /// Requests that wait, for their time or for a release.
    pub fn waiting(&self, file: &str, kinds: &[Kind]) -> usize {
        let (held, delayed) = self.schedule.waiting(file, kinds);
        held + delayed
    }

    /// Waits until `count` of these are held.
    pub fn wait_held(&self, file: &str, kinds: &[Kind], count: usize) -> Result<(), Stop> {
        self.wait(
            || self.held(file, kinds) >= count,
            || format!("{count} {kinds:?} never came to {file}"),
        )
    }

    /// Waits until nothing waits any more: all that was asked has been done.
    pub fn settle(&self) -> Result<(), Stop> {
        self.wait(
            || self.waiting("*", &Kind::ALL) == 0,
            || "requests of the slow medium don't end".into(),
        )
    }

    fn wait(&self, until: impl Fn() -> bool, what: impl Fn() -> String) -> Result<(), Stop> {
        let deadline = Instant::now() + PATIENCE;
        while !until() {
            if Instant::now() > deadline {
                return Stop::fail(what());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Unmounts `point` when this process is gone.
fn guard(point: &Path) -> std::io::Result<Child> {
    let script = r#"while [ -d "/proc/$0" ] && ! grep -q '^State:.Z' "/proc/$0/status"; do sleep 1; done
        umount -f -l "$1"; rmdir "$1""#;
    Command::new("sh")
        .args(["-c", script, &std::process::id().to_string()])
        .arg(point)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Not with this process on Ctrl-C.
        .process_group(0)
        .spawn()
}

impl Drop for SlowMedium {
    fn drop(&mut self) {
        self.schedule.end();
        // The unmount is forced: the kernel completes all requests to the mount, from all processes, with an
        // error. It is detached: files that are still open keep nothing mounted. A call that fails here finds
        // no mount any more.
        let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
        let _ = rustix::mount::unmount(&self.point, flags);
        if let Some(session) = self.session.take() {
            let _ = session.umount_and_join();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        drop(self.own.take());
        let _ = self.guard.kill();
        let _ = self.guard.wait();
    }
}
