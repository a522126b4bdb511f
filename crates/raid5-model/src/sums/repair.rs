//! The repair: a block that doesn't fit its sum is calculated from all others, each of which has to fit its own.

use super::batch::{ALL, places};
use super::bug::Bug;
use super::model::Model;
use super::state::{Phase, REBUILD, State, UNKNOWN, Value};
use crate::check::{Broken, Property};
use crate::state::NONE;

impl Model {
    /// Blocks of these places were read and don't fit. One is calculated, unless a member is missing. Two are one device's fault if it has one of them
    /// and the other's sum: that other one is taken for right.
    pub(super) fn misfits(&self, s: &mut State, at: usize, failed: u8) -> Result<(), Broken> {
        let is_missing = s.missing != NONE;
        let batch = &mut s.batches[at];
        let bad = if batch.bad == NONE { 0 } else { 1 << batch.bad };
        let both = failed | bad;
        if is_missing {
            return self.fails(s, at);
        }
        if both.count_ones() == 1 {
            batch.bad = both.trailing_zeros() as u8;
            if self.has(Bug::SumTakenForWrong) {
                return self.right_sum(s, at, both.trailing_zeros() as usize);
            }
        } else if both.count_ones() == 2 && batch.trusted == NONE && !self.has(Bug::NoneTrusted) {
            let mut all = places(both);
            let held = all.find(|place| both & (1 << self.holder(*place)) != 0);
            let Some(held) = held else {
                return self.fails(s, at);
            };
            batch.trusted = held as u8;
            batch.bad = (both & !(1 << held)).trailing_zeros() as u8;
            batch.valid |= 1 << held;
        } else {
            return self.fails(s, at);
        }
        // It may want a bit now.
        s.batches[at].phase = Phase::Claimed;
        Ok(())
    }

    /// The sum of a block is made that of the block as it was read.
    fn right_sum(&self, s: &mut State, at: usize, place: usize) -> Result<(), Broken> {
        let contents = s.batches[at].got[place];
        self.set_sum(s, at, place, contents);
        self.check_repair(s, at, place, contents)?;
        let batch = &mut s.batches[at];
        batch.valid |= 1 << place;
        (batch.bad, batch.misfit, batch.fixed) = (NONE, 0, batch.fixed + 1);
        Ok(())
    }

    /// All others of a bad block are there.
    pub(super) fn fix(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        let batch = s.batches[at];
        let bad = usize::from(batch.bad);
        let contents = places(ALL & !(1 << bad)).fold(0, |sum, p| sum ^ batch.got[p]);
        let wanted = s.memory[bad][at];
        let is_trusting = batch.trusted != NONE;
        let fits = [contents, UNKNOWN].contains(&wanted);
        if is_trusting && contents == wanted {
            let held = usize::from(batch.trusted);
            self.set_sum(s, at, held, batch.got[held]);
            self.check_repair(s, at, held, batch.got[held])?;
        } else if !self.has(Bug::FixedNotCompared) {
            let is_the_same = batch.misfit == contents;
            if is_trusting || !(fits || is_the_same) {
                return self.fails(s, at);
            }
        }
        self.check_repair(s, at, bad, contents)?;
        self.set_sum(s, at, bad, contents);
        self.block_begins(s, at, bad, contents);
        s.batches[at].phase = Phase::Fixing;
        Ok(())
    }

    /// The calculated block is written, and the batch goes on.
    pub(super) fn fix_end(&self, s: &mut State, at: usize) {
        let bad = usize::from(s.batches[at].bad);
        self.block_ends(s, at, bad);
        if s.batches[at].job == REBUILD {
            return self.end_rebuild(s, at);
        }
        let batch = &mut s.batches[at];
        batch.lost = 0;
        batch.fixed += 1;
        (batch.bad, batch.misfit, batch.trusted) = (NONE, 0, NONE);
        batch.phase = Phase::Claimed;
    }

    /// A repair leaves these contents, or a sum of them.
    fn check_repair(
        &self,
        s: &State,
        at: usize,
        place: usize,
        contents: Value,
    ) -> Result<(), Broken> {
        let block = self.bound.block(at, place);
        match s.right(at, block) {
            Some(right) if right != contents => Err(Broken::new(Property::RepairFits, || {
                format!(
                    "block {block} of stripe {at}: a repair takes {contents:#b} for right, and {right:#b} is"
                )
            })),
            _ => Ok(()),
        }
    }
}
