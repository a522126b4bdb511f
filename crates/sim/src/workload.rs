//! [`Workload`]: what users of a world ask for, and what they share.

use crate::bugs::Bug;
use crate::checker::Checker;
use crate::log::Log;
use crate::stamp::SECTOR_BYTES;
use fastrand::Rng;
use pvblk_block::Op;

/// The mix of requests: shares, each relative to the sum.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mix {
    pub reads: u32,
    pub writes: u32,
    pub flushes: u32,
    pub fua: u32,
    pub discards: u32,
    /// Discards and write-zeroes.
    pub zeroes: u32,
}

/// What users ask for, and how.
#[derive(Clone, Debug)]
pub struct Load {
    /// Depth of each user.
    pub depths: Vec<u32>,
    /// Sectors of the device: few, so that requests meet.
    pub sectors: u64,
    /// Kinds of requests.
    pub mix: Mix,
    /// Longest request in sectors, as a rule.
    pub longest: u64,
    /// Longest request in sectors.
    pub most: u64,
    /// Most requests that are submitted together.
    pub batch: usize,
    /// Sectors from the first on in which requests concentrate; 0: none.
    pub hot: u64,
    /// Of 8 requests, so many follow the one before.
    pub sequential: u32,
    /// Of 8 requests, so many begin and end at 4 KiB.
    pub aligned: u32,
    /// Of 8 writes, so many change their data on the way.
    pub changing: u32,
    /// Users promise not to do that.
    pub stable: bool,
    /// Of 8 writes, so many become write-zeroes or discards, some of them very long.
    pub blank: u32,
    /// Users that sleep submit now and then.
    pub eager: bool,
    /// Of 8 requests, so many use memory that isn't the device's; `None`: it has none of its own, and memory begins at sectors' boundaries.
    pub foreign: Option<u32>,
}

/// What users of a world share.
pub struct Workload {
    /// All chance.
    pub rng: Rng,
    /// What happened.
    pub log: Log,
    /// What may be where.
    pub checker: Checker,
    /// What users ask for.
    pub load: Load,
    /// A bug of requests on their way, or none.
    pub bug: Option<Bug>,
    /// Requests may fail.
    pub may_fail: bool,
    /// Where the next sequential request begins.
    pub next: u64,
    /// While everything is read back: the sector to go on with.
    pub verify: Option<u64>,
    /// What a write to an array has to know.
    pub array: ArrayState,
}

/// The state of an array, as users see it who ask.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArrayState {
    /// It does without a member.
    pub degraded: bool,
    /// And no other device is becoming it.
    pub alone: bool,
    /// A write was acknowledged that the missing member doesn't have.
    pub stale: bool,
    /// Discards make zeros of whole rows of so many sectors only; 0: it isn't an array.
    pub row: u64,
    /// Its members never fail.
    pub lasts: bool,
}

impl Load {
    /// Memory of a request: room for the longest, also off a sector's boundary.
    pub fn slot_bytes(&self) -> usize {
        (self.most as usize + usize::from(self.foreign.is_some())) * SECTOR_BYTES
    }
}

impl Workload {
    /// What is to be done on a device of zeros, or of what nobody knows.
    pub fn new(rng: Rng, log: Log, load: Load, known: bool, bug: Option<Bug>) -> Workload {
        Workload {
            rng,
            log,
            checker: Checker::new(load.sectors, known),
            load,
            bug,
            may_fail: false,
            next: 0,
            verify: None,
            array: ArrayState::default(),
        }
    }

    /// What to ask for, with FUA or not, and where; `None` if everything is read back.
    pub fn choose(&mut self) -> Option<(Op, bool, u64, u64)> {
        let end = self.load.sectors;
        if let Some(from) = self.verify {
            if from >= end {
                return None;
            }
            let sectors = self.load.most.min(end - from);
            self.verify = Some(from + sectors);
            return Some((Op::Read, false, from, sectors));
        }
        let m = self.load.mix;
        let all = m.reads + m.writes + m.flushes + m.fua + m.discards + m.zeroes;
        let mut at = self.rng.u32(..all);
        let mut is = |share: u32| match at.checked_sub(share) {
            Some(rest) => {
                at = rest;
                false
            }
            None => true,
        };
        if is(m.flushes) {
            return Some((Op::Flush, false, 0, 0));
        }
        let (op, fua) = match (is(m.reads), is(m.writes), is(m.fua), is(m.discards)) {
            (true, ..) => (Op::Read, false),
            (_, true, ..) => (Op::Write, false),
            (_, _, true, _) => (Op::Write, true),
            (.., true) => (Op::Discard, false),
            _ if self.rng.bool() => (Op::Discard, false),
            _ => (Op::WriteZeroes, self.rng.u8(..4) == 0),
        };
        let (sector, sectors) = self.place();
        Some((op, fua, sector, sectors))
    }

    /// Where a request is.
    fn place(&mut self) -> (u64, u64) {
        let (load, rng) = (&self.load, &mut self.rng);
        let end = load.sectors;
        let mut sectors = rng.u64(1..=load.longest);
        let mut sector = match (rng.u32(..8) < load.sequential, load.hot) {
            (true, _) => self.next % end,
            (false, 1..) if rng.u8(..4) > 0 => rng.u64(..load.hot.min(end)),
            _ => rng.u64(..end),
        };
        if rng.u32(..8) < load.aligned {
            sector -= sector % 8;
            sectors = sectors.next_multiple_of(8);
        }
        sectors = sectors.min(end - sector).min(load.most);
        self.next = sector + sectors;
        (sector, sectors)
    }

    /// A write may become one without data: as long as it is, or much longer.
    pub fn without_data(&mut self, sector: u64, sectors: u64, discards: bool) -> (Op, u64) {
        if self.load.blank == 0 || self.rng.u32(..8) >= self.load.blank {
            return (Op::Write, sectors);
        }
        let sectors = match self.rng.u8(..4) {
            0 => self.rng.u64(1..=self.load.sectors - sector),
            _ => sectors,
        };
        match discards && self.rng.u8(..3) == 0 {
            true => (Op::Discard, sectors),
            false => (Op::WriteZeroes, sectors),
        }
    }

    /// A discard of an array has ended. Whole rows are zeros now, if no member was missing; all else is as it was.
    /// `degraded`: it did without one already when that was submitted.
    pub fn discarded(&mut self, sector: u64, sectors: u64, degraded: bool) {
        let end = sector + sectors;
        let row = self.array.row;
        let first = sector.next_multiple_of(row).min(end);
        let last = (end - end % row).max(first);
        self.checker.write_ignored(sector, first - sector);
        self.checker.write_ignored(last, end - last);
        let surely = self.array.lasts && !degraded && !self.array.degraded;
        match surely {
            true => self.checker.write_acked(first, last - first, false),
            false => self.checker.write_failed(first, last - first),
        }
    }
}
