//! The bounds of histograms, and the disks that have them.

use super::snapshot::DiskFigures;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Bounds in seconds, as Prometheus itself prints them. All are powers of two of nanoseconds, which are bounds of the counters' buckets, too.
pub const BOUNDS: [&str; 19] = [
    "4.096e-06",
    "8.192e-06",
    "1.6384e-05",
    "3.2768e-05",
    "6.5536e-05",
    "0.000131072",
    "0.000262144",
    "0.000524288",
    "0.001048576",
    "0.002097152",
    "0.004194304",
    "0.008388608",
    "0.016777216",
    "0.033554432",
    "0.067108864",
    "0.134217728",
    "0.268435456",
    "1.073741824",
    "8.589934592",
];
/// One more: times above all bounds.
pub const COUNTS: usize = BOUNDS.len() + 1;
/// Binary logarithms of the first bound in nanoseconds, of the last one up to which each is twice the one before, and of the two after it.
const FIRST: u32 = 12;
const DOUBLES: u32 = 28;
const LAST: [u32; 2] = [30, 33];

/// The bucket for times below `end` nanoseconds.
pub fn place(end: u64) -> usize {
    let log = end.checked_next_power_of_two().map_or(64, u64::ilog2);
    match log {
        0..=FIRST => 0,
        log if log <= DOUBLES => (log - FIRST) as usize,
        log if log <= LAST[0] => BOUNDS.len() - 2,
        log if log <= LAST[1] => BOUNDS.len() - 1,
        _ => BOUNDS.len(),
    }
}

/// Lines of a histogram.
const LINES: usize = COUNTS + 2;
/// Most lines of histograms in a reading. With as many lines of disks and hops as there can be, all lines of 1,000 disks are some 20,000.
const MOST_LINES: usize = 5_000;
/// A disk is in use for so long after its last request.
const IN_USE: Duration = Duration::from_secs(300);

/// The histograms that a reader wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buckets {
    /// Of disks in use, as many as fit.
    Active,
    All,
    None,
}

impl Buckets {
    /// The value of `buckets=`.
    pub fn parse(value: &str) -> Option<Buckets> {
        match value {
            "active" => Some(Buckets::Active),
            "all" => Some(Buckets::All),
            "none" => Some(Buckets::None),
            _ => None,
        }
    }
}

/// The disks in use, as far as readings tell.
#[derive(Default)]
pub struct InUse(HashMap<String, Used>);

#[derive(Clone, Copy)]
struct Used {
    requests: u64,
    /// When a reading found more requests than the one before.
    last: Instant,
    /// It had buckets in the last reading.
    shown: bool,
}

impl InUse {
    /// The disks that have buckets in this reading, by their places, and the number of disks in use that have none. Disks that had some keep them as long as they are
    /// in use: series are not to come and go.
    pub fn choose(&mut self, disks: &[DiskFigures], now: Instant) -> (Vec<bool>, u64) {
        let mut table = HashMap::with_capacity(disks.len());
        let mut wanted = Vec::new();
        for (index, disk) in disks.iter().enumerate() {
            let Some(counts) = &disk.counts else {
                continue;
            };
            let requests = counts.requests();
            let old = self.0.get(&disk.name).copied();
            let used = match old {
                Some(old) if old.requests == requests => old,
                None if requests == 0 => continue,
                _ => Used {
                    requests,
                    last: now,
                    shown: old.is_some_and(|o| o.shown),
                },
            };
            if requests > 0 && now.saturating_duration_since(used.last) <= IN_USE {
                let lines = LINES * counts.operations.iter().filter(|o| o.requests > 0).count();
                wanted.push((!used.shown, index, lines));
            }
            table.insert(
                disk.name.clone(),
                Used {
                    shown: false,
                    ..used
                },
            );
        }
        wanted.sort_unstable();
        let (mut chosen, mut lines, mut left_out) = (vec![false; disks.len()], 0, 0);
        for (_, index, more) in wanted {
            if lines + more > MOST_LINES {
                left_out += 1;
                continue;
            }
            lines += more;
            chosen[index] = true;
            if let Some(used) = table.get_mut(&disks[index].name) {
                used.shown = true;
            }
        }
        self.0 = table;
        (chosen, left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::Counts;
    use super::*;

    #[test]
    fn bounds_are_those_of_the_counters() {
        let mut last = 0.0;
        for (index, bound) in BOUNDS.iter().enumerate() {
            let seconds: f64 = bound.parse().unwrap();
            let ns = (seconds * 1e9).round() as u64;
            assert!(ns.is_power_of_two() && seconds > last, "{bound}");
            last = seconds;
            assert_eq!(place(ns), index, "{bound}");
            assert_eq!(place(ns + 1), index + 1, "{bound}");
        }
        assert_eq!(place(128), 0);
        assert_eq!(place(u64::MAX), BOUNDS.len());
    }

    fn disks(requests: &[u64]) -> Vec<DiskFigures> {
        let each = requests.iter().enumerate().map(|(n, &requests)| {
            let mut counts = Counts::default();
            counts.operations[0].requests = requests;
            DiskFigures {
                name: format!("d{n:05}"),
                counts: Some(counts),
                ..DiskFigures::default()
            }
        });
        each.collect()
    }

    #[test]
    fn disks_in_use_have_buckets_and_keep_them() {
        let mut in_use = InUse::default();
        let begin = Instant::now();
        assert_eq!(
            in_use.choose(&disks(&[0, 5, 0]), begin),
            (vec![false, true, false], 0)
        );
        assert_eq!(
            in_use.choose(&disks(&[1, 5, 0]), begin + IN_USE),
            (vec![true, true, false], 0)
        );
        // The second one has rested.
        let later = begin + IN_USE + Duration::from_secs(1);
        assert_eq!(
            in_use.choose(&disks(&[1, 5, 0]), later),
            (vec![true, false, false], 0)
        );
        assert_eq!(
            in_use.choose(&disks(&[1, 6, 0]), later),
            (vec![true, true, false], 0)
        );
        // Counters that begin anew are requests, too.
        assert!(in_use.choose(&disks(&[1, 2, 0]), later + IN_USE).0[1]);
    }

    #[test]
    fn buckets_are_bounded_and_the_first_ones_stay() {
        let mut in_use = InUse::default();
        let begin = Instant::now();
        let most = MOST_LINES / LINES;
        let mut requests = vec![0; 1000];
        requests[500..].fill(1);
        let (chosen, left_out) = in_use.choose(&disks(&requests), begin);
        assert_eq!(
            (chosen.iter().filter(|c| **c).count(), left_out as usize),
            (most, 500 - most)
        );
        requests.fill(2);
        let (again, left_out) = in_use.choose(&disks(&requests), begin);
        assert_eq!((again, left_out as usize), (chosen, 1000 - most));
    }
}
