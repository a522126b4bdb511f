//! Charts of lines over a number.

use super::Axis;
use super::canvas::{Anchor, Canvas, EDGE, Frame, Heading, INK, WIDTH, check_values, colour};
use super::text::{LINE, TEXT, fitting, text_width};
use anyhow::{Result, ensure};

/// Pixels of the chart's height, without heading and axes.
const HEIGHT: i32 = 340;
/// Pixels between the frame and the first and last points.
const INSET: i32 = 16;

/// The division of the horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences have equal distances.
    Linear,
    /// Equal ratios have equal distances; values must be above 0.
    Log2,
}

/// `x`, `y` and the interval of `y` if it has one.
pub type Point = (f64, f64, Option<(f64, f64)>);

/// A chart of named lines, as SVG; `y` begins at zero. Points are joined in the order of their `x`.
pub fn line_chart(
    title: &str,
    subtitle: &str,
    x: (Axis, Scale),
    y: Axis,
    series: &[(&str, Vec<Point>)],
) -> Result<String> {
    let (x, scale) = x;
    let points = || series.iter().flat_map(|(_, points)| points);
    let max = check_values(points().flat_map(|&(_, y, interval)| {
        let (low, high) = interval.unwrap_or((y, y));
        [y, low.max(0.0), high]
    }))?;
    let mut places: Vec<f64> = points().map(|p| p.0).collect();
    ensure!(!places.is_empty(), "a chart without points");
    let right = |v: &f64| v.is_finite() && (*v > 0.0 || scale == Scale::Linear);
    ensure!(places.iter().all(right), "a point has no place on the axis");
    places.sort_by(f64::total_cmp);
    places.dedup();

    let names: Vec<&str> = series.iter().map(|(name, _)| *name).collect();
    let heading = Heading {
        title,
        subtitle,
        legend: &names,
        markers: true,
    };
    let mut frame = Frame {
        left: 0,
        right: WIDTH - EDGE - INSET,
        top: heading.height() + LINE / 2,
        bottom: heading.height() + LINE / 2 + HEIGHT,
    };
    let mut canvas = Canvas::new(frame.bottom + 2 * LINE + EDGE + 8);
    canvas.heading(&heading);
    let values = canvas.values(&y, max, &mut frame);

    let (labels, across) = across(&x, scale, &places, &frame);
    for (at, label) in fitting(&labels) {
        canvas.tick_below(*at, frame.bottom);
        canvas.text(label, (*at, frame.bottom + LINE - 3), Anchor::Center);
    }
    let middle = (frame.left + frame.right) / 2;
    canvas.text(
        x.label,
        (middle, frame.bottom + 2 * LINE + 4),
        Anchor::Center,
    );

    // The order is intervals, lines, markers, so that the most important is on top.
    for (number, (_, points)) in series.iter().enumerate() {
        for (x, _, interval) in points {
            if let Some((low, high)) = interval {
                let (low, high) = (values.pixel(*low), values.pixel(*high));
                canvas.whisker(across.pixel(*x), low, high, colour(number));
            }
        }
    }
    for (number, (_, points)) in series.iter().enumerate() {
        let mut points = points.clone();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let pixel = |p: &Point| (across.pixel(p.0), values.pixel(p.1));
        let path: Vec<(i32, i32)> = points.iter().map(pixel).collect();
        canvas.line(&path, colour(number), 2);
        for at in path {
            canvas.marker(number, at);
        }
    }
    canvas.line(
        &[(frame.left, frame.top), (frame.left, frame.bottom)],
        INK,
        1,
    );
    Ok(canvas.finish())
}

/// The horizontal axis.
struct Across {
    scale: Scale,
    from: f64,
    to: f64,
    left: i32,
    right: i32,
}

impl Across {
    fn pixel(&self, x: f64) -> i32 {
        let place = |v: f64| match self.scale {
            Scale::Linear => v,
            Scale::Log2 => v.log2(),
        };
        let (from, to) = (place(self.from), place(self.to));
        // A single place is in the middle.
        let share = if to > from {
            (place(x) - from) / (to - from)
        } else {
            0.5
        };
        self.left + (share * f64::from(self.right - self.left)).round() as i32
    }
}

/// The axis, and the labels of its ticks with their places. If there are few places, exactly those have
/// ticks.
fn across(x: &Axis, scale: Scale, places: &[f64], frame: &Frame) -> (Vec<(i32, String)>, Across) {
    let (from, to) = (places[0], places[places.len() - 1]);
    let across = Across {
        scale,
        from,
        to,
        left: frame.left + INSET,
        right: frame.right - INSET,
    };
    let with_labels = |ticks: &[f64], labels: Vec<String>, across: &Across| {
        let places = ticks.iter().map(|t| across.pixel(*t));
        places.zip(labels).collect::<Vec<_>>()
    };
    let own = |across: &Across, ticks: &[f64]| {
        let labels = ticks.iter().map(|t| x.unit.label(*t)).collect();
        with_labels(ticks, labels, across)
    };
    let labels = own(&across, places);
    if fitting(&labels).len() == places.len() {
        return (labels, across);
    }
    if scale == Scale::Log2 {
        let powers: Vec<f64> = (from.log2().ceil() as i32..=to.log2().floor() as i32)
            .map(|power| 2f64.powi(power))
            .collect();
        // Ticks are at every power, or every second, third and so on, rather than at those that
        // happen to fit.
        let room = (1..).find(|&every| {
            let some: Vec<f64> = powers.iter().copied().step_by(every).collect();
            fitting(&own(&across, &some)).len() == some.len()
        });
        let some: Vec<f64> = powers.into_iter().step_by(room.unwrap_or(1)).collect();
        return (own(&across, &some), across);
    }
    let most = (across.right - across.left) / (text_width("00.00 MiB", TEXT) + 10);
    let mut ticks = x.unit.ticks(from, to, most.clamp(2, 10) as usize);
    // The axis is as long as the data; ticks beyond it would only take room.
    ticks.retain(|t| (from..=to).contains(t));
    let labels = x.unit.labels(&ticks);
    (with_labels(&ticks, labels, &across), across)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::Unit;

    fn chart(series: &[(&str, Vec<Point>)], scale: Scale) -> Result<String> {
        let axis = |label| Axis {
            label,
            unit: Unit::Count,
        };
        line_chart(
            "T <1>",
            "s",
            (axis("in flight"), scale),
            axis("rate"),
            series,
        )
    }

    #[test]
    fn a_chart_has_its_texts() {
        let series = [
            (
                "a & b",
                vec![(1.0, 10.0, None), (32.0, 2000.0, Some((1800.0, 2100.0)))],
            ),
            ("c", vec![(1.0, 20.0, None), (32.0, 1000.0, None)]),
        ];
        let svg = chart(&series, Scale::Log2).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for text in [
            "T &lt;1&gt;",
            "a &amp; b",
            "in flight",
            "rate",
            "2.5 k",
            "32",
        ] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
    }

    #[test]
    fn twice_as_much_is_always_as_far() {
        let across = Across {
            scale: Scale::Log2,
            from: 1.0,
            to: 256.0,
            left: 0,
            right: 800,
        };
        assert_eq!(
            [1.0, 2.0, 16.0, 256.0].map(|x| across.pixel(x)),
            [0, 100, 400, 800]
        );
    }

    #[test]
    fn what_cannot_be_shown_says_so() {
        for (points, scale) in [
            (vec![], Scale::Linear),
            (vec![(0.0, 1.0, None)], Scale::Log2),
            (vec![(1.0, -1.0, None)], Scale::Linear),
            (vec![(1.0, f64::NAN, None)], Scale::Linear),
        ] {
            assert!(chart(&[("a", points)], scale).is_err());
        }
        assert!(chart(&[("a", vec![(0.0, 0.0, None)])], Scale::Linear).is_ok());
    }
}
