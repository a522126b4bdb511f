//! Compares two captures: prints the growth of each hop.

use super::text::time;
use super::{LatencyArgs, analyze, save};
use crate::output::print;
use crate::report;
use anyhow::{Result, bail};
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use pvblk_trace::latency::{Column, Deviation, Report, deviation};
use std::fmt::Write as _;
use std::path::Path;

pub(super) fn run(args: &LatencyArgs, good: &Path, bad: &Path) -> Result<()> {
    let (good, bad) = (analyze(good)?, analyze(bad)?);
    let rows = deviation(&good, &bad);
    if rows.is_empty() {
        bail!("the captures have no device in common");
    }
    print(&deviation_text(&rows))?;
    if let Some(file) = &args.report {
        page(file, [&good, &bad], &rows)?;
    }
    if let Some(path) = &args.json {
        save(path, &serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

/// A page with the growth, and both captures' hops beside each other.
fn page(file: &Path, [good, bad]: [&Report; 2], rows: &[Deviation]) -> Result<()> {
    let mut page = report::Page::default();
    page.section("What grew");
    page.terminal("growth of each hop", deviation_text(rows).trim());
    let mut devices = Vec::new();
    for (side, report) in [("good", good), ("bad", bad)] {
        let figures = serde_json::to_value(report.export())?;
        for device in figures["devices"].as_array().into_iter().flatten() {
            let mut device = device.clone();
            let name = device["name"].as_str().or(device["device"].as_str());
            device["name"] = format!("{}, {side}", name.unwrap_or_default()).into();
            devices.push(device);
        }
    }
    devices.sort_by_key(|d| {
        let name = d["name"].as_str().unwrap_or_default();
        name.rsplit_once(", ").map(|n| n.0.to_owned())
    });
    page.section("Hops");
    report::hops(&mut page, &serde_json::json!({ "devices": devices }))?;
    report::write(file, page, "Where the time of requests went, good and bad")
}

/// The deviation table, one for each device.
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
        let line = |title: &str, of: fn(&Column) -> f64| {
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
