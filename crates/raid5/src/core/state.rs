//! The state of an array that serves, for users.

use super::sync::SyncNow;
use super::{Core, Counts, WritePath};
use crate::STRIPE_SECTORS;

/// A device of the array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberNow {
    /// Its number among the devices.
    pub slot: usize,
    /// Its place in the array.
    pub place: usize,
    /// Its number in the superblocks.
    pub number: u32,
    /// Sectors of it that are rebuilt; `None`: it is a member.
    pub rebuilt_sectors: Option<u64>,
    /// Blocks that it could not read, and that were calculated and written again, ever.
    pub corrected_reads: u32,
}

/// The array at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Devices, by their numbers.
    pub members: Vec<MemberNow>,
    /// The place without a member.
    pub failed: Option<usize>,
    /// Two members failed.
    pub broken: bool,
    /// Its superblocks say that it isn't stopped in order.
    pub dirty: bool,
    /// Event counter of the superblocks.
    pub events: u64,
    /// The recovery, resync or check under way.
    pub sync: Option<SyncNow>,
    /// Sectors of each member, from the start, whose parity is right; `None`: all.
    pub in_sync_sectors: Option<u64>,
    /// Recoveries, resyncs and checks that have begun.
    pub syncs: u64,
    /// Sectors of members whose parity was wrong, of the last check or repair.
    pub mismatch_sectors: u64,
    /// Why the last rebuild or check didn't come to its end.
    pub trouble: Option<String>,
    /// The last recovery that came to its end: place, sectors written, and whether only what the bitmap marked.
    pub recovered: Option<(usize, u64, bool)>,
    /// Stripe heads, and how many of them are at work.
    pub stripes: usize,
    /// Number of stripe heads that have work.
    pub active_stripes: usize,
    /// Requests taken, ever.
    pub requests: u64,
    /// Path by which writes go to stripe heads.
    pub path: WritePath,
}

impl Core {
    /// Counters of writes.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The current state.
    pub fn state(&self) -> State {
        let (superblocks, dirty) = self.meta.superblocks();
        let incoming = self.members.incoming();
        let members = self.slots.live().filter_map(|slot| {
            let rebuilt = incoming.filter(|i| i.slot == slot);
            let place = self.members.role(slot).or(rebuilt.map(|i| i.role))?;
            Some(MemberNow {
                slot,
                place,
                number: superblocks[slot].as_ref().map_or(0, |s| s.dev_number),
                rebuilt_sectors: rebuilt.map(|i| i.done * STRIPE_SECTORS),
                corrected_reads: self.slots.all[slot].as_ref().map_or(0, |s| s.corrected),
            })
        });
        State {
            members: members.collect(),
            failed: self.members.failed(),
            broken: self.broken,
            dirty,
            events: self.meta.events(),
            sync: self.sync_now(),
            in_sync_sectors: self.unsynced.first().map(|s| s * STRIPE_SECTORS),
            syncs: self.syncs,
            mismatch_sectors: self.mismatch_sectors,
            trouble: self.trouble.clone(),
            recovered: self.recovered,
            stripes: self.heads.count(),
            active_stripes: self.heads.active(),
            requests: self.taken,
            path: self.queues.path,
        }
    }
}
