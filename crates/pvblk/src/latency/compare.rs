//! Compares two captures: prints and draws the growth of each hop.

use super::text::time;
use super::{LatencyArgs, analyze, chart, save};
use anyhow::{Result, bail};
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use pvblk_trace::latency::{Column, Deviation, deviation};
use std::fmt::Write as _;
use std::path::Path;

pub(super) fn run(args: &LatencyArgs, good: &Path, bad: &Path) -> Result<()> {
    let (good, bad) = (analyze(good)?, analyze(bad)?);
    let rows = deviation(&good, &bad);
    if rows.is_empty() {
        bail!("the captures have no device in common");
    }
    super::print(&deviation_text(&rows))?;
    if let Some(path) = &args.json {
        save(path, &serde_json::to_string_pretty(&rows)?)?;
    }
    if let Some(path) = &args.plot {
        let mut both = chart::rows(&good, ", good");
        both.extend(chart::rows(&bad, ", bad"));
        both.sort_by(|a, b| a.0.split(", ").next().cmp(&b.0.split(", ").next()));
        chart::draw(path, &both)?;
    }
    Ok(())
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
