//! Bars, shares as one bar, and heat maps.

use super::text::{left, right, time};
use crate::top::model::heat::{BANDS, HeatMap, begin};
use ratatui_core::style::{Color, Style};
use ratatui_core::text::{Line, Span};

/// Colours of successive parts of a bar.
const COLORS: [Color; 6] = [
    Color::Cyan,
    Color::Yellow,
    Color::Magenta,
    Color::Green,
    Color::Blue,
    Color::Red,
];

/// The part of `width` columns that `share` (0 to 1) has.
pub fn bar(share: f64, width: usize) -> String {
    let full = (share.clamp(0.0, 1.0) * width as f64).round() as usize;
    left(&"█".repeat(full), width)
}

/// A part of a bar: its words, and its length in any unit.
pub struct Part<'a> {
    pub words: &'a str,
    pub length: f64,
}

/// Parts one after the other in `width` columns together, each with as much of its words as fits. A part that is shorter than half a column isn't there.
/// Parts end with `│`, so they can be told apart without colours.
pub fn parts(parts: &[Part<'_>], width: usize) -> Vec<Span<'static>> {
    let all: f64 = parts.iter().map(|p| p.length).sum();
    if all <= 0.0 {
        return vec![Span::raw(" ".repeat(width))];
    }
    let (mut at, mut before) = (0, 0.0);
    let mut spans = Vec::new();
    for (n, part) in parts.iter().enumerate() {
        before += part.length;
        let end = (before / all * width as f64).round() as usize;
        let columns = end.min(width).saturating_sub(at);
        at += columns;
        if columns == 0 {
            continue;
        }
        let text = match columns {
            1 => "│".to_owned(),
            _ => format!("{}│", left(part.words, columns - 1)),
        };
        let style = Style::new().fg(Color::Black).bg(COLORS[n % COLORS.len()]);
        spans.push(Span::styled(text, style));
    }
    spans
}

/// The colour of the part with this number.
pub fn color(number: usize) -> Color {
    COLORS[number % COLORS.len()]
}

/// A bar between two shares of `width` columns, at least a column long.
pub fn between(from: f64, to: f64, width: usize) -> String {
    let at = |share: f64| (share.clamp(0.0, 1.0) * width as f64).round() as usize;
    let from = at(from).min(width.saturating_sub(1));
    let to = at(to).max(from + 1);
    let text = format!("{}{}", " ".repeat(from), "█".repeat(to - from));
    left(&text, width)
}

/// Columns before the map itself.
const SCALE: usize = 8;
/// Lines of the map at most: the bands below are left out.
const LINES: usize = 9;

/// A heat map: long times above, the newest answer on the right.
pub fn heat(map: &HeatMap, width: usize) -> Vec<Line<'static>> {
    let columns = width.saturating_sub(SCALE + 1);
    let Some((low, high)) = map.used(columns) else {
        return vec![Line::raw("  no requests yet")];
    };
    let low = low.max((high + 1).saturating_sub(LINES));
    let bands = (low..=high).rev().map(|band| {
        let scale = match band {
            0 => format!("<{}", time(begin(1))),
            n => format!("≥{}", time(begin(n))),
        };
        let cells: String = map.last(columns).map(|c| shade(c, band)).collect();
        let color = match band {
            // From 10 ms on and from 1 ms on.
            9.. => Color::Red,
            7..9 => Color::Yellow,
            _ => Color::Green,
        };
        Line::from(vec![
            Span::raw(right(&short(&scale), SCALE) + " "),
            Span::styled(cells, Style::new().fg(color)),
        ])
    });
    bands.collect()
}

/// `≥1.00ms` as `≥1ms`.
fn short(scale: &str) -> String {
    scale.replace(".00", "").replace(".0", "")
}

/// A cell by the share that its band has of the requests of its column.
fn shade(column: &[u64; BANDS], band: usize) -> char {
    let all: u64 = column.iter().sum();
    let count = column[band];
    let percent = count as f64 * 100.0 / all.max(1) as f64;
    match percent {
        _ if count == 0 => ' ',
        p if p < 1.0 => '·',
        p if p < 10.0 => '░',
        p if p < 30.0 => '▒',
        p if p < 60.0 => '▓',
        _ => '█',
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_backend::Histogram;

    fn text(spans: &[Span<'_>]) -> String {
        spans.iter().map(|s| s.content.as_ref()).collect()
    }

    fn part(words: &str, length: f64) -> Part<'_> {
        Part { words, length }
    }

    #[test]
    fn parts_fill_the_width() {
        let of = |lengths: &[f64], width| {
            let all: Vec<Part<'_>> = lengths.iter().map(|l| part("worker", *l)).collect();
            text(&parts(&all, width))
        };
        assert_eq!(of(&[1.0, 3.0], 16), "wo…│worker     │");
        assert_eq!(of(&[1.0, 99.0], 10), "worker   │");
        assert_eq!(of(&[0.0, 0.0], 4), "    ");
        for width in 0..40 {
            let lengths: Vec<f64> = (1..20).map(f64::from).collect();
            assert_eq!(of(&lengths, width).chars().count(), width);
        }
    }

    #[test]
    fn bars_stay_within_their_width() {
        assert_eq!(bar(0.5, 4), "██  ");
        assert_eq!(bar(7.0, 4), "████");
        assert_eq!(between(0.5, 0.5, 4), "  █ ");
        assert_eq!(between(1.0, 1.0, 4), "   █");
        assert_eq!(between(0.0, 1.0, 4), "████");
        assert_eq!(between(0.0, 1.0, 0), "");
    }

    #[test]
    fn a_heat_map_has_a_line_for_each_band_in_use() {
        let mut map = HeatMap::default();
        map.add(&Histogram::from_iter([(150_000, 98), (20_000_000, 2)]));
        map.add(&Histogram::from_iter([(150_000, 50), (400_000, 50)]));
        let lines: Vec<String> = heat(&map, 20).iter().map(|l| text(&l.spans)).collect();
        assert_eq!(
            lines,
            [
                "   ≥10ms ░ ",
                "    ≥3ms   ",
                "    ≥1ms   ",
                "  ≥300µs  ▓",
                "  ≥100µs █▓"
            ]
        );
    }
}
