//! Analyses requests of running servers.

use super::text::Heading;
use super::{Analysis, LatencyArgs, seconds};
use crate::output::print_or_end;
use crate::trace;
use anyhow::{Result, bail};
use parking_lot::Mutex;
use pvblk_trace::blktrace::{Step, every, name};
use pvblk_trace::{Action, Event, Merge};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

struct Live<'a> {
    args: &'a LatencyArgs,
    analysis: Analysis,
    merge: Merge,
    /// Of the events that were analysed since the last results.
    events: u64,
    late: u64,
    dropped: u64,
    begin_ns: Option<u64>,
    end_ns: u64,
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
        merge: Merge::new(streams.len()),
        events: 0,
        late: 0,
        dropped: 0,
        begin_ns: None,
        end_ns: 0,
        interval,
        last: Instant::now(),
    });
    let count = AtomicU64::new(0);
    let end = trace::follow(streams, limit, &count, |server, step| {
        let mut live = live.lock();
        count.store(live.events, Ordering::Relaxed);
        live.step(server, step)
    });
    let mut live = live.into_inner();
    let rest = live.merge.rest();
    live.analyze(&rest);
    if live.begin_ns.is_some() {
        live.show()?;
    } else if interval.is_none() {
        end?;
        bail!("no requests in that time");
    }
    end
}

impl Live<'_> {
    fn step(&mut self, server: usize, step: Step) -> Result<()> {
        if let Step::Message(_, device, text) = &step {
            if let Some(name) = name(text) {
                self.analysis.name(*device, name);
            }
            if let Some(every) = every(text) {
                self.analysis.is_of_one_in(every);
            }
        }
        let due = step.event().map(|event| self.merge.push(server, event));
        self.analyze(&due.unwrap_or_default());
        if self.interval.is_some_and(|i| self.last.elapsed() >= i) {
            self.last = Instant::now();
            let due = self.merge.due();
            self.analyze(&due);
            self.show()?;
        }
        Ok(())
    }

    fn analyze(&mut self, events: &[Event]) {
        for event in events {
            self.dropped += event.lost();
            if event.action != Action::Gap {
                self.events += 1;
                self.begin_ns.get_or_insert(event.time_ns);
                self.end_ns = self.end_ns.max(event.time_ns);
            }
        }
        self.analysis.events(events);
    }

    /// Prints the results since the last call.
    fn show(&mut self) -> Result<()> {
        let late = self.merge.late();
        let heading = Heading {
            events: std::mem::take(&mut self.events),
            elapsed_ns: self.end_ns - self.begin_ns.take().unwrap_or(self.end_ns),
            late: late - std::mem::replace(&mut self.late, late),
            dropped: std::mem::take(&mut self.dropped),
            ..Heading::default()
        };
        self.analysis.take().show(&heading, self.args)?;
        print_or_end("\n")
    }
}
