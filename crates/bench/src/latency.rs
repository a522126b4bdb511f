//! Distributions of times, and of rates over time.

use hdrhistogram::Histogram;

/// Times above this many nanoseconds (an hour) count as this.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// Sums of values, enough for mean and spread; `merge` adds two of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moments {
    /// Number of values.
    pub count: u64,
    /// The least; 0 if there are none.
    pub min: f64,
    /// The greatest; 0 if there are none.
    pub max: f64,
    sum: f64,
    squares: f64,
}

impl Moments {
    /// Adds a value.
    #[inline]
    pub fn record(&mut self, value: f64) {
        if self.count == 0 || value < self.min {
            self.min = value;
        }
        if value > self.max {
            self.max = value;
        }
        self.count += 1;
        self.sum += value;
        self.squares += value * value;
    }

    /// Adds the values of `other`.
    pub fn merge(&mut self, other: &Moments) {
        if other.count == 0 {
            return;
        }
        self.min = match self.count {
            0 => other.min,
            _ => self.min.min(other.min),
        };
        self.max = self.max.max(other.max);
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
    }

    /// The mean; 0 if there are no values.
    pub fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    /// The standard deviation of the sample; 0 for fewer than two values.
    pub fn stddev(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        let n = self.count as f64;
        ((self.squares - self.sum * self.sum / n) / (n - 1.0))
            .max(0.0)
            .sqrt()
    }
}

/// A distribution of times in nanoseconds: moments exactly, percentiles to three digits.
#[derive(Clone, Debug)]
pub struct Latency {
    moments: Moments,
    histogram: Histogram<u64>,
}

impl Default for Latency {
    fn default() -> Latency {
        // Constant bounds that the crate allows, so there is nothing to fail.
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, 3)
            .expect("three digits up to an hour are a valid histogram");
        Latency {
            moments: Moments::default(),
            histogram,
        }
    }
}

impl Latency {
    /// Adds a time in nanoseconds.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.moments.record(ns as f64);
        self.histogram.saturating_record(ns);
    }

    /// Adds the times of `other`.
    pub fn merge(&mut self, other: &Latency) {
        self.moments.merge(&other.moments);
        // Both have the same bounds, so it can't fail.
        let _ = self.histogram.add(&other.histogram);
    }

    /// Forgets all times.
    pub(super) fn clear(&mut self) {
        self.moments = Moments::default();
        self.histogram.reset();
    }

    /// Number of times.
    pub fn count(&self) -> u64 {
        self.moments.count
    }

    /// Least, mean, greatest and spread, in nanoseconds.
    pub fn moments(&self) -> &Moments {
        &self.moments
    }

    /// The time in nanoseconds that `percent` of all times don't exceed; 0 if there are none.
    pub fn percentile_ns(&self, percent: f64) -> u64 {
        if self.count() == 0 {
            return 0;
        }
        let value = self.histogram.value_at_quantile(percent / 100.0);
        value.min(self.moments.max as u64)
    }

    /// The histogram itself, in nanoseconds.
    pub fn histogram(&self) -> &Histogram<u64> {
        &self.histogram
    }

    /// Number of times that are at least `from_ns` and below `to_ns`, to the histogram's three digits.
    /// Neighbouring ranges count each time once.
    pub(super) fn between(&self, from_ns: u64, to_ns: u64) -> u64 {
        let range = from_ns..to_ns;
        let all = self.histogram.iter_recorded();
        // The iterator gives one value for each of the histogram's steps: a step may lie across a
        // range's end.
        all.filter(|step| range.contains(&step.value_iterated_to()))
            .map(|step| step.count_since_last_iteration())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_ranges_count_each_time_once() {
        let mut all = Latency::default();
        let ends = [0, 2_000, 20_000, 2_000_000, 20_000_000, u64::MAX];
        for end in &ends[1..5] {
            (end - 40..end + 40).for_each(|ns| all.record(ns));
            (1..60).for_each(|k| all.record(end - k * end / 3000));
        }
        let sum: u64 = ends.windows(2).map(|w| all.between(w[0], w[1])).sum();
        assert_eq!(sum, all.count());
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let (mut all, mut even, mut odd) =
            (Latency::default(), Latency::default(), Latency::default());
        for ns in 1..=10_000u64 {
            all.record(ns);
            if ns % 2 == 0 { &mut even } else { &mut odd }.record(ns);
        }
        even.merge(&odd);
        for p in [1.0, 50.0, 99.0, 99.9, 100.0] {
            assert_eq!(all.percentile_ns(p), even.percentile_ns(p));
        }
        let m = even.moments();
        assert_eq!((m.count, m.min, m.max), (10_000, 1.0, 10_000.0));
        assert!((m.mean() - 5000.5).abs() < 1e-6);
        assert!((m.stddev() - 2886.896).abs() < 0.001);
        assert!((4990..=5010).contains(&even.percentile_ns(50.0)));
        assert_eq!(even.percentile_ns(100.0), 10_000);
    }

    #[test]
    fn an_empty_one_is_zero() {
        let l = Latency::default();
        assert_eq!(l.percentile_ns(99.0), 0);
        assert_eq!((l.moments().mean(), l.moments().stddev()), (0.0, 0.0));
    }
}
