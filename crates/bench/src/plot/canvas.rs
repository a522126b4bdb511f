//! The parts that all charts share: the picture as SVG text, markers, the heading with its legend, the frame.

use super::Axis;
use super::text::{LINE, TEXT, text_width, wrap};
use anyhow::Result;
use std::fmt::{self, Write as _};

/// Pixels of the picture's width.
pub const WIDTH: i32 = 900;
/// Pixels between the picture's edge and anything in it.
pub const EDGE: i32 = 14;
const TITLE: i32 = 18;
const TITLE_LINE: i32 = 25;

/// Red, green and blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour(pub u8, pub u8, pub u8);

impl fmt::Display for Colour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02X}{:02X}{:02X}", self.0, self.1, self.2)
    }
}

/// The point of a text that is at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Left,
    Center,
    Right,
}

pub const INK: Colour = Colour(34, 34, 34);
const FAINT: Colour = Colour(222, 222, 222);
const QUIET: Colour = Colour(95, 95, 95);
pub const WHITE: Colour = Colour(255, 255, 255);

/// Okabe and Ito's colours, without the yellow, which can't be seen on white.
const COLOURS: [Colour; 7] = [
    Colour(0, 114, 178),
    Colour(213, 94, 0),
    Colour(0, 158, 115),
    Colour(204, 121, 167),
    Colour(230, 159, 0),
    Colour(86, 180, 233),
    Colour(60, 60, 60),
];

/// The colour of a series.
pub fn colour(series: usize) -> Colour {
    COLOURS[series % COLOURS.len()]
}

/// The texts above a chart.
pub struct Heading<'a> {
    pub title: &'a str,
    pub subtitle: &'a str,
    /// Names of the series, in the order of their colours.
    pub legend: &'a [&'a str],
    /// Series have markers in addition to colours.
    pub markers: bool,
}

/// Pixels of a legend's key.
const KEY: i32 = 30;

impl Heading<'_> {
    fn inner() -> i32 {
        WIDTH - 2 * EDGE
    }

    fn titles(&self) -> (Vec<String>, Vec<String>) {
        (
            // Bold letters are wider, so the width is that of a larger size.
            wrap(self.title, TITLE + 1, Heading::inner()),
            wrap(self.subtitle, TEXT, Heading::inner()),
        )
    }

    /// Name, left edge and row of each entry. One name alone needs no legend.
    fn entries(&self) -> Vec<(usize, String, i32, i32)> {
        if self.legend.len() < 2 {
            return Vec::new();
        }
        let (mut x, mut row) = (0, 0);
        let mut entries = Vec::new();
        for (series, name) in self.legend.iter().enumerate() {
            let fitting = wrap(name, TEXT, Heading::inner() - KEY);
            let name = fitting.first().cloned().unwrap_or_default();
            let width = KEY + text_width(&name, TEXT);
            if x > 0 && x + width > Heading::inner() {
                (x, row) = (0, row + 1);
            }
            entries.push((series, name, x, row));
            x += width + 18;
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
            + 10
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
    colour: Colour,
    /// More attributes of the element.
    more: &'static str,
}

impl Canvas {
    /// A white picture of the common width and this height.
    pub fn new(height: i32) -> Canvas {
        let mut canvas = Canvas {
            svg: format!(
                "<svg width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" xmlns=\"http://www.w3.org/2000/svg\" font-family=\"sans-serif\">\n"
            ),
        };
        canvas.rectangle((0, 0), (WIDTH, height), WHITE);
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
            colour: INK,
            more: " font-weight=\"bold\"",
        };
        for line in &titles {
            self.draw_text(line, bold, (EDGE, y), Anchor::Left);
            y += TITLE_LINE;
        }
        for line in &subtitles {
            self.text_coloured(line, (EDGE, y), Anchor::Left, QUIET);
            y += LINE;
        }
        y += 6;
        for (series, name, x, row) in heading.entries() {
            let (x, y) = (EDGE + x, y + row * LINE);
            if heading.markers {
                self.line(&[(x, y), (x + KEY - 8, y)], colour(series), 2);
                self.marker(series, (x + (KEY - 8) / 2, y));
            } else {
                self.rectangle((x + 4, y - 6), (x + KEY - 8, y + 6), colour(series));
            }
            self.text(&name, (x + KEY, y), Anchor::Left);
        }
    }

    fn draw_text(&mut self, text: &str, style: Style, (x, y): (i32, i32), anchor: Anchor) {
        let anchor = match anchor {
            Anchor::Left => "start",
            Anchor::Center => "middle",
            Anchor::Right => "end",
        };
        let Style { size, colour, more } = style;
        let text = escaped(text);
        self.element(format_args!(
            "<text x=\"{x}\" y=\"{y}\" dy=\"0.5ex\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{colour}\"{more}>{text}</text>"
        ));
    }

    /// Ordinary text, vertically centred on `at`.
    pub fn text(&mut self, text: &str, at: (i32, i32), anchor: Anchor) {
        self.text_coloured(text, at, anchor, INK);
    }

    /// Coloured text at a place.
    pub fn text_coloured(&mut self, text: &str, at: (i32, i32), anchor: Anchor, colour: Colour) {
        let style = Style {
            size: TEXT,
            colour,
            more: "",
        };
        self.draw_text(text, style, at, anchor);
    }

    /// Text that reads upwards, centred on `at`.
    pub fn text_upwards(&mut self, text: &str, (x, y): (i32, i32)) {
        self.element(format_args!("<g transform=\"rotate(270,{x},{y})\">"));
        self.text(text, (x, y), Anchor::Center);
        self.element(format_args!("</g>"));
    }

    /// A line through points.
    pub fn line(&mut self, points: &[(i32, i32)], colour: Colour, width: u32) {
        let points = listed(points);
        self.element(format_args!(
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" points=\"{points}\"/>"
        ));
    }

    /// A filled rectangle.
    pub fn rectangle(&mut self, (x, y): (i32, i32), to: (i32, i32), colour: Colour) {
        let (width, height) = (to.0 - x, to.1 - y);
        self.element(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{colour}\"/>"
        ));
    }

    /// Draws an interval: a vertical line with ends.
    pub fn whisker(&mut self, x: i32, low: i32, high: i32, colour: Colour) {
        self.line(&[(x, low), (x, high)], colour, 1);
        for y in [low, high] {
            self.line(&[(x - 4, y), (x + 4, y)], colour, 1);
        }
    }

    /// Draws the marker of a series; beyond the seventh, colours and markers come in other pairs.
    pub fn marker(&mut self, series: usize, (x, y): (i32, i32)) {
        const R: i32 = 5;
        match (series + series / COLOURS.len()) % 7 {
            0 => {
                let fill = colour(series);
                self.element(format_args!(
                    "<circle cx=\"{x}\" cy=\"{y}\" r=\"{R}\" fill=\"{fill}\"/>"
                ));
            }
            1 => self.polygon(series, (x, y), &[(-R, -R), (R, -R), (R, R), (-R, R)]),
            2 => self.polygon(series, (x, y), &[(0, -R - 1), (R + 1, R), (-R - 1, R)]),
            3 => {
                let r = R + 2;
                self.polygon(series, (x, y), &[(0, -r), (r, 0), (0, r), (-r, 0)]);
            }
            4 => self.strokes(series, (x, y), [[(-R, -R), (R, R)], [(-R, R), (R, -R)]]),
            5 => self.polygon(series, (x, y), &[(0, R + 1), (R + 1, -R), (-R - 1, -R)]),
            _ => {
                let r = R + 1;
                self.strokes(series, (x, y), [[(-r, 0), (r, 0)], [(0, -r), (0, r)]]);
            }
        }
    }

    fn polygon(&mut self, series: usize, at: (i32, i32), corners: &[(i32, i32)]) {
        let corners: Vec<_> = corners.iter().map(|(x, y)| (at.0 + x, at.1 + y)).collect();
        let (points, fill) = (listed(&corners), colour(series));
        self.element(format_args!(
            "<polygon fill=\"{fill}\" points=\"{points}\"/>"
        ));
    }

    fn strokes(&mut self, series: usize, at: (i32, i32), lines: [[(i32, i32); 2]; 2]) {
        for line in lines {
            let points = line.map(|(x, y)| (at.0 + x, at.1 + y));
            self.line(&points, colour(series), 3);
        }
    }

    /// Draws the axis of values, from zero: its name, its ticks, their lines across the chart. Returns the
    /// places of values.
    pub fn values(&mut self, axis: &Axis, max: f64, frame: &mut Frame) -> Values {
        let ticks = axis.unit.ticks(0.0, max, 6);
        let labels = axis.unit.labels(&ticks);
        let widest = labels.iter().map(|l| text_width(l, TEXT)).max();
        frame.left = EDGE + LINE + widest.unwrap_or(0) + 10;
        let values = Values {
            top: ticks.last().copied().unwrap_or(1.0),
            high: frame.top,
            low: frame.bottom,
        };
        for (tick, label) in ticks.iter().zip(&labels) {
            let y = values.pixel(*tick);
            let ink = if *tick == 0.0 { INK } else { FAINT };
            self.line(&[(frame.left, y), (frame.right, y)], ink, 1);
            self.text(label, (frame.left - 8, y), Anchor::Right);
        }
        let middle = (frame.top + frame.bottom) / 2;
        self.text_upwards(axis.label, (EDGE + TEXT / 2, middle));
        values
    }

    /// A tick on the axis below.
    pub fn tick_below(&mut self, x: i32, y: i32) {
        self.line(&[(x, y), (x, y + 5)], INK, 1);
    }

    /// The SVG text of the picture.
    pub fn finish(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }
}

/// Points in SVG's notation.
fn listed(points: &[(i32, i32)]) -> String {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x},{y}")).collect();
    points.join(" ")
}

/// Replaces the characters that have a meaning in XML.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

/// Pixels of the chart itself.
pub struct Frame {
    pub left: i32,
    pub right: i32,
    pub top: i32,
    pub bottom: i32,
}

/// The vertical axis.
pub struct Values {
    top: f64,
    high: i32,
    low: i32,
}

impl Values {
    /// The vertical pixel of a value.
    pub fn pixel(&self, value: f64) -> i32 {
        let share = (value / self.top).clamp(0.0, 1.0);
        self.low - (share * f64::from(self.low - self.high)).round() as i32
    }
}

/// The greatest of the values; an error if a chart can't show them.
pub fn check_values(values: impl IntoIterator<Item = f64>) -> Result<f64> {
    let mut max = 0f64;
    for value in values {
        anyhow::ensure!(
            value.is_finite() && value >= 0.0,
            "a chart from zero can't show {value}"
        );
        max = max.max(value);
    }
    Ok(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legends_wrap() {
        let names = ["a rather long name of a series"; 9];
        let heading = |legend| Heading {
            title: "t",
            subtitle: "",
            legend,
            markers: true,
        };
        assert!(heading(&names[..]).height() >= heading(&names[..2]).height() + 2 * LINE);
        assert!(
            heading(&names[..])
                .entries()
                .iter()
                .all(|e| e.2 < WIDTH - EDGE)
        );
    }

    #[test]
    fn every_series_has_a_marker_in_the_picture() {
        let mut canvas = Canvas::new(100);
        let mut svg = canvas.svg.clone();
        for series in 0..14 {
            canvas.marker(series, (10, 10));
            assert!(canvas.svg.len() > svg.len(), "series {series}");
            svg.clone_from(&canvas.svg);
        }
        let svg = canvas.finish();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        for element in ["<rect", "<circle", "<polygon", "<polyline"] {
            assert!(svg.contains(element), "{element}");
        }
    }
}
