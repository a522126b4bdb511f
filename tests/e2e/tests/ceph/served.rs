//! Servers of images, and loads on them.

use pvblk_e2e::ceph::{Cluster, Written, load};
use pvblk_e2e::nbd::Connection;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{run_ok, wait_for};
use pvblk_e2e::{Daemon, Stop};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A bug in the command of servers that are started.
#[derive(Clone)]
pub struct Bug {
    pub name: &'static str,
    /// A command that was built with the feature `planted`.
    pub binary: PathBuf,
}

static PLANTED: Mutex<Option<Bug>> = Mutex::new(None);

/// Plants a bug, or none, in servers that are started from now on.
pub fn plant(bug: Option<Bug>) {
    *PLANTED.lock().unwrap_or_else(PoisonError::into_inner) = bug;
}

fn planted() -> Option<Bug> {
    let planted = PLANTED.lock().unwrap_or_else(PoisonError::into_inner);
    planted.clone()
}

/// The name of an image for a test that is run again with planted bugs.
pub fn named(name: &str) -> String {
    match planted() {
        None => name.to_owned(),
        Some(bug) => format!("{name}-{}", bug.name),
    }
}

/// A server of disks over NBD.
pub struct Served {
    pub daemon: Daemon,
    pub socket: PathBuf,
}

impl Served {
    pub fn start(
        cluster: &Cluster,
        disks: &[(&str, String)],
        more: &[String],
    ) -> Result<Served, Stop> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let socket = cluster.dir().join(format!("nbd{number}.sock"));
        let mut args = vec![
            "serve".to_owned(),
            format!("--nbd=unix:{}", socket.display()),
        ];
        args.extend(
            disks
                .iter()
                .map(|(name, spec)| format!("--disk={name}={spec}")),
        );
        args.extend_from_slice(more);
        let daemon = match planted() {
            None => Daemon::start(args)?,
            Some(bug) => {
                let mut command = Command::new(bug.binary);
                command.args(args).stdin(Stdio::null());
                command.env("PVBLK_CONTROL", "none");
                command.env("PVBLK_PLANTED", bug.name);
                Daemon::run(command)?
            }
        };
        Ok(Served { daemon, socket })
    }

    pub fn one(cluster: &Cluster, name: &str, options: &str) -> Result<Served, Stop> {
        Served::start(cluster, &[(name, cluster.spec(name, options))], &[])
    }

    pub fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.socket.display())
    }

    pub fn connect(&self, name: &str) -> Result<Connection, Stop> {
        Connection::open(&self.socket, name)
    }

    /// Waits until the log has a line with this text.
    pub fn wait_told(&self, text: &str) -> Result<(), Stop> {
        wait_for(&format!("the log tells: {text}"), || {
            Ok(self.daemon.lines().iter().any(|line| line.contains(text)))
        })
    }

    /// The commands of `qemu-io`, which must succeed.
    pub fn io(&self, name: &str, commands: &[&str]) -> Result<(), Stop> {
        self.io_with(&["-f", "raw"], name, commands)
    }

    pub fn io_with(&self, options: &[&str], name: &str, commands: &[&str]) -> Result<(), Stop> {
        let uri = self.uri(name);
        let commands = commands.iter().flat_map(|c| ["-c", c]);
        let args = options.iter().copied().chain(commands).chain([&*uri]);
        run_ok("qemu-io", args).map(drop)
    }
}

/// A load in the background.
pub struct Writer {
    stop: Arc<AtomicBool>,
    pub progress: Arc<AtomicU64>,
    pub thread: JoinHandle<Result<Written, Stop>>,
}

impl Writer {
    pub fn start(served: &Served, disk: &str, blocks: u64) -> Result<Writer, Stop> {
        Writer::start_after(served, disk, (blocks, 0))
    }

    /// A load whose numbers begin after this one.
    pub fn start_after(
        served: &Served,
        disk: &str,
        (blocks, last): (u64, u64),
    ) -> Result<Writer, Stop> {
        let connection = served.connect(disk)?;
        connection.patience(Duration::from_secs(180))?;
        let (stop, progress) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (flag, count) = (Arc::clone(&stop), Arc::clone(&progress));
        let thread = std::thread::spawn(move || load(connection, (blocks, last), &flag, &count));
        Ok(Writer {
            stop,
            progress,
            thread,
        })
    }

    pub fn wait_progress(&self, writes: u64) -> Result<(), Stop> {
        wait_for("so many writes", || {
            let ended = self.thread.is_finished();
            check(!ended, || "the load has ended".into())?;
            Ok(self.progress.load(Ordering::Relaxed) >= writes)
        })
    }

    pub fn stop(self) -> Result<Written, Stop> {
        self.stop.store(true, Ordering::Relaxed);
        self.end()
    }

    /// Waits for an end that others cause.
    pub fn end(self) -> Result<Written, Stop> {
        wait_for("the load ends", || Ok(self.thread.is_finished()))?;
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Stop::fail("the load panicked"))
    }
}
