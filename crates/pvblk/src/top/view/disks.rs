//! The list of disks.

use super::Page;
use super::bar::{Part, parts};
use super::columns::{Column, Columns, cell, number, text};
use super::text::{count, percent, time};
use crate::terminal::shown;
use crate::top::hops::words;
use crate::top::model::{Model, Row};
use crate::top::ui::{Sort, Ui};
use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::Line;

/// The columns before the bar. The first one gets the room that its names need.
const COLUMNS: [Column; 11] = [
    text("DISK", 12, 0),
    text("STATE", 8, 5),
    number("LOAD", 5, 0),
    number("r/s", 5, 3),
    number("w/s", 5, 4),
    number("MB/s", 5, 8),
    number("FLIGHT", 6, 9),
    number("AVG", 6, 6),
    number("P99", 6, 1),
    number("err/s", 5, 10),
    text("MOST TIME IN", 20, 2),
];
/// Longest name that isn't cut.
const LONGEST_NAME: usize = 24;
/// Least width of the bar.
const LEAST_BAR: usize = 12;

/// The colour in which a state is shown.
pub fn state_style(state: &str) -> Style {
    let color = match state {
        "failed" => Color::Red,
        "stalled" => Color::LightRed,
        "degraded" => Color::Yellow,
        "limited" => Color::Magenta,
        "healthy" => return Style::new(),
        _ => Color::Cyan,
    };
    Style::new().fg(color).add_modifier(Modifier::BOLD)
}

fn column_of(sort: Sort) -> usize {
    match sort {
        Sort::Disk => 0,
        Sort::State => 1,
        Sort::Load => 2,
        Sort::Reads => 3,
        Sort::Writes => 4,
        Sort::Bytes => 5,
        Sort::Flight => 6,
        Sort::Average => 7,
        Sort::P99 => 8,
    }
}

struct Table {
    columns: Columns,
    /// Columns of the bar, or 0.
    bar: usize,
}

impl Table {
    fn new(rows: &[(&str, &Row)], width: usize) -> Table {
        let longest = rows.iter().map(|(n, _)| n.chars().count()).max();
        let mut all = COLUMNS;
        all[0].width = longest.unwrap_or(0).clamp(4, LONGEST_NAME);
        // A narrow terminal gets its numbers first.
        all[0].width = all[0].width.min((width / 3).max(8));
        if width < 100 {
            all[10].width = 15;
        }
        let columns = Columns::fit(&all, width);
        let left = width.saturating_sub(columns.width() + 1);
        let bar = if left < LEAST_BAR { 0 } else { left };
        Table { columns, bar }
    }

    fn head(&self, ui: &Ui) -> Line<'static> {
        let mut line = self.columns.titles(Some(column_of(ui.sort)));
        if self.bar > 0 {
            line.push_span(" TIME BY HOP");
        }
        line
    }

    fn line(&self, name: &str, row: &Row, at_cursor: bool) -> Line<'static> {
        let state = row.state();
        let mut cells = vec![cell(shown(name)), (state.to_owned(), state_style(state))];
        match &row.rates {
            None => cells.extend((0..8).map(|_| cell("-"))),
            Some(r) => {
                let of = &r.operations;
                let number = |v: f64| cell(count(v));
                cells.extend([
                    number(r.load),
                    number(of[0].requests),
                    // Discards and write-zeroes change the disk, too.
                    number(of[1].requests + of[3].requests + of[4].requests),
                    number(r.all.bytes / 1e6),
                    cell(r.all.in_flight.to_string()),
                    cell(time(r.all.average_ns)),
                    cell(time(r.all.p99_ns)),
                    number(r.all.errors),
                ]);
                if r.all.errors > 0.0 {
                    cells[9].1 = state_style("failed");
                }
            }
        }
        let most = row.way.greatest();
        let most = most.map(|(hop, share)| format!("{:>4} {}", percent(share), words(hop)));
        cells.push(cell(shown(&most.unwrap_or_default())));
        let mut line = self.columns.row(&cells);
        if self.bar > 0 {
            line.push_span(" ");
            let words: Vec<(String, f64)> = row
                .way
                .shares()
                .map(|(h, s)| (shown(&words(h)).into_owned(), s))
                .collect();
            let all: Vec<Part<'_>> = words
                .iter()
                .map(|(w, s)| Part {
                    words: w,
                    length: *s,
                })
                .collect();
            line.spans.extend(parts(&all, self.bar));
        }
        match at_cursor {
            true => line.style(Style::new().add_modifier(Modifier::REVERSED)),
            false => line,
        }
    }
}

/// The lines around the cursor that fit `height`, with the titles.
pub fn window(model: &Model, ui: &Ui, width: usize, height: usize) -> Page {
    let rows = ui.sorted(model);
    let table = Table::new(&rows, width);
    let height = height.saturating_sub(1);
    let place = ui.place(&rows);
    // The cursor is in the last line when the list is longer than the terminal.
    let first = (place + 1).saturating_sub(height);
    let lines = rows.iter().enumerate().skip(first).take(height);
    let mut lines: Vec<Line<'static>> = lines
        .map(|(at, (name, row))| table.line(name, row, at == place))
        .collect();
    if rows.is_empty() {
        lines.push(Line::raw(empty(model)));
    }
    Page {
        head: vec![table.head(ui)],
        lines,
        sections: Vec::new(),
    }
}

fn empty(model: &Model) -> &'static str {
    match (model.looks, model.rows.is_empty()) {
        (0, _) => "asking the server",
        (_, true) => "the server has no disks: pvblk disk add gives it one",
        _ => "no disk passes the filter: Esc takes it away",
    }
}

pub fn page(model: &Model, ui: &Ui, width: usize) -> Page {
    let rows = ui.sorted(model);
    let table = Table::new(&rows, width);
    let lines = rows.iter().map(|(name, row)| table.line(name, row, false));
    Page {
        head: vec![table.head(ui)],
        lines: lines.collect(),
        sections: Vec::new(),
    }
}
