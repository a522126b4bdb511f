//! `pvblk latency`: where the time of requests went, from captures.

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::error::ErrorKind;
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use pvblk_lab::plot::{Unit, hop_chart};
use pvblk_trace::blktrace::Capture;
use pvblk_trace::latency::{Analyzer, Deviation, Hop, Hops, Life, Report, Summary, deviation};
use pvblk_trace::op_name;
use pvblk_trace::slow::SlowLog;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const HELP: &str = "\
A capture is a file, or all files NAME.blktrace.N of a NAME: pvblk's, blktrace's, or a dump that
`blkparse -d` merged. Hops are named by the steps at their ends, as blkparse(1) has them:
  A remap  Q queued  G got a tag  I inserted  M merged  D issued  C completed
  C2A      from a completion to the next request of the same submitter

Examples:
  pvblk latency trace                        all of trace.blktrace.0, trace.blktrace.1, …
  pvblk latency trace --slow 10ms --plot hops.svg
  pvblk latency --good before --bad after    what grew, in percent";

#[derive(Args, Debug)]
pub struct LatencyArgs {
    /// Captures, read as one
    #[arg(value_name = "FILE|NAME", required_unless_present = "good")]
    pub files: Vec<PathBuf>,
    /// Compare: the capture of the good case
    #[arg(long, value_name = "FILE|NAME", requires = "bad", conflicts_with_all = ["files", "deviation"])]
    pub good: Option<PathBuf>,
    /// Compare: the capture of the bad case
    #[arg(long, value_name = "FILE|NAME", requires = "good")]
    pub bad: Option<PathBuf>,
    /// Compare two captures, the good one first
    #[arg(long)]
    pub deviation: bool,
    /// List requests that took longer, such as 10ms, with all their hops
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub slow: Option<Duration>,
    /// Write figures and histograms here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Draw the hops of each device here
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

/// Most slow requests that are listed: the last ones.
const MOST_SLOW: usize = 100;
/// Most of them in one second.
const MOST_SLOW_PER_SECOND: u32 = 10;

fn parse_time(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match &text[digits.len()..] {
        "ns" => 1e-9,
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err("a time has a unit: ns, us, ms or s".into()),
    };
    let number: f64 = digits.parse().map_err(|_| "not a number")?;
    Duration::try_from_secs_f64(number * scale).map_err(|e| e.to_string())
}

pub fn run(args: &LatencyArgs) -> Result<()> {
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
        return compare(args, good, bad);
    }
    let mut slow = args.slow.map(|t| {
        let ns = u64::try_from(t.as_nanos()).unwrap_or(u64::MAX);
        SlowLog::new(ns, MOST_SLOW, MOST_SLOW_PER_SECOND)
    });
    let (capture, report) = analyze(&args.files, |life| {
        if let Some(slow) = &mut slow {
            slow.record(life);
        }
    })?;
    print!("{}", text(&capture, &report));
    if let Some(slow) = &slow {
        print!("{}", slow_text(slow, &report));
    }
    if let Some(path) = &args.json {
        save(path, &serde_json::to_string_pretty(&report.export())?)?;
    }
    if let Some(path) = &args.plot {
        let rows = rows(&report, "");
        draw(path, &rows)?;
    }
    Ok(())
}

fn analyze(files: &[PathBuf], done: impl FnMut(&Life)) -> Result<(Capture, Report)> {
    let mut capture = Capture::read(files)?;
    if capture.events.is_empty() {
        let names: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
        bail!("{}: no events of requests in there", names.join(", "));
    }
    let mut report = Analyzer::run(&capture.events, done);
    report.names = std::mem::take(&mut capture.devices);
    Ok((capture, report))
}

fn save(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, format!("{text}\n")).with_context(|| format!("writing {}", path.display()))
}

/// Nanoseconds with a unit.
fn time(ns: f64) -> String {
    Unit::Microseconds.label(ns / 1e3)
}

fn spread(s: &Summary) -> String {
    format!("{} ± {}", time(s.average_ns), time(s.stddev_ns))
}

fn text(capture: &Capture, report: &Report) -> String {
    let mut out = String::new();
    let begin = capture.events.first().map_or(0, |e| e.time_ns);
    let end = capture.events.last().map_or(0, |e| e.time_ns);
    let _ = writeln!(
        out,
        "{} events of {} devices in {}",
        capture.events.len(),
        report.devices.len(),
        time((end - begin) as f64)
    );
    for note in &capture.notes {
        let _ = writeln!(out, "note: {note}");
    }
    for (count, what) in [
        (capture.missing, "records are missing from the files"),
        (
            capture.dropped,
            "events were dropped when this was recorded",
        ),
    ] {
        if count > 0 {
            let _ = writeln!(out, "warning: {count} {what}: hops may be wrong");
        }
    }
    for device in report.devices.keys() {
        let _ = write!(out, "\n{}", device_text(report, *device));
    }
    out
}

fn device_text(report: &Report, device: pvblk_trace::Device) -> String {
    let mut out = String::new();
    let of = &report.devices[&device];
    let name = report.names.get(&device);
    let name = name.map_or_else(String::new, |n| format!(" ({n})"));
    let _ = write!(out, "device {device}{name}: {} events", of.events);
    for (count, what) in [
        (of.back_merges, "merged behind another"),
        (of.front_merges, "merged in front of another"),
        (of.splits, "split"),
        (of.requeues, "requeued"),
        (of.sleeps, "waits for a tag"),
        (of.errors, "errors"),
        (of.unfinished, "without an end"),
        (of.unmatched, "of requests without a beginning"),
    ] {
        if count > 0 {
            let _ = write!(out, ", {count} {what}");
        }
    }
    for (from, count) in &of.remapped_from {
        let _ = write!(out, ", {count} remapped from {}", report.name(*from));
    }
    out.push('\n');
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header([
        "operation",
        "hop",
        "count",
        "average",
        "within 1 sd",
        "share",
        "p50",
        "p90",
        "p99",
        "p99.9",
        "max",
    ]);
    let mut lines = 0;
    for ((_, op), hops) in report.hops.iter().filter(|((d, _), _)| *d == device) {
        for hop in Hop::ALL {
            let Some(s) = hops.of(hop).summary() else {
                continue;
            };
            lines += 1;
            let mut row = vec![
                (*op).to_owned(),
                hop.name().to_owned(),
                s.count.to_string(),
                spread(&s),
                time(s.within_average_ns),
                format!("{:.1} %", s.within_share * 100.0),
            ];
            row.extend(s.percentiles_ns[..4].iter().map(|(_, ns)| time(*ns as f64)));
            row.push(time(s.max_ns as f64));
            table.add_row(row);
        }
    }
    if lines > 0 {
        let _ = writeln!(out, "{table}");
    }
    submitters_text(&mut out, report, device);
    out
}

/// Most submitters that are listed for one device.
const MOST_SUBMITTERS: usize = 16;

fn submitters_text(out: &mut String, report: &Report, device: pvblk_trace::Device) {
    let of = report.submitters.iter().filter(|((d, _), _)| *d == device);
    let mut of: Vec<_> = of.filter(|(_, s)| s.requests > 0).collect();
    of.sort_by_key(|(_, s)| std::cmp::Reverse(s.requests));
    for ((_, pid), s) in of.iter().take(MOST_SUBMITTERS) {
        let percent = |ns: f64| ns / (s.elapsed_ns.max(1) as f64) * 100.0;
        let mut parts: Vec<String> = s
            .shares_ns
            .iter()
            .map(|(hop, ns)| format!("{hop} {:.1} %", percent(*ns)))
            .collect();
        parts.push(format!("C2A {:.1} %", percent(s.idle_ns)));
        if s.other_ns > 0.0 {
            parts.push(format!("other {:.1} %", percent(s.other_ns)));
        }
        let _ = writeln!(
            out,
            "submitter {pid}: {} requests in {}: {}; together {:.1} %",
            s.requests,
            time(s.elapsed_ns as f64),
            parts.join(", "),
            s.explained() * 100.0
        );
    }
    if of.len() > MOST_SUBMITTERS {
        let _ = writeln!(out, "and {} more submitters", of.len() - MOST_SUBMITTERS);
    }
}

fn slow_text(slow: &SlowLog, report: &Report) -> String {
    let mut out = format!("\n{} slow requests\n", slow.seen());
    for life in slow.kept() {
        let hops = life.hops().filter(|(hop, _)| *hop != Hop::Q2C);
        let hops: Vec<String> = hops
            .map(|(hop, ns)| format!("{} {}", hop.name(), time(ns as f64)))
            .collect();
        let _ = writeln!(
            out,
            "at {:.6} s: {} by {} on {}, sector {} + {}: {} ({})",
            life.queue_ns as f64 / 1e9,
            op_name(life.op),
            life.submitter,
            report.name(life.device),
            life.sector,
            life.sectors,
            time(life.total_ns() as f64),
            hops.join(", ")
        );
    }
    if slow.suppressed() > 0 {
        let _ = writeln!(out, "and {} that are not listed", slow.suppressed());
    }
    out
}

type Row = (String, Vec<(&'static str, f64)>);

/// A line for each device: averages in microseconds of the hops that follow each other.
fn rows(report: &Report, suffix: &str) -> Vec<Row> {
    let row = |(device, hops): (_, Hops)| {
        let first = match hops.of(Hop::A2G).count() {
            0 => [Hop::Q2D, Hop::G2I],
            _ => [Hop::A2G, Hop::G2I],
        };
        let order = first.into_iter().chain([Hop::I2D, Hop::D2C, Hop::C2A]);
        let parts = order.filter_map(|hop| {
            let average = hops.of(hop).summary()?.average_ns;
            Some((hop.name(), average / 1e3))
        });
        (format!("{}{suffix}", report.name(device)), parts.collect())
    };
    let devices = report.devices.keys();
    devices
        .map(|d| row((*d, report.all_of(*d))))
        .filter(|(_, parts): &Row| !parts.is_empty())
        .collect()
}

fn draw(path: &Path, rows: &[Row]) -> Result<()> {
    let rows: Vec<(&str, Vec<(&str, f64)>)> =
        rows.iter().map(|(n, p)| (n.as_str(), p.clone())).collect();
    let subtitle = "Averages of the hops of a request's life, and of the time until the next one";
    let svg = hop_chart("Where the time goes", subtitle, Unit::Microseconds, &rows)?;
    save(path, &svg)
}

fn compare(args: &LatencyArgs, good: &Path, bad: &Path) -> Result<()> {
    let read = |path: &Path| analyze(&[path.to_owned()], |_| {}).map(|(_, report)| report);
    let (good, bad) = (read(good)?, read(bad)?);
    let rows = deviation(&good, &bad);
    if rows.is_empty() {
        bail!("the captures have no device in common");
    }
    print!("{}", deviation_text(&rows));
    if let Some(path) = &args.json {
        save(path, &serde_json::to_string_pretty(&rows)?)?;
    }
    if let Some(path) = &args.plot {
        let mut both = self::rows(&good, ", good");
        both.extend(self::rows(&bad, ", bad"));
        both.sort_by(|a, b| a.0.split(", ").next().cmp(&b.0.split(", ").next()));
        draw(path, &both)?;
    }
    Ok(())
}

/// The seed's table: one for each device.
fn deviation_text(rows: &[Deviation]) -> String {
    let mut out = String::new();
    for row in rows {
        let mut table = Table::new();
        table.load_preset(ASCII_MARKDOWN);
        let names = row.columns.iter().map(|c| c.name.clone());
        table.set_header(std::iter::once(row.device.clone()).chain(names));
        let figure = |name: &str, value: f64| match name.starts_with('%') {
            true => format!("{value:.2} %"),
            false => time(value),
        };
        let line = |title: &str, of: fn(&pvblk_trace::latency::Column) -> f64| {
            let cells = row.columns.iter().map(|c| figure(&c.name, of(c)));
            std::iter::once(title.to_owned())
                .chain(cells)
                .collect::<Vec<_>>()
        };
        table.add_row(line("good", |c| c.good));
        table.add_row(line("bad", |c| c.bad));
        let percent = row.columns.iter().map(|c| match c.percent {
            Some(p) => format!("{p:.2}%"),
            None => "-".to_owned(),
        });
        let title = "deviation good->bad".to_owned();
        table.add_row(std::iter::once(title).chain(percent));
        let _ = writeln!(out, "{table}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(parse_time("10ms"), Ok(Duration::from_millis(10)));
        assert_eq!(parse_time("1.5us"), Ok(Duration::from_nanos(1500)));
        for wrong in ["", "10", "ms", "-1s", "10 ms", "1e300s", "1h"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
