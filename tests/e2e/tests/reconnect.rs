//! Servers that are killed, restarted, or never come back, under real clients.

use pvblk_e2e::daemon::lab;
use pvblk_e2e::mounted::{Ext4, need_machine};
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::slow_medium::SlowMedium;
use pvblk_e2e::tools::{fio_verify, need, run, run_ok};
use pvblk_e2e::{Daemon, MIB, Route, Stage, Stop, full, pattern, run_all, stage};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    run_all(&[
        ("ext4_copy_goes_on_over_killed_servers", || {
            ext4_copy(Stage::new)
        }),
        ("ext4_copy_goes_on_over_killed_servers_in_a_sandbox", || {
            ext4_copy(Stage::in_sandbox)
        }),
        ("fio_verifies_over_killed_and_restarted_servers", || {
            fio(Stage::new)
        }),
        (
            "fio_verifies_over_killed_and_restarted_servers_in_a_sandbox",
            || fio(Stage::in_sandbox),
        ),
        ("kills_by_seed_lose_nothing", kills_by_seed),
        (
            "kills_over_a_slow_medium_lose_and_overtake_nothing",
            kills_over_a_slow_medium,
        ),
        ("a_server_that_never_comes_back_is_given_up", || {
            never_back(Stage::new)
        }),
        (
            "a_server_in_a_sandbox_that_never_comes_back_is_given_up",
            || never_back(Stage::in_sandbox),
        ),
        ("a_disk_that_lost_everything_is_not_taken_back", lost_disk),
    ])
}

/// Makes a disk and serves it.
type Serve = fn(Route, u64) -> Result<Stage, Stop>;

/// Counters and flags that the test shares with the thread that kills servers.
#[derive(Default)]
struct Killing {
    stop: AtomicBool,
    kills: AtomicU32,
}

impl Killing {
    fn kills(&self) -> u32 {
        self.kills.load(Ordering::Relaxed)
    }
}

/// Kills the server and starts it again, each time with other offers, until the test ends.
fn kill_until(
    mut stage: Stage,
    killing: &Arc<Killing>,
    pause: Duration,
) -> std::thread::JoinHandle<Result<Stage, Stop>> {
    let killing = Arc::clone(killing);
    std::thread::spawn(move || {
        while !killing.stop.load(Ordering::Relaxed) {
            std::thread::sleep(pause);
            stage.kill_server()?;
            let offers = [("1", "1"), ("4", "16"), ("2", "2")][killing.kills() as usize % 3];
            stage.start_server(&["--max-queues", offers.0, "--max-ring-pages", offers.1])?;
            killing.kills.fetch_add(1, Ordering::Relaxed);
        }
        Ok(stage)
    })
}

fn joined<T>(thread: std::thread::JoinHandle<Result<T, Stop>>) -> Result<T, Stop> {
    thread
        .join()
        .unwrap_or_else(|_| Stop::fail("the thread that kills servers panicked"))
}

/// Files are copied into an ext4 while its server is killed again and again: the copy goes on, and all is there.
fn ext4_copy(serve: Serve) -> Result<(), Stop> {
    need_machine()?;
    let stage = serve(Route::Rings, 512 * MIB)?;
    let disk = stage.disk();
    let mut ext4 = Ext4::make(&stage)?;
    let originals = stage.path("originals");
    std::fs::create_dir(&originals)?;
    let count = if full() { 64 } else { 24 };
    for n in 0..count {
        let file = originals.join(format!("file{n}"));
        pattern::write(&file, (n % 8 + 1) * MIB + n * 511, n)?;
    }
    let killing = Arc::new(Killing::default());
    let killer = kill_until(stage, &killing, Duration::from_millis(150));
    // A fast disk may have it all between two kills.
    let mut copied = Ok(());
    while copied.is_ok() && killing.kills() < 3 && !killer.is_finished() {
        copied = copy_all(&originals, &ext4.folder, count);
    }
    killing.stop.store(true, Ordering::Relaxed);
    let mut stage = joined(killer)?;
    copied?;
    let kills = killing.kills();
    ext4.again()?;
    for n in 0..count {
        let name = format!("file{n}");
        pvblk_e2e::tools::compare(&originals.join(&name), &ext4.folder.join(&name))?;
    }
    ext4.end()?;
    stage.stop()?;
    println!("({kills} kills)");
    run_ok("e2fsck", ["-fn", &disk.display().to_string()]).map(drop)
}

fn copy_all(from: &Path, to: &Path, count: u64) -> Result<(), Stop> {
    for n in 0..count {
        let name = format!("file{n}");
        // With fsync, so that the disk is at work all the time, and errors of the write-back are seen.
        let args = [
            format!("if={}", from.join(&name).display()),
            format!("of={}", to.join(&name).display()),
            "bs=64k".into(),
            "conv=fsync".into(),
            "status=none".into(),
        ];
        run_ok("dd", &args)?;
    }
    Ok(())
}

/// fio verifies every block while servers are killed.
fn fio(serve: Serve) -> Result<(), Stop> {
    need(&["fio"])?;
    let stage = serve(Route::Rings, 128 * MIB)?;
    let uri = stage.uri();
    let killing = Arc::new(Killing::default());
    let killer = kill_until(stage, &killing, Duration::from_millis(300));
    let seconds = if full() { 60 } else { 6 };
    let options = [
        "--rw=randwrite",
        "--bssplit=4k/60:16k/20:128k/20",
        "--iodepth=32",
        "--size=128M",
        "--verify_backlog=512",
        "--fsync=100",
        "--time_based=1",
        &format!("--runtime={seconds}"),
    ];
    let result = fio_verify(&uri, &options, Duration::from_secs(seconds + 90));
    killing.stop.store(true, Ordering::Relaxed);
    let mut stage = joined(killer)?;
    result?;
    check(killing.kills() > 0, || "the server was never killed".into())?;
    // A restart in order is no end either.
    stage.serve().stop()?;
    stage.start_server(&[])?;
    let mut connection = Connection::open(&stage.nbd_socket(), "a")?;
    connection.send(Command::Flush, 1, 0, &[])?;
    check(connection.receive()?.is_some_and(|r| r.error == 0), || {
        "a flush failed after a restart".into()
    })?;
    stage.stop()
}

/// The lab's campaign, a bounded share of it.
fn campaign(cycles: u32, more: &[&str]) -> Result<(), Stop> {
    let (cycles, seed) = (cycles.to_string(), pvblk_testing::seed().to_string());
    let mut command = lab(["crash", "--cycles", &cycles, "--seed", &seed])?;
    command.args(more);
    run(command, Duration::from_secs(900))?.success().map(drop)
}

fn kills_by_seed() -> Result<(), Stop> {
    let cycles = if full() { 1000 } else { 120 };
    campaign(cycles, &["--export", "rings", "--volume", "file,cache"])
}

/// All exports and volumes, with writes that are still on their way when their server is dead.
fn kills_over_a_slow_medium() -> Result<(), Stop> {
    let medium = SlowMedium::new()?;
    let cycles = if full() { 1200 } else { 60 };
    let point = medium.point().display().to_string();
    campaign(cycles, &["--medium", &point])
}

/// Requests wait as long as was said, then they fail, and the command ends and says why.
fn never_back(serve: Serve) -> Result<(), Stop> {
    for (seconds, at_least) in [("0", 0), ("1", 900)] {
        let mut stage = serve(Route::Rings, 16 * MIB)?;
        if let Some(mut attach) = stage.take_attach() {
            attach.stop()?;
        }
        let mut attach = stage.attach_again(&["--reconnect", seconds])?;
        let mut connection = Connection::open(&stage.nbd_socket(), "a")?;
        connection.send(Command::Write, 1, 0, &[7; 4096])?;
        check(connection.receive()?.is_some_and(|r| r.error == 0), || {
            "a write failed while the server was there".into()
        })?;
        let killed = Instant::now();
        stage.kill_server()?;
        // The write may fail, or find the connection closed; it may not succeed.
        let sent = connection.send(Command::Write, 2, 0, &[8; 4096]).is_ok();
        let answer = if sent { connection.receive()? } else { None };
        check(answer.is_none_or(|r| r.error != 0), || {
            "a write succeeded without a server".into()
        })?;
        let status = attach.wait(Duration::from_secs(60))?;
        let waited = killed.elapsed().as_millis();
        check(status.code() == Some(1) && waited >= at_least, || {
            format!("it ended with {status} after {waited} ms")
        })?;
        let lines = attach.lines();
        let last = lines.last().map(String::as_str).unwrap_or_default();
        check(
            last.starts_with("pvblk: ") && last.contains("closed"),
            || format!("it doesn't say why: {lines:?}"),
        )?;
    }
    Ok(())
}

/// A disk in memory is gone with its server. The next server's empty one must not take its place.
fn lost_disk() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    let local = stage::unix(&path("local"));
    let serve = || Daemon::start(["serve", "--disk", "a=mem:16M", "--local", &local]);
    let mut first = serve()?;
    let mut attach = Daemon::start([
        "attach",
        &local,
        "--disk",
        "a",
        "--nbd",
        &stage::unix(&path("nbd")),
        "--reconnect",
        "2",
    ])?;
    // It finds the next server as soon as it looks, however long that takes to start.
    attach.freeze()?;
    first.kill()?;
    let mut second = serve()?;
    attach.signal(Signal::CONT)?;
    let status = attach.wait(Duration::from_secs(60))?;
    let lines = attach.lines();
    check(
        status.code() == Some(1) && lines.iter().any(|l| l.contains("lost")),
        || format!("it ended with {status} and said {lines:?}"),
    )?;
    second.stop()
}
