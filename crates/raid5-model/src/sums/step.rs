//! Steps: the vocabulary of traces, and those that a state allows. A step and a state have one state that follows.

use super::bug::Bug;
use super::model::Model;
use super::state::{
    Armed, Asked, CHECK, Check, Phase, Power, REBUILD, REQUESTS, STRIPES, Spare, State, Sweep,
    There,
};
use crate::state::{BLOCKS, MEMBERS, NONE};
use crate::vocabulary::steps;

steps! {
    /// A step of the array, of a user or of a device. Each is atomic.
    Ask(u8) "request asked" "A user submits this request: a read of a group in memory goes to its member, all others wait for their stripe's word."
    Claim(u8) "word claimed" "This request has its stripe's word."
    DirectRead(u8) "direct read" "A direct read has its block, and looks at the group of sums."
    DirectCompare(u8) "direct compared" "It compares the block with the sum in memory."
    DirectLook(u8) "direct looked" "It looks at the group again: if that was in memory all the time, the read is done."
    Prepare(u8) "prepared" "The background sets the bit that this stripe's batch wants, and reads its group of sums."
    Open(u8) "opened" "This stripe's batch finds its bit and its group, and takes them back from a sweep."
    Read(u8) "read" "What it needs has been read and compared; a read and a check are done, or a block is calculated."
    FixEnd(u8) "repair ended" "The calculated block is written."
    WriteBegin(u8) "write begun" "Data and parity go to the members, and have sums in memory."
    WriteEnd(u8) "write ended" "They are written; the batch leaves its word."
    SetSums(u8) "sums set" "The blocks of this stripe get sums; a step of its own only with a planted bug."
    CheckTurn(u8) "turn claimed" "The action `checksum`, or a rebuild, has this stripe's word."
    SpareComes "spare comes" "A device is to be rebuilt for the place without a member."
    SpareOver "spare taken" "It is rebuilt, and its sums are written: it is the member."
    Save "found sums begun" "Sums that the action has found are being written."
    Saved "found sums written" "They are on the members."
    SweepBegin(u8) "sweep begun" "A sweep marks what it is to take away: a mask of two chunks and the group."
    SweepWrite "sweep writes" "The batches that it waited for are done; dirty sums are being written."
    SweepWritten "sweep wrote" "They are on the members."
    SweepFlush "sweep flushes" "Members are flushed."
    SweepEnd "sweep ended" "Bits are cleared and the group goes, unless a batch has taken them back."
    Flip(u8) "bit flips" "A block has a flipped bit; the number is its place, twice, and its stripe."
    FlipSum(u8) "sum flips" "A sum on disk has a flipped bit; the number is its block's."
    LoseBlock(u8) "block gets lost" "This device loses the next block that it is to write."
    LosePage(u8) "page gets lost" "This device loses the next page of sums that it is to write."
    LoseAll(u8) "device loses writes" "This device loses all writes from now on."
    Regain(u8) "device keeps writes" "It keeps them again."
    Astray(u8) "block goes astray" "The next block that this device is to write goes to the other stripe."
    Cut(u8) "power cut" "Caches are lost; the number says which of the blocks in them survive."
    StartRepair "start repairs" "A start makes parity of marked chunks."
    StartForget "start forgets" "It makes sums of marked chunks unknown, in whole pages."
    StartClean "start ends" "Superblocks say clean, no bit is set, and the array is served."
}

impl Step {
    /// True if nobody has to do it: users submit when they like, and power and devices fail or don't.
    fn is_up_to_others(self) -> bool {
        matches!(
            self,
            Step::Ask(_)
                | Step::SweepBegin(_)
                | Step::SpareComes
                | Step::Flip(_)
                | Step::FlipSum(_)
                | Step::LoseBlock(_)
                | Step::LosePage(_)
                | Step::LoseAll(_)
                | Step::Regain(_)
                | Step::Astray(_)
                | Step::Cut(_)
        )
    }
}

impl Model {
    /// The steps that a state allows.
    pub fn steps(&self, s: &State, out: &mut Vec<Step>) {
        self.of_devices(s, out);
        match s.power {
            Power::Cut => out.push(Step::StartRepair),
            Power::Repaired => out.push(Step::StartForget),
            Power::Forgot => out.push(Step::StartClean),
            Power::Before | Power::After => {
                self.of_requests(s, out);
                (0..STRIPES).for_each(|at| self.of_batch(s, at, out));
                self.of_background(s, out);
            }
        }
    }

    fn of_requests(&self, s: &State, out: &mut Vec<Step>) {
        for r in 0..REQUESTS {
            let (Some(request), n) = (self.bound.requests[r], r as u8) else {
                continue;
            };
            let stripe = usize::from(request.stripe);
            match s.asks[r].asked {
                // Requests of one shape are interchangeable: they are submitted in order.
                Asked::New => {
                    let mut twins =
                        (0..r).filter(|t| self.bound.requests[*t] == self.bound.requests[r]);
                    if twins.all(|t| s.asks[t].asked != Asked::New) {
                        out.push(Step::Ask(n));
                    }
                }
                Asked::Direct => out.push(Step::DirectRead(n)),
                Asked::Looked => out.push(Step::DirectCompare(n)),
                Asked::Fits => out.push(Step::DirectLook(n)),
                Asked::Waits if s.batches[stripe].phase == Phase::Free => out.push(Step::Claim(n)),
                Asked::Waits | Asked::Batch | Asked::Done => {}
            }
        }
    }

    /// True if a batch's bit is set, or it doesn't want one.
    pub(super) fn has_bit(&self, s: &State, at: usize) -> bool {
        let batch = &s.batches[at];
        let writes = batch.bad != NONE || !self.reads(batch.job);
        !writes || s.chunks[self.bound.chunk(at)] != There::Clear || self.has(Bug::WriteNotMarked)
    }

    /// True if the batch for a job reads, unless a block is bad.
    pub(super) fn reads(&self, job: u8) -> bool {
        let request = self.bound.requests.get(usize::from(job)).copied().flatten();
        job == CHECK || job == REBUILD || request.is_some_and(|request| request.reads)
    }

    fn of_batch(&self, s: &State, at: usize, out: &mut Vec<Step>) {
        let (batch, n) = (&s.batches[at], at as u8);
        match batch.phase {
            Phase::Free => {}
            Phase::Claimed => {
                let has_group = s.group != There::Clear;
                if self.has_bit(s, at) && has_group {
                    out.push(Step::Open(n));
                } else if !self.is_writing(s) {
                    let comes = !self.has(Bug::LoadNotAsked) || !self.reads(batch.job);
                    if !self.has_bit(s, at) || comes {
                        out.push(Step::Prepare(n));
                    }
                }
            }
            Phase::Reading => out.push(Step::Read(n)),
            Phase::Read => out.push(Step::WriteBegin(n)),
            Phase::Writing => out.push(Step::WriteEnd(n)),
            Phase::Fixing => out.push(Step::FixEnd(n)),
            Phase::Late => out.push(Step::SetSums(n)),
        }
    }

    /// True while the background writes pages of sums: it does nothing else then.
    fn is_writing(&self, s: &State) -> bool {
        s.sweep == Sweep::Writing || s.check == Check::Writing
    }

    fn of_background(&self, s: &State, out: &mut Vec<Step>) {
        if self.bound.spare && s.missing != NONE && s.spare == Spare::None {
            out.push(Step::SpareComes);
        }
        match s.check {
            Check::Done if matches!(s.spare, Spare::Comes(..)) => out.push(Step::SpareOver),
            Check::Turn(at) if s.batches[usize::from(at)].phase == Phase::Free => {
                out.push(Step::CheckTurn(at));
            }
            Check::Ended if !self.is_writing(s) => out.push(Step::Save),
            Check::Writing => out.push(Step::Saved),
            Check::None | Check::Turn(_) | Check::Ended | Check::Done => {}
        }
        match s.sweep {
            Sweep::None if s.sweeps < self.bound.sweeps => {
                let marks = |chunk: usize| match s.chunks[chunk] {
                    There::Clear => 0,
                    There::Set | There::Clearing => 1 << chunk,
                };
                // Nothing is cleared while a member is missing.
                let chunks = match s.missing {
                    NONE => marks(0) | marks(1),
                    _ => 0,
                };
                let group = u8::from(s.group != There::Clear) << 2;
                let may = chunks | group;
                out.extend((1..8).filter(|mask| mask & !may == 0).map(Step::SweepBegin));
            }
            Sweep::Waiting if s.owned == 0 || self.has(Bug::SweepNotAwaited) => {
                if !self.is_writing(s) {
                    out.push(Step::SweepWrite);
                }
            }
            Sweep::Writing => out.push(Step::SweepWritten),
            Sweep::Written => out.push(Step::SweepFlush),
            Sweep::Flushed => out.push(Step::SweepEnd),
            Sweep::None | Sweep::Waiting => {}
        }
    }

    fn of_devices(&self, s: &State, out: &mut Vec<Step>) {
        if self.bound.cut && s.power == Power::Before && s.missing == NONE {
            out.extend((0..self.survivors(s)).map(Step::Cut));
        }
        if let Armed::All(device) = s.armed {
            out.push(Step::Regain(device));
        }
        let kinds = self.bound.faults;
        if s.faults >= kinds.most {
            return;
        }
        for place in (0..MEMBERS as u8).filter(|p| *p != s.missing) {
            let both =
                |step: fn(u8) -> Step| (0..STRIPES as u8).map(move |at| step(place * 2 + at));
            if kinds.flips {
                out.extend(both(Step::Flip));
            }
            if kinds.sums && s.missing != self.holder(usize::from(place)) as u8 {
                out.extend(both(Step::FlipSum));
            }
            let may_lose = match s.armed {
                Armed::None => true,
                Armed::Blocks(some) => some & (1 << place) == 0,
                _ => false,
            };
            if kinds.lost && s.serves() && may_lose {
                out.push(Step::LoseBlock(place));
            }
            if s.armed != Armed::None || !s.serves() {
                continue;
            }
            out.extend(kinds.lost.then_some(Step::LosePage(place)));
            out.extend(kinds.all.then_some(Step::LoseAll(place)));
            out.extend(kinds.astray.then_some(Step::Astray(place)));
        }
    }

    /// The number of ways in which a power cut may leave the blocks.
    fn survivors(&self, s: &State) -> u8 {
        let all = s.media.as_flattened().iter();
        let count: usize = all.map(|block| block.all().count()).product();
        u8::try_from(count).expect("a cut has a number")
    }

    /// Data blocks of a request.
    pub(super) fn data(mask: u8) -> impl Iterator<Item = usize> {
        (0..BLOCKS).filter(move |b| mask & (1 << b) != 0)
    }
}
