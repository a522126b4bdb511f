//! Direct reads, which have no word: they look at the group of sums before they compare, and after that.

use super::bug::Bug;
use super::model::Model;
use super::state::{ANY, Asked, State, There, UNKNOWN, Value, version};
use crate::check::{Broken, Property};

impl Model {
    /// A request gets a block.
    pub(super) fn gives(
        &self,
        s: &State,
        (at, place): (usize, usize),
        contents: Value,
        (may, covered): (u8, bool),
    ) -> Result<(), Broken> {
        let block = self.bound.block(at, place);
        let version = version(block, contents);
        let is_right = version.is_some_and(|v| may & (1 << v) != 0);
        if is_right || (may | s.may[at][block]) & ANY != 0 || !covered {
            return Ok(());
        }
        Err(Broken::new(Property::FitsOrTold, || {
            format!("block {block} of stripe {at}: a read gets {contents:#b}, of versions {may:#b}")
        }))
    }

    /// A direct read has its block, and looks at the group.
    pub(super) fn direct_read(&self, s: &mut State, r: usize) {
        let Some((at, place)) = self.read_of(r) else {
            return;
        };
        s.asks[r].contents = s.media[place][at].now;
        if s.group == There::Clear {
            return self.reads_again(s, r);
        }
        s.group = There::Set;
        s.asks[r].stayed = true;
        s.asks[r].asked = Asked::Looked;
    }

    fn read_of(&self, r: usize) -> Option<(usize, usize)> {
        let request = self.bound.requests[r]?;
        let at = usize::from(request.stripe);
        Some((at, self.bound.place(at, usize::from(request.blocks >> 1))))
    }

    /// The stripe's owner is to read.
    fn reads_again(&self, s: &mut State, r: usize) {
        let ask = &mut s.asks[r];
        (ask.contents, ask.stayed, ask.covered) = (0, false, false);
        ask.asked = Asked::Waits;
    }

    pub(super) fn direct_compare(&self, s: &mut State, r: usize) {
        let Some((at, place)) = self.read_of(r) else {
            return;
        };
        let sum = s.memory[place][at];
        let fits = sum == UNKNOWN || sum == s.asks[r].contents;
        s.asks[r].may |= s.may[at][self.bound.block(at, place)] & ANY;
        s.asks[r].covered = s.covered[at] & (1 << place) != 0;
        if !fits && !self.has(Bug::DirectNotCompared) {
            return self.reads_again(s, r);
        }
        s.asks[r].asked = Asked::Fits;
    }

    pub(super) fn direct_look(&self, s: &mut State, r: usize) -> Result<(), Broken> {
        let (Some((at, place)), ask) = (self.read_of(r), s.asks[r]) else {
            return Ok(());
        };
        if !ask.stayed && !self.has(Bug::NotLookedAgain) {
            self.reads_again(s, r);
            return Ok(());
        }
        self.gives(s, (at, place), ask.contents, (ask.may, ask.covered))?;
        s.asks[r] = Default::default();
        s.asks[r].asked = Asked::Done;
        Ok(())
    }
}
