//! What all charts share: markers, the heading with its legend, the frame.

use super::Axis;
use super::text::{LINE, TEXT, text_width, wrap};
use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::element::{Circle, PathElement, Polygon, Rectangle};
use plotters::prelude::{DrawingArea, IntoDrawingArea, IntoFont, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontTransform, RGBColor, ShapeStyle, TextStyle};

/// Pixels of the picture's width.
pub const WIDTH: i32 = 900;
/// Pixels between the picture's edge and anything in it.
pub const EDGE: i32 = 14;
const TITLE: i32 = 18;
const TITLE_LINE: i32 = 25;
const FAMILY: &str = "sans-serif";

pub const INK: RGBColor = RGBColor(34, 34, 34);
const FAINT: RGBColor = RGBColor(222, 222, 222);
const QUIET: RGBColor = RGBColor(95, 95, 95);
pub const WHITE: RGBColor = RGBColor(255, 255, 255);

/// Okabe and Ito's colours, without the yellow, which white drowns.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(60, 60, 60),
];

/// The colour of a series.
pub fn colour(series: usize) -> RGBColor {
    COLOURS[series % COLOURS.len()]
}

/// What stands above a chart.
pub struct Heading<'a> {
    pub title: &'a str,
    pub subtitle: &'a str,
    /// Names of the series, in the order of their colours.
    pub legend: &'a [&'a str],
    /// Series have markers, not only colours.
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
            // Bold letters are wider.
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

    /// Pixels from the picture's top to what is below the heading.
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
pub struct Canvas<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
}

fn lost<E: std::fmt::Display>(e: E) -> anyhow::Error {
    anyhow!("drawing a chart: {e}")
}

impl<'a> Canvas<'a> {
    /// White, of the common width and this height.
    pub fn new(svg: &'a mut String, height: i32) -> Result<Canvas<'a>> {
        let size = (WIDTH as u32, height.unsigned_abs());
        let area = SVGBackend::with_string(svg, size).into_drawing_area();
        area.fill(&WHITE).map_err(lost)?;
        Ok(Canvas { area })
    }

    /// Draws the heading.
    pub fn heading(&self, heading: &Heading) -> Result<()> {
        let (titles, subtitles) = heading.titles();
        let mut y = EDGE + TITLE_LINE / 2;
        for line in &titles {
            let style = (FAMILY, f64::from(TITLE) * 1.24)
                .into_font()
                .style(plotters::style::FontStyle::Bold);
            let style = TextStyle::from(style).color(&INK);
            self.draw_text(line, &style, (EDGE, y), HPos::Left)?;
            y += TITLE_LINE;
        }
        for line in &subtitles {
            self.text_coloured(line, (EDGE, y), HPos::Left, QUIET)?;
            y += LINE;
        }
        y += 6;
        for (series, name, x, row) in heading.entries() {
            let (x, y) = (EDGE + x, y + row * LINE);
            if heading.markers {
                self.line(&[(x, y), (x + KEY - 8, y)], colour(series), 2)?;
                self.marker(series, (x + (KEY - 8) / 2, y))?;
            } else {
                self.rectangle((x + 4, y - 6), (x + KEY - 8, y + 6), colour(series))?;
            }
            self.text(&name, (x + KEY, y), HPos::Left)?;
        }
        Ok(())
    }

    fn draw_text(&self, text: &str, style: &TextStyle, at: (i32, i32), h: HPos) -> Result<()> {
        let style = style.pos(Pos::new(h, VPos::Center));
        self.area.draw_text(text, &style, at).map_err(lost)
    }

    /// Ordinary text, vertically centred on `at`.
    pub fn text(&self, text: &str, at: (i32, i32), h: HPos) -> Result<()> {
        self.text_coloured(text, at, h, INK)
    }

    /// Text of a colour.
    pub fn text_coloured(
        &self,
        text: &str,
        at: (i32, i32),
        h: HPos,
        colour: RGBColor,
    ) -> Result<()> {
        // The backend divides sizes by this.
        let style = TextStyle::from((FAMILY, f64::from(TEXT) * 1.24).into_font()).color(&colour);
        self.draw_text(text, &style, at, h)
    }

    /// Text that reads upwards, centred on `at`.
    pub fn text_upwards(&self, text: &str, at: (i32, i32)) -> Result<()> {
        let font = (FAMILY, f64::from(TEXT) * 1.24).into_font();
        let style = TextStyle::from(font.transform(FontTransform::Rotate270)).color(&INK);
        self.draw_text(text, &style, at, HPos::Center)
    }

    /// A line through points.
    pub fn line(&self, points: &[(i32, i32)], colour: RGBColor, width: u32) -> Result<()> {
        let line = PathElement::new(points.to_vec(), colour.stroke_width(width));
        self.area.draw(&line).map_err(lost)
    }

    /// A filled rectangle.
    pub fn rectangle(&self, from: (i32, i32), to: (i32, i32), colour: RGBColor) -> Result<()> {
        let rectangle = Rectangle::new([from, to], colour.filled());
        self.area.draw(&rectangle).map_err(lost)
    }

    /// An interval: a vertical line with ends.
    pub fn whisker(&self, x: i32, low: i32, high: i32, colour: RGBColor) -> Result<()> {
        self.line(&[(x, low), (x, high)], colour, 1)?;
        for y in [low, high] {
            self.line(&[(x - 4, y), (x + 4, y)], colour, 1)?;
        }
        Ok(())
    }

    /// The marker of a series; beyond the seventh, colours and markers come in other pairs.
    pub fn marker(&self, series: usize, at: (i32, i32)) -> Result<()> {
        let fill: ShapeStyle = colour(series).filled();
        let r = 5;
        let polygon = |corners: &[(i32, i32)]| {
            let corners: Vec<_> = corners.iter().map(|(x, y)| (at.0 + x, at.1 + y)).collect();
            self.area.draw(&Polygon::new(corners, fill)).map_err(lost)
        };
        let strokes = |lines: [[(i32, i32); 2]; 2]| {
            for [a, b] in lines {
                let points = [(at.0 + a.0, at.1 + a.1), (at.0 + b.0, at.1 + b.1)];
                self.line(&points, colour(series), 3)?;
            }
            Ok(())
        };
        match (series + series / COLOURS.len()) % 7 {
            0 => self.area.draw(&Circle::new(at, r, fill)).map_err(lost),
            1 => polygon(&[(-r, -r), (r, -r), (r, r), (-r, r)]),
            2 => polygon(&[(0, -r - 1), (r + 1, r), (-r - 1, r)]),
            3 => polygon(&[(0, -r - 2), (r + 2, 0), (0, r + 2), (-r - 2, 0)]),
            4 => strokes([[(-r, -r), (r, r)], [(-r, r), (r, -r)]]),
            5 => polygon(&[(0, r + 1), (r + 1, -r), (-r - 1, -r)]),
            _ => strokes([[(-r - 1, 0), (r + 1, 0)], [(0, -r - 1), (0, r + 1)]]),
        }
    }

    /// The axis of values, from zero: its name, its ticks, their lines across the chart. Tells where values are.
    pub fn values(&self, axis: &Axis, max: f64, frame: &mut Frame) -> Result<Values> {
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
            self.line(&[(frame.left, y), (frame.right, y)], ink, 1)?;
            self.text(label, (frame.left - 8, y), HPos::Right)?;
        }
        let middle = (frame.top + frame.bottom) / 2;
        self.text_upwards(axis.label, (EDGE + TEXT / 2, middle))?;
        Ok(values)
    }

    /// A tick on the axis below.
    pub fn tick_below(&self, x: i32, y: i32) -> Result<()> {
        self.line(&[(x, y), (x, y + 5)], INK, 1)
    }

    /// Ends the picture.
    pub fn finish(self) -> Result<()> {
        self.area.present().map_err(lost)
    }
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
    /// Where a value is.
    pub fn pixel(&self, value: f64) -> i32 {
        let share = (value / self.top).clamp(0.0, 1.0);
        self.low - (share * f64::from(self.low - self.high)).round() as i32
    }
}

/// Fails unless a chart can show these values.
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
}
