//! What a disk holds and what of it would survive.

use fastrand::Rng;
use std::ops::Range;

/// A write that is in the cache and not on the medium.
#[derive(Clone, Copy, Debug)]
struct Version {
    stamp: u64,
    queue: usize,
    write: u64,
    /// When its completion was handed over.
    completed: Option<u64>,
}

#[derive(Clone, Debug, Default)]
struct Sector {
    durable: u64,
    /// In the order in which they were done.
    versions: Vec<Version>,
}

/// Sectors with a volatile cache. A flush saves no more than it must.
#[derive(Debug)]
pub struct Cache {
    sectors: Vec<Sector>,
    /// Sectors with versions, some twice.
    dirty: Vec<usize>,
}

impl Cache {
    /// `sectors` of zeros.
    pub fn new(sectors: usize) -> Cache {
        Cache {
            sectors: vec![Sector::default(); sectors],
            dirty: Vec::new(),
        }
    }

    /// What a read finds.
    pub fn current(&self, sector: usize) -> u64 {
        let s = &self.sectors[sector];
        s.versions.last().map_or(s.durable, |v| v.stamp)
    }

    /// Write number `write` does a sector.
    pub fn write(&mut self, sector: usize, stamp: u64, queue: usize, write: u64) {
        let s = &mut self.sectors[sector];
        if s.versions.is_empty() {
            self.dirty.push(sector);
        }
        s.versions.push(Version {
            stamp,
            queue,
            write,
            completed: None,
        });
    }

    /// The completion of a write is handed over at time `now`.
    pub fn completed(&mut self, sectors: Range<usize>, write: u64, now: u64, durable: bool) {
        for s in &mut self.sectors[sectors] {
            let Some(at) = s.versions.iter().position(|v| v.write == write) else {
                continue;
            };
            s.versions[at].completed = Some(now);
            if durable {
                s.settle(at);
            }
        }
    }

    /// Makes durable what completed before `time`; only writes of queue `only`, if it is given.
    pub fn flush(&mut self, time: u64, only: Option<usize>) {
        for &sector in &self.dirty {
            let s = &mut self.sectors[sector];
            let covered = |v: &Version| {
                v.completed.is_some_and(|c| c < time) && only.is_none_or(|q| q == v.queue)
            };
            if let Some(at) = s.versions.iter().rposition(covered) {
                s.settle(at);
            }
        }
        self.dirty.retain(|&s| !self.sectors[s].versions.is_empty());
    }

    /// The power goes: of each sector any version survives, or none.
    pub fn lose(&mut self, rng: &mut Rng) {
        for sector in self.dirty.drain(..) {
            let s = &mut self.sectors[sector];
            if let Some(v) = s.versions.get(rng.usize(..=s.versions.len())) {
                s.durable = v.stamp;
            }
            s.versions.clear();
        }
    }
}

impl Sector {
    fn settle(&mut self, upto: usize) {
        self.durable = self.versions[upto].stamp;
        self.versions.drain(..=upto);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_saves_what_completed_before_it_and_nothing_else() {
        let mut c = Cache::new(3);
        c.write(0, 10, 0, 1);
        c.completed(0..1, 1, 5, false);
        c.write(0, 11, 0, 2);
        c.write(1, 12, 1, 3);
        c.completed(1..2, 3, 6, false);
        c.write(2, 13, 0, 4);
        c.flush(6, None);
        assert_eq!([0, 1, 2].map(|s| c.current(s)), [11, 12, 13]);
        let (mut kept, mut lost) = (false, false);
        for seed in 0..20 {
            let mut crashed = Cache {
                sectors: c.sectors.clone(),
                dirty: c.dirty.clone(),
            };
            crashed.lose(&mut Rng::with_seed(seed));
            assert!([10, 11].contains(&crashed.current(0)));
            kept |= crashed.current(1) == 12;
            lost |= crashed.current(1) == 0;
        }
        assert!(kept && lost);
    }
}
