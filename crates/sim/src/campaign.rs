//! Many seeds in a row.

use crate::{Counts, Failure, Options, Scenario};
use std::fmt;
use std::time::{Duration, Instant};

/// What many seeds add up to.
#[derive(Clone, Debug, Default)]
pub struct Sum {
    /// Seeds that passed.
    pub seeds: u64,
    /// Events by kind.
    pub counts: Counts,
    /// Time that passed in the simulated worlds.
    pub simulated: Duration,
    /// Processor time that this took.
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

/// Runs `seeds` seeds from `first` on, while `goes_on` (it is given how many are done) says so. Ends with the first that fails.
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

/// The first seed of `seeds` that finds the bug.
pub fn find(scenario: &Scenario, options: &Options, seeds: u64) -> Option<Box<Failure>> {
    run(scenario, options, 0, seeds, |_| true).1
}

/// Processor time of this thread; where the kernel doesn't count it, time.
fn cpu_time() -> Duration {
    thread_local!(static START: Instant = Instant::now());
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ns = stat.and_then(|s| s.split(' ').next()?.parse().ok());
    ns.map_or_else(|| START.with(Instant::elapsed), Duration::from_nanos)
}
