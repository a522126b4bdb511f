//! `pvblk latency` beside `btt` on the same capture, which went through the whole ring path.

use pvblk_e2e::btt::{HOPS, btts, devices, ours, parts_add_up, same};
use pvblk_e2e::daemon::{lab, pvblk};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{Finished, need, run, run_ok};
use pvblk_e2e::{Stop, full, run_all};
use serde_json::Value;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("blkparse_reads_a_capture_without_skips", blkparse),
        ("figures_are_btts", btt),
        ("a_merged_dump_tells_the_same", merged_dump),
        ("captures_are_compared", comparison),
        ("slow_requests_are_listed", slow),
        ("mistakes_are_one_line", mistakes),
    ])
}

/// A capture called `t` in a directory of its own.
struct Sample {
    dir: TempDir,
    events: u64,
}

impl Sample {
    fn new() -> Result<Sample, Stop> {
        let dir = tempfile::tempdir()?;
        let requests = if full() { 20_000 } else { 2_000 };
        let prefix = text(&dir.path().join("t"));
        let args = [
            "trace-sample",
            &prefix,
            "--requests",
            &requests.to_string(),
            "--seed",
            &pvblk_testing::seed().to_string(),
        ];
        let said = run(lab(args)?, Duration::from_secs(60))?.success()?;
        let count = said.stdout.split_whitespace().next();
        let events = count.and_then(|n| n.parse().ok()).unwrap_or(0);
        check(events > requests * 4, || said.stdout.clone())?;
        Ok(Sample { dir, events })
    }

    fn path(&self, name: &str) -> String {
        text(&self.dir.path().join(name))
    }

    /// All files in one, as `btt` wants it.
    fn dump(&self) -> Result<String, Stop> {
        let dump = self.path("dump");
        run_ok("blkparse", ["-i", &self.path("t"), "-d", &dump, "-O", "-q"])?;
        Ok(dump)
    }

    fn report(&self, capture: &str) -> Result<Value, Stop> {
        let json = self.path("report.json");
        latency(&[capture, "--json", &json])?.success()?;
        Ok(serde_json::from_slice(&std::fs::read(json)?)?)
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn latency(args: &[&str]) -> Result<Finished, Stop> {
    let words = std::iter::once(&"latency").chain(args);
    run(pvblk(words)?, Duration::from_secs(60))
}

fn blkparse() -> Result<(), Stop> {
    need(&["blkparse"])?;
    let sample = Sample::new()?;
    let said = run_ok("blkparse", ["-i", &sample.path("t")])?.stdout;
    check(said.contains("Skips: 0 forward (0 -   0.0%)"), || {
        format!("skips: {}", &said[said.len().saturating_sub(300)..])
    })?;
    // Every event is a line, as are the messages that name three devices.
    let lines = said.lines().filter(|l| l.starts_with("240,")).count() as u64;
    check(lines == sample.events + 3, || {
        format!("{lines} lines of {} events", sample.events)
    })?;
    check(said.contains("pvblk device sample/front"), || {
        "no name".into()
    })?;
    for step in ["Q", "G", "M", "I", "D", "C"] {
        let has = |l: &str| l.split_whitespace().nth(5) == Some(step);
        check(said.lines().any(has), || format!("no {step}"))?;
    }
    Ok(())
}

fn btt() -> Result<(), Stop> {
    need(&["blkparse", "btt"])?;
    for _ in 0..if full() { 20 } else { 3 } {
        let sample = Sample::new()?;
        let report = sample.report(&sample.path("t"))?;
        let (ours, btts) = (ours(devices(&report)), btts(Path::new(&sample.dump()?))?);
        same(&ours, &btts, &HOPS)?;
        // The comparison itself must see a difference.
        let mut wrong = ours.clone();
        if let Some(d2c) = wrong.get_mut("D2C") {
            d2c.1 += 2.0;
        }
        check(same(&wrong, &btts, &HOPS).is_err(), || {
            "2 ns aren't seen".into()
        })?;
    }
    Ok(())
}

fn merged_dump() -> Result<(), Stop> {
    need(&["blkparse"])?;
    let sample = Sample::new()?;
    let files = sample.report(&sample.path("t"))?;
    let mut dump = sample.report(&sample.dump()?)?;
    // A dump has its times from 0, and no names of devices.
    for (f, d) in files["devices"]
        .as_array()
        .into_iter()
        .flatten()
        .zip(dump["devices"].as_array_mut().into_iter().flatten())
    {
        check(f["operations"] == d["operations"], || {
            format!("{f} is not {d}")
        })?;
    }
    let named = |d: &&Value| d["name"] == "sample/front";
    let device = devices(&files).iter().find(named);
    let device = device.unwrap_or(&Value::Null);
    check(device["back_merges"].as_u64() > Some(0), || {
        "no merges".into()
    })?;
    parts_add_up(&files)
}

fn comparison() -> Result<(), Stop> {
    let (good, bad) = (Sample::new()?, Sample::new()?);
    let plot = good.path("hops.html");
    let (good, bad) = (good.path("t"), bad.path("t"));
    let said = latency(&["--good", &good, "--bad", &bad, "--report", &plot])?.success()?;
    for words in ["deviation good->bad", "avg-A2G", "%C2A-in-avg+-stddev"] {
        check(said.stdout.contains(words), || said.stdout.clone())?;
    }
    let drawn = std::fs::read_to_string(plot)?;
    check(drawn.contains("sample/front, bad"), || "no such row".into())?;
    let again = latency(&[&good, &bad, "--deviation"])?.success()?;
    check(again.stdout == said.stdout, || again.stdout.clone())?;
    // A capture compared with itself.
    let none = latency(&["--good", &good, "--bad", &good])?.success()?;
    let row = none.stdout.lines().find(|l| l.contains("deviation"));
    let zeros = row.unwrap_or_default().matches(" 0.00%").count();
    check(zeros >= 5, || none.stdout.clone())
}

fn slow() -> Result<(), Stop> {
    let sample = Sample::new()?;
    let all = latency(&[&sample.path("t"), "--slow", "1ns"])?.success()?;
    // Ten of each second, and the sample takes less than some of them.
    let listed = |text: &str| text.lines().filter(|l| l.starts_with("at ")).count();
    let count = listed(&all.stdout);
    check((10..=100).contains(&count), || all.stdout.clone())?;
    check(all.stdout.contains("that are not listed"), || {
        all.stdout.clone()
    })?;
    let none = latency(&[&sample.path("t"), "--slow", "1000s"])?.success()?;
    check(none.stdout.contains("\n0 slow requests\n"), || {
        none.stdout.clone()
    })
}

fn mistakes() -> Result<(), Stop> {
    let sample = Sample::new()?;
    let garbage = sample.path("garbage");
    std::fs::write(&garbage, [7; 100])?;
    let empty = sample.path("empty");
    std::fs::write(&empty, [])?;
    let (good, missing) = (sample.path("t"), sample.path("missing"));
    for (args, code, culprit) in [
        (&[][..], 2, "FILE"),
        (&["--good", &good], 2, "--bad"),
        (&[&good, "--deviation"], 2, "two captures"),
        (&[&good, "--slow", "10"], 2, "unit"),
        (&[&missing], 1, "no such file"),
        (&[&garbage], 1, "garbage, byte 0: no blktrace record"),
        (&[&empty], 1, "no events"),
        (&[&good, "--json", "/nonexistent/f"], 1, "/nonexistent/f"),
    ] {
        let finished = latency(args)?;
        let right = finished.status.and_then(|s| s.code()) == Some(code)
            && finished.stderr.lines().count() == 1
            && finished.stderr.contains(culprit);
        if !right {
            return Err(finished.failure(&format!("should name {culprit:?}, status {code}")));
        }
    }
    Ok(())
}
