//! Runs jobs: stages, threads, progress.

use super::job_thread::JobThread;
use super::plan::{Plan, thread_seed};
use super::report::{JobReport, Report};
use super::spec::JobSpec;
use parking_lot::{Condvar, Mutex};
use pvblk_block::trace::Tracing;
use pvblk_block::{BlockDevice, Error, ErrorKind, QueueContext, SECTOR};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Options of a run that don't depend on the jobs.
#[derive(Clone, Default)]
pub struct RunOptions<'a> {
    /// Setting it ends the run early: no request is submitted any more, and those in flight come
    /// back.
    pub stop: Arc<AtomicBool>,
    /// Time for which a thread polls for completions before it sleeps; fio's is zero.
    pub spin: Duration,
    /// Hooks for the requests of each device; empty if they aren't traced.
    pub tracing: Vec<Tracing>,
    /// Called about once a second, on the caller's thread.
    pub progress: Option<&'a dyn Fn(&Progress)>,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Stage that runs, from 1.
    pub stage: usize,
    /// Number of stages.
    pub stages: usize,
    /// Threads of jobs that still run.
    pub threads: usize,
    /// Done share of this stage, 0 to 1; `None` where it isn't known.
    pub done: Option<f64>,
    /// Time left for this stage; `None` where it isn't known.
    pub left: Option<Duration>,
    /// Requests per second in the last second.
    pub iops: f64,
    /// Bytes per second in the last second.
    pub bytes_per_second: f64,
}

/// Counters of one thread, which others may read while it runs. Only that thread writes them.
#[derive(Default)]
pub(super) struct LiveCounters {
    ios: AtomicU64,
    bytes: AtomicU64,
}

impl LiveCounters {
    #[inline]
    pub(super) fn add(&self, bytes: u64) {
        let ios = self.ios.load(Ordering::Relaxed);
        self.ios.store(ios + 1, Ordering::Relaxed);
        let sum = self.bytes.load(Ordering::Relaxed) + bytes;
        self.bytes.store(sum, Ordering::Relaxed);
    }
}

/// A thread that is to run: its job, its plan, its device.
struct PlannedThread<'a> {
    spec: &'a JobSpec,
    device: &'a Arc<dyn BlockDevice>,
    plan: Plan,
    seed: u64,
    group: u32,
    /// The queue's index: the number of the thread among those of its stage on the same device.
    queue: u32,
    counters: Arc<LiveCounters>,
    goal: Option<u64>,
    /// Index of the device.
    target: usize,
}

/// Runs `jobs` on `device`. An error means that the run can't begin; later errors are in the
/// report.
pub fn run(
    jobs: &[JobSpec],
    device: &Arc<dyn BlockDevice>,
    options: &RunOptions<'_>,
) -> Result<Report, Error> {
    let devices = vec![Arc::clone(device); jobs.len()];
    run_on(jobs, &devices, options)
}

/// Runs each of `jobs` on its own one of `devices`, of which several may be the same.
pub fn run_on(
    jobs: &[JobSpec],
    devices: &[Arc<dyn BlockDevice>],
    options: &RunOptions<'_>,
) -> Result<Report, Error> {
    if jobs.is_empty() || jobs.len() != devices.len() {
        return Err(Error::config("there must be a job, and a target for each"));
    }
    let mut stages = plan_threads(jobs, devices)?;
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

/// The threads of all stages. It checks that every job fits its target before the first one starts.
fn plan_threads<'a>(
    jobs: &'a [JobSpec],
    devices: &'a [Arc<dyn BlockDevice>],
) -> Result<Vec<Vec<PlannedThread<'a>>>, Error> {
    let mut stages: Vec<Vec<PlannedThread<'a>>> = Vec::new();
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
            let same = |s: &&PlannedThread<'_>| Arc::ptr_eq(s.device, device);
            let queue = stage.iter().filter(same).count() as u32;
            number += 1;
            stage.push(PlannedThread {
                spec,
                device,
                seed,
                group,
                queue,
                counters: Arc::default(),
                goal: plan.goal_bytes(),
                target: i,
                plan,
            });
        }
    }
    Ok(stages)
}

fn run_stage(
    planned_threads: Vec<PlannedThread<'_>>,
    (stage, stages): (usize, usize),
    options: &RunOptions<'_>,
) -> Result<Vec<JobReport>, Error> {
    let mut meter = ProgressMeter::new(&planned_threads, stage, stages);
    let mut threads = Vec::new();
    for planned in planned_threads {
        let context = QueueContext {
            index: planned.queue,
            submitter: planned.queue,
            tracing: options
                .tracing
                .get(planned.target)
                .cloned()
                .unwrap_or_default(),
            ..QueueContext::new(planned.spec.iodepth)
        };
        let thread = JobThread::open(
            planned.spec,
            planned.plan,
            planned.seed,
            planned.device,
            &context,
            planned.counters,
            options,
        )
        .map_err(|e| e.context(format!("job {}", planned.spec.name)))?;
        threads.push((thread, planned.group));
    }
    let running = Mutex::new(threads.len());
    let ended = Condvar::new();
    // The threads' closures borrow what they share.
    let (count, condition) = (&running, &ended);
    std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for (i, (thread, group)) in threads.into_iter().enumerate() {
            let builder = std::thread::Builder::new().name(format!("pvblk-bench-{i}"));
            let body = move || {
                // The count goes down on a panic too; otherwise the caller would wait for ever.
                let _end = Countdown(count, condition);
                let mut report = thread.run();
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
                tell(&meter.look(*left));
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

/// Reads the threads' counters for progress reports.
struct ProgressMeter {
    counters: Vec<Arc<LiveCounters>>,
    /// Bytes that all threads will move, unless time ends them.
    goal: Option<u64>,
    /// The longest runtime, ramp included.
    time: Option<Duration>,
    started: Instant,
    last: (Instant, u64, u64),
    stage: usize,
    stages: usize,
}

impl ProgressMeter {
    fn new(planned: &[PlannedThread<'_>], stage: usize, stages: usize) -> ProgressMeter {
        let now = Instant::now();
        let time = |s: &PlannedThread<'_>| s.spec.runtime.map(|t| t + s.spec.ramp_time);
        ProgressMeter {
            counters: planned.iter().map(|s| Arc::clone(&s.counters)).collect(),
            goal: planned.iter().map(|s| s.goal).sum(),
            time: planned.iter().filter_map(time).max(),
            started: now,
            last: (now, 0, 0),
            stage,
            stages,
        }
    }

    fn look(&mut self, threads: usize) -> Progress {
        let sum = |f: fn(&LiveCounters) -> &AtomicU64| -> u64 {
            let load = |l: &Arc<LiveCounters>| f(l).load(Ordering::Relaxed);
            self.counters.iter().map(load).sum()
        };
        let (ios, bytes) = (sum(|l| &l.ios), sum(|l| &l.bytes));
        let now = Instant::now();
        let seconds = (now - self.last.0).as_secs_f64().max(1e-9);
        let elapsed = (now - self.started).as_secs_f64();
        let by_bytes = self.goal.map(|g| bytes as f64 / g.max(1) as f64);
        let by_time = self.time.map(|t| elapsed / t.as_secs_f64().max(1e-9));
        // The jobs end at the sooner of both limits.
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
