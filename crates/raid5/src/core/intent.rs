//! Bits of the write-intent bitmap: batches that wait for theirs, and sweeps that take bits away.
//!
//! A bit is on all members from before a batch writes a stripe of its chunk until after the flush that follows the batch's end.

use super::Data;
use super::common::Common;
use super::io::Purpose;
use super::queue::{Opening, QueueCore};
use super::record::{Kind, Stripe};
use super::sums::Sums;
use crate::STRIPE_SECTORS;
use crate::head_pages::bits;
use crate::sums::GROUP_SECTORS;
use crate::words::{Chunks, Marked, Open, Owned, Parked, Seen, Token};
use pvblk_block::Op;
use pvblk_block::planted::{Plant, has};
use std::collections::BTreeSet;
use std::ops::Range;

/// Batches of a queue that wait for bits, and its sweep.
#[derive(Default)]
pub(super) struct Intents {
    waiting: Vec<Token<Parked, Stripe>>,
    sweep: Option<Sweep>,
}

impl Intents {
    /// The number of batches that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.sweep.is_none()
    }
}

/// A sweep that goes on.
struct Sweep {
    marked: Marked,
    /// The epoch in which chunks were marked.
    epoch: u32,
    /// Batches that weren't done then, those that wait for their log included.
    stripes: Owned,
    /// Groups of sums that are to go from memory.
    groups: Marked,
    step: Step,
}

/// The part of a sweep that is under way; each follows the one before it.
enum Step {
    /// Batches of the words that were owned end.
    Waiting,
    /// Sums are written.
    Writing,
    /// Members are flushed: so many aren't.
    Flushing(usize),
}

impl Common {
    /// Sectors of each member's data that belong to a stripe.
    pub(super) fn stripe_sectors(&self, stripe: u64) -> Range<u64> {
        let first = self.geometry.stripe_member_sector(stripe);
        first..first + STRIPE_SECTORS
    }

    /// True if the bits of a stripe, whose word is the caller's, are on all members.
    fn may_write(&self, stripe: u64) -> bool {
        let chunks = self.chunks.as_ref();
        chunks.is_none_or(|chunks| chunks.may_write(&self.stripe_sectors(stripe)))
    }

    /// The bits of these stripes are on all members. The thread that writes bits calls this; if they are in memory only, a queue that has the
    /// stripe's word.
    pub fn bits_are_set(&self, stripes: impl IntoIterator<Item = u64>) {
        let Some(chunks) = &self.chunks else { return };
        let _together = self.passing.lock();
        for stripe in stripes {
            chunks.set(&self.stripe_sectors(stripe));
        }
    }

    /// Chunks of the bitmap, if there is one.
    pub fn chunks(&self) -> Option<&Chunks> {
        self.chunks.as_ref()
    }

    /// Stripes from one on that the bitmap marks.
    pub(super) fn marked_from(&self, stripe: u64) -> u64 {
        let sectors = self.geometry.stripe_member_sector(stripe)..self.geometry.member_sectors();
        let marked = |chunks: &Chunks| chunks.set_sectors(sectors) / STRIPE_SECTORS;
        self.chunks.as_ref().map_or(0, marked)
    }

    /// Passes over the stripes from `stripe` on that the bitmap doesn't mark: calls for the first one that it marks, or the end. A batch that
    /// finds its bit set, which this didn't, finds what the call has changed.
    pub(super) fn pass_over(&self, stripe: u64, pass: impl FnOnce(u64)) {
        let Some(chunks) = &self.chunks else { return };
        let _together = self.passing.lock();
        let marked = chunks.next_set(self.geometry.stripe_member_sector(stripe));
        let end = marked.map_or(u64::MAX, |sector| sector / STRIPE_SECTORS);
        let end = end.clamp(stripe, self.geometry.stripes().max(stripe));
        if end > stripe {
            pass(end);
        }
    }
}

impl QueueCore {
    /// The bits of a stripe, whose word is the caller's, are set, also those that are in memory only: then a sweep will be due. False: one has to
    /// be set on all members first.
    pub(super) fn has_bits(&mut self, stripe: u64) -> bool {
        if self.common.may_write(stripe) {
            return true;
        }
        if self.common.in_memory && !has(Plant::MissedNotMarked) {
            self.common.bits_are_set([stripe]);
            self.marked = true;
        }
        self.common.in_memory
    }

    /// An open batch may write its stripe: returns it. `None`: it goes on later, since superblocks don't say dirty, or a bit isn't set.
    pub(super) fn may_write(
        &mut self,
        mut token: Token<Open, Stripe>,
    ) -> Option<Token<Open, Stripe>> {
        if !self.now.dirty {
            self.park(token);
            self.stop_words();
            return None;
        }
        let stripe = token.record_mut().known.stripe;
        if self.has_bits(stripe) {
            return Some(token);
        }
        self.wait_to_open(token, true);
        None
    }

    /// An open batch may begin: as [`QueueCore::may_write`] if it writes; and the sums of its stripe, if the array has them, are in memory.
    pub(super) fn may_begin(
        &mut self,
        token: Token<Open, Stripe>,
        writes: bool,
    ) -> Option<Token<Open, Stripe>> {
        let mut token = match writes {
            true => self.may_write(token)?,
            false => token,
        };
        let stripe = token.record_mut().known.stripe;
        if self.common.sums().is_none_or(|sums| sums.stay(stripe)) {
            return Some(token);
        }
        self.wait_to_open(token, writes);
        None
    }

    fn wait_to_open(&mut self, mut token: Token<Open, Stripe>, writes: bool) {
        let stripe = token.record_mut().known.stripe;
        if token.record_mut().kind() == Kind::Write {
            // Until it goes on, other writes needn't wait for its reads.
            self.note_ways(token.record_mut());
            self.gathered_read();
        }
        // Parked: a stop doesn't wait for it.
        let (token, tell) = self.common.words.park(token, &self.common.epoch);
        self.tell(tell);
        self.intents.waiting.push(token);
        self.intends.push(Opening { stripe, writes });
    }

    /// An [`Opening`] is done; these slots (a mask) failed to get the stripe's bits.
    pub(super) fn intended(&mut self, stripe: u64, failed: u64) {
        self.devices_failed(failed);
        let is_its = |token: &mut Token<Parked, Stripe>| token.record().known.stripe == stripe;
        let ready: Vec<_> = self.intents.waiting.extract_if(.., is_its).collect();
        for token in ready {
            self.claim_again(token);
        }
    }

    /// These slots (a mask) failed something that wasn't this queue's I/O.
    pub fn devices_failed(&mut self, failed: u64) {
        for slot in bits(failed) {
            self.common.note_failure(slot);
            self.member_failed(slot);
        }
    }

    /// A sweep of the bitmap begins, as is due every few seconds, and [`QueueCore::go_on_sweeping`] follows. Nothing is cleared while a member
    /// is missing: it may come back, and the writes that it missed have to be known. Groups of sums go also then, if there are too many in
    /// memory. `bits`: false if only they are to go.
    pub fn start_sweep(&mut self, bits: bool) {
        let Seen::Going(epoch) = self.look() else {
            return;
        };
        if self.now.broken || self.intents.sweep.is_some() {
            return;
        }
        let clears = bits && self.now.members.failed().is_none();
        let marked = match self.common.chunks.as_ref().filter(|_| clears) {
            Some(chunks) => {
                let unsynced = self.now.unsynced();
                let may_clear = |chunk: usize| {
                    let Range { start, end } = chunks.sectors(chunk);
                    let stripes = start / STRIPE_SECTORS..end.div_ceil(STRIPE_SECTORS);
                    !unsynced.meets(&stripes)
                };
                chunks.sweep(may_clear)
            }
            None => Marked::default(),
        };
        let groups = self.common.sums().map(Sums::sweep).unwrap_or_default();
        if marked.is_empty() && groups.is_empty() {
            return;
        }
        self.intents.sweep = Some(Sweep {
            // Both were marked before.
            stripes: self.common.words.owned(&marked),
            marked,
            epoch,
            groups,
            step: Step::Waiting,
        });
    }

    /// Groups of sums that have to be written before the sweep goes on, if it has come to that: dirty ones that are to go, and those of chunks whose
    /// bits are. [`QueueCore::sums_written`] follows.
    pub fn swept_sums(&self) -> Option<Vec<usize>> {
        let sweep = self.intents.sweep.as_ref()?;
        let (Step::Writing, sums) = (&sweep.step, self.common.sums()?) else {
            return None;
        };
        let chunks = self.common.chunks.as_ref()?;
        let chunks_swept = sweep.marked.all().filter(|_| !has(Plant::SumsNotSwept));
        let of_chunks = chunks_swept.flat_map(|chunk| {
            let Range { start, end } = chunks.sectors(chunk);
            (start / GROUP_SECTORS) as usize..end.div_ceil(GROUP_SECTORS) as usize
        });
        let wanted: BTreeSet<usize> = of_chunks.chain(sweep.groups.all()).collect();
        let mut dirty = sums.dirty();
        dirty.retain(|group| wanted.contains(group));
        Some(dirty)
    }

    /// The sums that the sweep waits for are on all members but these (a mask of slots).
    pub fn sums_written(&mut self, failed: u64) {
        if failed != 0 {
            self.intents.sweep = None;
            return self.devices_failed(failed);
        }
        self.flush_for_sweep();
    }

    /// Goes on with the sweep, if there is one: when the batches that there were at its begin are done, members are flushed. Before that, sums have
    /// to be written, if there are any.
    pub fn go_on_sweeping(&mut self) {
        let Some(sweep) = &mut self.intents.sweep else {
            return;
        };
        if !matches!(sweep.step, Step::Waiting) {
            return;
        }
        let (epoch, waits) = (sweep.epoch, self.common.words.is_owned(&mut sweep.stripes));
        if !self.is_as_in(epoch) {
            self.intents.sweep = None;
            // A kick that was under way may have left them as they are.
            let failed = self.common.failed(&self.now);
            return self.devices_failed(failed);
        }
        if waits && !has(Plant::SweepNotAwaited) {
            return;
        }
        match self.common.sums() {
            None => self.flush_for_sweep(),
            Some(_) => self.set_step(Step::Writing),
        }
    }

    fn flush_for_sweep(&mut self) {
        let sweep = self.intents.sweep.as_ref();
        let slots = match sweep.is_some_and(|sweep| sweep.marked.is_empty()) {
            // No bit goes.
            true => Vec::new(),
            false => self.common.volatile(&self.now),
        };
        self.set_step(Step::Flushing(slots.len() + 1));
        for slot in slots {
            self.start(Purpose::Sweep, (slot, Op::Flush, false), 0, Data::None);
        }
        self.sweep_flushed();
    }

    fn set_step(&mut self, step: Step) {
        if let Some(sweep) = &mut self.intents.sweep {
            sweep.step = step;
        }
    }

    /// True if no member has failed since an epoch was looked at.
    fn is_as_in(&mut self, epoch: u32) -> bool {
        self.look() == Seen::Going(epoch) && self.common.failed(&self.now) == 0
    }

    /// A member was flushed, or failed that.
    pub(super) fn sweep_flushed(&mut self) {
        let Some(sweep) = &mut self.intents.sweep else {
            return;
        };
        if let Step::Flushing(left) = &mut sweep.step {
            *left -= 1;
            if *left > 0 {
                return;
            }
        }
        let Some(Sweep {
            marked,
            epoch,
            groups,
            ..
        }) = self.intents.sweep.take()
        else {
            return;
        };
        if self.is_as_in(epoch)
            && let Some(chunks) = &self.common.chunks
        {
            chunks.clear(marked);
            if let Some(sums) = self.common.sums() {
                sums.drop_unused(groups);
            }
            return;
        }
        let failed = self.common.failed(&self.now);
        self.devices_failed(failed);
    }

    /// The sweep, if there is one, clears nothing.
    pub fn stop_sweep(&mut self) {
        self.intents.sweep = None;
    }

    /// True while a sweep goes on.
    pub fn is_sweeping(&self) -> bool {
        self.intents.sweep.is_some()
    }
}
