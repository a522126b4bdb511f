//! [`CrashDisk`]: a disk with a volatile cache that can lose power at any step.

use crate::Planted;
use crate::cache::Cache;
use crate::fuse::{Fuse, Side};
use crate::stamp;
use fastrand::Rng;
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Capabilities, Completion, DeviceQueue, Error, EventHub, Incarnation, Limits,
    LossMarks, Op, QueueContext, Readiness, Request, RequestFlags, Status,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A request at the disk.
struct Work {
    /// Unique; names the write in the cache.
    id: u64,
    request: Box<Request>,
    /// Sectors of the request that are not done yet, in the order in which they will be.
    left: Vec<u32>,
    /// Time of its submission.
    since: u64,
}

#[derive(Default)]
struct DiskQueue {
    work: Vec<Work>,
    /// Done and not handed over: number and completion.
    done: Vec<(u64, Completion)>,
    armed: bool,
    rung: bool,
}

/// What goes with a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nothing but itself: the cache is the kernel's.
    Nothing,
    /// A cache that was its own.
    Cache,
    /// The machine, with all caches.
    Power,
}

/// A sector's write that is done later than its request seems to be: the request was acknowledged too early, by a planted bug, or
/// its process is dead and the kernel has it.
struct Late {
    id: u64,
    queue: usize,
    sector: usize,
    stamp: u64,
}

struct State {
    cache: Cache,
    queues: Vec<DiskQueue>,
    /// Sum of all queues' `work`.
    busy: usize,
    late: Vec<Late>,
    /// Writes of killed processes that are on their way to the medium; they hold its lock.
    old: Vec<Late>,
    /// Requests, and a clock for what was before what.
    clock: u64,
    mark: u64,
    trouble: Option<String>,
}

/// See the module's documentation. Nothing moves but in [`CrashDisk::step`].
pub struct CrashDisk {
    state: Arc<Mutex<State>>,
    events: EventHub,
    fuse: Arc<Fuse>,
    sectors: u64,
    discard: bool,
    mark_known: bool,
    planted: Option<Planted>,
}

/// How to make one.
#[derive(Clone, Copy, Debug)]
pub struct DiskSetup {
    /// Capacity in 512-byte sectors, all zeros.
    pub sectors: u64,
    /// It can discard.
    pub discard: bool,
    /// It says when its cache was lost.
    pub mark_known: bool,
    /// A bug to be found.
    pub planted: Option<Planted>,
}

impl CrashDisk {
    /// A disk of zeros.
    pub fn new(setup: DiskSetup, fuse: &Arc<Fuse>) -> CrashDisk {
        CrashDisk {
            state: Arc::new(Mutex::new(State {
                cache: Cache::new(setup.sectors as usize),
                queues: Vec::new(),
                busy: 0,
                late: Vec::new(),
                old: Vec::new(),
                clock: 0,
                mark: 1,
                trouble: None,
            })),
            events: EventHub::default(),
            fuse: Arc::clone(fuse),
            sectors: setup.sectors,
            discard: setup.discard,
            mark_known: setup.mark_known,
            planted: setup.planted,
        }
    }

    /// Number of the queue that was opened last.
    pub fn last_queue(&self) -> usize {
        self.state.lock().queues.len() - 1
    }

    /// True if something is to be done.
    pub fn is_busy(&self) -> bool {
        let s = self.state.lock();
        s.busy > 0 || !s.late.is_empty() || !s.old.is_empty()
    }

    /// True while a killed process' writes are on their way: no other process gets the disk.
    pub fn is_locked(&self) -> bool {
        !self.state.lock().old.is_empty() && self.planted != Some(Planted::LockBeforeIo)
    }

    /// True if the queue's user is to be woken.
    pub fn is_rung(&self, queue: usize) -> bool {
        self.state.lock().queues[queue].rung
    }

    /// What the disk was asked that nobody may ask; told once.
    pub fn take_trouble(&self) -> Option<String> {
        self.state.lock().trouble.take()
    }

    /// Does some of the work of one request, chosen at random; false if there is none.
    pub fn step(&self, rng: &mut Rng) -> bool {
        let mut s = self.state.lock();
        if !s.late.is_empty() && (s.busy == 0 || rng.u8(..8) == 0) {
            let at = rng.usize(..s.late.len());
            let l = s.late.swap_remove(at);
            s.cache.write(l.sector, l.stamp, l.queue, l.id);
            return true;
        }
        if !s.old.is_empty() && (s.busy == 0 || rng.u8(..8) == 0) {
            // In any order, as a medium likes it.
            let at = rng.usize(..s.old.len());
            let l = s.old.swap_remove(at);
            s.cache.write(l.sector, l.stamp, l.queue, l.id);
            return true;
        }
        if s.busy == 0 {
            return false;
        }
        let mut at = rng.usize(..s.busy);
        let busy = s
            .queues
            .iter()
            .position(|q| match at.checked_sub(q.work.len()) {
                Some(rest) => {
                    at = rest;
                    false
                }
                None => true,
            });
        let Some(queue) = busy else { return false };
        let mut work = s.queues[queue].work.swap_remove(at);
        s.busy -= 1;
        let one_flush = self.planted == Some(Planted::FlushOneQueue);
        if work.request.op == Op::Flush {
            s.cache.flush(work.since, one_flush.then_some(queue));
        } else {
            let some = if rng.u8(..3) == 0 { 1 } else { work.left.len() };
            for _ in 0..some {
                if let Some(sector) = work.left.pop() {
                    s.do_sector(&work, queue, sector);
                }
            }
        }
        if work.left.is_empty() {
            let completion = Completion {
                request: work.request,
                status: Status::Ok,
            };
            let q = &mut s.queues[queue];
            q.done.push((work.id, completion));
            q.rung |= std::mem::take(&mut q.armed);
        } else {
            s.queues[queue].work.push(work);
            s.busy += 1;
        }
        true
    }

    /// The process that uses the disk is killed. What was in flight has happened in part, sector by sector, and goes on unless the
    /// machine is lost too.
    pub fn crash(&self, loss: Loss, rng: &mut Rng) {
        let s = &mut *self.state.lock();
        for queue in 0..s.queues.len() {
            let work = std::mem::take(&mut s.queues[queue].work);
            for w in work.iter().filter(|w| w.request.op.is_write()) {
                let share = [0, 1, 2, 2][rng.usize(..4)];
                // Most media are done with it soon; some keep it for long.
                let goes_on = loss != Loss::Power && rng.bool();
                for &sector in &w.left {
                    if share == 1 || (share == 2 && rng.bool()) {
                        s.do_sector(w, queue, sector);
                    } else if goes_on {
                        s.goes_on(w, queue, sector);
                    }
                }
            }
            // The requests go with their queue, as their owner wants it.
            s.queues[queue].work = work;
        }
        if loss == Loss::Power {
            s.old.clear();
        }
        s.late.clear();
        s.busy = 0;
        if loss != Loss::Nothing {
            s.cache.lose(rng);
            s.mark += 1;
        }
        // Queues are never stepped again; those of dead lanes are about to be dropped.
        s.queues.iter_mut().for_each(|q| q.rung = false);
    }
}

impl State {
    /// The `index`-th sector of a write will be done by the kernel, though its process is dead.
    fn goes_on(&mut self, work: &Work, queue: usize, index: u32) {
        let r = &*work.request;
        let stamp = match r.op {
            Op::Write => stamp::get(&r.buffers, index as usize),
            _ => Some(stamp::ZEROS),
        };
        let sector = (r.sector + u64::from(index)) as usize;
        // What is no stamp is trouble for who does it, and nobody does it any more.
        self.old.extend(stamp.map(|stamp| Late {
            id: work.id,
            queue,
            sector,
            stamp,
        }));
    }

    /// Reads or writes the `index`-th sector of a request.
    fn do_sector(&mut self, work: &Work, queue: usize, index: u32) {
        let r = &*work.request;
        let sector = r.sector + u64::from(index);
        let at = sector as usize;
        match r.op {
            Op::Read => stamp::put(&r.buffers, index as usize, self.cache.current(at)),
            Op::Write => match stamp::get(&r.buffers, index as usize) {
                Some(stamp) if stamp::belongs(stamp, sector) => {
                    self.cache.write(at, stamp, queue, work.id);
                }
                wrong => {
                    let why = format!("a write puts {wrong:x?} on sector {sector}");
                    self.trouble.get_or_insert(why);
                }
            },
            Op::Discard | Op::WriteZeroes => self.cache.write(at, stamp::ZEROS, queue, work.id),
            Op::Flush => {}
        }
    }
}

impl BlockDevice for CrashDisk {
    fn describe(&self) -> String {
        "crash disk".into()
    }

    fn limits(&self) -> Limits {
        Limits {
            physical_sector_bytes: 512,
            discard_granularity_bytes: if self.discard { 512 } else { 0 },
            volatile_cache: true,
            ..Limits::default()
        }
    }

    fn capacity_sectors(&self) -> u64 {
        self.sectors
    }

    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let mut s = self.state.lock();
        s.queues.push(DiskQueue::default());
        Ok(Box::new(CrashQueue {
            number: s.queues.len() - 1,
            state: Arc::clone(&self.state),
            fuse: Arc::clone(&self.fuse),
            early: self.planted == Some(Planted::ReplyBeforeWrite),
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
            cache: self.mark_known.then(|| self.state.lock().mark),
            contents: None,
        }
    }
}

struct CrashQueue {
    number: usize,
    state: Arc<Mutex<State>>,
    fuse: Arc<Fuse>,
    /// Planted: every fourth write is acknowledged before it is done.
    early: bool,
}

impl DeviceQueue for CrashQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        for request in batch.drain(..) {
            self.fuse.tick(Side::Back);
            let s = &mut *self.state.lock();
            s.clock += 1;
            let (id, sectors) = (s.clock, request.sectors as u32);
            let early = self.early && request.op == Op::Write && id % 4 == 0;
            let q = &mut s.queues[self.number];
            if early {
                for i in 0..sectors as usize {
                    s.late.push(Late {
                        id,
                        queue: self.number,
                        sector: request.sector as usize + i,
                        stamp: stamp::get(&request.buffers, i).unwrap_or_default(),
                    });
                }
                let status = Status::Ok;
                q.done.push((id, Completion { request, status }));
                q.rung |= std::mem::take(&mut q.armed);
                continue;
            }
            // Last first, or first first: with several in flight at once that is order enough.
            let left = match id % 2 {
                0 => (0..sectors).rev().collect(),
                _ => (0..sectors).collect(),
            };
            q.work.push(Work {
                id,
                request,
                left,
                since: id,
            });
            s.busy += 1;
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.fuse.tick(Side::Back);
        let s = &mut *self.state.lock();
        for (id, completion) in s.queues[self.number].done.drain(..) {
            let r = &completion.request;
            if r.op.is_write() {
                s.clock += 1;
                let fua = r.flags.contains(RequestFlags::FUA);
                let sectors = r.sector as usize..r.end() as usize;
                s.cache.completed(sectors, id, s.clock, fua);
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
        self.state.lock().queues[self.number].rung = false;
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for CrashQueue {
    fn drop(&mut self) {
        let mut s = self.state.lock();
        let q = std::mem::take(&mut s.queues[self.number]);
        // After a crash they don't count any more.
        s.busy = s.queues.iter().map(|q| q.work.len()).sum();
        drop(s);
        drop(q);
    }
}
