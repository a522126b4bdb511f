//! CPUs that this process may use, and settings of the calling thread.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;

/// CPUs that this process may run on, in rising order.
pub fn allowed() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&c| set.is_set(c)).collect(),
        Err(_) => vec![0],
    }
}

/// Binds the calling thread to one CPU.
pub fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Sets the timer slack of the calling thread: its timers fire at most `ns` late (the kernel's default is 50 µs).
pub fn set_timer_slack_ns(ns: u64) -> io::Result<()> {
    Ok(rustix::thread::set_current_timer_slack(
        std::num::NonZeroU64::new(ns),
    )?)
}
