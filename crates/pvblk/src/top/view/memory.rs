//! The memory of the server: its bill, its pools, and where it learns that memory is short.

use super::Page;
use super::columns::{Columns, cell, number, text};
use super::text::{bytes, heading, plain, strong, theirs};
use crate::memory::{Pool, Report};
use crate::terminal::shown;
use crate::top::model::Model;
use ratatui_core::text::Line;

/// Bytes of a page.
const PAGE: u64 = 4096;

pub fn page(model: &Model, width: usize) -> Page {
    let mut page = Page::default();
    let Some(memory) = &model.memory else {
        page.lines.push(Line::raw("asking the server"));
        return page;
    };
    page.lines.push(pressure(memory));
    for source in &memory.sources {
        let mut line = Line::from(theirs(&source.name));
        match &source.missing {
            None => line.push_span("  listened to"),
            Some(why) => line.push_span(format!("  not there: {}", shown(why))),
        }
        page.lines.push(line);
    }
    page.section(heading("owners", width));
    let owners = Columns::fit(
        &[
            text("OWNER", width.saturating_sub(38).clamp(16, 60), 0),
            text("KIND", 12, 2),
            number("NOW", 11, 0),
            number("AT MOST", 11, 1),
        ],
        width,
    );
    page.lines.push(owners.titles(None));
    for owner in &memory.owners {
        page.lines.push(owners.row(&[
            cell(shown(&owner.owner)),
            cell(shown(&owner.kind)),
            cell(bytes(owner.live_bytes)),
            cell(bytes(owner.cap_bytes)),
        ]));
    }
    let all = memory.private_bytes + memory.shared_bytes;
    page.lines.push(owners.row(&[
        cell("all"),
        cell(""),
        cell(bytes(all)),
        cell(bytes(memory.cap_bytes)),
    ]));
    page.section(heading("buffers of disks", width));
    let pools = Columns::fit(
        &[
            text("DISK", 16, 0),
            number("POOL", 10, 0),
            number("IN USE", 10, 0),
            number("PEAK", 10, 2),
            number("SQUEEZES", 8, 3),
            number("STALLS", 8, 1),
        ],
        width,
    );
    page.lines.push(pools.titles(None));
    let row = |name: &str, p: &Pool| {
        pools.row(&[
            cell(shown(name)),
            cell(bytes(p.pool_pages * PAGE)),
            cell(bytes(p.in_use_pages * PAGE)),
            cell(bytes(p.peak_pages * PAGE)),
            cell(p.squeezes.to_string()),
            cell(p.allocation_stalls.to_string()),
        ])
    };
    // A disk without buffers tells nothing here.
    for disk in memory.disks.iter().filter(|d| d.pool.peak_pages > 0) {
        page.lines.push(row(&disk.disk, &disk.pool));
    }
    page.lines.push(row("all", &memory.total));
    page
}

impl Page {
    pub fn section(&mut self, heading: Line<'static>) {
        self.sections.push(self.lines.len());
        self.lines.push(heading);
    }
}

/// State of memory, in a line.
pub fn pressure(memory: &Report) -> Line<'static> {
    let state = match memory.squeezing {
        true => strong("memory is squeezed"),
        false => plain("memory isn't squeezed"),
    };
    let past = match memory.squeezes {
        0 => ", and never was".to_owned(),
        n => format!(
            ", was {n} times, longest for {} µs",
            memory.longest_squeeze_us
        ),
    };
    let private = format!("; {} private", bytes(memory.rss_anon_bytes));
    Line::from(vec![state, plain(past), plain(private)])
}
