//! Places and labels of ticks.

use serde::{Deserialize, Serialize};

/// The unit of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Number of things, or of things a second: k, M, G.
    Count,
    /// Microseconds: shown as ns, µs, ms or s.
    Microseconds,
    /// Bytes: KiB, MiB, GiB.
    Bytes,
    /// Bytes a second: KiB/s, MiB/s, GiB/s.
    BytesPerSecond,
    /// Seconds: shown as ms or s.
    Seconds,
    /// One of so many, on an axis of percentiles: 100 stands for 99 %.
    Nines,
    /// Percentages, shown with %.
    Percent,
    /// Plain numbers, such as ratios.
    Plain,
}

impl Unit {
    /// Steps of the unit, each with its name, the smallest first.
    fn steps(self) -> &'static [(f64, &'static str)] {
        match self {
            Unit::Count => &[(1.0, ""), (1e3, " k"), (1e6, " M"), (1e9, " G")],
            Unit::Microseconds => &[(1e-3, " ns"), (1.0, " µs"), (1e3, " ms"), (1e6, " s")],
            Unit::Bytes => &[
                (1.0, " B"),
                (1024.0, " KiB"),
                (1_048_576.0, " MiB"),
                (1_073_741_824.0, " GiB"),
            ],
            Unit::BytesPerSecond => &[
                (1.0, " B/s"),
                (1024.0, " KiB/s"),
                (1_048_576.0, " MiB/s"),
                (1_073_741_824.0, " GiB/s"),
            ],
            Unit::Seconds => &[(1e-3, " ms"), (1.0, " s")],
            Unit::Nines => &[(1.0, "")],
            Unit::Percent => &[(1.0, " %")],
            Unit::Plain => &[(1.0, "")],
        }
    }

    fn step_for(self, value: f64) -> (f64, &'static str) {
        let steps = self.steps();
        let fitting = steps.iter().rev().find(|(size, _)| value.abs() >= *size);
        *fitting.unwrap_or(&steps[0])
    }

    /// A number with its unit, at most three significant digits of fraction.
    pub fn label(self, value: f64) -> String {
        if value == 0.0 {
            return "0".to_owned();
        }
        if self == Unit::Nines {
            let digits = value.log10().round().clamp(0.0, 9.0) as usize;
            return format!("{:.*} %", digits.saturating_sub(2), 100.0 - 100.0 / value);
        }
        let (size, name) = self.step_for(value);
        let scaled = value / size;
        let decimals = match scaled.abs() {
            v if v >= 100.0 => 0,
            v if v >= 10.0 => 1,
            _ => 2,
        };
        let text = format!("{scaled:.decimals$}");
        let text = if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.')
        } else {
            &text
        };
        format!("{text}{name}")
    }

    /// The label of a tick on an axis of powers of two: a whole number is written as it is, or in binary units if it has more than five digits.
    pub(super) fn binary_label(self, value: f64) -> String {
        let is_whole = value.fract() == 0.0 && value.abs() < 2f64.powi(53);
        if !is_whole || !matches!(self, Unit::Count | Unit::Plain) {
            return self.label(value);
        }
        let units = [(1 << 30, " Gi"), (1 << 20, " Mi"), (1 << 10, " Ki")];
        let whole = value as i64;
        let unit = units.iter().find(|(size, _)| whole % size == 0);
        match unit {
            Some((size, name)) if whole.abs() >= 100_000 => format!("{}{name}", whole / size),
            _ => whole.to_string(),
        }
    }

    /// Powers of ten that hold `low..=high`, which are above 0; if they are few, twice and five times as much, too.
    pub(super) fn decades(low: f64, high: f64) -> Vec<f64> {
        let first = (low.log10() + 1e-9).floor() as i32;
        let last = ((high.log10() - 1e-9).ceil() as i32).max(first + 1);
        let finer: &[f64] = if last - first <= 2 {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0]
        };
        let steps =
            (first..last).flat_map(|power| finer.iter().map(move |f| f * 10f64.powi(power)));
        let mut ticks: Vec<f64> = steps.chain([10f64.powi(last)]).collect();
        // The outermost that aren't needed.
        while ticks.len() > 2 && ticks[1] <= low {
            ticks.remove(0);
        }
        while ticks.len() > 2 && ticks[ticks.len() - 2] >= high {
            ticks.pop();
        }
        ticks
    }

    /// Labels of evenly spaced ticks: one unit and one number of decimals for all of them.
    pub(super) fn labels(self, ticks: &[f64]) -> Vec<String> {
        let max = ticks.iter().fold(0.0f64, |m, t| m.max(t.abs()));
        let (size, name) = self.step_for(max);
        let exact = |decimals: usize| {
            ticks.iter().all(|t| {
                let scaled = t / size * 10f64.powi(decimals as i32);
                (scaled - scaled.round()).abs() < 1e-6 * scaled.abs().max(1.0)
            })
        };
        let decimals = (0..6).find(|&d| exact(d)).unwrap_or(6);
        let label = |t: &f64| match *t == 0.0 {
            true => "0".to_owned(),
            false => format!("{:.decimals$}{name}", t / size),
        };
        ticks.iter().map(label).collect()
    }

    /// Evenly spaced ticks that hold `low..=high`: the first is at most `low`, the last at least `high`.
    pub(super) fn ticks(self, low: f64, high: f64, most: usize) -> Vec<f64> {
        let high = if high > low {
            high
        } else {
            low + low.abs().max(1.0)
        };
        let rough = (high - low) / most.max(2) as f64;
        let step = if matches!(self, Unit::Bytes | Unit::BytesPerSecond) {
            2f64.powf(rough.log2().ceil())
        } else {
            let magnitude = 10f64.powf(rough.log10().floor());
            let nice = [1.0, 2.0, 2.5, 5.0, 10.0];
            let nice = nice
                .iter()
                .find(|n| **n * magnitude >= rough * (1.0 - 1e-9));
            nice.unwrap_or(&10.0) * magnitude
        };
        let first = (low / step + 1e-9).floor() as i64;
        let last = (high / step - 1e-9).ceil() as i64;
        (first..=last).map(|i| i as f64 * step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_one_unit() {
        let of = |unit: Unit, high: f64| unit.labels(&unit.ticks(0.0, high, 5));
        assert_eq!(
            of(Unit::Count, 183_000.0),
            ["0", "50 k", "100 k", "150 k", "200 k"]
        );
        assert_eq!(
            of(Unit::Count, 2.4e6),
            ["0", "0.5 M", "1.0 M", "1.5 M", "2.0 M", "2.5 M"]
        );
        assert_eq!(of(Unit::Microseconds, 0.35).last().unwrap(), "400 ns");
        assert_eq!(of(Unit::Microseconds, 2600.0).last().unwrap(), "3 ms");
        assert_eq!(of(Unit::Bytes, 60.0 * 1048576.0).last().unwrap(), "64 MiB");
        assert_eq!(of(Unit::Percent, 93.0).last().unwrap(), "100 %");
    }

    #[test]
    fn ticks_hold_the_range() {
        for high in [1e-3, 0.7, 1.0, 9.99, 10.0, 12_345.0, 7e9] {
            for unit in [Unit::Count, Unit::Bytes, Unit::Plain] {
                let ticks = unit.ticks(0.0, high, 6);
                assert!((2..=8).contains(&ticks.len()), "{high}: {ticks:?}");
                assert_eq!(ticks[0], 0.0);
                assert!(ticks.last().unwrap() >= &(high * (1.0 - 1e-6)));
            }
        }
        assert_eq!(
            Unit::Count.ticks(0.0, 0.0, 5).first(),
            Some(&0.0),
            "nothing measured"
        );
    }

    #[test]
    fn powers_of_two_are_round() {
        let of = |v: f64| Unit::Count.binary_label(v);
        assert_eq!([1.0, 1024.0, 65536.0].map(of), ["1", "1024", "65536"]);
        assert_eq!([131_072.0, 1_048_576.0].map(of), ["128 Ki", "1 Mi"]);
        assert_eq!(of(1000.0), "1000");
        assert_eq!(of(0.5), "0.5");
        assert_eq!(Unit::Bytes.binary_label(65536.0), "64 KiB");
        assert_eq!(
            Unit::BytesPerSecond.labels(&Unit::BytesPerSecond.ticks(0.0, 1.7e9, 5)),
            ["0", "0.5 GiB/s", "1.0 GiB/s", "1.5 GiB/s", "2.0 GiB/s"]
        );
    }

    #[test]
    fn decades_hold_the_range() {
        assert_eq!(Unit::decades(3.0, 40.0), [2.0, 5.0, 10.0, 20.0, 50.0]);
        assert_eq!(
            Unit::decades(0.5, 90_000.0),
            [0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5]
        );
        assert_eq!(Unit::decades(10.0, 10.0), [10.0, 20.0]);
    }

    #[test]
    fn percentiles_have_nines() {
        let of = |v: f64| Unit::Nines.label(v);
        assert_eq!(
            [2.0, 10.0, 100.0, 1000.0, 10_000.0].map(of),
            ["50 %", "90 %", "99 %", "99.9 %", "99.99 %"]
        );
    }

    #[test]
    fn single_numbers() {
        assert_eq!(Unit::Microseconds.label(0.25), "250 ns");
        assert_eq!(Unit::Microseconds.label(12.34), "12.3 µs");
        assert_eq!(Unit::Count.label(1536.0), "1.54 k");
        assert_eq!(Unit::Bytes.label(4096.0), "4 KiB");
        assert_eq!(Unit::Count.label(128.0), "128");
        assert_eq!(Unit::Plain.label(0.0), "0");
    }
}
