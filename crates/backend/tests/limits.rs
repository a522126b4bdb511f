//! Limits of disks and connections, on a clock that the tests move: nothing here depends on the speed of the machine.

mod support;

use parking_lot::Mutex;
use pvblk_backend::{
    Backend, BackendOptions, Connection, Disk, Lane, Pulled, RequestSource, SourceEnd, Throttle,
    ThrottleLimits,
};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    Buffer, Clock, Completion, ManualClock, Op, Readiness, Request, RequestFlags, SECTOR,
};
use pvblk_testing::wait;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::instantly::Instantly;

/// A request that ended: when, its operation, its bytes.
type Ended = (Duration, Op, u64);

#[derive(Default)]
struct Log {
    ended: Vec<Ended>,
    /// Requests that the source still gives; `None`: any number.
    left: Option<usize>,
}

/// Always has requests of a pattern, in turn, until `left` is used up.
struct Endless {
    clock: Arc<ManualClock>,
    start: Instant,
    depth: u32,
    pattern: VecDeque<(Op, u64)>,
    ordered: bool,
    data: Buffer,
    log: Arc<Mutex<Log>>,
}

impl RequestSource for Endless {
    fn describe(&self) -> String {
        "endless".into()
    }
    fn depth(&self) -> u32 {
        self.depth
    }
    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        for _ in 0..room.min(8) {
            let mut log = self.log.lock();
            match &mut log.left {
                Some(0) => break,
                Some(n) => *n -= 1,
                None => {}
            }
            let (op, bytes) = self.pattern[0];
            self.pattern.rotate_left(1);
            let buffers = match op.has_data() {
                true => vec![self.data.slice(0, bytes as usize).unwrap()],
                false => Vec::new(),
            };
            let mut request = match op {
                Op::Read | Op::Write => Request::with_buffers(op, 0, buffers, 0),
                Op::Flush => Request::new(op, 0, 0, 0),
                _ => Request::new(op, 0, bytes / SECTOR, 0),
            };
            if self.ordered && op == Op::Write {
                request.flags = RequestFlags::PREFLUSH;
            }
            out.push(request);
        }
        Ok(Pulled {
            ordered: self.ordered && !out.is_empty(),
            answered: 0,
        })
    }
    fn complete(&mut self, done: &mut Vec<Completion>) {
        let at = self.clock.now() - self.start;
        let ended = done.drain(..);
        let ended = ended.map(|c| (at, c.request.op, c.request.sectors * SECTOR));
        self.log.lock().ended.extend(ended);
    }
    fn push(&mut self) -> Result<usize, SourceEnd> {
        Ok(0)
    }
    fn arm(&mut self) -> Readiness {
        match self.log.lock().left {
            Some(0) => Readiness::Wait(None),
            _ => Readiness::Ready,
        }
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A disk, its lanes, and the clock of its limits.
struct Bed {
    clock: Arc<ManualClock>,
    start: Instant,
    disk: Disk,
    lanes: Vec<Lane>,
    logs: Vec<Arc<Mutex<Log>>>,
    rng: fastrand::Rng,
    /// A lane is stepped so much later than it asked for, at most.
    late: Duration,
}

const MS: Duration = Duration::from_millis(1);

impl Bed {
    fn new(limits: &str) -> Bed {
        let clock = Arc::new(ManualClock::default());
        let throttle = Arc::new(Throttle::with_clock(clock.clone()));
        let disk = Disk::new("d", Arc::new(Instantly::default()), Tracing::off());
        let bed = Bed {
            start: clock.now(),
            clock,
            disk: disk.with_throttle(throttle),
            lanes: Vec::new(),
            logs: Vec::new(),
            rng: pvblk_testing::random(),
            late: 2 * MS,
        };
        bed.set(limits);
        bed
    }

    fn set(&self, limits: &str) {
        self.disk.throttle().set(limits.parse().unwrap());
    }

    /// Adds a lane of this depth whose requests are those of `pattern` in turn; its index.
    fn lane(&mut self, depth: u32, pattern: &[(Op, u64)]) -> usize {
        self.lane_of(None, depth, pattern, false)
    }

    fn lane_of(
        &mut self,
        connection: Option<&Arc<Connection>>,
        depth: u32,
        pattern: &[(Op, u64)],
        ordered: bool,
    ) -> usize {
        let log = Arc::<Mutex<Log>>::default();
        let source = Endless {
            clock: self.clock.clone(),
            start: self.start,
            depth,
            pattern: pattern.iter().copied().collect(),
            ordered,
            data: Buffer::anonymous(4 << 20).unwrap(),
            log: log.clone(),
        };
        let lane = Lane::open_as(&self.disk, connection.cloned(), Box::new(source)).unwrap();
        self.lanes.push(lane);
        self.logs.push(log);
        self.lanes.len() - 1
    }

    fn now(&self) -> Duration {
        self.clock.now() - self.start
    }

    /// Runs all lanes for `time`, as a worker would: steps those that have work, and moves the clock to the time at which the first one wants to
    /// be stepped again, or a little later.
    fn run(&mut self, time: Duration) {
        let end = self.clock.now() + time;
        loop {
            let mut steps = 0;
            while self
                .lanes
                .iter_mut()
                .fold(false, |any, lane| lane.step() | any)
            {
                steps += 1;
                assert!(steps < 1_000_000, "the lanes never rest: no limit holds");
            }
            let mut next = end;
            for lane in &mut self.lanes {
                match lane.arm() {
                    Readiness::Wait(Some(at)) => next = next.min(at),
                    Readiness::Wait(None) => {}
                    // A full lane isn't asked; any other has more requests than it may pull.
                    Readiness::Ready => panic!("a lane that has to wait would spin"),
                }
            }
            if next >= end {
                return self.clock.advance_to(end);
            }
            let late = self.late.mul_f64(self.rng.f64());
            self.clock.advance_to((next + late).min(end));
        }
    }

    fn ended(&self) -> Vec<Ended> {
        let mut all: Vec<Ended> = Vec::new();
        for log in &self.logs {
            all.extend(log.lock().ended.iter().copied());
        }
        all.sort_by_key(|e| e.0);
        all
    }

    fn count(&self, lane: usize) -> usize {
        self.logs[lane].lock().ended.len()
    }
}

fn amount(of: &str, (_, op, bytes): &Ended) -> u64 {
    let counts = match of.split_once('-') {
        Some(("read", _)) => *op == Op::Read,
        Some(("write", _)) => op.is_write(),
        _ => *op != Op::Flush,
    };
    match (counts, of.ends_with("iops")) {
        (false, _) => 0,
        (true, true) => 1,
        (true, false) => *bytes * u64::from(op.has_data()),
    }
}

/// The most that was passed at once beyond the rate, in any time: the greatest level of a bucket that leaks at the rate.
fn burst(of: &str, rate: f64, ended: &[Ended]) -> f64 {
    let (mut level, mut most, mut last) = (0.0f64, 0.0f64, Duration::ZERO);
    for e in ended {
        level = (level - (e.0 - last).as_secs_f64() * rate).max(0.0) + amount(of, e) as f64;
        (most, last) = (most.max(level), e.0);
    }
    most
}

const MIX: [(Op, u64); 5] = [
    (Op::Read, 4096),
    (Op::Write, 65536),
    (Op::Read, 16384),
    (Op::Write, 4096),
    (Op::Discard, 1 << 20),
];

#[test]
fn each_limit_holds_within_two_percent_over_ten_seconds_and_no_burst_is_greater_than_was_asked() {
    for (of, rate, greatest) in [
        ("read-iops", 500, 1),
        ("write-iops", 3000, 1),
        ("iops", 20_000, 1),
        ("read-bw", 10_000_000, 16384),
        ("write-bw", 50_000_000, 65536),
        ("bw", 200_000_000, 65536),
    ] {
        for (asked, time) in [
            ("", 100),
            (",burst=20ms", 20),
            (",burst=2ms", 2),
            (",burst=500ms", 500),
        ] {
            for connection in ["", "connection-"] {
                let mut bed = Bed::new(&format!("{connection}{of}={rate}{asked}"));
                // Less than half of the burst: later than that, some of the limit is lost.
                bed.late = bed.late.min(Duration::from_micros(time * 300));
                let one = Connection::new("one".into());
                for _ in 0..3 {
                    bed.lane_of(Some(&one), 16, &MIX, false);
                }
                if of.starts_with("read") || of.starts_with("write") {
                    // The other kind isn't limited: without it only.
                    bed.lanes.clear();
                    bed.logs.clear();
                    let kind = |op: &Op| (*op == Op::Read) == of.starts_with("read");
                    let mix: Vec<_> = MIX.into_iter().filter(|(op, _)| kind(op)).collect();
                    for _ in 0..3 {
                        bed.lane_of(Some(&one), 16, &mix, false);
                    }
                }
                bed.run(Duration::from_secs(10));
                let ended = bed.ended();
                let passed: u64 = ended.iter().map(|e| amount(of, e)).sum();
                let share = passed as f64 / (rate as f64 * 10.0);
                let allowed = 0.02 + time as f64 / 10_000.0;
                assert!(
                    (0.98..=1.0 + allowed).contains(&share),
                    "{connection}{of}{asked}: {share} of it"
                );
                let most = burst(of, rate as f64, &ended);
                let whole = rate as f64 * time as f64 / 1000.0;
                let one = f64::from(greatest);
                // Each further lane may pass one request that waited.
                let bound = whole.max(whole / 2.0 + one) + 2.0 * one;
                assert!(
                    most <= bound * 1.001,
                    "{connection}{of}{asked}: {most} at once, not {bound}"
                );
            }
        }
    }
}

#[test]
fn a_worker_that_comes_late_by_less_than_50_ms_loses_nothing_without_a_burst_of_its_user() {
    for (of, rate) in [("read-iops", 5000), ("read-bw", 50_000_000)] {
        let mut bed = Bed::new(&format!("{of}={rate}"));
        bed.late = Duration::from_millis(45);
        // More in flight than the limit allows in 50 ms: else the connection's depth is the limit.
        bed.lane(512, &[(Op::Read, 16384)]);
        bed.run(Duration::from_secs(10));
        let passed: u64 = bed.ended().iter().map(|e| amount(of, e)).sum();
        let share = passed as f64 / (rate as f64 * 10.0);
        assert!((0.98..=1.02).contains(&share), "{of}: {share} of it");
    }
}

#[test]
fn one_lane_passes_no_more_than_the_burst() {
    for (limit, rate, bound) in [
        ("iops=1000,burst=10ms", 1000.0, 10.0),
        ("bw=40960000,burst=100ms", 40_960_000.0, 4_096_000.0),
        // One that is greater than half of the burst: half of it and that one.
        ("bw=1000000,burst=10ms", 1_000_000.0, 5000.0 + 65536.0),
    ] {
        let (of, _) = limit.split_once('=').unwrap();
        let mut bed = Bed::new(limit);
        bed.lane(32, &[(Op::Write, 65536), (Op::Read, 4096)]);
        bed.run(Duration::from_secs(3));
        let most = burst(of, rate, &bed.ended());
        // One of the other kind may wait.
        let other = if of == "iops" { 1.0 } else { 65536.0 };
        assert!(most <= bound + other, "{limit}: {most} at once");
        assert!(most > bound * 0.5, "{limit}: only {most} at once");
    }
}

#[test]
fn reads_go_on_while_writes_wait() {
    let mut bed = Bed::new("write-bw=1M,read-iops=1k");
    let lane = bed.lane(64, &[(Op::Write, 65536), (Op::Read, 4096), (Op::Flush, 0)]);
    let reader = bed.lane(4, &[(Op::Read, 4096)]);
    bed.run(Duration::from_secs(10));
    let of = |lane: usize, op| {
        let log = bed.logs[lane].lock();
        log.ended.iter().filter(|e| e.1 == op).count()
    };
    let writes = of(lane, Op::Write);
    assert!((150..=160).contains(&writes), "{writes} writes");
    assert!(
        of(reader, Op::Read) >= 9_500,
        "{} reads",
        of(reader, Op::Read)
    );
    // Its depth is full of writes, but flushes and reads that it got in aren't held up.
    assert!(of(lane, Op::Flush) >= writes && of(lane, Op::Read) >= writes);
    let held = bed.disk.throttle().held_back();
    assert!(held.requests > 0 && held.since.is_some() && held.ever > held.requests);
}

#[test]
fn limits_change_while_they_are_used() {
    let mut bed = Bed::new("none");
    let lane = bed.lane(32, &[(Op::Read, 4096)]);
    bed.set("iops=1k");
    bed.run(Duration::from_secs(10));
    let first = bed.count(lane);
    assert!((9_900..=10_100).contains(&first), "{first}");
    bed.set("iops=5k,read-bw=100M");
    bed.run(Duration::from_secs(10));
    let second = bed.count(lane) - first;
    assert!((49_500..=50_500).contains(&second), "{second}");
    bed.set("iops=10");
    bed.run(Duration::from_secs(10));
    let third = bed.count(lane) - first - second;
    assert!((99..=103).contains(&third), "{third}");
    // Without limits what waits goes on, and lanes don't ask any more.
    bed.set("none");
    bed.logs[lane].lock().left = Some(1000);
    bed.run(Duration::from_secs(1));
    assert_eq!(bed.count(lane) - first - second - third, 1000 + 32);
    let held = bed.disk.throttle().held_back();
    assert_eq!((held.requests, held.since), (0, None));
    assert!(format!("{:?}", bed.disk.throttle()).contains("none"));
}

#[test]
fn a_controller_that_sets_limits_all_the_time_starves_nobody() {
    let mut bed = Bed::new("iops=5");
    let lane = bed.lane(1, &[(Op::Read, 4096)]);
    let other = bed.lane(32, &[(Op::Read, 4096)]);
    for turn in 0..1000 {
        bed.set(if turn % 2 == 0 { "iops=6" } else { "iops=5" });
        bed.run(50 * MS);
    }
    let counts = [bed.count(lane), bed.count(other)];
    let all = counts[0] + counts[1];
    assert!((240..=310).contains(&all), "{counts:?} in 50 s");
    assert!(counts[0] >= all / 4, "{counts:?}");
}

#[test]
fn each_connection_has_its_own_limit_and_its_queues_share_it() {
    let mut bed = Bed::new("connection-iops=1k,iops=2500");
    let (one, two) = (Connection::new("one".into()), Connection::new("two".into()));
    for connection in [&one, &one, &one, &two] {
        bed.lane_of(Some(connection), 16, &[(Op::Read, 4096)], false);
    }
    bed.run(Duration::from_secs(10));
    let one: usize = (0..3).map(|lane| bed.count(lane)).sum();
    assert!((9_800..=10_200).contains(&one), "{one}");
    assert!((9_800..=10_200).contains(&bed.count(3)), "{}", bed.count(3));
    // Two more connections: now the disk's limit holds.
    for _ in 0..2 {
        bed.lane(16, &[(Op::Read, 4096)]);
    }
    let before: usize = (0..6).map(|lane| bed.count(lane)).sum();
    bed.run(Duration::from_secs(10));
    let all = (0..6).map(|lane| bed.count(lane)).sum::<usize>() - before;
    assert!((24_500..=25_500).contains(&all), "{all}");
}

#[test]
fn lanes_of_a_disk_take_turns() {
    let mut bed = Bed::new("iops=1k");
    let small = bed.lane(1, &[(Op::Read, 4096)]);
    let great = bed.lane(64, &[(Op::Read, 4096)]);
    bed.run(Duration::from_secs(10));
    let counts = [bed.count(small), bed.count(great)];
    // Not half of it, since a lane that is late makes up for what it missed.
    assert!(counts[0] * 3 >= counts[0] + counts[1], "{counts:?}");
}

#[test]
fn what_must_stay_in_order_passes_in_advance_and_is_paid_for() {
    let mut bed = Bed::new("write-iops=100");
    let lane = bed.lane_of(None, 32, &[(Op::Write, 4096)], true);
    bed.run(Duration::from_secs(10));
    let count = bed.count(lane);
    assert!((980..=1020).contains(&count), "{count}");
    // The lane pauses now. Without limits it goes on at once, and others too.
    bed.set("none");
    bed.logs[lane].lock().left = Some(500);
    bed.run(Duration::from_secs(1));
    assert_eq!(bed.count(lane), count + 500);
    assert_eq!(bed.disk.throttle().held_back().since, None);
}

#[test]
fn what_waits_when_its_source_ends_passes_and_is_paid_for() {
    let mut bed = Bed::new("iops=10,burst=1s");
    let lane = bed.lane(64, &[(Op::Read, 4096)]);
    bed.logs[lane].lock().left = Some(50);
    bed.run(Duration::from_secs(2));
    assert!(bed.count(lane) < 40);
    bed.lanes[lane].stop();
    while bed.lanes[lane].step() {}
    assert_eq!(bed.count(lane), 50);
    assert!(matches!(
        bed.lanes[lane].finished(),
        Some(SourceEnd::Closed)
    ));
    bed.lanes.clear();
    assert_eq!(bed.disk.throttle().held_back().requests, 0);
    let next = bed.lane(64, &[(Op::Read, 4096)]);
    let from = bed.now();
    bed.run(Duration::from_secs(8));
    let until = bed.now().as_secs_f64();
    // 10 a second since the beginning, and one burst.
    let most = until * 10.0 + 10.0;
    let all = 50.0 + (bed.count(1.min(next)) as f64);
    assert!(all <= most + 1.0, "{all} of {most}; from {from:?}");
    assert!(all >= most * 0.9, "{all} of {most}");
}

#[test]
fn a_worker_sleeps_until_the_time_of_what_waits() {
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    })
    .unwrap();
    let disk = Disk::new("d", Arc::new(Instantly::default()), Tracing::off());
    let limits: ThrottleLimits = "write-iops=200,burst=10ms".parse().unwrap();
    disk.throttle().set(limits);
    assert_eq!(disk.throttle().limits(), limits);
    let (feed, source) = support::source::source(64);
    backend.attach(&disk, source, Box::new(|_| {})).unwrap();
    let start = Instant::now();
    for sector in 0..60 {
        feed.write(sector, RequestFlags::empty());
    }
    wait("all have passed", || feed.answered() == 60);
    // 2 pass at once and the others at 200 a second; a slow machine takes longer.
    assert!(start.elapsed() >= Duration::from_millis(57 * 5));
    assert_eq!(disk.throttle().held_back().requests, 0);
    // One that waits for long is let go when the limits are taken away.
    disk.throttle()
        .set("write-iops=1,burst=1ms".parse().unwrap());
    for sector in 0..60 {
        feed.write(sector, RequestFlags::empty());
    }
    wait("some wait", || disk.throttle().held_back().requests > 50);
    disk.throttle().set(ThrottleLimits::default());
    wait("all have passed", || feed.answered() == 120);
}
