//! A Ceph cluster of this machine (scripts/ceph.sh), and a load that knows which of its writes must be in an image.

use crate::nbd::{Command, Connection};
use crate::tools::{self, Finished, need, run, tool};
use crate::{Stop, pattern};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::collections::HashMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Longest time of a command of the cluster.
const COMMAND: Duration = Duration::from_secs(180);

/// The user of servers' images, who may do no more than the documents say.
const USER: &str = "pvblk";

/// A cluster, which ends with this.
pub struct Cluster {
    dir: TempDir,
    port: String,
}

impl Cluster {
    /// Starts one; skipped where Ceph's packages aren't installed.
    pub fn start() -> Result<Cluster, Stop> {
        need(&["ceph-mon", "ceph-osd", "ceph", "rbd", "monmaptool", "jq"])?;
        let in_memory = Path::new("/dev/shm");
        let mut builder = tempfile::Builder::new();
        let dir = match in_memory.is_dir() {
            true => builder.prefix("pvblk-ceph-").tempdir_in(in_memory)?,
            false => builder.prefix("pvblk-ceph-").tempdir()?,
        };
        let cluster = Cluster {
            dir,
            port: free_port()?.to_string(),
        };
        cluster.script(&["start"], &["1"])?;
        let keyring = cluster.dir().join(format!("c/client.{USER}.keyring"));
        let keyring = keyring.display().to_string();
        cluster.ceph(&[
            "auth",
            "get-or-create",
            &format!("client.{USER}"),
            "mon",
            "profile rbd",
            "osd",
            "profile rbd pool=rbd",
            "-o",
            &keyring,
        ])?;
        Ok(cluster)
    }

    /// A line for each daemon that has ended though nobody killed it, and the cluster's own view of its health.
    pub fn health(&self) -> String {
        let mut text = String::new();
        for daemon in ["mon", "osd.0"] {
            let lives = self.pid(daemon).is_ok_and(|p| test_kill_process(p).is_ok());
            if !lives {
                text += &format!("{daemon} has ended\n");
            }
        }
        match self.ceph(&["health", "detail"]) {
            Ok(said) => text + &said.stdout,
            Err(_) => text + "the monitor doesn't answer",
        }
    }

    /// The folder of the cluster, for other files too.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The configuration file of its clients.
    pub fn conf(&self) -> PathBuf {
        self.dir().join("c/ceph.conf")
    }

    fn script(&self, before: &[&str], after: &[&str]) -> Result<Finished, Stop> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/ceph.sh");
        let mut command = std::process::Command::new(script);
        command.args(before).arg(self.dir().join("c")).args(after);
        command.env("PORT", &self.port);
        command.env("GRACE", "120");
        run(command, COMMAND)?.success()
    }

    /// Runs `rbd` with these arguments, which must succeed.
    pub fn rbd(&self, args: &[&str]) -> Result<Finished, Stop> {
        let conf = self.conf();
        let mut command = tool("rbd", ["--conf".as_ref(), conf.as_os_str()]);
        command.args(args);
        run(command, COMMAND)?.success()
    }

    /// Runs `ceph` with these arguments, which must succeed.
    pub fn ceph(&self, args: &[&str]) -> Result<Finished, Stop> {
        let conf = self.conf();
        let mut command = tool("ceph", ["-c".as_ref(), conf.as_os_str()]);
        command.args(["--connect-timeout", "60"]).args(args);
        run(command, COMMAND)?.success()
    }

    /// Makes an image of this size in the pool `rbd`.
    pub fn image(&self, name: &str, size: &str) -> Result<(), Stop> {
        self.rbd(&["create", "--size", size, &format!("rbd/{name}")])
            .map(drop)
    }

    /// The specification of an image of the pool `rbd`, with options.
    pub fn spec(&self, name: &str, options: &str) -> String {
        let conf = self.conf();
        format!("rbd:rbd/{name},conf={},id={USER}{options}", conf.display())
    }

    /// Copies an image or snapshot, as the cluster has it now, into a file.
    pub fn export(&self, name: &str, file: &str) -> Result<PathBuf, Stop> {
        let path = self.dir().join(file);
        let _ = std::fs::remove_file(&path);
        let text = path.display().to_string();
        self.rbd(&["export", "--no-progress", &format!("rbd/{name}"), &text])?;
        Ok(path)
    }

    /// Owner of an image's lock, and the lock's name.
    pub fn lock(&self, name: &str) -> Result<Option<(String, String)>, Stop> {
        let said = self.rbd(&["lock", "ls", &format!("rbd/{name}"), "--format", "json"])?;
        let locks: serde_json::Value = serde_json::from_str(&said.stdout)?;
        let text = |field: &str| locks[0][field].as_str().map(str::to_owned);
        Ok(text("locker").zip(text("id")))
    }

    /// Breaks the lock of an image, whose owner is blocked.
    pub fn steal(&self, name: &str) -> Result<(), Stop> {
        self.break_lock(name, true)
    }

    /// Blocks the owner of an image's lock, and leaves the lock.
    pub fn block(&self, name: &str) -> Result<(), Stop> {
        let said = self.rbd(&["lock", "ls", &format!("rbd/{name}"), "--format", "json"])?;
        let locks: serde_json::Value = serde_json::from_str(&said.stdout)?;
        let Some(address) = locks[0]["address"].as_str() else {
            return Stop::fail(format!("nobody has the lock of {name}"));
        };
        self.ceph(&["osd", "blocklist", "add", address]).map(drop)
    }

    /// Breaks the lock of an image; its owner may be left as it is.
    pub fn break_lock(&self, name: &str, and_block: bool) -> Result<(), Stop> {
        let Some(held) = self.lock(name)? else {
            return Stop::fail(format!("nobody has the lock of {name}"));
        };
        self.break_held(name, &held, and_block)
    }

    /// As [`Cluster::break_lock`], for the lock as it was then: its owner, and its name.
    pub fn break_held(
        &self,
        name: &str,
        (owner, id): &(String, String),
        and_block: bool,
    ) -> Result<(), Stop> {
        let block = format!("--rbd-blocklist-on-break-lock={and_block}");
        self.rbd(&["lock", "rm", &block, &format!("rbd/{name}"), id, owner])
            .map(drop)
    }

    fn pid(&self, daemon: &str) -> Result<Pid, Stop> {
        let text = std::fs::read_to_string(self.dir().join(format!("c/run/{daemon}.pid")))?;
        let pid = text.trim().parse().ok().and_then(Pid::from_raw);
        pid.ok_or_else(|| Stop::Fail(format!("{daemon}: `{text}` is no process")))
    }

    /// Sends a signal to `osd.0` or `mon`.
    pub fn signal(&self, daemon: &str, signal: Signal) -> Result<(), Stop> {
        Ok(kill_process(self.pid(daemon)?, signal)?)
    }

    /// Starts a daemon again that was killed.
    pub fn restart(&self, daemon: &str) -> Result<(), Stop> {
        match daemon.strip_prefix("osd.") {
            Some(number) => self.script(&["osd"], &[number]),
            None => self.script(&["mon"], &[]),
        }
        .map(drop)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.script(&["wipe"], &[]);
    }
}

/// A port such that it and the next one are free now.
fn free_port() -> Result<u16, Stop> {
    for _ in 0..100 {
        let first = TcpListener::bind(("127.0.0.1", 0))?;
        let port = first.local_addr()?.port();
        if let Some(next) = port.checked_add(1)
            && TcpListener::bind(("127.0.0.1", next)).is_ok()
        {
            return Ok(port);
        }
    }
    Stop::fail("no two ports beside each other are free")
}

/// Bytes of a write of [`load`].
pub const BLOCK: usize = 4096;
/// Writes in flight.
const WINDOW: usize = 8;

/// A client's knowledge of its writes.
#[derive(Debug, Default)]
pub struct Written {
    sent: HashMap<u64, u64>,
    acknowledged: HashMap<u64, u64>,
    /// Number of writes that succeeded.
    pub writes: u64,
    /// Number of writes that failed.
    pub errors: u64,
}

/// Writes numbered blocks, one behind the other over the first `blocks`, until the first error, the end of the connection or `stop`. `progress` counts
/// the writes that succeeded. The first number is the one after `last`, so that writes of an earlier load are older.
pub fn load(
    mut connection: Connection,
    (blocks, last): (u64, u64),
    stop: &AtomicBool,
    progress: &AtomicU64,
) -> Result<Written, Stop> {
    let mut written = Written::default();
    let mut in_flight: HashMap<u64, u64> = HashMap::new();
    let (mut sequence, mut open) = (last, true);
    let mut block = vec![0; BLOCK];
    loop {
        while open && !stop.load(Ordering::Relaxed) && in_flight.len() < WINDOW {
            sequence += 1;
            let index = sequence % blocks;
            pattern::fill_block(&mut block, index, sequence);
            in_flight.insert(sequence, index);
            written.sent.insert(index, sequence);
            let at = index * BLOCK as u64;
            open = connection
                .send(Command::Write, sequence, at, &block)
                .is_ok();
        }
        if in_flight.is_empty() {
            return Ok(written);
        }
        let Some(reply) = connection.receive()? else {
            return Ok(written);
        };
        let Some(index) = in_flight.remove(&reply.cookie) else {
            return Stop::fail(format!("an answer to no request: {reply:?}"));
        };
        if reply.error != 0 {
            written.errors += 1;
            open = false;
            continue;
        }
        let last = written.acknowledged.entry(index).or_default();
        *last = (*last).max(reply.cookie);
        written.writes += 1;
        progress.fetch_add(1, Ordering::Relaxed);
    }
}

impl Written {
    /// Fails unless the bytes of the image have each write that was acknowledged, and nothing that wasn't sent.
    pub fn check(&self, image: &[u8]) -> Result<(), Stop> {
        for (&index, &sent) in &self.sent {
            let at = index as usize * BLOCK;
            let found = pattern::block_sequence(&image[at..at + BLOCK], index);
            let least = self.acknowledged.get(&index).copied().unwrap_or(0);
            match found {
                Some(found) if (least..=sent).contains(&found) => {}
                other => {
                    return Stop::fail(format!(
                        "block {index} holds write {other:?}; {least} was acknowledged, {sent} sent last"
                    ));
                }
            }
        }
        Ok(())
    }
}

pub fn has(program: &str) -> bool {
    tools::find(program).is_some()
}
