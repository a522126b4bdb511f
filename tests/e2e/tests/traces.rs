//! Traces of running processes: fio over NBD, an attached front end, rings, the server and its file.

use pvblk_e2e::btt::{HOPS, btts, devices, ours, parts_add_up, same};
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::{unix, uri};
use pvblk_e2e::tools::{self, Finished, need, need_fio_nbd, run, run_ok, tool, wait_for};
use pvblk_e2e::{Daemon, MIB, Stop, full, run_all};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A limit for operations that take a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    run_all(&[
        ("a_verify_run_is_read_by_blkparse_and_btt", verify_run),
        ("a_running_server_is_looked_at", live),
        ("flushes_side_by_side_are_told_apart", flushes),
        ("a_stream_goes_to_blkparse", stream),
        ("a_capture_ends_in_order_with_its_server", server_ends),
        ("slow_requests_are_logged", slow),
        ("one_connection_too_many_is_refused_in_one_line", too_many),
        ("mistakes_are_one_line", mistakes),
    ])
}

/// A served disk `a`, attached, and both control sockets.
struct Scene {
    attach: Daemon,
    serve: Daemon,
    dir: TempDir,
}

impl Scene {
    fn new(volume: impl Fn(&Path) -> String) -> Result<Scene, Stop> {
        let dir = tempfile::tempdir()?;
        let path = |name: &str| unix(&dir.path().join(name));
        let disk = format!("a={}", volume(dir.path()));
        let (local, back, nbd) = (path("local"), path("back"), path("nbd"));
        let args = ["serve", "--disk", &disk, "--local", &local, "--nbd", &nbd];
        let serve = Daemon::start(args.iter().chain(&["--control", &back]))?;
        let (front, nbd) = (path("front"), path("attached"));
        let args = ["attach", &local, "--disk", "a", "--nbd", &nbd];
        let attach = Daemon::start(args.iter().chain(&["--control", &front]))?;
        Ok(Scene { attach, serve, dir })
    }

    fn file() -> Result<Scene, Stop> {
        Scene::new(|dir| format!("file:{},size=64M", dir.join("disk.img").display()))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// A control socket: `front` or `back`.
    fn control(&self, name: &str) -> String {
        unix(&self.path(name))
    }

    /// Starts to record both sides into the capture `t`; returns when it does.
    fn record(&self) -> Result<Child, Stop> {
        let (front, back, name) = (self.control("front"), self.control("back"), self.text("t"));
        let mut command = pvblk(["trace", &front, &back, "--output", &name])?;
        let child = command.stderr(Stdio::piped()).spawn()?;
        // The file is made when the servers have answered.
        wait_for("a trace begins", || Ok(self.path("t.blktrace.0").exists()))?;
        Ok(child)
    }

    fn stop(mut self) -> Result<(), Stop> {
        self.attach.stop()?;
        self.serve.stop()
    }
}

/// Ends a recording as Ctrl-C does; returns its last line.
fn interrupt(mut child: Child) -> Result<String, Stop> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| Stop::Fail("no process id".into()))?;
    kill_process(pid, Signal::INT)?;
    ended(&mut child)
}

fn ended(child: &mut Child) -> Result<String, Stop> {
    let Some(status) = tools::wait(child, PATIENCE)? else {
        let _ = child.kill();
        return Stop::fail("the recording doesn't end");
    };
    let mut said = String::new();
    if let Some(stderr) = &mut child.stderr {
        stderr.read_to_string(&mut said)?;
    }
    check(status.success(), || format!("{status}: {said}"))?;
    Ok(said)
}

fn latency(args: &[&str]) -> Result<Finished, Stop> {
    let words = std::iter::once(&"latency").chain(args);
    run(pvblk(words)?, PATIENCE)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

/// Number of blkparse's lines with this step on this device.
fn count(lines: &str, device: &str, step: &str) -> usize {
    let fits = |l: &&str| {
        let words: Vec<&str> = l.split_whitespace().collect();
        words.first() == Some(&device) && words.get(5) == Some(&step)
    };
    lines.lines().filter(fits).count()
}

fn verify_run() -> Result<(), Stop> {
    need_fio_nbd()?;
    need(&["blkparse", "btt"])?;
    // On a busy machine the rings may not be emptied in time; dropped events are reported, and aren't the
    // subject of this test.
    for _ in 0..4 {
        if verify_recorded()? {
            return Ok(());
        }
    }
    Stop::fail("events were dropped in each of four runs")
}

/// False if events were dropped.
fn verify_recorded() -> Result<bool, Stop> {
    let scene = Scene::file()?;
    let child = scene.record()?;
    let size = if full() { 32 * MIB } else { 4 * MIB };
    let common = format!(
        "--ioengine=nbd --uri={} --size={size} --iodepth=16 --verify=crc32c --verify_fatal=1 \
         --verify_state_save=0 --serialize_overlap=1",
        uri(&scene.path("attached"), "a")
    );
    let jobs = "--name=mixed --rw=randrw --bssplit=4k/60:16k/30:64k/10 --fsync=32 \
                --name=sequential --rw=write --bs=4k --stonewall";
    let words: Vec<&str> = common
        .split_whitespace()
        .chain(jobs.split_whitespace())
        .collect();
    // Options after the first job's name belong to it, those before to all jobs.
    run(tool("fio", words), Duration::from_secs(180))?.success()?;
    let said = interrupt(child)?;
    if said.contains("dropped") {
        return Ok(false);
    }
    check(said.contains(" events of 4 devices"), || said)?;

    let lines = run_ok("blkparse", ["-i", &scene.text("t")])?.stdout;
    check(lines.contains("Skips: 0 forward (0 -   0.0%)"), || {
        "skips".into()
    })?;
    let (dump, json) = (scene.text("dump"), scene.text("report.json"));
    run_ok(
        "blkparse",
        ["-i", &scene.text("t"), "-d", &dump, "-O", "-q"],
    )?;
    let told = latency(&[&scene.text("t"), "--json", &json])?
        .success()?
        .stdout;
    let report: Value = serde_json::from_slice(&std::fs::read(&json)?)?;

    // btt's figures, as printed.
    same(&ours(devices(&report)), &btts(Path::new(&dump))?, &HOPS)?;
    parts_add_up(&report)?;

    // Remaps and merges.
    let named = |suffix: &str| {
        let ends = |d: &&Value| d["name"].as_str().is_some_and(|n| n.contains(suffix));
        devices(&report)
            .iter()
            .find(ends)
            .ok_or_else(|| Stop::Fail(format!("no {suffix}")))
    };
    let (attach, front, back, file) = (
        named("a/attach")?,
        named("a/front")?,
        named("a/back")?,
        named("a/file:")?,
    );
    for (lower, upper) in [(front, attach), (file, back)] {
        let device = lower["device"].as_str().unwrap_or_default();
        let remaps = count(&lines, device, "A");
        let upper = upper["name"].as_str().unwrap_or_default();
        let line = format!("{remaps} remapped from {upper}");
        check(remaps > 0 && told.contains(&line), || {
            format!("no {line:?} in {told}")
        })?;
    }
    let device = front["device"].as_str().unwrap_or_default();
    let merges = [("back_merges", "M"), ("front_merges", "F")];
    for (name, step) in merges {
        let counted = count(&lines, device, step) as u64;
        check(front[name].as_u64() == Some(counted), || {
            format!("{counted} {name}: {front}")
        })?;
    }

    // The path of each request through all layers: its hops are the whole.
    let path = &report["paths"][0];
    let (followed, alone) = (number(&path["requests"]), number(&path["alone"]));
    check(
        path["name"] == "a/attach" && followed > 1000.0 && alone <= 0.02 * followed,
        || format!("{followed} requests followed, {alone} not: {told}"),
    )?;
    let hops = path["hops"].as_array().into_iter().flatten();
    let share: f64 = hops.map(|h| number(&h["share"])).sum();
    check((share - 1.0).abs() < 0.02, || {
        format!("hops are {share} of the whole")
    })?;
    for hop in [
        "a/front: down to ring",
        "a/back: waits",
        "a/front: up from ring",
    ] {
        check(told.contains(hop), || format!("no {hop:?} in {told}"))?;
    }
    scene.stop()?;
    Ok(true)
}

/// A load on the rings until it is killed.
fn load(scene: &Scene) -> Result<Child, Stop> {
    let target = format!("rings:{},disk=a,queues=1", unix(&scene.path("local")));
    let mut args = vec![
        "bench",
        "--target",
        &target,
        "--rw",
        "randrw",
        "--iodepth",
        "8",
    ];
    args.extend(["--size", "16m", "--runtime", "600"]);
    let mut command = pvblk(args)?;
    Ok(command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?)
}

fn end(mut load: Child) -> Result<(), Stop> {
    load.kill()?;
    load.wait()?;
    Ok(())
}

/// Looks at a running server until `whole` accepts the reading; returns the reading's text. A reading may begin before
/// the load does, or hold gaps where the recorder was overtaken, so a single one proves nothing either way.
fn look(args: &[&str], whole: impl Fn(&Finished) -> bool) -> Result<String, Stop> {
    let begin = Instant::now();
    loop {
        let finished = latency(args)?;
        if whole(&finished) {
            return Ok(finished.stdout);
        }
        check(begin.elapsed() < PATIENCE, || {
            format!("{args:?} never told all: {finished:?}")
        })?;
    }
}

fn live() -> Result<(), Stop> {
    let scene = Scene::new(|_| "mem:64M".into())?;
    let load = load(&scene)?;
    let back = scene.control("back");
    let succeeded = |finished: &Finished| finished.status.is_some_and(|s| s.success());
    look(&["--live", &back, "--seconds", "0.5"], |finished| {
        let words = [
            "a/back",
            "a/mem:64M",
            "remapped from a/back",
            "the path of requests to a/back",
        ];
        succeeded(finished) && words.iter().all(|word| finished.stdout.contains(word))
    })?;
    let several = [
        "--live",
        &back,
        "--seconds",
        "1.5",
        "--interval",
        "0.4",
        "--slow",
        "1ns",
    ];
    look(&several, |finished| {
        let reports = finished.stdout.matches("events of 2 devices").count();
        succeeded(finished) && reports >= 2 && finished.stdout.contains("slow requests")
    })?;
    end(load)?;
    // Nobody listens any more, so nothing is recorded once the last requests have ended.
    look(&["--live", &back, "--seconds", "0.3"], |finished| {
        finished.stderr.contains("no requests in that time")
    })?;
    scene.stop()
}

/// Requests of [`flushes`] that are in flight together, on each of two floors.
const TOGETHER: u64 = 4;

/// Keeps a write and three flushes in flight until `over`; at least 50 times.
fn flush_until(scene: &Scene, over: impl Fn() -> bool) -> Result<(), Stop> {
    let mut connection = Connection::open(&scene.path("nbd"), "a")?;
    for round in 0.. {
        if round >= 50 && over() {
            break;
        }
        connection.send(Command::Write, 0, 0, &[7; 4096])?;
        for cookie in 1..TOGETHER {
            connection.send(Command::Flush, cookie, 0, &[])?;
        }
        for _ in 0..TOGETHER {
            let reply = connection.receive()?;
            check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))?;
        }
    }
    Ok(())
}

/// All flushes look alike: they begin at sector 0 and have no length.
fn flushes() -> Result<(), Stop> {
    let scene = Scene::new(|_| "delay:2ms:mem:8M".into())?;
    let child = scene.record()?;
    flush_until(&scene, || true)?;
    let said = interrupt(child)?;
    check(!said.contains("dropped"), || said)?;
    let json = scene.text("flushes.json");
    let unmatched = |least: u64, args: &[&str]| -> Result<u64, Stop> {
        latency(&[args, &["--json", &json]].concat())?.success()?;
        let report: Value = serde_json::from_slice(&std::fs::read(&json)?)?;
        let all = devices(&report).iter();
        let sum = |name| all.clone().filter_map(|d| d[name].as_u64()).sum::<u64>();
        let flushes = all
            .clone()
            .filter_map(|d| d["operations"]["flush"]["Q2C"]["count"].as_u64());
        let flushes: u64 = flushes.sum();
        check(flushes >= least, || format!("{flushes} flushes: {report}"))?;
        Ok(sum("unmatched") + sum("unfinished"))
    };
    let left = unmatched(2 * 50 * (TOGETHER - 1), &[&scene.text("t")])?;
    check(left == 0, || {
        format!("{left} of a file have no beginning or no end")
    })?;
    let back = scene.control("back");
    let left = std::thread::scope(|scope| {
        let live = scope.spawn(|| unmatched(1, &["--live", &back, "--seconds", "2"]));
        flush_until(&scene, || live.is_finished())?;
        live.join()
            .unwrap_or_else(|_| Stop::fail("the thread that looks panicked"))
    })?;
    // Those that were in flight when it began: D and C on both floors; and when it ended.
    let allowed = 3 * 2 * TOGETHER;
    check(left <= allowed, || {
        format!("{left} have no beginning or no end")
    })?;
    scene.stop()
}

fn stream() -> Result<(), Stop> {
    need(&["blkparse"])?;
    let scene = Scene::new(|_| "mem:64M".into())?;
    let load = load(&scene)?;
    let back = scene.control("back");
    let dump = scene.path("stream");
    let mut command = pvblk(["trace", &back, "--output", "-", "--seconds", "0.5"])?;
    let output = std::fs::File::create(&dump)?;
    let mut child = command.stdout(output).stderr(Stdio::piped()).spawn()?;
    let said = ended(&mut child)?;
    end(load)?;
    check(said.contains("standard output"), || said.clone())?;
    let mut blkparse = tool("blkparse", ["-i", "-"]);
    blkparse.stdin(std::fs::File::open(&dump)?);
    let lines = run(blkparse, PATIENCE)?.success()?.stdout;
    check(
        count(&lines, "240,0", "Q") > 0 || said.starts_with("0 events"),
        || said.clone(),
    )?;
    scene.stop()
}

fn server_ends() -> Result<(), Stop> {
    let mut scene = Scene::file()?;
    let mut child = scene.record()?;
    run_ok("nbdinfo", [uri(&scene.path("attached"), "a")])?;
    scene.attach.stop()?;
    scene.serve.stop()?;
    let said = ended(&mut child)?;
    check(said.contains("t.blktrace.0"), || said)
}

fn slow() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let nbd = dir.path().join("nbd");
    let listen = unix(&nbd);
    let disk = "a=delay:30ms:mem:1M";
    need(&["qemu-io"])?;
    let args = ["serve", "--disk", disk, "--nbd", &listen, "--slow", "20ms"];
    let mut serve = Daemon::start(args)?;
    let disk = uri(&nbd, "a");
    run_ok("qemu-io", ["-r", "-f", "raw", "-c", "read 0 4k", &disk])?;
    // Milliseconds of D2C; on a loaded machine, more than the disk's 30.
    let d2c = |line: &str| {
        let (_, from) = line.split_once("D2C ")?;
        let (number, unit) = from.split_once(' ')?;
        let number = number.parse::<f64>().ok()?;
        let in_ms = [("ms", 1.0), ("s", 1e3)];
        let unit = in_ms.iter().find(|(name, _)| unit.starts_with(name));
        unit.map(|(_, ms)| number * ms)
    };
    let logged = |lines: &[String]| {
        let slow = lines.iter().filter(|l| l.contains("slow: read by"));
        slow.filter(|l| d2c(l).is_some_and(|ms| ms >= 30.0)).count()
    };
    wait_for(
        "a slow request is logged",
        || Ok(logged(&serve.lines()) > 0),
    )?;
    serve.stop()?;
    // At both layers.
    let lines = serve.lines();
    check(logged(&lines) == 2, || lines.join("\n"))
}

/// The control socket serves 16 connections at a time; one more gets a refusal, and no broken
/// connection.
fn too_many() -> Result<(), Stop> {
    let scene = Scene::new(|_| "mem:1M".into())?;
    let ask = |question: &str| -> Result<UnixStream, Stop> {
        let mut socket = UnixStream::connect(scene.path("back"))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.write_all(question.as_bytes())?;
        Ok(socket)
    };
    let mut traces = Vec::new();
    for _ in 0..16 {
        let mut trace = ask("trace\n")?;
        let mut ok = [0; 3];
        trace.read_exact(&mut ok)?;
        check(&ok == b"ok\n", || format!("{ok:?}"))?;
        traces.push(trace);
    }
    for _ in 0..20 {
        let mut said = String::new();
        ask("trace\n")?.read_to_string(&mut said)?;
        check(
            said == "error: 16 are connected already: end one of them\n",
            || said.clone(),
        )?;
    }
    let finished = run(pvblk(["trace", &scene.control("back")])?, PATIENCE)?;
    let told = finished.stderr.contains("16 are connected already")
        && finished.stderr.lines().count() == 1;
    if !told {
        return Err(finished.failure("should tell that there are too many"));
    }
    traces.pop();
    wait_for("the end of a trace is noticed", || {
        let mut first = [0; 3];
        ask("trace\n")?.read_exact(&mut first)?;
        Ok(&first == b"ok\n")
    })?;
    drop(traces);
    scene.stop()
}

fn mistakes() -> Result<(), Stop> {
    let scene = Scene::new(|_| "mem:1M".into())?;
    let (nbd, rings) = (unix(&scene.path("nbd")), unix(&scene.path("local")));
    let (none, back) = (scene.control("none"), scene.control("back"));
    for (args, code, culprit) in [
        (vec!["trace"], 2, "unix:PATH"),
        (vec!["trace", "/x"], 1, "write unix:PATH"),
        (vec!["trace", &none], 1, "is `pvblk serve` running there?"),
        (vec!["trace", &nbd], 1, "no control socket"),
        (vec!["trace", &rings], 1, "not such a socket"),
        (vec!["trace", &back, "--seconds", "0"], 1, "more than 0"),
        (
            vec![
                "trace",
                &back,
                "--seconds",
                "1",
                "--output",
                "/nonexistent/t",
            ],
            1,
            "/nonexistent/t",
        ),
        (
            vec!["latency", "--live", &back, "--seconds", "0.1"],
            1,
            "no requests in that time",
        ),
        (vec!["latency", "--seconds", "1", "x"], 2, "--live"),
    ] {
        let finished = run(pvblk(&args)?, PATIENCE)?;
        let right = finished.status.and_then(|s| s.code()) == Some(code)
            && finished.stderr.lines().count() == 1
            && finished.stderr.contains(culprit);
        if !right {
            return Err(finished.failure(&format!("should name {culprit:?}, status {code}")));
        }
    }
    scene.stop()
}
