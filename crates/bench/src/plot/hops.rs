//! Charts of the hops of a request: each row is one stacked bar.

use super::canvas::{Anchor, Canvas, EDGE, Heading, ON};
use super::text::{LINE, TEXT, text_width, wrap};
use super::{Hops, Row, Unit, Width, check_series, check_values};
use anyhow::{Result, ensure};

/// Pixels of a bar's height.
const BAR: i32 = 24;

/// Where rows stand.
struct Layout {
    left: i32,
    right: i32,
    /// Most pixels of the rows' names.
    name: i32,
    /// Names stand above their bars.
    above: bool,
    longest: f64,
}

impl Layout {
    fn place(&self, value: f64) -> i32 {
        let share = if self.longest > 0.0 {
            value / self.longest
        } else {
            0.0
        };
        self.left + (share * f64::from(self.right - self.left)).round() as i32
    }

    fn height(&self, row: &Row) -> i32 {
        let lines = wrap(&row.name, TEXT, self.name).len() as i32 * LINE;
        match (self.above, row.parts.is_empty()) {
            (true, true) => lines + 8,
            (true, false) => lines + BAR + 8,
            (false, _) => lines.max(BAR) + 8,
        }
    }
}

fn sum(row: &Row) -> f64 {
    let real = row.parts.iter().filter(|(name, _)| !name.is_empty());
    real.map(|(_, v)| v).sum()
}

/// The text in a part of so many pixels: its name and value, its value, or nothing.
fn inside(name: &str, value: &str, pixels: i32) -> Option<String> {
    let both = format!("{name} {value}");
    let fits = |text: &str| text_width(text, TEXT) + 6 <= pixels;
    if fits(&both) {
        return Some(both);
    }
    fits(value).then(|| value.to_owned())
}

pub fn draw(chart: &Hops, width: Width) -> Result<String> {
    let Hops { rows, unit, .. } = chart;
    let unit: Unit = *unit;
    ensure!(!rows.is_empty(), "a chart without rows");
    check_values(rows.iter().flat_map(|r| r.parts.iter().map(|(_, v)| *v)))?;
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flat_map(|r| &r.parts) {
        if !name.is_empty() && !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    check_series(names.len())?;
    let end = |row: &Row| row.parts.iter().map(|(_, v)| v).sum::<f64>();
    let above = width == Width::Narrow;
    // A letter more than the name, so that it isn't broken.
    let widths = rows.iter().map(|r| text_width(&r.name, TEXT) + TEXT);
    let name = match above {
        true => width.pixels() - 2 * EDGE,
        false => widths.max().unwrap_or(0).min(width.pixels() / 3),
    };
    let sums = rows.iter().map(|r| text_width(&unit.label(sum(r)), TEXT));
    let layout = Layout {
        left: if above { EDGE } else { EDGE + name + 10 },
        right: width.pixels() - EDGE - sums.max().unwrap_or(0) - 8,
        name,
        above,
        longest: rows.iter().map(end).fold(0.0, f64::max),
    };
    // In a legend are the names that stand in no part.
    let mut unnamed = names.clone();
    for row in rows {
        let mut begin = 0.0;
        for (name, value) in &row.parts {
            let pixels = layout.place(begin + value) - layout.place(begin);
            begin += value;
            let text = inside(name, &unit.label(*value), pixels);
            if text.is_some_and(|t| t.starts_with(name.as_str())) {
                unnamed.retain(|n| n != name);
            }
        }
    }
    let number = |name: &str| names.iter().position(|n| *n == name).unwrap_or(0);
    let heading = Heading {
        title: &chart.title,
        subtitle: &chart.subtitle,
        legend: unnamed.iter().map(|n| (number(n), *n)).collect(),
        lines: false,
        width,
    };
    let top = heading.height();
    let total: i32 = rows.iter().map(|r| layout.height(r)).sum();
    let mut canvas = Canvas::new(width, top + total + EDGE, &chart.title);
    canvas.heading(&heading);
    let mut y = top;
    for row in rows {
        let label = wrap(&row.name, TEXT, layout.name);
        let lines = label.len() as i32;
        let middle = match above {
            true => y + lines * LINE + BAR / 2,
            false => y + layout.height(row) / 2,
        };
        let (x, first, anchor) = match above {
            true => (EDGE, y + LINE / 2, Anchor::Left),
            false => (
                layout.left - 10,
                middle - (lines - 1) * LINE / 2,
                Anchor::Right,
            ),
        };
        for (line, text) in (0..).zip(&label) {
            canvas.text(text, (x, first + line * LINE), anchor);
        }
        let mut begin = 0.0;
        for (name, value) in &row.parts {
            let (from, to) = (layout.place(begin), layout.place(begin + value));
            begin += value;
            if name.is_empty() {
                continue;
            }
            let series = number(name);
            let (high, low) = (middle - BAR / 2, middle + BAR / 2);
            let shown = unit.label(*value);
            let hint = format!("{}, {name}: {shown}", row.name);
            // A white line between parts, and at least one pixel of each.
            canvas.area(
                series,
                (from, high),
                ((to - 1).max(from + 1), low),
                Some(&hint),
            );
            if let Some(text) = inside(name, &shown, to - from) {
                canvas.text_of(ON[series], &text, ((from + to) / 2, middle), Anchor::Center);
            }
        }
        if !row.parts.is_empty() {
            let text = unit.label(sum(row));
            canvas.text(&text, (layout.place(begin) + 6, middle), Anchor::Left);
        }
        y += layout.height(row);
    }
    canvas.rule("axis", (layout.left, top), (layout.left, y));
    Ok(canvas.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, parts: &[(&str, f64)]) -> Row {
        Row {
            name: name.into(),
            parts: parts.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect(),
        }
    }

    fn chart(rows: Vec<Row>) -> Hops {
        Hops {
            title: "T".into(),
            subtitle: "s".into(),
            unit: Unit::Microseconds,
            rows,
        }
    }

    #[test]
    fn rows_and_their_sums() {
        let rows = vec![
            row("client", &[("queue", 1.5), ("ring", 2.0), ("volume", 0.01)]),
            row("other", &[("ring", 4.0), ("queue", 3.0)]),
        ];
        for width in [Width::Wide, Width::Narrow] {
            let svg = draw(&chart(rows.clone()), width).unwrap();
            for text in [">3.51 µs<", ">7 µs<", ">volume<", ">client<", ">ring 4 µs<"] {
                assert!(svg.contains(text), "{text} in {svg}");
            }
            assert!(!svg.contains(">10 ns<"), "no room for it");
            assert!(!svg.contains(">ring<"), "it is named where it is");
        }
        assert!(draw(&chart(vec![]), Width::Wide).is_err());
        assert!(draw(&chart(vec![row("a", &[("b", -1.0)])]), Width::Wide).is_err());
    }
}
