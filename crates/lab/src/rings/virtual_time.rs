//! A front end as it serves, its rings and a lane over the modelled SSD, in one thread and in virtual time: the same figures come out each
//! time, on any machine. Only the device takes time.

use crate::loopback::Loopback;
use anyhow::{Context, Result, bail, ensure};
use pvblk_backend::{BlkifSource, Disk, Lane, RequestSource};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Clock, Completion, ManualClock, Op, Queue, QueueContext, Readiness, Request,
    RequestFlags, SECTOR, Status,
};
use pvblk_client::rings::{Frontend, MergePolicy};
use pvblk_volume::{DelayVolume, VolumeSpec};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Least time that passes when everybody sleeps.
const TICK: Duration = Duration::from_micros(1);

/// One cell: threads, each with a queue of its own, that submit one request at a time.
#[derive(Clone, Debug)]
pub struct VirtualLoad {
    pub threads: u32,
    /// Requests in flight of each thread.
    pub depth: u32,
    /// Bytes of each request.
    pub block: u32,
    pub op: Op,
    /// Threads whose places are random; each other one has a stream of its own.
    pub random: u32,
    pub ring_pages: usize,
    /// The modelled device: see [`crate::bed::modelled_ssd`].
    pub device: String,
    /// Chance, of 256, that a thread doesn't run between one event and the next: real threads aren't in step with one another for ever.
    pub late: u8,
    pub seed: u64,
}

/// Counts of a span of virtual time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VirtualSample {
    /// Requests of the load that ended.
    pub requests: u64,
    /// 10^6 bytes per second.
    pub mb_s: f64,
    /// Requests that were merged into others.
    pub merged: u64,
    /// Longest time of a request.
    pub longest: Duration,
    /// A digest of all requests that ended, in order, and of the times at which they did.
    pub digest: u64,
}

struct Thread {
    queue: Queue,
    free: Vec<Box<Request>>,
    batch: Vec<Box<Request>>,
    next: u64,
    begin: u64,
    end: u64,
    rng: fastrand::Rng,
    submitted: Vec<Instant>,
    /// It doesn't run before the next event.
    late: bool,
}

/// The cell while it runs.
pub struct VirtualRun {
    load: VirtualLoad,
    clock: Arc<ManualClock>,
    rng: fastrand::Rng,
    threads: Vec<Thread>,
    lane: Lane,
    contexts: Vec<QueueContext>,
    done: Vec<Completion>,
    sample: VirtualSample,
    _disk: Disk,
}

impl VirtualRun {
    /// Connects a front end with this policy, and opens a queue for each thread.
    pub fn new<M: MergePolicy>(load: &VirtualLoad) -> Result<VirtualRun> {
        let clock = Arc::new(ManualClock::default());
        let spec: VolumeSpec = load.device.parse()?;
        let VolumeSpec::Delay(delay, below) = spec else {
            bail!("{} isn't a modelled device", load.device);
        };
        let below = pvblk_volume::open(&below.to_string())?;
        let timed: Arc<dyn Clock> = clock.clone();
        let device = Arc::new(DelayVolume::with_clock(&delay, below, Arc::clone(&timed))?);
        let device: Arc<dyn BlockDevice> = device;
        let wiring = Loopback {
            ring_pages: load.ring_pages,
            ..Loopback::default()
        };
        let (front, mut back) = wiring.wire(&*device)?;
        let disk = Disk::new("lab", device, Tracing::off());
        let source = back.pop().context("one ring")?;
        let source = BlkifSource::new(source);
        source.fix_pull(32);
        let lane = Lane::open(&disk, Box::new(source))?;
        let front: Arc<dyn BlockDevice> = Frontend::<M>::with_policy(front, timed)?;
        let mut rng = fastrand::Rng::with_seed(load.seed);
        let mut contexts = Vec::new();
        let source = front.buffer_source().context("a front end has memory")?;
        let part = front.capacity_sectors() / u64::from(load.threads) / 4096 * 4096;
        let mut threads = Vec::new();
        for n in 0..load.threads {
            let context = QueueContext::new(load.depth);
            let queue = Queue::open(&front, &context)?;
            contexts.push(context);
            let mut free = Vec::new();
            for tag in 0..load.depth {
                let buffer = source.allocate(load.block as usize).context("memory")?;
                free.push(Request::with_buffers(
                    load.op,
                    0,
                    vec![buffer],
                    u64::from(tag),
                ));
            }
            let begin = part * u64::from(n);
            threads.push(Thread {
                queue,
                free,
                batch: Vec::new(),
                next: begin,
                begin,
                end: begin + part,
                rng: rng.fork(),
                submitted: vec![clock.now(); load.depth as usize],
                late: false,
            });
        }
        Ok(VirtualRun {
            load: load.clone(),
            clock,
            rng,
            threads,
            lane,
            contexts,
            done: Vec::new(),
            sample: VirtualSample::default(),
            _disk: disk,
        })
    }

    /// Lets `span` pass, and counts it.
    pub fn pass(&mut self, span: Duration) -> Result<VirtualSample> {
        self.sample = VirtualSample::default();
        let merged = self.merged();
        let begin = self.clock.now();
        let mut order: Vec<usize> = (0..self.threads.len()).collect();
        loop {
            self.rng.shuffle(&mut order);
            let mut any = false;
            for &n in &order {
                if !self.threads[n].late {
                    any |= self.step(n)?;
                }
            }
            while self.lane.step() {
                any = true;
            }
            let passed = self.clock.now() - begin;
            if passed >= span {
                let bytes = self.sample.requests * u64::from(self.load.block);
                self.sample.mb_s = bytes as f64 / passed.as_secs_f64() / 1e6;
                self.sample.merged = self.merged() - merged;
                return Ok(self.sample.clone());
            }
            if !any {
                self.sleep()?;
            }
        }
    }

    /// Everybody sleeps until something is due.
    fn sleep(&mut self) -> Result<()> {
        let now = self.clock.now();
        let mut due = None::<Instant>;
        for thread in self.threads.iter_mut().filter(|thread| !thread.late) {
            match thread.queue.arm() {
                Readiness::Ready => return Ok(()),
                Readiness::Wait(until) => due = due.into_iter().chain(until).min(),
            }
        }
        // A lane that cuts a long request looks at its ring all the time, and again by the system's clock.
        let lane = match self.lane.arm() {
            Readiness::Ready => Some(now + TICK),
            Readiness::Wait(until) => {
                until.map(|until| if until > now { until } else { now + TICK })
            }
        };
        due = due.into_iter().chain(lane).min();
        match due {
            Some(due) => {
                self.clock.advance_to(due);
                for thread in &mut self.threads {
                    thread.late = self.rng.u8(..) < self.load.late;
                }
            }
            None if self.threads.iter().any(|thread| thread.late) => {
                self.threads
                    .iter_mut()
                    .for_each(|thread| thread.late = false);
            }
            None => bail!("nothing will ever end"),
        }
        Ok(())
    }

    /// Takes completions of a thread, and submits as many requests, one at a time. True if there were any.
    fn step(&mut self, n: usize) -> Result<bool> {
        let now = self.clock.now();
        let (load, thread) = (&self.load, &mut self.threads[n]);
        thread.queue.poll(&mut self.done);
        for Completion { request, status } in self.done.drain(..) {
            ensure!(status == Status::Ok, "a request failed: {request:?}");
            let took = now - thread.submitted[request.tag as usize];
            let sample = &mut self.sample;
            sample.requests += 1;
            sample.longest = sample.longest.max(took);
            for part in [n as u64, request.sector, took.as_nanos() as u64] {
                sample.digest = (sample.digest ^ part).wrapping_mul(0x0100_0000_01b3);
            }
            thread.free.push(request);
        }
        let any = !thread.free.is_empty();
        while let Some(mut request) = thread.free.pop() {
            let sectors = u64::from(load.block) / SECTOR;
            let sector = match (n as u32) < load.random {
                true => {
                    thread.begin + thread.rng.u64(..(thread.end - thread.begin) / sectors) * sectors
                }
                false => thread.next,
            };
            thread.next = sector + sectors;
            if thread.next + sectors > thread.end {
                thread.next = thread.begin;
            }
            let tag = request.tag;
            request.reset(load.op, RequestFlags::empty(), sector, sectors, tag);
            thread.submitted[tag as usize] = now;
            thread.batch.push(request);
            thread.queue.submit(&mut thread.batch);
        }
        Ok(any)
    }

    fn merged(&self) -> u64 {
        let of = |context: &QueueContext| context.merges.of(self.load.op);
        self.contexts.iter().map(of).sum()
    }
}
