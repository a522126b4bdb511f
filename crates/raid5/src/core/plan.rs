//! Plans: the blocks that a batch of a stripe reads, its calculation, and the blocks that it writes.
//!
//! Everything here is a function of a stripe's record and of a [`View`] of the array. Nothing here has access to the core, does I/O or
//! touches a page: a plan is carried out by `batch.rs`, its calculation by `work.rs`. docs/decisions/0048-stripes-own-themselves.md has the
//! reason.

use super::Piece;
use super::members::Members;
use super::slots::Unsynced;
use super::work::{BatchPiece, can_borrow};
use super::zero::is_hole;
use crate::head_pages::bits;
use crate::{Geometry, Policy};
use pvblk_block::planted::{Plant, has};

/// The way in which a batch computes parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Nothing is written.
    Read,
    /// The parity member is missing.
    NoParity,
    /// Read-modify-write: old parity, XOR the old and the new contents of the blocks that are
    /// written.
    Modify,
    /// Reconstruct-write: from all data.
    Reconstruct,
    /// A block that couldn't be read is calculated and written.
    Fix,
    /// Parity is compared with the data, and calculated where it is wrong.
    Check,
    /// A block is calculated or copied, for a member that is rebuilt.
    Rebuild,
}

impl Mode {
    /// True if a batch writes data of requests.
    pub fn writes(self) -> bool {
        matches!(self, Mode::NoParity) || self.makes_parity()
    }

    /// True if it writes their parity, too.
    fn makes_parity(self) -> bool {
        matches!(self, Mode::Modify | Mode::Reconstruct)
    }
}

/// A stripe as far as its owner knows it. Masks of members have a bit for each role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub stripe: u64,
    /// Mask of the members whose page has the data of the member, or the data that it should have.
    pub valid: u64,
    /// Bit of the member whose block couldn't be read: it is calculated and written before anything else.
    pub bad: u64,
}

impl Record {
    /// A calculation has changed the pages.
    pub fn calculated(&mut self, done: &Calculation) {
        if let Some(member) = done.compute {
            self.valid |= bit(member);
        }
        if !done.mode.writes() {
            return;
        }
        match done.borrows {
            true => self.valid &= !done.touched,
            false => self.valid |= done.touched,
        }
        match done.mode {
            // It may be asked for again, for a member that is rebuilt.
            Mode::NoParity => self.valid &= !bit(done.parity),
            _ => self.valid |= bit(done.parity),
        }
    }
}

/// A plan for one batch of a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub mode: Mode,
    /// Mask of the roles whose blocks are read first.
    pub reads: u64,
    /// Data blocks that are written: a bit for each.
    pub touched: u64,
    /// The role that isn't there, as far as this batch goes. It may come back meanwhile.
    pub missing: Option<usize>,
    /// This role's page is to be calculated from all others.
    pub compute: Option<usize>,
    /// The role whose block alone is written, in a batch that isn't for a request.
    pub target: Option<usize>,
}

impl Plan {
    /// First data block that is written, and how many.
    pub fn blocks(&self) -> (usize, usize) {
        let first = self.touched.trailing_zeros() as usize;
        (first, self.touched.count_ones() as usize)
    }

    /// True if a piece that waits for its stripe is part of it.
    pub fn takes(&self, piece: &Piece) -> bool {
        match piece.write {
            true => self.mode.writes() && self.touched & bit(piece.index) != 0,
            false => self.mode == Mode::Read,
        }
    }
}

/// The calculation of a plan whose reads are done; members as masks, but for the parity's and the computed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Calculation {
    pub mode: Mode,
    /// All members, and those whose data is written.
    pub all: u64,
    pub touched: u64,
    pub parity: usize,
    /// This page is to be calculated from all others first.
    pub compute: Option<usize>,
    /// An entry in a log comes before the writes.
    pub logged: bool,
    /// The entry has partial parity.
    pub partial: bool,
    /// The data goes to the members from where it is: nothing is copied.
    pub borrows: bool,
    /// The stripe becomes all zeros, without data.
    pub hole: bool,
}

impl Calculation {
    /// Mask of the members whose pages, before the calculation, are partial parity together: the XOR of the blocks that don't change.
    pub fn unchanged(&self) -> u64 {
        match self.mode {
            Mode::Modify => self.touched | bit(self.parity),
            _ => self.all & !bit(self.parity) & !self.touched,
        }
    }
}

/// All of an array that plans depend on.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub geometry: &'a Geometry,
    pub policy: Policy,
    pub members: &'a Members,
    pub unsynced: &'a Unsynced,
}

impl View<'_> {
    /// Mask of all members.
    fn everyone(&self) -> u64 {
        u64::MAX >> (64 - self.geometry.members())
    }

    /// All members but one, without those whose pages are valid.
    fn all_others(&self, record: &Record, but: usize) -> u64 {
        self.everyone() & !record.valid & !bit(but)
    }

    /// The data block of a role in a stripe, if it isn't the parity's.
    fn index_of(&self, stripe: u64, role: Option<usize>) -> Option<usize> {
        let row = self.geometry.stripe_row(stripe);
        self.geometry.data_index(row, role?)
    }

    fn logs_parity(&self, parity: usize, missing: Option<usize>) -> bool {
        matches!(self.policy, Policy::Ppl(_)) && missing != Some(parity)
    }

    fn plan(&self, mode: Mode, missing: Option<usize>) -> Plan {
        Plan {
            mode,
            reads: 0,
            touched: 0,
            missing,
            compute: None,
            target: None,
        }
    }

    /// A batch for pieces that wait: all reads, if there are any, or some of the writes.
    pub fn serve(&self, record: &Record, waiting: &[Piece]) -> Plan {
        let missing = self.members.missing(record.stripe);
        match waiting.iter().any(|p| !p.write) {
            true => self.read(record, waiting, missing),
            false => self.write(record, waiting, missing),
        }
    }

    fn read(&self, record: &Record, waiting: &[Piece], missing: Option<usize>) -> Plan {
        let mut plan = self.plan(Mode::Read, missing);
        for piece in waiting.iter().filter(|p| !p.write) {
            let member = self.geometry.stripe_data(record.stripe, piece.index);
            if record.valid & bit(member) != 0 {
                continue;
            }
            if missing == Some(member) {
                plan.compute = Some(member);
                plan.reads |= self.all_others(record, member);
            } else {
                plan.reads |= bit(member);
            }
        }
        plan
    }

    fn write(&self, record: &Record, waiting: &[Piece], missing: Option<usize>) -> Plan {
        let stripe = record.stripe;
        let data = self.geometry.data_members();
        let parity = self.geometry.stripe_parity(stripe);
        let mut covered = [0u8; 64];
        for piece in waiting {
            covered[piece.index] |= sectors_of(piece);
        }
        let indices = |f: &dyn Fn(u8) -> bool| {
            let some = covered[..data].iter().enumerate().filter(|(_, c)| f(**c));
            some.fold(0, |mask, (i, _)| mask | bit(i))
        };
        let alone = self.index_of(stripe, self.members.uncommitted(stripe));
        let logs = self.logs_parity(parity, missing);
        let wanted = choose(indices(&|c| c != 0), alone, logs);
        let whole = indices(&|c| c == u8::MAX) & wanted;
        // Members of data blocks whose pages aren't valid.
        let stale = |blocks: u64| self.geometry.stripe_members(stripe, blocks) & !record.valid;
        let mut plan = self.plan(Mode::NoParity, missing);
        plan.touched = wanted;
        if missing == Some(parity) {
            plan.reads = stale(wanted & !whole);
            return plan;
        }
        let modify = stale(wanted) | (bit(parity) & !record.valid);
        let reconstruct = stale(!whole);
        let failed = self.index_of(stripe, missing).map(bit);
        (plan.mode, plan.compute) = match failed {
            // A block that isn't written and can't be read must not be needed.
            Some(f) if stale(f) != 0 && wanted & f == 0 => (Mode::Modify, None),
            // The block is written in part, so the rest of it must be known.
            Some(f) if stale(f) != 0 && whole & f == 0 => (Mode::Reconstruct, missing),
            Some(f) if wanted & f != 0 => (Mode::Reconstruct, None),
            // Parity that isn't right would stay so.
            _ if self.unsynced.has(stripe) => (Mode::Reconstruct, None),
            _ if modify.count_ones() < reconstruct.count_ones() => (Mode::Modify, None),
            _ => (Mode::Reconstruct, None),
        };
        plan.reads = match (plan.mode, plan.compute) {
            (_, Some(member)) => self.all_others(record, member),
            (Mode::Modify, None) => modify,
            _ => reconstruct,
        };
        plan
    }

    /// A batch that calculates the block that couldn't be read, and writes it: the device puts it elsewhere. `None` if a member is missing: the
    /// block is that member's, which is computed anyway; or it can't be computed, and later requests for it find that out.
    pub fn fix(&self, record: &Record) -> Option<Plan> {
        if self.members.missing(record.stripe).is_some() {
            return None;
        }
        let member = record.bad.trailing_zeros() as usize;
        let mut plan = self.plan(Mode::Fix, None);
        (plan.compute, plan.target) = (Some(member), Some(member));
        plan.reads = self.all_others(record, member);
        Some(plan)
    }

    /// A batch that writes the incoming device's block: that of the member, or one that is calculated. `None` if there is no such device.
    pub fn rebuild(&self, record: &Record) -> Option<Plan> {
        let role = self.members.incoming()?.role;
        let mut plan = self.plan(Mode::Rebuild, None);
        plan.target = Some(role);
        let is_valid = record.valid & bit(role) != 0;
        plan.reads = match self.members.slot(role) {
            _ if is_valid => 0,
            Some(_) => bit(role),
            None => {
                plan.compute = Some(role);
                self.all_others(record, role)
            }
        };
        Some(plan)
    }

    /// A batch that compares data and parity, all of it as it is on the members. `None` if one is missing.
    pub fn check(&self, record: &Record) -> Option<Plan> {
        if self.members.missing(record.stripe).is_some() {
            return None;
        }
        let mut plan = self.plan(Mode::Check, None);
        plan.target = Some(self.geometry.stripe_parity(record.stripe));
        plan.reads = self.everyone();
        Some(plan)
    }

    /// True if a member's block that a plan's batch couldn't read can be calculated: all other blocks and their parity are good for it.
    pub fn can_fix(&self, record: &Record, plan: &Plan, member: usize) -> bool {
        let others = record.bad & !bit(member) == 0;
        others && plan.mode != Mode::Fix && self.can_calculate(record, plan)
    }

    /// True if a block can be calculated that a plan's batch didn't get, as far as members and parity go.
    pub fn can_calculate(&self, record: &Record, plan: &Plan) -> bool {
        let stripe = record.stripe;
        let rebuilds = plan.mode == Mode::Rebuild && plan.compute.is_some();
        let misses = self.members.missing(stripe).is_some() || plan.missing.is_some() || rebuilds;
        !misses && !self.unsynced.has(stripe)
    }

    /// The calculation for a plan, whose reads are done, and the pieces that it took. `may_borrow`: nobody takes submitters' memory away.
    pub fn calculation(
        &self,
        record: &Record,
        plan: &Plan,
        pieces: &[BatchPiece],
        may_borrow: bool,
    ) -> Calculation {
        let parity = self.geometry.stripe_parity(record.stripe);
        let data = self.geometry.data_members();
        let is_whole = plan.blocks().1 == data;
        let makes_parity = plan.mode.makes_parity();
        let logged = makes_parity && self.logs_parity(parity, plan.missing);
        let is_everywhere = makes_parity && is_whole && plan.missing.is_none();
        Calculation {
            mode: plan.mode,
            all: self.everyone(),
            touched: self.geometry.stripe_members(record.stripe, plan.touched),
            parity,
            compute: plan.compute,
            logged,
            partial: logged && !is_whole,
            borrows: is_everywhere && may_borrow && can_borrow(pieces, data),
            hole: is_everywhere && is_hole(pieces, data),
        }
    }

    /// Calls `write` with each role whose page is written when a plan's calculation is done, and with each of the slots to which it goes.
    pub fn writes(&self, record: &Record, plan: &Plan, mut write: impl FnMut(usize, usize)) {
        for role in bits(self.written(record.stripe, plan)) {
            // A block that is rebuilt goes where it isn't yet.
            let goes = |slot: &usize| match plan.mode {
                Mode::Rebuild => self.members.is_incoming(*slot),
                _ => !self.members.is_incoming(*slot) || !has(Plant::IncomingForgotten),
            };
            let slots = self.members.writes(role, record.stripe).filter(goes);
            slots.for_each(|slot| write(role, slot));
        }
    }

    /// Mask of the roles that a plan writes.
    fn written(&self, stripe: u64, plan: &Plan) -> u64 {
        let parity = bit(self.geometry.stripe_parity(stripe));
        let all = match plan.mode {
            Mode::Fix | Mode::Rebuild => plan.target.map_or(0, bit),
            Mode::Check => parity,
            Mode::Read => 0,
            Mode::NoParity | Mode::Modify | Mode::Reconstruct => {
                self.geometry.stripe_members(stripe, plan.touched) | parity
            }
        };
        all & !plan.missing.map_or(0, bit)
    }
}

/// The data blocks, of those that wait, that a batch writes; all as masks.
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

/// The bit of a member or of a data block in a mask.
pub(super) fn bit(member: usize) -> u64 {
    1 << member
}

/// Sectors of a block that a piece covers.
pub(super) fn sectors_of(piece: &Piece) -> u8 {
    if has(Plant::PartialTakenForWhole) {
        return u8::MAX;
    }
    sectors_from(piece.offset, piece.sectors)
}

/// The mask of so many sectors of a block, from its sector `first` on.
pub(super) fn sectors_from(first: u64, count: u64) -> u8 {
    let all = (1u16 << count) - 1;
    (all << first) as u8
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
