//! One user of the front end: a queue, what it has in flight, and what it checks of every completion.

use crate::checker::{Checker, Flush};
use crate::log::Log;
use crate::profile::Profile;
use crate::stamp;
use fastrand::Rng;
use pvblk_block::{
    BlockDevice, Buffer, BufferSource, Completion, Op, Queue, QueueContext, Readiness, Region,
    Request, RequestFlags, Status,
};
use pvblk_sys::{PAGE_SIZE, Poller};
use std::sync::Arc;
use std::time::Duration;

/// Memory of each slot: room for the longest request, also off a sector's boundary.
const SLOT_BYTES: usize = 2 * PAGE_SIZE;
/// Most sectors of a request.
pub const MOST_SECTORS: u64 = 15;
/// Submitters at once, and slots of each.
const MOST_SLOTS: (usize, usize) = (3, 16);

thread_local!(static FOREIGN: Arc<Region> = {
    let bytes = MOST_SLOTS.0 * MOST_SLOTS.1 * SLOT_BYTES;
    Arc::new(Region::anonymous(bytes).expect("memory"))
});

/// What the workload, whoever runs it, has in common.
pub struct Workload {
    /// All chance.
    pub rng: Rng,
    /// The oracle.
    pub checker: Checker,
    /// What happened.
    pub log: Log,
    /// The seed's character.
    pub profile: Profile,
    /// Requests so far; numbers them.
    pub requests: u64,
}

#[derive(Clone, Copy, Debug)]
enum Pending {
    Read,
    Write,
    Flush(Flush),
}

#[derive(Default)]
struct Slot {
    /// Tag and kind of what is in flight.
    pending: Option<(u64, Pending)>,
    /// Kept for its next use.
    spare: Option<Box<Request>>,
}

/// See the module's documentation.
pub struct Submitter {
    number: usize,
    queue: Queue,
    slots: Vec<Slot>,
    /// The front end's memory for all slots.
    native: Option<Buffer>,
    asleep: bool,
    /// When it was last told of a loss, or opened.
    told: u64,
    /// Where the last request ended.
    last_end: u64,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
    sleeper: Poller,
}

impl Submitter {
    /// Opens a queue with memory of its own.
    pub fn open(
        number: usize,
        device: &Arc<dyn BlockDevice>,
        w: &mut Workload,
    ) -> Result<Submitter, String> {
        let depth = w.profile.depths[number];
        let mut context = QueueContext::new(depth);
        context.index = number as u32;
        let queue = Queue::open(device, &context).map_err(|e| e.to_string())?;
        let source = device
            .buffer_source()
            .ok_or("the front end has no memory")?;
        let native = source.allocate(depth as usize * SLOT_BYTES);
        let sleeper = Poller::new().map_err(|e| e.to_string())?;
        let fd = queue.wait_fd().ok_or("nothing to wait for")?;
        sleeper.add(fd, 0, false).map_err(|e| e.to_string())?;
        Ok(Submitter {
            number,
            queue,
            slots: (0..depth).map(|_| Slot::default()).collect(),
            native: Some(native.ok_or("no memory for buffers")?),
            asleep: false,
            told: w.checker.now(),
            last_end: 0,
            batch: Vec::new(),
            done: Vec::new(),
            sleeper,
        })
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Gives its memory back; nothing is in flight.
    pub fn close(mut self, source: &dyn BufferSource) {
        self.slots.clear();
        if let Some(native) = self.native.take() {
            source.free(native);
        }
    }

    /// Does what its thread would do next; false if that thread would sleep on.
    pub fn step(&mut self, w: &mut Workload, may_submit: bool) -> Result<bool, String> {
        let may_submit = may_submit && self.slots.iter().any(|s| s.pending.is_none());
        if self.asleep {
            let mut events = Vec::new();
            self.sleeper
                .wait(&mut events, Some(Duration::ZERO))
                .map_err(|e| e.to_string())?;
            if !events.is_empty() {
                w.log.add("submitter # is woken", [self.number as u64]);
                self.asleep = false;
                self.queue.woken();
                return Ok(true);
            }
            // Only its own user wakes it.
            let comes = self.in_flight() == 0 || (w.profile.eager && w.rng.u8(..8) == 0);
            if !may_submit || !comes {
                return Ok(false);
            }
            self.asleep = false;
        }
        if may_submit && w.rng.u8(..3) > 0 {
            self.submit(w);
        } else if self.poll(w)? == 0 {
            let ready = self.queue.arm();
            self.asleep = ready != Readiness::Ready;
            w.log.add(
                "submitter # sleeps: #",
                [self.number as u64, u64::from(self.asleep)],
            );
        }
        Ok(true)
    }

    /// Submits a batch of what the mix says.
    fn submit(&mut self, w: &mut Workload) {
        let most = w.rng.usize(1..=self.slots.len());
        let mut flushed = false;
        for slot in 0..self.slots.len() {
            if self.batch.len() == most || self.slots[slot].pending.is_some() {
                continue;
            }
            let m = w.profile.mix;
            let mut at = w
                .rng
                .u32(..m.reads + m.writes + m.flushes + m.fua + m.discards);
            let mut is = |share: u32| match at.checked_sub(share) {
                None => true,
                Some(rest) => {
                    at = rest;
                    false
                }
            };
            let (op, flags) = if is(m.reads) {
                (Op::Read, RequestFlags::empty())
            } else if is(m.writes) {
                (Op::Write, RequestFlags::empty())
            } else if is(m.fua) {
                (Op::Write, RequestFlags::FUA)
            } else if is(m.discards) {
                (Op::Discard, RequestFlags::empty())
            } else if !flushed {
                flushed = true;
                (Op::Flush, RequestFlags::empty())
            } else {
                continue;
            };
            self.prepare(w, slot, op, flags, None);
        }
        self.send(w);
    }

    /// Submits reads of `from..` until its slots are full or the disk ends; returns where it got to.
    pub fn read_back(&mut self, w: &mut Workload, mut from: u64) -> u64 {
        for slot in 0..self.slots.len() {
            let n = (w.profile.sectors - from).min(MOST_SECTORS);
            if n > 0 {
                self.prepare(w, slot, Op::Read, RequestFlags::empty(), Some((from, n)));
                from += n;
            }
        }
        self.send(w);
        from
    }

    fn send(&mut self, w: &mut Workload) {
        w.log.add(
            "submitter # submits #",
            [self.number as u64, self.batch.len() as u64],
        );
        self.asleep = false;
        self.queue.submit(&mut self.batch);
    }

    /// Where a request goes; nothing where it would meet a write in flight.
    fn choose(&mut self, w: &mut Workload, op: Op) -> Option<(u64, u64)> {
        let all = w.profile.sectors;
        let follows = w.rng.u32(..8) < w.profile.sequential && self.last_end < all;
        let first = if follows {
            self.last_end
        } else {
            w.rng.u64(..all)
        };
        let most = w.rng.u64(1..=w.profile.longest).min(all - first);
        let free = |&s: &u64| op == Op::Read || !w.checker.is_being_written(s);
        let sectors = (first..first + most).take_while(free).count() as u64;
        self.last_end = first + sectors;
        (sectors > 0).then_some((first, sectors))
    }

    fn prepare(
        &mut self,
        w: &mut Workload,
        at: usize,
        op: Op,
        flags: RequestFlags,
        place: Option<(u64, u64)>,
    ) {
        let place = match (op, place) {
            (Op::Flush, _) => Some((0, 0)),
            (_, None) => self.choose(w, op),
            (_, given) => given,
        };
        let Some((sector, sectors)) = place else {
            return;
        };
        w.requests += 1;
        let id = w.requests;
        let tag = id << 8 | at as u64;
        let slot = &mut self.slots[at];
        let spare = slot.spare.take();
        let mut request = spare.unwrap_or_else(|| Request::new(op, 0, 0, 0));
        request.reset(op, flags, sector, sectors, tag);
        request.buffers.clear();
        if op.has_data() {
            let native = self.native.as_ref().map(|n| (n.region(), n.offset()));
            choose_buffers(w, native, self.number, at, sectors, &mut request.buffers);
        }
        let what = match op {
            Op::Read => "  read # of # sectors at #",
            Op::Write if flags.is_empty() => "  write # of # sectors at #",
            Op::Write => "  FUA write # of # sectors at #",
            Op::Flush => "  flush #",
            _ => "  discard # of # sectors at #",
        };
        w.log.add(what, [id, sectors, sector]);
        let pending = match op {
            Op::Flush => Pending::Flush(w.checker.flush_submitted(self.told)),
            Op::Read => {
                for i in 0..sectors {
                    stamp::put(&request.buffers, i as usize, stamp::poison(sector + i));
                }
                w.checker.read_submitted(id, sector, sectors);
                Pending::Read
            }
            _ => {
                for i in 0..sectors {
                    let mut data = stamp::ZEROS;
                    if op == Op::Write {
                        data = stamp::stamp(id, sector + i);
                        stamp::put(&request.buffers, i as usize, data);
                    }
                    w.checker.write_submitted(sector + i, data);
                }
                Pending::Write
            }
        };
        slot.pending = Some((tag, pending));
        self.batch.push(request);
    }

    fn poll(&mut self, w: &mut Workload) -> Result<usize, String> {
        let n = self.queue.poll(&mut self.done);
        let mut failed = false;
        let mut done = std::mem::take(&mut self.done);
        for Completion { request, status } in done.drain(..) {
            failed |= self.completed(w, request, status)?;
        }
        self.done = done;
        if failed {
            // Whatever came with the news isn't news.
            self.told = w.checker.now();
        }
        Ok(n)
    }

    /// Checks a completion; true if it told of a loss.
    fn completed(
        &mut self,
        w: &mut Workload,
        request: Box<Request>,
        status: Status,
    ) -> Result<bool, String> {
        let (tag, r) = (request.tag, &*request);
        let id = tag >> 8;
        let slot = self.slots.get_mut((tag & 0xff) as usize);
        let Some((slot, (_, pending))) = slot.and_then(|s| {
            let pending = s.pending.take_if(|p| p.0 == tag)?;
            Some((s, pending))
        }) else {
            return Err(format!("request {id} completes, and isn't in flight"));
        };
        w.log.add(
            "  # of submitter # is done, ok: #",
            [id, self.number as u64, u64::from(status == Status::Ok)],
        );
        let told = match pending {
            Pending::Flush(flush) if status == Status::IoError => {
                w.checker.flush_failed(flush)?;
                true
            }
            _ if status != Status::Ok => {
                return Err(format!("request {id} ({:?}) ends with {status:?}", r.op));
            }
            Pending::Flush(flush) => {
                w.checker.flush_done(flush);
                false
            }
            Pending::Read => {
                let found: Vec<_> = (0..r.sectors as usize)
                    .map(|i| stamp::get(&r.buffers, i))
                    .collect();
                w.checker.read_done(id, &found)?;
                false
            }
            Pending::Write => {
                let durable = r.flags.contains(RequestFlags::FUA);
                for i in 0..r.sectors {
                    w.checker.write_acked(r.sector + i, durable);
                    if r.op == Op::Write {
                        // The memory is ours again: whoever still reads it finds this.
                        stamp::put(&r.buffers, i as usize, stamp::poison(r.sector + i));
                    }
                }
                false
            }
        };
        slot.spare = Some(request);
        Ok(told)
    }
}

/// Memory for `sectors` sectors: the front end's or not, on a sector's boundary or not, in one piece or in many.
fn choose_buffers(
    w: &mut Workload,
    native: Option<(&Arc<Region>, usize)>,
    submitter: usize,
    slot: usize,
    sectors: u64,
    out: &mut Vec<Buffer>,
) {
    let rng = &mut w.rng;
    let foreign = rng.u32(..8) < w.profile.foreign;
    let (region, start) = match native {
        Some((region, start)) if !foreign => (Arc::clone(region), start + slot * SLOT_BYTES),
        _ => {
            let at = (submitter * MOST_SLOTS.1 + slot) * SLOT_BYTES;
            (FOREIGN.with(Arc::clone), at)
        }
    };
    let skip = match rng.u8(..16) {
        0 => 8,
        1..4 => 512 * rng.usize(..=(MOST_SECTORS + 1 - sectors) as usize),
        _ => 0,
    };
    let pieces = rng.u8(..4);
    let mut at = start + skip;
    let mut left = sectors as usize;
    while left > 0 {
        let n = match pieces {
            0 => 1,
            1 => rng.usize(1..=left),
            _ => left,
        };
        out.extend(Buffer::new(&region, at, n * stamp::SECTOR_BYTES));
        at += n * stamp::SECTOR_BYTES;
        left -= n;
    }
}
