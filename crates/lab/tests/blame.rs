//! Delays planted at one place of the way, with 1, 32 and 256 requests in flight, over rings, a lane and the device below: `hops` blames that place, by
//! the planter's own clock, and no other.
//!
//! Only the planter moves the clock, and each look at it by a nanosecond: the times don't depend on what else the machine does.

use pvblk_backend::{
    Backend, BackendOptions, BlkifSource, Disk, Disks, Lane, Service, Throttle, ThrottleLimits,
};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, Decorator, DeviceQueue, Error, EventHub,
    Forwards, Op, Queue, QueueContext, Readiness, Request, Status,
};
use pvblk_cache::{CacheConfig, PageCache};
use pvblk_client::rings::Frontend;
use pvblk_export::nbd::{NbdConfig, NbdServer};
use pvblk_lab::loopback::Loopback;
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, CreateOptions, Raid5, assemble, create, prepare, sleepy,
};
use pvblk_trace::live::{HopsReport, Live};
use pvblk_trace::{Collector, Recorder};
use pvblk_volume::{Clock, ManualClock};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A limit for steps that take a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Holds requests back until it is told to let them go.
#[derive(Default)]
struct Planter {
    holds: AtomicBool,
    /// Requests at the device that it holds back.
    held: AtomicU64,
}

impl Planter {
    fn held(&self) -> u64 {
        self.held.load(Ordering::SeqCst)
    }
}

/// A device whose completions the planter holds back. It has no layer of its own.
struct Late {
    inner: Arc<dyn BlockDevice>,
    planter: Arc<Planter>,
    events: EventHub,
}

struct LateQueue {
    inner: Box<dyn DeviceQueue>,
    planter: Arc<Planter>,
    done: Vec<Completion>,
}

impl Decorator for Late {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn floor(&self) -> String {
        self.inner.floor()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(LateQueue {
            inner: self.inner.open_device_queue(context)?,
            planter: Arc::clone(&self.planter),
            done: Vec::new(),
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

impl DeviceQueue for LateQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        if self.planter.holds.load(Ordering::SeqCst) {
            let count = batch.len() as u64;
            self.planter.held.fetch_add(count, Ordering::SeqCst);
        }
        self.inner.submit(batch);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.inner.poll(&mut self.done);
        if !self.planter.holds.load(Ordering::SeqCst) {
            out.append(&mut self.done);
        }
    }

    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Ring,
    Worker,
    /// Of requests that are merged on the ring, and go to the device in parts.
    WorkerOfMerged,
    Limit,
    Volume,
    Member,
    CacheMiss,
    Remote,
}

impl Place {
    const ALL: [Place; 8] = [
        Place::Ring,
        Place::Worker,
        Place::WorkerOfMerged,
        Place::Limit,
        Place::Volume,
        Place::Member,
        Place::CacheMiss,
        Place::Remote,
    ];

    /// The label that is to be blamed.
    fn label(self) -> &'static str {
        match self {
            Place::Ring => "ring, down",
            Place::Worker | Place::WorkerOfMerged => "worker",
            Place::Limit => "limit",
            Place::Volume | Place::CacheMiss => "medium",
            Place::Member => "member b",
            Place::Remote => "remote server",
        }
    }
}

/// A device below a lane, and what has to live as long.
struct Below {
    device: Arc<dyn BlockDevice>,
    planter: Arc<Planter>,
    _server: Option<(NbdServer, TempDir)>,
}

fn late(spec: &str, planter: &Arc<Planter>) -> Arc<dyn BlockDevice> {
    Arc::new(Late {
        inner: pvblk_volume::open(spec).expect("a volume"),
        planter: Arc::clone(planter),
        events: EventHub::default(),
    })
}

impl Below {
    fn new(place: Place) -> Below {
        let planter = Arc::<Planter>::default();
        let mut server = None;
        let device: Arc<dyn BlockDevice> = match place {
            Place::Ring | Place::Worker | Place::WorkerOfMerged | Place::Limit => {
                pvblk_volume::open("mem:64M").unwrap()
            }
            Place::Volume => late("mem:64M", &planter),
            Place::Member => array(&planter),
            Place::CacheMiss => {
                let config = CacheConfig::new(32 << 20);
                Arc::new(PageCache::new(&config, late("mem:64M", &planter)).unwrap())
            }
            Place::Remote => {
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("nbd").display().to_string();
                let disk = Disk::new("x", late("mem:64M", &planter), Tracing::off());
                let options = BackendOptions {
                    workers: 1,
                    ..BackendOptions::default()
                };
                let backend = Backend::start(&options).unwrap();
                let service = Service::new(backend, Disks::new(vec![disk.into()]), Arc::default());
                let addr = format!("unix:{path}").parse().unwrap();
                let nbd = NbdServer::bind(&addr, NbdConfig::default(), &service).unwrap();
                server = Some((nbd, dir));
                pvblk_volume::open(&format!("nbd+unix:///x?socket={path}")).unwrap()
            }
        };
        Below {
            device,
            planter,
            _server: server,
        }
    }
}

/// An array of three members, of which the second is late.
fn array(planter: &Arc<Planter>) -> Arc<dyn BlockDevice> {
    let member = |name: &str| -> (String, Arc<dyn BlockDevice>) {
        let device = match name {
            "b" => late("mem:8M", planter),
            _ => pvblk_volume::open("mem:8M").expect("a volume"),
        };
        (name.to_owned(), device)
    };
    let all = ["a", "b", "c"].map(member).to_vec();
    let mut options = CreateOptions::new("test:0");
    options.chunk_sectors = 8;
    options.assume_clean = true;
    create(all.clone(), &options, &mut sleepy()).expect("an array");
    let options = AssembleOptions::default();
    let mut assembly = assemble(all, &options, &mut sleepy()).expect("its members");
    prepare(&mut assembly, &options, &mut |_, _| {}, &mut sleepy()).expect("its parity");
    let array = Raid5::start(assembly, &ArrayOptions::default()).expect("an array");
    array.keep().expect("a thread");
    array
}

/// Nanoseconds since the begin of the clock that only the planter moves.
#[derive(Clone)]
struct Time {
    clock: Arc<ManualClock>,
    begin: Instant,
}

impl Time {
    fn new() -> Time {
        let clock = Arc::new(ManualClock::default());
        Time {
            begin: clock.now(),
            clock,
        }
    }

    fn ns(&self) -> u64 {
        (self.clock.now() - self.begin).as_nanos() as u64
    }

    fn recorder(&self) -> Recorder {
        let time = self.clone();
        // The step keeps two events from having the same time.
        let clock = Arc::new(move || {
            time.clock.advance(Duration::from_nanos(1));
            time.ns()
        });
        Recorder::with_clock(1 << 14, clock)
    }
}

/// Finds the hops of all that was recorded.
fn hops(collector: &Collector, every: u64) -> HopsReport {
    let mut events = Vec::new();
    collector.drain(&mut events);
    events.sort_by_key(|e| (e.time_ns, e.action));
    let names = collector.clone();
    let mut live = Live::new(Box::new(move || names.devices()), None, 0);
    live.events(&events);
    live.take(1 << 40, every)
}

/// Steps until it is `done`.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "{what} takes for ever");
    }
}

/// Runs requests over rings with a delay at one place. Returns the hops, and the planted time in nanoseconds.
fn run(place: Place, delay: Duration, depth: u64) -> (HopsReport, u64) {
    let time = Time::new();
    let recorder = time.recorder();
    let collector = recorder.collector();
    let tracing = Tracing::to(Arc::new(recorder), "t");
    let below = Below::new(place);
    let planter = &below.planter;
    let wires = Loopback {
        ring_pages: 8,
        ..Loopback::default()
    };
    let (front, mut back) = wires.wire(below.device.as_ref()).unwrap();
    let mut disk = Disk::new("t", Arc::clone(&below.device), tracing.clone());
    if place == Place::Limit {
        let throttle = Throttle::with_clock(time.clock.clone());
        let limits: ThrottleLimits = "iops=100,burst=1ms".parse().unwrap();
        throttle.set(limits);
        disk = disk.with_throttle(Arc::new(throttle));
    }
    let mut lane = Lane::open(&disk, Box::new(BlkifSource::new(back.remove(0)))).unwrap();
    let front: Arc<dyn BlockDevice> = Frontend::new(front).unwrap();
    let source = front.buffer_source().unwrap();
    let mut context = QueueContext::new(depth as u32);
    context.tracing = tracing;
    let mut queue = Queue::open(&front, &context).unwrap();
    let request = |page: u64| {
        let buffer = source.allocate(4096).unwrap();
        Request::with_buffers(Op::Read, page * 8, vec![buffer], page)
    };
    let mut done: Vec<Completion> = Vec::new();
    if place == Place::CacheMiss {
        // Every second request is to be a hit.
        for n in (1..depth).step_by(2) {
            queue.submit(&mut vec![request(n * 40)]);
            until("a read of the cache", || {
                lane.step();
                queue.poll(&mut done) > 0
            });
        }
        done.clear();
        collector.drain(&mut Vec::new());
    }
    // A single request is on one member: all of them have a turn.
    let rounds = if depth == 1 { 6 } else { 1 };
    let mut planted = 0;
    for round in 0..rounds {
        done.clear();
        let (begin_ns, all) = (time.ns(), depth as usize);
        planter.holds.store(true, Ordering::SeqCst);
        planter.held.store(0, Ordering::SeqCst);
        let page = |n| match place {
            Place::CacheMiss => (n + 2 * round) * 40,
            Place::WorkerOfMerged => n,
            _ => (n + round) * 2,
        };
        queue.submit(&mut (0..depth).map(|n| request(page(n))).collect());
        match place {
            Place::Ring => {
                time.clock.advance(delay);
                planted += depth * delay.as_nanos() as u64;
            }
            Place::Worker | Place::WorkerOfMerged => {
                let gate = disk.pass();
                assert!(gate.try_close());
                (0..100).for_each(|_| _ = lane.step());
                time.clock.advance(delay);
                planted += depth * delay.as_nanos() as u64;
                gate.open();
            }
            Place::Limit => {
                // The lane takes all.
                (0..100).for_each(|_| _ = lane.step());
                until("a limit", || {
                    lane.step();
                    let ended = queue.poll(&mut done) as u64;
                    planted += ended * (time.ns() - begin_ns);
                    let over = done.len() == all;
                    if !over {
                        time.clock.advance(delay);
                    }
                    over
                });
            }
            _ => {
                // A cache may read more than it was asked for.
                let hits = match place {
                    Place::CacheMiss => Some(depth / 2),
                    Place::Member => None,
                    _ => Some(0),
                };
                let late = |done: &[Completion]| depth - done.len() as u64;
                until(&format!("{place:?}, {depth} in flight"), || {
                    lane.step();
                    queue.poll(&mut done);
                    // A server takes only so many of one connection; the others wait before it.
                    let most = if place == Place::Remote { 32 } else { u64::MAX };
                    let all_there = planter.held() >= late(&done).min(most);
                    all_there && hits.is_none_or(|hits| done.len() as u64 == hits)
                });
                (0..100).for_each(|_| _ = lane.step());
                time.clock.advance(delay);
                planted += late(&done) * delay.as_nanos() as u64;
            }
        }
        planter.holds.store(false, Ordering::SeqCst);
        until("the end", || {
            lane.step();
            queue.poll(&mut done);
            done.len() == all
        });
        assert!(done.iter().all(|c| c.status == Status::Ok));
    }
    (hops(&collector, 1), planted)
}

fn check(place: Place, delay: Duration, depth: u64) {
    let (report, planted) = run(place, delay, depth);
    let text = format!("{place:?}, {delay:?}, {depth} in flight, {planted} ns: {report:#?}");
    assert!(planted >= delay.as_nanos() as u64, "{text}");
    assert_eq!((report.lost, report.unknown), (0, 0), "{text}");
    let [disk] = &report.disks[..] else {
        panic!("{text}");
    };
    let rounds = if depth == 1 { 6 } else { 1 };
    assert_eq!(disk.requests, depth * rounds, "{text}");
    let within = planted / 50;
    let sum = |label: &str| -> u64 {
        let hops = disk.hops.iter().filter(|h| h.label == label);
        hops.map(|h| h.sum_ns).sum()
    };
    let mut blamed = sum(place.label());
    let mut right = vec![place.label()];
    if place == Place::Worker {
        // A lane that holds requests takes no more: the others wait behind them, on the ring, as long as those.
        let delay_ns = delay.as_nanos() as u64;
        let taken = blamed / delay_ns;
        assert!(taken >= depth.min(8), "{taken} were taken: {text}");
        let rest = sum("ring, down");
        let behind = (depth * rounds - taken) * delay_ns;
        assert!(
            rest.abs_diff(behind) <= within,
            "{rest} behind them: {text}"
        );
        blamed += rest;
        right.push("ring, down");
    }
    assert!(
        blamed.abs_diff(planted) <= within,
        "blamed {blamed}: {text}"
    );
    for other in &disk.hops {
        let is_right = right.contains(&other.label.as_str());
        assert!(
            is_right || other.sum_ns <= within,
            "{} is blamed: {text}",
            other.label
        );
    }
    // The slowest request waited there, too.
    let slowest = &disk.slowest[0];
    let most = slowest.hops.iter().max_by_key(|h| h.ns);
    let most = most.map_or("", |h| h.label.as_str());
    assert!(right.contains(&most), "{text}");
}

fn check_depths(delay: Duration) {
    for place in Place::ALL {
        for depth in [1, 32, 256] {
            check(place, delay, depth);
        }
    }
}

#[test]
fn ten_milliseconds_are_blamed_on_the_right_place() {
    check_depths(Duration::from_millis(10));
}

#[test]
fn a_millisecond_is_blamed_on_the_right_place() {
    check_depths(Duration::from_millis(1));
}

#[test]
fn a_tenth_of_a_millisecond_is_blamed_on_the_right_place() {
    check_depths(Duration::from_micros(100));
}

/// Of one request in three, all hops are known down to the medium, whatever a layer makes of it.
#[test]
fn requests_that_are_followed_are_followed_to_the_medium() {
    const EVERY: u32 = 3;
    for (place, op, last) in [
        (Place::CacheMiss, Op::Read, "medium"),
        (Place::CacheMiss, Op::Discard, "medium"),
        (Place::Member, Op::Read, "member "),
        (Place::Member, Op::Write, "member "),
        (Place::Remote, Op::Write, "remote server"),
    ] {
        let recorder = Time::new().recorder();
        recorder.set_every(EVERY);
        let collector = recorder.collector();
        let mut context = QueueContext::new(8);
        context.tracing = Tracing::to(Arc::new(recorder), "t");
        let below = Below::new(place);
        let mut queue = Queue::open(&below.device, &context).unwrap();
        let mut done = Vec::new();
        for n in 0..600 {
            let sector = n * 40 % 2000 * 8;
            let request = match op.has_data() {
                true => {
                    let buffer = Buffer::anonymous(4096).expect("memory");
                    Request::with_buffers(op, sector, vec![buffer], n)
                }
                false => Request::new(op, sector, 8, n),
            };
            queue.submit(&mut vec![request]);
            until("a request", || queue.poll(&mut done) > 0);
            assert_eq!(done.pop().map(|c| c.status), Some(Status::Ok));
        }
        let report = hops(&collector, u64::from(EVERY));
        let disk = &report.disks[0];
        let text = format!("{place:?} {op:?}: {:#?}", disk.hops);
        let followed = disk.requests / u64::from(EVERY);
        assert!((120..=300).contains(&followed), "{followed}: {text}");
        let count = |is: &dyn Fn(&str) -> bool| -> u64 {
            let hops = disk.hops.iter().filter(|h| is(&h.label));
            let ends = hops.filter(|h| ["D2C", "Q2C"].contains(&h.name.as_str()));
            ends.map(|h| h.count).sum()
        };
        let known = count(&|label| label.starts_with(last) || label == "cache hit");
        assert!(known >= followed, "{known} of {followed}: {text}");
        let unknown = count(&|label| ["in the cache", "array"].contains(&label));
        assert_eq!(unknown, 0, "{text}");
    }
}
