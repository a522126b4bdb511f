//! The view: lines of text from a model, the state of the keys, and a width.

mod bar;
mod columns;
mod disk;
mod disks;
mod events;
mod help;
mod memory;
mod text;
mod way;

use super::model::Model;
use super::ui::{Page as Which, Ui};
use crate::terminal::{ascii, shown};
use ratatui_core::buffer::Buffer;
use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::{Line, Span};
use text::{count, left, plain, strong};

/// Lines above and below the body.
pub const FIXED: usize = 3;

/// A page that scrolls.
#[derive(Default)]
pub struct Page {
    /// Lines that stay above.
    pub head: Vec<Line<'static>>,
    pub lines: Vec<Line<'static>>,
    /// Numbers of the lines at which sections begin.
    pub sections: Vec<usize>,
}

/// The page that is shown; of the list of disks all of its lines.
pub fn page(model: &Model, ui: &Ui, width: usize) -> Page {
    match ui.page {
        Which::Disks => disks::page(model, ui, width),
        Which::Disk => disk::page(model, ui, width),
        Which::Events => events::page(model, ui, width),
        Which::Memory => memory::page(model, width),
        Which::Help => help::page(width),
    }
}

/// Draws everything. `utf8`: the terminal shows more than ASCII.
pub fn draw(buffer: &mut Buffer, model: &Model, ui: &Ui, utf8: bool) {
    let area = buffer.area;
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let mut lines = vec![title(model, ui, width), alert(model, ui)];
    let body = height.saturating_sub(FIXED);
    let page = match ui.page {
        Which::Disks => disks::window(model, ui, width, body),
        _ => {
            let mut page = page(model, ui, width);
            let last = page.lines.len().saturating_sub(body);
            page.lines.drain(..ui.offset.min(last));
            page
        }
    };
    lines.extend(page.head.into_iter().chain(page.lines).take(body));
    lines.resize(height.saturating_sub(1).max(1), Line::default());
    lines.push(footer(ui, width));
    for (y, line) in (area.y..area.bottom()).zip(&lines) {
        match utf8 {
            true => buffer.set_line(area.x, y, line, area.width),
            false => buffer.set_line(area.x, y, &in_ascii(line), area.width),
        };
    }
}

/// The page as plain text.
pub fn as_text(model: &Model, ui: &Ui, width: usize, utf8: bool) -> String {
    let page = page(model, ui, width);
    let about = [Line::raw(""), summary(model), alert(model, ui)];
    let mut out = String::new();
    for line in about.iter().chain(&page.head).chain(&page.lines) {
        let text: String = line.spans.iter().map(|s| s.content.as_ref()).collect();
        let text = text.trim_end();
        out += match utf8 {
            true => text.into(),
            false => ascii(text),
        }
        .as_ref();
        out.push('\n');
    }
    out
}

fn in_ascii(line: &Line<'static>) -> Line<'static> {
    let spans = line.spans.iter();
    let spans = spans.map(|s| Span::styled(ascii(&s.content).into_owned(), s.style));
    Line::from_iter(spans).style(line.style)
}

/// Sums of all disks.
fn summary(model: &Model) -> Line<'static> {
    let rates = || model.rows.values().filter_map(|r| r.rates.as_ref());
    let (mut requests, mut bytes, mut load, mut busy) = (0.0, 0.0, 0.0, 0);
    for r in rates() {
        requests += r.all.requests;
        bytes += r.all.bytes;
        load += r.load;
        busy += usize::from(r.all.requests > 0.0 || r.all.in_flight > 0);
    }
    let disks = model.rows.len();
    let noun = if disks == 1 { "disk" } else { "disks" };
    Line::from(vec![
        strong(format!("{disks} {noun}")),
        plain(format!(
            ", {busy} busy: {} requests/s, {} MB/s, {} at work",
            count(requests),
            count(bytes / 1e6),
            count(load)
        )),
    ])
}

fn title(model: &Model, ui: &Ui, width: usize) -> Line<'static> {
    let mut line = summary(model);
    let interval = match ui.interval.as_millis() {
        ms if ms < 1000 => format!("{ms}ms"),
        ms => format!("{}s", ms / 1000),
    };
    let right = match ui.paused {
        true => " paused ".to_owned(),
        false => format!(" {} {interval} ", shown(&model.server)),
    };
    let used = line.width();
    if let Some(room) = width.checked_sub(used + right.chars().count()) {
        line.push_span(" ".repeat(room));
        line.push_span(right);
    } else if ui.paused {
        line.spans.insert(0, strong("paused "));
    }
    let missing = width.saturating_sub(line.width());
    line.push_span(" ".repeat(missing));
    line.style(Style::new().add_modifier(Modifier::REVERSED))
}

/// The worst that there is to tell.
fn alert(model: &Model, ui: &Ui) -> Line<'static> {
    let warn = |text: String| {
        Line::styled(
            text,
            Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        )
    };
    if let Some(why) = &model.gone {
        return warn(format!("the server is gone, trying again: {}", shown(why)));
    }
    let mut parts = Vec::new();
    for state in [
        "failed", "stalled", "degraded", "limited", "opening", "removing",
    ] {
        let disks = model.rows.iter().filter(|(_, r)| r.state() == state);
        let disks: Vec<&str> = disks.map(|(n, _)| n.as_str()).collect();
        match disks.as_slice() {
            [] => {}
            [one] => parts.push(format!("{} {state}", shown(one))),
            [one, rest @ ..] => {
                parts.push(format!("{} and {} more {state}", shown(one), rest.len()))
            }
        }
    }
    if model.memory.as_ref().is_some_and(|m| m.squeezing) {
        parts.push("memory is squeezed".to_owned());
    }
    if !parts.is_empty() {
        return Line::styled(
            parts.join(", "),
            Style::new().fg(Color::Yellow).add_modifier(Modifier::BOLD),
        );
    }
    if let Some(why) = &model.no_hops {
        return Line::raw(format!("no hops, counters only: {}", shown(why)));
    }
    match (model.events.back(), ui.page) {
        (Some(event), Which::Disks) => {
            Line::raw(format!("last event: {}", shown(&event.to_string())))
        }
        _ => Line::default(),
    }
}

fn footer(ui: &Ui, width: usize) -> Line<'static> {
    if ui.typing {
        return Line::from(vec![
            strong("filter: "),
            plain(shown(&ui.filter).into_owned()),
            plain("█"),
            plain("  Enter: keep, Esc: none"),
        ]);
    }
    let keys = match ui.page {
        Which::Disks if !ui.filter.is_empty() => format!("filter {} (Esc: none)  ? help  q quit", shown(&ui.filter)),
        Which::Disks => "Enter disk  ←→ sort  r reverse  / filter  e events  m memory  Space pause  ? help  q quit".to_owned(),
        Which::Disk => "Esc back  Tab section  h heat map of  w slow request  n p other disk  e events  ? help  q quit".to_owned(),
        Which::Events => "Esc back  / filter  ? help  q quit".to_owned(),
        Which::Memory | Which::Help => "Esc back  q quit".to_owned(),
    };
    Line::styled(left(&keys, width), Style::new().add_modifier(Modifier::DIM))
}
