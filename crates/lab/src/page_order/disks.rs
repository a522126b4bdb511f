//! Modelled disks in virtual time, one for each queue, and so one for each process. Their cost is about that
//! of the sixteen disks behind a controller of the historical measurement (seed 002).
//!
//! A request gets its tag 2 us after it arrived, is inserted 1 us later, and issued 1 us after that, or when the disk is free: it serves one
//! request at a time, in order. A disk that merges pays for each segment, one that doesn't care pays for none. All of it is known
//! when a request arrives, so its events are recorded then, with the times at which they happen.

use parking_lot::Mutex;
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    BlockDevice, Capabilities, Clock, Completion, DeviceQueue, Error, EventHub, Limits,
    ManualClock, QueueContext, Readiness, Request, SECTOR, Status,
};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const GET: Duration = Duration::from_micros(2);
const INSERT: Duration = Duration::from_micros(1);
const ISSUE: Duration = Duration::from_micros(1);

/// Cost of a request.
#[derive(Clone, Copy, Debug)]
pub struct ServiceCost {
    /// Time of each request.
    pub request: Duration,
    /// Rate at which data is transferred.
    pub bytes_per_second: f64,
    /// Time of each segment; segments that touch count as one.
    pub segment: Duration,
}

impl ServiceCost {
    /// A disk of 1 ms and 40 MB/s that doesn't mind segments: the seed's controller "doesn't care about pfn
    /// ordering in any way".
    pub const PLAIN: ServiceCost = ServiceCost {
        request: Duration::from_millis(1),
        bytes_per_second: 40e6,
        segment: Duration::ZERO,
    };
    /// A disk that needn't seek and is told one segment after the other: 200 us, 200 MB/s, 12 us for each
    /// segment.
    pub const MERGING: ServiceCost = ServiceCost {
        request: Duration::from_micros(200),
        bytes_per_second: 200e6,
        segment: Duration::from_micros(12),
    };

    fn of(&self, request: &Request) -> Duration {
        let bytes = request.sectors * SECTOR;
        let segments = request.buffers.len() as u32;
        self.request
            + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second)
            + self.segment * segments
    }
}

/// The clock of the disks' events: virtual time, but for events that are recorded before they
/// happen.
#[derive(Debug)]
pub struct EventClock {
    clock: Arc<ManualClock>,
    begin: Instant,
    /// Time of the next event in nanoseconds since the begin; [`u64::MAX`]: the virtual clock's
    /// time.
    instead: AtomicU64,
}

impl EventClock {
    /// An events' clock that begins now.
    pub fn new(clock: &Arc<ManualClock>) -> EventClock {
        EventClock {
            clock: Arc::clone(clock),
            begin: clock.now(),
            instead: AtomicU64::new(u64::MAX),
        }
    }

    /// Nanoseconds since the begin.
    pub fn now_ns(&self) -> u64 {
        match self.instead.load(Ordering::Relaxed) {
            u64::MAX => self.at(self.clock.now()),
            ns => ns,
        }
    }

    fn at(&self, time: Instant) -> u64 {
        time.saturating_duration_since(self.begin).as_nanos() as u64
    }

    fn record(&self, tracer: &mut Tracer, phase: Phase, request: &Request, time: Instant) {
        self.instead.store(self.at(time), Ordering::Relaxed);
        tracer.request(phase, request);
        self.instead.store(u64::MAX, Ordering::Relaxed);
    }
}

/// Disks as the head of this module describes them. They don't touch data.
pub struct ModelledDisks {
    cost: ServiceCost,
    clock: Arc<ManualClock>,
    events_clock: Arc<EventClock>,
    capacity_sectors: u64,
    /// The time at which the next request of each queue ends.
    due: Arc<Mutex<Vec<Option<Instant>>>>,
    events: EventHub,
}

impl ModelledDisks {
    /// Disks for `capacity_sectors` sectors (512 B) in all; each queue has its own part of them.
    pub fn new(
        cost: ServiceCost,
        capacity_sectors: u64,
        clock: &Arc<ManualClock>,
    ) -> ModelledDisks {
        ModelledDisks {
            cost,
            clock: Arc::clone(clock),
            events_clock: Arc::new(EventClock::new(clock)),
            capacity_sectors,
            due: Arc::default(),
            events: EventHub::default(),
        }
    }

    /// The clock of the disks' events.
    pub fn events_clock(&self) -> Arc<EventClock> {
        Arc::clone(&self.events_clock)
    }

    /// The time at which the next request of any queue ends.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.lock().iter().flatten().min().copied()
    }
}

impl BlockDevice for ModelledDisks {
    fn describe(&self) -> String {
        "modelled disks".into()
    }
    fn floor(&self) -> String {
        "disk".into()
    }
    fn limits(&self) -> Limits {
        Limits::default()
    }
    fn capacity_sectors(&self) -> u64 {
        self.capacity_sectors
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let mut due = self.due.lock();
        due.push(None);
        Ok(Box::new(ModelledDiskQueue {
            cost: self.cost,
            clock: Arc::clone(&self.clock),
            events_clock: Arc::clone(&self.events_clock),
            due: Arc::clone(&self.due),
            number: due.len() - 1,
            busy_until: self.clock.now(),
            waiting: VecDeque::new(),
            tracer: context
                .tracing
                .tracer(&self.floor(), context.index, context.submitter),
        }))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

struct ModelledDiskQueue {
    cost: ServiceCost,
    clock: Arc<ManualClock>,
    events_clock: Arc<EventClock>,
    due: Arc<Mutex<Vec<Option<Instant>>>>,
    number: usize,
    busy_until: Instant,
    /// Requests with the time at which each is done, in order of time.
    waiting: VecDeque<(Instant, Box<Request>)>,
    tracer: Tracer,
}

impl ModelledDiskQueue {
    fn tell(&self) {
        self.due.lock()[self.number] = self.waiting.front().map(|w| w.0);
    }
}

impl DeviceQueue for ModelledDiskQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let now = self.clock.now();
        for request in batch.drain(..) {
            let got = now + GET;
            let inserted = got + INSERT;
            let issued = (inserted + ISSUE).max(self.busy_until);
            for (phase, time) in [
                (Phase::Get, got),
                (Phase::Insert, inserted),
                (Phase::Issue, issued),
            ] {
                self.events_clock
                    .record(&mut self.tracer, phase, &request, time);
            }
            self.busy_until = issued + self.cost.of(&request);
            self.waiting.push_back((self.busy_until, request));
        }
        self.tell();
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let now = self.clock.now();
        let before = out.len();
        while let Some((_, request)) = self.waiting.pop_front_if(|(due, _)| *due <= now) {
            let status = Status::Ok;
            out.push(Completion { request, status });
        }
        if out.len() > before {
            self.tell();
        }
    }

    fn arm(&mut self) -> Readiness {
        match self.waiting.front() {
            Some((due, _)) if *due <= self.clock.now() => Readiness::Ready,
            first => Readiness::Wait(first.map(|w| w.0)),
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
