//! Runs jobs: stages, threads, progress.

use super::lane::Lane;
use super::plan::{Plan, thread_seed};
use super::report::{JobReport, Report};
use super::spec::JobSpec;
use parking_lot::{Condvar, Mutex};
use pvblk_block::trace::Tracing;
use pvblk_block::{BlockDevice, Error, ErrorKind, QueueContext, SECTOR};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// How to run, whatever the jobs are.
#[derive(Clone, Default)]
pub struct RunOptions<'a> {
    /// Set it to end the run early: nothing new is submitted, what is in flight comes back.
    pub stop: Arc<AtomicBool>,
    /// How long a thread polls for completions before it sleeps; zero: not at all, as fio.
    pub spin: Duration,
    /// Where the requests to each device are traced; empty: nowhere.
    pub tracing: Vec<Tracing>,
    /// Called about once a second, on the caller's thread.
    pub progress: Option<&'a dyn Fn(&Progress)>,
}

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Stage that runs, from 1.
    pub stage: usize,
    /// Stages in all.
    pub stages: usize,
    /// Jobs' threads that still run.
    pub threads: usize,
    /// Done share of this stage, 0 to 1, where that can be said.
    pub done: Option<f64>,
    /// Time left for this stage, by the same reckoning.
    pub left: Option<Duration>,
    /// Requests per second in the last second.
    pub iops: f64,
    /// Bytes per second in the last second.
    pub bytes_per_second: f64,
}

/// Counters of one thread that others may look at while it runs. It alone writes them.
#[derive(Default)]
pub(super) struct Live {
    ios: AtomicU64,
    bytes: AtomicU64,
}

impl Live {
    #[inline]
    pub(super) fn add(&self, bytes: u64) {
        let ios = self.ios.load(Ordering::Relaxed);
        self.ios.store(ios + 1, Ordering::Relaxed);
        let sum = self.bytes.load(Ordering::Relaxed) + bytes;
        self.bytes.store(sum, Ordering::Relaxed);
    }
}

/// A thread to be: its job, its stream, and where it stands.
struct Seat<'a> {
    spec: &'a JobSpec,
    device: &'a Arc<dyn BlockDevice>,
    plan: Plan,
    seed: u64,
    group: u32,
    /// Its number among the threads of its stage on the same device: the queue's index.
    queue: u32,
    live: Arc<Live>,
    goal: Option<u64>,
    /// Which of the devices it is.
    target: usize,
}

/// Runs `jobs` on `device`. Errors tell what can't begin; what happens later is in the report.
pub fn run(
    jobs: &[JobSpec],
    device: &Arc<dyn BlockDevice>,
    options: &RunOptions<'_>,
) -> Result<Report, Error> {
    let devices = vec![Arc::clone(device); jobs.len()];
    run_on(jobs, &devices, options)
}

/// Runs each of `jobs` on its own one of `devices`; several may be the same.
pub fn run_on(
    jobs: &[JobSpec],
    devices: &[Arc<dyn BlockDevice>],
    options: &RunOptions<'_>,
) -> Result<Report, Error> {
    if jobs.is_empty() || jobs.len() != devices.len() {
        return Err(Error::config("there must be a job, and a target for each"));
    }
    let mut stages = seats(jobs, devices)?;
    let count = stages.len();
    let mut threads = Vec::new();
    for (i, stage) in stages.drain(..).enumerate() {
        if i > 0 && options.stop.load(Ordering::Relaxed) {
            break;
        }
        threads.extend(run_stage(stage, (i + 1, count), options)?);
    }
    Ok(Report {
        threads,
        global: Vec::new(),
        interrupted: options.stop.load(Ordering::Relaxed),
        finished: SystemTime::now(),
    })
}

/// All threads of all stages; checks that every job makes sense on its target before the first one starts.
fn seats<'a>(
    jobs: &'a [JobSpec],
    devices: &'a [Arc<dyn BlockDevice>],
) -> Result<Vec<Vec<Seat<'a>>>, Error> {
    let mut stages: Vec<Vec<Seat<'a>>> = Vec::new();
    let (mut group, mut number) = (0, 0);
    for (i, (spec, device)) in jobs.iter().zip(devices).enumerate() {
        if i == 0 || spec.stonewall {
            stages.push(Vec::new());
        }
        group += u32::from(i > 0 && (spec.stonewall || spec.new_group));
        for thread in 0..spec.numjobs.max(1) {
            let base = if spec.repeatable {
                spec.seed
            } else {
                fastrand::u64(..)
            };
            let seed = thread_seed(base, number);
            let capacity = device.capacity_sectors() * SECTOR;
            let plan = Plan::new(spec, thread, seed, capacity, &device.limits())?;
            let Some(stage) = stages.last_mut() else {
                continue;
            };
            let same = |s: &&Seat<'_>| Arc::ptr_eq(s.device, device);
            let queue = stage.iter().filter(same).count() as u32;
            number += 1;
            stage.push(Seat {
                spec,
                device,
                seed,
                group,
                queue,
                live: Arc::default(),
                goal: plan.goal_bytes(),
                target: i,
                plan,
            });
        }
    }
    Ok(stages)
}

fn run_stage(
    seats: Vec<Seat<'_>>,
    (stage, stages): (usize, usize),
    options: &RunOptions<'_>,
) -> Result<Vec<JobReport>, Error> {
    let mut watch = Watch::new(&seats, stage, stages);
    let mut lanes = Vec::new();
    for seat in seats {
        let context = QueueContext {
            index: seat.queue,
            submitter: seat.queue,
            tracing: options
                .tracing
                .get(seat.target)
                .cloned()
                .unwrap_or_default(),
            ..QueueContext::new(seat.spec.iodepth)
        };
        let lane = Lane::open(
            seat.spec,
            seat.plan,
            seat.seed,
            seat.device,
            &context,
            seat.live,
            options,
        )
        .map_err(|e| e.context(format!("job {}", seat.spec.name)))?;
        lanes.push((lane, seat.group));
    }
    let running = Mutex::new(lanes.len());
    let ended = Condvar::new();
    // References, so that the threads' closures don't own what they share.
    let (count, bell) = (&running, &ended);
    std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for (i, (lane, group)) in lanes.into_iter().enumerate() {
            let builder = std::thread::Builder::new().name(format!("pvblk-bench-{i}"));
            let body = move || {
                // Counts down on a panic too, or the caller would wait for ever.
                let _end = Countdown(count, bell);
                let mut report = lane.run();
                report.group = group;
                report
            };
            handles.push(builder.spawn_scoped(scope, body));
        }
        let missing = handles.iter().filter(|h| h.is_err()).count();
        if missing > 0 {
            *running.lock() -= missing;
            options.stop.store(true, Ordering::Relaxed);
        }
        let mut left = running.lock();
        while *left > 0 {
            if ended
                .wait_for(&mut left, Duration::from_secs(1))
                .timed_out()
                && let Some(tell) = options.progress
            {
                tell(&watch.look(*left));
            }
        }
        drop(left);
        handles
            .into_iter()
            .map(|h| {
                let handle = h.map_err(|e| Error::os("starting a job's thread", e))?;
                handle
                    .join()
                    .map_err(|_| Error::new(ErrorKind::Os, "a job's thread panicked"))
            })
            .collect()
    })
}

struct Countdown<'a>(&'a Mutex<usize>, &'a Condvar);

impl Drop for Countdown<'_> {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.1.notify_one();
    }
}

/// Looks at the counters from outside.
struct Watch {
    lives: Vec<Arc<Live>>,
    /// Bytes that all threads will move, unless time ends them.
    goal: Option<u64>,
    /// The longest runtime, ramp included.
    time: Option<Duration>,
    started: Instant,
    last: (Instant, u64, u64),
    stage: usize,
    stages: usize,
}

impl Watch {
    fn new(seats: &[Seat<'_>], stage: usize, stages: usize) -> Watch {
        let now = Instant::now();
        let time = |s: &Seat<'_>| s.spec.runtime.map(|t| t + s.spec.ramp_time);
        Watch {
            lives: seats.iter().map(|s| Arc::clone(&s.live)).collect(),
            goal: seats.iter().map(|s| s.goal).sum(),
            time: seats.iter().filter_map(time).max(),
            started: now,
            last: (now, 0, 0),
            stage,
            stages,
        }
    }

    fn look(&mut self, threads: usize) -> Progress {
        let sum = |f: fn(&Live) -> &AtomicU64| -> u64 {
            let load = |l: &Arc<Live>| f(l).load(Ordering::Relaxed);
            self.lives.iter().map(load).sum()
        };
        let (ios, bytes) = (sum(|l| &l.ios), sum(|l| &l.bytes));
        let now = Instant::now();
        let seconds = (now - self.last.0).as_secs_f64().max(1e-9);
        let elapsed = (now - self.started).as_secs_f64();
        let by_bytes = self.goal.map(|g| bytes as f64 / g.max(1) as f64);
        let by_time = self.time.map(|t| elapsed / t.as_secs_f64().max(1e-9));
        // Whichever comes first ends the jobs.
        let done = by_bytes.into_iter().chain(by_time).reduce(f64::max);
        let done = done.map(|d| d.clamp(0.0, 1.0));
        let left = done
            .filter(|&d| d > 0.0)
            .map(|d| Duration::from_secs_f64((elapsed * (1.0 - d) / d).min(1e9)));
        let progress = Progress {
            stage: self.stage,
            stages: self.stages,
            threads,
            done,
            left,
            iops: (ios - self.last.1) as f64 / seconds,
            bytes_per_second: (bytes - self.last.2) as f64 / seconds,
        };
        self.last = (now, ios, bytes);
        progress
    }
}
