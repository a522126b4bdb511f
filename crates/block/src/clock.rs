//! The time that modelled devices and deadlines live in.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Tells the time; a test's clock only moves when it is told to.
pub trait Clock: Send + Sync {
    /// The time now; never goes back.
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
    /// Moves the time on by `step`.
    pub fn advance(&self, step: Duration) {
        *self.0.lock() += step;
    }

    /// Moves the time on to `time`, unless that is past.
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
