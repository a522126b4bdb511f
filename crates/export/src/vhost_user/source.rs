//! One virtqueue as a request source: chains in, used buffers out.

use super::inflight::InflightQueue;
use super::memory::GuestMemory;
use super::request::{self, Bad, Chain, Parsed};
use super::virtqueue::{Broken, Descriptor, Virtqueue};
use parking_lot::Mutex;
use pvblk_backend::{
    LostWritesQueue, PullBatch, PullChoice, Pulled, RateLimit, RequestSource, SourceEnd,
    SpareRequests, ratelimited,
};
use pvblk_block::{Buffer, Completion, Error, Op, Readiness, Request, Status};
use pvblk_protocol::virtio::{ID, Offered};
use pvblk_sys::PeerEvent;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};

/// Time after which a queue without a kick is looked at again; while it stays idle, after twice the time each time, up to the second.
const POLL: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(20));

/// Descriptors after which a pull takes no more chains: the worker's other lanes wait for it. As many as this cost as much as one request.
const MOST_DESCRIPTORS: usize = 4096;
const DESCRIPTORS_PER_REQUEST: usize = 32;

/// State that the control thread and a queue at work share.
#[derive(Debug, Default)]
pub struct Shared {
    call: Mutex<Option<PeerEvent>>,
    memory: Mutex<Option<GuestMemory>>,
    memory_changed: AtomicBool,
    /// The available index at which the queue stopped.
    index: AtomicU16,
    /// Requests that a server before us left are still to be taken.
    again: AtomicBool,
    /// The queue ends when they are.
    stopping: AtomicBool,
}

impl Shared {
    /// Another way to wake the guest. It is rung once: what was told through the old one may have been missed.
    pub fn set_call(&self, call: Option<PeerEvent>) {
        if let Some(call) = &call {
            call.notify();
        }
        *self.call.lock() = call;
    }

    /// Other memory, from the next chain on. Requests in flight keep the memory they have.
    pub fn set_memory(&self, memory: GuestMemory) {
        *self.memory.lock() = Some(memory);
        self.memory_changed.store(true, Ordering::Release);
    }

    /// A queue will be made with this.
    pub fn start(&self) {
        self.stopping.store(false, Ordering::SeqCst);
    }

    /// True if the queue will end by itself, when it has taken all that a server before us left; false if it has.
    pub fn stop_after_resubmission(&self) -> bool {
        // The queue stores and loads the other way round, so one of the two sees the other.
        self.stopping.store(true, Ordering::SeqCst);
        self.again.load(Ordering::SeqCst)
    }

    /// The queue has taken all that a server before us left; true if it is to end now.
    #[cold]
    fn resubmitted(&self) -> bool {
        self.again.store(false, Ordering::SeqCst);
        self.stopping.load(Ordering::SeqCst)
    }

    /// Where the queue stopped; known when its source is gone.
    pub fn index(&self) -> u16 {
        self.index.load(Ordering::Acquire)
    }
}

/// The parts of a queue that begins.
pub struct VhostQueueParts {
    /// For the log: disk, front end and queue.
    pub name: String,
    pub queue: Virtqueue,
    /// All of the guest's memory.
    pub memory: GuestMemory,
    /// The state that the control thread may change.
    pub shared: Arc<Shared>,
    /// The event that wakes us; `None`: the queue is looked at all the time.
    pub kick: Option<PeerEvent>,
    /// Where requests in flight are told.
    pub inflight: Option<InflightQueue>,
    /// The features that requests may use.
    pub offered: Offered,
    /// The disk's name for the guest.
    pub id: [u8; ID],
}

/// A request that isn't answered yet.
#[derive(Default)]
struct Slot {
    status: Option<Buffer>,
    writable: u32,
    /// Of a flush: what it covers.
    covers: u64,
}

/// A virtqueue of a virtio-blk device.
pub struct VhostSource {
    parts: VhostQueueParts,
    /// The slot of each chain, by the number of its first descriptor.
    slots: Vec<Slot>,
    /// Heads that were taken by a server before us and not answered.
    again: VecDeque<u16>,
    /// There were some, and `shared` wasn't told yet that they are taken.
    resubmits: bool,
    chain: Vec<Descriptor>,
    spare: SpareRequests,
    batch: PullBatch,
    /// Counts bad requests for the log, of all sources of the disk once that is known.
    complaints: Arc<RateLimit>,
    /// Without a kick: how soon to look again.
    poll: Duration,
    unpublished: bool,
    /// The ring made no sense: it is not written any more.
    broken: bool,
}

impl VhostSource {
    /// A source over a queue that was set up. Requests that a server before us left are done first.
    pub fn new(mut parts: VhostQueueParts) -> VhostSource {
        let entries = parts.queue.entries();
        let again: VecDeque<u16> = match &mut parts.inflight {
            Some(inflight) => {
                let used = parts.queue.next_used();
                let heads = inflight.recover(used);
                // What was taken is answered or in flight; the front end doesn't know more than that either.
                parts
                    .queue
                    .set_next_available(used.wrapping_add(heads.len() as u16));
                heads.into()
            }
            None => VecDeque::new(),
        };
        if !again.is_empty() {
            let limit = RateLimit::of("vhost-user", "done again");
            ratelimited!(
                info,
                limit,
                "{}: {} requests of the last server are done again",
                parts.name,
                again.len()
            );
        }
        let resubmits = !again.is_empty();
        parts.shared.again.store(resubmits, Ordering::SeqCst);
        VhostSource {
            resubmits,
            slots: (0..entries).map(|_| Slot::default()).collect(),
            spare: SpareRequests::default(),
            batch: PullBatch::default(),
            chain: Vec::new(),
            parts,
            again,
            complaints: Arc::default(),
            poll: POLL.0,
            unpublished: false,
            broken: false,
        }
    }

    #[cold]
    fn stop(&mut self, why: Broken) -> SourceEnd {
        self.broken = true;
        // Zeros where memory was look like any other rule.
        let why = if self.is_lost() {
            Broken::MemoryLost
        } else {
            why
        };
        SourceEnd::Broken(Error::protocol(format!(
            "{}: {why}; the queue is stopped until the guest resets its disk",
            self.parts.name
        )))
    }

    fn is_lost(&self) -> bool {
        let inflight = self.parts.inflight.as_ref();
        self.parts.memory.is_lost()
            || self.parts.queue.is_lost()
            || inflight.is_some_and(|i| i.check().is_err())
    }

    /// The next head, and whether it is one of the last server's.
    #[inline]
    fn next_head(&mut self, left: &mut u16) -> Result<Option<u16>, Broken> {
        if let Some(head) = self.again.pop_front() {
            return Ok(Some(head));
        }
        if *left == 0 {
            *left = self.parts.queue.available()?;
            if *left == 0 {
                return Ok(None);
            }
        }
        *left -= 1;
        let head = self.parts.queue.take()?;
        if self.slots[usize::from(head)].status.is_some() {
            return Err(Broken::InFlight(head));
        }
        if let Some(inflight) = &mut self.parts.inflight {
            inflight.taken(head);
        }
        Ok(Some(head))
    }

    /// Takes one chain; `Ok(false)` if there is none.
    #[inline]
    fn take(&mut self, left: &mut u16, out: &mut Vec<Box<Request>>) -> Result<bool, Broken> {
        let Some(head) = self.next_head(left)? else {
            return Ok(false);
        };
        let parts = &mut self.parts;
        parts.queue.chain(head, &parts.memory, &mut self.chain)?;
        let mut request = self.spare.take();
        let parsed = request::parse(&self.chain, &parts.memory, parts.offered, &mut request);
        let Chain {
            status,
            writable,
            asked,
        } = match parsed {
            Ok(chain) => chain,
            Err(broken) => {
                self.spare.keep(request);
                return Err(broken);
            }
        };
        let code = match asked {
            Ok(Parsed::Submit) => {
                request.tag = u64::from(head);
                let covers = match (&parts.inflight, request.op) {
                    (Some(inflight), Op::Flush) => inflight.flush(),
                    _ => 0,
                };
                self.slots[usize::from(head)] = Slot {
                    status: Some(status),
                    writable,
                    covers,
                };
                out.push(request);
                return Ok(true);
            }
            Ok(Parsed::Id) => {
                let mut id = &parts.id[..];
                for buffer in &request.buffers {
                    let (now, rest) = id.split_at(id.len().min(buffer.len()));
                    buffer.write(0, now);
                    id = rest;
                }
                VIRTIO_BLK_S_OK
            }
            Err(bad) => self.refuse(bad),
        };
        self.spare.keep(request);
        self.answer(head, &status, code, writable);
        Ok(true)
    }

    #[cold]
    fn refuse(&mut self, bad: Bad) -> u32 {
        let name = &self.parts.name;
        ratelimited!(warn, self.complaints, "{name}: bad request: {bad}");
        match bad.is_unsupported() {
            true => VIRTIO_BLK_S_UNSUPP,
            false => VIRTIO_BLK_S_IOERR,
        }
    }

    #[inline]
    fn answer(&mut self, head: u16, status: &Buffer, code: u32, written: u32) {
        status.write(0, &[code as u8]);
        self.parts.queue.add_used(head, written);
        if let Some(inflight) = &mut self.parts.inflight {
            inflight.answered(head);
        }
        self.unpublished = true;
    }
}

impl RequestSource for VhostSource {
    fn describe(&self) -> String {
        self.parts.name.clone()
    }

    fn served_as(&mut self, disk: &str) {
        self.complaints = RateLimit::of(disk, "bad request");
    }

    fn pull_choice(&self) -> Option<Arc<PullChoice>> {
        Some(Arc::clone(self.batch.choice()))
    }

    fn depth(&self) -> u32 {
        u32::from(self.parts.queue.entries())
    }

    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let changed = &self.parts.shared.memory_changed;
        // The first look costs less than an exchange, and idle steps make many.
        if changed.load(Ordering::Relaxed)
            && changed.swap(false, Ordering::Acquire)
            && let Some(memory) = self.parts.shared.memory.lock().take()
        {
            self.parts.memory = memory;
        }
        if self.is_lost() {
            return Err(self.stop(Broken::MemoryLost));
        }
        let mut left = match room > 0 && self.again.is_empty() {
            true => self.parts.queue.available().map_err(|why| self.stop(why))?,
            false => 0,
        };
        let pending = usize::from(left) + self.again.len();
        let (mut taken, mut descriptors, before) = (0, 0, out.len());
        if left > 0 {
            self.poll = POLL.0;
        }
        // Counts bad requests too: a guest that sends only those must not keep the worker here.
        for _ in 0..room.min(self.batch.next(pending)) {
            match self.take(&mut left, out) {
                Ok(true) => taken += 1,
                Ok(false) => break,
                Err(broken) => return Err(self.stop(broken)),
            }
            descriptors += self.chain.len();
            if descriptors >= MOST_DESCRIPTORS {
                break;
            }
        }
        self.batch.took(taken);
        if self.resubmits && self.again.is_empty() {
            self.resubmits = false;
            if self.parts.shared.resubmitted() {
                return Err(SourceEnd::Closed);
            }
        }
        self.parts.queue.disarm();
        let answered = taken - (out.len() - before);
        Ok(Pulled {
            ordered: false,
            answered: answered + descriptors / DESCRIPTORS_PER_REQUEST,
        })
    }

    fn complete(&mut self, done: &mut Vec<Completion>) {
        for Completion { request, status } in done.drain(..) {
            let op = request.op;
            let head = request.tag as u16;
            let Slot {
                status: byte,
                writable,
                covers,
            } = std::mem::take(&mut self.slots[usize::from(head)]);
            let code = match status {
                Status::Ok => VIRTIO_BLK_S_OK,
                Status::Unsupported => VIRTIO_BLK_S_UNSUPP,
                _ => VIRTIO_BLK_S_IOERR,
            };
            if let (Some(byte), false) = (byte, self.broken) {
                if let (Some(inflight), VIRTIO_BLK_S_OK) = (&mut self.parts.inflight, code) {
                    match op {
                        Op::Read => {}
                        Op::Flush => inflight.flushed(covers),
                        _ => inflight.wrote(),
                    }
                }
                // The status is the last byte, so a read has written up to it.
                let written = if op == Op::Read { writable } else { 1 };
                self.answer(head, &byte, code, written);
            }
            self.spare.keep(request);
        }
    }

    fn push(&mut self) -> Result<usize, SourceEnd> {
        if self.unpublished && !self.broken {
            self.unpublished = false;
            self.parts.queue.publish();
            if let Some(inflight) = &mut self.parts.inflight {
                inflight.published(self.parts.queue.next_used());
            }
            let mut wakes = self.parts.queue.needs_call();
            if wakes {
                let call = self.parts.shared.call.lock();
                call.as_ref().inspect(|call| call.notify());
                wakes = call.is_some();
            }
            self.batch.pushed(wakes);
        }
        Ok(0)
    }

    fn arm(&mut self) -> Readiness {
        self.batch.sleeps();
        if !self.again.is_empty() || self.parts.queue.arm() {
            return Readiness::Ready;
        }
        match self.parts.kick {
            Some(_) => Readiness::Wait(None),
            None => {
                let soon = self.poll;
                self.poll = (soon * 2).min(POLL.1);
                Readiness::Wait(Some(Instant::now() + soon))
            }
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.parts.kick.as_ref().map(AsFd::as_fd)
    }

    fn woken(&mut self) {
        if let Some(kick) = &self.parts.kick {
            kick.clear();
        }
    }

    fn rest(&mut self) {
        self.spare.release();
    }

    fn lost_writes(&mut self) -> Option<LostWritesQueue> {
        let losses = self.parts.inflight.as_ref()?.losses()?;
        Some(losses.queue(self.parts.queue.submitted()))
    }

    fn position(&self) -> u16 {
        let next = self.parts.queue.next_available();
        next.wrapping_sub(self.again.len() as u16)
    }
}

impl Drop for VhostSource {
    fn drop(&mut self) {
        // Not `position`: what is left of `again` is told by the area alone. It needn't be what became available last, so from another index on a
        // queue without that area would do again what was answered.
        let index = self.parts.queue.next_available();
        self.parts.shared.index.store(index, Ordering::Release);
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
