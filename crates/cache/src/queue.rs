//! One queue of a cache: hits at once and without a lock, everything else through the core.

use crate::config::{PAGE_BYTES, PAGE_SECTORS};
use crate::core::{Core, Out, Turn, copy, meeting};
use crate::device::Shared;
use crate::lane::{Lane, earliest};
use crate::policy::Policy;
use crate::readahead::{Hint, Streams};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    Completion, DeviceQueue, Error, Op, QueueContext, Readiness, Request, SECTOR, Status,
};
use pvblk_sys::Poller;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a queue that goes away waits for what it has at the device.
const LAST_WAIT: Duration = Duration::from_secs(10);
/// Longest read that is tried as a hit, in pages: the core does larger ones in pieces.
const LONGEST_HIT: u64 = 1024;

/// Pages that were found without a lock, and those of them that had been read in advance.
#[derive(Debug, Default)]
pub(crate) struct Hits {
    pub all: AtomicU64,
    pub ahead: AtomicU64,
}

pub(crate) struct CacheQueue<P: Policy> {
    shared: Arc<Shared<P>>,
    owner: usize,
    lane: Arc<Lane>,
    hits: Arc<Hits>,
    streams: Streams,
    /// Requests that are the core's.
    inside: usize,
    done: Vec<Completion>,
    turn: Turn,
    out: Out,
    ended: Vec<Completion>,
    /// Lanes of others that this queue waits for.
    foreign: Vec<Arc<Lane>>,
    /// Their descriptors were cleared, so they are to be polled, also if their owners do that again.
    look: Vec<Arc<Lane>>,
    slow: Vec<(Box<Request>, Hint)>,
    poller: Poller,
    /// Its poller has the lane's descriptor.
    waits: bool,
    tracer: Tracer,
}

/// Out of kernel memory: rather a busy queue than one that sleeps for ever.
#[cold]
fn cannot_wait(e: &std::io::Error) -> Readiness {
    tracing::error!("cache: waiting for a device: {e}");
    Readiness::Ready
}

/// Adds to a queue's own counter: nobody else stores to it.
fn add(counter: &AtomicU64, some: u64) {
    counter.store(counter.load(Ordering::Relaxed) + some, Ordering::Relaxed);
}

impl<P: Policy> CacheQueue<P> {
    pub fn open(
        shared: &Arc<Shared<P>>,
        context: &QueueContext,
        floor: &str,
    ) -> Result<CacheQueue<P>, Error> {
        let os = |e| Error::os("cache: opening a queue", e);
        let tracer = context
            .tracing
            .tracer(floor, context.index, context.submitter);
        let below = QueueContext {
            tracing: context.tracing.below(&tracer),
            ..context.clone()
        };
        let lane = Arc::new(Lane::open(&shared.inner, &below)?);
        let poller = Poller::new().map_err(os)?;
        poller.add(lane.bell.as_fd(), 0, false).map_err(os)?;
        let hits = Arc::new(Hits::default());
        let owner = shared.add_lane(&lane, &hits);
        shared.core.lock().open(owner, context.index);
        Ok(CacheQueue {
            shared: Arc::clone(shared),
            owner,
            lane,
            hits,
            streams: Streams::default(),
            inside: 0,
            done: Vec::with_capacity(context.depth as usize),
            turn: Turn::Nothing,
            out: Out::default(),
            ended: Vec::new(),
            foreign: Vec::new(),
            look: Vec::new(),
            slow: Vec::new(),
            poller,
            waits: false,
            tracer,
        })
    }

    /// Reads what is in the cache; false if anything isn't.
    #[inline]
    fn hit(&mut self, request: &Request, first: u64, last: u64, accessed: bool) -> bool {
        let table = &self.shared.table;
        let region = &self.shared.region;
        for page in first..=last {
            let Some(look) = table.begin(page) else {
                return false;
            };
            let frame = look.frame as usize * PAGE_BYTES;
            match &request.buffers[..] {
                [one] if first == last => {
                    let skip = (request.sector % PAGE_SECTORS * SECTOR) as usize;
                    one.copy_from(region, frame + skip);
                }
                buffers => {
                    let (skip, begin, len) = meeting(request, page);
                    copy(buffers, skip, region, frame + begin, len, false);
                }
            }
            if !table.end(look) {
                return false;
            }
            // Parts of a page that are read one after another are one access.
            if (!accessed || page != first) && table.touch(look.frame) {
                add(&self.hits.ahead, 1);
            }
        }
        add(&self.hits.all, last - first + 1);
        true
    }

    /// Steps the core, and sends what comes of it on its way.
    fn step(&mut self, f: impl FnOnce(&mut Core<P>, usize)) {
        let shared = Arc::clone(&self.shared);
        let mut out = std::mem::take(&mut self.out);
        let mut core = shared.core.lock();
        core.at_time(shared.clock.now());
        f(&mut core, self.owner);
        shared.background(&mut core);
        core.take_out(&mut out);
        self.turn = core.next_turn(self.owner);
        let is_clean = core.is_clean();
        drop(core);
        shared.wake_keeper(is_clean);
        let mine = out.done.extract_if(.., |(owner, _)| *owner == self.owner);
        let before = self.done.len();
        self.done.extend(mine.map(|(_, done)| done));
        self.inside -= self.done.len() - before;
        shared.dispatch(&mut out, Some((self.owner, &self.lane)));
        self.out = out;
    }

    fn collect_mail(&mut self) -> bool {
        if !self.lane.any.swap(false, Ordering::SeqCst) {
            return false;
        }
        let mut letters = self.lane.letters.lock();
        self.inside -= letters.done.len();
        self.done.append(&mut letters.done);
        let ios = std::mem::take(&mut letters.ios);
        drop(letters);
        if !ios.is_empty() {
            self.lane.submit(ios.into_iter().map(|io| io.request));
        }
        true
    }

    /// Takes what devices have done, and goes on with it.
    fn progress(&mut self) {
        let mut news = self.collect_mail();
        let mut ended = std::mem::take(&mut self.ended);
        self.lane.poll(&mut ended, true);
        self.shared.keeper_lane.poll_for_others(&mut ended);
        for lane in self.look.drain(..) {
            lane.poll_for_others(&mut ended);
        }
        if ended.is_empty() && self.done.is_empty() && self.inside > 0 {
            self.shared.poll_idle_lanes(self.owner, &mut ended);
        }
        news |= !ended.is_empty()
            || match self.turn {
                Turn::Nothing => false,
                Turn::Now => true,
                Turn::At(at) => self.shared.clock.now() >= at,
            };
        if news || self.shared.wants_background() {
            self.step(|core, owner| {
                for c in ended.drain(..) {
                    core.ended(c.request, c.status);
                }
                core.turn(owner);
            });
        }
        self.ended = ended;
        self.settle();
    }

    /// Nobody polls this queue while it has nothing of its user's: those who wait for its lane do that themselves, and have to know.
    fn settle(&mut self) {
        if self.inside > 0 || !self.lane.busy.load(Ordering::Relaxed) {
            return;
        }
        self.lane.busy.store(false, Ordering::SeqCst);
        if !self.lane.is_idle() {
            self.shared.wake_sleepers(self.owner);
        }
    }

    /// Others aren't waited for any more.
    fn awake(&mut self) {
        // Nobody else sets it, and hits don't pay for a locked instruction.
        if self.lane.armed.load(Ordering::Relaxed) {
            self.lane.armed.store(false, Ordering::SeqCst);
            self.shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
        for lane in self.foreign.drain(..) {
            let _ = lane.with_fd(|fd| self.poller.remove(fd));
        }
    }

    fn is_ready(&self) -> bool {
        let turn = match self.turn {
            Turn::Nothing => false,
            Turn::Now => true,
            Turn::At(at) => at <= self.shared.clock.now(),
        };
        turn || !self.done.is_empty() || self.lane.any.load(Ordering::SeqCst)
    }

    /// Waits for the lanes of others too.
    fn arm_others(&mut self) -> Readiness {
        let mut deadline = None;
        for lane in self.shared.idle_lanes(self.owner) {
            match lane.arm() {
                Readiness::Ready => return Readiness::Ready,
                Readiness::Wait(until) => deadline = earliest(deadline, until),
            }
            let added = lane.with_fd(|fd| self.poller.add(fd, 2, false));
            match added {
                Some(Err(e)) => return cannot_wait(&e),
                Some(Ok(())) => self.foreign.push(lane),
                None => {}
            }
        }
        Readiness::Wait(deadline)
    }
}

impl<P: Policy> DeviceQueue for CacheQueue<P> {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let mut slow = std::mem::take(&mut self.slow);
        for request in batch.drain(..) {
            let mut hint = Hint {
                stream: 0,
                sequential: false,
            };
            if request.op == Op::Read {
                let first = request.sector / PAGE_SECTORS;
                let last = (request.end() - 1) / PAGE_SECTORS;
                let accessed = self.streams.is_on(first);
                hint = self.streams.read(first, last);
                if last - first < LONGEST_HIT && self.hit(&request, first, last, accessed) {
                    self.done.push(Completion {
                        request,
                        status: Status::Ok,
                    });
                    continue;
                }
            }
            self.tracer.request(Phase::Issue, &request);
            slow.push((request, hint));
        }
        if !slow.is_empty() {
            self.inside += slow.len();
            self.lane.busy.store(true, Ordering::SeqCst);
            // What was read in advance may be there meanwhile.
            let mut ended = std::mem::take(&mut self.ended);
            self.lane.poll(&mut ended, true);
            self.step(|core, owner| {
                for c in ended.drain(..) {
                    core.ended(c.request, c.status);
                }
                for (request, hint) in slow.drain(..) {
                    core.submit(owner, request, hint);
                }
            });
            self.ended = ended;
            self.settle();
        }
        self.slow = slow;
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.awake();
        if self.inside > 0 || self.lane.any.load(Ordering::Relaxed) {
            self.progress();
        }
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        if self.is_ready() {
            return Readiness::Ready;
        }
        if self.inside == 0 {
            return Readiness::Wait(None);
        }
        // From now on who has something for this queue rings its bell.
        if !self.lane.armed.swap(true, Ordering::SeqCst) {
            self.shared.sleepers.fetch_add(1, Ordering::SeqCst);
        }
        let mut deadline = match self.turn {
            Turn::At(at) => Some(at),
            _ => None,
        };
        if !self.lane.is_idle() {
            match self.lane.arm() {
                Readiness::Ready => return Readiness::Ready,
                Readiness::Wait(until) => deadline = earliest(deadline, until),
            }
            if let Err(e) = self.lane.wait_in(&self.poller, 1, &mut self.waits) {
                return cannot_wait(&e);
            }
        }
        match self.arm_others() {
            Readiness::Ready => return Readiness::Ready,
            Readiness::Wait(until) => deadline = earliest(deadline, until),
        }
        match self.is_ready() {
            true => Readiness::Ready,
            false => Readiness::Wait(deadline),
        }
    }

    fn woken(&mut self) {
        self.lane.bell.drain();
        self.lane.woken();
        for lane in &self.foreign {
            lane.woken();
        }
        // Others may have waited for the same. Who has no request in flight isn't polled, so they have to look themselves.
        self.look.extend(self.foreign.iter().cloned());
        if self.inside == 0 {
            // What was read in advance has come, and stays with the device until somebody asks for it: its descriptor would be readable all the time.
            self.lane.wait_no_more(&self.poller, &mut self.waits);
            self.shared.wake_sleepers(self.owner);
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }
}

impl<P: Policy> Drop for CacheQueue<P> {
    /// Its user's buffers may be in use: what it asked for has to end.
    fn drop(&mut self) {
        self.awake();
        let begin = Instant::now();
        while self.inside > 0 && !std::thread::panicking() {
            let before = self.done.len();
            self.progress();
            if self.done.len() == before {
                std::thread::sleep(Duration::from_micros(100));
            }
            if begin.elapsed() > LAST_WAIT {
                tracing::error!("cache: a queue went away with requests at its device");
                break;
            }
        }
        self.shared.remove_lane(self.owner);
        self.shared.wake_sleepers(self.owner);
    }
}
