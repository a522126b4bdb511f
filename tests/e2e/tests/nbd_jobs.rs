//! QEMU's block jobs onto a disk of ours and from it, while somebody writes to the disk that is copied.

use pvblk_e2e::outcome::check;
use pvblk_e2e::qmp::StorageDaemon;
use pvblk_e2e::tools::{compare, need, run, run_ok, tool};
use pvblk_e2e::{Daemon, MIB, Stop, pattern, run_all, stage};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tempfile::TempDir;

const SIZE: u64 = 64 * MIB;
const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    run_all(&[
        ("a_running_disk_is_mirrored_onto_ours", || mirror(false)),
        ("our_running_disk_is_mirrored", || mirror(true)),
        ("a_running_disk_is_backed_up_onto_ours", || backup(false)),
        ("our_running_disk_is_backed_up", || backup(true)),
    ])
}

/// A disk of ours and a file, both nodes of QEMU's daemon; the source of the job is an export of its own, to be written to.
struct Bed {
    folder: TempDir,
    server: Daemon,
    qemu: StorageDaemon,
}

impl Bed {
    /// `ours`: the disk of ours is the source, else the target.
    fn new(ours: bool) -> Result<Bed, Stop> {
        need(&["qemu-storage-daemon", "qemu-io", "qemu-img", "cmp"])?;
        let folder = tempfile::tempdir()?;
        let at = |name: &str| folder.path().join(name).display().to_string();
        for (name, is_source) in [("ours.img", ours), ("file.img", !ours)] {
            let path = folder.path().join(name);
            match is_source {
                true => pattern::write(&path, SIZE, 7)?,
                false => std::fs::File::create(&path)?.set_len(SIZE)?,
            }
        }
        let (disk, socket) = (format!("a=file:{}", at("ours.img")), at("nbd.sock"));
        let listen = format!("unix:{socket}");
        let server = Daemon::start(["serve", "--disk", &disk, "--nbd", &listen])?;
        let mut qemu = StorageDaemon::start(folder.path())?;
        let nbd = json!({
            "driver": "raw", "node-name": "ours", "discard": "unmap",
            "file": {"driver": "nbd", "export": "a", "server": {"type": "unix", "path": socket}},
        });
        let file = json!({
            "driver": "raw", "node-name": "file", "discard": "unmap",
            "file": {"driver": "file", "filename": at("file.img")},
        });
        qemu.ask("blockdev-add", nbd)?;
        qemu.ask("blockdev-add", file)?;
        let address = json!({"type": "unix", "data": {"path": at("export.sock")}});
        qemu.ask("nbd-server-start", json!({"addr": address}))?;
        let source = if ours { "ours" } else { "file" };
        let export = json!({
            "type": "nbd", "id": "e", "node-name": source, "name": "source", "writable": true,
        });
        qemu.ask("block-export-add", export)?;
        Ok(Bed {
            folder,
            server,
            qemu,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The source as a user of QEMU's daemon has it.
    fn source(&self) -> String {
        stage::uri(&self.path("export.sock"), "source")
    }

    /// Starts a job from the source onto the other node.
    fn start(&mut self, command: &str, ours: bool, more: Value) -> Result<(), Stop> {
        let (from, to) = if ours {
            ("ours", "file")
        } else {
            ("file", "ours")
        };
        let mut all = json!({"job-id": "job", "device": from, "target": to, "sync": "full"});
        for (key, value) in more.as_object().into_iter().flatten() {
            all[key] = value.clone();
        }
        self.qemu.ask(command, all).map(drop)
    }

    /// Ends both programs, so that the files have everything.
    fn end(self) -> Result<TempDir, Stop> {
        let Bed {
            folder,
            mut server,
            mut qemu,
        } = self;
        qemu.ask("quit", json!({}))?;
        drop(qemu);
        server.stop()?;
        Ok(folder)
    }
}

/// Writes to the disk, again and again at other places.
fn write_some(uri: &str, round: u64) -> Result<(), Stop> {
    let mut args = vec!["-f".to_owned(), "raw".into()];
    for n in 0..16 {
        let at = (round * 16 + n) * 7919 * 4096 % (SIZE - MIB);
        let byte = 1 + (round * 16 + n) % 250;
        let kind = match n % 4 {
            3 => "write -z".to_owned(),
            _ => format!("write -P {byte}"),
        };
        args.extend(["-c".into(), format!("{kind} {at} 48k")]);
    }
    args.push(uri.to_owned());
    let said = run(tool("qemu-io", &args), LIMIT)?.success()?;
    check(!said.stdout.contains("fail"), || said.stdout.clone())
}

/// Runs `job` beside a writer.
fn beside_writes(uri: String, job: impl FnOnce() -> Result<(), Stop>) -> Result<(), Stop> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let writer = s.spawn(|| {
            let mut round = 0;
            loop {
                write_some(&uri, round)?;
                round += 1;
                if stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
            }
        });
        let done = job();
        stop.store(true, Ordering::Relaxed);
        let written: Result<(), Stop> = writer
            .join()
            .unwrap_or_else(|_| Stop::fail("the writer panicked"));
        done?;
        written
    })
}

/// The target follows the source, whatever is written to it, until the job is completed.
fn mirror(ours: bool) -> Result<(), Stop> {
    let mut bed = Bed::new(ours)?;
    let uri = bed.source();
    beside_writes(uri.clone(), || {
        bed.start("blockdev-mirror", ours, json!({"copy-mode": "background"}))?;
        bed.qemu.wait_for("BLOCK_JOB_READY", "job")
    })?;
    // What is written once both are the same is copied, too.
    write_some(&uri, 1000)?;
    bed.qemu
        .ask("block-job-complete", json!({"device": "job"}))?;
    bed.qemu.wait_for("BLOCK_JOB_COMPLETED", "job")?;
    let folder = bed.end()?;
    let (a, b) = (
        folder.path().join("ours.img"),
        folder.path().join("file.img"),
    );
    compare(&a, &b)?;
    // By QEMU's eyes as well.
    same(&a, &b)
}

fn same(a: &Path, b: &Path) -> Result<(), Stop> {
    let names = [a, b].map(|p| p.display().to_string());
    let args = ["compare", "-f", "raw", "-F", "raw", &names[0], &names[1]];
    run_ok("qemu-img", args).map(drop)
}

/// The target is the source as it was when the job began, whatever is written to it meanwhile.
fn backup(ours: bool) -> Result<(), Stop> {
    let mut bed = Bed::new(ours)?;
    let uri = bed.source();
    let source = if ours { "ours.img" } else { "file.img" };
    let target = if ours { "file.img" } else { "ours.img" };
    let before = bed.path("before.img");
    write_some(&uri, 2000)?;
    std::fs::copy(bed.path(source), &before)?;
    // A slow job, so that writes find parts that aren't copied yet.
    bed.start("blockdev-backup", ours, json!({"speed": 16 * MIB}))?;
    write_some(&uri, 3000)?;
    beside_writes(uri, || {
        bed.qemu
            .ask("block-job-set-speed", json!({"device": "job", "speed": 0}))?;
        bed.qemu.wait_for("BLOCK_JOB_COMPLETED", "job")
    })?;
    let folder = bed.end()?;
    compare(&before, &folder.path().join(target))?;
    let after = folder.path().join(source);
    check(same(&before, &after).is_err(), || {
        "nothing was written to the source".into()
    })
}
