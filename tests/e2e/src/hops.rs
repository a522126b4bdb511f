//! Hops as all readers of a server have them: `pvblk latency`, the page's stream, metrics and timelines, recorded side by side.

use crate::Stop;
use crate::daemon::pvblk;
use crate::http::Place;
use crate::outcome::check;
use crate::perfetto::{Sums, by_protoc};
use crate::tools::{self, run, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(120);

/// Number and sum of a hop.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figure {
    pub count: f64,
    pub ns: f64,
}

impl Figure {
    pub fn add(&mut self, count: f64, ns: f64) {
        self.count += count;
        self.ns += ns;
    }
}

/// Sums of hops of one disk, by their names.
pub type Hops = BTreeMap<String, Figure>;

/// Nanoseconds of all hops.
pub fn total(hops: &Hops) -> f64 {
    hops.values().map(|f| f.ns).sum()
}

/// The hops of each disk in a reading of metrics.
fn metrics(text: &str) -> BTreeMap<String, Hops> {
    let mut disks = BTreeMap::<String, Hops>::new();
    for (family, is_time) in [
        ("pvblk_disk_hop_requests_total{disk=\"", false),
        ("pvblk_disk_hop_time_seconds_total{disk=\"", true),
    ] {
        for line in text.lines().filter_map(|l| l.strip_prefix(family)) {
            let parts = line
                .split_once("\",hop=\"")
                .and_then(|(disk, rest)| Some((disk, rest.rsplit_once("\"} ")?)));
            let Some((disk, (hop, value))) = parts else {
                continue;
            };
            let value: f64 = value.parse().unwrap_or(f64::NAN);
            let figure = disks.entry(disk.to_owned()).or_default();
            let figure = figure.entry(hop.to_owned()).or_default();
            match is_time {
                true => figure.ns = value * 1e9,
                false => figure.count = value,
            }
        }
    }
    disks
}

/// All that is recorded while loads run.
pub struct Recording<'a> {
    web: &'a Place,
    /// Where the capture is written.
    name: PathBuf,
    trace: Child,
    objects: Receiver<Value>,
    before: BTreeMap<String, Hops>,
}

/// The hops of all disks, as each reader has them.
pub struct Read {
    pub capture: Value,
    pub timeline: Sums,
    pub page: BTreeMap<String, Hops>,
    pub metrics: BTreeMap<String, Hops>,
    /// Events and requests that at least one reader lost.
    pub lost: u64,
}

impl Recording<'_> {
    /// Starts to record a server with this page and this control socket, into captures in a folder.
    pub fn start<'a>(web: &'a Place, control: &str, dir: &Path) -> Result<Recording<'a>, Stop> {
        // The readers of all requests first, so that nothing changes later.
        let reading = || -> Result<String, Stop> { Ok(web.get("/metrics?hops=1")?.text()) };
        wait_for("hops are counted", || {
            Ok(reading()?.contains("\npvblk_hops_followed_one_in 1\n"))
        })?;
        let follow = web.follow("/api/hops?every=1")?;
        let (to, objects) = channel();
        std::thread::spawn(move || {
            let objects = follow.filter_map(|line| serde_json::from_str(&line).ok());
            for object in objects {
                if to.send(object).is_err() {
                    return;
                }
            }
        });
        let name = dir.join("t");
        let text = name.display().to_string();
        let trace = pvblk(["trace", control, "--output", &text])?
            .stderr(Stdio::null())
            .spawn()?;
        wait_for("a trace begins", || Ok(dir.join("t.blktrace.0").exists()))?;
        // One object later the page follows everything.
        objects
            .recv_timeout(HANG)
            .map_err(|_| Stop::Fail("no hops".into()))?;
        Ok(Recording {
            before: metrics(&reading()?),
            web,
            name,
            trace,
            objects,
        })
    }

    /// Ends it after loads of so many requests for each disk.
    pub fn finish(mut self, requests: &BTreeMap<String, u64>) -> Result<Read, Stop> {
        let (mut page, mut lost) = (BTreeMap::<String, Hops>::new(), 0);
        let mut seen = BTreeMap::<String, u64>::new();
        while lost == 0 && *requests != seen {
            let object = self.objects.recv_timeout(HANG);
            let object = object
                .map_err(|_| Stop::Fail(format!("hops of {seen:?}, and {requests:?} were sent")))?;
            lost += object["lost"].as_u64().unwrap_or(0) + object["unknown"].as_u64().unwrap_or(0);
            for disk in object["disks"].as_array().into_iter().flatten() {
                let name = disk["disk"].as_str().unwrap_or_default();
                *seen.entry(name.to_owned()).or_default() += disk["requests"].as_u64().unwrap_or(0);
                let hops = page.entry(name.to_owned()).or_default();
                for hop in disk["hops"].as_array().into_iter().flatten() {
                    let label = hop["label"].as_str().unwrap_or_default();
                    let number = |field: &str| hop[field].as_f64().unwrap_or(f64::NAN);
                    let figure = hops.entry(label.to_owned()).or_default();
                    figure.add(number("count"), number("sum_ns"));
                }
            }
        }
        let mut of_metrics = BTreeMap::new();
        if lost == 0 {
            wait_for("metrics have all requests", || {
                let text = self.web.get("/metrics?hops=1")?.text();
                of_metrics = difference(&metrics(&text), &self.before);
                let counted = |name: &str| -> f64 {
                    let worker = of_metrics.get(name).and_then(|h: &Hops| h.get("worker"));
                    worker.map_or(0.0, |f| f.count)
                };
                let is_lost = text.contains("\npvblk_hops_lost_events_total ")
                    && !text.contains("\npvblk_hops_lost_events_total 0\n");
                lost += u64::from(is_lost);
                Ok(is_lost || requests.iter().all(|(name, n)| counted(name) >= *n as f64))
            })?;
        }
        let pid = i32::try_from(self.trace.id()).ok().and_then(Pid::from_raw);
        kill_process(
            pid.ok_or_else(|| Stop::Fail("no process".into()))?,
            Signal::INT,
        )?;
        let ended = tools::wait(&mut self.trace, HANG)?;
        check(ended.is_some_and(|s| s.success()), || "the trace".into())?;
        let (capture, timeline) = capture(&self.name)?;
        lost += capture["lost"].as_u64().unwrap_or(0);
        Ok(Read {
            capture,
            timeline,
            page,
            metrics: of_metrics,
            lost,
        })
    }
}

/// Figures of a capture, and the sums of its timeline.
pub fn capture(name: &Path) -> Result<(Value, Sums), Stop> {
    let (name, json) = (
        name.display().to_string(),
        format!("{}.json", name.display()),
    );
    run(pvblk(["latency", &name, "--json", &json])?, HANG)?.success()?;
    let timeline = format!("{name}.pftrace");
    let args = ["trace", "--from", &name, "--perfetto", &timeline];
    run(pvblk(args)?, HANG)?.success()?;
    let sums = by_protoc(Path::new(&timeline))?;
    Ok((serde_json::from_slice(&std::fs::read(json)?)?, sums))
}

fn difference(
    now: &BTreeMap<String, Hops>,
    before: &BTreeMap<String, Hops>,
) -> BTreeMap<String, Hops> {
    let mut all = now.clone();
    for (disk, hops) in &mut all {
        for (hop, figure) in hops {
            if let Some(old) = before.get(disk).and_then(|h| h.get(hop)) {
                figure.add(-old.count, -old.ns);
            }
        }
    }
    all
}

/// The path of the requests to an uppermost layer, such as `vm1/back`, in the figures of a capture, by the texts of hops.
pub fn path_of(capture: &Value, layer: &str) -> Hops {
    let paths = capture["paths"].as_array().into_iter().flatten();
    let mut hops = Hops::new();
    for path in paths.filter(|p| p["name"] == layer) {
        for hop in path["hops"].as_array().into_iter().flatten() {
            let number = |field: &str| hop["figures"][field].as_f64().unwrap_or(f64::NAN);
            let name = hop["hop"].as_str().unwrap_or_default();
            let figure = hops.entry(name.to_owned()).or_default();
            figure.add(number("count"), number("count") * number("average_ns"));
        }
    }
    hops
}

/// The figures of all hops of these names together.
pub fn sum(hops: &Hops, is: impl Fn(&str) -> bool) -> Figure {
    let mut all = Figure::default();
    for (_, figure) in hops.iter().filter(|(name, _)| is(name)) {
        all.add(figure.count, figure.ns);
    }
    all
}

/// True if two figures differ by no more than this share of the greater one.
pub fn close(a: f64, b: f64, share: f64) -> bool {
    (a - b).abs() <= share * a.max(b)
}
