//! The parts that all charts share: the picture as SVG text, markers, the heading with its legend, the frame.

use super::palette::{CSS, DASHES, MARKERS, Marker};
use super::text::{LINE, TEXT, text_width, wrap};
use super::{Axis, Scale, Unit, Width};
use std::fmt::{self, Write as _};

/// Pixels between the picture's edge and anything in it.
pub const EDGE: i32 = 10;
const TITLE: i32 = 17;
const TITLE_LINE: i32 = 24;
/// Pixels of a legend's key.
pub const KEY: i32 = 34;

/// The point of a text that is at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Left,
    Center,
    Right,
}

/// A class of the style sheet.
pub type Class = &'static str;

/// Classes that give a series its colour.
pub const SERIES: [Class; 8] = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"];
/// Classes of text on a series' colour.
pub const ON: [Class; 8] = ["on0", "on1", "on2", "on3", "on4", "on5", "on6", "on7"];

/// The texts above a chart.
pub struct Heading<'a> {
    pub title: &'a str,
    pub subtitle: &'a str,
    /// Series that have no label in the chart: number and name.
    pub legend: Vec<(usize, &'a str)>,
    /// Series are lines with markers, else areas.
    pub lines: bool,
    pub width: Width,
}

impl Heading<'_> {
    fn inner(&self) -> i32 {
        self.width.pixels() - 2 * EDGE
    }

    fn titles(&self) -> (Vec<String>, Vec<String>) {
        (
            // Bold letters are wider, so the width is that of a larger size.
            wrap(self.title, TITLE + 1, self.inner()),
            wrap(self.subtitle, TEXT, self.inner()),
        )
    }

    /// Series, name, left edge and row of each entry.
    fn entries(&self) -> Vec<(usize, String, i32, i32)> {
        let (mut x, mut row) = (0, 0);
        let mut entries = Vec::new();
        for (series, name) in &self.legend {
            let fitting = wrap(name, TEXT, self.inner() - KEY);
            let name = fitting.first().cloned().unwrap_or_default();
            let width = KEY + text_width(&name, TEXT);
            if x > 0 && x + width > self.inner() {
                (x, row) = (0, row + 1);
            }
            entries.push((*series, name, x, row));
            x += width + 16;
        }
        entries
    }

    /// Pixels from the picture's top to the lower end of the heading.
    pub fn height(&self) -> i32 {
        let (titles, subtitles) = self.titles();
        let rows = self.entries().last().map_or(0, |(.., row)| row + 1);
        EDGE + titles.len() as i32 * TITLE_LINE
            + subtitles.len() as i32 * LINE
            + rows * LINE
            + if rows > 0 { 8 } else { 0 }
            + 8
    }
}

/// A picture being drawn, in pixels from its upper left corner.
pub struct Canvas {
    svg: String,
}

/// The style of a text.
#[derive(Clone, Copy)]
struct Style {
    /// Pixels of a letter's height.
    size: i32,
    class: Class,
    /// More attributes of the element.
    more: &'static str,
}

impl Canvas {
    /// A picture of this height; `title` is its name for those who can't see it.
    pub fn new(width: Width, height: i32, title: &str) -> Canvas {
        let (name, width) = (escaped(title), width.pixels());
        let mut canvas = Canvas {
            svg: format!(
                "<svg class=\"chart\" role=\"img\" aria-label=\"{name}\" viewBox=\"0 0 {width} {height}\" xmlns=\"http://www.w3.org/2000/svg\" font-family=\"system-ui,sans-serif\">\n"
            ),
        };
        canvas.element(format_args!(
            "<rect class=\"ground\" width=\"{width}\" height=\"{height}\"/>"
        ));
        canvas
    }

    fn element(&mut self, element: fmt::Arguments<'_>) {
        // Writing to a string can't fail.
        let _ = writeln!(self.svg, "{element}");
    }

    pub fn heading(&mut self, heading: &Heading) {
        let (titles, subtitles) = heading.titles();
        let mut y = EDGE + TITLE_LINE / 2;
        let bold = Style {
            size: TITLE,
            class: "ink",
            more: " font-weight=\"600\"",
        };
        for line in &titles {
            self.draw_text(line, bold, (EDGE, y), Anchor::Left);
            y += TITLE_LINE;
        }
        for line in &subtitles {
            self.text_of("quiet", line, (EDGE, y), Anchor::Left);
            y += LINE;
        }
        y += 6;
        for (series, name, x, row) in heading.entries() {
            let at = (EDGE + x, y + row * LINE);
            self.key(series, at, heading.lines);
            self.text(&name, (at.0 + KEY, at.1), Anchor::Left);
        }
    }

    /// The mark of a series beside its name, from `at` to the right.
    pub fn key(&mut self, series: usize, (x, y): (i32, i32), line: bool) {
        if line {
            self.series_line(series, &[(x, y), (x + KEY - 8, y)]);
            self.marker(series, (x + (KEY - 8) / 2, y), None);
        } else {
            self.area(series, (x + 6, y - 6), (x + KEY - 8, y + 6), None);
        }
    }

    fn draw_text(&mut self, text: &str, style: Style, (x, y): (i32, i32), anchor: Anchor) {
        let anchor = match anchor {
            Anchor::Left => "start",
            Anchor::Center => "middle",
            Anchor::Right => "end",
        };
        let Style { size, class, more } = style;
        let text = escaped(text);
        self.element(format_args!(
            "<text class=\"{class}\" x=\"{x}\" y=\"{y}\" dy=\"0.35em\" text-anchor=\"{anchor}\" font-size=\"{size}\"{more}>{text}</text>"
        ));
    }

    /// Ordinary text, vertically centred on `at`.
    pub fn text(&mut self, text: &str, at: (i32, i32), anchor: Anchor) {
        self.text_of("ink", text, at, anchor);
    }

    pub fn text_of(&mut self, class: Class, text: &str, at: (i32, i32), anchor: Anchor) {
        let style = Style {
            size: TEXT,
            class,
            more: "",
        };
        self.draw_text(text, style, at, anchor);
    }

    /// A thin line of a class.
    pub fn rule(&mut self, class: Class, from: (i32, i32), to: (i32, i32)) {
        let ((a, b), (c, d)) = (from, to);
        self.element(format_args!(
            "<path class=\"{class}\" d=\"M{a} {b}L{c} {d}\"/>"
        ));
    }

    /// A line of a series through points.
    pub fn series_line(&mut self, series: usize, points: &[(i32, i32)]) {
        let (class, dash) = (SERIES[series], DASHES[series]);
        let points = listed(points);
        self.element(format_args!(
            "<polyline class=\"{class}\" fill=\"none\" stroke=\"currentColor\" stroke-width=\"2\" stroke-linejoin=\"round\" stroke-dasharray=\"{dash}\" points=\"{points}\"/>"
        ));
    }

    /// The area of a series' band.
    pub fn band(&mut self, series: usize, corners: &[(i32, i32)]) {
        let (class, corners) = (SERIES[series], listed(corners));
        self.element(format_args!(
            "<polygon class=\"{class}\" fill=\"currentColor\" fill-opacity=\"0.22\" points=\"{corners}\"/>"
        ));
    }

    /// A filled rectangle of a series, with a text that appears under the pointer.
    pub fn area(&mut self, series: usize, (x, y): (i32, i32), to: (i32, i32), hint: Option<&str>) {
        let (class, width, height) = (SERIES[series], to.0 - x, to.1 - y);
        let hint = hint.map_or_else(String::new, |h| format!("<title>{}</title>", escaped(h)));
        self.element(format_args!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"currentColor\">{hint}</rect>"
        ));
    }

    /// Draws a vertical interval: a line with ends, in the colour of a series.
    pub fn whisker(&mut self, series: usize, x: i32, low: i32, high: i32) {
        let class = SERIES[series];
        let (left, right) = (x - 4, x + 4);
        self.element(format_args!(
            "<path class=\"{class}\" stroke=\"currentColor\" d=\"M{x} {low}V{high}M{left} {low}H{right}M{left} {high}H{right}\"/>"
        ));
    }

    /// Draws a horizontal interval in ink.
    pub fn whisker_across(&mut self, y: i32, low: i32, high: i32) {
        let (top, bottom) = (y - 4, y + 4);
        self.element(format_args!(
            "<path class=\"axis\" d=\"M{low} {y}H{high}M{low} {top}V{bottom}M{high} {top}V{bottom}\"/>"
        ));
    }

    /// Draws the marker of a series, with a text that appears under the pointer.
    pub fn marker(&mut self, series: usize, (x, y): (i32, i32), hint: Option<&str>) {
        let class = SERIES[series];
        let hint = hint.map_or_else(String::new, |h| format!("<title>{}</title>", escaped(h)));
        let moved = |(dx, dy): (i32, i32)| (x + dx, y + dy);
        match MARKERS[series] {
            Marker::Disc => self.element(format_args!(
                "<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"4.5\" fill=\"currentColor\">{hint}</circle>"
            )),
            Marker::Ring => self.element(format_args!(
                "<circle class=\"{class} ring\" cx=\"{x}\" cy=\"{y}\" r=\"4\" fill=\"none\" stroke=\"currentColor\" stroke-width=\"2\">{hint}</circle>"
            )),
            Marker::Filled(corners) => {
                let corners: Vec<_> = corners.iter().copied().map(moved).collect();
                let corners = listed(&corners);
                self.element(format_args!(
                    "<polygon class=\"{class}\" fill=\"currentColor\" points=\"{corners}\">{hint}</polygon>"
                ));
            }
            Marker::Strokes(lines) => {
                let d = lines.map(|[from, to]| {
                    let ((a, b), (c, d)) = (moved(from), moved(to));
                    format!("M{a} {b}L{c} {d}")
                });
                let d = d.concat();
                self.element(format_args!(
                    "<path class=\"{class}\" stroke=\"currentColor\" stroke-width=\"3\" d=\"{d}\">{hint}</path>"
                ));
            }
        }
    }

    /// Draws the axis of values: its name above it, its ticks, their lines across the chart. Returns the places of values.
    pub fn values(&mut self, axis: &Axis, (low, high): (f64, f64), frame: &mut Frame) -> Values {
        let (ticks, log) = match axis.scale {
            Scale::Linear => (axis.unit.ticks(0.0, high, frame.ticks()), false),
            Scale::Log2 | Scale::Log10 => (Unit::decades(low, high), true),
        };
        let labels: Vec<String> = match log {
            false => axis.unit.labels(&ticks),
            true => ticks.iter().map(|t| axis.unit.label(*t)).collect(),
        };
        let widest = labels.iter().map(|l| text_width(l, TEXT)).max();
        frame.left = EDGE + widest.unwrap_or(0) + 8;
        let values = Values {
            from: ticks.first().copied().unwrap_or(0.0),
            to: ticks.last().copied().unwrap_or(1.0),
            log,
            high: frame.top,
            low: frame.bottom,
        };
        for (n, (tick, label)) in ticks.iter().zip(&labels).enumerate() {
            let y = values.pixel(*tick);
            let class = if n == 0 { "axis" } else { "grid" };
            self.rule(class, (frame.left, y), (frame.right, y));
            self.text(label, (frame.left - 6, y), Anchor::Right);
        }
        let above = (EDGE, frame.top - LINE);
        self.text_of("quiet", &axis.label, above, Anchor::Left);
        values
    }

    /// The SVG text of the picture.
    pub fn finish(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }
}

/// An `<svg>` element as a file of its own, with its looks in it.
pub fn standalone(svg: &str) -> String {
    match svg.split_once(">\n") {
        Some((begin, rest)) => format!("{begin}>\n<style>{CSS}</style>\n{rest}"),
        None => svg.to_owned(),
    }
}

/// Points in SVG's notation.
fn listed(points: &[(i32, i32)]) -> String {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x},{y}")).collect();
    points.join(" ")
}

/// Replaces the characters that have a meaning in XML and HTML, and those that aren't allowed there.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Pixels of the chart itself.
pub struct Frame {
    pub left: i32,
    pub right: i32,
    pub top: i32,
    pub bottom: i32,
}

impl Frame {
    /// Number of ticks on the vertical axis.
    fn ticks(&self) -> usize {
        ((self.bottom - self.top) / 55).max(3) as usize
    }
}

/// The vertical axis.
pub struct Values {
    from: f64,
    to: f64,
    log: bool,
    high: i32,
    low: i32,
}

impl Values {
    /// The vertical pixel of a value.
    pub fn pixel(&self, value: f64) -> i32 {
        let place = |v: f64| {
            if self.log {
                v.max(f64::MIN_POSITIVE).log10()
            } else {
                v
            }
        };
        let (from, to) = (place(self.from), place(self.to));
        let share = ((place(value) - from) / (to - from)).clamp(0.0, 1.0);
        self.low - (share * f64::from(self.low - self.high)).round() as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legends_wrap() {
        let heading = |count| Heading {
            title: "t",
            subtitle: "",
            legend: (0..count)
                .map(|n| (n, "a rather long name of a series"))
                .collect(),
            lines: true,
            width: Width::Narrow,
        };
        assert!(heading(8).height() >= heading(2).height() + 3 * LINE);
        assert!(heading(8).entries().iter().all(|e| e.2 < 380 - EDGE));
    }

    #[test]
    fn text_stays_text() {
        let hostile = "</text><script>alert('\"&\u{1}\u{7f}";
        let text = escaped(hostile);
        assert!(
            !text.contains(['<', '>', '"', '\'', '\u{1}', '\u{7f}']),
            "{text}"
        );
        let mut canvas = Canvas::new(Width::Wide, 10, hostile);
        canvas.text(hostile, (0, 0), Anchor::Left);
        canvas.marker(0, (0, 0), Some(hostile));
        assert!(!canvas.finish().contains("<script"));
    }

    #[test]
    fn a_file_of_its_own_has_its_looks_in_it() {
        let svg = Canvas::new(Width::Wide, 10, "t").finish();
        let file = standalone(&svg);
        assert!(file.starts_with("<svg ") && file.contains("<style>") && file.contains("</svg>"));
    }
}
