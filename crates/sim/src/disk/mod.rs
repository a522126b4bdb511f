//! [`CrashDisk`]: the only disk of the simulation. It has a volatile cache, loses it, fails, and has users
//! that may die at any step.
//!
//! Its fault model is as bad as a disk may be that keeps the promises of `pvblk_block`:
//! - **Time.** Requests are done only in [`CrashDisk::step`], which does some or all sectors of one request
//!   in flight. Requests in flight, of all queues, are done in any order; the sectors of one in rising or in
//!   falling order.
//! - **Loss.** A completed write is in the cache, sector by sector (512 bytes), older versions under newer
//!   ones. A flush makes those writes stable that completed before it was submitted, on any queue, and no
//!   others; a write with FUA makes itself stable. All others may be lost when the cache is. Then, as
//!   [`Survives`] says, nothing of the cache survives, or all, or of each sector any version, or whole writes:
//!   so later writes may survive earlier ones, and a write of many sectors may survive in part.
//! - **Tearing.** When a process dies, the sectors that are left of its write in flight are all written, or
//!   none, or each by a coin. A sector is written whole or not at all.
//! - **Death of a process** ([`Crash::Process`]). The cache stays: it is the kernel's. Sectors that are left
//!   may be written later and in any order, while the disk is locked and no other process gets it.
//! - **Errors.** From a step on, all reads, or writes and flushes, or all requests fail, until the disk is
//!   told to work again; a failed write may have happened in part. Single sectors can't be read until they are
//!   written.
//! - **Stalls.** Requests wait until the disk is told to go on. They are done then, with the data that their memory has by then.
//! - **Left out.** Bits don't rot; writes go to the right sectors; a stable sector stays; requests don't hang
//!   (those of the `stop` scenario do).
//!
//! The disk checks its users too. They must not have two writes of a sector in flight, nor change memory that
//! is being written from, nor write contents that are no stamps where it expects stamps.

mod image;
mod sabotage;
mod state;

pub use image::Survives;
pub use sabotage::{Fate, Flushes, Sabotage};

use crate::fuse::{Fuse, Side};
use crate::stamp::{Bytes, SECTOR_BYTES};
use fastrand::Rng;
use image::Image;
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, DeviceQueue, Error, EventHub, Incarnation,
    Limits, LossMarks, Op, QueueContext, Readiness, Request, RequestFlags, Status,
};
use pvblk_sys::EventFd;
use sabotage::{Why, take_late};
use state::{DiskQueue, State, Work, lost};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The requests of a disk that fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fails {
    #[default]
    Nothing,
    Reads,
    /// Writes and flushes fail.
    Writes,
    All,
}

/// The end of the process that uses a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process alone is killed: the cache is the kernel's, which goes on with its writes.
    Process,
    /// The process is killed with a cache of its own.
    Cache(Survives),
    /// The machine loses its power.
    Power(Survives),
}

/// Properties of a disk to make.
#[derive(Default)]
pub struct DiskSetup {
    /// Number of the disk, for messages.
    pub number: usize,
    /// Capacity in sectors, which are all zeros.
    pub sectors: u64,
    /// The disk can discard and write zeros; both leave zeros.
    pub zeroes: bool,
    /// The disk says that it is rotational.
    pub rotational: bool,
    /// The disk shows by its incarnation that its cache was lost.
    pub marks: bool,
    /// The disk expects stamps of [`crate::stamp`], or zeros.
    pub stamped: bool,
    /// The user may give up requests, and use their memory for something else.
    pub given_up: bool,
    /// Faults of the disk.
    pub sabotage: Sabotage,
    /// Counter of calls, at one of which the process that uses the disk may die.
    pub fuse: Arc<Fuse>,
}

/// A disk as the head of this module describes it.
pub struct CrashDisk {
    state: Arc<Mutex<State>>,
    events: EventHub,
    fuse: Arc<Fuse>,
    number: usize,
    sectors: u64,
    limits: Limits,
    marks: bool,
}

impl CrashDisk {
    /// A disk of zeros.
    pub fn new(setup: DiskSetup) -> CrashDisk {
        let limits = Limits {
            discard_granularity_bytes: if setup.zeroes { 512 } else { 0 },
            write_zeroes: setup.zeroes,
            volatile_cache: true,
            non_rotational: !setup.rotational,
            ..Limits::default()
        };
        CrashDisk {
            state: Arc::new(Mutex::new(State {
                image: Image::new(setup.sectors),
                queues: Vec::new(),
                late: Vec::new(),
                clock: 0,
                fails: Fails::Nothing,
                stalled: false,
                given_up: setup.given_up,
                bad: BTreeSet::new(),
                mark: 1,
                trouble: None,
                sabotage: setup.sabotage,
                stamped: setup.stamped,
            })),
            events: EventHub::default(),
            fuse: setup.fuse,
            number: setup.number,
            sectors: setup.sectors,
            limits,
            marks: setup.marks,
        }
    }

    /// Puts bytes on the medium, from a sector on.
    pub fn put(&self, sector: u64, bytes: &[u8]) {
        let mut s = self.state.lock();
        for (at, sector_bytes) in (sector..).zip(bytes.as_chunks::<SECTOR_BYTES>().0) {
            s.image.set(at, sector_bytes);
        }
    }

    /// The contents that a read would find.
    pub fn current(&self, sector: u64) -> Bytes {
        self.state.lock().image.current(sector)
    }

    /// Makes requests fail from now on.
    pub fn fail(&self, how: Fails) {
        self.state.lock().fails = how;
    }

    /// Lets all requests wait, or no more.
    pub fn stall(&self, on: bool) {
        self.state.lock().stalled = on;
    }

    /// True if any requests fail.
    pub fn is_failing(&self) -> bool {
        self.state.lock().fails != Fails::Nothing
    }

    /// Makes a sector unreadable until it is written.
    pub fn spoil(&self, sector: u64) {
        self.state.lock().bad.insert(sector);
    }

    /// Makes all sectors readable again; false if they were.
    pub fn repair(&self) -> bool {
        !std::mem::take(&mut self.state.lock().bad).is_empty()
    }

    /// The first mistake of the disk's users; returned once.
    pub fn take_trouble(&self) -> Option<String> {
        let trouble = self.state.lock().trouble.take();
        trouble.map(|what| format!("disk {}: {what}", self.number))
    }

    /// Number of requests that are not done.
    pub fn busy(&self) -> usize {
        let s = self.state.lock();
        let all = s.queues.iter().filter(|_| !s.stalled);
        all.map(DiskQueue::busy).sum()
    }

    /// Number of sectors that are written after their requests ended.
    pub fn late(&self) -> usize {
        self.state.lock().late.len()
    }

    /// True while a killed process' writes are on their way: no other process gets the disk.
    pub fn is_locked(&self) -> bool {
        let s = self.state.lock();
        !s.sabotage.forgets_lock && s.late.iter().any(|l| l.why == Why::Killed)
    }

    /// Number of the queue that was opened last.
    pub fn last_queue(&self) -> usize {
        self.state.lock().queues.len() - 1
    }

    /// True if the queue has a wake-up for its user.
    pub fn is_notified(&self, queue: usize) -> bool {
        self.state.lock().queues[queue].notified
    }

    /// The first buffer of a write in flight.
    pub fn buffer_in_flight(&self) -> Option<Buffer> {
        let s = self.state.lock();
        let work = s.queues.iter().flat_map(|q| &q.work);
        let mut writes = work.filter(|w| w.request.op == Op::Write);
        writes.find_map(|w| w.request.buffers.first().cloned())
    }

    /// Does some of the work of one request, chosen at random; false if there is none.
    pub fn step(&self, rng: &mut Rng) -> bool {
        let mut guard = self.state.lock();
        let s = &mut *guard;
        if s.stalled {
            return false;
        }
        let busy: usize = s.queues.iter().map(DiskQueue::busy).sum();
        if (busy == 0 || rng.u8(..8) == 0)
            && let Some(late) = take_late(&mut s.late, rng)
        {
            s.image.write(late.sector, &late.bytes, late.queue, late.id);
            return true;
        }
        if busy == 0 {
            return false;
        }
        let mut at = rng.usize(..busy);
        let queue = s.queues.iter().position(|q| {
            let here = at < q.busy();
            at -= if here { 0 } else { q.busy() };
            here
        });
        let Some(queue) = queue else { return false };
        let mut work = s.queues[queue].work.swap_remove(at);
        let mut status = Status::Ok;
        if s.refuses(work.request.op) {
            // The steps before have decided which part of the write has happened.
            status = Status::IoError;
        } else if work.request.op == Op::Flush {
            s.flush(work.id, queue);
        } else {
            let some = match rng.u8(..4) {
                0 => 1 + rng.usize(..work.left.len()),
                _ => work.left.len(),
            };
            let first = work.left.len() - some;
            for index in work.left.split_off(first) {
                status = s.do_sector(&work, queue, index);
                if status != Status::Ok {
                    break;
                }
            }
        }
        let q = &mut s.queues[queue];
        if status == Status::Ok && !work.left.is_empty() {
            q.work.push(work);
            return true;
        }
        if q.closed {
            return true;
        }
        let request = work.request;
        q.done.push((work.id, Completion { request, status }));
        if std::mem::take(&mut q.armed) {
            q.notified = true;
            q.wake_up.notify();
        }
        true
    }

    /// The process that uses the disk dies: its writes in flight have happened in part, and don't complete.
    /// Returns the number of sectors in the cache if that was lost.
    pub fn crash(&self, crash: Crash, rng: &mut Rng) -> u64 {
        let mut guard = self.state.lock();
        let s = &mut *guard;
        let machine = matches!(crash, Crash::Power(_));
        s.stalled = false;
        // The kernel's writes go on unless the machine is down too. A write that was acknowledged too early
        // is lost with the process that had it.
        s.late.retain(|l| l.why == Why::Killed && !machine);
        for queue in 0..s.queues.len() {
            if std::mem::replace(&mut s.queues[queue].dead, true) {
                continue;
            }
            let work = std::mem::take(&mut s.queues[queue].work);
            for w in work.iter().filter(|w| w.request.op.is_write()) {
                let share = [0, 1, 2, 2][rng.usize(..4)];
                // Most media finish such writes soon; some keep them for long.
                let goes_on = !machine && rng.bool();
                for &index in &w.left {
                    let happens = share == 1 || (share == 2 && rng.bool());
                    if happens && !s.refuses(Op::Write) {
                        s.do_sector(w, queue, index);
                    } else if goes_on {
                        s.goes_on(w, queue, index);
                    }
                }
            }
            let q = &mut s.queues[queue];
            q.done
                .extend(work.into_iter().map(|w| (w.id, lost(w.request))));
            q.wake_up.notify();
        }
        match crash {
            Crash::Process => 0,
            Crash::Cache(survives) | Crash::Power(survives) => {
                s.mark += u64::from(!s.sabotage.same_cache);
                s.image.lose(survives, rng)
            }
        }
    }
}

impl BlockDevice for CrashDisk {
    fn describe(&self) -> String {
        format!("disk {}", self.number)
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn capacity_sectors(&self) -> u64 {
        self.sectors
    }

    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let wake_up = EventFd::new().map_err(|e| Error::os("an eventfd for a disk", e))?;
        let wake_up = Arc::new(wake_up);
        let s = &mut *self.state.lock();
        s.late.extend(s.sabotage.replay());
        s.queues.push(DiskQueue {
            work: Vec::new(),
            done: Vec::new(),
            armed: false,
            wake_up: Arc::clone(&wake_up),
            notified: false,
            dead: false,
            closed: false,
        });
        Ok(Box::new(CrashQueue {
            number: s.queues.len() - 1,
            state: Arc::clone(&self.state),
            fuse: Arc::clone(&self.fuse),
            wake_up,
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            incarnation: Some(self),
            ..Capabilities::none()
        }
    }
}

impl LossMarks for CrashDisk {
    fn incarnation(&self) -> Incarnation {
        Incarnation {
            cache: self.marks.then(|| self.state.lock().mark),
            contents: None,
        }
    }
}

struct CrashQueue {
    number: usize,
    state: Arc<Mutex<State>>,
    fuse: Arc<Fuse>,
    wake_up: Arc<EventFd>,
}

impl DeviceQueue for CrashQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        for request in batch.drain(..) {
            self.fuse.tick(Side::Back);
            let s = &mut *self.state.lock();
            s.clock += 1;
            let id = s.clock;
            if s.queues[self.number].dead {
                s.queues[self.number].done.push((id, lost(request)));
                continue;
            }
            let mut carried = Vec::new();
            if request.op.is_write() {
                s.check_overlap(&request);
            }
            if request.op == Op::Write {
                let parts = request.buffers.iter().map(Buffer::to_vec);
                carried = parts.collect::<Vec<_>>().concat();
            }
            let sectors = request.sectors as u32;
            // The order is rising or falling; with several requests in flight that mixes enough.
            let left = match id % 2 {
                0 => (0..sectors).rev().collect(),
                _ => (0..sectors).collect(),
            };
            s.queues[self.number].work.push(Work {
                id,
                request,
                carried,
                left,
            });
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.fuse.tick(Side::Back);
        let s = &mut *self.state.lock();
        let q = &mut s.queues[self.number];
        let dead = q.dead;
        for (id, completion) in q.done.drain(..) {
            let r = &completion.request;
            if r.op.is_write() && completion.status == Status::Ok && !dead {
                s.clock += 1;
                let fua = r.flags.contains(RequestFlags::FUA) && !s.sabotage.forgets_fua;
                s.image.completed(r.sector..r.end(), id, s.clock, fua);
            }
            out.push(completion);
        }
    }

    fn arm(&mut self) -> Readiness {
        self.fuse.tick(Side::Back);
        let q = &mut self.state.lock().queues[self.number];
        if !q.done.is_empty() {
            return Readiness::Ready;
        }
        q.armed = true;
        Readiness::Wait(None)
    }

    fn woken(&mut self) {
        self.state.lock().queues[self.number].notified = false;
        self.wake_up.drain();
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake_up.as_fd())
    }
}

impl Drop for CrashQueue {
    fn drop(&mut self) {
        let mut s = self.state.lock();
        let q = &mut s.queues[self.number];
        q.closed = true;
        let done = std::mem::take(&mut q.done);
        drop(s);
        drop(done);
    }
}

#[cfg(test)]
mod tests;
