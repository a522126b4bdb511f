//! A lane: one source's way to one queue of its disk, and the order of requests that need an order.
//!
//! ```text
//!            pull                      enter gate
//!  source ─────────▶ batch ───────────────────────────▶ device queue
//!    ▲                 │ PREFLUSH, BARRIER, gate closed      │ poll
//!    │                 ▼                                     │
//!    │               held ── one step of an order at a time ─┤
//!    └───────────────── complete, push ◀─────────────────────┘
//! ```
//!
//! Invariants: a request that was pulled is either held, in an order, or at the device until its completion
//! goes to the source (`outstanding` counts them). While a request is held or a barrier runs, no more are
//! pulled. A barrier runs only while this lane holds the gate closed and no lane has a request at the device.
//! The same is true of a write of a part of a block, which is read, changed and written.

use crate::backend::Disk;
use crate::events::Health;
use crate::gate::Pass;
use crate::lost_writes::{LostWritesQueue, promises};
use crate::parts::{PARTS_IN_FLIGHT, Parts};
use crate::source::{RequestSource, SourceEnd};
use crate::stall::Stall;
use pvblk_block::trace::{self, Phase, Tracer};
use pvblk_block::{Completion, Error, Op, Queue, Readiness, Request, RequestFlags, SECTOR, Status};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tags from here on are the lane's own; a source's are below.
pub(crate) const INTERNAL_TAG: u64 = 1 << 63;
const BARRIER_TAG: u64 = INTERNAL_TAG | 1 << 62;

/// Most sectors (512 B) that a lane submits in one step: 256 KiB. A device may copy the data while it is
/// submitted, and the worker's other lanes wait for that.
const STEP_SECTORS: u64 = 512;
/// Number of sectors of data, 64 KiB, after which a lane's turn is over; a step leaves work that isn't urgent
/// to the next one.
pub(crate) const TURN_SECTORS: u64 = 128;

/// Interval at which a lane looks again that waits for other lanes' requests, or for the gate.
const ORDER_POLL: Duration = Duration::from_micros(100);

/// Progress of a barrier: flush, write (if there is data), flush. Earlier writes are stable before
/// the barrier's, and the barrier's before any later one. For a part of a block it is read, write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BarrierStage {
    Draining,
    FlushBefore,
    Writing,
    FlushAfter,
    ReadingBlock,
    WritingBlock,
}

struct Barrier {
    stage: BarrierStage,
    request: Option<Box<Request>>,
}

/// A write of a part of a block, while the block is read.
#[derive(Default)]
struct Partial {
    flags: RequestFlags,
    /// Bytes of the block that stay as they are: at its beginning and at its end.
    stay: (usize, usize),
    bytes: Vec<u8>,
}

/// One source's way to its disk. Workers step lanes, and so can a simulation.
pub struct Lane {
    /// Declared before the source, so that it is dropped first: the source's memory must stay while
    /// requests are at the device.
    queue: Queue,
    source: Box<dyn RequestSource>,
    pass: Pass,
    depth: usize,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
    held: VecDeque<Box<Request>>,
    /// Long requests, which go to the device in parts.
    parts: Parts,
    /// Writes that wait for their flush; the index is in the flush's tag.
    preflush: Vec<Option<Box<Request>>>,
    barrier: Option<Barrier>,
    partial: Partial,
    /// Number of requests of orders at the device: while there are any, completions are looked at
    /// one by one.
    special: usize,
    outstanding: usize,
    end: Option<SourceEnd>,
    /// True if the source's descriptor was reported readable; used for sources whose poll is a
    /// system call.
    may_pull: bool,
    /// Sectors of data that its last step copied, or about as many.
    work: u64,
    /// Other disks have work on the same worker.
    company: bool,
    /// The last step ended before its responses were pushed.
    owes_push: bool,
    /// While flushes have to fail: the record of lost writes, and the index of the next request.
    owed: Option<Box<(LostWritesQueue, u16)>>,
    tracer: Tracer,
    stall: Arc<Stall>,
    health: Arc<Health>,
    /// Time until which a stopped lane waits for its last responses to be taken.
    lingers: Option<Instant>,
}

/// Longest time for a peer to read the last responses of a lane that was stopped.
const LINGER: Duration = Duration::from_secs(2);

impl Lane {
    /// A lane from `source` to a new queue of `disk`, through the disk's gate.
    pub fn open(disk: &Disk, mut source: Box<dyn RequestSource>) -> Result<Lane, Error> {
        source.served_as(disk.name());
        // A barrier or flush of the lane's own, and parts, are added to the requests that the source has in
        // flight.
        let (queue, tracer) = disk.open_queue(source.depth() + 1 + PARTS_IN_FLIGHT)?;
        let parts = Parts::new(queue.limits());
        let owed = source.lost_writes();
        Ok(Lane {
            depth: source.depth() as usize,
            owed: owed.map(|queue| Box::new((queue, source.position()))),
            source,
            queue,
            pass: disk.pass(),
            batch: Vec::new(),
            done: Vec::new(),
            held: VecDeque::new(),
            parts,
            preflush: Vec::new(),
            barrier: None,
            partial: Partial::default(),
            special: 0,
            outstanding: 0,
            end: None,
            may_pull: true,
            work: 0,
            company: false,
            owes_push: false,
            tracer,
            stall: Arc::clone(disk.stall()),
            health: Arc::clone(disk.health()),
            lingers: None,
        })
    }

    /// Does the work that can be done now; true if there was any.
    #[inline]
    pub fn step(&mut self) -> bool {
        self.work = 0;
        if self.owes_push {
            self.push();
            if self.has_worked() {
                return true;
            }
        }
        let (mut moved, holds) = match self.holds() {
            true => (false, true),
            false if self.end.is_none() => self.pull(),
            false => (false, false),
        };
        if holds {
            moved |= self.advance_held();
        }
        if self.queue.in_flight() > 0 {
            let n = self.queue.poll(&mut self.done);
            if n > 0 {
                moved = true;
                self.pass.leave(n as u32);
                if self.special > 0 {
                    self.sort_out_special();
                }
                self.outstanding -= self.done.len();
                let failed = self.done.iter().any(|c| c.status != Status::Ok);
                if failed || self.health.is_in_trouble() {
                    self.health.ended(&self.done);
                }
                self.tracer.completed(&self.done);
                self.source.complete(&mut self.done);
            }
        }
        if self.company && self.has_worked() {
            // Data was copied, and responses may have to be copied, too: that is the next step.
            self.owes_push = true;
            return true;
        }
        self.push();
        moved
    }

    #[inline]
    fn push(&mut self) {
        self.owes_push = false;
        match self.source.push() {
            Ok(bytes) => self.work += bytes as u64 / SECTOR,
            Err(end) => _ = self.end.get_or_insert(end),
        }
    }

    /// Sectors of data that its last step copied, or about as many: a measure of the worker's time that the
    /// step took.
    #[inline]
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// Tells the lane if other disks have work on the same worker: then steps are shorter.
    #[inline]
    pub(crate) fn set_company(&mut self, company: bool) {
        if self.company != company {
            self.company = company;
            self.source.in_company(company);
        }
    }

    #[inline]
    fn has_worked(&self) -> bool {
        self.work >= TURN_SECTORS
    }

    /// True while requests that were pulled are still to be submitted.
    #[inline]
    fn holds(&self) -> bool {
        !self.held.is_empty() || self.barrier.is_some() || self.parts.is_cutting()
    }

    /// Pulls requests unless some are held. Returns true if there was any work, and true if
    /// requests are held now.
    #[inline]
    fn pull(&mut self) -> (bool, bool) {
        let room = self.depth - self.outstanding;
        if room == 0 || !self.may_pull {
            return (false, false);
        }
        let result = self.source.pull(room, &mut self.batch);
        // If a request came, more may follow: one more look is cheaper than a sleep. If none came,
        // a level-triggered descriptor reports the next one by itself.
        self.may_pull = !self.batch.is_empty() || !self.source.poll_is_syscall();
        let failed = self.owed.is_some() && self.fail_flushes();
        let traced = trace::is_on();
        if traced {
            self.tracer.arrived(&self.batch);
        }
        let pulled = match result {
            Ok(p) => p,
            Err(end) => {
                self.end = Some(end);
                self.held.extend(self.batch.drain(..));
                self.outstanding += self.held.len();
                return (true, self.holds());
            }
        };
        if self.batch.is_empty() {
            return (failed, false);
        }
        self.outstanding += self.batch.len();
        let sectors: u64 = self.batch.iter().map(|r| r.sectors).sum();
        let at_once = !pulled.ordered && sectors <= STEP_SECTORS;
        if !at_once || !self.pass.enter(self.batch.len() as u32) {
            self.held.extend(self.batch.drain(..));
            return (true, true);
        }
        if traced {
            self.trace_issue();
        }
        self.work += sectors;
        self.queue.submit(&mut self.batch);
        (true, false)
    }

    /// Fails the flushes of the batch whose success would mean that lost writes are stable. True if there
    /// were any.
    #[cold]
    fn fail_flushes(&mut self) -> bool {
        let Some(owed) = &mut self.owed else {
            return false;
        };
        let (lost, next) = &mut **owed;
        let from = std::mem::replace(next, self.source.position());
        if !lost.fails(from) {
            self.owed = None;
            return false;
        }
        let failed = self.batch.extract_if(.., |r| promises(r));
        let status = Status::IoError;
        let mut failed: Vec<_> = failed
            .map(|request| Completion { request, status })
            .collect();
        if failed.is_empty() {
            return false;
        }
        self.source.complete(&mut failed);
        match self.source.push() {
            Ok(_) => lost.tell(),
            Err(end) => self.end = Some(end),
        }
        true
    }

    /// Moves held requests on, in order, as far as orders and the gate allow.
    #[cold]
    fn advance_held(&mut self) -> bool {
        let mut moved = self.advance_barrier();
        let mut room = STEP_SECTORS;
        while self.barrier.is_none() {
            if self.parts.is_cutting() {
                if !self.issue_part(&mut room) {
                    break;
                }
                moved = true;
                continue;
            }
            let Some(first) = self.held.front() else {
                break;
            };
            let flags = first.flags;
            if flags.intersects(RequestFlags::BARRIER | RequestFlags::PARTIAL) {
                if !self.pass.try_close() {
                    break;
                }
                self.barrier = Some(Barrier {
                    stage: BarrierStage::Draining,
                    request: self.held.pop_front(),
                });
                moved |= self.advance_barrier();
            } else if flags.contains(RequestFlags::PREFLUSH) {
                if !self.pass.enter(1) {
                    break;
                }
                let request = self.held.pop_front();
                let index = self.park(request);
                self.submit_special(Request::new(Op::Flush, 0, 0, INTERNAL_TAG | index));
                moved = true;
            } else if self.parts.is_long(first) {
                if let Some(request) = self.held.pop_front() {
                    self.tracer.requests(Phase::Issue, [&*request]);
                    self.parts.begin(request);
                }
            } else {
                let ordered =
                    RequestFlags::BARRIER | RequestFlags::PREFLUSH | RequestFlags::PARTIAL;
                let mut run = 0;
                for request in &self.held {
                    let cost = Parts::cost(request);
                    let waits = request.flags.intersects(ordered) || self.parts.is_long(request);
                    if waits || cost > room {
                        break;
                    }
                    room -= cost;
                    self.work += cost;
                    run += 1;
                }
                if run == 0 {
                    break; // in the next step
                }
                if !self.pass.enter(run as u32) {
                    break;
                }
                self.batch.extend(self.held.drain(..run));
                self.issue();
                moved = true;
            }
        }
        moved
    }

    /// Submits the next part of a long request, if it may be at the device now.
    fn issue_part(&mut self, room: &mut u64) -> bool {
        if self.parts.next_cost() > *room || !self.parts.may_issue() || !self.pass.enter(1) {
            return false;
        }
        let part = self.parts.issue();
        *room -= Parts::cost(&part);
        self.work += Parts::cost(&part);
        self.special += 1;
        self.batch.push(part);
        self.queue.submit(&mut self.batch);
        true
    }

    fn park(&mut self, request: Option<Box<Request>>) -> u64 {
        let index = match self.preflush.iter().position(Option::is_none) {
            Some(i) => i,
            None => {
                self.preflush.push(None);
                self.preflush.len() - 1
            }
        };
        self.preflush[index] = request;
        index as u64
    }

    /// Submits the batch, whose requests have entered the gate.
    fn issue(&mut self) {
        self.trace_issue();
        self.queue.submit(&mut self.batch);
    }

    fn trace_issue(&mut self) {
        let of_source = |r: &&Request| r.tag & INTERNAL_TAG == 0;
        let requests = self.batch.iter().map(|r| &**r).filter(of_source);
        self.tracer.requests(Phase::Issue, requests);
    }

    /// Submits a request that the lane has already entered the gate for.
    fn submit_special(&mut self, request: Box<Request>) {
        self.special += 1;
        self.batch.push(request);
        self.issue();
    }

    /// Starts a drained barrier's first step.
    fn advance_barrier(&mut self) -> bool {
        let Some(barrier) = &mut self.barrier else {
            return false;
        };
        if barrier.stage != BarrierStage::Draining || !self.pass.is_drained() {
            return false;
        }
        self.pass.enter(1);
        let is_partial = |r: &mut Box<Request>| r.flags.contains(RequestFlags::PARTIAL);
        if let Some(request) = barrier.request.take_if(is_partial) {
            barrier.stage = BarrierStage::ReadingBlock;
            let request = self.partial.begin(request);
            self.submit_special(request);
            return true;
        }
        barrier.stage = BarrierStage::FlushBefore;
        self.submit_special(Request::new(Op::Flush, 0, 0, BARRIER_TAG));
        true
    }

    /// Takes the completions of orders out of `done` and starts their next step.
    #[cold]
    fn sort_out_special(&mut self) {
        let mut i = 0;
        while i < self.done.len() {
            let tag = self.done[i].request.tag;
            let is_barrier = self
                .barrier
                .as_ref()
                .is_some_and(|b| b.stage != BarrierStage::Draining);
            if is_barrier {
                // No other request of this lane is at the device.
                let completion = self.done.swap_remove(i);
                self.special -= 1;
                self.barrier_step_done(completion);
                return;
            }
            if tag & INTERNAL_TAG == 0 {
                i += 1;
                continue;
            }
            let flush = self.done.swap_remove(i);
            self.special -= 1;
            if let Some(part) = Parts::index_of(tag) {
                self.done.extend(self.parts.complete(part, flush.status));
                continue;
            }
            let Some(request) = self.preflush[(tag & !INTERNAL_TAG) as usize].take() else {
                debug_assert!(false, "a flush without its write");
                continue;
            };
            if flush.status == Status::Ok {
                let mut request = request;
                request.flags.remove(RequestFlags::PREFLUSH);
                // The write goes at once, before held requests: a barrier that came later waits for
                // it.
                if self.pass.enter(1) {
                    self.batch.push(request);
                    self.issue();
                } else {
                    self.held.push_front(request);
                }
            } else {
                self.done.push(Completion {
                    request,
                    status: flush.status,
                });
            }
        }
    }

    fn barrier_step_done(&mut self, mut completion: Completion) {
        let Some(barrier) = &mut self.barrier else {
            return;
        };
        let status = completion.status;
        let next = match barrier.stage {
            BarrierStage::ReadingBlock => {
                self.partial.end(&mut completion.request);
                if status == Status::Ok {
                    barrier.stage = BarrierStage::WritingBlock;
                    self.pass.enter(1);
                    return self.submit_special(completion.request);
                }
                None
            }
            _ if status != Status::Ok => None,
            BarrierStage::FlushBefore => match &barrier.request {
                Some(r) if r.op == Op::Write => {
                    barrier.stage = BarrierStage::Writing;
                    barrier.request.take().map(|mut r| {
                        r.flags.remove(RequestFlags::BARRIER);
                        r
                    })
                }
                _ => None,
            },
            BarrierStage::Writing => {
                barrier.stage = BarrierStage::FlushAfter;
                Some(Request::new(Op::Flush, 0, 0, BARRIER_TAG))
            }
            BarrierStage::Draining | BarrierStage::FlushAfter | BarrierStage::WritingBlock => None,
        };
        if completion.request.tag & INTERNAL_TAG == 0 {
            barrier.request = Some(completion.request);
        }
        if let Some(request) = next {
            self.pass.enter(1);
            self.submit_special(request);
            return;
        }
        if let Some(Barrier {
            request: Some(request),
            ..
        }) = self.barrier.take()
        {
            self.done.push(Completion { request, status });
        }
        self.pass.open();
    }

    /// Stops pulling; outstanding requests complete.
    pub fn stop(&mut self) {
        self.end.get_or_insert(SourceEnd::Closed);
    }

    /// The reason why the lane has ended, once it has and no request is outstanding.
    pub fn finished(&mut self) -> Option<SourceEnd> {
        if self.outstanding > 0 || self.end.is_none() {
            return None;
        }
        if self.source.wants_write() {
            let until = *self.lingers.get_or_insert_with(|| Instant::now() + LINGER);
            if Instant::now() < until {
                return None;
            }
        }
        self.end.take()
    }

    /// The last look before sleep, at both ends.
    pub fn arm(&mut self) -> Readiness {
        let mut device = self.queue.arm();
        if self.holds() && !self.parts.waits_for_own() {
            // Another lane's progress opens the way, and doesn't wake this one.
            let soon = Readiness::Wait(Some(Instant::now() + ORDER_POLL));
            device = earlier(device, soon);
        }
        if self.end.is_some() || self.outstanding == self.depth {
            let deadline = self.source.deadline();
            let deadline = min_deadline(deadline, self.lingers.filter(|_| self.end.is_some()));
            return earlier(device, Readiness::Wait(deadline));
        }
        let source = self.source.arm();
        if source == Readiness::Ready {
            self.may_pull = true;
        }
        earlier(device, source)
    }

    /// Notes that the source's descriptor was reported.
    pub fn source_woken(&mut self) {
        self.source.woken();
        self.may_pull = true;
    }

    /// True if requests can be pulled, so that the source's descriptor is of interest.
    pub fn wants_read(&self) -> bool {
        self.end.is_none() && self.outstanding < self.depth && self.source.wants_read()
    }

    /// True if responses wait for the descriptor to be writable.
    pub fn wants_write(&self) -> bool {
        self.source.wants_write()
    }

    /// Gives back memory that is kept for reuse: no request has come for a while.
    pub fn rest(&mut self) {
        self.source.rest();
        self.partial.bytes = Vec::new();
        self.batch.shrink_to_fit();
        self.done.shrink_to_fit();
        self.held.shrink_to_fit();
    }

    /// Notes that the device queue's descriptor was reported.
    pub fn device_woken(&mut self) {
        self.queue.woken();
    }

    /// Makes the next step look at the source even if that costs a system call.
    pub fn poll_source(&mut self) {
        self.may_pull = true;
    }

    /// True if each look at the source is a system call and nothing is at the device.
    pub fn polls_by_syscall(&self) -> bool {
        self.source.poll_is_syscall() && self.queue.in_flight() == 0
    }

    /// The source's descriptor.
    pub fn source_fd(&self) -> Option<BorrowedFd<'_>> {
        self.source.wait_fd()
    }

    /// The device queue's descriptor; it may appear with the first request.
    pub fn device_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wait_fd()
    }

    /// The record of blocked lanes of its disk.
    pub(crate) fn stall(&self) -> &Arc<Stall> {
        &self.stall
    }

    /// Disk and queue, for the log.
    pub fn describe(&self) -> String {
        self.source.describe()
    }
}

impl Partial {
    /// Makes the write a read of its block, and keeps the data to be written.
    fn begin(&mut self, mut request: Box<Request>) -> Box<Request> {
        let (first, last) = (request.scratch & 0xffff, request.scratch >> 16);
        self.stay = (first as usize, last as usize);
        self.flags = request.flags;
        self.bytes.clear();
        for b in &request.buffers {
            let at = self.bytes.len();
            self.bytes.resize(at + b.len(), 0);
            b.read(0, &mut self.bytes[at..]);
        }
        request.op = Op::Read;
        request.flags = RequestFlags::empty();
        request.scratch = 0;
        request
    }

    /// Makes it the write again, with the bytes that stay from the block that was read.
    fn end(&mut self, request: &mut Request) {
        request.op = Op::Write;
        request.flags = self.flags - RequestFlags::PARTIAL;
        let end = self.bytes.len().saturating_sub(self.stay.1);
        let mut at = 0;
        for b in &request.buffers {
            let from = self.stay.0.clamp(at, at + b.len());
            let until = end.clamp(from, at + b.len());
            b.write(from - at, &self.bytes[from..until]);
            at += b.len();
        }
    }
}

fn earlier(a: Readiness, b: Readiness) -> Readiness {
    match (a, b) {
        (Readiness::Ready, _) | (_, Readiness::Ready) => Readiness::Ready,
        (Readiness::Wait(x), Readiness::Wait(y)) => Readiness::Wait(min_deadline(x, y)),
    }
}

fn min_deadline(x: Option<Instant>, y: Option<Instant>) -> Option<Instant> {
    match (x, y) {
        (Some(x), Some(y)) => Some(x.min(y)),
        (x, y) => x.or(y),
    }
}
