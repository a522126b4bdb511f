//! The cache as a state machine: told requests, ends of I/O and the time, it returns I/O to start and requests that are done.
//!
//! A request that isn't a plain hit becomes a *job*. It goes from page to page, and stops where it has to wait:
//!
//! ```text
//! run ──▶ page is there: copy, next ──▶ … ──▶ done
//!  ▲         │ being read or written: in the frame's chain of waits
//!  │         │ no frame: parked with its need; its owner's next turn goes on
//!  └─────────┤ range held by a discard: in that range's list
//!            └ too much dirty: parked
//! ```

mod check;
mod giving;
mod memory;
mod pieces;
mod range;
mod read;
mod write;
mod writeback;

pub use giving::Next;
pub use pieces::{copy, meeting};

use crate::alloc::Allocator;
use crate::config::{CacheConfig, Mode, PAGE_BYTES, PAGE_SECTORS};
use crate::counters::Counters;
use crate::lists::{Lists, On, Shadows};
use crate::policy::{Policy, Standard};
use crate::readahead::{Hint, Plan, Readers, STREAMS, Window};
use crate::table::Table;
use pvblk_block::memory::Gauge;
use pvblk_block::{Buffer, Completion, Limits, Op, Region, Request, RequestFlags, SECTOR, Status};
use slab::Slab;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

const NONE: u32 = u32::MAX;
/// Most pages that one job waits for at a time.
const MOST_PENDING: u32 = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The allocator's, or a job's that has not enough of them yet.
    Free,
    Reading,
    Clean,
    Dirty,
    Writing,
}

#[derive(Clone, Debug)]
struct Frame {
    page: u64,
    state: State,
    /// An older version of the page is being written.
    behind: bool,
    /// It is an older version: its page has another frame.
    orphan: bool,
    /// It could not be written.
    failed: bool,
    /// It becomes active when it has been read.
    activate: bool,
    /// Who reads it is to read ahead.
    marked: bool,
    /// Somebody waits for its write with FUA.
    fua: bool,
    /// When it became dirty.
    epoch: u64,
    /// Chain of those who wait for its I/O.
    waits: u32,
    /// Chain of those whose writes are done when it is written.
    syncs: u32,
}

impl Frame {
    const FREE: Frame = Frame {
        page: u64::MAX,
        state: State::Free,
        behind: false,
        orphan: false,
        failed: false,
        activate: false,
        marked: false,
        fua: false,
        epoch: 0,
        waits: NONE,
        syncs: NONE,
    };
}

struct Wait {
    job: u32,
    /// For a read: the page to copy then; else [`u64::MAX`].
    page: u64,
    next: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write {
        /// It waits for the device.
        sync: bool,
    },
    Flush {
        /// It covers what became dirty up to here.
        epoch: u64,
        sent: bool,
    },
    Range {
        number: u64,
        sent: bool,
    },
}

/// What a parked job waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    /// It is to reclaim.
    Reclaim,
    /// It has reclaimed, and is to try again.
    Retry,
    /// It sleeps for memory.
    Sleep {
        since: Instant,
        until: Instant,
        /// It wakes when any I/O ends: there had been so many ends.
        ends: Option<u64>,
        /// It wakes when the device isn't congested.
        congested: bool,
    },
    /// Too much is dirty; so many writes had failed.
    Throttle {
        since: Instant,
        errors: u64,
    },
}

struct Filling {
    plan: Plan,
    /// Where to go on.
    at: u64,
    /// Pages from here on nobody asked for.
    optional: u64,
    frames: Vec<u32>,
}

struct Job {
    owner: usize,
    request: Box<Request>,
    hint: Hint,
    kind: Kind,
    at: u64,
    end: u64,
    /// Pages it waits for.
    pending: u32,
    status: Status,
    need: Need,
    /// Pages its last reclaim freed.
    progress: usize,
    filling: Option<Filling>,
    is_parked: bool,
}

enum IoKind {
    Read {
        first: u64,
        frames: Vec<u32>,
    },
    Write {
        first: u64,
        frames: Vec<u32>,
    },
    /// A flush or a range that is passed on.
    Pass(u32),
}

/// Something for the device.
pub struct Io {
    /// Who is to submit it: the queue whose request needs it, or [`Core::BACKGROUND`].
    pub runner: usize,
    /// The request; its tag says what it is for.
    pub request: Box<Request>,
}

/// What comes of a step.
#[derive(Default)]
pub struct Out {
    /// To be started.
    pub ios: Vec<Io>,
    /// Done, and whose.
    pub done: Vec<(usize, Completion)>,
    /// Owners that have something to do now.
    pub wake: Vec<usize>,
}

/// What an owner has to come back for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing, unless it is told.
    Nothing,
    /// At this time.
    At(Instant),
    /// At once.
    Now,
}

#[derive(Default)]
struct Owner {
    windows: [Window; STREAMS],
    parked: Vec<u32>,
    list: usize,
}

struct RangeHold {
    job: u32,
    number: u64,
    /// First page, and first page behind.
    first: u64,
    end: u64,
    /// The device is doing it.
    sent: bool,
    waiters: Vec<u32>,
}

/// Where pages are kept.
pub struct Store {
    pub table: Arc<Table>,
    pub region: Arc<Region>,
    /// What frames may have of the system's memory.
    pub memory: Gauge,
}

/// See the module's documentation.
pub struct Core<P = Standard> {
    table: Arc<Table>,
    region: Arc<Region>,
    config: CacheConfig,
    policy: P,
    /// The device's.
    limits: Limits,
    /// Sectors of the device.
    capacity: u64,
    alloc: Allocator<P>,
    lists: Lists,
    shadows: Shadows,
    frames: Box<[Frame]>,
    jobs: Slab<Option<Box<Job>>>,
    ios: Slab<IoKind>,
    waits: Slab<Wait>,
    owners: Vec<Owner>,
    readers: Readers,
    /// Dirty pages that aren't being written.
    dirty: BTreeMap<u64, u32>,
    /// Frames being read: they are on no list until that ends, and count as inactive.
    reading: usize,
    /// Frames being written.
    writing: usize,
    /// Writes of pages at the device.
    write_ios: usize,
    /// How many frames became dirty at each number and are not written yet.
    epochs: BTreeMap<u64, u32>,
    epoch: u64,
    /// Jobs.
    flushes: Vec<u32>,
    /// Where the flushes' search for dirty pages goes on.
    flush_at: u64,
    /// Pages to be written as soon as they can be.
    urgent: Vec<u64>,
    background: writeback::Background,
    ranges: Vec<RangeHold>,
    range_number: u64,
    /// I/O that ended.
    ends: u64,
    kswapd: bool,
    refaults_seen: u64,
    /// On the bill: what frames may have of the system's memory.
    memory: Gauge,
    /// When what is active was looked at for giving it away.
    aged: Option<Instant>,
    now: Instant,
    out: Out,
    counters: Counters,
    spare_requests: Vec<Box<Request>>,
    spare_frames: Vec<Vec<u32>>,
    pages_ready: Vec<(u32, u64)>,
}

impl Core {
    /// The runner of what no request needs.
    pub const BACKGROUND: usize = 0;

    /// Bytes of its tables for each frame, about.
    pub const fn frame_bytes() -> usize {
        size_of::<Frame>() + 48
    }
}

impl<P: Policy> Core<P> {
    /// An empty cache over a device with these limits and so many sectors.
    pub fn new(
        config: &CacheConfig,
        policy: P,
        limits: Limits,
        capacity: u64,
        store: Store,
        cpus: usize,
        now: Instant,
    ) -> Core<P> {
        let frames = config.frames();
        let lists = match config.lists {
            0 => cpus,
            n => n as usize,
        };
        Core {
            table: store.table,
            region: store.region,
            memory: store.memory,
            limits,
            capacity,
            alloc: Allocator::new(frames, lists, policy.clone()),
            lists: Lists::new(frames),
            shadows: Shadows::new(frames),
            frames: vec![Frame::FREE; frames].into(),
            jobs: Slab::new(),
            ios: Slab::new(),
            waits: Slab::new(),
            owners: vec![Owner::default()],
            readers: Readers::new(frames),
            dirty: BTreeMap::new(),
            reading: 0,
            writing: 0,
            write_ios: 0,
            epochs: BTreeMap::new(),
            epoch: 1,
            flushes: Vec::new(),
            flush_at: 0,
            urgent: Vec::new(),
            background: writeback::Background::new(now),
            ranges: Vec::new(),
            range_number: 0,
            ends: 0,
            kswapd: false,
            refaults_seen: 0,
            aged: None,
            now,
            out: Out::default(),
            counters: Counters::default(),
            spare_requests: Vec::new(),
            spare_frames: Vec::new(),
            pages_ready: Vec::new(),
            config: config.clone(),
            policy,
        }
    }

    /// A queue is opened: `owner` is its number, from 1.
    pub fn open(&mut self, owner: usize, index: u32) {
        while self.owners.len() <= owner {
            self.owners.push(Owner::default());
        }
        self.owners[owner] = Owner {
            list: index as usize,
            ..Owner::default()
        };
    }

    /// The counters now.
    pub fn counters(&self) -> Counters {
        Counters {
            nr_free_pages: self.alloc.free_frames() as u64,
            nr_listed_pages: self.alloc.listed_frames() as u64,
            nr_inactive_file: (self.lists.len(On::Inactive) + self.reading) as u64,
            nr_active_file: self.lists.len(On::Active) as u64,
            nr_dirty: self.dirty.len() as u64,
            nr_writeback: self.writing as u64,
            nr_warm_pages: self.alloc.warm_frames() as u64,
            ..self.counters
        }
    }

    /// What came of the steps since it was asked last.
    pub fn take_out(&mut self, out: &mut Out) {
        std::mem::swap(&mut self.out, out);
    }

    /// The time of what follows.
    pub fn at_time(&mut self, now: Instant) {
        self.now = now;
    }

    /// A request that isn't a hit.
    pub fn submit(&mut self, owner: usize, request: Box<Request>, hint: Hint) {
        let sync =
            self.config.mode == Mode::WriteThrough || request.flags.contains(RequestFlags::FUA);
        let kind = match request.op {
            Op::Read => Kind::Read,
            Op::Write => Kind::Write { sync },
            Op::Flush => self.new_flush(),
            Op::Discard | Op::WriteZeroes => Kind::Range {
                number: self.next_range(),
                sent: false,
            },
        };
        let job = Box::new(Job {
            owner,
            hint,
            kind,
            at: request.sector / PAGE_SECTORS,
            end: request.end().div_ceil(PAGE_SECTORS),
            pending: 0,
            status: Status::Ok,
            need: Need::Nothing,
            progress: 0,
            filling: None,
            is_parked: false,
            request,
        });
        let (first, end) = (job.at, job.end);
        let id = self.jobs.insert(Some(job)) as u32;
        match kind {
            Kind::Flush { .. } => self.flushes.push(id),
            Kind::Range { number, .. } => self.hold(id, number, first, end),
            _ => {}
        }
        self.run(id);
    }

    /// Goes on with a job.
    fn run(&mut self, id: u32) {
        let Some(mut job) = self.jobs.get_mut(id as usize).and_then(Option::take) else {
            return;
        };
        let done = match job.kind {
            Kind::Read => self.run_read(id, &mut job),
            Kind::Write { sync } => self.run_write(id, &mut job, sync),
            Kind::Flush { .. } => self.run_flush(id, &mut job),
            Kind::Range { .. } => self.run_range(id, &mut job),
        };
        match done {
            true => self.complete(id, job),
            false => self.jobs[id as usize] = Some(job),
        }
    }

    #[allow(clippy::boxed_local)] // It comes out of its place so.
    fn complete(&mut self, id: u32, mut job: Box<Job>) {
        self.jobs.remove(id as usize);
        if let Some(filling) = job.filling.take() {
            self.give_up(job.owner, filling);
        }
        let (request, status) = (job.request, job.status);
        self.out
            .done
            .push((job.owner, Completion { request, status }));
    }

    /// It goes on in its owner's next turn.
    fn park(&mut self, id: u32, job: &mut Job) {
        if !std::mem::replace(&mut job.is_parked, true) {
            self.owners[job.owner].parked.push(id);
            // It may be somebody else's step, and its owner sleeps without a deadline.
            if !self.out.wake.contains(&job.owner) {
                self.out.wake.push(job.owner);
            }
        }
    }

    /// Goes on with the owner's parked jobs whose time has come.
    pub fn turn(&mut self, owner: usize) {
        let parked = std::mem::take(&mut self.owners[owner].parked);
        for id in parked {
            let Some(Some(job)) = self.jobs.get_mut(id as usize) else {
                continue;
            };
            let need = job.need;
            if self.is_due(need) {
                if let Some(Some(job)) = self.jobs.get_mut(id as usize) {
                    job.is_parked = false;
                }
                self.run(id);
            } else {
                self.owners[owner].parked.push(id);
                if matches!(need, Need::Throttle { .. }) && self.now >= self.background.retry_at {
                    self.pump_background(owner);
                }
            }
        }
    }

    /// When the owner has to come back.
    pub fn next_turn(&self, owner: usize) -> Turn {
        let mut turn = Turn::Nothing;
        for &id in &self.owners[owner].parked {
            let Some(Some(job)) = self.jobs.get(id as usize) else {
                continue;
            };
            // Nobody else may write what it waits for: there may be less than is written in the background.
            let to_write = matches!(job.need, Need::Throttle { .. })
                && self.writing == 0
                && self.ranges.is_empty()
                && self.now >= self.background.retry_at;
            if to_write || self.is_due(job.need) {
                return Turn::Now;
            }
            let until = match job.need {
                Need::Sleep { until, .. } => Some(until),
                Need::Throttle { .. } => Some(self.background.retry_at).filter(|&at| at > self.now),
                _ => None,
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

    fn is_due(&self, need: Need) -> bool {
        match need {
            Need::Nothing | Need::Reclaim | Need::Retry => true,
            Need::Sleep {
                until,
                ends,
                congested,
                ..
            } => {
                self.now >= until
                    || ends.is_some_and(|ends| ends != self.ends)
                    || (congested && !self.is_congested())
            }
            Need::Throttle { errors, .. } => {
                !self.is_too_dirty() || self.counters.write_errors != errors
            }
        }
    }

    /// Free blocks of each order.
    pub fn free_blocks(&self) -> Vec<usize> {
        self.alloc.blocks().to_vec()
    }

    /// Whether anything at all is unfinished.
    pub fn is_busy(&self) -> bool {
        !self.jobs.is_empty() || !self.ios.is_empty()
    }

    /// A request of [`Io`] has come back.
    pub fn ended(&mut self, mut request: Box<Request>, status: Status) {
        self.ends += 1;
        let kind = self.ios.remove(request.tag as usize);
        request.buffers.clear();
        self.spare_requests.push(request);
        match kind {
            IoKind::Read { first, frames } => self.read_ended(first, frames, status),
            IoKind::Write { first, frames } => self.write_ended(first, frames, status),
            IoKind::Pass(id) => self.passed(id, status),
        }
        self.wake_sleepers();
    }

    /// Those who wait for any end.
    fn wake_sleepers(&mut self) {
        for owner in 0..self.owners.len() {
            if self.owners[owner].parked.is_empty() || self.out.wake.contains(&owner) {
                continue;
            }
            if self.next_turn(owner) == Turn::Now {
                self.out.wake.push(owner);
            }
        }
    }

    fn passed(&mut self, id: u32, status: Status) {
        let Some(mut job) = self.jobs.get_mut(id as usize).and_then(Option::take) else {
            return;
        };
        job.status = status;
        self.range_done(&job, status == Status::Ok);
        self.complete(id, job);
        self.pump_flushes();
    }

    /// Puts a job in a frame's chain.
    fn wait_on(&mut self, frame: u32, job: u32, page: u64) {
        let next = self.frames[frame as usize].waits;
        let wait = self.waits.insert(Wait { job, page, next });
        self.frames[frame as usize].waits = wait as u32;
    }

    /// Empties a chain: jobs and pages, in the order in which they came.
    fn take_chain(&mut self, mut at: u32) -> Vec<(u32, u64)> {
        let mut all = std::mem::take(&mut self.pages_ready);
        while at != NONE {
            let wait = self.waits.remove(at as usize);
            all.push((wait.job, wait.page));
            at = wait.next;
        }
        all.reverse();
        all
    }

    fn keep_chain(&mut self, mut chain: Vec<(u32, u64)>) {
        chain.clear();
        self.pages_ready = chain;
    }

    /// Sectors of a page that the device has.
    fn sectors_of(&self, page: u64) -> u64 {
        PAGE_SECTORS.min(self.capacity.saturating_sub(page * PAGE_SECTORS))
    }

    /// Starts an I/O on frames of neighbouring pages.
    fn start(&mut self, op: Op, fua: bool, first: u64, frames: Vec<u32>, runner: usize) {
        let mut request = self.spare_request();
        let mut sectors = 0;
        let mut piece = (0, 0);
        for (page, &frame) in (first..).zip(&frames) {
            let len = self.sectors_of(page) * SECTOR;
            sectors += len / SECTOR;
            let (offset, len) = (frame as usize * PAGE_BYTES, len as usize);
            if piece.0 + piece.1 == offset && piece.1 > 0 {
                piece.1 += len;
            } else {
                request
                    .buffers
                    .extend(Buffer::new(&self.region, piece.0, piece.1).filter(|b| !b.is_empty()));
                piece = (offset, len);
            }
        }
        request
            .buffers
            .extend(Buffer::new(&self.region, piece.0, piece.1));
        let segments = request.buffers.len() as u64;
        let c = &mut self.counters;
        let mut flags = RequestFlags::empty();
        let kind = match op {
            Op::Read => {
                c.pgpgin += sectors / 2;
                c.read_requests += 1;
                c.read_segments += segments;
                IoKind::Read { first, frames }
            }
            _ => {
                c.pgpgout += sectors / 2;
                c.write_requests += 1;
                c.write_segments += segments;
                // What is written doesn't change: who writes to the page meanwhile gets another frame.
                flags = RequestFlags::STABLE_BUFFERS;
                flags.set(RequestFlags::FUA, fua);
                IoKind::Write { first, frames }
            }
        };
        let tag = self.ios.insert(kind) as u64;
        request.reset(op, flags, first * PAGE_SECTORS, sectors, tag);
        self.out.ios.push(Io { runner, request });
    }

    fn spare_request(&mut self) -> Box<Request> {
        let spare = self.spare_requests.pop();
        spare.unwrap_or_else(|| Request::new(Op::Flush, 0, 0, 0))
    }

    /// Whether another frame may join a run.
    fn fits(&self, frames: &[u32], segments: usize, next: u32) -> bool {
        let pages = (u64::from(self.config.max_io_bytes) / PAGE_BYTES as u64)
            .min(u64::from(self.limits.max_sectors) / PAGE_SECTORS)
            .max(1);
        let joins = frames.last().is_some_and(|&l| l + 1 == next);
        (frames.len() as u64) < pages
            && (joins || segments < self.limits.max_segments.max(1) as usize)
    }

    fn spare_list(&mut self) -> Vec<u32> {
        self.spare_frames.pop().unwrap_or_default()
    }

    fn keep_list(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.spare_frames.push(list);
    }
}
