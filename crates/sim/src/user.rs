//! [`User`]: a user of the device under test with a queue of its own. It submits, polls, sleeps, and checks
//! every completion.

use crate::bugs::Bug;
use crate::checker::Flush;
use crate::stamp::{self, Bytes, SECTOR_BYTES, ZEROS};
use crate::workload::Workload;
use pvblk_block::{
    BlockDevice, Buffer, BufferSource, Clock, Completion, MergeCounts, Op, Queue, QueueContext,
    Readiness, Region, Request, RequestFlags, Status,
};
use pvblk_sys::Poller;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request in sent.
struct InFlight {
    op: Op,
    fua: bool,
    sector: u64,
    sectors: u64,
    /// Number of the request.
    id: u64,
    /// Time of the submission, and of the last loss that its user had been told of.
    at: Flush,
    /// The array was degraded already when the request was submitted.
    degraded: bool,
}

/// The part of a user's memory that belongs to a request.
struct RequestMemory {
    region: Arc<Region>,
    start: usize,
}

/// A user of the device under test.
pub struct User {
    queue: Queue,
    merges: Arc<MergeCounts>,
    sleeper: Poller,
    number: u64,
    memory: Arc<Region>,
    /// The device's memory for all requests, if it has any.
    native: Option<Buffer>,
    /// Requests in flight by the low byte of their tags.
    in_flight: Vec<Option<InFlight>>,
    free: Vec<(usize, Box<Request>)>,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
    /// The deadline of its sleep, if it sleeps.
    asleep: Option<Option<Instant>>,
    /// The last poll found no completion.
    idle: bool,
    /// Time at which the user was last told of a loss, or opened.
    told: u64,
}

impl User {
    pub fn open(
        device: &Arc<dyn BlockDevice>,
        number: usize,
        w: &mut Workload,
    ) -> Result<User, String> {
        let depth = w.load.depths[number];
        let mut context = QueueContext::new(depth);
        context.index = number as u32;
        let queue = Queue::open(device, &context).map_err(|e| e.to_string())?;
        let bytes = (depth as usize * w.load.slot_bytes()).next_multiple_of(4096);
        let native = match (w.load.foreign, device.buffer_source()) {
            (None, _) => None,
            (Some(_), source) => {
                let source = source.ok_or("the device has no memory")?;
                Some(source.allocate(bytes).ok_or("no memory for buffers")?)
            }
        };
        let sleeper = Poller::new().map_err(|e| e.to_string())?;
        let fd = queue.wait_fd().ok_or("nothing to wait for")?;
        sleeper.add(fd, 0, false).map_err(|e| e.to_string())?;
        let memory = Region::anonymous(bytes).map_err(|e| e.to_string())?;
        let requests = (0..depth as usize).map(|slot| (slot, Request::new(Op::Flush, 0, 0, 0)));
        Ok(User {
            queue,
            merges: context.merges,
            sleeper,
            number: number as u64,
            memory: Arc::new(memory),
            native,
            in_flight: (0..depth).map(|_| None).collect(),
            free: requests.collect(),
            batch: Vec::new(),
            done: Vec::new(),
            asleep: None,
            idle: false,
            told: w.checker.now(),
        })
    }

    /// Users for all of the load's depths.
    pub fn open_all(device: &Arc<dyn BlockDevice>, w: &mut Workload) -> Result<Vec<User>, String> {
        let all = 0..w.load.depths.len();
        all.map(|n| User::open(device, n, w)).collect()
    }

    /// Gives the device's memory back; no request may be in sent.
    pub fn close(mut self, source: &dyn BufferSource) {
        self.free.clear();
        if let Some(native) = self.native.take() {
            source.free(native);
        }
    }

    /// Number of requests in sent.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Number of its requests that were merged into others.
    pub fn merged(&self) -> u64 {
        self.merges.of(Op::Read) + self.merges.of(Op::Write)
    }

    /// The time at which the user wakes by itself, if it sleeps.
    pub fn deadline(&self) -> Option<Instant> {
        self.asleep.flatten()
    }

    /// Does one thing; false if there is nothing to do. `fill`: it may begin new requests.
    pub fn step(&mut self, w: &mut Workload, fill: bool) -> Result<bool, String> {
        // A user that isn't eager submits only when it is awake, or when only its own requests
        // could wake it.
        let up = w.load.eager || self.asleep.is_none() || self.in_flight() == 0;
        if fill && up && !self.free.is_empty() && w.rng.u8(..4) < 2 && self.submit(w) {
            return Ok(true);
        }
        if w.load.changing > 0 && w.rng.u8(..4) == 0 {
            self.change_data(w);
        }
        if let Some(until) = self.asleep {
            let mut events = Vec::new();
            let wait = self.sleeper.wait(&mut events, Some(Duration::ZERO));
            wait.map_err(|e| e.to_string())?;
            let spurious = fill && w.load.eager && w.rng.u8(..32) == 0;
            let due = until.is_some_and(|until| until <= w.log.clock.now());
            if events.is_empty() && !spurious && !due {
                return Ok(false);
            }
            if !events.is_empty() {
                self.queue.woken();
            }
            self.asleep = None;
            self.idle = false;
        }
        if self.idle {
            self.idle = false;
            if let Readiness::Wait(until) = self.queue.arm() {
                self.asleep = Some(until);
            }
            return Ok(self.asleep.is_none());
        }
        self.poll(w)
    }

    fn poll(&mut self, w: &mut Workload) -> Result<bool, String> {
        self.queue.poll(&mut self.done);
        if self.done.is_empty() {
            self.idle = true;
            return Ok(self.in_flight() > 0);
        }
        let mut told = false;
        for Completion { request, status } in std::mem::take(&mut self.done) {
            let r = &*request;
            let slot = (r.tag & 0xff) as usize;
            let sent = self.in_flight.get_mut(slot);
            let sent = sent.and_then(|f| f.take_if(|f| f.id == r.tag >> 8));
            let Some(sent) = sent else {
                return Err(format!("request {} comes back twice", r.tag >> 8));
            };
            if (r.op, r.sector, r.sectors) != (sent.op, sent.sector, sent.sectors) {
                return Err(format!("a request comes back as another: {r:?}"));
            }
            told |= self.answered(w, &sent, r, status)?;
            if r.op == Op::Write {
                // The memory is the user's again: a later reader of it finds poison.
                poison(&r.buffers);
            }
            self.free.push((slot, request));
        }
        if told {
            // Completions that came with the report of the loss were made before it.
            self.told = w.checker.now();
        }
        Ok(true)
    }

    /// Checks a completion; true if it told of a loss.
    fn answered(
        &self,
        w: &mut Workload,
        sent: &InFlight,
        request: &Request,
        status: Status,
    ) -> Result<bool, String> {
        let (sector, sectors) = (sent.sector, sent.sectors);
        let place = [self.number, sectors, sector, sent.id];
        if status != Status::Ok {
            w.log.add("# fails: # sectors at # (#)", place);
            match sent.op {
                Op::Read => w.checker.read_done(sent.at.since, &[])?,
                Op::Flush => {}
                _ => w.checker.write_failed(sector, sectors),
            }
            if w.may_fail && status == Status::IoError {
                return Ok(false);
            }
            if sent.op == Op::Flush && status == Status::IoError {
                return w.checker.flush_failed(sent.at).map(|()| true);
            }
            return Err(format!(
                "{:?} of {sectors} sectors at {sector} fails with {status:?}",
                sent.op
            ));
        }
        match sent.op {
            Op::Read => {
                w.log.add("# has read # sectors at # (#)", place);
                let found = contents(&request.buffers, sector);
                w.checker.read_done(sent.at.since, &found)?;
            }
            Op::Flush => {
                w.log.add("# has flushed", [self.number]);
                w.checker.flush_done(sent.at);
            }
            op => {
                w.log.add("# has written # sectors at # (#)", place);
                if op == Op::Discard && w.array.row > 0 {
                    w.discarded(sector, sectors, sent.degraded);
                } else {
                    // The member may have been recovered meanwhile.
                    w.array.stale |= sent.degraded && w.array.degraded;
                    w.checker.write_acked(sector, sectors, sent.fua);
                }
            }
        }
        Ok(false)
    }

    /// Submits some requests; false if none can be made.
    fn submit(&mut self, w: &mut Workload) -> bool {
        for _ in 0..1 + w.rng.usize(..w.load.batch) {
            let Some((slot, request)) = self.free.pop() else {
                break;
            };
            match self.fill(w, slot, request) {
                Ok(request) => self.batch.push(request),
                Err(request) => {
                    self.free.push((slot, request));
                    break;
                }
            }
        }
        let any = !self.batch.is_empty();
        self.queue.submit(&mut self.batch);
        // A user that submits polls before it sleeps.
        if any {
            (self.asleep, self.idle) = (None, false);
        }
        any
    }

    /// Makes a request; gives it back if none can be made now.
    fn fill(
        &mut self,
        w: &mut Workload,
        slot: usize,
        mut r: Box<Request>,
    ) -> Result<Box<Request>, Box<Request>> {
        let Some((op, fua, sector, sectors)) = w.choose() else {
            return Err(r);
        };
        let discards = self.queue.limits().discard_granularity_bytes > 0;
        let (op, sectors) = match op {
            Op::Write => w.without_data(sector, sectors, discards),
            _ => (op, sectors),
        };
        let fua = fua && op != Op::Discard;
        if op.is_write() && !w.checker.is_free(sector, sectors) {
            return Err(r);
        }
        w.log.requests += 1;
        let id = w.log.requests;
        let mut flags = RequestFlags::empty();
        flags.set(RequestFlags::FUA, fua && w.bug != Some(Bug::FuaOnlyCached));
        flags.set(
            RequestFlags::STABLE_BUFFERS,
            w.load.stable && op == Op::Write,
        );
        if op == Op::WriteZeroes && w.load.blank > 0 && w.rng.bool() {
            flags |= RequestFlags::NO_UNMAP;
        }
        r.reset(op, flags, sector, sectors, id << 8 | slot as u64);
        r.buffers.clear();
        if op.has_data() {
            self.choose_buffers(w, slot, sectors, &mut r.buffers);
        }
        let place = [self.number, sectors, sector, id];
        let mut at = Flush::default();
        match op {
            Op::Read => {
                w.log.add("# reads # sectors at # (#)", place);
                poison(&r.buffers);
                at.since = w.checker.read_submitted();
            }
            Op::Flush => {
                w.log.add("# flushes", [self.number]);
                at = w.checker.flush_submitted(self.told);
            }
            Op::Write => {
                let what = match fua {
                    true => "# writes through # sectors at # (#)",
                    false => "# writes # sectors at # (#)",
                };
                w.log.add(what, place);
                put(&r.buffers, sector, id);
                let whole = !w.array.alone;
                w.checker.write_submitted(sector, sectors, id, whole);
            }
            _ => {
                w.log.add("# zeroes # sectors at # (#)", place);
                let whole = !w.array.alone;
                w.checker.write_submitted(sector, sectors, ZEROS, whole);
            }
        }
        self.in_flight[slot] = Some(InFlight {
            op,
            fua,
            sector,
            sectors,
            id,
            at,
            degraded: w.array.degraded,
        });
        Ok(r)
    }

    /// Chooses memory for a request: the device's or not, aligned to a sector or not, in one segment or in
    /// many.
    fn choose_buffers(&self, w: &mut Workload, slot: usize, sectors: u64, out: &mut Vec<Buffer>) {
        let mut place = RequestMemory {
            region: Arc::clone(&self.memory),
            start: slot * w.load.slot_bytes(),
        };
        let mut single = false;
        if let Some(foreign) = w.load.foreign {
            if let Some(native) = &self.native
                && w.rng.u32(..8) >= foreign
            {
                place.start += native.offset();
                place.region = Arc::clone(native.region());
            }
            place.start += match w.rng.u8(..16) {
                0 => 8,
                1..4 => SECTOR_BYTES * w.rng.usize(..=(w.load.most + 1 - sectors) as usize),
                _ => 0,
            };
            single = w.rng.u8(..4) == 0;
        }
        let mut left = sectors as usize;
        while left > 0 {
            let some = match single {
                true => 1,
                false if w.rng.u8(..4) == 0 => w.rng.usize(1..=left),
                false => left,
            };
            let bytes = some * SECTOR_BYTES;
            out.extend(Buffer::new(&place.region, place.start, bytes));
            place.start += bytes;
            left -= some;
        }
    }

    /// Changes the data of a write in flight: a guest may do that, and gets the old or the new
    /// data.
    fn change_data(&mut self, w: &mut Workload) {
        let slot = w.rng.usize(..self.in_flight.len());
        let Some(sent) = &self.in_flight[slot] else {
            return;
        };
        if sent.op != Op::Write || w.rng.u32(..8) >= w.load.changing {
            return;
        }
        let at = w.rng.u64(..sent.sectors);
        let bytes = stamp::make(sent.id, sent.sector + at, true);
        let place = slot * w.load.slot_bytes() + at as usize * SECTOR_BYTES;
        self.memory.write(place, &bytes);
    }
}

/// The contents of the sectors in these buffers, from `sector` on.
pub fn contents(buffers: &[Buffer], sector: u64) -> Vec<(u64, Bytes)> {
    let mut found = Vec::new();
    let mut bytes = [0; SECTOR_BYTES];
    for buffer in buffers {
        for skip in (0..buffer.len()).step_by(SECTOR_BYTES) {
            buffer.read(skip, &mut bytes);
            found.push((sector + found.len() as u64, bytes));
        }
    }
    found
}

/// Puts the stamps of request `id` into these buffers.
pub fn put(buffers: &[Buffer], sector: u64, id: u64) {
    let mut at = sector;
    for buffer in buffers {
        for skip in (0..buffer.len()).step_by(SECTOR_BYTES) {
            buffer.write(skip, &stamp::make(id, at, false));
            at += 1;
        }
    }
}

/// Fills memory with bytes that must be neither stored nor believed.
fn poison(buffers: &[Buffer]) {
    const PAGE: [u8; 4096] = [stamp::POISON; 4096];
    for buffer in buffers {
        for skip in (0..buffer.len()).step_by(PAGE.len()) {
            buffer.write(skip, &PAGE[..PAGE.len().min(buffer.len() - skip)]);
        }
    }
}
