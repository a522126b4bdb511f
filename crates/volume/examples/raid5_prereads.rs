//! Counts the reads of an array from its members for parity, while a trace of writes is replayed:
//! `cargo run --release -p pvblk-volume --example raid5_prereads -- tests/e2e/data/ext4.trace`.
//!
//! The array has four members in memory, 64 MiB each, with chunks of 64 KiB. Their speed is that of `--disk`
//! (the MODEL of `delay:MODEL:`), in a time that passes only while all requests wait: the same figures come
//! out each time.
//!
//! `--on SPEC` replays to any volume, by the same rules; its reads have to be counted elsewhere.
//!
//! A line of a trace is `W SECTOR SECTORS`, `F` (flush), or a comment that begins with `#`. A request follows as soon as an
//! earlier one is done; those that can go at once go as one batch.

use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Op,
    Queue, QueueContext, Readiness, Request, RequestFlags, SECTOR, Status,
};
use pvblk_raid5::{
    ArrayOptions, Assembly, BackgroundWork, Consistency, Layout, Member, NewArray, Raid5, WritePath,
};
use pvblk_sys::Poller;
use pvblk_volume::{Clock, DelayVolume, ManualClock, VolumeSpec};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MEMBERS: usize = 4;
const MEMBER_SECTORS: u64 = 64 << 11;
const USAGE: &str = "usage: raid5_prereads TRACE [--depth N]... [--disk MODEL]... [--stripes N] [--path PATH] [--on SPEC]";

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A line of a trace; no sectors: a flush.
#[derive(Clone, Copy)]
struct Line {
    sector: u64,
    sectors: u64,
}

fn parse(text: &str) -> Option<Line> {
    let mut words = text.split_whitespace();
    let (sector, sectors) = match words.next()? {
        "F" => (0, 0),
        "W" => (words.next()?.parse().ok()?, words.next()?.parse().ok()?),
        _ => return None,
    };
    words.next().is_none().then_some(Line { sector, sectors })
}

fn read_trace(path: &str) -> Outcome<Vec<Line>> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let lines = text.lines().filter(|l| !l.starts_with('#'));
    lines
        .map(|l| parse(l).ok_or_else(|| format!("{path}: {l:?} is no request").into()))
        .collect()
}

/// Reads of all members together.
#[derive(Default)]
struct Reads {
    sectors: AtomicU64,
    requests: AtomicU64,
}

/// A member that counts its reads.
struct Counted {
    inner: Arc<dyn BlockDevice>,
    reads: Arc<Reads>,
}

struct CountedQueue {
    inner: Box<dyn DeviceQueue>,
    reads: Arc<Reads>,
}

impl Decorator for Counted {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(CountedQueue {
            inner: self.inner.open_device_queue(context)?,
            reads: Arc::clone(&self.reads),
        }))
    }
    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

impl DeviceQueue for CountedQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        for request in batch.iter().filter(|r| r.op == Op::Read) {
            let (sectors, requests) = (&self.reads.sectors, &self.reads.requests);
            sectors.fetch_add(request.sectors, Ordering::Relaxed);
            requests.fetch_add(1, Ordering::Relaxed);
        }
        self.inner.submit(batch);
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.inner.poll(out);
    }
    fn arm(&mut self) -> Readiness {
        self.inner.arm()
    }
    fn woken(&mut self) {
        self.inner.woken();
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}

/// An array of members that are all zeros, so that parity is right from the start.
fn array(
    model: &str,
    stripes: usize,
    path: WritePath,
    clock: &Arc<ManualClock>,
    reads: &Arc<Reads>,
) -> Outcome<Arc<dyn BlockDevice>> {
    let created = NewArray {
        set_uuid: [7; 16],
        name: "prereads:0",
        created_secs: 1,
        layout: Layout::LeftSymmetric,
        chunk_sectors: 128,
        device_sectors: &[MEMBER_SECTORS; MEMBERS],
        size_sectors: None,
        consistency: Consistency::Resync,
        checksums: false,
        clean: true,
    }
    .build()?;
    let spec = format!("delay:{model}:mem:{}", MEMBER_SECTORS * SECTOR).parse()?;
    let VolumeSpec::Delay(delay, memory) = spec else {
        return Err(format!("{model} is no model of a disk").into());
    };
    let mut members = Vec::new();
    for i in 0..MEMBERS {
        let clock = Arc::clone(clock);
        let slow = DelayVolume::with_clock(&delay, memory.open()?, clock)?;
        members.push(Some(Member {
            device: Arc::new(Counted {
                inner: Arc::new(slow),
                reads: Arc::clone(reads),
            }),
            name: format!("m{i}"),
            superblock: created.superblock(i, [i as u8; 16]),
        }));
    }
    let assembly = Assembly::new(created.geometry(), members, false);
    let options = ArrayOptions {
        stripes,
        path,
        ..ArrayOptions::default()
    };
    let array = Raid5::start(assembly, &options)?;
    write_first(&array, clock)?;
    // The block's old data and parity.
    reads.sectors.store(0, Ordering::Relaxed);
    reads.requests.store(0, Ordering::Relaxed);
    Ok(array)
}

/// Writes zeros to the first block, so that superblocks say dirty from then on.
fn write_first(array: &Arc<Raid5>, clock: &ManualClock) -> Outcome<()> {
    let device: Arc<dyn BlockDevice> = array.clone();
    let mut background = BackgroundWork::new(array);
    let mut queue = Queue::open(&device, &QueueContext::new(1))?;
    let buffers = vec![Buffer::anonymous(4096)?];
    queue.submit(&mut vec![Request::with_buffers(Op::Write, 0, buffers, 0)]);
    let mut idle = || {
        clock.advance(Duration::from_millis(1));
        Ok(())
    };
    while queue.poll(&mut Vec::new()) == 0 {
        background.work_with(&|| Duration::ZERO, &mut idle);
        idle()?;
    }
    Ok(())
}

/// Replays a trace with `depth` requests in flight; `wait` is called when nothing else can be done.
fn replay(
    device: &Arc<dyn BlockDevice>,
    trace: &[Line],
    depth: usize,
    mut wait: impl FnMut(&mut Queue, Option<Instant>) -> Outcome<()>,
) -> Outcome<()> {
    let mut queue = Queue::open(device, &QueueContext::new(depth as u32))?;
    let longest = trace.iter().map(|l| l.sectors).max().unwrap_or(0).max(1);
    // The written data doesn't matter, so all writes may have the same.
    let data = Buffer::anonymous((longest * SECTOR) as usize)?;
    let mut free: Vec<_> = (0..depth)
        .map(|_| Request::new(Op::Flush, 0, 0, 0))
        .collect();
    let (mut batch, mut done) = (Vec::new(), Vec::<Completion>::new());
    let mut lines = trace.iter().enumerate().peekable();
    while lines.peek().is_some() || queue.in_flight() > 0 {
        while let Some(mut request) = free.pop() {
            let Some((n, line)) = lines.next() else { break };
            let op = if line.sectors == 0 {
                Op::Flush
            } else {
                Op::Write
            };
            let flags = RequestFlags::empty();
            request.reset(op, flags, line.sector, line.sectors, n as u64);
            request.buffers.clear();
            if op == Op::Write {
                let part = data.slice(0, (line.sectors * SECTOR) as usize);
                request.buffers.extend(part);
            }
            batch.push(request);
        }
        if !batch.is_empty() {
            queue.submit(&mut batch);
        }
        if queue.poll(&mut done) == 0
            && queue.in_flight() > 0
            && let Readiness::Wait(deadline) = queue.arm()
        {
            wait(&mut queue, deadline)?;
        }
        for completion in done.drain(..) {
            if completion.status != Status::Ok {
                let line = completion.request.tag + 1;
                return Err(format!("request {line}: {:?}", completion.status).into());
            }
            free.push(completion.request);
        }
    }
    Ok(())
}

/// To a volume whose time is the machine's.
fn replay_for_real(device: &Arc<dyn BlockDevice>, trace: &[Line], depth: usize) -> Outcome<()> {
    let poller = Poller::new()?;
    let (mut added, mut events) = (false, Vec::new());
    replay(device, trace, depth, |queue, deadline| {
        if !added && let Some(fd) = queue.wait_fd() {
            poller.add(fd, 0, false)?;
            added = true;
        }
        let timeout = deadline.map(|due| due.saturating_duration_since(Instant::now()));
        poller.wait(&mut events, timeout)?;
        events.clear();
        queue.woken();
        Ok(())
    })
}

/// The words of the command line.
struct Options {
    trace: String,
    depths: Vec<usize>,
    models: Vec<String>,
    stripes: usize,
    path: WritePath,
    on: Option<String>,
}

impl Options {
    fn read() -> Outcome<Options> {
        let mut args = std::env::args().skip(1);
        let mut options = Options {
            trace: args.next().ok_or(USAGE)?,
            depths: Vec::new(),
            models: Vec::new(),
            stripes: ArrayOptions::default().stripes,
            path: WritePath::Direct,
            on: None,
        };
        while let Some(name) = args.next() {
            let value = args.next().ok_or(USAGE)?;
            match name.as_str() {
                "--depth" => options.depths.push(value.parse()?),
                "--disk" => options.models.push(value),
                "--stripes" => options.stripes = value.parse()?,
                "--path" => options.path = value.parse()?,
                "--on" => options.on = Some(value),
                _ => return Err(USAGE.into()),
            }
        }
        if options.depths.is_empty() {
            options.depths = vec![1, 8, 32];
        }
        if options.models.is_empty() {
            // All at once; one after another; that, and the longer the more is moved.
            options.models = ["100us", "100us,channels=1", "100us,channels=1,bw=200M"]
                .map(String::from)
                .into();
        }
        Ok(options)
    }
}

fn main() -> Outcome<()> {
    let options = Options::read()?;
    let trace = read_trace(&options.trace)?;
    if let Some(spec) = &options.on {
        let device = pvblk_volume::open(spec)?;
        for &depth in &options.depths {
            let begin = Instant::now();
            replay_for_real(&device, &trace, depth)?;
            let seconds = begin.elapsed().as_secs_f64();
            println!(
                "{} requests, {depth} in flight: {seconds:.2} s",
                trace.len()
            );
        }
        return Ok(());
    }
    for &depth in &options.depths {
        for model in &options.models {
            let (clock, reads) = (Arc::new(ManualClock::default()), Arc::<Reads>::default());
            let array = array(model, options.stripes, options.path, &clock, &reads)?;
            let begin = clock.now();
            replay(&array, &trace, depth, |_, deadline| {
                clock.advance_to(deadline.ok_or("nothing will ever end")?);
                Ok(())
            })?;
            println!(
                "depth {depth:>3}  read {:>7} sectors {:>6} requests in {:>8.1} ms  {model}",
                reads.sectors.load(Ordering::Relaxed),
                reads.requests.load(Ordering::Relaxed),
                (clock.now() - begin).as_secs_f64() * 1e3
            );
        }
    }
    Ok(())
}
