//! A lane that copies much leaves the worker's others their turn: counted in its requests, not in time.

mod support;

use parking_lot::Mutex;
use pvblk_backend::{Backend, BackendOptions, Disk, Pulled, RequestSource, SourceEnd};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, DeviceQueue, Error, EventHub, Limits, Op,
    QueueContext, Readiness, Request, RequestFlags, Status,
};
use pvblk_testing::wait;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use support::source::{Feed, source};

/// Completes everything in the next poll.
#[derive(Default)]
struct Instantly(EventHub);

#[derive(Default)]
struct InstantQueue(Vec<Completion>);

impl BlockDevice for Instantly {
    fn describe(&self) -> String {
        "instantly".into()
    }
    fn limits(&self) -> Limits {
        Limits::default()
    }
    fn capacity_sectors(&self) -> u64 {
        1 << 20
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::<InstantQueue>::default())
    }
    fn events(&self) -> &EventHub {
        &self.0
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

impl DeviceQueue for InstantQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.0.extend(batch.drain(..).map(|request| Completion {
            request,
            status: Status::Ok,
        }));
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.0);
    }
    fn arm(&mut self) -> Readiness {
        match self.0.is_empty() {
            true => Readiness::Wait(None),
            false => Readiness::Ready,
        }
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Counts that several greedy sources of one disk share, all on one worker's thread.
struct Count {
    other: Feed,
    asked: usize,
    rung_at: Option<usize>,
    rounds: usize,
    longest: usize,
    company: bool,
}

/// Always has one more write of 256 KiB. Now and then, in its own call, it gives the other disk's source, which sleeps, a write; and it counts
/// for how many requests the worker asks until it pulls that one.
struct Greedy {
    data: Buffer,
    count: Arc<Mutex<Count>>,
}

const ROUNDS: usize = 50;

impl RequestSource for Greedy {
    fn describe(&self) -> String {
        "greedy".into()
    }
    fn depth(&self) -> u32 {
        4
    }
    fn pull(&mut self, _: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let mut count = self.count.lock();
        count.asked += 1;
        match count.rung_at {
            Some(at) if count.other.pulled() > count.rounds => {
                count.longest = count.longest.max(count.asked - at);
                count.rounds += 1;
                count.rung_at = None;
            }
            // Not a divisor of how often the worker looks.
            None if count.asked.is_multiple_of(1009) && count.rounds < ROUNDS => {
                count.rung_at = Some(count.asked);
                count.other.write(1, RequestFlags::empty());
            }
            _ => {}
        }
        drop(count);
        let buffers = vec![self.data.clone()];
        out.push(Request::with_buffers(Op::Write, 0, buffers, 0));
        Ok(Pulled::default())
    }
    fn complete(&mut self, done: &mut Vec<Completion>) {
        done.clear();
    }
    fn push(&mut self) -> Result<usize, SourceEnd> {
        Ok(0)
    }
    fn in_company(&mut self, company: bool) {
        self.count.lock().company |= company;
    }
    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Number of requests of `lanes` greedy sources of one disk that came before a neighbour's that
/// slept.
fn longest_wait(lanes: usize) -> usize {
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        spin_max: Duration::ZERO,
        pin: Vec::new(),
    })
    .unwrap();
    let disk = |name: &str| Disk::new(name, Arc::new(Instantly::default()), Tracing::off());
    let (feed, quiet) = source(4);
    backend
        .attach(&disk("quiet"), quiet, Box::new(|_| {}))
        .unwrap();
    let count = Arc::new(Mutex::new(Count {
        other: feed.clone(),
        asked: 0,
        rung_at: None,
        rounds: 0,
        longest: 0,
        company: false,
    }));
    let greedy = disk("greedy");
    for _ in 0..lanes {
        let source = Greedy {
            data: Buffer::anonymous(256 << 10).unwrap(),
            count: Arc::clone(&count),
        };
        backend
            .attach(&greedy, Box::new(source), Box::new(|_| {}))
            .unwrap();
    }
    wait("all rounds", || count.lock().rounds == ROUNDS);
    wait("its answers", || feed.answered() == ROUNDS);
    let count = count.lock();
    assert!(count.company, "nobody was told of the company");
    count.longest
}

#[test]
fn a_sleeping_neighbour_is_heard_after_few_long_requests() {
    let longest = longest_wait(1);
    assert!(longest <= 4, "{longest} requests of 256 KiB were first");
}

#[test]
fn many_lanes_of_a_disk_have_one_turn_together() {
    let longest = longest_wait(32);
    assert!(longest <= 4, "{longest} requests of 256 KiB were first");
}
