//! Nothing is reported that didn't happen: a recorder loses events all the time, requests share sectors and identities, and each
//! reported request and hop is compared with a log of what was done.

use pvblk_block::trace::{Phase, Tracer, Tracing};
use pvblk_block::{Completion, Op, Request, Status};
use pvblk_trace::latency::{Analyzer, Part, Paths};
use pvblk_trace::{Action, Device, Recorder, Sorter};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Time that the lower layer works at each request, in nanoseconds.
const WORK_NS: u64 = 50_000;
/// Longest time for which [`Sorter`] may hold events back, in nanoseconds: that of a feed.
const HOLD_BACK_NS: u64 = 20_000_000;
const QUEUES: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Submit,
    Issue,
    Arrive,
    Work,
    Ended,
    Answer,
    Drain,
}

struct Queue {
    upper: Tracer,
    lower: Tracer,
}

/// The requests that were made: device, operation, sector, times of Q and C.
type Log = HashSet<(u32, u8, u64, u64, u64)>;

struct Found {
    /// Requests on both layers.
    made: usize,
    reported: usize,
    lost: u64,
    unknown: u64,
    invented: Vec<String>,
}

/// Runs `count` requests through rings of `capacity` events, of which many find them full.
fn run(rng: &mut fastrand::Rng, count: usize, capacity: usize) -> Found {
    let clock = Arc::new(AtomicU64::new(1_000_000_000));
    let now = Arc::clone(&clock);
    let recorder = Recorder::with_clock(capacity, Arc::new(move || now.load(Ordering::Relaxed)));
    let collector = recorder.collector();
    let tracing = Tracing::to(Arc::new(recorder), "x");
    let mut queues: Vec<Queue> = (0..QUEUES as u32)
        .map(|n| {
            let upper = tracing.tracer("back", n, n);
            let lower = tracing.below(&upper).tracer("mem", n, n);
            Queue { upper, lower }
        })
        .collect();
    let mut requests: Vec<Option<Box<Request>>> = Vec::new();
    let mut begun: Vec<(u64, u64)> = Vec::new();
    let mut free: Vec<Box<Request>> = Vec::new();
    let mut steps = BinaryHeap::new();
    let mut submitted = 0;
    for n in 0..32 {
        steps.push(Reverse((1_000_000_000 + n, Step::Submit, 0)));
    }
    steps.push(Reverse((1_004_000_000, Step::Drain, 0)));
    let (mut log, mut made) = (Log::new(), 0);
    let mut sorter = Sorter::default();
    let mut analyzer = Analyzer::new();
    let mut paths = Paths::default();
    let mut lives = Vec::new();
    let mut analyze = |sorter: &mut Sorter, until_ns| {
        for event in sorter.take_until(until_ns) {
            paths.event(&event);
            analyzer.event(&event, &mut |life| {
                paths.life(life);
                lives.push(life.clone());
            });
        }
    };
    while let Some(Reverse((ns, step, n))) = steps.pop() {
        clock.store(ns, Ordering::Relaxed);
        let queue = &mut queues[n % QUEUES];
        let mut next = |step, after: u64| steps.push(Reverse((ns + after, step, n)));
        match step {
            Step::Drain => {
                collector.drain(sorter.input());
                analyze(&mut sorter, ns - HOLD_BACK_NS.min(ns));
                if submitted < count || requests.iter().any(Option::is_some) {
                    next(Step::Drain, rng.u64(1_000_000..8_000_000));
                }
            }
            Step::Submit if submitted == count => {}
            Step::Submit => {
                submitted += 1;
                let op = [Op::Read, Op::Write, Op::Flush][rng.usize(0..3)];
                let (sector, sectors) = match op {
                    Op::Flush => (0, 0),
                    _ => (8 * rng.u64(0..4), 8),
                };
                // The last box that became free: identities come again at once.
                let mut request = match free.pop() {
                    Some(mut old) => {
                        (old.op, old.sector, old.sectors) = (op, sector, sectors);
                        old
                    }
                    None => Request::new(op, sector, sectors, 0),
                };
                let n = requests.len();
                queues[n % QUEUES]
                    .upper
                    .arrived(std::slice::from_mut(&mut request));
                requests.push(Some(request));
                begun.push((ns, 0));
                // Some requests are slow, some seconds are quiet.
                let wait = match rng.u32(0..1000) {
                    0 => rng.u64(0..30_000_000),
                    _ => rng.u64(0..20_000),
                };
                steps.push(Reverse((ns + wait, Step::Issue, n)));
            }
            Step::Issue | Step::Arrive | Step::Work => {
                let Some(request) = &mut requests[n] else {
                    unreachable!("it is in flight")
                };
                match step {
                    Step::Issue => {
                        queue.upper.request(Phase::Issue, request);
                        next(Step::Arrive, 100);
                    }
                    Step::Arrive => {
                        begun[n].1 = ns;
                        queue.lower.arrived(std::slice::from_mut(request));
                        next(Step::Work, 50);
                    }
                    _ => {
                        queue.lower.request(Phase::Issue, request);
                        next(Step::Ended, WORK_NS);
                    }
                }
            }
            Step::Ended | Step::Answer => {
                let request = requests[n].take().expect("it is in flight");
                let status = Status::Ok;
                let (op, sector) = (request.op, request.sector);
                let done = [Completion { request, status }];
                let (tracer, minor, begun_ns) = match step {
                    Step::Ended => (&mut queue.lower, 1, begun[n].1),
                    _ => (&mut queue.upper, 0, begun[n].0),
                };
                tracer.completed(&done);
                made += 1;
                log.insert((minor, op as u8, sector, begun_ns, ns));
                let [Completion { request, .. }] = done;
                if step == Step::Ended {
                    requests[n] = Some(request);
                    next(Step::Answer, 70);
                } else {
                    free.push(request);
                    // No clock shows the same nanosecond twice.
                    let pause = match rng.u32(0..200) {
                        0 => rng.u64(1..40_000_000),
                        _ => rng.u64(1..500_000),
                    };
                    steps.push(Reverse((ns + pause, Step::Submit, 0)));
                }
            }
        }
    }
    collector.drain(sorter.input());
    analyze(&mut sorter, u64::MAX);
    let report = analyzer.finish();
    let mut invented = Vec::new();
    for life in &lives {
        let entry = (
            life.device.minor(),
            life.op as u8,
            life.sector,
            life.queue_ns,
            life.complete_ns,
        );
        if !log.contains(&entry) {
            invented.push(format!("{life:?}"));
        }
        if life.device.minor() == 1 && life.issue_ns != Some(life.complete_ns - WORK_NS) {
            invented.push(format!("a wrong issue: {life:?}"));
        }
    }
    for (device, path) in paths.take() {
        assert_eq!(device, Device::new(Device::MAJOR, 0));
        if path.alone > 0 {
            invented.push(format!("{} requests without events below", path.alone));
        }
        for hop in &path.hops {
            let wrong = hop.times.values().iter().filter(|ns| match hop.part {
                Part::Work => **ns != WORK_NS,
                Part::Down(_) => **ns != 100,
                Part::Up(_) => **ns != 70,
                Part::Wait => false,
                Part::Get | Part::Answer => true,
            });
            invented.extend(wrong.map(|ns| format!("{:?} of {ns} ns", hop.part)));
        }
    }
    let of = report.devices.values();
    Found {
        made,
        reported: lives.len(),
        lost: of.clone().map(|d| d.lost).sum(),
        unknown: of.map(|d| d.unknown).sum(),
        invented,
    }
}

#[test]
fn no_request_is_reported_that_was_not_made() {
    let mut rng = pvblk_testing::random();
    let (mut checked, mut reported, mut lost) = (0, 0, 0);
    for _ in 0..10 {
        // Full after some 30, 300 or 3000 requests.
        let capacity = [128, 1024, 8192][rng.usize(0..3)];
        let found = run(&mut rng, 10_000, capacity);
        assert!(
            found.invented.is_empty(),
            "{} of {}: {:#?}",
            found.invented.len(),
            found.reported,
            &found.invented[..found.invented.len().min(5)]
        );
        assert_eq!(found.made, 20_000);
        assert!(found.lost > 0 || found.unknown == 0);
        checked += found.made / 2;
        reported += found.reported;
        lost += found.lost;
    }
    println!("{checked} requests, {lost} events lost, {reported} reported on two layers");
    assert!(checked >= 100_000);
}

#[test]
fn all_requests_are_reported_if_nothing_is_lost() {
    let mut rng = pvblk_testing::random();
    let found = run(&mut rng, 5_000, 1 << 16);
    assert_eq!((found.lost, found.unknown), (0, 0));
    assert!(found.invented.is_empty(), "{:?}", &found.invented[0]);
    assert_eq!((found.reported, found.made), (10_000, 10_000));
}

#[test]
fn a_listener_is_told_of_the_losses_of_its_own_time_only() {
    let feed_of = |capacity| Recorder::new(capacity);
    let recorder = feed_of(16);
    let collector = recorder.collector();
    let tracing = Tracing::to(Arc::new(recorder.clone()), "x");
    let mut tracer = tracing.tracer("d", 0, 0);
    let mut request = Request::new(Op::Read, 0, 8, 0);
    request.followed = true;
    let mut events = Vec::new();
    for round in 1..=3u64 {
        recorder.start();
        for _ in 0..16 + round {
            tracer.request(Phase::Queue, &request);
        }
        events.clear();
        collector.drain(&mut events);
        let gaps: Vec<u64> = events
            .iter()
            .filter(|e| e.action == Action::Gap)
            .map(|e| e.lost())
            .collect();
        assert_eq!((events.len(), &gaps[..]), (17, &[round][..]));
    }
}
