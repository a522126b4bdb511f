//! One NBD connection in the transmission phase, as a source of requests.
//!
//! Invariants: a slot is in use from the moment a request's header is taken until its reply is queued,
//! or, with data to send, until they are sent. Buffers belong to the slot, to its one request at the
//! device, or to the pool, never to two of them. Nothing is read from the socket while slots, memory or
//! unsent replies are at their bound: the client waits in its own socket.

mod commands;
mod incoming;
mod intake;
mod issue;
mod memory;
mod stall;
mod status;

use super::check::Terms;
use super::config::NbdConfig;
use super::handshake::Negotiated;
use super::reply::{Outbox, Sent};
use super::shares::DiskShare;
use super::slots::Slots;
use super::stream::Stream;
use super::window::Window;
use incoming::Incoming;
use issue::Issuer;
use memory::Memory;
use pvblk_backend::{BufferPool, LaneWaker, Pulled, RequestSource, SourceEnd};
use pvblk_block::{BlockDevice, Completion, Error, ErrorKind, Limits, Readiness, Request, Status};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::Command;
use rustix::net::AddressFamily;
use stall::{Awaited, Patience};
use status::Statuses;
use std::any::Any;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An idle connection gives back what it may not keep after this time; a busy one what it doesn't need, as often.
const IDLE: Duration = Duration::from_millis(100);

/// See the module's documentation.
pub struct NbdSource {
    name: String,
    stream: Stream,
    device: Arc<dyn BlockDevice>,
    limits: Limits,
    terms: Terms,
    incoming: Incoming,
    slots: Slots,
    issuer: Issuer,
    outbox: Outbox,
    memory: Memory,
    statuses: Statuses,
    patience: Patience,
    rest: Rest,
    /// A block status was answered in this pull.
    described: bool,
    /// A bound is reached: nothing is taken from the inbox or the socket until something is freed.
    held_up: bool,
    /// The socket took all it could; the next try is after [`RequestSource::woken`].
    full: bool,
    /// The client left in order: no more requests.
    leaving: bool,
    /// The socket is of no use any more.
    dead: bool,
    _guard: Option<Box<dyn Any + Send>>,
}

/// When an idle connection gives back what it doesn't need.
struct Rest {
    /// Something happened since the last look.
    busy: bool,
    at: Option<Instant>,
}

/// Memory that is to be given back now.
enum Due {
    Nothing,
    /// Some of what wasn't needed lately.
    Some,
    All,
}

impl Rest {
    /// Sends an event while the source is busy, or while it is idle.
    #[inline]
    fn disturb(&mut self, busy: bool) {
        self.busy |= busy;
    }

    /// To be called before each sleep; `idle`: nothing is held for the client.
    fn look(&mut self, idle: bool) -> Due {
        if !self.busy && self.at.is_none() {
            return Due::Nothing;
        }
        let now = Instant::now();
        let due = self.at.is_some_and(|at| now >= at);
        if due && idle && !self.busy {
            self.at = None;
            return Due::All;
        }
        if due || self.at.is_none() {
            self.at = Some(now + IDLE);
            self.busy = false;
        }
        if due { Due::Some } else { Due::Nothing }
    }
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
        let stream = Stream::Plain(Arc::new(socket));
        let share = DiskShare::alone();
        NbdSource::with_share(name, &disk, stream, negotiated, config, share, None)
    }

    /// As [`NbdSource::new`], for a disk of that name with this share; `guard` is dropped with the source.
    pub(super) fn with_share(
        name: &str,
        disk: &str,
        stream: Stream,
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
            negotiated.mode,
            negotiated.contexts,
            device.capacity_sectors(),
        );
        let pool = BufferPool::new(
            &config.pressure,
            disk,
            &format!("{name}: data"),
            device.buffer_source(),
            config.bounded_in_flight() / pvblk_sys::PAGE_SIZE,
        );
        let domain = rustix::net::sockopt::socket_domain(stream.fd());
        let window = (domain == Ok(AddressFamily::UNIX)).then(Window::default);
        NbdSource {
            name: name.to_owned(),
            stream,
            limits,
            terms,
            incoming: Incoming::new(name, negotiated.mode, negotiated.leftover),
            slots: Slots::new(2 * depth as usize),
            issuer: Issuer::new(&limits, depth),
            outbox: Outbox::new(negotiated.mode, window),
            memory: Memory::new(pool, share),
            statuses: Statuses::new(Arc::clone(&device), negotiated.mode),
            patience: Patience::new(config.stall_timeout),
            rest: Rest {
                busy: true,
                at: None,
            },
            device,
            described: false,
            held_up: false,
            full: false,
            leaving: false,
            dead: false,
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
        self.issuer.room() > 0
            && (self.issuer.has_work(&self.slots)
                || self.memory.must_retry()
                || (!self.held_up
                    && !self.leaving
                    && (self.incoming.has_input() || self.incoming.has_more())))
    }

    /// True if bytes for the client are left.
    #[inline]
    fn has_output(&self) -> bool {
        self.outbox.len() > 0 || self.stream.has_unsent()
    }

    /// True once nothing is left to be yielded to a client that leaves.
    fn is_over(&self) -> bool {
        self.leaving && self.issuer.is_over() && self.statuses.len() == 0
    }

    /// The client's duties without which the connection can't go on.
    fn awaited(&self) -> Awaited {
        let replies = self.has_output() && self.full;
        // While all requests are at the device nothing is read, and the client isn't to blame.
        let payload = self.incoming.lacks_data() && self.issuer.room() > 0 && !self.leaving;
        Awaited {
            replies: replies.then(|| self.outbox.passed()),
            payload: payload.then(|| self.incoming.received()),
        }
    }

    /// Answers a slot of which everything is done.
    #[inline(always)]
    fn finish(&mut self, index: u32) {
        let slot = self.slots.get_mut(index);
        let (to, status) = (slot.to, slot.status);
        let send_data = status == Status::Ok && slot.command == Command::Read && !self.dead;
        if send_data {
            slot.look();
            // At most `MAX_PAYLOAD`.
            let len = slot.len as u32;
            self.outbox.data(to, len, index);
            return;
        }
        self.memory.give(&mut slot.buffers);
        self.slots.remove(index);
        self.held_up = false;
        if self.dead {
            return;
        }
        match proto::error_of(status) {
            0 => self.outbox.done(to),
            error => self.outbox.error(to, error),
        }
    }

    /// Forgets the client.
    fn bury(&mut self) {
        self.dead = true;
        self.leaving = true;
        let (memory, slots) = (&mut self.memory, &mut self.slots);
        self.outbox.clear(|index| free(memory, slots, index));
    }

    /// Gives back what isn't needed. Returns when to look again.
    fn arm_idle(&mut self) -> Option<Instant> {
        let idle = self.slots.used() == 0 && !self.has_output();
        match self.rest.look(idle) {
            Due::Nothing => {}
            Due::Some => self.memory.decay(),
            Due::All => {
                self.memory.rest(false);
                self.incoming.release();
                self.stream.release();
                self.issuer.release();
            }
        }
        self.rest.at
    }
}

/// Frees a slot whose data are sent.
#[inline(always)]
fn free(memory: &mut Memory, slots: &mut Slots, index: u32) {
    let slot = slots.get_mut(index);
    slot.view.clear();
    memory.give(&mut slot.buffers);
    slots.remove(index);
}

impl RequestSource for NbdSource {
    fn bind(&mut self, waker: LaneWaker) {
        self.memory.bind(&waker);
        self.statuses.bind(self.memory.share(), &waker);
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn depth(&self) -> u32 {
        self.issuer.depth()
    }

    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let (before, replies) = (out.len(), self.outbox.len());
        let target = before + room.min(self.issuer.room() as usize);
        self.issuer.begin();
        self.take_answers();
        self.issuer.issue_flushes(&mut self.slots, target, out);
        self.issuer.issue_parts(&mut self.slots, target, out);
        self.issue_steps(target, out);
        if !self.issuer.is_cutting() {
            self.parse(target, out)?;
            // What was here already comes first; the socket's turn is next time. An end of the stream counts only after
            // all that came before it, and a full inbox has no room to receive.
            let more =
                target > before && !self.held_up && !self.leaving && !self.incoming.has_input();
            if out.len() == before && more {
                self.receive()?;
                self.parse(target, out)?;
            }
        }
        self.rest.disturb(out.len() > before);
        if self.is_over() && out.len() == before {
            return Err(SourceEnd::Closed);
        }
        Ok(Pulled {
            ordered: self.issuer.is_ordered(),
            // Nothing is sent here.
            answered: self.outbox.len().saturating_sub(replies),
        })
    }

    fn complete(&mut self, done: &mut Vec<Completion>) {
        self.rest.disturb(!done.is_empty());
        for Completion {
            mut request,
            status,
        } in done.drain(..)
        {
            let index = request.tag as u32;
            let slot = self.slots.get_mut(index);
            if slot.whole {
                if slot.op.has_data() && request.buffers.is_empty() {
                    // The device lost the request, and the data's memory with it.
                    self.memory.lose(slot.whole_len() as usize);
                }
                std::mem::swap(&mut request.buffers, &mut slot.buffers);
                slot.whole = false;
            }
            self.issuer.ended(request);
            slot.pending -= 1;
            if slot.status == Status::Ok {
                slot.status = status;
            }
            if slot.pending > 0 || !slot.issued {
                continue;
            }
            if slot.then_flush && self.issuer.flush_follows(&mut self.slots, index, self.dead) {
                continue;
            }
            self.finish(index);
        }
    }

    fn push(&mut self) -> Result<usize, SourceEnd> {
        let mut late = false;
        if !self.has_output() || self.full {
            self.memory.settle();
            late = self.patience.is_late();
            if !late {
                return Ok(0);
            }
        }
        // One that is late gets a last chance: a socket takes some before it says that it is writable.
        self.rest.disturb(true);
        let memory = &mut self.memory;
        let held_up = &mut self.held_up;
        let before = self.outbox.passed();
        let sent = self
            .outbox
            .send(&mut self.stream, &mut self.slots, |slots, index| {
                free(memory, slots, index);
                *held_up = false;
            });
        match sent {
            Ok(sent) => {
                self.memory.settle();
                self.full = sent == Sent::Full || self.stream.has_unsent();
                // Queued errors hold a client up, too.
                self.held_up &= self.outbox.len() > 0 || self.memory.is_short();
                if late && let Some(why) = self.patience.verdict(self.awaited()) {
                    self.bury();
                    return Err(self.broken(why));
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
        let replies_to_send = self.has_output() && !self.full;
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
        self.patience.look(self.awaited())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stream.fd())
    }

    /// False while a bound is reached, so that bytes in the socket are no reason to wake up.
    fn wants_read(&self) -> bool {
        !(self.held_up || self.leaving || self.dead)
    }

    fn wants_write(&self) -> bool {
        self.has_output()
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
            self.memory.give(&mut slot.buffers);
        }
    }
}

#[cfg(test)]
mod bounds_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
