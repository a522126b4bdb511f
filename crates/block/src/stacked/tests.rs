//! Tests of the parts on the machine's own primitives; tests/loom.rs has the models.

use super::*;
use crate::{
    BlockDevice, Capabilities, Completion, DeviceQueue, Error, EventHub, Limits, Op, QueueContext,
    Readiness, Request, Status, SystemClock,
};
use parking_lot::Mutex;
use pvblk_sys::Poller;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(60);

/// A device that ends a request when the test says so.
#[derive(Default)]
struct Slow {
    events: EventHub,
    at_device: Arc<Mutex<VecDeque<Box<Request>>>>,
    may_end: Arc<Mutex<usize>>,
}

struct SlowQueue(Arc<Mutex<VecDeque<Box<Request>>>>, Arc<Mutex<usize>>);

impl BlockDevice for Slow {
    fn describe(&self) -> String {
        "slow".into()
    }
    fn limits(&self) -> Limits {
        Limits::default()
    }
    fn capacity_sectors(&self) -> u64 {
        8
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let (at_device, may_end) = (Arc::clone(&self.at_device), Arc::clone(&self.may_end));
        Ok(Box::new(SlowQueue(at_device, may_end)))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

impl DeviceQueue for SlowQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.0.lock().extend(batch.drain(..));
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        let mut may_end = self.1.lock();
        while *may_end > 0
            && let Some(request) = self.0.lock().pop_front()
        {
            *may_end -= 1;
            out.push(Completion {
                request,
                status: Status::Ok,
            });
        }
    }
    fn arm(&mut self) -> Readiness {
        match *self.1.lock() > 0 {
            true => Readiness::Ready,
            false => Readiness::Wait(None),
        }
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

fn lower(depth: u32) -> (Arc<Slow>, LowerQueue) {
    let slow = Arc::new(Slow::default());
    let device: Arc<dyn BlockDevice> = slow.clone();
    let lower = LowerQueue::open(&device, &QueueContext::new(depth)).unwrap();
    (slow, lower)
}

fn flush(tag: u64) -> Box<Request> {
    Request::new(Op::Flush, 0, 0, tag)
}

#[test]
fn a_lower_queue_keeps_to_its_depth_and_to_the_order() {
    let (slow, mut lower) = lower(2);
    (0..5).for_each(|tag| lower.push(flush(tag)));
    lower.submit();
    assert_eq!((slow.at_device.lock().len(), lower.in_flight()), (2, 5));
    let (mut out, mut left) = (Vec::new(), 5);
    while left > 0 {
        *slow.may_end.lock() = 1;
        assert_eq!(lower.arm(), Readiness::Ready);
        assert_eq!(lower.poll(&mut out), 1);
        left -= 1;
        assert_eq!(lower.in_flight(), left);
        assert_eq!(
            slow.at_device.lock().len(),
            left.min(2),
            "at most its depth"
        );
    }
    let tags: Vec<u64> = out.iter().map(|c| c.request.tag).collect();
    assert_eq!(tags, [0, 1, 2, 3, 4]);
    assert!(lower.is_idle());
}

#[test]
fn who_gives_io_to_an_idle_lower_queue_is_told_so() {
    let (slow, lower) = lower(2);
    let shared = SharedLowerQueue::<Native>::new(lower);
    assert!(shared.submit([flush(0), flush(1), flush(2)].into_iter()));
    assert!(!shared.submit([flush(3)].into_iter()));
    assert_eq!(shared.in_flight(), 4);
    *slow.may_end.lock() = 3;
    let mut out = Vec::new();
    // Completions are taken as long as the device says that there may be some.
    assert!(shared.poll_unattended(&mut out));
    assert_eq!((out.len(), shared.in_flight()), (3, 1));
    *slow.may_end.lock() = 1;
    shared.poll(&mut out);
    assert!(shared.is_idle());
    assert!(shared.submit([flush(4)].into_iter()));
    *slow.may_end.lock() = 1;
    shared.poll(&mut out);
}

/// Another thread has it for a moment, perhaps to wait for it after its wake-up was taken: whoever comes by has neither polled nor armed it.
#[test]
fn a_lower_queue_that_another_has_was_not_polled() {
    let (slow, lower) = lower(2);
    let shared = SharedLowerQueue::<Native>::new(lower);
    shared.submit([flush(0)].into_iter());
    *slow.may_end.lock() = 1;
    let mut out = Vec::new();
    let passes_by = std::iter::once_with(|| {
        assert!(!shared.poll_unattended(&mut out));
        flush(1)
    });
    shared.submit(passes_by);
    assert!(out.is_empty());
    assert!(shared.poll_unattended(&mut out));
    assert_eq!(out.len(), 1);
    *slow.may_end.lock() = 1;
    shared.poll(&mut out);
}

/// A device is always ready and has no completion: a poll gives up, and says so.
#[test]
fn a_device_that_is_never_done_being_ready_does_not_hold_up_who_polls_it() {
    struct Liar(EventHub);
    struct LiarQueue(Vec<Box<Request>>);
    impl BlockDevice for Liar {
        fn describe(&self) -> String {
            "liar".into()
        }
        fn limits(&self) -> Limits {
            Limits::default()
        }
        fn capacity_sectors(&self) -> u64 {
            8
        }
        fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
            Ok(Box::new(LiarQueue(Vec::new())))
        }
        fn events(&self) -> &EventHub {
            &self.0
        }
        fn capabilities(&self) -> Capabilities<'_> {
            Capabilities::none()
        }
    }
    impl DeviceQueue for LiarQueue {
        fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
            self.0.append(batch);
        }
        fn poll(&mut self, _: &mut Vec<Completion>) {}
        fn arm(&mut self) -> Readiness {
            Readiness::Ready
        }
        fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }
    let device: Arc<dyn BlockDevice> = Arc::new(Liar(EventHub::default()));
    let lower = LowerQueue::open(&device, &QueueContext::new(1)).unwrap();
    let shared = SharedLowerQueue::<Native>::new(lower);
    shared.submit([flush(0)].into_iter());
    assert!(!shared.poll_unattended(&mut Vec::new()));
}

struct StackedQueue(CompletionQueue<Vec<u32>>, SharedLowerQueue);

impl Neighbour for StackedQueue {
    type Entries = Vec<u32>;
    fn completions(&self) -> &CompletionQueue<Vec<u32>> {
        &self.0
    }
    fn lower(&self) -> Option<&SharedLowerQueue> {
        Some(&self.1)
    }
}

fn place() -> (Arc<Slow>, Arc<StackedQueue>) {
    let (slow, lower) = lower(4);
    let place = StackedQueue(
        CompletionQueue::new().unwrap(),
        SharedLowerQueue::new(lower),
    );
    (slow, Arc::new(place))
}

#[test]
fn a_number_is_free_when_nothing_is_left_of_its_queue() {
    let table = QueueTable::<StackedQueue>::default();
    let ((_, first), (slow, second), (_, third)) = (place(), place(), place());
    assert_eq!((table.open(&first), table.open(&second)), (0, 1));
    second.1.attend();
    second.1.submit([flush(0)].into_iter());
    assert!(table.unattended(0).is_empty(), "its owner looks after it");
    table.close(1);
    assert!(table.get(1).is_none());
    assert_eq!(table.unattended(0).len(), 1, "now others do");
    assert_eq!(table.open(&third), 2);
    table.close(0);
    assert_eq!(table.open(&first), 0);
    *slow.may_end.lock() = 1;
    second.1.poll(&mut Vec::new());
    assert_eq!(table.open(&place().1), 1);
}

#[test]
fn a_post_is_one_for_each_queue_and_wakes_those_that_sleep() {
    let table = QueueTable::<StackedQueue>::default();
    let places: Vec<_> = (0..3).map(|_| place().1).collect();
    places.iter().for_each(|p| {
        table.open(p);
    });
    let entry = |n: usize| places[n].0.wait();
    table.prepare_to_wait(entry(1));
    let mut posts = Vec::new();
    table.post(&mut vec![2, 1, 2, 7, 1], |number, _, all| {
        posts.push(number);
        all.push(number as u32);
    });
    assert_eq!(
        posts,
        [1, 2],
        "each once, and nothing for one that isn't there"
    );
    assert!(entry(1).event().drain(), "it sleeps");
    assert!(!entry(2).event().drain(), "it will look");
    let take = |n: usize| {
        let mut got = Vec::new();
        places[n].0.collect(|all| got.append(all));
        got
    };
    assert_eq!((take(0), take(1), take(2)), (vec![], vec![1], vec![2]));
    table.wake_sleepers(0);
    assert!(entry(1).event().drain() && !entry(2).event().drain());
    table.finish_wait(entry(1));
    table.wake_sleepers(0);
    assert!(!entry(1).event().drain(), "it is awake");
}

/// Reports each step to the test, and gets the result from it.
struct Steps {
    steps: Sender<()>,
    due: Receiver<Due>,
}

impl Background for Steps {
    fn step(&mut self) -> Due {
        let _ = self.steps.send(());
        self.due.recv().unwrap_or(Due::Never)
    }
    fn arm(&mut self, _: &Poller) -> io::Result<Due> {
        Ok(Due::Never)
    }
    fn woken(&mut self) {}
}

#[test]
fn a_background_thread_steps_when_it_is_due_and_when_it_is_woken() {
    let (steps, stepped) = channel();
    let (dues, due) = channel();
    let wait = Arc::new(WaitEntry::new().unwrap());
    let work = Steps { steps, due };
    let thread = BackgroundThread::start("t", &wait, Arc::new(SystemClock), work).unwrap();
    let step = || stepped.recv_timeout(HANG).expect("a step");
    step();
    dues.send(Due::Now).unwrap();
    step();
    dues.send(Due::At(Instant::now() + Duration::from_millis(1)))
        .unwrap();
    step();
    // The thread is woken while it is at work, and while it sleeps.
    thread.wake();
    dues.send(Due::Never).unwrap();
    step();
    dues.send(Due::Never).unwrap();
    let begin = Instant::now();
    while !wait.is_sleeping() {
        assert!(begin.elapsed() < HANG, "it never sleeps");
        std::thread::yield_now();
    }
    thread.wake();
    step();
    // The thread ends also when nothing is due.
    dues.send(Due::Never).unwrap();
    // The thread may have woken once more than it had to, and then waits for this.
    drop(dues);
    drop(thread);
}

#[test]
fn the_earlier_of_two_times() {
    let now = Instant::now();
    let later = now + HANG;
    for (a, b, earlier) in [
        (Due::At(now), Due::At(later), Due::At(now)),
        (Due::Never, Due::At(later), Due::At(later)),
        (Due::Never, Due::Never, Due::Never),
        (Due::Now, Due::At(now), Due::Now),
        (Due::Now, Due::Never, Due::Now),
    ] {
        assert_eq!((a.earlier(b), b.earlier(a)), (earlier, earlier));
    }
}

#[test]
fn the_last_wait_is_bounded() {
    let mut left = 3;
    let ended = finish_within(HANG, || {
        left -= 1;
        (left > 0).then_some(left == 1)
    });
    assert!(ended && left == 0);
    assert!(!finish_within(Duration::from_millis(1), || Some(false)));
    assert!(!finish_within(Duration::from_millis(1), || Some(true)));
}
