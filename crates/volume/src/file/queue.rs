//! One queue of a file volume. Nothing here waits for the medium: what would have to goes to the disk's threads.

use super::blocking::{self, Outcome, is_aligned};
use super::lanes::{Kind, Lanes, Work};
use super::mailbox::Mailbox;
use super::ring::{RETRY, Returned, RingEngine};
use super::shared::Shared;
use super::task::{Next, Task};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{Completion, DeviceQueue, Op, Readiness, Request, RequestFlags, SECTOR, Status};
use pvblk_sys::fileio;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

/// The longest request that is copied to or from the page cache by the queue's user itself.
const INLINE_BYTES: u64 = 1 << 20;

/// Requests that have been away for so long, with none that came back, tell of a medium that hangs: then even attempts that don't wait are
/// left to the threads, because the kernel's reading ahead may wait for a place in the medium's queue.
const HANGS: Duration = Duration::from_millis(100);

/// How long a look at the length of a file in memory counts. Elsewhere each batch with a write has its own: there it costs little.
const LOOK_COUNTS: Duration = Duration::from_millis(1);

/// Between two looks if there was no descriptor for a bell.
const NO_BELL: Duration = Duration::from_millis(1);

pub(super) struct FileQueue {
    shared: Arc<Shared>,
    depth: u32,
    most_entries: Option<u32>,
    /// io_uring is to be used, and wasn't looked for.
    wants_ring: bool,
    ring: Option<Box<RingEngine>>,
    /// Made at the first request that goes to a thread, so that idle disks, and cached ones, cost no descriptor.
    mailbox: Option<Arc<Mailbox>>,
    /// Requests at the threads.
    away: usize,
    /// Since when none came back.
    away_since: Option<Instant>,
    /// What this batch has for each of the lanes.
    outgoing: [Vec<Work>; 3],
    returned: Returned,
    /// When the length of a file in memory is looked at again.
    next_look: Option<Instant>,
    tracer: Tracer,
}

impl FileQueue {
    pub(super) fn new(
        shared: Arc<Shared>,
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
            mailbox: None,
            away: 0,
            away_since: None,
            outgoing: Default::default(),
            returned: Returned::default(),
            next_look: None,
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

    /// Does the request now, or finds out who does.
    fn take(&mut self, request: Box<Request>, attempts: bool) {
        let mut task = match Task::begin(&request) {
            Ok(task) => task,
            Err(status) => return self.done(request, status),
        };
        let shared = &*self.shared;
        let bytes = request.sectors * SECTOR;
        let direct = shared.direct;
        let bounced = direct.is_some_and(|alignment| !is_aligned(&request.buffers, alignment));
        if shared.in_memory && bytes <= INLINE_BYTES {
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
        // The kernel locks a regular file for each write through the page cache, and for each change of what is allocated.
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
        let mailbox = self.mailbox.get_or_insert_with(|| Arc::new(Mailbox::new()));
        self.outgoing[kind as usize].push(Work {
            request,
            task,
            bounced,
            mailbox: Arc::clone(mailbox),
        });
    }

    /// Hands what was sent to the threads.
    fn hand_over(&mut self) {
        let count: usize = self.outgoing.iter().map(Vec::len).sum();
        if count == 0 {
            return;
        }
        if self.away == 0 {
            self.away_since = Some(Instant::now());
        }
        self.away += count;
        for kind in [Kind::Beside, Kind::InTurn, Kind::Sync] {
            Lanes::push(&self.shared, kind, &mut self.outgoing[kind as usize]);
        }
    }

    /// The medium seems to hang.
    fn hangs(&self) -> bool {
        self.away > 0 && self.away_since.is_some_and(|since| since.elapsed() > HANGS)
    }

    /// Answers those writes of the batch that would undo a cut of the file; see [`Shared::may_write`].
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

    /// Sends on what the ring gave back.
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

/// One attempt to read from the page cache that doesn't wait. `Step`: the rest needs a thread. A write isn't tried like that: the system call
/// waits while the filesystem is frozen, before it looks at `RWF_NOWAIT`; io_uring doesn't (since Linux 6.12).
fn attempt(request: &Request, task: &mut Task, shared: &Shared) -> Next {
    let (file, at) = (shared.file.as_fd(), request.sector * SECTOR);
    match fileio::read_some(file, at, &request.buffers, 0, false) {
        // At the end of the file, or of what is cached.
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
        if self.away > 0
            && let Some(mailbox) = &self.mailbox
        {
            let came = mailbox.take(out);
            if came > 0 {
                self.away -= came;
                self.away_since = Some(Instant::now());
            } else if self.shared.lanes.is_starved() {
                Lanes::retry(&self.shared);
            }
        }
    }

    fn arm(&mut self) -> Readiness {
        if !self.returned.done.is_empty() {
            return Readiness::Ready;
        }
        let mut until = None;
        let mut bell = None;
        if self.away > 0
            && let Some(mailbox) = &self.mailbox
        {
            if mailbox.arm() {
                return Readiness::Ready;
            }
            bell = mailbox.bell();
            until = match bell {
                None => Some(Instant::now() + NO_BELL),
                Some(_) if self.shared.lanes.is_starved() => Some(Instant::now() + RETRY),
                Some(_) => None,
            };
        }
        match &mut self.ring {
            None => Readiness::Wait(until),
            Some(ring) => match ring.arm(&self.shared, bell) {
                Readiness::Wait(other) => Readiness::Wait(until.into_iter().chain(other).min()),
                Readiness::Ready => Readiness::Ready,
            },
        }
    }

    /// Before the first request that isn't done at once there is none, and nothing to wait for.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.ring {
            Some(ring) => Some(ring.wait_fd()),
            None => self.mailbox.as_ref().and_then(|mailbox| mailbox.wait_fd()),
        }
    }
}

impl Drop for FileQueue {
    /// Doesn't wait for requests that are away. A thread in a system call keeps its request and buffers until the call ends; the ring is
    /// dropped by a thread that waits for the kernel.
    fn drop(&mut self) {
        if let Some(mailbox) = &self.mailbox {
            mailbox.close();
        }
        if let Some(ring) = self.ring.take().filter(|ring| ring.in_flight() > 0) {
            let shared = Arc::clone(&self.shared);
            let end = move || {
                drop(ring);
                drop(shared);
            };
            if let Err(job) = self.shared.lanes.threads().run(Box::new(end)) {
                // No thread to wait on: the kernel may still write to the buffers.
                std::mem::forget(job);
            }
        }
    }
}
