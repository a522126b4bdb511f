//! Requests that wait for the disk's own threads, and the order in which the threads take them.

use super::blocking::{self, Outcome};
use super::completions::FileCompletions;
use super::shared::FileShared;
use super::task::{Next, Task};
use parking_lot::Mutex;
use pvblk_block::{Completion, DiskThreads, Request, Status};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most requests of one disk that wait for the medium side by side in system calls.
const BESIDE: usize = 32;

/// Requests of one queue that a thread does before another queue has its turn, in case there is one thread
/// for all.
const TURN: usize = 32;

/// A request on its way through a thread.
pub(super) struct Work {
    pub(super) request: Box<Request>,
    pub(super) task: Task,
    /// The request's segments can't be used with O_DIRECT.
    pub(super) bounced: bool,
    pub(super) completions: Arc<FileCompletions>,
}

/// The requests that threads may do at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Any number of them at the same time.
    Beside,
    /// One after another: the kernel locks the file for each, so more threads would only wait for each other.
    InTurn,
    /// One `fdatasync` for all that wait.
    Sync,
}

#[derive(Default)]
struct WorkQueue {
    waiting: VecDeque<Work>,
    /// Number of threads that take from the queue, or will.
    runners: usize,
}

/// The work queues of one disk, and its threads.
pub(super) struct WorkQueues {
    threads: DiskThreads,
    queues: [Mutex<WorkQueue>; 3],
    /// The system refused the first thread, and requests wait for another attempt.
    starved: AtomicBool,
}

impl WorkQueues {
    pub(super) fn new() -> WorkQueues {
        WorkQueues {
            // One more for `InTurn`, `Sync`, and looks at the file's size.
            threads: DiskThreads::new("pvblk-file", BESIDE + 3),
            queues: Default::default(),
            starved: AtomicBool::new(false),
        }
    }

    /// The threads, for calls that aren't requests.
    pub(super) fn threads(&self) -> &DiskThreads {
        &self.threads
    }

    /// True if [`WorkQueues::push`] or [`WorkQueues::retry`] found no thread.
    pub(super) fn is_starved(&self) -> bool {
        self.starved.load(Ordering::Relaxed)
    }

    /// Adds all of `works`, which are then empty.
    pub(super) fn push(shared: &Arc<FileShared>, kind: Kind, works: &mut Vec<Work>) {
        if works.is_empty() {
            return;
        }
        let start = {
            let mut queue = shared.work_queues.queues[kind as usize].lock();
            let added = works.len();
            queue.waiting.extend(works.drain(..));
            let most = if kind == Kind::Beside { BESIDE } else { 1 };
            let start = (most - queue.runners).min(added);
            queue.runners += start;
            start
        };
        WorkQueues::start(shared, kind, start);
    }

    fn start(shared: &Arc<FileShared>, kind: Kind, threads: usize) {
        for _ in 0..threads {
            let runner = Runner {
                shared: Arc::clone(shared),
                kind,
                counts: true,
            };
            if shared
                .work_queues
                .threads
                .run(Box::new(|| run(runner)))
                .is_err()
            {
                shared.work_queues.starved.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Looks for a thread again, after the system refused one.
    #[cold]
    pub(super) fn retry(shared: &Arc<FileShared>) {
        shared.work_queues.starved.store(false, Ordering::Relaxed);
        for kind in [Kind::Beside, Kind::InTurn, Kind::Sync] {
            let start = {
                let mut queue = shared.work_queues.queues[kind as usize].lock();
                let start = queue.runners == 0 && !queue.waiting.is_empty();
                queue.runners += usize::from(start);
                usize::from(start)
            };
            WorkQueues::start(shared, kind, start);
        }
    }
}

/// Counts as one of the queue's `runners` until it is dropped.
struct Runner {
    shared: Arc<FileShared>,
    kind: Kind,
    counts: bool,
}

impl Runner {
    fn queue(&self) -> &Mutex<WorkQueue> {
        &self.shared.work_queues.queues[self.kind as usize]
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        if self.counts {
            self.queue().lock().runners -= 1;
        }
    }
}

/// Takes a thread's turn at a work queue.
fn run(mut runner: Runner) {
    for _ in 0..TURN {
        let mut queue = runner.queue().lock();
        let Some(work) = queue.waiting.pop_front() else {
            // This happens under the lock: a thread that adds work from now on starts another
            // runner.
            queue.runners -= 1;
            drop(queue);
            runner.counts = false;
            return;
        };
        if runner.kind == Kind::Sync {
            let others = std::mem::take(&mut queue.waiting);
            drop(queue);
            sync(&runner.shared, work, others);
        } else {
            drop(queue);
            one(&runner.shared, work);
        }
    }
    // This very thread will take the job, so it isn't refused.
    let threads = Arc::clone(&runner.shared);
    let _ = threads.work_queues.threads.run(Box::new(|| run(runner)));
}

fn one(shared: &Arc<FileShared>, mut work: Work) {
    if work.completions.is_closed() {
        return;
    }
    let execute = || blocking::execute(&work.request, &mut work.task, work.bounced, shared);
    match catch_unwind(AssertUnwindSafe(execute)) {
        // The panic is a bug of ours, whose message is printed: it fails this request, and the queue goes on.
        Err(_) => finish(work, Status::IoError),
        Ok(Outcome::Done(status)) => finish(work, status),
        Ok(Outcome::Sync) => WorkQueues::push(shared, Kind::Sync, &mut vec![work]),
    }
}

/// Does one `fdatasync` after all of these were submitted, so it covers all writes that they have to cover.
/// This file description has no other syncs, so the kernel's one report of a failed write-back comes here,
/// before any later flush completes.
fn sync(shared: &Arc<FileShared>, first: Work, others: VecDeque<Work>) {
    let mut all: Vec<Work> = std::iter::once(first).chain(others).collect();
    all.retain(|work| !work.completions.is_closed());
    if all.is_empty() {
        return;
    }
    let failed = shared.sync().err();
    if let Some(e) = &failed {
        shared.log_text("fdatasync", e);
        shared.lose_data();
    }
    for mut work in all {
        let advance = || work.task.advance(&work.request, Ok(0), true, shared);
        let status = match catch_unwind(AssertUnwindSafe(advance)) {
            Ok(Next::Done(status)) if failed.is_none() => status,
            _ => Status::IoError,
        };
        finish(work, status);
    }
}

fn finish(work: Work, status: Status) {
    work.completions.deliver(Completion {
        request: work.request,
        status,
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::task::Step;
    use crate::spec::FileSpec;
    use crate::{FileVolume, file::shared::FileShared};
    use pvblk_block::{Op, SECTOR};
    use pvblk_sys::Buffer;
    use std::time::{Duration, Instant};

    /// A write of a sector; one that is `broken` has done more than there is to do, which panics.
    fn work(completions: &Arc<FileCompletions>, tag: u64, broken: bool) -> Work {
        let data = Buffer::anonymous(SECTOR as usize).unwrap();
        let (step, done) = match broken {
            true => (Step::Zeros, 2 * SECTOR),
            false => (Step::Data, 0),
        };
        Work {
            request: Request::with_buffers(Op::Write, tag, vec![data], tag),
            task: Task { step, done },
            bounced: false,
            completions: Arc::clone(completions),
        }
    }

    #[test]
    fn a_panic_costs_one_request_and_not_its_answer() {
        let folder = tempfile::tempdir().unwrap();
        let spec = FileSpec {
            size_bytes: Some(1 << 20),
            ..FileSpec::new(folder.path().join("disk"))
        };
        let volume = FileVolume::open(&spec).unwrap();
        let shared: &Arc<FileShared> = &volume.shared;
        let completions = Arc::new(FileCompletions::new());
        for kind in [Kind::Beside, Kind::InTurn] {
            let mut works = (0..9).map(|n| work(&completions, n, n % 3 == 1)).collect();
            WorkQueues::push(shared, kind, &mut works);
            let (mut done, begin) = (Vec::new(), Instant::now());
            while done.len() < 9 {
                completions.take(&mut done);
                assert!(begin.elapsed() < Duration::from_secs(60), "{done:?}");
                std::thread::yield_now();
            }
            for Completion { request, status } in done {
                let expected = match request.tag % 3 {
                    1 => Status::IoError,
                    _ => Status::Ok,
                };
                assert_eq!(status, expected, "{kind:?} {}", request.tag);
            }
        }
    }
}
