//! Pages swapped while disks work and another process needs memory: the first measurement of seed
//! 003.

use super::bystander::Bystander;
use super::disks::Disks;
use super::group::{Group, Swap, major_faults, swapped};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pages swapped in and out of the historical measurement: without the squeeze, and with it by its
/// duration in ms.
pub const SEED: [(Option<u64>, u64, u64); 4] = [
    (None, 76_672, 185_799),
    (Some(1), 852, 6_424),
    (Some(10), 212, 3_325),
    (Some(100), 203, 3_340),
];

/// Sizes of the experiment.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sizes {
    /// Number of disks.
    pub disks: usize,
    /// Bytes in flight of a disk at most, which its pool keeps.
    pub pool_bytes: u64,
    /// Bytes that the bystander writes to again and again.
    pub bystander_bytes: u64,
    /// The group's limit, with the server, its pools and the bystander in it.
    pub limit_bytes: u64,
    /// Length of a run in seconds.
    pub seconds: f64,
}

/// Figures of one run.
#[derive(Clone, Debug, Serialize)]
pub struct SwapRun {
    /// The squeeze's duration; `None`: the server doesn't listen for pressure.
    pub duration_ms: Option<u64>,
    /// Pages swapped in, by the whole machine.
    pub pswpin: u64,
    /// Pages swapped out.
    pub pswpout: u64,
    /// Major faults of server and bystander together.
    pub major_faults: u64,
    /// Bursts a second.
    pub bursts_per_second: f64,
    /// 99th percentile of the bursts' times, ms.
    pub burst_p99_ms: f64,
    /// Pages that the bystander wrote to.
    pub bystander_pages: u64,
    /// Servers that the kernel killed before this run, which was made again: the group can run out of memory
    /// although there is swap.
    pub killed: u32,
    /// Number of squeezes.
    pub squeezes: u64,
    /// Pages that the squeezes gave back.
    pub squeezed_pages: u64,
    /// Seconds since the load began, and MiB of all pools at that time.
    pub pools: Vec<(f64, f64)>,
}

/// Runs of one kind that may end by a kill.
const TRIES: u32 = 5;

/// Makes runs until one ends without a kill of the server.
pub fn run_until_one_survives(
    dir: &Path,
    sizes: &Sizes,
    duration_ms: Option<u64>,
    seed: u64,
    progress: &dyn Fn(&str),
) -> Result<SwapRun> {
    for killed in 0..TRIES {
        let group = Group::new("squeeze")?;
        match run(dir, &group, sizes, duration_ms, seed) {
            Ok(run) => return Ok(SwapRun { killed, ..run }),
            Err(e) if group.kills() == 0 => return Err(e),
            Err(_) => progress("the kernel killed the server; once more"),
        }
    }
    bail!("the kernel killed the server {TRIES} times")
}

/// Makes one run. The seed decides the order of the disks.
fn run(
    dir: &Path,
    group: &Group,
    sizes: &Sizes,
    duration_ms: Option<u64>,
    seed: u64,
) -> Result<SwapRun> {
    let flags = match duration_ms {
        None => vec!["--no-pressure".to_owned()],
        Some(ms) => vec!["--buffer-squeeze-duration-ms".into(), ms.to_string()],
    };
    let pool_bytes = sizes.pool_bytes as usize;
    let mut disks = Disks::start(dir, group, sizes.disks, pool_bytes, &flags)?;
    let mut bystander = Bystander::start(group)?;
    let _swap = Swap::on(dir, 2 << 30)?;
    // The disks come first, so their pools are full when the bystander starts.
    disks.fill()?;
    group.limit(Some(sizes.limit_bytes))?;
    let before = swapped()?;
    let faults = |d: &Disks, b: &Bystander| major_faults(d.server.pid()) + major_faults(b.pid());
    let faults_before = faults(&disks, &bystander);
    let start = Instant::now();
    bystander.tell(&format!("grow {}", sizes.bystander_bytes >> 20))?;
    bystander.tell(&format!("cycle {}", (sizes.seconds * 1e3) as u64))?;
    let stop = Arc::new(AtomicBool::new(false));
    let (control, stopped) = (disks.control.clone(), Arc::clone(&stop));
    let watcher = std::thread::spawn(move || -> Result<Vec<(f64, f64)>> {
        let mut seen = Vec::new();
        while !stopped.load(Ordering::Relaxed) {
            let (pools, _) = control.pools()?;
            let mib = (pools.pool_pages * 4096) as f64 / f64::from(1 << 20);
            seen.push((start.elapsed().as_secs_f64(), mib));
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(seen)
    });
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bursts = Vec::new();
    while start.elapsed().as_secs_f64() < sizes.seconds {
        bursts.push(disks.burst(rng.usize(0..disks.len()))?.as_secs_f64() * 1e3);
    }
    let elapsed = start.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    let pools = watcher
        .join()
        .ok()
        .context("the thread that watches the pools panicked")??;
    bystander.answer()?;
    let bystander_pages = bystander
        .answer()?
        .parse()
        .context("the bystander's pages")?;
    let after = swapped()?;
    let major_faults = faults(&disks, &bystander) - faults_before;
    let (total, squeezes) = disks.control.pools()?;
    bursts.sort_by(f64::total_cmp);
    let p99 = bursts
        .get(bursts.len() * 99 / 100)
        .or(bursts.last())
        .copied();
    drop(bystander);
    group.limit(None)?;
    disks.server.stop()?;
    Ok(SwapRun {
        duration_ms,
        pswpin: after.0 - before.0,
        pswpout: after.1 - before.1,
        major_faults,
        bursts_per_second: bursts.len() as f64 / elapsed,
        burst_p99_ms: p99.unwrap_or(0.0),
        bystander_pages,
        killed: 0,
        squeezes,
        squeezed_pages: total.squeezed_pages,
        pools,
    })
}
