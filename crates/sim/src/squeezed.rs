//! Buffer pools whose memory is taken away at any step: lanes over a slow device, connections that come and go, and squeezes.
//!
//! ```text
//!   Client ── slots with buffers ── Lane ── device that takes its time
//!      │           └ BufferPool ◀── Pressure: squeezes, limits, time
//!      └ what must a block hold?
//! ```
//!
//! The pool, the pressure and the lanes are those of production; released memory is poisoned, so that whoever still uses it is
//! found by what it reads, or by what it writes. docs/decisions/0014-squeeze.md says what must hold.

use crate::{Failure, caught};
use fastrand::Rng;
use parking_lot::Mutex;
use pvblk_backend::{BufferPool, Disk, Lane, Pressure, Pulled, RequestSource, SourceEnd};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, DeviceQueue, Error, EventHub, Limits,
    ManualClock, Op, QueueContext, Readiness, Request, RequestFlags, Status,
};
use pvblk_sys::{PAGE_SIZE, POISON, poison_released_memory};
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Blocks of a disk, a page each.
const BLOCKS: usize = 64;
/// Most blocks of a request.
const LONGEST: usize = 8;
/// Requests in flight of a connection.
const DEPTH: u32 = 16;
/// The last events that are told of a failure.
const TOLD: usize = 40;

/// A bug to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The connection gives buffers back while their request is at the device.
    GiveInFlight,
    /// A squeeze takes a page that is in flight, whatever the types say.
    ReleaseInFlight,
    /// The connection forgets to give some buffers back.
    Forget,
}

impl Bug {
    /// All of them, with names.
    pub const ALL: &[(&str, Bug)] = &[
        ("give-in-flight", Bug::GiveInFlight),
        ("release-in-flight", Bug::ReleaseInFlight),
        ("forget", Bug::Forget),
    ];
}

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A bug to be found.
    pub planted: Option<Bug>,
    /// Print every event to standard error.
    pub verbose: bool,
}

/// What happened in a seed, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Steps.
    pub steps: u64,
    /// Requests answered.
    pub requests: u64,
    /// Squeezes that were not merged.
    pub squeezes: u64,
    /// Pages that they took.
    pub squeezed_pages: u64,
    /// Connections that ended with requests in flight.
    pub broken: u64,
    /// Times that a connection waited for memory.
    pub stalls: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, o: Report) {
        self.steps += o.steps;
        self.requests += o.requests;
        self.squeezes += o.squeezes;
        self.squeezed_pages += o.squeezed_pages;
        self.broken += o.broken;
        self.stalls += o.stalls;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} steps, {} requests, {} squeezes of {} pages, {} broken connections, {} stalls",
            self.steps, self.requests, self.squeezes, self.squeezed_pages, self.broken, self.stalls
        )
    }
}

/// Requests at the device, of all connections, and what its blocks hold.
struct Medium {
    work: Vec<(usize, Box<Request>)>,
    done: Vec<Vec<Completion>>,
    blocks: Vec<u8>,
    /// Queues that were closed.
    dead: Vec<usize>,
}

struct SlowDevice {
    medium: Arc<Mutex<Medium>>,
    events: EventHub,
}

struct SlowQueue {
    medium: Arc<Mutex<Medium>>,
    index: usize,
}

impl BlockDevice for SlowDevice {
    fn describe(&self) -> String {
        "slow".into()
    }
    fn limits(&self) -> Limits {
        Limits::default()
    }
    fn capacity_sectors(&self) -> u64 {
        (BLOCKS * PAGE_SIZE / 512) as u64
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let mut medium = self.medium.lock();
        medium.done.push(Vec::new());
        Ok(Box::new(SlowQueue {
            index: medium.done.len() - 1,
            medium: Arc::clone(&self.medium),
        }))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

impl DeviceQueue for SlowQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let mut medium = self.medium.lock();
        medium.work.extend(batch.drain(..).map(|r| (self.index, r)));
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.medium.lock().done[self.index]);
    }
    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for SlowQueue {
    fn drop(&mut self) {
        let mut medium = self.medium.lock();
        medium.dead.push(self.index);
        medium.done[self.index].clear();
    }
}

impl Medium {
    /// Does a request's data now, long after it was submitted, as a device does.
    fn complete(&mut self, at: usize) {
        let (queue, request) = self.work.swap_remove(at);
        let mut block = request.sector as usize * 512 / PAGE_SIZE;
        for buffer in &request.buffers {
            for page in 0..buffer.len() / PAGE_SIZE {
                match request.op {
                    Op::Write => {
                        let mut data = [0; PAGE_SIZE];
                        buffer.read(page * PAGE_SIZE, &mut data);
                        let one = data.iter().all(|b| *b == data[0]);
                        // A mixture is no write of anybody's.
                        self.blocks[block] = if one { data[0] } else { POISON };
                    }
                    _ => buffer.write(page * PAGE_SIZE, &[self.blocks[block]; PAGE_SIZE]),
                }
                block += 1;
            }
        }
        if self.dead.contains(&queue) {
            return; // nobody wants to know
        }
        self.done[queue].push(Completion {
            request,
            status: Status::Ok,
        });
    }
}

/// What the client of a disk knows: what each block must hold, and which are busy.
struct Known {
    value: Vec<u8>,
    busy: Vec<bool>,
}

struct Slot {
    first: usize,
    count: usize,
    op: Op,
    value: u8,
    answered: bool,
}

/// What a connection and the world share.
struct Shared {
    rng: Mutex<Rng>,
    known: Mutex<Known>,
    trouble: Mutex<Option<String>>,
    answered: Mutex<u64>,
    /// Requests that may still come.
    left: Mutex<u64>,
    /// First block and number of requests whose client left before their answer.
    orphans: Mutex<Vec<(usize, usize)>>,
    planted: Option<Bug>,
}

struct Connection {
    shared: Arc<Shared>,
    pool: BufferPool,
    slots: Vec<Option<Slot>>,
    /// Buffers of answers that are not sent yet, with their slots.
    unsent: VecDeque<(usize, Vec<Buffer>)>,
}

impl Connection {
    fn request(&mut self) -> Option<Box<Request>> {
        let mut rng = self.shared.rng.lock();
        let tag = self.slots.iter().position(Option::is_none)?;
        let count = rng.usize(1..=LONGEST);
        let first = rng.usize(0..=BLOCKS - count);
        let mut known = self.shared.known.lock();
        if known.busy[first..first + count].contains(&true) {
            return None;
        }
        let mut buffers = Vec::new();
        if !self.pool.take(count * PAGE_SIZE, &mut buffers) {
            return None;
        }
        known.busy[first..first + count].fill(true);
        let op = if rng.bool() { Op::Write } else { Op::Read };
        // Never 0 nor poison.
        let value = rng.u8(1..POISON);
        if op == Op::Write {
            for buffer in &buffers {
                buffer.write(0, &vec![value; buffer.len()]);
            }
        }
        if self.shared.planted == Some(Bug::GiveInFlight) && rng.u8(0..8) == 0 {
            self.pool.give(&mut buffers.clone());
        }
        self.slots[tag] = Some(Slot {
            first,
            count,
            op,
            value,
            answered: false,
        });
        let sector = |blocks: usize| (blocks * PAGE_SIZE / 512) as u64;
        let mut request = Request::new(op, 0, 0, 0);
        let flags = RequestFlags::empty();
        request.reset(op, flags, sector(first), sector(count), tag as u64);
        request.buffers = buffers;
        Some(request)
    }

    fn answer(&mut self, tag: usize, buffers: &[Buffer]) {
        let Some(slot) = &mut self.slots[tag] else {
            return;
        };
        slot.answered = true;
        let mut known = self.shared.known.lock();
        let mut block = slot.first;
        for buffer in buffers {
            for page in buffer.to_vec().chunks(PAGE_SIZE) {
                let expected = match slot.op {
                    Op::Write => slot.value,
                    _ => known.value[block],
                };
                if page.iter().any(|b| *b != expected) {
                    let what = format!(
                        "{:?} of block {block}: {:#x} and not {expected:#x}",
                        slot.op, page[0]
                    );
                    self.shared.trouble.lock().get_or_insert(what);
                }
                if slot.op == Op::Write {
                    known.value[block] = slot.value;
                }
                block += 1;
            }
        }
        known.busy[slot.first..slot.first + slot.count].fill(false);
        *self.shared.answered.lock() += 1;
    }
}

impl RequestSource for Connection {
    fn describe(&self) -> String {
        "connection".into()
    }
    fn depth(&self) -> u32 {
        DEPTH
    }
    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let wanted = self.shared.rng.lock().usize(0..=room.min(4));
        for _ in 0..wanted {
            if *self.shared.left.lock() == 0 {
                break;
            }
            let Some(request) = self.request() else { break };
            *self.shared.left.lock() -= 1;
            out.push(request);
        }
        Ok(Pulled::default())
    }
    fn complete(&mut self, done: &mut Vec<Completion>) {
        for mut completion in done.drain(..) {
            let tag = completion.request.tag as usize;
            let buffers = std::mem::take(&mut completion.request.buffers);
            self.answer(tag, &buffers);
            self.unsent.push_back((tag, buffers));
        }
    }
    fn push(&mut self) -> Result<usize, SourceEnd> {
        let send = self.shared.rng.lock().usize(0..=self.unsent.len());
        for (tag, mut buffers) in self.unsent.drain(..send) {
            self.slots[tag] = None;
            if self.shared.planted == Some(Bug::Forget) {
                buffers.truncate(buffers.len() / 2);
            }
            self.pool.give(&mut buffers);
        }
        self.pool.settle();
        let mut rng = self.shared.rng.lock();
        match rng.u8(0..32) {
            0 => self.pool.rest(),
            1 => self.pool.decay(),
            _ => {}
        }
        Ok(0)
    }
    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn wants_write(&self) -> bool {
        !self.unsent.is_empty()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        for (_, mut buffers) in self.unsent.drain(..) {
            self.pool.give(&mut buffers);
        }
        let open = self.slots.iter().flatten().filter(|s| !s.answered);
        let mut orphans = self.shared.orphans.lock();
        orphans.extend(open.map(|s| (s.first, s.count)));
    }
}

struct World {
    rng: Rng,
    options: Options,
    clock: Arc<ManualClock>,
    pressure: Arc<Pressure>,
    medium: Arc<Mutex<Medium>>,
    disk: Disk,
    shared: Arc<Shared>,
    lanes: Vec<Option<Lane>>,
    step: u64,
    report: Report,
    events: VecDeque<String>,
}

impl World {
    fn new(seed: u64, options: &Options) -> World {
        let mut rng = Rng::with_seed(seed);
        let clock = Arc::new(ManualClock::default());
        let floor = [0, 4, 64][rng.usize(0..3)];
        let pressure = Arc::new(Pressure::with_clock(floor, clock.clone()));
        pressure.set_max_buffer_pages([0, 8, 1024][rng.usize(0..3)]);
        let medium = Arc::new(Mutex::new(Medium {
            work: Vec::new(),
            done: Vec::new(),
            blocks: vec![0; BLOCKS],
            dead: Vec::new(),
        }));
        let device = Arc::new(SlowDevice {
            medium: Arc::clone(&medium),
            events: EventHub::default(),
        });
        let shared = Arc::new(Shared {
            rng: Mutex::new(rng.fork()),
            known: Mutex::new(Known {
                value: vec![0; BLOCKS],
                busy: vec![false; BLOCKS],
            }),
            trouble: Mutex::default(),
            answered: Mutex::default(),
            left: Mutex::new(rng.u64(20..200)),
            orphans: Mutex::default(),
            planted: options.planted,
        });
        World {
            disk: Disk::new("d", device, Tracing::off()),
            lanes: (0..rng.usize(1..4)).map(|_| None).collect(),
            rng,
            options: *options,
            clock,
            pressure,
            medium,
            shared,
            step: 0,
            report: Report::default(),
            events: VecDeque::new(),
        }
    }

    fn log(&mut self, what: String) {
        if self.options.verbose {
            eprintln!("{:6} {what}", self.step);
        }
        if self.events.len() == TOLD {
            self.events.pop_front();
        }
        self.events.push_back(format!("{:6} {what}", self.step));
    }

    fn connect(&mut self, at: usize) -> Result<(), String> {
        let limit = self.rng.usize(LONGEST * 2..=96);
        let pool = BufferPool::new(&self.pressure, "d", "squeezed", None, limit);
        let connection = Connection {
            shared: Arc::clone(&self.shared),
            pool,
            slots: (0..DEPTH).map(|_| None).collect(),
            unsent: VecDeque::new(),
        };
        let lane = Lane::open(&self.disk, Box::new(connection)).map_err(|e| e.to_string())?;
        self.lanes[at] = Some(lane);
        self.log(format!("{at} connects, {limit} pages"));
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        self.step += 1;
        let at = self.rng.usize(0..self.lanes.len());
        match self.rng.u8(0..100) {
            0..45 => match &mut self.lanes[at] {
                Some(lane) => {
                    lane.step();
                }
                None => self.connect(at)?,
            },
            45..75 => self.complete(),
            75..90 => self.squeeze(),
            90..96 => {
                let by = Duration::from_micros(self.rng.u64(0..8000));
                self.clock.advance(by);
            }
            96..98 => {
                let pages = [0, 8, 1024][self.rng.usize(0..3)];
                self.pressure.set_max_buffer_pages(pages);
                self.log(format!("limit {pages}"));
            }
            _ => self.disconnect(at),
        }
        self.check()
    }

    fn complete(&mut self) {
        let mut medium = self.medium.lock();
        if !medium.work.is_empty() {
            let at = self.rng.usize(0..medium.work.len());
            medium.complete(at);
        }
    }

    fn squeeze(&mut self) {
        let squeezed = self.pressure.squeeze();
        if !squeezed.merged {
            self.report.squeezes += 1;
            self.report.squeezed_pages += squeezed.bytes / PAGE_SIZE as u64;
            self.log(format!("squeeze: {} bytes", squeezed.bytes));
        }
        if self.options.planted == Some(Bug::ReleaseInFlight) {
            let medium = self.medium.lock();
            let writes = medium.work.iter().filter(|(_, r)| r.op == Op::Write);
            if let Some(buffer) = writes.flat_map(|(_, r)| &r.buffers).next() {
                // What a page holds that was released.
                buffer.write(0, &[POISON; PAGE_SIZE]);
            }
        }
    }

    /// The client is gone, whatever is in flight: the device still works on it.
    fn disconnect(&mut self, at: usize) {
        if self.lanes[at].take().is_none() {
            return;
        }
        self.report.broken += 1;
        self.log(format!("{at} is gone"));
        // Once its requests are done, anybody may use their blocks, with what they left there.
        let mut medium = self.medium.lock();
        while !medium.work.is_empty() {
            medium.complete(0);
        }
        let mut known = self.shared.known.lock();
        for (first, count) in self.shared.orphans.lock().drain(..) {
            let blocks = first..first + count;
            if medium.blocks[blocks.clone()].contains(&POISON) {
                let what = "a write of one that is gone was of released memory".to_owned();
                self.shared.trouble.lock().get_or_insert(what);
            }
            known.value[blocks.clone()].copy_from_slice(&medium.blocks[blocks.clone()]);
            known.busy[blocks].fill(false);
        }
    }

    fn check(&mut self) -> Result<(), String> {
        if let Some(trouble) = self.shared.trouble.lock().take() {
            return Err(trouble);
        }
        let total = self.pressure.report().total;
        if total.claimed > 0 {
            return Err("a page was given back while somebody had it".into());
        }
        self.report.stalls = total.stalls;
        Ok(())
    }

    /// Everything is answered and given back, and nothing is left.
    fn come_to_rest(&mut self) -> Result<(), String> {
        *self.shared.left.lock() = 0;
        for _ in 0..2000 {
            self.step += 1;
            self.complete();
            for lane in self.lanes.iter_mut().flatten() {
                lane.step();
            }
            self.check()?;
        }
        let used = self.pressure.report().total.used_pages;
        if used > 0 {
            return Err(format!("{used} pages are in use, and nothing is in flight"));
        }
        self.clock.advance(Duration::from_secs(1));
        self.pressure.squeeze();
        if self.pressure.free_bytes() > 0 {
            return Err("a squeeze left something".into());
        }
        self.lanes.iter_mut().for_each(|l| *l = None);
        self.check()
    }
}

/// Runs one seed from the first connection to the last page given back.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Failure>> {
    poison_released_memory();
    let mut world = World::new(seed, options);
    let steps = world.rng.u64(100..600);
    let drive = |world: &mut World| {
        (0..steps).try_for_each(|_| world.step())?;
        world.come_to_rest()
    };
    match caught(|| drive(&mut world)) {
        Ok(()) => Ok(Report {
            steps: world.step,
            requests: *world.shared.answered.lock(),
            ..world.report
        }),
        Err(what) => {
            let failure = Failure {
                seed,
                step: world.step,
                what,
                events: world.events.iter().cloned().collect(),
            };
            std::mem::forget(world);
            Err(Box::new(failure))
        }
    }
}
