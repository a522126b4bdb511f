//! Many seeds in a row.

use crate::{Counts, Failure, Options, Scenario};
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Sums over many seeds.
#[derive(Clone, Debug, Default)]
pub struct Sum {
    /// Number of seeds that passed.
    pub seeds: u64,
    /// Events by kind.
    pub counts: Counts,
    /// Time that passed in the simulations.
    pub simulated: Duration,
    /// CPU time that the simulations took.
    pub cpu: Duration,
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cpu, simulated) = (self.cpu.as_secs_f64(), self.simulated.as_secs_f64());
        write!(
            f,
            "{} seeds passed in {cpu:.1} s of CPU time, {:.0} a second; {simulated:.1} s were simulated, {:.1} in each second of CPU time: {}",
            self.seeds,
            self.seeds as f64 / cpu,
            simulated / cpu,
            self.counts
        )
    }
}

/// Runs `seeds` seeds from `first` on while `goes_on` says so, which is given the number of seeds done. Ends
/// with the first seed that fails.
pub fn run(
    scenario: &Scenario,
    options: &Options,
    first: u64,
    seeds: u64,
    mut goes_on: impl FnMut(u64) -> bool,
) -> (Sum, Option<Box<Failure>>) {
    let begin = cpu_time();
    let mut sum = Sum::default();
    let mut failure = None;
    while sum.seeds < seeds && goes_on(sum.seeds) {
        match scenario.run(first.wrapping_add(sum.seeds), options) {
            Ok(report) => {
                sum.counts += &report.counts;
                sum.simulated += report.simulated;
                sum.seeds += 1;
            }
            Err(found) => {
                failure = Some(found);
                break;
            }
        }
    }
    sum.cpu = cpu_time().saturating_sub(begin);
    (sum, failure)
}

/// The failure of the first seed of `seeds` that finds the bug.
pub fn find(scenario: &Scenario, options: &Options, seeds: Range<u64>) -> Option<Box<Failure>> {
    let many = seeds.end - seeds.start;
    run(scenario, options, seeds.start, many, |_| true).1
}

/// CPU time of this thread; elapsed time where the kernel doesn't count it.
fn cpu_time() -> Duration {
    thread_local!(static START: Instant = Instant::now());
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ns = stat.and_then(|s| s.split(' ').next()?.parse().ok());
    ns.map_or_else(|| START.with(Instant::elapsed), Duration::from_nanos)
}
