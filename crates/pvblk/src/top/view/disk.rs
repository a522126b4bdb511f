//! The page of one disk.

use super::Page;
use super::bar::{bar, heat};
use super::columns::{Columns, cell, number, text};
use super::disks::state_style;
use super::memory::pressure;
use super::text::{bytes, count, heading, percent, plain, strong, theirs, time, wrapped};
use super::way;
use crate::raid::{noun, pace, percent as percent_done};
use crate::terminal::shown;
use crate::top::model::rates::{NAMES, Rate};
use crate::top::model::{CacheRates, Model, OfDisk, Row};
use crate::top::ui::Ui;
use pvblk_raid5::ask::{Detail, DeviceState};
use ratatui_core::style::Style;
use ratatui_core::text::{Line, Span};
use serde_json::Value;

/// Events of the disk that are shown.
const EVENTS: usize = 5;

pub fn page(model: &Model, ui: &Ui, width: usize) -> Page {
    let mut page = Page::default();
    let (Some(of), Some(name)) = (&model.disk, &ui.disk) else {
        return page;
    };
    let Some(row) = model.rows.get(name) else {
        let text = match model.looks {
            0 => "asking the server",
            _ => "the server has no such disk (any more): Esc leads back to the list",
        };
        page.head.push(Line::from(vec![
            strong(shown(name)),
            plain(format!(": {text}")),
        ]));
        return page;
    };
    page.head.push(first_line(name, row));
    facts(&mut page, row, width);
    operations(&mut page, row, width);
    way::hops(&mut page, model, of, ui, width);
    let (title, map) = way::heat_map(of, ui);
    page.section(heading(&title, width));
    page.lines.extend(heat(map, width));
    way::slowest(&mut page, of, ui, width);
    members(&mut page, of, width);
    cache(&mut page, of, width);
    connections(&mut page, of, row, width);
    memory(&mut page, model, name, width);
    events(&mut page, model, name, width);
    page
}

fn first_line(name: &str, row: &Row) -> Line<'static> {
    let state = row.state();
    let mut line = Line::from(vec![
        strong(shown(name)),
        plain("  "),
        Span::styled(state.to_owned(), state_style(state)),
    ]);
    if let Some(r) = &row.rates {
        line.push_span(format!(
            "  load {}, {} in flight, {} queues busy, avg {}, p99 {}",
            count(r.load),
            r.all.in_flight,
            count(r.busy),
            time(r.all.average_ns),
            time(r.all.p99_ns),
        ));
    }
    line
}

fn facts(page: &mut Page, row: &Row, width: usize) {
    let Some(shown_disk) = &row.shown else {
        return;
    };
    let mut text = format!(
        "{}, {}",
        shown(&shown_disk.volume),
        bytes(shown_disk.size_bytes)
    );
    for (is, word) in [
        (shown_disk.read_only, ", read-only"),
        (shown_disk.exclusive, ", exclusive"),
    ] {
        if is {
            text += word;
        }
    }
    if let Some(why) = &shown_disk.reason {
        text += &format!(", it isn't open: {}", shown(why));
    }
    let lines = wrapped(&text, width).into_iter().map(Line::raw);
    page.lines.extend(lines);
    if let Some(limit) = &shown_disk.limit {
        let mut line = Line::from(vec![plain("limit "), theirs(limit)]);
        if row.is_limited() {
            line.push_span(Span::styled(
                "  holds requests back",
                state_style("limited"),
            ));
        }
        page.lines.push(line);
    }
}

fn operations(page: &mut Page, row: &Row, width: usize) {
    page.section(heading("operations", width));
    let columns = Columns::fit(
        &[
            text("", 12, 0),
            number("/s", 6, 0),
            number("MB/s", 6, 2),
            number("SIZE", 8, 4),
            number("FLIGHT", 6, 3),
            number("AVG", 6, 0),
            number("P99", 6, 0),
            number("err/s", 6, 1),
        ],
        width,
    );
    let Some(rates) = &row.rates else {
        page.lines.push(Line::raw("  no figures yet"));
        return;
    };
    page.lines.push(columns.titles(None));
    let mut used = 0;
    for (name, rate) in NAMES.iter().zip(&rates.operations) {
        if rate.requests > 0.0 || rate.in_flight > 0 {
            page.lines.push(columns.row(&rate_cells(name, rate)));
            used += 1;
        }
    }
    if used != 1 {
        page.lines.push(columns.row(&rate_cells("all", &rates.all)));
    }
}

fn rate_cells(name: &str, rate: &Rate) -> Vec<(String, Style)> {
    let size = match rate.requests {
        0.0 => "-".to_owned(),
        n => bytes((rate.bytes / n).round() as u64),
    };
    let errors = match rate.errors {
        0.0 => Style::new(),
        _ => state_style("failed"),
    };
    vec![
        cell(name),
        cell(count(rate.requests)),
        cell(count(rate.bytes / 1e6)),
        cell(size),
        cell(rate.in_flight.to_string()),
        cell(time(rate.average_ns)),
        cell(time(rate.p99_ns)),
        (count(rate.errors), errors),
    ]
}

fn members(page: &mut Page, of: &OfDisk, width: usize) {
    let Some(detail) = &of.array else {
        return;
    };
    let title = format!(
        "members of the array: {} of RAID-{}",
        detail.raid_devices, detail.level
    );
    page.section(heading(&title, width));
    progress(page, detail, width);
    let columns = Columns::fit(
        &[
            number("PLACE", 5, 0),
            text("STATE", 16, 0),
            text("DEVICE", width.saturating_sub(60).clamp(14, 48), 0),
            number("TIME", 5, 1),
            number("AVG", 6, 2),
            number("P99", 6, 1),
            number("CORRECTED", 9, 3),
        ],
        width,
    );
    page.lines.push(columns.titles(None));
    for member in &detail.members {
        let name = member.name.as_deref().unwrap_or("-");
        let (share, average, p99) = way::of_member(of, name);
        let style = match member.state {
            DeviceState::Active | DeviceState::Spare => Style::new(),
            DeviceState::Rebuilding => state_style("degraded"),
            DeviceState::Faulty | DeviceState::Removed => state_style("failed"),
        };
        let place = member
            .place
            .map_or_else(|| "-".to_owned(), |p| p.to_string());
        page.lines.push(columns.row(&[
            cell(place),
            (member.state.text().to_owned(), style),
            cell(shown(name)),
            cell(share.map_or_else(|| "-".to_owned(), percent)),
            cell(time(average)),
            cell(time(p99)),
            cell(member.corrected_reads.to_string()),
        ]));
    }
    for note in &detail.notes {
        page.lines
            .extend(wrapped(&shown(note), width).into_iter().map(Line::raw));
    }
}

/// A rebuild, resync or check that is under way, or why the last rebuild didn't end.
fn progress(page: &mut Page, detail: &Detail, width: usize) {
    let Some(serving) = &detail.serving else {
        return;
    };
    if let Some(sync) = &serving.sync {
        let share = sync.done_bytes as f64 / sync.of_bytes.max(1) as f64;
        let text = format!(
            "{} {}%, {} of {}{}",
            noun(&sync.action),
            percent_done(sync),
            bytes(sync.done_bytes),
            bytes(sync.of_bytes),
            pace(sync)
        );
        page.lines.push(Line::raw(text));
        page.lines.push(Line::raw(format!(
            "[{}]",
            bar(share, width.saturating_sub(2).min(60))
        )));
    }
    if let Some(trouble) = &serving.trouble {
        let lines = wrapped(&shown(trouble), width).into_iter();
        page.lines
            .extend(lines.map(|l| Line::styled(l, state_style("failed"))));
    }
}

fn cache(page: &mut Page, of: &OfDisk, width: usize) {
    let Some(CacheRates { now, hit_share }) = &of.cache else {
        return;
    };
    page.section(heading("page cache", width));
    let ever = now.get("hit_ratio").and_then(Value::as_f64);
    let text = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), percent);
    page.lines.push(Line::from(vec![
        plain("hits "),
        strong(text(*hit_share)),
        plain(format!(" of reads lately, {} ever", text(ever))),
    ]));
    let pages = |name: &str| now.get(name).and_then(Value::as_u64).unwrap_or(0) * 4096;
    page.lines.push(Line::raw(format!(
        "active {}, inactive {}, dirty {}, under write-back {}, free {}",
        bytes(pages("nr_active_file")),
        bytes(pages("nr_inactive_file")),
        bytes(pages("nr_dirty")),
        bytes(pages("nr_writeback")),
        bytes(pages("nr_free_pages")),
    )));
}

fn connections(page: &mut Page, of: &OfDisk, row: &Row, width: usize) {
    page.section(heading("connections", width));
    if of.connections.is_empty() {
        let users = row.shown.as_ref().map_or(0, |s| s.users.len());
        let text = if users == 0 {
            "  none"
        } else {
            "  no figures yet"
        };
        page.lines.push(Line::raw(text));
        return;
    }
    let columns = Columns::fit(
        &[
            text("", width.saturating_sub(46).clamp(14, 60), 0),
            number("LOAD", 5, 0),
            number("/s", 6, 0),
            number("MB/s", 6, 2),
            number("FLIGHT", 6, 3),
            number("AVG", 6, 1),
            number("P99", 6, 0),
        ],
        width,
    );
    page.lines.push(columns.titles(None));
    for c in &of.connections {
        page.lines.push(columns.row(&[
            cell(shown(&c.name)),
            cell(count(c.rates.load)),
            cell(count(c.rates.all.requests)),
            cell(count(c.rates.all.bytes / 1e6)),
            cell(c.rates.all.in_flight.to_string()),
            cell(time(c.rates.all.average_ns)),
            cell(time(c.rates.all.p99_ns)),
        ]));
    }
}

fn memory(page: &mut Page, model: &Model, name: &str, width: usize) {
    let Some(memory) = &model.memory else {
        return;
    };
    page.section(heading("memory", width));
    if let Some(of) = memory.disks.iter().find(|d| d.disk == name) {
        let p = &of.pool;
        page.lines.push(Line::raw(format!(
            "buffers {}, {} in use, {} at most; {} squeezes, {} stalls",
            bytes(p.pool_pages * 4096),
            bytes(p.in_use_pages * 4096),
            bytes(p.peak_pages * 4096),
            p.squeezes,
            p.allocation_stalls,
        )));
    }
    page.lines.push(pressure(memory));
}

fn events(page: &mut Page, model: &Model, name: &str, width: usize) {
    page.section(heading("events", width));
    let of = model.events.iter().rev();
    let of = of.filter(|e| e.disk.as_deref() == Some(name)).take(EVENTS);
    let before = page.lines.len();
    for event in of {
        let text = event.to_string();
        page.lines
            .extend(wrapped(&shown(&text), width).into_iter().map(Line::raw));
    }
    if page.lines.len() == before {
        page.lines.push(Line::raw("  none"));
    }
}
