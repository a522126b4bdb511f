//! Ratios of runs that were interleaved in pairs, and the claims that a control allows.

use super::Confidence;
use super::summary::{mean, variance};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::fmt;

/// Fewest pairs that have an interval.
const MIN_PAIRS: usize = 3;

/// The ratio of paired samples.
///
/// Both runs of a pair share the state of the machine at the time, so their ratio is steadier than either
/// rate. Ratios multiply, so their mean is taken of logarithms: twice and half are equally far from one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PairRatio {
    /// Number of pairs.
    pub pairs: usize,
    /// Median of the ratios.
    pub median: f64,
    /// Geometric mean of the ratios.
    pub mean: f64,
    /// Lower end of the interval of the geometric mean.
    pub low: f64,
    /// Upper end of the interval of the geometric mean.
    pub high: f64,
    /// Confidence of the interval, percent.
    pub confidence: Confidence,
}

impl PairRatio {
    /// The ratios `a[i] / b[i]`. Both sets have the same length, at least three, and all samples
    /// are above 0.
    pub fn of(a: &[f64], b: &[f64], confidence: Confidence) -> Result<PairRatio> {
        ensure!(
            a.len() == b.len(),
            "{} and {} samples don't make pairs",
            a.len(),
            b.len()
        );
        ensure!(
            a.len() >= MIN_PAIRS,
            "{} pairs: an interval needs {MIN_PAIRS}",
            a.len()
        );
        let usable = |v: &&f64| v.is_finite() && **v > 0.0;
        if let Some(bad) = a.iter().chain(b).find(|v| !usable(v)) {
            anyhow::bail!("a sample is {bad}: ratios need samples above 0");
        }
        let logs: Vec<f64> = a.iter().zip(b).map(|(a, b)| (a / b).ln()).collect();
        let pairs = logs.len();
        let centre = mean(&logs);
        let half = confidence.factor(pairs - 1) * (variance(&logs, centre) / pairs as f64).sqrt();
        let ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
        Ok(PairRatio {
            pairs,
            median: crate::path::median(&ratios),
            mean: centre.exp(),
            low: (centre - half).exp(),
            high: (centre + half).exp(),
            confidence,
        })
    }

    /// Distance of the ratio from one as a logarithm: that of the median or of the mean, whichever is nearer.
    /// It is 0 if they lie on different sides of one.
    fn margin(&self) -> f64 {
        let (median, mean) = (self.median.ln(), self.mean.ln());
        if median * mean <= 0.0 {
            return 0.0;
        }
        median.abs().min(mean.abs())
    }

    /// Greatest distance of the interval from one, as a logarithm.
    fn reach(&self) -> f64 {
        self.low.ln().abs().max(self.high.ln().abs())
    }
}

impl fmt::Display for PairRatio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PairRatio {
            median, low, high, ..
        } = self;
        write!(f, "{median:.3} ({low:.3} to {high:.3})")
    }
}

/// The reason why a difference isn't claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Doubt {
    /// The interval of the ratio holds one.
    HoldsOne,
    /// The control, which compares a thing with itself, reaches as far.
    WithinControl,
}

/// The claim that a ratio allows, given the A/A control of the same runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// The ratio that was measured.
    pub ratio: PairRatio,
    /// The ratio of the A/A control.
    pub control: PairRatio,
    /// `None` if the difference is proven.
    pub doubt: Option<Doubt>,
}

impl Claim {
    /// Claims a difference only if its interval doesn't hold one and the margin is greater than the reach of
    /// the control's interval. A control that isn't around one shows a bias, and counts in full.
    pub fn of(ratio: PairRatio, control: PairRatio) -> Claim {
        let doubt = if ratio.low <= 1.0 && ratio.high >= 1.0 {
            Some(Doubt::HoldsOne)
        } else if ratio.margin() <= control.reach() {
            Some(Doubt::WithinControl)
        } else {
            None
        };
        Claim {
            ratio,
            control,
            doubt,
        }
    }

    /// True if the difference may be claimed.
    pub fn proven(&self) -> bool {
        self.doubt.is_none()
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.doubt {
            None => "Difference",
            Some(_) => "No difference proven",
        };
        let why = match self.doubt {
            None => "",
            Some(Doubt::HoldsOne) => "; the interval holds one",
            Some(Doubt::WithinControl) => "; the control reaches as far",
        };
        write!(
            f,
            "{verdict} at {} confidence: ratio {}, A/A {}{why}",
            self.ratio.confidence, self.ratio, self.control
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratio(a: &[f64]) -> PairRatio {
        PairRatio::of(a, &vec![1.0; a.len()], Confidence::default()).unwrap()
    }

    #[test]
    fn a_known_interval() {
        // Logarithms 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 4.302653 for two degrees of freedom.
        let r = ratio(&[1f64.exp(), 2f64.exp(), 3f64.exp()]);
        let half = 4.302_652_729_911_275 / 3f64.sqrt();
        assert!((r.mean.ln() - 2.0).abs() < 1e-12 && (r.median.ln() - 2.0).abs() < 1e-12);
        assert!((r.low.ln() - (2.0 - half)).abs() < 1e-8, "{r:?}");
        assert!((r.high.ln() - (2.0 + half)).abs() < 1e-8, "{r:?}");
    }

    #[test]
    fn what_has_no_ratio_says_so() {
        let of = |a: &[f64], b: &[f64]| PairRatio::of(a, b, Confidence::default());
        for (a, b, culprit) in [
            (&[1.0, 2.0][..], &[1.0, 2.0][..], "2 pairs"),
            (&[1.0, 2.0, 3.0], &[1.0, 2.0], "3 and 2"),
            (&[1.0, 2.0, 0.0], &[1.0, 2.0, 3.0], "is 0"),
            (&[1.0, 2.0, 3.0], &[1.0, f64::NAN, 3.0], "NaN"),
        ] {
            let error = of(a, b).unwrap_err().to_string();
            assert!(error.contains(culprit), "{error}");
        }
    }

    #[test]
    fn a_clear_margin_is_claimed() {
        let claim = Claim::of(
            ratio(&[1.30, 1.31, 1.29, 1.30]),
            ratio(&[1.0, 1.01, 0.99, 1.0]),
        );
        assert!(claim.proven());
        let text = claim.to_string();
        assert!(
            text.starts_with("Difference at 95.0% confidence: ratio 1.300 ("),
            "{text}"
        );
    }

    #[test]
    fn a_margin_within_the_control_is_never_claimed() {
        let steady = ratio(&[1.030, 1.031, 1.029, 1.030]);
        assert!(steady.low > 1.0);
        let noisy = ratio(&[0.90, 1.10, 0.95, 1.05]);
        let claim = Claim::of(steady, noisy);
        assert_eq!(claim.doubt, Some(Doubt::WithinControl));
        assert!(claim.to_string().starts_with("No difference proven"));
        // A steady control that isn't around one shows a bias.
        let biased = ratio(&[0.96, 0.961, 0.959, 0.96]);
        assert_eq!(Claim::of(steady, biased).doubt, Some(Doubt::WithinControl));
    }

    #[test]
    fn an_interval_around_one_is_not_claimed() {
        let claim = Claim::of(ratio(&[0.8, 1.3, 1.4]), ratio(&[1.0, 1.0, 1.0]));
        assert_eq!(claim.doubt, Some(Doubt::HoldsOne));
    }

    #[test]
    fn one_outlier_does_not_make_a_margin() {
        // One run pulls the mean up, while the median shows no difference.
        let r = PairRatio {
            median: 0.999,
            ..ratio(&[1.2, 1.21, 1.19])
        };
        assert_eq!(r.margin(), 0.0);
    }
}
