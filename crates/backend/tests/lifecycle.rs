//! Sources come and go: in order, broken, and at any time.

mod support;

use parking_lot::Mutex;
use pvblk_backend::{Backend, BackendOptions, Disk, OnEnd, SourceEnd, SourceId};
use pvblk_block::trace::Tracing;
use pvblk_block::{Op, RequestFlags, Status};
use pvblk_testing::wait;
use std::sync::Arc;
use std::time::Duration;
use support::device::Device;
use support::source::{Feed, source};

const NONE: RequestFlags = RequestFlags::empty();
const W: Op = Op::Write;

struct Rig {
    device: Arc<Device>,
    disk: Disk,
    backend: Backend,
}

/// The end of a source, once it has ended.
#[derive(Clone, Default)]
struct End(Arc<Mutex<Vec<SourceEnd>>>);

impl End {
    fn on_end(&self) -> OnEnd {
        let all = Arc::clone(&self.0);
        Box::new(move |end| all.lock().push(end))
    }

    fn count(&self) -> usize {
        self.0.lock().len()
    }

    fn is_closed(&self) -> bool {
        matches!(self.0.lock()[..], [SourceEnd::Closed])
    }

    fn is_broken(&self) -> bool {
        matches!(self.0.lock()[..], [SourceEnd::Broken(_)])
    }
}

fn rig(workers: usize) -> Rig {
    let device = Arc::new(Device::default());
    let backend = Backend::start(&BackendOptions {
        workers,
        spin_max: Duration::from_micros(20),
        ..BackendOptions::default()
    })
    .unwrap();
    Rig {
        disk: Disk::new("d", device.clone(), Tracing::off()),
        device,
        backend,
    }
}

impl Rig {
    fn attach(&self, depth: u32) -> (Feed, End, SourceId) {
        let (feed, source) = source(depth);
        let end = End::default();
        let id = self
            .backend
            .attach(&self.disk, source, end.on_end())
            .unwrap();
        (feed, end, id)
    }

    #[track_caller]
    fn wait_held(&self, n: usize) {
        wait("the device gets it", || self.device.held().len() == n);
    }
}

#[test]
fn detach_lets_everything_complete_and_takes_nothing_more() {
    for workers in [1, 2] {
        let rig = rig(workers);
        let (feed, end, id) = rig.attach(8);
        feed.write(1, NONE);
        feed.write(2, RequestFlags::PREFLUSH);
        wait("both are taken", || rig.device.held().len() == 2);
        rig.backend.detach(&id);
        // The workers take commands in order, and each gets one of these.
        let others: Vec<_> = (0..2).map(|_| rig.attach(1)).collect();
        others.iter().for_each(|(other, _, _)| other.settle());
        feed.write(3, NONE);
        others.iter().for_each(|(other, _, _)| other.settle());
        assert_eq!((feed.pulled(), end.count()), (2, 0));
        rig.device.complete_one((0, W, 1), Status::Ok);
        wait("the answer", || feed.answers() == [(1, Status::Ok)]);
        rig.device.complete_one((0, Op::Flush, 0), Status::Ok);
        rig.wait_held(1);
        assert_eq!(end.count(), 0, "a write of it is still under way");
        rig.device.complete_one((0, W, 2), Status::IoError);
        wait("the end", || end.count() == 1);
        assert!(end.is_closed());
        assert_eq!(feed.answers(), [(1, Status::Ok), (2, Status::IoError)]);
        // Twice is once.
        rig.backend.detach(&id);
    }
}

#[test]
fn a_broken_source_ends_alone() {
    for workers in [1, 2] {
        let rig = rig(workers);
        let (bad, bad_end, _) = rig.attach(8);
        let (good, good_end, _) = rig.attach(8);
        bad.write(1, NONE);
        good.write(2, NONE);
        rig.wait_held(2);
        bad.break_off();
        good.write(3, NONE);
        rig.wait_held(3);
        wait("it is seen", || bad.end_is_seen());
        good.settle();
        assert_eq!(bad_end.count(), 0, "its write is still at the device");
        rig.device.complete_one((0, W, 1), Status::Ok);
        wait("the end", || bad_end.count() == 1);
        assert!(bad_end.is_broken());
        rig.device.complete_one((1, W, 2), Status::Ok);
        rig.device.complete_one((1, W, 3), Status::Ok);
        wait("answers", || good.answers().len() == 2);
        good.write(4, NONE);
        rig.wait_held(1);
        rig.device.complete_one((1, W, 4), Status::Ok);
        wait("the other goes on", || good.answers().len() == 3);
        assert_eq!(good_end.count(), 0);
    }
}

/// A source that dies with its barrier half done opens the gate for the others.
#[test]
fn a_source_that_ends_in_its_barrier_stops_nobody() {
    for detach in [false, true] {
        let rig = rig(2);
        let (bad, end, id) = rig.attach(8);
        let (good, _, _) = rig.attach(8);
        bad.write(1, RequestFlags::BARRIER);
        rig.wait_held(1);
        good.write(2, NONE);
        wait("it is taken", || good.pulled() == 1);
        if detach {
            rig.backend.detach(&id);
        } else {
            bad.break_off();
        }
        for step in [(0, Op::Flush, 0), (0, W, 1), (0, Op::Flush, 0)] {
            wait("the barrier's next step", || rig.device.held() == [step]);
            rig.device.complete_one(step, Status::Ok);
        }
        wait("the end", || end.count() == 1);
        wait("the other's write", || rig.device.held() == [(1, W, 2)]);
        rig.device.complete_one((1, W, 2), Status::Ok);
        wait("its answer", || good.answers() == [(2, Status::Ok)]);
    }
}

#[test]
fn a_source_closed_by_its_peer_ends_once() {
    let rig = rig(1);
    let (feed, end, id) = rig.attach(8);
    feed.write(1, NONE);
    feed.end(SourceEnd::Closed);
    rig.wait_held(1);
    rig.backend.detach(&id);
    rig.device.complete(0, Status::Ok);
    wait("the end", || end.count() == 1);
    assert!(end.is_closed());
    assert_eq!(feed.answers(), [(1, Status::Ok)]);
    rig.backend.detach(&id);
}

#[test]
fn no_more_is_in_flight_than_the_source_allows() {
    let rig = rig(1);
    let (feed, _, _) = rig.attach(3);
    let (other, _, _) = rig.attach(1);
    (1..=10).for_each(|n| feed.write(n, NONE));
    for left in (0..10usize).rev() {
        rig.wait_held(3.min(left + 1));
        other.settle();
        assert_eq!(rig.device.held().len(), 3.min(left + 1));
        rig.device.complete(0, Status::Ok);
    }
    wait("all answers", || feed.answers().len() == 10);
}

#[test]
fn sources_come_and_go_under_load() {
    let mut rng = pvblk_testing::random();
    let rig = rig(2);
    let mut live: Vec<(Feed, End, SourceId)> = Vec::new();
    let mut ended = Vec::new();
    for _ in 0..300 {
        match rng.u32(0..6) {
            0 if live.len() < 6 => live.push(rig.attach(4)),
            1 if !live.is_empty() => {
                let (feed, end, id) = live.swap_remove(rng.usize(..live.len()));
                if rng.bool() {
                    rig.backend.detach(&id);
                } else {
                    feed.break_off();
                }
                ended.push((feed, end));
            }
            2 | 3 if !live.is_empty() => {
                let flags = [NONE, RequestFlags::PREFLUSH, RequestFlags::BARRIER];
                live[rng.usize(..live.len())]
                    .0
                    .write(rng.u64(1..1000), flags[rng.usize(..3)]);
            }
            _ => {
                let n = rig.device.held().len();
                if n > 0 {
                    rig.device.complete(rng.usize(..n), Status::Ok);
                }
            }
        }
    }
    for (feed, end, id) in live {
        rig.backend.detach(&id);
        ended.push((feed, end));
    }
    wait("every source ends", || {
        let n = rig.device.held().len();
        if n > 0 {
            rig.device.complete(rng.usize(..n), Status::Ok);
        }
        ended.iter().all(|(_, end)| end.count() == 1)
    });
    for (feed, _) in &ended {
        assert_eq!(
            feed.answers().len(),
            feed.pulled(),
            "taken and not answered"
        );
    }
}

/// Stopping gives up the requests at the device; it neither hangs nor panics.
#[test]
fn a_back_end_stops_with_requests_in_flight() {
    for (workers, flags) in [
        (1, NONE),
        (2, RequestFlags::BARRIER),
        (2, RequestFlags::PREFLUSH),
    ] {
        let rig = rig(workers);
        let (a, _, _) = rig.attach(8);
        let (b, _, _) = rig.attach(8);
        a.write(1, NONE);
        b.write(2, NONE);
        rig.wait_held(2);
        a.write(3, flags);
        wait("it is taken", || a.pulled() == 2);
        let device = Arc::clone(&rig.device);
        drop(rig);
        assert!(device.held().is_empty(), "the device's queues are closed");
    }
}
