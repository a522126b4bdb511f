//! The array as a device: each of its queues has queues of its own to all members, and steps the one [`Core`] with what they tell.

use super::Geometry;
use super::assemble::{Assembly, Member};
use super::blocking::{Blocking, Idle};
use super::core::{Core, MemberIo, Setup, Token};
use super::repair::write_superblocks;
use parking_lot::Mutex;
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    BlockDevice, Completion, DeviceQueue, Error, EventHub, Limits, Op, Queue, QueueContext,
    Readiness, Request, RequestFlags, Status,
};
use pvblk_sys::{EventFd, Poller};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Most stripe heads: as many as md takes.
const MOST_STRIPES: usize = 32768;
/// Fewest, so that any request makes progress.
const LEAST_STRIPES: usize = 8;
/// Most sectors of a request.
const MAX_SECTORS: u32 = 2048;
/// Most requests of one array queue at one member.
const MEMBER_DEPTH: u32 = 512;
/// How long a queue that goes away waits for what it has at the members.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// How to serve an array.
#[derive(Clone, Copy, Debug)]
pub struct ArrayOptions {
    /// Stripe heads, 8 to 32768: each has a page of 4 KiB for every member.
    pub stripes: usize,
}

impl Default for ArrayOptions {
    /// 256 heads, as md.
    fn default() -> ArrayOptions {
        ArrayOptions { stripes: 256 }
    }
}

/// What a queue gets from others.
struct Mail {
    letters: Mutex<Letters>,
    any: AtomicBool,
    bell: EventFd,
}

#[derive(Default)]
struct Letters {
    done: Vec<Completion>,
    ios: Vec<MemberIo>,
}

struct Shared {
    name: String,
    core: Mutex<Core>,
    /// By owner; `None` is of a queue that is closed, and its number free.
    mails: Mutex<Vec<Option<Arc<Mail>>>>,
    /// By role.
    devices: Vec<Option<Arc<dyn BlockDevice>>>,
    limits: Limits,
    geometry: Geometry,
}

impl Shared {
    fn mail(&self, owner: usize) -> Option<Arc<Mail>> {
        self.mails.lock().get(owner).cloned().flatten()
    }
}

/// A RAID-5 array that serves.
pub struct Raid5 {
    shared: Arc<Shared>,
    events: EventHub,
}

impl Raid5 {
    /// Serves an array that was assembled and prepared. Errors if the options are out of range, or there is no memory.
    pub fn start(assembly: Assembly, options: &ArrayOptions) -> Result<Arc<Raid5>, Error> {
        if !(LEAST_STRIPES..=MOST_STRIPES).contains(&options.stripes) {
            return Err(Error::config(format!(
                "raid5 with {} stripes: it takes {LEAST_STRIPES} to {MOST_STRIPES}",
                options.stripes
            )));
        }
        let devices: Vec<_> = assembly
            .members
            .iter()
            .map(|m| m.as_ref().map(|m| Arc::clone(&m.device)))
            .collect();
        let all: Vec<Limits> = devices.iter().flatten().map(|d| d.limits()).collect();
        let most = |f: fn(&Limits) -> u32| all.iter().map(f).max().unwrap_or(512);
        let limits = Limits {
            logical_sector_bytes: most(|l| l.logical_sector_bytes),
            physical_sector_bytes: most(|l| l.physical_sector_bytes),
            max_sectors: MAX_SECTORS,
            max_segments: MAX_SECTORS,
            discard_granularity_bytes: 0,
            write_zeroes: false,
            read_only: all.iter().any(|l| l.read_only),
            volatile_cache: all.iter().any(|l| l.volatile_cache),
            non_rotational: all.iter().all(|l| l.non_rotational),
        };
        let volatile = |d: &Option<Arc<dyn BlockDevice>>| {
            d.as_ref().is_some_and(|d| d.limits().volatile_cache)
        };
        let names = assembly
            .members
            .iter()
            .map(|m| m.as_ref().map_or("missing", |m| &m.name));
        let core = Core::new(Setup {
            geometry: assembly.geometry,
            volatile: devices.iter().map(volatile).collect(),
            heads: options.stripes,
            unit_bytes: limits.logical_sector_bytes as usize,
            dirty: assembly.dirty,
            superblocks: assembly
                .members
                .iter()
                .map(|m| m.as_ref().map(|m| m.superblock.clone()))
                .collect(),
        })?;
        Ok(Arc::new(Raid5 {
            shared: Arc::new(Shared {
                name: format!("raid5 of {}", names.collect::<Vec<_>>().join(", ")),
                core: Mutex::new(core),
                mails: Mutex::default(),
                devices,
                limits,
                geometry: assembly.geometry,
            }),
            events: EventHub::default(),
        }))
    }

    /// The member that failed or is missing, by role.
    pub fn failed(&self) -> Option<usize> {
        self.shared.core.lock().failed()
    }

    /// Ends in order, when all queues are closed: everything is on stable storage, and the superblocks say clean.
    pub fn stop(&self, idle: &mut Idle<'_>) -> Result<(), Error> {
        let (superblocks, dirty, broken) = {
            let core = self.shared.core.lock();
            let (superblocks, dirty) = core.superblocks();
            (superblocks.to_vec(), dirty, core.is_broken())
        };
        if !dirty || broken {
            return Ok(());
        }
        let members = self.shared.devices.iter().zip(superblocks);
        let members = members.map(|(device, superblock)| {
            Some(Member {
                device: Arc::clone(device.as_ref()?),
                name: device.as_ref()?.describe(),
                superblock: superblock?,
            })
        });
        let mut assembly = Assembly {
            geometry: self.shared.geometry,
            members: members.collect(),
            spares: Vec::new(),
            dirty: true,
            notes: Vec::new(),
        };
        for member in assembly.members.iter().flatten() {
            Blocking::open(&member.device)?.flush(idle)?;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        write_superblocks(&mut assembly, true, now.map_or(0, |d| d.as_secs()), idle)
    }
}

impl BlockDevice for Raid5 {
    fn describe(&self) -> String {
        self.shared.name.clone()
    }

    fn floor(&self) -> String {
        "raid5".into()
    }

    fn limits(&self) -> Limits {
        self.shared.limits
    }

    fn capacity_sectors(&self) -> u64 {
        self.shared.geometry.capacity_sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(ArrayQueue::open(
            &self.shared,
            context,
            self.floor(),
        )?))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn close(&self) -> Result<(), Error> {
        self.stop(&mut super::blocking::sleepy())
    }
}

/// One member, as one array queue sees it.
struct Lane {
    queue: Queue,
    /// What finds no room at the member.
    backlog: VecDeque<Box<Request>>,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
    in_poller: bool,
}

struct ArrayQueue {
    shared: Arc<Shared>,
    owner: usize,
    mail: Arc<Mail>,
    members: Vec<Option<Lane>>,
    /// What each request at a member is for, by its tag.
    tokens: Vec<Vec<Token>>,
    free_tags: Vec<usize>,
    spare: Vec<Box<Request>>,
    ios: Vec<MemberIo>,
    done: Vec<Completion>,
    ended: Vec<(Token, bool)>,
    /// Empty lists to hand to the core for those that it filled.
    told_ios: Vec<MemberIo>,
    told_done: Vec<(usize, Completion)>,
    poller: Poller,
    tracer: Tracer,
}

impl ArrayQueue {
    fn open(
        shared: &Arc<Shared>,
        context: &QueueContext,
        floor: String,
    ) -> Result<ArrayQueue, Error> {
        let os = |e| Error::os("raid5: opening a queue", e);
        let tracer = context
            .tracing
            .tracer(&floor, context.index, context.submitter);
        // Members trace for themselves: their sectors aren't the array's, so nothing would link them.
        let below = QueueContext {
            depth: MEMBER_DEPTH,
            tracing: context.tracing.clone(),
            ..*context
        };
        let mut members = Vec::new();
        for device in &shared.devices {
            members.push(match device {
                None => None,
                Some(device) => Some(Lane {
                    queue: Queue::open(device, &below)?,
                    backlog: VecDeque::new(),
                    batch: Vec::new(),
                    done: Vec::new(),
                    in_poller: false,
                }),
            });
        }
        let mail = Arc::new(Mail {
            letters: Mutex::default(),
            any: AtomicBool::new(false),
            bell: EventFd::new().map_err(os)?,
        });
        let poller = Poller::new().map_err(os)?;
        poller.add(mail.bell.as_fd(), 0, false).map_err(os)?;
        let mut mails = shared.mails.lock();
        let free = mails.iter().position(Option::is_none);
        let owner = free.unwrap_or(mails.len());
        match mails.get_mut(owner) {
            Some(slot) => *slot = Some(Arc::clone(&mail)),
            None => mails.push(Some(Arc::clone(&mail))),
        }
        Ok(ArrayQueue {
            shared: Arc::clone(shared),
            owner,
            mail,
            members,
            tokens: Vec::new(),
            free_tags: Vec::new(),
            spare: Vec::new(),
            ios: Vec::new(),
            done: Vec::new(),
            ended: Vec::new(),
            told_ios: Vec::new(),
            told_done: Vec::new(),
            poller,
            tracer,
        })
    }

    /// Steps the core, and sends what comes of it on its way.
    fn step(&mut self, f: impl FnOnce(&mut Core, usize)) {
        let shared = Arc::clone(&self.shared);
        let mut core = shared.core.lock();
        f(&mut core, self.owner);
        core.unplug();
        // Swapped, so that all of them keep their memory.
        let mut ios = std::mem::replace(&mut core.ios, std::mem::take(&mut self.told_ios));
        let mut done = std::mem::replace(&mut core.done, std::mem::take(&mut self.told_done));
        drop(core);
        let mut others: Vec<usize> = Vec::new();
        for io in ios.drain(..) {
            if io.runner == self.owner {
                self.ios.push(io);
                continue;
            }
            others.push(io.runner);
            self.to(io.runner, |letters| letters.ios.push(io));
        }
        for (owner, completion) in done.drain(..) {
            if owner == self.owner {
                self.done.push(completion);
                continue;
            }
            others.push(owner);
            self.to(owner, |letters| letters.done.push(completion));
        }
        self.told_ios = ios;
        self.told_done = done;
        others.sort_unstable();
        others.dedup();
        for owner in others {
            if let Some(mail) = shared.mail(owner) {
                mail.any.store(true, Ordering::Release);
                mail.bell.notify();
            }
        }
        self.issue();
    }

    /// Only an array that is given up has something for a queue that is gone.
    fn to(&self, owner: usize, put: impl FnOnce(&mut Letters)) {
        if let Some(mail) = self.shared.mail(owner) {
            put(&mut mail.letters.lock());
        }
    }

    /// Gives member I/O to the members; what touches goes as one request.
    fn issue(&mut self) {
        if self.ios.is_empty() {
            return;
        }
        let mut ios = std::mem::take(&mut self.ios);
        ios.sort_unstable_by_key(|io| (io.member, io.op as u8, io.fua, io.sector));
        let mut last: Option<(usize, Box<Request>, usize)> = None;
        for io in ios.drain(..) {
            let buffers = io.data.buffers();
            let count = buffers.len();
            let sectors: u64 = buffers.iter().map(|b| b.len() as u64 / 512).sum();
            if let Some((member, request, tag)) = &mut last {
                let touches = *member == io.member
                    && request.op == io.op
                    && io.op != Op::Flush
                    && request.flags.contains(RequestFlags::FUA) == io.fua
                    && request.end() == io.sector;
                let limits = self.members[io.member].as_ref().map(|m| m.queue.limits());
                let fits = limits.is_some_and(|l| {
                    request.sectors + sectors <= u64::from(l.max_sectors)
                        && request.buffers.len() + count <= l.max_segments as usize
                });
                if touches && fits {
                    request.sectors += sectors;
                    io.data.append_to(&mut request.buffers);
                    self.tokens[*tag].push(io.token);
                    continue;
                }
            }
            if let Some((member, request, _)) = last.take() {
                self.send(member, request);
            }
            let tag = match self.free_tags.pop() {
                Some(tag) => tag,
                None => {
                    self.tokens.push(Vec::new());
                    self.tokens.len() - 1
                }
            };
            self.tokens[tag].push(io.token);
            let mut request = self
                .spare
                .pop()
                .unwrap_or_else(|| Request::new(Op::Flush, 0, 0, 0));
            let flags = match io.fua {
                true => RequestFlags::FUA,
                false => RequestFlags::empty(),
            };
            request.reset(io.op, flags, io.sector, sectors, tag as u64);
            io.data.append_to(&mut request.buffers);
            last = Some((io.member, request, tag));
        }
        if let Some((member, request, _)) = last {
            self.send(member, request);
        }
        self.ios = ios;
        for lane in self.members.iter_mut().flatten() {
            lane.submit();
        }
    }

    fn send(&mut self, member: usize, request: Box<Request>) {
        match &mut self.members[member] {
            Some(lane) => lane.backlog.push_back(request),
            None => self.release(request, false),
        }
    }

    /// A member's request has ended.
    fn release(&mut self, mut request: Box<Request>, ok: bool) {
        let tag = request.tag as usize;
        let tokens = self.tokens[tag].drain(..);
        self.ended.extend(tokens.map(|t| (t, ok)));
        self.free_tags.push(tag);
        request.buffers.clear();
        self.spare.push(request);
    }

    fn collect_mail(&mut self) {
        if !self.mail.any.swap(false, Ordering::AcqRel) {
            return;
        }
        let mut letters = self.mail.letters.lock();
        self.done.append(&mut letters.done);
        self.ios.append(&mut letters.ios);
        drop(letters);
        self.issue();
    }

    /// Takes what members have done, and goes on with it; false if there was nothing.
    fn progress(&mut self) -> bool {
        self.collect_mail();
        for at in 0..self.members.len() {
            let Some(lane) = &mut self.members[at] else {
                continue;
            };
            if lane.queue.poll(&mut lane.done) == 0 {
                continue;
            }
            lane.submit();
            let mut done = std::mem::take(&mut lane.done);
            for completion in done.drain(..) {
                let ok = completion.status == Status::Ok;
                self.release(completion.request, ok);
            }
            if let Some(lane) = &mut self.members[at] {
                lane.done = done;
            }
        }
        if self.ended.is_empty() {
            return false;
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.step(|core, owner| {
            for (token, ok) in ended.drain(..) {
                core.ended(owner, token, ok);
            }
        });
        // What could not be given to a member has ended meanwhile.
        ended.append(&mut self.ended);
        self.ended = ended;
        true
    }

    fn is_busy(&self) -> bool {
        let at_members = |l: &Lane| l.queue.in_flight() > 0 || !l.backlog.is_empty();
        self.members.iter().flatten().any(at_members)
            || self.shared.core.lock().has_active(self.owner)
    }
}

impl Lane {
    fn submit(&mut self) {
        while self.queue.in_flight() + self.batch.len() < MEMBER_DEPTH as usize
            && let Some(request) = self.backlog.pop_front()
        {
            self.batch.push(request);
        }
        if !self.batch.is_empty() {
            self.queue.submit(&mut self.batch);
        }
    }
}

impl DeviceQueue for ArrayQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.tracer
            .requests(Phase::Issue, batch.iter().map(|r| &**r));
        self.step(|core, owner| {
            for request in batch.drain(..) {
                core.submit(owner, request);
            }
        });
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.progress();
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        let ready = |q: &ArrayQueue| {
            !q.done.is_empty() || !q.ended.is_empty() || q.mail.any.load(Ordering::Acquire)
        };
        if ready(self) {
            return Readiness::Ready;
        }
        let mut deadline: Option<Instant> = None;
        for (at, lane) in self.members.iter_mut().enumerate() {
            let Some(lane) = lane else { continue };
            if lane.queue.in_flight() == 0 {
                continue;
            }
            match lane.queue.arm() {
                Readiness::Ready => return Readiness::Ready,
                Readiness::Wait(until) => deadline = deadline.into_iter().chain(until).min(),
            }
            if !lane.in_poller
                && let Some(fd) = lane.queue.wait_fd()
            {
                if let Err(e) = self.poller.add(fd, at as u64 + 1, false) {
                    // Out of kernel memory: rather a busy queue than one that sleeps for ever.
                    tracing::error!("raid5: waiting for a member: {e}");
                    return Readiness::Ready;
                }
                lane.in_poller = true;
            }
        }
        match ready(self) {
            true => Readiness::Ready,
            false => Readiness::Wait(deadline),
        }
    }

    fn woken(&mut self) {
        self.mail.bell.drain();
        for lane in self.members.iter_mut().flatten() {
            lane.queue.woken();
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }
}

impl Drop for ArrayQueue {
    /// Others may wait for stripes that this queue runs: it lets them end.
    fn drop(&mut self) {
        let begin = Instant::now();
        while self.is_busy() && !std::thread::panicking() {
            if !self.progress() {
                std::thread::sleep(Duration::from_micros(100));
            }
            if begin.elapsed() > LAST_WAIT {
                tracing::error!(
                    "{}: a queue went away with work at its members: the array stops",
                    self.shared.name
                );
                self.step(|core, _| core.give_up());
                break;
            }
        }
        self.shared.mails.lock()[self.owner] = None;
    }
}
