//! A comparison of two sets of samples.

use super::summary::{mean, variance};
use super::{Confidence, general};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::fmt;

/// Fewest samples on each side of a comparison.
pub const MIN_SAMPLES: usize = 3;

/// Two sets of independent samples by Student's t with a pooled variance.
///
/// All figures are those of `ministat`; its `Display` is the text that `ministat` prints below its table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Confidence of the interval, percent.
    pub confidence: Confidence,
    /// Mean of the samples less mean of the reference, in their unit.
    pub difference: f64,
    /// The true difference is within this much of `difference`, in the samples' unit.
    pub error: f64,
    /// `difference` in percent of the reference's mean; infinite if that is 0.
    pub percent: f64,
    /// `error` in percent of the reference's mean.
    pub percent_error: f64,
    /// Pooled standard deviation, in the samples' unit.
    pub pooled: f64,
    /// True if the interval doesn't hold 0.
    pub proven: bool,
}

impl Comparison {
    /// Compares `samples` with `reference`; both need at least [`MIN_SAMPLES`].
    pub fn of(reference: &[f64], samples: &[f64], confidence: Confidence) -> Result<Comparison> {
        let (n, m) = (reference.len(), samples.len());
        ensure!(
            n.min(m) >= MIN_SAMPLES,
            "{n} and {m} samples: a comparison needs {MIN_SAMPLES} on each side"
        );
        let (base, avg) = (mean(reference), mean(samples));
        let freedom = n + m - 2;
        let squares =
            variance(reference, base) * (n - 1) as f64 + variance(samples, avg) * (m - 1) as f64;
        let pooled = (squares / freedom as f64).sqrt();
        let standard_error = pooled * (1.0 / n as f64 + 1.0 / m as f64).sqrt();
        let difference = avg - base;
        let error = confidence.ministat_factor(freedom) * standard_error;
        Ok(Comparison {
            confidence,
            difference,
            error,
            percent: difference * 100.0 / base,
            percent_error: error * 100.0 / base,
            pooled,
            proven: difference.abs() > error,
        })
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.proven {
            return write!(f, "No difference proven at {} confidence", self.confidence);
        }
        let g = |value| general(value, 6);
        write!(
            f,
            "Difference at {} confidence\n\t{} +/- {}\n\t{}% +/- {}%\n\t(Student's t, pooled s = {})",
            self.confidence,
            g(self.difference),
            g(self.error),
            g(self.percent),
            g(self.percent_error),
            g(self.pooled)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The example of ministat's manual.
    const IGUANA: [f64; 7] = [50.0, 200.0, 150.0, 400.0, 750.0, 400.0, 150.0];
    const CHAMELEON: [f64; 5] = [150.0, 400.0, 720.0, 500.0, 930.0];

    fn at(percent: f64) -> Comparison {
        let confidence = Confidence::of_percent(percent).unwrap();
        Comparison::of(&IGUANA, &CHAMELEON, confidence).unwrap()
    }

    #[test]
    fn the_manuals_example() {
        assert_eq!(
            at(80.0).to_string(),
            "Difference at 80.0% confidence\n\t240 +/- 212.215\n\t80% +/- 70.7384%\n\t\
             (Student's t, pooled s = 264.159)"
        );
        assert_eq!(
            at(95.0).to_string(),
            "No difference proven at 95.0% confidence"
        );
        assert!(!at(95.0).proven && at(95.0).error > at(80.0).error);
    }

    #[test]
    fn a_set_does_not_differ_from_itself() {
        for confidence in Confidence::all() {
            let same = Comparison::of(&IGUANA, &IGUANA, confidence).unwrap();
            assert!(!same.proven && same.difference == 0.0);
        }
        let constant = Comparison::of(&[3.0; 3], &[3.0; 4], Confidence::default()).unwrap();
        assert!(!constant.proven && constant.error == 0.0);
    }

    #[test]
    fn too_few_samples_say_so() {
        let error = Comparison::of(&[1.0, 2.0], &IGUANA, Confidence::default()).unwrap_err();
        assert!(error.to_string().contains("2 and 7 samples"), "{error}");
    }
}
