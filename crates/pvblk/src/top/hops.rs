//! The answers of the control method `hops` as the screen needs them.

use pvblk_backend::Histogram;
pub use pvblk_trace::live::{DiskHops, HopTimes, HopsReport, SlowRequest};

/// Words that name a hop among those of a disk, such as `medium file:c.img`.
pub fn words(hop: &HopTimes) -> String {
    match &hop.member {
        Some(member) if !hop.label.contains(member.as_str()) => format!("{} {member}", hop.label),
        _ => hop.label.clone(),
    }
}

/// Pairs of a time in nanoseconds and how many requests took less, but no less than the bucket's shortest time.
pub fn times(hop: &HopTimes) -> impl Iterator<Item = (u64, u64)> + '_ {
    let pairs = hop.latency_ns.iter();
    pairs.map(|(ns, count)| (ns.saturating_add(1), *count))
}

pub fn histogram(hop: &HopTimes) -> Histogram {
    Histogram::from_iter(times(hop))
}
