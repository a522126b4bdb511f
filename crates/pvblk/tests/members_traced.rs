//! The time that requests to an array spend at its members, by the members' names. The delays are made by a device with a clock of its own, and times are compared
//! with its sum within one run.

use parking_lot::Mutex;
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, Decorator, DeviceQueue, Error, EventHub,
    Forwards, Op, Queue, QueueContext, Readiness, Request, Status,
};
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, Consistency, CreateOptions, Raid5, assemble, create, prepare,
    sleepy,
};
use pvblk_trace::latency::{Analyzer, Part, Path, Paths};
use pvblk_trace::{Device, Recorder};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A device that answers late, and knows how late.
struct Late {
    inner: Arc<dyn BlockDevice>,
    delay: Duration,
    /// Times of the requests since the last look, from their submission to their completion.
    took: Arc<Mutex<Duration>>,
    events: EventHub,
}

struct LateQueue {
    inner: Box<dyn DeviceQueue>,
    delay: Duration,
    took: Arc<Mutex<Duration>>,
    begun: Vec<(u64, Instant)>,
    done: Vec<Completion>,
}

impl Decorator for Late {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn describe(&self) -> String {
        "late".into()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(LateQueue {
            inner: self.inner.open_device_queue(context)?,
            delay: self.delay,
            took: Arc::clone(&self.took),
            begun: Vec::new(),
            done: Vec::new(),
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

impl DeviceQueue for LateQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let now = Instant::now();
        self.begun.extend(batch.iter().map(|r| (r.tag, now)));
        self.inner.submit(batch);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.inner.poll(&mut self.done);
        let mut at = 0;
        while at < self.done.len() {
            let tag = self.done[at].request.tag;
            let found = self.begun.iter().position(|(of, _)| *of == tag);
            let found = found.expect("a request that was submitted");
            let took = self.begun[found].1.elapsed();
            if took < self.delay {
                at += 1;
                continue;
            }
            self.begun.swap_remove(found);
            *self.took.lock() += took;
            out.push(self.done.swap_remove(at));
        }
    }

    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Sums of a path: by member and part of the path, in nanoseconds.
fn sums(path: &Path) -> BTreeMap<(Device, &'static str), f64> {
    let mut sums = BTreeMap::new();
    for hop in &path.hops {
        let part = match hop.part {
            Part::Get | Part::Wait => "waits",
            Part::Down(_) => "down",
            Part::Work | Part::Answer => "works",
            Part::Up(_) => "up",
        };
        *sums.entry((hop.device, part)).or_default() += hop.times.sum_ns() as f64;
    }
    sums
}

/// Runs in which the machine was busy with something else, at most.
const BUSY: usize = 10;

/// Errors if the times aren't where they should be.
fn blamed(consistency: Consistency, late: usize, op: Op) -> Result<(), String> {
    let took: Arc<Mutex<Duration>> = Arc::default();
    let member = |n: usize| -> Arc<dyn BlockDevice> {
        let inner = pvblk_volume::open("mem:8M").expect("a volume");
        match n == late {
            false => inner,
            true => Arc::new(Late {
                inner,
                delay: Duration::from_millis(4),
                took: Arc::clone(&took),
                events: EventHub::default(),
            }),
        }
    };
    let names = ["a", "b", "c"];
    let all = (0..3).map(|n| (names[n].to_owned(), member(n)));
    let all: Vec<(String, Arc<dyn BlockDevice>)> = all.collect();
    let mut options = CreateOptions::new("test:0");
    options.chunk_sectors = 8;
    options.consistency = consistency;
    options.assume_clean = true;
    create(all.clone(), &options, &mut sleepy()).expect("an array");
    let options = AssembleOptions::default();
    let mut assembly = assemble(all, &options, &mut sleepy()).expect("its members");
    prepare(&mut assembly, &options, &mut |_, _| {}, &mut sleepy()).expect("its parity");
    let options = ArrayOptions::default();
    let array = Raid5::start(assembly, &options).expect("an array");
    array.keep().expect("a thread");
    let device: Arc<dyn BlockDevice> = array;

    let recorder = Arc::new(Recorder::new(1 << 16));
    let collector = recorder.collector();
    let mut context = QueueContext::new(8);
    context.tracing = Tracing::to(recorder, "vm");
    let mut queue = Queue::open(&device, &context).expect("a queue");
    let mut request = |sector: u64| {
        let buffer = Buffer::anonymous(4096).expect("memory");
        let request = Request::with_buffers(op, sector, vec![buffer], sector);
        queue.submit(&mut vec![request]);
        let mut done = Vec::new();
        while done.is_empty() {
            queue.poll(&mut done);
        }
        assert_eq!(done[0].status, Status::Ok);
    };
    // The superblocks say dirty from the first write on, and chunks of the private map, 64 KiB of each member, are marked.
    (0..150 * 8).step_by(128).for_each(&mut request);
    *took.lock() = Duration::ZERO;
    let mut events = Vec::new();
    collector.drain(&mut events);
    events.clear();
    // Each block in turn, so that all members are data, parity and neither.
    (0..150).for_each(|n| request(n * 8));
    collector.drain(&mut events);
    let took = *took.lock();
    events.sort_by_key(|e| (e.time_ns, e.action));
    let mut paths = Paths::default();
    let devices = collector.devices();
    for (device, name) in &devices {
        paths.name(*device, name);
    }
    let report = Analyzer::run(&events, |life| paths.life(life));
    let named = |name: &str| devices.iter().find(|d| d.1 == name).expect(name).0;
    for name in ["vm/raid5", "vm/[a]", "vm/[b]", "vm/[c]"] {
        let of = &report.devices[&named(name)];
        assert_eq!((of.unmatched, of.unfinished), (0, 0), "{name}");
    }
    let found = paths.take();
    let path = &found[&named("vm/raid5")];
    assert_eq!(path.total.count() as u64 + path.alone, 150);
    assert_eq!(path.alone, 0);
    let sums = sums(path);
    let total = path.total.sum_ns() as f64;
    // All hops together are the whole time.
    let all: f64 = sums.values().sum();
    assert!((all / total - 1.0).abs() < 1e-9, "{all} of {total}");
    let of = |n: usize| {
        let device = named(&format!("vm/[{}]", names[n]));
        let parts = ["waits", "works"];
        let sum = |part: &&str| sums.get(&(device, *part)).copied().unwrap_or(0.0);
        parts.iter().map(sum).sum::<f64>()
    };
    let own = took.as_nanos() as f64;
    assert!(own > 0.1e9, "the member was asked for {own} ns");
    let text = format!("{consistency:?} {op:?}, member {late}: {sums:?}, own clock {own}");
    let right = (of(late) / own - 1.0).abs() < 0.02;
    let mut others = (0..3).filter(|n| *n != late);
    match right && others.all(|other| of(other) < own * 0.02) {
        true => Ok(()),
        false => Err(text),
    }
}

/// The clock is the machine's: a thread that loses its CPU makes another member late as well. A mistake of ours would be in each run.
fn check(consistency: Consistency, late: usize, op: Op) {
    let mut why = String::new();
    for _ in 0..BUSY {
        match blamed(consistency, late, op) {
            Ok(()) => return,
            Err(text) => why = text,
        }
    }
    panic!("{why}");
}

#[test]
fn a_delay_is_blamed_on_the_member_that_makes_it() {
    for late in 0..3 {
        for consistency in [Consistency::Resync, Consistency::Ppl] {
            check(consistency, late, Op::Write);
        }
        check(Consistency::Resync, late, Op::Read);
    }
}
