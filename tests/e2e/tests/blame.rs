//! Delays planted at one place of a served disk, under load over real exports: `pvblk latency`, the page's data, the metrics and the timeline blame that
//! place, by the planter's own clock.
//!
//! A modelled device knows for how long it held each request ([`Held`]), and the trace's time of service has that time in it, so the blamed time is never
//! less. It is more by the time for which a thread that has lost its CPU waits for it: a round is repeated until it is near, with a bound.

use pvblk_e2e::arrays::{Disks, raid};
use pvblk_e2e::control::Control;
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::hops::{Figure, Hops, Read, Recording, capture, close, path_of, sum, total};
use pvblk_e2e::http::Place;
use pvblk_e2e::outcome::check;
use pvblk_e2e::perfetto::same_sums;
use pvblk_e2e::stage::{unix, uri};
use pvblk_e2e::tools::{self, need, run, wait_for};
use pvblk_e2e::{Daemon, Stop, run_all};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(120);
/// Rounds until one is near and has lost no event.
const ROUNDS: usize = 32;
/// Most that a blamed time may be above the planted one, as a share, or else in nanoseconds for each request: the CPU's time for a whole batch is in the
/// blamed time of each of its requests.
const NEAR: f64 = 0.02;
const NEAR_NS: f64 = 20_000.0;
/// Most that two readers of the same events may differ, as a share.
const SAME: f64 = 0.001;

const DELAYS: [(&str, u64); 3] = [("10ms", 10_000), ("1ms", 1_000), ("100us", 100)];
const DEPTHS: [u64; 3] = [1, 32, 256];

fn main() -> ExitCode {
    run_all(&[
        ("a_slow_volume_is_blamed", || blamed(Planted::Volume)),
        ("a_slow_member_is_blamed", || blamed(Planted::Member)),
        ("a_slow_volume_below_a_cache_is_blamed", || {
            blamed(Planted::CacheMiss)
        }),
        ("a_slow_remote_server_is_blamed", || blamed(Planted::Remote)),
        ("a_limit_is_blamed", limit),
        ("a_server_that_stands_still_is_the_ring", ring),
    ])
}

/// The place of the delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    Volume,
    Member,
    CacheMiss,
    Remote,
}

/// A disk with one delay, and its load.
struct Cell {
    disk: String,
    delay: &'static str,
    depth: u64,
    requests: u64,
}

fn cells() -> Vec<Cell> {
    let cell = |(delay, us): (&'static str, u64), depth: u64| Cell {
        disk: format!("d{delay}-{depth}"),
        delay,
        depth,
        // About a fifth of a second, and enough for all in flight to have some turns.
        requests: (200_000 / us * depth).clamp(depth * 4, 2048),
    };
    let each = DELAYS.into_iter();
    each.flat_map(|delay| DEPTHS.map(|depth| cell(delay, depth)))
        .collect()
}

/// A server with a disk for each cell, and the one behind it if the disks are remote.
struct Scene {
    server: Daemon,
    behind: Option<Daemon>,
    web: Place,
    dir: TempDir,
    _members: Vec<Disks>,
}

impl Scene {
    fn new(place: Planted, cells: &[Cell]) -> Result<Scene, Stop> {
        let dir = tempfile::tempdir()?;
        let path = |name: &str| unix(&dir.path().join(name));
        let mut members = Vec::new();
        let mut disks = Vec::new();
        let mut remote = Vec::new();
        for cell in cells {
            let late = format!("delay:{}:mem:16M", cell.delay);
            let volume = match place {
                Planted::Volume => late,
                Planted::CacheMiss => format!("cache:4M,readahead=0:{late}"),
                Planted::Remote => {
                    remote.push(format!("{}={late}", cell.disk));
                    uri(&dir.path().join("behind"), &cell.disk)
                }
                Planted::Member => {
                    let files = Disks::fast(3, 12)?;
                    let paths = files.paths(0..3);
                    let args = ["create", "--raid-devices", "3", "--chunk", "4k"];
                    raid(&args, &paths)?;
                    let file = |n: usize| format!("file:{}", paths[n].display());
                    members.push(files);
                    let (a, b, c) = (file(0), file(1), file(2));
                    format!("raid5:[{a}][delay:{}:{b}][{c}]", cell.delay)
                }
            };
            disks.push(format!("{}={volume}", cell.disk));
        }
        let behind = match place {
            Planted::Remote => Some(serve(
                &remote,
                &["--nbd", &path("behind"), "--control", &path("far")],
            )?),
            _ => None,
        };
        let (nbd, local, control, web) = (path("nbd"), path("local"), path("ctl"), path("web"));
        let mut args = vec![
            "--nbd",
            &nbd,
            "--local",
            &local,
            "--control",
            &control,
            "--web",
            &web,
        ];
        let guests: Vec<String> = cells
            .iter()
            .filter(|c| c.depth == 256)
            .map(|c| format!("{}={}", c.disk, path(&c.disk)))
            .collect();
        for guest in &guests {
            args.extend(["--vhost-user", guest]);
        }
        let server = serve(&disks, &args)?;
        let web = Place::told(&server.lines())?;
        Ok(Scene {
            server,
            behind,
            web,
            dir,
            _members: members,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The way of a load: each depth has its own export.
    fn target(&self, cell: &Cell) -> String {
        match cell.depth {
            1 => uri(&self.path("nbd"), &cell.disk),
            32 => format!("rings:{},disk={}", unix(&self.path("local")), cell.disk),
            _ => format!("vhost-user:{}", unix(&self.path(&cell.disk))),
        }
    }

    /// Requests that the planter held, and the time for which it did, in nanoseconds.
    fn held(&self, place: Planted, disk: &str) -> Result<Held, Stop> {
        let question = json!({"delay": "held"});
        let (socket, question) = match place {
            Planted::Remote => ("far", question),
            Planted::Member => {
                let question = json!({"raid": "ask", "member": "1", "question": question});
                ("ctl", question)
            }
            _ => ("ctl", question),
        };
        let params = json!({"name": disk, "question": question});
        let answer = Control::open(&self.path(socket))?.must("disk.ask", params)?;
        let number = |name: &str| answer[name].as_u64();
        match (number("requests"), number("held_ns")) {
            (Some(requests), Some(ns)) => Ok(Held { requests, ns }),
            _ => Stop::fail(format!("the planter says {answer}")),
        }
    }

    fn record(&self) -> Result<Recording<'_>, Stop> {
        Recording::start(&self.web, &unix(&self.path("ctl")), self.dir.path())
    }

    fn stop(mut self) -> Result<(), Stop> {
        self.server.stop()?;
        self.behind.as_mut().map_or(Ok(()), Daemon::stop)
    }
}

fn serve(disks: &[String], args: &[&str]) -> Result<Daemon, Stop> {
    let disks = disks.iter().flat_map(|d| ["--disk", d.as_str()]);
    Daemon::start(
        ["serve"]
            .into_iter()
            .chain(disks)
            .chain(args.iter().copied()),
    )
}

/// The planter's account.
#[derive(Clone, Copy, Debug)]
struct Held {
    requests: u64,
    ns: u64,
}

/// Runs a load to its end; returns the number of its requests and the sum of their times by the client's clock.
fn load(scene: &Scene, cell: &Cell) -> Result<Figure, Stop> {
    let json = scene.path("bench.json").display().to_string();
    let (target, depth) = (scene.target(cell), cell.depth.to_string());
    let size = (cell.requests * 4096).to_string();
    let args = [
        "bench",
        "--target",
        &target,
        "--rw",
        "randread",
        "--iodepth",
        &depth,
    ];
    let args = args.into_iter().chain(["--size", &size, "--json", &json]);
    run(pvblk(args)?, HANG)?.success()?;
    let report: Value = serde_json::from_slice(&std::fs::read(json)?)?;
    let read = &report["jobs"][0]["read"];
    let number = |v: &Value| v.as_f64().unwrap_or(f64::NAN);
    let count = number(&read["total_ios"]);
    Ok(Figure {
        count,
        ns: count * number(&read["lat_ns"]["mean"]),
    })
}

impl Planted {
    /// The label of the blamed hop is this, or begins so.
    fn label(self) -> &'static str {
        match self {
            Planted::Volume | Planted::CacheMiss => "medium",
            Planted::Member => "member delay:",
            Planted::Remote => "remote server",
        }
    }

    /// The hop's text in `latency` and on the timeline.
    fn is_blamed(self, text: &str, disk: &str) -> bool {
        let begin = match self {
            Planted::Member => format!("{disk}/[delay:"),
            Planted::Remote => format!("{disk}/nbd"),
            _ => format!("{disk}/delay:"),
        };
        text.starts_with(&begin) && text.ends_with(": works")
    }
}

/// One disk's figures against the planter's. `Ok(None)`: all is right but not near; else how much of the planted time is blamed.
fn judge(
    place: Planted,
    cell: &Cell,
    planted: Held,
    client: Figure,
    read: &Read,
) -> Result<Option<f64>, Stop> {
    let disk = &cell.disk;
    let empty = Hops::new();
    let path = path_of(&read.capture, &format!("{disk}/back"));
    let page = read.page.get(disk).unwrap_or(&empty);
    let in_metrics = read.metrics.get(disk).unwrap_or(&empty);
    let blamed = sum(&path, |text| place.is_blamed(text, disk));
    let by_label = |hops: &Hops| sum(hops, |label| label.starts_with(place.label()));
    let text = || {
        format!(
            "{place:?} {disk}: planted {planted:?}, the client {client:?}\nlatency {path:#?}\npage {page:#?}\nmetrics {in_metrics:#?}"
        )
    };
    // Readers of the same events agree, hop by hop.
    check(
        !path.is_empty() && close(total(&path), total(page), SAME),
        text,
    )?;
    check(close(total(page), total(in_metrics), SAME), text)?;
    let labels = |hops: &Hops| -> Vec<String> { hops.keys().cloned().collect() };
    check(labels(page) == labels(in_metrics), text)?;
    for (label, figure) in page {
        let other = in_metrics[label];
        let same = figure.count == other.count && close(figure.ns, other.ns, SAME);
        check(same, text)?;
    }
    let (on_page, exported) = (by_label(page), by_label(in_metrics));
    check(blamed.count as u64 == planted.requests, text)?;
    // All of the planted time is there, in each of them.
    let least = planted.ns as f64;
    check(blamed.ns >= least && on_page.ns >= least, text)?;
    check(exported.ns >= least * (1.0 - 1e-6), text)?;
    // No time is invented: all hops together are no more than the client saw, and so all others no more than it saw beside the planted time.
    check(total(&path) <= client.ns * (1.0 + 1e-9), text)?;
    let others = total(&path) - blamed.ns;
    check(others <= client.ns - least, text)?;
    let other = path.iter().filter(|(text, _)| !place.is_blamed(text, disk));
    let other = other.max_by(|a, b| a.1.ns.total_cmp(&b.1.ns));
    println!(
        "{place:?} {:>5} {:>3} in flight: planted {:>9.3} ms, blamed {:.4} x in latency, {:.4} on the page, {:.4} in metrics; other hops {:.4}, most {}",
        cell.delay,
        cell.depth,
        least / 1e6,
        blamed.ns / least,
        on_page.ns / least,
        exported.ns / least,
        others / least,
        other.map_or(String::new(), |(text, f)| format!(
            "{text} {:.4}",
            f.ns / least
        ))
    );
    let most = blamed.ns.max(on_page.ns).max(exported.ns);
    let bound = least + (least * NEAR).max(planted.requests as f64 * NEAR_NS);
    Ok(Some(most / least).filter(|_| most <= bound))
}

fn blamed(place: Planted) -> Result<(), Stop> {
    need(&["protoc"])?;
    let mut left = cells();
    let scene = Scene::new(place, &left)?;
    for _ in 0..ROUNDS {
        let recording = scene.record()?;
        let mut loads = Vec::new();
        let mut requests = BTreeMap::new();
        for cell in &left {
            // A cache has read nothing of this disk yet, or has forgotten it.
            if place == Planted::CacheMiss {
                let params = json!({"name": cell.disk, "question": {"cache": "drop"}});
                Control::open(&scene.path("ctl"))?.must("disk.ask", params)?;
            }
            let before = scene.held(place, &cell.disk)?;
            let client = load(&scene, cell)?;
            let after = scene.held(place, &cell.disk)?;
            let planted = Held {
                requests: after.requests - before.requests,
                ns: after.ns - before.ns,
            };
            requests.insert(cell.disk.clone(), cell.requests);
            loads.push((planted, client));
        }
        let read = recording.finish(&requests)?;
        if read.lost > 0 {
            continue;
        }
        let compared = same_sums(&read.timeline, &read.capture)?;
        check(compared >= 4 * left.len(), || format!("{compared} sums"))?;
        let mut is_near = Vec::new();
        for (cell, (planted, client)) in left.iter().zip(&loads) {
            let share = judge(place, cell, *planted, *client, &read)?;
            // What a remote server is blamed for has the way there and back in it.
            is_near.push(share.is_some() || place == Planted::Remote);
        }
        let mut near = is_near.into_iter();
        left.retain(|_| !near.next().unwrap_or(false));
        if left.is_empty() {
            return scene.stop();
        }
    }
    let names: Vec<&str> = left.iter().map(|c| c.disk.as_str()).collect();
    Stop::fail(format!("not near in {ROUNDS} rounds: {names:?}"))
}

/// A limit holds requests back: it has nearly all of their time.
fn limit() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| unix(&dir.path().join(name));
    let disks = ["a=mem:16M".to_owned()];
    let (nbd, control, web) = (path("nbd"), path("ctl"), path("web"));
    let args = [
        "--limit",
        "a:iops=200,burst=1ms",
        "--nbd",
        &nbd,
        "--control",
        &control,
        "--web",
        &web,
    ];
    let server = serve(&disks, &args)?;
    let web = Place::told(&server.lines())?;
    let mut scene = Scene {
        server,
        behind: None,
        web,
        dir,
        _members: Vec::new(),
    };
    for _ in 0..ROUNDS {
        let recording = scene.record()?;
        let target = uri(&scene.path("nbd"), "a");
        let json = scene.path("bench.json").display().to_string();
        let args = [
            "bench",
            "--target",
            &target,
            "--rw",
            "randread",
            "--iodepth",
            "8",
        ];
        let args = args.into_iter().chain(["--size", "512k", "--json", &json]);
        run(pvblk(args)?, HANG)?.success()?;
        let read = recording.finish(&BTreeMap::from([("a".to_owned(), 128)]))?;
        if read.lost > 0 {
            continue;
        }
        let empty = Hops::new();
        let hops = [
            read.page.get("a").unwrap_or(&empty),
            read.metrics.get("a").unwrap_or(&empty),
        ];
        let totals = hops.map(total);
        check(close(totals[0], totals[1], SAME), || format!("{hops:#?}"))?;
        let share = hops.map(|h| sum(h, |label| label == "limit").ns / total(h));
        println!("limit: {share:?} of the time is blamed on it");
        if share.iter().all(|s| *s > 1.0 - NEAR) {
            return scene.server.stop();
        }
    }
    Stop::fail(format!("not near in {ROUNDS} rounds"))
}

/// A server that is stopped leaves requests on the ring for as long.
fn ring() -> Result<(), Stop> {
    const DEPTH: u64 = 32;
    need(&["protoc"])?;
    let dir = tempfile::tempdir()?;
    let path = |name: &str| unix(&dir.path().join(name));
    let (local, control) = (path("local"), path("back"));
    let disks = ["a=mem:16M".to_owned()];
    let mut server = serve(&disks, &["--local", &local, "--control", &control])?;
    let (nbd, front) = (path("nbd"), path("front"));
    let args = [
        "attach",
        &local,
        "--disk",
        "a",
        "--nbd",
        &nbd,
        "--control",
        &front,
    ];
    let mut attach = Daemon::start(args)?;
    let mut nearest = f64::INFINITY;
    for round in 0..ROUNDS {
        let name = dir.path().join(format!("t{round}"));
        let text = name.display().to_string();
        let mut trace = pvblk(["trace", &control, &front, "--output", &text])?
            .stderr(Stdio::null())
            .spawn()?;
        wait_for("a trace begins", || {
            Ok(dir.path().join(format!("t{round}.blktrace.0")).exists())
        })?;
        let mut client = pvblk_e2e::nbd::Connection::open(&dir.path().join("nbd"), "a")?;
        client.patience(HANG)?;
        server.freeze()?;
        let begin = Instant::now();
        for n in 0..DEPTH {
            client.send_read(n, n * 4096, 4096)?;
        }
        let mut stat = Control::open(&dir.path().join("front"))?;
        wait_for("all requests are taken", || {
            let answer = stat.must("stat", json!({"disk": "a"}))?;
            Ok(answer["disks"][0]["in_flight"] == DEPTH)
        })?;
        // All are on the ring from here on.
        let on_ring = Instant::now();
        std::thread::sleep(Duration::from_millis(100));
        let least = DEPTH as f64 * on_ring.elapsed().as_nanos() as f64;
        server.signal(Signal::CONT)?;
        for _ in 0..DEPTH {
            let reply = client.receive()?;
            check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))?;
            client.receive_data(4096)?;
        }
        let most = DEPTH as f64 * begin.elapsed().as_nanos() as f64;
        let pid = i32::try_from(trace.id()).ok().and_then(Pid::from_raw);
        kill_process(
            pid.ok_or_else(|| Stop::Fail("no process".into()))?,
            Signal::INT,
        )?;
        let ended = tools::wait(&mut trace, HANG)?;
        check(ended.is_some_and(|s| s.success()), || "the trace".into())?;
        let (capture, timeline) = capture(&name)?;
        same_sums(&timeline, &capture)?;
        let way = path_of(&capture, "a/attach");
        let down = sum(&way, |text| text.ends_with("down to ring"));
        let text = || format!("{down:?} of {least} to {most} ns: {}", capture["paths"]);
        check(down.count as u64 == DEPTH, text)?;
        check(down.ns >= least && down.ns <= most, text)?;
        nearest = nearest.min(down.ns / least);
        println!(
            "ring: {:.4} x of the time that the server stood still",
            down.ns / least
        );
        if nearest <= 1.0 + NEAR {
            attach.stop()?;
            return server.stop();
        }
    }
    Stop::fail(format!(
        "{nearest} x of the planted time in {ROUNDS} rounds"
    ))
}
