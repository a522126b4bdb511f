//! The parts of an image that hold data, as of one question to the cluster and own writes since.

use pvblk_block::{Error, Extent, ExtentKind, SECTOR};
use pvblk_sys::librbd::Image;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Most objects that are told apart: a MiB of bits.
const MOST: u64 = 8 << 20;

/// A bit for each object that may hold data. It lies only to the safe side: what holds data is told as data.
pub(super) struct Objects {
    unit_bytes: u64,
    bits: Vec<AtomicU64>,
    /// The cluster was asked, and has answered.
    is_known: AtomicBool,
    /// The image has changed too much: everything is told as data.
    given_up: AtomicBool,
}

impl Objects {
    /// Bits for an image of this size, of which none is known.
    pub fn new(unit_bytes: u64, bytes: u64) -> Option<Objects> {
        let count = bytes.checked_div(unit_bytes)? + 1;
        (count <= MOST).then(|| Objects {
            unit_bytes,
            bits: (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            is_known: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
        })
    }

    /// Asks the cluster. Writes that complete meanwhile are marked by [`Objects::mark`].
    pub fn learn(&self, image: &Image) -> io::Result<()> {
        image.data(|at, len| self.mark(at, len))?;
        self.is_known.store(true, Ordering::Release);
        Ok(())
    }

    /// Everything is told as data from now on.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// A write of these bytes has completed.
    pub fn mark(&self, at: u64, len: u64) {
        if len == 0 {
            return;
        }
        for object in at / self.unit_bytes..=(at + len - 1) / self.unit_bytes {
            if let Some(word) = self.bits.get((object / 64) as usize) {
                word.fetch_or(1 << (object % 64), Ordering::Release);
            }
        }
    }

    fn holds_data(&self, object: u64) -> bool {
        let word = self.bits.get((object / 64) as usize);
        word.is_none_or(|word| word.load(Ordering::Acquire) >> (object % 64) & 1 != 0)
    }

    /// Adds extents that cover `sector..sector + sectors`.
    pub fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        let (first, end) = (out.len(), sector + sectors);
        let known = self.is_known.load(Ordering::Acquire) && !self.given_up.load(Ordering::Acquire);
        if !known {
            Extent::push(out, first, sector, end, ExtentKind::Data);
            return Ok(());
        }
        let unit = self.unit_bytes / SECTOR;
        let mut at = sector;
        while at < end {
            let next = ((at / unit + 1) * unit).min(end);
            let kind = match self.holds_data(at / unit) {
                true => ExtentKind::Data,
                false => ExtentKind::Hole,
            };
            Extent::push(out, first, at, next, kind);
            at = next;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(objects: &Objects, sector: u64, sectors: u64) -> Vec<(u64, u64, ExtentKind)> {
        let mut out = Vec::new();
        objects.extents(sector, sectors, &mut out).unwrap();
        out.iter().map(|e| (e.sector, e.sectors, e.kind)).collect()
    }

    #[test]
    fn what_isnt_known_is_data_and_own_writes_are() {
        use ExtentKind::{Data, Hole};
        let objects = Objects::new(4 << 20, 64 << 20).unwrap();
        assert_eq!(told(&objects, 3, 100), [(3, 100, Data)]);
        objects.mark(5 << 20, 1);
        objects.is_known.store(true, Ordering::Release);
        assert_eq!(
            told(&objects, 0, 131_072),
            [(0, 8192, Hole), (8192, 8192, Data), (16384, 114_688, Hole)]
        );
        assert_eq!(told(&objects, 8191, 2), [(8191, 1, Hole), (8192, 1, Data)]);
        // A write over two objects, and one behind the end of the image as it was.
        objects.mark((12 << 20) - 1, 2);
        objects.mark(1 << 40, 4096);
        assert_eq!(told(&objects, 16384, 16384), [(16384, 16384, Data)]);
        objects.give_up();
        assert_eq!(told(&objects, 0, 131_072), [(0, 131_072, Data)]);
    }

    #[test]
    fn bits_are_bounded() {
        assert!(Objects::new(0, 1 << 20).is_none());
        assert!(Objects::new(4096, 1 << 50).is_none());
        assert!(Objects::new(4 << 20, 16 << 40).is_some());
    }
}
