use super::*;
use crate::{Collector, Recorder, Sorter};
use pvblk_block::trace::{Phase, Tracer, Tracing};
use pvblk_block::{Completion, Op, Request, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A disk of three layers whose steps are made by hand, with a clock that only the test moves.
struct Disk {
    recorder: Recorder,
    collector: Collector,
    clock: Arc<AtomicU64>,
    back: Tracer,
    cache: Tracer,
    file: Tracer,
}

impl Disk {
    fn new(every: u32) -> Disk {
        let clock = Arc::new(AtomicU64::new(1_000));
        let now = Arc::clone(&clock);
        let clock_of = Arc::new(move || now.load(Ordering::Relaxed));
        let recorder = Recorder::with_clock(1 << 16, clock_of);
        recorder.set_every(every);
        let tracing = Tracing::to(Arc::new(recorder.clone()), "vm1");
        let back = tracing.tracer("back", 0, 0);
        let below = tracing.below(&back);
        let cache = below.tracer("cache", 0, 0);
        let file = below.below(&cache).tracer("/srv/a", 0, 0);
        Disk {
            collector: recorder.collector(),
            recorder,
            clock,
            back,
            cache,
            file,
        }
    }

    fn live(&self, disk: Option<&str>) -> Live {
        let collector = self.collector.clone();
        let names = Box::new(move || collector.devices());
        Live::new(names, disk.map(str::to_owned), 1_000)
    }

    /// Moves the clock by 2^n ns.
    fn pass(&self, n: u32) {
        self.clock.fetch_add(1 << n, Ordering::Relaxed);
    }

    fn completed(tracer: &mut Tracer, request: Box<Request>) -> Box<Request> {
        let status = Status::Ok;
        let done = [Completion { request, status }];
        tracer.completed(&done);
        let [Completion { request, .. }] = done;
        request
    }

    /// One request, whose steps take 1, 2, 4, … ns.
    fn request(&mut self, hit: bool) {
        let mut batch = [Request::new(Op::Read, 64, 8, 0)];
        self.back.arrived(&mut batch);
        self.pass(0);
        self.back.request(Phase::Get, &batch[0]);
        self.pass(1);
        self.back.request(Phase::Issue, &batch[0]);
        self.pass(2);
        self.cache.arrived(&mut batch);
        self.pass(3);
        if !hit {
            self.cache.request(Phase::Issue, &batch[0]);
            self.pass(4);
            let mut read = Request::new(Op::Read, 64, 64, 0);
            read.followed = batch[0].followed;
            let mut reads = [read];
            self.file.arrived(&mut reads);
            self.pass(5);
            self.file.request(Phase::Issue, &reads[0]);
            self.pass(6);
            let [read] = reads;
            Disk::completed(&mut self.file, read);
            self.pass(7);
        }
        let [request] = batch;
        let request = Disk::completed(&mut self.cache, request);
        self.pass(8);
        Disk::completed(&mut self.back, request);
        self.pass(9);
    }

    fn drain(&self, live: &mut Live) -> usize {
        let mut sorter = Sorter::default();
        self.collector.drain(sorter.input());
        let events = sorter.take_until(u64::MAX);
        live.events(&events);
        events.len()
    }
}

#[test]
fn hops_are_in_the_order_of_the_way_and_add_up() {
    let mut disk = Disk::new(1);
    let mut live = disk.live(None);
    disk.request(false);
    disk.request(false);
    disk.request(true);
    disk.drain(&mut live);
    let report = live.take(5_000, 1);
    assert_eq!(
        (report.at_ns, report.elapsed_ns, report.every),
        (5_000, 4_000, 1)
    );
    let [of] = &report.disks[..] else {
        panic!("{report:?}");
    };
    assert_eq!((of.disk.as_str(), of.requests), ("vm1", 3));
    let hops: Vec<_> = of
        .hops
        .iter()
        .map(|h| {
            (
                h.name.as_str(),
                h.label.as_str(),
                h.depth,
                h.count,
                h.sum_ns,
            )
        })
        .collect();
    let expected = [
        ("Q2G", "limit", 0, 3, 3),
        ("G2D", "worker", 0, 3, 6),
        ("D2Q", "to cache", 0, 3, 12),
        ("Q2C", "cache hit", 1, 1, 8),
        ("Q2D", "cache", 1, 2, 16),
        ("D2Q", "to volume", 1, 2, 32),
        ("Q2D", "volume", 2, 2, 64),
        ("D2C", "medium", 2, 2, 128),
        ("C2C", "from volume", 1, 2, 256),
        ("C2C", "from cache", 0, 3, 768),
    ];
    assert_eq!(hops, expected);
    let slowest: Vec<u64> = of.slowest.iter().map(|r| r.total_ns).collect();
    assert_eq!(slowest, [511, 511, 271]);
    assert_eq!(
        slowest.iter().sum::<u64>(),
        expected.map(|e| e.4).iter().sum::<u64>()
    );
    let hit = &of.slowest[2];
    let parts: Vec<_> = hit
        .hops
        .iter()
        .map(|h| (h.label.as_str(), h.begin_ns, h.ns))
        .collect();
    let expected = [
        ("limit", 0, 1),
        ("worker", 1, 2),
        ("to cache", 3, 4),
        ("cache hit", 7, 8),
        ("from cache", 15, 256),
    ];
    assert_eq!(parts, expected);
    // The next time has its own requests only.
    disk.request(true);
    disk.drain(&mut live);
    let next = live.take(6_000, 1);
    assert_eq!((next.elapsed_ns, next.disks[0].requests), (1_000, 1));
    assert!(live.take(7_000, 1).disks.is_empty());
}

#[test]
fn only_the_wanted_disk_is_in_the_report() {
    let mut disk = Disk::new(1);
    let (mut own, mut other) = (disk.live(Some("vm1")), disk.live(Some("vm10")));
    disk.request(false);
    let mut events = Vec::new();
    disk.collector.drain(&mut events);
    events.sort_by_key(|e| (e.time_ns, e.action));
    own.events(&events);
    other.events(&events);
    assert_eq!(own.take(2_000, 1).disks.len(), 1);
    assert_eq!(other.take(2_000, 1).disks.len(), 0);
}

#[test]
fn one_request_in_n_is_followed_whole() {
    let mut disk = Disk::new(8);
    let mut live = disk.live(None);
    let (mut events, mut requests) = (0, 0u64);
    for n in 0..4_000 {
        // The request's Box is at the same address again and again, which must not matter.
        disk.request(n % 2 == 0);
        if n % 500 == 499 {
            events += disk.drain(&mut live);
        }
    }
    let report = live.take(1 << 40, 8);
    let of = &report.disks[0];
    // The distance is 8 ± 4.3: 500 ± 12, at five deviations.
    assert!((440..=560).contains(&(of.requests / 8)), "{}", of.requests);
    assert_eq!(report.unknown, 0);
    let of_label = |label: &str| {
        let found = of.hops.iter().find(|h| h.label == label);
        found.map_or(0, |h| h.count)
    };
    let (hits, misses) = (of_label("cache hit"), of_label("medium"));
    assert_eq!(hits + misses, of.requests / 8, "each with its whole way");
    assert!(
        (150..=350).contains(&hits),
        "{hits}: a regular load is met evenly"
    );
    let sum: u64 = of.hops.iter().map(|h| h.sum_ns).sum();
    assert_eq!(sum, hits * 271 + misses * 511);
    requests += of.requests / 8;
    // A hit has A and Q twice, less A on top, G, D, two C; a miss A, Q, two D and C more.
    assert_eq!(events as u64, hits * 7 + misses * 12, "{requests} requests");
    // From now on all.
    disk.recorder.set_every(1);
    for _ in 0..100 {
        disk.request(true);
    }
    disk.drain(&mut live);
    assert_eq!(live.take(1 << 41, 1).disks[0].requests, 100);
}

#[test]
fn nothing_that_did_not_happen_after_a_change_of_n() {
    let mut disk = Disk::new(4);
    let mut live = disk.live(None);
    for round in 0..200 {
        disk.recorder.set_every([1, 4, 64][round % 3]);
        for _ in 0..10 {
            disk.request(false);
        }
        disk.drain(&mut live);
        let report = live.take(1 << 40, 1);
        for of in &report.disks {
            let sum: u64 = of.hops.iter().map(|h| h.sum_ns).sum();
            assert_eq!(sum, of.requests * 511);
        }
    }
}

#[test]
fn members_are_named() {
    assert_eq!(member("vm1/[a]"), Some("a"));
    assert_eq!(member("vm1/[a]/mem:1M"), Some("a"));
    assert_eq!(member("vm1/[b[0]]"), Some("b[0]"));
    assert_eq!(member("vm1/back"), None);
    assert_eq!(disk_of("vm1/[a]"), "vm1");
}
