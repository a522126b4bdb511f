//! Hops of a disk's requests: shares of the last second, and what is kept for the shown disk.

use super::heat::HeatMap;
use crate::top::hops::{DiskHops, HopTimes, SlowRequest, times, words};
use pvblk_backend::Histogram;

/// Slowest requests that are kept.
const SLOWEST: usize = 10;
/// Time after which a slow request is forgotten.
const MINUTE_NS: u64 = 60_000_000_000;

/// Hops of the last second.
#[derive(Clone, Debug, Default)]
pub struct Way {
    pub hops: Vec<HopTimes>,
}

impl Way {
    pub fn new(of: DiskHops) -> Way {
        Way { hops: of.hops }
    }

    /// Hops with their share of the time of all requests, 0 to 1.
    pub fn shares(&self) -> impl Iterator<Item = (&HopTimes, f64)> {
        let all: u64 = self.hops.iter().map(|h| h.sum_ns).sum();
        let share = move |h: &HopTimes| h.sum_ns as f64 / all.max(1) as f64;
        self.hops.iter().map(move |h| (h, share(h)))
    }

    /// The hop with the greatest share.
    pub fn greatest(&self) -> Option<(&HopTimes, f64)> {
        self.shares()
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .filter(|(_, share)| *share > 0.0)
    }
}

/// A hop by what names it.
pub type HopName = (String, String);

pub fn name(hop: &HopTimes) -> HopName {
    (hop.layer.clone(), words(hop))
}

/// Hops of the shown disk.
#[derive(Clone, Debug, Default)]
pub struct Followed {
    pub way: Way,
    /// One request in so many was followed.
    pub every: u64,
    /// Time that the hops are about.
    pub elapsed_ns: u64,
    pub lost: u64,
    pub unknown: u64,
    /// Of each hop that is there now.
    pub heat: Vec<(HopName, HeatMap)>,
    /// Of the last minute, the slowest first, with the time of the answer that had it.
    pub slowest: Vec<(u64, SlowRequest)>,
}

impl Followed {
    pub fn add(&mut self, at_ns: u64, mut of: DiskHops) {
        let slowest = std::mem::take(&mut of.slowest);
        self.slowest.extend(slowest.into_iter().map(|s| (at_ns, s)));
        self.slowest
            .retain(|(at, _)| at_ns.saturating_sub(*at) < MINUTE_NS);
        self.slowest
            .sort_by_key(|(_, s)| std::cmp::Reverse(s.total_ns));
        self.slowest.truncate(SLOWEST);
        for hop in &of.hops {
            let name = name(hop);
            if !self.heat.iter().any(|(n, _)| *n == name) {
                self.heat.push((name, HeatMap::default()));
            }
        }
        // A hop without requests has a column without any, so that columns are times; one that isn't there any more goes.
        let place = |n: &HopName| of.hops.iter().position(|h| name(h) == *n);
        self.heat.retain_mut(|(n, map)| {
            // Several kinds of clients may have hops of one name.
            let hops = of.hops.iter().filter(|h| name(h) == *n);
            map.add(&Histogram::from_iter(hops.flat_map(times)));
            place(n).is_some() || map.used(usize::MAX).is_some()
        });
        self.heat
            .sort_by_key(|(n, _)| place(n).unwrap_or(usize::MAX));
        self.way = Way::new(of);
    }
}
