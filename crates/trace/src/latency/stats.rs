//! Samples of times, their figures and histograms.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Longer times (over an hour, in nanoseconds) count as this in percentiles; averages are exact.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// Significant digits of percentiles.
const DIGITS: u8 = 3;
/// The percentiles in tables and files.
pub const PERCENTILES: [f64; 5] = [50.0, 90.0, 99.0, 99.9, 99.99];

/// All samples of one hop, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Samples(Vec<u64>);

impl Samples {
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.0.push(ns);
    }

    pub fn merge(&mut self, other: &Samples) {
        self.0.extend_from_slice(&other.0);
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The samples in nanoseconds, in the order of completion.
    pub fn values(&self) -> &[u64] {
        &self.0
    }

    pub fn sum_ns(&self) -> u128 {
        self.0.iter().map(|v| u128::from(*v)).sum()
    }

    /// Converts to a histogram.
    pub fn histogram(&self) -> Times {
        let mut times = Times::default();
        self.0.iter().for_each(|v| times.record(*v));
        times
    }

    /// Figures for tables; `None` without samples.
    pub fn summary(&self) -> Option<Summary> {
        if self.0.is_empty() {
            return None;
        }
        let n = self.0.len() as f64;
        let average = self.sum_ns() as f64 / n;
        let squares: f64 = self.0.iter().map(|v| (*v as f64 - average).powi(2)).sum();
        let stddev = if n > 1.0 {
            (squares / (n - 1.0)).sqrt()
        } else {
            0.0
        };
        let near = self.0.iter().map(|v| *v as f64);
        let near = near.filter(|v| (v - average).abs() <= stddev);
        let (count, sum) = near.fold((0u64, 0.0), |(c, s), v| (c + 1, s + v));
        let times = self.histogram();
        let max = self.0.iter().copied().max().unwrap_or(0);
        Some(Summary {
            count: self.0.len() as u64,
            average_ns: average,
            stddev_ns: stddev,
            within_average_ns: if count > 0 {
                sum / count as f64
            } else {
                average
            },
            within_share: count as f64 / n,
            min_ns: self.0.iter().copied().min().unwrap_or(0),
            max_ns: max,
            percentiles_ns: PERCENTILES.map(|p| (p, times.percentile(p).min(max))),
        })
    }
}

/// Figures of one hop.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of samples.
    pub count: u64,
    /// Average of all, nanoseconds.
    pub average_ns: f64,
    /// Standard deviation of the sample, nanoseconds; 0 for a single one.
    pub stddev_ns: f64,
    /// Average of the samples that are within one standard deviation of the average, in nanoseconds: column
    /// "in-avg+-stddev".
    pub within_average_ns: f64,
    /// Share of those samples, from 0 to 1.
    pub within_share: f64,
    /// Shortest time in nanoseconds.
    pub min_ns: u64,
    /// Longest time in nanoseconds.
    pub max_ns: u64,
    /// Percentiles, each with its time in nanoseconds, to three digits.
    pub percentiles_ns: [(f64, u64); 5],
}

/// A histogram of times: percentiles to three digits; histograms can be merged.
#[derive(Clone, Debug)]
pub struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Times {
        // The crate allows these constant bounds, so creation can't fail; the histogram grows as needed.
        let mut histogram = Histogram::new(DIGITS).expect("three digits are a valid histogram");
        histogram.auto(true);
        Times(histogram)
    }
}

/// A histogram as it is written to a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct TimesExport {
    /// Significant digits of the values.
    pub digits: u8,
    /// Times in nanoseconds with their counts, without empty buckets.
    pub buckets_ns: Vec<(u64, u64)>,
}

impl Times {
    /// Adds one time in nanoseconds.
    pub fn record(&mut self, ns: u64) {
        self.record_many(ns, 1);
    }

    fn record_many(&mut self, ns: u64, count: u64) {
        // Cannot fail: the histogram grows to any value below the bound.
        let _ = self.0.record_n(ns.min(LONGEST_NS), count);
    }

    pub fn merge(&mut self, other: &Times) {
        let _ = self.0.add(&other.0);
    }

    /// Number of samples.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The time in nanoseconds that `percent` of the samples don't exceed.
    pub fn percentile(&self, percent: f64) -> u64 {
        self.0.value_at_percentile(percent)
    }

    /// Converts for a file; [`Times::import`] reverses it.
    pub fn export(&self) -> TimesExport {
        let buckets = self.0.iter_recorded();
        TimesExport {
            digits: DIGITS,
            buckets_ns: buckets
                .map(|b| (b.value_iterated_to(), b.count_at_value()))
                .collect(),
        }
    }

    /// Reads the form of a file.
    pub fn import(export: &TimesExport) -> Times {
        let mut times = Times::default();
        for (ns, count) in &export.buckets_ns {
            times.record_many(*ns, *count);
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures() {
        let mut samples = Samples::default();
        [10, 20, 30, 40, 1000]
            .into_iter()
            .for_each(|v| samples.record(v));
        let s = samples.summary().unwrap();
        assert_eq!(
            (s.count, s.average_ns, s.min_ns, s.max_ns),
            (5, 220.0, 10, 1000)
        );
        assert!((s.stddev_ns - 436.176_56).abs() < 1e-4, "{}", s.stddev_ns);
        assert_eq!((s.within_average_ns, s.within_share), (25.0, 0.8));
        assert_eq!(Samples::default().summary(), None);
        let mut one = Samples::default();
        one.record(7);
        let s = one.summary().unwrap();
        assert_eq!((s.average_ns, s.stddev_ns, s.within_share), (7.0, 0.0, 1.0));
    }

    #[test]
    fn histograms_add_up_also_over_a_file() {
        let (mut a, mut b, mut both) = (Times::default(), Times::default(), Times::default());
        for n in 0..10_000u64 {
            let ns = n * n;
            if n % 3 == 0 {
                a.record(ns)
            } else {
                b.record(ns)
            }
            both.record(ns);
        }
        let text = serde_json::to_string(&b.export()).unwrap();
        let read: TimesExport = serde_json::from_str(&text).unwrap();
        a.merge(&Times::import(&read));
        assert_eq!(a.count(), 10_000);
        for p in PERCENTILES {
            assert_eq!(a.percentile(p), both.percentile(p));
        }
        both.record(u64::MAX);
        assert!(both.percentile(100.0) >= LONGEST_NS);
    }
}
