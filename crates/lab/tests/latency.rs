//! Delays planted in the real stack, each alone and in every combination, are found where they were planted.
//!
//! One thread, and a clock that only this test moves: the times are exact, whatever else the machine does.

use pvblk_backend::{BlkifSource, Disk, Lane};
use pvblk_block::trace::Tracing;
use pvblk_block::{BlockDevice, Completion, Op, Queue, QueueContext, Request};
use pvblk_client::rings::Frontend;
use pvblk_lab::loopback::Loopback;
use pvblk_trace::latency::{Analyzer, Hop, Part, Paths, Samples};
use pvblk_trace::{Device, Recorder};
use pvblk_volume::{Clock, DelayVolume, ManualClock, VolumeSpec};
use std::sync::Arc;
use std::time::Duration;

const DELAY: Duration = Duration::from_millis(10);
const REQUESTS: u64 = 5;
/// Steps of the clock while the volume works.
const TICK: Duration = Duration::from_micros(20);

/// Place of a delay.
#[derive(Clone, Copy, Debug, Default)]
struct Planted {
    volume: bool,
    ring: bool,
    worker: bool,
    workload: bool,
}

/// Averages in nanoseconds of the hops of a request's path, and of the gaps between requests.
struct Found {
    volume_ns: f64,
    ring_ns: f64,
    worker_ns: f64,
    gap_ns: f64,
    /// All hops together, as a share of the whole time.
    hops_share: f64,
    /// Hops and gaps together, as a share of the submitter's time.
    explained: f64,
}

fn average(samples: &Samples) -> f64 {
    samples.sum_ns() as f64 / samples.count().max(1) as f64
}

fn volume(planted: bool, clock: &Arc<ManualClock>) -> Arc<dyn BlockDevice> {
    let inner = pvblk_volume::open("mem:1M").unwrap();
    if !planted {
        return inner;
    }
    let Ok(VolumeSpec::Delay(spec, _)) = "delay:10ms:mem:1M".parse() else {
        panic!("no delay");
    };
    let clock: Arc<dyn Clock> = clock.clone();
    Arc::new(DelayVolume::with_clock(&spec, inner, clock).unwrap())
}

fn run(planted: Planted) -> Found {
    let clock = Arc::new(ManualClock::default());
    let begin = clock.now();
    let ours = Arc::clone(&clock);
    let recorder = Arc::new(Recorder::with_clock(
        1024,
        Arc::new(move || {
            // The step keeps two events from having the same time.
            ours.advance(Duration::from_nanos(1));
            (ours.now() - begin).as_nanos() as u64
        }),
    ));
    let collector = recorder.collector();
    let tracing = Tracing::to(recorder, "t");
    let device = volume(planted.volume, &clock);
    let name = device.describe();
    let (front, mut back) = Loopback::default().wire(device.as_ref()).unwrap();
    let disk = Disk::new("t", device, tracing.clone());
    let mut lane = Lane::open(&disk, Box::new(BlkifSource::new(back.remove(0)))).unwrap();
    let front: Arc<dyn BlockDevice> = Frontend::new(front).unwrap();
    let source = front.buffer_source().unwrap();
    let context = QueueContext {
        tracing,
        ..QueueContext::new(1)
    };
    let mut queue = Queue::open(&front, &context).unwrap();
    let mut done = Vec::<Completion>::new();
    let gate = disk.pass();
    let pause = |wanted: bool| {
        if wanted {
            clock.advance(DELAY);
        }
    };
    for n in 0..REQUESTS {
        let buffer = source.allocate(4096).unwrap();
        let request = Request::with_buffers(Op::Read, n * 8, vec![buffer], n);
        queue.submit(&mut vec![request]);
        pause(planted.ring);
        if planted.worker {
            // The worker has the request, and must not issue it yet.
            assert!(gate.try_close());
            lane.step();
            pause(true);
            gate.open();
        }
        while queue.poll(&mut done) == 0 {
            lane.step();
            if planted.volume {
                clock.advance(TICK);
            }
        }
        if n + 1 < REQUESTS {
            pause(planted.workload);
        }
    }
    let mut events = Vec::new();
    collector.drain(&mut events);
    events.sort_by_key(|e| (e.time_ns, e.action));
    let mut paths = Paths::default();
    for (device, name) in collector.devices() {
        paths.name(device, &name);
    }
    let report = Analyzer::run(&events, |life| paths.life(life));
    let of = |wanted: &str| -> Device {
        let devices = collector.devices();
        devices.iter().find(|(_, n)| n == wanted).expect("traced").0
    };
    let (front, back, volume) = (of("t/front"), of("t/back"), of(&format!("t/{name}")));
    let path = &paths.take()[&front];
    assert_eq!((path.total.count() as u64, path.alone), (REQUESTS, 0));
    let hop = |device, part| {
        let mut hops = path.hops.iter();
        let hop = hops.find(|h| h.device == device && h.part == part);
        average(&hop.expect("a hop of the path").times)
    };
    let all: f64 = path.hops.iter().map(|h| average(&h.times)).sum();
    Found {
        volume_ns: hop(volume, Part::Work),
        ring_ns: hop(front, Part::Down(back)),
        worker_ns: hop(back, Part::Wait),
        gap_ns: average(report.all_of(front).of(Hop::C2A)),
        hops_share: all / average(&path.total),
        explained: report.submitters[&(front, 0)].explained(),
    }
}

/// True if `found` is within two hundredths of the planted delay, or a few ticks where nothing was
/// planted.
fn near(found: f64, planted: bool) -> bool {
    let should = if planted { 1e7 } else { 0.0 };
    (found - should).abs() <= 0.02 * 1e7
}

#[test]
fn planted_delays_are_found_where_they_are() {
    for bits in 0..16 {
        let planted = Planted {
            volume: bits & 1 != 0,
            ring: bits & 2 != 0,
            worker: bits & 4 != 0,
            workload: bits & 8 != 0,
        };
        let found = run(planted);
        for (what, is, should) in [
            ("volume", found.volume_ns, planted.volume),
            ("ring", found.ring_ns, planted.ring),
            ("worker", found.worker_ns, planted.worker),
            ("workload", found.gap_ns, planted.workload),
        ] {
            assert!(near(is, should), "{planted:?}: {what} took {is} ns");
        }
        for sum in [found.hops_share, found.explained] {
            assert!((sum - 1.0).abs() <= 0.02, "{planted:?}: {sum}");
        }
    }
}
