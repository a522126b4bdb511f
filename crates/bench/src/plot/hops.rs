//! Charts of the hops of a request: each row is one stacked bar.

use super::canvas::{
    Anchor, Canvas, Colour, EDGE, Heading, INK, WHITE, WIDTH, check_values, colour,
};
use super::text::{LINE, TEXT, text_width, wrap};
use super::ticks::Unit;
use anyhow::{Result, ensure};

/// Pixels of a bar's height.
const BAR: i32 = 26;
/// Pixels from one row to the next, at least.
const ROW: i32 = 40;
/// Most pixels of the rows' names.
const MAX_NAME: i32 = 240;

/// A chart of rows as SVG. Each row is one bar of segments end to end. Segments of one name have one colour
/// in all rows; a segment is labelled with its value if there is room, and a row with its sum. A segment
/// without a name is a gap, which is in no sum; a row without segments is a heading.
/// sum; a row without segments is a heading.
pub fn hop_chart(
    title: &str,
    subtitle: &str,
    unit: Unit,
    rows: &[(&str, Vec<(&str, f64)>)],
) -> Result<String> {
    ensure!(!rows.is_empty(), "a chart without rows");
    check_values(rows.iter().flat_map(|(_, s)| s.iter().map(|(_, v)| *v)))?;
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flat_map(|(_, segments)| segments) {
        if !name.is_empty() && !names.contains(name) {
            names.push(name);
        }
    }
    let sum = |segments: &[(&str, f64)]| {
        let real = segments.iter().filter(|(name, _)| !name.is_empty());
        real.map(|(_, v)| v).sum::<f64>()
    };
    let end = |segments: &[(&str, f64)]| segments.iter().map(|(_, v)| v).sum::<f64>();
    let longest = rows.iter().map(|(_, s)| end(s)).fold(0.0, f64::max);
    let heading = Heading {
        title,
        subtitle,
        legend: &names,
        markers: false,
    };
    let labels: Vec<Vec<String>> = rows.iter().map(|(n, _)| wrap(n, TEXT, MAX_NAME)).collect();
    let widths = labels.iter().flatten().map(|l| text_width(l, TEXT));
    let left = EDGE + widths.max().unwrap_or(0).min(MAX_NAME) + 10;
    let sums = rows
        .iter()
        .map(|(_, s)| text_width(&unit.label(sum(s)), TEXT));
    let right = WIDTH - EDGE - sums.max().unwrap_or(0) - 8;
    let height = |label: &Vec<String>| ROW.max(label.len() as i32 * LINE + 8);
    let total: i32 = labels.iter().map(height).sum();

    let top = heading.height();
    let mut canvas = Canvas::new(top + total + EDGE);
    canvas.heading(&heading);
    let place = |value: f64| {
        let share = if longest > 0.0 { value / longest } else { 0.0 };
        left + (share * f64::from(right - left)).round() as i32
    };
    let mut y = top;
    for ((_, segments), label) in rows.iter().zip(&labels) {
        let middle = y + height(label) / 2;
        let first = middle - (label.len() as i32 - 1) * LINE / 2;
        for (line, text) in label.iter().enumerate() {
            let at = (left - 10, first + line as i32 * LINE);
            canvas.text(text, at, Anchor::Right);
        }
        let mut begin = 0.0;
        for (name, value) in segments {
            let (from, to) = (place(begin), place(begin + value));
            begin += value;
            if name.is_empty() {
                continue;
            }
            let number = names.iter().position(|n| n == name).unwrap_or(0);
            let (above, below) = (middle - BAR / 2, middle + BAR / 2);
            if to > from {
                canvas.rectangle((from, above), (to, below), colour(number));
                canvas.line(&[(to, above), (to, below)], WHITE, 1);
            }
            let text = unit.label(*value);
            if text_width(&text, TEXT) + 6 <= to - from {
                let at = ((from + to) / 2, middle);
                canvas.text_coloured(&text, at, Anchor::Center, on(colour(number)));
            }
        }
        if !segments.is_empty() {
            let text = unit.label(sum(segments));
            canvas.text(&text, (place(begin) + 8, middle), Anchor::Left);
        }
        y += height(label);
    }
    canvas.line(&[(left, top), (left, y)], INK, 1);
    Ok(canvas.finish())
}

/// The colour of text that is readable on another colour.
fn on(Colour(r, g, b): Colour) -> Colour {
    let light = 299 * u32::from(r) + 587 * u32::from(g) + 114 * u32::from(b);
    if light > 125_000 { INK } else { WHITE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_their_sums() {
        let rows = [
            (
                "client",
                vec![("queue", 1.5), ("ring", 2.0), ("volume", 0.01)],
            ),
            ("other", vec![("ring", 4.0), ("queue", 3.0)]),
        ];
        let svg = hop_chart("T", "s", Unit::Microseconds, &rows).unwrap();
        for text in ["3.51 µs", "7 µs", "queue", "volume", "client"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("10 ns"), "no room for it");
        assert!(hop_chart("T", "", Unit::Microseconds, &[]).is_err());
        assert!(hop_chart("T", "", Unit::Count, &[("a", vec![("b", -1.0)])]).is_err());
    }
}
