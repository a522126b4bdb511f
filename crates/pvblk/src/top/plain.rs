//! Tables for a pipe or a file.

use super::feed::{Feed, News};
use super::model::LEAST_NS;
use super::{Top, view};
use crate::output::print_or_end;
use anyhow::{Result, bail};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Columns of a table where there is no terminal.
const WIDTH: usize = 132;
/// Time that hops and a disk's own answers may take longer than counters.
const LATER: Duration = Duration::from_millis(1500);

/// Prints `count` tables, or tables until the reader or the server has enough.
pub fn run(mut top: Top, path: &Path, count: Option<u64>) -> Result<()> {
    let (send, news) = channel();
    let wanted = top.wanted();
    let feed = Feed::start(path, wanted, send, |n| n)?;
    let mut printed = 0;
    while count.is_none_or(|count| printed < count) {
        gather(&mut top, &feed, &news)?;
        if let Some(name) = &top.ui.disk
            && !top.model.rows.contains_key(name)
        {
            bail!("the server has no disk {name}; `pvblk disk list` shows all");
        }
        let text = view::as_text(&top.model, &top.ui, WIDTH, top.utf8);
        print_or_end(&text)?;
        printed += 1;
    }
    Ok(())
}

/// Waits until there are rates, and hops of the same time if the server has some.
fn gather(top: &mut Top, feed: &Feed, news: &Receiver<News>) -> Result<()> {
    let (mut rates, mut hops) = (None::<Instant>, false);
    loop {
        let now = Instant::now();
        let rest = rates.map_or(Duration::from_secs(3600), |at| {
            (at + LATER).saturating_duration_since(now)
        });
        let new = match news.recv_timeout(rest) {
            Ok(new) => new,
            Err(RecvTimeoutError::Timeout) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => bail!("a thread of top ended"),
        };
        if let News::Gone(why) = new {
            bail!("{why}");
        }
        hops |= match &new {
            News::Hops(_, answer) => answer.elapsed_ns >= LEAST_NS,
            other => matches!(other, News::NoHops(_)),
        };
        let is_count = matches!(new, News::Counted(_));
        top.model.news(new);
        feed.want(&top.wanted());
        // The first answer is the beginning of the time that the second one is about.
        if is_count && top.model.looks > 1 {
            rates.get_or_insert_with(Instant::now);
        }
        if rates.is_some() && hops && news_is_whole(top) {
            return Ok(());
        }
    }
}

/// True unless the shown disk's array or cache hasn't answered yet.
fn news_is_whole(top: &Top) -> bool {
    let Some(of) = &top.model.disk else {
        return true;
    };
    let shown = top.model.rows.get(&of.name).and_then(|r| r.shown.as_ref());
    let volume = shown.map_or("", |s| s.volume.as_str());
    let is_there = |word: &str, has: bool| !volume.starts_with(word) || has;
    is_there("raid5:", of.array.is_some()) && is_there("cache:", of.cache.is_some())
}
