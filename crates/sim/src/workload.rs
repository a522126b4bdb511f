//! [`Workload`]: the requests of a scenario's users, and the state that they share.

use crate::bugs::Bug;
use crate::checker::Checker;
use crate::log::Log;
use crate::stamp::SECTOR_BYTES;
use fastrand::Rng;
use pvblk_block::Op;

/// The mix of requests, as shares of the sum.
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

/// Properties of the users' requests.
#[derive(Clone, Debug)]
pub struct Load {
    /// Depth of each user.
    pub depths: Vec<u32>,
    /// Sectors of the device: few, so that requests meet.
    pub sectors: u64,
    /// Shares of the kinds of requests.
    pub mix: Mix,
    /// Longest request in sectors, with exceptions.
    pub longest: u64,
    /// Longest request in sectors, without exceptions.
    pub most: u64,
    /// Most requests that are submitted together.
    pub batch: usize,
    /// Sectors from the first on in which requests concentrate; 0: none.
    pub hot: u64,
    /// Number of requests, of 8, that follow the one before.
    pub sequential: u32,
    /// Number of requests, of 8, that begin and end at 4 KiB.
    pub aligned: u32,
    /// Number of writes, of 8, that change their data on the way.
    pub changing: u32,
    /// Users promise not to change data on the way.
    pub stable: bool,
    /// Number of writes, of 8, that become write-zeroes or discards, some of them very long.
    pub blank: u32,
    /// Users that sleep submit now and then.
    pub eager: bool,
    /// Number of requests, of 8, with memory that isn't the device's; `None`: the device has no memory of its
    /// own, and memory is aligned to sectors.
    pub foreign: Option<u32>,
}

/// The state that users of a scenario share.
pub struct Workload {
    /// The generator of all random choices.
    pub rng: Rng,
    pub log: Log,
    /// Checks the contents that users read.
    pub checker: Checker,
    /// Properties of the users' requests.
    pub load: Load,
    /// A bug of requests on their way, or none.
    pub bug: Option<Bug>,
    /// Requests may fail.
    pub may_fail: bool,
    /// The sector at which the next sequential request begins.
    pub next: u64,
    /// The next sector to read back, while everything is read back.
    pub verify: Option<u64>,
    /// The state of the array, for writes to one.
    pub array: ArrayState,
}

/// The state of an array, as its users can ask for it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArrayState {
    /// The array is without a member.
    pub degraded: bool,
    /// The array is degraded, and no other device is becoming a member.
    pub alone: bool,
    /// A write was acknowledged that the missing member doesn't have.
    pub stale: bool,
    /// Sectors of a row of chunks: discards zero only whole rows; 0: the device isn't an array.
    pub row: u64,
    /// Its members never fail.
    pub lasts: bool,
}

impl Load {
    /// Bytes of a request's memory: room for the longest, also if it isn't aligned to a sector.
    pub fn slot_bytes(&self) -> usize {
        (self.most as usize + usize::from(self.foreign.is_some())) * SECTOR_BYTES
    }
}

impl Workload {
    /// The workload of a device of zeros, or with unknown contents unless `known`.
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

    /// Chooses operation, FUA and place of the next request; `None` if everything is read back.
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

    /// Chooses the place of a request.
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

    /// Turns a write into one without data now and then: as long as it is, or much longer.
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

    /// A discard of an array has completed. Whole rows are zeros now, if no member was missing; all other
    /// sectors are as they were. `degraded`: the array was without a member already when the discard was
    /// submitted.
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
