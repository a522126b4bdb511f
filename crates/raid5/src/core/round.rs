//! A round of a stripe head: its reads, its computation, its writes.

use super::pages::{Block, bits, segments};
use super::work::{Mode, RoundPiece, Work, can_borrow};
use super::zero::is_hole;
use super::{Core, Data, Piece, Purpose};
use crate::{Policy, STRIPE_BYTES};
use pvblk_block::Op;
use pvblk_block::planted::{Plant, has};

/// The work of a head from its first read to its last write.
pub(super) struct Round {
    pub mode: Mode,
    pub pieces: Vec<RoundPiece>,
    /// Data blocks that are written: a bit for each.
    touched: u64,
    /// The role that isn't there, as far as this round goes. It may come back meanwhile.
    missing: Option<usize>,
    /// This role's page is to be calculated from all others.
    pub compute: Option<usize>,
    /// The role whose block alone is written, in a round that isn't for a request.
    pub target: Option<usize>,
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
    /// The number of kicks when it was planned.
    pub epoch: u64,
}

impl Round {
    /// True if the round has writes of requests.
    pub fn writes(&self) -> bool {
        matches!(self.mode, Mode::NoParity | Mode::Modify | Mode::Reconstruct)
    }

    /// True if it was planned while the stripe had no device for one of its blocks.
    pub fn is_without_member(&self) -> bool {
        self.missing.is_some()
    }

    /// First data block that is written, and how many.
    pub fn blocks(&self) -> (usize, usize) {
        let first = self.touched.trailing_zeros() as usize;
        (first, self.touched.count_ones() as usize)
    }

    pub fn new(mode: Mode, missing: Option<usize>) -> Round {
        Round {
            mode,
            pieces: Vec::new(),
            touched: 0,
            missing,
            compute: None,
            target: None,
            ios: 0,
            again: false,
            lost: false,
            fua: false,
            borrows: false,
            hole: false,
            runner: 0,
            partial_parity: None,
            logged: false,
            intends: false,
            sync: None,
            epoch: 0,
        }
    }
}

pub(super) fn bit(member: usize) -> u64 {
    1 << member
}

/// Sectors of a block that a piece covers.
pub(super) fn sectors_of(piece: &Piece) -> u8 {
    if has(Plant::PartialTakenForWhole) {
        return u8::MAX;
    }
    let all = (1u16 << piece.sectors) - 1;
    (all << piece.offset) as u8
}

impl Core {
    fn member(&self, stripe: u64, index: usize) -> usize {
        self.geometry.stripe_data(stripe, index)
    }

    /// Members of these data blocks, as masks both.
    fn members_of(&self, stripe: u64, blocks: u64) -> u64 {
        let data = self.geometry.data_members();
        let some = bits(blocks).take_while(|i| *i < data);
        some.fold(0, |mask, i| mask | bit(self.member(stripe, i)))
    }

    /// Mask of all members.
    pub(super) fn everyone(&self) -> u64 {
        u64::MAX >> (64 - self.geometry.members())
    }

    /// The data block of a role in a stripe, if it isn't the parity's.
    fn index_of(&self, stripe: u64, role: Option<usize>) -> Option<usize> {
        let row = self.geometry.stripe_row(stripe);
        self.geometry.data_index(row, role?)
    }

    fn logs_parity(&self, parity: usize, missing: Option<usize>) -> bool {
        matches!(self.policy, Policy::Ppl(_)) && missing != Some(parity)
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
        let rebuilds = |i: super::Incoming| self.slots.by_role[i.role].is_none();
        let first = h.sync.is_some() && self.slots.incoming.is_some_and(rebuilds);
        if h.bad != 0 && !first {
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
        h.bad = 0;
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
        let missing = self.slots.missing(h.stripe);
        let reads = h.waiting.iter().any(|p| !p.write);
        let (mut round, need) = match reads {
            true => self.plan_reads(head, missing),
            false => self.plan_writes(head, missing),
        };
        if need != 0 && !reads && !self.may_preread(head) {
            return;
        }
        // From here on the pieces are the round's.
        let touched = round.touched;
        let takes = |p: &Piece| p.write != reads && (reads || touched & bit(p.index) != 0);
        round.pieces = self.spare_pieces.pop().unwrap_or_default();
        let h = &mut self.heads.all[head];
        let (geometry, active) = (&self.geometry, &self.active);
        for piece in h.waiting.iter().filter(|p| takes(p)) {
            if let Some(active) = &active[piece.request] {
                round.pieces.push(RoundPiece {
                    piece: *piece,
                    request: std::sync::Arc::clone(&active.request),
                    member: geometry.stripe_data(h.stripe, piece.index),
                });
            }
        }
        h.waiting.retain(|p| !takes(p));
        let first = round.pieces.first();
        round.runner = first.map_or(0, |p| self.owner(p.piece.request));
        let mut pieces = round.pieces.iter();
        round.fua = pieces.any(|p| self.is_fua(p.piece.request));
        self.begin(head, round, need);
    }

    /// Starts a round's reads of these members; without any, its work.
    pub(super) fn begin(&mut self, head: usize, mut round: Round, need: u64) {
        round.ios = need.count_ones() as usize;
        round.epoch = self.epoch;
        let runner = round.runner;
        let stripe = self.heads.all[head].stripe;
        let sector = self.geometry.stripe_member_sector(stripe);
        if round.writes() {
            self.queues.writing.add(runner);
            let (_, blocks) = round.blocks();
            self.counts.rounds += 1;
            self.counts.whole += u64::from(blocks == self.geometry.data_members());
            self.counts.prereads += need.count_ones() as u64;
        }
        self.heads.all[head].round = Some(round);
        let pages = self.pages.of(head);
        for member in bits(need) {
            let Some(slot) = self.slots.reads(member) else {
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

    /// All members but one, without those whose pages are valid.
    pub(super) fn all_others(&self, valid: u64, but: usize) -> u64 {
        self.everyone() & !valid & !bit(but)
    }

    fn plan_reads(&self, head: usize, missing: Option<usize>) -> (Round, u64) {
        let h = &self.heads.all[head];
        let mut round = Round::new(Mode::Read, missing);
        let mut need = 0;
        for piece in h.waiting.iter().filter(|p| !p.write) {
            let member = self.member(h.stripe, piece.index);
            if h.valid & bit(member) != 0 {
                continue;
            }
            if missing == Some(member) {
                round.compute = Some(member);
                need |= self.all_others(h.valid, member);
            } else {
                need |= bit(member);
            }
        }
        (round, need)
    }

    fn plan_writes(&self, head: usize, missing: Option<usize>) -> (Round, u64) {
        let h = &self.heads.all[head];
        let stripe = h.stripe;
        let data = self.geometry.data_members();
        let parity = self.geometry.stripe_parity(stripe);
        let mut covered = [0u8; 64];
        for piece in &h.waiting {
            covered[piece.index] |= sectors_of(piece);
        }
        let indices = |f: &dyn Fn(u8) -> bool| {
            let some = covered[..data].iter().enumerate().filter(|(_, c)| f(**c));
            some.fold(0, |mask, (i, _)| mask | bit(i))
        };
        let alone = self.index_of(stripe, self.slots.uncommitted(stripe));
        let logs = self.logs_parity(parity, missing);
        let wanted = choose(indices(&|c| c != 0), alone, logs);
        let whole = indices(&|c| c == u8::MAX) & wanted;
        // Members of data blocks whose pages aren't valid.
        let stale = |blocks: u64| self.members_of(stripe, blocks) & !h.valid;
        let mut round = Round::new(Mode::NoParity, missing);
        round.touched = wanted;
        if missing == Some(parity) {
            return (round, stale(wanted & !whole));
        }
        let modify = stale(wanted) | (bit(parity) & !h.valid);
        let reconstruct = stale(!whole);
        let failed = self.index_of(stripe, missing).map(bit);
        (round.mode, round.compute) = match failed {
            // A block that isn't written and can't be read must not be needed.
            Some(f) if stale(f) != 0 && wanted & f == 0 => (Mode::Modify, None),
            // The block is written in part, so the rest of it must be known.
            Some(f) if stale(f) != 0 && whole & f == 0 => {
                let member = missing.unwrap_or(parity);
                round.compute = Some(member);
                round.mode = Mode::Reconstruct;
                return (round, self.all_others(h.valid, member));
            }
            Some(f) if wanted & f != 0 => (Mode::Reconstruct, None),
            // Parity that isn't right would stay so.
            _ if self.unsynced.has(stripe) => (Mode::Reconstruct, None),
            _ if modify.count_ones() < reconstruct.count_ones() => (Mode::Modify, None),
            _ => (Mode::Reconstruct, None),
        };
        let need = match round.mode {
            Mode::Modify => modify,
            _ => reconstruct,
        };
        (round, need)
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
            h.valid |= bit(member);
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
        let stripe = self.heads.all[head].stripe;
        let gone = self.slots.all.get(slot).is_none_or(Option::is_none);
        if !gone && !self.count_read_error(slot) {
            self.kick(slot, runner);
        }
        let is_there = self.slots.reads(member) == Some(slot);
        let missing = self.slots.missing(stripe).is_some();
        let h = &mut self.heads.all[head];
        let Some(round) = &mut h.round else { return };
        round.again = true;
        if !is_there {
            return;
        }
        // Where all other blocks and their parity are good for it.
        let rebuilds = round.mode == Mode::Rebuild && round.compute.is_some();
        let missing = missing || round.missing.is_some() || rebuilds;
        let others = !missing && h.bad & !bit(member) == 0;
        match others && round.mode != Mode::Fix && !self.unsynced.has(stripe) {
            true => h.bad = bit(member),
            false => round.lost = true,
        }
    }

    /// Fails the round: two blocks of its stripe can't be read.
    fn lose_round(&mut self, head: usize) {
        let Some(mut round) = self.take_round(head) else {
            return;
        };
        let h = &mut self.heads.all[head];
        h.bad = 0;
        let stripe = h.stripe;
        let was_fix = round.mode == Mode::Fix;
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
        let (stripe, member) = (h.stripe, h.bad.trailing_zeros() as usize);
        if self.slots.missing(stripe).is_some() {
            // The block is the missing member's, which is computed anyway; or it can't be computed, and later
            // requests for it find that out.
            self.heads.all[head].bad = 0;
            self.run_head(head);
            return;
        }
        let mut round = Round::new(Mode::Fix, None);
        (round.compute, round.target) = (Some(member), Some(member));
        let waiting = h.waiting.front().map(|p| self.owner(p.request));
        let sync = self.sync.as_ref().map(|s| s.owner);
        round.runner = waiting.or(sync).unwrap_or(0);
        let need = self.all_others(h.valid, member);
        self.begin(head, round, need);
    }

    /// All that the round needs is there.
    fn calculate(&mut self, head: usize) {
        let stripe = self.heads.all[head].stripe;
        let parity = self.geometry.stripe_parity(stripe);
        let all = self.everyone();
        let Some(round) = &self.heads.all[head].round else {
            return;
        };
        let touched = self.members_of(stripe, round.touched);
        let (blocks, data) = (round.blocks().1, self.geometry.data_members());
        let writes = matches!(round.mode, Mode::Modify | Mode::Reconstruct);
        let logs = writes && blocks < data && self.logs_parity(parity, round.missing);
        let borrows =
            writes && blocks == data && round.missing.is_none() && can_borrow(&round.pieces, data);
        // Abandoned I/O has no memory of a submitter.
        let borrows = borrows && !self.ages.limited;
        let hole =
            writes && blocks == data && round.missing.is_none() && is_hole(&round.pieces, data);
        let pages = self.pages.of(head);
        let partial = logs.then(|| self.logs.block());
        let Some(round) = &mut self.heads.all[head].round else {
            return;
        };
        (round.borrows, round.hole) = (borrows, hole);
        self.works.push(Work {
            head,
            runner: round.runner,
            pages,
            mode: round.mode,
            pieces: std::mem::take(&mut round.pieces),
            all,
            touched,
            parity,
            compute: round.compute,
            partial_parity: partial,
            borrows,
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
        if let Some(member) = work.compute {
            h.valid |= bit(member);
        }
        match work.mode {
            Mode::Read => {
                let pieces = std::mem::take(&mut round.pieces);
                self.pieces_done(pieces, false);
                self.round_over(head);
            }
            Mode::Fix | Mode::Rebuild => self.write_pages(head),
            Mode::Check => self.checked(head, work.mismatch),
            Mode::NoParity | Mode::Modify | Mode::Reconstruct => {
                match work.borrows {
                    true => h.valid &= !work.touched,
                    false => h.valid |= work.touched,
                }
                match work.mode {
                    // It may be asked for again, for a member that is rebuilt.
                    Mode::NoParity => h.valid &= !bit(work.parity),
                    _ => h.valid |= bit(work.parity),
                }
                let missing = round.missing;
                if self.is_outdated(head) {
                    self.plan_anew(head);
                    return;
                }
                match self.logs_parity(work.parity, missing) {
                    true => self.logs.add(work.parity, head),
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

    /// Mask of the roles that a round writes.
    fn written(&self, stripe: u64, round: &Round) -> u64 {
        let parity = self.geometry.stripe_parity(stripe);
        let all = match round.mode {
            Mode::Fix | Mode::Rebuild => round.target.map_or(0, bit),
            Mode::Check => bit(parity),
            Mode::Read => 0,
            _ => self.members_of(stripe, round.touched) | bit(parity),
        };
        all & !round.missing.map_or(0, bit)
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
        let stripe = h.stripe;
        let Some(round) = &h.round else { return };
        let (runner, fua, mode, hole) = (round.runner, round.fua, round.mode, round.hole);
        let mut writes = Vec::new();
        if !self.broken {
            for role in bits(self.written(stripe, round)) {
                let slots = self.slots.writes(role, stripe);
                // A block that is rebuilt goes where it isn't yet.
                let new = |s: &usize| {
                    let incoming = self.slots.incoming.is_some_and(|i| i.slot == *s);
                    match mode {
                        Mode::Rebuild => incoming,
                        _ => !incoming || !has(Plant::IncomingForgotten),
                    }
                };
                writes.extend(slots.filter(new).map(|slot| (role, slot)));
            }
        }
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
            let data = self.borrowed(head, role);
            let data = data.unwrap_or_else(|| Data::of(pages.buffer(role)));
            let io = (slot, Op::Write, fua);
            self.start(runner, Purpose::HeadWrite(head), io, sector, data);
        }
    }

    /// A block's data where its submitter has it.
    fn borrowed(&self, head: usize, role: usize) -> Option<Data> {
        let round = self.heads.all[head].round.as_ref()?;
        if !round.borrows {
            return None;
        }
        let p = round.pieces.iter().find(|p| p.member == role)?;
        let mut data = None;
        segments(&p.request, p.piece.skip, STRIPE_BYTES, |b| data = Some(b));
        Some(Data::of(data))
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
        let stripe = h.stripe;
        let Some(round) = &mut h.round else { return };
        let pieces = std::mem::take(&mut round.pieces);
        let (logged, intends, sync) = (round.logged, round.intends, round.sync);
        let whole = round.missing.is_none();
        if round.mode == Mode::Fix {
            let member = h.bad.trailing_zeros() as usize;
            h.bad = 0;
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
            self.intent_over(stripe, whole && self.slots.failed().is_none());
        }
        if let Some(sync) = sync {
            self.sync_stripe_done(sync, stripe);
        }
        self.round_over(head);
    }

    fn fixed(&mut self, stripe: u64, member: usize) {
        let Some(slot) = self.slots.by_role.get(member).copied().flatten() else {
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

/// The data blocks, of those that wait, that a round writes; all as masks.
fn choose(all: u64, alone: Option<usize>, logs: bool) -> u64 {
    if let Some(f) = alone
        && all & bit(f) != 0
        && !has(Plant::MissingWithOthers)
    {
        // The block is written alone: only parity is written then, so a crash can't mix the versions of the
        // missing member's data.
        return bit(f);
    }
    if !logs {
        return all;
    }
    // A log's entry names neighbours.
    let first = all.trailing_zeros();
    let run = (all >> first).trailing_ones();
    all & (u64::MAX >> (64 - run - first))
}
