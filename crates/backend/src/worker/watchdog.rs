//! The watchdog: finds that a worker's thread is blocked in a call of a lane, and gives its other lanes to a
//! fresh thread; it also lets a worker that is busy all the time give a lane to one that isn't ([`super::load`]).
//!
//! It looks every 25 ms while any worker is awake, and sleeps while all of them sleep. A thread is blocked if
//! it has been in one call for two looks and the kernel says twice, a moment apart, that it sleeps there. A
//! thread that runs, or waits for a CPU on a loaded machine, isn't blocked. A replacement without need costs
//! a thread, and nothing else. The watchdog also logs stalls that last.

use super::load::{Balance, Gift, Load, STAYS};
use super::{Command, Wish, Worker, lane_table};
use crate::stall::Blocked;
use parking_lot::Mutex;
use pvblk_sys::proc_status;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Interval between two looks.
const TICK: Duration = Duration::from_millis(25);
/// Looks at the same call before the kernel is asked.
const PATIENT_TICKS: u32 = 2;
/// Interval between the two questions to the kernel.
const AGAIN: Duration = Duration::from_millis(3);
/// Looks without a worker awake before it sleeps.
const IDLE_TICKS: u32 = 8;

/// The means by which workers wake the watchdog, and the stalls that it is to log.
#[derive(Default)]
pub struct WatchdogSignal {
    sleeps: AtomicBool,
    thread: OnceLock<Thread>,
    /// Lanes whose stall isn't logged yet.
    blocked: Mutex<Vec<Arc<Blocked>>>,
}

impl WatchdogSignal {
    /// To be called by a worker that has waited, after it set its flag that it is awake.
    #[inline]
    pub fn a_worker_woke(&self) {
        // The order is sequentially consistent, as for the worker's `asleep` and the watchdog's look at it:
        // one of the two sees the other.
        if self.sleeps.load(Ordering::SeqCst) {
            self.rouse();
        }
    }

    /// Makes the watchdog log this stall if it lasts, and keeps it awake until then.
    #[cold]
    pub fn watch(&self, blocked: &Arc<Blocked>) {
        self.blocked.lock().push(Arc::clone(blocked));
        self.a_worker_woke();
    }

    /// Logs stalls that have lasted long enough. True if one may have to be logged later.
    fn tell_stalls(&self) -> bool {
        let mut blocked = self.blocked.lock();
        if !blocked.is_empty() {
            let now = Instant::now();
            blocked.retain(|b| b.is_due(now));
        }
        !blocked.is_empty()
    }

    #[cold]
    fn rouse(&self) {
        if self.sleeps.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}

/// The watchdog's thread, which a drop ends.
pub struct Watchdog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches `workers`, which call `signal`.
    pub fn start(
        workers: Vec<Arc<Worker>>,
        signal: &Arc<WatchdogSignal>,
    ) -> std::io::Result<Watchdog> {
        let stop = Arc::new(AtomicBool::new(false));
        let (told, signal) = (Arc::clone(&stop), Arc::clone(signal));
        let thread = std::thread::Builder::new()
            .name("pvblk-watchdog".into())
            .stack_size(256 * 1024)
            .spawn(move || {
                let _ = signal.thread.set(std::thread::current());
                watch(&workers, &signal, &told);
            })?;
        Ok(Watchdog {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// A call in which a worker was seen.
#[derive(Clone, Copy, Default)]
struct Seen {
    turn: u64,
    ticks: u32,
}

impl Seen {
    /// True if the worker is still in that call.
    fn is_call_of(&self, worker: &Worker) -> bool {
        !self.turn.is_multiple_of(2) && worker.lease.turn() == self.turn
    }
}

fn watch(workers: &[Arc<Worker>], signal: &WatchdogSignal, stop: &AtomicBool) {
    let mut seen = vec![Seen::default(); workers.len()];
    let mut balance = Balance::default();
    let mut idle = 0;
    let nothing_to_do = || {
        // The order matters: a worker that falls asleep has added its stalls before.
        let asleep = workers.iter().all(|s| s.asleep.load(Ordering::SeqCst));
        !signal.tell_stalls() && asleep
    };
    while !stop.load(Ordering::Acquire) {
        idle = if nothing_to_do() { idle + 1 } else { 0 };
        if idle >= IDLE_TICKS {
            signal.sleeps.store(true, Ordering::SeqCst);
            if nothing_to_do() {
                std::thread::park();
            }
            signal.sleeps.store(false, Ordering::SeqCst);
            idle = 0;
            balance.forget();
        }
        std::thread::park_timeout(TICK);
        let load = |(worker, seen): (&Arc<Worker>, &Seen)| worker.load(seen.is_call_of(worker));
        let loads: Vec<Load> = workers.iter().zip(&seen).map(load).collect();
        if let Some(Gift { from, to, most }) = balance.look(Instant::now(), &loads) {
            let wish = Wish {
                to,
                most,
                stays: STAYS,
            };
            workers[from].commands.send(Command::Share(wish));
        }
        for (worker, seen) in workers.iter().zip(&mut seen) {
            look(worker, seen);
        }
    }
}

fn look(worker: &Arc<Worker>, seen: &mut Seen) {
    let turn = worker.lease.turn();
    if turn.is_multiple_of(2) || turn != seen.turn {
        *seen = Seen { turn, ticks: 0 };
        return;
    }
    seen.ticks += 1;
    if seen.ticks < PATIENT_TICKS || !sleeps(worker) {
        return;
    }
    std::thread::sleep(AGAIN);
    if worker.lease.turn() != turn || !sleeps(worker) {
        return;
    }
    if let Err(e) = replace(worker, turn) {
        tracing::error!("{} is blocked, and can't be replaced: {e}", worker.name);
        seen.ticks = 0;
    }
}

/// True if the kernel says that the worker's thread sleeps.
fn sleeps(worker: &Worker) -> bool {
    let tid = worker.tid.load(Ordering::Acquire);
    matches!(proc_status::thread_state(tid), Some('S' | 'D' | 'I'))
}

fn replace(worker: &Arc<Worker>, turn: u64) -> std::io::Result<()> {
    let poller = lane_table::poller(&worker.commands)?;
    worker.start(move |worker| {
        let mut lanes = worker.lease.seize(turn)?;
        lanes.take_over(poller, &worker.signal);
        Some(lanes)
    })
}
