//! The cache as a state machine: told requests, ends of I/O and the time, it returns I/O to start and requests that are done.
//!
//! Each part of the state belongs to one machine, whose fields are private to its module. Machines don't know each other, but for two directions: memory asks
//! write-back whether a frame is clean, and write-back starts its writes at the device, past the ranges that are held. The rest is routed here.
//!
//! ```text
//!              ┌──────────── Core: routes ───────────────┐
//!   Requests   Reads      Memory ──▶ WriteBack ──▶ DeviceIo
//!   Waiters    (plans)    (frames)   (dirty, epochs)   ▲
//!   Ranges ◀─────────────────────────────┘ asks        └── reads, and requests passed on
//! ```
//!
//! A request that isn't a plain hit goes from page to page, and stops where it has to wait:
//!
//! ```text
//! go on ──▶ page is there: copy, next ──▶ … ──▶ done
//!  ▲         │ being read or written: in the frame's chain of waiters
//!  │         │ no frame: parked with its allocation; its owner's next turn goes on
//!  └─────────┤ range held by a discard: in that range's list
//!            └ too much dirty: parked
//! ```
//!
//! docs/decisions/0024-cache-machines.md says what each machine guards.

mod check;
mod device_io;
mod memory;
mod pieces;
mod ranges;
mod reads;
mod requests;
mod route;
mod waiters;
mod writeback;

pub use memory::{Giving, Next};
pub use pieces::{copy, meeting};

use crate::alloc::FreeBlock;
use crate::config::{CacheConfig, PAGE_SECTORS};
use crate::counters::Counters;
use crate::policy::{Policy, Standard};
use crate::readahead::Hint;
use crate::table::Table;
use device_io::{DeviceIo, Purpose};
use memory::{Memory, Moment};
use pvblk_block::memory::Gauge;
use pvblk_block::{CacheState, Limits, Op, Region, Request, RequestFlags, Status};
use ranges::Ranges;
use reads::Reads;
pub use requests::{Copies, Done};
use requests::{Kind, Ongoing, Requests};
use std::sync::Arc;
use std::time::Instant;
use waiters::Waiters;
use writeback::{Below, WriteBack};

/// The runner of I/O that no request needs.
const BACKGROUND: usize = 0;

/// I/O for the device.
pub struct Io {
    /// The queue that is to submit it: the one whose request needs it, or [`Core::BACKGROUND`].
    pub runner: usize,
    /// Its tag is the core's.
    pub request: Box<Request>,
}

/// The outcome of a step.
#[derive(Default)]
pub struct Out {
    /// I/O to be started.
    pub ios: Vec<Io>,
    pub done: Vec<Done>,
    /// Owners that have something to do now.
    pub wake: Vec<usize>,
}

/// The time at which an owner has to step the core again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// No time: others wake it.
    Nothing,
    At(Instant),
    Now,
}

/// Memory of a cache, which the core shares with readers that take no lock.
pub struct Store {
    pub table: Arc<Table>,
    pub region: Arc<Region>,
    /// The frames' part of the system's memory.
    pub memory: Gauge,
}

/// See the module's documentation.
pub struct Core<P = Standard> {
    memory: Memory<P>,
    writes: WriteBack,
    reads: Reads<P>,
    ranges: Ranges,
    waiters: Waiters,
    requests: Requests,
    io: DeviceIo,
    policy: P,
    moment: Moment,
}

impl Core {
    /// The runner of I/O that no request needs.
    pub const BACKGROUND: usize = BACKGROUND;

    /// Bytes of its tables for each frame, about.
    pub const fn frame_bytes() -> usize {
        Memory::<Standard>::FRAME_BYTES + WriteBack::FRAME_BYTES + Waiters::FRAME_BYTES
    }
}

impl<P: Policy> Core<P> {
    /// An empty cache over a device with these limits and so many sectors.
    pub fn new(
        config: &CacheConfig,
        policy: P,
        limits: Limits,
        sectors: u64,
        store: Store,
        cpus: usize,
        now: Instant,
    ) -> Core<P> {
        let region = Arc::clone(&store.region);
        Core {
            memory: Memory::new(config, policy.clone(), store, cpus),
            writes: WriteBack::new(config, &limits, now),
            reads: Reads::new(config, policy.clone(), &limits),
            ranges: Ranges::default(),
            waiters: Waiters::new(config.frames()),
            requests: Requests::new(),
            io: DeviceIo::new(config, &limits, region, sectors),
            policy,
            moment: Moment { now, ends: 0 },
        }
    }

    /// A queue is opened: `owner` is its number, from 1.
    pub fn open(&mut self, owner: usize, index: u32) {
        self.requests.open(owner);
        self.reads.open(owner);
        self.memory.open(owner, index);
    }

    /// The counters of all machines.
    pub fn counters(&self) -> Counters {
        let mut sum = self.memory.counters();
        sum.add(&self.writes.counters());
        sum.add(self.reads.counters());
        sum.add(self.io.counters());
        sum
    }

    /// Moves the outcome of the steps since the last call to `out`, whose lists are empty.
    pub fn take_out(&mut self, out: &mut Out) {
        self.io.take_ready(&mut out.ios);
        self.requests.take_news(&mut out.done, &mut out.wake);
    }

    /// The time of the calls that follow.
    pub fn at_time(&mut self, now: Instant) {
        self.moment.now = now;
    }

    /// A request that isn't a hit. `copies` is for reads: large ones are copied inside all the same.
    pub fn submit(&mut self, owner: usize, request: Box<Request>, hint: Hint, copies: Copies) {
        let sync = self.writes.writes_through() || request.flags.contains(RequestFlags::FUA);
        let kind = match request.op {
            Op::Read => Kind::Read,
            Op::Write => Kind::Write { sync },
            Op::Flush => Kind::Flush,
            Op::Discard | Op::WriteZeroes => Kind::Range { number: 0 },
        };
        let first = request.sector / PAGE_SECTORS;
        let end = request.end().div_ceil(PAGE_SECTORS);
        let mut ongoing = Ongoing::new(owner, request, hint, kind, (first, end));
        if kind == Kind::Read && self.memory.keeps(end - first) {
            ongoing.copies = copies;
        }
        let number = self.requests.insert(ongoing);
        match kind {
            Kind::Flush => {
                let flush = self.writes.begin_flush(number, owner);
                self.go_on_with_flush(flush);
                return;
            }
            Kind::Range { .. } => {
                let range = self.ranges.hold(number, first, end);
                if let Some(request) = self.requests.get_mut(number) {
                    request.kind = Kind::Range { number: range };
                }
            }
            Kind::Read | Kind::Write { .. } => {}
        }
        self.go_on(number);
    }

    /// Goes on with a request.
    fn go_on(&mut self, number: u32) {
        let Some(mut request) = self.requests.take(number) else {
            return;
        };
        let done = match request.kind {
            Kind::Read => self.go_on_with_read(number, &mut request),
            Kind::Write { sync } => self.go_on_with_write(number, &mut request, sync),
            Kind::Range { number: range } => self.go_on_with_range(number, &mut request, range),
            // It waits for writes and for the device.
            Kind::Flush => false,
        };
        match done {
            true => self.complete(number, request),
            false => self.requests.put(number, request),
        }
    }

    /// Completes a request that is out of its place.
    fn complete(&mut self, number: u32, mut request: Box<Ongoing>) {
        self.give_up_filling(&mut request);
        self.requests.complete(number, request);
    }

    /// True if the device has become smaller, and a part of the request is behind its end.
    fn is_behind_end(&self, request: &Ongoing) -> bool {
        request.request.end() > self.io.sectors()
    }

    /// A request fails, and its next pages aren't looked at: it is done when nothing is pending.
    fn fail_rest(&mut self, request: &mut Ongoing) {
        self.give_up_filling(request);
        request.throttle = None;
        (request.status, request.at) = (Status::IoError, request.end);
    }

    /// A request has no pages read any more.
    fn give_up_filling(&mut self, request: &mut Ongoing) {
        if let Some(mut filling) = request.filling.take() {
            let frames = filling.take_frames(false);
            self.memory.give_up(request.owner, frames.iter().copied());
            self.reads.keep_list(frames);
        }
    }

    /// A frame for a request; `None`: it is to be parked.
    fn allocate(&mut self, request: &mut Ongoing) -> Option<u32> {
        self.memory.allocate(
            &mut request.allocation,
            request.owner,
            self.moment,
            &mut self.writes,
        )
    }

    /// Goes on with the owner's parked requests whose time has come.
    pub fn turn(&mut self, owner: usize) {
        for number in self.requests.take_parked(owner) {
            let Some(request) = self.requests.get(number) else {
                continue;
            };
            if self.is_due(request) {
                self.requests.unpark(number);
                self.go_on(number);
                continue;
            }
            let throttled = request.throttle.is_some();
            self.requests.park_again(owner, number);
            if throttled && self.writes.may_retry(self.moment.now) {
                self.write_in_background(owner);
            }
        }
    }

    /// When the owner has to come back.
    pub fn next_turn(&self, owner: usize) -> Turn {
        let mut turn = Turn::Nothing;
        let now = self.moment.now;
        for request in self.requests.parked(owner) {
            let throttled = request.throttle.is_some();
            // Nobody else may write what it waits for: there may be less than is written in the background.
            let to_write = throttled
                && self.writes.is_idle()
                && self.ranges.is_empty()
                && self.writes.may_retry(now);
            if to_write || self.is_due(request) {
                return Turn::Now;
            }
            let until = match throttled {
                true => Some(self.writes.retry_at()).filter(|&at| at > now),
                false => request.allocation.until(),
            };
            if let Some(until) = until {
                turn = match turn {
                    Turn::At(other) => Turn::At(other.min(until)),
                    _ => Turn::At(until),
                };
            }
        }
        turn
    }

    /// True if a parked request may go on.
    fn is_due(&self, request: &Ongoing) -> bool {
        match request.throttle {
            Some(throttle) => self.writes.is_over(throttle),
            None => request.allocation.is_due(self.moment, &self.writes),
        }
    }

    /// Free blocks of each order.
    pub fn free_blocks(&self) -> Vec<usize> {
        self.memory.free_blocks().to_vec()
    }

    /// True if anything at all is unfinished.
    pub fn is_busy(&self) -> bool {
        self.requests.len() > 0 || !self.io.is_idle()
    }

    /// A request of [`Io`] has come back.
    pub fn ended(&mut self, request: Box<Request>, status: Status) {
        self.moment.ends += 1;
        match self.io.ended(request) {
            Purpose::Read { first, frames } => self.read_ended(first, frames, status),
            Purpose::Write { first, frames } => self.write_ended(first, frames, status),
            Purpose::Pass { request } => self.passed(request, status),
        }
        self.wake_sleepers();
    }

    /// Wakes the owners of parked requests whose time has come.
    fn wake_sleepers(&mut self) {
        for owner in 0..self.requests.owners() {
            if self.requests.sleeps(owner) && self.next_turn(owner) == Turn::Now {
                self.requests.wake(owner);
            }
        }
    }

    /// True if background reclaim has something to do.
    pub fn wants_reclaim(&self) -> bool {
        self.memory.wants_reclaim()
    }

    /// Does a part of background reclaim. True if it is to be called again at once.
    pub fn background_reclaim(&mut self) -> bool {
        if !self.memory.wants_reclaim() {
            return false;
        }
        let more = self.memory.background_reclaim(BACKGROUND, &mut self.writes);
        self.wake_sleepers();
        more
    }

    /// True if background write-back has something to do.
    pub fn wants_write_back(&self) -> bool {
        self.writes.wants_background(self.moment.now)
    }

    /// Does a part of background write-back.
    pub fn write_back(&mut self) {
        let below = Below {
            io: &mut self.io,
            ranges: &self.ranges,
            runner: BACKGROUND,
            followed: false,
        };
        self.writes.write_some(self.moment.now, below);
    }

    /// Notes the time: pages older than the configured age are to be written. Returns when to come back.
    pub fn tick(&mut self) -> Option<Instant> {
        self.writes.tick(self.moment.now)
    }

    /// True if everything written is on the device, though perhaps in its cache.
    pub fn is_clean(&self) -> bool {
        self.writes.has_nothing_unwritten()
    }

    /// The state of a page. One that is being read isn't here yet; one that is being written is dirty until the device has it.
    pub fn cached(&self, page: u64) -> CacheState {
        match self.memory.find(page) {
            Some(frame) if self.memory.is_reading(frame) => CacheState::Absent,
            Some(frame) if self.writes.is_clean(frame) => CacheState::Clean,
            Some(_) => CacheState::Dirty,
            None => CacheState::Absent,
        }
    }

    /// Drops every clean page, as `drop_caches` does. Returns how many those were.
    pub fn drop_clean(&mut self) -> usize {
        self.memory.drop_clean(&self.writes)
    }

    /// Begins to look for memory that nobody needs.
    pub fn give_way(&mut self) -> Giving {
        self.memory.begin_giving(self.moment.now)
    }

    /// Others had the lock: another turn of the pass.
    pub fn go_on_giving(&mut self, pass: &mut Giving) {
        self.memory.go_on_giving(pass);
    }

    /// The next block, out of the cache and off the allocator's lists.
    pub fn next_to_go(&mut self, pass: &mut Giving) -> Next {
        self.memory
            .next_to_go(pass, self.moment.now, &mut self.writes)
    }

    /// Blocks that may be out at a time.
    pub fn most_out(&self, pass: &Giving) -> usize {
        self.memory.most_out(pass)
    }

    /// A block comes back; `cold`: its memory has gone. Returns how many of its pages had any.
    pub fn gone(&mut self, block: FreeBlock, cold: bool) -> usize {
        self.memory.gone(block, cold)
    }

    /// Requests that wait for memory may have the frames that came back.
    pub fn memory_came(&mut self) {
        self.moment.ends += 1;
        self.wake_sleepers();
    }

    /// The pass is over: dirty pages are written, so that they can go, too.
    pub fn end_of_giving(&mut self) {
        if self.writes.has_dirty() {
            self.writes.hurry();
        }
    }

    /// The device has so many sectors now: pages behind its end go. False if a page at the old end has to be written first.
    pub fn resize(&mut self, sectors: u64) -> bool {
        let edge = self.io.sectors().min(sectors) / PAGE_SECTORS;
        if sectors < self.io.sectors() {
            // First, so that of a page over the new end what the device has left of it is written.
            self.io.set_sectors(sectors);
        }
        let mut waits = false;
        for frame in 0..self.memory.len() as u32 {
            let Some(page) = self.memory.page_of(frame).filter(|&page| page >= edge) else {
                continue;
            };
            let gone = page * PAGE_SECTORS >= sectors;
            if gone && self.writes.could_be_lost(frame) {
                self.writes.forget(page, frame);
            } else if self.memory.is_reading(frame)
                || !self.writes.is_clean(frame)
                || self.waiters.any(frame)
            {
                // One that has failed is written again in the background, after a pause.
                if !self.writes.has_failed(frame) {
                    self.write_out(page, page + 1, (BACKGROUND, false));
                }
                waits = true;
                continue;
            }
            self.memory.drop_page(frame);
        }
        if !waits {
            self.io.set_sectors(sectors);
        }
        !waits
    }
}
