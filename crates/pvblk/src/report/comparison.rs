//! A comparison that `pvblk-lab compare` made.

use super::page::{Cell, Page};
use super::{Source, machine};
use anyhow::Result;
use pvblk_bench::plot::{Bar, Bars, Chart, Group, MOST_SERIES, Unit};
use serde_json::Value;

/// Metrics of one chart.
const MOST_GROUPS: usize = 12;

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

/// The names of the sides: their files.
fn sides(content: &Value) -> Vec<String> {
    let files = |side: &Value| {
        items(&side["files"])
            .map(text)
            .collect::<Vec<_>>()
            .join(", ")
    };
    items(&content["sides"]).map(files).collect()
}

pub fn section(page: &mut Page, source: &Source) -> Result<()> {
    let content = &source.content;
    page.section(&source.name);
    let sides = sides(content);
    if content["machines_differ"] == true {
        page.warning("The files are from different machines: their figures don't compare.");
    }
    let first = items(&content["sides"]).find_map(|s| items(&s["machines"]).next());
    if let Some(found) = first {
        machine(page, found);
    }
    for chart in charts(content, &sides) {
        page.chart(&chart)?;
    }
    let confidence = match &content["confidence_percent"] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    page.text(&format!(
        "Differences by Student's t with a pooled variance, at {confidence} % confidence. No difference proven is not equal."
    ));
    for metric in items(&content["metrics"]) {
        page.part(text(&metric["name"]));
        let rows = items(&metric["parts"]).map(|part| row(part, &sides));
        page.table(
            &[
                "side",
                "n",
                "least",
                "median",
                "greatest",
                "average",
                "std. dev.",
                "difference",
            ],
            rows.collect(),
        );
    }
    Ok(())
}

fn row(part: &Value, sides: &[String]) -> Vec<Cell> {
    let side = part["side"].as_u64().unwrap_or(0) as usize;
    let name = sides.get(side).cloned().unwrap_or_default();
    let s = &part["summary"];
    let figure = |name: &str| Cell::from(digits(number(&s[name])));
    let comparison = &part["comparison"];
    let verdict = match (comparison.is_object(), side) {
        (_, 0) => "–".into(),
        (false, _) => text(&part["reason"]).into(),
        (true, _) => {
            let by = format!(
                "{:+.2} ± {:.2} %",
                number(&comparison["percent"]),
                number(&comparison["percent_error"])
            );
            match comparison["proven"].as_bool() {
                Some(true) => Cell::from(by),
                _ => Cell::from(format!("{by}, none proven")),
            }
        }
    };
    vec![
        name.into(),
        s["n"].to_string().into(),
        figure("min"),
        figure("median"),
        figure("max"),
        figure("avg"),
        figure("stddev"),
        verdict,
    ]
}

/// Five significant digits, without an exponent.
fn digits(value: f64) -> String {
    let before = value.abs().max(1e-9).log10().floor() as i32 + 1;
    format!("{value:.*}", (5 - before).clamp(0, 9) as usize)
}

/// The averages as shares of the first side's.
fn charts(content: &Value, sides: &[String]) -> Vec<Chart> {
    if sides.len() > MOST_SERIES {
        return Vec::new();
    }
    let metrics: Vec<&Value> = items(&content["metrics"]).collect();
    let group = |metric: &&Value| {
        let bar = |side: usize| {
            let part = items(&metric["parts"]).find(|p| p["side"] == side)?;
            if side == 0 {
                let (value, interval) = (100.0, None);
                return Some(Bar { value, interval });
            }
            let comparison = part.get("comparison").filter(|c| c.is_object())?;
            let value = 100.0 + number(&comparison["percent"]);
            let error = number(&comparison["percent_error"]);
            let interval = Some(((value - error).max(0.0), value + error));
            (value.is_finite() && value >= 0.0 && error.is_finite())
                .then_some(Bar { value, interval })
        };
        Group {
            name: text(&metric["name"]).to_owned(),
            bars: (0..sides.len()).map(bar).collect(),
        }
    };
    let chart = |groups: &[&Value]| {
        Chart::Bars(Bars {
            title: "Averages, beside the first side's".into(),
            subtitle: "in percent of the first side; whiskers: the interval of the difference"
                .into(),
            unit: Unit::Percent,
            series: sides.to_vec(),
            groups: groups.iter().map(group).collect(),
        })
    };
    metrics.chunks(MOST_GROUPS).map(chart).collect()
}

#[cfg(test)]
mod tests {
    use super::digits;

    #[test]
    fn figures_have_five_digits() {
        assert_eq!(
            [183_456.7, 12.3456, 0.012_345_6, 0.0].map(digits),
            ["183457", "12.346", "0.012346", "0.000000000"]
        );
    }
}
