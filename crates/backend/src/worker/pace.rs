//! How long a worker polls before it sleeps, and when it gives its CPU away.

use std::time::{Duration, Instant};

/// A spin window that grows from nothing starts here.
const SPIN_START: Duration = Duration::from_micros(4);

/// The next spin window after a sleep of `slept`.
pub fn tuned(spin: Duration, slept: Duration, max: Duration) -> Duration {
    if slept <= max {
        (spin * 2).clamp(SPIN_START, max.max(SPIN_START)).min(max)
    } else if spin <= SPIN_START {
        Duration::ZERO
    } else {
        spin / 2
    }
}

/// Gives the CPU away while polling: whoever we wait for may need this very one. But not to those who
/// keep it: an offer that was taken for long is not repeated for a while.
#[derive(Default)]
pub struct Courtesy {
    not_before: Option<Instant>,
    pause: Duration,
}

/// A peer that answers takes the CPU for less than this; somebody who computes, for a whole time slice.
const TAKEN_FOR_LONG: Duration = Duration::from_micros(500);
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

impl Courtesy {
    pub fn offer(&mut self) {
        let before = Instant::now();
        if self.not_before.is_some_and(|t| before < t) {
            return;
        }
        std::thread::yield_now();
        self.learn(before, Instant::now());
    }

    fn learn(&mut self, before: Instant, after: Instant) {
        if after.duration_since(before) < TAKEN_FOR_LONG {
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
            spin = tuned(spin, Duration::from_micros(10), max);
            assert!(spin <= max);
        }
        assert_eq!(spin, max);
        for _ in 0..10 {
            spin = tuned(spin, Duration::from_millis(10), max);
        }
        assert_eq!(spin, Duration::ZERO);
        assert_eq!(tuned(spin, Duration::ZERO, Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn a_taken_cpu_is_not_offered_again_soon() {
        let mut c = Courtesy::default();
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
}
