//! Groups of bars from left to right, each with its name and its value.

use super::canvas::{Anchor, Canvas, EDGE, Heading};
use super::text::{LINE, TEXT, text_width, wrap};
use super::{Bars, Width, check_series, check_values};
use anyhow::{Result, ensure};

/// Pixels of a bar's height, and from one to the next.
const BAR: i32 = 18;
const STEP: i32 = 24;
/// Pixels between groups.
const BETWEEN: i32 = 10;

pub fn draw(chart: &Bars, width: Width) -> Result<String> {
    ensure!(
        !chart.groups.is_empty() && !chart.series.is_empty(),
        "a chart without bars"
    );
    check_series(chart.series.len())?;
    for group in &chart.groups {
        let (bars, series) = (group.bars.len(), chart.series.len());
        ensure!(
            bars == series,
            "group {} has {bars} bars for {series} series",
            group.name
        );
    }
    let bars = || chart.groups.iter().flat_map(|g| g.bars.iter().flatten());
    let max = check_values(bars().flat_map(|bar| {
        let (low, high) = bar.interval.unwrap_or((bar.value, bar.value));
        [bar.value, low.max(0.0), high]
    }))?;
    let heading = Heading {
        title: &chart.title,
        subtitle: &chart.subtitle,
        legend: Vec::new(),
        lines: false,
        width,
    };
    // A name is before each bar, unless there is one series only: then the group's is.
    let one = chart.series.len() == 1;
    let names: Vec<&str> = match one {
        true => chart.groups.iter().map(|g| g.name.as_str()).collect(),
        false => chart.series.iter().map(String::as_str).collect(),
    };
    let most = width.pixels() / 3;
    let widest = names.iter().map(|n| text_width(n, TEXT)).max().unwrap_or(0);
    let left = EDGE + widest.min(most) + 8;
    let labels = bars().map(|b| text_width(&chart.unit.label(b.value), TEXT));
    let right = width.pixels() - EDGE - labels.max().unwrap_or(0) - 8;
    let rows: i32 = chart
        .groups
        .iter()
        .map(|g| g.bars.len() as i32 * STEP + if one { 0 } else { LINE + BETWEEN })
        .sum();
    let top = heading.height();
    let mut canvas = Canvas::new(width, top + rows + EDGE, &chart.title);
    canvas.heading(&heading);
    let place = |value: f64| {
        let share = if max > 0.0 { value / max } else { 0.0 };
        left + (share.clamp(0.0, 1.0) * f64::from(right - left)).round() as i32
    };
    let short = |name: &str| {
        let lines = wrap(name, TEXT, most);
        match lines.len() {
            0 | 1 => name.to_owned(),
            _ => format!("{}…", wrap(name, TEXT, most - TEXT)[0]),
        }
    };
    let mut y = top;
    for group in &chart.groups {
        if !one {
            canvas.text_of("quiet", &group.name, (EDGE, y + LINE / 2), Anchor::Left);
            y += LINE;
        }
        let first = y;
        for (series, bar) in group.bars.iter().enumerate() {
            let middle = y + STEP / 2;
            let name = if one {
                &group.name
            } else {
                &chart.series[series]
            };
            canvas.text(&short(name), (left - 8, middle), Anchor::Right);
            y += STEP;
            let Some(bar) = bar else {
                canvas.text_of("quiet", "–", (left + 4, middle), Anchor::Left);
                continue;
            };
            let to = place(bar.value);
            let value = chart.unit.label(bar.value);
            let hint = format!("{}, {}: {value}", group.name, chart.series[series]);
            let corners = (
                (left, middle - BAR / 2),
                (to.max(left + 1), middle + BAR / 2),
            );
            canvas.area(series, corners.0, corners.1, Some(&hint));
            let mut end = to;
            if let Some((low, high)) = bar.interval {
                canvas.whisker_across(middle, place(low), place(high));
                end = end.max(place(high));
            }
            canvas.text(&value, (end + 7, middle), Anchor::Left);
        }
        canvas.rule("axis", (left, first), (left, y));
        y += if one { 0 } else { BETWEEN };
    }
    Ok(canvas.finish())
}

#[cfg(test)]
mod tests {
    use super::super::{Bar, Group, Unit};
    use super::*;

    fn chart(series: &[&str]) -> Bars {
        let bar = |value, interval| Some(Bar { value, interval });
        let group = |name: &str, bars| Group {
            name: name.into(),
            bars,
        };
        Bars {
            title: "T".into(),
            subtitle: String::new(),
            unit: Unit::Count,
            series: series.iter().map(|s| (*s).to_owned()).collect(),
            groups: vec![
                group("depth 1", vec![bar(17_500.0, None), None]),
                group(
                    "depth 32",
                    vec![bar(183_000.0, Some((172e3, 185e3))), bar(127e3, None)],
                ),
            ],
        }
    }

    #[test]
    fn bars_and_their_texts() {
        for width in [Width::Wide, Width::Narrow] {
            let svg = draw(&chart(&["a", "b"]), width).unwrap();
            for text in [">depth 1<", ">183 k<", ">127 k<", ">17.5 k<", ">a<", ">b<"] {
                assert!(svg.contains(text), "{text}");
            }
        }
        assert!(
            draw(&chart(&["a"]), Width::Wide).is_err(),
            "two bars for one series"
        );
        let mut none = chart(&["a"]);
        none.groups.clear();
        assert!(draw(&none, Width::Wide).is_err());
    }
}
