//! Volumes on NBD servers: servers of other people and our own, killed and started again under load, resized, and asked where their data is.

use pvblk_e2e::outcome::check;
use pvblk_e2e::sandbox::{need_sandbox, user};
use pvblk_e2e::tools::{find, fio_verify, need, need_fio_nbd, run_ok, tool};
use pvblk_e2e::{Daemon, MIB, Stop, full, run_all, stage};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const HANG: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    run_all(&[
        ("fio_verifies_over_killed_qemu_nbd", || {
            killed(Kind::QemuNbd)
        }),
        ("fio_verifies_over_killed_nbdkit", || killed(Kind::Nbdkit)),
        ("fio_verifies_in_a_sandbox_over_killed_qemu_nbd", || {
            killed_in_sandbox(Kind::QemuNbd)
        }),
        ("fio_verifies_in_a_sandbox_over_killed_nbdkit", || {
            killed_in_sandbox(Kind::Nbdkit)
        }),
        ("fio_verifies_over_killed_pvblk", || killed(Kind::Own)),
        ("fio_verifies_over_servers_that_lose_their_cache", || {
            killed(Kind::OwnCache)
        }),
        ("a_larger_export_is_a_resize", resized),
        ("connections_are_as_many_as_asked_for", connections),
        ("holes_of_qemu_nbd_are_seen", || holes(Kind::QemuNbd)),
        ("holes_of_nbdkit_are_seen", || holes(Kind::Nbdkit)),
        ("holes_of_pvblk_are_seen", || holes(Kind::Own)),
    ])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    QemuNbd,
    Nbdkit,
    Own,
    /// Ours with a page cache, which dies with it.
    OwnCache,
}

enum Process {
    Other(Child),
    Own(Daemon),
}

impl Process {
    fn kill(&mut self) -> Result<(), Stop> {
        match self {
            Process::Other(child) => {
                child.kill()?;
                child.wait()?;
                Ok(())
            }
            Process::Own(daemon) => daemon.kill(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.kill();
    }
}

/// A server of a file, in a folder of its own.
struct Origin {
    kind: Kind,
    process: Process,
    dir: Arc<TempDir>,
}

impl Origin {
    fn new(
        kind: Kind,
        bytes: u64,
        prepare: impl FnOnce(&Path) -> Result<(), Stop>,
    ) -> Result<Origin, Stop> {
        match kind {
            Kind::QemuNbd => need(&["qemu-nbd"])?,
            Kind::Nbdkit => need(&["nbdkit"])?,
            Kind::Own | Kind::OwnCache => {}
        }
        let dir = Arc::new(tempfile::tempdir()?);
        let file = dir.path().join("disk.img");
        std::fs::File::create(&file)?.set_len(bytes)?;
        prepare(&file)?;
        let process = start(kind, dir.path())?;
        Ok(Origin { kind, process, dir })
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("disk.img")
    }

    fn uri(&self) -> String {
        stage::uri(&self.dir.path().join("origin"), "a")
    }

    fn kill(&mut self) -> Result<(), Stop> {
        self.process.kill()
    }

    fn start(&mut self) -> Result<(), Stop> {
        self.process = start(self.kind, self.dir.path())?;
        Ok(())
    }

    /// `pvblk serve` in front of it, and the URI of its export.
    fn front(&self, options: &str) -> Result<(Daemon, String), Stop> {
        self.front_with(options, &[])
    }

    fn front_with(&self, options: &str, more: &[&str]) -> Result<(Daemon, String), Stop> {
        let socket = self.dir.path().join("front");
        let disk = format!("b={}{options}", self.uri());
        let nbd = stage::unix(&socket);
        let args = [&["serve", "--disk", &disk, "--nbd", &nbd], more].concat();
        let daemon = Daemon::start(args)?;
        Ok((daemon, stage::uri(&socket, "b")))
    }
}

fn start(kind: Kind, dir: &Path) -> Result<Process, Stop> {
    let (socket, file) = (dir.join("origin"), dir.join("disk.img"));
    // A killed server leaves it behind.
    let _ = std::fs::remove_file(&socket);
    let (at, of) = (socket.display().to_string(), file.display().to_string());
    let (program, args): (&str, Vec<&str>) = match kind {
        Kind::QemuNbd => (
            "qemu-nbd",
            vec![
                "-f",
                "raw",
                "-t",
                "-e",
                "16",
                "-x",
                "a",
                "-k",
                &at,
                "--discard=unmap",
                &of,
            ],
        ),
        Kind::Nbdkit => ("nbdkit", vec!["-f", "-U", &at, "file", &of]),
        Kind::Own | Kind::OwnCache => {
            let cache = if kind == Kind::OwnCache {
                "cache:64M:"
            } else {
                ""
            };
            let disk = format!("a={cache}file:{of}");
            let nbd = stage::unix(&socket);
            return Ok(Process::Own(Daemon::start([
                "serve", "--disk", &disk, "--nbd", &nbd,
            ])?));
        }
    };
    let child = tool(program, args).spawn()?;
    let process = Process::Other(child);
    let begin = Instant::now();
    while UnixStream::connect(&socket).is_err() {
        check(begin.elapsed() < HANG, || {
            format!("{program} doesn't listen")
        })?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(process)
}

/// Kills that are wanted: `PVBLK_NBD_KILLS`, or 20.
fn kills_wanted() -> u32 {
    let text = std::env::var("PVBLK_NBD_KILLS").unwrap_or_default();
    text.parse().unwrap_or(if full() { 100 } else { 20 })
}

/// Kills of a server in front of which ours is in a sandbox, where each connection is made by the parent.
const KILLS_IN_SANDBOX: u32 = 10;

fn killed_in_sandbox(kind: Kind) -> Result<(), Stop> {
    need_sandbox()?;
    killed_with(kind, &["--sandbox", &user()], KILLS_IN_SANDBOX)
}

fn killed(kind: Kind) -> Result<(), Stop> {
    killed_with(kind, &[], kills_wanted())
}

/// fio verifies what it writes while the server is killed and started again, so many times.
fn killed_with(kind: Kind, more: &[&str], wanted: u32) -> Result<(), Stop> {
    need_fio_nbd()?;
    let mut origin = Origin::new(kind, 64 * MIB, |_| Ok(()))?;
    let (mut front, uri) = origin.front_with(",keep=8M", more)?;
    let (stop, kills) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU32::new(0)),
    );
    let killer = std::thread::spawn({
        let (stop, kills) = (Arc::clone(&stop), Arc::clone(&kills));
        move || -> Result<Origin, Stop> {
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(150));
                origin.kill()?;
                origin.start()?;
                kills.fetch_add(1, Ordering::Relaxed);
            }
            Ok(origin)
        }
    });
    let mut result = Ok(());
    let mut round = 0;
    while result.is_ok() && kills.load(Ordering::Relaxed) < wanted && !killer.is_finished() {
        round += 1;
        result = verify(&uri, round);
    }
    stop.store(true, Ordering::Relaxed);
    let mut origin = match killer.join() {
        Ok(origin) => origin?,
        Err(_) => return Stop::fail("the thread that kills servers panicked"),
    };
    result?;
    // nbdkit asks to be ended with the thread that started it.
    origin.kill()?;
    origin.start()?;
    println!("({} kills of {kind:?})", kills.load(Ordering::Relaxed));
    front.stop()?;
    drop(origin);
    Ok(())
}

fn verify(uri: &str, seed: u32) -> Result<(), Stop> {
    let options = [
        "--rw=randwrite",
        "--bssplit=4k/60:16k/20:128k/20",
        "--iodepth=32",
        "--size=64M",
        "--io_size=48M",
        "--verify_backlog=256",
        "--fsync=200",
        &format!("--randseed={seed}"),
    ];
    fio_verify(uri, &options, Duration::from_secs(300))
}

/// The server comes back with a larger disk.
fn resized() -> Result<(), Stop> {
    need(&["nbdinfo"])?;
    let mut origin = Origin::new(Kind::Own, 16 * MIB, |_| Ok(()))?;
    let (mut front, uri) = origin.front("")?;
    let size = || -> Result<u64, Stop> {
        let said = run_ok("nbdinfo", ["--size", &uri])?.stdout;
        Ok(said.trim().parse().unwrap_or_default())
    };
    check(size()? == 16 * MIB, || "another size at the start".into())?;
    origin.kill()?;
    std::fs::OpenOptions::new()
        .write(true)
        .open(origin.file())?
        .set_len(24 * MIB)?;
    origin.start()?;
    let begin = Instant::now();
    while size()? != 24 * MIB {
        check(begin.elapsed() < HANG, || "the new size isn't seen".into())?;
        std::thread::sleep(Duration::from_millis(20));
    }
    front.stop()
}

/// As many sockets more as connections more were asked for.
fn connections() -> Result<(), Stop> {
    let sockets = |options: &str| -> Result<usize, Stop> {
        let origin = Origin::new(Kind::Own, 16 * MIB, |_| Ok(()))?;
        let (mut front, _) = origin.front(options)?;
        let folder = format!("/proc/{}/fd", front.serving_pid()?);
        let links = std::fs::read_dir(folder)?.filter_map(Result::ok);
        let links = links.filter_map(|l| std::fs::read_link(l.path()).ok());
        let count = links
            .filter(|l| l.to_string_lossy().starts_with("socket:"))
            .count();
        front.stop()?;
        Ok(count)
    };
    let (one, four) = (sockets(",connections=1")?, sockets(",connections=4")?);
    check(four == one + 3, || {
        format!("{one} sockets with 1, {four} with 4")
    })
}

/// The map of the server's export and of the disk that is over it.
fn holes(kind: Kind) -> Result<(), Stop> {
    need(&["nbdinfo"])?;
    let origin = Origin::new(kind, 64 * MIB, |disk| {
        let file = std::fs::OpenOptions::new().write(true).open(disk)?;
        for at in [0, 5, 16, 17, 40] {
            file.write_all_at(&[0x5a; 300_000], at * MIB)?;
        }
        Ok(file.sync_all()?)
    })?;
    let (mut front, uri) = origin.front("")?;
    let (theirs, ours) = (map(&origin.uri())?, map(&uri)?);
    check(theirs.len() > 3, || {
        format!("the server tells no holes: {theirs:?}")
    })?;
    check(ours == theirs, || format!("{ours:?} over {theirs:?}"))?;
    // Written sectors are data at once.
    let write = format!("write -P 9 {} 65536", 30 * MIB);
    if find("qemu-io").is_some() {
        run_ok("qemu-io", ["-f", "raw", "-c", &write, &uri])?;
        let (theirs, ours) = (map(&origin.uri())?, map(&uri)?);
        check(ours == theirs, || {
            format!("after a write {ours:?} over {theirs:?}")
        })?;
    }
    front.stop()
}

/// Extents as offset, length and whether they read as zeros; neighbours of one kind are one.
fn map(uri: &str) -> Result<Vec<(u64, u64, bool)>, Stop> {
    let said = run_ok("nbdinfo", ["--map", "--json", uri])?.stdout;
    let all: Value = serde_json::from_str(&said)?;
    let mut out: Vec<(u64, u64, bool)> = Vec::new();
    for e in all.as_array().into_iter().flatten() {
        let number = |key: &str| e[key].as_u64().unwrap_or_default();
        let (offset, length, zero) = (number("offset"), number("length"), number("type") & 2 != 0);
        match out.last_mut() {
            Some(last) if last.2 == zero && last.0 + last.1 == offset => last.1 += length,
            _ => out.push((offset, length, zero)),
        }
    }
    Ok(out)
}
