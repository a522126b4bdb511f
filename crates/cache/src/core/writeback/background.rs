//! Background write-back: the oldest pages, pages that are too many, and those that reclaim met.

use super::WriteBack;
use super::runs::Below;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Writes at the device at once, in the background.
const DEPTH: usize = 16;
/// Time between two notes of the present number, from which ages are known.
const TICK: Duration = Duration::from_secs(5);
/// Calls for which whole rows aren't looked for, since there were none.
const NO_ROWS: u32 = 64;

/// The search for pages to be written in the background.
#[derive(Default)]
pub struct Background {
    /// The page at which it goes on.
    at: u64,
    /// Reclaim met dirty pages: all are written.
    hurry: bool,
    /// Times, and the number that was the present one then.
    ticks: VecDeque<(Instant, u64)>,
    /// All frames that became dirty under this number or an older one are to be written.
    aged: u64,
    /// Calls until whole rows are looked for again.
    no_rows: u32,
}

impl WriteBack {
    /// Reclaim met dirty pages: they are to be written until there are none.
    pub fn hurry(&mut self) {
        self.background.hurry = true;
    }

    /// True if background write-back has something to do.
    pub fn wants_background(&self, now: Instant) -> bool {
        let many = self.dirty.len() > self.background_from;
        let oldest = self.epochs.first_key_value();
        let aged = oldest.is_some_and(|(&e, _)| e <= self.background.aged);
        (many || aged || self.background.hurry)
            && self.ios < DEPTH
            && !self.dirty.is_empty()
            && now >= self.retry_at
    }

    /// Does a part of background write-back, if there is something to do.
    pub fn write_some(&mut self, now: Instant, below: Below) {
        if self.wants_background(now) {
            self.write_in_background(now, below);
        }
        self.background.hurry &= !self.dirty.is_empty();
    }

    /// Writes dirty pages, by sector, from the page where the search was; whole rows first.
    pub fn write_in_background(&mut self, now: Instant, mut below: Below) {
        let unit = self.row_pages;
        for whole in [true, false] {
            if whole && (unit == 1 || self.background.no_rows > 0) {
                self.background.no_rows = self.background.no_rows.saturating_sub(1);
                continue;
            }
            let before = self.ios;
            let mut rounds = 0;
            while self.ios < DEPTH && rounds < 2 {
                let Some((&page, &frame)) = self.dirty.range(self.background.at..).next() else {
                    self.background.at = 0;
                    rounds += 1;
                    continue;
                };
                let row = page / unit * unit;
                self.background.at = page + 1;
                let f = &self.frames[frame as usize];
                if f.behind || f.failed && now < self.retry_at {
                    continue;
                }
                let written = match whole {
                    true if !self.is_row_dirty(row) => {
                        self.background.at = row + unit;
                        continue;
                    }
                    true => {
                        let mut end = row + unit;
                        while self.is_row_dirty(end) && end - page < self.io_pages {
                            end += unit;
                        }
                        self.start(page, end, &mut below)
                    }
                    false => self.start(page, u64::MAX, &mut below),
                };
                self.background.at = page + written.max(1);
            }
            // Parts of rows wait until there is nothing else.
            if self.ios > 0 {
                return;
            }
            if whole && self.ios == before {
                self.background.no_rows = NO_ROWS;
            }
        }
    }

    /// True if all pages of a row are dirty, from its first page on.
    fn is_row_dirty(&self, row: u64) -> bool {
        let pages = self.dirty.range(row..row + self.row_pages);
        pages.count() as u64 == self.row_pages
    }

    /// Notes the time: pages older than the configured age are to be written. Returns when to come back.
    pub fn tick(&mut self, now: Instant) -> Option<Instant> {
        let due = self.background.ticks.back().map(|&(at, _)| at + TICK);
        if due.is_none_or(|due| now >= due) {
            self.background.ticks.push_back((now, self.epoch));
            self.epoch += 1;
        }
        while let Some(&(at, epoch)) = self.background.ticks.front() {
            if now < at + self.expire {
                break;
            }
            self.background.aged = epoch;
            self.background.ticks.pop_front();
        }
        (!self.epochs.is_empty()).then(|| now + TICK)
    }
}
