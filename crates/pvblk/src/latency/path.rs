//! Prints a request's path through all layers, one line for each hop.

use super::text::time;
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use pvblk_trace::Device;
use pvblk_trace::latency::{Path, PathHop, Report};
use serde_json::{Value, json};

/// Columns of the widest bar.
const BAR: f64 = 40.0;

fn name(hop: &PathHop, report: &Report) -> String {
    let name = |device| report.name(device);
    hop.part.name(&name(hop.device), name)
}

/// The hops, each with its share of the time of all requests together, 0 to 1.
fn shares(path: &Path) -> impl Iterator<Item = (&PathHop, f64)> {
    let all = path.total.sum_ns().max(1) as f64;
    let share = move |hop: &PathHop| hop.times.sum_ns() as f64 / all;
    path.hops.iter().map(move |hop| (hop, share(hop)))
}

/// The table of a path.
pub(super) fn text(device: Device, path: &Path, report: &Report) -> String {
    let Some(total) = path.total.summary() else {
        return String::new();
    };
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    // All figures of a line are of the same requests: those that passed the hop.
    table.set_header([
        "hop", "requests", "average", "p50", "p99", "max", "share", "",
    ]);
    for column in 1..7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for (hop, share) in shares(path) {
        let Some(s) = hop.times.summary() else {
            continue;
        };
        let bar = "█".repeat((share * BAR).round() as usize);
        table.add_row([
            name(hop, report),
            s.count.to_string(),
            time(s.average_ns),
            time(s.percentiles_ns[0].1 as f64),
            time(s.percentiles_ns[2].1 as f64),
            time(s.max_ns as f64),
            format!("{:.1} %", share * 100.0),
            bar,
        ]);
    }
    let mut alone = match path.alone {
        0 => String::new(),
        n => format!(", and {n} without events below"),
    };
    if path.unknown > 0 {
        alone += &format!(", and {} left out, since events may be lost", path.unknown);
    }
    format!(
        "\nthe path of requests to {}: {} of {} on average{alone}\n{table}\n",
        report.name(device),
        total.count,
        time(total.average_ns)
    )
}

/// The same as JSON.
pub(super) fn json(device: Device, path: &Path, report: &Report) -> Value {
    let hops = shares(path).map(|(hop, share)| {
        json!({
            "hop": name(hop, report),
            "share": share,
            "figures": hop.times.summary(),
            "histogram": hop.times.histogram().export(),
        })
    });
    json!({
        "device": device.to_string(),
        "name": report.name(device),
        "requests": path.total.count(),
        "alone": path.alone,
        "unknown": path.unknown,
        "total": path.total.summary(),
        "hops": hops.collect::<Vec<Value>>(),
    })
}
