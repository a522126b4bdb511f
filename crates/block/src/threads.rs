//! [`DiskThreads`]: threads of one disk, for calls that its medium may block.

use crate::spare_threads::spawn;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A call that may block.
pub type Job = Box<dyn FnOnce() + Send>;

/// A thread without a job ends after this time.
const IDLE: Duration = Duration::from_secs(2);

/// Most threads of all disks of the process together. A disk without threads gets one beyond this number, so
/// that no disk waits for another's.
const MOST_OF_ALL: usize = 1024;

static OF_ALL: AtomicUsize = AtomicUsize::new(0);

/// Runs jobs of one disk, side by side up to a bound, in the order in which they came. Threads start with the
/// jobs that need them and end after two seconds without any, so a disk at rest has none. A job that never
/// returns takes a thread of this disk and none of others.
///
/// The number of waiting jobs isn't bounded here: their submitters have bounds of their own (a queue's
/// depth).
///
/// A drop lets the waiting jobs run, and doesn't wait for them.
pub struct DiskThreads {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    most: usize,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    /// Number of threads that wait for a job.
    idle: usize,
    closed: bool,
}

impl DiskThreads {
    /// Makes no thread yet; at most `most` (at least 1) will be made, with this name, of which the kernel
    /// shows the first 15 bytes.
    pub fn new(name: impl Into<String>, most: usize) -> DiskThreads {
        DiskThreads {
            shared: Arc::new(Shared {
                name: name.into(),
                most: most.max(1),
                state: Mutex::default(),
                work: Condvar::new(),
            }),
        }
    }

    /// Runs `job` on one of the threads. Gives it back if there is no thread and the system refuses one.
    pub fn run(&self, job: Job) -> Result<(), Job> {
        let mut state = self.shared.state.lock();
        if state.idle > state.jobs.len() || !self.may_start(&state) {
            state.jobs.push_back(job);
            self.shared.work.notify_one();
            return Ok(());
        }
        state.threads += 1;
        OF_ALL.fetch_add(1, Ordering::Relaxed);
        state.jobs.push_back(job);
        let shared = Arc::clone(&self.shared);
        if spawn(&self.shared.name, Box::new(move || work(&shared))).is_ok() {
            return Ok(());
        }
        state.threads -= 1;
        OF_ALL.fetch_sub(1, Ordering::Relaxed);
        if state.threads > 0 {
            return Ok(());
        }
        match state.jobs.pop_back() {
            Some(job) => Err(job),
            None => Ok(()),
        }
    }

    fn may_start(&self, state: &State) -> bool {
        let room = OF_ALL.load(Ordering::Relaxed) < MOST_OF_ALL;
        state.threads == 0 || (room && state.threads < self.shared.most)
    }

    /// Number of jobs that run or wait.
    pub fn busy(&self) -> usize {
        let state = self.shared.state.lock();
        state.jobs.len() + state.threads - state.idle
    }

    /// Number of threads, busy or idle.
    pub fn threads(&self) -> usize {
        self.shared.state.lock().threads
    }
}

impl Drop for DiskThreads {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
    }
}

fn work(shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            // The panic of a job has printed its message, and affects no other job.
            let _ = catch_unwind(AssertUnwindSafe(job));
            state = shared.state.lock();
            continue;
        }
        if state.closed {
            break;
        }
        state.idle += 1;
        let timed_out = shared.work.wait_for(&mut state, IDLE).timed_out();
        state.idle -= 1;
        if timed_out && state.jobs.is_empty() {
            break;
        }
    }
    state.threads -= 1;
    OF_ALL.fetch_sub(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A bound that only a hang reaches.
    const HANG: Duration = Duration::from_secs(60);

    #[test]
    fn a_job_that_hangs_holds_up_no_other() {
        let threads = DiskThreads::new("t", 3);
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        for _ in 0..2 {
            let held = Arc::clone(&held);
            let job = move || {
                let _ = held.lock().recv();
            };
            assert!(threads.run(Box::new(job)).is_ok());
        }
        let (done, finished) = mpsc::channel();
        for i in 0..100 {
            let done = done.clone();
            assert!(threads.run(Box::new(move || done.send(i).unwrap())).is_ok());
        }
        for i in 0..100 {
            assert_eq!(finished.recv_timeout(HANG), Ok(i));
        }
        assert!(threads.threads() <= 3);
        assert!(threads.busy() >= 2);
        drop(release);
    }

    #[test]
    fn threads_come_with_jobs_and_go_when_idle() {
        let threads = DiskThreads::new("t", 8);
        assert_eq!(threads.threads(), 0);
        let (done, finished) = mpsc::channel();
        assert!(threads.run(Box::new(|| panic!("on purpose"))).is_ok());
        assert!(
            threads
                .run(Box::new(move || done.send(()).unwrap()))
                .is_ok()
        );
        assert_eq!(finished.recv_timeout(HANG), Ok(()));
        let start = std::time::Instant::now();
        while threads.threads() > 0 {
            assert!(start.elapsed() < HANG, "idle threads stay");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn jobs_that_wait_run_after_the_end() {
        let threads = DiskThreads::new("t", 1);
        let (release, held) = mpsc::channel::<()>();
        let (done, finished) = mpsc::channel();
        assert!(
            threads
                .run(Box::new(move || {
                    let _ = held.recv();
                }))
                .is_ok()
        );
        assert!(
            threads
                .run(Box::new(move || done.send(()).unwrap()))
                .is_ok()
        );
        drop(threads);
        drop(release);
        assert_eq!(finished.recv_timeout(HANG), Ok(()));
    }
}
