//! A round of a stripe head: a plan that is carried out, with its reads, its calculation and its writes.

use super::pages::{Block, bits};
use super::plan::{Mode, Plan, View, bit};
use super::work::{RoundPiece, Work, borrowed};
use super::{Core, Data, Purpose};
use pvblk_block::Op;

/// The work of a head from its first read to its last write.
pub(super) struct Round {
    pub plan: Plan,
    pub pieces: Vec<RoundPiece>,
    ios: usize,
    /// A read failed: all begins anew.
    again: bool,
    /// Another one failed: nothing of this can be had.
    lost: bool,
    fua: bool,
    /// The data goes to the members from where it is.
    borrows: bool,
    /// The stripe becomes all zeros, without data.
    hole: bool,
    pub runner: usize,
    /// XOR of the blocks that aren't written; `None` if all are, or if no log needs it.
    pub partial_parity: Option<Box<Block>>,
    /// It is in a log that is on disk.
    pub logged: bool,
    /// It counts as a writer in the bitmap.
    pub intends: bool,
    /// Number of the recovery, resync or check that the round belongs to.
    pub sync: Option<u64>,
}

impl Round {
    /// `runner`: the queue whose request it is for.
    pub fn new(plan: Plan, runner: usize) -> Round {
        Round {
            plan,
            pieces: Vec::new(),
            ios: 0,
            again: false,
            lost: false,
            fua: false,
            borrows: false,
            hole: false,
            runner,
            partial_parity: None,
            logged: false,
            intends: false,
            sync: None,
        }
    }

    /// True if the round has writes of requests.
    pub fn writes(&self) -> bool {
        self.plan.mode.writes()
    }
}

impl Core {
    /// The array as plans see it.
    pub(super) fn view(&self) -> View<'_> {
        View {
            geometry: &self.geometry,
            policy: self.policy,
            members: &self.members,
            unsynced: &self.unsynced,
        }
    }

    /// Begins a round of the head's work, if there is any.
    pub(super) fn run_head(&mut self, head: usize) {
        if self.heads.all[head].round.is_some() {
            return;
        }
        if self.broken {
            self.fail_head(head);
            return;
        }
        let h = &self.heads.all[head];
        // A block that isn't recovered can't be used to compute another one.
        let first = h.sync.is_some() && self.members.is_recovering();
        if h.record.bad != 0 && !first {
            self.fix(head);
            return;
        }
        if self.heads.all[head].sync.is_some() {
            if self.sync_head(head) {
                return;
            }
            if self.heads.all[head].waiting.is_empty() {
                self.rest_or_go_on(head, 0, false);
                return;
            }
        }
        self.serve(head);
    }

    /// Everything that waits fails.
    fn fail_head(&mut self, head: usize) {
        let h = &mut self.heads.all[head];
        let idle = h.waiting.is_empty() && h.sync.is_none();
        h.record.bad = 0;
        h.sync = None;
        let pieces = std::mem::take(&mut h.waiting);
        for piece in pieces {
            self.fail_piece(piece.request);
        }
        if !idle {
            self.rest_or_go_on(head, 0, false);
        }
    }

    fn serve(&mut self, head: usize) {
        let h = &self.heads.all[head];
        if h.waiting.is_empty() {
            return;
        }
        let plan = self.view().serve(&h.record, &h.waiting);
        if plan.reads != 0 && plan.mode.writes() && !self.may_preread(head) {
            return;
        }
        // From here on the pieces are the round's.
        let mut pieces = self.spare_pieces.pop().unwrap_or_default();
        let h = &mut self.heads.all[head];
        let (geometry, active) = (&self.geometry, &self.active);
        for piece in h.waiting.iter().filter(|p| plan.takes(p)) {
            if let Some(active) = &active[piece.request] {
                pieces.push(RoundPiece {
                    piece: *piece,
                    request: std::sync::Arc::clone(&active.request),
                    member: geometry.stripe_data(h.record.stripe, piece.index),
                });
            }
        }
        h.waiting.retain(|p| !plan.takes(p));
        let first = pieces.first();
        let mut round = Round::new(plan, first.map_or(0, |p| self.owner(p.piece.request)));
        round.fua = pieces.iter().any(|p| self.is_fua(p.piece.request));
        round.pieces = pieces;
        self.begin(head, round);
    }

    /// Starts a round's reads; without any, its calculation.
    pub(super) fn begin(&mut self, head: usize, mut round: Round) {
        let need = round.plan.reads;
        round.ios = need.count_ones() as usize;
        let runner = round.runner;
        let stripe = self.heads.all[head].record.stripe;
        let sector = self.geometry.stripe_member_sector(stripe);
        if round.writes() {
            self.queues.writing.add(runner);
            let (_, blocks) = round.plan.blocks();
            self.counts.rounds += 1;
            self.counts.whole += u64::from(blocks == self.geometry.data_members());
            self.counts.prereads += need.count_ones() as u64;
        }
        self.heads.all[head].round = Some(round);
        let pages = self.pages.of(head);
        for member in bits(need) {
            let Some(slot) = self.members.reads(member) else {
                // It went since this was planned.
                self.head_read(head, member, usize::MAX, false, runner);
                continue;
            };
            let purpose = Purpose::HeadRead { head, member };
            let io = (slot, Op::Read, false);
            self.start(runner, purpose, io, sector, Data::of(pages.buffer(member)));
        }
        if need == 0 {
            self.calculate(head);
        }
    }

    /// One of the round's reads has ended.
    pub(super) fn head_read(
        &mut self,
        head: usize,
        member: usize,
        slot: usize,
        ok: bool,
        runner: usize,
    ) {
        if !ok {
            self.block_unreadable(head, member, slot, runner);
        }
        let h = &mut self.heads.all[head];
        let Some(round) = &mut h.round else { return };
        round.ios -= 1;
        if ok {
            h.record.valid |= bit(member);
        }
        if round.ios > 0 {
            return;
        }
        if round.lost && !self.broken {
            self.lose_round(head);
            return;
        }
        if round.again || self.broken {
            let mut pieces = std::mem::take(&mut round.pieces);
            for piece in pieces.drain(..).rev() {
                h.waiting.push_front(piece.piece);
            }
            h.sync = h.sync.or(round.sync);
            self.keep_list(pieces);
            self.round_over(head);
            return;
        }
        match self.is_outdated(head) {
            true => self.plan_anew(head),
            false => self.calculate(head),
        }
    }

    /// A block can't be read: it is calculated, if the others are there.
    fn block_unreadable(&mut self, head: usize, member: usize, slot: usize, runner: usize) {
        let gone = self.slots.all.get(slot).is_none_or(Option::is_none);
        if !gone && !self.count_read_error(slot) {
            self.kick(slot, runner);
        }
        let is_there = self.members.reads(member) == Some(slot);
        let h = &self.heads.all[head];
        let Some(round) = &h.round else { return };
        let can_fix = self.view().can_fix(&h.record, &round.plan, member);
        let h = &mut self.heads.all[head];
        let Some(round) = &mut h.round else { return };
        round.again = true;
        match is_there && can_fix {
            true => h.record.bad = bit(member),
            false => round.lost |= is_there,
        }
    }

    /// Fails the round: two blocks of its stripe can't be read.
    fn lose_round(&mut self, head: usize) {
        let Some(mut round) = self.take_round(head) else {
            return;
        };
        let h = &mut self.heads.all[head];
        h.record.bad = 0;
        let stripe = h.record.stripe;
        let was_fix = round.plan.mode == Mode::Fix;
        let mut lost: Vec<usize> = round.pieces.drain(..).map(|p| p.piece.request).collect();
        let mut sync = round.sync;
        if was_fix {
            // They wait for it, all of them.
            lost.extend(h.waiting.drain(..).map(|p| p.request));
            sync = sync.or(h.sync.take());
        }
        self.keep_list(round.pieces);
        tracing::error!(
            "raid5: sector {} of the members: two blocks can't be read",
            self.geometry.stripe_member_sector(stripe)
        );
        for request in lost {
            self.fail_piece(request);
        }
        if let Some(sync) = sync {
            self.sync_unreadable(sync, stripe);
        }
        self.rest_or_go_on(head, 0, false);
    }

    /// Calculates the block that can't be read, and writes it: the device puts it elsewhere.
    fn fix(&mut self, head: usize) {
        let h = &self.heads.all[head];
        let Some(plan) = self.view().fix(&h.record) else {
            self.heads.all[head].record.bad = 0;
            self.run_head(head);
            return;
        };
        let waiting = h.waiting.front().map(|p| self.owner(p.request));
        let sync = self.sync.as_ref().map(|s| s.owner);
        self.begin(head, Round::new(plan, waiting.or(sync).unwrap_or(0)));
    }

    /// All that the round needs is there.
    fn calculate(&mut self, head: usize) {
        let h = &self.heads.all[head];
        let Some(round) = &h.round else { return };
        // Abandoned I/O has no memory of a submitter.
        let may_borrow = !self.ages.limited;
        let view = self.view();
        let calculation = view.calculation(&h.record, &round.plan, &round.pieces, may_borrow);
        let pages = self.pages.of(head);
        let partial_parity = calculation.partial.then(|| self.logs.block());
        let Some(round) = &mut self.heads.all[head].round else {
            return;
        };
        (round.borrows, round.hole) = (calculation.borrows, calculation.hole);
        self.works.push(Work {
            head,
            runner: round.runner,
            pages,
            pieces: std::mem::take(&mut round.pieces),
            calculation,
            partial_parity,
            partial: None,
            mismatch: false,
        });
    }

    /// A piece of work is done. [`Core::unplug`] follows.
    pub fn worked(&mut self, work: Work) {
        let head = work.head;
        let h = &mut self.heads.all[head];
        let Some(round) = &mut h.round else { return };
        round.pieces = work.pieces;
        round.partial_parity = work.partial_parity;
        h.record.calculated(&work.calculation);
        match work.calculation.mode {
            Mode::Read => {
                let pieces = std::mem::take(&mut round.pieces);
                self.pieces_done(pieces, false);
                self.round_over(head);
            }
            Mode::Fix | Mode::Rebuild => self.write_pages(head),
            Mode::Check => self.checked(head, work.mismatch),
            Mode::NoParity | Mode::Modify | Mode::Reconstruct => {
                if self.is_outdated(head) {
                    self.plan_anew(head);
                    return;
                }
                match work.calculation.logged {
                    true => self.logs.add(work.calculation.parity, head),
                    false => self.intend(head),
                }
            }
        }
    }

    fn pieces_done(&mut self, mut pieces: Vec<RoundPiece>, failed: bool) {
        for RoundPiece { piece, request, .. } in pieces.drain(..) {
            drop(request);
            match failed {
                true => self.fail_piece(piece.request),
                false => self.piece_done(piece.request),
            }
        }
        self.keep_list(pieces);
    }

    /// Keeps an empty list for another round. Rounds that aren't for requests have none: there are as many of
    /// those as stripes.
    pub(super) fn keep_list(&mut self, pieces: Vec<RoundPiece>) {
        debug_assert!(pieces.is_empty());
        if pieces.capacity() > 0 {
            self.spare_pieces.push(pieces);
        }
    }

    /// Writes data and parity to the members, but not while the superblocks still list a failed member: after
    /// a power cut it would be taken for up to date, and data written without it, or without its log, would
    /// be lost.
    pub(super) fn write_pages(&mut self, head: usize) {
        if self.is_outdated(head) {
            self.plan_anew(head);
            return;
        }
        if self.meta.is_kicking() && !self.broken {
            self.unnamed.push(head);
            return;
        }
        let h = &self.heads.all[head];
        let stripe = h.record.stripe;
        let Some(round) = &h.round else { return };
        let (runner, fua, hole) = (round.runner, round.fua, round.hole);
        let writes = match self.broken {
            true => Vec::new(),
            false => self.view().writes(&h.record, &round.plan),
        };
        let sector = self.geometry.stripe_member_sector(stripe);
        let pages = self.pages.of(head);
        if let Some(round) = &mut self.heads.all[head].round {
            round.ios = writes.len();
        }
        if writes.is_empty() {
            self.finish_round(head);
            return;
        }
        for (role, slot) in writes {
            if hole && self.slots.zeroes(slot) {
                let io = (slot, Op::WriteZeroes, fua);
                self.start(runner, Purpose::HeadWrite(head), io, sector, Data::Zeros);
                continue;
            }
            let round = self.heads.all[head].round.as_ref();
            let data = round.filter(|round| round.borrows);
            let data = data.and_then(|round| borrowed(&round.pieces, role));
            let data = Data::of(data.or_else(|| pages.buffer(role)));
            let io = (slot, Op::Write, fua);
            self.start(runner, Purpose::HeadWrite(head), io, sector, data);
        }
    }

    /// One of the round's writes has ended. That one failed is the kicked member's matter.
    pub(super) fn head_written(&mut self, head: usize) {
        let Some(round) = &mut self.heads.all[head].round else {
            return;
        };
        round.ios -= 1;
        if round.ios == 0 {
            self.finish_round(head);
        }
    }

    pub(super) fn finish_round(&mut self, head: usize) {
        let h = &mut self.heads.all[head];
        let stripe = h.record.stripe;
        let Some(round) = &mut h.round else { return };
        let pieces = std::mem::take(&mut round.pieces);
        let (logged, intends, sync) = (round.logged, round.intends, round.sync);
        let whole = round.plan.missing.is_none();
        if round.plan.mode == Mode::Fix {
            let member = h.record.bad.trailing_zeros() as usize;
            h.record.bad = 0;
            self.fixed(stripe, member);
        }
        self.pieces_done(pieces, self.broken);
        if logged {
            let parity = self.geometry.stripe_parity(stripe);
            let volatile = !self.slots.volatile().is_empty();
            self.logs.stripe_done(parity, volatile);
        }
        if let Some(round) = &mut self.heads.all[head].round
            && let Some(block) = round.partial_parity.take()
        {
            self.logs.take_back(block);
        }
        if intends {
            self.intent_over(stripe, whole && self.members.failed().is_none());
        }
        if let Some(sync) = sync {
            self.sync_stripe_done(sync, stripe);
        }
        self.round_over(head);
    }

    fn fixed(&mut self, stripe: u64, member: usize) {
        let Some(slot) = self.members.slot(member) else {
            return;
        };
        if let Some(slot) = &mut self.slots.all[slot] {
            slot.corrected += 1;
        }
        tracing::warn!(
            "raid5: member {member} could not read sector {} of its data: it was calculated and written again",
            self.geometry.stripe_member_sector(stripe)
        );
    }
}
