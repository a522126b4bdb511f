//! [`spawn`]: threads for one task each that are used again for the next.
//!
//! A new thread costs the process a mapping for its stack, and the end of one takes that away on all CPUs. Disks that are added and removed need a few
//! threads each for a moment, and their neighbours would pay for it. So a thread whose task is over waits a little for another one.

use crate::threads::Job;
use parking_lot::{Condvar, Mutex};
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Most threads that wait for a task.
const MOST: usize = 8;
/// A thread without a task ends after this time.
const PATIENCE: Duration = Duration::from_secs(1);
/// Room for a deep stack of volumes, which a task may open.
const STACK: usize = 1 << 20;

static ALL: SpareThreads = SpareThreads::new();

/// Runs `task` on a thread of this name, of which the kernel shows the first 15 bytes: a spare one, or a new one. Gives the task back if the system refuses a thread.
/// The number of tasks isn't bounded here.
pub fn spawn(name: &str, task: Job) -> Result<(), Job> {
    ALL.spawn(name, task)
}

/// Threads that wait for a task, the last one first in the list's end.
struct SpareThreads {
    waiting: Mutex<Vec<Arc<Seat>>>,
}

/// A thread's next task.
#[derive(Default)]
struct Seat {
    task: Mutex<Option<Task>>,
    came: Condvar,
}

struct Task {
    name: CString,
    run: Job,
}

impl SpareThreads {
    const fn new() -> SpareThreads {
        SpareThreads {
            waiting: Mutex::new(Vec::new()),
        }
    }

    fn spawn(&'static self, name: &str, run: Job) -> Result<(), Job> {
        let task = Task {
            name: CString::new(name).unwrap_or_default(),
            run,
        };
        let spare = self.waiting.lock().pop();
        if let Some(seat) = spare {
            *seat.task.lock() = Some(task);
            seat.came.notify_one();
            return Ok(());
        }
        let seat = Arc::<Seat>::default();
        *seat.task.lock() = Some(task);
        let own = Arc::clone(&seat);
        let thread = std::thread::Builder::new().name(name.to_owned());
        match thread.stack_size(STACK).spawn(move || self.serve(&own)) {
            Ok(_) => Ok(()),
            Err(_) => match seat.task.lock().take() {
                Some(task) => Err(task.run),
                None => Ok(()),
            },
        }
    }

    fn serve(&self, seat: &Arc<Seat>) {
        while let Some(task) = self.next(seat) {
            // It is for people who look at the process only.
            let _ = rustix::thread::set_name(&task.name);
            // The panic of a task has printed its message.
            let _ = catch_unwind(AssertUnwindSafe(task.run));
            let mut waiting = self.waiting.lock();
            if waiting.len() == MOST {
                return;
            }
            waiting.push(Arc::clone(seat));
        }
    }

    /// The task of a seat; waits for it. `None`: nobody will bring one.
    fn next(&self, seat: &Arc<Seat>) -> Option<Task> {
        let mut task = seat.task.lock();
        while task.is_none() {
            if !seat.came.wait_for(&mut task, PATIENCE).timed_out() || task.is_some() {
                continue;
            }
            drop(task);
            let mut waiting = self.waiting.lock();
            let place = waiting.iter().position(|s| Arc::ptr_eq(s, seat));
            if let Some(place) = place {
                waiting.remove(place);
                return None;
            }
            // Somebody has taken it off the list, to bring a task.
            drop(waiting);
            task = seat.task.lock();
        }
        task.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::mpsc;
    use std::thread::ThreadId;
    use std::time::Instant;

    /// A bound that only a hang reaches.
    const HANG: Duration = Duration::from_secs(60);

    fn all() -> &'static SpareThreads {
        Box::leak(Box::new(SpareThreads::new()))
    }

    /// Returns the thread once it waits again, or has ended.
    fn run(all: &'static SpareThreads) -> ThreadId {
        let (tell, told) = mpsc::channel();
        let job = move || tell.send(std::thread::current().id()).unwrap();
        assert!(all.spawn("t", Box::new(job)).is_ok());
        let id = told.recv_timeout(HANG).unwrap();
        wait(|| !all.waiting.lock().is_empty());
        id
    }

    fn wait(is_so: impl Fn() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < HANG);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn tasks_one_after_another_share_a_thread() {
        let all = all();
        let threads: HashSet<ThreadId> = (0..200).map(|_| run(all)).collect();
        // One may have waited in vain while the test waited for its CPU.
        assert!(threads.len() < 100, "{}", threads.len());
    }

    #[test]
    fn threads_end_when_there_is_nothing_to_do_and_a_panic_ends_none() {
        let all = all();
        run(all);
        assert!(all.spawn("t", Box::new(|| panic!("on purpose"))).is_ok());
        wait(|| !all.waiting.lock().is_empty());
        wait(|| all.waiting.lock().is_empty());
        run(all);
    }

    #[test]
    fn no_more_wait_than_are_useful_and_each_task_runs_once() {
        let all = all();
        let (done, finished) = mpsc::channel();
        for round in 0..20 {
            for i in 0..50 {
                let done = done.clone();
                let job = move || done.send(round * 50 + i).unwrap();
                assert!(all.spawn("t", Box::new(job)).is_ok());
            }
            assert!(all.waiting.lock().len() <= MOST);
        }
        let ran: HashSet<i32> = (0..1000)
            .map(|_| finished.recv_timeout(HANG).unwrap())
            .collect();
        assert_eq!(ran.len(), 1000);
        assert!(all.waiting.lock().len() <= MOST);
    }
}
