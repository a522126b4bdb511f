//! An experiment of `pvblk-lab`.

use super::page::{Cell, Page};
use super::{Source, machine};
use anyhow::{Context, Result};
use pvblk_bench::plot::Chart;
use serde_json::Value;

pub fn section(page: &mut Page, source: &Source) -> Result<()> {
    let content = &source.content;
    page.section(&source.name);
    page.terminal("command", content["command"].as_str().unwrap_or_default());
    let result = &content["result"];
    // Experiments of several parts name the machine in each.
    let parts = result
        .as_object()
        .into_iter()
        .flatten()
        .map(|(_, part)| part);
    let machines = std::iter::once(result).chain(parts).map(|p| &p["machine"]);
    if let Some(found) = machines.into_iter().find(|m| m.is_object()) {
        machine(page, found);
    }
    let shown = &content["report"];
    if shown.is_null() {
        page.quiet(
            "This file has samples only: it was written before tables and plots were kept in it.",
        );
        return Ok(());
    }
    for chart in shown["charts"].as_array().into_iter().flatten() {
        let chart: Chart = serde_json::from_value(chart.clone())
            .with_context(|| format!("{}: a chart that can't be read", source.name))?;
        page.chart(&chart)?;
    }
    page.terminal("tables", shown["text"].as_str().unwrap_or_default().trim());
    let checks = shown["checks"].as_array().into_iter().flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let rows = checks.map(|check| {
        let verdict = match check["holds"].as_bool() {
            Some(true) => "ok".into(),
            _ => Cell::Bad("not seen".to_owned()),
        };
        vec![
            text(&check["expected"]).into(),
            text(&check["figure"]).into(),
            verdict,
        ]
    });
    page.words(&["expected", "found", ""], rows.collect());
    Ok(())
}
