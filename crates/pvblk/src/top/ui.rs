//! State of the screen, and the keys that change it.

use super::model::{Model, Row};
use super::view;
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::cmp::Ordering;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    Disks,
    Disk,
    Events,
    Memory,
    Help,
}

/// The column by which disks are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sort {
    Disk,
    State,
    Load,
    Reads,
    Writes,
    Bytes,
    Flight,
    Average,
    P99,
}

const SORTS: [Sort; 9] = [
    Sort::Disk,
    Sort::State,
    Sort::Load,
    Sort::Reads,
    Sort::Writes,
    Sort::Bytes,
    Sort::Flight,
    Sort::Average,
    Sort::P99,
];

/// Intervals that `+` and `-` choose from.
const INTERVALS: [Duration; 8] = [
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
];

/// Longest filter in characters.
const LONGEST_FILTER: usize = 64;

pub struct Ui {
    pub page: Page,
    /// Pages to which Esc leads.
    back: Vec<Page>,
    pub sort: Sort,
    pub reverse: bool,
    pub filter: String,
    /// The filter is being typed.
    pub typing: bool,
    /// The disk under the cursor; `None`: the first one.
    pub cursor: Option<String>,
    /// The disk that is shown.
    pub disk: Option<String>,
    /// First line that is shown of a page that scrolls.
    pub offset: usize,
    /// Number of the hop whose heat map is shown; 0: of whole requests.
    pub heat: usize,
    /// Number of the slow request that is unfolded.
    pub slow: usize,
    pub paused: bool,
    pub interval: Duration,
    /// The terminal's columns and lines.
    pub size: (u16, u16),
}

/// The step that a key asks the loop for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Draw,
    /// Draw all cells again.
    Redraw,
    Stop,
    Quit,
}

impl Ui {
    pub fn new(interval: Duration, size: (u16, u16)) -> Ui {
        Ui {
            page: Page::Disks,
            back: Vec::new(),
            sort: Sort::Load,
            reverse: false,
            filter: String::new(),
            typing: false,
            cursor: None,
            disk: None,
            offset: 0,
            heat: 0,
            slow: 0,
            paused: false,
            interval,
            size,
        }
    }

    /// Shows one disk.
    pub fn show(&mut self, disk: &str) {
        self.disk = Some(disk.to_owned());
        self.cursor = self.disk.clone();
        self.heat = 0;
        self.slow = 0;
        self.go(Page::Disk);
    }

    fn go(&mut self, page: Page) {
        if self.page == page {
            return;
        }
        self.back.retain(|p| *p != page);
        self.back.push(self.page);
        self.page = page;
        self.offset = 0;
    }

    fn back(&mut self) {
        self.page = self.back.pop().unwrap_or(Page::Disks);
        self.offset = 0;
        if self.page == Page::Disks {
            self.disk = None;
            self.back.clear();
        }
    }

    /// True if disks of this name pass the filter.
    pub fn passes(&self, name: &str) -> bool {
        self.filter.is_empty() || name.to_lowercase().contains(&self.filter.to_lowercase())
    }

    /// The disks that pass the filter, in the order of the screen.
    pub fn sorted<'a>(&self, model: &'a Model) -> Vec<(&'a str, &'a Row)> {
        let rows = model.rows.iter();
        let mut rows: Vec<(&str, &Row)> = rows
            .filter(|(name, _)| self.passes(name))
            .map(|(name, row)| (name.as_str(), row))
            .collect();
        // By name in the beginning, and the sort is stable.
        rows.sort_by(|a, b| {
            let order = self.order(a, b);
            if self.reverse { order.reverse() } else { order }
        });
        rows
    }

    /// Numbers begin with the greatest, texts with the first.
    fn order(&self, a: &(&str, &Row), b: &(&str, &Row)) -> Ordering {
        let number = |(_, row): &(&str, &Row)| {
            let Some(rates) = &row.rates else { return -1.0 };
            match self.sort {
                Sort::Load => rates.load,
                Sort::Reads => rates.operations[0].requests,
                Sort::Writes => rates.operations[1].requests,
                Sort::Bytes => rates.all.bytes,
                Sort::Flight => rates.all.in_flight as f64,
                Sort::Average => rates.all.average_ns as f64,
                _ => rates.all.p99_ns as f64,
            }
        };
        match self.sort {
            Sort::Disk => a.0.cmp(b.0),
            Sort::State => badness(a.1).cmp(&badness(b.1)),
            _ => number(b).total_cmp(&number(a)),
        }
    }

    /// Place of the cursor in the sorted list.
    pub fn place(&self, rows: &[(&str, &Row)]) -> usize {
        let name = self.cursor.as_deref();
        let at = name.and_then(|n| rows.iter().position(|(name, _)| *name == n));
        at.unwrap_or(0)
    }

    /// Lines of the body of a page.
    fn body(&self) -> usize {
        usize::from(self.size.1).saturating_sub(view::FIXED).max(1)
    }

    pub fn key(&mut self, key: KeyEvent, model: &Model) -> Step {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Step::Quit,
                KeyCode::Char('z') => Step::Stop,
                KeyCode::Char('l') => Step::Redraw,
                _ => Step::Draw,
            };
        }
        if self.typing {
            self.typed(key.code);
            return Step::Draw;
        }
        match key.code {
            KeyCode::Char('q') => return Step::Quit,
            KeyCode::Esc | KeyCode::Backspace => match self.page {
                Page::Disks => self.filter.clear(),
                _ => self.back(),
            },
            KeyCode::Char('?') | KeyCode::F(1) => self.go(Page::Help),
            KeyCode::Char('e') => self.go(Page::Events),
            KeyCode::Char('m') => self.go(Page::Memory),
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Char('+') => self.interval = longer(self.interval),
            KeyCode::Char('-') => self.interval = shorter(self.interval),
            KeyCode::Char('/') if matches!(self.page, Page::Disks | Page::Events) => {
                self.typing = true;
            }
            code if self.page == Page::Disks => self.in_list(code, model),
            code => self.in_page(code, model),
        }
        Step::Draw
    }

    fn typed(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(c) if self.filter.chars().count() < LONGEST_FILTER => self.filter.push(c),
            _ => {}
        }
    }

    fn in_list(&mut self, code: KeyCode, model: &Model) {
        let rows = self.sorted(model);
        let (place, last) = (self.place(&rows), rows.len().saturating_sub(1));
        let page = self.body();
        let place = match code {
            KeyCode::Up | KeyCode::Char('k') => place.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => (place + 1).min(last),
            KeyCode::PageUp => place.saturating_sub(page),
            KeyCode::PageDown => (place + page).min(last),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => last,
            KeyCode::Left | KeyCode::Char('<') => return self.sort_by(-1),
            KeyCode::Right | KeyCode::Char('>') => return self.sort_by(1),
            KeyCode::Char('r') => {
                self.reverse = !self.reverse;
                return;
            }
            KeyCode::Enter => {
                if let Some(name) = rows.get(place).map(|(n, _)| (*n).to_owned()) {
                    self.show(&name);
                }
                return;
            }
            _ => return,
        };
        self.cursor = rows.get(place).map(|(name, _)| (*name).to_owned());
    }

    fn sort_by(&mut self, step: isize) {
        let at = SORTS.iter().position(|s| *s == self.sort).unwrap_or(0);
        let next = (at as isize + step).rem_euclid(SORTS.len() as isize);
        self.sort = SORTS[next as usize];
    }

    fn in_page(&mut self, code: KeyCode, model: &Model) {
        let page = self.body();
        let shown = view::page(model, self, self.size.0.into());
        let last = shown.lines.len().saturating_sub(page);
        let offset = self.offset.min(last);
        self.offset = match code {
            KeyCode::Up | KeyCode::Char('k') => offset.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => (offset + 1).min(last),
            KeyCode::PageUp => offset.saturating_sub(page),
            KeyCode::PageDown => (offset + page).min(last),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => last,
            KeyCode::Tab => {
                let next = shown.sections.iter().find(|s| **s > offset);
                next.map_or(0, |s| (*s).min(last))
            }
            KeyCode::Char('h') => {
                let hops = model.disk.as_ref().map_or(0, |d| d.followed.heat.len());
                self.heat = (self.heat + 1) % (hops + 1);
                offset
            }
            KeyCode::Char('w') => {
                let slow = model.disk.as_ref().map_or(0, |d| d.followed.slowest.len());
                self.slow = (self.slow + 1) % slow.max(1);
                offset
            }
            KeyCode::Char(c @ ('n' | 'p')) if self.page == Page::Disk => {
                self.neighbour(c == 'n', model);
                offset
            }
            _ => offset,
        };
    }

    /// Shows the next disk of the list, or the one before.
    fn neighbour(&mut self, next: bool, model: &Model) {
        let rows = self.sorted(model);
        let place = self.place(&rows);
        let other = match next {
            true => place + 1,
            false => place.wrapping_sub(1),
        };
        if let Some(name) = rows.get(other).map(|(n, _)| (*n).to_owned()) {
            self.show(&name);
        }
    }
}

/// Rank of a disk's state, the worst first.
fn badness(row: &Row) -> usize {
    let states = [
        "failed", "stalled", "degraded", "limited", "opening", "removing",
    ];
    let at = states.iter().position(|s| *s == row.state());
    at.unwrap_or(states.len())
}

fn longer(interval: Duration) -> Duration {
    let next = INTERVALS.iter().find(|i| **i > interval);
    *next.unwrap_or(&interval)
}

fn shorter(interval: Duration) -> Duration {
    let next = INTERVALS.iter().rev().find(|i| **i < interval);
    *next.unwrap_or(&interval)
}
