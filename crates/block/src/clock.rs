//! The time by which modelled devices and deadlines go.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// A source of time; a test's clock moves only when the test moves it.
pub trait Clock: Send + Sync {
    /// The current time, which never goes back.
    fn now(&self) -> Instant;
}

/// The system's monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// A clock that stands still until [`ManualClock::advance`], for tests and simulation.
#[derive(Debug)]
pub struct ManualClock(Mutex<Instant>);

impl Default for ManualClock {
    fn default() -> ManualClock {
        ManualClock(Mutex::new(Instant::now()))
    }
}

impl ManualClock {
    /// Moves the clock forward by `step`.
    pub fn advance(&self, step: Duration) {
        *self.0.lock() += step;
    }

    /// Moves the clock forward to `time`, unless that is past.
    pub fn advance_to(&self, time: Instant) {
        let mut now = self.0.lock();
        *now = (*now).max(time);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        *self.0.lock()
    }
}
