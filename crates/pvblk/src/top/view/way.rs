//! Hops of a disk's requests: the table, the heat map, the slowest requests.

use super::Page;
use super::bar::{Part, bar, between, color, parts};
use super::columns::{Columns, cell, number, text};
use super::text::{bytes, count, heading, percent, plain, time};
use crate::terminal::shown;
use crate::top::hops::{SlowRequest, histogram, times, words};
use crate::top::model::heat::HeatMap;
use crate::top::model::{HopName, Model, OfDisk, name};
use crate::top::ui::Ui;
use pvblk_backend::Histogram;
use ratatui_core::style::{Modifier, Style};
use ratatui_core::text::{Line, Span};

/// Words of a request before its bar.
const REQUEST: usize = 34;

pub fn hops(page: &mut Page, model: &Model, of: &OfDisk, ui: &Ui, width: usize) {
    let followed = &of.followed;
    let mut title = "time by hop".to_owned();
    if followed.every > 1 {
        title += &format!(", 1 request of {} followed", followed.every);
    }
    if followed.unknown > 0 {
        title += &format!(", {} left out", followed.unknown);
    }
    if followed.lost > 0 {
        title += &format!(", {} events lost", followed.lost);
    }
    page.section(heading(&title, width));
    if let Some(why) = &model.no_hops {
        page.lines
            .push(Line::raw(format!("  none, counters only: {}", shown(why))));
        return;
    }
    if followed.way.hops.is_empty() {
        page.lines
            .push(Line::raw("  no requests were followed in the last second"));
        return;
    }
    // The bar has what is left, as far as that is of use.
    let layer = width.saturating_sub(66).clamp(10, 28);
    let columns = Columns::fit(
        &[
            text("HOP", width.saturating_sub(60).clamp(14, 28), 0),
            text("LAYER", layer, 4),
            number("/s", 6, 3),
            number("AVG", 6, 1),
            number("P99", 6, 2),
            number("TIME", 4, 0),
        ],
        width.saturating_sub(9),
    );
    let bars = width.saturating_sub(columns.width() + 1).min(40);
    page.lines.push(columns.titles(None));
    let mapped = chosen(of, ui).map(|(name, _)| name);
    // Of requests per second, each one that was followed is so many.
    let each = followed.every.max(1) as f64 * 1e9 / followed.elapsed_ns.max(1) as f64;
    for (n, (hop, share)) in followed.way.shares().enumerate() {
        let indent = "  ".repeat(hop.depth.min(4) as usize);
        let style = match mapped == Some(&name(hop)) {
            true => Style::new().add_modifier(Modifier::UNDERLINED),
            false => Style::new(),
        };
        let average = hop.sum_ns.checked_div(hop.count).unwrap_or(0);
        let mut line = columns.row(&[
            (format!("{indent}{}", shown(&words(hop))), style),
            cell(shown(&hop.layer)),
            cell(count(hop.count as f64 * each)),
            cell(time(average)),
            cell(time(histogram(hop).quantile(0.99))),
            cell(percent(share)),
        ]);
        line.push_span(" ");
        line.push_span(Span::styled(bar(share, bars), Style::new().fg(color(n))));
        page.lines.push(line);
    }
}

/// The hop whose heat map is chosen.
fn chosen<'a>(of: &'a OfDisk, ui: &Ui) -> Option<&'a (HopName, HeatMap)> {
    of.followed.heat.get(ui.heat.checked_sub(1)?)
}

/// The heat map that is chosen, with its title.
pub fn heat_map<'a>(of: &'a OfDisk, ui: &Ui) -> (String, &'a HeatMap) {
    match chosen(of, ui) {
        Some(((layer, words), map)) => (
            format!("times of {} in {} (h: next)", shown(words), shown(layer)),
            map,
        ),
        None => ("times of requests (h: of a hop)".to_owned(), &of.heat),
    }
}

/// The slowest requests of a minute, one of them as a waterfall.
pub fn slowest(page: &mut Page, of: &OfDisk, ui: &Ui, width: usize) {
    let slowest = &of.followed.slowest;
    if slowest.is_empty() {
        return;
    }
    page.section(heading(
        "slowest requests of the last minute (w: unfold)",
        width,
    ));
    let longest = slowest
        .iter()
        .map(|(_, s)| s.total_ns)
        .max()
        .unwrap_or(1)
        .max(1);
    let room = width.saturating_sub(REQUEST);
    let unfolded = ui.slow.min(slowest.len() - 1);
    for (n, (_, request)) in slowest.iter().enumerate() {
        let mark = if n == unfolded { "▼" } else { " " };
        let words = format!(
            "{mark}{:>6} {} {} at {}",
            time(request.total_ns),
            shown(&request.op),
            bytes(request.bytes),
            request.sector
        );
        let mut line = Line::from(plain(super::text::left(&words, REQUEST.min(width))));
        let length = (request.total_ns as f64 / longest as f64 * room as f64).round() as usize;
        let words: Vec<String> = request
            .hops
            .iter()
            .map(|h| shown(&h.label).into_owned())
            .collect();
        let hops = request.hops.iter().zip(&words);
        let all: Vec<Part<'_>> = hops
            .map(|(h, words)| Part {
                words,
                length: h.ns as f64,
            })
            .collect();
        line.spans.extend(parts(&all, length.max(1).min(room)));
        page.lines.push(line);
        if n == unfolded {
            page.lines.extend(waterfall(request, width));
        }
    }
}

/// The hops of one request, each from its begin to its end on one scale.
fn waterfall(request: &SlowRequest, width: usize) -> Vec<Line<'static>> {
    let names = width.saturating_sub(REQUEST).min(28).max(width / 3);
    let room = width.saturating_sub(names + 12);
    let total = request.total_ns.max(1) as f64;
    let lines = request.hops.iter().enumerate().map(|(n, hop)| {
        let (from, to) = (hop.begin_ns as f64, (hop.begin_ns + hop.ns) as f64);
        let words = format!("   {} {}", shown(&hop.label), shown(&hop.layer));
        Line::from(vec![
            plain(super::text::left(&words, names)),
            plain(format!(" {:>7} │", time(hop.ns))),
            Span::styled(
                between(from / total, to / total, room),
                Style::new().fg(color(n)),
            ),
            plain("│"),
        ])
    });
    lines.collect()
}

/// Share of the requests' time, average and 99th percentile of the hops at one member.
pub fn of_member(of: &OfDisk, name: &str) -> (Option<f64>, u64, u64) {
    let at = of.followed.way.shares();
    let at: Vec<_> = at
        .filter(|(h, _)| h.member.as_deref() == Some(name))
        .collect();
    if at.is_empty() {
        return (None, 0, 0);
    }
    let share = at.iter().map(|(_, share)| share).sum();
    let (sum, count) = at
        .iter()
        .fold((0, 0), |(s, c), (h, _)| (s + h.sum_ns, c.max(h.count)));
    let times = at.iter().flat_map(|(h, _)| times(h));
    let times = Histogram::from_iter(times);
    (
        Some(share),
        sum.checked_div(count).unwrap_or(0),
        times.quantile(0.99),
    )
}
