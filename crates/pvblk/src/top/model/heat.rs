//! A heat map: times by length, one column for each answer.

use pvblk_backend::Histogram;
use std::collections::VecDeque;

/// Columns that are kept.
const COLUMNS: usize = 120;
/// Bands of times: two for each factor of ten from 1 µs to 10 s, one below and one above.
pub const BANDS: usize = 16;

/// The latest columns, each with the number of requests in every band.
#[derive(Clone, Debug, Default)]
pub struct HeatMap {
    columns: VecDeque<[u64; BANDS]>,
}

impl HeatMap {
    pub fn add(&mut self, times: &Histogram) {
        let mut column = [0; BANDS];
        for (end, count) in times.buckets() {
            // The middle of a bucket, which is an eighth of its end wide.
            column[band(end - end / 16)] += count;
        }
        self.columns.push_back(column);
        if self.columns.len() > COLUMNS {
            self.columns.pop_front();
        }
    }

    /// The latest columns, the newest last.
    pub fn last(&self, columns: usize) -> impl Iterator<Item = &[u64; BANDS]> {
        let left = self.columns.len().saturating_sub(columns);
        self.columns.iter().skip(left)
    }

    /// The lowest and the highest band that has requests in the latest columns.
    pub fn used(&self, columns: usize) -> Option<(usize, usize)> {
        let has = |band: &usize| self.last(columns).any(|c| c[*band] > 0);
        Some(((0..BANDS).find(has)?, (0..BANDS).rev().find(has)?))
    }
}

fn band(ns: u64) -> usize {
    (1..BANDS).rev().find(|b| ns >= begin(*b)).unwrap_or(0)
}

/// Least time of a band in nanoseconds: 0, 1 µs, 3 µs, 10 µs and so on.
pub fn begin(band: usize) -> u64 {
    match band {
        0 => 0,
        n => 10u64.pow(3 + (n as u32 - 1) / 2) * if n % 2 == 0 { 3 } else { 1 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_their_band_and_old_columns_go() {
        assert_eq!(band(999), 0);
        assert_eq!(band(1000), 1);
        assert_eq!(band(2_999), 1);
        assert_eq!(band(3_000), 2);
        assert_eq!(band(10_000_000_000), 15);
        assert_eq!(band(u64::MAX), 15);
        let mut map = HeatMap::default();
        for _ in 0..COLUMNS {
            map.add(&Histogram::from_iter([(1 << 20, 3)]));
        }
        map.add(&Histogram::from_iter([(128, 1), (u64::MAX, 2)]));
        assert_eq!(map.last(1000).count(), COLUMNS);
        assert_eq!(map.used(1), Some((0, 15)));
        assert_eq!(map.used(2), Some((0, 15)));
        map.add(&Histogram::default());
        assert_eq!(map.used(1), None);
    }
}
