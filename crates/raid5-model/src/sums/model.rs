//! The model: the state that follows a step; and writes, some of which a device loses.

use super::bound::Bound;
use super::bug::Bug;
use super::check::rank;
use super::state::{
    Armed, Ask, Asked, Batch, CHECK, Check, Phase, Power, REBUILD, REQUESTS, STRIPES, Sector,
    Spare, State, Sweep, There, UNKNOWN, Value, holder, rot, value,
};
use super::step::Step;
use crate::check::Broken;
use crate::machine::Machine;
use crate::state::{BLOCKS, MEMBERS, PARITY};

/// A bound, and a bug or none.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub bound: Bound,
    pub bug: Option<Bug>,
}

impl Model {
    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The member that has the sums of a place.
    pub(super) fn holder(&self, place: usize) -> usize {
        match self.has(Bug::SumsBesideBlocks) {
            true => place,
            false => holder(place),
        }
    }

    /// The state in which a run begins: all is stable, and sums are right, but for those that the bound says.
    pub fn first(&self) -> State {
        let mut media = [[Sector::new(0); STRIPES]; MEMBERS];
        let mut pages = [[Sector::new(UNKNOWN); STRIPES]; MEMBERS];
        let mut covered = [0; STRIPES];
        for at in 0..STRIPES {
            for b in 0..=PARITY {
                let contents = match b {
                    PARITY => value(0, 0) ^ value(1, 0),
                    b => value(b, 0),
                };
                let place = self.bound.place(at, b);
                media[place][at] = Sector::new(contents);
                let is_missing = self.bound.missing == self.holder(place) as u8;
                if self.bound.unknown & (1 << place) == 0 && !is_missing {
                    pages[place][at] = Sector::new(contents);
                    covered[at] |= 1 << place;
                }
            }
        }
        State {
            media,
            pages,
            bits: [0; MEMBERS],
            chunks: Default::default(),
            group: There::Clear,
            memory: [[UNKNOWN; STRIPES]; MEMBERS],
            dirty: false,
            flying: [[UNKNOWN; STRIPES]; MEMBERS],
            lost_pages: 0,
            batches: [Batch::default(); STRIPES],
            asks: [Ask::default(); REQUESTS],
            sweep: Sweep::None,
            sweeps: 0,
            sweeps_bits: false,
            sweeps_group: false,
            owned: 0,
            check: match self.bound.unknown {
                0 => Check::None,
                _ => Check::Turn(0),
            },
            missing: self.bound.missing,
            spare: Spare::None,
            given: false,
            power: Power::Before,
            armed: Armed::None,
            faults: 0,
            harmed: 0,
            may: [[1; BLOCKS]; STRIPES],
            covered,
        }
    }

    /// The state after a step that the state allows, or the property that the step breaks.
    pub fn after(&self, state: &State, step: Step) -> Result<State, Broken> {
        let mut s = *state;
        match step {
            Step::Ask(r) => self.ask(&mut s, usize::from(r)),
            Step::Claim(r) => self.claim(&mut s, usize::from(r)),
            Step::DirectRead(r) => self.direct_read(&mut s, usize::from(r)),
            Step::DirectCompare(r) => self.direct_compare(&mut s, usize::from(r)),
            Step::DirectLook(r) => self.direct_look(&mut s, usize::from(r))?,
            Step::Prepare(n) => self.prepare(&mut s, usize::from(n)),
            Step::Open(n) => self.open(&mut s, usize::from(n)),
            Step::Read(n) => self.read(&mut s, usize::from(n))?,
            Step::FixEnd(n) => self.fix_end(&mut s, usize::from(n)),
            Step::WriteBegin(n) => self.write_begin(&mut s, usize::from(n)),
            Step::WriteEnd(n) => self.write_end(&mut s, usize::from(n)),
            Step::SetSums(n) => {
                self.note_sums(&mut s, usize::from(n));
                self.done(&mut s, usize::from(n));
            }
            Step::CheckTurn(n) => {
                s.batches[usize::from(n)] = Batch {
                    phase: Phase::Claimed,
                    job: match s.spare {
                        Spare::Comes(..) => REBUILD,
                        _ => CHECK,
                    },
                    ..Batch::default()
                };
            }
            Step::SpareComes => self.spare_comes(&mut s),
            Step::SpareOver => self.spare_over(&mut s),
            Step::Save => self.save(&mut s),
            Step::Saved => {
                self.pages_end(&mut s);
                s.check = Check::Done;
            }
            Step::SweepBegin(mask) => self.sweep_begin(&mut s, mask),
            Step::SweepWrite => self.sweep_write(&mut s),
            Step::SweepWritten => {
                self.pages_end(&mut s);
                s.sweep = Sweep::Written;
            }
            Step::SweepFlush => self.sweep_flush(&mut s),
            Step::SweepEnd => self.sweep_end(&mut s),
            Step::Flip(_)
            | Step::FlipSum(_)
            | Step::LoseBlock(_)
            | Step::LosePage(_)
            | Step::LoseAll(_)
            | Step::Astray(_) => self.fault(&mut s, step),
            Step::Regain(_) => s.armed = Armed::None,
            Step::Cut(n) => self.cut(&mut s, usize::from(n)),
            Step::StartRepair => self.start_repair(&mut s),
            Step::StartForget => self.start_forget(&mut s),
            Step::StartClean => self.start_clean(&mut s),
        }
        Ok(s)
    }

    /// A block goes to its member: from now on a power cut may leave it there.
    pub(super) fn block_begins(&self, s: &mut State, at: usize, place: usize, contents: Value) {
        let place_bit = 1 << place;
        s.batches[at].got[place] = contents;
        s.batches[at].valid |= place_bit;
        if s.lacks(at) == place as u8 {
            return;
        }
        let device = place as u8;
        match s.armed {
            Armed::All(all) if all == device => s.batches[at].lost |= place_bit,
            Armed::Blocks(some) if some & place_bit != 0 => {
                s.batches[at].lost |= place_bit;
                s.armed = match some & !place_bit {
                    0 => Armed::None,
                    left => Armed::Blocks(left),
                };
            }
            Armed::Astray(one) if one == device => {
                s.batches[at].lost |= place_bit;
                s.media[place][1 - at].now ^= rot(s.faults - 1);
                s.armed = Armed::None;
            }
            _ => s.media[place][at].begin(contents),
        }
    }

    /// Its write has ended.
    pub(super) fn block_ends(&self, s: &mut State, at: usize, place: usize) {
        let is_lost = s.batches[at].lost & (1 << place) != 0 || s.loses(place);
        if !is_lost && s.lacks(at) != place as u8 {
            s.media[place][at].end(s.batches[at].got[place], false);
        }
    }

    /// Pages of sums go to the members, as the sums are in memory now.
    pub(super) fn pages_begin(&self, s: &mut State) {
        s.dirty = false;
        s.flying = s.memory;
        s.lost_pages = 0;
        for place in 0..MEMBERS {
            let device = self.holder(place);
            if s.armed == Armed::Page(device as u8) {
                s.armed = Armed::None;
                s.lost_pages |= 1 << place;
            }
            if s.loses(device) {
                s.lost_pages |= 1 << place;
            }
            if self.page_is_there(s, place) {
                for at in 0..STRIPES {
                    s.pages[place][at].begin(s.flying[place][at]);
                }
            }
        }
    }

    pub(super) fn page_is_there(&self, s: &State, place: usize) -> bool {
        s.lost_pages & (1 << place) == 0 && s.has_device(self.holder(place))
    }

    /// They are on stable storage.
    pub(super) fn pages_end(&self, s: &mut State) {
        for place in 0..MEMBERS {
            if self.page_is_there(s, place) && !s.loses(self.holder(place)) {
                for at in 0..STRIPES {
                    let fua = !self.has(Bug::SumsInCache);
                    s.pages[place][at].end(s.flying[place][at], fua);
                }
            }
        }
        s.lost_pages = 0;
        s.given |= matches!(s.spare, Spare::Comes(..));
        s.flying = [[UNKNOWN; STRIPES]; MEMBERS];
    }

    fn ask(&self, s: &mut State, r: usize) {
        let Some(request) = self.bound.requests[r] else {
            return;
        };
        s.asks[r].asked = Asked::Waits;
        if !request.reads {
            return;
        }
        let at = usize::from(request.stripe);
        let block = usize::from(request.blocks >> 1);
        s.asks[r].may = s.may[at][block];
        if s.group != There::Clear && s.has_block(self.bound.place(at, block), at) {
            s.group = There::Set;
            s.asks[r].asked = Asked::Direct;
        }
    }

    fn claim(&self, s: &mut State, r: usize) {
        let Some(request) = self.bound.requests[r] else {
            return;
        };
        s.asks[r].asked = Asked::Batch;
        s.batches[usize::from(request.stripe)] = Batch {
            phase: Phase::Claimed,
            job: r as u8,
            ..Batch::default()
        };
    }
}

impl Machine for Model {
    type State = State;
    type Step = Step;

    fn bound(&self) -> String {
        self.bound.to_string()
    }

    fn first(&self) -> State {
        Model::first(self)
    }

    fn steps(&self, state: &State, out: &mut Vec<Step>) {
        Model::steps(self, state, out);
    }

    fn after(&self, state: &State, step: Step) -> Result<State, Broken> {
        Model::after(self, state, step)
    }

    fn check(&self, before: &State, after: &State) -> Result<(), Broken> {
        let disks = |s: &State| (s.media, s.pages, s.bits, s.harmed);
        match disks(before) == disks(after) {
            true => Ok(()),
            false => self.check_marks(after),
        }
    }

    fn check_rest(&self, state: &State) -> Result<(), Broken> {
        Model::check_rest(self, state)
    }

    fn rank(&self, state: &State) -> u64 {
        rank(state)
    }
}
