//! [`BackgroundThread`]: steps the work of a device while none of its users polls.

use super::wait_entry::WaitEntry;
use crate::Clock;
use pvblk_sys::Poller;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The next step is due at once.
    Now,
    /// The next step is due at this time, or when I/O of the device ends.
    At(Instant),
    /// The next step is due when the device is used, or I/O of it ends.
    Never,
}

impl Due {
    /// The earlier of the two.
    #[must_use]
    pub fn earlier(self, other: Due) -> Due {
        match (self, other) {
            (Due::At(a), Due::At(b)) => Due::At(a.min(b)),
            (Due::Never, due) | (due, Due::Never) => due,
            _ => Due::Now,
        }
    }
}

impl From<crate::Readiness> for Due {
    fn from(readiness: crate::Readiness) -> Due {
        match readiness {
            crate::Readiness::Ready => Due::Now,
            crate::Readiness::Wait(Some(at)) => Due::At(at),
            crate::Readiness::Wait(None) => Due::Never,
        }
    }
}

/// Work that is done in steps, by a [`BackgroundThread`] or by a simulation.
pub trait Background: Send + 'static {
    /// Does a bounded part of the work.
    fn step(&mut self) -> Due;

    /// The last check before sleeping: asks for wake-ups, and puts descriptors into the poller, with tokens from 1. Errors if that fails.
    fn arm(&mut self, poller: &Poller) -> io::Result<Due>;

    /// Clears the descriptors after the thread has slept.
    fn woken(&mut self);
}

/// A thread that steps a [`Background`] until it is dropped, which waits for the step that runs.
pub struct BackgroundThread {
    wait: Arc<WaitEntry>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundThread {
    /// Starts a thread with a name of at most 15 bytes. It sleeps at `wait`, which others may wake.
    pub fn start(
        name: &str,
        wait: &Arc<WaitEntry>,
        clock: Arc<dyn Clock>,
        mut work: impl Background,
    ) -> io::Result<BackgroundThread> {
        let poller = Poller::new()?;
        poller.add(wait.event().as_fd(), 0, false)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, waits) = (Arc::clone(&stop), Arc::clone(wait));
        let body = move || {
            let mut events = Vec::new();
            while !stopped.load(Ordering::Acquire) {
                let due = work.step();
                if due != Due::Now {
                    sleep(&waits, &*clock, &mut work, due, &poller, &mut events);
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body)?;
        Ok(BackgroundThread {
            wait: Arc::clone(wait),
            stop,
            thread: Some(thread),
        })
    }

    /// Wakes the thread, because there is work.
    pub fn wake(&self) {
        self.wait.wake();
    }
}

fn sleep(
    wait: &WaitEntry,
    clock: &dyn Clock,
    work: &mut impl Background,
    due: Due,
    poller: &Poller,
    events: &mut Vec<pvblk_sys::PollEvent>,
) {
    wait.prepare_to_wait();
    let armed = work.arm(poller);
    if !wait.take_pending() {
        events.clear();
        let slept = armed.and_then(|armed| {
            let timeout = match due.earlier(armed) {
                Due::Now => return Ok(()),
                Due::At(at) => Some(at.saturating_duration_since(clock.now())),
                Due::Never => None,
            };
            poller.wait(events, timeout)
        });
        if slept.is_err() {
            // The kernel is out of memory: the thread had better be late than busy.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    wait.finish_wait();
    wait.event().drain();
    work.woken();
}

impl Drop for BackgroundThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wait.wake();
        if let Some(thread) = self.thread.take() {
            // A step that panicked has printed its message.
            let _ = thread.join();
        }
    }
}
