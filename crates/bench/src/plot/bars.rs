//! Groups of bars.

use super::Axis;
use super::canvas::{Anchor, Canvas, EDGE, Frame, Heading, INK, WIDTH, check_values, colour};
use super::text::{LINE, TEXT, text_width, wrap};
use anyhow::{Result, ensure};

/// Pixels of the chart's height, without heading and axes.
const HEIGHT: i32 = 320;
/// Most pixels of a bar's width.
const MAX_BAR: i32 = 80;

/// A value, and its interval if it has one.
pub type Bar = (f64, Option<(f64, f64)>);

/// A chart of bars in named groups, as SVG; `y` begins at zero. A group has a bar of each series, in their order;
/// `None` leaves its place empty.
pub fn bar_chart(
    title: &str,
    subtitle: &str,
    y: Axis,
    series: &[&str],
    groups: &[(&str, Vec<Option<Bar>>)],
) -> Result<String> {
    ensure!(
        !groups.is_empty() && !series.is_empty(),
        "a chart without bars"
    );
    for (name, bars) in groups {
        ensure!(
            bars.len() == series.len(),
            "group {name} has {} bars for {} series",
            bars.len(),
            series.len()
        );
    }
    let bars = groups.iter().flat_map(|(_, bars)| bars.iter().flatten());
    let max = check_values(bars.flat_map(|&(value, interval)| {
        let (low, high) = interval.unwrap_or((value, value));
        [value, low.max(0.0), high]
    }))?;
    let heading = Heading {
        title,
        subtitle,
        legend: series,
        markers: false,
    };
    let mut frame = Frame {
        left: 0,
        right: WIDTH - EDGE,
        top: heading.height() + LINE / 2,
        bottom: heading.height() + LINE / 2 + HEIGHT,
    };
    // The labels' height depends on the groups' width, which depends on the width of the values' labels: this
    // is the widest that they get.
    let widest = WIDTH - 2 * EDGE - LINE - text_width("1000.00 MiB", TEXT);
    let room = widest / groups.len() as i32 - 10;
    let labels: Vec<Vec<String>> = groups.iter().map(|(g, _)| wrap(g, TEXT, room)).collect();
    let rows = labels.iter().map(Vec::len).max().unwrap_or(1) as i32;

    let mut canvas = Canvas::new(frame.bottom + rows * LINE + EDGE + 4);
    canvas.heading(&heading);
    // The axis ends above the greatest value, which leaves room for the labels of bars.
    let values = canvas.values(&y, max * 1.04, &mut frame);
    let group = (frame.right - frame.left) / groups.len() as i32;
    let bar = (group * 8 / 10 / series.len() as i32).clamp(2, MAX_BAR);
    for (number, ((_, bars), label)) in groups.iter().zip(&labels).enumerate() {
        let middle = frame.left + group * number as i32 + group / 2;
        let left = middle - bar * series.len() as i32 / 2;
        for (place, shown) in bars.iter().enumerate() {
            let Some((value, interval)) = shown else {
                continue;
            };
            let from = left + bar * place as i32;
            let top = values.pixel(*value);
            canvas.rectangle(
                (from + 1, top),
                (from + bar - 1, frame.bottom),
                colour(place),
            );
            let mut above = top;
            if let Some((low, high)) = interval {
                let (low, high) = (values.pixel(*low), values.pixel(*high));
                canvas.whisker(from + bar / 2, low, high, INK);
                above = above.min(high);
            }
            let text = y.unit.label(*value);
            if text_width(&text, TEXT) <= bar {
                canvas.text(&text, (from + bar / 2, above - LINE / 2), Anchor::Center);
            }
        }
        for (row, line) in label.iter().enumerate() {
            let y = frame.bottom + LINE - 4 + row as i32 * LINE;
            canvas.text(line, (middle, y), Anchor::Center);
        }
    }
    Ok(canvas.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::Unit;

    #[test]
    fn bars_and_their_texts() {
        let y = Axis {
            label: "requests/s",
            unit: Unit::Count,
        };
        let groups = [
            ("depth 1", vec![Some((17_500.0, None)), None]),
            (
                "depth 32",
                vec![Some((183_000.0, Some((172e3, 185e3)))), Some((127e3, None))],
            ),
        ];
        let svg = bar_chart("T", "", y, &["a", "b"], &groups).unwrap();
        for text in ["depth 1", "183 k", "127 k", "200 k", "requests/s"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(
            bar_chart("T", "", y, &["a"], &groups).is_err(),
            "two bars for one series"
        );
        assert!(bar_chart("T", "", y, &["a"], &[]).is_err());
    }
}
