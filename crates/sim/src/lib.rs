//! One deterministic simulation of the code between a workload and its disk. A seed runs one scenario: the
//! code of production between users and disks of this crate, in one thread, one step at a time, in an order
//! that is a function of the seed.
//!
//! ```text
//!   scenario   what runs          between            and                 what goes wrong
//!   rings      front end, back end  users             a crash disk        processes die, rings break, caches are lost
//!   raid       RAID-5               users             three to seven      power cuts, disks that fail, starts that are cut
//!   cache      page cache           users             one                 power cuts, a disk that fails, memory that is short
//!   squeeze    buffer pools, lanes  connections       one                 squeezes, connections that break
//!   stop       the order of a stop                                        disks that hang or fail
//! ```
//!
//! All of them share [`run`] and the campaign over it, the scheduler ([`scheduler`]), users ([`user`]) and
//! their requests ([`workload`]), the disk and its fault model ([`disk`]), contents of sectors ([`stamp`])
//! and the checker of contents ([`checker`]). docs/decisions/0018-one-simulation.md tells more.

pub mod bugs;
pub mod campaign;
mod checker;
mod disk;
mod fuse;
mod log;
mod scenarios;
mod scheduler;
mod stamp;
mod user;
mod workload;

pub use bugs::Bug;
pub use log::Counts;
pub use scenarios::SCENARIOS;

use log::Log;
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// A scenario that can be run.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Name on the command line.
    pub name: &'static str,
    /// One line that describes the scenario.
    pub about: &'static str,
    /// The bugs that the scenario has to find.
    pub bugs: fn() -> Vec<Bug>,
    run: fn(u64, &Options) -> Outcome,
}

impl Scenario {
    /// The scenario with this name.
    pub fn named(name: &str) -> Option<&'static Scenario> {
        SCENARIOS.iter().find(|s| s.name == name)
    }

    /// Runs one seed to its end.
    pub fn run(&self, seed: u64, options: &Options) -> Outcome {
        (self.run)(seed, options)
    }
}

/// Options of a run of a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A bug to be found.
    pub bug: Option<Bug>,
    /// Prints every event to standard error.
    pub verbose: bool,
}

/// Counts of a seed that passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of events by kind.
    pub counts: Counts,
    /// Time that was simulated.
    pub simulated: Duration,
}

/// The result of a seed.
pub type Outcome = Result<Report, Box<Failure>>;

/// A seed that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The seed, which runs the same again.
    pub seed: u64,
    /// The step in which the failure was seen.
    pub step: u64,
    /// Description of the failure.
    pub what: String,
    /// The last events, one line each.
    pub events: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}, step {}: {}", self.seed, self.step, self.what)?;
        self.events.iter().try_for_each(|e| writeln!(f, "  {e}"))
    }
}

/// The state of a scenario.
trait ScenarioState: Sized {
    /// The state at the begin of a seed.
    fn new(seed: u64, bug: Option<Bug>, log: Log) -> Result<Self, String>;

    /// Runs the scenario to its end. An error is a finding.
    fn drive(&mut self) -> Result<(), String>;

    fn log(&mut self) -> &mut Log;
}

/// Runs one seed of a scenario, and returns panics as failures.
fn run<W: ScenarioState>(seed: u64, options: &Options) -> Outcome {
    // A use of memory after it was given back finds no plausible data there.
    pvblk_sys::poison_released_memory();
    #[cfg(feature = "planted")]
    pvblk_block::planted::plant(match options.bug {
        Some(Bug::Logic(plant)) => Some(plant),
        _ => None,
    });
    let failure = |step, what, events| {
        Box::new(Failure {
            seed,
            step,
            what,
            events,
        })
    };
    let world = W::new(seed, options.bug, Log::new(options.verbose));
    let mut world = world.map_err(|what| failure(0, what, Vec::new()))?;
    let result = caught(|| world.drive());
    let log = world.log();
    match result {
        Ok(()) => {
            let mut counts = Counts::default();
            counts.add("steps", log.step);
            if log.requests > 0 {
                counts.add("requests", log.requests);
            }
            counts += &log.counts;
            let simulated = log.simulated();
            Ok(Report { counts, simulated })
        }
        Err(what) => {
            let found = failure(log.step, what, log.lines());
            // The state isn't consistent, so it isn't used again, and its destructors must not hide the
            // reason.
            std::mem::forget(world);
            Err(found)
        }
    }
}

/// Runs `f`; a panic in it is a finding.
fn caught(f: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| Err(panicked(&*payload)))
}

/// The message of a panic.
fn panicked(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    format!("panic: {}", text.unwrap_or_default())
}

/// Drops a killed process: its destructors run as in a panic, where they don't wait for anything.
fn drop_killed<T>(process: T) {
    let _ = catch_unwind(AssertUnwindSafe(move || {
        let _process = process;
        std::panic::resume_unwind(Box::new(()));
    }));
}

/// A random one of `choices`.
fn pick<T: Copy>(rng: &mut fastrand::Rng, choices: &[T]) -> T {
    choices[rng.usize(..choices.len())]
}
