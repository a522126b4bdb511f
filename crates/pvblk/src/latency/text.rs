//! Prints reports as text.

use comfy_table::{Table, presets::ASCII_MARKDOWN};
use pvblk_bench::plot::Unit;
use pvblk_trace::latency::{Hop, Life, Report, Summary};
use pvblk_trace::op_name;
use pvblk_trace::slow::SlowLog;
use std::fmt::Write as _;

/// Formats nanoseconds with a unit.
pub(super) fn time(ns: f64) -> String {
    Unit::Microseconds.label(ns / 1e3)
}

fn spread(s: &Summary) -> String {
    format!("{} ± {}", time(s.average_ns), time(s.stddev_ns))
}

/// First lines of a report: counts, notes and warnings.
#[derive(Default)]
pub(super) struct Heading<'a> {
    pub events: u64,
    pub elapsed_ns: u64,
    pub notes: &'a [String],
    pub missing: u64,
    pub dropped: u64,
    pub late: u64,
}

impl Heading<'_> {
    /// Losses that the figures suffer from, one line each.
    pub fn warnings(&self) -> impl Iterator<Item = String> {
        let all = [
            (
                self.missing,
                "records are missing from the files: requests of that time are left out",
            ),
            (
                self.dropped,
                "events were dropped when this was recorded: requests of that time are left out",
            ),
            (
                self.late,
                "events came too late to be sorted: hops may be wrong",
            ),
        ];
        let some = all.into_iter().filter(|(count, _)| *count > 0);
        some.map(|(count, what)| format!("{count} {what}"))
    }
}

pub(super) fn report(heading: &Heading<'_>, every: u32, report: &Report) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{} events of {} devices in {}",
        heading.events,
        report.devices.len(),
        time(heading.elapsed_ns as f64)
    );
    if every > 1 {
        let _ = writeln!(
            out,
            "note: one request in {every} was followed, at random: counts are of those; times between requests (C2A) aren't known"
        );
    }
    for note in heading.notes {
        let _ = writeln!(out, "note: {note}");
    }
    for warning in heading.warnings() {
        let _ = writeln!(out, "warning: {warning}");
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
        (of.lost, "lost"),
        (of.unknown, "requests left out, since events may be lost"),
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

pub(super) fn slow(slow: &SlowLog, report: &Report) -> String {
    let mut out = format!("\n{} slow requests\n", slow.seen());
    for life in slow.kept() {
        let name = report.name(life.device);
        let _ = writeln!(
            out,
            "at {:.6} s: {}",
            life.queue_ns as f64 / 1e9,
            self::life(life, &name)
        );
    }
    if slow.suppressed() > 0 {
        let _ = writeln!(out, "and {} that are not listed", slow.suppressed());
    }
    out
}

/// Formats one request with its hops.
pub fn life(life: &Life, device: &str) -> String {
    let hops = life.hops().filter(|(hop, _)| *hop != Hop::Q2C);
    let hops: Vec<String> = hops
        .map(|(hop, ns)| format!("{} {}", hop.name(), time(ns as f64)))
        .collect();
    format!(
        "{} by {} on {device}, sector {} + {}: {} ({})",
        op_name(life.op),
        life.submitter,
        life.sector,
        life.sectors,
        time(life.total_ns() as f64),
        hops.join(", ")
    )
}
