//! Long requests: a step of a lane is bounded in bytes, so that its neighbours on the worker don't wait for it.

mod support;

use pvblk_backend::{Backend, BackendOptions, Disk, SourceId};
use pvblk_block::trace::Tracing;
use pvblk_block::{Buffer, Op, Request, RequestFlags, Status};
use pvblk_testing::wait;
use std::sync::Arc;
use support::device::{Device, Seen};
use support::source::{Feed, FeedSource, source};

/// Sectors that one step submits at most, and parts of one lane at the device.
const STEP: u64 = 512;
const PARTS: usize = 16;

struct Rig {
    device: Arc<Device>,
    backend: Backend,
    disk: Disk,
}

fn rig() -> Rig {
    let device = Arc::new(Device::default());
    let options = BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    };
    Rig {
        backend: Backend::start(&options).unwrap(),
        disk: Disk::new("d", device.clone(), Tracing::off()),
        device,
    }
}

impl Rig {
    fn attach(&self, depth: u32) -> (Feed, SourceId) {
        let (feed, source) = source(depth);
        (feed, self.attach_source(source))
    }

    fn attach_source(&self, source: Box<FeedSource>) -> SourceId {
        let id = self.backend.attach(&self.disk, source, Box::new(|_| {}));
        id.unwrap()
    }

    /// Completes the requests at the device until `feed` has `n` responses.
    fn complete_until(&self, feed: &Feed, n: usize, status: impl Fn(u64) -> Status) {
        wait("answers", || {
            while let Some(&(_, _, sector)) = self.device.held().first() {
                self.device.complete(0, status(sector));
            }
            feed.answered() == n
        });
    }
}

fn write(feed: &Feed, data: &Buffer, sector: u64, flags: RequestFlags) {
    let mut request = Request::with_buffers(Op::Write, sector, vec![data.clone()], sector);
    request.flags = flags;
    feed.send(request);
}

#[test]
fn a_long_write_is_at_the_device_in_few_short_parts() {
    let rig = rig();
    let (feed, _) = rig.attach(64);
    let data = Buffer::anonymous(32 << 20).unwrap();
    write(&feed, &data, 8, RequestFlags::FUA);
    wait("as many parts as may be", || {
        rig.device.held().len() == PARTS
    });
    // Another lane's request comes in between.
    let (other, _) = rig.attach(4);
    other.write(3, RequestFlags::empty());
    wait("it is at the device", || {
        rig.device.held().contains(&(1, Op::Write, 3))
    });
    rig.device.complete_one((1, Op::Write, 3), Status::Ok);
    wait("its answer", || other.answered() == 1);
    rig.complete_until(&feed, 1, |_| Status::Ok);
    assert_eq!(feed.answers(), [(8, Status::Ok)]);
    let of_it: Vec<u64> = rig
        .device
        .seen()
        .iter()
        .filter_map(|s| match s {
            Seen::Submit(0, Op::Write, sector) => Some(*sector),
            _ => None,
        })
        .collect();
    let expected: Vec<u64> = std::iter::once(8)
        .chain((1..=128).map(|i| i * STEP))
        .collect();
    assert_eq!(of_it, expected);
}

#[test]
fn many_long_requests_end_each_with_its_own_status() {
    let rig = rig();
    let (feed, source) = source(64);
    let data = Buffer::anonymous(1 << 20).unwrap();
    // Sent before the lane looks: a lane with all its parts at the device pulls nothing more, however few it has.
    for i in 0..64 {
        write(&feed, &data, i * 2048, RequestFlags::empty());
    }
    let id = rig.attach_source(source);
    wait("they are at work", || rig.device.held().len() == PARTS);
    // The source is detached in the middle; the requests that were taken complete.
    wait("all are taken", || feed.pulled() >= 8);
    rig.backend.detach(&id);
    let bad = 3 * 2048 + STEP;
    wait("all taken are answered", || {
        while let Some(&(_, _, sector)) = rig.device.held().first() {
            let bad = sector == bad;
            rig.device
                .complete(0, if bad { Status::IoError } else { Status::Ok });
        }
        feed.answered() == feed.pulled()
    });
    let mut answers = feed.answers();
    answers.sort_by_key(|a| a.0);
    for (tag, status) in answers {
        let expected = match tag {
            6144 => Status::IoError,
            _ => Status::Ok,
        };
        assert_eq!((tag, status), (tag, expected));
    }
}

#[test]
fn a_barrier_waits_for_all_parts_of_what_came_before() {
    let rig = rig();
    let (feed, _) = rig.attach(64);
    let data = Buffer::anonymous(8 << 20).unwrap();
    write(&feed, &data, 0, RequestFlags::empty());
    feed.flush(1 << 20, RequestFlags::BARRIER);
    rig.complete_until(&feed, 2, |_| Status::Ok);
    let seen = rig.device.seen();
    let flush = seen
        .iter()
        .position(|s| matches!(s, Seen::Submit(_, Op::Flush, _)))
        .unwrap();
    let done = seen[..flush]
        .iter()
        .filter(|s| matches!(s, Seen::Done(_, Op::Write, _)));
    assert_eq!(done.count(), 32);
}

#[test]
fn a_discard_of_all_is_taken_in_parts() {
    let rig = rig();
    let (feed, _) = rig.attach(4);
    feed.send(Request::new(Op::Discard, 0, 1 << 20, 7));
    rig.complete_until(&feed, 1, |_| Status::Ok);
    assert_eq!(feed.answers(), [(7, Status::Ok)]);
    let discards = rig.device.seen();
    assert_eq!(discards.len(), 2 * 8);
}

/// Each is refused at once, whole; their parts would have no end, and begin at sector 0 again.
#[test]
fn a_long_request_beyond_the_device_is_refused() {
    let rig = rig();
    let (feed, id) = rig.attach(64);
    feed.send(Request::new(Op::Discard, 0, u64::MAX, 1));
    let data = Buffer::anonymous(1024 * 512).unwrap();
    write(&feed, &data, u64::MAX - 99, RequestFlags::empty());
    wait("both are answered", || feed.answered() == 2);
    let refused = [(1, Status::Invalid), (u64::MAX - 99, Status::Invalid)];
    assert_eq!(feed.answers(), refused);
    assert_eq!(rig.device.seen(), []);
    let lanes = rig.disk.counters().totals();
    assert!(lanes.operations.iter().all(|o| o.bytes == 0), "{lanes:?}");
    rig.backend.detach(&id);
    wait("it has gone", || rig.backend.lanes() == [0]);
}

/// Sectors that a peer made up don't make long requests short.
#[test]
fn the_sum_of_a_batch_does_not_wrap() {
    let rig = rig();
    let (feed, source) = source(64);
    let data = Buffer::anonymous(1 << 20).unwrap();
    for i in 0..31 {
        write(&feed, &data, i * 2048, RequestFlags::empty());
    }
    feed.send(Request::new(
        Op::Discard,
        0,
        8u64.wrapping_sub(31 * 2048),
        1,
    ));
    rig.attach_source(source);
    wait("they are at work", || !rig.device.held().is_empty());
    feed.settle();
    assert!(rig.device.held().len() <= PARTS);
    rig.complete_until(&feed, 32, |_| Status::Ok);
}
