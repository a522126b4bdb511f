//! The keys and the columns.

use super::Page;
use super::text::{left, strong, wrapped};
use ratatui_core::text::Line;

const HELP: &[(&str, &str)] = &[
    ("", "Keys everywhere"),
    ("? F1", "this page"),
    ("Esc", "back; in the list of disks: no filter"),
    ("Space", "pause, and go on"),
    ("+ -", "longer and shorter intervals"),
    ("e", "events; from the page of a disk: its events"),
    ("m", "memory: pressure, owners, buffers of disks"),
    ("Ctrl-L", "draw everything again"),
    ("Ctrl-Z", "stop; fg goes on"),
    ("q Ctrl-C", "quit"),
    ("", "In the list of disks"),
    ("↑ ↓ PgUp PgDn Home End", "choose a disk; also k j g G"),
    ("Enter", "look at that disk"),
    ("← →", "sort by another column; also < >"),
    ("r", "reverse the order"),
    ("/", "type a part of the names that are shown"),
    ("", "On the page of a disk"),
    ("↑ ↓ PgUp PgDn Home End", "scroll"),
    ("Tab", "to the next section"),
    ("h", "heat map of the next hop"),
    ("w", "unfold the next slow request"),
    ("n p", "next and previous disk of the list"),
    ("", "Columns"),
    (
        "LOAD",
        "requests at work, on average: a disk with 1 is always busy with one",
    ),
    (
        "r/s w/s",
        "reads, and writes with discards and write-zeroes, that ended, per second",
    ),
    ("MB/s", "their data, 10^6 bytes per second"),
    ("FLIGHT", "requests at work now"),
    (
        "AVG P99",
        "their times in the server: on average, and what 99 % took less than",
    ),
    (
        "MOST TIME IN",
        "the hop with the greatest share of the requests' time, and that share",
    ),
    ("TIME BY HOP", "all hops, as wide as their shares"),
    ("", "States"),
    (
        "failed",
        "the disk could not be opened, is gone, or its array lost two members",
    ),
    ("stalled", "a request hangs"),
    (
        "degraded",
        "the array lacks a member, the backing is full, or requests fail",
    ),
    ("limited", "healthy, and its limits hold requests back"),
];

pub fn page(width: usize) -> Page {
    let mut page = Page::default();
    let column = 24.min(width / 3);
    for (key, words) in HELP {
        if key.is_empty() {
            page.section(Line::from(strong(*words)));
            continue;
        }
        for (n, line) in wrapped(words, width.saturating_sub(column + 4))
            .into_iter()
            .enumerate()
        {
            let key = left(if n == 0 { key } else { "" }, column);
            page.lines.push(Line::raw(format!("  {key} {line}")));
        }
    }
    page
}
