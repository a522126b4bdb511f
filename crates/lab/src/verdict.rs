//! Expected results, and whether they were seen.

use crate::stats::{Claim, Confidence, PairRatio};
use comfy_table::Table;
use pvblk_bench::plot::{Axis, Chart, Lines, Point, Scale, Series, Unit};
use serde::Serialize;

/// One expectation of an experiment.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The expectation in words.
    pub expected: String,
    /// The measured figure.
    pub figure: String,
    /// True if the figure meets the expectation.
    pub holds: bool,
}

/// Median and interval of a ratio. `None`: there were too few rounds for one.
pub fn interval(ratio: Option<PairRatio>) -> String {
    match ratio {
        Some(r) => format!("{:.2} ({:.2} to {:.2})", r.median, r.low, r.high),
        None => "no interval".to_owned(),
    }
}

/// Prints checks, one a line; false if one doesn't hold.
pub fn print(checks: &[Check]) -> bool {
    for check in checks {
        let word = if check.holds { "ok  " } else { "FAIL" };
        println!("{word} {}: {}", check.expected, check.figure);
    }
    checks.iter().all(|c| c.holds)
}

pub fn axis(label: &str, unit: Unit, scale: Scale) -> Axis {
    Axis {
        label: label.to_owned(),
        unit,
        scale,
    }
}

pub fn series(name: &str, points: impl IntoIterator<Item = Point>) -> Series {
    Series {
        name: name.to_owned(),
        points: points.into_iter().collect(),
        band: false,
    }
}

/// The charts that have points: a run may leave parts of an experiment out.
pub fn charts(all: impl IntoIterator<Item = Lines>) -> Vec<Chart> {
    let all = all.into_iter().filter(|chart| {
        let points = chart.series.iter().map(|s| s.points.len());
        points.sum::<usize>() > 0
    });
    all.map(Chart::Lines).collect()
}

/// An empty table in the results' style.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(header);
    table
}

/// The ratio of interleaved samples in words, with what the control allows to say of it.
pub fn ratio(a: &[f64], b: &[f64], control: (&[f64], &[f64])) -> String {
    let level = Confidence::default();
    let (Ok(ratio), Ok(control)) = (
        PairRatio::of(a, b, level),
        PairRatio::of(control.0, control.1, level),
    ) else {
        return format!("{:.2} (no interval)", median_ratio(a, b));
    };
    let sure = if Claim::of(ratio, control).proven() {
        ""
    } else {
        " n.p."
    };
    format!(
        "{:.2} ({:.2} to {:.2}){sure}",
        ratio.median, ratio.low, ratio.high
    )
}

/// Median of the ratios of pairs; 0 if there are none.
pub fn median_ratio(a: &[f64], b: &[f64]) -> f64 {
    let ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
    if ratios.is_empty() {
        0.0
    } else {
        crate::path::median(&ratios)
    }
}
