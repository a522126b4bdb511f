//! `pvblk latency`: prints the times of requests by hop, of running servers or from captures.

mod compare;
mod live;
mod path;
mod text;

pub use text::life as life_text;

use crate::output::print;
use crate::{config, report, trace};
use anyhow::{Context, Result, bail};
use clap::Args;
use clap::error::ErrorKind;
use pvblk_trace::blktrace::Capture;
use pvblk_trace::latency::{Analyzer, Path as HopPath, Paths, Report};
use pvblk_trace::slow::SlowLog;
use pvblk_trace::{Action, Device, Event};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use text::Heading;

pub const HELP: &str = "\
A capture is a file, or all files NAME.blktrace.N of a NAME: pvblk's, blktrace's, or a dump that
`blkparse -d` merged. Hops are named by the steps at their ends, as blkparse(1) has them:
  A remap  Q queued  G got a tag  I inserted  M merged  D issued  C completed
  C2A      from a completion to the next request of the same submitter
Captures of both sides of a ring are read together: then each request's path through all layers is shown.
A virtual machine's own blktrace of its disk, made at the same time, is a side of the ring too: --guest aligns
its clock by the requests that both captures have, and then guest, ring, back end and volume are shown apart.

Examples:
  pvblk latency trace                        all of trace.blktrace.0, trace.blktrace.1, …
  pvblk latency trace --slow 10ms --report hops.html
  pvblk latency --good before --bad after    what grew, in percent
  pvblk latency trace --guest vm1=xvda       beside `blktrace -d /dev/xvda` in the guest of disk vm1
  pvblk latency --live unix:/run/p.ctl --seconds 5
  pvblk latency --live unix:/run/p.ctl --every 64     one request in 64, at a million a second
  pvblk latency --live unix:/run/p.ctl --live unix:/run/attach.ctl --interval 1";

#[derive(Args, Debug)]
pub struct LatencyArgs {
    /// Captures, read as one
    #[arg(value_name = "FILE|NAME", required_unless_present_any = ["good", "live"])]
    pub files: Vec<PathBuf>,
    /// A capture that blktrace made in the guest whose disk is served as DISK, at the same time; may be given several times
    #[arg(long, value_name = "DISK=FILE|NAME", value_parser = guest, requires = "files", conflicts_with_all = ["good", "bad", "live", "deviation"])]
    pub guest: Vec<(String, PathBuf)>,
    /// Compare: the capture of the good case
    #[arg(long, value_name = "FILE|NAME", requires = "bad", conflicts_with_all = ["files", "deviation"])]
    pub good: Option<PathBuf>,
    /// Compare: the capture of the bad case
    #[arg(long, value_name = "FILE|NAME", requires = "good")]
    pub bad: Option<PathBuf>,
    /// Compare two captures: the good one first
    #[arg(long)]
    pub deviation: bool,
    /// Analyse a running server through its control socket; may be given several times, as for both sides of a ring
    #[arg(long, value_name = "unix:PATH", conflicts_with_all = ["files", "good", "deviation"])]
    pub live: Vec<String>,
    /// Follow one request in so many, with all its hops, for loads that are too high to follow all
    #[arg(long, value_name = "N", default_value = "1", value_parser = trace::every(), requires = "live")]
    pub every: u32,
    /// Time to analyse; without it, until Ctrl-C
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,
    /// Interval of reports; without it, one report at the end
    #[arg(long, value_name = "SECONDS")]
    pub interval: Option<f64>,
    /// List requests that took longer, such as 10ms, with all their hops
    #[arg(long, value_name = "TIME", value_parser = config::time)]
    pub slow: Option<Duration>,
    /// File to write figures and histograms to
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Write an HTML page with tables and plots of the hops, as `pvblk report` does
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

/// Most slow requests that are listed: the last ones.
const MOST_SLOW: usize = 100;
/// Most slow requests that are listed for one second.
const MOST_SLOW_PER_SECOND: u32 = 10;

pub fn run(args: &LatencyArgs) -> Result<()> {
    if !args.live.is_empty() {
        return live::run(args);
    }
    if args.seconds.is_some() || args.interval.is_some() {
        let text = "--seconds and --interval are for running servers: give --live too\n";
        return Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, text).into());
    }
    let pair = match (&args.good, &args.bad, args.deviation) {
        (Some(good), Some(bad), _) => Some((good, bad)),
        (_, _, true) => match args.files.as_slice() {
            [good, bad] => Some((good, bad)),
            _ => {
                let text = "--deviation takes two captures: the good one and the bad one\n";
                return Err(clap::Error::raw(ErrorKind::WrongNumberOfValues, text).into());
            }
        },
        _ => None,
    };
    if let Some((good, bad)) = pair {
        if args.slow.is_some() {
            let text = "--slow is for one capture, not for a comparison\n";
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, text).into());
        }
        return compare::run(args, good, bad);
    }
    let capture = read_all(&args.files, &args.guest)?;
    let mut analysis = Analysis::new(args.slow);
    for (device, name) in &capture.devices {
        analysis.name(*device, name);
    }
    if let Some(every) = capture.every {
        analysis.is_of_one_in(every);
    }
    analysis.events(&capture.events);
    let heading = heading(&capture);
    analysis.take().show(&heading, args)
}

fn heading(capture: &Capture) -> Heading<'_> {
    let gaps = capture.events.iter().filter(|e| e.action == Action::Gap);
    let begin = capture.events.first().map_or(0, |e| e.time_ns);
    let end = capture.events.last().map_or(0, |e| e.time_ns);
    Heading {
        events: (capture.events.len() - gaps.count()) as u64,
        elapsed_ns: end - begin,
        notes: &capture.notes,
        missing: capture.missing,
        dropped: capture.dropped,
        late: 0,
    }
}

/// Reads captures as one, and those of guests.
pub fn read_all(files: &[PathBuf], guests: &[(String, PathBuf)]) -> Result<Capture> {
    let mut capture = read(files)?;
    for (disk, file) in guests {
        add_guest(&mut capture, disk, file)?;
    }
    capture.sort();
    Ok(capture)
}

fn read(files: &[PathBuf]) -> Result<Capture> {
    let capture = Capture::read(files)?;
    if capture.events.is_empty() {
        let names: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
        bail!(
            "{}: the capture has no events of requests; was anything read or written while it was made?",
            names.join(", ")
        );
    }
    Ok(capture)
}

/// Parses the value of `--guest`: a disk's name, and a capture of its guest.
pub fn guest(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((disk, file)) if !disk.is_empty() && !file.is_empty() => {
            Ok((disk.to_owned(), file.into()))
        }
        _ => Err("give the disk's name at the server and the guest's capture: vm1=xvda".into()),
    }
}

fn add_guest(capture: &mut Capture, disk: &str, file: &Path) -> Result<()> {
    let guest = read(&[file.to_owned()])?;
    let clock = capture
        .add_guest(&guest, disk)
        .map_err(|why| anyhow::anyhow!("--guest {disk}={}: {why}", file.display()))?;
    capture.notes.push(format!(
        "the guest's clock for {disk} is aligned by {} requests, to within {} either way: a hop of the ring may be longer by that, and the other shorter",
        clock.requests,
        text::time(clock.within_ns as f64)
    ));
    Ok(())
}

/// Analysis of events: hops, paths and slow requests.
struct Analysis {
    analyzer: Analyzer,
    paths: Paths,
    names: BTreeMap<Device, String>,
    threshold: Option<Duration>,
    slow: Option<SlowLog>,
    /// One request of so many was followed.
    every: u32,
}

/// Results of an [`Analysis`].
struct Results {
    report: Report,
    paths: BTreeMap<Device, HopPath>,
    slow: Option<SlowLog>,
    every: u32,
}

impl Analysis {
    fn new(threshold: Option<Duration>) -> Analysis {
        Analysis {
            analyzer: Analyzer::new(),
            paths: Paths::default(),
            names: BTreeMap::new(),
            threshold,
            slow: threshold.map(slow_log),
            every: 1,
        }
    }

    /// Only one request in `every` is followed, or at some time was.
    fn is_of_one_in(&mut self, every: u32) {
        self.every = self.every.max(every);
        if self.every > 1 {
            self.analyzer.has_a_part_of_all();
        }
    }

    fn name(&mut self, device: Device, name: &str) {
        self.paths.name(device, name);
        self.names.insert(device, name.to_owned());
    }

    /// Analyses events, which must be in order of time.
    fn events(&mut self, events: &[Event]) {
        for event in events {
            self.paths.event(event);
            self.analyzer.event(event, &mut |life| {
                self.paths.life(life);
                if let Some(slow) = &mut self.slow {
                    slow.record(life);
                }
            });
        }
    }

    /// Takes the results since the last call.
    fn take(&mut self) -> Results {
        let mut report = self.analyzer.take();
        report.names = self.names.clone();
        let again = self.threshold.map(slow_log);
        Results {
            report,
            paths: self.paths.take(),
            every: self.every,
            slow: std::mem::replace(&mut self.slow, again),
        }
    }
}

fn slow_log(threshold: Duration) -> SlowLog {
    SlowLog::new(threshold, MOST_SLOW, MOST_SLOW_PER_SECOND)
}

impl Results {
    /// Prints the results, and writes the requested files.
    fn show(&self, heading: &Heading<'_>, args: &LatencyArgs) -> Result<()> {
        let mut all = text::report(heading, self.every, &self.report);
        for (device, path) in &self.paths {
            all += &path::text(*device, path, &self.report);
        }
        if let Some(slow) = &self.slow {
            all += &text::slow(slow, &self.report);
        }
        print(&all)?;
        if args.json.is_none() && args.report.is_none() {
            return Ok(());
        }
        let figures = self.json()?;
        if let Some(file) = &args.json {
            save(file, &serde_json::to_string_pretty(&figures)?)?;
        }
        if let Some(file) = &args.report {
            self.page(file, heading, &figures)?;
        }
        Ok(())
    }

    /// Figures and histograms for a file.
    fn json(&self) -> Result<Value> {
        let mut json = serde_json::to_value(self.report.export())?;
        let paths = self.paths.iter();
        let paths = paths.map(|(device, path)| path::json(*device, path, &self.report));
        json["paths"] = paths.collect();
        json["every"] = self.every.into();
        Ok(json)
    }

    fn page(&self, file: &Path, heading: &Heading<'_>, figures: &Value) -> Result<()> {
        let mut page = report::Page::default();
        report::hops(&mut page, &with_notes(figures, heading))?;
        if let Some(slow) = &self.slow {
            page.section("Slow requests");
            page.terminal("slow requests", text::slow(slow, &self.report).trim());
        }
        page.section("Files");
        let bytes = serde_json::to_vec_pretty(figures)?;
        page.attachment("latency.json", "application/json", &bytes);
        report::write(file, page, "Where the time of requests goes")
    }
}

/// The figures with what has to be known to read them.
fn with_notes(figures: &Value, heading: &Heading<'_>) -> Value {
    let mut figures = figures.clone();
    figures["notes"] = heading.notes.iter().cloned().collect();
    figures["warnings"] = heading.warnings().collect();
    figures
}

/// Hops and paths of captures, as for `--json`, with notes and warnings.
pub fn figures(files: &[PathBuf], guests: &[(String, PathBuf)]) -> Result<Value> {
    let capture = read_all(files, guests)?;
    let mut analysis = Analysis::new(None);
    for (device, name) in &capture.devices {
        analysis.name(*device, name);
    }
    analysis.events(&capture.events);
    let heading = heading(&capture);
    Ok(with_notes(&analysis.take().json()?, &heading))
}

/// Analyses one capture for a comparison.
fn analyze(file: &Path) -> Result<Report> {
    let mut capture = read(&[file.to_owned()])?;
    let mut report = Analyzer::run(&capture.events, |_| {});
    report.names = std::mem::take(&mut capture.devices);
    Ok(report)
}

fn save(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, format!("{text}\n")).with_context(|| format!("writing {}", path.display()))
}

/// Checks a time given in seconds.
fn seconds(flag: &str, given: Option<f64>) -> Result<Option<Duration>> {
    given.map(|s| trace::seconds(flag, s)).transpose()
}
