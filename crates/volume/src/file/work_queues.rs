//! What waits for the disk's own threads, and in which order they take it.

use super::blocking::{self, Outcome};
use super::mailbox::Mailbox;
use super::shared::Shared;
use super::task::{Next, Task};
use parking_lot::Mutex;
use pvblk_block::{Completion, DiskThreads, Request, Status};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most requests of one disk that wait for the medium side by side in system calls.
const BESIDE: usize = 32;

/// A thread does so many requests of one lane before another lane has its turn, in case there is one thread for all.
const TURN: usize = 32;

/// A request on its way through a thread.
pub(super) struct Work {
    pub(super) request: Box<Request>,
    pub(super) task: Task,
    /// Its segments are none that O_DIRECT takes.
    pub(super) bounced: bool,
    pub(super) mailbox: Arc<Mailbox>,
}

/// Which requests a thread takes together with which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Any number at the same time.
    Beside,
    /// One after another: the kernel locks the file for each, so more threads would only wait for each other.
    InTurn,
    /// One `fdatasync` for all that wait.
    Sync,
}

#[derive(Default)]
struct Lane {
    waiting: VecDeque<Work>,
    /// Threads that take from it, or will.
    runners: usize,
}

/// The lanes of one disk and its threads.
pub(super) struct Lanes {
    threads: DiskThreads,
    lanes: [Mutex<Lane>; 3],
    /// The system refused the first thread, and requests wait for another attempt.
    starved: AtomicBool,
}

impl Lanes {
    pub(super) fn new() -> Lanes {
        Lanes {
            // One more for `InTurn`, `Sync`, and looks at the file's size.
            threads: DiskThreads::new("pvblk-file", BESIDE + 3),
            lanes: Default::default(),
            starved: AtomicBool::new(false),
        }
    }

    /// The threads, for what isn't a request.
    pub(super) fn threads(&self) -> &DiskThreads {
        &self.threads
    }

    /// True if [`Lanes::push`] or [`Lanes::retry`] found no thread.
    pub(super) fn is_starved(&self) -> bool {
        self.starved.load(Ordering::Relaxed)
    }

    /// Adds all of `works`, which are then empty.
    pub(super) fn push(shared: &Arc<Shared>, kind: Kind, works: &mut Vec<Work>) {
        if works.is_empty() {
            return;
        }
        let start = {
            let mut lane = shared.lanes.lanes[kind as usize].lock();
            let added = works.len();
            lane.waiting.extend(works.drain(..));
            let most = if kind == Kind::Beside { BESIDE } else { 1 };
            let start = (most - lane.runners).min(added);
            lane.runners += start;
            start
        };
        Lanes::start(shared, kind, start);
    }

    fn start(shared: &Arc<Shared>, kind: Kind, threads: usize) {
        for _ in 0..threads {
            let runner = Runner {
                shared: Arc::clone(shared),
                kind,
                counts: true,
            };
            if shared.lanes.threads.run(Box::new(|| run(runner))).is_err() {
                shared.lanes.starved.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Looks for a thread again, after the system refused one.
    #[cold]
    pub(super) fn retry(shared: &Arc<Shared>) {
        shared.lanes.starved.store(false, Ordering::Relaxed);
        for kind in [Kind::Beside, Kind::InTurn, Kind::Sync] {
            let start = {
                let mut lane = shared.lanes.lanes[kind as usize].lock();
                let start = lane.runners == 0 && !lane.waiting.is_empty();
                lane.runners += usize::from(start);
                usize::from(start)
            };
            Lanes::start(shared, kind, start);
        }
    }
}

/// Counts as one of the lane's `runners` until it is dropped.
struct Runner {
    shared: Arc<Shared>,
    kind: Kind,
    counts: bool,
}

impl Runner {
    fn lane(&self) -> &Mutex<Lane> {
        &self.shared.lanes.lanes[self.kind as usize]
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        if self.counts {
            self.lane().lock().runners -= 1;
        }
    }
}

/// A thread's part in a lane.
fn run(mut runner: Runner) {
    for _ in 0..TURN {
        let mut lane = runner.lane().lock();
        let Some(work) = lane.waiting.pop_front() else {
            // Under the lock: who adds something from now on starts another thread.
            lane.runners -= 1;
            drop(lane);
            runner.counts = false;
            return;
        };
        if runner.kind == Kind::Sync {
            let others = std::mem::take(&mut lane.waiting);
            drop(lane);
            sync(&runner.shared, work, others);
        } else {
            drop(lane);
            one(&runner.shared, work);
        }
    }
    // This very thread will take it, so it isn't refused.
    let threads = Arc::clone(&runner.shared);
    let _ = threads.lanes.threads.run(Box::new(|| run(runner)));
}

fn one(shared: &Arc<Shared>, mut work: Work) {
    if work.mailbox.is_closed() {
        return;
    }
    let execute = || blocking::execute(&work.request, &mut work.task, work.bounced, shared);
    match catch_unwind(AssertUnwindSafe(execute)) {
        // A bug of ours, which the process's hook has told of: it costs this request, and the lane goes on.
        Err(_) => finish(work, Status::IoError),
        Ok(Outcome::Done(status)) => finish(work, status),
        Ok(Outcome::Sync) => Lanes::push(shared, Kind::Sync, &mut vec![work]),
    }
}

/// One `fdatasync` after all of them were submitted: it covers whatever they have to. Nobody else syncs this file description, so the
/// kernel's one report of a failed write-back comes here, before any later flush is answered.
fn sync(shared: &Arc<Shared>, first: Work, others: VecDeque<Work>) {
    let mut all: Vec<Work> = std::iter::once(first).chain(others).collect();
    all.retain(|work| !work.mailbox.is_closed());
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
    work.mailbox.deliver(Completion {
        request: work.request,
        status,
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::task::Step;
    use crate::spec::FileSpec;
    use crate::{FileVolume, file::shared::Shared};
    use pvblk_block::{Op, SECTOR};
    use pvblk_sys::Buffer;
    use std::time::{Duration, Instant};

    /// A write of a sector; one that is `broken` has done more than there is to do, which panics.
    fn work(mailbox: &Arc<Mailbox>, tag: u64, broken: bool) -> Work {
        let data = Buffer::anonymous(SECTOR as usize).unwrap();
        let (step, done) = match broken {
            true => (Step::Zeros, 2 * SECTOR),
            false => (Step::Data, 0),
        };
        Work {
            request: Request::with_buffers(Op::Write, tag, vec![data], tag),
            task: Task { step, done },
            bounced: false,
            mailbox: Arc::clone(mailbox),
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
        let shared: &Arc<Shared> = &volume.shared;
        let mailbox = Arc::new(Mailbox::new());
        for kind in [Kind::Beside, Kind::InTurn] {
            let mut works = (0..9).map(|n| work(&mailbox, n, n % 3 == 1)).collect();
            Lanes::push(shared, kind, &mut works);
            let (mut done, begin) = (Vec::new(), Instant::now());
            while done.len() < 9 {
                mailbox.take(&mut done);
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
