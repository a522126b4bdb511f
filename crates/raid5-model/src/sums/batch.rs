//! Batches and direct reads: what they read and compare, write, and give sums.

use super::bug::Bug;
use super::model::Model;
use super::state::{
    ANY, Asked, CHECK, Check, Phase, REBUILD, STRIPES, State, There, UNKNOWN, Value, value,
};
use crate::check::{Broken, Property};
use crate::state::{MEMBERS, NONE, PARITY};

/// The places of all members.
pub(super) const ALL: u8 = 0b111;

/// The places of a mask, in order.
pub(super) fn places(mask: u8) -> impl Iterator<Item = usize> {
    (0..MEMBERS).filter(move |place| mask & (1 << place) != 0)
}

/// A batch as it is planned.
struct Plan {
    /// Places that are read, and those that are written, missing ones included.
    reads: u8,
    data: u8,
    /// The place of parity, unless it is missing.
    parity: Option<usize>,
    /// Parity is made from its old contents.
    modify: bool,
}

impl Model {
    fn place_bit(&self, at: usize, block: usize) -> u8 {
        1 << self.bound.place(at, block)
    }

    fn plan(&self, s: &State, at: usize) -> Plan {
        let job = s.batches[at].job;
        let missing = match s.lacks(at) {
            NONE => 0,
            place => 1 << place,
        };
        let parity = self.bound.place(at, PARITY);
        let mut plan = Plan {
            reads: ALL & !missing,
            data: 0,
            parity: None,
            modify: false,
        };
        let request = self.bound.requests.get(usize::from(job)).copied();
        let Some(request) = request.flatten() else {
            return plan;
        };
        let data = Model::data(request.blocks).fold(0, |m, b| m | self.place_bit(at, b));
        if request.reads {
            plan.reads = if data == missing {
                ALL & !missing
            } else {
                data
            };
            return plan;
        }
        let all_data = ALL & !(1 << parity);
        plan.data = data;
        if missing == 1 << parity {
            plan.reads = 0;
            return plan;
        }
        plan.parity = Some(parity);
        // A missing block that isn't written must not be needed, and one that is written has no old contents.
        plan.modify = match missing {
            0 => self.bound.modify && data != all_data,
            missing => missing & data == 0,
        };
        plan.reads = match plan.modify {
            true => data | 1 << parity,
            false => all_data & !data & !missing,
        };
        plan
    }

    /// The background sets the bit that a batch wants, and reads its group.
    pub(super) fn prepare(&self, s: &mut State, at: usize) {
        if !self.has_bit(s, at) {
            let chunk = self.bound.chunk(at);
            for member in 0..MEMBERS {
                let is_written = s.has_device(member) && !s.loses(member);
                s.bits[member] |= u8::from(is_written) << chunk;
            }
            s.chunks[chunk] = There::Set;
        }
        let is_asked = !self.has(Bug::LoadNotAsked) || !self.reads(s.batches[at].job);
        if s.group != There::Clear || !is_asked {
            return;
        }
        s.group = There::Set;
        for place in 0..MEMBERS {
            let holder = self.holder(place);
            for n in 0..STRIPES {
                let is_there = s.has_page(holder);
                let page = s.pages[place][n].now;
                let sum = if is_there { page } else { UNKNOWN };
                s.memory[place][n] = sum;
                // A page without them that isn't a fault's is a mistake.
                let may_be_unknown = !is_there || s.harmed & (1 << holder) != 0;
                if sum == UNKNOWN && may_be_unknown {
                    s.covered[n] &= !(1 << place);
                }
            }
        }
    }

    /// A batch finds its bit and its group, and takes them back from a sweep.
    pub(super) fn open(&self, s: &mut State, at: usize) {
        let chunk = self.bound.chunk(at);
        let wants_bit = s.batches[at].bad != NONE || !self.reads(s.batches[at].job);
        let is_there = s.chunks[chunk] != There::Clear;
        if wants_bit && is_there && !self.has(Bug::ClearingNotTaken) {
            s.chunks[chunk] = There::Set;
        }
        s.group = There::Set;
        s.batches[at].phase = Phase::Reading;
    }

    /// Blocks are read and compared; then the batch goes on with what it has.
    pub(super) fn read(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        let plan = self.plan(s, at);
        let bad = s.batches[at].bad;
        let wants = if bad == NONE {
            plan.reads
        } else {
            ALL & !(1 << bad)
        };
        let mut failed = 0;
        for place in places(wants & !s.batches[at].valid) {
            let (contents, sum) = (s.media[place][at].now, s.memory[place][at]);
            let batch = &mut s.batches[at];
            let passes = self.has(Bug::OthersNotCompared) && bad != NONE;
            batch.got[place] = contents;
            if sum == UNKNOWN || sum == contents || passes || batch.trusted == place as u8 {
                batch.valid |= 1 << place;
                continue;
            }
            failed |= 1 << place;
            if bad == NONE {
                batch.misfit = contents;
            }
        }
        match (failed, bad) {
            (0, NONE) => self.has_read(s, at, &plan),
            (0, _) => self.fix(s, at),
            _ => self.misfits(s, at, failed),
        }
    }

    /// All that the batch needs is there.
    fn has_read(&self, s: &mut State, at: usize, plan: &Plan) -> Result<(), Broken> {
        let job = s.batches[at].job;
        if job == REBUILD {
            return self.rebuild(s, at);
        }
        if job == CHECK {
            self.find_sums(s, at);
            self.end_turn(s, at);
            return Ok(());
        }
        if !self.reads(job) {
            s.batches[at].phase = Phase::Read;
            return Ok(());
        }
        let wanted = places(plan.reads).next().unwrap_or(0);
        let (mut place, mut contents) = (wanted, s.batches[at].got[wanted]);
        if plan.reads.count_ones() == 2 {
            place = usize::from(s.missing);
            contents = places(plan.reads).fold(0, |sum, p| sum ^ s.batches[at].got[p]);
            let sum = s.memory[place][at];
            let fits = sum == UNKNOWN || sum == contents || self.has(Bug::ComputedNotCompared);
            if !fits {
                return self.fails(s, at);
            }
        }
        let covered = s.covered[at] & (1 << place) != 0;
        self.gives(
            s,
            (at, place),
            contents,
            (s.asks[usize::from(job)].may, covered),
        )?;
        self.done(s, at);
        Ok(())
    }

    /// The request of a batch is over.
    pub(super) fn done(&self, s: &mut State, at: usize) {
        if let Some(ask) = s.asks.get_mut(usize::from(s.batches[at].job)) {
            *ask = Default::default();
            ask.asked = Asked::Done;
        }
        self.leave(s, at);
    }

    pub(super) fn leave(&self, s: &mut State, at: usize) {
        s.batches[at] = Default::default();
        s.owned &= !(1 << at);
    }

    /// The request of a batch fails, and users are told; a check passes over the stripe.
    pub(super) fn fails(&self, s: &mut State, at: usize) -> Result<(), Broken> {
        let all_known = s.missing == NONE && s.covered[at] == ALL;
        if s.faults <= 1 && all_known {
            return Err(Broken::new(Property::OneFaultHeals, || {
                format!(
                    "stripe {at}: its blocks don't fit, though no more than one device had a fault"
                )
            }));
        }
        match s.batches[at].job {
            CHECK => self.end_turn(s, at),
            REBUILD => self.end_rebuild(s, at),
            _ => self.done(s, at),
        }
        Ok(())
    }

    pub(super) fn end_turn(&self, s: &mut State, at: usize) {
        s.check = match usize::from(at as u8 + 1) {
            STRIPES => Check::Ended,
            next => Check::Turn(next as u8),
        };
        self.leave(s, at);
    }

    /// Blocks whose parity fits get sums where they have none.
    fn find_sums(&self, s: &mut State, at: usize) {
        let sum = s.batches[at].got.iter().fold(0, |sum, block| sum ^ block);
        if sum == 0 || self.has(Bug::FoundWithoutParity) {
            self.learn_sums(s, at);
        }
    }

    /// Blocks that are known get sums where they have none.
    pub(super) fn learn_sums(&self, s: &mut State, at: usize) {
        for place in places(s.batches[at].valid) {
            if s.memory[place][at] == UNKNOWN {
                self.set_sum(s, at, place, s.batches[at].got[place]);
            }
        }
    }

    /// A block gets a sum in memory.
    pub(super) fn set_sum(&self, s: &mut State, at: usize, place: usize, sum: Value) {
        // Memory of a group that went is lost.
        if s.group == There::Clear {
            return;
        }
        s.memory[place][at] = sum;
        s.dirty = true;
        match sum {
            UNKNOWN => s.covered[at] &= !(1 << place),
            _ => s.covered[at] |= 1 << place,
        }
    }

    /// Data and parity go to the members.
    pub(super) fn write_begin(&self, s: &mut State, at: usize) {
        let (plan, job) = (self.plan(s, at), s.batches[at].job);
        let old = s.batches[at].got;
        let mut new = old;
        for place in places(plan.data) {
            let block = self.bound.block(at, place);
            new[place] = value(block, job + 1);
            s.may[at][block] |= 1 << (job + 1);
            for (ask, request) in s.asks.iter_mut().zip(self.bound.requests) {
                let its = request.is_some_and(|r| {
                    r.reads && usize::from(r.stripe) == at && usize::from(r.blocks >> 1) == block
                });
                if its && !matches!(ask.asked, Asked::New | Asked::Done) {
                    ask.may |= 1 << (job + 1);
                }
            }
        }
        if !plan.modify {
            self.makes_parity_of(s, at, plan.reads);
        }
        if let Some(parity) = plan.parity {
            let others = ALL & !(1 << parity);
            let sum = |of: [Value; MEMBERS], mask: u8| places(mask).fold(0, |sum, p| sum ^ of[p]);
            new[parity] = match plan.modify {
                true => old[parity] ^ sum(old, plan.data) ^ sum(new, plan.data),
                false => sum(new, others),
            };
        }
        s.batches[at].got = new;
        if !self.has(Bug::SumsSetLate) {
            self.note_sums(s, at);
        }
        let parity = plan.parity.map_or(0, |parity| 1 << parity);
        for place in places(plan.data | parity) {
            self.block_begins(s, at, place, new[place]);
        }
        s.batches[at].phase = Phase::Writing;
    }

    /// New parity is made of these blocks, as they were read. One without a sum that a fault has changed can't be calculated from then on, and counts as it is.
    fn makes_parity_of(&self, s: &mut State, at: usize, read: u8) {
        for place in places(read & !s.covered[at]) {
            let block = self.bound.block(at, place);
            if s.right(at, block) != Some(s.batches[at].got[place]) {
                s.may[at][block] |= ANY;
            }
        }
    }

    /// Blocks that are written get sums. Parity's follows from others', without a look at it.
    pub(super) fn note_sums(&self, s: &mut State, at: usize) {
        let plan = self.plan(s, at);
        let new = s.batches[at].got;
        let sums = |s: &State, mask: u8| {
            let mut all = places(mask).map(|p| s.memory[p][at]);
            all.try_fold(0, |sum, one| (one != UNKNOWN).then_some(sum ^ one))
        };
        let parity = self.bound.place(at, PARITY);
        let is_whole = s.lacks(at) == NONE;
        let mut of_parity = Some(0);
        if plan.modify {
            of_parity = sums(s, plan.data | 1 << parity);
        }
        for place in places(plan.data) {
            self.set_sum(s, at, place, new[place]);
        }
        let others = if plan.modify {
            plan.data
        } else {
            ALL & !(1 << parity)
        };
        of_parity = of_parity.zip(sums(s, others)).map(|(a, b)| a ^ b);
        let of_parity = match plan.parity {
            None => UNKNOWN,
            Some(_) if self.has(Bug::ParitySumKept) => return,
            Some(_) => of_parity.filter(|_| is_whole).unwrap_or(new[parity]),
        };
        self.set_sum(s, at, parity, of_parity);
    }

    /// They are written, and the request is done.
    pub(super) fn write_end(&self, s: &mut State, at: usize) {
        let (plan, job) = (self.plan(s, at), s.batches[at].job);
        let parity = plan.parity.map_or(0, |parity| 1 << parity);
        for place in places(plan.data | parity) {
            self.block_ends(s, at, place);
        }
        for place in places(plan.data) {
            s.may[at][self.bound.block(at, place)] = 1 << (job + 1);
        }
        if self.has(Bug::SumsSetLate) {
            s.batches[at].phase = Phase::Late;
            s.owned &= !(1 << at);
            return;
        }
        self.done(s, at);
    }
}
