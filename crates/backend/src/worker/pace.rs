//! The time that a worker polls before it sleeps, and the times at which it yields its CPU.

use std::time::{Duration, Instant};

/// Time that a wake-up across CPUs takes: polling that saves one is worth as much.
const WAKE_UP: Duration = Duration::from_micros(25);
/// The windows that are compared, as parts of the longest.
const PARTS: [u32; 2] = [4, 1];

/// An idle time of a lane, which has ended.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    pub time: Duration,
    /// The lane slept, so the time has a wake-up in it.
    pub slept: bool,
}

/// The time for which a lane that found no work is polled before it sleeps: the longest one, a quarter of it, or none. Each idle time that isn't
/// longer than a window counts 25 µs for it, each longer one counts the window against it. The window that has gained most in the last idle times
/// is taken, and none if both have lost.
#[derive(Clone, Debug)]
pub struct SpinWindow {
    longest: Duration,
    /// The longest one is taken always.
    fixed: bool,
    /// Nanoseconds that each window gains in an idle time, averaged over some eight.
    gains: [i64; PARTS.len()],
}

impl SpinWindow {
    /// Windows of at most `longest`; the first is a quarter of it.
    pub fn new(longest: Duration) -> SpinWindow {
        SpinWindow {
            longest,
            fixed: false,
            gains: [1, 0],
        }
    }

    /// A window that doesn't change.
    pub fn fixed(window: Duration) -> SpinWindow {
        SpinWindow {
            fixed: true,
            ..SpinWindow::new(window)
        }
    }

    /// The window to poll for now.
    pub fn get(&self) -> Duration {
        if self.fixed {
            return self.longest;
        }
        let mut best = (0, Duration::ZERO);
        for (gain, part) in self.gains.into_iter().zip(PARTS) {
            if gain > best.0 {
                best = (gain, self.longest / part);
            }
        }
        best.1
    }

    pub fn learn(&mut self, idle: Idle) {
        let wake_up = if idle.slept { WAKE_UP } else { Duration::ZERO };
        let time = idle.time.saturating_sub(wake_up);
        for (gain, part) in self.gains.iter_mut().zip(PARTS) {
            let window = self.longest / part;
            let gained = match time <= window {
                true => nanos(WAKE_UP),
                false => -nanos(window),
            };
            *gain += (gained - *gain) / 8;
        }
    }
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX / 16)
}

/// A lane's windows, one for each side that it waits for: a fast client of a slow disk comes back soon, and the disk doesn't.
#[derive(Clone, Debug)]
pub struct SpinWindows {
    /// While nothing is at the device: for the next request.
    requests: SpinWindow,
    /// While requests are at the device.
    device: SpinWindow,
}

impl From<SpinWindow> for SpinWindows {
    fn from(window: SpinWindow) -> SpinWindows {
        SpinWindows {
            requests: window.clone(),
            device: window,
        }
    }
}

impl SpinWindows {
    pub fn of(&self, at_device: bool) -> &SpinWindow {
        match at_device {
            true => &self.device,
            false => &self.requests,
        }
    }

    pub fn of_mut(&mut self, at_device: bool) -> &mut SpinWindow {
        match at_device {
            true => &mut self.device,
            false => &mut self.requests,
        }
    }

    /// The windows to poll for now.
    pub fn get(&self) -> Polled {
        Polled {
            requests: self.requests.get(),
            device: self.device.get(),
        }
    }
}

/// The times for which an idle lane is polled before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polled {
    /// While nothing is at the device.
    pub requests: Duration,
    /// While requests are at the device.
    pub device: Duration,
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

    const LONGEST: Duration = Duration::from_micros(100);

    /// The window after idle times of so many microseconds, again and again. A sleep is over 40 µs late.
    fn after(mut window: SpinWindow, times: &[u64]) -> (SpinWindow, u128) {
        for time in times.iter().cycle().take(60 * times.len()) {
            let time = Duration::from_micros(*time);
            let slept = time > window.get();
            let late = Duration::from_micros(if slept { 40 } else { 0 });
            window.learn(Idle {
                time: time + late,
                slept,
            });
        }
        let us = window.get().as_micros();
        (window, us)
    }

    #[test]
    fn the_spin_window_follows_the_idle_times() {
        assert_eq!(SpinWindow::new(LONGEST).get(), LONGEST / 4);
        let cases: [(&[u64], u128); 8] = [
            (&[3], 25),
            (&[30], 100),
            (&[80], 100),
            (&[120], 0),
            (&[1_000_000], 0),
            // A long one now and then isn't the load.
            (&[30, 30, 30, 30, 30, 30, 30, 30, 30, 5000], 100),
            // Short waits for a device, and long ones for the next request.
            (&[80, 900], 0),
            (&[10, 10, 10, 900], 25),
        ];
        for (times, window) in cases {
            // From polling, and from none: sleeps are longer than the same times without one.
            assert_eq!(
                after(SpinWindow::new(LONGEST), times).1,
                window,
                "{times:?}"
            );
            let (sleeps, none) = after(SpinWindow::new(LONGEST), &[1_000_000]);
            assert_eq!(none, 0);
            assert_eq!(after(sleeps, times).1, window, "{times:?} after a rest");
        }
    }

    #[test]
    fn each_side_has_a_window_of_its_own() {
        let mut windows = SpinWindows::from(SpinWindow::new(LONGEST));
        for _ in 0..100 {
            for (at_device, us) in [(true, 80), (false, 900)] {
                let time = Duration::from_micros(us);
                let slept = time > windows.of(at_device).get();
                windows.of_mut(at_device).learn(Idle { time, slept });
            }
        }
        let polled = Polled {
            requests: Duration::ZERO,
            device: LONGEST,
        };
        assert_eq!(windows.get(), polled);
    }

    #[test]
    fn a_fixed_window_learns_nothing() {
        let window = Duration::from_micros(70);
        for times in [&[3][..], &[1_000_000]] {
            assert_eq!(after(SpinWindow::fixed(window), times).1, 70);
        }
    }

    #[test]
    fn without_a_longest_window_nothing_is_polled() {
        let mut window = SpinWindow::new(Duration::ZERO);
        for _ in 0..100 {
            window.learn(Idle {
                time: Duration::ZERO,
                slept: false,
            });
            assert_eq!(window.get(), Duration::ZERO);
        }
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
