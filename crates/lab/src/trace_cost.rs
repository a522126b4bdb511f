//! Cost of recording a trace: both ends of a disk in memory, in one thread, while a recorder records and
//! while it doesn't.

use crate::instructions::BothEnds;
use crate::machine::{Machine, cpu_ns};
use crate::path::median;
use crate::stats::{Confidence, PairRatio};
use crate::verdict;
use anyhow::{Context, Result, ensure};
use pvblk_block::trace::Tracing;
use pvblk_trace::{Feed, Next, Recorder};
use rustix::time::ClockId;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

/// Requests of a burst, whose events fit into the rings.
const BURST: usize = 2000;
/// Pause between two bursts.
const PAUSE: Duration = Duration::from_millis(12);

/// One round of three samples: not recording, recording, not recording.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    /// CPU time of the path's thread for a request in nanoseconds, in the two samples without
    /// recording.
    pub off_ns: [f64; 2],
    /// CPU time of the path's thread for a request in nanoseconds, while a recorder records.
    pub on_ns: f64,
    /// CPU time of the whole process for a request in nanoseconds, while a recorder records;
    /// emptying the rings and sorting the events are in it.
    pub process_ns: f64,
    /// Events of a request.
    pub events: f64,
    /// Events that found their ring full.
    pub dropped: u64,
}

impl Round {
    /// The part by which recording makes the path's thread take longer.
    fn share(&self) -> f64 {
        let off_ns = (self.off_ns[0] + self.off_ns[1]) / 2.0;
        self.on_ns / off_ns - 1.0
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct TraceCost {
    pub machine: Machine,
    /// Requests of each sample.
    pub requests: usize,
    /// Requests in flight.
    pub depth: u32,
    /// One request of so many is recorded.
    pub every: u32,
    /// In the order in which they were run.
    pub rounds: Vec<Round>,
}

/// Runs rounds of 4 KiB random reads.
pub fn run(
    requests: usize,
    depth: u32,
    rounds: usize,
    every: u32,
    progress: &dyn Fn(&str),
) -> Result<TraceCost> {
    ensure!(requests > 0 && depth > 0, "there must be requests");
    ensure!(rounds >= 3, "at least 3 rounds make an interval");
    let recorder = Recorder::idle(0);
    let feed = Feed::new(recorder.clone());
    let mut ends = BothEnds::new(depth, &Tracing::to(Arc::new(recorder), "d"))?;
    ends.run(requests);
    let clocks = [ClockId::ThreadCPUTime, ClockId::ProcessCPUTime];
    let sample = |ends: &mut BothEnds| {
        let before = clocks.map(cpu_ns);
        let mut left = requests;
        while left > 0 {
            let burst = left.min(BURST);
            ends.run(burst);
            left -= burst;
            // The pause lets the rings be emptied in time: an event that isn't recorded costs less.
            std::thread::sleep(PAUSE);
        }
        let each = |i: usize| (cpu_ns(clocks[i]) - before[i]) / requests as f64;
        [each(0), each(1)]
    };
    let mut all = Vec::new();
    for round in 0..rounds {
        progress(&format!("round {} of {rounds}", round + 1));
        let [before, _] = sample(&mut ends);
        let subscription = feed.subscribe_every(every).context("starting to record")?;
        let ([on, process], events) = std::thread::scope(|scope| {
            let count = scope.spawn(|| {
                let mut events = 0;
                loop {
                    match subscription.next(Duration::from_secs(1)) {
                        Next::Events(batch) => events += batch.len(),
                        Next::Nothing => {}
                        Next::End => return events,
                    }
                }
            });
            let sample = sample(&mut ends);
            subscription.finish();
            (sample, count.join().unwrap_or(0))
        });
        let dropped = feed.collector().drops().iter().map(|d| d.dropped).sum();
        drop(subscription);
        // The hooks are off when the recorder has its rings back.
        while pvblk_block::trace::is_on() {
            ends.run(1);
        }
        let [after, _] = sample(&mut ends);
        all.push(Round {
            off_ns: [before, after],
            on_ns: on,
            process_ns: process,
            events: (events as f64 + dropped as f64) / requests as f64,
            dropped,
        });
    }
    Ok(TraceCost {
        machine: Machine::here(),
        requests,
        depth,
        every,
        rounds: all,
    })
}

impl TraceCost {
    pub fn text(&self) -> Result<String> {
        let of = |f: &dyn Fn(&Round) -> f64| -> Vec<f64> { self.rounds.iter().map(f).collect() };
        let off = of(&|r| (r.off_ns[0] + r.off_ns[1]) / 2.0);
        let path = of(&|r| (r.on_ns - (r.off_ns[0] + r.off_ns[1]) / 2.0) / r.events);
        let whole = of(&|r| (r.process_ns - (r.off_ns[0] + r.off_ns[1]) / 2.0) / r.events);
        let control = PairRatio::of(
            &of(&|r| r.off_ns[0]),
            &of(&|r| r.off_ns[1]),
            Confidence::default(),
        )?;
        let range = |values: &[f64]| {
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let most = values.iter().copied().fold(0.0, f64::max);
            format!("{:.1} ({least:.1} to {most:.1})", median(values))
        };
        let shares: Vec<f64> = self.rounds.iter().map(Round::share).collect();
        let mut table = verdict::table(&[
            "depth",
            "one in",
            "ns a request",
            "events",
            "of the path",
            "ns an event",
            "with collecting",
            "dropped",
        ]);
        table.add_row([
            self.depth.to_string(),
            self.every.to_string(),
            range(&off),
            format!("{:.2}", median(&of(&|r| r.events))),
            format!("{:+.1} %", median(&shares) * 100.0),
            range(&path),
            range(&whole),
            self.rounds
                .iter()
                .map(|r| r.dropped)
                .sum::<u64>()
                .to_string(),
        ]);
        Ok(format!("{table}\nA/A, nobody recording: {control}\n"))
    }
}
