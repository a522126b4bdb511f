//! Charts of lines over a number.

use super::canvas::{Anchor, Canvas, EDGE, Frame, Heading, KEY};
use super::labels::apart;
use super::text::{LINE, TEXT, fitting, text_width};
use super::{Axis, Lines, Point, Scale, Width, check_series, check_values};
use anyhow::{Result, ensure};

/// Pixels between the frame and the first and last points.
const INSET: i32 = 12;
/// Points of a line that have markers, at most: with more of them, some have.
const MOST_MARKERS: usize = 12;

pub fn draw(chart: &Lines, width: Width) -> Result<String> {
    check_series(chart.series.len())?;
    let Lines { x, y, .. } = chart;
    let points = || chart.series.iter().flat_map(|s| &s.points);
    let values = || {
        points().flat_map(|p| {
            let (low, high) = p.interval.unwrap_or((p.y, p.y));
            [p.y, low.max(0.0), high]
        })
    };
    let max = check_values(values())?;
    let above_zero = values().filter(|v| *v > 0.0);
    let min = above_zero.fold(f64::INFINITY, f64::min);
    ensure!(
        y.scale == Scale::Linear || values().all(|v| v > 0.0),
        "an axis of equal ratios can't show 0"
    );
    let mut places: Vec<f64> = points().map(|p| p.x).collect();
    ensure!(!places.is_empty(), "a chart without points");
    let has_place = |v: &f64| v.is_finite() && (*v > 0.0 || x.scale == Scale::Linear);
    ensure!(
        places.iter().all(has_place),
        "a point has no place on the axis"
    );
    places.sort_by(f64::total_cmp);
    places.dedup();

    // Names at the ends of lines, if there is room beside the chart.
    let widest = chart.series.iter().map(|s| text_width(&s.name, TEXT)).max();
    let beside = KEY + widest.unwrap_or(0);
    let alone = chart.series.len() == 1;
    let direct = !alone && beside * 3 < width.pixels();
    let legend = match direct || alone {
        true => Vec::new(),
        false => (0..)
            .zip(chart.series.iter().map(|s| s.name.as_str()))
            .collect(),
    };
    let heading = Heading {
        title: &chart.title,
        subtitle: &chart.subtitle,
        legend,
        lines: true,
        width,
    };
    let tall = match width {
        Width::Wide => 330,
        Width::Narrow => 240,
    };
    let top = heading.height() + LINE + LINE / 2;
    let mut frame = Frame {
        left: 0,
        right: width.pixels() - EDGE - if direct { beside + 6 } else { INSET },
        top,
        bottom: top + tall,
    };
    let mut canvas = Canvas::new(width, frame.bottom + 2 * LINE + EDGE + 8, &chart.title);
    canvas.heading(&heading);
    let values = canvas.values(y, (min, max), &mut frame);
    let across = below(&mut canvas, x, &places, &frame);

    // The order is bands, intervals, lines, markers, so that the most important is on top.
    for (number, series) in chart.series.iter().enumerate() {
        let interval = |p: &Point| p.interval.unwrap_or((p.y, p.y));
        let end = |p: &Point, v: f64| (across.pixel(p.x), values.pixel(v));
        if series.band {
            let low = series.points.iter().map(|p| end(p, interval(p).0));
            let high = series.points.iter().rev().map(|p| end(p, interval(p).1));
            canvas.band(number, &low.chain(high).collect::<Vec<_>>());
            continue;
        }
        for p in &series.points {
            if let Some((low, high)) = p.interval {
                canvas.whisker(
                    number,
                    across.pixel(p.x),
                    values.pixel(low),
                    values.pixel(high),
                );
            }
        }
    }
    let mut ends = Vec::new();
    for (number, series) in chart.series.iter().enumerate() {
        let mut points = series.points.clone();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        let pixel = |p: &Point| (across.pixel(p.x), values.pixel(p.y));
        let path: Vec<(i32, i32)> = points.iter().map(pixel).collect();
        canvas.series_line(number, &path);
        let every = points.len().div_ceil(MOST_MARKERS).max(1);
        for (n, (point, at)) in points.iter().zip(&path).enumerate() {
            if n % every == every / 2 {
                let hint = format!(
                    "{}: {} at {}",
                    series.name,
                    y.unit.label(point.y),
                    tick(x, point.x)
                );
                canvas.marker(number, *at, Some(&hint));
            }
        }
        ends.extend(path.last().map(|at| (number, *at)));
    }
    if direct {
        let wanted: Vec<i32> = ends.iter().map(|(_, at)| at.1).collect();
        let places = apart(&wanted, frame.top, frame.bottom);
        for ((number, end), y) in ends.iter().zip(places) {
            let from = (frame.right + 4, y);
            if y != end.1 || end.0 < frame.right - INSET {
                canvas.rule("leader", (end.0 + 7, end.1), (from.0 - 1, from.1));
            }
            canvas.key(*number, from, true);
            let name = &chart.series[*number].name;
            canvas.text(name, (from.0 + KEY - 4, from.1), Anchor::Left);
        }
    }
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
            Scale::Log2 | Scale::Log10 => v.log2(),
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

fn tick(x: &Axis, value: f64) -> String {
    match x.scale {
        Scale::Log2 => x.unit.binary_label(value),
        _ => x.unit.label(value),
    }
}

/// Draws the axis below.
fn below(canvas: &mut Canvas, x: &Axis, places: &[f64], frame: &Frame) -> Across {
    let across = Across {
        scale: x.scale,
        from: places[0],
        to: places[places.len() - 1],
        left: frame.left + INSET,
        right: frame.right - INSET,
    };
    for (at, label) in ticks(x, places, &across) {
        canvas.rule("axis", (at, frame.bottom), (at, frame.bottom + 5));
        canvas.text(&label, (at, frame.bottom + LINE - 2), Anchor::Center);
    }
    let middle = (frame.left + frame.right) / 2;
    let at = (middle, frame.bottom + 2 * LINE + 2);
    canvas.text_of("quiet", &x.label, at, Anchor::Center);
    across
}

/// Ticks with their labels. If there are few places, exactly those have ticks.
fn ticks(x: &Axis, places: &[f64], across: &Across) -> Vec<(i32, String)> {
    let labelled = |ticks: &[f64]| -> Vec<(i32, String)> {
        let labels = ticks.iter().map(|t| (across.pixel(*t), tick(x, *t)));
        labels.collect()
    };
    let labels = labelled(places);
    if fitting(&labels).len() == places.len() {
        return labels;
    }
    let powers = |base: f64| -> Vec<f64> {
        let (first, last) = (across.from.log(base), across.to.log(base));
        ((first - 1e-9).ceil() as i32..=(last + 1e-9).floor() as i32)
            .map(|power| base.powi(power))
            .collect()
    };
    let powers = match x.scale {
        Scale::Log2 => powers(2.0),
        Scale::Log10 => powers(10.0),
        Scale::Linear => {
            let most = (across.right - across.left) / (text_width("00.00 MiB", TEXT) + 10);
            let mut ticks = x
                .unit
                .ticks(across.from, across.to, most.clamp(2, 10) as usize);
            // The axis is as long as the data; ticks beyond it would only take room.
            ticks.retain(|t| (across.from..=across.to).contains(t));
            let labels = x.unit.labels(&ticks);
            let places = ticks.iter().map(|t| across.pixel(*t));
            return places.zip(labels).collect();
        }
    };
    // Ticks are at every power, or every second, third and so on, rather than at those that happen to fit.
    let every = |n: usize| -> Vec<f64> { powers.iter().copied().step_by(n).collect() };
    let all_fit = |n: &usize| fitting(&labelled(&every(*n))).len() == every(*n).len();
    labelled(&every((1..).find(all_fit).unwrap_or(1)))
}

#[cfg(test)]
mod tests {
    use super::super::{Series, Unit};
    use super::*;

    fn series(name: &str, points: &[(f64, f64)]) -> Series {
        let point = |(x, y): &(f64, f64)| Point {
            x: *x,
            y: *y,
            interval: Some((y * 0.9, y * 1.1)),
        };
        Series {
            name: name.into(),
            points: points.iter().map(point).collect(),
            band: false,
        }
    }

    fn chart(series: Vec<Series>, scale: Scale) -> Lines {
        let axis = |label: &str, scale| Axis {
            label: label.into(),
            unit: Unit::Count,
            scale,
        };
        Lines {
            title: "T <1>".into(),
            subtitle: "s".into(),
            x: axis("in flight", scale),
            y: axis("rate", Scale::Linear),
            series,
        }
    }

    #[test]
    fn a_chart_has_its_texts() {
        let lines = vec![
            series("a & b", &[(1.0, 10.0), (1024.0, 2000.0)]),
            series("c", &[(1.0, 20.0), (1024.0, 1000.0)]),
        ];
        for width in [Width::Wide, Width::Narrow] {
            let svg = draw(&chart(lines.clone(), Scale::Log2), width).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            for text in [
                ">T &lt;1&gt;<",
                ">a &amp; b<",
                "in flight",
                "rate",
                ">1024<",
            ] {
                assert!(svg.contains(text), "{text} in {svg}");
            }
            assert!(!svg.contains("1.02 k"), "{svg}");
        }
    }

    #[test]
    fn nine_lines_are_refused() {
        let lines = |n: usize| {
            (0..n)
                .map(|n| series(&n.to_string(), &[(1.0, 1.0)]))
                .collect()
        };
        assert!(draw(&chart(lines(8), Scale::Linear), Width::Wide).is_ok());
        let refused = draw(&chart(lines(9), Scale::Linear), Width::Wide).unwrap_err();
        assert!(refused.to_string().contains("more than 8"), "{refused}");
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
    fn many_places_have_powers_as_ticks() {
        let x = Axis {
            label: String::new(),
            unit: Unit::Count,
            scale: Scale::Log2,
        };
        let across = Across {
            scale: Scale::Log2,
            from: 1.0,
            to: 65536.0,
            left: 0,
            right: 300,
        };
        let places: Vec<f64> = (0..200)
            .map(|n| 2f64.powf(f64::from(n) * 16.0 / 199.0))
            .collect();
        let labels = ticks(&x, &places, &across);
        let labels: Vec<&str> = labels.iter().map(|l| l.1.as_str()).collect();
        assert_eq!(labels, ["1", "8", "64", "512", "4096", "32768"]);
    }

    #[test]
    fn what_cannot_be_shown_says_so() {
        for (points, scale) in [
            (vec![], Scale::Linear),
            (vec![(0.0, 1.0)], Scale::Log2),
            (vec![(1.0, -1.0)], Scale::Linear),
            (vec![(1.0, f64::NAN)], Scale::Linear),
        ] {
            let chart = chart(vec![series("a", &points)], scale);
            assert!(draw(&chart, Width::Wide).is_err());
        }
        let mut zero = chart(vec![series("a", &[(1.0, 0.0)])], Scale::Linear);
        assert!(draw(&zero, Width::Wide).is_ok());
        zero.y.scale = Scale::Log10;
        assert!(draw(&zero, Width::Wide).is_err());
    }
}
