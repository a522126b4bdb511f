//! The contents of a disk, and those that would survive a loss of its cache.

use crate::stamp::Bytes;
use fastrand::Rng;
use std::collections::BTreeMap;
use std::ops::Range;

const PAGE_SECTORS: u64 = 8;
const PAGE_BYTES: usize = 4096;

/// A write of one sector that is in the cache and not on the medium.
#[derive(Clone, Debug)]
struct Unflushed {
    bytes: Box<Bytes>,
    write: u64,
    queue: usize,
    /// Time at which the write's completion was taken; `None` before.
    completed: Option<u64>,
}

/// The part of the cache that survives its loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survives {
    Nothing,
    Everything,
    /// For each sector, any of its versions.
    AnyVersions,
    WholeWrites,
}

/// Sectors with a volatile cache. A flush makes no more stable than it must.
#[derive(Debug)]
pub struct Image {
    /// Pages that were ever written; the others are zeros.
    pages: Vec<Option<Box<[u8; PAGE_BYTES]>>>,
    /// Unflushed writes of each sector, in the order in which they were done.
    cache: BTreeMap<u64, Vec<Unflushed>>,
}

impl Image {
    /// An image of `sectors` sectors of zeros.
    pub fn new(sectors: u64) -> Image {
        Image {
            pages: vec![None; sectors.div_ceil(PAGE_SECTORS) as usize],
            cache: BTreeMap::new(),
        }
    }

    /// The contents on the medium.
    pub fn durable(&self, sector: u64) -> Bytes {
        let mut bytes = [0; 512];
        if let Some(page) = &self.pages[(sector / PAGE_SECTORS) as usize] {
            let at = (sector % PAGE_SECTORS) as usize * 512;
            bytes.copy_from_slice(&page[at..at + 512]);
        }
        bytes
    }

    /// The contents that a read finds.
    pub fn current(&self, sector: u64) -> Bytes {
        let newest = self.cache.get(&sector).and_then(|v| v.last());
        newest.map_or_else(|| self.durable(sector), |v| *v.bytes)
    }

    /// Puts a sector on the medium.
    pub fn set(&mut self, sector: u64, bytes: &Bytes) {
        let page = &mut self.pages[(sector / PAGE_SECTORS) as usize];
        let page = page.get_or_insert_with(|| Box::new([0; PAGE_BYTES]));
        let at = (sector % PAGE_SECTORS) as usize * 512;
        page[at..at + 512].copy_from_slice(bytes);
    }

    /// Write number `write` writes a sector into the cache.
    pub fn write(&mut self, sector: u64, bytes: &Bytes, queue: usize, write: u64) {
        self.cache.entry(sector).or_default().push(Unflushed {
            bytes: Box::new(*bytes),
            write,
            queue,
            completed: None,
        });
    }

    /// The completion of write number `write` is taken at time `now`.
    pub fn completed(&mut self, sectors: Range<u64>, write: u64, now: u64, durable: bool) {
        let mut settled = Vec::new();
        for (&sector, versions) in self.cache.range_mut(sectors) {
            let Some(at) = versions.iter().position(|v| v.write == write) else {
                continue;
            };
            versions[at].completed = Some(now);
            if durable {
                settled.push((sector, at));
            }
        }
        self.settle(settled);
    }

    /// Makes writes stable that completed before `time`; only those of queue `only`, if it is
    /// given.
    pub fn flush(&mut self, time: u64, only: Option<usize>) {
        let covered = |v: &Unflushed| {
            v.completed.is_some_and(|c| c < time) && only.is_none_or(|q| q == v.queue)
        };
        let cache = self.cache.iter();
        let settled = cache.filter_map(|(&s, v)| Some((s, v.iter().rposition(covered)?)));
        let settled = settled.collect();
        self.settle(settled);
    }

    /// Puts versions on the medium, given by sector and index, and forgets those before them.
    fn settle(&mut self, all: Vec<(u64, usize)>) {
        for (sector, upto) in all {
            let Some(versions) = self.cache.get_mut(&sector) else {
                continue;
            };
            let newest = versions.drain(..=upto).next_back();
            if versions.is_empty() {
                self.cache.remove(&sector);
            }
            if let Some(v) = newest {
                self.set(sector, &v.bytes);
            }
        }
    }

    /// Loses the cache. Returns the number of sectors that were in it.
    pub fn lose(&mut self, survives: Survives, rng: &mut Rng) -> u64 {
        let cache = std::mem::take(&mut self.cache);
        let salt = rng.u64(..);
        for (&sector, versions) in &cache {
            let survives = match survives {
                Survives::Nothing => None,
                Survives::Everything => versions.last(),
                Survives::AnyVersions => versions.get(rng.usize(..=versions.len())),
                Survives::WholeWrites => versions
                    .iter()
                    .rfind(|v| Rng::with_seed(v.write ^ salt).bool()),
            };
            if let Some(v) = survives {
                self.set(sector, &v.bytes);
            }
        }
        cache.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_saves_what_completed_before_it_and_nothing_else() {
        let b = |n: u8| [n; 512];
        let made = || {
            let mut image = Image::new(16);
            image.write(0, &b(10), 0, 1);
            image.completed(0..1, 1, 5, false);
            image.write(0, &b(11), 0, 2);
            image.write(9, &b(12), 1, 3);
            image.completed(9..10, 3, 6, false);
            image.write(2, &b(13), 0, 4);
            image.write(3, &b(14), 0, 5);
            image.completed(3..4, 5, 7, true);
            image.flush(6, None);
            image
        };
        assert_eq!([0, 9, 2, 3].map(|s| made().current(s)[0]), [11, 12, 13, 14]);
        let (mut kept, mut lost) = (false, false);
        for seed in 0..20 {
            let mut image = made();
            let survives = [Survives::AnyVersions, Survives::WholeWrites][seed as usize % 2];
            image.lose(survives, &mut Rng::with_seed(seed));
            assert!([10, 11].contains(&image.current(0)[0]));
            assert_eq!(image.current(3)[0], 14);
            kept |= image.current(9)[0] == 12;
            lost |= image.current(9)[0] == 0;
        }
        assert!(kept && lost);
    }
}
