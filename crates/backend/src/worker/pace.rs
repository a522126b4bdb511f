//! The time that a worker polls before it sleeps, and the times at which it yields its CPU.

use std::time::{Duration, Instant};

/// The spin window with which growth from zero begins.
const SPIN_START: Duration = Duration::from_micros(4);

/// The spin window after a sleep of `slept`.
pub fn next_spin(spin: Duration, slept: Duration, max: Duration) -> Duration {
    if slept <= max {
        (spin * 2).clamp(SPIN_START, max.max(SPIN_START)).min(max)
    } else if spin <= SPIN_START {
        Duration::ZERO
    } else {
        spin / 2
    }
}

/// Yields the CPU while polling: the peer that a lane waits for may need this very CPU. Where nobody takes it, yields are made
/// rarer, since a request that comes during one is seen late. Threads that compute keep the CPU: if a yield took long, the next
/// one comes only after a while.
pub struct YieldPolicy {
    /// Idle steps since the last yield, and those from one to the next.
    steps: u32,
    every: u32,
    not_before: Option<Instant>,
    pause: Duration,
}

impl Default for YieldPolicy {
    fn default() -> YieldPolicy {
        YieldPolicy {
            steps: 0,
            every: EVERY_MIN,
            not_before: None,
            pause: Duration::ZERO,
        }
    }
}

/// Idle steps between two yields: about a microsecond, and about six.
const EVERY_MIN: u32 = 8;
const EVERY_MAX: u32 = 64;
/// Two switches of threads take longer than this, a yield to nobody doesn't.
const TAKEN: Duration = Duration::from_nanos(1200);
/// A peer that responds takes the CPU for less than this; a thread that computes takes a whole time slice.
const TAKEN_FOR_LONG: Duration = Duration::from_micros(500);
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

impl YieldPolicy {
    /// A step found nothing to do: yields the CPU if it is time. Returns the time, if it was read.
    #[inline]
    pub fn idle_step(&mut self) -> Option<Instant> {
        self.steps += 1;
        if self.steps < self.every {
            return None;
        }
        self.steps = 0;
        Some(self.offer())
    }

    fn offer(&mut self) -> Instant {
        let before = Instant::now();
        if self.not_before.is_some_and(|t| before < t) {
            return before;
        }
        std::thread::yield_now();
        let after = Instant::now();
        self.learn(before, after);
        after
    }

    fn learn(&mut self, before: Instant, after: Instant) {
        let took = after.duration_since(before);
        self.every = match took < TAKEN {
            true => (self.every * 2).min(EVERY_MAX),
            false => EVERY_MIN,
        };
        if took < TAKEN_FOR_LONG {
            self.not_before = None;
            self.pause /= 2;
        } else {
            self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
            self.not_before = Some(after + self.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spin_window_follows_the_load_and_stays_in_bounds() {
        let max = Duration::from_micros(50);
        let mut spin = Duration::ZERO;
        for _ in 0..10 {
            spin = next_spin(spin, Duration::from_micros(10), max);
            assert!(spin <= max);
        }
        assert_eq!(spin, max);
        for _ in 0..10 {
            spin = next_spin(spin, Duration::from_millis(10), max);
        }
        assert_eq!(spin, Duration::ZERO);
        assert_eq!(
            next_spin(spin, Duration::ZERO, Duration::ZERO),
            Duration::ZERO
        );
    }

    #[test]
    fn a_taken_cpu_is_not_offered_again_soon() {
        let mut c = YieldPolicy::default();
        let start = Instant::now();
        c.learn(start, start + Duration::from_micros(20));
        assert_eq!(c.not_before, None);
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            c.learn(start, start + Duration::from_millis(3));
            assert!(c.pause >= last && c.pause <= PAUSE_MAX);
            last = c.pause;
        }
        assert_eq!(last, PAUSE_MAX);
        c.learn(start, start + Duration::from_micros(20));
        assert!(c.not_before.is_none() && c.pause < PAUSE_MAX);
    }

    #[test]
    fn yields_that_nobody_takes_become_rarer() {
        let mut policy = YieldPolicy::default();
        let start = Instant::now();
        for _ in 0..10 {
            policy.learn(start, start + Duration::from_nanos(300));
        }
        assert_eq!(policy.every, EVERY_MAX);
        policy.learn(start, start + Duration::from_micros(5));
        assert_eq!(policy.every, EVERY_MIN);
    }
}
