//! Records events of the trace hooks in memory: one ring for each queue, and a collector that empties them.

use crate::{Device, Event};
use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::trace::{Recording, TraceDevice, TraceEvent, TraceHub, TraceOrigin, TraceSink};
use rtrb::{Consumer, Producer, RingBuffer};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Most rings at a time, because blkparse takes files of up to 512 CPUs.
pub const MAX_QUEUES: usize = 512;

/// Most events in a ring: 16 ms at a million events a second.
pub const DEFAULT_CAPACITY: usize = 1 << 14;

/// Memory of all rings together in bytes; the last rings, with [`LEAST_CAPACITY`] each, may exceed it.
const MEMORY: usize = 64 << 20;

/// One ring may take this part (1/16) of the memory that is left.
const SHARE: usize = 16;

/// Fewest events in a ring.
const LEAST_CAPACITY: usize = 256;

/// Longest wait for queues to return their rings when the recording stops.
const LINGER: Duration = Duration::from_millis(100);

/// Time for which an event may be on its way into a ring, in nanoseconds: a thread may lose its CPU between reading the clock and storing the
/// event.
pub(crate) const LATEST_NS: u64 = 20_000_000;

/// A clock in nanoseconds for tests and simulation.
pub type GivenClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// An entry of a ring: the time in nanoseconds, and the event.
type Stamped = (u64, TraceEvent);

/// Events of one device's queues that got no ring.
struct Refused {
    device: Device,
    events: Arc<AtomicU64>,
    /// Those of them for which a gap was given out.
    told: u64,
}

/// The collector's end of one ring.
struct Ring {
    /// The lowest number that was free; blktrace's CPU.
    number: u32,
    origin: TraceOrigin,
    events: Consumer<Stamped>,
    /// Events that found the ring full.
    dropped: Arc<AtomicU64>,
    /// Those of them for which a gap was given out.
    told: u64,
    bytes: usize,
    _memory: Gauge,
}

#[derive(Default)]
struct RecorderState {
    /// Names of devices; a device's minor is its index here plus the first minor.
    devices: Vec<String>,
    rings: Vec<Ring>,
    /// Losses of rings that are gone; as bounded as the devices.
    past: Vec<Drops>,
    /// Devices with queues that got no ring.
    refused: Vec<Refused>,
    /// Time in nanoseconds at which the rings were emptied before.
    drained_ns: u64,
    recording: Option<Recording>,
    /// The same moment on the events' clock, in nanoseconds, and as time of day.
    started: Option<(u64, SystemTime)>,
}

impl RecorderState {
    fn name(&self, device: Device, first_minor: u32) -> String {
        let place = device.minor().saturating_sub(first_minor) as usize;
        self.devices.get(place).cloned().unwrap_or_default()
    }

    /// The counter of events of the device's queues that got no ring.
    fn refused(&mut self, device: Device) -> Arc<AtomicU64> {
        if let Some(known) = self.refused.iter().find(|r| r.device == device) {
            return Arc::clone(&known.events);
        }
        let events = Arc::new(AtomicU64::new(0));
        self.refused.push(Refused {
            device,
            events: Arc::clone(&events),
            told: 0,
        });
        events
    }
}

struct RecorderShared {
    capacity: usize,
    first_minor: u32,
    /// Locked when a queue is opened and when rings are emptied, never to record.
    state: Mutex<RecorderState>,
    /// True while events are recorded.
    wanted: AtomicBool,
    /// One request of so many is followed; 0 while no events are recorded.
    every: Arc<AtomicU32>,
    /// Replaces the system's clock.
    clock: Option<GivenClock>,
}

impl RecorderShared {
    fn now_ns(&self) -> u64 {
        self.clock
            .as_ref()
            .map_or_else(pvblk_sys::ticks::monotonic_ns, |clock| clock())
    }
}

/// Events that one queue lost because its ring was full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops {
    pub device: Device,
    /// Name of the device.
    pub name: String,
    /// Number of the queue's ring.
    pub queue: u32,
    /// Number of lost events.
    pub dropped: u64,
}

/// Records the events of all queues: pass it to [`pvblk_block::trace::Tracing::to`]. Clones share one recorder.
#[derive(Clone)]
pub struct Recorder(Arc<RecorderShared>);

/// Empties a recorder's rings, from any thread.
#[derive(Clone)]
pub struct Collector(Arc<RecorderShared>);

impl Recorder {
    /// Creates a recorder that records at once, with rings of `capacity` events, at least 16.
    pub fn new(capacity: usize) -> Recorder {
        let recorder = Recorder::make(capacity, 0, None);
        recorder.start();
        recorder
    }

    /// As [`Recorder::new`], with the caller's clock, which must never go back.
    pub fn with_clock(capacity: usize, clock: GivenClock) -> Recorder {
        let recorder = Recorder::make(capacity, 0, Some(clock));
        recorder.start();
        recorder
    }

    /// Creates a recorder that waits for [`Recorder::start`]. Its devices are numbered from `first_minor` on, so that
    /// captures of several processes can be combined.
    pub fn idle(first_minor: u32) -> Recorder {
        Recorder::make(DEFAULT_CAPACITY, first_minor, None)
    }

    fn make(capacity: usize, first_minor: u32, clock: Option<GivenClock>) -> Recorder {
        Recorder(Arc::new(RecorderShared {
            capacity: capacity.max(16),
            first_minor,
            state: Mutex::default(),
            wanted: AtomicBool::new(false),
            every: Arc::default(),
            clock,
        }))
    }

    /// Starts recording, of all requests. Events of an earlier recording are dropped.
    pub fn start(&self) {
        self.start_every(1);
    }

    /// As [`Recorder::start`], of one request in `every`.
    pub fn start_every(&self, every: u32) {
        let mut forgotten = Vec::new();
        self.collector().drain(&mut forgotten);
        let mut state = self.0.state.lock();
        state.past.clear();
        for ring in &mut state.rings {
            ring.dropped.store(0, Ordering::Relaxed);
            ring.told = 0;
        }
        // Queues without a ring keep their counter.
        for refused in &mut state.refused {
            refused.events.store(0, Ordering::Relaxed);
            refused.told = 0;
        }
        state.drained_ns = self.0.now_ns();
        state.started = Some((self.0.now_ns(), SystemTime::now()));
        self.0.wanted.store(true, Ordering::Relaxed);
        self.0.every.store(every.max(1), Ordering::Relaxed);
        state.recording.get_or_insert_with(Recording::new);
    }

    /// Stops recording. Queues return their rings at their next hook: busy ones do so before this returns; idle ones
    /// keep them until the next recording, or until they are closed.
    pub fn stop(&self) {
        self.0.wanted.store(false, Ordering::Relaxed);
        self.0.every.store(0, Ordering::Relaxed);
        let begin = Instant::now();
        while begin.elapsed() < LINGER {
            let state = self.0.state.lock();
            if state.rings.iter().all(|r| r.events.is_abandoned()) {
                break;
            }
            drop(state);
            std::thread::sleep(Duration::from_millis(2));
        }
        self.0.state.lock().recording = None;
    }

    /// Follows one request in `every` from now on. Those that have begun keep their mark.
    pub fn set_every(&self, every: u32) {
        // Not while it is stopped.
        let set = |before: u32| (before > 0).then_some(every.max(1));
        let _ = self
            .0
            .every
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, set);
    }

    /// True between [`Recorder::start`] and [`Recorder::stop`].
    pub fn is_recording(&self) -> bool {
        self.0.wanted.load(Ordering::Relaxed)
    }

    /// The end of the rings at which events are taken out.
    pub fn collector(&self) -> Collector {
        Collector(Arc::clone(&self.0))
    }
}

impl TraceHub for Recorder {
    fn device(&self, name: &str) -> TraceDevice {
        let shared = &self.0;
        let devices = &mut shared.state.lock().devices;
        let known = devices.iter().position(|d| d == name);
        let place = known.unwrap_or(devices.len());
        let minor = shared.first_minor.saturating_add(place as u32);
        if minor >= Device::MINORS {
            return TraceDevice(Device::new(Device::MAJOR, Device::MINORS - 1).0);
        }
        if known.is_none() {
            devices.push(name.to_owned());
        }
        TraceDevice(Device::new(Device::MAJOR, minor).0)
    }

    fn every(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.0.every)
    }

    fn open(&self, origin: &TraceOrigin) -> Option<Box<dyn TraceSink>> {
        let shared = &self.0;
        if !shared.wanted.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = shared.state.lock();
        let number = (0..MAX_QUEUES as u32).find(|n| state.rings.iter().all(|r| r.number != *n));
        let Some(number) = number else {
            return Some(Box::new(NoRing {
                events: state.refused(Device(origin.device.0)),
                shared: Arc::clone(shared),
            }));
        };
        let used: usize = state.rings.iter().map(|r| r.bytes).sum();
        let share = MEMORY.saturating_sub(used) / SHARE / size_of::<Stamped>();
        let capacity = shared.capacity.min(share.max(LEAST_CAPACITY));
        let bytes = capacity * size_of::<Stamped>();
        let (sender, events) = RingBuffer::new(capacity);
        let name = state.name(Device(origin.device.0), shared.first_minor);
        let owner = format!("trace: {name} queue {}", origin.queue);
        let dropped = Arc::new(AtomicU64::new(0));
        state.rings.push(Ring {
            number,
            origin: *origin,
            events,
            dropped: Arc::clone(&dropped),
            told: 0,
            bytes,
            _memory: Gauge::fixed(owner, MemoryKind::Heap, bytes as u64),
        });
        Some(Box::new(RingSink {
            events: sender,
            dropped,
            shared: Arc::clone(shared),
        }))
    }
}

/// The queue's end of one ring.
struct RingSink {
    events: Producer<Stamped>,
    dropped: Arc<AtomicU64>,
    shared: Arc<RecorderShared>,
}

impl TraceSink for RingSink {
    fn now_ns(&self) -> u64 {
        self.shared.now_ns()
    }

    fn record(&mut self, time_ns: u64, event: TraceEvent) -> bool {
        if !self.shared.wanted.load(Ordering::Relaxed) {
            return false;
        }
        if self.events.push((time_ns, event)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        true
    }
}

/// Sink of a queue that got no ring because there are too many.
struct NoRing {
    events: Arc<AtomicU64>,
    shared: Arc<RecorderShared>,
}

impl TraceSink for NoRing {
    fn now_ns(&self) -> u64 {
        0
    }

    fn record(&mut self, _: u64, _: TraceEvent) -> bool {
        self.events.fetch_add(1, Ordering::Relaxed);
        self.shared.wanted.load(Ordering::Relaxed)
    }
}

impl Collector {
    /// Appends the events in the rings now. Those of one queue are in order; all together are not sorted by time.
    /// Where events were lost since the last call, there is a gap: from [`LATEST_NS`] before that call until now.
    /// Rings of closed queues are removed once they are empty.
    pub fn drain(&self, into: &mut Vec<Event>) {
        let mut state = self.0.state.lock();
        let mut rings = std::mem::take(&mut state.rings);
        let mut lost = BTreeMap::<Device, u64>::new();
        let begun_ns = self.0.now_ns();
        rings.retain_mut(|ring| {
            // Read before the last look, so that no event from before the queue was closed stays behind.
            let closed = ring.events.is_abandoned();
            // A bounded number, so that a busy queue doesn't keep this loop running for ever.
            let count = ring.events.slots();
            if let Ok(chunk) = ring.events.read_chunk(count) {
                let (origin, number) = (&ring.origin, ring.number);
                let event = |(time_ns, event)| Event::of(origin, &event, time_ns, number);
                into.extend(chunk.into_iter().map(event));
            }
            // Read after the events: what was lost before one of them is in this count or in an earlier one.
            let dropped = ring.dropped.load(Ordering::Relaxed);
            let new = dropped - std::mem::replace(&mut ring.told, dropped);
            if new > 0 {
                *lost.entry(Device(ring.origin.device.0)).or_default() += new;
            }
            if closed {
                let drops = self.drops_of(&state, ring);
                remember(&mut state.past, drops);
            }
            !closed
        });
        state.rings = rings;
        for refused in &mut state.refused {
            let events = refused.events.load(Ordering::Relaxed);
            let new = events - std::mem::replace(&mut refused.told, events);
            if new > 0 {
                *lost.entry(refused.device).or_default() += new;
            }
        }
        let before_ns = std::mem::replace(&mut state.drained_ns, begun_ns);
        if !lost.is_empty() {
            let (from_ns, until_ns) = (before_ns.saturating_sub(LATEST_NS), self.0.now_ns() + 1);
            let gaps = lost.into_iter();
            into.extend(gaps.map(|(device, n)| Event::gap(device, from_ns, until_ns, n)));
        }
    }

    fn drops_of(&self, state: &RecorderState, ring: &Ring) -> Drops {
        let device = Device(ring.origin.device.0);
        Drops {
            device,
            name: state.name(device, self.0.first_minor),
            queue: ring.origin.queue,
            dropped: ring.dropped.load(Ordering::Relaxed),
        }
    }

    /// Number and name of every device.
    pub fn devices(&self) -> Vec<(Device, String)> {
        let state = self.0.state.lock();
        let number = |i| Device::new(Device::MAJOR, self.0.first_minor + i as u32);
        let named = state.devices.iter().enumerate();
        named.map(|(i, name)| (number(i), name.clone())).collect()
    }

    /// Losses by queue.
    pub fn drops(&self) -> Vec<Drops> {
        let state = self.0.state.lock();
        let mut all = state.past.clone();
        for ring in &state.rings {
            remember(&mut all, self.drops_of(&state, ring));
        }
        all
    }

    /// Number of events of queues that got no ring because there were [`MAX_QUEUES`].
    pub fn refused(&self) -> u64 {
        let state = self.0.state.lock();
        let each = state
            .refused
            .iter()
            .map(|r| r.events.load(Ordering::Relaxed));
        each.sum()
    }

    /// Present time of the events' clock, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }

    /// One request of so many is followed: what all who listen get now.
    pub fn every(&self) -> u32 {
        self.0.every.load(Ordering::Relaxed).max(1)
    }

    /// The time of day at time `time_ns` of the events' clock.
    pub fn time_of_day(&self, time_ns: u64) -> SystemTime {
        let started = self.0.state.lock().started;
        let (started_ns, started) = started.unwrap_or((0, SystemTime::UNIX_EPOCH));
        started + Duration::from_nanos(time_ns.saturating_sub(started_ns))
    }
}

/// Adds `new` to the losses of the same queue.
fn remember(all: &mut Vec<Drops>, new: Drops) {
    if new.dropped == 0 {
        return;
    }
    let same = |d: &&mut Drops| d.device == new.device && d.queue == new.queue;
    match all.iter_mut().find(same) {
        Some(old) => old.dropped += new.dropped,
        None => all.push(new),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Action;
    use pvblk_block::trace::{Phase, Tracing};
    use pvblk_block::{Completion, Op, Request, Status};

    /// One that is followed.
    fn request(op: Op, sector: u64, sectors: u64, tag: u64) -> Box<Request> {
        let mut request = Request::new(op, sector, sectors, tag);
        request.followed = true;
        request
    }

    #[test]
    fn recorded_events_come_out_once() {
        let recorder = Arc::new(Recorder::new(64));
        let collector = recorder.collector();
        let tracing = Tracing::to(recorder, "x");
        let mut a = tracing.tracer("front", 0, 7);
        let mut b = tracing.tracer("back", 0, 8);
        let request = self::request(Op::Write, 8, 16, 3);
        a.request(Phase::Queue, &request);
        b.request(Phase::Issue, &request);
        a.completed(&[Completion {
            request,
            status: Status::NoSpace,
        }]);
        drop(a);
        let mut events = Vec::new();
        collector.drain(&mut events);
        assert_eq!(events.len(), 3);
        let (first, last) = (events[0], events[1]);
        assert_eq!((first.action, first.queue), (Action::Queue, 0));
        assert_eq!((first.sector, first.bytes, first.submitter), (8, 8192, 7));
        assert_eq!((last.action, last.error), (Action::Complete, 28));
        assert!(last.time_ns >= first.time_ns);
        assert_eq!(
            collector.devices(),
            [
                (Device::new(240, 0), "x/front".into()),
                (Device::new(240, 1), "x/back".into())
            ]
        );
        assert_eq!(events[2].device, Device::new(240, 1));
        collector.drain(&mut events);
        assert_eq!(events.len(), 3);
        // The number of the closed queue is free again; the device keeps its own.
        let mut c = tracing.tracer("front", 1, 9);
        c.request(Phase::Get, &self::request(Op::Write, 8, 16, 3));
        collector.drain(&mut events);
        assert_eq!(
            (events[3].queue, events[3].device),
            (0, Device::new(240, 0))
        );
    }

    #[test]
    fn a_stopped_recorder_gets_its_rings_back() {
        let recorder = Recorder::idle(100);
        let collector = recorder.collector();
        let tracing = Tracing::to(Arc::new(recorder.clone()), "x");
        let mut busy = tracing.tracer("busy", 0, 0);
        let mut idle = tracing.below(&busy).tracer("idle", 0, 0);
        let mut step = |both: bool| {
            let mut batch = [Request::new(Op::Read, 0, 8, 0)];
            busy.arrived(&mut batch);
            if both {
                idle.arrived(&mut batch);
            }
            let mut events = Vec::new();
            collector.drain(&mut events);
            events.len()
        };
        assert_eq!(step(true), 0, "before it is started");
        recorder.start();
        assert_eq!(step(true), 3, "Q, and A and Q below");
        let stop = std::thread::scope(|scope| {
            let stop = scope.spawn(|| recorder.stop());
            while !stop.is_finished() {
                step(false);
            }
            stop.join()
        });
        assert!(stop.is_ok());
        // The idle queue still has its ring, and uses it in the next recording.
        assert_eq!(recorder.0.state.lock().rings.len(), 1);
        assert_eq!(step(true), 0);
        recorder.start();
        assert_eq!(step(true), 3);
        let named = collector.devices();
        assert_eq!(named[1], (Device::new(240, 101), "x/idle".into()));
    }

    #[test]
    fn rings_share_a_bounded_memory() {
        let recorder = Recorder::new(DEFAULT_CAPACITY);
        let open: Vec<_> = (0..MAX_QUEUES as u32)
            .map(|queue| {
                let origin = TraceOrigin {
                    device: TraceDevice(0),
                    above: None,
                    queue,
                    submitter: 0,
                };
                recorder.open(&origin).expect("it records")
            })
            .collect();
        let bytes: usize = recorder.0.state.lock().rings.iter().map(|r| r.bytes).sum();
        let least = MAX_QUEUES * LEAST_CAPACITY * size_of::<Stamped>();
        assert!(bytes <= MEMORY + least, "{bytes}");
        drop(open);
    }

    #[test]
    fn a_full_ring_drops_and_counts() {
        let recorder = Arc::new(Recorder::new(16));
        let collector = recorder.collector();
        let tracing = Tracing::to(recorder, "x");
        let mut tracer = tracing.tracer("d", 5, 0);
        let request = self::request(Op::Read, 0, 8, 0);
        for _ in 0..20 {
            tracer.request(Phase::Queue, &request);
        }
        let mut events = Vec::new();
        collector.drain(&mut events);
        assert_eq!((events.len(), events[16].lost()), (17, 4));
        let expected = [Drops {
            device: Device::new(240, 0),
            name: "x/d".into(),
            queue: 5,
            dropped: 4,
        }];
        assert_eq!(collector.drops(), expected);
        drop(tracer);
        collector.drain(&mut events);
        assert_eq!(collector.drops(), expected, "also of a closed queue");
    }

    #[test]
    fn there_are_only_so_many_rings() {
        let recorder = Arc::new(Recorder::new(16));
        let collector = recorder.collector();
        let tracing = Tracing::to(recorder, "x");
        let request = self::request(Op::Read, 0, 8, 0);
        let mut all: Vec<_> = (0..=MAX_QUEUES as u32)
            .map(|q| tracing.tracer("d", q, 0))
            .collect();
        for tracer in &mut all {
            tracer.request(Phase::Queue, &request);
        }
        let mut events = Vec::new();
        collector.drain(&mut events);
        assert_eq!((events.len(), collector.refused()), (MAX_QUEUES + 1, 1));
        assert_eq!(events[MAX_QUEUES].lost(), 1);
    }

    #[test]
    fn threads_record_while_another_one_drains() {
        let recorder = Arc::new(Recorder::new(1024));
        let collector = recorder.collector();
        let tracing = Tracing::to(recorder, "x");
        let (threads, each) = (4, 20_000u64);
        let mut seen = Vec::new();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|t| {
                    let mut tracer = tracing.tracer("d", t, t);
                    scope.spawn(move || {
                        for n in 0..each {
                            tracer.request(Phase::Queue, &request(Op::Read, n, 8, n));
                        }
                    })
                })
                .collect();
            while !workers.iter().all(|w| w.is_finished()) {
                collector.drain(&mut seen);
            }
        });
        collector.drain(&mut seen);
        let dropped: u64 = collector.drops().iter().map(|d| d.dropped).sum();
        let lost: u64 = seen.iter().map(Event::lost).sum();
        seen.retain(|e| e.action != Action::Gap);
        assert_eq!(lost, dropped);
        assert_eq!(seen.len() as u64 + dropped, u64::from(threads) * each);
        for t in 0..threads {
            let of: Vec<_> = seen.iter().filter(|e| e.submitter == t).collect();
            assert!(of.windows(2).all(|w| w[0].sector < w[1].sector));
            assert!(of.windows(2).all(|w| w[0].time_ns <= w[1].time_ns));
        }
    }
}
