//! Charts as data, and their drawing as SVG: for reports and documents. See docs/decisions/0038-timelines-and-reports.md.
//!
//! Labels never overlap or leave the picture, whichever font the viewer has: widths are estimates on the safe
//! side. Each series has a colour, a dash and a marker of its own; colour-blind people can tell the colours apart, on white and on dark ground.

mod bars;
mod canvas;
mod hops;
mod labels;
mod lines;
mod palette;
mod text;
mod ticks;

pub use canvas::{escaped, standalone};
pub use palette::{CSS, MOST_SERIES};
pub use ticks::Unit;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// A chart, without its looks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Chart {
    Lines(Lines),
    Bars(Bars),
    Hops(Hops),
}

/// An axis of a chart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Axis {
    /// Name of the axis, without a unit.
    pub label: String,
    /// Unit of its ticks' labels.
    pub unit: Unit,
    pub scale: Scale,
}

/// The division of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// Equal differences have equal distances; a vertical axis begins at zero.
    Linear,
    /// Equal ratios have equal distances, ticks are powers of two; values must be above 0.
    Log2,
    /// Equal ratios have equal distances, ticks are powers of ten.
    Log10,
}

/// Lines over a number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lines {
    pub title: String,
    pub subtitle: String,
    pub x: Axis,
    pub y: Axis,
    pub series: Vec<Series>,
}

/// A line; its points are joined in the order of their `x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    pub name: String,
    pub points: Vec<Point>,
    /// The points' intervals are one area around the line, not a whisker at each.
    #[serde(default)]
    pub band: bool,
}

/// A point, and the interval of its `y` if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<(f64, f64)>,
}

/// Groups of bars; a group has a bar of each series, `None` where there is no figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bars {
    pub title: String,
    pub subtitle: String,
    pub unit: Unit,
    pub series: Vec<String>,
    pub groups: Vec<Group>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub name: String,
    pub bars: Vec<Option<Bar>>,
}

/// A value, and its interval if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bar {
    pub value: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<(f64, f64)>,
}

/// Rows of parts end to end. Parts of one name have one colour in all rows. A part without a name is room that is left empty, and is in no
/// sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hops {
    pub title: String,
    pub subtitle: String,
    pub unit: Unit,
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub name: String,
    pub parts: Vec<(String, f64)>,
}

/// Pixels of a picture's width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// For screens and paper.
    Wide,
    /// The width of a phone's page.
    Narrow,
}

impl Width {
    fn pixels(self) -> i32 {
        match self {
            Width::Wide => 860,
            Width::Narrow => 380,
        }
    }
}

impl Chart {
    pub fn title(&self) -> &str {
        match self {
            Chart::Lines(c) => &c.title,
            Chart::Bars(c) => &c.title,
            Chart::Hops(c) => &c.title,
        }
    }

    /// The chart as an `<svg>` element whose looks are in [`CSS`]. Errors if it has nothing to show, or figures that its axes can't show.
    pub fn draw(&self, width: Width) -> Result<String> {
        match self {
            Chart::Lines(chart) => lines::draw(chart, width),
            Chart::Bars(chart) => bars::draw(chart, width),
            Chart::Hops(chart) => hops::draw(chart, width),
        }
    }
}

impl Point {
    /// The median of `samples` at `x`, with the least and the greatest; `None` without samples.
    pub fn spread(x: f64, samples: &[f64]) -> Option<Point> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (*sorted.first()?, *sorted.last()?);
        let middle = (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0;
        Some(Point {
            x,
            y: middle,
            interval: (sorted.len() > 1).then_some((low, high)),
        })
    }
}

/// Joins runs that go up and down to a band: for each of `count` equal intervals of `x`, the median of all runs' points in it, the least and
/// the greatest.
pub fn band(name: &str, runs: &[&[(f64, f64)]], count: usize) -> Series {
    let all = || runs.iter().flat_map(|run| run.iter());
    let low = all().map(|p| p.0).fold(f64::INFINITY, f64::min);
    let high = all().map(|p| p.0).fold(f64::NEG_INFINITY, f64::max);
    let step = (high - low) / count.max(1) as f64;
    let mut places = vec![Vec::new(); count.max(1)];
    for (x, y) in all() {
        let place = if step > 0.0 { (x - low) / step } else { 0.0 };
        places[(place as usize).min(count.max(1) - 1)].push(*y);
    }
    let points = places.iter().enumerate();
    let points = points.filter_map(|(n, ys)| Point::spread(low + (n as f64 + 0.5) * step, ys));
    Series {
        name: name.to_owned(),
        points: points.collect(),
        band: true,
    }
}

/// The greatest of the values; an error if a chart can't show them.
fn check_values(values: impl IntoIterator<Item = f64>) -> Result<f64> {
    let mut max = 0f64;
    for value in values {
        ensure!(
            value.is_finite() && value >= 0.0,
            "a chart from zero can't show {value}"
        );
        max = max.max(value);
    }
    Ok(max)
}

fn check_series(count: usize) -> Result<()> {
    ensure!(
        count <= MOST_SERIES,
        "a chart of {count} series: more than {MOST_SERIES} can't be told apart; make several charts"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_become_a_band() {
        let (a, b) = (
            [(0.0, 1.0), (1.0, 5.0), (10.0, 4.0)],
            [(0.5, 3.0), (9.0, 2.0)],
        );
        let band = band("n", &[&a, &b], 2);
        let points: Vec<_> = band.points.iter().map(|p| (p.x, p.y, p.interval)).collect();
        assert_eq!(
            points,
            [(2.5, 3.0, Some((1.0, 5.0))), (7.5, 3.0, Some((2.0, 4.0)))]
        );
        assert!(band.band);
    }

    #[test]
    fn a_chart_is_written_and_read() {
        let chart = Chart::Hops(Hops {
            title: "t".into(),
            subtitle: String::new(),
            unit: Unit::Microseconds,
            rows: vec![Row {
                name: "r".into(),
                parts: vec![("a".into(), 0.1 + 0.2)],
            }],
        });
        let text = serde_json::to_string(&chart).unwrap();
        assert!(text.contains("\"kind\":\"hops\""), "{text}");
        assert_eq!(serde_json::from_str::<Chart>(&text).unwrap(), chart);
    }
}
