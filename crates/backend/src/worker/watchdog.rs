//! The watchdog: notices that a worker's thread is blocked in a call of a lane, and gives its other lanes to a fresh thread.
//!
//! It looks every 25 ms while any worker is awake, and sleeps while all of them do. A thread is blocked if it has been in one call for two looks and the
//! kernel says twice, a moment apart, that it sleeps there: a thread that runs, or waits for a CPU on a loaded machine,
//! isn't. A thread that is replaced without need costs a thread, and nothing else. The watchdog also logs stalls that last.

use super::{Seat, roster};
use crate::stall::Blocked;
use parking_lot::Mutex;
use pvblk_sys::proc_status;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Between two looks.
const TICK: Duration = Duration::from_millis(25);
/// Looks at the same call before the kernel is asked.
const PATIENT_TICKS: u32 = 2;
/// Between the two questions to the kernel.
const AGAIN: Duration = Duration::from_millis(3);
/// Looks without a worker awake before it sleeps.
const IDLE_TICKS: u32 = 8;

/// How workers wake the watchdog, and what they leave it to log.
#[derive(Default)]
pub struct Attention {
    sleeps: AtomicBool,
    thread: OnceLock<Thread>,
    /// Lanes whose stall isn't logged yet.
    blocked: Mutex<Vec<Arc<Blocked>>>,
}

impl Attention {
    /// Called by a worker that has waited, after it said that it is awake.
    #[inline]
    pub fn a_worker_woke(&self) {
        // Sequentially consistent, as the worker's `asleep` and the watchdog's look at it: one of the two sees the other.
        if self.sleeps.load(Ordering::SeqCst) {
            self.rouse();
        }
    }

    /// The watchdog logs this stall if it lasts, and doesn't sleep before.
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

/// The watchdog's thread; dropping it ends it.
pub struct Watchdog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches `seats`, whose workers call `attention`.
    pub fn start(seats: Vec<Arc<Seat>>, attention: &Arc<Attention>) -> std::io::Result<Watchdog> {
        let stop = Arc::new(AtomicBool::new(false));
        let (told, attention) = (Arc::clone(&stop), Arc::clone(attention));
        let thread = std::thread::Builder::new()
            .name("pvblk-watchdog".into())
            .stack_size(256 * 1024)
            .spawn(move || {
                let _ = attention.thread.set(std::thread::current());
                watch(&seats, &attention, &told);
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

/// A call that a worker was seen in.
#[derive(Clone, Copy, Default)]
struct Seen {
    turn: u64,
    ticks: u32,
}

fn watch(seats: &[Arc<Seat>], attention: &Attention, stop: &AtomicBool) {
    let mut seen = vec![Seen::default(); seats.len()];
    let mut idle = 0;
    let nothing_to_do = || {
        // In this order: a worker that falls asleep has told of its stalls.
        let asleep = seats.iter().all(|s| s.asleep.load(Ordering::SeqCst));
        !attention.tell_stalls() && asleep
    };
    while !stop.load(Ordering::Acquire) {
        idle = if nothing_to_do() { idle + 1 } else { 0 };
        if idle >= IDLE_TICKS {
            attention.sleeps.store(true, Ordering::SeqCst);
            if nothing_to_do() {
                std::thread::park();
            }
            attention.sleeps.store(false, Ordering::SeqCst);
            idle = 0;
        }
        std::thread::park_timeout(TICK);
        for (seat, seen) in seats.iter().zip(&mut seen) {
            look(seat, seen);
        }
    }
}

fn look(seat: &Arc<Seat>, seen: &mut Seen) {
    let turn = seat.baton.turn();
    if turn.is_multiple_of(2) || turn != seen.turn {
        *seen = Seen { turn, ticks: 0 };
        return;
    }
    seen.ticks += 1;
    if seen.ticks < PATIENT_TICKS || !sleeps(seat) {
        return;
    }
    std::thread::sleep(AGAIN);
    if seat.baton.turn() != turn || !sleeps(seat) {
        return;
    }
    if let Err(e) = replace(seat, turn) {
        tracing::error!("{} is blocked, and can't be replaced: {e}", seat.name);
        seen.ticks = 0;
    }
}

/// True if the kernel says that the seat's thread sleeps.
fn sleeps(seat: &Seat) -> bool {
    let tid = seat.tid.load(Ordering::Acquire);
    matches!(proc_status::thread_state(tid), Some('S' | 'D' | 'I'))
}

fn replace(seat: &Arc<Seat>, turn: u64) -> std::io::Result<()> {
    let poller = roster::poller(&seat.mailbox)?;
    seat.start(move |seat| {
        let mut roster = seat.baton.seize(turn)?;
        roster.take_over(poller, &seat.attention);
        Some(roster)
    })
}
