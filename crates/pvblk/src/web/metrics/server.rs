//! Metrics of the whole server.

use super::families::{self as f, Family};
use super::snapshot::Snapshot;
use super::text::{Labels, Lines};
use crate::memory::Report;
use pvblk_backend::events::Kind;
use std::collections::BTreeMap;
use std::io;
use std::time::SystemTime;

/// Bytes of a page of buffers.
const PAGE: u64 = 4096;
/// States of a disk.
const STATES: [&str; 4] = ["opening", "serving", "removing", "failed"];

pub fn begin(lines: &mut Lines<'_>, snapshot: &Snapshot) -> io::Result<()> {
    let none = Labels::default();
    lines
        .family(&f::BUILD)?
        .put(&Labels::of("version", &snapshot.version), 1)?;
    if let Some(process) = &snapshot.process {
        lines.family(&f::CPU)?.put_ns(&none, process.cpu_ns)?;
        let start = process.start.duration_since(SystemTime::UNIX_EPOCH);
        let start = start.unwrap_or_default().as_nanos() as u64;
        lines.family(&f::START)?.put_ns(&none, start)?;
    }
    let mut samples = lines.family(&f::DISKS)?;
    for state in STATES {
        let count = snapshot.disks.iter().filter(|d| d.state == state).count();
        samples.put(&Labels::of("state", state), count as u64)?;
    }
    Ok(())
}

pub fn events(lines: &mut Lines<'_>, snapshot: &Snapshot) -> io::Result<()> {
    let mut samples = lines.family(&f::EVENTS)?;
    // All kinds, so that an alert sees the first one come.
    for kind in Kind::ALL.iter().filter(|k| **k != Kind::EventsLost) {
        let count = snapshot.events.get(kind.name()).copied().unwrap_or(0);
        let labels = Labels::of("kind", kind.name()).and("severity", kind.severity().name());
        samples.put(&labels, count)?;
    }
    Ok(())
}

pub fn memory(lines: &mut Lines<'_>, report: &Report) -> io::Result<()> {
    let none = Labels::default();
    let mut kinds: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for owner in &report.owners {
        let sum = kinds.entry(&owner.kind).or_default();
        *sum = (
            sum.0 + owner.live_bytes,
            sum.1.saturating_add(owner.cap_bytes),
        );
    }
    let mut samples = lines.family(&f::MEMORY)?;
    for (kind, (live, _)) in &kinds {
        samples.put(&Labels::of("kind", kind), *live)?;
    }
    let mut samples = lines.family(&f::MEMORY_LIMIT)?;
    for (kind, (_, most)) in &kinds {
        samples.put(&Labels::of("kind", kind), *most)?;
    }
    let total = &report.total;
    let all: [(&'static Family, u64); 10] = [
        (&f::MEMORY_ANONYMOUS, report.rss_anon_bytes),
        (&f::POOL, total.pool_pages * PAGE),
        (&f::POOL_USED, total.in_use_pages * PAGE),
        (&f::POOL_ALLOCATED, total.allocated_pages * PAGE),
        (&f::POOL_RETURNED, total.returned_pages * PAGE),
        (&f::POOL_STALLS, total.allocation_stalls),
        (&f::SQUEEZES, report.squeezes),
        (&f::SQUEEZE_ACTIVE, u64::from(report.squeezing)),
        (&f::SQUEEZE_DEVICES, report.device_bytes),
        (&f::PRESSURE_SIGNALS, report.source_signals),
    ];
    for (family, value) in all {
        lines.family(family)?.put(&none, value)?;
    }
    let mut samples = lines.family(&f::DISK_BUFFERS)?;
    for disk in report.disks.iter().filter(|d| d.pool.pool_pages > 0) {
        samples.put(&Labels::of("disk", &disk.disk), disk.pool.pool_pages * PAGE)?;
    }
    let squeezed = (total.squeezed_ms * 1e6) as u64;
    lines.family(&f::SQUEEZE_TIME)?.put_ns(&none, squeezed)?;
    let longest = report.longest_squeeze_us * 1000;
    lines.family(&f::SQUEEZE_LONGEST)?.put_ns(&none, longest)?;
    let mut samples = lines.family(&f::PRESSURE_SOURCE)?;
    for source in &report.sources {
        let works = u64::from(source.missing.is_none());
        samples.put(&Labels::of("source", &source.name), works)?;
    }
    Ok(())
}
