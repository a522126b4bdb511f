//! An orderly stop beside a disk that hangs or fails: every healthy disk's acknowledged writes are on its
//! backing afterwards, and the log and the exit status name the other disks.
//! the log and the exit status say what couldn't be done, for which disk.

use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::slow_medium::{Kind, Rule, SlowMedium};
use pvblk_e2e::{Daemon, MIB, Stop, run_all, stage};
use rustix::process::Signal;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("a_failing_disk_keeps_no_other_from_its_flush", failing),
        (
            "a_pending_read_or_a_hung_medium_keeps_no_other_from_its_flush",
            pending_or_hung,
        ),
        ("healthy_disks_are_flushed_and_all_is_well", healthy),
    ])
}

/// A limit far above the time that the documentation allows for a stop.
const STOP: Duration = Duration::from_secs(120);
const BLOCK: usize = 64 << 10;
const DATA: u8 = 0x5a;

/// A server with a cached disk `good`, and others before it and behind it.
struct Scene {
    daemon: Daemon,
    dir: TempDir,
}

impl Scene {
    fn new(before: &[&str], behind: &[&str]) -> Result<Scene, Stop> {
        let dir = tempfile::tempdir()?;
        let good = dir.path().join("good.img");
        File::create(&good)?.set_len(16 * MIB)?;
        // A page that stays dirty until a flush.
        let good = format!("good=cache:4M:file:{}", good.display());
        let mut args = vec!["serve".to_owned()];
        for disk in [before, &[&good], behind].concat() {
            args.extend(["--disk".to_owned(), disk.to_owned()]);
        }
        args.extend(["--nbd".to_owned(), stage::unix(&dir.path().join("nbd"))]);
        Ok(Scene {
            daemon: Daemon::start(args)?,
            dir,
        })
    }

    fn nbd(&self) -> PathBuf {
        self.dir.path().join("nbd")
    }

    /// Writes to a disk without a flush, and waits for the reply.
    fn write(&self, disk: &str) -> Result<Connection, Stop> {
        let mut connection = Connection::open(&self.nbd(), disk)?;
        connection.send(Command::Write, 1, 0, &[DATA; BLOCK])?;
        let reply = connection.receive()?;
        check(reply.is_some_and(|r| r.error == 0), || {
            format!("{disk}: a write was answered with {reply:?}")
        })?;
        Ok(connection)
    }

    /// The acknowledged write to `good` is in its file.
    fn good_is_kept(&self) -> Result<(), Stop> {
        check(holds(&self.dir.path().join("good.img"))?, || {
            let said = self.daemon.lines().join("\n  | ");
            format!("an acknowledged write to a healthy disk is lost; the server said\n  | {said}")
        })
    }

    /// Checks the server's last lines about `disk`.
    fn said_about(&self, disk: &str) -> Result<(), Stop> {
        let lines = self.daemon.lines();
        // The log also has lines on connections to disks.
        let after = lines.iter().skip_while(|l| *l != "pvblk: ready");
        let after = after.filter(|l| !l.contains(" INFO "));
        check(after.clone().any(|l| names(l, disk)), || {
            format!("the server said nothing about disk {disk}: {lines:#?}")
        })?;
        check(!after.clone().any(|l| names(l, "good")), || {
            format!("the server complained of the healthy disk: {lines:#?}")
        })
    }
}

/// True if a line names a disk.
fn names(line: &str, disk: &str) -> bool {
    line.split(|c: char| !c.is_ascii_alphanumeric())
        .any(|w| w == disk)
}

fn holds(file: &Path) -> Result<bool, Stop> {
    let mut data = vec![0; BLOCK];
    File::open(file)?.read_exact_at(&mut data, 0)?;
    Ok(data.iter().all(|&b| b == DATA))
}

fn failing() -> Result<(), Stop> {
    for (before, behind) in [
        (&["bad=fault:error=1:mem:16M"][..], &[][..]),
        (&[], &["bad=fault:error=1:mem:16M"]),
    ] {
        let mut scene = Scene::new(before, behind)?;
        let connection = scene.write("good")?;
        scene.daemon.signal(Signal::TERM)?;
        let status = scene.daemon.wait(STOP)?;
        drop(connection);
        scene.good_is_kept()?;
        check(!status.success(), || {
            "the server ended with status 0, though a disk couldn't be flushed".into()
        })?;
        scene.said_about("bad")?;
    }
    Ok(())
}

/// Side by side, because both wait until the server's patience ends.
fn pending_or_hung() -> Result<(), Stop> {
    let pending = std::thread::spawn(pending);
    let hung = hung();
    let pending = pending.join();
    pending.unwrap_or_else(|_| Stop::fail("the test of a pending read panicked"))?;
    hung
}

fn pending() -> Result<(), Stop> {
    let slow = SlowMedium::new()?;
    let file = slow.add("late", 16 * MIB)?;
    let late = format!("late=delay:300s:file:{},direct", file.display());
    let mut scene = Scene::new(&[&late], &[])?;
    // Declared last: a failure ends the medium before it waits for the server.
    let medium = slow;
    let mut waits = Connection::open(&scene.nbd(), "late")?;
    let connection = scene.write("good")?;
    // When the medium has it, the disk has it.
    medium.set("late", &[Kind::Read], Rule::Hold);
    waits.send_read(1, 0, 4096)?;
    medium.wait_held("late", &[Kind::Read], 1)?;
    medium.heal("late");
    scene.daemon.signal(Signal::TERM)?;
    let status = scene.daemon.wait(STOP)?;
    drop(connection);
    scene.good_is_kept()?;
    check(!status.success(), || {
        "the server ended with status 0, though a read wasn't answered".into()
    })?;
    scene.said_about("late")
}

/// A disk on a medium that completes no flush. The process may remain until the medium completes it; the
/// process' report, and the flushes of other disks, don't wait for that.
/// others doesn't wait for that.
fn hung() -> Result<(), Stop> {
    let slow = SlowMedium::new()?;
    let disk = slow.add("stuck", 16 * MIB)?;
    let stuck = format!("stuck=cache:4M:file:{}", disk.display());
    let mut scene = Scene::new(&[&stuck], &[])?;
    // Declared last: a failure ends the medium before it waits for the server.
    let medium = slow;
    let connections = [scene.write("stuck")?, scene.write("good")?];
    medium.set("stuck", &[Kind::Fsync], Rule::Hold);
    scene.daemon.signal(Signal::TERM)?;
    medium.wait_held("stuck", &[Kind::Fsync], 1)?;
    let good = scene.dir.path().join("good.img");
    let deadline = Instant::now() + STOP;
    while !holds(&good)? && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    scene.good_is_kept()?;
    while scene.said_about("stuck").is_err() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    scene.said_about("stuck")?;
    medium.heal("*");
    scene.daemon.wait(STOP)?;
    drop(connections);
    Ok(())
}

fn healthy() -> Result<(), Stop> {
    let mut scene = Scene::new(&["other=mem:16M"], &[])?;
    let connection = scene.write("good")?;
    scene.daemon.stop()?;
    drop(connection);
    scene.good_is_kept()
}
