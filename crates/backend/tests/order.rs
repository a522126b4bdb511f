//! Requests that need an order, over a device that completes when the test says so: barriers across queues,
//! flushes before writes.

mod support;

use pvblk_backend::{Backend, BackendOptions, Disk};
use pvblk_block::trace::Tracing;
use pvblk_block::{Op, RequestFlags, Status};
use pvblk_testing::wait;
use std::sync::Arc;
use std::time::Duration;
use support::device::{Device, Seen};
use support::source::{Feed, source};

const NONE: RequestFlags = RequestFlags::empty();
const BARRIER: RequestFlags = RequestFlags::BARRIER;
const PREFLUSH: RequestFlags = RequestFlags::PREFLUSH;

struct Rig {
    device: Arc<Device>,
    feeds: Vec<Feed>,
    _backend: Backend,
}

fn rig(queues: usize, workers: usize) -> Rig {
    let device = Arc::new(Device::default());
    let backend = Backend::start(&BackendOptions {
        workers,
        spin_max: Duration::from_micros(20),
        ..BackendOptions::default()
    })
    .unwrap();
    let disk = Disk::new("d", device.clone(), Tracing::off());
    let mut feeds = Vec::new();
    for _ in 0..queues {
        let (feed, source) = source(16);
        backend.attach(&disk, source, Box::new(|_| {})).unwrap();
        feeds.push(feed);
    }
    Rig {
        device,
        feeds,
        _backend: backend,
    }
}

impl Rig {
    #[track_caller]
    fn wait_held(&self, expected: &[(u32, Op, u64)]) {
        let sorted = |mut v: Vec<(u32, Op, u64)>| {
            v.sort_by_key(|h| (h.0, h.2));
            v
        };
        let expected = sorted(expected.to_vec());
        wait("the device gets it", || {
            let held = sorted(self.device.held());
            assert!(
                held.len() <= expected.len(),
                "too much at the device: {held:?}"
            );
            held == expected
        });
    }

    /// Everything had its chance, and the device still holds just this.
    #[track_caller]
    fn nothing_more_than(&self, expected: &[(u32, Op, u64)]) {
        self.feeds.iter().for_each(Feed::settle);
        self.wait_held(expected);
    }

    #[track_caller]
    fn done(&self, what: (u32, Op, u64)) {
        self.device.complete_one(what, Status::Ok);
    }

    #[track_caller]
    fn wait_answer(&self, queue: usize, expected: (u64, Status)) {
        wait("the answer", || {
            self.feeds[queue].answers().contains(&expected)
        });
    }
}

const W: Op = Op::Write;
const F: Op = Op::Flush;

/// `data`: the barrier writes; else it is empty.
fn barrier_holds(workers: usize, data: bool) {
    let rig = rig(2, workers);
    let (a, b) = (&rig.feeds[0], &rig.feeds[1]);
    a.write(1, NONE);
    b.write(2, NONE);
    rig.wait_held(&[(0, W, 1), (1, W, 2)]);
    if data {
        a.write(3, BARRIER);
    } else {
        a.flush(3, BARRIER);
    }
    wait("the barrier is taken", || a.pulled() == 2);
    // A taken request may not have reached the gate yet; after a whole turn it has.
    a.settle();
    // Later than the barrier, on both queues.
    a.write(4, NONE);
    b.write(5, NONE);
    wait("the later write is taken", || b.pulled() == 2);
    rig.nothing_more_than(&[(0, W, 1), (1, W, 2)]);
    rig.done((0, W, 1));
    rig.wait_answer(0, (1, Status::Ok));
    rig.nothing_more_than(&[(1, W, 2)]);
    rig.done((1, W, 2));
    // Earlier writes are durable before the barrier's, and the barrier's before later ones.
    rig.wait_held(&[(0, F, 0)]);
    rig.nothing_more_than(&[(0, F, 0)]);
    rig.done((0, F, 0));
    if data {
        rig.wait_held(&[(0, W, 3)]);
        rig.nothing_more_than(&[(0, W, 3)]);
        assert!(!a.answers().contains(&(3, Status::Ok)));
        rig.done((0, W, 3));
        rig.wait_held(&[(0, F, 0)]);
        rig.nothing_more_than(&[(0, F, 0)]);
        assert!(
            !a.answers().contains(&(3, Status::Ok)),
            "before it is durable"
        );
        rig.done((0, F, 0));
    }
    rig.wait_answer(0, (3, Status::Ok));
    rig.wait_held(&[(0, W, 4), (1, W, 5)]);
    rig.done((0, W, 4));
    rig.done((1, W, 5));
    rig.wait_answer(0, (4, Status::Ok));
    rig.wait_answer(1, (5, Status::Ok));
}

#[test]
fn no_write_of_any_queue_crosses_a_barrier_with_data() {
    barrier_holds(1, true);
    barrier_holds(2, true);
}

#[test]
fn no_write_of_any_queue_crosses_an_empty_barrier() {
    barrier_holds(1, false);
    barrier_holds(2, false);
}

#[test]
fn a_barrier_that_fails_is_answered_and_opens_the_gate() {
    // Its first flush, its write, its last flush.
    for failing in 0..3 {
        let rig = rig(2, 2);
        rig.feeds[0].write(3, BARRIER);
        for step in [(0, F, 0), (0, W, 3), (0, F, 0)].into_iter().take(failing) {
            rig.wait_held(&[step]);
            rig.done(step);
        }
        let step = [(0, F, 0), (0, W, 3), (0, F, 0)][failing];
        rig.wait_held(&[step]);
        rig.device.complete_one(step, Status::NoSpace);
        rig.wait_answer(0, (3, Status::NoSpace));
        rig.feeds[1].write(4, NONE);
        rig.wait_held(&[(1, W, 4)]);
        rig.done((1, W, 4));
        rig.wait_answer(1, (4, Status::Ok));
        assert_eq!(rig.feeds[0].answers().len(), 1);
    }
}

#[test]
fn barriers_of_two_queues_take_turns() {
    let rig = rig(2, 2);
    rig.feeds[0].write(1, BARRIER);
    rig.feeds[1].write(2, BARRIER);
    let mut order = Vec::new();
    for _ in 0..2 {
        wait("a barrier starts", || rig.device.held().len() == 1);
        let (queue, op, _) = rig.device.held()[0];
        let sector = u64::from(queue) + 1;
        assert_eq!(op, F);
        for step in [(queue, F, 0), (queue, W, sector), (queue, F, 0)] {
            rig.wait_held(&[step]);
            rig.nothing_more_than(&[step]);
            rig.done(step);
        }
        rig.wait_answer(queue as usize, (sector, Status::Ok));
        order.push(queue);
    }
    order.sort();
    assert_eq!(order, [0, 1]);
}

#[test]
fn a_preflush_write_is_flushed_for_first() {
    let rig = rig(1, 1);
    let a = &rig.feeds[0];
    a.write(1, PREFLUSH);
    rig.wait_held(&[(0, F, 0)]);
    a.write(2, NONE);
    // Others don't wait for it.
    rig.wait_held(&[(0, F, 0), (0, W, 2)]);
    rig.nothing_more_than(&[(0, F, 0), (0, W, 2)]);
    rig.done((0, F, 0));
    rig.wait_held(&[(0, W, 1), (0, W, 2)]);
    assert_eq!(a.answers(), []);
    rig.done((0, W, 1));
    rig.wait_answer(0, (1, Status::Ok));
    rig.done((0, W, 2));
    rig.wait_answer(0, (2, Status::Ok));
    assert_eq!(a.answers().len(), 2);
}

#[test]
fn a_write_whose_flush_failed_is_answered_and_never_submitted() {
    let rig = rig(1, 1);
    rig.feeds[0].write(1, PREFLUSH);
    rig.wait_held(&[(0, F, 0)]);
    rig.device.complete_one((0, F, 0), Status::IoError);
    rig.wait_answer(0, (1, Status::IoError));
    rig.nothing_more_than(&[]);
    let writes = |s: &Seen| matches!(s, Seen::Submit(_, Op::Write, _));
    assert!(!rig.device.seen().iter().any(writes));
}

/// A barrier that comes after a flush with data waits for the data too, not only for its flush.
#[test]
fn a_barrier_waits_for_the_write_behind_a_flush() {
    let rig = rig(2, 2);
    let a = &rig.feeds[0];
    a.write(1, PREFLUSH);
    rig.wait_held(&[(0, F, 0)]);
    a.write(2, BARRIER);
    wait("the barrier is taken", || a.pulled() == 2);
    rig.nothing_more_than(&[(0, F, 0)]);
    rig.done((0, F, 0));
    rig.wait_held(&[(0, W, 1)]);
    rig.nothing_more_than(&[(0, W, 1)]);
    rig.done((0, W, 1));
    rig.wait_answer(0, (1, Status::Ok));
    for step in [(0, F, 0), (0, W, 2), (0, F, 0)] {
        rig.wait_held(&[step]);
        rig.done(step);
    }
    rig.wait_answer(0, (2, Status::Ok));
}

/// Random writes, flushes with data and barriers on three queues; completions in random order.
#[test]
fn random_loads_never_cross_a_barrier() {
    let mut rng = pvblk_testing::random();
    for workers in [1, 2] {
        let rig = rig(3, workers);
        let total = 2000;
        let mut sent: Vec<Vec<(u64, bool)>> = vec![Vec::new(); 3];
        let (mut next, mut answered) = (1, 0);
        while answered < total as usize {
            for _ in 0..rng.u32(0..4) {
                if next > total {
                    break;
                }
                let flags = [NONE, NONE, NONE, NONE, NONE, PREFLUSH, BARRIER][rng.usize(..7)];
                let queue = rng.usize(..3);
                sent[queue].push((next, flags == BARRIER));
                rig.feeds[queue].write(next, flags);
                next += 1;
            }
            for _ in 0..rng.u32(0..4) {
                let held = rig.device.held().len();
                if held == 0 {
                    std::thread::yield_now();
                    break;
                }
                rig.device.complete(rng.usize(..held), Status::Ok);
            }
            answered = rig.feeds.iter().map(Feed::answered).sum();
        }
        let mut tags: Vec<u64> = rig
            .feeds
            .iter()
            .flat_map(|f| f.answers())
            .map(|a| a.0)
            .collect();
        tags.sort();
        assert!(tags.iter().copied().eq(1..=total), "each is answered once");
        check_barriers(&rig.device.seen(), &sent);
    }
}

/// From a barrier's first flush to its last no other request is at the device; requests that its queue got
/// before it are done by then, those that came after it start later.
fn check_barriers(seen: &[Seen], sent: &[Vec<(u64, bool)>]) {
    let mut began = std::collections::HashMap::new();
    let mut ended = std::collections::HashMap::new();
    let mut busy = vec![0i32];
    for (i, s) in seen.iter().enumerate() {
        busy.push(busy[i] + if matches!(s, Seen::Submit(..)) { 1 } else { -1 });
        match *s {
            Seen::Submit(_, W, n) => began.insert(n, i),
            Seen::Done(_, W, n) => ended.insert(n, i),
            _ => None,
        };
    }
    for (queue, requests) in (0..).zip(sent) {
        for (k, &(n, barrier)) in requests.iter().enumerate() {
            if !barrier {
                continue;
            }
            let i = began[&n];
            let expected = [
                Seen::Submit(queue, F, 0),
                Seen::Done(queue, F, 0),
                Seen::Submit(queue, W, n),
                Seen::Done(queue, W, n),
                Seen::Submit(queue, F, 0),
                Seen::Done(queue, F, 0),
            ];
            assert_eq!(seen[i - 2..i + 4], expected, "barrier {n} isn't alone");
            assert_eq!(
                busy[i], 0,
                "barrier {n} starts while others are at the device"
            );
            let before = requests[..k].iter().all(|(m, _)| ended[m] < i);
            let after = requests[k + 1..].iter().all(|(m, _)| began[m] > i);
            assert!(
                before && after,
                "requests of queue {queue} cross its barrier {n}"
            );
        }
    }
}
