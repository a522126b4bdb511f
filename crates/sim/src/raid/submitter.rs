//! A user of the array with a queue of its own: submits, polls, sleeps, and compares.

use super::oracle::Oracle;
use super::profile::{Losses, Profile};
use super::stamp;
use crate::log::Log;
use fastrand::Rng;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Limits, Op, Queue, QueueContext, Readiness, Region, Request,
    RequestFlags, Status,
};
use pvblk_sys::Poller;
use std::sync::Arc;
use std::time::Duration;

/// Most sectors of a request.
pub const MOST_SECTORS: u64 = 128;

/// What submitters share.
pub struct Common {
    /// The seed's dice.
    pub rng: Rng,
    /// What happened.
    pub log: Log,
    /// The seed's character.
    pub profile: Profile,
    /// What may be where.
    pub oracle: Oracle,
    /// Numbers of writes.
    pub writes: u64,
    /// Requests submitted.
    pub requests: u64,
    /// Two members failed: requests may fail.
    pub may_fail: bool,
    /// The array does without a member.
    pub degraded: bool,
    /// And no other device is becoming it.
    pub alone: bool,
    /// A write was acknowledged that this member doesn't have.
    pub stale: bool,
    /// Where the next sequential request begins.
    pub next: u64,
    /// While everything is read after a start: the sector to go on with.
    pub verify: Option<u64>,
    /// The read-back settles what was unsure, instead of only comparing.
    pub settles: bool,
}

/// A request in flight.
struct Flight {
    op: Op,
    fua: bool,
    sector: u64,
    sectors: u64,
    /// Number of the write.
    id: u64,
    /// When it was submitted.
    since: u64,
    floors: Vec<usize>,
    /// It reads back.
    verifies: bool,
    /// The array did without a member already when it was submitted.
    degraded: bool,
}

/// See the module's documentation.
pub struct Submitter {
    queue: Queue,
    sleeper: Poller,
    number: u64,
    memory: Arc<Region>,
    /// By tag.
    flights: Vec<Option<Flight>>,
    free: Vec<Box<Request>>,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
    asleep: bool,
    /// The last poll found nothing.
    idle: bool,
}

impl Submitter {
    /// Opens a queue.
    pub fn new(
        device: &Arc<dyn BlockDevice>,
        number: u32,
        depth: u32,
    ) -> Result<Submitter, String> {
        let mut context = QueueContext::new(depth);
        context.index = number;
        let queue = Queue::open(device, &context).map_err(|e| e.to_string())?;
        let sleeper = Poller::new().map_err(|e| e.to_string())?;
        let fd = queue.wait_fd().ok_or("nothing to wait for")?;
        sleeper.add(fd, 0, false).map_err(|e| e.to_string())?;
        let bytes = depth as usize * MOST_SECTORS as usize * 512;
        let memory = Region::anonymous(bytes).map_err(|e| e.to_string())?;
        let requests = (0..u64::from(depth)).map(|tag| Request::new(Op::Flush, 0, 0, tag));
        Ok(Submitter {
            queue,
            sleeper,
            number: u64::from(number),
            memory: Arc::new(memory),
            flights: (0..depth).map(|_| None).collect(),
            free: requests.collect(),
            batch: Vec::new(),
            done: Vec::new(),
            asleep: false,
            idle: false,
        })
    }

    /// Requests that aren't answered.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Does one thing; false if there is nothing to do. `fill`: it may begin something new.
    pub fn step(&mut self, c: &mut Common, fill: bool) -> Result<bool, String> {
        if fill && !self.free.is_empty() && c.rng.u8(..4) < 2 && self.submit(c) {
            return Ok(true);
        }
        if c.profile.restless > 0 && c.rng.u8(..4) == 0 {
            self.fidget(c);
        }
        if self.asleep {
            let mut events = Vec::new();
            let wait = self.sleeper.wait(&mut events, Some(Duration::ZERO));
            wait.map_err(|e| e.to_string())?;
            let spurious = fill && c.rng.u8(..32) == 0;
            if events.is_empty() && !spurious {
                return Ok(false);
            }
            if !events.is_empty() {
                self.queue.woken();
            }
            self.asleep = false;
            self.idle = false;
        }
        if self.idle {
            self.idle = false;
            // A submitter that has nothing in flight has nothing to wait for.
            self.asleep = matches!(self.queue.arm(), Readiness::Wait(_));
            return Ok(!self.asleep);
        }
        self.poll(c)
    }

    fn poll(&mut self, c: &mut Common) -> Result<bool, String> {
        self.queue.poll(&mut self.done);
        if self.done.is_empty() {
            self.idle = true;
            return Ok(self.in_flight() > 0);
        }
        for Completion { request, status } in std::mem::take(&mut self.done) {
            let tag = request.tag as usize;
            let flight = self.flights.get_mut(tag).and_then(Option::take);
            let flight = flight.ok_or("a request comes back twice")?;
            if (request.op, request.sector, request.sectors)
                != (flight.op, flight.sector, flight.sectors)
            {
                return Err(format!("a request comes back as another: {request:?}"));
            }
            self.answered(c, &flight, &request, status)?;
            self.free.push(request);
        }
        Ok(true)
    }

    fn answered(
        &self,
        c: &mut Common,
        flight: &Flight,
        request: &Request,
        status: Status,
    ) -> Result<(), String> {
        let (sector, sectors) = (flight.sector, flight.sectors);
        if status != Status::Ok {
            c.log
                .add("# fails: # sectors at #", [self.number, sectors, sector]);
            if flight.op.is_write() {
                c.oracle.failed(sector, sectors);
            }
            return match c.may_fail && status == Status::IoError {
                true => Ok(()),
                false => Err(format!(
                    "{:?} of {sectors} sectors at {sector} fails with {status:?}",
                    flight.op
                )),
            };
        }
        match flight.op {
            Op::Read => {
                c.log
                    .add("# has read # sectors at #", [self.number, sectors, sector]);
                let mut at = 0;
                let mut bytes = [0; 512];
                for buffer in &request.buffers {
                    for skip in (0..buffer.len()).step_by(512) {
                        buffer.read(skip, &mut bytes);
                        let s = sector + at as u64;
                        match flight.verifies && c.settles {
                            true => c.oracle.settle(s, &bytes)?,
                            false => c.oracle.check_read(s, flight.floors[at], &bytes)?,
                        }
                        at += 1;
                    }
                }
            }
            Op::Write => {
                c.log.add(
                    "# has written # sectors at # (write #)",
                    [self.number, sectors, sector, flight.id],
                );
                // It may have been rebuilt meanwhile.
                c.stale |= flight.degraded && c.degraded;
                c.oracle
                    .acknowledged(sector, sectors, flight.id, flight.fua);
            }
            Op::WriteZeroes => {
                c.log.add(
                    "# has zeroed # sectors at #",
                    [self.number, sectors, sector],
                );
                c.stale |= flight.degraded && c.degraded;
                c.oracle
                    .acknowledged(sector, sectors, stamp::ZEROS, flight.fua);
            }
            Op::Discard => {
                c.log.add(
                    "# has discarded # sectors at #",
                    [self.number, sectors, sector],
                );
                c.discarded(flight);
            }
            Op::Flush => {
                c.log.add("# has flushed", [self.number]);
                c.oracle.flushed(flight.since);
            }
        }
        Ok(())
    }

    /// Submits one to three requests; false if none can be.
    fn submit(&mut self, c: &mut Common) -> bool {
        for _ in 0..1 + c.rng.usize(..3) {
            let Some(request) = self.free.pop() else {
                break;
            };
            match self.fill(c, request) {
                Ok(request) => self.batch.push(request),
                Err(request) => {
                    self.free.push(request);
                    break;
                }
            }
        }
        let any = !self.batch.is_empty();
        c.requests += self.batch.len() as u64;
        self.queue.submit(&mut self.batch);
        // Whoever submits polls before it sleeps.
        if any {
            (self.asleep, self.idle) = (false, false);
        }
        any
    }

    /// Makes a request; gives it back if none can be made now.
    fn fill(&mut self, c: &mut Common, mut r: Box<Request>) -> Result<Box<Request>, Box<Request>> {
        let tag = r.tag;
        let end = c.profile.shape.sectors();
        let (op, fua, sector, sectors) = match c.verify {
            Some(from) if from >= end => return Err(r),
            Some(from) => {
                let sectors = MOST_SECTORS.min(end - from);
                c.verify = Some(from + sectors);
                (Op::Read, false, from, sectors)
            }
            None => {
                let m = c.profile.mix;
                let mut at = c.rng.u32(..m.reads + m.writes + m.flushes + m.fua);
                let mut is = |share: u32| match at.checked_sub(share) {
                    Some(rest) => {
                        at = rest;
                        false
                    }
                    None => true,
                };
                if is(m.flushes) {
                    (Op::Flush, false, 0, 0)
                } else {
                    let (sector, sectors) = c.place();
                    match (is(m.reads), is(m.writes)) {
                        (true, _) => (Op::Read, false, sector, sectors),
                        (_, plain) => (Op::Write, !plain, sector, sectors),
                    }
                }
            }
        };
        let (op, sector, sectors) = match op {
            Op::Write => c.without_data(sector, sectors, self.queue.limits()),
            _ => (op, sector, sectors),
        };
        let fua = fua && op != Op::Discard;
        if op.is_write() && !c.oracle.is_free(sector, sectors) {
            return Err(r);
        }
        let mut flags = match fua {
            true => RequestFlags::FUA,
            false => RequestFlags::empty(),
        };
        if c.profile.stable && op == Op::Write {
            flags |= RequestFlags::STABLE_BUFFERS;
        }
        r.reset(op, flags, sector, sectors, tag);
        if op == Op::WriteZeroes && c.rng.bool() {
            r.flags |= RequestFlags::NO_UNMAP;
        }
        r.buffers = match op {
            Op::WriteZeroes | Op::Discard => Vec::new(),
            _ => pieces(&self.memory, tag * MOST_SECTORS, sectors, &mut c.rng),
        };
        let mut flight = Flight {
            op,
            fua,
            sector,
            sectors,
            id: 0,
            since: c.oracle.now(),
            floors: Vec::new(),
            verifies: c.verify.is_some(),
            degraded: c.degraded,
        };
        match op {
            Op::Read => {
                c.log
                    .add("# reads # sectors at #", [self.number, sectors, sector]);
                flight.floors = c.oracle.floors(sector, sectors);
            }
            Op::Write => {
                c.writes += 1;
                flight.id = c.writes;
                let all = [self.number, sectors, sector, flight.id];
                match fua {
                    true => c.log.add("# writes through # sectors at # (write #)", all),
                    false => c.log.add("# writes # sectors at # (write #)", all),
                }
                c.oracle.submitted(sector, sectors, flight.id, c.alone);
                let mut at = sector;
                for buffer in &r.buffers {
                    for skip in (0..buffer.len()).step_by(512) {
                        buffer.write(skip, &stamp::make(flight.id, at, false));
                        at += 1;
                    }
                }
            }
            Op::WriteZeroes | Op::Discard => {
                c.log
                    .add("# zeroes # sectors at #", [self.number, sectors, sector]);
                c.oracle.submitted(sector, sectors, stamp::ZEROS, c.alone);
            }
            Op::Flush => c.log.add("# flushes", [self.number]),
        }
        self.flights[tag as usize] = Some(flight);
        Ok(r)
    }

    /// Changes the data of a write in flight: a guest may do that, and gets one or the other.
    fn fidget(&mut self, c: &mut Common) {
        let tag = c.rng.usize(..self.flights.len());
        let Some(flight) = &self.flights[tag] else {
            return;
        };
        if flight.op != Op::Write || c.rng.u32(..8) >= c.profile.restless {
            return;
        }
        let at = c.rng.u64(..flight.sectors);
        let bytes = stamp::make(flight.id, flight.sector + at, true);
        let place = (tag as u64 * MOST_SECTORS + at) as usize * 512;
        self.memory.write(place, &bytes);
    }
}

/// Memory from a sector on, in pieces: a request's.
pub(crate) fn pieces(memory: &Arc<Region>, first: u64, sectors: u64, rng: &mut Rng) -> Vec<Buffer> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < sectors as usize {
        let rest = sectors as usize - at;
        let some = match rng.u8(..4) {
            0 => rng.usize(1..=rest),
            _ => rest,
        };
        let place = (first as usize + at) * 512;
        parts.extend(Buffer::new(memory, place, some * 512));
        at += some;
    }
    parts
}

impl Common {
    /// A write may become one without data: as long as it is, or much longer.
    fn without_data(&mut self, sector: u64, sectors: u64, limits: &Limits) -> (Op, u64, u64) {
        // Without these there are no dice to throw: seeds do what they did.
        if self.profile.zeroes == 0 || self.rng.u32(..8) >= self.profile.zeroes {
            return (Op::Write, sector, sectors);
        }
        let end = self.profile.shape.sectors();
        let sectors = match self.rng.u8(..4) {
            0 => self.rng.u64(1..=end - sector),
            _ => sectors,
        };
        match limits.discard_granularity_bytes > 0 && self.rng.u8(..3) == 0 {
            true => (Op::Discard, sector, sectors),
            false => (Op::WriteZeroes, sector, sectors),
        }
    }

    /// Whole rows are zeros now, if no member was missing; all else is as it was.
    fn discarded(&mut self, flight: &Flight) {
        let (sector, end) = (flight.sector, flight.sector + flight.sectors);
        let row = (self.profile.shape.members as u64 - 1) * self.profile.shape.chunk;
        let first = sector.next_multiple_of(row).min(end);
        let last = (end - end % row).max(first);
        self.oracle.untouched(sector, first - sector);
        self.oracle.untouched(last, end - last);
        let surely = self.profile.losses == Losses::None && !flight.degraded && !self.degraded;
        match surely {
            true => self
                .oracle
                .acknowledged(first, last - first, stamp::ZEROS, false),
            false => self.oracle.failed(first, last - first),
        }
    }

    /// Where a request is.
    fn place(&mut self) -> (u64, u64) {
        let (p, rng) = (&self.profile, &mut self.rng);
        let end = p.shape.sectors();
        let mut sectors = rng.u64(1..=p.longest);
        let mut sector = match (rng.u32(..8) < p.sequential, p.hot) {
            (true, _) => self.next % end,
            (false, 1..) if rng.u8(..4) > 0 => rng.u64(..p.hot.min(end)),
            _ => rng.u64(..end),
        };
        if rng.u32(..8) < p.aligned {
            sector -= sector % 8;
            sectors = sectors.next_multiple_of(8);
        }
        sectors = sectors.min(end - sector).min(MOST_SECTORS);
        self.next = sector + sectors;
        (sector, sectors)
    }
}
