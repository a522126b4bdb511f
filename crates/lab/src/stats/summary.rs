//! Figures of one set of samples.

use super::general;
use serde::Serialize;

/// The heading above the lines of [`Summary::row`].
pub const HEADER: &str =
    "    N           Min           Max        Median           Avg        Stddev";

/// Figures of a set of samples, in the samples' unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of samples.
    pub n: usize,
    pub min: f64,
    pub max: f64,
    /// The middle sample; of an even number the greater of the two in the middle, as in `ministat`.
    pub median: f64,
    pub avg: f64,
    /// Standard deviation of the sample, with `n - 1`; 0 for one sample.
    pub stddev: f64,
}

impl Summary {
    /// Figures of `samples`, in any order; `None` if there are none.
    pub fn of(samples: &[f64]) -> Option<Summary> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let n = sorted.len();
        let avg = mean(samples);
        Some(Summary {
            n,
            min,
            max,
            median: sorted[n / 2],
            avg,
            stddev: variance(samples, avg).sqrt(),
        })
    }

    /// A line of `ministat`'s table; `symbol` names the set.
    pub fn row(&self, symbol: char) -> String {
        let numbers = [self.min, self.max, self.median, self.avg, self.stddev];
        numbers
            .iter()
            .fold(format!("{symbol} {:3}", self.n), |row, &number| {
                format!("{row} {:>13}", general(number, 8))
            })
    }
}

pub(super) fn mean(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len() as f64
}

/// Variance of a sample around its mean; 0 for fewer than two. It is taken in two passes: a sum of squares
/// loses all digits when the spread is small beside the mean.
pub(super) fn variance(samples: &[f64], mean: f64) -> f64 {
    if samples.len() < 2 {
        return 0.0;
    }
    let squares: f64 = samples.iter().map(|s| (s - mean).powi(2)).sum();
    squares / (samples.len() - 1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        let s = Summary::of(&[4.0, 2.0, 9.0, 4.0, 5.0, 5.0, 7.0, 4.0]).unwrap();
        assert_eq!((s.n, s.min, s.max, s.avg), (8, 2.0, 9.0, 5.0));
        assert_eq!(s.median, 5.0, "the greater of the two in the middle");
        assert!((s.stddev - (32.0f64 / 7.0).sqrt()).abs() < 1e-12);
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[3.0]).unwrap().stddev, 0.0);
    }

    #[test]
    fn a_small_spread_on_a_great_mean_is_seen() {
        let s = Summary::of(&[1e9 + 1.0, 1e9 + 2.0, 1e9 + 3.0]).unwrap();
        assert_eq!((s.avg, s.stddev), (1e9 + 2.0, 1.0));
    }

    #[test]
    fn a_row_is_ministats() {
        let samples: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!(
            Summary::of(&samples).unwrap().row('x'),
            "x  10             1            10             6           5.5     3.0276504"
        );
    }
}
