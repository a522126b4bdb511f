//! `pvblk top` on a terminal, with a server that has load, and in a pipe.

use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::unix;
use pvblk_e2e::terminal::Terminal;
use pvblk_e2e::tools::run;
use pvblk_e2e::{Daemon, Stop, run_all};
use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// For operations that take a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

const ENTER: &str = "\r";
const ESCAPE: &str = "\x1b";
const LEFT: &str = "\x1b[D";

fn main() -> ExitCode {
    run_all(&[
        ("disks_are_sorted_and_looked_at", looked_at),
        ("the_terminal_is_given_back", given_back),
        ("a_server_that_goes_away_is_waited_for", waited_for),
        ("a_pipe_gets_tables", piped),
    ])
}

/// A server of `fast`, `slow` and `idle`, with load on the first two.
struct Served {
    daemon: Daemon,
    loads: Vec<Child>,
    dir: TempDir,
}

impl Served {
    fn start() -> Result<Served, Stop> {
        let dir = tempfile::tempdir()?;
        let mut served = Served {
            daemon: serve(&dir)?,
            loads: Vec::new(),
            dir,
        };
        // Many requests at once of a medium that takes 5 ms, and one of a medium that takes no time.
        for (disk, depth) in [("slow", "16"), ("fast", "1")] {
            served.load(disk, depth)?;
        }
        Ok(served)
    }

    fn load(&mut self, disk: &str, depth: &str) -> Result<(), Stop> {
        let nbd = self.dir.path().join("nbd");
        let uri = format!("nbd+unix:///{disk}?socket={}", nbd.display());
        let mut load = pvblk(["bench", "--target", &uri, "--rw", "randread"])?;
        load.args(["--iodepth", depth, "--runtime", "600"]);
        load.args(["--option", "rate_iops=3000"]);
        load.stdout(Stdio::null()).stderr(Stdio::null());
        self.loads.push(load.spawn()?);
        Ok(())
    }

    fn top(&self, args: &[&str]) -> Result<Command, Stop> {
        let control = unix(&self.dir.path().join("control"));
        let mut top = pvblk(["top", "--interval", "250ms", "--control", &control])?;
        top.args(args).env("LC_ALL", "C.UTF-8").env("TERM", "xterm");
        top.env_remove("NO_COLOR");
        Ok(top)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        for load in &mut self.loads {
            // It may have ended with the server.
            let _ = load.kill();
            let _ = load.wait();
        }
    }
}

fn serve(dir: &TempDir) -> Result<Daemon, Stop> {
    let path = |name: &str| unix(&dir.path().join(name));
    let (nbd, control) = (path("nbd"), path("control"));
    let mut args = vec!["serve", "--nbd", &nbd, "--control", &control];
    for disk in ["fast=mem:16M", "slow=delay:5ms:mem:16M", "idle=mem:16M"] {
        args.extend(["--disk", disk]);
    }
    Daemon::start(args)
}

/// Names of the disks in the order of the screen.
fn order(screen: &str) -> Vec<&str> {
    let disks = ["fast", "slow", "idle"];
    let words = screen.lines().filter_map(|l| l.split(' ').next());
    words.filter(|w| disks.contains(w)).collect()
}

/// Both disks with load have rates.
fn has_rates(screen: &str) -> bool {
    let line = |disk: &str| screen.lines().find(|l| l.starts_with(disk));
    ["fast", "slow"]
        .iter()
        .all(|d| line(d).is_some_and(|l| l.contains("µs") || l.contains("ms")))
}

fn looked_at() -> Result<(), Stop> {
    let served = Served::start()?;
    let mut terminal = Terminal::start(&served.top(&[])?, 120, 30)?;
    // By load: the disk at which most requests wait.
    let screen = terminal.until("sorted by load", |s| {
        has_rates(s) && order(s) == ["slow", "fast", "idle"]
    })?;
    check(screen.contains("3 disks, 2 busy: "), || screen.clone())?;
    // Its medium is the part of the way where the time is.
    terminal.until("with the hop that takes most", |s| {
        let slow = s.lines().find(|l| l.starts_with("slow"));
        slow.is_some_and(|l| l.contains("% medium"))
    })?;
    terminal.keys("/F")?;
    terminal.keys(ENTER)?;
    terminal.until("filtered", |s| order(s) == ["fast"])?;
    terminal.keys(ESCAPE)?;
    terminal.until("unfiltered", |s| order(s).len() == 3)?;
    // By name, backwards.
    terminal.keys(LEFT)?;
    terminal.keys("<r")?;
    terminal.until("sorted by name", |s| order(s) == ["slow", "idle", "fast"])?;
    terminal.keys("g")?;
    terminal.keys(ENTER)?;
    let parts = [
        "slow  healthy",
        "operations",
        "read ",
        "time by hop",
        "5 ms",
        "nbd unix",
    ];
    terminal.until("on the page of the disk", |s| {
        s.starts_with("3 disks") && parts[..4].iter().all(|p| s.contains(p))
    })?;
    // A terminal of any size, and back: the same picture.
    terminal.resize(40, 10)?;
    terminal.until("narrow", |s| {
        s.contains("slow  healthy") && s.contains("─ operations ─") && s.lines().count() == 10
    })?;
    terminal.resize(120, 60)?;
    terminal.until("wide", |s| {
        parts[..3].iter().all(|p| s.contains(p)) && s.contains("connections")
    })?;
    terminal.keys("e")?;
    terminal.until("events", |s| s.contains("peer-attached"))?;
    terminal.keys("?")?;
    terminal.until("help", |s| s.contains("Keys everywhere"))?;
    terminal.keys("q")?;
    let status = terminal.wait()?;
    check(status.success(), || format!("q: {status}"))?;
    terminal.check_given_back()
}

fn given_back() -> Result<(), Stop> {
    let served = Served::start()?;
    let mut terminal = Terminal::start(&served.top(&[])?, 80, 24)?;
    terminal.until("drawn", has_rates)?;
    check(terminal.is_taken(), || "no alternate screen".into())?;
    // By a signal and by a key: stopped, and continued.
    for by_key in [false, true] {
        match by_key {
            true => terminal.keys("\x1a")?,
            false => terminal.signal(Signal::TSTP)?,
        }
        terminal.until_stopped()?;
        terminal.check_given_back()?;
        terminal.signal(Signal::CONT)?;
        terminal.until("drawn again", has_rates)?;
        check(terminal.is_taken(), || "no alternate screen".into())?;
    }
    terminal.signal(Signal::TERM)?;
    let status = terminal.wait()?;
    let signal = Some(Signal::TERM.as_raw());
    check(status.signal() == signal, || format!("SIGTERM: {status}"))?;
    terminal.check_given_back()
}

fn waited_for() -> Result<(), Stop> {
    let mut served = Served::start()?;
    let mut terminal = Terminal::start(&served.top(&[])?, 100, 24)?;
    terminal.until("drawn", has_rates)?;
    served.daemon.kill()?;
    let screen = terminal.until("told", |s| s.contains("the server is gone, trying again"))?;
    check(order(&screen).len() == 3, || {
        format!("the last picture is gone: {screen}")
    })?;
    served.daemon = serve(&served.dir)?;
    terminal.until("back", |s| !s.contains("is gone") && order(s).len() == 3)?;
    served.load("slow", "8")?;
    served.load("fast", "1")?;
    terminal.until("drawn again", has_rates)?;
    terminal.keys("\x03")?;
    let status = terminal.wait()?;
    check(status.success(), || format!("Ctrl-C: {status}"))?;
    terminal.check_given_back()
}

fn piped() -> Result<(), Stop> {
    let served = Served::start()?;
    let list = run(served.top(&["--count", "2"])?, PATIENCE)?
        .success()?
        .stdout;
    check(
        list.matches("DISK ").count() == 2 && !list.contains('\x1b'),
        || list.clone(),
    )?;
    check(
        order(&list) == ["slow", "fast", "idle", "slow", "fast", "idle"],
        || list.clone(),
    )?;
    let mut ascii = served.top(&["slow", "--count", "1"])?;
    ascii.env("LC_ALL", "C");
    let disk = run(ascii, PATIENCE)?.success()?.stdout;
    check(disk.is_ascii() && disk.contains("-- operations --"), || {
        disk.clone()
    })?;
    let nowhere = pvblk(["top", "--count", "1", "--control", "unix:/nowhere/ctl"])?;
    let refused = run(nowhere, PATIENCE)?;
    check(
        refused.status.and_then(|s| s.code()) == Some(1) && refused.stderr.lines().count() == 1,
        || format!("{refused:?}"),
    )
}
