//! A lane that waits for its device asks its source to ring only where it has to.

mod support;

use pvblk_backend::{Disk, Lane};
use pvblk_block::trace::Tracing;
use pvblk_block::{Readiness, Status};
use pvblk_ring::FrontRing;
use pvblk_ring::wire::{OP_READ, RequestHeader, Segment};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::device::Device;
use support::peer::{Peer, WRITABLE};

struct Rig {
    device: Arc<Device>,
    lane: Lane,
    front: FrontRing,
    next: u64,
}

fn rig() -> Rig {
    let (device, peer) = (Arc::new(Device::default()), Peer::new(0, false));
    let Peer { front, source, .. } = peer;
    let disk = Disk::new("d", device.clone(), Tracing::off());
    Rig {
        device,
        lane: Lane::open(&disk, Box::new(source)).unwrap(),
        front,
        next: 0,
    }
}

impl Rig {
    /// Puts so many reads; true if the lane wants to be rung for them.
    fn put(&mut self, count: usize) -> bool {
        for _ in 0..count {
            let header = RequestHeader {
                operation: OP_READ,
                nr_segments: 1,
                handle: 0,
                pad: 0,
                id: self.next,
                sector_number: self.next * 8,
            };
            let segment = Segment {
                gref: WRITABLE,
                first_sect: 0,
                last_sect: 7,
                pad: 0,
            };
            self.next += 1;
            self.front.put_rw(&header, &[segment]);
        }
        self.front.publish()
    }

    /// What a worker does until it would sleep.
    fn settle(&mut self) -> Readiness {
        loop {
            while self.lane.step() {}
            match self.lane.arm(Instant::now()) {
                Readiness::Ready => {}
                wait => return wait,
            }
        }
    }
}

#[test]
fn while_many_requests_are_at_the_device_the_peer_need_not_ring() {
    let mut rig = rig();
    assert_eq!(rig.settle(), Readiness::Wait(None));
    assert!(rig.put(9), "nothing is at the device");
    let begin = Instant::now();
    let Readiness::Wait(Some(until)) = rig.settle() else {
        panic!("it sleeps for ever, and nobody rings");
    };
    assert!(until <= begin.max(Instant::now()) + Duration::from_micros(50));
    assert!(!rig.put(1), "it looks by itself");
    // An end at the device shows the new request, too.
    rig.device.complete(0, Status::Ok);
    rig.settle();
    assert_eq!(rig.device.held().len(), 9);
}

#[test]
fn a_slow_device_makes_the_peer_ring() {
    let mut rig = rig();
    rig.put(9);
    assert!(matches!(rig.settle(), Readiness::Wait(Some(_))));
    // The time is over, and nothing has ended.
    assert_eq!(rig.settle(), Readiness::Wait(None));
    assert!(rig.put(1));
}

#[test]
fn with_few_requests_at_the_device_the_peer_rings() {
    let mut rig = rig();
    rig.put(7);
    assert_eq!(rig.settle(), Readiness::Wait(None));
    assert!(rig.put(1));
    assert!(matches!(rig.settle(), Readiness::Wait(Some(_))));
}

#[test]
fn what_came_before_the_look_is_taken_at_once() {
    let mut rig = rig();
    rig.put(9);
    while rig.lane.step() {}
    rig.put(1);
    assert_eq!(rig.lane.arm(Instant::now()), Readiness::Ready);
    rig.settle();
    assert_eq!(rig.device.held().len(), 10);
}
