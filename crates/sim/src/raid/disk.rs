//! [`CrashMember`]: a member with a volatile cache, that can lose power at any step, and fail.

use super::image::{Image, Mercy};
use super::planted::{Areas, Fate, MemberBug};
use super::stamp::Bytes;
use fastrand::Rng;
use parking_lot::{Mutex, MutexGuard};
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, DeviceQueue, Error, EventHub, Limits, Op,
    QueueContext, Readiness, Request, RequestFlags, Status,
};
use pvblk_sys::EventFd;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// What of a member fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Failure {
    /// Nothing.
    #[default]
    None,
    /// Reads.
    Reads,
    /// Writes and flushes.
    Writes,
    /// Everything.
    All,
}

/// A request at the disk.
struct Work {
    /// Unique, and in order of submission.
    id: u64,
    request: Box<Request>,
    /// What a write carried when it was submitted: it may not change until it is done.
    carried: Vec<u8>,
    /// Sectors of the request that are not done yet, in the order in which they will be.
    left: Vec<u32>,
}

struct MemberQueue {
    work: Vec<Work>,
    /// Done and not handed over: number and completion.
    done: Vec<(u64, Completion)>,
    armed: bool,
    bell: Arc<EventFd>,
    /// Of before a power cut: whoever still uses it finds a disk that fails.
    dead: bool,
}

pub(super) struct State {
    image: Image,
    queues: Vec<MemberQueue>,
    clock: u64,
    failure: Failure,
    /// They can't be read until they are written.
    bad: BTreeSet<u64>,
    trouble: Option<String>,
    bug: MemberBug,
}

/// See the module's documentation. Nothing moves but in [`CrashMember::step`].
pub struct CrashMember {
    state: Arc<Mutex<State>>,
    events: EventHub,
    sectors: u64,
    number: usize,
    zeroes: bool,
    rotational: bool,
}

impl CrashMember {
    /// A disk of zeros.
    pub fn new(number: usize, sectors: u64, bug: MemberBug) -> CrashMember {
        CrashMember {
            state: Arc::new(Mutex::new(State {
                image: Image::new(sectors),
                queues: Vec::new(),
                clock: 0,
                failure: Failure::None,
                bad: BTreeSet::new(),
                trouble: None,
                bug,
            })),
            events: EventHub::default(),
            sectors,
            number,
            zeroes: false,
            rotational: false,
        }
    }

    /// It says whether it has arms: an array then treats its submitters as one.
    pub fn with_arms(self, rotational: bool) -> CrashMember {
        CrashMember { rotational, ..self }
    }

    /// The same, that can also discard and write zeros; both leave zeros.
    #[must_use]
    pub fn with_zeroes(self) -> CrashMember {
        CrashMember {
            zeroes: true,
            ..self
        }
    }

    /// Where logs and superblocks are, for bugs to know.
    pub fn set_areas(&self, areas: Areas) {
        self.state.lock().bug.areas = areas;
    }

    /// Puts bytes on the medium, from a sector on.
    pub fn put(&self, sector: u64, bytes: &[u8]) {
        let mut s = self.state.lock();
        for (at, sector_bytes) in (sector..).zip(bytes.as_chunks::<512>().0) {
            s.image.set(at, sector_bytes);
        }
    }

    /// What a read would find.
    pub fn current(&self, sector: u64) -> Bytes {
        self.state.lock().image.current(sector)
    }

    /// From now on it fails so.
    pub fn fail(&self, failure: Failure) {
        self.state.lock().failure = failure;
    }

    /// Whether anything fails.
    pub fn is_failing(&self) -> bool {
        self.state.lock().failure != Failure::None
    }

    /// A sector that can't be read until it is written.
    pub fn spoil(&self, sector: u64) {
        self.state.lock().bad.insert(sector);
    }

    /// All sectors can be read again; false if they could before.
    pub fn mend(&self) -> bool {
        !std::mem::take(&mut self.state.lock().bad).is_empty()
    }

    /// What the disk was asked that nobody may ask; told once.
    pub fn take_trouble(&self) -> Option<String> {
        let trouble = self.state.lock().trouble.take();
        trouble.map(|what| format!("member {}: {what}", self.number))
    }

    /// Requests that are not done.
    pub fn busy(&self) -> usize {
        let s = self.state.lock();
        let alive = s.queues.iter().filter(|q| !q.dead);
        alive.map(|q| q.work.len()).sum()
    }

    /// Does some of the work of one request, chosen at random; false if there is none.
    pub fn step(&self, rng: &mut Rng) -> bool {
        let mut guard = self.state.lock();
        let s = &mut *guard;
        let busy: usize = s.queues.iter().map(MemberQueue::busy).sum();
        if (busy == 0 || rng.u8(..8) == 0) && s.be_late(rng) {
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
        if s.fails(work.request.op) {
            // A part of it may have happened, as was decided by the steps before.
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
        if status == Status::Ok && !work.left.is_empty() {
            s.queues[queue].work.push(work);
            return true;
        }
        let request = work.request;
        let q = &mut s.queues[queue];
        q.done.push((work.id, Completion { request, status }));
        if std::mem::take(&mut q.armed) {
            q.bell.notify();
        }
        true
    }

    /// The power goes: what was in flight has happened in part, and nobody is told. Returns what was in the cache.
    pub fn cut(&self, mercy: Mercy, rng: &mut Rng) -> u64 {
        let mut guard = self.state.lock();
        let s = &mut *guard;
        for queue in 0..s.queues.len() {
            if std::mem::replace(&mut s.queues[queue].dead, true) {
                continue;
            }
            let work = std::mem::take(&mut s.queues[queue].work);
            for w in work.iter().filter(|w| w.request.op.is_write()) {
                let share = [0, 1, 2, 2][rng.usize(..4)];
                for &index in &w.left {
                    let happens = share == 1 || (share == 2 && rng.bool());
                    if happens && !s.fails(Op::Write) {
                        s.do_sector(w, queue, index);
                    }
                }
            }
            let q = &mut s.queues[queue];
            q.done
                .extend(work.into_iter().map(|w| (w.id, lost(w.request))));
            q.bell.notify();
        }
        s.bug.cut();
        s.image.cut(mercy, rng)
    }
}

/// How a request ends at a disk without power.
fn lost(request: Box<Request>) -> Completion {
    let status = Status::IoError;
    Completion { request, status }
}

impl MemberQueue {
    fn busy(&self) -> usize {
        if self.dead { 0 } else { self.work.len() }
    }
}

impl State {
    fn fails(&self, op: Op) -> bool {
        match self.failure {
            _ if self.bug.hides_failure() => false,
            Failure::None => false,
            Failure::Reads => op == Op::Read,
            Failure::Writes => op != Op::Read,
            Failure::All => true,
        }
    }

    fn flush(&mut self, since: u64, queue: usize) {
        if let Some(only) = self.bug.flush(queue) {
            self.image.flush(since, only);
        }
    }

    /// Reads or writes the `index`-th sector of a request.
    fn do_sector(&mut self, work: &Work, queue: usize, index: u32) -> Status {
        let r = &*work.request;
        let sector = r.sector + u64::from(index);
        let at = index as usize * 512;
        if r.op == Op::Read {
            if self.bad.contains(&sector) {
                return Status::IoError;
            }
            let bytes = self.image.current(sector);
            let (buffer, skip) = place(&r.buffers, at);
            buffer.write(skip, &bytes);
            return Status::Ok;
        }
        if r.op != Op::Write {
            if self.failure == Failure::None {
                self.bad.remove(&sector);
            }
            self.image.write(sector, &[0; 512], queue, work.id);
            return Status::Ok;
        }
        let mut now = [0; 512];
        let (buffer, skip) = place(&r.buffers, at);
        buffer.read(skip, &mut now);
        if now != work.carried[at..at + 512] {
            self.complain(format!(
                "a page changed while sector {sector} was written from it"
            ));
        }
        self.bad.remove(&sector);
        if self.failure != Failure::None && self.bug.hides_failure() {
            return Status::Ok;
        }
        match self.bug.fate(sector, &work.carried) {
            Fate::Lost => {}
            Fate::Late => self.bug.put_off(sector, now, queue, work.id),
            Fate::Done => self.image.write(sector, &now, queue, work.id),
        }
        Status::Ok
    }

    /// Planted: does what was acknowledged before.
    fn be_late(&mut self, rng: &mut Rng) -> bool {
        let Some(late) = self.bug.take_late(rng) else {
            return false;
        };
        self.image
            .write(late.sector, &late.bytes, late.queue, late.id);
        true
    }

    fn complain(&mut self, what: String) {
        self.trouble.get_or_insert(what);
    }

    /// Nobody may have two writes to a sector in flight: which of them wins isn't said.
    fn check_overlap(&mut self, new: &Request) {
        let live = self.queues.iter().filter(|q| !q.dead);
        let others = live.flat_map(|q| {
            let done = q.done.iter().map(|(_, c)| &*c.request);
            q.work.iter().map(|w| &*w.request).chain(done)
        });
        let meets = |r: &&Request| r.op.is_write() && r.sector < new.end() && new.sector < r.end();
        if let Some(other) = { others }.find(meets) {
            let what = format!(
                "a write of sectors {}..{} is submitted while {}..{} is written",
                new.sector,
                new.end(),
                other.sector,
                other.end()
            );
            self.complain(what);
        }
    }
}

/// The buffer that holds byte `at` of all, and where in it.
fn place(buffers: &[Buffer], mut at: usize) -> (&Buffer, usize) {
    for b in buffers {
        if at < b.len() {
            return (b, at);
        }
        at -= b.len();
    }
    panic!("a sector outside the request's buffers");
}

impl BlockDevice for CrashMember {
    fn describe(&self) -> String {
        format!("member {}", self.number)
    }

    fn limits(&self) -> Limits {
        Limits {
            discard_granularity_bytes: if self.zeroes { 512 } else { 0 },
            write_zeroes: self.zeroes,
            volatile_cache: true,
            non_rotational: !self.rotational,
            ..Limits::default()
        }
    }

    fn capacity_sectors(&self) -> u64 {
        self.sectors
    }

    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let bell = EventFd::new().map_err(|e| Error::os("a bell for a member", e))?;
        let bell = Arc::new(bell);
        let mut s = self.state.lock();
        s.queues.push(MemberQueue {
            work: Vec::new(),
            done: Vec::new(),
            armed: false,
            bell: Arc::clone(&bell),
            dead: false,
        });
        Ok(Box::new(CrashQueue {
            number: s.queues.len() - 1,
            state: Arc::clone(&self.state),
            bell,
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

struct CrashQueue {
    number: usize,
    state: Arc<Mutex<State>>,
    bell: Arc<EventFd>,
}

impl DeviceQueue for CrashQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let mut guard: MutexGuard<'_, State> = self.state.lock();
        let s = &mut *guard;
        for request in batch.drain(..) {
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
            // Last first, or first first: with several in flight at once that is order enough.
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
        let s = &mut *self.state.lock();
        let q = &mut s.queues[self.number];
        let dead = q.dead;
        for (id, completion) in q.done.drain(..) {
            let r = &completion.request;
            if r.op.is_write() && completion.status == Status::Ok && !dead {
                s.clock += 1;
                let fua = r.flags.contains(RequestFlags::FUA) && s.bug.honours_fua();
                s.image.completed(r.sector..r.end(), id, s.clock, fua);
            }
            out.push(completion);
        }
    }

    fn arm(&mut self) -> Readiness {
        let q = &mut self.state.lock().queues[self.number];
        if !q.done.is_empty() {
            return Readiness::Ready;
        }
        q.armed = true;
        Readiness::Wait(None)
    }

    fn woken(&mut self) {
        self.bell.drain();
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.bell.as_fd())
    }
}

impl Drop for CrashQueue {
    fn drop(&mut self) {
        let mut s = self.state.lock();
        let q = &mut s.queues[self.number];
        q.dead = true;
        let work = (std::mem::take(&mut q.work), std::mem::take(&mut q.done));
        drop(s);
        drop(work);
    }
}
