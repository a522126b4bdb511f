//! `pvblk trace --perfetto`: timelines, of running servers or from captures.

use super::{TraceArgs, follow, open, seconds};
use crate::latency;
use anyhow::{Context, Result};
use parking_lot::Mutex;
use pvblk_trace::Sorter;
use pvblk_trace::blktrace::{Step, gap, name};
use pvblk_trace::perfetto::{Drawn, Timeline};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Time in nanoseconds for which an event of one server waits for older ones of the others.
const HOLD_BACK_NS: u64 = 200_000_000;
/// Fewest waiting events that are worth sorting.
const LEAST: usize = 1 << 14;

type Output = BufWriter<Box<dyn Write + Send>>;

fn output(file: &Path) -> Result<Output> {
    let to: Box<dyn Write + Send> = match file.as_os_str() == "-" {
        true => Box::new(std::io::stdout()),
        false => Box::new(File::create(file).with_context(|| shown(file))?),
    };
    Ok(BufWriter::with_capacity(1 << 16, to))
}

fn shown(file: &Path) -> String {
    format!("writing {}", file.display())
}

/// Draws the timeline of captures that were made before.
pub(super) fn from_captures(args: &TraceArgs, file: &Path) -> Result<()> {
    let capture = latency::read_all(&args.from, &args.guest)?;
    let mut timeline = Timeline::new(output(file)?);
    for (device, name) in &capture.devices {
        timeline.name(*device, name);
    }
    for event in &capture.events {
        timeline.event(event).with_context(|| shown(file))?;
    }
    for note in &capture.notes {
        eprintln!("note: {note}");
    }
    let (_, drawn) = timeline.finish().with_context(|| shown(file))?;
    told(file, drawn, capture.missing);
    Ok(())
}

fn told(file: &Path, drawn: Drawn, missing: u64) {
    let place = match file.as_os_str() == "-" {
        true => "standard output".to_owned(),
        false => format!("{}; open it on https://ui.perfetto.dev", file.display()),
    };
    // Events that are missing from a file are among the lost.
    let lost = match drawn.lost.max(missing) {
        0 => String::new(),
        n => format!("; {n} events were lost, and requests of that time are left out"),
    };
    eprintln!("{} requests on all layers in {place}{lost}", drawn.requests);
}

struct Live {
    timeline: Timeline<Output>,
    sorter: Sorter,
    newest_ns: u64,
    /// Number of waiting events at which they are sorted.
    enough: usize,
    events: u64,
}

/// From running servers.
pub(super) fn from_servers(args: &TraceArgs, file: &Path) -> Result<()> {
    let limit = args.seconds.map(|s| seconds("--seconds", s)).transpose()?;
    let streams = open(&args.servers, args.every)?;
    let live = Mutex::new(Live {
        timeline: Timeline::new(output(file)?),
        sorter: Sorter::default(),
        newest_ns: 0,
        enough: LEAST,
        events: 0,
    });
    let count = AtomicU64::new(0);
    let end = follow(streams, limit, &count, |_, step| {
        let mut live = live.lock();
        live.step(step).with_context(|| shown(file))?;
        count.store(live.events, Ordering::Relaxed);
        Ok(())
    });
    let mut live = live.into_inner();
    live.draw(u64::MAX).with_context(|| shown(file))?;
    let (_, drawn) = live.timeline.finish().with_context(|| shown(file))?;
    told(file, drawn, 0);
    match live.sorter.late() {
        0 => {}
        n => eprintln!("warning: {n} events came too late to be sorted: slices may be wrong"),
    }
    end
}

impl Live {
    fn step(&mut self, step: Step) -> std::io::Result<()> {
        match step {
            Step::Event(event, _) => {
                self.events += 1;
                self.newest_ns = self.newest_ns.max(event.time_ns);
                self.sorter.input().push(event);
                if self.sorter.input().len() >= self.enough {
                    self.draw(self.newest_ns.saturating_sub(HOLD_BACK_NS))?;
                }
            }
            Step::Message(time_ns, device, text) => {
                if let Some(name) = name(&text) {
                    self.timeline.name(device, name);
                }
                self.sorter.input().extend(gap(time_ns, device, &text));
            }
            _ => {}
        }
        Ok(())
    }

    fn draw(&mut self, until_ns: u64) -> std::io::Result<()> {
        for event in self.sorter.take_until(until_ns) {
            self.timeline.event(&event)?;
        }
        // Sorting looks at all waiting events, so it isn't done for each new one.
        self.enough = 2 * self.sorter.input().len() + LEAST;
        Ok(())
    }
}
