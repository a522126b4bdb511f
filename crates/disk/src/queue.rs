//! Many requests in flight, driven by steps.

use crate::buffer::{Home, Parts};
use crate::request::name;
use crate::shared::Shared;
use crate::{Buffer, Completion, Error, ErrorKind, Full, Request};
use pvblk_block::{Op, QueueContext, SECTOR, Status};
use pvblk_sys::{PollEvent, Poller};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The leave to sleep that [`Queue::arm`] gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Don't sleep: there may be completions to poll.
    Ready,
    /// Sleep until the queue's descriptor is readable, or until this time if there is one, and then poll.
    Wait(Option<Instant>),
}

/// One submitter's way to a disk, with many requests in flight. One thread uses it at a time; several threads open one each, by
/// [`Disk::queue`](crate::Disk::queue).
///
/// Nothing blocks but [`Queue::wait`], and nothing happens behind the caller's back: [`push`](Queue::push) requests, [`submit`](Queue::submit) them as one batch,
/// [`poll`](Queue::poll) completions. Neighbours within a batch may go to the server as one request. Requests complete in any order.
///
/// [`Queue::wait`] sleeps until something completes. A program with a poll loop of its own does this:
///
/// ```
/// # fn step(queue: &mut pvblk_disk::Queue, done: &mut Vec<pvblk_disk::Completion>) {
/// use pvblk_disk::Readiness;
///
/// queue.submit();
/// while queue.poll(done) == 0 && queue.in_flight() > 0 {
///     if let Readiness::Wait(until) = queue.arm() {
///         // Sleep in the program's own way: until `queue.as_fd()` is readable, or until the time has come.
/// #       let _ = until;
/// #       std::thread::yield_now();
///     }
/// }
/// # }
/// # let disk = pvblk_disk::Disk::open("delay:1ms:mem:1M")?;
/// # let mut queue = disk.queue(1)?;
/// # queue.push(pvblk_disk::Request::flush().tag(7))?;
/// # let mut done = Vec::new();
/// # step(&mut queue, &mut done);
/// # assert_eq!(done[0].tag, 7);
/// # Ok::<(), pvblk_disk::Error>(())
/// ```
///
/// A queue that is dropped with requests in flight gives them up: whether its writes are done isn't known until a flush of another queue after them.
pub struct Queue {
    /// Always there but at the end of `drop`.
    work: Option<Work>,
    shared: Arc<Shared>,
    depth: u32,
    /// Counts as one of the queues that may be open at the same time.
    counted: bool,
    batch: Vec<Box<pvblk_block::Request>>,
    poller: Poller,
    /// The poller has the device's descriptor, which some devices make with their first request.
    has_fd: bool,
    /// The caller may sleep, and so a wake-up may be there to be cleared.
    armed: bool,
    events: Vec<PollEvent>,
}

/// A queue of the device, and the requests that it has.
pub(crate) struct Work {
    queue: pvblk_block::Queue,
    slots: Vec<Slot>,
    free: Vec<u32>,
    done: Vec<pvblk_block::Completion>,
}

/// The place of one request in flight.
#[derive(Default)]
struct Slot {
    request: Option<Box<pvblk_block::Request>>,
    tag: u64,
    offset: u64,
    len: u64,
    home: Option<Arc<Home>>,
    buffer_len: usize,
}

impl Slot {
    /// The buffer of a request that this place had.
    fn buffer(&mut self, request: &mut pvblk_block::Request) -> Option<Buffer> {
        let (home, memory) = (self.home.take()?, request.buffers.pop()?);
        Some(Buffer::from_parts(memory, home, self.buffer_len))
    }

    #[cold]
    fn error(&self, shared: &Shared, op: Op, status: Status) -> Error {
        let (what, name) = (name(op), shared.name());
        let what = match op {
            Op::Flush => format!("{name}: {what}"),
            _ => format!(
                "{name}: {what} of {} bytes at byte {}",
                self.len, self.offset
            ),
        };
        Error::of_request(status, op == Op::Flush, shared.is_gone(), &what)
    }
}

impl Work {
    /// Takes completions, and returns their number.
    fn poll(&mut self, shared: &Shared, mut take: impl FnMut(Completion)) -> usize {
        let count = self.queue.poll(&mut self.done);
        for c in self.done.drain(..) {
            let mut request = c.request;
            let id = request.tag;
            let slot = &mut self.slots[id as usize];
            let buffer = slot.buffer(&mut request);
            let result = match c.status {
                Status::Ok => Ok(()),
                status => Err(slot.error(shared, request.op, status)),
            };
            let tag = slot.tag;
            slot.request = Some(request);
            self.free.push(id as u32);
            take(Completion {
                tag,
                result,
                buffer,
            });
        }
        count
    }

    /// Drops completions and gives their buffers back; true while there are requests in flight.
    pub(crate) fn reap(&mut self, shared: &Shared) -> bool {
        self.queue.woken();
        self.poll(shared, drop);
        self.queue.in_flight() > 0
    }
}

impl Queue {
    pub(crate) fn open(shared: &Arc<Shared>, depth: u32, counted: bool) -> Result<Queue, Error> {
        let context = QueueContext {
            index: shared.next_index(),
            ..QueueContext::new(depth)
        };
        let queue =
            pvblk_block::Queue::open(shared.device(), &context).map_err(Error::of_device)?;
        let poller = Poller::new().map_err(cannot_wait)?;
        let new = |id| Slot {
            request: Some(pvblk_block::Request::new(Op::Flush, 0, 0, id)),
            ..Slot::default()
        };
        let mut queue = Queue {
            work: Some(Work {
                queue,
                slots: (0..u64::from(depth)).map(new).collect(),
                free: (0..depth).rev().collect(),
                done: Vec::with_capacity(depth as usize),
            }),
            shared: Arc::clone(shared),
            depth,
            // Only from here on, so that a failure is counted by who opens the queue.
            counted: false,
            batch: Vec::with_capacity(depth as usize),
            poller,
            has_fd: false,
            armed: false,
            events: Vec::new(),
        };
        queue.look_for_fd()?;
        queue.counted = counted;
        Ok(queue)
    }

    /// Number of requests that the queue can have in flight.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Number of requests that were pushed, and whose completions weren't taken.
    #[inline]
    pub fn in_flight(&self) -> usize {
        let free = self.work.as_ref().map_or(0, |w| w.free.len());
        self.depth as usize - free
    }

    /// Makes a buffer: see [`Disk::buffer`](crate::Disk::buffer).
    pub fn buffer(&self, len: usize) -> Result<Buffer, Error> {
        self.shared.buffer(len)
    }

    /// Adds a request to the batch that [`Queue::submit`] sends. The number of requests in flight is limited to the queue's depth; without a place the
    /// request comes back in the error. One that makes no sense for the disk fails as its completion.
    #[inline]
    pub fn push(&mut self, request: Request) -> Result<(), Full> {
        let work = self.work.as_mut();
        let Some((id, slot)) = work.and_then(|w| {
            let id = *w.free.last()?;
            Some((w.free.pop()?, w.slots.get_mut(id as usize)?))
        }) else {
            return Err(Full {
                request,
                depth: self.depth,
            });
        };
        // A free slot holds its request.
        let mut inner = slot
            .request
            .take()
            .unwrap_or_else(|| pvblk_block::Request::new(Op::Flush, 0, 0, 0));
        // A length or offset that isn't one of whole sectors must not become another one.
        let sectors = |bytes: u64| match bytes % SECTOR {
            0 => bytes / SECTOR,
            _ => u64::MAX,
        };
        let (sector, count) = (sectors(request.offset), sectors(request.len));
        inner.reset(request.op, request.flags, sector, count, u64::from(id));
        inner.buffers.clear();
        slot.tag = request.tag;
        (slot.offset, slot.len) = (request.offset, request.len);
        slot.home = None;
        if let Some(buffer) = request.buffer {
            slot.buffer_len = buffer.len();
            if let Some(Parts { memory, home }) = buffer.into_parts() {
                let part = match request.len == memory.len() as u64 {
                    true => memory,
                    false => memory.slice(0, request.len as usize).unwrap_or(memory),
                };
                inner.buffers.push(part);
                slot.home = Some(home);
            }
        }
        self.batch.push(inner);
        Ok(())
    }

    /// Sends what was pushed, in that order. Without a batch it does nothing.
    #[inline]
    pub fn submit(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        if let Some(work) = &mut self.work {
            work.queue.submit(&mut self.batch);
        }
    }

    /// Appends the completions that are there to `out`, and returns their number. It doesn't wait, and doesn't submit.
    #[inline]
    pub fn poll(&mut self, out: &mut Vec<Completion>) -> usize {
        let Some(work) = &mut self.work else {
            return 0;
        };
        if std::mem::take(&mut self.armed) {
            work.queue.woken();
        }
        work.poll(&self.shared, |c| out.push(c))
    }

    /// The last step before sleeping, after [`Queue::poll`] found nothing: submits what was pushed, asks for a wake-up, and says whether one may sleep.
    pub fn arm(&mut self) -> Readiness {
        self.submit();
        let Some(work) = &mut self.work else {
            return Readiness::Wait(None);
        };
        let armed = work.queue.arm();
        if !self.has_fd && self.look_for_fd().is_err() {
            // Out of kernel memory: rather a busy queue than one that sleeps for ever.
            return Readiness::Ready;
        }
        match armed {
            pvblk_block::Readiness::Ready => Readiness::Ready,
            pvblk_block::Readiness::Wait(until) => {
                self.armed = true;
                Readiness::Wait(until)
            }
        }
    }

    /// Submits what was pushed, and sleeps until there are completions. Appends them to `out` and returns their number: 0 after `limit`, or if nothing is
    /// in flight. `None`: no limit of time.
    ///
    /// The error is the operating system's, if it can't wait; requests stay in flight.
    pub fn wait(
        &mut self,
        out: &mut Vec<Completion>,
        limit: Option<Duration>,
    ) -> Result<usize, Error> {
        self.submit();
        let deadline = limit.and_then(|l| Instant::now().checked_add(l));
        loop {
            let count = self.poll(out);
            if count > 0 || self.in_flight() == 0 {
                return Ok(count);
            }
            let Readiness::Wait(until) = self.arm() else {
                if deadline.is_some_and(|d| Instant::now() >= d) {
                    return Ok(0);
                }
                continue;
            };
            let until = until.into_iter().chain(deadline).min();
            let time = until.map(|u| u.saturating_duration_since(Instant::now()));
            self.events.clear();
            let waited = self.poller.wait(&mut self.events, time);
            waited.map_err(cannot_wait)?;
            // Without a wake-up there is none to clear.
            self.armed = !self.events.is_empty();
            if !self.armed && deadline.is_some_and(|d| Instant::now() >= d) {
                return Ok(self.poll(out));
            }
        }
    }

    fn look_for_fd(&mut self) -> Result<(), Error> {
        if let Some(fd) = self.work.as_ref().and_then(|w| w.queue.wait_fd()) {
            self.poller.add(fd, 0, false).map_err(cannot_wait)?;
            self.has_fd = true;
        }
        Ok(())
    }
}

fn cannot_wait(e: std::io::Error) -> Error {
    Error::os("waiting for completions", e)
}

/// The error of a depth that no queue can have.
pub(crate) fn check_depth(depth: u32) -> Result<(), Error> {
    const MOST: u32 = 65_536;
    if (1..=MOST).contains(&depth) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Config,
        format!("a queue of {depth} requests; ask for 1 to {MOST}"),
    ))
}

/// The descriptor to sleep on after [`Queue::arm`]: readable when there may be completions. It stays the same, and [`Queue::poll`] clears it.
impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let Some(mut work) = self.work.take() else {
            return;
        };
        // Nobody but us has these.
        for mut request in self.batch.drain(..) {
            if let Some(slot) = work.slots.get_mut(request.tag as usize) {
                drop(slot.buffer(&mut request));
            }
        }
        // Their memory comes back when they complete.
        let given_up = (work.queue.in_flight() > 0).then_some(work);
        self.shared.leave(given_up, self.counted);
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, count) = (self.shared.name(), self.in_flight());
        write!(f, "Queue({name}, {count} of {} in flight)", self.depth)
    }
}
