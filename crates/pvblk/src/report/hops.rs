//! Hops of requests: what `pvblk latency --json` writes.

use super::page::{Cell, Page};
use super::time;
use anyhow::Result;
use pvblk_bench::plot::{Chart, Hops, Row, Unit};
use serde_json::Value;

/// Hops of a device that follow one another, in order; the first two are never on one device.
const SUCCESSIVE: [&str; 8] = ["A2G", "Q2M", "M2D", "Q2D", "G2I", "G2D", "I2D", "D2C"];
/// All hops, in the order of tables.
const ALL: [&str; 11] = [
    "A2G", "Q2G", "G2I", "Q2M", "M2D", "I2D", "Q2D", "G2D", "D2C", "Q2C", "C2A",
];
/// Rows of one chart.
const MOST_ROWS: usize = 24;

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

/// Shows devices and paths.
pub fn section(page: &mut Page, figures: &Value) -> Result<()> {
    for note in items(&figures["notes"]) {
        page.quiet(text(note));
    }
    for warning in items(&figures["warnings"]) {
        page.warning(text(warning));
    }
    for path in items(&figures["paths"]) {
        if number(&path["requests"]) > 0.0 {
            way(page, path)?;
        }
    }
    let devices: Vec<&Value> = items(&figures["devices"]).collect();
    let rows: Vec<Row> = devices.iter().flat_map(|d| rows_of(d)).collect();
    for rows in rows.chunks(MOST_ROWS) {
        page.chart(&Chart::Hops(Hops {
            title: "Where the time goes on each layer".into(),
            subtitle: "averages of the successive hops of a request".into(),
            unit: Unit::Microseconds,
            rows: rows.to_vec(),
        }))?;
    }
    for device in devices {
        table(page, device);
    }
    Ok(())
}

/// The way of a request through all layers.
fn way(page: &mut Page, path: &Value) -> Result<()> {
    let name = format!("The way of requests to {}", text(&path["name"]));
    page.part(&name);
    let average = number(&path["total"]["average_ns"]) / 1e3;
    let (alone, unknown) = (number(&path["alone"]), number(&path["unknown"]));
    let mut told = format!(
        "{} requests, {} on average",
        path["requests"],
        Unit::Microseconds.label(average)
    );
    if alone > 0.0 {
        told += &format!("; {alone} without events below");
    }
    if unknown > 0.0 {
        told += &format!("; {unknown} left out, since events may be lost");
    }
    page.text(&told);
    let mut begin = 0.0;
    let mut rows = Vec::new();
    for hop in items(&path["hops"]) {
        let length = number(&hop["share"]) * average;
        let full = text(&hop["hop"]);
        // `vm1/front: down to ring`: the word after the layer tells parts of a kind.
        let kind = full.rsplit(": ").next().unwrap_or(full);
        let kind = kind.split(' ').next().unwrap_or(kind);
        rows.push(Row {
            name: full.to_owned(),
            parts: vec![(String::new(), begin), (kind.to_owned(), length)],
        });
        begin += length;
    }
    for rows in rows.chunks(MOST_ROWS) {
        page.chart(&Chart::Hops(Hops {
            title: name.clone(),
            subtitle: "average of all requests; each hop begins where the one before ends".into(),
            unit: Unit::Microseconds,
            rows: rows.to_vec(),
        }))?;
    }
    let rows = items(&path["hops"]).map(|hop| {
        let mut row = vec![Cell::from(text(&hop["hop"]))];
        row.extend(times(&hop["figures"]));
        row.push(format!("{:.1} %", number(&hop["share"]) * 100.0).into());
        row
    });
    page.table(
        &[
            "hop", "requests", "average", "p50", "p90", "p99", "p99.9", "longest", "share",
        ],
        rows.collect(),
    );
    Ok(())
}

/// Count, average, percentiles and the longest time of one hop.
fn times(figures: &Value) -> Vec<Cell> {
    let percentile = |n: usize| time(number(&figures["percentiles_ns"][n][1]));
    let mut cells: Vec<Cell> = vec![
        figures["count"].to_string().into(),
        time(number(&figures["average_ns"])).into(),
    ];
    cells.extend((0..4).map(|n| Cell::from(percentile(n))));
    cells.push(time(number(&figures["max_ns"])).into());
    cells
}

fn name_of(device: &Value) -> &str {
    device["name"].as_str().unwrap_or(text(&device["device"]))
}

/// A row for each operation of a device.
fn rows_of(device: &Value) -> Vec<Row> {
    let operations = device["operations"].as_object().into_iter().flatten();
    let row = |(operation, hops): (&String, &Value)| {
        let part = |hop: &&str| {
            let average = hops[*hop]["average_ns"].as_f64()?;
            // Of merged and other requests together, a hop is as long as its share of all of them.
            let share = number(&hops[*hop]["count"]) / number(&hops["Q2C"]["count"]).max(1.0);
            Some(((*hop).to_owned(), average * share / 1e3))
        };
        Row {
            name: format!("{}, {operation}", name_of(device)),
            parts: SUCCESSIVE.iter().filter_map(part).collect(),
        }
    };
    operations
        .map(row)
        .filter(|r| !r.parts.is_empty())
        .collect()
}

fn table(page: &mut Page, device: &Value) {
    page.part(name_of(device));
    let counts = [
        ("back_merges", "merged behind another"),
        ("front_merges", "merged in front of another"),
        ("splits", "split"),
        ("errors", "errors"),
        ("unfinished", "without an end"),
        ("unmatched", "events of requests without a beginning"),
        ("lost", "events lost"),
        ("unknown", "left out, since events may be lost"),
    ];
    let counts: Vec<String> = counts
        .iter()
        .filter(|(field, _)| number(&device[*field]) > 0.0)
        .map(|(field, words)| format!("{} {words}", device[*field]))
        .collect();
    if !counts.is_empty() {
        page.quiet(&counts.join(", "));
    }
    let operations = device["operations"].as_object().into_iter().flatten();
    let rows = operations.flat_map(|(operation, hops)| {
        let hops = ALL
            .iter()
            .filter_map(move |hop| Some((hop, hops.get(*hop)?)));
        hops.map(move |(hop, figures)| {
            let mut row: Vec<Cell> = vec![operation.as_str().into(), (*hop).into()];
            row.extend(times(figures));
            row
        })
    });
    page.table(
        &[
            "operation",
            "hop",
            "count",
            "average",
            "p50",
            "p90",
            "p99",
            "p99.9",
            "longest",
        ],
        rows.collect(),
    );
}
