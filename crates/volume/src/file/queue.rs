//! One queue of a file volume. Its methods don't wait for the medium: requests that would have to go to the
//! disk's threads.

use super::blocking::{self, Outcome, is_aligned};
use super::completions::FileCompletions;
use super::ring::{RETRY, Returned, RingEngine};
use super::shared::FileShared;
use super::swap::SwapLook;
use super::task::{Next, Task};
use super::work_queues::{Kind, Work, WorkQueues};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{Completion, DeviceQueue, Op, Readiness, Request, RequestFlags, SECTOR, Status};
use pvblk_sys::fileio;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

/// The longest request that is copied to or from the page cache by the queue's user itself.
const INLINE_BYTES: u64 = 1 << 20;

/// A medium counts as hanging when no request of those at the threads has completed for this long. Then even
/// attempts that don't wait are left to the threads, because the kernel's read-ahead may wait for a place in
/// the medium's queue.
const HANGS: Duration = Duration::from_millis(100);

/// Time for which the known length of a file in memory is used. Other media are asked with each batch that
/// has a write, which costs little there.
const LOOK_COUNTS: Duration = Duration::from_millis(1);

/// Interval between two looks for completions if there was no descriptor for a wake-up.
const WITHOUT_EVENT: Duration = Duration::from_millis(1);

pub(super) struct FileQueue {
    shared: Arc<FileShared>,
    depth: u32,
    most_entries: Option<u32>,
    /// io_uring is to be used, and hasn't been opened yet.
    wants_ring: bool,
    ring: Option<Box<RingEngine>>,
    /// Made for the first request that goes to a thread, so that idle disks, and cached ones, cost no
    /// descriptor.
    completions: Option<Arc<FileCompletions>>,
    /// Number of requests at the threads.
    at_threads: usize,
    /// The time since which no request of those has completed.
    waiting_since: Option<Instant>,
    /// Requests of this batch for each of the work queues.
    outgoing: [Vec<Work>; 3],
    returned: Returned,
    /// The time at which the length of a file in memory is asked for again.
    next_look: Option<Instant>,
    swap: SwapLook,
    /// Pages of the file's file system may be in swap.
    swap_on: bool,
    tracer: Tracer,
}

impl FileQueue {
    pub(super) fn new(
        shared: Arc<FileShared>,
        depth: u32,
        most_entries: Option<u32>,
        wants_ring: bool,
        tracer: Tracer,
    ) -> FileQueue {
        FileQueue {
            shared,
            depth,
            most_entries,
            wants_ring,
            ring: None,
            completions: None,
            at_threads: 0,
            waiting_since: None,
            outgoing: Default::default(),
            returned: Returned::default(),
            next_look: None,
            swap: SwapLook::default(),
            swap_on: false,
            tracer,
        }
    }

    /// Makes the ring, at the first request.
    #[cold]
    fn start(&mut self) {
        self.wants_ring = false;
        match RingEngine::new(self.depth, self.most_entries, &self.shared) {
            Ok(engine) => self.ring = Some(Box::new(engine)),
            Err(e) => {
                static TOLD: Once = Once::new();
                TOLD.call_once(|| {
                    tracing::warn!(
                        "{}: io_uring is not available ({e}); threads do its work",
                        self.shared.name
                    );
                });
            }
        }
    }

    fn done(&mut self, request: Box<Request>, status: Status) {
        self.returned.done.push(Completion { request, status });
    }

    /// True if a file in memory may have pages of the request in swap.
    fn may_be_swapped(&self, request: &Request) -> bool {
        let shared = &*self.shared;
        let (at, bytes) = (request.sector * SECTOR, request.sectors * SECTOR);
        self.swap_on
            && request.op != Op::Flush
            && !shared.swap.are_present(shared.file.as_fd(), at, bytes)
    }

    /// Does the request now, or finds the work queue for it.
    fn take(&mut self, request: Box<Request>, attempts: bool) {
        let mut task = match Task::begin(&request) {
            Ok(task) => task,
            Err(status) => return self.done(request, status),
        };
        let shared = &*self.shared;
        let bytes = request.sectors * SECTOR;
        let direct = shared.direct;
        let bounced = direct.is_some_and(|alignment| !is_aligned(&request.buffers, alignment));
        if shared.in_memory && bytes <= INLINE_BYTES && !self.may_be_swapped(&request) {
            return match blocking::execute(&request, &mut task, bounced, shared) {
                Outcome::Done(status) => self.done(request, status),
                Outcome::Sync => self.send(Kind::Sync, request, task, false),
            };
        }
        if !request.op.has_data() || bounced || !shared.tries(request.op) {
            return self.send_by_kind(request, task, bounced);
        }
        let fua = request.flags.contains(RequestFlags::FUA);
        let small = attempts && bytes <= INLINE_BYTES && !fua;
        if let Some(ring) = &mut self.ring
            && (direct.is_some() || (request.op == Op::Write && small))
        {
            return ring.push(request, task, shared, &mut self.returned);
        }
        if direct.is_none() && request.op == Op::Read && small {
            match attempt(&request, &mut task, shared) {
                Next::Done(status) => return self.done(request, status),
                Next::Step => {}
            }
        }
        self.send_by_kind(request, task, false);
    }

    fn send_by_kind(&mut self, request: Box<Request>, task: Task, bounced: bool) {
        // The kernel locks a regular file for each write through the page cache, and for each change of its
        // allocation.
        let locks = match request.op {
            Op::Flush => return self.send(Kind::Sync, request, task, false),
            Op::Read => false,
            Op::Write => self.shared.direct.is_none(),
            Op::Discard | Op::WriteZeroes => true,
        };
        let kind = match locks && !self.shared.is_block_device {
            true => Kind::InTurn,
            false => Kind::Beside,
        };
        self.send(kind, request, task, bounced);
    }

    fn send(&mut self, kind: Kind, request: Box<Request>, task: Task, bounced: bool) {
        let completions = self
            .completions
            .get_or_insert_with(|| Arc::new(FileCompletions::new()));
        self.outgoing[kind as usize].push(Work {
            request,
            task,
            bounced,
            completions: Arc::clone(completions),
        });
    }

    /// Gives the batch's requests to the threads.
    fn hand_over(&mut self) {
        let count: usize = self.outgoing.iter().map(Vec::len).sum();
        if count == 0 {
            return;
        }
        if self.at_threads == 0 {
            self.waiting_since = Some(Instant::now());
        }
        self.at_threads += count;
        for kind in [Kind::Beside, Kind::InTurn, Kind::Sync] {
            WorkQueues::push(&self.shared, kind, &mut self.outgoing[kind as usize]);
        }
    }

    /// True if the medium seems to hang.
    fn hangs(&self) -> bool {
        self.at_threads > 0
            && self
                .waiting_since
                .is_some_and(|since| since.elapsed() > HANGS)
    }

    /// Completes those writes of the batch with an error that would undo a truncation of the file; see
    /// [`FileShared::may_write`].
    fn refuse_behind_the_end(&mut self, batch: &mut Vec<Box<Request>>) {
        let shared = &self.shared;
        if shared.is_block_device || !batch.iter().any(|request| request.op.is_write()) {
            return;
        }
        if shared.in_memory {
            let now = Instant::now();
            if self.next_look.is_some_and(|next| now < next) {
                return;
            }
            self.next_look = Some(now + LOOK_COUNTS);
        } else if !shared.tries(Op::Write) {
            // The threads look, just before they write.
            return;
        }
        let Ok(bytes) = shared.present_bytes() else {
            return;
        };
        if bytes
            < shared
                .known_bytes
                .load(std::sync::atomic::Ordering::Relaxed)
        {
            self.was_cut(batch, bytes);
        }
    }

    #[cold]
    fn was_cut(&mut self, batch: &mut Vec<Box<Request>>, bytes: u64) {
        self.shared.look_soon();
        // The next batch looks again, until the new size is known.
        self.next_look = None;
        for request in std::mem::take(batch) {
            if request.op.is_write() && !self.shared.fits(&request, bytes) {
                self.done(request, Status::Invalid);
            } else {
                batch.push(request);
            }
        }
    }

    /// Gives requests that the ring returned to the threads.
    #[cold]
    fn send_returned(&mut self) {
        for (request, task) in std::mem::take(&mut self.returned.slow) {
            match task.step {
                super::task::Step::Sync => self.send(Kind::Sync, request, task, false),
                _ => self.send_by_kind(request, task, false),
            }
        }
    }
}

/// Attempts once to read from the page cache without waiting. With `Step` the rest needs a thread. A write
/// isn't tried like that: the system call waits while the filesystem is frozen, before it looks at
/// `RWF_NOWAIT`; io_uring doesn't (since Linux 6.12).
/// waits while the filesystem is frozen, before it looks at `RWF_NOWAIT`; io_uring doesn't (since Linux 6.12).
fn attempt(request: &Request, task: &mut Task, shared: &FileShared) -> Next {
    let (file, at) = (shared.file.as_fd(), request.sector * SECTOR);
    match fileio::read_some(file, at, &request.buffers, 0, false) {
        // The read came to the end of the file, or of the cached part.
        Ok(done) if (done as u64) < request.sectors * SECTOR => {
            task.done = done as u64;
            Next::Step
        }
        Err(e)
            if matches!(
                Errno::from_io_error(&e),
                Some(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL)
            ) =>
        {
            shared.try_no_more(request.op);
            Next::Step
        }
        result => task.advance(request, result.map(|n| n as u64), false, shared),
    }
}

impl DeviceQueue for FileQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        if self.wants_ring {
            self.start();
        }
        self.refuse_behind_the_end(batch);
        let attempts = !self.hangs();
        self.swap_on = self.shared.in_memory && self.swap.is_on(&self.shared.swap);
        for request in batch.drain(..) {
            self.tracer.request(Phase::Issue, &request);
            self.take(request, attempts);
        }
        if let Some(ring) = &mut self.ring {
            ring.submit(&self.shared);
        }
        if !self.returned.slow.is_empty() {
            self.send_returned();
        }
        self.hand_over();
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        if let Some(ring) = &mut self.ring {
            ring.collect(&self.shared, &mut self.returned);
            if !self.returned.slow.is_empty() {
                self.send_returned();
                self.hand_over();
            }
        }
        out.append(&mut self.returned.done);
        if self.at_threads > 0
            && let Some(completions) = &self.completions
        {
            let came = completions.take(out);
            if came > 0 {
                self.at_threads -= came;
                self.waiting_since = Some(Instant::now());
            } else if self.shared.work_queues.is_starved() {
                WorkQueues::retry(&self.shared);
            }
        }
    }

    fn arm(&mut self) -> Readiness {
        if !self.returned.done.is_empty() {
            return Readiness::Ready;
        }
        let mut until = None;
        let mut event = None;
        if self.at_threads > 0
            && let Some(completions) = &self.completions
        {
            if completions.arm() {
                return Readiness::Ready;
            }
            event = completions.event();
            until = match event {
                None => Some(Instant::now() + WITHOUT_EVENT),
                Some(_) if self.shared.work_queues.is_starved() => Some(Instant::now() + RETRY),
                Some(_) => None,
            };
        }
        match &mut self.ring {
            None => Readiness::Wait(until),
            Some(ring) => match ring.arm(&self.shared, event) {
                Readiness::Wait(other) => Readiness::Wait(until.into_iter().chain(other).min()),
                Readiness::Ready => Readiness::Ready,
            },
        }
    }

    /// There is no descriptor before the first request that isn't done at once.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.ring {
            Some(ring) => Some(ring.wait_fd()),
            None => self
                .completions
                .as_ref()
                .and_then(|completions| completions.wait_fd()),
        }
    }
}

impl Drop for FileQueue {
    /// Doesn't wait for requests at the threads. A thread in a system call keeps its request and buffers
    /// until the call ends; the ring is dropped by a thread that waits for the kernel.
    fn drop(&mut self) {
        if let Some(completions) = &self.completions {
            completions.close();
        }
        if let Some(ring) = self.ring.take().filter(|ring| ring.in_flight() > 0) {
            let shared = Arc::clone(&self.shared);
            let end = move || {
                drop(ring);
                drop(shared);
            };
            if let Err(job) = self.shared.work_queues.threads().run(Box::new(end)) {
                // There is no thread to wait on: the kernel may still write to the buffers.
                std::mem::forget(job);
            }
        }
    }
}
