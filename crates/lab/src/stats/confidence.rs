//! Levels of confidence, and the quantiles that follow from them.

use serde::{Serialize, Serializer};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};
use std::fmt;
use std::str::FromStr;

/// Most degrees of freedom that `ministat` has a quantile for; beyond, it uses the normal distribution's.
const MAX_TABLED: usize = 100;

/// Wrong entries of the table that `ministat` reads: for 99.5 % and 7 to 12 degrees of freedom they are off
/// by 0.001 to 0.003.
const MISPRINTED: (usize, [f64; 6]) = (7, [4.782, 4.499, 4.296, 4.143, 4.024, 3.929]);

/// A confidence level that `ministat` knows: 80, 90, 95, 98, 99 or 99.5 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Confidence {
    percent: f64,
    /// Quantile that `ministat` takes: the two-sided one, but 0.999 for 99.5 %, which is stricter than it
    /// says.
    ministat_quantile: f64,
}

const LEVELS: [Confidence; 6] = [
    level(80.0, 0.9),
    level(90.0, 0.95),
    level(95.0, 0.975),
    level(98.0, 0.99),
    level(99.0, 0.995),
    level(99.5, 0.999),
];

const fn level(percent: f64, ministat_quantile: f64) -> Confidence {
    Confidence {
        percent,
        ministat_quantile,
    }
}

impl Default for Confidence {
    fn default() -> Confidence {
        LEVELS[2]
    }
}

impl Confidence {
    /// The level of `percent` percent; `None` if it isn't one of the six.
    pub fn of_percent(percent: f64) -> Option<Confidence> {
        LEVELS.into_iter().find(|l| l.percent == percent)
    }

    /// All levels, the lowest first.
    pub fn all() -> [Confidence; 6] {
        LEVELS
    }

    pub fn percent(self) -> f64 {
        self.percent
    }

    /// Number of standard errors that each side of a difference extends, for `freedom` degrees of freedom.
    ///
    /// It is rounded to three decimals, and constant beyond 100 degrees of freedom, so that every printed
    /// figure and every verdict is that of `ministat`, which reads these numbers from a printed table.
    pub(super) fn ministat_factor(self, freedom: usize) -> f64 {
        let misprint = freedom
            .checked_sub(MISPRINTED.0)
            .and_then(|at| MISPRINTED.1.get(at));
        if let (Some(&factor), true) = (misprint, self.percent == 99.5) {
            return factor;
        }
        let exact = if freedom > MAX_TABLED {
            Normal::standard().inverse_cdf(self.ministat_quantile)
        } else {
            t_quantile(self.ministat_quantile, freedom as f64)
        };
        (exact * 1e3).round() / 1e3
    }

    /// Number of standard errors that each side of a two-sided interval extends, for `freedom` degrees of
    /// freedom.
    pub(super) fn factor(self, freedom: usize) -> f64 {
        t_quantile(0.5 + self.percent / 200.0, freedom as f64)
    }
}

/// Quantile of Student's t above the median.
fn t_quantile(quantile: f64, freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom).map_or(f64::INFINITY, |t| t.inverse_cdf(quantile))
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1}%", self.percent)
    }
}

impl FromStr for Confidence {
    type Err = String;

    fn from_str(text: &str) -> Result<Confidence, String> {
        let number = text.strip_suffix('%').unwrap_or(text).trim().parse().ok();
        number
            .and_then(Confidence::of_percent)
            .ok_or_else(|| "must be 80, 90, 95, 98, 99 or 99.5 percent".to_owned())
    }
}

impl Serialize for Confidence {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_printed_tables() {
        // Two-sided 80, 90, 95, 98, 99 % and one-sided 0.999.
        for (freedom, row) in [
            (4, [1.533, 2.132, 2.776, 3.747, 4.604, 7.173]),
            (30, [1.310, 1.697, 2.042, 2.457, 2.750, 3.385]),
            (100, [1.290, 1.660, 1.984, 2.364, 2.626, 3.174]),
            (101, [1.282, 1.645, 1.960, 2.326, 2.576, 3.090]),
        ] {
            assert_eq!(LEVELS.map(|l| l.ministat_factor(freedom)), row, "{freedom}");
        }
    }

    #[test]
    fn the_misprints_are_near_the_truth() {
        for freedom in 7..=12 {
            let exact = t_quantile(0.999, freedom as f64);
            let off = LEVELS[5].ministat_factor(freedom) - exact;
            assert!((-0.004..-0.0005).contains(&off), "{freedom}: {off}");
        }
        assert_eq!(LEVELS[2].ministat_factor(7), 2.365, "only that level");
    }

    #[test]
    fn quantiles_invert_the_distribution() {
        for freedom in 1..=300u32 {
            let t = StudentsT::new(0.0, 1.0, f64::from(freedom)).unwrap();
            for p in [0.9, 0.95, 0.975, 0.99, 0.995, 0.9975, 0.999] {
                let back = t.cdf(t_quantile(p, f64::from(freedom)));
                assert!((back - p).abs() < 1e-9, "{freedom} {p}: {back}");
            }
        }
    }

    #[test]
    fn only_known_levels_parse() {
        for (text, percent) in [("95", 95.0), ("99.5", 99.5), ("80%", 80.0), ("90.0", 90.0)] {
            assert_eq!(text.parse::<Confidence>().unwrap().percent(), percent);
        }
        for text in ["97", "", "nan", "-95", "ninety"] {
            assert!(text.parse::<Confidence>().is_err());
        }
        assert_eq!(Confidence::default().to_string(), "95.0%");
    }
}
