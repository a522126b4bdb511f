//! A clock for measuring short times on the path of a request: the CPU's time stamp counter, which takes half the time of a look at the kernel's clock.
//! It is used where the kernel keeps its own time by this counter, so it runs at one rate on all CPUs; elsewhere the kernel's monotonic clock is.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time for which the rate is measured. The error of two looks, some 50 ns each, is then below 0.1 per mille.
const CALIBRATION: Duration = Duration::from_millis(2);
/// Looks at both clocks of which the closest is taken: the thread may lose its CPU between two clocks, for longer than the calibration.
const LOOKS: u32 = 16;

/// The counter's rate, for converting many times.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    uses_counter: bool,
    /// Nanoseconds of one tick, times 2^32.
    scale: u64,
    origin: Instant,
}

static RATE: OnceLock<Rate> = OnceLock::new();

/// Measures the counter's rate, which takes 2 ms. The first [`now`] does it otherwise.
pub fn calibrate() {
    let _ = RATE.get_or_init(Rate::measure);
}

/// Ticks since some moment of the past. Differences are for [`to_ns`]; between two CPUs one may come out below zero by some nanoseconds, so take them by `saturating_sub`.
#[inline]
pub fn now() -> u64 {
    rate().now()
}

/// Nanoseconds of so many ticks.
pub fn to_ns(ticks: u64) -> u64 {
    rate().to_ns(ticks)
}

/// The rate, which is measured if it hasn't been.
#[inline]
pub fn rate() -> &'static Rate {
    RATE.get_or_init(Rate::measure)
}

/// Nanoseconds of the system's monotonic clock, which is the same in all processes of a machine.
///
/// It asks libc, whose look at the clock works under valgrind: rustix's reads the vDSO that valgrind hides.
#[inline]
pub fn monotonic_ns() -> u64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `t` is a `timespec` that the call writes.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    // The clock exists on every Linux, so there is no error.
    debug_assert_eq!(rc, 0);
    (t.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(t.tv_nsec as u64)
}

impl Rate {
    /// As [`now`], without a look at whether the rate was measured.
    #[inline]
    pub fn now(&self) -> u64 {
        match self.uses_counter {
            true => counter(),
            false => self.origin.elapsed().as_nanos() as u64,
        }
    }

    /// Nanoseconds of so many ticks.
    #[inline]
    pub fn to_ns(&self, ticks: u64) -> u64 {
        ((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64
    }

    fn measure() -> Rate {
        let (first, origin) = look(counter, Instant::now);
        if !kernel_uses_the_counter() {
            return Rate {
                uses_counter: false,
                scale: 1 << 32,
                origin,
            };
        }
        std::thread::sleep(CALIBRATION);
        let (last, end) = look(counter, Instant::now);
        let elapsed = end.saturating_duration_since(origin).as_nanos();
        let ticks = u128::from(last.saturating_sub(first).max(1));
        Rate {
            uses_counter: true,
            scale: ((elapsed << 32) / ticks) as u64,
            origin,
        }
    }
}

/// The counter and the clock at the same moment: of several looks the one with the fewest ticks around it.
fn look<T>(mut counter: impl FnMut() -> u64, mut clock: impl FnMut() -> T) -> (u64, T) {
    let mut one = || {
        let before = counter();
        let at = clock();
        let took = counter().saturating_sub(before);
        (took, (before + took / 2, at))
    };
    let mut closest = one();
    for _ in 1..LOOKS {
        let next = one();
        if next.0 < closest.0 {
            closest = next;
        }
    }
    closest.1
}

fn kernel_uses_the_counter() -> bool {
    const NAME: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    cfg!(target_arch = "x86_64")
        && std::fs::read_to_string(NAME).is_ok_and(|name| name.trim() == "tsc")
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: reads a register. Linux lets all processes do so, unless one forbids it to itself by prctl(PR_SET_TSC).
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_run_with_the_kernels_clock() {
        calibrate();
        // The least of several, since a thread may lose its CPU between two looks.
        let error = || {
            let (before, first) = (Instant::now(), now());
            std::thread::sleep(Duration::from_millis(20));
            let (ticks, elapsed) = (now().saturating_sub(first), before.elapsed());
            to_ns(ticks).abs_diff(elapsed.as_nanos() as u64)
        };
        let least = (0..50).map(|_| error()).min().unwrap_or(u64::MAX);
        assert!(least < 1_000_000, "{least} ns in 20 ms");
    }

    /// The thread loses its CPU in most looks: before the clock, behind it, or both.
    #[test]
    fn a_look_is_at_one_moment() {
        use std::cell::Cell;
        for clear in 0..LOOKS {
            let (time, steps) = (Cell::new(1000), Cell::new(0));
            // Each reading takes 10; three are one look.
            let reading = || {
                let (step, read) = (steps.get(), time.get());
                let is_cut = step / 3 != clear && step % 3 != step / 3 % 3;
                time.set(read + 10 + u64::from(is_cut) * 4_000_000);
                steps.set(step + 1);
                read
            };
            let (ticks, at) = look(reading, reading);
            assert!(ticks.abs_diff(at) <= 10, "{ticks} ticks at {at}");
            assert_eq!(steps.get(), 3 * LOOKS);
        }
    }

    #[test]
    fn long_times_do_not_overflow() {
        let second = (1u64 << 32) as f64 * 1e9 / RATE.get_or_init(Rate::measure).scale as f64;
        let year = to_ns((second * 31_557_600.0) as u64);
        assert!(
            year.abs_diff(31_557_600_000_000_000) < 1_000_000_000,
            "{year}"
        );
    }
}
