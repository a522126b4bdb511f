//! The time from the allocation that brings the pressure until free pools are back with the system, seen from
//! outside.

use super::bystander::{Bystander, now_ns};
use super::disks::Disks;
use super::group::{Group, resident};
use crate::child::cpu_percent;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// Interval at which the server's resident memory is read.
const LOOK: Duration = Duration::from_micros(100);
/// Time for which a server at rest is watched.
const IDLE: Duration = Duration::from_secs(10);
/// The longest time to wait for the memory.
const PATIENCE_NS: u64 = 5_000_000_000;
const MIB: u64 = 1 << 20;

/// The samples of one size.
#[derive(Clone, Debug, Serialize)]
pub struct Reaction {
    /// Number of attached disks.
    pub disks: usize,
    /// Free bytes of all pools, about.
    pub pool_bytes: u64,
    /// Milliseconds from the allocation until 95 % of these bytes are returned.
    pub ms: Vec<f64>,
    /// Percentage of a CPU that the server takes with all disks at rest, without a limit and just above the
    /// margin.
    pub idle_percent: [f64; 2],
}

/// Measures `rounds` times with pools of `pool_bytes` in all.
pub fn run(dir: &Path, count: usize, pool_bytes: u64, rounds: usize) -> Result<Reaction> {
    let group = Group::new("reaction")?;
    let each = (pool_bytes / count as u64) as usize;
    let mut disks = Disks::start(dir, &group, count, each, &[])?;
    let mut bystander = Bystander::start(&group)?;
    let pid = disks.server.pid();
    let mut ms = Vec::new();
    let mut idle_percent = [0.0; 2];
    for round in 0..rounds {
        group.limit(None)?;
        bystander.ask("drop")?;
        disks.fill()?;
        // Pools keep buffers of busy connections for 100 ms; this waits for longer.
        std::thread::sleep(Duration::from_millis(250));
        let (pools, _) = disks.control.pools()?;
        let free = (pools.pool_pages - pools.in_use_pages) * 4096;
        if free < pool_bytes * 9 / 10 {
            bail!("pools have {free} bytes, not {pool_bytes}: something squeezes them already");
        }
        if round == 0 {
            idle_percent[0] = cpu_percent(pid, IDLE)?;
        }
        // The server's margin is a part of the limit; the bystander allocates memory until just above it.
        let usage = group.usage()?;
        let limit = (usage + 3 * MIB) * 32 / 31;
        let margin = (limit / 32).clamp(4 * MIB, 256 * MIB);
        group.limit(Some((usage + margin + 3 * MIB).max(limit)))?;
        // The server reads the limit every 100 ms.
        std::thread::sleep(Duration::from_millis(250));
        if round == 0 {
            idle_percent[1] = cpu_percent(pid, IDLE)?;
        }
        let resident_before = resident(pid).context("the server is gone")?;
        let until = resident_before.saturating_sub(free * 95 / 100);
        // The allocation crosses the mark within its first megabytes; the clock starts before.
        bystander.tell("grow 4")?;
        let asked = now_ns();
        let end = loop {
            let now = now_ns();
            match resident(pid) {
                Some(bytes) if bytes <= until => break now,
                Some(_) => {}
                None => bail!("the server is gone"),
            }
            std::thread::sleep(LOOK);
            if now - asked > PATIENCE_NS {
                bail!("nothing went back within 5 s");
            }
        };
        let answer = bystander.answer()?;
        let start: u64 = answer
            .split(' ')
            .next()
            .and_then(|n| n.parse().ok())
            .context("the bystander's time")?;
        ms.push(end.saturating_sub(start) as f64 / 1e6);
    }
    drop(bystander);
    group.limit(None)?;
    disks.server.stop()?;
    Ok(Reaction {
        disks: count,
        pool_bytes,
        ms,
        idle_percent,
    })
}
