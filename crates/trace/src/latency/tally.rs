//! Times of a hop in bounded memory: their number, their sum and a histogram.

use super::Samples;

/// Takes the times of one hop, in nanoseconds.
pub trait Tally: Clone + Default {
    fn record(&mut self, ns: u64);
}

impl Tally for Samples {
    fn record(&mut self, ns: u64) {
        Samples::record(self, ns);
    }
}

/// Steps in each doubling of the time; the bounds are those of `pvblk stat`.
const STEPS: u64 = 8;
const STEPS_LOG2: u32 = STEPS.trailing_zeros();
/// Times below 2^7 ns (128 ns) count as such.
const FIRST: u32 = 7;
/// Times from 2^37 ns (137 s) on count as such.
const LAST: u32 = 37;
/// Buckets: one below, the steps, one above.
const BUCKETS: usize = ((LAST - FIRST) as u64 * STEPS) as usize + 2;

/// Number, sum and distribution of times: 2 KiB, once there is one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    count: u64,
    sum_ns: u64,
    /// Empty while there are no times.
    buckets: Vec<u64>,
}

/// The bucket of a time in nanoseconds.
fn bucket(ns: u64) -> usize {
    if ns < 1 << FIRST {
        return 0;
    }
    let doubling = ns.ilog2();
    if doubling >= LAST {
        return BUCKETS - 1;
    }
    let step = (ns >> (doubling - STEPS_LOG2)) & (STEPS - 1);
    ((doubling - FIRST) as u64 * STEPS + step) as usize + 1
}

/// The shortest time of a bucket, in nanoseconds.
fn begin(bucket: usize) -> u64 {
    let Some(index) = (bucket as u64).checked_sub(1) else {
        return 0;
    };
    let doubling = FIRST + (index / STEPS) as u32;
    (STEPS + index % STEPS) << (doubling - STEPS_LOG2)
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
    fn a_bucket_begins_where_the_one_before_ends() {
        for b in 1..BUCKETS {
            assert_eq!(bucket(begin(b)), b, "shortest time of {b}");
            assert_eq!(bucket(begin(b) - 1), b - 1, "longest time before {b}");
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BUCKETS - 1));
        assert_eq!(begin(BUCKETS - 1), 1 << LAST);
    }

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
