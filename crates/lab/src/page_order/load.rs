//! iozone's load in virtual time: processes that read records of 64 KiB, each from a disk of its own, and a
//! cache that is too small.

use super::PageOrderCell;
use super::disks::{ModelledDisks, ServiceCost};
use super::policy::Policy;
use crate::machine::cpu_ns;
use anyhow::{Context, Result, bail, ensure};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Buffer, Clock, Completion, ManualClock, Op, Queue, QueueContext, Readiness,
    Request, RequestFlags, SECTOR, Status,
};
use pvblk_cache::{BackgroundWork, CacheConfig, Counters, Due, PAGE_SECTORS, PageCache, Standard};
use pvblk_trace::latency::{Analyzer, Report};
use pvblk_trace::{Collector, Device, Event, Recorder};
use rustix::time::ClockId;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a record.
pub const RECORD: usize = 64 << 10;
const RECORD_SECTORS: u64 = RECORD as u64 / SECTOR;
/// Time that a process spends on each record.
pub const THINK: Duration = Duration::from_micros(40);
/// Sectors of each process' disk.
const DISK: u64 = 1 << 21;
/// Time between the begin of one process and of the next.
const STAGGER: Duration = Duration::from_micros(700);
/// Time that runs before counting begins.
pub const RAMP: Duration = Duration::from_millis(300);
/// Most rounds of a run; a run with more hangs.
const MOST_ROUNDS: u64 = 50_000_000;

/// The result of a run.
#[derive(Clone, Debug)]
pub struct CellRun {
    /// KiB of all processes together that were read in a second of virtual time.
    pub kib_per_second: f64,
    /// CPU time of cache, model and driver, in nanoseconds for each KiB.
    pub cpu_ns_per_kib: f64,
    /// The cache's counters, of the counted time.
    pub counters: Counters,
    /// Hops at the disks; `None` if no trace was wanted.
    pub hops: Option<Report>,
}

struct Process {
    queue: Queue,
    request: Option<Box<Request>>,
    /// The process is busy until this time.
    thinks: Option<Instant>,
    begin: u64,
    at: u64,
    sectors: u64,
    random: Option<fastrand::Rng>,
    /// Sectors that the process reads before it ends.
    left: u64,
    /// Number of records read.
    records: u64,
    done: Vec<Completion>,
}

impl Process {
    fn new(
        device: &Arc<dyn BlockDevice>,
        number: u32,
        (begin, sectors): (u64, u64),
        random: Option<u64>,
        tracing: &Tracing,
    ) -> Result<Process> {
        let context = QueueContext {
            index: number,
            submitter: number,
            tracing: tracing.clone(),
            ..QueueContext::new(1)
        };
        let buffer = Buffer::anonymous(RECORD)?;
        Ok(Process {
            queue: Queue::open(device, &context)?,
            request: Some(Request::with_buffers(Op::Read, begin, vec![buffer], 0)),
            thinks: None,
            begin,
            at: begin,
            sectors,
            random: random.map(fastrand::Rng::with_seed),
            left: u64::MAX,
            records: 0,
            done: Vec::new(),
        })
    }

    /// One step: returns whether the process did something, and the time until which it waits.
    fn step(&mut self, clock: &ManualClock) -> Result<(bool, Option<Instant>)> {
        if let Some(until) = self.thinks {
            if clock.now() < until {
                return Ok((false, Some(until)));
            }
            self.thinks = None;
        }
        if let Some(mut request) = self.request.take() {
            if self.left == 0 {
                self.request = Some(request);
                return Ok((false, None));
            }
            self.left = self.left.saturating_sub(RECORD_SECTORS);
            if let Some(rng) = &mut self.random {
                self.at = self.begin + rng.u64(..self.sectors / RECORD_SECTORS) * RECORD_SECTORS;
            } else if self.at + RECORD_SECTORS > self.begin + self.sectors {
                self.at = self.begin;
            }
            request.reset(Op::Read, RequestFlags::empty(), self.at, RECORD_SECTORS, 0);
            self.at += RECORD_SECTORS;
            self.queue.submit(&mut vec![request]);
            return Ok((true, None));
        }
        if self.queue.poll(&mut self.done) > 0 {
            let done = self.done.pop().context("a completion")?;
            ensure!(done.status == Status::Ok, "a read failed");
            self.request = Some(done.request);
            self.records += 1;
            self.thinks = Some(clock.now() + THINK);
            return Ok((true, None));
        }
        Ok(match self.queue.arm() {
            Readiness::Ready => (true, None),
            Readiness::Wait(until) => (false, until),
        })
    }
}

/// The processes, their cache and its disks.
struct World<P: pvblk_cache::Policy> {
    clock: Arc<ManualClock>,
    disks: Arc<ModelledDisks>,
    cache: Option<Arc<PageCache<P>>>,
    background: Option<BackgroundWork<P>>,
    device: Arc<dyn BlockDevice>,
    tracing: Tracing,
    collector: Option<Collector>,
    events: Vec<Event>,
}

impl<P: pvblk_cache::Policy> World<P> {
    fn new(policy: Option<P>, pages: u64, cost: ServiceCost, traced: bool) -> Result<World<P>> {
        let clock = Arc::new(ManualClock::default());
        let disks = Arc::new(ModelledDisks::new(cost, DISK * 66, &clock));
        let (mut tracing, mut collector) = (Tracing::off(), None);
        if traced {
            let times = disks.events_clock();
            let recorder = Recorder::with_clock(1 << 12, Arc::new(move || times.now_ns()));
            collector = Some(recorder.collector());
            tracing = Tracing::to(Arc::new(recorder), "lab");
        }
        let below: Arc<dyn BlockDevice> = disks.clone();
        let cache = policy.map(|policy| {
            let mut config = CacheConfig::new(pages * 4096);
            config.lists = 2;
            // Windows don't follow the device's round trip: they are the experiment's.
            config.readahead_bytes = Some(128 << 10);
            PageCache::with_policy(&config, policy, Arc::clone(&below), clock.clone()).map(Arc::new)
        });
        let cache = cache.transpose()?;
        Ok(World {
            background: cache.as_deref().map(BackgroundWork::new),
            device: cache.clone().map_or(below, |c| c as _),
            clock,
            disks,
            cache,
            tracing,
            collector,
            events: Vec::new(),
        })
    }

    /// Steps all processes until a time, or until all have read what they are to read.
    fn drive(&mut self, processes: &mut [Process], end: Option<Instant>) -> Result<()> {
        let count = processes.len();
        for round in 0..MOST_ROUNDS {
            let now = self.clock.now();
            if end.is_some_and(|end| now >= end)
                || processes.iter().all(|p| p.left == 0 && p.request.is_some())
            {
                return Ok(());
            }
            let (mut moved, mut until) = (false, end);
            // The first process changes from round to round.
            for n in 0..count {
                let process = &mut processes[(n + round as usize) % count];
                let (has, at) = process.step(&self.clock)?;
                moved |= has;
                until = until.into_iter().chain(at).min();
            }
            if let Some(background) = &mut self.background {
                for due in [background.step(), background.arm()] {
                    match due {
                        Due::Now => moved = true,
                        Due::At(at) => until = until.into_iter().chain([at]).min(),
                        Due::Never => {}
                    }
                }
            }
            if moved {
                continue;
            }
            if let Some(collector) = &self.collector {
                collector.drain(&mut self.events);
            }
            until = until.into_iter().chain(self.disks.next_due()).min();
            let until = until.context("somebody waits for ever")?;
            self.clock.advance_to(until);
        }
        let cache = self.cache.as_ref();
        let unfinished = cache.map(|c| c.unfinished()).unwrap_or_default();
        bail!("no end: {unfinished}")
    }

    /// One process reads a part of the last disk once.
    fn read_all(&mut self, begin: u64, sectors: u64) -> Result<()> {
        let tracing = Tracing::off();
        let place = (DISK * 65 + begin, sectors);
        let mut one = Process::new(&self.device, 0, place, None, &tracing)?;
        one.left = sectors;
        self.drive(std::slice::from_mut(&mut one), None)
    }
}

/// Runs one cell with the defaults of the cache that is served.
pub fn run(cell: &PageOrderCell, seconds: f64, traced: bool, cost: ServiceCost) -> Result<CellRun> {
    match cell.policy {
        None => run_with(None::<Standard>, cell, seconds, traced, cost),
        Some(Policy::DEFAULT) => run_with(Some(Standard), cell, seconds, traced, cost),
        other => run_with(other, cell, seconds, traced, cost),
    }
}

/// Runs a cell as [`run`], with a policy instead of the cell's. `active_pages` pages were read often before
/// and aren't any more; the historical measurement (seed 002) had such pages left from its writes.
pub fn run_with<P: pvblk_cache::Policy>(
    policy: Option<P>,
    cell: &PageOrderCell,
    seconds: f64,
    traced: bool,
    cost: ServiceCost,
) -> Result<CellRun> {
    let mut world = World::new(policy, cell.pages, cost, traced)?;
    if let Some(cache) = world.cache.clone() {
        for _ in 0..3 {
            if cell.active_pages > 0 {
                world.read_all(0, cell.active_pages * PAGE_SECTORS)?;
            }
        }
        // No frame is free when the load begins.
        world.read_all(DISK / 2, cell.pages * PAGE_SECTORS)?;
        cache.check().map_err(anyhow::Error::msg)?;
    }
    let process = |n: u32| {
        let random = cell.random.then_some(u64::from(n) + 1);
        let place = (DISK * u64::from(n), DISK);
        Process::new(&world.device, n, place, random, &world.tracing)
    };
    let mut processes = (0..cell.processes)
        .map(process)
        .collect::<Result<Vec<_>>>()?;
    let begin = world.clock.now();
    for (n, process) in processes.iter_mut().enumerate() {
        process.thinks = Some(begin + STAGGER * n as u32);
    }
    let ramp = begin + RAMP;
    world.drive(&mut processes, Some(ramp))?;
    let counters = |w: &World<P>| w.cache.as_ref().map(|c| c.counters()).unwrap_or_default();
    let records = |p: &[Process]| p.iter().map(|p| p.records).sum::<u64>();
    let (before, read_before) = (counters(&world), records(&processes));
    world.events.clear();
    let cpu = cpu_ns(ClockId::ThreadCPUTime);
    let end = ramp + Duration::from_secs_f64(seconds);
    world.drive(&mut processes, Some(end))?;
    let cpu = cpu_ns(ClockId::ThreadCPUTime) - cpu;
    let read = records(&processes) - read_before;
    let kib = (read * RECORD as u64 / 1024) as f64;
    let counters = counters(&world).since(&before);
    // A queue isn't closed before its requests have ended, and virtual time doesn't pass by itself.
    processes.iter_mut().for_each(|p| p.left = 0);
    world.drive(&mut processes, None)?;
    if let Some(cache) = &world.cache {
        cache.check().map_err(anyhow::Error::msg)?;
    }
    Ok(CellRun {
        kib_per_second: kib / seconds,
        cpu_ns_per_kib: cpu / kib.max(1.0),
        counters,
        hops: world
            .collector
            .take()
            .map(|c| hops(&c, &mut world.events))
            .transpose()?,
    })
}

/// The report on the hops at the disks.
fn hops(collector: &Collector, events: &mut Vec<Event>) -> Result<Report> {
    collector.drain(events);
    ensure!(collector.drops().is_empty(), "events were dropped");
    let devices = collector.devices();
    let disk = devices.iter().find(|(_, name)| name == "lab/disk");
    let disk: Device = disk.context("no disk in the trace")?.0;
    events.retain(|e| e.device == disk);
    events.sort_by_key(|e| e.time_ns);
    Ok(Analyzer::run(events, |_| {}))
}
