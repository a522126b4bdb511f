//! The devices of the members, and the handling of one that fails. `members.rs` says which device is whose.

use super::{Ability, Core, Data};
use crate::{Policy, Superblock};
use pvblk_block::Status;
use std::ops::Range;

/// A device of the array.
pub(super) struct Slot {
    /// Where its data begins.
    pub data_sectors: u64,
    /// Where its log begins.
    pub log_sector: u64,
    pub log_sectors: u64,
    /// Where its bitmap begins.
    pub bitmap_sector: u64,
    pub ability: Ability,
    /// Blocks that could not be read and were calculated.
    pub corrected: u32,
    /// The same, not so long ago.
    pub read_errors: u32,
}

impl Slot {
    pub fn new(superblock: &Superblock, ability: Ability) -> Slot {
        let (log, bitmap_sector) = match superblock.policy() {
            Policy::Ppl(log) => ((log.sector, log.sectors), 0),
            Policy::Bitmap { sector } => ((0, 0), sector),
            Policy::Resync => ((0, 0), 0),
        };
        Slot {
            data_sectors: superblock.data_offset_sectors,
            log_sector: log.0,
            log_sectors: log.1,
            bitmap_sector,
            ability,
            corrected: superblock.corrected_reads,
            read_errors: 0,
        }
    }
}

/// The devices of an array.
#[derive(Default)]
pub(super) struct Slots {
    /// `None`: gone.
    pub all: Vec<Option<Slot>>,
    /// Slots that aren't used any more.
    pub gone: Vec<usize>,
}

impl Slots {
    /// All that are there.
    pub fn live(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.all.len()).filter(|s| self.all[*s].is_some())
    }

    /// Those that have to be flushed.
    pub fn volatile(&self) -> Vec<usize> {
        let volatile = |s: &usize| self.all[*s].as_ref().is_some_and(|s| s.ability.volatile);
        self.live().filter(volatile).collect()
    }

    /// True if a device writes zeros by itself.
    pub fn zeroes(&self, slot: usize) -> bool {
        self.all[slot].as_ref().is_some_and(|s| s.ability.zeroes)
    }

    /// Makes a device known; returns its slot. One that is gone is used again if `is_quiet`: no I/O of the old device is left.
    pub fn take(&mut self, slot: Slot, is_quiet: impl Fn(usize) -> bool) -> usize {
        let free = |s: &usize| self.all[*s].is_none() && !self.gone.contains(s) && is_quiet(*s);
        let found = (0..self.all.len()).find(free);
        let at = found.unwrap_or(self.all.len());
        match self.all.get_mut(at) {
            Some(place) => *place = Some(slot),
            None => self.all.push(Some(slot)),
        }
        at
    }

    /// A device isn't the array's any more.
    pub fn drop_slot(&mut self, slot: usize) {
        self.all[slot] = None;
        self.gone.push(slot);
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

impl Core {
    /// Where each role's data is: a slot, and the sector where it begins; `None`: on no member that is whole.
    pub fn homes(&self) -> impl Iterator<Item = Option<(usize, u64)>> + use<'_> {
        let home = |slot: usize| Some((slot, self.slots.all[slot].as_ref()?.data_sectors));
        let by_role = self.members.slots().iter();
        by_role.map(move |slot| slot.filter(|_| !self.broken).and_then(home))
    }

    /// A device failed: the array goes on without it, if it is the first.
    pub(super) fn kick(&mut self, slot: usize, runner: usize) {
        if self.slots.all[slot].is_none() || self.broken {
            return;
        }
        if self.members.is_incoming(slot) {
            tracing::warn!("raid5: the member that was being rebuilt failed");
            self.drop_incoming(runner);
            return;
        }
        let Some(role) = self.members.role(slot) else {
            return;
        };
        if self.members.failed().is_some() {
            tracing::error!("raid5: member {role} failed too: the array stops");
            self.break_off();
            return;
        }
        tracing::warn!("raid5: member {role} failed and is kicked");
        self.members.lose(role);
        self.slots.drop_slot(slot);
        if let Some(first) = self.unsynced.first() {
            tracing::error!(
                "raid5: it failed before all parity was made: what it had from sector {} on may be lost",
                self.geometry.stripe_member_sector(first)
            );
            self.unsynced = Unsynced::default();
        }
        self.sync_lost_member(role);
        self.begin_kick(slot, runner);
    }

    /// Fails everything that waits; work under way fails when its I/O ends.
    #[cold]
    pub(super) fn break_off(&mut self) {
        if self.broken {
            return;
        }
        self.broken = true;
        self.sync = None;
        self.fail_intents();
        for head in std::mem::take(&mut self.unnamed) {
            self.write_pages(head);
        }
        for (owner, mut completion) in std::mem::take(&mut self.held) {
            completion.status = Status::IoError;
            self.done.push((owner, completion));
        }
        for id in std::mem::take(&mut self.undirtied) {
            self.fail_piece(id);
        }
        for piece in self.heads.take_waiting() {
            self.fail_piece(piece.request);
        }
        self.fail_queues();
    }

    /// The incoming device is no longer wanted, or failed.
    pub(super) fn drop_incoming(&mut self, runner: usize) {
        let Some(incoming) = self.members.lose_incoming() else {
            return;
        };
        self.slots.drop_slot(incoming.slot);
        self.stop_rebuild();
        self.meta.forget_incoming();
        // The superblocks may know it as the member already, and the one before as none.
        if let Some(old) = self.members.slot(incoming.role)
            && self.meta.superblocks().0[old].is_none()
        {
            self.members.lose(incoming.role);
            self.slots.drop_slot(old);
        }
        self.begin_kick(incoming.slot, runner);
    }

    /// A block could not be read; false if the device is out of patience.
    pub(super) fn count_read_error(&mut self, slot: usize) -> bool {
        let Some(slot) = &mut self.slots.all[slot] else {
            return false;
        };
        slot.read_errors += 1;
        slot.read_errors <= MOST_READ_ERRORS
    }

    /// Halves the counts of read errors, every hour, so that old errors count less.
    pub fn forgive_read_errors(&mut self) {
        let slots = self.slots.all.iter_mut().flatten();
        slots.for_each(|slot| slot.read_errors /= 2);
    }

    /// Flushes every device that needs it; how many that are.
    pub(super) fn flush_all(&mut self, runner: usize, purpose: super::Purpose) -> usize {
        let slots = self.slots.volatile();
        let count = slots.len();
        for slot in slots {
            let io = (slot, pvblk_block::Op::Flush, false);
            self.start(runner, purpose, io, 0, Data::None);
        }
        count
    }
}

/// Blocks of a device that may be calculated before it is kicked: md's `max_corrected_read_errors`.
pub(super) const MOST_READ_ERRORS: u32 = 20;
