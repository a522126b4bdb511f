//! One queue of an image: requests become operations of librbd, whose callbacks leave them in the queue's inbox.

use super::shared::{EROFS, ESHUTDOWN, Live, Mode, Shared};
use pvblk_block::stacked::CompletionQueue;
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{Completion, DeviceQueue, Op, Readiness, Request, RequestFlags, SECTOR, Status};
use pvblk_sys::librbd::{Aio, AioOp, Finish};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Number of times that a request is parked before it fails: a lock that is ours refuses no request for long.
const MOST_DOUBTS: u64 = 3;

const ENOSPC: i64 = 28;
const EDQUOT: i64 = 122;
const EOPNOTSUPP: i64 = 95;

/// Operations that are done.
#[derive(Default)]
pub(super) struct Inbox {
    done: Vec<Box<Aio<Task>>>,
    /// Nobody looks any more.
    closed: bool,
}

/// The owner's part of an operation.
pub(super) struct Task {
    /// The slot of its request, and the number that the slot had then.
    slot: usize,
    turn: u64,
    target: Arc<CompletionQueue<Inbox>>,
}

/// The place of a request that is at librbd.
#[derive(Default)]
struct Slot {
    request: Option<Box<Request>>,
    /// Another one for each operation: one whose request was taken back finds nothing.
    turn: u64,
    /// The open image that it was sent to.
    number: u64,
    /// The write is done, and is being made stable.
    flushes: bool,
}

impl Finish for Task {
    fn finish(mut aio: Box<Aio<Task>>) {
        // An answer that no queue collects doesn't keep the image open.
        aio.image = None;
        let target = Arc::clone(&aio.owner.target);
        let mut unwanted = None;
        target.post(|inbox| match inbox.closed {
            false => inbox.done.push(aio),
            true => unwanted = Some(aio),
        });
        drop(unwanted);
    }
}

pub(super) struct RbdQueue {
    shared: Arc<Shared>,
    inbox: Arc<CompletionQueue<Inbox>>,
    mode: Mode,
    /// The count of changes after which the mode was asked for.
    seen: u64,
    parked: VecDeque<Box<Request>>,
    done: Vec<Completion>,
    /// Taken out of the inbox; empty between two polls.
    arrived: Vec<Box<Aio<Task>>>,
    free: Vec<Box<Aio<Task>>>,
    slots: Vec<Slot>,
    free_slots: Vec<usize>,
    tracer: Tracer,
}

impl RbdQueue {
    pub fn new(shared: &Arc<Shared>, tracer: Tracer) -> std::io::Result<RbdQueue> {
        let inbox = Arc::new(CompletionQueue::new()?);
        shared.add_queue(&inbox);
        let seen = shared.changes();
        Ok(RbdQueue {
            mode: shared.mode(),
            seen,
            shared: Arc::clone(shared),
            inbox,
            parked: VecDeque::new(),
            done: Vec::new(),
            arrived: Vec::new(),
            free: Vec::new(),
            slots: Vec::new(),
            free_slots: Vec::new(),
            tracer,
        })
    }

    /// Takes a change of the mode over.
    #[inline]
    fn look(&mut self) {
        let changes = self.shared.changes();
        if changes != self.seen {
            self.seen = changes;
            self.change();
        }
    }

    #[cold]
    fn change(&mut self) {
        self.mode = self.shared.mode();
        match &self.mode {
            Mode::Park | Mode::ParkForEver => return,
            Mode::Send(idle) => self.take_back(Some(idle.number)),
            Mode::Fail => self.take_back(None),
        }
        match &self.mode {
            Mode::Park | Mode::ParkForEver => {}
            Mode::Send(_) | Mode::Fail => {
                for request in std::mem::take(&mut self.parked) {
                    self.start(request);
                }
            }
        }
    }

    /// Takes requests back that are at a librbd whose client instance is blocked: it may never answer them. Their data can't land any more, because the
    /// cluster refuses it. Reads stay, because librbd may still fill their buffers; it answers them.
    fn take_back(&mut self, number: Option<u64>) {
        for slot in 0..self.slots.len() {
            let at = &mut self.slots[slot];
            let is_old = number.is_none_or(|number| at.number != number);
            if is_old
                && at.request.as_ref().is_some_and(|r| r.op != Op::Read)
                && let Some(request) = at.request.take()
            {
                at.turn += 1;
                self.free_slots.push(slot);
                self.parked.push_back(request);
            }
        }
    }

    fn end(&mut self, request: Box<Request>, status: Status) {
        self.done.push(Completion { request, status });
    }

    fn start(&mut self, request: Box<Request>) {
        let live = match &self.mode {
            Mode::Send(idle) => match idle.live() {
                Some(live) => live,
                // The next look finds the new mode.
                None => return self.parked.push_back(request),
            },
            Mode::Park | Mode::ParkForEver => return self.parked.push_back(request),
            Mode::Fail => return self.end(request, Status::IoError),
        };
        let (at, len) = (request.sector * SECTOR, request.sectors * SECTOR);
        let op = match request.op {
            Op::Read => AioOp::Read(at),
            Op::Write => AioOp::Write(at),
            Op::Flush => AioOp::Flush,
            Op::Discard => AioOp::Discard(at, len),
            Op::WriteZeroes => {
                let thick = request.flags.contains(RequestFlags::NO_UNMAP);
                AioOp::WriteZeroes(at, len, thick)
            }
        };
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        self.slots[slot].request = Some(request);
        self.send(slot, op, &live, false);
    }

    fn send(&mut self, slot: usize, op: AioOp, live: &Live, flushes: bool) {
        let mut aio = match self.free.pop() {
            Some(aio) => aio,
            None => Aio::new(Task {
                slot,
                turn: 0,
                target: Arc::clone(&self.inbox),
            }),
        };
        let at = &mut self.slots[slot];
        at.number = live.number;
        at.flushes = flushes;
        (aio.owner.slot, aio.owner.turn) = (slot, at.turn);
        if let Some(request) = at.request.as_ref().filter(|_| !flushes) {
            self.tracer.request(Phase::Issue, request);
        }
        if let Some(request) = &at.request
            && op != AioOp::Flush
        {
            aio.buffers.extend_from_slice(&request.buffers);
        }
        if let Err((aio, e)) = live.image.submit(aio, op) {
            tracing::warn!("{}: librbd took no request: {e}", self.shared.name);
            self.recycle(aio);
            if let Some(request) = self.leave(slot) {
                self.end(request, Status::IoError);
            }
        }
    }

    fn recycle(&mut self, mut aio: Box<Aio<Task>>) {
        aio.image = None;
        aio.buffers.clear();
        self.free.push(aio);
    }

    /// Frees a slot, and returns its request.
    fn leave(&mut self, slot: usize) -> Option<Box<Request>> {
        let at = &mut self.slots[slot];
        at.turn += 1;
        self.free_slots.push(slot);
        at.request.take()
    }

    fn finish(&mut self, aio: Box<Aio<Task>>) {
        let (result, slot, turn) = (aio.result, aio.owner.slot, aio.owner.turn);
        self.recycle(aio);
        let at = &self.slots[slot];
        let (number, flushes) = (at.number, at.flushes);
        let Some(request) = at.request.as_ref().filter(|_| at.turn == turn) else {
            // Its request was taken back.
            return;
        };
        let (op, flags, bytes) = (request.op, request.flags, request.sectors * SECTOR);
        if op.is_write()
            && let Some(objects) = self.shared.objects.get()
        {
            objects.mark(request.sector * SECTOR, bytes);
        }
        let writable = !self.shared.spec.is_read_only();
        let is_refused = writable && result == -i64::from(EROFS);
        let is_doubt = is_refused || result == -i64::from(ESHUTDOWN);
        let is_lost = matches!(self.mode, Mode::Fail | Mode::ParkForEver);
        if is_doubt || is_lost {
            if let Some(mut request) = self.leave(slot) {
                request.scratch += u64::from(is_refused);
                if is_doubt {
                    self.shared.doubt(number);
                    self.look();
                }
                self.again(request);
            }
            return;
        }
        let status = match result {
            r if r >= 0 && (op != Op::Read || r == bytes as i64) => Status::Ok,
            r if r == -ENOSPC || r == -EDQUOT => Status::NoSpace,
            r if r == -EOPNOTSUPP => Status::Unsupported,
            _ => Status::IoError,
        };
        if status == Status::Ok && op.is_write() && flags.contains(RequestFlags::FUA) && !flushes {
            let live = match &self.mode {
                Mode::Send(idle) if idle.number == number => idle.live(),
                _ => None,
            };
            match live {
                Some(live) => self.send(slot, AioOp::Flush, &live, true),
                // The next open image knows nothing of this write.
                None => {
                    if let Some(request) = self.leave(slot) {
                        self.again(request);
                    }
                }
            }
            return;
        }
        if let Some(request) = self.leave(slot) {
            self.end(request, status);
        }
    }

    /// Parks, sends or fails a request as if it came anew.
    #[cold]
    fn again(&mut self, request: Box<Request>) {
        match request.scratch > MOST_DOUBTS && !matches!(self.mode, Mode::ParkForEver) {
            true => self.end(request, Status::IoError),
            false => self.start(request),
        }
    }
}

impl DeviceQueue for RbdQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.shared.look_if_due();
        self.look();
        for mut request in batch.drain(..) {
            request.scratch = 0;
            self.start(request);
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        if self.free_slots.len() < self.slots.len() {
            self.shared.look_if_due();
        }
        self.inbox.wait().finish_wait();
        let arrived = &mut self.arrived;
        self.inbox
            .collect(|inbox| std::mem::swap(&mut inbox.done, arrived));
        self.look();
        let mut arrived = std::mem::take(&mut self.arrived);
        for aio in arrived.drain(..) {
            self.finish(aio);
        }
        self.arrived = arrived;
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        if !self.done.is_empty() {
            return Readiness::Ready;
        }
        let wait = self.inbox.wait();
        wait.prepare_to_wait();
        if wait.is_pending() || self.shared.changes() != self.seen {
            return Readiness::Ready;
        }
        // A blocked librbd may answer nothing, so the lock is looked at while requests are there.
        let is_busy = self.free_slots.len() < self.slots.len();
        Readiness::Wait(is_busy.then(|| self.shared.look_time()).flatten())
    }

    fn woken(&mut self) {
        self.inbox.wait().event().drain();
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.inbox.wait().event().as_fd())
    }
}

impl Drop for RbdQueue {
    /// Operations in flight keep their requests and the image until they are done.
    fn drop(&mut self) {
        let mut inbox = self.inbox.entries();
        inbox.closed = true;
        // Each holds the inbox.
        let done = std::mem::take(&mut inbox.done);
        drop(inbox);
        drop(done);
    }
}
