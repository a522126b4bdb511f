//! From the trace hooks into memory: a ring for each queue, and one who empties them.

use crate::{Device, Event};
use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::trace::{TraceDevice, TraceEvent, TraceHub, TraceSink};
use rtrb::{Consumer, Producer, RingBuffer};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Most rings at a time. blkparse takes files of up to 512 CPUs.
pub const MAX_QUEUES: usize = 512;

/// Events that a ring holds unless told otherwise: 3 MiB, which is 30 ms at two million events a second.
pub const DEFAULT_CAPACITY: usize = 1 << 16;

/// Nanoseconds of the system's monotonic clock: the same for all processes of a machine, so that their captures
/// go together.
fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    (t.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(t.tv_nsec as u64)
}

/// Tells the time in nanoseconds; for tests and simulation, where it stands still until it is moved.
pub type GivenClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What is in a ring: the event and its time in nanoseconds.
type Stamped = (u64, TraceEvent);

/// One ring's receiving end.
struct Ring {
    /// The lowest number that was free: blktrace's CPU.
    number: u32,
    device: Device,
    name: String,
    queue: u32,
    events: Consumer<Stamped>,
    dropped: Arc<AtomicU64>,
    _memory: Gauge,
}

impl Ring {
    fn drops(&self) -> Drops {
        Drops {
            device: self.device,
            name: self.name.clone(),
            queue: self.queue,
            dropped: self.dropped.load(Ordering::Relaxed),
        }
    }
}

#[derive(Default)]
struct State {
    /// A device's minor is its place here.
    devices: Vec<String>,
    rings: Vec<Ring>,
    /// Of rings that are gone, those that dropped something; as bounded as the devices.
    past: Vec<Drops>,
}

struct Shared {
    capacity: usize,
    /// Taken when a queue is opened and when rings are emptied, never to record.
    state: Mutex<State>,
    /// Events of queues that got no ring.
    refused: Arc<AtomicU64>,
    started_ns: u64,
    started: SystemTime,
    /// Instead of the system's.
    clock: Option<GivenClock>,
}

/// Events that one queue lost because nobody emptied its ring in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops {
    /// Of this device,
    pub device: Device,
    /// its name,
    pub name: String,
    /// and this queue of it.
    pub queue: u32,
    /// How many.
    pub dropped: u64,
}

/// Takes the events of all queues: hand it to [`pvblk_block::trace::Tracing::to`].
pub struct Recorder(Arc<Shared>);

/// Empties a recorder's rings; any thread may have it.
#[derive(Clone)]
pub struct Collector(Arc<Shared>);

impl Recorder {
    /// A recorder whose rings hold `capacity` events each, at least 16.
    pub fn new(capacity: usize) -> Recorder {
        Recorder::make(capacity, None)
    }

    /// As [`Recorder::new`], with a clock of the caller's, which never goes back.
    pub fn with_clock(capacity: usize, clock: GivenClock) -> Recorder {
        Recorder::make(capacity, Some(clock))
    }

    fn make(capacity: usize, clock: Option<GivenClock>) -> Recorder {
        Recorder(Arc::new(Shared {
            capacity: capacity.max(16),
            state: Mutex::default(),
            refused: Arc::default(),
            started_ns: clock.as_ref().map_or_else(now_ns, |c| c()),
            started: SystemTime::now(),
            clock,
        }))
    }

    /// The end where the events come out.
    pub fn collector(&self) -> Collector {
        Collector(Arc::clone(&self.0))
    }
}

impl TraceHub for Recorder {
    fn open(&self, device: &str, queue: u32) -> (TraceDevice, Box<dyn TraceSink>) {
        let shared = &self.0;
        let mut state = shared.state.lock();
        let known = state.devices.iter().position(|d| d == device);
        let minor = known.unwrap_or(state.devices.len());
        let number = (0..MAX_QUEUES as u32).find(|n| state.rings.iter().all(|r| r.number != *n));
        let number = number.filter(|_| minor < Device::MINORS as usize);
        let Some(number) = number else {
            let refused = Arc::clone(&shared.refused);
            return (TraceDevice(0), Box::new(NoRing(refused)));
        };
        if known.is_none() {
            state.devices.push(device.to_owned());
        }
        let device_number = Device::new(Device::MAJOR, minor as u32);
        let (sender, events) = RingBuffer::new(shared.capacity);
        let bytes = (shared.capacity * size_of::<Stamped>()) as u64;
        let memory = Gauge::fixed(
            format!("trace: {device} queue {queue}"),
            MemoryKind::Heap,
            bytes,
        );
        let dropped = Arc::new(AtomicU64::new(0));
        state.rings.push(Ring {
            number,
            device: device_number,
            name: device.to_owned(),
            queue,
            events,
            dropped: Arc::clone(&dropped),
            _memory: memory,
        });
        let sink = Sink {
            events: sender,
            dropped,
            clock: shared.clock.clone(),
        };
        (TraceDevice(device_number.0), Box::new(sink))
    }
}

/// One ring's sending end.
struct Sink {
    events: Producer<Stamped>,
    dropped: Arc<AtomicU64>,
    clock: Option<GivenClock>,
}

impl TraceSink for Sink {
    fn record(&mut self, event: TraceEvent) {
        let time = match &self.clock {
            None => now_ns(),
            Some(clock) => clock(),
        };
        if self.events.push((time, event)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Instead of a ring, when there are too many.
struct NoRing(Arc<AtomicU64>);

impl TraceSink for NoRing {
    fn record(&mut self, _: TraceEvent) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Collector {
    /// Appends what is in the rings now: those of one queue in their order, not yet sorted by time over all.
    /// Rings whose queue is closed go away once they are empty.
    pub fn drain(&self, into: &mut Vec<Event>) {
        let mut state = self.0.state.lock();
        let State { rings, past, .. } = &mut *state;
        rings.retain_mut(|ring| {
            // Before the last look, so that nothing recorded before the queue was closed stays behind.
            let closed = ring.events.is_abandoned();
            // A bounded share, so that a busy queue doesn't keep us here for ever.
            for _ in 0..ring.events.slots() {
                let Ok((time_ns, event)) = ring.events.pop() else {
                    break;
                };
                into.push(Event::of(&event, time_ns, ring.number));
            }
            if closed {
                remember(past, ring.drops());
            }
            !closed
        });
    }

    /// Every device's number and name.
    pub fn devices(&self) -> Vec<(Device, String)> {
        let state = self.0.state.lock();
        let number = |i| Device::new(Device::MAJOR, i as u32);
        let named = state.devices.iter().enumerate();
        named.map(|(i, name)| (number(i), name.clone())).collect()
    }

    /// The queues that lost events, and how many.
    pub fn drops(&self) -> Vec<Drops> {
        let state = self.0.state.lock();
        let mut all = state.past.clone();
        for ring in &state.rings {
            remember(&mut all, ring.drops());
        }
        all
    }

    /// Events of queues that got no ring, because [`MAX_QUEUES`] had one.
    pub fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// The time of day when the events' clock showed `time_ns`.
    pub fn time_of_day(&self, time_ns: u64) -> SystemTime {
        let since = Duration::from_nanos(time_ns.saturating_sub(self.0.started_ns));
        self.0.started + since
    }
}

/// Adds to what is known of the same queue.
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
    use pvblk_block::{Op, Request, Status};

    #[test]
    fn what_is_recorded_comes_out_once() {
        let recorder = Arc::new(Recorder::new(64));
        let collector = recorder.collector();
        let tracing = Tracing::to(recorder);
        let mut a = tracing.tracer("front", 0, 7);
        let mut b = tracing.tracer("back", 0, 8);
        let request = Request::new(Op::Write, 8, 16, 3);
        a.request(Phase::Queue, &request);
        b.request(Phase::Issue, &request);
        a.complete(&request, Status::NoSpace);
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
                (Device::new(240, 0), "front".into()),
                (Device::new(240, 1), "back".into())
            ]
        );
        assert_eq!(events[2].device, Device::new(240, 1));
        collector.drain(&mut events);
        assert_eq!(events.len(), 3);
        // The number of the closed queue is free again; the device keeps its own.
        let mut c = tracing.tracer("front", 1, 9);
        c.request(Phase::Get, &request);
        collector.drain(&mut events);
        assert_eq!(
            (events[3].queue, events[3].device),
            (0, Device::new(240, 0))
        );
    }

    #[test]
    fn a_full_ring_drops_and_counts() {
        let recorder = Arc::new(Recorder::new(16));
        let collector = recorder.collector();
        let tracing = Tracing::to(recorder);
        let mut tracer = tracing.tracer("d", 5, 0);
        let request = Request::new(Op::Read, 0, 8, 0);
        for _ in 0..20 {
            tracer.request(Phase::Queue, &request);
        }
        let mut events = Vec::new();
        collector.drain(&mut events);
        assert_eq!(events.len(), 16);
        let expected = [Drops {
            device: Device::new(240, 0),
            name: "d".into(),
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
        let tracing = Tracing::to(recorder);
        let request = Request::new(Op::Read, 0, 8, 0);
        let mut all: Vec<_> = (0..=MAX_QUEUES as u32)
            .map(|q| tracing.tracer("d", q, 0))
            .collect();
        for tracer in &mut all {
            tracer.request(Phase::Queue, &request);
        }
        let mut events = Vec::new();
        collector.drain(&mut events);
        assert_eq!((events.len(), collector.refused()), (MAX_QUEUES, 1));
    }

    #[test]
    fn threads_record_while_another_one_drains() {
        let recorder = Arc::new(Recorder::new(1024));
        let collector = recorder.collector();
        let tracing = Tracing::to(recorder);
        let (threads, each) = (4, 20_000u64);
        let mut seen = Vec::new();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|t| {
                    let mut tracer = tracing.tracer("d", t, t);
                    scope.spawn(move || {
                        for n in 0..each {
                            tracer.request(Phase::Queue, &Request::new(Op::Read, n, 8, n));
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
        assert_eq!(seen.len() as u64 + dropped, u64::from(threads) * each);
        for t in 0..threads {
            let of: Vec<_> = seen.iter().filter(|e| e.submitter == t).collect();
            assert!(of.windows(2).all(|w| w[0].sector < w[1].sector));
            assert!(of.windows(2).all(|w| w[0].time_ns <= w[1].time_ns));
        }
    }
}
