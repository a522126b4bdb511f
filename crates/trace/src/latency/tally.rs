//! Times of a hop in bounded memory: their number, their sum and a histogram.

use super::Samples;
use pvblk_block::time_steps::{BUCKETS, begin, bucket};

/// Takes the times of one hop, in nanoseconds.
pub trait Tally: Clone + Default {
    fn record(&mut self, ns: u64);
}

impl Tally for Samples {
    fn record(&mut self, ns: u64) {
        Samples::record(self, ns);
    }
}

/// Number, sum and distribution of times: 2 KiB, once there is one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    count: u64,
    sum_ns: u64,
    /// Numbers of times by bucket, those of `pvblk stat`. Empty while there are no times.
    buckets: Vec<u64>,
}

impl Tally for Sums {
    fn record(&mut self, ns: u64) {
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        if self.buckets.is_empty() {
            self.buckets.resize(BUCKETS, 0);
        }
        self.buckets[bucket(ns)] += 1;
    }
}

impl Sums {
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Sum of the times; saturates.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Pairs of a bucket's shortest time in nanoseconds and its count, without empty buckets.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let counts = self.buckets.iter().enumerate();
        counts
            .filter(|(_, count)| **count > 0)
            .map(|(b, count)| (begin(b), *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_and_added_up() {
        let mut sums = Sums::default();
        assert_eq!(sums.buckets().count(), 0);
        for ns in [5, 1024, 1100, 1152, u64::MAX] {
            sums.record(ns);
        }
        assert_eq!((sums.count(), sums.sum_ns()), (5, u64::MAX));
        let buckets: Vec<_> = sums.buckets().collect();
        assert_eq!(buckets, [(0, 1), (1024, 2), (1152, 1), (1 << 37, 1)]);
    }
}
