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

mod limited;
mod order;
mod parts;
mod turn;

use crate::backend::Disk;
use crate::counters::Counting;
use crate::events::Health;
use crate::gate::Pass;
use crate::lost_writes::{LostWritesQueue, promises};
use crate::source::{RequestSource, SourceEnd};
use crate::stall::Stall;
use crate::throttle::Connection;
use limited::LaneThrottle;
use order::{Barrier, Partial};
use parts::{PARTS_IN_FLIGHT, Parts};
use pvblk_block::trace::{self, Phase, Tracer};
use pvblk_block::{Completion, Error, Queue, Readiness, Request, SECTOR, Status};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use turn::Turn;

/// Tags from here on are the lane's own; a source's are below.
pub(crate) const INTERNAL_TAG: u64 = 1 << 63;

/// Most sectors (512 B) that a lane submits in one step: 256 KiB. A device may copy the data while it is
/// submitted, and the worker's other lanes wait for that.
const STEP_SECTORS: u64 = 512;
/// Number of sectors of data, 64 KiB, after which a lane's turn is over; a step leaves work that isn't urgent
/// to the next one.
pub(crate) const TURN_SECTORS: u64 = 128;

/// Number of requests in a batch from which on the lane saves a look at the clock.
const ONE_LOOK: usize = 4;

/// Interval at which a lane looks again that waits for other lanes' requests, or for the gate.
const ORDER_POLL: Duration = Duration::from_micros(100);

/// A reason for which requests of a lane wait that neither its source nor its device ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Another lane's requests come first.
    Order,
    /// The disk's limits hold requests back, and none is at the device.
    Limits,
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
    turn: Turn,
    /// While flushes have to fail: the record of lost writes, and the index of the next request.
    owed: Option<Box<(LostWritesQueue, u16)>>,
    counters: Counting,
    /// Time at which requests of this lane ended in the step before, in ticks; 0 if none did, or if others were stepped since.
    last_look: u64,
    throttle: LaneThrottle,
    tracer: Tracer,
    stall: Arc<Stall>,
    health: Arc<Health>,
    /// Time until which a stopped lane waits for its last responses to be taken.
    lingers: Option<Instant>,
}

/// Longest time for a peer to read the last responses of a lane that was stopped.
const LINGER: Duration = Duration::from_secs(2);

impl Lane {
    /// A lane from `source` to a new queue of `disk`, through the disk's gate. It is a connection of its own.
    pub fn open(disk: &Disk, source: Box<dyn RequestSource>) -> Result<Lane, Error> {
        Lane::open_as(disk, None, source)
    }

    /// As [`Lane::open`], for a source of `connection`.
    pub fn open_as(
        disk: &Disk,
        connection: Option<Arc<Connection>>,
        mut source: Box<dyn RequestSource>,
    ) -> Result<Lane, Error> {
        source.served_as(disk.name());
        // A barrier or flush of the lane's own, and parts, are added to the requests that the source has in
        // flight.
        let connection = connection.unwrap_or_else(|| Connection::new(source.connection()));
        let counters = disk.counters().open(&connection, source.describe());
        if let Some(choice) = source.pull_choice() {
            counters.chooses(choice);
        }
        let depth = source.depth() + 1 + PARTS_IN_FLIGHT;
        let (queue, tracer) = disk.open_queue(depth, counters.merges())?;
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
            turn: Turn::default(),
            counters,
            throttle: LaneThrottle::new(disk.throttle(), connection),
            last_look: 0,
            tracer,
            stall: Arc::clone(disk.stall()),
            health: Arc::clone(disk.health()),
            lingers: None,
        })
    }

    /// Others were stepped since its last step, or may have been.
    #[inline]
    pub(crate) fn begin_turn(&mut self) {
        self.last_look = 0;
    }

    /// Does the work that can be done now; true if there was any.
    #[inline]
    pub fn step(&mut self) -> bool {
        self.turn.begin();
        if self.turn.owes_push() && self.push_owed() {
            return true;
        }
        let (mut moved, holds) = match self.holds() {
            true => (false, true),
            false if self.end.is_none() => self.pull(),
            false => self.let_go(),
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
                let failed = self.count_ended();
                if failed || self.health.is_in_trouble() {
                    self.health.ended(&self.done);
                }
                self.tracer.completed(&self.done);
                self.source.complete(&mut self.done);
            }
        }
        if self.turn.leaves_push() {
            // Data was copied, and responses may have to be copied, too: that is the next step.
            return true;
        }
        self.push();
        moved
    }

    /// Pushes the responses that the last step left. True if that was enough for this one.
    #[cold]
    fn push_owed(&mut self) -> bool {
        self.turn.takes_up_push();
        self.push();
        self.turn.is_over()
    }

    #[inline]
    fn push(&mut self) {
        match self.source.push() {
            Ok(bytes) => self.turn.copied(bytes as u64 / SECTOR),
            Err(end) => _ = self.end.get_or_insert(end),
        }
    }

    /// Sectors of data that its last step copied, or about as many.
    #[inline]
    pub(crate) fn work(&self) -> u64 {
        self.turn.sectors()
    }

    /// The worker's time that the last step took, in sectors: of data, and for each request as many as its copy would cost.
    #[inline]
    pub(crate) fn cost(&self) -> u64 {
        self.turn.cost()
    }

    /// Tells the lane if other disks have work on the same worker: then steps are shorter.
    #[inline]
    pub(crate) fn set_company(&mut self, company: bool) {
        if self.turn.set_company(company) {
            self.source.in_company(company);
        }
    }

    /// True while requests that were pulled are still to be submitted.
    #[inline]
    fn holds(&self) -> bool {
        !self.held.is_empty() || self.barrier.is_some() || self.parts.is_cutting()
    }

    /// The reason for which a lane without work isn't simply waited for.
    pub fn hold(&self) -> Option<Hold> {
        let other = self.holds() && !self.parts.waits_for_own();
        let limits = self.throttle.holds() && self.queue.in_flight() == 0;
        match (limits, other) {
            (true, _) => Some(Hold::Limits),
            (false, true) => Some(Hold::Order),
            (false, false) => None,
        }
    }

    /// Pulls requests unless some are held. Returns true if there was any work, and true if
    /// requests are held now.
    #[inline]
    fn pull(&mut self) -> (bool, bool) {
        let limited = self.throttle.is_on();
        let goes = !limited || self.may_pull_limited();
        let room = self.depth - self.outstanding;
        if room == 0 || !self.may_pull || !goes {
            return match limited {
                true => self.pass_waiting(),
                false => (false, false),
            };
        }
        let result = self.source.pull(room, &mut self.batch);
        // If a request came, more may follow: one more look is cheaper than a sleep. If none came,
        // a level-triggered descriptor reports the next one by itself.
        self.may_pull = !self.batch.is_empty() || !self.source.poll_is_syscall();
        let failed = self.owed.is_some() && self.fail_flushes();
        let traced = trace::is_on();
        if traced {
            self.tracer.arrived(&mut self.batch);
        }
        let pulled = match result {
            Ok(p) => p,
            Err(end) => {
                self.end = Some(end);
                self.count_taken();
                self.counters.fence_and_join();
                self.let_go();
                self.held.extend(self.batch.drain(..));
                return (true, self.holds());
            }
        };
        self.turn.submitted(pulled.answered);
        if self.batch.is_empty() {
            self.last_look = 0;
            let moved = failed || pulled.answered > 0;
            if limited {
                let (passed, holds) = self.pass_waiting();
                return (moved || passed, holds);
            }
            return (moved, false);
        }
        let mut sectors = self.count_taken();
        if limited {
            // They may not come to the gate for a while.
            self.counters.fence_and_join();
            sectors = self.limit(pulled.ordered);
            if self.batch.is_empty() {
                return (true, false);
            }
        }
        self.submit(pulled.ordered, sectors)
    }

    /// Submits the batch, or holds it if it has to stay in order, is long, or the gate is closed. Returns as [`Lane::pull`].
    #[inline]
    fn submit(&mut self, ordered: bool, sectors: u64) -> (bool, bool) {
        let at_once = !ordered && sectors <= STEP_SECTORS;
        if !at_once || !self.pass.enter(self.batch.len() as u32) {
            self.held.extend(self.batch.drain(..));
            self.counters.fence_and_join();
            return (true, true);
        }
        // A full fence is part of the entry.
        self.counters.join();
        if trace::is_on() {
            self.trace_issue();
        }
        self.turn.copied(sectors);
        self.turn.submitted(self.batch.len());
        self.queue.submit(&mut self.batch);
        (true, false)
    }

    /// Counts the batch, which was just pulled. Returns its sectors.
    #[inline]
    fn count_taken(&mut self) -> u64 {
        // A busy lane looks once for each batch: its last requests ended just now.
        let now = if self.last_look > 0 && self.batch.len() >= ONE_LOOK {
            self.last_look
        } else {
            self.counters.now()
        };
        self.last_look = 0;
        let idle = self.outstanding == 0;
        self.outstanding += self.batch.len();
        self.counters.taken(&mut self.batch, now, idle)
    }

    /// Counts requests that are done. True if one of them failed.
    #[inline]
    fn count_ended(&mut self) -> bool {
        if self.done.is_empty() {
            return false; // parts and flushes of the lane's own
        }
        let now = self.counters.now();
        self.outstanding -= self.done.len();
        let ended = self.counters.ended(&self.done, now, self.outstanding);
        self.last_look = if ended.later { 0 } else { now };
        ended.failed
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
        self.counters.refused(&mut failed);
        self.source.complete(&mut failed);
        match self.source.push() {
            Ok(_) => lost.tell(),
            Err(end) => self.end = Some(end),
        }
        true
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
        if self.throttle.is_on() {
            device = earlier(device, self.throttle.arm());
        }
        let deaf = self.outstanding == self.depth || self.throttle.is_paused();
        if self.end.is_some() || deaf {
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
        let takes = self.outstanding < self.depth && !self.throttle.is_paused();
        self.end.is_none() && takes && self.source.wants_read()
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

    /// True while requests are at the device.
    pub(crate) fn waits_for_device(&self) -> bool {
        self.queue.in_flight() > 0
    }

    /// True if each look at the source is a system call and nothing is at the device.
    pub fn polls_by_syscall(&self) -> bool {
        self.source.poll_is_syscall() && !self.waits_for_device()
    }

    /// True if a descriptor may tell what steps alone don't find out: that the source has requests, or room for responses, or that somebody
    /// waits for the device's descriptor to be cleared.
    pub(crate) fn is_told_by_descriptor(&self) -> bool {
        self.source.poll_is_syscall() || self.source.wants_write() || self.queue.wait_fd().is_some()
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

    /// The figures by which others see it.
    pub(crate) fn counting(&self) -> &Counting {
        &self.counters
    }

    /// Disk and queue, for the log.
    pub fn describe(&self) -> String {
        self.source.describe()
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
