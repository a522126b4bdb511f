//! The engine on io_uring: many requests in flight, a backlog for those that don't fit.

use super::Shared;
use super::blocking::part;
use super::task::{Next, Step, Task, allocate_mode, rest_of};
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Completion, Op, Readiness, Request, RequestFlags, SECTOR, Status};
use pvblk_sys::uring::{FileOp, Uring};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most operations of one queue in the kernel; what is deeper waits here.
const MOST_ENTRIES: u32 = 256;

/// When to try again what the kernel was too short of memory to take.
const RETRY: Duration = Duration::from_millis(100);

/// One queue's io_uring.
pub(super) struct RingEngine {
    ring: Uring,
    /// Requests in the kernel; the index is the operation's token.
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    /// Requests that wait for a free slot: at most the queue's depth.
    backlog: VecDeque<Box<Request>>,
    _gauge: Gauge,
}

struct Flight {
    request: Box<Request>,
    task: Task,
    /// The kernel has the request's own buffers, to be put back; otherwise it has copies.
    lent: bool,
}

impl RingEngine {
    /// A ring for `depth` requests on `file`, of at most `most_entries`. Fails where io_uring is not available.
    pub(super) fn new(
        file: Arc<OwnedFd>,
        depth: u32,
        most_entries: Option<u32>,
        shared: &Shared,
    ) -> io::Result<RingEngine> {
        let entries = depth.clamp(1, most_entries.unwrap_or(MOST_ENTRIES));
        let ring = Uring::new(file, entries)?;
        let room = ring.room();
        let bytes = Uring::mapped_bytes(entries) as u64;
        Ok(RingEngine {
            ring,
            flights: (0..room).map(|_| None).collect(),
            free: (0..room).rev().collect(),
            backlog: VecDeque::new(),
            _gauge: Gauge::fixed(
                format!("{}: io_uring", shared.name),
                MemoryKind::Shared,
                bytes,
            ),
        })
    }

    /// Takes a request; [`RingEngine::submit`] hands it to the kernel.
    pub(super) fn push(
        &mut self,
        request: Box<Request>,
        shared: &Shared,
        done: &mut Vec<Completion>,
    ) {
        match self.free.pop() {
            Some(slot) => self.begin(slot, request, shared, done),
            None => self.backlog.push_back(request),
        }
    }

    /// Hands everything pushed to the kernel. Returns the number of operations that it has.
    pub(super) fn submit(&mut self, shared: &Shared) -> usize {
        if let Err(e) = self.ring.submit() {
            shared.log_text("io_uring refuses submissions, trying again", &e);
        }
        self.ring.in_flight()
    }

    /// Moves finished requests to `done` and starts those that wait.
    pub(super) fn collect(&mut self, shared: &Shared, done: &mut Vec<Completion>) {
        let mut any = false;
        while let Some(finished) = self.ring.reap() {
            any = true;
            let slot = finished.token as usize;
            let Some(mut flight) = self.flights.get_mut(slot).and_then(Option::take) else {
                continue;
            };
            if flight.lent {
                flight.request.buffers = finished.buffers;
            }
            let result = finished.result.map(u64::from);
            match flight.task.advance(&flight.request, result, true, shared) {
                Next::Step => self.issue(slot, flight.request, flight.task, shared, done),
                Next::Done(status) => {
                    done.push(Completion {
                        request: flight.request,
                        status,
                    });
                    self.reuse(slot, shared, done);
                }
            }
        }
        if any {
            self.submit(shared);
        }
    }

    /// What to wait for; see [`pvblk_block::DeviceQueue::arm`].
    pub(super) fn arm(&mut self, shared: &Shared) -> Readiness {
        if self.submit(shared) == 0 {
            return Readiness::Wait(None);
        }
        if self.ring.is_ready() {
            return Readiness::Ready;
        }
        // A submission that the kernel put off has no completion that would wake anybody.
        Readiness::Wait(Some(Instant::now() + RETRY))
    }

    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Gives a free slot to the first request that waits, if there is one.
    fn reuse(&mut self, slot: usize, shared: &Shared, done: &mut Vec<Completion>) {
        match self.backlog.pop_front() {
            Some(request) => self.begin(slot, request, shared, done),
            None => self.free.push(slot),
        }
    }

    fn begin(
        &mut self,
        slot: usize,
        request: Box<Request>,
        shared: &Shared,
        done: &mut Vec<Completion>,
    ) {
        let mut request = request;
        loop {
            match Task::begin(&request) {
                Ok(task) => return self.issue(slot, request, task, shared, done),
                Err(status) => done.push(Completion { request, status }),
            }
            // That one needed no slot: the next one gets it.
            match self.backlog.pop_front() {
                Some(next) => request = next,
                None => return self.free.push(slot),
            }
        }
    }

    /// Pushes the task's step. The slot is taken until the step's result has come.
    fn issue(
        &mut self,
        slot: usize,
        mut request: Box<Request>,
        task: Task,
        shared: &Shared,
        done: &mut Vec<Completion>,
    ) {
        let start = request.sector * SECTOR;
        let total = request.sectors * SECTOR;
        let offset = start + task.done;
        let lent = task.step == Step::Data && task.done == 0;
        let (op, buffers) = match task.step {
            Step::Data => {
                let buffers = if lent {
                    std::mem::take(&mut request.buffers)
                } else {
                    rest_of(&request.buffers, task.done)
                };
                let durable = request.flags.contains(RequestFlags::FUA);
                match request.op {
                    Op::Read => (FileOp::Read { offset }, buffers),
                    _ => (FileOp::Write { offset, durable }, buffers),
                }
            }
            Step::Allocate => {
                let mode = allocate_mode(&request).bits() as i32;
                let len = total;
                (FileOp::Allocate { mode, offset, len }, Vec::new())
            }
            Step::Zeros => {
                let durable = false;
                let zeros = part(&shared.zeros, total - task.done).into_iter().collect();
                (FileOp::Write { offset, durable }, zeros)
            }
            Step::Sync => (FileOp::Sync, Vec::new()),
        };
        if let Err(buffers) = self.ring.push(op, buffers, slot as u64) {
            // There are as many slots as entries, so this doesn't happen; a lost request would be worse.
            if lent {
                request.buffers = buffers;
            }
            self.free.push(slot);
            let status = Status::IoError;
            done.push(Completion { request, status });
            return;
        }
        self.flights[slot] = Some(Flight {
            request,
            task,
            lent,
        });
    }
}
