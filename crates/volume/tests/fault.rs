//! Faults come as the seed says, and a torn write leaves exactly a first part.

mod common;

use common::*;
use pvblk_block::{BlockDevice, Op, Queue, QueueContext, Readiness, Request, Status};
use pvblk_volume::{FaultSpec, FaultVolume, ManualClock};
use std::sync::Arc;
use std::time::Duration;

fn open(spec: &str) -> Arc<dyn BlockDevice> {
    pvblk_volume::open(spec).expect("a volume")
}

/// The statuses of 400 requests of a fixed order.
fn fates(device: &Arc<dyn BlockDevice>, index: u32) -> Vec<bool> {
    let context = QueueContext {
        index,
        ..QueueContext::new(1)
    };
    let mut q = Queue::open(device, &context).expect("a queue");
    (0..400)
        .map(|i| {
            let request = match i % 4 {
                0 => Request::new(Op::Flush, 0, 0, i),
                1 => Request::with_buffers(Op::Read, i, vec![buffer_of(&[0; 4096])], i),
                2 => Request::new(Op::Discard, i, 8, i),
                _ => Request::with_buffers(Op::Write, i, vec![buffer_of(&[1; 4096])], i),
            };
            let done = run(&mut q, request);
            assert_eq!(done.request.tag, i);
            done.status == Status::Ok
        })
        .collect()
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let seed = pvblk_testing::seed();
    let spec = format!("fault:seed={seed},error=0.2,torn=0.2:mem:1M");
    let first = fates(&open(&spec), 0);
    assert_eq!(first, fates(&open(&spec), 0));
    assert_ne!(
        first,
        fates(&open(&spec), 1),
        "queues have fates of their own"
    );
    let other = format!("fault:seed={},error=0.2,torn=0.2:mem:1M", seed ^ 1);
    assert_ne!(first, fates(&open(&other), 0));
    let failed = first.iter().filter(|ok| !**ok).count();
    assert!((40..200).contains(&failed), "{failed} of 400 failed");
}

#[test]
fn a_fault_of_one_kind_does_not_move_the_others() {
    let base = fates(&open("fault:seed=5,write-error=0.3:mem:1M"), 0);
    let more = fates(
        &open("fault:seed=5,write-error=0.3,flush-error=0.3,stall=0.01/1us:mem:1M"),
        0,
    );
    for (i, (a, b)) in base.iter().zip(&more).enumerate() {
        assert!(i % 4 == 0 || a == b, "request {i}");
    }
}

#[test]
fn each_kind_of_error() {
    for (spec, want) in [
        ("error=1", [false; 4]),
        ("error=1,read-error=0", [false, true, false, false]),
        ("read-error=1", [true, false, true, true]),
        ("write-error=1", [true, true, false, false]),
        ("flush-error=1", [false, true, true, true]),
        ("torn=1", [true, true, true, false]),
        ("error=0", [true; 4]),
    ] {
        let got = fates(&open(&format!("fault:seed=1,{spec}:mem:1M")), 0);
        assert!(got.chunks(4).all(|c| c == want), "{spec}");
    }
}

#[test]
fn a_torn_write_stores_a_first_part_and_fails() {
    let seed = pvblk_testing::seed();
    for (sector, unit) in [(512, 512), (4096, 4096_usize)] {
        let device = open(&format!("fault:seed={seed},torn=1:mem:1M,sector={sector}"));
        let mut q = queue(&device, 1);
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut lengths = std::collections::HashSet::new();
        for round in 1..=200u8 {
            let old = read(&mut q, 0, 64);
            let region = Arc::new(pvblk_block::Region::anonymous(1 << 20).expect("memory"));
            let segments = scatter(&mut rng, &region, 64, 9);
            fill(&segments, &[round; 64 * 512]);
            let request = Request::with_buffers(Op::Write, 0, segments.clone(), 7);
            let done = run(&mut q, request);
            assert_eq!((done.status, done.request.tag), (Status::IoError, 7));
            assert_eq!(done.request.sectors, 64);
            assert_eq!(done.request.buffers.len(), segments.len());
            let new = read(&mut q, 0, 64);
            let stored = new.iter().take_while(|&&b| b == round).count();
            assert!(stored < 64 * 512 && stored.is_multiple_of(unit));
            assert!(new[stored..] == old[stored..], "more than a first part");
            lengths.insert(stored);
        }
        assert!(lengths.len() > 3, "always the same part: {lengths:?}");
    }
}

#[test]
fn a_failed_write_stores_nothing() {
    let mut q = queue(&open("fault:seed=1,write-error=1:mem:1M"), 1);
    assert_eq!(write(&mut q, 8, &[1; 4096]), Status::IoError);
    assert_eq!(read(&mut q, 8, 8), [0; 4096]);
}

#[test]
fn the_first_requests_are_spared() {
    let device = open("fault:seed=1,after=5,error=1:mem:1M");
    let (mut a, mut b) = (queue(&device, 1), queue(&device, 1));
    let mut failed = Vec::new();
    for n in 0..8 {
        let q = if n % 2 == 0 { &mut a } else { &mut b };
        failed.push(write(q, 0, &[1; 512]) == Status::IoError);
    }
    assert_eq!(failed, [[false; 5].as_slice(), &[true; 3]].concat());
}

#[test]
fn a_stall_holds_back_for_its_time() {
    let clock = Arc::new(ManualClock::default());
    let spec = FaultSpec {
        seed: Some(1),
        stall: 1.0,
        stall_time: Duration::from_millis(50),
        ..FaultSpec::default()
    };
    let volume = FaultVolume::with_clock(&spec, open("mem:1M"), Arc::<ManualClock>::clone(&clock));
    let device: Arc<dyn BlockDevice> = Arc::new(volume.expect("a volume"));
    let mut q = queue(&device, 2);
    q.submit(&mut vec![Request::new(Op::Flush, 0, 0, 1)]);
    assert_eq!(q.poll(&mut Vec::new()), 0);
    let Readiness::Wait(Some(due)) = q.arm() else {
        panic!("no deadline");
    };
    clock.advance(Duration::from_millis(50) - Duration::from_nanos(1));
    assert_eq!(q.poll(&mut Vec::new()), 0);
    clock.advance_to(due);
    assert_eq!(q.arm(), Readiness::Ready);
    assert_eq!(q.poll(&mut Vec::new()), 1);
}

#[test]
fn a_seed_of_its_own_can_be_replayed() {
    let volume = FaultVolume::new(&FaultSpec::default(), open("mem:1M")).expect("a volume");
    assert!(
        volume
            .describe()
            .contains(&format!("seed={}", volume.seed()))
    );
    pvblk_volume::open(&volume.describe()).expect("the description is a spec");
}
