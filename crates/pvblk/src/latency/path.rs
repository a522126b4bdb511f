//! Prints a request's path through all layers, one line for each hop.

use super::chart::Row;
use super::text::time;
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use pvblk_trace::Device;
use pvblk_trace::latency::{Part, Path, PathHop, Report};
use serde_json::{Value, json};

/// Columns of the widest bar.
const BAR: f64 = 40.0;

fn name(hop: &PathHop, report: &Report) -> String {
    let device = report.name(hop.device);
    let ring = |other: &Device| {
        let other = report.name(*other);
        let is_front = device.ends_with("/front") || device.ends_with("/guest");
        match is_front && other.ends_with("/back") {
            true => "ring".to_owned(),
            false => other,
        }
    };
    match &hop.part {
        Part::Wait => format!("{device}: waits"),
        Part::Down(other) => format!("{device}: down to {}", ring(other)),
        Part::Work => format!("{device}: works"),
        Part::Up(other) => format!("{device}: up from {}", ring(other)),
    }
}

/// Averages of the hops as shares of the whole; a hop that some requests don't pass is averaged over those that do.
fn averages(path: &Path) -> impl Iterator<Item = (&PathHop, f64)> {
    let all = path.total.count().max(1) as f64;
    path.hops.iter().map(move |hop| {
        let average = hop.times.sum_ns() as f64 / all;
        (hop, average)
    })
}

/// The table of a path.
pub(super) fn text(device: Device, path: &Path, report: &Report) -> String {
    let Some(total) = path.total.summary() else {
        return String::new();
    };
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["hop", "average", "p50", "p99", "max", "share", ""]);
    for column in 1..6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for (hop, average) in averages(path) {
        let Some(s) = hop.times.summary() else {
            continue;
        };
        let share = average / total.average_ns.max(1.0);
        let bar = "█".repeat((share * BAR).round() as usize);
        table.add_row([
            name(hop, report),
            time(average),
            time(s.percentiles_ns[0].1 as f64),
            time(s.percentiles_ns[2].1 as f64),
            time(s.max_ns as f64),
            format!("{:.1} %", share * 100.0),
            bar,
        ]);
    }
    let alone = match path.alone {
        0 => String::new(),
        n => format!(", and {n} without events below"),
    };
    format!(
        "\nthe path of requests to {}: {} of {} on average{alone}\n{table}\n",
        report.name(device),
        total.count,
        time(total.average_ns)
    )
}

/// The same as JSON.
pub(super) fn json(device: Device, path: &Path, report: &Report) -> Value {
    let hops = averages(path).map(|(hop, average)| {
        json!({
            "hop": name(hop, report),
            "average_ns": average,
            "figures": hop.times.summary(),
            "histogram": hop.times.histogram().export(),
        })
    });
    json!({
        "device": device.to_string(),
        "name": report.name(device),
        "requests": path.total.count(),
        "alone": path.alone,
        "total": path.total.summary(),
        "hops": hops.collect::<Vec<Value>>(),
    })
}

/// Rows of a chart: each hop begins where the one before ended.
pub(super) fn rows(device: Device, path: &Path, report: &Report) -> Vec<Row> {
    let mut begin = 0.0;
    let mut rows = vec![(
        format!("the path of requests to {}", report.name(device)),
        Vec::new(),
    )];
    for (hop, average) in averages(path) {
        let part = match hop.part {
            Part::Wait => "waits",
            Part::Down(_) => "down",
            Part::Work => "works",
            Part::Up(_) => "up",
        };
        rows.push((name(hop, report), vec![("", begin), (part, average / 1e3)]));
        begin += average / 1e3;
    }
    rows
}
