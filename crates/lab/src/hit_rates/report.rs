//! Table and checks of `pvblk-lab hit-rates`.

use super::shapes::Shape;
use super::{HitRateSample, HitRates, POLICIES};
use crate::verdict::{Check, table};

/// Places in [`POLICIES`].
const BEST: usize = 0;
const SERVED: usize = 1;
const OF_2011: usize = 2;

impl HitRateSample {
    /// The highest rate of a policy that doesn't know the future, but the one that is served.
    fn best_other(&self) -> f64 {
        self.rates[OF_2011..].iter().copied().fold(0.0, f64::max)
    }
}

impl HitRates {
    /// Hit rates in percent.
    pub fn table(&self) -> String {
        let mut header = vec!["shape"];
        header.extend(POLICIES);
        header.push("served / best other");
        let mut t = table(&header);
        for sample in &self.samples {
            let mut row = vec![sample.shape.to_owned()];
            row.extend(
                sample
                    .rates
                    .iter()
                    .map(|rate| format!("{:.1}", 100.0 * rate)),
            );
            row.push(format!(
                "{:.2}",
                sample.rates[SERVED] / sample.best_other().max(1e-9)
            ));
            t.add_row(row);
        }
        t.to_string()
    }
}

impl HitRates {
    pub fn checks(&self) -> Vec<Check> {
        let over = |s: &&HitRateSample| s.of_all.iter().any(|rate| *rate > s.of_all[BEST] + 1e-9);
        let over = self.samples.iter().filter(over).count();
        let mut checks = vec![Check {
            expected: "no policy is better than the best that there can be".into(),
            figure: format!("{over} shapes where one is"),
            holds: over == 0,
        }];
        for sample in &self.samples {
            let (served, other) = (sample.rates[SERVED], sample.best_other());
            let ratio = served / other.max(1e-9);
            // Pages that are to stay are used twice first, which costs a set that moves what LRU keeps at once.
            let moving = sample.shape == Shape::Moving.name();
            let least = if moving { 0.85 } else { 0.9 };
            checks.push(Check {
                expected: format!(
                    "{}: served at least {least} of the best other",
                    sample.shape
                ),
                figure: format!("{ratio:.3}"),
                holds: ratio >= least,
            });
        }
        checks
    }
}
