//! Batches: the work of a stripe from the claim of its word to the release.

use super::flying::{Flying, Ios};
use super::io::Purpose;
use super::queue::{Mail, QueueCore};
use super::record::{Batch, Kind, Part as RequestPart, Stripe, Waiting};
use super::{Action, Data, Piece, Work, bit};
use crate::core::plan::Plan;
use crate::core::work::{BatchPiece, StripeWork, borrowed};
use crate::head_pages::bits;
use crate::words;
use crate::words::{
    Claimed, Closed, Errands, Leaves, LogEntry, Looked, Open, Owner, Parked, Part, Partial, Seen,
    Token,
};
use pvblk_block::{Op, RequestFlags};

/// Most lists of pieces that a queue keeps for later batches.
const SPARE: usize = 64;
/// A list with room for more pieces than this isn't kept: arrays with more data members allocate one for each batch.
const MOST_KEPT: usize = 16;

/// A batch that is written, except to members that failed: it is acknowledged when superblocks name them.
pub struct Unnamed {
    token: Token<words::Waiting, Stripe>,
    failed: u64,
}

impl Unnamed {
    /// `failed`: a mask of slots.
    pub(super) fn new(token: Token<words::Waiting, Stripe>, failed: u64) -> Unnamed {
        Unnamed { token, failed }
    }

    /// True if it isn't acknowledged as long as this slot is a member's.
    pub(super) fn waits_for(&self, slot: usize) -> bool {
        self.failed & bit(slot) != 0
    }
}

/// Lists that batches need for a moment; they keep their memory for the next one. Between two steps only `planned`, which nobody reads any more,
/// and `spare`, whose lists are empty, have entries.
#[derive(Default)]
pub(super) struct Lists {
    arrived: Vec<words::Arrived<RequestPart>>,
    /// Pieces of the last plan that was made.
    planned: Vec<Piece>,
    /// Parts that are over.
    over: Vec<Waiting>,
    /// I/O of a batch that is being written.
    writes: Vec<((usize, Op, bool), Data)>,
    /// Memory for pieces of batches.
    spare: Vec<Vec<BatchPiece>>,
}

impl Lists {
    /// Keeps memory for a later batch, if not much is kept already.
    fn keep(&mut self, mut pieces: Vec<BatchPiece>) {
        pieces.clear();
        if self.spare.len() < SPARE && (1..=MOST_KEPT).contains(&pieces.capacity()) {
            self.spare.push(pieces);
        }
    }
}

impl QueueCore {
    /// The word is this queue's.
    pub(super) fn claimed(&mut self, token: Token<Claimed, Stripe>) {
        match self.common.words.look(token, &self.common.epoch) {
            Looked::Parked(token, tell) => {
                self.tell(tell);
                self.parked.push(token);
            }
            Looked::Open(token) => {
                self.has_seen(token.epoch());
                self.open_batch(token);
            }
        }
    }

    pub(super) fn open_batch(&mut self, mut token: Token<Open, Stripe>) {
        self.take_arrivals(&mut token);
        if self.now.broken {
            let mut token = self.close_word(token);
            let failed = token.record_mut().fail();
            self.end_parts(failed);
            return self.leave(token);
        }
        let record = token.record_mut();
        record.turn_to_first();
        record.was_useful = record.known.valid != 0;
        let kind = record.kind();
        let Some(mut token) = self.may_begin(token, kind.writes()) else {
            return;
        };
        let record = token.record_mut();
        if let Kind::Sync(action) = kind {
            self.sync_opened(record.known.stripe, action);
            if action != Action::Recover {
                // The data on the members counts.
                record.known.valid = 0;
            }
        }
        record.seen = self.now.see(record.known.stripe);
        if record.pages.is_none() {
            match self.take_pages() {
                None => return self.wait_for_pages(token),
                pages => token.record_mut().pages = pages,
            }
        }
        self.read_blocks(token, false);
    }

    fn take_arrivals<S: words::Takes>(&mut self, token: &mut Token<S, Stripe>) {
        let arrived = &mut self.lists.arrived;
        self.common.words.take(token, arrived);
        token
            .record_mut()
            .add(arrived.drain(..), &self.common.geometry);
    }

    /// Closes the batch; arrivals until then are among those that wait.
    pub(super) fn close_word(&mut self, token: Token<Open, Stripe>) -> Token<Closed, Stripe> {
        let arrived = &mut self.lists.arrived;
        let mut token = self.common.words.close(token, arrived);
        token
            .record_mut()
            .add(arrived.drain(..), &self.common.geometry);
        token
    }

    fn take_pages(&mut self) -> Option<words::StripePages> {
        let mut errands = Errands::default();
        let words = (&self.common.words, &self.common.epoch);
        let pages = self.reserve.take(words, &mut errands);
        self.run_errands(errands);
        pages
    }

    /// Queues have waited for pages and have them.
    #[inline(always)]
    pub(super) fn wake_for_pages(&mut self, queues: Vec<Owner>) {
        for to in queues {
            self.send(to, Mail::Pages);
        }
    }

    /// Errands of pages.
    pub(super) fn run_errands(&mut self, errands: Errands<Stripe>) {
        self.wake_for_pages(errands.wake);
        self.tell(errands.tell);
        for token in errands.arrived {
            self.leave(token);
        }
    }

    /// A batch that waits for pages is parked: else a stop would wait for it, and it for batches that wait for the stop's end.
    fn wait_for_pages(&mut self, token: Token<Open, Stripe>) {
        let (token, tell) = self.common.words.park(token, &self.common.epoch);
        self.tell(tell);
        self.pageless.push(token);
    }

    pub(super) fn wake_pageless(&mut self) {
        for token in std::mem::take(&mut self.pageless) {
            self.claim_again(token);
        }
    }

    /// A parked batch goes on as after a claim.
    pub(super) fn claim_again(&mut self, token: Token<Parked, Stripe>) {
        let token = self.common.words.go_on(token);
        self.send(self.me, Mail::Stripe(token));
    }

    /// Gives up the batch: it is planned anew when the stop is over.
    pub(super) fn park(&mut self, mut token: Token<Open, Stripe>) {
        token.record_mut().forget();
        let (token, tell) = self.common.words.park(token, &self.common.epoch);
        self.tell(tell);
        self.parked.push(token);
    }

    /// Plans for all that wait, and reads. `again`: others have joined while the first ones' blocks were read.
    fn read_blocks(&mut self, mut token: Token<Open, Stripe>, again: bool) {
        let record = token.record_mut();
        let view = self.common.view(&self.now, &record.seen);
        let parts = record.waiting.len();
        let plan = match record.next_plan(&view, parts, &mut self.lists.planned) {
            Some(plan) if plan.reads != 0 => plan,
            planned => return self.close_batch(token, parts, planned),
        };
        let sector = self
            .common
            .geometry
            .stripe_member_sector(record.known.stripe);
        let pages = record.head_pages().expect("a batch has pages");
        if record.kind() == Kind::Write {
            self.tallies.note_prereads(plan.reads.count_ones());
        }
        let ios = Ios::new(plan.reads.count_ones() as usize);
        let flying = self.flying.insert(Flying::Reading {
            token,
            plan,
            parts,
            again,
            ios,
        });
        for role in bits(plan.reads) {
            let slot = self.now.members.reads(role);
            let io = (
                slot.expect("a member that was planned with"),
                Op::Read,
                false,
            );
            let purpose = Purpose::Read { flying, role };
            self.start(purpose, io, sector, Data::of(pages.buffer(role)));
        }
    }

    pub(super) fn block_read(&mut self, flying: usize, role: usize, ok: bool) {
        let Flying::Reading { token, ios, .. } = &mut self.flying[flying] else {
            debug_assert!(false, "a read of a batch that has none");
            return;
        };
        let fits = ok && self.common.page_fits(token.record_mut(), role);
        if fits {
            token.record_mut().known.valid |= bit(role);
        }
        if !ios.read(role, ok, fits) {
            return;
        }
        if let Flying::Reading {
            token,
            plan,
            parts,
            again,
            ios,
        } = self.flying.remove(flying)
        {
            self.blocks_read(token, plan, (parts, again), ios);
        }
    }

    pub(super) fn block_written(&mut self, flying: usize, slot: usize, ok: bool) {
        let (Flying::Writing { ios, .. } | Flying::RunWriting { ios, .. }) =
            &mut self.flying[flying]
        else {
            debug_assert!(false, "a write of a batch that has none");
            return;
        };
        if !ios.wrote(slot, ok) {
            return;
        }
        match self.flying.remove(flying) {
            Flying::Writing { token, logged, ios } => self.written(token, logged, ios.failed()),
            Flying::RunWriting { run, logged, ios } => self.run_written(run, logged, ios.failed()),
            _ => {}
        }
    }

    /// All reads of a plan have ended.
    fn blocks_read(
        &mut self,
        mut token: Token<Open, Stripe>,
        plan: Plan,
        (parts, again): (usize, bool),
        ios: Ios,
    ) {
        let (failed, unread) = (ios.failed(), ios.unread());
        let slots = bits(unread).filter_map(|role| self.now.members.reads(role));
        for slot in slots.collect::<Vec<_>>() {
            if !self.common.note_read_error(&self.now, slot) {
                self.common.note_failure(slot);
                self.member_failed(slot);
            }
        }
        if matches!(self.look(), Seen::Stopped(_)) {
            return self.park(token);
        }
        if failed != 0 {
            return self.unreadable(token, plan, parts, (failed, unread));
        }
        if again || !matches!(token.record().kind(), Kind::Read | Kind::Write) {
            return self.close_batch(token, parts, None);
        }
        self.take_arrivals(&mut token);
        if token.record().waiting.len() == parts {
            return self.close_batch(token, parts, None);
        }
        self.read_blocks(token, true);
    }

    /// Members are there that couldn't read their blocks: one is calculated and written, if all others can be read.
    fn unreadable(
        &mut self,
        mut token: Token<Open, Stripe>,
        plan: Plan,
        parts: usize,
        (failed, unread): (u64, u64),
    ) {
        let record = token.record_mut();
        let view = self.common.view(&self.now, &record.seen);
        let is_one = failed.count_ones() == 1 && record.known.bad == 0;
        let role = failed.trailing_zeros() as usize;
        let can_fix = is_one && view.can_fix(&record.known, &plan, role);
        let may_trust = unread == 0 && view.can_calculate(&record.known, &plan);
        let is_trusted = may_trust && self.common.trust_held(record, failed);
        if !can_fix && !is_trusted {
            return self.lose_blocks(token, plan, parts);
        }
        if !is_trusted {
            record.known.bad = bit(role);
        }
        if let Some(token) = self.may_write(token) {
            self.read_blocks(token, false);
        }
    }

    /// A block of the stripe can't be had, nor calculated: those that need it fail.
    fn lose_blocks(&mut self, token: Token<Open, Stripe>, plan: Plan, parts: usize) {
        let mut token = self.close_word(token);
        let record = token.record_mut();
        let sector = self
            .common
            .geometry
            .stripe_member_sector(record.known.stripe);
        tracing::error!(
            "raid5: sector {sector} of the members: a block that can't be read, or isn't what was written, can't be calculated"
        );
        let lost = match record.kind() {
            // All wait for it.
            Kind::Fix => return self.lose_stripe(token),
            // A check passes over it.
            Kind::Sync(action) => vec![record.sync_done(action != Action::Recover)],
            Kind::Read | Kind::Write => {
                let seen = record.seen.clone();
                let view = self.common.view(&self.now, &seen);
                record.lose(&view, &plan, parts)
            }
        };
        self.lose_parts(token, lost);
    }

    /// A missing member's block that was calculated isn't what was written: those that need it fail, and a rebuild ends.
    fn lose_computed(
        &mut self,
        mut token: Token<Closed, Stripe>,
        role: usize,
        pieces: Vec<BatchPiece>,
    ) {
        let record = token.record_mut();
        match record.kind() {
            Kind::Sync(_) => {
                let lost = record.sync_done(false);
                self.lose_parts(token, vec![lost]);
            }
            // Other blocks of the stripe are well.
            Kind::Read => {
                record.fail_pieces(&pieces, role);
                self.end_batch(token, pieces, true);
            }
            Kind::Write | Kind::Fix => self.end_batch(token, pieces, false),
        }
    }

    /// A block of the stripe can't be made right: all parts of the stripe fail.
    pub(super) fn lose_stripe(&mut self, mut token: Token<Closed, Stripe>) {
        let lost = token.record_mut().fail_stripe();
        self.lose_parts(token, lost);
    }

    fn lose_parts(&mut self, mut token: Token<Closed, Stripe>, lost: Vec<Waiting>) {
        let record = token.record_mut();
        let sector = self
            .common
            .geometry
            .stripe_member_sector(record.known.stripe);
        record.forget();
        record.settle();
        let rebuilds = |waiting: &Waiting| waiting.part.is_rebuild();
        if lost.iter().any(rebuilds) {
            // Before the word is left: its next owner would count on the incoming device.
            self.stop_rebuild(sector);
        }
        self.end_parts(lost);
        self.leave(token);
    }

    /// Notes this queue's parts of a batch that came through [`super::gather`].
    pub(super) fn note_ways(&mut self, record: &Stripe) {
        let its = |w: &&Waiting| w.part.stripe == record.known.stripe;
        let its = record.waiting.iter().filter(its);
        self.ways.extend(its.filter_map(|w| w.part.way_of(self.me)));
    }

    /// All that the first parts need was read, or `planned`, whose pieces are in `lists.planned`, needs no reads. A plan of an action or a fix has
    /// no pieces; the list is then an older plan's.
    fn close_batch(&mut self, token: Token<Open, Stripe>, parts: usize, planned: Option<Plan>) {
        let mut token = self.close_word(token);
        let record = token.record_mut();
        let view = self.common.view(&self.now, &record.seen);
        let mut pieces = self.lists.spare.pop().unwrap_or_default();
        let listed = &mut self.lists.planned;
        let ready = match record.kind() {
            Kind::Read | Kind::Write => {
                let plan = record.ready(&view, parts, planned, listed);
                record.take_pieces(&view, &plan, listed, &mut pieces);
                Some(plan)
            }
            Kind::Sync(_) | Kind::Fix => planned.or_else(|| record.next_plan(&view, parts, listed)),
        };
        let Some(plan) = ready else {
            return self.end_batch(token, pieces, true);
        };
        let calculation = view.calculation(&record.known, &plan, &pieces, !self.common.limited);
        let pages = record.head_pages().expect("a batch has pages");
        let partial = match calculation.partial {
            false => Ok(None),
            true => Partial::of(&pages, calculation.unchanged(), &mut self.blocks).map(Some),
        };
        if record.kind() == Kind::Write {
            let blocks = self.common.geometry.data_members();
            self.tallies.note_batches(1, plan.blocks().1 == blocks);
            self.note_ways(record);
        }
        record.batch = Some(Batch {
            plan,
            pieces: Vec::new(),
            calculation,
        });
        self.gathered_read();
        let Ok(partial) = partial else {
            tracing::error!("raid5: there is no memory for a log");
            return self.end_batch(token, pieces, false);
        };
        let stripe = record.known.stripe;
        let flying = self.flying.insert(Flying::Calculating(token));
        self.works.push(Work::Stripe(StripeWork {
            flying,
            pages,
            pieces,
            calculation,
            partial,
            mismatch: false,
            sums: self.common.sums().map(|_| stripe),
            computed: None,
        }));
    }

    /// A calculation is done. It holds nothing of its requests any more.
    pub fn worked(&mut self, work: &mut Work) {
        match work {
            Work::Stripe(work) => self.stripe_worked(work),
            Work::Run(work) => self.run_worked(work),
        }
    }

    #[inline(always)]
    fn stripe_worked(&mut self, work: &mut StripeWork) {
        let Flying::Calculating(mut token) = self.flying.remove(work.flying) else {
            debug_assert!(false, "a calculation of a batch that has none");
            return;
        };
        let record = token.record_mut();
        if record.kind() == Kind::Write {
            self.tallies
                .note_calculation(work.written_bytes(), work.moved_bytes());
        }
        record.known.calculated(&work.calculation);
        let stripe = record.known.stripe;
        let is_left = match record.kind() {
            Kind::Read => false,
            Kind::Sync(Action::Check | Action::Checksum) => false,
            Kind::Sync(Action::Resync | Action::Repair) => work.mismatch,
            Kind::Sync(Action::Recover) | Kind::Write | Kind::Fix => true,
        };
        record.waiting[0].mismatch = work.mismatch;
        let computed = work.calculation.compute.zip(work.computed);
        let computed = computed.filter(|_| record.kind() != Kind::Fix);
        if let Some((role, sum)) = computed
            && !self.common.computed_fits(record, role, sum)
        {
            return self.lose_computed(token, role, std::mem::take(&mut work.pieces));
        }
        match record.kind() {
            Kind::Sync(action) if action.makes_parity() || !work.mismatch => {
                self.common.learn_sums(record);
            }
            Kind::Fix if !self.common.fixed_fits(&self.now, record) => {
                return self.lose_stripe(token);
            }
            _ => {}
        }
        if !is_left {
            return self.end_batch(token, std::mem::take(&mut work.pieces), true);
        }
        let Some(batch) = &mut record.batch else {
            debug_assert!(false, "a calculation without a batch");
            return;
        };
        batch.pieces = std::mem::take(&mut work.pieces);
        let (first, blocks) = batch.plan.blocks();
        match work.calculation.logged {
            false => self.write_blocks(token, None),
            true => self.wait_for_log(
                token,
                LogEntry {
                    stripe,
                    stripes: 1,
                    first,
                    blocks,
                    partial: work.partial.take(),
                },
            ),
        }
    }

    /// Writes data and parity to the members.
    pub(super) fn write_blocks(&mut self, mut token: Token<Closed, Stripe>, logged: Option<Part>) {
        debug_assert!(self.is_current(token.epoch()), "planned for other members");
        let record = token.record_mut();
        let sector = self
            .common
            .geometry
            .stripe_member_sector(record.known.stripe);
        let pages = record.head_pages();
        let view = self.common.view(&self.now, &record.seen);
        let (Some(pages), Some(batch)) = (pages, &record.batch) else {
            debug_assert!(false, "a batch has pages and a plan");
            return;
        };
        let is_fua = |p: &BatchPiece| p.request.flags.contains(RequestFlags::FUA);
        let fua = batch.pieces.iter().any(is_fua);
        let mut writes = std::mem::take(&mut self.lists.writes);
        view.writes(&record.known, &batch.plan, |role, slot| {
            if batch.calculation.hole && self.now.device(slot).slot.ability.zeroes {
                return writes.push(((slot, Op::WriteZeroes, fua), Data::Zeros));
            }
            let pieces = Some(&batch.pieces).filter(|_| batch.calculation.borrows);
            let data = pieces.and_then(|pieces| borrowed(pieces, role));
            let data = Data::of(data.or_else(|| pages.buffer(role)));
            writes.push(((slot, Op::Write, fua), data));
        });
        let ios = Ios::new(writes.len());
        self.common.note_sums(token.record_mut());
        if writes.is_empty() {
            self.lists.writes = writes;
            return self.written(token, logged, 0);
        }
        let flying = self.flying.insert(Flying::Writing { token, logged, ios });
        for (io, data) in writes.drain(..) {
            self.start(Purpose::Write { flying }, io, sector, data);
        }
        self.lists.writes = writes;
    }

    /// Data and parity are written, but for the members of these slots, a mask.
    pub(super) fn writes_ended(&mut self, logged: Option<Part>, failed: u64) {
        // First: a log that goes on before words are stopped would forget stripes of which a member lacks data.
        for slot in bits(failed) {
            self.member_failed(slot);
        }
        if let Some(part) = logged {
            self.give_back(part);
        }
    }

    fn written(&mut self, token: Token<Closed, Stripe>, logged: Option<Part>, failed: u64) {
        self.writes_ended(logged, failed);
        if failed == 0 {
            return self.finish_batch(token, true);
        }
        let (token, tell) = self.common.words.wait(token, &self.common.epoch);
        self.tell(tell);
        self.unnamed.push(Unnamed::new(token, failed));
    }

    /// A stop is over. The batch is acknowledged, unless one of the members that failed it is one still.
    pub(super) fn name_or_wait(&mut self, unnamed: Unnamed) {
        let mut waits = false;
        for slot in bits(unnamed.failed) {
            waits |= self.member_failed(slot);
        }
        if waits {
            return self.unnamed.push(unnamed);
        }
        let token = self.common.words.resume(unnamed.token);
        self.finish_batch(token, !self.now.broken);
    }

    fn finish_batch(&mut self, mut token: Token<Closed, Stripe>, ok: bool) {
        let batch = token.record_mut().batch.as_mut();
        let pieces = batch.map(|batch| std::mem::take(&mut batch.pieces));
        self.end_batch(token, pieces.unwrap_or_default(), ok);
    }

    /// The batch is over: its pieces are acknowledged, and the word is left.
    fn end_batch(
        &mut self,
        mut token: Token<Closed, Stripe>,
        mut pieces: Vec<BatchPiece>,
        ok: bool,
    ) {
        let record = token.record_mut();
        let batch = record.batch.take();
        let mut over = std::mem::take(&mut self.lists.over);
        match record.kind() {
            Kind::Fix => {
                if batch.is_some() && ok {
                    let misfit = record.misfit;
                    self.common.note_fixed(&self.now, &record.known, misfit);
                }
                record.settle();
            }
            Kind::Sync(_) => over.push(record.sync_done(ok)),
            Kind::Read | Kind::Write => record.done(&mut pieces, ok, &mut over),
        }
        let blocks = self.common.geometry.data_members();
        let whole = batch.is_some_and(|batch| batch.plan.blocks().1 == blocks);
        if !ok {
            record.forget();
        }
        let mut wake = Vec::new();
        self.reserve.end_batch(record, whole, &mut wake);
        self.wake_for_pages(wake);
        self.end_parts(over.drain(..));
        self.lists.over = over;
        self.lists.keep(pieces);
        self.leave(token);
    }

    /// Frees the word, or hands it over to the queue whose part waits longest.
    pub(super) fn leave<S: Leaves>(&mut self, mut token: Token<S, Stripe>) {
        if token.record().waiting.is_empty() {
            let mut errands = Errands::default();
            let words = (&self.common.words, &self.common.epoch);
            let left = self.reserve.release(words, token, &mut errands);
            self.run_errands(errands);
            match left {
                Ok(()) => return,
                Err(back) => token = back,
            }
            self.take_arrivals(&mut token);
        }
        let to = token.record().next_owner();
        let to = to.expect("somebody has arrived");
        let token = self.common.words.hand_over(token, to);
        self.send(to, Mail::Stripe(token));
    }
}
