//! A deterministic simulation of everything between a workload and its disk: the same front end, rings, lanes and parser
//! as in production, under a scheduler that is a function of one seed.
//!
//! ```text
//!   submitters ── Frontend ── rings ── Lanes ── CrashDisk
//!        │         └ process ┘          └ process ┘   │
//!        └────────── Checker: what may a sector hold? ┘ (it sees only what submitters see)
//! ```
//!
//! One thread, one step at a time: a submitter, a lane, the disk, or whoever starts and stops processes. Either process
//! dies between two steps or in the middle of a call (`fuse`), the disk may lose its cache, rings are broken, connections
//! are closed, and follow one another with the real handshake. docs/decisions/0006-reconnect.md says what must hold.

mod cache;
mod channel;
mod checker;
mod disk;
mod fuse;
mod log;
mod memory;
pub mod paged;
mod profile;
pub mod raid;
mod server;
pub mod squeezed;
mod stamp;
pub mod stops;
mod submitter;
mod trouble;
mod world;

use fuse::Killed;
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use world::World;

/// A bug to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// The disk acknowledges some writes before it does them.
    ReplyBeforeWrite,
    /// A flush makes only writes of its own disk queue durable.
    FlushOneQueue,
    /// A killed server's disk is free while its writes are still on their way.
    LockBeforeIo,
    /// The front end replays writes that were answered.
    #[cfg(feature = "planted")]
    ReplayAnswered,
    /// The front end doesn't look whether the disk's cache is still the one that was there.
    #[cfg(feature = "planted")]
    IgnoreCacheMark,
}

impl Planted {
    /// All of them, with names.
    pub const ALL: &[(&str, Planted)] = &[
        ("reply-before-write", Planted::ReplyBeforeWrite),
        ("flush-one-queue", Planted::FlushOneQueue),
        ("lock-before-io", Planted::LockBeforeIo),
        #[cfg(feature = "planted")]
        ("replay-answered", Planted::ReplayAnswered),
        #[cfg(feature = "planted")]
        ("ignore-cache-mark", Planted::IgnoreCacheMark),
    ];
}

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A bug to be found.
    pub planted: Option<Planted>,
    /// Print every event to standard error.
    pub verbose: bool,
}

/// What happened in a seed, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Steps.
    pub steps: u64,
    /// Requests submitted.
    pub requests: u64,
    /// Processes killed.
    pub kills: u64,
    /// Caches lost.
    pub losses: u64,
    /// Connections after a front end's first.
    pub reconnects: u64,
    /// Servers that didn't get the disk, because the last one's writes were still at work.
    pub refused: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Report) {
        self.steps += other.steps;
        self.requests += other.requests;
        self.kills += other.kills;
        self.losses += other.losses;
        self.reconnects += other.reconnects;
        self.refused += other.refused;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} steps, {} requests, {} kills, {} lost caches, {} reconnects, {} servers refused",
            self.steps, self.requests, self.kills, self.losses, self.reconnects, self.refused
        )
    }
}

/// A seed that went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Runs it again.
    pub seed: u64,
    /// The step in which it was seen.
    pub step: u64,
    /// What is wrong.
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

/// Runs one seed from the first handshake to the last page given back.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Failure>> {
    #[cfg(feature = "planted")]
    {
        let is = |bug| options.planted == Some(bug);
        pvblk_frontend::planted::replay_answered(is(Planted::ReplayAnswered));
        pvblk_frontend::planted::ignore_cache_mark(is(Planted::IgnoreCacheMark));
    }
    let mut world = World::new(seed, options);
    let result = drive(&mut world);
    match result {
        Ok(()) => {
            let mut report = world.report;
            report.steps = world.w.log.step;
            report.requests = world.w.requests;
            Ok(report)
        }
        Err(what) => {
            let failure = Failure {
                seed,
                step: world.w.log.step,
                what,
                events: world.w.log.lines(),
            };
            // Nothing of it is in order, so nothing of it is used again, and its end must not hide the reason.
            std::mem::forget(world);
            Err(Box::new(failure))
        }
    }
}

fn drive(world: &mut World) -> Result<(), String> {
    for _ in 0..world.w.profile.steps {
        guarded(world, World::step)?;
    }
    for phase in [World::come_to_rest, World::read_back, World::take_down] {
        guarded(world, phase)?;
    }
    Ok(())
}

/// Runs some of the world. A process that dies in it is buried; any other panic is a finding.
fn guarded(world: &mut World, f: fn(&mut World) -> Result<(), String>) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(|| f(world))) {
        Ok(result) => result,
        Err(payload) => match payload.downcast::<Killed>() {
            Ok(killed) => {
                world.w.log.add("somebody dies in the middle of a call", []);
                world.kill(killed.0)
            }
            Err(payload) => Err(panicked(&*payload)),
        },
    }
}

/// Runs something. A panic in it is a finding.
fn caught(f: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| Err(panicked(&*payload)))
}

/// What a panic says.
fn panicked(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    format!("panic: {}", text.unwrap_or_default())
}
