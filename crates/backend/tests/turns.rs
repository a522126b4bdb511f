//! A lane that copies much leaves the worker's others their turn: counted in its requests, not in time.

mod support;

use parking_lot::Mutex;
use pvblk_backend::{Backend, BackendOptions, Disk, Pulled, RequestSource, SourceEnd};
use pvblk_block::trace::Tracing;
use pvblk_block::{Buffer, Completion, Op, Readiness, Request, RequestFlags, SECTOR};
use pvblk_testing::wait;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use support::instantly::Instantly;
use support::source::{Feed, source};

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

fn instant_disk(name: &str) -> Disk {
    Disk::new(name, Arc::new(Instantly::default()), Tracing::off())
}

/// A back end of one worker, with one lane that sleeps, as in most servers, and the end that wakes it.
fn beside_a_sleeper() -> (Backend, Feed) {
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        spin_max: Duration::ZERO,
        ..BackendOptions::default()
    })
    .unwrap();
    let (feed, quiet) = source(4);
    backend
        .attach(&instant_disk("quiet"), quiet, Box::new(|_| {}))
        .unwrap();
    (backend, feed)
}

/// Number of requests of greedy sources, `lanes` of each of `disks` disks, that came before a neighbour's that
/// slept.
fn longest_wait(lanes: usize, disks: usize) -> usize {
    let (backend, feed) = beside_a_sleeper();
    let count = Arc::new(Mutex::new(Count {
        other: feed.clone(),
        asked: 0,
        rung_at: None,
        rounds: 0,
        longest: 0,
        company: false,
    }));
    for number in 0..disks {
        let greedy = instant_disk(&format!("greedy {number}"));
        for _ in 0..lanes {
            let source = Greedy {
                data: Buffer::anonymous(256 << 10).unwrap(),
                count: Arc::clone(&count),
            };
            backend
                .attach(&greedy, Box::new(source), Box::new(|_| {}))
                .unwrap();
        }
    }
    wait("all rounds", || count.lock().rounds == ROUNDS);
    wait("its answers", || feed.answered() == ROUNDS);
    let count = count.lock();
    assert!(count.company, "nobody was told of the company");
    count.longest
}

#[test]
fn a_sleeping_neighbour_is_heard_after_few_long_requests() {
    let longest = longest_wait(1, 1);
    assert!(longest <= 4, "{longest} requests of 256 KiB were first");
}

#[test]
fn many_lanes_of_a_disk_have_one_turn_together() {
    let longest = longest_wait(32, 1);
    assert!(longest <= 4, "{longest} requests of 256 KiB were first");
}

#[test]
fn greedy_lanes_of_many_disks_leave_one_that_slept_its_turn() {
    let longest = longest_wait(4, 8);
    assert!(longest <= 4, "{longest} requests of 256 KiB were first");
}

/// The parts of a worker's time that disks had: sectors of data, and 8 for each request. Kept by the worker's own thread.
#[derive(Default)]
struct Costs {
    now: [u64; 3],
    /// When all had begun.
    from: Option<[u64; 3]>,
    /// After many turns.
    until: Option<[u64; 3]>,
}

impl Costs {
    fn add(&mut self, disk: usize, cost: u64) {
        self.now[disk] += cost;
        if self.from.is_none() && self.now.iter().all(|&n| n > 0) {
            self.from = Some(self.now);
        }
        let sum = |costs: &[u64; 3]| costs.iter().sum::<u64>();
        let turns = self.from.map(|from| (sum(&self.now) - sum(&from)) / 512);
        if self.until.is_none() && turns.is_some_and(|t| t > 6000) {
            self.until = Some(self.now);
        }
    }
}

/// Always has as many requests of this size.
struct Steady {
    disk: usize,
    data: Buffer,
    requests: usize,
    flags: RequestFlags,
    costs: Arc<Mutex<Costs>>,
}

impl RequestSource for Steady {
    fn describe(&self) -> String {
        "steady".into()
    }
    fn depth(&self) -> u32 {
        32
    }
    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let count = self.requests.min(room);
        for _ in 0..count {
            let buffers = vec![self.data.clone()];
            let mut request = Request::with_buffers(Op::Write, 0, buffers, 0);
            request.flags = self.flags;
            out.push(request);
        }
        let one = self.data.len() as u64 / SECTOR + 8;
        let cost = match self.flags {
            RequestFlags::PARTIAL => 2 * one,
            RequestFlags::PREFLUSH => one + 8,
            RequestFlags::BARRIER => one + 16,
            _ => one,
        };
        self.costs.lock().add(self.disk, count as u64 * cost);
        Ok(Pulled {
            ordered: !self.flags.is_empty(),
            answered: 0,
        })
    }
    fn complete(&mut self, done: &mut Vec<Completion>) {
        done.clear();
    }
    fn push(&mut self) -> Result<usize, SourceEnd> {
        Ok(0)
    }
    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Bytes of a request, requests in a pull, lanes, flags of the requests.
type Load = (usize, usize, usize, RequestFlags);

fn share_evenly(disks: [Load; 3]) {
    let (backend, _feed) = beside_a_sleeper();
    let costs = Arc::<Mutex<Costs>>::default();
    for (number, (bytes, requests, lanes, flags)) in disks.into_iter().enumerate() {
        let disk = instant_disk(&format!("{number}"));
        for _ in 0..lanes {
            let source = Steady {
                disk: number,
                data: Buffer::anonymous(bytes).unwrap(),
                requests,
                flags,
                costs: Arc::clone(&costs),
            };
            backend
                .attach(&disk, Box::new(source), Box::new(|_| {}))
                .unwrap();
        }
    }
    wait("many turns", || costs.lock().until.is_some());
    let costs = costs.lock();
    let (Some(from), Some(until)) = (costs.from, costs.until) else {
        panic!("they have begun");
    };
    let had = [0, 1, 2].map(|i| (until[i] - from[i]) as f64);
    let all: f64 = had.iter().sum();
    for one in had {
        assert!((0.30..0.37).contains(&(one / all)), "{had:?}");
    }
}

#[test]
fn disks_share_a_worker_by_requests_and_bytes() {
    let none = RequestFlags::empty();
    share_evenly([
        (256 << 10, 1, 1, none),
        (4096, 8, 1, none),
        (512, 1, 3, none),
    ]);
}

/// The back end makes several requests of each of them.
#[test]
fn requests_that_need_an_order_count_as_others_do() {
    let none = RequestFlags::empty();
    for flag in [
        RequestFlags::PARTIAL,
        RequestFlags::PREFLUSH,
        RequestFlags::BARRIER,
    ] {
        share_evenly([(4096, 8, 1, none), (512, 4, 1, flag), (512, 1, 3, none)]);
    }
    // They aren't cut in parts, so one is longer than a turn.
    let barrier = RequestFlags::BARRIER;
    share_evenly([
        (4096, 8, 1, none),
        (1 << 20, 1, 1, barrier),
        (512, 1, 3, none),
    ]);
}
