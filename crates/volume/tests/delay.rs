//! The modelled device keeps its completions back exactly as long as the model says, on a clock that
//! only the test moves.

mod common;

use common::*;
use pvblk_block::{BlockDevice, Completion, Op, Queue, Readiness, Request, Status};
use pvblk_volume::{Clock, DelayVolume, ManualClock, VolumeSpec};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn modelled(model: &str) -> (Arc<dyn BlockDevice>, Arc<ManualClock>) {
    let spec = format!("delay:{model}:mem:1M").parse().expect("a spec");
    let VolumeSpec::Delay(spec, inner) = spec else {
        panic!("no delay");
    };
    let clock = Arc::new(ManualClock::default());
    let inner = inner.open().expect("inner");
    let device = DelayVolume::with_clock(&spec, inner, Arc::<ManualClock>::clone(&clock));
    (Arc::new(device.expect("a device")), clock)
}

fn reads(count: u64, bytes: usize) -> Vec<Box<Request>> {
    (0..count)
        .map(|tag| Request::with_buffers(Op::Read, 0, vec![buffer_of(&vec![0; bytes])], tag))
        .collect()
}

/// Lets time jump from deadline to deadline; returns when each request completed, by completion.
fn drain(q: &mut Queue, clock: &ManualClock, start: Instant) -> Vec<(u64, Duration)> {
    let mut order = Vec::new();
    while q.in_flight() > 0 {
        let mut out: Vec<Completion> = Vec::new();
        q.poll(&mut out);
        for done in out {
            assert_eq!(done.status, Status::Ok);
            order.push((done.request.tag, clock.now() - start));
        }
        match q.arm() {
            Readiness::Ready => {}
            Readiness::Wait(Some(due)) => {
                assert!(due > clock.now());
                clock.advance_to(due);
            }
            Readiness::Wait(None) => assert_eq!(q.in_flight(), 0, "nothing to wait for"),
        }
    }
    order
}

fn micros(order: &[(u64, Duration)]) -> Vec<u128> {
    order.iter().map(|(_, t)| t.as_micros()).collect()
}

#[test]
fn nothing_completes_before_it_is_due() {
    let (device, clock) = modelled("210us");
    let mut q = queue(&device, 4);
    q.submit(&mut reads(1, 512));
    let start = clock.now();
    for _ in 0..21 {
        assert_eq!(q.poll(&mut Vec::new()), 0);
        assert_eq!(
            q.arm(),
            Readiness::Wait(Some(start + Duration::from_micros(210)))
        );
        clock.advance(Duration::from_micros(10) - Duration::from_nanos(1));
        assert_eq!(q.poll(&mut Vec::new()), 0);
        clock.advance(Duration::from_nanos(1));
    }
    assert_eq!(q.arm(), Readiness::Ready);
    assert_eq!(q.poll(&mut Vec::new()), 1);
    assert_eq!(q.arm(), Readiness::Wait(None));
}

#[test]
fn channels_serve_side_by_side_over_all_queues() {
    let (device, clock) = modelled("100us,channels=2");
    let (mut a, mut b) = (queue(&device, 4), queue(&device, 4));
    let start = clock.now();
    a.submit(&mut reads(2, 512));
    b.submit(&mut reads(2, 512));
    assert_eq!(micros(&drain(&mut a, &clock, start)), [100, 100]);
    assert_eq!(micros(&drain(&mut b, &clock, start)), [200, 200]);
}

#[test]
fn serial_queues_do_not_wait_for_each_other() {
    let (device, clock) = modelled("100us,serial");
    let (mut a, mut b) = (queue(&device, 4), queue(&device, 4));
    let start = clock.now();
    a.submit(&mut reads(3, 512));
    b.submit(&mut reads(1, 512));
    let order = drain(&mut a, &clock, start);
    assert_eq!(micros(&order), [100, 200, 300]);
    assert_eq!(order.iter().map(|o| o.0).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(b.poll(&mut Vec::new()), 1);
}

#[test]
fn iops_and_bandwidth_are_capped_over_all_queues() {
    let (device, clock) = modelled("50us,iops=209k,bw=2.4G");
    let mut queues = [queue(&device, 64), queue(&device, 64)];
    let start = clock.now();
    let mut completed = 0;
    let mut last = Duration::ZERO;
    for _ in 0..200 {
        queues
            .iter_mut()
            .for_each(|q| q.submit(&mut reads(32, 512)));
        for q in &mut queues {
            let order = drain(q, &clock, start);
            completed += order.len();
            last = last.max(order.last().expect("some").1);
        }
    }
    // Each batch ends with a service time in which nothing is waiting: 64 slots and no idle time.
    let rate = completed as f64 / last.as_secs_f64();
    assert!(
        rate <= 209_000.0 * 1.001 && rate > 209_000.0 * 0.99,
        "{rate} requests per second"
    );

    let (device, clock) = modelled("bw=2.4G");
    let mut q = queue(&device, 64);
    let start = clock.now();
    q.submit(&mut reads(64, 1 << 20));
    let last = drain(&mut q, &clock, start).last().expect("some").1;
    let rate = f64::from(64 << 20) / last.as_secs_f64();
    assert!((rate / 2.4e9 - 1.0).abs() < 1e-4, "{rate} bytes per second");
}

#[test]
fn a_file_below_is_waited_for_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk");
    let spec = format!("delay:1us:file:{},size=1M,engine=uring", path.display());
    let mut q = queue(&pvblk_volume::open(&spec).expect("a volume"), 4);
    for i in 0..50 {
        assert_eq!(write(&mut q, i * 8, &[i as u8; 4096]), Status::Ok);
        assert_eq!(read(&mut q, i * 8, 8), [i as u8; 4096]);
    }
}

#[test]
fn the_time_for_which_requests_were_held_can_be_asked_for() {
    let (device, clock) = modelled("100us");
    let held = || -> (u64, u64) {
        let answer = device.ask(r#"{"delay":"held"}"#);
        let answer = answer.expect("an answer").expect("figures");
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
        let number = |name: &str| answer[name].as_u64().expect("a number");
        (number("requests"), number("held_ns"))
    };
    assert_eq!(held(), (0, 0));
    let mut q = queue(&device, 4);
    q.submit(&mut reads(3, 512));
    clock.advance(Duration::from_micros(90));
    q.poll(&mut Vec::new());
    assert_eq!(held(), (0, 0));
    // They are given back late: that is time for which they were held, too.
    clock.advance(Duration::from_micros(40));
    assert_eq!(q.poll(&mut Vec::new()), 3);
    assert_eq!(held(), (3, 3 * 130_000));
    q.submit(&mut reads(1, 512));
    drain(&mut q, &clock, clock.now());
    assert_eq!(held(), (4, 3 * 130_000 + 100_000));
    let wrong = device.ask(r#"{"delay":"due"}"#).expect("an answer");
    assert!(
        wrong
            .expect_err("no such figure")
            .to_string()
            .contains("ask for held")
    );
    assert!(device.ask(r#"{"cache":"counters"}"#).is_none());
}
