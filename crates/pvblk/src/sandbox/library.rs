//! The third process of a server in a sandbox: it has Ceph's library, opens images for the child, and serves them to it over rings. It is a server of its own, whose
//! disks are these images, and whose sockets only the parent reaches.

use super::lockdown;
use super::user::User;
use crate::control::Client;
use crate::log;
use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use pvblk_volume::{RbdSpec, VolumeSpec};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Variable of its environment: [`LibraryRole`] as JSON.
pub const ROLE: &str = "PVBLK_SANDBOX_LIBRARY";
/// Longest time to open or close an image: a killed server's lock is free after 30 s.
const PATIENCE: Duration = Duration::from_secs(120);
/// Queues of an image, as many as a volume may need.
const QUEUES: &str = "64";

/// The part of a process that has Ceph's library.
#[derive(Serialize, Deserialize)]
pub struct LibraryRole {
    parent: String,
    user: User,
    /// Where its sockets are; it makes it.
    folder: PathBuf,
    /// Folders of configuration files that images name.
    readable: Vec<PathBuf>,
}

impl LibraryRole {
    /// Gives up all rights but those that the library needs. To be called before there is any other thread.
    pub fn enter(&self) -> Result<()> {
        lockdown::become_library(&self.user, &self.parent)?;
        // As the user, to whom nobody could give it without a capability.
        let made = std::fs::DirBuilder::new().mode(0o700).create(&self.folder);
        made.with_context(|| format!("making {}", self.folder.display()))?;
        lockdown::confine_library(&self.folder, &self.readable)
    }
}

/// The parent's hold on the process.
pub struct Library {
    process: Mutex<Child>,
    folder: PathBuf,
    /// Images that may be opened, as the configuration names them.
    named: Vec<String>,
    next: AtomicU64,
    /// Held while an image is opened or closed, so that one that is opened anew finds the lock free.
    turn: Mutex<()>,
}

impl Library {
    /// Starts the process, and waits until it serves.
    pub fn start(named: &[RbdSpec], user: &User) -> Result<Library> {
        let folder = new_folder();
        let role = LibraryRole {
            parent: std::process::id().to_string(),
            user: *user,
            folder: folder.clone(),
            readable: named.iter().filter_map(folder_of).collect(),
        };
        let socket = |name| format!("unix:{}", folder.join(name).display());
        let mut process = Command::new(std::env::current_exe().context("this program")?)
            .args(["serve", "--no-pressure", "--log-format", "text"])
            .args(["--max-queues", QUEUES])
            .args(["--local", &socket(RINGS), "--control", &socket(CONTROL)])
            .env(ROLE, serde_json::to_string(&role)?)
            .env_remove("STATE_DIRECTORY")
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_PID")
            // An interrupt from the terminal ends the child first.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting the process that opens images")?;
        let said = process.stderr.take().context("its standard error")?;
        let mut said = BufReader::new(said);
        let started = wait_ready(&mut said);
        let library = Library {
            process: Mutex::new(process),
            folder,
            named: named.iter().map(ToString::to_string).collect(),
            next: AtomicU64::new(0),
            turn: Mutex::default(),
        };
        started.context("the process that opens images")?;
        std::thread::Builder::new()
            .name("pvblk-images".into())
            .spawn(move || relay(said))
            .context("starting a thread")?;
        Ok(library)
    }

    /// One whose process has ended.
    #[cfg(test)]
    pub fn of_test(named: &[RbdSpec]) -> Library {
        let process = Command::new("/bin/true").spawn();
        Library {
            process: Mutex::new(process.expect("a process")),
            folder: "/nonexistent".into(),
            named: named.iter().map(ToString::to_string).collect(),
            next: AtomicU64::new(0),
            turn: Mutex::default(),
        }
    }

    /// The socket at which it serves images.
    pub fn rings(&self) -> PathBuf {
        self.folder.join(RINGS)
    }

    /// Opens an image; returns the name by which it is served.
    pub fn open(&self, image: &str) -> io::Result<String> {
        if !self.named.iter().any(|named| named == image) {
            let why = "a server in a sandbox opens images that its configuration names: add the disk there, and start it again";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let _turn = self.turn.lock();
        let name = format!("image-{}", self.next.fetch_add(1, Ordering::Relaxed));
        let params = json!({"name": name, "volume": image, "timeout_secs": PATIENCE.as_secs()});
        let failed = |e: anyhow::Error| io::Error::other(pvblk_block::error_line(&*e));
        match self.call("disk.add", params).map_err(failed)? {
            Ok(()) => Ok(name),
            Err(why) => {
                let before = [format!("disk {name}: "), format!("{image}: ")];
                let why = before.iter().fold(&*why, |why, text| {
                    why.strip_prefix(text.as_str()).unwrap_or(why)
                });
                Err(io::Error::other(why.to_owned()))
            }
        }
    }

    /// Closes an image, and gives back its lock.
    pub fn close(&self, name: &str) {
        let _turn = self.turn.lock();
        let params = json!({"name": name, "force": true, "timeout_secs": PATIENCE.as_secs()});
        match self.call("disk.remove", params) {
            Ok(Ok(())) => {}
            Ok(Err(why)) => tracing::warn!("closing {name}: {why}"),
            Err(e) => tracing::warn!("closing {name}: {e}"),
        }
    }

    fn call(&self, method: &str, params: Value) -> Result<Result<(), String>> {
        let margin = Duration::from_secs(10);
        let mut client = Client::connect(&self.folder.join(CONTROL), PATIENCE + margin)?;
        let answer = client.request(method, params)?;
        Ok(answer.map(drop).map_err(|e| e.message))
    }

    /// Its status, if it has ended.
    pub fn status(&self) -> io::Result<Option<ExitStatus>> {
        self.process.lock().try_wait()
    }

    /// Has it close all images in order, and waits for its end.
    pub fn end(&self) {
        let mut process = self.process.lock();
        if let Ok(None) = process.try_wait() {
            let _ = kill_process(Pid::from_child(&process), Signal::TERM);
            let _ = process.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        self.end();
    }
}

const RINGS: &str = "rings";
const CONTROL: &str = "control";

/// A folder that isn't there yet, whose name nobody guesses.
fn new_folder() -> PathBuf {
    let random = RandomState::new().build_hasher().finish();
    std::env::temp_dir().join(format!("pvblk-images-{random:016x}"))
}

/// The folder of an image's configuration file, where its keyrings are, too.
fn folder_of(image: &RbdSpec) -> Option<PathBuf> {
    let folder = image.conf.as_deref().and_then(Path::parent)?;
    std::fs::canonicalize(folder).ok()
}

/// Reads until it says that it is ready; an end before that is told in its own words.
fn wait_ready(said: &mut impl BufRead) -> Result<()> {
    let begin = Instant::now();
    let mut last = String::new();
    loop {
        let mut line = String::new();
        // A line has an end, or else it isn't read further.
        let read = said.take(64 << 10).read_line(&mut line)?;
        if read == 0 {
            bail!(
                "it ended after {:.1} s: {last}",
                begin.elapsed().as_secs_f64()
            );
        }
        if line.trim_end() == "pvblk: ready" {
            return Ok(());
        }
        line.trim_end().clone_into(&mut last);
    }
}

/// Passes its warnings and errors on, until it ends.
fn relay(mut said: impl BufRead) {
    loop {
        let mut line = String::new();
        match (&mut said).take(64 << 10).read_line(&mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if line.contains(" WARN ") || line.contains(" ERROR ") => {
                log::put(&format!("{}\n", line.trim_end()));
            }
            Ok(_) => {}
        }
    }
}

/// The text of an image as a volume, and the disk that it is at the third process.
pub fn served_at(rings: &Path, name: &str) -> VolumeSpec {
    VolumeSpec::Rings(pvblk_volume::RingsSpec {
        path: rings.to_owned(),
        disk: name.to_owned(),
        queues: None,
        ring_pages: pvblk_volume::RingsSpec::RING_PAGES,
        memory_bytes: None,
    })
}
