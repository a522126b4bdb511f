//! Virtual machines on disks that `pvblk serve --vhost-user` serves: QEMU's own vhost-user-blk device, SeaBIOS, and a Linux guest.

use pvblk_e2e::arrays::{Disks, raid};
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{bound, find, need, run};
use pvblk_e2e::{Daemon, MIB, Stop, full, run_all, vm};
use rustix::process::Signal;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("a_bios_boots_from_a_served_disk", boots),
        ("a_guest_uses_one_queue", || uses(1)),
        ("a_guest_uses_four_queues", || uses(4)),
        ("a_guest_sees_a_disk_grow", grows),
        ("a_guest_survives_killed_servers", survives),
        (
            "a_guest_survives_a_lost_member_of_its_raid5",
            loses_a_member,
        ),
    ])
}

/// A disk of a file, its server, and where the guest finds it.
struct Served {
    dir: TempDir,
    daemon: Daemon,
}

impl Served {
    fn start(bytes: u64) -> Result<Served, Stop> {
        Served::start_on(bytes, "")
    }

    /// With this in front of the file.
    fn start_on(bytes: u64, decorator: &str) -> Result<Served, Stop> {
        let dir = tempfile::tempdir()?;
        File::create(dir.path().join("disk"))?.set_len(bytes)?;
        let daemon = Served::serve(dir.path(), decorator)?;
        Ok(Served { dir, daemon })
    }

    fn serve(dir: &Path, decorator: &str) -> Result<Daemon, Stop> {
        let volume = format!("vm={decorator}file:{}", dir.join("disk").display());
        let socket = format!("vm=unix:{}", dir.join("socket").display());
        Daemon::start([
            "serve",
            "--disk",
            &volume,
            "--vhost-user",
            &socket,
            "--max-queues",
            "4",
        ])
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self) -> Result<File, Stop> {
        Ok(File::options()
            .read(true)
            .write(true)
            .open(self.path("disk"))?)
    }

    fn machine(&self, queues: usize) -> vm::Machine {
        vm::Machine {
            vhost: vec![self.path("socket")],
            queues,
            cpus: queues.max(2),
            ..vm::Machine::default()
        }
    }
}

/// Reads sector 1 through the BIOS, writes it to sector 2, prints it on the serial port, and ends QEMU.
const BOOT: &[u8] = &[
    0x31, 0xc0, // xor ax, ax
    0x8e, 0xd8, 0x8e, 0xc0, // mov ds, ax; mov es, ax
    0xb8, 0x01, 0x02, 0xbb, 0x00, 0x7e, // mov ax, 0x0201; mov bx, 0x7e00
    0xb9, 0x02, 0x00, 0xb6, 0x00, 0xcd, 0x13, // mov cx, 2; mov dh, 0; int 0x13
    0xb8, 0x01, 0x03, // mov ax, 0x0301
    0xb9, 0x03, 0x00, 0xb6, 0x00, 0xcd, 0x13, // mov cx, 3; mov dh, 0; int 0x13
    0xbe, 0x00, 0x7e, 0xba, 0xf8, 0x03, // mov si, 0x7e00; mov dx, 0x3f8
    0xac, 0x84, 0xc0, 0x74, 0x03, 0xee, 0xeb, 0xf8, // lodsb; until zero: out dx, al
    0xba, 0xf4, 0x00, 0xb0, 0x10, 0xee, // mov dx, 0xf4; mov al, 16; out dx, al
    0xf4, 0xeb, 0xfd, // hlt
];
/// Exit status of QEMU when its debug exit device gets a 16.
const EXIT: i32 = 33;

fn boots() -> Result<(), Stop> {
    need(&["qemu-system-x86_64"])?;
    let mut served = Served::start(MIB)?;
    let disk = served.file()?;
    disk.write_all_at(BOOT, 0)?;
    disk.write_all_at(&[0x55, 0xaa], 510)?;
    let text = format!("from the served disk, {:x}\n", pvblk_testing::seed());
    disk.write_all_at(text.as_bytes(), 512)?;
    // Two machines, one after the other, at the same server.
    for round in 0..2 {
        disk.write_all_at(&[0; 512], 1024)?;
        let serial = served.path("serial");
        let Some(qemu) = find("qemu-system-x86_64") else {
            return Stop::skip("no qemu-system-x86_64");
        };
        let mut command = bound(qemu, "KILL");
        command.args([
            "-machine",
            "q35,memory-backend=m",
            "-accel",
            "tcg",
            "-m",
            "64",
        ]);
        command.args(["-object", "memory-backend-memfd,id=m,size=64M,share=on"]);
        command.args([
            "-display",
            "none",
            "-nodefaults",
            "-no-reboot",
            "-boot",
            "strict=on",
        ]);
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
        command
            .arg("-serial")
            .arg(format!("file:{}", serial.display()));
        let socket = served.path("socket");
        command
            .arg("-chardev")
            .arg(format!("socket,id=c,path={}", socket.display()));
        command.args([
            "-device",
            "vhost-user-blk-pci,chardev=c,num-queues=1,bootindex=0",
        ]);
        let done = run(command, Duration::from_secs(120))?;
        if done.status.and_then(|s| s.code()) != Some(EXIT) {
            return Err(served.daemon.failure(&format!("round {round}: {done:?}")));
        }
        let said = std::fs::read_to_string(serial)?;
        check(said == text, || {
            format!("the serial port said {said:?} and not {text:?}")
        })?;
        let mut sectors = [0; 1024];
        disk.read_exact_at(&mut sectors, 512)?;
        check(sectors[..512] == sectors[512..], || {
            "what the BIOS wrote isn't there".into()
        })?;
    }
    served.daemon.stop()
}

const GUEST_TIME: Duration = Duration::from_secs(1200);

fn guest(script: &str, machine: &vm::Machine, out: &Path) -> Result<String, Stop> {
    vm::script_on(vm::Kind::Qemu, &vm::named(script), machine, out, GUEST_TIME)
}

/// The server still serves, and has nothing to complain about.
fn quiet(mut daemon: Daemon) -> Result<(), Stop> {
    daemon.stop()?;
    match daemon.complaint() {
        None => Ok(()),
        Some(line) => Err(daemon.failure(&format!("complained: {line}"))),
    }
}

fn uses(queues: usize) -> Result<(), Stop> {
    let served = Served::start(96 * MIB)?;
    let said = guest("vhost-io.sh", &served.machine(queues), &served.path("out"))?;
    for line in [
        format!("queues {queues}"),
        "serial vm".into(),
        format!("sectors {}", 96 * MIB / 512),
        "cache write back".into(),
        "fio verified".into(),
        "discarded and zeroed".into(),
        "all well".into(),
    ] {
        let there = said.lines().any(|l| l == line);
        check(there, || format!("no line {line:?} in:\n{said}"))?;
    }
    quiet(served.daemon)
}

/// Waits until the guest has written `text` at `offset`.
fn wait_for(file: &File, offset: u64, text: &[u8], over: &AtomicBool) -> Result<(), Stop> {
    vm::wait_for(
        file,
        (offset, text.len()),
        |seen| seen == text,
        over,
        GUEST_TIME,
    )
}

/// Runs a guest, and `beside` it with a mark that is set when the guest is over.
fn with_guest(
    script: &str,
    machine: &vm::Machine,
    out: &Path,
    beside: impl FnOnce(&AtomicBool) -> Result<(), Stop>,
) -> Result<String, Stop> {
    let (said, ()) = vm::beside(|| guest(script, machine, out), beside)?;
    Ok(said)
}

fn grows() -> Result<(), Stop> {
    let served = Served::start(8 * MIB)?;
    let file = served.file()?;
    let out = served.path("out");
    let said = with_guest("vhost-resize.sh", &served.machine(1), &out, |over| {
        wait_for(&file, 0, b"ready", over)?;
        file.set_len(12 * MIB)?;
        served.daemon.signal(Signal::HUP)
    })?;
    let line = format!("from {} to {}", 8 * MIB, 12 * MIB);
    check(said.lines().any(|l| l == line), || {
        format!("no line {line:?} in:\n{said}")
    })?;
    let mut end = [0; 7];
    file.read_exact_at(&mut end, 12 * MIB - 512)?;
    check(&end == b"the end", || format!("{end:?} at the new end"))?;
    quiet(served.daemon)
}

/// Number of queues that did again the requests that the server before had left.
fn redone(server: &Daemon) -> usize {
    let lines = server.lines();
    lines
        .iter()
        .filter(|l| l.contains("are done again"))
        .count()
}

fn survives() -> Result<(), Stop> {
    let kills = if full() { 20 } else { 3 };
    // A slow disk, so that most kills find requests in flight.
    const SLOW: &str = "delay:5ms:";
    let Served { dir, daemon } = Served::start_on(8 * MIB, SLOW)?;
    let path = |name: &str| dir.path().join(name);
    let file = File::options().read(true).write(true).open(path("disk"))?;
    let machine = vm::Machine {
        vhost: vec![path("socket")],
        queues: 2,
        cpus: 2,
        ..vm::Machine::default()
    };
    let mut rng = pvblk_testing::random();
    let mut server = Some(daemon);
    let mut again = 0;
    let out = path("out");
    let said = with_guest("vhost-kill.sh", &machine, &out, |over| {
        let round = |n: usize| format!("round {n}\n").into_bytes();
        wait_for(&file, MIB - 512, &round(1), over)?;
        for kill in 0..kills {
            std::thread::sleep(Duration::from_millis(rng.u64(200..1500)));
            if over.load(Ordering::Acquire) {
                return Stop::fail(format!("the guest was over before kill {kill}"));
            }
            if let Some(mut old) = server.take() {
                again += redone(&old);
                old.kill()?;
            }
            std::thread::sleep(Duration::from_millis(rng.u64(0..300)));
            let new = Served::serve(dir.path(), SLOW)?;
            // It has to come back before the next kill counts.
            let connected = Instant::now() + Duration::from_secs(120);
            while !new.lines().iter().any(|l| l.contains("connected")) {
                check(Instant::now() < connected, || {
                    format!("kill {kill}: QEMU didn't come back")
                })?;
                std::thread::sleep(Duration::from_millis(20));
            }
            server = Some(new);
        }
        std::thread::sleep(Duration::from_secs(2));
        Ok(file.write_all_at(b"stop", 0)?)
    })?;
    check(said.lines().any(|l| l == "all well"), || said.clone())?;
    again += server.as_ref().map_or(0, redone);
    let rounds = said.lines().next().unwrap_or_default();
    println!("{kills} kills, {rounds}; queues that had requests to do again: {again}");
    // Of many kills one finds requests in flight, or this test shows nothing.
    check(!full() || again > 0, || "nothing was ever in flight".into())?;
    server.map_or(Ok(()), quiet)
}

/// The array loses a member under load, gets another, and rebuilds it.
fn loses_a_member() -> Result<(), Stop> {
    let disks = Disks::new(4)?;
    raid(
        &["create", "--raid-devices", "3", "--chunk", "64K"],
        &disks.paths(0..3),
    )?;
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    File::create(path("disk"))?.set_len(MIB)?;
    let members: String = disks
        .paths(0..3)
        .iter()
        .map(|p| format!("[file:{}]", p.display()))
        .collect();
    let at = |name: &str| format!("unix:{}", path(name).display());
    let mut daemon = Daemon::start([
        "serve".into(),
        "--disk".into(),
        format!("r=raid5:{members}"),
        "--disk".into(),
        format!("control=file:{}", path("disk").display()),
        "--vhost-user".into(),
        format!("r={}", at("array")),
        "--vhost-user".into(),
        format!("control={}", at("socket")),
        "--control".into(),
        at("ctl"),
    ])?;
    let manage = |word: &str, args: &[&str]| -> Result<String, Stop> {
        let mut command = pvblk(["raid", word, "--control", &at("ctl"), "r"])?;
        command.args(args);
        Ok(run(command, Duration::from_secs(300))?.success()?.stdout)
    };
    let machine = vm::Machine {
        vhost: vec![path("array"), path("socket")],
        queues: 2,
        ..vm::Machine::default()
    };
    let file = File::options().read(true).write(true).open(path("disk"))?;
    let out = path("out");
    let said = with_guest("vhost-kill.sh", &machine, &out, |over| {
        let round = |n: usize| format!("round {n}\n").into_bytes();
        wait_for(&file, MIB - 512, &round(1), over)?;
        manage("fail", &["1"])?;
        wait_for(&file, MIB - 512, &round(2), over)?;
        manage("add", &[&format!("file:{}", disks.path(3).display())])?;
        manage("wait", &[])?;
        Ok(file.write_all_at(b"stop", 0)?)
    });
    let said = match said {
        Ok(said) => said,
        Err(Stop::Fail(text)) => return Err(daemon.failure(&text)),
        Err(skip) => return Err(skip),
    };
    check(said.lines().any(|l| l == "all well"), || said.clone())?;
    let checked = manage("check", &["--wait"])?;
    check(checked == "mismatch_cnt: 0\n", || checked)?;
    daemon.stop()
}
