//! `/metrics`: a [`Snapshot`] as text. The families, their names and their labels are in `families.rs` alone.

mod asker;
mod buckets;
mod families;
mod hops;
mod query;
mod server;
mod snapshot;
mod stacked;
mod text;

use super::backing::Backing;
use asker::Asker;
use buckets::{BOUNDS, Buckets, InUse};
use families as f;
use hops::Hops;
use parking_lot::Mutex;
use pvblk_backend::OPERATIONS;
use pvblk_block::units::parse_rate;
pub use query::Query;
use snapshot::{Counts, Operation};
pub use snapshot::{DiskFigures, Snapshot, begin};
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Instant;
pub use text::Form;
use text::{Labels, Lines};

/// Writes metrics, one reading after another.
#[derive(Default)]
pub struct Metrics {
    asker: Arc<Asker>,
    hops: Arc<Hops>,
    in_use: Mutex<InUse>,
}

/// A disk, and what all its lines share.
struct Disk<'a> {
    figures: &'a DiskFigures,
    label: Labels,
    /// Its histograms are in this reading.
    has_buckets: bool,
}

impl Metrics {
    /// Writes all figures of this moment.
    pub fn write(
        &self,
        backing: &Arc<dyn Backing>,
        form: Form,
        query: Query,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let Query { buckets, hops } = query;
        if let Some(every) = hops {
            self.hops.ask(backing, every);
        }
        let mut lines = Lines::new(form, out);
        let snapshot = match backing.snapshot() {
            Ok(snapshot) => snapshot,
            Err(why) => {
                tracing::debug!("no metrics: {why}");
                lines.family(&f::UP)?.put(&Labels::default(), 0)?;
                return lines.finish();
            }
        };
        let (answers, unanswered) = self.asker.ask(backing, stacked::questions(&snapshot.disks));
        let (chosen, left_out) = self.in_use.lock().choose(&snapshot.disks, Instant::now());
        let disks = snapshot
            .disks
            .iter()
            .zip(chosen)
            .map(|(figures, chosen)| Disk {
                figures,
                label: Labels::of("disk", &figures.name),
                has_buckets: match buckets {
                    Buckets::Active => chosen,
                    Buckets::All => true,
                    Buckets::None => false,
                },
            });
        let disks: Vec<Disk<'_>> = disks.collect();
        let none = Labels::default();
        lines.family(&f::UP)?.put(&none, 1)?;
        server::begin(&mut lines, &snapshot)?;
        lines.family(&f::UNANSWERED)?.put(&none, unanswered)?;
        let left_out = if buckets == Buckets::Active {
            left_out
        } else {
            0
        };
        lines.family(&f::LEFT_OUT)?.put(&none, left_out)?;
        server::events(&mut lines, &snapshot)?;
        state(&mut lines, &disks)?;
        counters(&mut lines, &disks)?;
        self.hops.write(&mut lines, &disks)?;
        limits(&mut lines, &disks)?;
        stacked::write(&mut lines, &answers)?;
        if let Some(memory) = &snapshot.memory {
            server::memory(&mut lines, memory)?;
        }
        lines.finish()
    }
}

fn state(lines: &mut Lines<'_>, disks: &[Disk<'_>]) -> io::Result<()> {
    let mut samples = lines.family(&f::DISK)?;
    for disk in disks {
        let volume = disk.figures.volume.split(':').next().unwrap_or_default();
        samples.put(&disk.label.and("volume", volume), 1)?;
    }
    let mut samples = lines.family(&f::DISK_STATUS)?;
    for disk in disks {
        let label = disk.label.and("state", &disk.figures.state);
        samples.put(&label.and("health", &disk.figures.health), 1)?;
    }
    for (family, of) in [
        (&f::DISK_SIZE, (|d| d.size_bytes) as fn(&DiskFigures) -> u64),
        (&f::DISK_CONNECTIONS, |d| d.connections),
    ] {
        let mut samples = lines.family(family)?;
        for disk in disks {
            samples.put(&disk.label, of(disk.figures))?;
        }
    }
    Ok(())
}

/// Operations that have lines even while they weren't used: rates need a first value.
const ALWAYS: [&str; 2] = ["read", "write"];

/// The labels of a disk's operations, with their counters.
fn operations(counts: &Counts) -> impl Iterator<Item = (&'static str, &Operation)> {
    let all = OPERATIONS
        .into_iter()
        .map(crate::stat::name)
        .zip(&counts.operations);
    all.filter(|(name, o)| o.requests > 0 || ALWAYS.contains(name))
}

fn counters(lines: &mut Lines<'_>, disks: &[Disk<'_>]) -> io::Result<()> {
    let open = || {
        disks
            .iter()
            .filter_map(|d| Some((d, d.figures.counts.as_ref()?)))
    };
    let mut samples = lines.family(&f::DISK_IN_FLIGHT)?;
    for (disk, counts) in open() {
        samples.put(&disk.label, counts.in_flight)?;
    }
    let mut samples = lines.family(&f::DISK_BUSY)?;
    for (disk, counts) in open() {
        samples.put_ns(&disk.label, counts.busy_ns)?;
    }
    // Made once for the families below.
    let each: Vec<(Labels, &Operation, bool)> = open()
        .flat_map(|(disk, counts)| {
            operations(counts).map(|(op, o)| (disk.label.and("op", op), o, disk.has_buckets))
        })
        .collect();
    let mut samples = lines.family(&f::DISK_REQUESTS)?;
    for (labels, o, _) in &each {
        samples.put(labels, o.requests)?;
    }
    let mut samples = lines.family(&f::DISK_BYTES)?;
    for (labels, o, _) in &each {
        samples.put(labels, o.bytes)?;
    }
    let mut samples = lines.family(&f::DISK_ERRORS)?;
    for (labels, o, _) in &each {
        samples.put(labels, o.errors)?;
    }
    let mut samples = lines.family(&f::DISK_TIME)?;
    for (labels, o, _) in &each {
        samples.put_ns(labels, o.time_ns)?;
    }
    let mut samples = lines.family(&f::DISK_MERGES)?;
    for (labels, o, _) in each.iter().filter(|(_, o, _)| o.merges > 0) {
        samples.put(labels, o.merges)?;
    }
    let mut samples = lines.family(&f::DISK_LATENCY)?;
    for (labels, o, _) in each
        .iter()
        .filter(|(_, o, has_buckets)| *has_buckets && o.requests > 0)
    {
        samples.put_histogram(labels, &BOUNDS, &o.latency, o.time_ns)?;
    }
    Ok(())
}

/// A limit of a disk: of its connections or itself, its operation, and whether it is of bytes.
fn limit(key: &str) -> Option<(&'static str, &'static str, bool)> {
    let (scope, key) = match key.strip_prefix("connection-") {
        Some(key) => ("connection", key),
        None => ("disk", key),
    };
    let (op, unit) = match key.split_once('-') {
        Some(("read", unit)) => ("read", unit),
        Some(("write", unit)) => ("write", unit),
        Some(_) => return None,
        None => ("all", key),
    };
    match unit {
        "iops" => Some((scope, op, false)),
        "bw" => Some((scope, op, true)),
        _ => None,
    }
}

fn limits(lines: &mut Lines<'_>, disks: &[Disk<'_>]) -> io::Result<()> {
    for (family, of_bytes) in [(&f::LIMIT_REQUESTS, false), (&f::LIMIT_BYTES, true)] {
        let mut samples = lines.family(family)?;
        for disk in disks {
            let text = disk.figures.limit.as_deref().unwrap_or_default();
            for (key, value) in text.split(',').filter_map(|entry| entry.split_once('=')) {
                if let (Some((scope, op, bytes)), Some(rate)) = (limit(key), parse_rate(value))
                    && bytes == of_bytes
                {
                    samples.put(&disk.label.and("scope", scope).and("op", op), rate)?;
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
