//! tiobench's four phases, as a page cache submits them: each thread has a part of the array for its file,
//! and keeps a number of requests in flight.

use super::array::{Array, Counted4k, ROW_SECTORS, Way};
use crate::machine::cpu_ns;
use anyhow::{Context, Result, ensure};
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Request, RequestFlags,
    SECTOR, Status,
};
use pvblk_sys::Poller;
use pvblk_volume::{Clock, ManualClock};
use rustix::time::ClockId;
use serde::Serialize;
use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Bytes that a writing thread has in flight: as many as write-back keeps of a file.
pub const WRITE_WINDOW: u64 = 1 << 20;
/// Bytes that a thread has in flight while it reads in order: two windows of read-ahead.
pub const READ_WINDOW: u64 = 256 << 10;
/// Chance, of 256, that a thread in virtual time doesn't submit before the next event while members are busy:
/// real threads aren't in step with one another for ever.
const LATE: u8 = 64;
/// Random requests of all threads together, as tiobench makes them.
const RANDOM_OPS: u64 = 4000;

/// Phases of tiobench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Writes of each file from its begin to its end.
    SequentialWrite,
    /// Writes at random places of the file.
    RandomWrite,
    /// Reads of each file from its begin to its end, with read-ahead.
    SequentialRead,
    /// Reads at random places of the file, one at a time.
    RandomRead,
}

impl Phase {
    /// All phases in tiobench's order.
    pub const ALL: [Phase; 4] = [
        Phase::SequentialWrite,
        Phase::RandomWrite,
        Phase::SequentialRead,
        Phase::RandomRead,
    ];

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Phase::SequentialWrite => "Sequential writes",
            Phase::RandomWrite => "Random writes",
            Phase::SequentialRead => "Sequential reads",
            Phase::RandomRead => "Random reads",
        }
    }

    /// True if the phase writes.
    pub fn writes(self) -> bool {
        matches!(self, Phase::SequentialWrite | Phase::RandomWrite)
    }

    fn random(self) -> bool {
        matches!(self, Phase::RandomWrite | Phase::RandomRead)
    }
}

/// One cell of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StripeCell {
    pub phase: Phase,
    /// Bytes of a request.
    pub block: u64,
    /// Threads, each with a file of its own.
    pub threads: usize,
    /// Bytes of all files together.
    pub bytes: u64,
}

impl StripeCell {
    /// Name in tables.
    pub fn name(&self) -> String {
        format!(
            "{}, {} KiB, {} threads",
            self.phase.name().to_lowercase(),
            self.block >> 10,
            self.threads
        )
    }

    /// The files, in sectors of the array. They begin at any block of 4 KiB, as in a file system.
    pub fn files(&self) -> Vec<Range<u64>> {
        let each = self.bytes / self.threads as u64 / SECTOR;
        // Whole rows of chunks lie between the files, so that no row has the edges of two.
        let stride = each.next_multiple_of(ROW_SECTORS) + 2 * ROW_SECTORS;
        let begin = |i: u64| ROW_SECTORS + i * stride + 8 * (11 + 5 * i);
        (0..self.threads as u64)
            .map(|i| begin(i)..begin(i) + each)
            .collect()
    }

    /// Sectors of an array that has room for the files.
    pub fn room(&self) -> u64 {
        self.files().last().map_or(0, |f| f.end + 2 * ROW_SECTORS)
    }

    /// Requests that a thread keeps in flight.
    pub fn depth(&self) -> usize {
        let window = match self.phase {
            Phase::SequentialWrite | Phase::RandomWrite => WRITE_WINDOW,
            Phase::SequentialRead => READ_WINDOW,
            Phase::RandomRead => 0,
        };
        (window / self.block).max(1) as usize
    }

    fn edges(&self) -> Vec<u64> {
        match self.phase.random() {
            true => Vec::new(),
            false => self
                .files()
                .iter()
                .flat_map(|f| [f.start, f.end - 1])
                .collect(),
        }
    }
}

/// The load of one thread.
pub struct Job {
    /// Sectors of the file.
    pub file: Range<u64>,
    /// [`Op::Read`] or [`Op::Write`].
    pub op: Op,
    /// Requests go to random places instead of in order.
    pub random: bool,
    /// Bytes of a request.
    pub block: u64,
    /// Requests in flight.
    pub depth: usize,
    /// Number of requests in all; after the file's end they go on at its begin.
    pub requests: u64,
    /// Buffers stay as they are until a write ends, so the array needn't copy them.
    pub stable: bool,
}

struct Submitter {
    queue: Queue,
    job: Job,
    rng: fastrand::Rng,
    begun: u64,
    ended: u64,
    flushed: bool,
    stop: bool,
    free: Vec<Box<Request>>,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
}

impl Submitter {
    fn new(device: &Arc<dyn BlockDevice>, job: Job, seed: u64) -> Result<Submitter> {
        let depth = job.depth;
        let queue = Queue::open(device, &QueueContext::new(depth as u32))?;
        let data = Buffer::anonymous(depth * job.block as usize).context("memory for buffers")?;
        // A page that was never written is the kernel's page of zeros, which costs nothing to read.
        let mut noise = vec![0; job.block as usize];
        let mut any = fastrand::Rng::with_seed(!seed);
        for i in 0..depth {
            any.fill(&mut noise);
            data.write(i * noise.len(), &noise);
        }
        let request = |i: usize| {
            let part = data.slice(i * job.block as usize, job.block as usize);
            let part = part.context("a part of the buffer")?;
            Ok(Request::with_buffers(job.op, 0, vec![part], i as u64))
        };
        Ok(Submitter {
            queue,
            rng: fastrand::Rng::with_seed(seed),
            begun: 0,
            ended: 0,
            flushed: false,
            stop: false,
            free: (0..depth).map(request).collect::<Result<_>>()?,
            batch: Vec::new(),
            done: Vec::new(),
            job,
        })
    }

    fn next_sector(&mut self) -> u64 {
        let sectors = self.job.block / SECTOR;
        let blocks = (self.job.file.end - self.job.file.start) / sectors;
        let block = match self.job.random {
            true => self.rng.u64(..blocks),
            false => self.begun % blocks,
        };
        self.job.file.start + block * sectors
    }

    fn is_over(&self) -> bool {
        self.queue.in_flight() == 0
            && (self.stop || self.flushed || self.job.op == Op::Read)
            && (self.stop || self.ended == self.job.requests)
    }

    /// Submits new requests, unless the thread is late, and takes completions; true if there were
    /// any of either.
    fn step(&mut self, late: bool) -> Result<bool> {
        while !self.stop
            && !late
            && self.begun < self.job.requests
            && let Some(mut request) = self.free.pop()
        {
            request.sector = self.next_sector();
            request.flags = match self.job.stable {
                true => RequestFlags::STABLE_BUFFERS,
                false => RequestFlags::empty(),
            };
            self.begun += 1;
            self.batch.push(request);
        }
        let last = self.job.op == Op::Write && self.ended == self.job.requests;
        if last && !self.flushed && !self.stop {
            // The time of tiobench's writes includes its fsync.
            self.flushed = true;
            self.batch.push(Request::new(Op::Flush, 0, 0, 0));
        }
        let any = !self.batch.is_empty();
        if any {
            self.queue.submit(&mut self.batch);
        }
        let any = self.queue.poll(&mut self.done) > 0 || any;
        for c in self.done.drain(..) {
            ensure!(
                c.status == Status::Ok,
                "a request of sector {} failed: {:?}",
                c.request.sector,
                c.status
            );
            if c.request.op != Op::Flush {
                self.ended += 1;
                self.free.push(c.request);
            }
        }
        Ok(any)
    }
}

/// Figures of a sample.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StripeSample {
    /// 10⁶ bytes a second, all threads together.
    pub mb_per_second: f64,
    /// CPU time as percentage of the elapsed time. For modelled disks: real CPU time as percentage
    /// of modelled time.
    pub cpu_percent: f64,
    /// Blocks of 4 KiB that members read, per MiB written, outside of the rows of chunks where streams begin
    /// and end.
    pub prereads_per_mib: f64,
    /// Blocks read in the rows where streams begin and end.
    pub prereads_at_edges: u64,
    /// Rounds of whole stripes as percentage of all rounds of stripes.
    pub whole_percent: f64,
}

fn cpu_seconds(clock: ClockId) -> f64 {
    cpu_ns(clock) / 1e9
}

fn sample(bytes: u64, took: Duration, cpu: f64, counted: Counted4k) -> StripeSample {
    let seconds = took.as_secs_f64();
    let mib = bytes as f64 / f64::from(1 << 20);
    StripeSample {
        mb_per_second: bytes as f64 / 1e6 / seconds,
        cpu_percent: 100.0 * cpu / seconds,
        prereads_per_mib: counted.inside as f64 / mib,
        prereads_at_edges: counted.at_edges,
        whole_percent: 100.0 * counted.whole as f64 / counted.rounds.max(1) as f64,
    }
}

fn jobs(cell: &StripeCell) -> Vec<Job> {
    let job = |file: Range<u64>| {
        let blocks = (file.end - file.start) * SECTOR / cell.block;
        Job {
            op: if cell.phase.writes() {
                Op::Write
            } else {
                Op::Read
            },
            random: cell.phase.random(),
            block: cell.block,
            depth: cell.depth(),
            requests: match cell.phase.random() {
                true => RANDOM_OPS / cell.threads as u64,
                false => blocks,
            },
            stable: false,
            file,
        }
    };
    cell.files().into_iter().map(job).collect()
}

/// Runs a cell in virtual time. The seed decides the order of the threads in each round, and which
/// are late.
pub fn in_virtual_time(
    array: &mut Array,
    clock: &ManualClock,
    cell: &StripeCell,
    way: Way,
    seed: u64,
) -> Result<StripeSample> {
    array.begin(way, &cell.edges())?;
    let run = run_virtually(array, clock, jobs(cell), None, seed)?;
    let bytes = run.requests.iter().sum::<u64>() * cell.block;
    Ok(sample(bytes, run.took, run.cpu_seconds, array.counted()))
}

/// The result of jobs.
pub struct JobsRun {
    /// Time that the jobs took.
    pub took: Duration,
    /// CPU time of this thread.
    pub cpu_seconds: f64,
    /// Requests of each job.
    pub requests: Vec<u64>,
}

/// Runs jobs in virtual time until all are done, or for `limit`.
pub fn run_virtually(
    array: &Array,
    clock: &ManualClock,
    jobs: Vec<Job>,
    limit: Option<Duration>,
    seed: u64,
) -> Result<JobsRun> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let submitter = |job| Submitter::new(&array.device, job, rng.u64(..));
    let mut all: Vec<Submitter> = jobs.into_iter().map(submitter).collect::<Result<_>>()?;
    let begin = clock.now();
    let cpu = cpu_seconds(ClockId::ThreadCPUTime);
    let mut order: Vec<usize> = (0..all.len()).collect();
    let mut counted = None;
    loop {
        rng.shuffle(&mut order);
        let (mut any, mut over) = (false, true);
        for &i in &order {
            if !all[i].is_over() {
                let late = array.is_busy() && rng.u8(..) < LATE;
                any |= all[i].step(late)?;
                over &= all[i].is_over();
            }
        }
        if over {
            break;
        }
        if limit.is_some_and(|limit| clock.now() - begin >= limit) && counted.is_none() {
            counted = Some(all.iter().map(|s| s.ended).collect::<Vec<_>>());
            all.iter_mut().for_each(|s| s.stop = true);
        }
        if any {
            continue;
        }
        let (mut due, mut ready) = (None::<Instant>, false);
        for s in all.iter_mut().filter(|s| s.queue.in_flight() > 0) {
            match s.queue.arm() {
                Readiness::Ready => ready = true,
                Readiness::Wait(d) => due = due.into_iter().chain(d).min(),
            }
        }
        if ready {
            continue;
        }
        clock.advance_to(due.context("nothing will ever end")?);
    }
    let requests = counted.unwrap_or_else(|| all.iter().map(|s| s.ended).collect());
    Ok(JobsRun {
        took: limit.unwrap_or_else(|| clock.now() - begin),
        cpu_seconds: cpu_seconds(ClockId::ThreadCPUTime) - cpu,
        requests,
    })
}

/// Runs a cell on real threads in real time.
pub fn in_real_time(
    array: &mut Array,
    cell: &StripeCell,
    way: Way,
    seed: u64,
) -> Result<StripeSample> {
    array.begin(way, &cell.edges())?;
    let jobs = jobs(cell);
    let gate = Barrier::new(jobs.len() + 1);
    let mut cpu = 0.0;
    let (took, requests) = std::thread::scope(|scope| {
        let thread = |(i, job)| {
            let (array, gate) = (&*array, &gate);
            scope.spawn(move || {
                let made = Submitter::new(&array.device, job, seed ^ (i as u64) << 32);
                let poller = Poller::new();
                gate.wait();
                run_really(made?, &poller?)
            })
        };
        let threads: Vec<_> = jobs.into_iter().enumerate().map(thread).collect();
        cpu -= cpu_seconds(ClockId::ProcessCPUTime);
        gate.wait();
        let begin = Instant::now();
        let mut sum = 0;
        for thread in threads {
            let ended = thread.join();
            sum += ended.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        cpu += cpu_seconds(ClockId::ProcessCPUTime);
        anyhow::Ok((begin.elapsed(), sum))
    })?;
    Ok(sample(requests * cell.block, took, cpu, array.counted()))
}

fn run_really(mut s: Submitter, poller: &Poller) -> Result<u64> {
    let (mut added, mut events) = (false, Vec::new());
    while !s.is_over() {
        if s.step(false)? || s.is_over() {
            continue;
        }
        if let Readiness::Wait(due) = s.queue.arm() {
            if !added && let Some(fd) = s.queue.wait_fd() {
                poller.add(fd, 0, false)?;
                added = true;
            }
            let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
            poller.wait(&mut events, timeout)?;
            events.clear();
            s.queue.woken();
        }
    }
    Ok(s.ended)
}

/// Runs each job for `time` on a thread of its own, on the device that is given with it; with `cpus`, each on
/// its CPU. Returns requests a second of each job, and seconds of CPU per second, of all threads together.
pub fn for_so_long(
    jobs: Vec<(&Arc<dyn BlockDevice>, Job)>,
    time: Duration,
    cpus: &[usize],
) -> Result<(Vec<f64>, f64)> {
    let gate = Barrier::new(jobs.len());
    std::thread::scope(|scope| {
        let gate = &gate;
        let thread = |(i, (device, job)): (usize, (&Arc<dyn BlockDevice>, Job))| {
            let made = Submitter::new(device, job, i as u64 + 1);
            let cpu = cpus.get(i).copied();
            scope.spawn(move || {
                let pinned = cpu.map_or(Ok(()), pvblk_sys::cpu::pin);
                gate.wait();
                pinned?;
                busy(made?, time)
            })
        };
        let numbered = jobs.into_iter().enumerate();
        // All threads start before one is waited for.
        let threads: Vec<_> = numbered.map(thread).collect();
        let mut rates = Vec::new();
        let mut cpu = 0.0;
        for thread in threads {
            let (rate, used) = thread
                .join()
                .map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            rates.push(rate);
            cpu += used;
        }
        Ok((rates, cpu))
    })
}

/// Runs a job for `time` and polls all the while.
fn busy(mut s: Submitter, time: Duration) -> Result<(f64, f64)> {
    let (begin, cpu) = (Instant::now(), cpu_seconds(ClockId::ThreadCPUTime));
    while begin.elapsed() < time {
        s.step(false)?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    let rate = s.ended as f64 / seconds;
    let used = (cpu_seconds(ClockId::ThreadCPUTime) - cpu) / seconds;
    s.stop = true;
    while !s.is_over() {
        s.step(false)?;
    }
    Ok((rate, used))
}
