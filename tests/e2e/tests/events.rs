//! Events: each kind is caused once, and seen by the program of `--on-event` and by `pvblk events`.

use pvblk_e2e::arrays::{Disks, raid};
use pvblk_e2e::daemon::{binary, pvblk};
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::unix;
use pvblk_e2e::tools::{need, run};
use pvblk_e2e::{Daemon, Stop, run_all};
use rustix::process::Signal;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// For operations that take a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The NBD protocol's numbers of errors.
const EIO: u32 = 5;
const ENOSPC: u32 = 28;

fn main() -> ExitCode {
    run_all(&[
        ("who_comes_leaves_and_breaks_is_told", peers),
        ("disks_that_come_and_go_are_told", disks),
        ("a_backing_that_fails_is_told_and_so_is_its_end", failing),
        ("a_backing_that_hangs_is_told_and_so_is_its_end", hanging),
        ("a_backing_that_is_full_is_told_and_so_is_its_end", full),
        ("the_life_of_an_array_is_told", array),
        ("the_end_of_an_array_and_of_a_device_are_told", lost),
        ("sizes_and_squeezes_are_told", sizes),
        ("limits_that_are_reached_are_told", limited),
        ("a_reader_follows_until_it_goes", followed),
        ("systemd_hears_of_progress", watchdog),
        ("lines_are_objects_if_asked_for", json_log),
    ])
}

/// A server whose program writes each event to a file.
struct Told {
    daemon: Daemon,
    dir: TempDir,
}

impl Told {
    /// Serves over NBD, with these flags.
    fn start(flags: &[&str]) -> Result<Told, Stop> {
        let dir = tempfile::tempdir()?;
        let command = pvblk(arguments(dir.path(), flags)?)?;
        let daemon = Daemon::run(command)?;
        Ok(Told { daemon, dir })
    }

    fn nbd(&self) -> PathBuf {
        self.dir.path().join("nbd")
    }

    fn control(&self) -> String {
        unix(&self.dir.path().join("control"))
    }

    /// The events that the program has seen.
    fn seen(&self) -> Result<Vec<Value>, Stop> {
        let text = std::fs::read_to_string(self.dir.path().join("seen")).unwrap_or_default();
        // The last line may be on its way.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let lines = whole.lines().map(serde_json::from_str);
        Ok(lines.collect::<Result<_, _>>()?)
    }

    /// Waits until the program has seen an event of this kind about the disk; returns the last one.
    fn until(&self, kind: &str, disk: Option<&str>) -> Result<Value, Stop> {
        self.until_with(kind, disk, || Ok(()))
    }

    /// The same, and does something again and again meanwhile.
    fn until_with(
        &self,
        kind: &str,
        disk: Option<&str>,
        mut meanwhile: impl FnMut() -> Result<(), Stop>,
    ) -> Result<Value, Stop> {
        let begin = Instant::now();
        loop {
            let seen = self.seen()?;
            let is = |e: &&Value| e["kind"] == kind && e["disk"].as_str() == disk;
            if let Some(event) = seen.iter().rev().find(is) {
                return Ok(event.clone());
            }
            let late = begin.elapsed() > PATIENCE;
            let text = || format!("no {kind} in {seen:#?}");
            if late {
                return Err(self.daemon.failure(&text()));
            }
            meanwhile()?;
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// `pvblk events` in JSON, with these flags.
    fn events(&self, flags: &[&str]) -> Result<Vec<Value>, Stop> {
        let control = self.control();
        let mut command = pvblk(["events", "--control", &control, "--json"])?;
        command.args(flags);
        let text = run(command, PATIENCE)?.success()?.stdout;
        let lines = text.lines().map(serde_json::from_str);
        Ok(lines.collect::<Result<_, _>>()?)
    }

    /// The program and `pvblk events` have seen the same, in order; then the server ends.
    fn end(mut self) -> Result<(), Stop> {
        let kept = self.events(&[])?;
        let begin = Instant::now();
        loop {
            let seen = self.seen()?;
            if seen.len() >= kept.len() {
                check(seen.starts_with(&kept), || {
                    format!("kept {kept:#?}, seen {seen:#?}")
                })?;
                return self.daemon.stop();
            }
            check(begin.elapsed() < PATIENCE, || {
                format!("kept {kept:#?}, seen {seen:#?}")
            })?;
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The command line of a server in this folder, with a program that keeps its events.
fn arguments(dir: &Path, flags: &[&str]) -> Result<Vec<String>, Stop> {
    let program = dir.join("program");
    // One write for each event.
    let seen = dir.join("seen").display().to_string();
    let body = format!("#!/bin/sh\nprintf '%s\\n' \"$PVBLK_EVENT_JSON\" >>{seen}\n");
    std::fs::write(&program, body)?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let path = |name: &str| unix(&dir.join(name));
    let mut all = vec![
        "serve".to_owned(),
        "--nbd".into(),
        path("nbd"),
        "--control".into(),
        path("control"),
        "--on-event".into(),
        program.display().to_string(),
    ];
    all.extend(flags.iter().map(|f| (*f).to_owned()));
    Ok(all)
}

/// Sends one request of 4 KiB, and returns the error of its reply.
fn one(connection: &mut Connection, command: Command, offset: u64) -> Result<u32, Stop> {
    match command {
        Command::Read => {
            connection.send_read(7, offset, 4096)?;
            let reply = connection.receive()?;
            let error = reply.map_or(u32::MAX, |r| r.error);
            if error == 0 {
                connection.receive_data(4096)?;
            }
            Ok(error)
        }
        _ => {
            connection.send(command, 7, offset, &[7; 4096])?;
            Ok(connection.receive()?.map_or(u32::MAX, |r| r.error))
        }
    }
}

fn state(event: &Value) -> &str {
    event["fields"]["state"].as_str().unwrap_or_default()
}

fn peers() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let local = unix(&dir.path().join("local"));
    let flags = ["--disk", "a=mem:1M", "--exclusive", "a", "--local", &local];
    let told = Told::start(&flags)?;
    let mut connection = Connection::open(&told.nbd(), "a")?;
    let came = told.until("peer-attached", Some("a"))?;
    let fields = &came["fields"];
    let ours = u64::from(std::process::id());
    let is_ours = fields["pid"] == ours && fields["via"] == "nbd";
    let uid = u64::from(rustix::process::geteuid().as_raw());
    check(is_ours && fields["uid"] == uid, || format!("{came:#?}"))?;
    // The disk is this client's alone.
    let other = unix(&dir.path().join("other"));
    let command = pvblk(["attach", &local, "--disk", "a", "--nbd", &other])?;
    let refused = run(command, PATIENCE)?;
    check(refused.success().is_err(), || "it was let in".into())?;
    let refused = told.until("peer-refused", Some("a"))?;
    let why = refused["fields"]["why"].as_str().unwrap_or_default();
    let is_told = why.contains("exclusive") && refused["fields"]["via"] == "rings";
    check(is_told, || format!("{refused:#?}"))?;
    connection.send_bytes(&[0x55; 28])?;
    check(connection.receive()?.is_none(), || "still served".into())?;
    told.until("peer-broken", Some("a"))?;
    told.until("peer-left", Some("a"))?;
    told.end()
}

fn disks() -> Result<(), Stop> {
    let told = Told::start(&["--disk", "a=mem:1M"])?;
    let control = told.control();
    let disk = |args: &[&str]| -> Result<(), Stop> {
        let mut command = pvblk(["disk"])?;
        command.args(args).args(["--control", &control]);
        run(command, PATIENCE)?.success().map(drop)
    };
    disk(&["add", "b=mem:1M"])?;
    told.until("disk-added", Some("b"))?;
    disk(&["set", "b", "--exclusive", "on"])?;
    told.until("disk-changed", Some("b"))?;
    disk(&["remove", "b"])?;
    told.until("disk-removed", Some("b"))?;
    let gone = told.seen()?.iter().any(|e| e["kind"] == "disk-gone");
    check(!gone, || "a removal isn't trouble".into())?;
    told.end()
}

fn failing() -> Result<(), Stop> {
    let told = Told::start(&["--disk", "a=fault:seed=1,read-error=1:mem:1M"])?;
    let mut connection = Connection::open(&told.nbd(), "a")?;
    let error = one(&mut connection, Command::Read, 0)?;
    check(error == EIO, || format!("error {error}"))?;
    let failing = told.until("backing-failing", Some("a"))?;
    check(state(&failing) == "degraded", || format!("{failing:#?}"))?;
    let back = told.until_with("backing-back", Some("a"), || {
        one(&mut connection, Command::Write, 0).map(drop)
    })?;
    check(state(&back) == "healthy", || format!("{back:#?}"))?;
    told.end()
}

fn hanging() -> Result<(), Stop> {
    let flags = ["--disk", "a=fault:seed=1,stall=1/8s:mem:1M"];
    let told = Told::start(&[&flags[..], &["--hang-after", "2s"]].concat())?;
    let mut connection = Connection::open(&told.nbd(), "a")?;
    connection.send(Command::Write, 1, 0, &[7; 4096])?;
    let hanging = told.until("backing-hanging", Some("a"))?;
    check(state(&hanging) == "stalled", || format!("{hanging:#?}"))?;
    check(connection.receive()?.is_some(), || "no reply".into())?;
    let back = told.until("backing-back", Some("a"))?;
    check(state(&back) == "healthy", || format!("{back:#?}"))?;
    told.end()
}

fn full() -> Result<(), Stop> {
    need(&["unshare", "mount"])?;
    let dir = tempfile::tempdir()?;
    let small = dir.path().join("small");
    std::fs::create_dir(&small)?;
    let disk = format!("a=file:{},size=16M", small.join("a.img").display());
    let args = arguments(dir.path(), &["--disk", &disk])?;
    // In a name space of its own the server may mount a small file system.
    let mount = "mount -t tmpfs -o size=1M none \"$1\" || exit 77; shift; exec \"$@\"";
    let inside = |command: &mut std::process::Command| {
        let small = small.as_os_str();
        command.args(["-rm", "sh", "-c", mount, "sh"]).arg(small);
    };
    let mut probe = std::process::Command::new("unshare");
    inside(&mut probe);
    if !probe.arg("true").stderr(Stdio::null()).status()?.success() {
        return Stop::skip("no small file system can be mounted here");
    }
    let mut command = std::process::Command::new("unshare");
    inside(&mut command);
    command.arg(binary()?).args(args).stdin(Stdio::null());
    let told = Told {
        daemon: Daemon::run(command)?,
        dir,
    };
    let mut connection = Connection::open(&told.nbd(), "a")?;
    let mut offset = 0;
    while one(&mut connection, Command::Write, offset)? == 0 {
        offset += 4096;
        check(offset < 16 << 20, || "there is room".into())?;
    }
    let error = one(&mut connection, Command::Write, offset)?;
    check(error == ENOSPC, || format!("error {error}"))?;
    let full = told.until("backing-full", Some("a"))?;
    check(state(&full) == "degraded", || format!("{full:#?}"))?;
    // Blocks that are there already can be written.
    let back = told.until_with("backing-back", Some("a"), || {
        one(&mut connection, Command::Write, 0).map(drop)
    })?;
    check(back["fields"]["was"] == "full", || format!("{back:#?}"))?;
    told.end()
}

/// Runs `pvblk raid WORD` for the served disk `r`.
fn manage(told: &Told, word: &str, args: &[&str]) -> Result<(), Stop> {
    let control = told.control();
    let mut command = pvblk(["raid", word, "--control", &control, "r"])?;
    command.args(args);
    run(command, PATIENCE)?.success().map(drop)
}

fn array() -> Result<(), Stop> {
    let disks = Disks::new(5)?;
    let args = ["create", "--raid-devices", "3", "--chunk", "64K"];
    raid(&args, &disks.paths(0..3))?;
    let name = |n: usize| disks.path(n).display().to_string();
    let members = format!("r=raid5:[{}][{}][{}]", name(0), name(1), name(2));
    let told = Told::start(&["--disk", &members])?;
    manage(&told, "fail", &["1"])?;
    let failed = told.until("member-failed", Some("r"))?;
    let fields = &failed["fields"];
    let member = fields["member"].as_str().unwrap_or_default();
    let is_told = fields["place"] == 1 && member.contains(&name(1));
    check(is_told, || format!("{failed:#?}"))?;
    let degraded = told.until("array-degraded", Some("r"))?;
    check(state(&degraded) == "degraded", || format!("{degraded:#?}"))?;
    // Slow enough for a rebuild that doesn't come to its end.
    manage(&told, "speed", &["--min", "16", "--max", "16"])?;
    manage(&told, "add", &[&name(3)])?;
    told.until("rebuild-started", Some("r"))?;
    manage(&told, "fail", &["1"])?;
    told.until("rebuild-stopped", Some("r"))?;
    manage(&told, "speed", &["--min", "200000", "--max", "200000"])?;
    manage(&told, "add", &[&name(4)])?;
    told.until("rebuild-finished", Some("r"))?;
    let whole = told.until("array-whole", Some("r"))?;
    check(state(&whole) == "healthy", || format!("{whole:#?}"))?;
    told.end()?;
    // An array that begins without a member.
    let members = format!("r=raid5:[{}][missing][{}]", name(0), name(2));
    let told = Told::start(&["--disk", &members])?;
    let missing = told.until("member-missing", Some("r"))?;
    check(missing["fields"]["place"] == 1, || format!("{missing:#?}"))?;
    told.until("array-degraded", Some("r"))?;
    told.end()
}

fn lost() -> Result<(), Stop> {
    let disks = Disks::new(3)?;
    let args = ["create", "--raid-devices", "3", "--chunk", "64K"];
    raid(&args, &disks.paths(0..3))?;
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("below");
    let disk = |n: usize| format!("m{n}=file:{}", disks.path(n).display());
    let (two, three) = (disk(1), disk(2));
    let nbd = unix(&socket);
    let below = ["serve", "--disk", "g=mem:1M", "--disk", &two, "--disk"];
    let below = [&below[..], &[&three, "--nbd", &nbd]].concat();
    let below = Daemon::start(below)?;
    let export = |name: &str| {
        let socket = socket.display();
        format!("nbd+unix:///{name}?socket={socket},on-reconnect=fail")
    };
    let members = format!(
        "r=raid5:[{}][{}][{}]",
        disks.path(0).display(),
        export("m1"),
        export("m2")
    );
    let device = format!("g={}", export("g"));
    let told = Told::start(&["--disk", &members, "--disk", &device])?;
    let mut connection = Connection::open(&told.nbd(), "r")?;
    let mut other = Connection::open(&told.nbd(), "g")?;
    check(one(&mut other, Command::Write, 0)? == 0, || "g".into())?;
    let error = one(&mut connection, Command::Write, 0)?;
    check(error == 0, || format!("error {error}"))?;
    below.crash()?;
    let gone = told.until_with("disk-gone", Some("g"), || {
        one(&mut other, Command::Write, 0).map(drop)
    })?;
    check(state(&gone) == "failed", || format!("{gone:#?}"))?;
    let failed = told.until_with("array-failed", Some("r"), || {
        one(&mut connection, Command::Write, 0).map(drop)
    })?;
    check(state(&failed) == "failed", || format!("{failed:#?}"))?;
    Ok(())
}

fn sizes() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("a.img");
    File::create(&path)?.set_len(1 << 20)?;
    let disk = format!("a=file:{}", path.display());
    let told = Told::start(&["--disk", &disk])?;
    File::options().write(true).open(&path)?.set_len(2 << 20)?;
    told.daemon.signal(Signal::HUP)?;
    let resized = told.until("disk-resized", Some("a"))?;
    let bytes = &resized["fields"]["bytes"];
    check(*bytes == 2 << 20, || format!("{resized:#?}"))?;
    let command = pvblk(["ctl", "squeeze", "--control", &told.control()])?;
    run(command, PATIENCE)?.success()?;
    told.until("memory-squeezed", None)?;
    let of_disk = told.events(&["--disk", "a"])?;
    check(of_disk.len() == 1, || format!("{of_disk:#?}"))?;
    told.end()
}

fn limited() -> Result<(), Stop> {
    let flags = [
        "--disk",
        "a=mem:1M",
        "--limit",
        "a:write-iops=5,burst=100ms",
    ];
    let told = Told::start(&flags)?;
    let mut connection = Connection::open(&told.nbd(), "a")?;
    for n in 0..32 {
        connection.send(Command::Write, n, 0, &[7; 4096])?;
    }
    let reached = told.until("limit-reached", Some("a"))?;
    let waiting = reached["fields"]["requests"].as_u64().unwrap_or(0);
    check((1..32).contains(&waiting), || format!("{reached:#?}"))?;
    for _ in 0..32 {
        let reply = connection.receive()?;
        check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))?;
    }
    told.end()
}

fn followed() -> Result<(), Stop> {
    let mut told = Told::start(&["--disk", "a=mem:1M"])?;
    let control = told.control();
    let mut command = pvblk(["events", "--control", &control, "--follow"])?;
    let mut reader = command.stdout(Stdio::piped()).spawn()?;
    let Some(output) = reader.stdout.take() else {
        return Stop::fail("no output");
    };
    drop(Connection::open(&told.nbd(), "a")?);
    let mut lines = BufReader::new(output).lines();
    for words in ["peer-attached", "peer-left"] {
        let line = lines.next().transpose()?.unwrap_or_default();
        check(line.contains(words) && line.contains("disk a: "), || line)?;
    }
    // The end of the server is the end of the events.
    told.daemon.stop()?;
    check(lines.next().is_none(), || "more".into())?;
    let status = pvblk_e2e::tools::wait(&mut reader, PATIENCE)?;
    check(status.is_some_and(|s| s.success()), || {
        format!("{status:?}")
    })
}

fn watchdog() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let nbd = unix(&dir.path().join("nbd"));
    let mut command = pvblk(["serve", "--disk", "a=mem:1M", "--nbd", &nbd])?;
    command.env("NOTIFY_SOCKET", &path);
    command.env("WATCHDOG_USEC", "200000");
    let mut daemon = Daemon::run(command)?;
    let mut heard = 0;
    let mut buffer = [0; 4096];
    while heard < 3 {
        let n = socket.recv(&mut buffer)?;
        heard += usize::from(buffer[..n].starts_with(b"WATCHDOG=1"));
    }
    daemon.stop()
}

fn json_log() -> Result<(), Stop> {
    let mut told = Told::start(&[
        "--disk",
        "a=fault:seed=1,read-error=1:mem:1M",
        "--log",
        "warn,backend=info",
        "--log-format",
        "json",
    ])?;
    let mut connection = Connection::open(&told.nbd(), "a")?;
    one(&mut connection, Command::Read, 0)?;
    told.until("backing-failing", Some("a"))?;
    drop(connection);
    told.daemon.stop()?;
    let mut failing = 0;
    for line in told.daemon.lines() {
        let line: Value = serde_json::from_str(&line)?;
        check(line["time"].is_string(), || line.to_string())?;
        failing += usize::from(line["event"] == "backing-failing" && line["level"] == "error");
    }
    check(failing == 1, || format!("{:#?}", told.daemon.lines()))
}
