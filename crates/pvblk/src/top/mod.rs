//! `pvblk top`: the disks of a server, live. Decision 37.

mod feed;
mod hops;
mod live;
mod model;
mod plain;
#[cfg(test)]
mod tests;
mod ui;
mod view;

use crate::config;
use crate::control::ControlArg;
use crate::terminal;
use anyhow::{Result, bail};
use clap::Args;
use feed::{News, Wanted};
use model::Model;
use pvblk_block::trace::MOST_EVERY;
use std::collections::VecDeque;
use std::time::Duration;
use ui::{Page, Sort, Ui};

/// Shown under the flags.
pub const HELP: &str = "\
On a terminal: Enter looks at a disk, left and right choose the column to sort by, / filters, ? shows all keys, q quits. Elsewhere tables are printed.
docs/guide/top.md explains the columns.

Examples:
  pvblk top --control unix:/run/pvblk.ctl
  pvblk top vm1 --control unix:/run/pvblk.ctl
  pvblk top --sort p99 --count 1 --control unix:/run/pvblk.ctl | head";

/// Requests of a disk that are followed in a second, about.
const FOLLOWED: f64 = 1000.0;
/// News that are held in a pause: events, mostly, of which the server keeps as many.
const MOST_HELD: usize = 1024;

#[derive(Args, Debug)]
pub struct TopArgs {
    /// Begin with the page of this disk
    #[arg(value_name = "DISK")]
    pub disk: Option<String>,
    #[command(flatten)]
    pub control: ControlArg,
    /// Interval between two looks, 100ms to 60s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = config::time)]
    pub interval: Duration,
    /// Print so many tables, without a screen [default: until interrupted, where the output is no terminal]
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Column to sort by
    #[arg(
        long,
        value_name = "COLUMN",
        value_enum,
        default_value = "load",
        hide_possible_values = true
    )]
    pub sort: Sort,
    /// Only disks whose names have this in them
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    pub filter: String,
    /// Follow one request in N through its hops [default: so that about 1000 a second are followed]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_EVERY)))]
    pub every: Option<u32>,
}

pub fn run(args: &TopArgs) -> Result<()> {
    let bounds = Duration::from_millis(100)..=Duration::from_secs(60);
    if !bounds.contains(&args.interval) {
        bail!("--interval: 100ms to 60s");
    }
    let path = args.control.path()?;
    let mut ui = Ui::new(args.interval, terminal::size());
    ui.sort = args.sort;
    ui.filter.clone_from(&args.filter);
    let mut model = Model::new(&path.display().to_string());
    if let Some(disk) = &args.disk {
        ui.show(disk);
        model.show(Some(disk));
    }
    let top = Top {
        model,
        ui,
        every: args.every,
        chosen: 64,
        utf8: terminal::is_utf8(),
        held: VecDeque::new(),
    };
    if args.count.is_some() {
        return plain::run(top, &path, args.count);
    }
    live::run(top, &path)
}

/// Model, screen, and the choice of requests to follow.
struct Top {
    model: Model,
    ui: Ui,
    /// As it was given.
    every: Option<u32>,
    chosen: u32,
    utf8: bool,
    /// News since the begin of a pause, the latest.
    held: VecDeque<News>,
}

impl Top {
    /// Nothing on the screen changes in a pause.
    fn news(&mut self, news: News) {
        self.held.push_back(news);
        if self.held.len() > MOST_HELD {
            self.held.pop_front();
        }
        self.resume();
    }

    /// Takes the news of a pause in, unless there is one.
    fn resume(&mut self) {
        if !self.ui.paused {
            let held = std::mem::take(&mut self.held);
            held.into_iter().for_each(|n| self.model.news(n));
        }
    }

    fn wanted(&mut self) -> Wanted {
        let disk = match self.ui.page {
            Page::Disks => None,
            _ => self.ui.disk.clone(),
        };
        self.model.show(disk.as_deref());
        self.chosen = self.every.unwrap_or_else(|| self.choose(disk.as_deref()));
        Wanted {
            interval: self.ui.interval,
            paused: self.ui.paused,
            disk,
            every: self.chosen,
            memory: matches!(self.ui.page, Page::Memory | Page::Disk),
        }
    }

    /// N for one request in N, by the rate of what is shown. It changes only by a factor of four at least: each change is a gap in what is followed.
    fn choose(&self, disk: Option<&str>) -> u32 {
        let rows = self.model.rows.iter();
        let rows = rows.filter(|(name, _)| disk.is_none_or(|d| d == *name));
        let rates: Vec<f64> = rows
            .filter_map(|(_, r)| Some(r.rates.as_ref()?.all.requests))
            .collect();
        if rates.is_empty() {
            return self.chosen;
        }
        let wanted = (rates.iter().sum::<f64>() / FOLLOWED).max(1.0) as u32;
        let wanted = wanted.min(MOST_EVERY).next_power_of_two().min(MOST_EVERY);
        match wanted >= self.chosen * 4 || wanted * 4 <= self.chosen {
            true => wanted,
            false => self.chosen,
        }
    }
}
