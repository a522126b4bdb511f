//! A round of a head: what it reads, what it calculates, what it writes.

use super::super::planted::{Raid5Bug, has};
use super::pages::Block;
use super::{Core, Data, Piece, Purpose};
use crate::raid5::Policy;
use pvblk_block::Op;

/// How a round makes parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Nothing is written.
    Read,
    /// The parity member is missing.
    NoParity,
    /// Read-modify-write: old parity, without the old contents of what is written, with the new ones.
    Modify,
    /// Reconstruct-write: from all data.
    Reconstruct,
}

/// What a head does from its first read to its last write.
pub(super) struct Round {
    mode: Mode,
    pieces: Vec<Piece>,
    /// Data blocks that are written: a bit for each.
    touched: u64,
    /// The failed member's page is to be calculated from all others.
    compute: Option<usize>,
    ios: usize,
    /// A read failed: all begins anew.
    again: bool,
    fua: bool,
    pub runner: usize,
    /// XOR of the blocks that aren't written; `None` if all are.
    pub partial_parity: Option<Box<Block>>,
    /// It is in a log that is on disk.
    pub logged: bool,
}

impl Round {
    /// First data block that is written, and how many.
    pub fn blocks(&self) -> (usize, usize) {
        let first = self.touched.trailing_zeros() as usize;
        (first, self.touched.count_ones() as usize)
    }
}

fn bit(member: usize) -> u64 {
    1 << member
}

/// Sectors of a block that a piece covers.
fn sectors(piece: &Piece) -> u8 {
    let all = (1u16 << piece.sectors) - 1;
    (all << piece.offset) as u8
}

impl Core {
    fn member(&self, stripe: u64, index: usize) -> usize {
        self.geometry.stripe_data(stripe, index)
    }

    /// Members of these data blocks, given as a mask.
    fn members_of(&self, stripe: u64, blocks: u64) -> impl Iterator<Item = usize> + Clone + use<> {
        let geometry = self.geometry;
        let some = (0..geometry.data_members()).filter(move |i| blocks & bit(*i) != 0);
        some.map(move |i| geometry.stripe_data(stripe, i))
    }

    /// The failed member's data block in a stripe, if its parity isn't what failed.
    fn failed_index(&self, stripe: u64) -> Option<usize> {
        let row = self.geometry.stripe_row(stripe);
        self.geometry.data_index(row, self.failed?)
    }

    /// Begins a round of what waits, if anything does.
    pub(super) fn run_head(&mut self, head: usize) {
        let h = &mut self.heads.all[head];
        if h.round.is_some() || h.waiting.is_empty() {
            return;
        }
        if self.broken {
            let pieces = std::mem::take(&mut h.waiting);
            for piece in pieces {
                self.fail_piece(piece.request);
            }
            self.round_over(head);
            return;
        }
        let reads = h.waiting.iter().any(|p| !p.write);
        let (mut round, need) = match reads {
            true => self.plan_reads(head),
            false => self.plan_writes(head),
        };
        if need != 0 && !reads && !self.may_preread(head) {
            return;
        }
        // From here on the pieces are the round's.
        let touched = round.touched;
        let h = &mut self.heads.all[head];
        let takes = |p: &Piece| p.write != reads && (reads || touched & bit(p.index) != 0);
        round.pieces.extend(h.waiting.iter().filter(|p| takes(p)));
        h.waiting.retain(|p| !takes(p));
        round.runner = round.pieces.first().map_or(0, |p| self.owner(p.request));
        round.fua = round.pieces.iter().any(|p| self.is_fua(p.request));
        round.ios = need.count_ones() as usize;
        let runner = round.runner;
        let sector = self
            .geometry
            .stripe_member_sector(self.heads.all[head].stripe);
        self.heads.all[head].round = Some(round);
        for member in 0..self.data_sectors.len() {
            if need & bit(member) != 0 {
                let page = Data::of(self.pages.buffer(head, member));
                let io = (member, Op::Read, false);
                self.start(runner, Purpose::HeadRead(head), io, sector, page);
            }
        }
        if need == 0 {
            self.calculate(head);
        }
    }

    fn empty_round(mode: Mode) -> Round {
        Round {
            mode,
            pieces: Vec::new(),
            touched: 0,
            compute: None,
            ios: 0,
            again: false,
            fua: false,
            runner: 0,
            partial_parity: None,
            logged: false,
        }
    }

    /// All members but the failed one, without those whose pages are valid.
    fn all_others(&self, valid: u64, failed: usize) -> u64 {
        let all = (0..self.data_sectors.len()).fold(0, |mask, m| mask | bit(m));
        all & !valid & !bit(failed)
    }

    fn plan_reads(&self, head: usize) -> (Round, u64) {
        let h = &self.heads.all[head];
        let mut round = Core::empty_round(Mode::Read);
        let mut need = 0;
        for piece in h.waiting.iter().filter(|p| !p.write) {
            let member = self.member(h.stripe, piece.index);
            if h.valid & bit(member) != 0 {
                continue;
            }
            if self.failed == Some(member) {
                round.compute = Some(member);
                need |= self.all_others(h.valid, member);
            } else {
                need |= bit(member);
            }
        }
        (round, need)
    }

    fn plan_writes(&self, head: usize) -> (Round, u64) {
        let h = &self.heads.all[head];
        let stripe = h.stripe;
        let data = self.geometry.data_members();
        let parity = self.geometry.stripe_parity(stripe);
        let failed = self.failed_index(stripe);
        let mut covered = [0u8; 64];
        for piece in &h.waiting {
            covered[piece.index] |= match has(Raid5Bug::PartialTakenForWhole) {
                true => u8::MAX,
                false => sectors(piece),
            };
        }
        let indices = |f: &dyn Fn(u8) -> bool| {
            let some = covered[..data].iter().enumerate().filter(|(_, c)| f(**c));
            some.fold(0, |mask, (i, _)| mask | bit(i))
        };
        let wanted = self.choose(indices(&|c| c != 0), parity, failed);
        let whole = indices(&|c| c == u8::MAX) & wanted;
        // Members of data blocks whose pages aren't valid.
        let stale = |blocks: u64| -> u64 {
            let members = (0..data).filter(|i| blocks & bit(*i) != 0);
            members.fold(0, |mask, i| mask | bit(self.member(stripe, i))) & !h.valid
        };
        let mut round = Core::empty_round(Mode::NoParity);
        round.touched = wanted;
        if self.failed == Some(parity) {
            return (round, stale(wanted & !whole));
        }
        let modify = stale(wanted) | (bit(parity) & !h.valid);
        let reconstruct = stale(!whole);
        let failed = failed.map(bit);
        (round.mode, round.compute) = match failed {
            // What isn't written and can't be read must not be needed.
            Some(f) if stale(f) != 0 && wanted & f == 0 => (Mode::Modify, None),
            // It is written in part, so what it holds must be known.
            Some(f) if stale(f) != 0 && whole & f == 0 => {
                let member = self.failed.unwrap_or(parity);
                round.compute = Some(member);
                round.mode = Mode::Reconstruct;
                return (round, self.all_others(h.valid, member));
            }
            Some(f) if wanted & f != 0 => (Mode::Reconstruct, None),
            _ if modify.count_ones() < reconstruct.count_ones() => (Mode::Modify, None),
            _ => (Mode::Reconstruct, None),
        };
        let need = match round.mode {
            Mode::Modify => modify,
            _ => reconstruct,
        };
        (round, need)
    }

    /// Which of the data blocks that are waited for this round writes; all as masks.
    fn choose(&self, all: u64, parity: usize, failed: Option<usize>) -> u64 {
        if let Some(f) = failed
            && all & bit(f) != 0
            && !has(Raid5Bug::MissingWithOthers)
        {
            // Alone: only parity is written then, so a crash can't mix what the missing member would hold.
            return bit(f);
        }
        let logs = matches!(self.policy, Policy::Ppl(_)) && self.failed != Some(parity);
        if !logs {
            return all;
        }
        // A log's entry names neighbours.
        let first = all.trailing_zeros();
        let run = (all >> first).trailing_ones();
        all & (u64::MAX >> (64 - run - first))
    }

    /// One of the round's reads has ended.
    pub(super) fn head_read(&mut self, head: usize, member: usize, ok: bool) {
        let h = &mut self.heads.all[head];
        let Some(round) = &mut h.round else { return };
        round.ios -= 1;
        match ok {
            true => h.valid |= bit(member),
            false => round.again = true,
        }
        if round.ios > 0 {
            return;
        }
        if round.again || self.broken {
            let pieces = std::mem::take(&mut round.pieces);
            for piece in pieces.into_iter().rev() {
                h.waiting.push_front(piece);
            }
            self.round_over(head);
            return;
        }
        self.calculate(head);
    }

    /// All that the round needs is there.
    fn calculate(&mut self, head: usize) {
        let Some(mut round) = self.heads.all[head].round.take() else {
            return;
        };
        if let Some(member) = round.compute {
            let others = (0..self.data_sectors.len()).filter(|m| *m != member);
            self.pages.xor_of(head, others, &mut self.scratch);
            self.pages.write(head, member, &self.scratch);
            self.heads.all[head].valid |= bit(member);
        }
        if round.mode == Mode::Read {
            self.answer_reads(head, &round);
            self.heads.all[head].round = Some(round);
            self.round_over(head);
            return;
        }
        let stripe = self.heads.all[head].stripe;
        let parity = self.geometry.stripe_parity(stripe);
        self.make_parity(head, &mut round);
        let touched = self.members_of(stripe, round.touched);
        let h = &mut self.heads.all[head];
        h.valid |= touched.fold(0, |mask, member| mask | bit(member));
        let logs = matches!(self.policy, Policy::Ppl(_)) && self.failed != Some(parity);
        h.round = Some(round);
        match logs {
            true => self.logs.add(parity, head),
            false => self.write_pages(head),
        }
    }

    fn answer_reads(&mut self, head: usize, round: &Round) {
        let stripe = self.heads.all[head].stripe;
        for piece in &round.pieces {
            let member = self.member(stripe, piece.index);
            if let Some(active) = &self.active[piece.request] {
                self.pages.give(head, member, piece, &active.request);
            }
            self.piece_done(piece.request);
        }
    }

    /// Takes a copy of the data: from here on the submitter's may change. Makes parity of the copy.
    fn make_parity(&mut self, head: usize, round: &mut Round) {
        let stripe = self.heads.all[head].stripe;
        let parity = self.geometry.stripe_parity(stripe);
        let data = self.geometry.data_members();
        let touched = self.members_of(stripe, round.touched);
        let rest = self.members_of(stripe, !round.touched);
        let whole = round.touched.count_ones() as usize == data;
        let sum = &mut *self.scratch;
        match round.mode {
            Mode::Modify => {
                let old = std::iter::once(parity).chain(touched.clone());
                self.pages.xor_of(head, old, sum);
            }
            Mode::Reconstruct if !whole => self.pages.xor_of(head, rest, sum),
            Mode::Reconstruct | Mode::NoParity | Mode::Read => {}
        }
        if !whole {
            round.partial_parity = Some(Box::new(*sum));
        }
        for piece in &round.pieces {
            let member = self.geometry.stripe_data(stripe, piece.index);
            if let Some(active) = &self.active[piece.request] {
                self.pages.take(head, member, piece, &active.request);
            }
        }
        if round.mode != Mode::NoParity {
            match whole {
                true => self.pages.xor_of(head, touched, sum),
                false => touched.for_each(|member| self.pages.xor(head, member, sum)),
            }
            self.pages.write(head, parity, sum);
            self.heads.all[head].valid |= bit(parity);
            if has(Raid5Bug::WrongPartialParity)
                && let Some(partial) = &mut round.partial_parity
            {
                **partial = *sum;
            }
        }
    }

    /// Data and parity go to the members. Not while a member is kicked that the superblocks still call one: after a power
    /// cut it would be taken for fresh, and what was written without it, or without its log, would be a hole.
    pub(super) fn write_pages(&mut self, head: usize) {
        if self.meta.is_kicking() && !self.broken && !has(Raid5Bug::KickNotAwaited) {
            self.unnamed.push(head);
            return;
        }
        let h = &self.heads.all[head];
        let stripe = h.stripe;
        let Some(round) = &h.round else { return };
        let (runner, fua) = (round.runner, round.fua);
        let parity = self.geometry.stripe_parity(stripe);
        let members = self.members_of(stripe, round.touched);
        let mut mask = members.fold(bit(parity), |mask, member| mask | bit(member));
        if let Some(failed) = self.failed {
            mask &= !bit(failed);
        }
        if self.broken {
            mask = 0;
        }
        if let Some(round) = &mut self.heads.all[head].round {
            round.ios = mask.count_ones() as usize;
        }
        if mask == 0 {
            self.finish_round(head);
            return;
        }
        let sector = self.geometry.stripe_member_sector(stripe);
        for member in (0..64).filter(|m| mask & bit(*m) != 0) {
            let page = Data::of(self.pages.buffer(head, member));
            let io = (member, Op::Write, fua);
            self.start(runner, Purpose::HeadWrite(head), io, sector, page);
        }
    }

    /// One of the round's writes has ended. That one failed is the kicked member's matter.
    pub(super) fn head_written(&mut self, head: usize, _member: usize, _ok: bool) {
        let Some(round) = &mut self.heads.all[head].round else {
            return;
        };
        round.ios -= 1;
        if round.ios == 1 && has(Raid5Bug::AnsweredEarly) {
            let pieces = std::mem::take(&mut round.pieces);
            pieces.into_iter().for_each(|p| self.piece_done(p.request));
            return;
        }
        if round.ios == 0 {
            self.finish_round(head);
        }
    }

    fn finish_round(&mut self, head: usize) {
        let Some(round) = &mut self.heads.all[head].round else {
            return;
        };
        let pieces = std::mem::take(&mut round.pieces);
        let logged = round.logged;
        for piece in pieces {
            match self.broken {
                true => self.fail_piece(piece.request),
                false => self.piece_done(piece.request),
            }
        }
        if logged {
            let parity = self.geometry.stripe_parity(self.heads.all[head].stripe);
            self.logs.stripe_done(parity, &self.volatile);
        }
        self.round_over(head);
    }
}
