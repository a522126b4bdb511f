//! `pvblk-lab page-order`: seed 002's tables. Processes that read through a page cache under memory pressure, by what the cache does then.
//!
//! The matrix of policies is in virtual time, on modelled disks (see [`disks`]), so the same figures come out each time. Stalls come from reclaim as
//! it happens, and from nothing else. [`real`] has what is measured on the real clock.

pub mod disks;
pub mod load;
pub mod policy;
pub mod real;
mod report;

use crate::machine::Machine;
use crate::threads::joined;
use anyhow::{Context, Result};
use disks::Cost;
use load::Run;
use parking_lot::Mutex;
use policy::{FrameOrder, Policy};
use pvblk_trace::latency::{Column, deviation};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Processes, as in the seed, and 12.
pub const PROCESSES: [u32; 8] = [1, 2, 4, 8, 12, 16, 32, 64];
/// The cell whose latencies and counters are shown: with more processes, memory doesn't do for whole requests whatever the policy.
const SHOWN: u32 = 12;
/// Pages of a cache that is just too small for 8 processes that read in order, or 12 to 16 that read anywhere; the half of them was read often before, and
/// isn't any more.
const TOO_SMALL: [u64; 2] = [720, 264];
/// A cache that is 64 % of the memory, as the seed's was (160 of 248,912 KiB), of a machine with 25 % more.
const MORE: [u64; 2] = [1000, 368];
/// Pages of the cache where frames' order is looked at: 256 MiB, whose lists are refilled by 15.
const LARGE: u64 = 65536;

/// One measurement.
#[derive(Clone, Debug)]
pub struct Cell {
    /// How many read.
    pub processes: u32,
    /// Anywhere, or in order.
    pub random: bool,
    /// `None`: without the cache.
    pub policy: Option<Policy>,
    /// Pages of the cache.
    pub pages: u64,
    /// Of those, pages that were read often before.
    pub active_pages: u64,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct PageOrderOptions {
    /// Seconds of virtual time of each cell with up to 16 processes; with more, less.
    pub seconds: f64,
    /// Only the policies of history and the default.
    pub quick: bool,
    /// Cells at a time.
    pub threads: usize,
}

/// What came of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// How many read.
    pub processes: u32,
    /// Anywhere, or in order.
    pub random: bool,
    /// `direct` without the cache.
    pub policy: String,
    /// Pages of the cache.
    pub pages: u64,
    /// KiB a second of all together.
    pub kib_per_second: f64,
    /// CPU time of cache, model and driver, in nanoseconds for each KiB.
    pub cpu_ns_per_kib: f64,
    /// The cache's counters of the counted time.
    pub counters: BTreeMap<&'static str, u64>,
    /// Pages freed for each page looked at.
    pub effectiveness: Option<f64>,
    /// Share of looks that requests took themselves.
    pub direct_share: Option<f64>,
    /// Share of pages read in advance that were used.
    pub readahead_accuracy: Option<f64>,
}

/// Latencies of good and bad.
#[derive(Clone, Debug, Serialize)]
pub struct Breakdown {
    /// What was compared.
    pub name: &'static str,
    /// The seed's columns.
    pub columns: Vec<Column>,
    /// Segments for each request, good and bad.
    pub segments: [f64; 2],
}

/// The modelled experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct PageOrderResult {
    /// Where.
    pub machine: Machine,
    /// Every cell, in the order of its making.
    pub samples: Vec<Sample>,
    /// The seed's line: random and sequential reads by default and as in history.
    pub breakdowns: Vec<Breakdown>,
    /// Frames in order and reversed, on disks that merge.
    pub merging: Breakdown,
}

impl Sample {
    fn of(cell: &Cell, run: &Run) -> Sample {
        let c = &run.counters;
        Sample {
            processes: cell.processes,
            random: cell.random,
            policy: cell.policy.map_or("direct".into(), |p| p.name()),
            pages: cell.pages,
            kib_per_second: run.kib_per_second,
            cpu_ns_per_kib: run.cpu_ns_per_kib,
            counters: c.all().into_iter().collect(),
            effectiveness: c.effectiveness(),
            direct_share: c.direct_share(),
            readahead_accuracy: c.readahead_accuracy(),
        }
    }
}

fn cells(options: &PageOrderOptions) -> Vec<Cell> {
    let mut cells = Vec::new();
    // Those that take longest first.
    for processes in PROCESSES.into_iter().rev() {
        for random in [false, true] {
            let at = usize::from(random);
            for pages in [TOO_SMALL[at], MORE[at]] {
                let mut policies: Vec<_> = match pages == TOO_SMALL[at] {
                    true => Policy::all(options.quick),
                    false => vec![Policy::HISTORY, Policy::DEFAULT],
                }
                .into_iter()
                .map(Some)
                .collect();
                if pages == TOO_SMALL[at] {
                    policies.push(None);
                }
                cells.extend(policies.into_iter().map(|policy| Cell {
                    processes,
                    random,
                    policy,
                    pages,
                    active_pages: TOO_SMALL[at] / 2,
                }));
            }
        }
    }
    cells
}

fn breakdown(name: &'static str, cells: [Cell; 2], seconds: f64, cost: Cost) -> Result<Breakdown> {
    let mut reports = Vec::new();
    let mut segments = [0.0; 2];
    for (cell, segments) in cells.iter().zip(&mut segments) {
        let run = load::run(cell, seconds, true, cost)?;
        *segments = run.counters.segments_per_read().unwrap_or(0.0);
        reports.push(run.hops.context("it was traced")?);
    }
    let rows = deviation(&reports[0], &reports[1]);
    let row = rows.into_iter().next().context("one device")?;
    Ok(Breakdown {
        name,
        columns: row.columns,
        segments,
    })
}

/// Runs the experiment; `progress` is told what is being measured.
pub fn run(
    options: &PageOrderOptions,
    progress: &(dyn Fn(&str) + Sync),
) -> Result<PageOrderResult> {
    let cells = cells(options);
    let next = AtomicUsize::new(0);
    let results = Mutex::new(vec![None; cells.len()]);
    progress(&format!("{} cells", cells.len()));
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(cell) = cells.get(at) else {
                    return Ok(());
                };
                if at.is_multiple_of(48) && at > 0 {
                    progress(&format!("{at} of {} cells", cells.len()));
                }
                let few =
                    f64::from(16.0_f32.min(cell.processes as f32)) / f64::from(cell.processes);
                let run = load::run(cell, options.seconds * few, false, Cost::PLAIN)?;
                results.lock()[at] = Some(Sample::of(cell, &run));
            }
        };
        let threads: Vec<_> = (0..options.threads.max(1))
            .map(|_| scope.spawn(work))
            .collect();
        threads.into_iter().try_for_each(joined)
    })?;
    progress("latencies");
    let pair = |random: bool| {
        let at = usize::from(random);
        [Policy::DEFAULT, Policy::HISTORY].map(|policy| Cell {
            processes: SHOWN,
            random,
            policy: Some(policy),
            pages: TOO_SMALL[at],
            active_pages: TOO_SMALL[at] / 2,
        })
    };
    let plain = |name, random| breakdown(name, pair(random), options.seconds, Cost::PLAIN);
    progress("disks that merge");
    let orders = [FrameOrder::Reversed, FrameOrder::Kept].map(|order| Cell {
        processes: 1,
        random: false,
        policy: Some(Policy {
            order,
            ..Policy::DEFAULT
        }),
        pages: LARGE,
        active_pages: 0,
    });
    Ok(PageOrderResult {
        machine: Machine::here(),
        breakdowns: vec![
            plain("random reads", true)?,
            plain("sequential reads", false)?,
        ],
        merging: breakdown(
            "frames reversed and kept",
            orders,
            options.seconds,
            Cost::MERGING,
        )?,
        samples: results.into_inner().into_iter().flatten().collect(),
    })
}
