//! A rebuild: a device is given the blocks of the place without a member, and its page of sums.

use super::model::Model;
use super::state::{ANY, Batch, Check, NO_BLOCKS, Phase, STRIPES, Sector, Spare, State, UNKNOWN};
use crate::check::Broken;
use crate::state::{BLOCKS, MEMBERS, NONE};

impl Model {
    /// The device holds anything: perhaps it was a member before.
    pub(super) fn spare_comes(&self, s: &mut State) {
        let device = usize::from(s.missing);
        s.media[device] = [Sector::new(0); STRIPES];
        let its = (0..MEMBERS).filter(|place| self.holder(*place) == device);
        for place in its {
            s.pages[place] = [Sector::new(NO_BLOCKS); STRIPES];
        }
        s.bits[device] = s.bits[(device + 1) % MEMBERS];
        s.spare = Spare::Comes(0, 0);
        s.check = Check::Turn(0);
    }

    /// The other blocks of a stripe have been read: the missing one is calculated, and compared.
    pub(super) fn rebuild(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        let place = usize::from(s.missing);
        let contents = s.batches[at].got.iter().fold(0, |sum, block| sum ^ block);
        let sum = s.memory[place][at];
        if sum != UNKNOWN && sum != contents {
            return self.fails(s, at);
        }
        s.batches[at].got[place] = contents;
        if sum == UNKNOWN {
            self.take_as_found(s, at);
        }
        self.learn_sums(s, at);
        self.set_sum(s, at, place, contents);
        if let Spare::Comes(_, done) = s.spare {
            s.spare = Spare::Comes(at as u8 + 1, done);
        }
        self.block_begins(s, at, place, contents);
        s.batches[at].bad = place as u8;
        s.batches[at].phase = Phase::Fixing;
        Ok(())
    }

    /// Nothing compares the calculated block, so a fault of another one that has no sum either isn't found, and its block counts from now on.
    fn take_as_found(&self, s: &mut State, at: usize) {
        for block in 0..BLOCKS {
            let found = s.batches[at].got[self.bound.place(at, block)];
            if s.right(at, block) != Some(found) {
                s.may[at][block] |= ANY;
            }
        }
    }

    /// The block is written; or it can't be had, and the rebuild ends.
    pub(super) fn end_rebuild(&self, s: &mut State, at: usize) {
        if s.batches[at].phase == Phase::Fixing {
            let begun = at as u8 + 1;
            s.spare = Spare::Comes(begun, begun);
            return self.end_turn(s, at);
        }
        s.spare = Spare::Gone;
        s.check = Check::Done;
        s.given = false;
        self.leave(s, at);
        // The device is left out in a stop: batches that don't write plan anew.
        for batch in &mut s.batches {
            if matches!(batch.phase, Phase::Reading | Phase::Read) {
                *batch = Batch {
                    phase: Phase::Claimed,
                    job: batch.job,
                    ..Batch::default()
                };
            }
        }
    }

    /// Members are flushed, and superblocks call the device the member.
    pub(super) fn spare_over(&self, s: &mut State) {
        self.flush(s);
        s.missing = NONE;
        s.spare = Spare::Over;
    }
}
