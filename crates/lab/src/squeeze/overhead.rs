//! The cost of keeping no free pages, on a disk in memory: the second measurement of seed 003.
//!
//! Server and client share one CPU: with two, a request in flight alone takes as long as the CPUs take to
//! wake each other, twice as long in some runs as in others. So the rate is that of the CPU time of both.

use super::disks::{Control, Pools};
use crate::child::Server;
use crate::driver::{Driver, DriverLoad};
use crate::stats::{Comparison, Confidence, PairRatio};
use crate::threads::joined;
use anyhow::{Context, Result};
use pvblk_block::{BlockDevice, Op};
use pvblk_client::nbd::{NbdClient, NbdClientConfig, NbdUri};
use pvblk_protocol::nbd::NbdAddr;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a request, as in the historical measurement.
const BLOCK: usize = 4096;
/// The limits in pages of the historical measurement, and average and standard deviation of its
/// rates in MB/s.
pub const SEED: [(usize, f64, f64); 2] = [(0, 419.4, 2.51), (1024, 417.8, 4.44)];

/// A shape of load, and the floor of the pools while it runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OverheadShape {
    /// Requests in flight.
    pub depth: u32,
    /// The floor of the whole process's pools, in pages.
    pub floor_pages: usize,
}

/// The samples of one shape, interleaved.
#[derive(Clone, Debug, Serialize)]
pub struct Overhead {
    pub shape: OverheadShape,
    /// MB/s with a limit of 0.
    pub none: Vec<f64>,
    /// MB/s with a limit of 1024 pages.
    pub full: Vec<f64>,
    /// Pages moved and pages allocated with a limit of 0.
    pub none_pages: (u64, u64),
    /// Pages moved and pages allocated with a limit of 1024.
    pub full_pages: (u64, u64),
}

impl Overhead {
    /// Ratio of the rate with limit 0 to that with limit 1024, run by run.
    pub fn ratio(&self) -> Result<PairRatio> {
        PairRatio::of(&self.none, &self.full, Confidence::default())
    }

    /// Compares limit 0 with limit 1024, which is the reference.
    pub fn compare(&self) -> Result<Comparison> {
        Comparison::of(&self.full, &self.none, Confidence::default())
    }
}

/// Writes `count` blocks in order and flushes, `runs` times with each limit.
pub fn run(dir: &Path, shapes: &[OverheadShape], count: u64, runs: usize) -> Result<Vec<Overhead>> {
    let cpus = pvblk_sys::cpu::allowed();
    let one = *cpus.last().context("no CPU")?;
    // The server and all threads that this process starts from here on inherit the CPU.
    std::thread::scope(|scope| {
        let body = || -> Result<Vec<Overhead>> {
            pvblk_sys::cpu::pin(one).context("staying on one CPU")?;
            run_here(dir, shapes, count, runs)
        };
        joined(scope.spawn(body))
    })
}

fn run_here(
    dir: &Path,
    shapes: &[OverheadShape],
    count: u64,
    runs: usize,
) -> Result<Vec<Overhead>> {
    let (nbd, control) = (dir.join("nbd.sock"), dir.join("ctl"));
    let bytes = count * BLOCK as u64;
    let server = Server::start(
        &[
            "serve".into(),
            "--no-pressure".into(),
            "--nbd".into(),
            format!("unix:{}", nbd.display()),
            "--control".into(),
            format!("unix:{}", control.display()),
            "--disk".into(),
            format!("a=mem:{bytes}"),
        ],
        None,
    )?;
    let control = Control::at(control);
    let uri = NbdUri::new(NbdAddr::Unix(nbd), "a");
    let client: Arc<dyn BlockDevice> =
        Arc::new(NbdClient::connect(&uri, NbdClientConfig::default())?);
    let depth = shapes.iter().map(|s| s.depth).max().unwrap_or(1);
    let mut driver = Driver::open(&client, 0, depth, BLOCK)?;
    // The disk's own pages are allocated before the measurement.
    write(&mut driver, depth, count)?;
    let mut all = Vec::new();
    for &shape in shapes {
        let mut result = Overhead {
            shape,
            none: Vec::new(),
            full: Vec::new(),
            none_pages: (0, 0),
            full_pages: (0, 0),
        };
        // This is the shape of the historical measurement. It shows no effect, which takes the most
        // runs to prove.
        let runs = if shape.depth == 1 && shape.floor_pages > 0 {
            3 * runs
        } else {
            runs
        };
        for run in 0..runs {
            // Each limit is the first of its pair as often as the other.
            for limit in if run % 2 == 0 { [0, 1024] } else { [1024, 0] } {
                let (rate, pages) = sample(&mut driver, &control, shape, limit, count)?;
                let (rates, of) = match limit {
                    0 => (&mut result.none, &mut result.none_pages),
                    _ => (&mut result.full, &mut result.full_pages),
                };
                rates.push(rate);
                *of = pages;
            }
        }
        all.push(result);
    }
    drop(driver);
    server.stop()?;
    Ok(all)
}

fn sample(
    driver: &mut Driver,
    control: &Control,
    shape: OverheadShape,
    limit: usize,
    count: u64,
) -> Result<(f64, (u64, u64))> {
    let floor = shape.floor_pages;
    control.ask(&format!(
        r#"{{"set":{{"max_buffer_pages":{limit},"buffer_floor_pages":{floor}}}}}"#
    ))?;
    control.ask(r#"{"memory":"squeeze"}"#)?;
    // This waits until the squeeze itself is over.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let (before, _) = control.pools()?;
    let rate = write(driver, shape.depth, count)?;
    let (after, _) = control.pools()?;
    let of = |f: fn(&Pools) -> u64| f(&after) - f(&before);
    Ok((rate, (of(|p| p.taken_pages), of(|p| p.allocated_pages))))
}

/// MB/s of `count` writes and a flush.
fn write(driver: &mut Driver, depth: u32, count: u64) -> Result<f64> {
    let load = |op, count| DriverLoad {
        op,
        block: BLOCK,
        depth,
        count,
        span: 0,
        sleep: true,
    };
    let mut block = 0;
    let place = || {
        block += 1;
        block - 1
    };
    let start = Instant::now();
    driver.run(&load(Op::Write, count), place, |_, _| {})?;
    driver.flush()?;
    Ok((count * BLOCK as u64) as f64 / 1e6 / start.elapsed().as_secs_f64())
}
