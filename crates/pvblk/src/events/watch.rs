//! The thread that looks once a second: for requests that hang, and for threads that make no progress.

use crate::daemon;
use crate::sandbox::State;
use anyhow::{Context, Result};
use parking_lot::{Condvar, Mutex};
use pvblk_backend::{Progress, Service};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Age from which on a request counts as hanging: the kernel's time for a SCSI command.
const HANG_AFTER: Duration = Duration::from_secs(30);

/// The age from which on a request counts as hanging, by flag or key.
pub fn hang_after(flag: Option<Duration>) -> Duration {
    flag.unwrap_or(HANG_AFTER)
}

#[derive(Default)]
struct Stopping {
    told: Mutex<bool>,
    changed: Condvar,
}

/// Looks until it is dropped.
pub struct Watch {
    stopping: Arc<Stopping>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Looks for requests older than `hang_after`. If systemd watches the process, it is told that the process is well as long as all
    /// workers and control threads make progress.
    pub fn start(service: &Arc<Service>, hang_after: Duration) -> Result<Watch> {
        let (stopping, service) = (Arc::<Stopping>::default(), Arc::downgrade(service));
        let told = Arc::clone(&stopping);
        let mut watchdog = Watchdog::find();
        let thread = std::thread::Builder::new()
            .name("pvblk-watch".into())
            .stack_size(256 << 10)
            .spawn(move || {
                while !told.wait(watchdog.as_ref().map_or(LOOK, |w| w.every.min(LOOK))) {
                    let Some(service) = service.upgrade() else {
                        return;
                    };
                    service.look(hang_after);
                    if let Some(watchdog) = &mut watchdog {
                        watchdog.look(&service);
                    }
                }
            })
            .context("starting a thread that looks for requests that hang")?;
        Ok(Watch {
            stopping,
            thread: Some(thread),
        })
    }
}

impl Stopping {
    /// Waits; true if it is to stop.
    fn wait(&self, patience: Duration) -> bool {
        let mut told = self.told.lock();
        if !*told {
            self.changed.wait_for(&mut told, patience);
        }
        *told
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.stopping.told.lock() = true;
        self.stopping.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// systemd's watchdog of this process (`WatchdogSec=`).
struct Watchdog {
    /// Half of the time after which systemd ends the process.
    every: Duration,
    progress: Progress,
    /// A thread is stuck, and that was logged.
    complained: bool,
}

impl Watchdog {
    /// As sd_watchdog_enabled(3); `sd_notify`'s wants `WATCHDOG_PID`, which needn't be there.
    fn find() -> Option<Watchdog> {
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let ours = u64::from(std::process::id());
        let usec = number("WATCHDOG_USEC").filter(|&usec| usec > 0)?;
        if number("WATCHDOG_PID").is_some_and(|pid| pid != ours) {
            return None;
        }
        Some(Watchdog {
            every: Duration::from_micros(usec / 2).max(Duration::from_millis(1)),
            progress: Progress::default(),
            complained: false,
        })
    }

    fn look(&mut self, service: &Service) {
        match self.progress.stuck(service, Instant::now(), self.every) {
            None => {
                self.complained = false;
                // It isn't there any more, perhaps.
                daemon::tell(State::Watchdog);
            }
            Some(name) if !std::mem::replace(&mut self.complained, true) => {
                tracing::error!(
                    "{name} has made no progress for {:.1} s: systemd's watchdog isn't told that all is well",
                    self.every.as_secs_f64()
                );
            }
            Some(_) => {}
        }
    }
}
