//! The partial parity logs: one unit at a time for each parity member.

use super::members::Incoming;
use super::pages::{Block, memory};
use super::{Core, Data, Purpose};
use crate::{
    Batch, Geometry, PPL_HEADER_BYTES, Policy, PplHeader, STRIPE_BYTES, Superblock,
    log_space_bytes, ppl_signature,
};
use pvblk_block::memory::Gauge;
use pvblk_block::planted::{Plant, has};
use pvblk_block::{Buffer, Error, Op, Region};
use std::sync::Arc;

/// Most partial parity of one unit, in bytes.
pub(super) const MOST_BYTES: u64 = 256 << 10;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    /// Members are flushed, so that the log may be written over.
    Flushing,
    Writing,
    /// The log is on disk; the unit's stripes are being written.
    Stripes,
}

#[derive(Default)]
struct Log {
    state: State,
    /// Heads for the next unit.
    next: Vec<usize>,
    /// Heads of this unit.
    unit: Vec<usize>,
    /// I/O or stripes that this state waits for.
    left: usize,
    /// Stripes of the last unit may be in members' caches only.
    stale: bool,
    generation: u64,
}

/// The logs, by the member that they are on.
pub(super) struct Logs {
    logs: Vec<Log>,
    geometry: Geometry,
    signature: u32,
    region: Arc<Region>,
    area_bytes: usize,
    /// Memory for partial parity that isn't in use.
    blocks: Vec<Box<Block>>,
    _memory: Gauge,
}

impl Logs {
    pub fn new(
        geometry: &Geometry,
        superblocks: &[Option<Superblock>],
        policy: Policy,
    ) -> Result<Logs, Error> {
        let mut logs: Vec<Log> = (0..geometry.members()).map(|_| Log::default()).collect();
        let mut signature = 0;
        for superblock in superblocks.iter().flatten() {
            signature = ppl_signature(&superblock.set_uuid);
        }
        // Above that of the empty log that is there.
        logs.iter_mut().for_each(|log| log.generation = 1);
        let area_bytes = match policy {
            Policy::Ppl(_) => PPL_HEADER_BYTES + MOST_BYTES as usize,
            _ => 0,
        };
        let bytes = (area_bytes * logs.len()).max(STRIPE_BYTES);
        let region = Region::anonymous(bytes).map_err(|e| Error::os("memory for logs", e))?;
        Ok(Logs {
            logs,
            geometry: *geometry,
            signature,
            region: Arc::new(region),
            area_bytes,
            blocks: Vec::new(),
            _memory: memory("logs", bytes),
        })
    }

    /// A head's round is ready, and goes on when it is logged.
    pub fn add(&mut self, parity: usize, head: usize) {
        self.logs[parity].next.push(head);
    }

    /// Takes the heads whose stripes aren't being written: those of the next units, and of units that are just logged.
    pub fn take_unwritten(&mut self) -> Vec<usize> {
        let mut heads = Vec::new();
        for log in &mut self.logs {
            heads.append(&mut log.next);
            if log.state == State::Writing {
                heads.append(&mut log.unit);
            }
        }
        heads
    }

    /// A stripe of the unit is written. `volatile`: perhaps to caches only.
    pub fn stripe_done(&mut self, parity: usize, volatile: bool) {
        let log = &mut self.logs[parity];
        log.left -= 1;
        if log.left == 0 {
            log.state = State::Idle;
            log.stale = volatile;
        }
    }

    /// A head of the unit that is being written.
    pub fn first_head(&self, log: usize) -> Option<usize> {
        self.logs[log].unit.first().copied()
    }

    /// Room for partial parity.
    pub fn block(&mut self) -> Box<Block> {
        let fresh = || Box::new([0; STRIPE_BYTES]);
        self.blocks.pop().unwrap_or_else(fresh)
    }

    /// Takes back memory of partial parity.
    pub fn take_back(&mut self, block: Box<Block>) {
        self.blocks.push(block);
    }
}

impl Core {
    /// Starts the next unit of each log that is idle.
    ///
    /// No unit is started while the superblocks still list a failed member: after a power cut it would be
    /// taken for up to date, and data that was only in its cache is recovered from the log that would be
    /// overwritten.
    pub(super) fn start_logs(&mut self) {
        if self.meta.is_kicking() && !self.broken {
            return;
        }
        for member in 0..self.logs.logs.len() {
            let log = &self.logs.logs[member];
            let Some(&first) = log.next.first() else {
                continue;
            };
            if self.broken || self.members.logs(member).next().is_none() {
                // Without parity there is nothing to log. When the array has stopped nothing is written any more, least
                // of all over a log that its next start needs.
                let heads = std::mem::take(&mut self.logs.logs[member].next);
                heads.into_iter().for_each(|head| self.write_pages(head));
                continue;
            }
            if log.state != State::Idle {
                continue;
            }
            let round = self.heads.all[first].round.as_ref();
            let runner = round.map_or(0, |r| r.runner);
            match log.stale && !has(Plant::LogReusedEarly) {
                true => self.flush_for_log(member, runner),
                false => self.write_log(member, runner),
            }
        }
    }

    /// The device that was to replace the member that failed, if it has a log. Entries from before would outlive writes without parity, and repair
    /// their stripes by old blocks when the device has their parity.
    pub(super) fn log_to_empty(&self) -> Option<Incoming> {
        let incoming = self.members.incoming();
        let incoming = incoming.filter(|i| self.members.slot(i.role).is_none());
        incoming.filter(|_| matches!(self.policy, Policy::Ppl(_)))
    }

    /// Empties that log.
    pub(super) fn empty_log(&mut self, runner: usize) {
        let Some(incoming) = self.log_to_empty() else {
            return;
        };
        let Some(slot) = &self.slots.all[incoming.slot] else {
            return;
        };
        let sector = slot.log_sector;
        let base = incoming.role * self.logs.area_bytes;
        let region = &self.logs.region;
        region.write(base, &PplHeader::empty(self.logs.signature).encode());
        let data = Data::of(Buffer::new(region, base, PPL_HEADER_BYTES));
        let io = (incoming.slot, Op::Write, true);
        self.start(runner, Purpose::KickFlush, io, sector, data);
    }

    fn flush_for_log(&mut self, log: usize, runner: usize) {
        self.logs.logs[log].state = State::Flushing;
        let left = self.flush_all(runner, Purpose::LogFlush(log));
        self.logs.logs[log].left = left;
        if left == 0 {
            self.logs.logs[log].stale = false;
            self.write_log(log, runner);
        }
    }

    /// One of the flushes has ended.
    pub(super) fn log_flushed(&mut self, log: usize) {
        let log = &mut self.logs.logs[log];
        log.left -= 1;
        if log.left == 0 {
            log.stale = false;
            log.state = State::Idle;
        }
    }

    fn write_log(&mut self, member: usize, runner: usize) {
        let slots = self.members.logs(member);
        let places: Vec<(usize, u64, u64)> = slots
            .filter_map(|s| {
                let slot = self.slots.all[s].as_ref()?;
                Some((s, slot.log_sector, log_space_bytes(slot.log_sectors)))
            })
            .collect();
        let space = places.iter().map(|(_, _, bytes)| *bytes).min();
        let logs = &mut self.logs;
        let log = &mut logs.logs[member];
        let heads = &mut self.heads.all;
        log.next
            .sort_unstable_by_key(|head| heads[*head].record.stripe);
        log.generation += 1;
        let mut batch = Batch::new(
            logs.geometry,
            logs.signature,
            log.generation,
            member,
            space.unwrap_or(0).min(MOST_BYTES),
        );
        let base = member * logs.area_bytes;
        let mut at = PPL_HEADER_BYTES;
        let mut taken = 0;
        for head in &log.next {
            let stripe = heads[*head].record.stripe;
            let Some(round) = &mut heads[*head].round else {
                taken += 1;
                continue;
            };
            let (first, blocks) = round.plan.blocks();
            let parity = round.partial_parity.as_deref();
            if batch.add(stripe, first, blocks, parity).is_err() {
                break;
            }
            if let Some(parity) = parity {
                logs.region.write(base + at, parity);
                at += STRIPE_BYTES;
            }
            taken += 1;
        }
        log.unit = log.next.drain(..taken).collect();
        // One of this unit's: the others may be gone before it is written, if the array ends.
        let first = log
            .unit
            .first()
            .and_then(|head| heads[*head].round.as_ref());
        let runner = first.map_or(runner, |round| round.runner);
        log.state = State::Writing;
        log.left = places.len();
        logs.region.write(base, &batch.header().encode());
        let data = Buffer::new(&logs.region, base, at);
        for (slot, sector, _) in places {
            let io = (slot, Op::Write, true);
            let data = Data::of(data.clone());
            self.start(runner, Purpose::Log(member), io, sector, data);
        }
    }

    /// The log is on disk, or its member is kicked: then there is no parity either.
    pub(super) fn log_written(&mut self, member: usize) {
        let log = &mut self.logs.logs[member];
        log.left -= 1;
        if log.left == 0 {
            self.write_unit(member);
        }
    }

    fn write_unit(&mut self, member: usize) {
        let log = &mut self.logs.logs[member];
        let unit = std::mem::take(&mut log.unit);
        log.left = unit.len();
        log.state = match unit.is_empty() {
            // A kick took it.
            true => State::Idle,
            false => State::Stripes,
        };
        for head in unit {
            if let Some(round) = &mut self.heads.all[head].round {
                round.logged = true;
            }
            self.write_pages(head);
        }
    }
}
