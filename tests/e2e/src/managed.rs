//! Arrays that are managed while they are served, with `pvblk raid --control`.

use crate::arrays::{Disks, detail, raid, scribble};
use crate::daemon::pvblk;
use crate::outcome::check;
use crate::stage::{unix, uri};
use crate::tools::{Finished, run, run_ok};
use crate::{Daemon, Stop};
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// For what takes a moment on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A server of the array `r`, with a control socket.
pub struct Managed {
    pub daemon: Daemon,
    dir: TempDir,
}

impl Managed {
    /// Serves these members.
    pub fn start(members: &[String]) -> Result<Managed, Stop> {
        let each: String = members.iter().map(|m| format!("[{m}]")).collect();
        Managed::of(&format!("raid5:{each}"))
    }

    /// Serves this volume.
    pub fn of(volume: &str) -> Result<Managed, Stop> {
        let dir = tempfile::tempdir()?;
        let path = |name: &str| unix(&dir.path().join(name));
        let disk = format!("r={volume}");
        let (nbd, control, local) = (path("nbd"), path("control"), path("local"));
        let args = ["serve", "--disk", &disk, "--nbd", &nbd, "--local", &local];
        let daemon = Daemon::start(args.iter().chain(&["--control", &control]))?;
        Ok(Managed { daemon, dir })
    }

    /// A file in the folder of its sockets: `nbd`, `control`, `local`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `pvblk raid WORD --control SOCKET r ARGS`
    pub fn try_raid(&self, word: &str, args: &[&str]) -> Result<Finished, Stop> {
        let control = unix(&self.path("control"));
        let mut command = pvblk(["raid", word, "--control", &control, "r"])?;
        command.args(args);
        run(command, PATIENCE)
    }

    /// Runs `pvblk raid`, which must succeed; returns its output.
    pub fn raid(&self, word: &str, args: &[&str]) -> Result<String, Stop> {
        Ok(self.try_raid(word, args)?.success()?.stdout)
    }

    /// `pvblk raid detail --json`
    pub fn detail(&self) -> Result<Value, Stop> {
        Ok(serde_json::from_str(&self.raid("detail", &["--json"])?)?)
    }

    /// Waits until the array is so.
    pub fn until(&self, what: &str, is: impl Fn(&Value) -> bool) -> Result<Value, Stop> {
        let begin = Instant::now();
        loop {
            let detail = self.detail()?;
            if is(&detail) {
                return Ok(detail);
            }
            if begin.elapsed() > PATIENCE {
                return Err(self.daemon.failure(&format!("never {what}: {detail}")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// All parity is right, as the array itself finds.
    pub fn parity_is_right(&self) -> Result<(), Stop> {
        let mut checked = self.try_raid("check", &["--wait"])?;
        let ended = ["run it again", "ended when a member failed"];
        if ended.iter().any(|why| checked.stderr.contains(why)) {
            // A member that reads badly failed or was replaced while it was checked.
            self.raid("wait", &[])?;
            checked = self.try_raid("check", &["--wait"])?;
        }
        let said = checked.success()?.stdout;
        check(said == "mismatch_cnt: 0\n", || said)
    }

    /// Copies all of it to a file.
    pub fn read(&self, to: &Path) -> Result<(), Stop> {
        let uri = uri(&self.path("nbd"), "r");
        run_ok("nbdcopy", [uri.as_ref(), to.as_os_str()]).map(drop)
    }

    /// Writes all of it from a file, and flushes.
    pub fn write(&self, from: &Path) -> Result<(), Stop> {
        let uri = uri(&self.path("nbd"), "r");
        let args = ["--flush".as_ref(), from.as_os_str(), uri.as_ref()];
        run_ok("nbdcopy", args).map(drop)
    }
}

/// A new array of four members, with more files besides, and an image as large as it.
pub fn array(files: usize, policy: &str) -> Result<(Disks, PathBuf), Stop> {
    let disks = Disks::new(files)?;
    let args = ["create", "--raid-devices", "4", "--chunk", "64K"];
    let policy = ["--consistency-policy", policy];
    raid(&[&args[..], &policy].concat(), &disks.paths(0..4))?;
    let bytes = detail(&disks.paths(0..4))?["array_bytes"].as_u64();
    let image = disks.dir.path().join("image");
    File::create(&image)?.set_len(bytes.unwrap_or(0))?;
    scribble(&image, &mut pvblk_testing::random())?;
    Ok((disks, image))
}

/// The same, and the last file is its spare.
pub fn array_with_spare() -> Result<Disks, Stop> {
    let disks = array(5, "ppl")?.0;
    raid(&["add", "--spare", &name(&disks, 4)], &disks.paths(0..4))?;
    Ok(disks)
}

/// Paths of these files.
pub fn names(disks: &Disks, which: &[usize]) -> Vec<String> {
    let name = |n: &usize| disks.path(*n).display().to_string();
    which.iter().map(name).collect()
}

/// Path of one of them.
pub fn name(disks: &Disks, n: usize) -> String {
    disks.path(n).display().to_string()
}

/// State of the device at a place, and the name of its file.
pub fn at(detail: &Value, place: u64) -> (&str, &str) {
    let members = detail["members"].as_array().map_or(&[][..], Vec::as_slice);
    let member = members.iter().find(|m| m["place"] == place);
    let text = |key: &str| member.and_then(|m| m[key].as_str()).unwrap_or_default();
    let file = text("name").rsplit('/').next().unwrap_or_default();
    (text("state"), file)
}

/// A field that `mdadm --examine` prints.
pub fn examined(path: &Path, key: &str) -> Result<String, Stop> {
    let said = run_ok("mdadm", ["--examine".as_ref(), path.as_os_str()])?.stdout;
    let line = said
        .lines()
        .filter_map(|l| l.split_once(" : "))
        .find(|(k, _)| k.trim() == key);
    match line {
        Some((_, value)) => Ok(value.trim().to_owned()),
        None => Stop::fail(format!("mdadm tells no {key}:\n{said}")),
    }
}

/// Bytes that are rebuilt of the device at a place.
pub fn rebuilt(detail: &Value, place: u64) -> u64 {
    let members = detail["members"].as_array().map_or(&[][..], Vec::as_slice);
    let members = members.iter().filter(|m| m["place"] == place);
    members
        .filter_map(|m| m["rebuilt_bytes"].as_u64())
        .sum::<u64>()
}
