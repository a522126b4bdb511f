//! A deterministic simulation of a page cache whose power is cut: the cache of production on a disk that loses its own cache and fails now and
//! then, under a scheduler that is a function of one seed.
//!
//! ```text
//!   submitters ── PageCache ── CrashMember
//!        │          keeper          │
//!        └── Oracle ────────────────┘   what may a sector hold?
//! ```
//!
//! One thread, one step at a time, on a clock that stands still unless all wait. After each cut everything is read back, through a new cache.
//! docs/decisions/0012-page-cache.md says what must hold.

mod planted;
mod profile;
mod submitter;
mod world;

pub use planted::Bug;

use crate::{Failure, caught};
use std::fmt;
use world::World;

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A bug to be found.
    pub planted: Option<Bug>,
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
    /// Power cuts.
    pub cuts: u64,
    /// Sectors that were in the disk's cache then.
    pub lost: u64,
    /// Pages that were dirty then.
    pub dirty: u64,
    /// Times that the disk failed.
    pub failures: u64,
    /// Pages reclaimed.
    pub reclaimed: u64,
    /// Sleeps for memory.
    pub stalls: u64,
    /// Writers that waited because too much was dirty.
    pub throttled: u64,
    /// Pages read in advance.
    pub ahead: u64,
    /// Pages whose memory went back to the system.
    pub given_back: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Report) {
        self.steps += other.steps;
        self.requests += other.requests;
        self.cuts += other.cuts;
        self.lost += other.lost;
        self.dirty += other.dirty;
        self.failures += other.failures;
        self.reclaimed += other.reclaimed;
        self.stalls += other.stalls;
        self.throttled += other.throttled;
        self.ahead += other.ahead;
        self.given_back += other.given_back;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} steps, {} requests, {} cuts with {} dirty pages and {} sectors in the disk's cache, {} failures, {} pages reclaimed, {} read in advance, {} given back, {} stalls, {} throttled",
            self.steps,
            self.requests,
            self.cuts,
            self.dirty,
            self.lost,
            self.failures,
            self.reclaimed,
            self.ahead,
            self.given_back,
            self.stalls,
            self.throttled
        )
    }
}

/// Runs one seed, from a disk of zeros to the last read-back.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Failure>> {
    #[cfg(feature = "planted")]
    Bug::plant(options.planted);
    let mut world = World::new(seed, options);
    match caught(|| drive(&mut world)) {
        Ok(()) => {
            let mut report = world.report;
            report.steps = world.c.log.step;
            report.requests = world.c.requests;
            Ok(report)
        }
        Err(what) => {
            let found = Failure {
                seed,
                step: world.c.log.step,
                what,
                events: world.c.log.lines(),
            };
            // Nothing of it is in order, so nothing of it is used again, and its end must not hide the reason.
            std::mem::forget(world);
            Err(Box::new(found))
        }
    }
}

fn drive(world: &mut World) -> Result<(), String> {
    for _ in 0..world.c.profile.cycles {
        world.boot()?;
        // Now and then nobody looks before there is work.
        let looks = world.c.rng.u8(..8) > 0;
        let cut = world.c.rng.u8(..8) == 0;
        if !looks || world.read_back(true, cut)? {
            world.work()?;
            if world.c.rng.u8(..4) == 0 {
                world.rest()?;
                world.read_back(false, false)?;
            }
        }
        world.cut();
    }
    world.boot()?;
    world.read_back(true, false)?;
    world.cut();
    Ok(())
}
