//! Counters of requests that are always on: for each disk, connection and operation.
//!
//! A lane writes its own [`LaneCounters`], and only the thread that steps the lane does, so that no write has to be atomic with its read. Readers
//! may see a request counted whose time isn't yet. [`DiskCounters`] has those of all lanes of a disk, and the sums of lanes that have ended.

mod age;
mod histogram;

use crate::active::Place;
use crate::pull_batch::PullChoice;
use crate::throttle::Connection;
use crate::worker::Polled;
use age::{Ages, Seen};
pub use histogram::Histogram;
use parking_lot::Mutex;
use pvblk_block::time_steps::{self, BUCKETS};
use pvblk_block::{Completion, MergeCounts, Op, Request, SECTOR, Status};
use pvblk_sys::ticks::{self, Rate};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The operations, in the order of [`Totals::operations`].
pub const OPERATIONS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

/// Of one operation, on one lane.
#[repr(align(64))]
struct OperationCounters {
    requests: AtomicU64,
    sectors: AtomicU64,
    errors: AtomicU64,
    ticks: AtomicU64,
    histogram: [AtomicU64; BUCKETS],
}

impl OperationCounters {
    fn new() -> Box<OperationCounters> {
        Box::new(OperationCounters {
            requests: AtomicU64::new(0),
            sectors: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            ticks: AtomicU64::new(0),
            histogram: [const { AtomicU64::new(0) }; BUCKETS],
        })
    }
}

/// Adds to a counter that only this thread writes.
#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

/// Counters of one lane. Written by the thread that steps it.
#[repr(align(64))]
pub(crate) struct LaneCounters {
    connection: Arc<Connection>,
    name: String,
    /// Number of its worker.
    worker: AtomicU32,
    /// Nanoseconds for which it is polled, when it has no work, before it sleeps: while nothing is at the device, and while requests are.
    polled: [AtomicU64; 2],
    choice: OnceLock<Arc<PullChoice>>,
    /// 2 KiB each, from the operation's first request on: an idle disk has none.
    operations: [OnceLock<Box<OperationCounters>>; 5],
    /// Requests that were taken, by operation.
    started: [AtomicU64; 5],
    merges: Arc<MergeCounts>,
    /// Ticks with requests in flight, up to `busy_since`.
    busy: AtomicU64,
    /// When the lane got its first request in flight.
    busy_since: AtomicU64,
    ages: Ages,
}

impl LaneCounters {
    fn new(connection: &Arc<Connection>, name: String) -> LaneCounters {
        LaneCounters {
            connection: Arc::clone(connection),
            name,
            worker: AtomicU32::new(0),
            polled: [const { AtomicU64::new(0) }; 2],
            choice: OnceLock::new(),
            operations: [const { OnceLock::new() }; 5],
            started: [const { AtomicU64::new(0) }; 5],
            merges: Arc::default(),
            busy: AtomicU64::new(0),
            busy_since: AtomicU64::new(0),
            ages: Ages::default(),
        }
    }

    /// Requests were taken at `now` ([`ticks`]); `idle`: none was in flight. Returns their sectors.
    #[inline]
    fn taken(&self, batch: &mut [Box<Request>], now: u64, idle: bool) -> u64 {
        if idle {
            self.busy_since.store(now, Ordering::Relaxed);
        }
        let (mut op, mut run, mut sectors) = (Op::Read, 0, 0);
        for request in batch {
            if request.op != op {
                add(&self.started[op as usize], run);
                (op, run) = (request.op, 0);
            }
            run += 1;
            request.taken = now;
            // Nobody has checked it yet.
            sectors = request.sectors.saturating_add(sectors);
        }
        add(&self.started[op as usize], run);
        sectors
    }

    /// These requests ended at `now`. Returns the number of errors.
    #[inline(always)]
    fn ended(&self, done: &[Completion], now: u64, rate: &Rate) -> u64 {
        let (mut rest, mut failed) = (done, 0);
        // Runs of one operation that were taken together, so that sums are written once for each.
        while let Some(first) = rest.first() {
            let (op, taken) = (first.request.op, first.request.taken);
            let (mut run, mut sectors, mut errors) = (0, 0, 0);
            for Completion { request, status } in rest {
                if request.op != op || request.taken != taken {
                    break;
                }
                run += 1;
                // The sectors of one that never came to the device may be any number.
                if *status != Status::Invalid {
                    sectors += request.sectors;
                }
                errors += u64::from(*status != Status::Ok);
            }
            let counters = self.operations[op as usize].get_or_init(OperationCounters::new);
            let took = now.saturating_sub(taken);
            let bucket = time_steps::bucket(rate.to_ns(took));
            add(&counters.histogram[bucket], run as u64);
            add(&counters.requests, run as u64);
            add(&counters.sectors, sectors);
            add(&counters.ticks, took * run as u64);
            if errors > 0 {
                add(&counters.errors, errors);
                failed += errors;
            }
            rest = &rest[run..];
        }
        failed
    }

    /// No request is in flight any more since `now`.
    #[inline]
    fn idle(&self, now: u64) {
        let since = self.busy_since.load(Ordering::Relaxed);
        add(&self.busy, now.saturating_sub(since));
    }

    /// Requests that have ended, and those that were taken and haven't.
    fn progress(&self) -> (u64, u64) {
        let ended = |o: &OnceLock<Box<OperationCounters>>| {
            o.get().map_or(0, |o| o.requests.load(Ordering::Relaxed))
        };
        let ended = self.operations.iter().map(ended).sum();
        // Read last: more may have ended since than had been started.
        let started = self.started.iter().map(|s| s.load(Ordering::Relaxed));
        (ended, started.sum::<u64>().saturating_sub(ended))
    }

    fn shown(&self) -> LaneNow {
        let (requests, in_flight) = self.progress();
        let [for_requests, for_device] = &self.polled;
        let time = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        LaneNow {
            name: self.name.clone(),
            connection: self.connection.name().to_owned(),
            in_flight,
            worker: self.worker.load(Ordering::Relaxed),
            polled: Polled {
                requests: time(for_requests),
                device: time(for_device),
            },
            pull: self.choice.get().map(|choice| choice.most()),
            requests,
            signals: self.choice.get().map(|choice| choice.signals()),
        }
    }

    fn totals(&self) -> Totals {
        let (_, in_flight) = self.progress();
        let mut busy = self.busy.load(Ordering::Relaxed);
        if in_flight > 0 {
            busy += ticks::now().saturating_sub(self.busy_since.load(Ordering::Relaxed));
        }
        let mut totals = Totals {
            in_flight: in_flight as u32,
            busy_ns: ticks::to_ns(busy),
            ..Totals::default()
        };
        let load = |c: &AtomicU64| c.load(Ordering::Relaxed);
        for (op, sum) in OPERATIONS.into_iter().zip(&mut totals.operations) {
            let started = &self.started[op as usize];
            sum.merges = self.merges.of(op);
            let Some(counted) = self.operations[op as usize].get() else {
                sum.in_flight = load(started);
                continue;
            };
            sum.requests = load(&counted.requests);
            sum.bytes = load(&counted.sectors) * SECTOR;
            sum.errors = load(&counted.errors);
            sum.time_ns = ticks::to_ns(load(&counted.ticks));
            sum.latency.add_counted(&counted.histogram);
            // Read last: more may have ended since than had been started.
            sum.in_flight = load(started).saturating_sub(sum.requests);
        }
        totals
    }
}

/// Sums of one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperationTotals {
    /// Requests that have ended, with or without an error.
    pub requests: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Those that ended with an error.
    pub errors: u64,
    /// Those that the device merged into others: a front end that has rings of another server does.
    pub merges: u64,
    /// Requests that were taken and haven't ended.
    pub in_flight: u64,
    /// Times of these together, each from when the back end took it to when its answer was ready.
    pub time_ns: u64,
    /// The same times by length.
    pub latency: Histogram,
}

/// Sums of a connection or a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// One for each of [`OPERATIONS`].
    pub operations: [OperationTotals; 5],
    /// Requests that were taken and haven't ended.
    pub in_flight: u32,
    /// Time with requests in flight. Several lanes that are busy at once count each.
    pub busy_ns: u64,
}

impl Totals {
    fn add(&mut self, other: &Totals) {
        for (sum, it) in self.operations.iter_mut().zip(&other.operations) {
            sum.requests += it.requests;
            sum.bytes += it.bytes;
            sum.errors += it.errors;
            sum.merges += it.merges;
            sum.in_flight += it.in_flight;
            sum.time_ns += it.time_ns;
            sum.latency.add(&it.latency);
        }
        self.in_flight += other.in_flight;
        self.busy_ns += other.busy_ns;
    }

    /// The difference to `before`, an earlier reading of the same counters; `in_flight` stays as it is.
    #[must_use]
    pub fn since(mut self, before: &Totals) -> Totals {
        for (it, old) in self.operations.iter_mut().zip(&before.operations) {
            it.requests = it.requests.saturating_sub(old.requests);
            it.bytes = it.bytes.saturating_sub(old.bytes);
            it.errors = it.errors.saturating_sub(old.errors);
            it.merges = it.merges.saturating_sub(old.merges);
            it.time_ns = it.time_ns.saturating_sub(old.time_ns);
            it.latency.since(&old.latency);
        }
        self.busy_ns = self.busy_ns.saturating_sub(before.busy_ns);
        self
    }
}

/// A lane as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneNow {
    /// Disk and queue, for people.
    pub name: String,
    /// Name of its connection.
    pub connection: String,
    /// Requests that were taken and haven't ended.
    pub in_flight: u64,
    /// Number of its worker, from 0.
    pub worker: u32,
    pub polled: Polled,
    /// The most requests that its source takes at a time, where the source chooses that; 0 before the first.
    pub pull: Option<u32>,
    /// Requests that have ended.
    pub requests: u64,
    /// Times at which its peer was woken for responses, where the source counts them.
    pub signals: Option<u64>,
}

/// Counters of a disk: of its lanes, and of lanes that have ended.
pub struct DiskCounters {
    since: Instant,
    state: Mutex<Lanes>,
    /// On the list of disks that are looked at.
    place: Arc<Place>,
}

impl Default for DiskCounters {
    fn default() -> DiskCounters {
        DiskCounters {
            since: Instant::now(),
            state: Mutex::default(),
            place: Arc::default(),
        }
    }
}

#[derive(Default)]
struct Lanes {
    live: Vec<LiveLane>,
    ended: Totals,
}

struct LiveLane {
    counters: Arc<LaneCounters>,
    /// By the last look.
    seen: Seen,
}

impl DiskCounters {
    /// Counters of a disk with this place on a list.
    pub(crate) fn at(place: &Arc<Place>) -> DiskCounters {
        DiskCounters {
            place: Arc::clone(place),
            ..DiskCounters::default()
        }
    }

    /// Counters for a lane of `connection` that has this name.
    pub(crate) fn open(
        self: &Arc<DiskCounters>,
        connection: &Arc<Connection>,
        name: String,
    ) -> Counting {
        let lane = Arc::new(LaneCounters::new(connection, name));
        self.state.lock().live.push(LiveLane {
            counters: Arc::clone(&lane),
            seen: Seen::default(),
        });
        Counting {
            disk: Arc::clone(self),
            lane,
            rate: *ticks::rate(),
        }
    }

    /// For how long they have counted.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// A look at all lanes: the least age that the oldest request in flight has; `None` if there is none. With `passes`, requests may wait for a limit of
    /// their own: then a lane whose requests end is well, however long they wait.
    pub(crate) fn look(&self, passes: bool) -> Option<Duration> {
        let mut state = self.state.lock();
        let now = ticks::now();
        let ages = state.live.iter_mut().filter_map(|lane| {
            let (ended, in_flight) = lane.counters.progress();
            let ages = &lane.counters.ages;
            lane.seen.look(ages, ended, in_flight, now, passes)
        });
        ages.max()
            .map(|age| Duration::from_nanos(ticks::to_ns(age)))
    }

    /// True if a request is in flight.
    pub(crate) fn is_busy(&self) -> bool {
        let state = self.state.lock();
        let is_busy = |lane: &LiveLane| lane.counters.progress().1 > 0;
        state.live.iter().any(is_busy)
    }

    /// Sums over all lanes that the disk has and had.
    pub fn totals(&self) -> Totals {
        let state = self.state.lock();
        let mut sum = state.ended.clone();
        let lanes = state.live.iter();
        lanes.for_each(|lane| sum.add(&lane.counters.totals()));
        sum
    }

    /// The sums, as `totals`, without a copy of them where no lane is there. `read` must not wait: lanes that begin or end wait for it.
    pub fn read_totals<T>(&self, read: impl FnOnce(&Totals) -> T) -> T {
        let state = self.state.lock();
        if state.live.is_empty() {
            return read(&state.ended);
        }
        drop(state);
        read(&self.totals())
    }

    /// The lanes that there are, in the order in which they came.
    pub fn lanes(&self) -> Vec<LaneNow> {
        let state = self.state.lock();
        state
            .live
            .iter()
            .map(|lane| lane.counters.shown())
            .collect()
    }

    /// Sums of each connection that there is, with its name. Two may have the same.
    pub fn connections(&self) -> Vec<(String, Totals)> {
        let state = self.state.lock();
        let mut all: Vec<(&Arc<Connection>, Totals)> = Vec::new();
        for LiveLane { counters: lane, .. } in &state.live {
            let totals = lane.totals();
            let known = |c: &Arc<Connection>| Arc::ptr_eq(c, &lane.connection);
            match all.iter_mut().find(|(c, _)| known(c)) {
                Some((_, sum)) => sum.add(&totals),
                None => all.push((&lane.connection, totals)),
            }
        }
        let named = all.into_iter();
        named.map(|(c, t)| (c.name().to_owned(), t)).collect()
    }
}

/// A lane's counters, which go into the disk's sums when the lane ends.
pub(crate) struct Counting {
    disk: Arc<DiskCounters>,
    lane: Arc<LaneCounters>,
    rate: Rate,
}

/// The outcome of [`Counting::ended`].
pub(crate) struct Ended {
    /// Some requests failed.
    pub failed: bool,
    /// Requests that follow have to be taken later than these ended.
    pub later: bool,
}

impl Counting {
    /// The time, in [`ticks`].
    #[inline]
    pub fn now(&self) -> u64 {
        self.rate.now()
    }

    /// The lane's source chooses how many requests it takes at a time.
    pub fn chooses(&self, choice: Arc<PullChoice>) {
        _ = self.lane.choice.set(choice);
    }

    /// The lane has come to this worker.
    pub fn came_to(&self, worker: usize) {
        let worker = u32::try_from(worker).unwrap_or(u32::MAX);
        self.lane.worker.store(worker, Ordering::Relaxed);
    }

    /// The lane is polled for these times from now on.
    #[inline]
    pub fn polled_for(&self, polled: Polled) {
        let times = [polled.requests, polled.device];
        for (place, time) in self.lane.polled.iter().zip(times) {
            place.store(time.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// Where the lane's queue of the device counts merges.
    pub fn merges(&self) -> Arc<MergeCounts> {
        Arc::clone(&self.lane.merges)
    }

    /// Requests were taken at `now`; `idle`: none was in flight. Returns their sectors. [`Counting::join`] has to follow.
    #[inline]
    pub fn taken(&self, batch: &mut [Box<Request>], now: u64, idle: bool) -> u64 {
        self.lane.taken(batch, now, idle)
    }

    /// These requests ended at `now`, and so many are left in flight.
    #[inline]
    pub fn ended(&self, done: &[Completion], now: u64, in_flight: usize) -> Ended {
        let errors = self.lane.ended(done, now, &self.rate);
        if in_flight == 0 {
            self.lane.idle(now);
        }
        let later = self.lane.ages.counts();
        if later {
            let taken = done.iter().map(|c| c.request.taken);
            self.lane.ages.ended(taken, now, in_flight as u32);
        }
        Ended {
            failed: errors > 0,
            later,
        }
    }

    /// The lane itself refused these requests.
    pub fn refused(&self, done: &mut [Completion]) {
        let now = self.now();
        for c in &mut *done {
            c.request.taken = now;
            add(&self.lane.started[c.request.op as usize], 1);
        }
        self.lane.ended(done, now, &self.rate);
    }

    /// Puts the disk on the list of those that are looked at, unless it is there. Requests that were taken are counted, and a full fence has
    /// followed.
    #[inline]
    pub fn join(&self) {
        self.disk.place.join();
    }

    /// The same without a fence before.
    pub fn fence_and_join(&self) {
        fence(Ordering::SeqCst);
        self.join();
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        if self.lane.progress().1 > 0 {
            // Requests that never ended.
            self.lane.idle(self.now());
        }
        let mut state = self.disk.state.lock();
        let ours = |lane: &LiveLane| Arc::ptr_eq(&lane.counters, &self.lane);
        state.live.retain(|lane| !ours(lane));
        let mut totals = self.lane.totals();
        // They never will.
        totals.in_flight = 0;
        totals.operations.iter_mut().for_each(|o| o.in_flight = 0);
        state.ended.add(&totals);
    }
}

#[cfg(test)]
mod tests;
