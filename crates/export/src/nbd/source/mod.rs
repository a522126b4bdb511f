//! One NBD connection in the transmission phase, as a source of requests.
//!
//! Invariants: a slot is in use from the moment a request's header is taken until its reply is queued,
//! or, with data to send, until they are sent. Buffers belong to the slot, to its one request at the
//! device, or to the pool, never to two of them. Nothing is read from the socket while slots, memory or
//! unsent replies are at their bound: the client waits in its own socket.

mod intake;
mod issue;
mod stall;
mod status;
mod walk;

use super::check::Terms;
use super::config::NbdConfig;
use super::handshake::Negotiated;
use super::receive::Inbox;
use super::reply::{Outbox, Sent};
use super::shares::DiskShare;
use super::slots::{Cut, PartSize, Slots, Walk};
use super::window::Window;
use pvblk_backend::{
    BufferPool, LaneWaker, Pulled, RequestSource, SourceEnd, SpareRequests, Waiter,
};
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{
    BlockDevice, Buffer, Completion, Error, ErrorKind, Job, Limits, Readiness, Request, Status,
};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::Command;
use rustix::net::AddressFamily;
use stall::Stall;
use status::Statuses;
use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An idle connection gives back what it may not keep after this time; a busy one what it doesn't need, as often.
const IDLE: Duration = Duration::from_millis(100);

/// Bytes of requests that one pull takes: a worker's other lanes wait for it.
const PULLED_AT_ONCE: u64 = 256 << 10;

/// What the next bytes from the client are.
enum Expect {
    Header,
    /// The payload of the write in `slot`, of which `filled` bytes are here.
    Payload {
        slot: u32,
        filled: usize,
    },
    /// The payload of a refused write: `left` bytes to drop, then this reply.
    Refused {
        left: usize,
        cookie: u64,
        error: u32,
    },
}

/// See the module's documentation.
pub struct NbdSource {
    name: String,
    socket: Arc<OwnedFd>,
    device: Arc<dyn BlockDevice>,
    limits: Limits,
    terms: Terms,
    depth: u32,
    inbox: Inbox,
    expect: Expect,
    slots: Slots,
    outbox: Outbox,
    pool: BufferPool,
    scratch: Vec<Buffer>,
    spare: SpareRequests,
    cut: Option<Cut>,
    /// Requests that are made step by step, besides `cut`.
    walks: VecDeque<Walk>,
    part: PartSize,
    /// Bytes that this pull may still take.
    left: u64,
    /// This pull has a request for a part of a block.
    partial: bool,
    /// The last receive took all it may at a time.
    more_received: bool,
    /// A block status was answered in this pull.
    described: bool,
    statuses: Statuses,
    /// Slots whose flush is due.
    flushes: Vec<u32>,
    /// Slots that will need one.
    flushes_later: usize,
    /// Requests at the device.
    in_flight: u32,
    /// A bound is reached: nothing is taken from the inbox or the socket until something is freed.
    held_up: bool,
    /// The socket took all it could; the next try is after [`RequestSource::woken`].
    full: bool,
    /// The client left in order: no more requests.
    leaving: bool,
    /// The socket is of no use any more.
    dead: bool,
    /// Something happened since the last `arm`.
    busy: bool,
    /// Bytes received.
    received: u64,
    unread: Stall,
    unsent: Stall,
    stall_timeout: Duration,
    /// When to look whether the client is stalled.
    let_go_at: Option<Instant>,
    share: Arc<DiskShare>,
    waker: Option<LaneWaker>,
    /// How it waits for the disk's memory, once it is with a worker.
    waiter: Option<Arc<Waiter>>,
    /// It waits for that now.
    short: bool,
    trim_at: Option<Instant>,
    inbox_gauge: Gauge,
    _guard: Option<Box<dyn Any + Send>>,
}

impl NbdSource {
    /// A connection that has been negotiated. `socket` is a stream socket; it needn't be non-blocking.
    pub fn new(
        name: &str,
        socket: OwnedFd,
        negotiated: Negotiated,
        config: &NbdConfig,
    ) -> NbdSource {
        let disk = negotiated.export.clone();
        let socket = Arc::new(socket);
        let share = DiskShare::alone();
        NbdSource::with_share(name, &disk, socket, negotiated, config, share, None)
    }

    /// As [`NbdSource::new`], for a disk of that name with this share; `guard` is dropped with the source.
    pub(super) fn with_share(
        name: &str,
        disk: &str,
        socket: Arc<OwnedFd>,
        negotiated: Negotiated,
        config: &NbdConfig,
        share: Arc<DiskShare>,
        guard: Option<Box<dyn Any + Send>>,
    ) -> NbdSource {
        let device = negotiated.device;
        let limits = device.limits();
        let depth = config.bounded_depth();
        let terms = Terms::new(
            negotiated.transmission_flags,
            negotiated.structured,
            negotiated.base_allocation,
            device.capacity_sectors(),
        );
        let pool = BufferPool::new(
            &config.pressure,
            disk,
            &format!("{name}: data"),
            device.buffer_source(),
            config.bounded_in_flight() / pvblk_sys::PAGE_SIZE,
        )
        .with_budget(&share.memory);
        let domain = rustix::net::sockopt::socket_domain(&socket);
        let window = (domain == Ok(AddressFamily::UNIX)).then(Window::default);
        NbdSource {
            name: name.to_owned(),
            socket,
            limits,
            terms,
            depth,
            inbox: Inbox::new(negotiated.leftover),
            expect: Expect::Header,
            slots: Slots::new(2 * depth as usize),
            outbox: Outbox::new(negotiated.structured, window),
            pool,
            scratch: Vec::new(),
            spare: SpareRequests::default(),
            cut: None,
            walks: VecDeque::new(),
            part: PartSize::of(&limits),
            left: 0,
            partial: false,
            more_received: false,
            described: false,
            statuses: Statuses::default(),
            flushes: Vec::new(),
            flushes_later: 0,
            in_flight: 0,
            held_up: false,
            full: false,
            leaving: false,
            dead: false,
            busy: true,
            received: 0,
            unread: Stall::default(),
            unsent: Stall::default(),
            stall_timeout: config.stall_timeout,
            let_go_at: None,
            share,
            waker: None,
            waiter: None,
            short: false,
            trim_at: None,
            inbox_gauge: Gauge::new(format!("{name}: inbox"), MemoryKind::Heap, 128 << 10),
            device,
            _guard: guard,
        }
    }

    /// Bytes that were sent.
    #[cfg(test)]
    pub(super) fn passed(&self) -> u64 {
        self.outbox.passed()
    }

    fn broken(&self, what: impl std::fmt::Display) -> SourceEnd {
        SourceEnd::Broken(Error::protocol(format!("{}: {what}", self.name)))
    }

    fn lost(&self, e: io::Error) -> SourceEnd {
        SourceEnd::Broken(Error::caused(
            ErrorKind::Disconnected,
            format!("{}: connection lost", self.name),
            e,
        ))
    }

    /// True if a request could be yielded without reading from the socket.
    fn has_work(&self) -> bool {
        self.in_flight < self.depth
            && (self.cut.is_some()
                || self.more_received
                || (self.short && self.waiter.is_none())
                || self.has_steps()
                || !self.flushes.is_empty()
                || (!self.held_up && !self.leaving && self.has_input()))
    }

    /// True once nothing is left to be yielded to a client that leaves.
    fn is_over(&self) -> bool {
        self.leaving
            && self.cut.is_none()
            && self.walks.is_empty()
            && self.statuses.is_empty()
            && self.flushes_later == 0
    }

    /// Answers a slot of which everything is done.
    fn finish(&mut self, index: u32) {
        let slot = self.slots.get_mut(index);
        let (cookie, status) = (slot.cookie, slot.status);
        let send_data = status == Status::Ok && slot.command == Command::Read && !self.dead;
        if send_data {
            slot.look();
            let (offset, len) = (slot.offset, slot.len);
            self.outbox.data(cookie, offset, len, index);
            return;
        }
        if !slot.buffers.is_empty() {
            self.pool.give(&mut slot.buffers);
        }
        self.slots.remove(index);
        self.held_up = false;
        if self.dead {
            return;
        }
        match proto::error_of(status) {
            0 => self.outbox.done(cookie),
            error => self.outbox.error(cookie, error),
        }
    }

    /// Forgets the client.
    fn bury(&mut self) {
        self.dead = true;
        self.leaving = true;
        let (pool, slots) = (&mut self.pool, &mut self.slots);
        self.outbox.clear(|index| free(pool, slots, index));
    }

    /// When to give back what isn't needed.
    fn arm_idle(&mut self) -> Option<Instant> {
        if !self.busy && self.trim_at.is_none() {
            return None;
        }
        let now = Instant::now();
        let due = self.trim_at.is_some_and(|at| now >= at);
        let idle = self.slots.used() == 0 && self.outbox.len() == 0;
        if due && idle && !self.busy {
            self.trim();
            self.trim_at = None;
            return None;
        }
        if due {
            let job = self.pool.decay_elsewhere();
            self.leave(job);
        }
        if due || self.trim_at.is_none() {
            self.trim_at = Some(now + IDLE);
            self.busy = false;
        }
        self.trim_at
    }

    /// Gives back memory that isn't needed, or all; much of it on a thread of the disk's, as others on this worker would have to wait.
    fn give_back(&mut self, all: bool) {
        let job = self.pool.rest_elsewhere(all);
        self.leave(job);
    }

    /// Leaves a job to the disk's threads.
    fn leave(&self, job: Option<Job>) {
        let Some(job) = job else {
            return;
        };
        let left = match &self.share.questions {
            Some(disk) => disk.leave(job).err(),
            None => Some(job),
        };
        if let Some(job) = left {
            job();
        }
    }

    fn trim(&mut self) {
        self.give_back(false);
        self.inbox.release();
        self.inbox_gauge.set(self.inbox.capacity() as u64);
        self.spare.release();
    }
}

/// Frees a slot whose data are sent.
fn free(pool: &mut BufferPool, slots: &mut Slots, index: u32) {
    let slot = slots.get_mut(index);
    slot.view.clear();
    pool.give(&mut slot.buffers);
    slots.remove(index);
}

impl RequestSource for NbdSource {
    fn bind(&mut self, waker: LaneWaker) {
        let woken = waker.clone();
        self.waiter = Some(Waiter::new(move || woken.wake()));
        self.waker = Some(waker);
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let before = out.len();
        let target = before + room.min((self.depth - self.in_flight) as usize);
        self.left = PULLED_AT_ONCE;
        self.partial = false;
        self.take_answers();
        self.issue_flushes(target, out);
        self.issue_parts(target, out);
        self.issue_steps(target, out);
        if self.cut.is_none() {
            self.parse(target, out)?;
            // What was here already comes first; the socket's turn is next time. An end of the stream counts only after
            // all that came before it, and a full inbox has no room to receive.
            let more = target > before && !self.held_up && !self.leaving && !self.has_input();
            if out.len() == before && more {
                self.receive()?;
                self.parse(target, out)?;
            }
        }
        self.busy |= out.len() > before;
        if self.is_over() && out.len() == before {
            return Err(SourceEnd::Closed);
        }
        Ok(Pulled {
            ordered: self.partial,
        })
    }

    fn complete(&mut self, done: &mut Vec<Completion>) {
        self.busy |= !done.is_empty();
        for Completion {
            mut request,
            status,
        } in done.drain(..)
        {
            let index = request.tag as u32;
            self.in_flight -= 1;
            let slot = self.slots.get_mut(index);
            if slot.whole {
                if slot.op.has_data() && request.buffers.is_empty() {
                    // The device lost the request, and the data's memory with it.
                    self.pool.lose(slot.whole_len() as usize);
                }
                std::mem::swap(&mut request.buffers, &mut slot.buffers);
                slot.whole = false;
            }
            self.spare.keep(request);
            slot.pending -= 1;
            if slot.status == Status::Ok {
                slot.status = status;
            }
            if slot.pending > 0 || !slot.issued {
                continue;
            }
            if std::mem::take(&mut slot.then_flush) {
                if slot.status == Status::Ok && !self.dead {
                    self.flushes.push(index);
                    continue;
                }
                self.flushes_later -= 1;
            }
            self.finish(index);
        }
    }

    fn push(&mut self) -> Result<usize, SourceEnd> {
        let mut late = false;
        if self.outbox.len() == 0 || self.full {
            self.pool.settle();
            late = self.is_late();
            if !late {
                return Ok(0);
            }
        }
        // One that is late gets a last chance: a socket takes some before it says that it is writable.
        self.busy = true;
        let pool = &mut self.pool;
        let held_up = &mut self.held_up;
        let before = self.outbox.passed();
        let sent = self
            .outbox
            .send(self.socket.as_fd(), &mut self.slots, |slots, index| {
                free(pool, slots, index);
                *held_up = false;
            });
        match sent {
            Ok(sent) => {
                self.pool.settle();
                self.full = sent == Sent::Full;
                // Queued errors hold a client up, too.
                self.held_up &= self.outbox.len() > 0 || self.short;
                if late {
                    self.check_stall()?;
                }
                Ok((self.outbox.passed() - before) as usize)
            }
            Err(e) => {
                let ended_in_order = self.leaving;
                self.bury();
                // A client that said goodbye needn't wait for its replies.
                Err(if ended_in_order {
                    SourceEnd::Closed
                } else {
                    self.lost(e)
                })
            }
        }
    }

    fn in_company(&mut self, company: bool) {
        self.outbox.in_company(company);
    }

    fn arm(&mut self) -> Readiness {
        let replies_to_send = self.outbox.len() > 0 && !self.full;
        if self.has_work() || self.is_over() || replies_to_send {
            return Readiness::Ready;
        }
        let stalled = self.deadline();
        match self.arm_idle() {
            Some(at) => Readiness::Wait(Some(stalled.map_or(at, |s| s.min(at)))),
            None => Readiness::Wait(stalled),
        }
    }

    fn deadline(&mut self) -> Option<Instant> {
        self.let_go_at = self.stalled_at();
        self.let_go_at
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    /// False while a bound is reached, so that bytes in the socket are no reason to wake up.
    fn wants_read(&self) -> bool {
        !(self.held_up || self.leaving || self.dead)
    }

    fn wants_write(&self) -> bool {
        self.outbox.len() > 0
    }

    fn poll_is_syscall(&self) -> bool {
        !(self.has_work() || self.is_over())
    }

    fn woken(&mut self) {
        self.full = false;
    }
}

impl Drop for NbdSource {
    fn drop(&mut self) {
        // The pool's memory may be the device's: everything goes back.
        for slot in self.slots.iter_mut() {
            slot.view.clear();
            self.pool.give(&mut slot.buffers);
        }
        if self.short {
            self.share.memory.pass_on();
        }
        self.give_back(true);
    }
}

#[cfg(test)]
mod bounds_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
