//! The cache as a device.

use crate::background;
use crate::config::{CacheConfig, Mode, PAGE_BYTES, PAGE_SECTORS};
use crate::core::{Core, Store};
use crate::counters::Counters;
use crate::policy::{Policy, Standard};
use crate::queue::CacheQueue;
use crate::shared::Shared;
use crate::table::Table;
use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::stacked::BackgroundThread;
use pvblk_block::{
    BlockDevice, CacheState, Cached, Capabilities, Clock, Close, Decorator, DeviceEvent,
    DeviceQueue, Error, EventHub, Extent, ExtentKind, Extents, Forwards, Incarnation, Limits,
    LossMarks, Op, Questions, QueueContext, Readiness, Reclaim, Refresh, Region, Request, Status,
    Subscription, SystemClock,
};
use pvblk_sys::Poller;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pages that are looked up with the core's lock held once.
const LOOKED_UP: u64 = 256;

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
    thread: Mutex<Option<BackgroundThread>>,
    open: OpenQueue<P>,
}

type OpenQueue<P> = fn(&Arc<Shared<P>>, &QueueContext, &str) -> Result<Box<dyn DeviceQueue>, Error>;

fn open<P: Policy>(
    shared: &Arc<Shared<P>>,
    context: &QueueContext,
    floor: &str,
) -> Result<Box<dyn DeviceQueue>, Error> {
    Ok(Box::new(CacheQueue::open(shared, context, floor)?))
}

/// As [`open`]. Not generic, so that the queues of every cache that is served are compiled in this crate, where the compiler inlines what they
/// call; a generic function is compiled in the crate that names its type.
fn open_standard(
    shared: &Arc<Shared<Standard>>,
    context: &QueueContext,
    floor: &str,
) -> Result<Box<dyn DeviceQueue>, Error> {
    open(shared, context, floor)
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
        PageCache::build(config, Standard, inner, clock, open_standard)
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
        PageCache::build(config, policy, inner, clock, open)
    }

    fn build(
        config: &CacheConfig,
        policy: P,
        inner: Arc<dyn BlockDevice>,
        clock: Arc<dyn Clock>,
        open: OpenQueue<P>,
    ) -> Result<PageCache<P>, Error> {
        if let Some(why) = config.problem() {
            return Err(Error::config(format!("cache: {why}")));
        }
        let len = usize::try_from(config.size_bytes)
            .map_err(|_| Error::config("cache: too large for this machine"))?;
        let below = inner.limits();
        let config = &CacheConfig {
            mode: config.mode.over(&below),
            ..config.clone()
        };
        let region = Region::anonymous_huge(len)
            .map_err(|e| Error::os("cache: too large for this machine", e))?;
        let region = Arc::new(region);
        let table = Arc::new(Table::new(config.frames()));
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
        let shared = Shared::new(&inner, core, (table, region), memory, clock)?;
        let shared = Arc::new(shared);
        let weak = Arc::downgrade(&shared);
        let condition = DeviceEvent::Condition(inner.events().condition());
        shared.events.raise(condition);
        let resizes = inner.events().subscribe(move |event| {
            let Some(shared) = weak.upgrade() else { return };
            if let DeviceEvent::Resized { .. } = event {
                // The next step follows the size, and tells it then.
                shared.resized.store(true, Ordering::SeqCst);
                shared.queues.wake_sleepers(usize::MAX);
                shared.background_wait.wake();
                return;
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
            thread: Mutex::new(None),
            open,
        })
    }

    /// The configuration, with the mode that follows from the device.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The device below.
    pub fn below(&self) -> &dyn BlockDevice {
        &*self.shared.inner
    }

    /// Counts of all queues and of the core.
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

    /// Checks the invariants of the core; slow. Errors say which doesn't hold.
    pub fn check(&self) -> Result<(), String> {
        self.shared.core.lock().check()
    }

    /// Unfinished work, for people who look for a hang.
    pub fn unfinished(&self) -> String {
        let mut queues = Vec::new();
        let all = &self.shared.queues;
        all.for_each(|_, end| queues.push(end.describe()));
        let core = self.shared.core.lock().unfinished();
        format!("{core}; queues {}", queues.join(", "))
    }

    /// True if any request or I/O is unfinished.
    pub fn is_busy(&self) -> bool {
        self.shared.core.lock().is_busy()
    }

    /// From now on a thread writes what becomes old while nobody polls, until the cache is closed.
    pub fn keep(&self) -> Result<(), Error> {
        *self.thread.lock() = Some(background::start_thread(&self.shared)?);
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
        (self.open)(&self.shared, context, &Decorator::floor(self))
    }

    fn events(&self) -> &EventHub {
        &self.shared.events
    }

    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards {
            refresh: Some(self),
            extents: Some(self),
            cached: Some(self),
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
            self.shared.tell_size();
            if self.shared.resized.load(Ordering::Relaxed) && self.config.mode != Mode::ReadOnly {
                let flushed = self.flush();
                self.shared.follow_size(&mut self.shared.core.lock());
                self.shared.tell_size();
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

impl<P: Policy> Cached for PageCache<P> {
    fn cached(&self, sector: u64, sectors: u64, out: &mut Vec<Extent<CacheState>>) {
        let (first, end) = (out.len(), sector + sectors);
        let mut at = sector;
        while at < end {
            let stop = end.min((at / PAGE_SECTORS + LOOKED_UP) * PAGE_SECTORS);
            let core = self.shared.core.lock();
            while at < stop {
                let page = at / PAGE_SECTORS;
                let to = stop.min((page + 1) * PAGE_SECTORS);
                Extent::push(out, first, at, to, core.cached(page));
                at = to;
            }
        }
    }
}

impl<P: Policy> LossMarks for PageCache<P> {
    fn incarnation(&self) -> Incarnation {
        let inner = self.shared.inner.incarnation();
        match self.config.mode {
            Mode::WriteBack => inner.under_cache(self.mark),
            // Nothing is held back.
            Mode::WriteThrough | Mode::ReadOnly | Mode::Usual => inner,
        }
    }
}

impl<P: Policy> Close for PageCache<P> {
    fn close(&self) -> Result<(), Error> {
        drop(self.thread.lock().take());
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
        drop(self.thread.lock().take());
        if !std::thread::panicking() && !self.shared.core.lock().is_clean() {
            tracing::warn!("cache: it goes with pages that were not flushed");
        }
    }
}

const _: () = assert!(PAGE_BYTES == 4096);
