//! The machine of a measurement.

use rustix::time::{ClockId, clock_gettime};

pub use pvblk_bench::Machine;

/// CPU time in nanoseconds by one of the CPU-time clocks, of a thread or of the process.
pub(crate) fn cpu_ns(clock: ClockId) -> f64 {
    let t = clock_gettime(clock);
    t.tv_sec as f64 * 1e9 + t.tv_nsec as f64
}
