//! Direct reads and writes, and writes to the page cache, by io_uring without waiting: many requests in
//! flight without a thread, and a backlog for those that don't fit.

use super::blocking::durable_write;
use super::shared::FileShared;
use super::task::{Next, Task};
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Completion, Op, Readiness, Request, SECTOR};
use pvblk_sys::EventFd;
use pvblk_sys::uring::{FileOp, Uring};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most operations of one queue in the kernel; more wait in the backlog.
const MOST_ENTRIES: u32 = 256;

/// Time after which a submission is tried again that the kernel had too little memory for.
pub(super) const RETRY: Duration = Duration::from_millis(100);

/// One queue's io_uring.
pub(super) struct RingEngine {
    ring: Uring,
    /// Requests in the kernel; the index is the operation's token.
    in_flight: Vec<Option<(Box<Request>, Task)>>,
    free: Vec<usize>,
    /// Requests that wait for a free slot: at most the queue's depth.
    backlog: VecDeque<(Box<Request>, Task)>,
    _gauge: Gauge,
}

/// Requests that a ring returns.
#[derive(Default)]
pub(super) struct Returned {
    pub(super) done: Vec<Completion>,
    /// Requests that would have had to wait, or aren't done for another reason.
    pub(super) slow: Vec<(Box<Request>, Task)>,
}

impl RingEngine {
    /// A ring for `depth` requests, of at most `most_entries`. Fails where io_uring is not available.
    pub(super) fn new(
        depth: u32,
        most_entries: Option<u32>,
        shared: &FileShared,
    ) -> io::Result<RingEngine> {
        let entries = depth.clamp(1, most_entries.unwrap_or(MOST_ENTRIES));
        let ring = Uring::new(Arc::clone(&shared.file), entries)?;
        let room = ring.room();
        let bytes = Uring::mapped_bytes(entries) as u64;
        Ok(RingEngine {
            ring,
            in_flight: (0..room).map(|_| None).collect(),
            free: (0..room).rev().collect(),
            backlog: VecDeque::new(),
            _gauge: Gauge::fixed(
                format!("{}: io_uring", shared.name),
                MemoryKind::Shared,
                bytes,
            ),
        })
    }

    /// Takes a read or write; [`RingEngine::submit`] hands it to the kernel.
    pub(super) fn push(
        &mut self,
        request: Box<Request>,
        task: Task,
        shared: &FileShared,
        out: &mut Returned,
    ) {
        match self.free.pop() {
            Some(slot) => self.issue(slot, request, task, shared, out),
            None => self.backlog.push_back((request, task)),
        }
    }

    /// Hands everything pushed to the kernel.
    pub(super) fn submit(&mut self, shared: &FileShared) {
        if let Err(e) = self.ring.submit() {
            shared.log_text("io_uring refuses submissions, trying again", &e);
        }
    }

    /// Operations that the kernel has.
    pub(super) fn in_flight(&self) -> usize {
        self.ring.in_flight()
    }

    /// Takes operations that have ended, and starts requests that wait.
    pub(super) fn collect(&mut self, shared: &FileShared, out: &mut Returned) {
        let mut any = false;
        while let Some(finished) = self.ring.reap() {
            any = true;
            let slot = finished.token as usize;
            let Some((mut request, mut task)) = self.in_flight.get_mut(slot).and_then(Option::take)
            else {
                continue;
            };
            request.buffers = finished.buffers;
            let result = finished.result.map(u64::from);
            let untold = result
                .as_ref()
                .is_err_and(|e| Errno::from_io_error(e) == Some(Errno::OPNOTSUPP));
            if untold {
                shared.try_no_more(request.op);
                out.slow.push((request, task));
            } else {
                let durable = durable_write(&request, shared);
                match task.advance(&request, result, durable, shared) {
                    Next::Step => out.slow.push((request, task)),
                    Next::Done(status) => out.done.push(Completion { request, status }),
                }
            }
            match self.backlog.pop_front() {
                Some((request, task)) => self.issue(slot, request, task, shared, out),
                None => self.free.push(slot),
            }
        }
        if any {
            self.submit(shared);
        }
    }

    /// The way to wait, with the event of the requests at the threads; see [`pvblk_block::DeviceQueue::arm`].
    pub(super) fn arm(&mut self, shared: &FileShared, event: Option<&EventFd>) -> Readiness {
        let watched = event.is_none_or(|event| self.ring.watch(event));
        self.submit(shared);
        if self.ring.is_ready() {
            return Readiness::Ready;
        }
        if watched && self.in_flight() == 0 {
            return Readiness::Wait(None);
        }
        // A submission that the kernel put off has no completion that would wake the queue.
        Readiness::Wait(Some(Instant::now() + RETRY))
    }

    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Pushes the part of the task that isn't done. The slot is taken until the result has come.
    fn issue(
        &mut self,
        slot: usize,
        mut request: Box<Request>,
        task: Task,
        shared: &FileShared,
        out: &mut Returned,
    ) {
        let offset = request.sector * SECTOR;
        let op = match request.op {
            Op::Read => FileOp::Read { offset },
            _ => {
                let durable = durable_write(&request, shared);
                FileOp::Write { offset, durable }
            }
        };
        let buffers = std::mem::take(&mut request.buffers);
        match self.ring.push(op, buffers, slot as u64) {
            Ok(()) => self.in_flight[slot] = Some((request, task)),
            Err(buffers) => {
                request.buffers = buffers;
                self.free.push(slot);
                out.slow.push((request, task));
            }
        }
    }
}
