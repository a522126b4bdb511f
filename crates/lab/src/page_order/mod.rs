//! `pvblk-lab page-order`: repeats the historical measurement of reads through a page cache under memory
//! pressure (seed 002), by the policy of the cache.
//!
//! All policies run in virtual time on modelled disks (see [`disks`]), so the same figures come out each
//! time. Stalls come from reclaim as it happens, and from nothing else. [`real`] measures on the real clock.

pub mod disks;
pub mod load;
pub mod policy;
pub mod real;
mod report;

use crate::machine::Machine;
use crate::threads::spread;
use anyhow::{Context, Result};
use disks::ServiceCost;
use load::CellRun;
use policy::{FrameOrder, Policy};
use pvblk_trace::latency::{Column, deviation};
use serde::Serialize;
use std::collections::BTreeMap;

/// Numbers of processes of the historical measurement, and 12.
pub const PROCESSES: [u32; 8] = [1, 2, 4, 8, 12, 16, 32, 64];
/// Processes of the cell whose latencies and counters are shown. With more, memory isn't enough for whole
/// requests under any policy.
const SHOWN: u32 = 12;
/// Pages of a cache that is just too small for 8 processes that read in order, or 12 to 16 that read at
/// random. Half of the pages were read often before, and aren't any more.
const TOO_SMALL: [u64; 2] = [720, 264];
/// Pages of the cache of a machine with 25 % more memory, where the cache is 64 % of the memory as in the
/// historical measurement (160 of 248,912 KiB).
const MORE: [u64; 2] = [1000, 368];
/// Pages of a cache of 256 MiB, for the check of the frames' order; its lists are refilled with 15
/// frames at a time.
const LARGE: u64 = 65536;

/// One cell of the tables.
#[derive(Clone, Debug)]
pub struct PageOrderCell {
    /// Number of reading processes.
    pub processes: u32,
    /// Reads go to random places instead of in order.
    pub random: bool,
    /// Policy of the cache; `None`: there is no cache.
    pub policy: Option<Policy>,
    /// Pages of the cache.
    pub pages: u64,
    /// Pages of the cache that were read often before.
    pub active_pages: u64,
}

#[derive(Clone, Debug)]
pub struct PageOrderOptions {
    /// Seconds of virtual time of each cell with up to 16 processes; with more, less.
    pub seconds: f64,
    /// Runs only the historical policies and the default.
    pub quick: bool,
    /// Number of cells that run at a time.
    pub threads: usize,
}

/// The result of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct PageOrderSample {
    /// Number of reading processes.
    pub processes: u32,
    /// Reads went to random places instead of in order.
    pub random: bool,
    /// Name of the policy; `direct` without the cache.
    pub policy: String,
    /// Pages of the cache.
    pub pages: u64,
    /// KiB a second of all processes together.
    pub kib_per_second: f64,
    /// CPU time of cache, model and driver, in nanoseconds for each KiB.
    pub cpu_ns_per_kib: f64,
    /// The cache's counters of the counted time.
    pub counters: BTreeMap<&'static str, u64>,
    /// Pages freed for each page looked at.
    pub effectiveness: Option<f64>,
    /// Share of scanned pages that requests scanned themselves.
    pub direct_share: Option<f64>,
    /// Share of pages read in advance that were used.
    pub readahead_accuracy: Option<f64>,
}

/// Latencies by hop of a better and a worse policy.
#[derive(Clone, Debug, Serialize)]
pub struct Breakdown {
    /// The name of the comparison.
    pub name: &'static str,
    /// Columns of the historical measurement.
    pub columns: Vec<Column>,
    /// Segments for each request with the better and with the worse policy.
    pub segments: [f64; 2],
}

/// The modelled experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct PageOrderResult {
    pub machine: Machine,
    /// All cells, in the order in which they were made.
    pub samples: Vec<PageOrderSample>,
    /// Random and sequential reads by the default and by the historical policy.
    pub breakdowns: Vec<Breakdown>,
    /// Frames in order and reversed, on disks that merge segments.
    pub merging: Breakdown,
}

impl PageOrderSample {
    fn of(cell: &PageOrderCell, run: &CellRun) -> PageOrderSample {
        let c = &run.counters;
        PageOrderSample {
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

fn cells(options: &PageOrderOptions) -> Vec<PageOrderCell> {
    let mut cells = Vec::new();
    // Cells that take longest come first.
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
                cells.extend(policies.into_iter().map(|policy| PageOrderCell {
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

fn breakdown(
    name: &'static str,
    cells: [PageOrderCell; 2],
    seconds: f64,
    cost: ServiceCost,
) -> Result<Breakdown> {
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
    progress(&format!("{} cells", cells.len()));
    let samples = spread(options.threads, cells.len(), |at| {
        let cell = &cells[at];
        if at.is_multiple_of(48) && at > 0 {
            progress(&format!("{at} of {} cells", cells.len()));
        }
        let few = f64::from(16.0_f32.min(cell.processes as f32)) / f64::from(cell.processes);
        let run = load::run(cell, options.seconds * few, false, ServiceCost::PLAIN)?;
        Ok(PageOrderSample::of(cell, &run))
    })?;
    progress("latencies");
    let pair = |random: bool| {
        let at = usize::from(random);
        [Policy::DEFAULT, Policy::HISTORY].map(|policy| PageOrderCell {
            processes: SHOWN,
            random,
            policy: Some(policy),
            pages: TOO_SMALL[at],
            active_pages: TOO_SMALL[at] / 2,
        })
    };
    let plain = |name, random| breakdown(name, pair(random), options.seconds, ServiceCost::PLAIN);
    progress("disks that merge");
    let orders = [FrameOrder::Reversed, FrameOrder::Kept].map(|order| PageOrderCell {
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
            ServiceCost::MERGING,
        )?,
        samples,
    })
}
