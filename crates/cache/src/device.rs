//! The cache as a device.

use crate::config::{CacheConfig, Mode, PAGE_BYTES};
use crate::core::{Core, Out, Store};
use crate::counters::Counters;
use crate::keeper::Thread;
use crate::lane::Lane;
use crate::policy::{Policy, Standard};
use crate::queue::{CacheQueue, Hits};
use crate::table::Table;
use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{
    BlockDevice, Capabilities, Capacity, Clock, Close, Completion, Decorator, DeviceEvent,
    DeviceQueue, Error, EventHub, Extent, ExtentKind, Extents, Forwards, Incarnation, Limits,
    LossMarks, Op, Questions, QueueContext, Readiness, Reclaim, Refresh, Region, Request, Status,
    Subscription, SystemClock,
};
use pvblk_sys::Poller;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A queue's lane and its count of hits.
struct Place {
    lane: Arc<Lane>,
    hits: Arc<Hits>,
    /// The queue is closed, and what was read in advance has not come back.
    gone: bool,
}

/// What a cache's queues share.
pub(crate) struct Shared<P = Standard> {
    pub inner: Arc<dyn BlockDevice>,
    pub core: Mutex<Core<P>>,
    pub table: Arc<Table>,
    pub region: Arc<Region>,
    pub clock: Arc<dyn Clock>,
    pub keeper_lane: Arc<Lane>,
    /// By owner; the first is the keeper's.
    places: Mutex<Vec<Option<Place>>>,
    /// Hits of queues that are gone.
    old_hits: Hits,
    /// Queues that may sleep.
    pub sleepers: AtomicUsize,
    /// Reclaim or write-back has something to do.
    background: AtomicBool,
    /// A keeper does that, and nobody else.
    pub kept: AtomicBool,
    /// The keeper's thread sleeps until it is rung.
    pub keeper_asleep: AtomicBool,
    /// The device has another size.
    resized: AtomicBool,
    capacity: Capacity,
    events: EventHub,
    /// What its frames may have of the system's memory.
    pub memory: Gauge,
    /// Held while somebody gives memory back; when the next pass makes sense.
    pub giving: Mutex<Option<Instant>>,
}

impl<P: Policy> Shared<P> {
    /// The number of a new owner.
    pub fn add_lane(&self, lane: &Arc<Lane>, hits: &Arc<Hits>) -> usize {
        let place = Place {
            lane: Arc::clone(lane),
            hits: Arc::clone(hits),
            gone: false,
        };
        let mut places = self.places.lock();
        let is_free = |p: &Option<Place>| p.as_ref().is_none_or(|p| p.gone && p.lane.is_idle());
        let free = places.iter().position(is_free);
        let owner = free.unwrap_or(places.len());
        match places.get_mut(owner) {
            Some(slot) => *slot = Some(place),
            None => places.push(Some(place)),
        }
        owner
    }

    /// A queue is closed. What it read in advance is polled for by whoever waits, as that of all who don't poll.
    pub fn remove_lane(&self, owner: usize) {
        let mut places = self.places.lock();
        let Some(place) = &mut places[owner] else {
            return;
        };
        for (old, own) in [
            (&self.old_hits.all, &place.hits.all),
            (&self.old_hits.ahead, &place.hits.ahead),
        ] {
            old.fetch_add(own.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        }
        place.gone = true;
        place.lane.busy.store(false, Ordering::SeqCst);
        if place.lane.is_idle() {
            places[owner] = None;
        }
    }

    fn lane(&self, owner: usize) -> Option<Arc<Lane>> {
        let places = self.places.lock();
        Some(Arc::clone(&places.get(owner)?.as_ref()?.lane))
    }

    /// Lanes of others with something in flight that their owners don't poll for; the keeper's is one.
    pub fn idle_lanes(&self, but: usize) -> Vec<Arc<Lane>> {
        let places = self.places.lock();
        let others = places.iter().enumerate().filter(|&(at, _)| at != but);
        let lanes = others.filter_map(|(_, p)| Some(&p.as_ref()?.lane));
        let idle = lanes.filter(|l| !l.busy.load(Ordering::SeqCst) && !l.is_idle());
        idle.cloned().collect()
    }

    /// Takes what is done on such lanes.
    pub fn poll_idle_lanes(&self, but: usize, ended: &mut Vec<Completion>) {
        for lane in self.idle_lanes(but) {
            lane.poll_for_others(ended);
        }
    }

    fn mail_done(&self, owner: usize, done: Completion) {
        if let Some(lane) = self.lane(owner) {
            lane.letters.lock().done.push(done);
            lane.ring();
        }
    }

    /// Sends I/O on its way, then what is done, and wakes owners; `own`: whose lane may be used at once, and who has taken its own. In this order: who
    /// has its last answer isn't polled any more, and would leave its I/O lying.
    pub fn dispatch(&self, out: &mut Out, own: Option<(usize, &Arc<Lane>)>) {
        let is_own = |runner: usize| own.is_some_and(|(owner, _)| owner == runner);
        if let Some((_, lane)) = own
            && out.ios.iter().any(|io| is_own(io.runner))
        {
            let mine = out.ios.extract_if(.., |io| is_own(io.runner));
            lane.submit(mine.map(|io| io.request));
        }
        for io in out.ios.drain(..) {
            match self.lane(io.runner) {
                Some(lane) if io.runner != Core::KEEPER => {
                    lane.letters.lock().ios.push(io);
                    lane.ring();
                }
                // Whoever polls steps it. A keeper that sleeps may not wait for its device yet.
                _ => {
                    self.keeper_lane.submit(std::iter::once(io.request));
                    self.wake_keeper(false);
                }
            }
        }
        for (owner, done) in out.done.drain(..) {
            self.mail_done(owner, done);
        }
        for owner in out.wake.drain(..) {
            if is_own(owner) {
                continue;
            }
            if let Some(lane) = self.lane(owner) {
                lane.ring();
            }
        }
    }

    /// Reclaim and write-back by whoever is there, unless a keeper does it.
    pub fn background(&self, core: &mut Core<P>) {
        if !self.kept.load(Ordering::Relaxed) {
            core.background_reclaim();
            core.write_back();
        }
        let wants = core.wants_reclaim() || core.wants_write_back();
        self.background.store(wants, Ordering::Relaxed);
        if self.resized.load(Ordering::Relaxed) {
            self.follow_size(core);
        }
    }

    pub fn wants_background(&self) -> bool {
        self.background.load(Ordering::Relaxed) && !self.kept.load(Ordering::Relaxed)
    }

    /// The device has another size: pages behind its end go.
    fn follow_size(&self, core: &mut Core<P>) {
        let sectors = self.inner.capacity_sectors();
        if core.resize(sectors) {
            self.resized.store(false, Ordering::Relaxed);
            self.capacity.set(sectors);
        }
    }

    /// Wakes all who may sleep, but one.
    pub fn wake_sleepers(&self, but: usize) {
        if self.sleepers.load(Ordering::SeqCst) == 0 {
            return;
        }
        let places = self.places.lock();
        for (owner, place) in places.iter().enumerate() {
            if let Some(place) = place
                && owner != but
                && place.lane.armed.load(Ordering::SeqCst)
            {
                place.lane.ring();
            }
        }
    }

    /// There may be dirty pages that become old.
    pub fn wake_keeper(&self, is_clean: bool) {
        if !is_clean && self.keeper_asleep.load(Ordering::Relaxed) {
            self.keeper_asleep.store(false, Ordering::Relaxed);
            self.keeper_lane.bell.notify();
        }
    }

    fn counters(&self) -> Counters {
        let mut counters = self.core.lock().counters();
        let places = self.places.lock();
        let queues = places.iter().flatten().map(|p| &*p.hits);
        for hits in queues.chain([&self.old_hits]) {
            counters.hits += hits.all.load(Ordering::Relaxed);
            counters.readahead_used += hits.ahead.load(Ordering::Relaxed);
        }
        counters
    }
}

/// A page cache over a device. docs/decisions/0012-page-cache.md says how it works.
///
/// Each queue of it opens a queue of the device. Nothing runs behind its users' backs, unless [`PageCache::keep`] is called.
pub struct PageCache<P: Policy = Standard> {
    pub(crate) shared: Arc<Shared<P>>,
    config: CacheConfig,
    limits: Limits,
    /// Another one for each cache: what wasn't flushed goes with it.
    mark: u64,
    _tables: Gauge,
    _resizes: Subscription,
    keeper: Mutex<Option<Thread<P>>>,
}

impl PageCache {
    /// An empty cache over `inner`. Errors if the configuration makes no sense, or there is no memory.
    pub fn new(config: &CacheConfig, inner: Arc<dyn BlockDevice>) -> Result<PageCache, Error> {
        PageCache::with_clock(config, inner, Arc::new(SystemClock))
    }

    /// As [`PageCache::new`], with a clock of the caller's for all waits and ages.
    pub fn with_clock(
        config: &CacheConfig,
        inner: Arc<dyn BlockDevice>,
        clock: Arc<dyn Clock>,
    ) -> Result<PageCache, Error> {
        PageCache::with_policy(config, Standard, inner, clock)
    }
}

impl<P: Policy> PageCache<P> {
    /// As [`PageCache::with_clock`], with other decisions about memory.
    pub fn with_policy(
        config: &CacheConfig,
        policy: P,
        inner: Arc<dyn BlockDevice>,
        clock: Arc<dyn Clock>,
    ) -> Result<PageCache<P>, Error> {
        if let Some(why) = config.problem() {
            return Err(Error::config(format!("cache: {why}")));
        }
        let len = usize::try_from(config.size_bytes)
            .map_err(|_| Error::config("cache: too large for this machine"))?;
        let region = Region::anonymous_huge(len)
            .map_err(|e| Error::os("cache: too large for this machine", e))?;
        let region = Arc::new(region);
        let table = Arc::new(Table::new(config.frames()));
        let below = inner.limits();
        let read_only = config.mode == Mode::ReadOnly || below.read_only;
        let limits = Limits {
            read_only,
            volatile_cache: below.volatile_cache || config.mode == Mode::WriteBack && !read_only,
            caches_reads: true,
            max_sectors: Limits::default().max_sectors,
            max_segments: Limits::default().max_segments,
            ..below
        };
        let sectors = inner.capacity_sectors();
        let name = format!("cache over {}", inner.describe());
        let tables = table.bytes() + (config.frames() * Core::frame_bytes()) as u64;
        let tables = Gauge::fixed(format!("{name}: tables"), MemoryKind::Heap, tables);
        let pages = format!("{name}: pages");
        let memory = Gauge::new(pages, MemoryKind::Anonymous, config.size_bytes);
        let store = Store {
            table: Arc::clone(&table),
            region: Arc::clone(&region),
            memory: memory.clone(),
        };
        let core = Core::new(
            config,
            policy,
            below,
            sectors,
            store,
            pvblk_sys::cpu::allowed().len(),
            clock.now(),
        );
        let keeper_lane = Arc::new(Lane::open(&inner, &QueueContext::new(1))?);
        let keeper = Place {
            lane: Arc::clone(&keeper_lane),
            hits: Arc::default(),
            gone: false,
        };
        let shared = Arc::new(Shared {
            core: Mutex::new(core),
            table,
            region,
            clock,
            keeper_lane,
            places: Mutex::new(vec![Some(keeper)]),
            old_hits: Hits::default(),
            sleepers: AtomicUsize::new(0),
            background: AtomicBool::new(false),
            kept: AtomicBool::new(false),
            keeper_asleep: AtomicBool::new(false),
            resized: AtomicBool::new(false),
            capacity: Capacity::new(sectors),
            events: EventHub::default(),
            memory,
            giving: Mutex::new(None),
            inner: Arc::clone(&inner),
        });
        let weak = Arc::downgrade(&shared);
        let resizes = inner.events().subscribe(move |event| {
            let Some(shared) = weak.upgrade() else { return };
            if let DeviceEvent::Resized { .. } = event {
                // Whoever steps next does it.
                shared.resized.store(true, Ordering::Relaxed);
                shared.wake_sleepers(usize::MAX);
                shared.keeper_lane.bell.notify();
            }
            shared.events.raise(event);
        });
        Ok(PageCache {
            shared,
            config: config.clone(),
            limits,
            mark: marks(),
            _tables: tables,
            _resizes: resizes,
            keeper: Mutex::new(None),
        })
    }

    /// How it was configured.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// Drops all pages that are clean and not in use, as Linux' `drop_caches`. Returns how many.
    pub fn drop_clean(&self) -> usize {
        self.shared.core.lock().drop_clean()
    }

    /// Bytes of memory that the system has given its frames (`mincore`); slow.
    pub fn resident_bytes(&self) -> u64 {
        self.shared.region.resident() as u64
    }

    /// Free blocks of each order, as `/proc/buddyinfo`; what is on lists of CPUs is missing.
    pub fn buddy_info(&self) -> Vec<usize> {
        self.shared.core.lock().free_blocks()
    }

    /// Looks whether what must always hold does; slow. Errors say what doesn't.
    pub fn check(&self) -> Result<(), String> {
        self.shared.core.lock().check()
    }

    /// What is unfinished, for people who look for what hangs.
    pub fn unfinished(&self) -> String {
        let places = self.shared.places.lock();
        let lanes: Vec<_> = places.iter().flatten().map(|p| p.lane.describe()).collect();
        drop(places);
        let core = self.shared.core.lock().unfinished();
        format!("{core}; lanes {}", lanes.join(", "))
    }

    /// Whether any request or I/O is unfinished.
    pub fn is_busy(&self) -> bool {
        self.shared.core.lock().is_busy()
    }

    /// From now on a thread writes what becomes old while nobody polls, until the cache is closed.
    pub fn keep(&self) -> Result<(), Error> {
        *self.keeper.lock() = Some(Thread::start(&self.shared)?);
        Ok(())
    }

    /// Writes everything out and flushes the device; waits for it.
    fn flush(&self) -> Result<(), Error> {
        let os = |e| Error::os("cache: waiting for the last flush", e);
        let mut queue =
            CacheQueue::open(&self.shared, &QueueContext::new(1), &Decorator::floor(self))?;
        let poller = Poller::new().map_err(os)?;
        if let Some(fd) = queue.wait_fd() {
            poller.add(fd, 0, false).map_err(os)?;
        }
        queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 0)]);
        let mut done = Vec::new();
        loop {
            queue.poll(&mut done);
            if let Some(c) = done.pop() {
                return match c.status {
                    Status::Ok => Ok(()),
                    other => Err(Error::new(
                        pvblk_block::ErrorKind::Os,
                        format!("cache: what was not flushed could not be written ({other:?})"),
                    )),
                };
            }
            if let Readiness::Wait(until) = queue.arm() {
                let now = self.shared.clock.now();
                let wait =
                    until.map_or(Duration::from_secs(1), |u| u.saturating_duration_since(now));
                poller.wait(&mut Vec::new(), Some(wait)).map_err(os)?;
                queue.woken();
            }
        }
    }
}

/// A number that no other cache has had.
fn marks() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

impl<P: Policy> Decorator for PageCache<P> {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.shared.inner
    }

    fn describe(&self) -> String {
        let kib = self.config.size_bytes >> 10;
        let (options, inner) = (self.config.options(), self.shared.inner.describe());
        format!("cache:{kib}k{options}:{inner}")
    }

    fn floor(&self) -> String {
        "cache".into()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn capacity_sectors(&self) -> u64 {
        self.shared.capacity.sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let queue = CacheQueue::open(&self.shared, context, &Decorator::floor(self))?;
        Ok(Box::new(queue))
    }

    fn events(&self) -> &EventHub {
        &self.shared.events
    }

    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards {
            refresh: Some(self),
            extents: Some(self),
            incarnation: Some(self),
            close: Some(self),
            questions: Some(self),
            memory: Some(self),
            // Requests are copied to and from pages of its own.
            buffers: None,
        }
    }
}

impl<P: Policy> Refresh for PageCache<P> {
    fn refresh(&self) -> Result<(), Error> {
        self.shared.inner.refresh()?;
        if self.shared.inner.capacity_sectors() != self.shared.capacity.sectors() {
            self.shared.resized.store(true, Ordering::Relaxed);
            // First, since what is behind the new end can't be written any more.
            self.shared.follow_size(&mut self.shared.core.lock());
            if self.shared.resized.load(Ordering::Relaxed) && self.config.mode != Mode::ReadOnly {
                let flushed = self.flush();
                self.shared.follow_size(&mut self.shared.core.lock());
                // A write that was on its way there has failed, and its page is gone now.
                if self.shared.resized.load(Ordering::Relaxed) {
                    flushed?;
                }
            }
        }
        Ok(())
    }
}

impl<P: Policy> Extents for PageCache<P> {
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        if self.shared.core.lock().is_clean() {
            return self.shared.inner.extents(sector, sectors, out);
        }
        // What is a hole below may be data here.
        let kind = ExtentKind::Data;
        out.push(Extent {
            sector,
            sectors,
            kind,
        });
        Ok(())
    }
}

impl<P: Policy> LossMarks for PageCache<P> {
    fn incarnation(&self) -> Incarnation {
        let inner = self.shared.inner.incarnation();
        match self.config.mode {
            Mode::WriteBack => inner.under_cache(self.mark),
            // Nothing is held back.
            Mode::WriteThrough | Mode::ReadOnly => inner,
        }
    }
}

impl<P: Policy> Close for PageCache<P> {
    fn close(&self) -> Result<(), Error> {
        drop(self.keeper.lock().take());
        if !self.limits.read_only {
            self.flush()?;
        }
        self.shared.inner.close()
    }
}

impl<P: Policy> Questions for PageCache<P> {
    fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        crate::ask::answer(self, question).or_else(|| self.shared.inner.ask(question))
    }
}

impl<P: Policy> Reclaim for PageCache<P> {
    fn give_way(&self) -> u64 {
        crate::giving::give_way(&self.shared) + self.shared.inner.give_way()
    }

    fn spare_bytes(&self) -> u64 {
        crate::giving::spare_bytes(&self.shared) + self.shared.inner.spare_bytes()
    }
}

impl<P: Policy> Drop for PageCache<P> {
    fn drop(&mut self) {
        drop(self.keeper.lock().take());
        if !std::thread::panicking() && !self.shared.core.lock().is_clean() {
            tracing::warn!("cache: it goes with pages that were not flushed");
        }
    }
}

const _: () = assert!(PAGE_BYTES == 4096);
