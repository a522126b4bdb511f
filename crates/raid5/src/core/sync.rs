//! Actions on all stripes: recovery of a member, resync of parity, and checks. One action runs at a
//! time.
//!
//! An action takes stripe heads as requests do, so a stripe has one round at a time: no write comes in
//! between.

use super::plan::Mode;
use super::round::Round;
use super::{Core, Purpose};
use crate::STRIPE_SECTORS;
use pvblk_block::Error;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;

/// An action on all stripes, in md's words (`sync_action`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Parity is made right where it isn't known to be.
    Resync,
    /// A device becomes a member.
    Recover,
    /// Parity is compared with the data.
    Check,
    /// A check that makes wrong parity right.
    Repair,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Resync => "resync",
            Action::Recover => "recover",
            Action::Check => "check",
            Action::Repair => "repair",
        })
    }
}

/// Progress of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncNow {
    pub action: Action,
    /// Sectors of each member that are done, of those to be done.
    pub done_sectors: u64,
    /// All of these.
    pub of_sectors: u64,
    /// Sectors of members whose parity was wrong.
    pub mismatch_sectors: u64,
    /// Only those that the write-intent bitmap marks.
    pub by_bitmap: bool,
}

/// Heads in use for it, of all: one in so many; and most.
const SHARE: usize = 4;
const MOST_HEADS: usize = 128;

pub(super) struct Sync {
    id: u64,
    action: Action,
    pub owner: usize,
    /// Stripes that aren't begun.
    ranges: VecDeque<Range<u64>>,
    /// Stripes that are begun and not done.
    flying: BTreeSet<u64>,
    of: u64,
    done: u64,
    mismatches: u64,
    unreadable: u64,
    /// Stripes that the bitmap doesn't mark are passed over.
    by_bitmap: bool,
    /// Members are flushed: how many are left, and all stripes before this were done when it began.
    flush: Option<(usize, u64)>,
    /// Superblocks are being written.
    telling: bool,
    ending: bool,
    /// Superblocks say that the device is recovered; the next ones say that it is the member. These are two
    /// steps: a power cut between two superblocks must not leave the device incomplete, and the one before it
    /// out.
    whole: bool,
}

impl Sync {
    /// All stripes before this are done.
    fn low(&self) -> u64 {
        let next = self.ranges.front().map_or(u64::MAX, |r| r.start);
        self.flying.first().copied().unwrap_or(u64::MAX).min(next)
    }
}

impl Core {
    /// The action under way.
    pub fn sync_now(&self) -> Option<SyncNow> {
        let sync = self.sync.as_ref()?;
        Some(SyncNow {
            action: sync.action,
            done_sectors: sync.done * STRIPE_SECTORS,
            of_sectors: sync.of.max(sync.done) * STRIPE_SECTORS,
            by_bitmap: sync.by_bitmap,
            mismatch_sectors: sync.mismatches * STRIPE_SECTORS,
        })
    }

    /// The action that has to be done without an order.
    pub fn sync_wanted(&self) -> Option<Action> {
        if self.sync.is_some() || self.broken {
            return None;
        }
        match (self.members.incoming(), self.unsynced.first()) {
            (Some(_), _) => Some(Action::Recover),
            (None, Some(_)) => Some(Action::Resync),
            (None, None) => None,
        }
    }

    /// The place that a spare is to be rebuilt for.
    pub fn wants_spare(&self) -> Option<usize> {
        match self.broken || self.members.incoming().is_some() {
            true => None,
            false => self.members.failed(),
        }
    }

    /// Requests taken, ever.
    pub fn requests(&self) -> u64 {
        self.taken
    }

    /// Throws the member at a place out, or the device that is to become it.
    pub fn fail_place(&mut self, place: usize, runner: usize) {
        // Asked before another one failed, perhaps: that would be the end.
        if self.members.failed().is_some_and(|failed| failed != place) {
            return;
        }
        if let Some(slot) = self.members.reads(place) {
            self.kick(slot, runner);
        }
    }

    /// Begins; the owner's queue does its I/O. Errors if it can't be, or another one is under way.
    pub fn start_sync(&mut self, owner: usize, action: Action) -> Result<(), Error> {
        if let Some(sync) = &self.sync {
            let other = sync.action;
            return Err(Error::config(format!(
                "{action}: {other} is under way; wait for its end, or stop it"
            )));
        }
        if self.broken {
            return Err(Error::config(format!("{action}: the array has failed")));
        }
        let all = self.geometry.stripes();
        let ranges = match (action, self.members.incoming()) {
            (Action::Recover, Some(incoming)) => std::iter::once(incoming.done..all).collect(),
            (Action::Recover, None) => {
                return Err(Error::config("recover: there is no device to rebuild"));
            }
            (Action::Resync, _) => self.unsynced.0.clone(),
            _ if self.members.failed().is_some() => {
                return Err(Error::config(format!(
                    "{action}: a member is missing, so there is no parity to compare"
                )));
            }
            _ => std::iter::once(0..all).collect(),
        };
        let by_bitmap = self.members.incoming().filter(|i| i.by_bitmap);
        let by_bitmap = by_bitmap.filter(|_| action == Action::Recover);
        let marked = by_bitmap.map(|i| self.marked_from(i.done) / STRIPE_SECTORS);
        self.syncs += 1;
        self.trouble = None;
        if matches!(action, Action::Check | Action::Repair) {
            self.mismatch_sectors = 0;
        }
        self.sync = Some(Sync {
            id: self.syncs,
            action,
            owner,
            of: match (action, marked) {
                (_, Some(marked)) => marked,
                (Action::Recover, _) => all,
                _ => ranges.iter().map(|r| r.end - r.start).sum(),
            },
            done: match action {
                Action::Recover if marked.is_none() => ranges.iter().map(|r| r.start).sum(),
                _ => 0,
            },
            ranges: ranges.into_iter().filter(|r| !r.is_empty()).collect(),
            flying: BTreeSet::new(),
            mismatches: 0,
            unreadable: 0,
            by_bitmap: marked.is_some(),
            flush: None,
            telling: false,
            ending: false,
            whole: false,
        });
        Ok(())
    }

    /// Goes on with at most so many stripes; returns how many were begun. [`Core::unplug`] follows.
    pub fn sync_more(&mut self, most: u64) -> u64 {
        let window = (self.heads.count() / SHARE).clamp(1, MOST_HEADS);
        let mut begun = 0;
        self.pass_over();
        while let Some(sync) = &mut self.sync
            && begun < most
            && sync.flying.len() < window
            && let Some(range) = sync.ranges.front_mut()
            && let Some(head) = self.heads.get_if_free(range.start, sync.owner)
        {
            let stripe = range.start;
            range.start += 1;
            if range.is_empty() {
                sync.ranges.pop_front();
            }
            sync.flying.insert(stripe);
            self.heads.all[head].sync = Some(sync.id);
            if sync.action == Action::Recover {
                self.members.begin_before(stripe + 1);
            }
            self.plug(head);
            begun += 1;
            self.pass_over();
        }
        self.sync_end();
        begun
    }

    /// Passes over stripes that the incoming device holds already, by the bitmap: from now on they count as begun, and writes go there.
    fn pass_over(&mut self) {
        let Some(sync) = self.sync.as_ref().filter(|s| s.by_bitmap) else {
            return;
        };
        let Some(next) = sync.ranges.front().map(|r| r.start) else {
            return;
        };
        let end = self.clear_until(next);
        let stripes = self.geometry.stripes();
        let Some(sync) = &mut self.sync else { return };
        if let Some(range) = sync.ranges.front_mut()
            && end > next
        {
            range.start = end.min(range.end);
            if range.is_empty() {
                sync.ranges.pop_front();
            }
            self.members.begin_before(end);
            self.members.done_before(sync.low().min(stripes));
        }
    }

    /// The head's turn in it; false if that is over.
    pub(super) fn sync_head(&mut self, head: usize) -> bool {
        let h = &mut self.heads.all[head];
        let stripe = h.record.stripe;
        let id = h.sync.take();
        let sync = self.sync.as_ref().filter(|s| Some(s.id) == id);
        let Some((action, owner, id)) = sync.map(|s| (s.action, s.owner, s.id)) else {
            return false;
        };
        let record = &self.heads.all[head].record;
        let plan = match action {
            Action::Recover => self.view().rebuild(record),
            _ => self.view().check(record),
        };
        let Some(plan) = plan else {
            if action != Action::Recover {
                self.sync_stripe_done(id, stripe);
            }
            return false;
        };
        if plan.mode == Mode::Check {
            // The data on the members counts, not that in the head.
            self.heads.all[head].record.valid = 0;
        }
        let mut round = Round::new(plan, owner);
        round.sync = Some(id);
        self.begin(head, round);
        true
    }

    /// Data and parity were compared.
    pub(super) fn checked(&mut self, head: usize, mismatch: bool) {
        let mut repairs = false;
        if let Some(sync) = &mut self.sync
            && mismatch
        {
            sync.mismatches += 1;
            repairs = sync.action != Action::Check;
        }
        match repairs {
            true => self.write_pages(head),
            false => self.finish_round(head),
        }
    }

    /// A stripe is done.
    pub(super) fn sync_stripe_done(&mut self, id: u64, stripe: u64) {
        let Some(sync) = self.sync.as_mut().filter(|s| s.id == id) else {
            return;
        };
        sync.flying.remove(&stripe);
        sync.done += 1;
        let low = sync.low().min(self.geometry.stripes());
        if sync.action == Action::Recover {
            self.members.done_before(low);
        }
        self.sync_end();
    }

    /// Nothing of a stripe can be had.
    pub(super) fn sync_unreadable(&mut self, id: u64, stripe: u64) {
        let Some(sync) = self.sync.as_mut().filter(|s| s.id == id) else {
            return;
        };
        sync.unreadable += 1;
        if sync.action == Action::Recover {
            let owner = sync.owner;
            let sector = self.geometry.stripe_member_sector(stripe);
            let text = format!("rebuilding stops: sector {sector} of another member can't be read");
            tracing::error!("raid5: {text}");
            self.trouble = Some(text);
            self.drop_incoming(owner);
            return;
        }
        self.sync_stripe_done(id, stripe);
    }

    /// Members are flushed, so that superblocks may say how far this is. Some time after [`Core::unplug`] they do.
    pub fn checkpoint(&mut self) {
        let stripes = self.geometry.stripes();
        let Some(sync) = &mut self.sync else { return };
        let stays = matches!(sync.action, Action::Check | Action::Repair);
        if stays || sync.flush.is_some() || sync.telling {
            return;
        }
        let (owner, id, low) = (sync.owner, sync.id, sync.low().min(stripes));
        sync.flush = Some((0, low));
        let left = self.flush_all(owner, Purpose::SyncFlush(id));
        if left == 0 {
            self.sync_tell(owner);
        } else if let Some(sync) = &mut self.sync {
            sync.flush = Some((left, low));
        }
    }

    /// One of the members is flushed.
    pub(super) fn sync_flushed(&mut self, id: u64) {
        let Some(sync) = self.sync.as_mut().filter(|s| s.id == id) else {
            return;
        };
        if let Some((left, _)) = &mut sync.flush {
            *left -= 1;
            let owner = sync.owner;
            if *left == 0 {
                self.sync_tell(owner);
            }
        }
    }

    fn sync_tell(&mut self, runner: usize) {
        let Some(sync) = &mut self.sync else { return };
        let Some((_, low)) = sync.flush.take() else {
            return;
        };
        sync.telling = true;
        match sync.action {
            Action::Recover => self.commit(low, false, runner),
            _ => {
                let begin = self.unsynced.first().unwrap_or(low);
                if begin < low {
                    self.intents_resynced(begin..low);
                }
                self.unsynced.done_before(low);
                self.write_meta(runner);
            }
        }
    }

    /// Superblocks are on disk.
    pub(super) fn sync_told(&mut self) {
        let Some(sync) = &mut self.sync else { return };
        let told = std::mem::take(&mut sync.telling);
        if told && sync.ending {
            if sync.action == Action::Recover && !std::mem::replace(&mut sync.whole, true) {
                sync.telling = true;
                let (owner, stripes) = (sync.owner, self.geometry.stripes());
                self.commit(stripes, true, owner);
                return;
            }
            self.sync = None;
            return;
        }
        self.sync_end();
    }

    /// Ends it, if nothing is left to do.
    fn sync_end(&mut self) {
        let Some(sync) = &mut self.sync else { return };
        let busy = !sync.ranges.is_empty() || !sync.flying.is_empty();
        if busy || sync.flush.is_some() || sync.telling || sync.ending {
            return;
        }
        match sync.action {
            Action::Check | Action::Repair => {
                self.mismatch_sectors = sync.mismatches * STRIPE_SECTORS;
                self.sync = None;
            }
            Action::Recover | Action::Resync => {
                sync.ending = true;
                self.checkpoint();
            }
        }
    }

    /// Number of devices that have become members.
    pub fn takeovers(&self) -> u64 {
        self.takeovers
    }

    /// The device that was rebuilt is the member.
    pub(super) fn take_over(&mut self) {
        let Some((incoming, old)) = self.members.take_over() else {
            return;
        };
        self.takeovers += 1;
        if let Some(sync) = &self.sync {
            let sectors = sync.done * STRIPE_SECTORS;
            self.recovered = Some((incoming.role, sectors, sync.by_bitmap));
        }
        if let Some(old) = old {
            self.slots.drop_slot(old);
        }
        // The writes that the old one missed are on the new one.
        let stripes = self.geometry.stripes();
        self.intents_resynced(0..stripes);
        match self.recovered {
            Some((role, sectors, true)) => tracing::info!(
                "raid5: member {role} is up to date: {sectors} sectors of it were written, by the bitmap"
            ),
            _ => tracing::info!("raid5: member {} is rebuilt", incoming.role),
        }
    }

    /// Stops the action under way; the stripes that are done stay done.
    pub fn stop_sync(&mut self) {
        if let Some(sync) = self.sync.take_if(|s| !s.ending) {
            self.ended_early(&sync, "was stopped");
        }
    }

    /// A check that didn't see all stripes says nothing of the others.
    fn ended_early(&mut self, sync: &Sync, why: &str) {
        if matches!(sync.action, Action::Check | Action::Repair) {
            self.mismatch_sectors = sync.mismatches * STRIPE_SECTORS;
            self.trouble = Some(format!(
                "{} {why} after {} of {} stripes",
                sync.action, sync.done, sync.of
            ));
        }
    }

    /// Rebuilding has lost its device.
    pub(super) fn stop_rebuild(&mut self) {
        let rebuilds = |s: &mut Sync| s.action == Action::Recover;
        self.sync.take_if(rebuilds);
    }

    /// A member failed: a check or resync has no parity then and ends, and a recovery of another device goes
    /// on if it can.
    pub(super) fn sync_lost_member(&mut self, _role: usize) {
        let compares = |s: &mut Sync| s.action != Action::Recover;
        if let Some(sync) = self.sync.take_if(compares) {
            self.ended_early(&sync, "ended when a member failed,");
        }
    }

    /// Progress of the incoming device, for an orderly end: all data was flushed.
    pub fn recovered_sectors(&self) -> Option<(usize, usize, u64)> {
        let incoming = self.members.incoming()?;
        Some((incoming.slot, incoming.role, incoming.done * STRIPE_SECTORS))
    }

    /// Stripes whose parity isn't known to be right, for an end in order.
    pub fn unsynced(&self) -> &[Range<u64>] {
        &self.unsynced.0
    }
}
