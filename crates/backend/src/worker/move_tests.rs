//! Lanes that move between workers, while they are woken and stopped.

use super::LaneWaker;
use crate::source::{Pulled, RequestSource, SourceEnd};
use crate::{Backend, BackendOptions, Disk, SourceId};
use instantly::Instantly;
use parking_lot::Mutex;
use pvblk_block::trace::Tracing;
use pvblk_block::{Completion, Op, Readiness, Request};
use pvblk_testing::wait;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

#[path = "../../tests/support/instantly.rs"]
mod instantly;

/// The test's side of a source that has no descriptor: only its waker tells of requests.
#[derive(Default)]
struct Feed {
    waiting: AtomicU64,
    /// It always has one more request.
    endless: AtomicBool,
    answered: AtomicU64,
    waker: Mutex<Option<LaneWaker>>,
    /// The thread that answered last.
    thread: Mutex<Option<ThreadId>>,
    ends: Mutex<Vec<SourceEnd>>,
}

struct FedSource(Arc<Feed>);

impl Feed {
    /// Sends one request.
    fn send(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.waker.lock().as_ref().expect("it is bound").wake();
    }

    fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    fn has_ended_well(&self) -> bool {
        matches!(self.ends.lock()[..], [SourceEnd::Closed])
    }
}

impl RequestSource for FedSource {
    fn describe(&self) -> String {
        "fed, queue 0".into()
    }

    fn bind(&mut self, waker: LaneWaker) {
        *self.0.waker.lock() = Some(waker);
    }

    fn depth(&self) -> u32 {
        8
    }

    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let endless = self.0.endless.load(Ordering::Relaxed);
        let count = match endless {
            true => room,
            false => room.min(self.0.waiting.load(Ordering::Relaxed) as usize),
        };
        if !endless {
            self.0.waiting.fetch_sub(count as u64, Ordering::Relaxed);
        }
        out.extend((0..count).map(|_| Request::new(Op::Flush, 0, 0, 0)));
        Ok(Pulled::default())
    }

    fn complete(&mut self, done: &mut Vec<Completion>) {
        let count = done.drain(..).count() as u64;
        self.0.answered.fetch_add(count, Ordering::Relaxed);
        *self.0.thread.lock() = Some(std::thread::current().id());
    }

    fn push(&mut self) -> Result<usize, SourceEnd> {
        Ok(0)
    }

    fn arm(&mut self) -> Readiness {
        match self.0.waiting.load(Ordering::Relaxed) {
            0 => Readiness::Wait(None),
            _ => Readiness::Ready,
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

struct Rig {
    disk: Disk,
    backend: Backend,
}

fn rig(workers: usize) -> Rig {
    let options = BackendOptions {
        workers,
        spin_max: Duration::from_micros(20),
        ..BackendOptions::default()
    };
    Rig {
        disk: Disk::new("d", Arc::new(Instantly::default()), Tracing::off()),
        backend: Backend::start(&options).expect("threads"),
    }
}

impl Rig {
    fn attach(&self) -> (Arc<Feed>, SourceId) {
        let feed = Arc::<Feed>::default();
        let ended = Arc::clone(&feed);
        let source = Box::new(FedSource(Arc::clone(&feed)));
        let on_end = Box::new(move |end| ended.ends.lock().push(end));
        let id = self.backend.attach(&self.disk, source, on_end);
        (feed, id.expect("a queue"))
    }
}

#[test]
fn a_busy_worker_gives_a_lane_to_an_idle_one() {
    let rig = rig(2);
    let [(first, first_id), (other, other_id), (third, third_id)] = [(); 3].map(|()| rig.attach());
    assert_eq!(rig.backend.lanes(), [2, 1]);
    rig.backend.detach(&other_id);
    wait("one leaves", || other.has_ended_well());
    assert_eq!(rig.backend.lanes(), [2, 0]);
    for feed in [&first, &third] {
        feed.endless.store(true, Ordering::Relaxed);
        feed.send();
    }
    wait("one moves", || rig.backend.lanes() == [1, 1]);
    wait("the disk tells it", || {
        let told = rig.disk.counters().lanes();
        let mut at: Vec<_> = told.iter().map(|lane| lane.worker).collect();
        at.sort_unstable();
        at == [0, 1]
    });
    let before = [&first, &third].map(|feed| feed.answered());
    wait("both go on", || {
        first.answered() > before[0] + 100 && third.answered() > before[1] + 100
    });
    wait("they have a thread each", || {
        *first.thread.lock() != *third.thread.lock()
    });
    for id in [&first_id, &third_id] {
        rig.backend.detach(id);
    }
    wait("the ends", || {
        first.has_ended_well() && third.has_ended_well()
    });
    assert_eq!(rig.backend.lanes(), [0, 0]);
}

/// Lets random lanes move while `body` runs.
fn while_lanes_move(backend: &Backend, seed: u64, body: impl FnOnce(&mut fastrand::Rng)) {
    let stop = AtomicBool::new(false);
    let workers = backend.lanes().len();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = fastrand::Rng::with_seed(seed);
            while !stop.load(Ordering::Relaxed) {
                let [from, to] = [(); 2].map(|()| rng.usize(..workers));
                backend.move_a_lane(from, to);
                std::thread::yield_now();
            }
        });
        // Also if it panics.
        let _stop = Stop(&stop);
        body(&mut fastrand::Rng::with_seed(!seed));
    });
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_wake_finds_a_lane_wherever_it_goes() {
    for seed in pvblk_testing::seeds(5, 4) {
        let rig = rig(3);
        let lanes: Vec<_> = (0..6).map(|_| rig.attach()).collect();
        let mut sent = [0; 6];
        while_lanes_move(&rig.backend, seed, |rng| {
            for round in 0..300 {
                for _ in 0..rng.usize(1..20) {
                    let lane = rng.usize(..lanes.len());
                    lanes[lane].0.send();
                    sent[lane] += 1;
                }
                let is_done = || {
                    let mut lanes = lanes.iter().zip(sent);
                    lanes.all(|((feed, _), n)| feed.answered() == n)
                };
                wait(&format!("seed {seed}: answers of round {round}"), is_done);
            }
        });
    }
}

#[test]
fn a_stop_finds_a_lane_wherever_it_goes() {
    for seed in pvblk_testing::seeds(5, 4) {
        let rig = rig(3);
        while_lanes_move(&rig.backend, seed, |rng| {
            for round in 0..500 {
                let lanes: Vec<_> = (0..rng.usize(1..5)).map(|_| rig.attach()).collect();
                lanes.iter().for_each(|(feed, _)| feed.send());
                let text = format!("seed {seed}, round {round}");
                wait(&text, || lanes.iter().all(|(feed, _)| feed.answered() == 1));
                lanes.iter().for_each(|(_, id)| rig.backend.detach(id));
                wait(&text, || {
                    lanes.iter().all(|(feed, _)| feed.has_ended_well())
                });
            }
        });
        assert_eq!(rig.backend.lanes(), [0; 3], "seed {seed}");
    }
}

#[test]
fn a_back_end_that_ends_while_lanes_move_ends_each_once() {
    for _ in 0..50 {
        let rig = rig(3);
        let lanes: Vec<_> = (0..6).map(|_| rig.attach()).collect();
        lanes.iter().for_each(|(feed, _)| feed.send());
        for n in 0..30 {
            rig.backend.move_a_lane(n % 3, (n + 1) % 3);
        }
        drop(rig);
        for (feed, _) in &lanes {
            assert!(feed.has_ended_well(), "{:?}", feed.ends.lock());
            // Nobody has it any more.
            feed.waker.lock().take().expect("it was bound").wake();
        }
    }
}
