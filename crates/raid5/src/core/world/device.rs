//! Devices with a volatile cache, as bytes.

use fastrand::Rng;
use std::collections::BTreeSet;
use std::ops::Range;

pub const SECTOR: usize = 512;

/// A device. A write that has ended is in its cache until a flush that was begun later has ended.
pub struct Device {
    /// The contents that reads find.
    now: Vec<u8>,
    stable: Vec<u8>,
    /// Sectors that are in the cache, in the order of their writes' ends: number of the write, sector, contents.
    cache: Vec<(u64, usize, Vec<u8>)>,
    writes: u64,
    pub volatile: bool,
    /// It fails everything.
    pub dead: bool,
    /// Sectors that can't be read until they are written.
    bad: BTreeSet<u64>,
}

impl Device {
    pub fn new(contents: Vec<u8>, volatile: bool) -> Device {
        Device {
            now: contents.clone(),
            stable: contents,
            cache: Vec::new(),
            writes: 0,
            volatile,
            dead: false,
            bad: BTreeSet::new(),
        }
    }

    pub fn contents(&self) -> &[u8] {
        &self.now
    }

    /// Sectors can't be read from now on.
    pub fn spoil(&mut self, sectors: Range<u64>) {
        self.bad.extend(sectors);
    }

    pub fn can_read(&self, sectors: Range<u64>) -> bool {
        self.bad.range(sectors).next().is_none()
    }

    pub fn read(&self, sector: u64, bytes: usize) -> &[u8] {
        let at = sector as usize * SECTOR;
        &self.now[at..at + bytes]
    }

    pub fn write(&mut self, sector: u64, bytes: &[u8], fua: bool) {
        self.writes += 1;
        for (n, bytes) in bytes.chunks(SECTOR).enumerate() {
            self.bad.remove(&(sector + n as u64));
            let sector = sector as usize + n;
            let at = sector * SECTOR;
            self.now[at..at + SECTOR].copy_from_slice(bytes);
            match fua || !self.volatile {
                true => {
                    self.cache.retain(|(_, other, _)| *other != sector);
                    self.stable[at..at + SECTOR].copy_from_slice(bytes);
                }
                false => self.cache.push((self.writes, sector, bytes.to_vec())),
            }
        }
    }

    /// The mark of a flush that begins now, for its end.
    pub fn begin_flush(&self) -> u64 {
        self.writes
    }

    pub fn end_flush(&mut self, mark: u64) {
        let stable = &mut self.stable;
        self.cache.retain(|(write, sector, bytes)| {
            let is_covered = *write <= mark;
            if is_covered {
                stable[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
            }
            !is_covered
        });
    }

    /// Contents after a power cut: each sector in the cache, or in flight, is there or not.
    pub fn cut(&self, flying: &[(u64, Vec<u8>)], rng: &mut Rng) -> Vec<u8> {
        let mut bytes = self.stable.clone();
        // All, none or some.
        let chance = *rng.choice(&[0, 2, 2, 4]).expect("one of them");
        for (_, sector, data) in &self.cache {
            if rng.u32(..4) < chance {
                bytes[sector * SECTOR..][..SECTOR].copy_from_slice(data);
            }
        }
        let chance = *rng.choice(&[0, 2, 2, 4]).expect("one of them");
        for (sector, data) in flying {
            for (n, data) in data.chunks(SECTOR).enumerate() {
                if rng.u32(..4) < chance {
                    bytes[(*sector as usize + n) * SECTOR..][..SECTOR].copy_from_slice(data);
                }
            }
        }
        bytes
    }
}
