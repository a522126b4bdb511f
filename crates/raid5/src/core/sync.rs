//! Rebuilds, resyncs and checks by one queue: each stripe has a turn, which is a part in its word's list as a request's.
//!
//! The next stripe's part arrives when the one before it has its word. So a rebuild's position passes no stripe that somebody holds, and a
//! batch with the position behind its stripe finds the block on the incoming device, or the part before it in the list.

use super::io::Purpose;
use super::membership::Progress;
use super::queue::{Errand, QueueCore};
use super::record::{Part, PartOf};
use super::{Data, bit};
use crate::STRIPE_SECTORS;
use crate::core::{Action, SyncNow};
use crate::head_pages::bits;
use pvblk_block::{Error, Op};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Stripes under way, of all that may have pages: one in so many; and most.
const SHARE: usize = 4;
const MOST_FLYING: usize = 128;

/// An action on all stripes, or on some.
#[derive(Debug)]
pub struct Sync {
    action: Action,
    /// That of the incoming device, and of this array's parity.
    progress: Arc<Progress>,
    /// The slot of the device that is rebuilt.
    incoming: Option<usize>,
    /// Stripes that aren't begun.
    ranges: VecDeque<Range<u64>>,
    /// So many of them may be begun now.
    allowed: u64,
    /// Most of them that are under way.
    window: usize,
    /// The stripe whose part is in a list, before it has the word for the first time.
    arriving: Option<u64>,
    /// Stripes that are begun and not done.
    flying: BTreeSet<u64>,
    of: u64,
    done: u64,
    mismatches: u64,
    /// Stripes that the bitmap doesn't mark are passed over.
    by_bitmap: bool,
    phase: Phase,
    /// Slots that failed a flush or a superblock of it, as a mask: until they aren't members any more it doesn't go on.
    failed: u64,
    /// It doesn't come to its end, and ends when no stripe is under way.
    early: Option<Early>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Stripes,
    /// Members are flushed; so many aren't, and all stripes before `low` were done when this began.
    Flushing {
        left: usize,
        low: u64,
    },
    /// Superblocks say that all stripes before this are done.
    Telling(u64),
    /// They say that all are.
    Told,
}

/// The reason why an action ends before all stripes are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Early {
    Stopped,
    /// A member that it needs, or the device that it is for, failed.
    Failed,
    /// This sector of another member than the one that is rebuilt can't be read.
    Unreadable(u64),
}

/// The end of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncEnd {
    pub action: Action,
    /// None: all stripes are done.
    pub early: Option<Early>,
    pub done_sectors: u64,
    pub of_sectors: u64,
    pub mismatch_sectors: u64,
    /// Only stripes that the bitmap marks were recovered.
    pub by_bitmap: bool,
}

impl Sync {
    /// All stripes before this are done.
    fn low(&self) -> u64 {
        let next = self.ranges.front().map_or(u64::MAX, |range| range.start);
        let flying = self.flying.first().copied().unwrap_or(u64::MAX);
        flying.min(next)
    }

    fn now(&self) -> SyncNow {
        SyncNow {
            action: self.action,
            done_sectors: self.done * STRIPE_SECTORS,
            of_sectors: self.of.max(self.done) * STRIPE_SECTORS,
            mismatch_sectors: self.mismatches * STRIPE_SECTORS,
            by_bitmap: self.by_bitmap,
        }
    }

    /// No stripe begins any more.
    fn stop(&mut self, early: Early) {
        self.ranges.clear();
        self.early.get_or_insert(early);
    }

    /// True if it is for this slot, or doesn't go on as long as the slot is a member's.
    pub(super) fn uses(&self, slot: usize) -> bool {
        self.incoming == Some(slot) || self.failed & bit(slot) != 0
    }

    /// True if superblocks say how far it is.
    fn is_told(&self) -> bool {
        matches!(self.action, Action::Recover | Action::Resync)
    }
}

impl QueueCore {
    /// Begins an action; this queue has to be stepped until it is over.
    pub fn start_sync(&mut self, action: Action) -> Result<(), Error> {
        self.look();
        let error = |text: &str| Err(Error::config(format!("{action}: {text}")));
        if self.now.broken {
            return error("the array has failed");
        }
        let all = self.common.geometry.stripes();
        let incoming = self.now.incoming();
        let ranges: VecDeque<Range<u64>> = match (action, incoming) {
            (Action::Recover, Some(incoming)) => std::iter::once(incoming.done..all).collect(),
            (Action::Recover, None) => return error("there is no device to rebuild"),
            (Action::Resync, _) => self.now.unsynced().0.into(),
            _ if self.now.members.failed().is_some() => {
                return error("a member is missing, so there is no parity to compare");
            }
            (Action::Check | Action::Repair, _) => std::iter::once(0..all).collect(),
            (Action::Checksum, _) => self.common.unsummed().into(),
        };
        if !self.common.begin_sync() {
            return error("another action is under way; wait for its end, or stop it");
        }
        let by_bitmap = incoming.filter(|i| i.by_bitmap && action == Action::Recover);
        let left: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let (of, done) = match (action, by_bitmap) {
            (_, Some(incoming)) => (self.common.marked_from(incoming.done), 0),
            (Action::Recover, None) => (all, all - left),
            _ => (left, 0),
        };
        self.sync = Some(Sync {
            action,
            progress: Arc::clone(&self.now.progress),
            incoming: incoming.map(|incoming| incoming.slot),
            ranges: ranges
                .into_iter()
                .filter(|range| !range.is_empty())
                .collect(),
            allowed: 0,
            window: 1,
            arriving: None,
            flying: BTreeSet::new(),
            of,
            done,
            mismatches: 0,
            by_bitmap: by_bitmap.is_some(),
            phase: Phase::Stripes,
            failed: 0,
            early: None,
        });
        self.synced = None;
        self.end_sync();
        Ok(())
    }

    /// The action under way.
    pub fn sync_now(&self) -> Option<SyncNow> {
        self.sync.as_ref().map(Sync::now)
    }

    /// From now on at most so many stripes are begun, until this is called again. Returns how many of those before weren't begun.
    pub fn allow_stripes(&mut self, most: u64) -> u64 {
        let window = (self.common.stock.count().1 / SHARE).clamp(1, MOST_FLYING);
        let Some(sync) = &mut self.sync else { return 0 };
        sync.window = window;
        std::mem::replace(&mut sync.allowed, most)
    }

    /// The end of the last action, if it wasn't taken yet.
    pub fn take_synced(&mut self) -> Option<SyncEnd> {
        self.synced.take()
    }

    /// The action ends as soon as no stripe is under way; those that are done stay done.
    pub fn stop_sync(&mut self) {
        // Once superblocks say that all is done, only the change of members is left.
        let sync = self.sync.as_mut();
        if let Some(sync) = sync.filter(|sync| sync.phase != Phase::Told) {
            sync.stop(Early::Stopped);
            self.end_sync();
        }
    }

    /// The turn of the next stripe arrives at its word, if it may; true if so.
    pub(super) fn next_synced(&mut self) -> bool {
        let Some(sync) = &mut self.sync else {
            return false;
        };
        let is_full = sync.flying.len() >= sync.window;
        if sync.allowed == 0 || is_full || sync.arriving.is_some() {
            return false;
        }
        if self.passes_over() {
            return true;
        }
        let Some(sync) = &mut self.sync else {
            return false;
        };
        let Some(range) = sync.ranges.front_mut() else {
            return false;
        };
        let Some(place) = self.places.take() else {
            return false;
        };
        let stripe = range.start;
        range.start += 1;
        if range.is_empty() {
            sync.ranges.pop_front();
        }
        sync.allowed -= 1;
        sync.arriving = Some(stripe);
        sync.flying.insert(stripe);
        let part = Part {
            of: PartOf::Sync(sync.action),
            from: self.me,
            stripe,
        };
        self.arrive(place, part);
        true
    }

    /// Passes over stripes that the incoming device holds already, by the bitmap; true if there were some. From now on they count as begun, and
    /// writes go there, too. No stripe's turn is on its way to its word.
    fn passes_over(&mut self) -> bool {
        let end = self.common.geometry.stripes();
        let Some(sync) = self.sync.as_mut().filter(|sync| sync.by_bitmap) else {
            return false;
        };
        let Some(next) = sync.ranges.front().map(|range| range.start) else {
            return false;
        };
        let progress = &sync.progress;
        let mut marked = next;
        self.common.pass_over(next, |stripe| {
            marked = stripe;
            progress.begin_before(stripe);
        });
        if marked == next {
            return false;
        }
        sync.ranges.clear();
        if marked < end {
            sync.ranges.push_back(marked..end);
        }
        if sync.early.is_none() {
            sync.progress.done_before(sync.low().min(end));
        }
        self.end_sync();
        true
    }

    /// A stripe's turn has the word: from now on the incoming device has its block, or this queue makes sure of it before anything else.
    pub(super) fn sync_opened(&mut self, stripe: u64, action: Action) {
        let Some(sync) = &mut self.sync else {
            debug_assert!(false, "a stripe's turn in no action");
            return;
        };
        sync.arriving.take_if(|arriving| *arriving == stripe);
        if action == Action::Recover {
            sync.progress.begin(stripe);
        }
    }

    /// A stripe's turn is over; unless `ok`, nothing of it was done: then the array has failed, or the rebuild ends.
    pub(super) fn sync_stripe_done(&mut self, stripe: u64, ok: bool, mismatch: bool) {
        let end = self.common.geometry.stripes();
        let Some(sync) = &mut self.sync else {
            debug_assert!(false, "a stripe's turn in no action");
            return;
        };
        sync.arriving.take_if(|arriving| *arriving == stripe);
        sync.flying.remove(&stripe);
        if !ok {
            sync.stop(Early::Failed);
            return self.end_sync();
        }
        sync.done += 1;
        sync.mismatches += u64::from(mismatch);
        if sync.action == Action::Recover && sync.early.is_none() {
            sync.progress.done_before(sync.low().min(end));
        }
        self.end_sync();
    }

    /// A sector of another member can't be read, so the incoming device can't be made whole: it is left out.
    pub(super) fn stop_rebuild(&mut self, sector: u64) {
        tracing::error!(
            "raid5: rebuilding stops: sector {sector} of another member can't be read, or isn't what was written"
        );
        if let Some(sync) = &mut self.sync {
            sync.stop(Early::Unreadable(sector));
        }
        if let Some(incoming) = self.now.members.incoming() {
            self.common.note_failure(incoming.slot);
            self.member_failed(incoming.slot);
        }
    }

    /// Members are flushed, so that superblocks may say how far the action is.
    pub fn checkpoint(&mut self) {
        let end = self.common.geometry.stripes();
        let Some(sync) = &mut self.sync else { return };
        let is_ready = sync.is_told() && sync.phase == Phase::Stripes;
        if !is_ready || sync.early.is_some() || sync.failed != 0 {
            return;
        }
        let slots = self.common.volatile(&self.now);
        sync.phase = Phase::Flushing {
            left: slots.len() + 1,
            low: sync.low().min(end),
        };
        for slot in slots {
            self.start(Purpose::Sync, (slot, Op::Flush, false), 0, Data::None);
        }
        self.sync_flush_over();
    }

    /// A member was flushed for it, or failed that.
    pub(super) fn sync_flushed(&mut self, slot: usize, ok: bool) {
        if let Some(sync) = &mut self.sync {
            sync.failed |= if ok { 0 } else { bit(slot) };
        }
        self.sync_flush_over();
    }

    fn sync_flush_over(&mut self) {
        let Some(sync) = &mut self.sync else { return };
        let Phase::Flushing { left, low } = &mut sync.phase else {
            return;
        };
        *left -= 1;
        let (left, low) = (*left, *low);
        if left > 0 {
            return;
        }
        if sync.failed != 0 || sync.early.is_some() {
            sync.phase = Phase::Stripes;
            return self.wait_for_members();
        }
        sync.phase = Phase::Telling(low);
        self.errands.push(match sync.action {
            Action::Recover => Errand::Recovered {
                slot: sync.incoming.unwrap_or(usize::MAX),
                stripes: low,
            },
            _ => Errand::Resynced(low),
        });
    }

    /// Superblocks are written; those of these slots (a mask) aren't.
    pub(super) fn sync_told(&mut self, failed: u64) {
        bits(failed).for_each(|slot| self.common.note_failure(slot));
        let end = self.common.geometry.stripes();
        let Some(sync) = &mut self.sync else { return };
        let Phase::Telling(low) = sync.phase else {
            debug_assert!(false, "superblocks that nobody asked for");
            return;
        };
        sync.phase = Phase::Stripes;
        sync.failed |= failed;
        if failed == 0 {
            match sync.action {
                Action::Recover => sync.progress.committed_before(low),
                _ => sync.progress.resynced_before(low),
            }
            if low == end && sync.low() == u64::MAX {
                sync.phase = Phase::Told;
            }
        }
        self.wait_for_members();
    }

    /// Goes on when those that failed aren't members any more: if they are, words are stopped, and this is asked again when they go on.
    fn wait_for_members(&mut self) {
        let failed = self.sync.as_ref().map_or(0, |sync| sync.failed);
        let mut waits = false;
        for slot in bits(failed) {
            waits |= self.member_failed(slot);
        }
        if waits {
            return;
        }
        if let Some(sync) = &mut self.sync {
            sync.failed = 0;
        }
        self.end_sync();
    }

    /// A stop is over.
    pub(super) fn sync_goes_on(&mut self) {
        let Some(sync) = &mut self.sync else { return };
        let members = &self.now.members;
        let is_possible = match sync.action {
            Action::Recover => sync.incoming.is_some_and(|slot| {
                let is_whole = sync.phase == Phase::Told && members.role(slot).is_some();
                members.is_incoming(slot) || is_whole
            }),
            _ => members.failed().is_none(),
        };
        if self.now.broken || !is_possible {
            sync.stop(Early::Failed);
        }
        if sync.action != Action::Recover {
            sync.progress = Arc::clone(&self.now.progress);
        }
        self.wait_for_members();
    }

    /// True if the device that this queue rebuilds is whole, and superblocks say so.
    pub(super) fn takes_over(&self) -> bool {
        let is_whole = |sync: &Sync| {
            sync.action == Action::Recover && sync.phase == Phase::Told && sync.early.is_none()
        };
        self.sync.as_ref().is_some_and(is_whole)
    }

    /// Goes on with the end of the action, if no stripe is left.
    fn end_sync(&mut self) {
        let Some(sync) = &self.sync else { return };
        if !sync.ranges.is_empty() || !sync.flying.is_empty() || sync.failed != 0 {
            return;
        }
        match sync.phase {
            Phase::Flushing { .. } | Phase::Telling(_) => return,
            Phase::Stripes | Phase::Told if sync.early.is_some() => {}
            Phase::Stripes if sync.is_told() => return self.checkpoint(),
            Phase::Told if sync.action == Action::Recover => {
                let slot = sync.incoming.unwrap_or(usize::MAX);
                if self.now.members.is_incoming(slot) {
                    // The kick of another queue may be under way: this is tried again after it.
                    return self.stop_words();
                }
            }
            Phase::Stripes | Phase::Told => {}
        }
        let SyncNow {
            action,
            done_sectors,
            of_sectors,
            mismatch_sectors,
            by_bitmap,
        } = sync.now();
        let sums_all = matches!(action, Action::Check | Action::Repair | Action::Checksum);
        if sums_all && sync.early.is_none() {
            self.common.all_summed();
        }
        self.synced = Some(SyncEnd {
            action,
            early: sync.early,
            done_sectors,
            of_sectors,
            mismatch_sectors,
            by_bitmap,
        });
        self.sync = None;
        self.common.end_sync();
    }
}
