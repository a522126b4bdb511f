//! [`Pressure`]: one for the process; when memory is short, it makes all pools give memory back.

mod files;
mod limit;
mod sources;
#[cfg(test)]
mod tests;
mod watermark;

use crate::events::{Event, EventLog, Kind};
use crate::pool::{Leaving, PoolCounters, PoolShared};
pub use limit::{group_limit, memory_limit};
use parking_lot::Mutex;
use pvblk_block::{BlockDevice, Clock, SystemClock};
pub use sources::{PressureSourceState, PressureSources, PressureWatch};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Pages that each worker may keep in its pools while there is pressure.
pub const FLOOR_PAGES_PER_WORKER: usize = 64;
/// Number of free pages that a pool keeps by default when there is no pressure: as Linux' back end
/// (`max_buffer_pages`).
pub const MAX_BUFFER_PAGES: usize = 1024;
/// Default length of a squeeze: as that of Linux' back end (`buffer_squeeze_duration_ms`), from the
/// historical measurement (seed 003).
pub const SQUEEZE_DURATION: Duration = Duration::from_millis(10);
/// Signals that come within this time of the last squeeze only prolong it.
const MERGE: Duration = Duration::from_millis(1);
/// Shortest interval at which the heap is trimmed.
const TRIM: Duration = Duration::from_millis(100);
/// Bytes of pools that are released together: more would only make the lists for it longer.
const BATCH: u64 = 64 << 20;

/// Memory pressure: the pools and devices that give memory back, and the counters of that.
///
/// A squeeze takes all free pages of all pools at once, on the thread that calls it: workers of idle disks
/// are not woken, and one that is held up by the shortage isn't waited for. Until its end
/// ([`Pressure::set_duration`]) pools keep only the floor. Signals that come meanwhile are merged.
pub struct Pressure {
    clock: Arc<dyn Clock>,
    epoch: Instant,
    /// Nanoseconds since `epoch`; 0: no squeeze.
    until_ns: AtomicU64,
    since_ns: AtomicU64,
    duration_ns: AtomicU64,
    max_buffer_pages: AtomicUsize,
    floor_pages: AtomicUsize,
    floor_used: AtomicUsize,
    squeezes: AtomicU64,
    merged: AtomicU64,
    /// Total length of the squeezes that are over.
    squeezed_ns: AtomicU64,
    longest_ns: AtomicU64,
    device_bytes: AtomicU64,
    pools: Mutex<Pools>,
    devices: Mutex<Devices>,
    events: OnceLock<Arc<EventLog>>,
    /// One pass over the pools at a time.
    pass: Mutex<Passes>,
}

#[derive(Default)]
struct Devices {
    all: Vec<Weak<dyn BlockDevice>>,
    /// Those that are gone are taken out when there are so many: adding one costs the same however many there are.
    most: usize,
}

#[derive(Default)]
struct Passes {
    /// Time at which the last pass ended; 0: there was none.
    end_ns: u64,
    /// Time at which the heap's free memory is given back, too.
    trim_ns: u64,
}

#[derive(Default)]
struct Pools {
    live: Vec<Weak<PoolShared>>,
    /// Counters of pools that are gone, by disk, with the time under pressure when the disk was
    /// seen first.
    retired: BTreeMap<String, RetiredDisk>,
    /// Sums of disks that were forgotten: what counts since the start doesn't go back.
    forgotten: PoolCounters,
}

#[derive(Clone, Copy, Default)]
struct RetiredDisk {
    counters: PoolCounters,
    squeezed_before_ns: u64,
}

/// The result of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Squeezed {
    /// Bytes that went back to the system.
    pub bytes: u64,
    /// True if a squeeze was under way or just over: it is prolonged, and nothing else was done.
    pub merged: bool,
}

/// Figures of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskMemory {
    /// Sum of its pools' counters.
    pub pools: PoolCounters,
    /// Time under squeeze since its first pool was made.
    pub squeezed: Duration,
}

/// All figures of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PressureReport {
    /// Figures by name of the disk.
    pub disks: BTreeMap<String, DiskMemory>,
    /// Sum over all disks.
    pub total: PoolCounters,
    /// Number of squeezes; merged signals are not counted.
    pub squeezes: u64,
    /// Number of signals that only prolonged a squeeze.
    pub merged: u64,
    /// Time under squeeze.
    pub squeezed: Duration,
    /// Longest time that a squeeze took to give everything back.
    pub longest_pass: Duration,
    /// Bytes that devices gave back: caches, stripes.
    pub device_bytes: u64,
    /// True while a squeeze lasts.
    pub on: bool,
}

impl Default for Pressure {
    /// The floor of one worker, and Linux' limit and duration.
    fn default() -> Pressure {
        Pressure::new(FLOOR_PAGES_PER_WORKER)
    }
}

impl Pressure {
    /// No pressure; pools together keep at most `floor_pages` (4 KiB) while there is some.
    pub fn new(floor_pages: usize) -> Pressure {
        Pressure::with_clock(floor_pages, Arc::new(SystemClock))
    }

    /// As [`Pressure::new`], with a clock of the caller's.
    pub fn with_clock(floor_pages: usize, clock: Arc<dyn Clock>) -> Pressure {
        Pressure {
            epoch: clock.now(),
            clock,
            until_ns: AtomicU64::new(0),
            since_ns: AtomicU64::new(0),
            duration_ns: AtomicU64::new(SQUEEZE_DURATION.as_nanos() as u64),
            max_buffer_pages: AtomicUsize::new(MAX_BUFFER_PAGES),
            floor_pages: AtomicUsize::new(floor_pages),
            floor_used: AtomicUsize::new(0),
            squeezes: AtomicU64::new(0),
            merged: AtomicU64::new(0),
            squeezed_ns: AtomicU64::new(0),
            longest_ns: AtomicU64::new(0),
            device_bytes: AtomicU64::new(0),
            pools: Mutex::default(),
            devices: Mutex::default(),
            events: OnceLock::new(),
            pass: Mutex::default(),
        }
    }

    /// Nanoseconds since `epoch`; never 0.
    fn now_ns(&self) -> u64 {
        self.clock.now().duration_since(self.epoch).as_nanos() as u64 + 1
    }

    /// Squeezes now: every pool gives back all its free pages, and devices give back the memory that they can
    /// spare. Returns when it is done.
    pub fn squeeze(&self) -> Squeezed {
        let merged = Squeezed {
            bytes: 0,
            merged: true,
        };
        self.prolong();
        let Some(mut passes) = self.pass.try_lock() else {
            self.merged.fetch_add(1, Ordering::Relaxed);
            return merged;
        };
        let start = self.now_ns();
        if passes.end_ns != 0 && start.saturating_sub(passes.end_ns) < MERGE.as_nanos() as u64 {
            self.merged.fetch_add(1, Ordering::Relaxed);
            return merged;
        }
        self.squeezes.fetch_add(1, Ordering::Relaxed);
        let pages = self.squeeze_pools();
        let mut device_bytes = 0;
        for device in self.devices() {
            // The squeeze may take longer than its duration, and pools are to keep nothing
            // meanwhile.
            self.prolong();
            device_bytes += device.give_way();
        }
        self.prolong();
        self.device_bytes.fetch_add(device_bytes, Ordering::Relaxed);
        if start >= passes.trim_ns {
            pvblk_sys::alloc::trim();
            passes.trim_ns = start + TRIM.as_nanos() as u64;
        }
        let end = self.now_ns();
        self.longest_ns.fetch_max(end - start, Ordering::Relaxed);
        passes.end_ns = end;
        // The duration counts from the time when memory is back.
        self.prolong();
        let bytes = pages * pvblk_sys::PAGE_SIZE as u64 + device_bytes;
        if let Some(log) = self.events.get() {
            let text = format!("memory is short: {bytes} bytes were given back");
            log.put(Event::new(Kind::MemorySqueezed, text).with("bytes", bytes));
        }
        Squeezed {
            bytes,
            merged: false,
        }
    }

    /// From now on squeezes are told to `events`.
    pub(crate) fn tell(&self, events: &Arc<EventLog>) {
        // A second service of a test keeps the first one's.
        let _ = self.events.set(Arc::clone(events));
    }

    /// Gives back memory first, of several pools at a time as their slabs are neighbours; then their address
    /// space, which isn't urgent. Returns pages.
    fn squeeze_pools(&self) -> u64 {
        let pools: Vec<_> = self.pools.lock().live.clone();
        let mut leaving = Vec::new();
        let (mut released, mut bytes) = (0, 0);
        // A pool that goes away meanwhile gives all memory back itself.
        for pool in pools.iter().filter_map(Weak::upgrade) {
            let Some(some) = pool.begin_squeeze() else {
                continue;
            };
            bytes += some.bytes();
            leaving.push((pool, some));
            if bytes >= BATCH {
                Leaving::release_all(leaving[released..].iter_mut().map(|(_, l)| l));
                (released, bytes) = (leaving.len(), 0);
            }
        }
        Leaving::release_all(leaving[released..].iter_mut().map(|(_, l)| l));
        let ends = leaving.into_iter().map(|(pool, l)| pool.end_squeeze(l));
        ends.sum()
    }

    fn prolong(&self) {
        let now = self.now_ns();
        let until = now + self.duration_ns.load(Ordering::Relaxed);
        self.end_if_over(now);
        if self.until_ns.fetch_max(until, Ordering::AcqRel) == 0 {
            self.since_ns.store(now, Ordering::Relaxed);
        }
    }

    /// True if there is pressure, or the limit is 0 anyway: pools keep no more than the floor.
    #[inline]
    pub fn keeps_none(&self) -> bool {
        self.max_buffer_pages.load(Ordering::Relaxed) == 0 || self.is_on()
    }

    /// True while a squeeze lasts.
    #[inline]
    pub fn is_on(&self) -> bool {
        let until = self.until_ns.load(Ordering::Relaxed);
        until != 0 && !self.end_if_over(self.now_ns())
    }

    /// True if there is no squeeze now.
    fn end_if_over(&self, now: u64) -> bool {
        let until = self.until_ns.load(Ordering::Acquire);
        if until == 0 {
            return true;
        }
        if now < until {
            return false;
        }
        let since = self.since_ns.load(Ordering::Relaxed);
        // The first thread that sees the end counts it.
        if self
            .until_ns
            .compare_exchange(until, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            self.squeezed_ns
                .fetch_add(until.saturating_sub(since), Ordering::Relaxed);
        }
        true
    }

    fn squeezed_ns(&self) -> u64 {
        let now = self.now_ns();
        let running = match self.end_if_over(now) {
            true => 0,
            false => now.saturating_sub(self.since_ns.load(Ordering::Relaxed)),
        };
        self.squeezed_ns.load(Ordering::Relaxed) + running
    }

    /// Free pages (4 KiB) that a pool keeps when there is no pressure.
    #[inline]
    pub fn max_buffer_pages(&self) -> usize {
        self.max_buffer_pages.load(Ordering::Relaxed)
    }

    /// Changes the limit, and gives back the memory beyond it.
    pub fn set_max_buffer_pages(&self, pages: usize) {
        self.max_buffer_pages.store(pages, Ordering::Relaxed);
        let pools: Vec<_> = self.pools.lock().live.clone();
        for pool in pools.iter().filter_map(Weak::upgrade) {
            pool.keep_at_most(pages);
        }
    }

    /// Length of a squeeze.
    pub fn duration(&self) -> Duration {
        Duration::from_nanos(self.duration_ns.load(Ordering::Relaxed))
    }

    /// Changes the length of later squeezes.
    pub fn set_duration(&self, duration: Duration) {
        self.duration_ns
            .store(duration.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Pages (4 KiB) that all pools together keep while there is pressure.
    pub fn floor_pages(&self) -> usize {
        self.floor_pages.load(Ordering::Relaxed)
    }

    /// Changes the floor; memory that is kept already stays until the next squeeze.
    pub fn set_floor_pages(&self, pages: usize) {
        self.floor_pages.store(pages, Ordering::Relaxed);
    }

    /// Reserves up to `wanted` pages of the floor.
    pub(crate) fn reserve_floor(&self, wanted: usize) -> usize {
        let floor = self.floor_pages();
        let mut got = 0;
        let _ = self
            .floor_used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                got = wanted.min(floor.saturating_sub(used));
                (got > 0).then_some(used + got)
            });
        got
    }

    pub(crate) fn return_floor(&self, pages: usize) {
        if pages > 0 {
            self.floor_used.fetch_sub(pages, Ordering::Relaxed);
        }
    }

    pub(crate) fn register(&self, pool: &Arc<PoolShared>) {
        let before = self.squeezed_ns();
        let mut pools = self.pools.lock();
        if !pools.retired.contains_key(pool.disk()) {
            let disk = RetiredDisk {
                squeezed_before_ns: before,
                ..RetiredDisk::default()
            };
            pools.retired.insert(pool.disk().to_owned(), disk);
        }
        pools.live.push(Arc::downgrade(pool));
    }

    /// Removes a pool, which is empty and goes away; its counts stay.
    pub(crate) fn retire(&self, pool: &Arc<PoolShared>) {
        let mut pools = self.pools.lock();
        let gone = Arc::downgrade(pool);
        pools.live.retain(|p| !p.ptr_eq(&gone));
        if let Some(disk) = pools.retired.get_mut(pool.disk()) {
            disk.counters += PoolCounters {
                free_pages: 0,
                used_pages: 0,
                ..pool.counters()
            };
        }
    }

    /// Adds a device that is squeezed, too, as long as it exists ([`BlockDevice::give_way`]). One that has nothing to give costs nothing.
    pub fn add_device(&self, device: &Arc<dyn BlockDevice>) {
        if device.capabilities().memory.is_none() {
            return;
        }
        let mut devices = self.devices.lock();
        if devices.all.len() >= devices.most {
            devices.all.retain(|d| d.strong_count() > 0);
            devices.most = 2 * devices.all.len() + 16;
        }
        devices.all.push(Arc::downgrade(device));
    }

    /// Forgets the counts of a disk that is gone and has no pool any more.
    pub fn forget(&self, disk: &str) {
        let mut pools = self.pools.lock();
        let lives = |p: &Weak<PoolShared>| p.upgrade().is_some_and(|p| p.disk() == disk);
        if !pools.live.iter().any(lives)
            && let Some(gone) = pools.retired.remove(disk)
        {
            pools.forgotten += PoolCounters {
                free_pages: 0,
                used_pages: 0,
                peak_pages: 0,
                ..gone.counters
            };
        }
    }

    fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        let devices = self.devices.lock();
        devices.all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Bytes that a squeeze would bring now, roughly: reads one word of each pool and device.
    pub fn free_bytes(&self) -> u64 {
        let spare: u64 = self.devices().iter().map(|d| d.spare_bytes()).sum();
        let pools = self.pools.lock();
        let pages: usize = pools
            .live
            .iter()
            .filter_map(Weak::upgrade)
            .map(|p| p.free_pages_seen())
            .sum();
        (pages * pvblk_sys::PAGE_SIZE) as u64 + spare
    }

    /// All current figures.
    pub fn report(&self) -> PressureReport {
        let squeezed_ns = self.squeezed_ns();
        let pools = self.pools.lock();
        let mut disks: BTreeMap<String, DiskMemory> = BTreeMap::new();
        for (name, disk) in &pools.retired {
            let squeezed =
                Duration::from_nanos(squeezed_ns.saturating_sub(disk.squeezed_before_ns));
            let memory = DiskMemory {
                pools: disk.counters,
                squeezed,
            };
            disks.insert(name.clone(), memory);
        }
        for pool in pools.live.iter().filter_map(Weak::upgrade) {
            if let Some(disk) = disks.get_mut(pool.disk()) {
                disk.pools += pool.counters();
            }
        }
        let mut total = pools.forgotten;
        disks.values().for_each(|d| total += d.pools);
        PressureReport {
            disks,
            total,
            squeezes: self.squeezes.load(Ordering::Relaxed),
            merged: self.merged.load(Ordering::Relaxed),
            squeezed: Duration::from_nanos(squeezed_ns),
            longest_pass: Duration::from_nanos(self.longest_ns.load(Ordering::Relaxed)),
            device_bytes: self.device_bytes.load(Ordering::Relaxed),
            on: self.is_on(),
        }
    }
}

impl std::fmt::Debug for Pressure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pressure")
            .field("max_buffer_pages", &self.max_buffer_pages())
            .field("duration", &self.duration())
            .field("floor_pages", &self.floor_pages())
            .finish_non_exhaustive()
    }
}
