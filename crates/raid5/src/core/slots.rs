//! The places of data and log on a device, and stripes whose parity isn't known to be right.

use super::zero::Ability;
use crate::{Policy, Superblock};
use std::ops::Range;

/// A device of the array.
pub(super) struct Slot {
    /// Where its data begins.
    pub data_sectors: u64,
    /// Where its log begins.
    pub log_sector: u64,
    pub log_sectors: u64,
    pub ability: Ability,
    /// Blocks that could not be read and were calculated.
    pub corrected: u32,
}

impl Slot {
    pub fn new(superblock: &Superblock, ability: Ability) -> Slot {
        let log = match superblock.policy() {
            Policy::Ppl(log) => (log.sector, log.sectors),
            Policy::Bitmap { .. } | Policy::Resync => (0, 0),
        };
        Slot {
            data_sectors: superblock.data_offset_sectors,
            log_sector: log.0,
            log_sectors: log.1,
            ability,
            corrected: superblock.corrected_reads,
        }
    }
}

/// Stripes whose parity isn't known to be right: ranges in order.
#[derive(Clone, Default)]
pub(super) struct Unsynced(pub Vec<Range<u64>>);

impl Unsynced {
    pub fn has(&self, stripe: u64) -> bool {
        self.0.iter().any(|r| r.contains(&stripe))
    }

    /// True if one of these stripes is among them.
    pub fn meets(&self, stripes: &Range<u64>) -> bool {
        let mut all = self.0.iter();
        all.any(|r| r.start < stripes.end && stripes.start < r.end)
    }

    /// All before this are right now.
    pub fn done_before(&mut self, stripe: u64) {
        self.0
            .iter_mut()
            .for_each(|r| r.start = r.start.max(stripe));
        self.0.retain(|r| !r.is_empty());
    }

    pub fn first(&self) -> Option<u64> {
        self.0.first().map(|r| r.start)
    }
}

/// Blocks of a device that may be calculated before it is kicked: md's `max_corrected_read_errors`.
pub(super) const MOST_READ_ERRORS: u32 = 20;
