//! `pvblk-lab rings`: compares one ring of 1 page with one of 8, on a modelled SSD, as the
//! historical measurement of ring sizes did (seed 000).
//!
//! Two processes: the front ends and their threads here, the server with its modelled devices there. Each variant has a
//! device of its own; rounds are interleaved, and the 8-page ring is measured twice in each: its ratio to itself is the control.
//! On a small machine the device's clock runs slower by a stated factor; figures are shown as those of the full speed.
//!
//! Sequential reads also run with the elevator's policy (it merges requests that wait for the ring), which no
//! front end of ours uses: it shows the cause of that measurement's anomalies. In [`virtual_time`] the same loads run without a server,
//! and give the same figures on any machine.

pub mod elevator;
mod report;
pub mod virtual_time;

use crate::bed::{Bed, Lane, Load, Pattern, Sample, Wishes, memory_bytes, modelled_ssd};
use crate::machine::Machine;
use anyhow::Result;
use elevator::WhileWaiting;
use pvblk_client::rings::{InStream, MergePolicy};
use serde::Serialize;
use std::path::Path;

#[derive(Clone, Debug)]
pub struct RingsOptions {
    /// Factor by which the device's clock runs slower.
    pub slower: f64,
    pub runs: usize,
    /// Seconds of each sample.
    pub seconds: f64,
    /// Measures only a few points of each table.
    pub quick: bool,
}

/// All samples of one load, in the order of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct RingsPoint {
    pub load: Load,
    /// Samples on a ring of one page.
    pub one_page: Vec<Sample>,
    /// Samples on a ring of eight pages.
    pub eight_pages: Vec<Sample>,
    /// Samples on another ring of eight pages: the control.
    pub eight_again: Vec<Sample>,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct RingsResult {
    pub machine: Machine,
    /// The modelled device, at full speed.
    pub device: String,
    /// Factor by which the device's clock ran slower.
    pub slower: f64,
    /// 4 KiB random reads and then writes, by threads.
    pub random: Vec<RingsPoint>,
    /// Random reads, by block size.
    pub sizes: Vec<RingsPoint>,
    /// Sequential reads, by block size, in two shapes.
    pub sequential: Vec<RingsPoint>,
    /// Sequential reads, submitted in batches.
    pub batched: Vec<RingsPoint>,
    /// Sequential reads, submitted one by one, with the elevator's policy; there is no control.
    pub elevator: Vec<RingsPoint>,
}

const THREADS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Threads and depth of the two sequential shapes of the historical measurement (seed 000).
const SHAPES: [(u32, u32); 2] = [(8, 32), (32, 8)];

impl RingsOptions {
    fn sizes(&self) -> Vec<u32> {
        if self.quick {
            vec![512, 4096, 16384, 131_072]
        } else {
            (9..=22).map(|shift| 1 << shift).collect()
        }
    }

    fn load(&self, threads: u32, depth: u32, block: u32, pattern: Pattern) -> Load {
        Load {
            threads,
            depth,
            block,
            pattern,
            batched: false,
            seconds: self.seconds,
        }
    }

    fn random(&self) -> Vec<Load> {
        let threads: &[u32] = if self.quick { &[8, 16, 64] } else { &THREADS };
        let mut loads = Vec::new();
        for pattern in [Pattern::RandomRead, Pattern::RandomWrite] {
            loads.extend(threads.iter().map(|&t| self.load(t, 4, 4096, pattern)));
        }
        loads
    }

    fn by_size(&self) -> Vec<Load> {
        let load = |&b: &u32| self.load(32, 4, b, Pattern::RandomRead);
        self.sizes().iter().map(load).collect()
    }

    fn sequential(&self, batched: bool) -> Vec<Load> {
        let mut loads = Vec::new();
        for (threads, depth) in SHAPES {
            let load = |&b: &u32| Load {
                batched,
                ..self.load(threads, depth, b, Pattern::SequentialRead)
            };
            loads.extend(self.sizes().iter().map(load));
        }
        loads
    }
}

/// Measures `loads` on three front ends, interleaved.
fn sweep<M: MergePolicy>(
    bed: &Bed,
    loads: &[Load],
    runs: usize,
    progress: &dyn Fn(&str),
) -> Result<Vec<RingsPoint>> {
    let control = !M::JOINS_WAITING;
    let connect = |disk: &str, ring_pages| -> Result<Lane<M>> {
        bed.connect(
            disk,
            &Wishes {
                queues: 1,
                ring_pages,
                memory_bytes: memory_bytes(loads, 1),
            },
        )
    };
    let one = connect("one", 1)?;
    let eight = connect("eight", 8)?;
    let again = connect("again", 8)?;
    let mut points: Vec<RingsPoint> = loads
        .iter()
        .map(|load| RingsPoint {
            load: load.clone(),
            one_page: Vec::new(),
            eight_pages: Vec::new(),
            eight_again: Vec::new(),
        })
        .collect();
    for run in 0..runs {
        for point in &mut points {
            let load = &point.load;
            progress(&format!(
                "round {} of {runs}: {:?}, {} threads x {}, {} bytes",
                run + 1,
                load.pattern,
                load.threads,
                load.depth,
                load.block
            ));
            // The order turns, so that each front end is the first at times.
            for step in 0..3 {
                match (run + step) % 3 {
                    0 => point.one_page.push(one.measure(load)?),
                    1 => point.eight_pages.push(eight.measure(load)?),
                    _ if control => point.eight_again.push(again.measure(load)?),
                    _ => {}
                }
            }
        }
    }
    Ok(points)
}

/// Runs the experiment, with its socket in `dir`; `progress` is told what is being measured.
pub fn run(options: &RingsOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<RingsResult> {
    let volume = modelled_ssd(options.slower);
    let disks = ["one", "eight", "again"].map(|name| (name.to_owned(), volume.clone()));
    let bed = Bed::start(dir, &disks, 1)?;
    let plain = |loads: Vec<Load>| sweep::<InStream>(&bed, &loads, options.runs, progress);
    Ok(RingsResult {
        machine: Machine::here(),
        device: modelled_ssd(1.0),
        slower: options.slower,
        random: plain(options.random())?,
        sizes: plain(options.by_size())?,
        sequential: plain(options.sequential(false))?,
        batched: plain(options.sequential(true))?,
        elevator: sweep::<WhileWaiting>(&bed, &options.sequential(false), 1, progress)?,
    })
}
