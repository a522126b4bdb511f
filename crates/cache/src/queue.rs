//! One queue of a cache: hits at once and without a lock, everything else through the core.

use crate::config::{PAGE_BYTES, PAGE_SECTORS};
use crate::core::{Copies, Core, Done, Out, Turn, copy, meeting};
use crate::policy::Policy;
use crate::readahead::{Hint, Streams};
use crate::shared::{Hits, QueueEnd, Shared};
use pvblk_block::planted::{Plant, has};
use pvblk_block::stacked::finish_within;
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    Completion, DeviceQueue, Error, Op, QueueContext, Readiness, Request, SECTOR, Status,
};
use pvblk_sys::Poller;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest wait of a queue that is closed for its I/O at the device.
const LAST_WAIT: Duration = Duration::from_secs(10);
/// Longest read that is tried as a hit, in pages: the core does larger ones in pieces.
const LONGEST_HIT: u64 = 1024;

pub(crate) struct CacheQueue<P: Policy> {
    shared: Arc<Shared<P>>,
    owner: usize,
    end: Arc<QueueEnd>,
    hits: Arc<Hits>,
    streams: Streams,
    /// Requests that are the core's.
    inside: usize,
    done: Vec<Completion>,
    turn: Turn,
    out: Out,
    ended: Vec<Completion>,
    /// Ends of others whose lower queues this queue waits for.
    foreign: Vec<Arc<QueueEnd>>,
    /// Queues whose descriptor this queue has cleared: it polls them itself, also if their owners do that again.
    look: Vec<Arc<QueueEnd>>,
    /// It has left I/O at the lower queue of another queue, and no queue that sleeps waits for that one yet.
    handed: bool,
    slow: Vec<(Box<Request>, Hint)>,
    /// Requests that the core has done for this queue. Empty between two calls.
    mine: Vec<Done>,
    /// Reads of which a page had gone before it was copied. Empty between two calls.
    again: Vec<(Box<Request>, Hint)>,
    poller: Poller,
    tracer: Tracer,
}

/// Out of kernel memory: rather a busy queue than one that sleeps for ever.
#[cold]
fn cannot_wait(e: &std::io::Error) -> Readiness {
    tracing::error!("cache: waiting for a device: {e}");
    Readiness::Ready
}

/// The first and the last page of a request for at least one sector.
fn pages(request: &Request) -> (u64, u64) {
    let last = (request.end() - 1) / PAGE_SECTORS;
    (request.sector / PAGE_SECTORS, last)
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
            merges: Arc::default(),
            ..context.clone()
        };
        let end = QueueEnd::open(&shared.inner, &below)?;
        let poller = Poller::new().map_err(os)?;
        let event = end.completions.wait().event();
        poller.add(event.as_fd(), 0, false).map_err(os)?;
        let hits = shared.new_hits();
        let owner = shared.queues.open(&end);
        shared.core.lock().open(owner, context.index);
        Ok(CacheQueue {
            shared: Arc::clone(shared),
            owner,
            end,
            hits,
            streams: Streams::default(),
            inside: 0,
            done: Vec::with_capacity(context.depth as usize),
            turn: Turn::Nothing,
            out: Out::default(),
            ended: Vec::new(),
            foreign: Vec::new(),
            look: Vec::new(),
            handed: false,
            slow: Vec::new(),
            mine: Vec::new(),
            again: Vec::new(),
            poller,
            tracer,
        })
    }

    /// Reads what is in the cache; false if anything isn't.
    #[inline]
    fn hit(&mut self, request: &Request, first: u64, last: u64, accessed: bool) -> bool {
        for page in first..=last {
            let Some(frame) = self.copy_page(request, page, first == last) else {
                return false;
            };
            // Parts of a page that are read one after another are one access.
            if (!accessed || page != first) && self.shared.table.touch(frame) {
                add(&self.hits.ahead, 1);
            }
        }
        add(&self.hits.all, last - first + 1);
        true
    }

    /// Fetches the begin of what a read is about to copy into the CPU's cache, and on the way its page's part of the table.
    #[inline]
    fn prefetch(&self, request: &Request) {
        if request.op != Op::Read {
            return;
        }
        if let Some(frame) = self.shared.table.find(request.sector / PAGE_SECTORS) {
            let skip = (request.sector % PAGE_SECTORS * SECTOR) as usize;
            let at = frame as usize * PAGE_BYTES + skip;
            self.shared.region.prefetch(at);
        }
    }

    /// Copies the part of a page that a request reads. Returns its frame; `None` if it isn't there, or not for the whole time. `alone`: the request reads of
    /// no other page.
    #[inline]
    fn copy_page(&self, request: &Request, page: u64, alone: bool) -> Option<u32> {
        let table = &self.shared.table;
        let region = &self.shared.region;
        let look = table.begin(page)?;
        let frame = look.frame as usize * PAGE_BYTES;
        match &request.buffers[..] {
            [one] if alone => {
                let skip = (request.sector % PAGE_SECTORS * SECTOR) as usize;
                one.copy_from(region, frame + skip);
            }
            buffers => {
                let (skip, begin, len) = meeting(request, page);
                copy(buffers, skip, region, frame + begin, len, false);
            }
        }
        table.end(look).then_some(look.frame)
    }

    /// Takes requests that the core has done, in the list of [`CacheQueue::mine`], which goes back to its place.
    fn accept_all(&mut self, mut mine: Vec<Done>) {
        mine.drain(..).for_each(|done| self.accept(done));
        self.mine = mine;
    }

    /// Takes a request that the core has done. If it is a read whose pages are to be copied, and one has gone, it is done again.
    fn accept(&mut self, done: Done) {
        let Completion { request, status } = done.completion;
        if let Some(hint) = done.to_copy {
            let (first, last) = pages(&request);
            let is_there = |page| self.copy_page(&request, page, first == last).is_some();
            if !(first..=last).all(is_there) && !has(Plant::GoneNotReadAgain) {
                return self.again.push((request, hint));
            }
        }
        self.inside -= 1;
        self.done.push(Completion { request, status });
    }

    /// Has the core do and copy the reads of which a page had gone.
    fn do_again(&mut self) {
        if self.again.is_empty() {
            return;
        }
        let mut again = std::mem::take(&mut self.again);
        self.step(|core, owner| {
            for (request, hint) in again.drain(..) {
                core.submit(owner, request, hint, Copies::Inside);
            }
        });
        debug_assert!(self.again.is_empty(), "what is copied inside is copied");
        self.again = again;
    }

    /// Steps the core, and sends what comes of it on its way.
    fn step(&mut self, f: impl FnOnce(&mut Core<P>, usize)) {
        let shared = Arc::clone(&self.shared);
        let mut out = std::mem::take(&mut self.out);
        let mut core = shared.core();
        core.at_time(shared.clock.now());
        f(&mut core, self.owner);
        shared.background_work(&mut core);
        core.take_out(&mut out);
        self.turn = core.next_turn(self.owner);
        let is_clean = core.is_clean();
        drop(core);
        shared.wake_background(is_clean);
        let mut mine = std::mem::take(&mut self.mine);
        mine.extend(out.done.extract_if(.., |done| done.owner == self.owner));
        self.handed |= shared.deliver(&mut out, Some((self.owner, &self.end)));
        self.accept_all(mine);
        self.out = out;
    }

    /// Takes the completions and I/O that others left for this queue; false if there are none.
    fn collect(&mut self) -> bool {
        let mut mine = std::mem::take(&mut self.mine);
        let lower = &self.end.lower;
        let any = self.end.completions.collect(|letters| {
            mine.append(&mut letters.done);
            if !letters.ios.is_empty() {
                lower.submit(letters.ios.drain(..).map(|io| io.request));
            }
        });
        self.accept_all(mine);
        any
    }

    /// Takes what devices have done, and goes on with it.
    fn progress(&mut self) {
        let mut news = self.collect();
        let mut ended = std::mem::take(&mut self.ended);
        self.end.lower.poll(&mut ended);
        let background = &self.shared.background.lower;
        self.handed |= !background.poll_unattended(&mut ended);
        for end in self.look.drain(..) {
            self.handed |= !end.lower.poll_unattended(&mut ended);
        }
        if ended.is_empty() && self.done.is_empty() && self.inside > 0 {
            for end in self.shared.queues.unattended(self.owner) {
                self.handed |= !end.lower.poll_unattended(&mut ended);
            }
        }
        news |= !ended.is_empty()
            || match self.turn {
                Turn::Nothing => false,
                Turn::Now => true,
                Turn::At(at) => self.shared.clock.now() >= at,
            };
        if news || self.shared.wants_background_work() {
            self.step(|core, owner| {
                for c in ended.drain(..) {
                    core.ended(c.request, c.status);
                }
                core.turn(owner);
            });
        }
        self.ended = ended;
        self.do_again();
        self.settle();
    }

    /// Nobody polls this queue while it has nothing of its user's. Then queues that sleep wait for its lower queue, and have to know.
    fn settle(&mut self) {
        if self.inside == 0 && (self.handed || self.end.lower.is_attended()) {
            let handed = std::mem::take(&mut self.handed);
            self.shared
                .queues
                .leave(self.owner, &self.end.lower, handed);
        }
    }

    /// Others aren't waited for any more.
    fn awake(&mut self) {
        self.shared.queues.finish_wait(self.end.completions.wait());
        for end in self.foreign.drain(..) {
            let _ = end.lower.with_fd(|fd| self.poller.remove(fd));
        }
    }

    fn is_ready(&self) -> bool {
        let turn = match self.turn {
            Turn::Nothing => false,
            Turn::Now => true,
            Turn::At(at) => at <= self.shared.clock.now(),
        };
        turn || !self.done.is_empty() || self.end.completions.wait().is_pending()
    }

    /// Waits for the lower queues of others too.
    fn arm_others(&mut self) -> Readiness {
        let mut deadline = None;
        for end in self.shared.queues.unattended(self.owner) {
            match end.lower.arm() {
                Readiness::Ready => return Readiness::Ready,
                Readiness::Wait(until) => deadline = earliest(deadline, until),
            }
            let added = end.lower.with_fd(|fd| self.poller.add(fd, 2, false));
            match added {
                Some(Err(e)) => return cannot_wait(&e),
                Some(Ok(())) => self.foreign.push(end),
                None => {}
            }
        }
        Readiness::Wait(deadline)
    }
}

impl<P: Policy> DeviceQueue for CacheQueue<P> {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let mut slow = std::mem::take(&mut self.slow);
        let mut rest = batch.drain(..);
        while let Some(request) = rest.next() {
            if let Some(next) = rest.as_slice().first() {
                self.prefetch(next);
            }
            let mut hint = Hint {
                stream: 0,
                sequential: false,
            };
            if request.op == Op::Read {
                let (first, last) = pages(&request);
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
            self.end.lower.attend();
            // What was read in advance may be there meanwhile.
            let mut ended = std::mem::take(&mut self.ended);
            self.end.lower.poll(&mut ended);
            self.step(|core, owner| {
                for c in ended.drain(..) {
                    core.ended(c.request, c.status);
                }
                for (request, hint) in slow.drain(..) {
                    core.submit(owner, request, hint, Copies::Outside);
                }
            });
            self.ended = ended;
            self.do_again();
            self.settle();
        }
        self.slow = slow;
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.awake();
        if self.inside > 0 || self.end.completions.wait().is_pending() {
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
        let wait = self.end.completions.wait();
        self.shared.queues.prepare_to_wait(wait);
        let mut deadline = match self.turn {
            Turn::At(at) => Some(at),
            _ => None,
        };
        if !self.end.lower.is_idle() {
            match self.end.lower.arm_in(&self.poller, 1) {
                Ok(Readiness::Ready) => return Readiness::Ready,
                Ok(Readiness::Wait(until)) => deadline = earliest(deadline, until),
                Err(e) => return cannot_wait(&e),
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
        self.end.completions.wait().event().drain();
        self.end.lower.woken();
        for end in &self.foreign {
            end.lower.woken();
        }
        // Others may have waited for the same. A queue without requests in flight isn't polled, so the others have to look themselves.
        self.look.extend(self.foreign.iter().cloned());
        if self.inside == 0 {
            // What was read in advance has come, and stays with the device until somebody asks for it: its descriptor would be readable all the time.
            self.end.lower.leave_poller(&self.poller);
            self.shared.queues.wake_sleepers(self.owner);
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
        let finished = finish_within(LAST_WAIT, || {
            let before = self.done.len();
            if self.inside == 0 {
                return None;
            }
            self.progress();
            Some(self.done.len() > before)
        });
        if !finished {
            tracing::error!("cache: a queue went away with requests at its device");
        }
        self.shared.keep_hits(&self.hits);
        self.shared.queues.close(self.owner);
    }
}

/// The earlier of two times, where there are any.
fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    a.into_iter().chain(b).min()
}
