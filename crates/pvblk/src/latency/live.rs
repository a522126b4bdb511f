//! Analyses requests of running servers.

use super::text::Heading;
use super::{Analysis, LatencyArgs, seconds};
use crate::trace;
use anyhow::{Result, bail};
use parking_lot::Mutex;
use pvblk_trace::Sorter;
use pvblk_trace::blktrace::{Step, every, gap, name};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time in nanoseconds for which an event of one server waits for older ones of the others.
const HOLD_BACK_NS: u64 = 200_000_000;

/// Fewest waiting events that are worth sorting.
const LEAST: usize = 1 << 14;

struct Live<'a> {
    args: &'a LatencyArgs,
    analysis: Analysis,
    sorter: Sorter,
    newest_ns: u64,
    /// Number of waiting events at which they are sorted.
    enough: usize,
    events: u64,
    late: u64,
    dropped: u64,
    begin_ns: Option<u64>,
    interval: Option<Duration>,
    last: Instant,
}

pub(super) fn run(args: &LatencyArgs) -> Result<()> {
    let limit = seconds("--seconds", args.seconds)?;
    let interval = seconds("--interval", args.interval)?;
    let streams = trace::open(&args.live, args.every)?;
    let live = Mutex::new(Live {
        args,
        analysis: Analysis::new(args.slow),
        sorter: Sorter::default(),
        newest_ns: 0,
        enough: LEAST,
        events: 0,
        late: 0,
        dropped: 0,
        begin_ns: None,
        interval,
        last: Instant::now(),
    });
    let count = AtomicU64::new(0);
    let end = trace::follow(streams, limit, &count, |_, step| {
        let mut live = live.lock();
        count.store(live.events, Ordering::Relaxed);
        live.step(step)
    });
    let mut live = live.into_inner();
    live.analyze(u64::MAX);
    if live.begin_ns.is_some() {
        live.show()?;
    } else if interval.is_none() {
        end?;
        bail!("no requests in that time");
    }
    end
}

impl Live<'_> {
    fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Event(event, _) => {
                self.events += 1;
                self.newest_ns = self.newest_ns.max(event.time_ns);
                self.begin_ns.get_or_insert(event.time_ns);
                self.sorter.input().push(event);
                if self.sorter.input().len() >= self.enough {
                    self.analyze(self.newest_ns.saturating_sub(HOLD_BACK_NS));
                }
            }
            Step::Message(time_ns, device, text) => {
                if let Some(name) = name(&text) {
                    self.analysis.name(device, name);
                }
                if let Some(every) = every(&text) {
                    self.analysis.is_of_one_in(every);
                }
                if let Some(gap) = gap(time_ns, device, &text) {
                    self.dropped += gap.lost();
                    self.sorter.input().push(gap);
                }
            }
            _ => {}
        }
        if self.interval.is_some_and(|i| self.last.elapsed() >= i) {
            self.last = Instant::now();
            self.analyze(self.newest_ns.saturating_sub(HOLD_BACK_NS));
            self.show()?;
        }
        Ok(())
    }

    fn analyze(&mut self, until_ns: u64) {
        let events = self.sorter.take_until(until_ns);
        self.analysis.events(&events);
        // Sorting looks at all waiting events, so it isn't done for each new one.
        self.enough = 2 * self.sorter.input().len() + LEAST;
    }

    /// Prints the results since the last call.
    fn show(&mut self) -> Result<()> {
        let late = self.sorter.late();
        let heading = Heading {
            events: std::mem::take(&mut self.events),
            elapsed_ns: self.newest_ns - self.begin_ns.take().unwrap_or(self.newest_ns),
            late: late - std::mem::replace(&mut self.late, late),
            dropped: std::mem::take(&mut self.dropped),
            ..Heading::default()
        };
        self.analysis.take().show(&heading, self.args)?;
        super::print("\n")
    }
}
