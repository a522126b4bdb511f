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
    request: Option<Box<Request>>,
    /// The open image that it was sent to.
    number: u64,
    /// The write is done, and is being made stable.
    flushes: bool,
    target: Arc<CompletionQueue<Inbox>>,
}

impl Finish for Task {
    fn finish(aio: Box<Aio<Task>>) {
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
            Mode::Park | Mode::ParkForEver => {}
            Mode::Send(_) | Mode::Fail => {
                for request in std::mem::take(&mut self.parked) {
                    self.start(request);
                }
            }
        }
    }

    fn end(&mut self, request: Box<Request>, status: Status) {
        self.done.push(Completion { request, status });
    }

    fn start(&mut self, mut request: Box<Request>) {
        let live = match &self.mode {
            Mode::Send(live) => live.clone(),
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
        let mut aio = match self.free.pop() {
            Some(aio) => aio,
            None => Aio::new(Task {
                request: None,
                number: 0,
                flushes: false,
                target: Arc::clone(&self.inbox),
            }),
        };
        aio.buffers = std::mem::take(&mut request.buffers);
        aio.owner.request = Some(request);
        self.send(aio, op, live, false);
    }

    fn send(&mut self, mut aio: Box<Aio<Task>>, op: AioOp, live: Live, flushes: bool) {
        aio.owner.number = live.number;
        aio.owner.flushes = flushes;
        if let Err((aio, e)) = live.image.submit(aio, op) {
            tracing::warn!("{}: librbd took no request: {e}", self.shared.name);
            if let (Some(request), _) = self.take_apart(aio) {
                self.end(request, Status::IoError);
            }
        }
    }

    /// Gives the request of an operation its buffers back, and keeps the rest for the next one.
    fn take_apart(&mut self, mut aio: Box<Aio<Task>>) -> (Option<Box<Request>>, u64) {
        aio.image = None;
        let mut request = aio.owner.request.take();
        if let Some(request) = &mut request {
            request.buffers = std::mem::take(&mut aio.buffers);
        }
        let number = aio.owner.number;
        self.free.push(aio);
        (request, number)
    }

    fn finish(&mut self, aio: Box<Aio<Task>>) {
        let (result, flushes) = (aio.result, aio.owner.flushes);
        let Some((op, flags, bytes)) = aio
            .owner
            .request
            .as_ref()
            .map(|r| (r.op, r.flags, r.sectors * SECTOR))
        else {
            return;
        };
        if op.is_write()
            && let (Some(objects), Some(r)) = (self.shared.objects.get(), &aio.owner.request)
        {
            objects.mark(r.sector * SECTOR, bytes);
        }
        let writable = !self.shared.spec.is_read_only();
        let is_doubt = result == -i64::from(ESHUTDOWN) || (writable && result == -i64::from(EROFS));
        if is_doubt {
            self.shared.doubt(aio.owner.number);
            self.look();
        }
        let is_lost = matches!(self.mode, Mode::Fail | Mode::ParkForEver);
        let status = match result {
            _ if is_doubt || is_lost => return self.again(aio),
            r if r >= 0 && (op != Op::Read || r == bytes as i64) => Status::Ok,
            r if r == -ENOSPC || r == -EDQUOT => Status::NoSpace,
            r if r == -EOPNOTSUPP => Status::Unsupported,
            _ => Status::IoError,
        };
        if status == Status::Ok && op.is_write() && flags.contains(RequestFlags::FUA) && !flushes {
            return match &self.mode {
                Mode::Send(live) if live.number == aio.owner.number => {
                    let live = live.clone();
                    self.send(aio, AioOp::Flush, live, true);
                }
                // The next open image knows nothing of this write.
                _ => self.again(aio),
            };
        }
        if let (Some(request), _) = self.take_apart(aio) {
            self.end(request, status);
        }
    }

    /// Parks, sends or fails a request as if it came anew.
    #[cold]
    fn again(&mut self, aio: Box<Aio<Task>>) {
        let aio_result = aio.result;
        let (Some(mut request), _) = self.take_apart(aio) else {
            return;
        };
        request.scratch += u64::from(aio_result == -i64::from(EROFS));
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
            self.tracer.request(Phase::Issue, &request);
            request.scratch = 0;
            self.start(request);
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
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
        match wait.is_pending() || self.shared.changes() != self.seen {
            true => Readiness::Ready,
            false => Readiness::Wait(None),
        }
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
