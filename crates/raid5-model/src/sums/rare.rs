//! Rare things: sweeps, the end of the action `checksum`, faults, and a power cut with the start that follows.

use super::bug::Bug;
use super::model::Model;
use super::state::{
    ANY, Armed, Ask, Asked, Check, NO_BLOCKS, Phase, Power, STRIPES, Sector, State, Sweep, There,
    UNKNOWN, rot, version,
};
use super::step::Step;
use crate::state::{MEMBERS, PARITY};

impl Model {
    pub(super) fn save(&self, s: &mut State) {
        if s.dirty && !self.has(Bug::FoundSumsLost) {
            self.pages_begin(s);
            s.check = Check::Writing;
        } else {
            s.check = Check::Done;
        }
    }

    /// A sweep marks chunks and the group, and notes the words that are owned.
    pub(super) fn sweep_begin(&self, s: &mut State, mask: u8) {
        for chunk in (0..STRIPES).filter(|chunk| mask & (1 << chunk) != 0) {
            s.chunks[chunk] = There::Clearing;
        }
        s.sweeps_bits = mask & 0b011 != 0;
        s.sweeps_group = mask & 0b100 != 0;
        if s.sweeps_group {
            s.group = There::Clearing;
        }
        let is_owned = |at: &usize| !matches!(s.batches[*at].phase, Phase::Free | Phase::Late);
        s.owned = (0..STRIPES).filter(is_owned).fold(0, |m, at| m | 1 << at);
        s.sweeps += 1;
        s.sweep = Sweep::Waiting;
    }

    pub(super) fn sweep_write(&self, s: &mut State) {
        s.owned = 0;
        let left_out = match s.sweeps_bits {
            true => self.has(Bug::SumsNotSwept),
            false => self.has(Bug::DirtyGroupDropped),
        };
        s.sweep = Sweep::Written;
        if s.dirty && !left_out {
            self.pages_begin(s);
            s.sweep = Sweep::Writing;
        }
    }

    pub(super) fn sweep_flush(&self, s: &mut State) {
        s.sweep = Sweep::Flushed;
        if !s.sweeps_bits || self.has(Bug::SweepNotFlushed) {
            return;
        }
        self.flush(s);
    }

    /// All members are flushed; what is being written isn't covered.
    pub(super) fn flush(&self, s: &mut State) {
        for place in 0..MEMBERS {
            for at in 0..STRIPES {
                let batch = &s.batches[at];
                let flies = matches!(batch.phase, Phase::Writing | Phase::Fixing);
                let is_in_flight = flies && s.media[place][at].others.contains(&batch.got[place]);
                let flying = is_in_flight.then_some(batch.got[place]);
                s.media[place][at].flush(flying);
            }
        }
    }

    /// Chunks and the group go that nobody has taken back.
    pub(super) fn sweep_end(&self, s: &mut State) {
        for chunk in 0..STRIPES {
            if s.chunks[chunk] == There::Clearing {
                s.chunks[chunk] = There::Clear;
                for member in 0..MEMBERS {
                    let cleared = if s.loses(member) { 0 } else { 1 << chunk };
                    s.bits[member] &= !cleared;
                }
            }
        }
        let in_use = s.group == There::Set && self.has(Bug::GroupDroppedInUse);
        if s.sweeps_group && (s.group == There::Clearing || in_use) {
            s.group = There::Clear;
            s.memory = [[UNKNOWN; STRIPES]; MEMBERS];
            s.asks.iter_mut().for_each(|ask| ask.stayed = false);
            // Nobody else has them.
            s.dirty = false;
        }
        (s.sweeps_bits, s.sweeps_group) = (false, false);
        s.sweep = Sweep::None;
    }

    /// A device has a fault.
    pub(super) fn fault(&self, s: &mut State, step: Step) {
        s.faults += 1;
        let flip = |n: u8| (usize::from(n / 2), usize::from(n % 2));
        let device = match step {
            Step::Flip(n) => {
                let (place, at) = flip(n);
                s.media[place][at].now ^= rot(s.faults - 1);
                place
            }
            Step::FlipSum(n) => {
                let (place, at) = flip(n);
                s.pages[place][at].now = NO_BLOCKS;
                self.holder(place)
            }
            Step::LoseBlock(device) => {
                let others = match s.armed {
                    Armed::Blocks(some) => some,
                    _ => 0,
                };
                s.armed = Armed::Blocks(others | 1 << device);
                usize::from(device)
            }
            Step::LosePage(device) => {
                s.armed = Armed::Page(device);
                usize::from(device)
            }
            Step::LoseAll(device) => {
                s.armed = Armed::All(device);
                usize::from(device)
            }
            Step::Astray(device) => {
                s.armed = Armed::Astray(device);
                usize::from(device)
            }
            _ => return,
        };
        s.harmed |= 1 << device;
    }

    /// The power is cut: of each block that is in a cache one of its contents survives, as the number says. Sums that aren't stable are of marked chunks,
    /// and a start forgets them.
    pub(super) fn cut(&self, s: &mut State, number: usize) {
        let mut rest = number;
        for block in s.media.as_flattened_mut() {
            let count = block.all().count();
            let found = block.all().nth(rest % count).unwrap_or(block.now);
            rest /= count;
            *block = Sector::new(found);
        }
        for (place, pages) in s.pages.iter_mut().enumerate() {
            for (at, sum) in pages.iter_mut().enumerate() {
                *sum = Sector::new(sum.now);
                // Sums that the action `checksum` has found are lost if they weren't written.
                if sum.now == UNKNOWN {
                    s.covered[at] &= !(1 << place);
                }
            }
        }
        let first = self.first();
        let asks = s.asks.map(|ask| match ask.asked {
            Asked::New => ask,
            _ => Ask {
                asked: Asked::Done,
                ..Ask::default()
            },
        });
        *s = State {
            asks,
            missing: s.missing,
            spare: s.spare,
            check: Check::None,
            power: Power::Cut,
            media: s.media,
            pages: s.pages,
            bits: s.bits,
            sweeps: s.sweeps,
            faults: s.faults,
            harmed: s.harmed,
            may: s.may,
            covered: s.covered,
            ..first
        };
    }

    /// Chunks that a start finds marked, as a mask: by the map that was written last, as its number tells.
    fn found_marks(&self, s: &State) -> u8 {
        match self.bug {
            Some(Bug::MapOfFirst) => s.bits[0],
            Some(Bug::MapsJoined) => s.bits.iter().fold(0, |all, bits| all | bits),
            _ => self.marks(s),
        }
    }

    /// Parity of marked chunks is made from the data that is there. This data counts from now on, whatever a fault has made of it.
    pub(super) fn start_repair(&self, s: &mut State) {
        s.power = Power::Repaired;
        let (found, marks) = (self.found_marks(s), self.marks(s));
        for at in 0..STRIPES {
            let mark = 1 << self.bound.chunk(at);
            let data = |b: usize| s.media[self.bound.place(at, b)][at].now;
            let data = [data(0), data(1)];
            for (block, contents) in data.into_iter().enumerate() {
                if marks & mark != 0 {
                    s.may[at][block] = version(block, contents).map_or(ANY, |v| 1 << v);
                }
            }
            if found & mark != 0 || self.has(Bug::ParityMadeEverywhere) {
                s.media[self.bound.place(at, PARITY)][at] = Sector::new(data[0] ^ data[1]);
            }
        }
    }

    pub(super) fn start_forget(&self, s: &mut State) {
        s.power = Power::Forgot;
        if self.has(Bug::CleanBeforeForgotten) {
            s.bits = [0; MEMBERS];
        } else if !self.has(Bug::SumsKeptAfterCrash) {
            self.forget(s);
        }
    }

    /// Whole pages: a marked chunk takes its neighbours along.
    fn forget(&self, s: &mut State) {
        if self.found_marks(s) != 0 {
            s.pages = [[Sector::new(UNKNOWN); STRIPES]; MEMBERS];
            s.check = Check::Turn(0);
        }
        if self.marks(s) != 0 {
            s.covered = [0; STRIPES];
        }
    }

    pub(super) fn start_clean(&self, s: &mut State) {
        s.bits = [0; MEMBERS];
        s.power = Power::After;
    }
}
