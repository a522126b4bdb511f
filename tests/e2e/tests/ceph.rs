//! Images of a real Ceph cluster, served: data, kills of the cluster's daemons, one writer. `PVBLK_E2E_FULL=1` (`make test-ceph`) runs longer.

use pvblk_e2e::ceph::{Cluster, Written, load, wait_for};
use pvblk_e2e::control::Control;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{compare, need, run, run_ok, tool};
use pvblk_e2e::{Daemon, MIB, Stop, full, pattern, run_all};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// One cluster for all tests, which are run one after another.
static CLUSTER: Mutex<Option<Cluster>> = Mutex::new(None);

fn main() -> ExitCode {
    let code = run_all(&[
        ("data_goes_in_and_comes_back", data),
        ("every_way_in_verifies", every_way),
        ("kills_of_the_cluster_are_pauses", kills),
        ("a_stopped_osd_is_a_pause", stopped),
        ("snapshots_and_clones", snapshots),
        ("holes_are_told", holes),
        ("a_resize_is_seen", resize),
        ("a_full_cluster_is_no_space", full_cluster),
        ("there_is_one_writer", one_writer),
        ("a_stolen_lock_stops_the_disk_and_no_other", steals),
        ("a_disk_may_wait_instead", waits),
        ("mistakes_are_one_line", mistakes),
        ("a_hundred_images_share_a_connection", hundred),
    ]);
    let cluster = CLUSTER
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    drop(cluster);
    code
}

fn on_cluster(test: impl FnOnce(&Cluster) -> Result<(), Stop>) -> Result<(), Stop> {
    let mut cluster = CLUSTER.lock().unwrap_or_else(PoisonError::into_inner);
    if cluster.is_none() {
        *cluster = Some(Cluster::start()?);
    }
    match &*cluster {
        Some(cluster) => test(cluster),
        None => Stop::fail("there is no cluster"),
    }
}

/// A server of disks over NBD.
struct Served {
    daemon: Daemon,
    socket: PathBuf,
}

impl Served {
    fn start(cluster: &Cluster, disks: &[(&str, String)], more: &[String]) -> Result<Served, Stop> {
        let socket = cluster.dir().join("nbd.sock");
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
        let daemon = Daemon::start(args)?;
        Ok(Served { daemon, socket })
    }

    fn one(cluster: &Cluster, name: &str, options: &str) -> Result<Served, Stop> {
        Served::start(cluster, &[(name, cluster.spec(name, options))], &[])
    }

    fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.socket.display())
    }

    fn connect(&self, name: &str) -> Result<Connection, Stop> {
        Connection::open(&self.socket, name)
    }

    /// The commands of `qemu-io`, which must succeed.
    fn io(&self, name: &str, commands: &[&str]) -> Result<(), Stop> {
        self.io_with(&["-f", "raw"], name, commands)
    }

    fn io_with(&self, options: &[&str], name: &str, commands: &[&str]) -> Result<(), Stop> {
        let uri = self.uri(name);
        let commands = commands.iter().flat_map(|c| ["-c", c]);
        let args = options.iter().copied().chain(commands).chain([&*uri]);
        run_ok("qemu-io", args).map(drop)
    }
}

fn data() -> Result<(), Stop> {
    need(&["qemu-img", "qemu-io", "cmp"])?;
    on_cluster(|cluster| {
        cluster.image("data", "64M")?;
        let source = cluster.dir().join("source");
        pattern::write(&source, 64 * MIB, 1)?;
        let mut served = Served::one(cluster, "data", "")?;
        let (file, uri) = (source.display().to_string(), served.uri("data"));
        run_ok(
            "qemu-img",
            ["convert", "-n", "-f", "raw", "-O", "raw", &file, &uri],
        )?;
        run_ok(
            "qemu-img",
            ["compare", "-f", "raw", "-F", "raw", &file, &uri],
        )?;
        // Zeroes, with and without their space, a discard, FUA and a flush.
        served.io(
            "data",
            &["write -z 1M 3M", "write -z -u 8M 5M", "discard 16M 8M"],
        )?;
        served.io(
            "data",
            &["write -f -P 7 40M 64k", "flush", "read -P 7 40M 64k"],
        )?;
        served.io(
            "data",
            &["read -P 0 1M 3M", "read -P 0 8M 5M", "read -P 0 16M 8M"],
        )?;
        check(served.daemon.complaint().is_none(), || {
            format!("{:?}", served.daemon.complaint())
        })?;
        served.daemon.stop()?;
        check(cluster.lock("data")?.is_none(), || {
            "the lock is left".into()
        })?;
        let bytes = std::fs::read(cluster.export("data", "out")?)?;
        let mut expected = std::fs::read(&source)?;
        let mib = MIB as usize;
        for zeroed in [mib..4 * mib, 8 * mib..13 * mib, 16 * mib..24 * mib] {
            expected[zeroed].fill(0);
        }
        expected[40 * mib..40 * mib + 65536].fill(7);
        check(bytes == expected, || "the cluster has other data".into())
    })
}

fn every_way() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("ways", "64M")?;
        let at = |name: &str| cluster.dir().join(name).display().to_string();
        let more = [
            format!("--local=unix:{}", at("rings")),
            format!("--vhost-user=ways=unix:{}", at("vhost")),
        ];
        let disks = [("ways", cluster.spec("ways", ""))];
        let mut served = Served::start(cluster, &disks, &more)?;
        for target in [
            served.uri("ways"),
            format!("rings:unix:{},disk=ways", at("rings")),
            format!("vhost-user:unix:{}", at("vhost")),
        ] {
            let args = [
                "bench",
                "--target",
                &target,
                "--rw=randwrite",
                "--bs=4k,4k",
                "--iodepth=16",
                "--size=16m",
                "--option=verify=crc32c",
            ];
            run(pvblk(args)?, Duration::from_secs(300))?.success()?;
        }
        served.daemon.stop()
    })
}

/// A verify load beside `disturb`, which must see no error.
fn verified(
    cluster: &Cluster,
    image: &str,
    disturb: impl FnOnce() -> Result<(), Stop>,
) -> Result<(), Stop> {
    cluster.image(image, "64M")?;
    let mut served = Served::one(cluster, image, "")?;
    let writer = Writer::start(&served, image, 4096)?;
    writer.wait_progress(500)?;
    disturb()?;
    // It goes on.
    let now = writer.progress.load(Ordering::Relaxed);
    writer.wait_progress(now + 500)?;
    let written = writer.stop()?;
    check(written.errors == 0, || format!("{} errors", written.errors))?;
    served.daemon.stop()?;
    written.check(&std::fs::read(cluster.export(image, "out")?)?)
}

fn kills() -> Result<(), Stop> {
    on_cluster(|cluster| {
        verified(cluster, "kills", || {
            for _ in 0..if full() { 10 } else { 2 } {
                for daemon in ["mon", "osd.0"] {
                    cluster.signal(daemon, Signal::KILL)?;
                    std::thread::sleep(Duration::from_secs(1));
                    cluster.restart(daemon)?;
                    cluster.ceph(&["mon", "stat"])?;
                    std::thread::sleep(Duration::from_secs(2));
                }
            }
            Ok(())
        })
    })
}

fn stopped() -> Result<(), Stop> {
    on_cluster(|cluster| {
        verified(cluster, "stopped", || {
            cluster.signal("osd.0", Signal::STOP)?;
            std::thread::sleep(Duration::from_secs(if full() { 60 } else { 6 }));
            cluster.signal("osd.0", Signal::CONT)
        })
    })
}

fn snapshots() -> Result<(), Stop> {
    need(&["qemu-io", "qemu-img", "cmp"])?;
    on_cluster(|cluster| {
        cluster.image("origin", "16M")?;
        let mut served = Served::one(cluster, "origin", "")?;
        served.io("origin", &["write -P 1 0 8M"])?;
        cluster.rbd(&["snap", "create", "--no-progress", "rbd/origin@s"])?;
        cluster.rbd(&["snap", "protect", "rbd/origin@s"])?;
        cluster.rbd(&["clone", "rbd/origin@s", "rbd/clone"])?;
        served.io("origin", &["write -P 2 0 4M"])?;
        served.daemon.stop()?;
        let before = cluster.export("origin@s", "before")?;
        let snapshot = format!("rbd:rbd/origin@s,conf={}", cluster.conf().display());
        let disks = [
            ("snapshot", snapshot),
            ("clone", cluster.spec("clone", "")),
            ("origin", cluster.spec("origin", ",ro")),
        ];
        let mut served = Served::start(cluster, &disks, &[])?;
        let read_only = ["-r", "-f", "raw"];
        served.io_with(
            &read_only,
            "snapshot",
            &["read -P 1 0 8M", "read -P 0 8M 8M"],
        )?;
        served.io_with(&read_only, "origin", &["read -P 2 0 4M", "read -P 1 4M 4M"])?;
        for name in ["snapshot", "origin"] {
            check(served.io(name, &["write -P 3 0 4k"]).is_err(), || {
                format!("{name} was written to")
            })?;
        }
        served.io(
            "clone",
            &["read -P 1 0 8M", "write -P 3 1M 1M", "read -P 3 1M 1M"],
        )?;
        served.daemon.stop()?;
        compare(&before, &cluster.export("origin@s", "after")?)
    })
}

fn holes() -> Result<(), Stop> {
    need(&["nbdinfo", "qemu-io"])?;
    on_cluster(|cluster| {
        cluster.image("holes", "64M")?;
        let mut served = Served::one(cluster, "holes", "")?;
        served.io("holes", &["write -P 1 8M 4k"])?;
        let map = |served: &Served| -> Result<Vec<(u64, u64, u64)>, Stop> {
            let said = run_ok("nbdinfo", ["--map", "--json", &served.uri("holes")])?;
            let map: serde_json::Value = serde_json::from_str(&said.stdout)?;
            let all = map.as_array().into_iter().flatten();
            let number = |e: &serde_json::Value, name: &str| e[name].as_u64().unwrap_or(u64::MAX);
            Ok(all
                .map(|e| {
                    (
                        number(e, "offset") / MIB,
                        number(e, "length") / MIB,
                        number(e, "type"),
                    )
                })
                .collect())
        };
        let (hole, is_data) = (3, 0);
        let found = map(&served)?;
        check(
            found == [(0, 8, hole), (8, 4, is_data), (12, 52, hole)],
            || format!("{found:?}"),
        )?;
        // Written after the question was asked.
        served.io("holes", &["write -P 1 20M 5M"])?;
        let found = map(&served)?;
        let expected = [
            (0, 8, hole),
            (8, 4, is_data),
            (12, 8, hole),
            (20, 8, is_data),
            (28, 36, hole),
        ];
        check(found == expected, || format!("{found:?}"))?;
        served.daemon.stop()
    })
}

fn resize() -> Result<(), Stop> {
    need(&["nbdinfo", "qemu-io"])?;
    on_cluster(|cluster| {
        cluster.image("grows", "16M")?;
        let control = cluster.dir().join("grows.ctl");
        let disks = [("grows", cluster.spec("grows", ""))];
        let more = [format!("--control=unix:{}", control.display())];
        let mut served = Served::start(cluster, &disks, &more)?;
        served.io("grows", &["write -P 1 0 4k"])?;
        for (size, bytes) in [("48M", 48 * MIB), ("32M", 32 * MIB)] {
            cluster.rbd(&[
                "resize",
                "--no-progress",
                "--allow-shrink",
                "--size",
                size,
                "rbd/grows",
            ])?;
            wait_for("the new size", || {
                let said = run_ok("nbdinfo", ["--size", &served.uri("grows")])?;
                Ok(said.stdout.trim() == bytes.to_string())
            })?;
        }
        served.io("grows", &["write -P 2 31M 1M", "read -P 2 31M 1M"])?;
        let mut control = Control::open(&control)?;
        let shown = control
            .must("disk.list", serde_json::json!({}))?
            .to_string();
        check(shown.contains(&(32 * MIB).to_string()), || shown.clone())?;
        served.daemon.stop()
    })
}

fn full_cluster() -> Result<(), Stop> {
    need(&["qemu-io"])?;
    on_cluster(|cluster| {
        cluster.image("full", "2G")?;
        let mut served = Served::one(cluster, "full", "")?;
        served.io("full", &["write -P 1 0 128M"])?;
        for (name, ratio) in [
            ("nearfull", "0.01"),
            ("backfillfull", "0.02"),
            ("full", "0.03"),
        ] {
            cluster.ceph(&["osd", &format!("set-{name}-ratio"), ratio])?;
        }
        let write = |at: u32| {
            let uri = served.uri("full");
            let write = format!("write -P 2 {at}M 1M");
            run(
                tool("qemu-io", ["-f", "raw", "-c", &write, &uri]),
                Duration::from_secs(120),
            )
        };
        // A write of a place that has its space already may succeed.
        let mut next = 128;
        let fails = wait_for("writes fail for lack of space", || {
            next += 1;
            let said = write(next)?;
            Ok(format!("{}{}", said.stdout, said.stderr).contains("No space left on device"))
        });
        for (name, ratio) in [
            ("full", "0.95"),
            ("backfillfull", "0.90"),
            ("nearfull", "0.85"),
        ] {
            cluster.ceph(&["osd", &format!("set-{name}-ratio"), ratio])?;
        }
        fails?;
        wait_for("writes succeed again", || {
            Ok(write(128)?.status.is_some_and(|s| s.success()))
        })?;
        served.io("full", &["read -P 1 0 128M", "read -P 2 128M 1M"])?;
        served.daemon.stop()
    })
}

fn one_writer() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("owned", "16M")?;
        let mut first = Served::one(cluster, "owned", "")?;
        let spec = cluster.spec("owned", "");
        let second = run(
            pvblk(["serve", "--disk", &format!("b={spec}"), "--nbd=unix:none"])?,
            Duration::from_secs(120),
        )?;
        let refused = !second.status.is_some_and(|s| s.success());
        check(
            refused && second.stderr.contains("has the image open for writing"),
            || format!("{second:?}"),
        )?;
        // The one that has it goes on; a crash leaves the lock, and the next server gets it when the cluster knows.
        let writer = Writer::start(&first, "owned", 1024)?;
        writer.wait_progress(100)?;
        first.daemon.kill()?;
        let written = writer.stop()?;
        let mut next = Served::one(cluster, "owned", "")?;
        written.check(&std::fs::read(cluster.export("owned", "out")?)?)?;
        next.daemon.stop()
    })
}

/// A load in the background.
struct Writer {
    stop: Arc<AtomicBool>,
    progress: Arc<AtomicU64>,
    thread: JoinHandle<Result<Written, Stop>>,
}

impl Writer {
    fn start(served: &Served, disk: &str, blocks: u64) -> Result<Writer, Stop> {
        Writer::start_after(served, disk, (blocks, 0))
    }

    /// A load whose numbers begin after this one.
    fn start_after(
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

    fn wait_progress(&self, writes: u64) -> Result<(), Stop> {
        wait_for("so many writes", || {
            let ended = self.thread.is_finished();
            check(!ended, || "the load has ended".into())?;
            Ok(self.progress.load(Ordering::Relaxed) >= writes)
        })
    }

    fn stop(self) -> Result<Written, Stop> {
        self.stop.store(true, Ordering::Relaxed);
        self.end()
    }

    /// Waits for an end that others cause.
    fn end(self) -> Result<Written, Stop> {
        wait_for("the load ends", || Ok(self.thread.is_finished()))?;
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Stop::fail("the load panicked"))
    }
}

const TOGETHER: usize = 5;
/// Blocks of a load: few, so that a stale write has something to write over.
const BLOCKS: u64 = 512;

/// Five disks of one server, and so of one connection, are stolen one after another under load.
fn steals() -> Result<(), Stop> {
    on_cluster(|cluster| {
        let names: Vec<String> = (0..TOGETHER).map(|n| format!("stolen{n}")).collect();
        for name in &names {
            cluster.image(name, "2M")?;
        }
        let rounds = if full() { 200 } else { 4 };
        let mut writes = 0;
        for round in 0..rounds {
            writes += round_of_steals(cluster, &names, round).map_err(|stop| match stop {
                Stop::Fail(why) => Stop::Fail(format!("round {round}: {why}")),
                skip => skip,
            })?;
        }
        println!("{} steals, {writes} writes", rounds * TOGETHER as u64);
        Ok(())
    })
}

fn round_of_steals(cluster: &Cluster, names: &[String], round: u64) -> Result<u64, Stop> {
    let disks: Vec<_> = names
        .iter()
        .map(|n| (n.as_str(), cluster.spec(n, "")))
        .collect();
    let mut served = Served::start(cluster, &disks, &[])?;
    let mut writers = Vec::new();
    for name in names {
        writers.push(Writer::start_after(&served, name, (BLOCKS, round << 32))?);
    }
    let mut sum = 0;
    for (stolen, name) in names.iter().enumerate() {
        for writer in &writers {
            // The disks whose lock is still there go on, whoever was stolen before.
            let now = writer.progress.load(Ordering::Relaxed);
            writer.wait_progress(now + 50)?;
        }
        cluster.steal(name)?;
        let at_once = std::fs::read(cluster.export(name, "at-once")?)?;
        let stays = || -> Result<(), Stop> {
            let later = std::fs::read(cluster.export(name, "later")?)?;
            check(at_once == later, || {
                format!("{name}: a write landed after its lock was stolen")
            })
        };
        stays()?;
        let written = writers.remove(0).end()?;
        check(written.errors > 0, || {
            format!("{name}: its client saw no error")
        })?;
        stays()?;
        written.check(&at_once).map_err(|stop| match stop {
            Stop::Fail(why) => Stop::Fail(format!("{name}: {why}")),
            skip => skip,
        })?;
        sum += written.writes;
        let told = format!("disk {name}: its lock was taken away");
        wait_for("the log tells of the lock", || {
            Ok(served
                .daemon
                .lines()
                .iter()
                .any(|line| line.contains(&told)))
        })?;
        check(stolen + writers.len() + 1 == names.len(), || {
            "lost count".into()
        })?;
    }
    // Its disks didn't end in order, which its status tells.
    served.daemon.signal(Signal::TERM)?;
    let status = served.daemon.wait(Duration::from_secs(120))?;
    check(status.code() == Some(1), || format!("{status}"))?;
    Ok(sum)
}

fn waits() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.image("waits", "2M")?;
        let mut served = Served::one(cluster, "waits", ",on-lost-lock=wait")?;
        let writer = Writer::start(&served, "waits", BLOCKS)?;
        writer.wait_progress(100)?;
        cluster.steal("waits")?;
        let at_once = std::fs::read(cluster.export("waits", "at-once")?)?;
        wait_for("the log tells of the lock", || {
            let lines = served.daemon.lines();
            Ok(lines
                .iter()
                .any(|line| line.contains("disk waits: its lock was taken away")))
        })?;
        std::thread::sleep(Duration::from_secs(2));
        check(!writer.thread.is_finished(), || {
            "the client's requests ended".into()
        })?;
        let later = std::fs::read(cluster.export("waits", "later")?)?;
        check(at_once == later, || {
            "a write landed after the lock was stolen".into()
        })?;
        served.daemon.kill()?;
        let written = writer.end()?;
        check(written.errors == 0, || format!("{} errors", written.errors))?;
        written.check(&at_once)
    })
}

fn mistakes() -> Result<(), Stop> {
    on_cluster(|cluster| {
        cluster.rbd(&[
            "create",
            "--size=16M",
            "--image-feature=layering",
            "rbd/plain",
        ])?;
        let conf = cluster.conf().display().to_string();
        for (spec, wanted) in [
            (
                cluster.spec("nothing", ""),
                "opening the image: No such file",
            ),
            (
                format!("rbd:nopool/a,conf={conf}"),
                "opening the pool: No such file",
            ),
            (
                "rbd:rbd/a,conf=/nonexistent".to_owned(),
                "name the cluster's configuration file with conf=PATH",
            ),
            (
                cluster.spec("plain", ""),
                "rbd feature enable rbd/plain exclusive-lock",
            ),
        ] {
            let disk = format!("a={spec}");
            let said = run(
                pvblk(["serve", "--disk", &disk, "--nbd=unix:none"])?,
                Duration::from_secs(120),
            )?;
            let lines = said.stderr.lines().filter(|l| l.contains(wanted)).count();
            let failed = said.status.and_then(|s| s.code()) == Some(1);
            check(failed && lines == 1, || format!("{spec}: {said:?}"))?;
        }
        let mut served = Served::one(cluster, "plain", ",nolock")?;
        let mut connection = served.connect("plain")?;
        connection.send(Command::Write, 1, 0, &[7; 4096])?;
        let reply = connection.receive()?;
        check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))?;
        drop(connection);
        served.daemon.stop()
    })
}

fn hundred() -> Result<(), Stop> {
    if !full() {
        return Stop::skip("only with PVBLK_E2E_FULL=1");
    }
    on_cluster(|cluster| {
        let names: Vec<String> = (0..100).map(|n| format!("many{n}")).collect();
        for name in &names {
            cluster.image(name, "16M")?;
        }
        let disks: Vec<_> = names
            .iter()
            .map(|n| (n.as_str(), cluster.spec(n, "")))
            .collect();
        let one = Served::start(cluster, &disks[..1], &[])?;
        let few = Used::of(&one)?;
        drop(one);
        let mut served = Served::start(cluster, &disks, &[])?;
        for name in &names {
            served.io(name, &["write -P 1 0 64k"])?;
        }
        std::thread::sleep(Duration::from_secs(5));
        let before = Used::of(&served)?;
        std::thread::sleep(Duration::from_secs(30));
        let after = Used::of(&served)?;
        println!(
            "1 image: {few:?}; 100 images: {after:?}; {} ticks of 10 ms in 30 s at rest",
            after.ticks - before.ticks
        );
        check(after.threads < few.threads + 20, || format!("{after:?}"))?;
        served.daemon.stop()
    })
}

#[derive(Debug)]
#[allow(dead_code)]
struct Used {
    threads: usize,
    resident_kib: u64,
    ticks: u64,
}

impl Used {
    fn of(served: &Served) -> Result<Used, Stop> {
        let proc = Path::new("/proc").join(served.daemon.pid().to_string());
        let status = std::fs::read_to_string(proc.join("status"))?;
        let number = |name: &str| {
            let line = status.lines().find(|l| l.starts_with(name));
            line.and_then(|l| l.split_whitespace().nth(1)?.parse().ok())
                .unwrap_or(0)
        };
        let stat = std::fs::read_to_string(proc.join("stat"))?;
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        let tick = |n: usize| {
            fields
                .get(n)
                .and_then(|f| f.parse::<u64>().ok())
                .unwrap_or(0)
        };
        Ok(Used {
            threads: number("Threads:") as usize,
            resident_kib: number("VmRSS:"),
            ticks: tick(11) + tick(12),
        })
    }
}
