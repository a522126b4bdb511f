//! Numbers of times in the buckets of [`time_steps`].

use pvblk_block::time_steps::{self, BUCKETS, bucket};
use std::sync::atomic::{AtomicU64, Ordering};

/// The first time, in nanoseconds, that is above those of a bucket. The last bucket has none.
fn end(bucket: usize) -> u64 {
    time_steps::begin((bucket + 1).min(BUCKETS - 1))
}

/// Numbers of times by bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Empty while there are no times: a disk that was never used keeps none.
    counts: Vec<u64>,
}

impl Histogram {
    /// Adds what a lane has counted.
    pub(super) fn add_counted(&mut self, counted: &[AtomicU64; BUCKETS]) {
        self.counts.resize(BUCKETS, 0);
        for (sum, c) in self.counts.iter_mut().zip(counted) {
            *sum += c.load(Ordering::Relaxed);
        }
    }

    /// Adds another one's times.
    pub(super) fn add(&mut self, other: &Histogram) {
        if self.counts.is_empty() {
            self.counts.clone_from(&other.counts);
            return;
        }
        for (sum, c) in self.counts.iter_mut().zip(&other.counts) {
            *sum += c;
        }
    }

    /// Takes away the times of `before`, an earlier reading.
    pub(super) fn since(&mut self, before: &Histogram) {
        for (sum, c) in self.counts.iter_mut().zip(&before.counts) {
            *sum = sum.saturating_sub(*c);
        }
    }

    /// The time in nanoseconds that `share` (0 to 1) of all times are below; at most 12.5 % too much. 0 if there are none.
    pub fn quantile(&self, share: f64) -> u64 {
        let all: u64 = self.counts.iter().sum();
        let wanted = ((all as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return end(bucket);
            }
        }
        0
    }

    /// Pairs of a bucket's upper end in nanoseconds (times are below it) and how many times it has; only buckets that have some. The last
    /// bucket, from 137 s on, has `u64::MAX`.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let counts = self.counts.iter().enumerate();
        counts.filter(|(_, c)| **c > 0).map(|(b, &c)| {
            let end = if b == BUCKETS - 1 { u64::MAX } else { end(b) };
            (end, c)
        })
    }
}

impl FromIterator<(u64, u64)> for Histogram {
    /// From pairs as [`Histogram::buckets`] gives them.
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(pairs: I) -> Histogram {
        let mut histogram = Histogram::default();
        for (end, count) in pairs {
            histogram.counts.resize(BUCKETS, 0);
            let sum = &mut histogram.counts[bucket(end.saturating_sub(1))];
            *sum = sum.saturating_add(count);
        }
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_an_eighth() {
        let mut h = Histogram::default();
        assert_eq!(h.quantile(0.99), 0);
        h.counts.resize(BUCKETS, 0);
        for ns in 1..=100_000u64 {
            h.counts[bucket(ns)] += 1;
        }
        for share in [0.1, 0.5, 0.9, 0.99, 1.0] {
            let (got, right) = (h.quantile(share) as f64, share * 100_000.0);
            assert!((1.0..=1.13).contains(&(got / right)), "{share}: {got}");
        }
        let mut later = h.clone();
        later.counts[bucket(5_000_000)] += 10;
        later.since(&h);
        assert_eq!(later.buckets().collect::<Vec<_>>(), [(5_242_880, 10)]);
        assert_eq!(h.buckets().collect::<Histogram>(), h);
        let longest = Histogram::from_iter([(u64::MAX, 3)]);
        assert_eq!(longest.buckets().collect::<Vec<_>>(), [(u64::MAX, 3)]);
    }
}
