//! The thread that looks once a second: for requests that hang, and for threads that make no progress. While no disk has requests it rests longer.

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
/// The same while there is nothing to look at, unless something comes. Events that are left out meanwhile are told so much later at most.
const LOOK_AT_REST: Duration = Duration::from_secs(10);
/// Age from which on a request counts as hanging: the kernel's time for a SCSI command.
const HANG_AFTER: Duration = Duration::from_secs(30);

/// The age from which on a request counts as hanging, by flag or key.
pub fn hang_after(flag: Option<Duration>) -> Duration {
    flag.unwrap_or(HANG_AFTER)
}

/// The thread's sleep.
#[derive(Default)]
struct Sleep {
    called: Mutex<Called>,
    changed: Condvar,
}

#[derive(Default)]
struct Called {
    stops: bool,
    /// There is something to look at.
    is_active: bool,
}

/// The end of a sleep.
enum Woken {
    /// The time is over.
    Time,
    Active,
    Stops,
}

/// Looks until it is dropped.
pub struct Watch {
    sleep: Arc<Sleep>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Looks for requests older than `hang_after`. If systemd watches the process, it is told that the process is well as long as all
    /// workers and control threads make progress.
    pub fn start(service: &Arc<Service>, hang_after: Duration) -> Result<Watch> {
        let sleep = Arc::<Sleep>::default();
        let (wake, ours) = (Arc::downgrade(&sleep), Arc::clone(&sleep));
        service.when_active(move || {
            if let Some(sleep) = wake.upgrade() {
                sleep.call(|called| called.is_active = true);
            }
        });
        let service = Arc::downgrade(service);
        let mut watchdog = Watchdog::find();
        let thread = std::thread::Builder::new()
            .name("pvblk-watch".into())
            .stack_size(256 << 10)
            .spawn(move || {
                let mut is_active = true;
                loop {
                    let every = watchdog.as_ref().map(|w| w.every);
                    match ours.wait(patience(is_active, every), !is_active) {
                        Woken::Stops => return,
                        Woken::Active => {
                            is_active = true;
                            continue;
                        }
                        Woken::Time => {}
                    }
                    let Some(service) = service.upgrade() else {
                        return;
                    };
                    is_active = service.look(hang_after);
                    if let Some(watchdog) = &mut watchdog {
                        watchdog.look(&service);
                    }
                }
            })
            .context("starting a thread that looks for requests that hang")?;
        Ok(Watch {
            sleep,
            thread: Some(thread),
        })
    }
}

/// The longest sleep. With a watchdog, two of them in a row are as long as its `every`: a sleep at rest that is cut short is followed by another one
/// before systemd is told, and a control thread that was slow at one look has another before systemd ends the process.
fn patience(is_active: bool, every: Option<Duration>) -> Duration {
    let most = if is_active { LOOK } else { LOOK_AT_REST };
    every.map_or(most, |every| most.min(every / 2))
}

impl Sleep {
    /// Sleeps for this time, or until the thread is to stop; if it is at rest, also until there is something to look at.
    fn wait(&self, patience: Duration, at_rest: bool) -> Woken {
        let until = Instant::now() + patience;
        let mut called = self.called.lock();
        loop {
            if called.stops {
                return Woken::Stops;
            }
            if std::mem::take(&mut called.is_active) && at_rest {
                return Woken::Active;
            }
            if self.changed.wait_until(&mut called, until).timed_out() {
                return Woken::Time;
            }
        }
    }

    fn call(&self, what: impl FnOnce(&mut Called)) {
        what(&mut self.called.lock());
        self.changed.notify_all();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.sleep.call(|called| called.stops = true);
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

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_thread_at_rest_is_woken_by_the_first_request() {
        let sleep = Sleep::default();
        // During a look.
        sleep.call(|called| called.is_active = true);
        assert!(matches!(sleep.wait(LONG, true), Woken::Active));
        assert!(matches!(
            sleep.wait(Duration::from_millis(1), true),
            Woken::Time
        ));
        std::thread::scope(|s| {
            s.spawn(|| sleep.call(|called| called.is_active = true));
            assert!(matches!(sleep.wait(LONG, true), Woken::Active));
        });
    }

    #[test]
    fn two_sleeps_are_as_long_as_a_watchdog_allows() {
        assert_eq!(patience(false, None), LOOK_AT_REST);
        for ms in [500, 1000, 7500, 15_000, 60_000] {
            let every = Duration::from_millis(ms);
            let cut_short = patience(false, Some(every)) + patience(true, Some(every));
            assert!(cut_short <= every, "{every:?}");
            assert!(2 * patience(false, Some(every)) <= every.min(2 * LOOK_AT_REST));
        }
    }

    #[test]
    fn a_thread_that_looks_already_is_woken_by_the_end_only() {
        let sleep = Sleep::default();
        sleep.call(|called| called.is_active = true);
        assert!(matches!(
            sleep.wait(Duration::from_millis(1), false),
            Woken::Time
        ));
        assert!(
            matches!(sleep.wait(Duration::from_millis(1), true), Woken::Time),
            "an old call"
        );
        sleep.call(|called| called.stops = true);
        assert!(matches!(sleep.wait(LONG, false), Woken::Stops));
        assert!(matches!(sleep.wait(LONG, true), Woken::Stops));
    }
}
