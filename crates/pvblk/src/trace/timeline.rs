//! `pvblk trace --perfetto`: timelines, of running servers or from captures.

use super::{TraceArgs, follow, open, seconds};
use crate::latency;
use crate::output::tell;
use anyhow::{Context, Result};
use parking_lot::Mutex;
use pvblk_trace::blktrace::{Step, name};
use pvblk_trace::perfetto::{Drawn, Timeline};
use pvblk_trace::{Event, Merge};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

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
        tell!("note: {note}");
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
    tell!("{} requests on all layers in {place}{lost}", drawn.requests);
}

struct Live {
    timeline: Timeline<Output>,
    merge: Merge,
    events: u64,
}

/// From running servers.
pub(super) fn from_servers(args: &TraceArgs, file: &Path) -> Result<()> {
    let limit = args.seconds.map(|s| seconds("--seconds", s)).transpose()?;
    let streams = open(&args.servers, args.every)?;
    let live = Mutex::new(Live {
        timeline: Timeline::new(output(file)?),
        merge: Merge::new(streams.len()),
        events: 0,
    });
    let count = AtomicU64::new(0);
    let end = follow(streams, limit, &count, |server, step| {
        let mut live = live.lock();
        live.step(server, step).with_context(|| shown(file))?;
        count.store(live.events, Ordering::Relaxed);
        Ok(())
    });
    let mut live = live.into_inner();
    let rest = live.merge.rest();
    live.draw(&rest).with_context(|| shown(file))?;
    let (_, drawn) = live.timeline.finish().with_context(|| shown(file))?;
    told(file, drawn, 0);
    match live.merge.late() {
        0 => {}
        n => tell!("warning: {n} events came too late to be sorted: slices may be wrong"),
    }
    end
}

impl Live {
    fn step(&mut self, server: usize, step: Step) -> std::io::Result<()> {
        self.events += u64::from(matches!(step, Step::Event(..)));
        if let Step::Message(_, device, text) = &step
            && let Some(name) = name(text)
        {
            self.timeline.name(*device, name);
        }
        let due = step.event().map(|event| self.merge.push(server, event));
        self.draw(&due.unwrap_or_default())
    }

    fn draw(&mut self, events: &[Event]) -> std::io::Result<()> {
        events.iter().try_for_each(|e| self.timeline.event(e))
    }
}
