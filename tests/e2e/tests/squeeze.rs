//! Memory pressure while data moves: nothing may change but how much memory there is.

use pvblk_e2e::daemon::{self, pvblk};
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::unix;
use pvblk_e2e::tools::{fio_verify, need, need_fio_nbd, run, run_ok, tool};
use pvblk_e2e::{Daemon, MIB, Stop, full, run_all};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;

fn main() -> ExitCode {
    run_all(&[
        ("fio_verifies_a_file_while_squeezed", || {
            verified(
                |dir| format!("file:{},size=128M", dir.join("a.img").display()),
                false,
            )
        }),
        ("fio_verifies_raid5_over_rings_while_squeezed", || {
            verified(raid5, true)
        }),
        ("fio_verifies_a_cache_while_squeezed", || {
            verified(
                |dir| format!("cache:32M:file:{},size=128M", dir.join("a.img").display()),
                false,
            )
        }),
        ("idle_disks_give_everything_back", idle_disks),
        ("limits_change_while_running", limits_change),
        (
            "a_group_at_its_limit_squeezes_by_itself",
            group_at_its_limit,
        ),
        ("mounts_of_others_are_not_kept_busy", others_mounts),
    ])
}

fn raid5(dir: &Path) -> String {
    let parts: Vec<String> = ["m0", "m1", "m2"]
        .iter()
        .map(|m| format!("file:{}", dir.join(m).display()))
        .collect();
    format!("raid5:[{}]", parts.join("]["))
}

/// Asks a server about its memory.
fn ask(control: &Path, question: &str) -> Result<Value, Stop> {
    let mut socket = UnixStream::connect(control)?;
    writeln!(socket, "memory {question}")?;
    let mut lines = BufReader::new(socket).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    if first != "ok" {
        return Stop::fail(format!("asked {question}: {first}"));
    }
    Ok(serde_json::from_str(
        &lines.next().transpose()?.unwrap_or_default(),
    )?)
}

fn report(control: &Path) -> Result<Value, Stop> {
    ask(control, r#"{"memory":"report"}"#)
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(u64::MAX)
}

/// Squeezes the servers every 1 to 20 ms, by seed, until it is stopped.
struct Squeezer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u64, Stop>>,
}

impl Squeezer {
    fn start(controls: Vec<PathBuf>, seed: u64) -> Squeezer {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut count = 0;
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(rng.u64(1000..20_000)));
                for control in &controls {
                    ask(control, r#"{"memory":"squeeze"}"#)?;
                }
                count += 1;
            }
            Ok(count)
        });
        Squeezer { stop, thread }
    }

    fn stop(self) -> Result<u64, Stop> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .unwrap_or_else(|_| Stop::fail("the squeezing thread panicked"))
    }
}

/// fio writes, reads back and checks while memory is squeezed all the time.
fn verified(volume: impl Fn(&Path) -> String, rings: bool) -> Result<(), Stop> {
    need_fio_nbd()?;
    let seed = pvblk_testing::seed();
    let seconds = if full() { 120 } else { 8 };
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    let volume = volume(dir.path());
    if volume.starts_with("raid5") {
        let mut args: Vec<String> = ["raid", "create", "--raid-devices", "3", "--chunk", "64K"]
            .map(String::from)
            .into();
        args.extend(["m0", "m1", "m2"].map(|m| format!("file:{},size=80M", path(m).display())));
        run(pvblk(args)?, Duration::from_secs(60))?.success()?;
    }
    let (disk, nbd, local) = (
        format!("a={volume}"),
        unix(&path("nbd.sock")),
        unix(&path("local.sock")),
    );
    let control = path("ctl");
    let control_arg = unix(&control);
    let mut serve = Daemon::start([
        "serve",
        "--disk",
        &disk,
        "--nbd",
        &nbd,
        "--local",
        &local,
        "--control",
        &control_arg,
    ])?;
    let mut controls = vec![control];
    let mut attach = None;
    let mut socket = path("nbd.sock");
    if rings {
        socket = path("attach.sock");
        controls.push(path("attach.ctl"));
        let (nbd, control) = (unix(&socket), unix(&path("attach.ctl")));
        attach = Some(Daemon::start([
            "attach",
            &local,
            "--disk",
            "a",
            "--nbd",
            &nbd,
            "--control",
            &control,
        ])?);
    }
    let squeezer = Squeezer::start(controls.clone(), seed);
    let uri = format!("nbd+unix:///a?socket={}", socket.display());
    let (runtime, randseed) = (
        format!("--runtime={seconds}"),
        format!("--randseed={}", seed >> 1),
    );
    let options = [
        "--rw=randrw",
        "--rwmixread=30",
        "--bssplit=4k/40:8k/10:16k/10:64k/20:128k/10:1m/10",
        "--iodepth=16",
        "--numjobs=4",
        "--size=24m",
        "--offset_increment=24m",
        "--verify_backlog=256",
        "--time_based=1",
        "--fsync=64",
        &runtime,
        &randseed,
    ];
    fio_verify(&uri, &options, Duration::from_secs(seconds + 90))?;
    let times = squeezer.stop()?;
    let [server, client] = [
        report(&controls[0])?,
        report(&controls[controls.len() - 1])?,
    ];
    let (pools, devices) = (
        number(&client["total"], "squeezed_pages"),
        number(&server, "device_bytes") / PAGE,
    );
    // Buffers of a client of rings lie in the memory that it shares with the server, which stays.
    check(
        number(&client, "squeezes") > times / 2 && (rings || pools > 0),
        || format!("squeezed {times} times, but it says {client:#}"),
    )?;
    check(devices > 0 || volume.starts_with("file"), || {
        format!("no memory of {volume} went back: {server:#}")
    })?;
    println!("squeezed {times} times, {pools} pages of pools and {devices} of devices went back");
    if let Some(mut attach) = attach {
        attach.stop()?;
    }
    serve.stop()
}

/// Some connections that had 4 MiB in flight each, on disks of their own.
struct Idle {
    serve: Daemon,
    control: PathBuf,
    _connections: Vec<Connection>,
    _dir: tempfile::TempDir,
}

impl Idle {
    fn new(disks: usize, extra: &[&str]) -> Result<Idle, Stop> {
        let dir = tempfile::tempdir()?;
        let (nbd, control) = (dir.path().join("nbd.sock"), dir.path().join("ctl"));
        let mut args: Vec<String> = vec!["serve".into(), "--nbd".into(), unix(&nbd)];
        args.extend(["--control".into(), unix(&control)]);
        args.extend(extra.iter().map(|s| (*s).to_owned()));
        for i in 0..disks {
            args.extend(["--disk".into(), format!("d{i}=delay:2s:null:64M")]);
        }
        let serve = Daemon::start(&args)?;
        let data = vec![7; 512 << 10];
        let mut connections = Vec::new();
        for i in 0..disks {
            connections.push(Connection::open(&nbd, &format!("d{i}"))?);
        }
        // All in flight at once: the volume takes its time.
        for connection in &mut connections {
            for n in 0..8 {
                connection.send(Command::Write, n, n << 20, &data)?;
            }
        }
        for connection in &mut connections {
            for _ in 0..8 {
                let reply = connection.receive()?;
                check(reply.is_some_and(|r| r.error == 0), || {
                    format!("a write: {reply:?}")
                })?;
            }
        }
        Ok(Idle {
            serve,
            control,
            _connections: connections,
            _dir: dir,
        })
    }
}

fn idle_disks() -> Result<(), Stop> {
    let disks = if full() { 256 } else { 64 };
    let mut idle = Idle::new(disks, &["--no-pressure"])?;
    std::thread::sleep(Duration::from_millis(300));
    let before = report(&idle.control)?;
    let pages = number(&before["total"], "pool_pages");
    let expected = disks as u64 * 1024;
    check(pages > expected * 9 / 10 && pages <= expected, || {
        format!("{pages} pages in {disks} full pools: {before:#}")
    })?;
    let squeezed = ask(&idle.control, r#"{"memory":"squeeze"}"#)?;
    check(number(&squeezed, "bytes") == pages * PAGE, || {
        format!("{pages} pages were free, and gone are {squeezed}")
    })?;
    let after = report(&idle.control)?;
    let (rss, bill) = (
        number(&after, "rss_anon_bytes"),
        number(&after, "private_bytes"),
    );
    let allowed = 16 * MIB + (disks as u64) * (64 << 10);
    println!(
        "{disks} disks: {} KiB of pools, RssAnon {} KiB, then {} KiB, bill {} KiB, allowed {} KiB",
        pages * 4,
        number(&before, "rss_anon_bytes") >> 10,
        rss >> 10,
        bill >> 10,
        allowed >> 10
    );
    check(
        number(&after["total"], "pool_pages") == 0 && rss <= allowed,
        || format!("after a squeeze: {after:#}"),
    )?;
    check(rss.abs_diff(bill) <= allowed / 4, || {
        format!("the bill says {bill}, the kernel {rss}")
    })?;
    let each = after["disks"].as_array().cloned().unwrap_or_default();
    check(
        each.len() == disks && each.iter().all(|d| number(d, "squeezes") == 1),
        || format!("not every disk was squeezed once: {after:#}"),
    )?;
    idle.serve.stop()
}

fn limits_change() -> Result<(), Stop> {
    let mut idle = Idle::new(2, &["--max-buffer-pages", "512"])?;
    let control = unix(&idle.control);
    let until = Instant::now() + Duration::from_secs(60);
    while number(&report(&idle.control)?["total"], "pool_pages") > 1024 {
        check(Instant::now() < until, || {
            "the pools don't shrink to their limit".into()
        })?;
        std::thread::sleep(Duration::from_millis(10));
    }
    let set = |flag: &str, value: &str| -> Result<String, Stop> {
        let command = pvblk(["ctl", "set", "--control", &control, flag, value])?;
        Ok(run(command, Duration::from_secs(60))?.success()?.stdout)
    };
    let said = set("--max-buffer-pages", "256")?;
    check(said.contains("max-buffer-pages 256"), || said.clone())?;
    let pages = number(&report(&idle.control)?["total"], "pool_pages");
    check(pages <= 512, || format!("{pages} pages at a limit of 256"))?;
    set("--buffer-squeeze-duration-ms", "100")?;
    check(set("--max-buffer-pages", "99999").is_err(), || {
        "a limit out of bounds was taken".into()
    })?;
    let command = pvblk(["ctl", "memory", "--control", &control])?;
    let table = run(command, Duration::from_secs(60))?.success()?.stdout;
    for word in [
        "under squeeze",
        "| d0",
        "RssAnon",
        "buffer-squeeze-duration-ms 100",
    ] {
        check(table.contains(word), || format!("no {word:?} in {table}"))?;
    }
    let command = pvblk(["ctl", "squeeze", "--control", &control])?;
    run(command, Duration::from_secs(60))?.success()?;
    idle.serve.stop()
}

/// A control group of version 1 that goes away with its last process.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Group, Stop> {
        let base = Path::new("/sys/fs/cgroup/memory");
        let path = base.join(format!("pvblk-e2e-{}", std::process::id()));
        if !base.join("memory.pressure_level").exists() {
            return Stop::skip("no memory controller of cgroup v1");
        }
        match std::fs::create_dir(&path) {
            Ok(()) => Ok(Group(path)),
            Err(e) => Stop::skip(format!("making {}: {e}", path.display())),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Somebody else mounts the hierarchies once more, in a tree of theirs: they can unmount them while a server runs.
fn others_mounts() -> Result<(), Stop> {
    need(&["unshare", "nsenter", "mount", "umount"])?;
    let dir = tempfile::tempdir()?;
    let (v1, v2) = (dir.path().join("v1"), dir.path().join("v2"));
    std::fs::create_dir(&v1)?;
    std::fs::create_dir(&v2)?;
    // In mounts of its own, so that nothing is left behind.
    let script = "mount -t cgroup -o memory none \"$1\" 2>/dev/null; mount -t cgroup2 none \"$2\" 2>/dev/null; shift 2; exec \"$@\"";
    let nbd = unix(&dir.path().join("nbd"));
    let mut command = tool("unshare", ["-m", "--propagation", "private"]);
    command.args(["sh", "-c", script, "sh"]).args([&v1, &v2]);
    command.arg(daemon::binary()?);
    command.args(["serve", "--disk", "a=mem:1M", "--nbd", &nbd]);
    let allowed = run_ok("unshare", ["-m", "true"]);
    if allowed.is_err() {
        return Stop::skip("no mounts of our own: this takes root");
    }
    let mut serve = Daemon::run(command)?;
    let mounts = std::fs::read_to_string(format!("/proc/{}/mountinfo", serve.pid()))?;
    let is_mounted = |d: &Path| mounts.contains(&format!(" {} ", d.display()));
    let mounted: Vec<&PathBuf> = [&v1, &v2].into_iter().filter(|d| is_mounted(d)).collect();
    if mounted.is_empty() {
        return Stop::skip("control groups can't be mounted here");
    }
    let shown = dir.path().display().to_string();
    let lines = serve.lines();
    check(
        !lines
            .iter()
            .any(|l| l.contains("pressure") && l.contains(&shown)),
        || lines.join("\n"),
    )?;
    let pid = serve.pid().to_string();
    for mount in mounted {
        let mut umount = tool("nsenter", ["-t", &pid, "-m", "umount"]);
        umount.arg(mount);
        run(umount, Duration::from_secs(60))?.success()?;
    }
    serve.stop()
}

/// Pools are full and the group's limit is lowered without a word to the server, which gives memory
/// back.
fn group_at_its_limit() -> Result<(), Stop> {
    let group = Group::new()?;
    std::fs::write(
        group.0.join("memory.limit_in_bytes"),
        (256 * MIB).to_string(),
    )?;
    // This process's own group is left again at once: the server is born in it.
    let before = std::fs::read_to_string("/proc/self/cgroup")?;
    let own = before
        .lines()
        .find_map(|l| {
            l.split_once(":memory:")
                .map(|(_, p)| p.trim_start_matches('/').to_owned())
        })
        .unwrap_or_default();
    let pid = std::process::id().to_string();
    std::fs::write(group.0.join("cgroup.procs"), &pid)?;
    let idle = Idle::new(16, &[]);
    let home = Path::new("/sys/fs/cgroup/memory").join(own);
    std::fs::write(home.join("cgroup.procs"), &pid)?;
    let mut idle = idle?;
    let before = report(&idle.control)?;
    let bytes = number(&before["total"], "pool_pages") * PAGE;
    check(bytes > 32 * MIB, || format!("pools of {bytes} bytes"))?;
    let usage: u64 = std::fs::read_to_string(group.0.join("memory.usage_in_bytes"))?
        .trim()
        .parse()
        .unwrap_or(0);
    // Less than the margin is left.
    std::fs::write(
        group.0.join("memory.limit_in_bytes"),
        (usage + 2 * MIB).to_string(),
    )?;
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let now = report(&idle.control)?;
        if number(&now["total"], "pool_pages") == 0 {
            check(number(&now, "source_signals") > 0, || format!("{now:#}"))?;
            break;
        }
        check(Instant::now() < until, || {
            format!("it keeps its pools: {now:#}")
        })?;
        std::thread::sleep(Duration::from_millis(5));
    }
    idle.serve.stop()
}
