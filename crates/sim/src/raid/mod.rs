//! A deterministic simulation of a RAID-5 array whose power is cut: the array of production on members that lose their caches,
//! fail, and come back, under a scheduler that is a function of one seed.
//!
//! ```text
//!   submitters ── Raid5 ── CrashMember …
//!        │                      │
//!        └── Oracle ── Raw ─────┘   what may a sector hold, and is parity right?
//! ```
//!
//! One thread, one step at a time: a submitter, or a member. The power is cut at any step, also while the array is being started or stopped;
//! then it is started again, everything is read back, and the members themselves are looked at. docs/decisions/0009-raid5.md says what must hold.

mod boot;
pub(crate) mod disk;
pub(crate) mod image;
mod inspect;
pub(crate) mod oracle;
pub(crate) mod planted;
mod profile;
mod shape;
pub(crate) mod stamp;
pub(crate) mod submitter;
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
    /// Power cycles.
    pub cycles: u64,
    /// Starts, those that were cut included.
    pub starts: u64,
    /// Power cuts.
    pub cuts: u64,
    /// Sectors that were in caches then.
    pub lost: u64,
    /// Members that failed.
    pub losses: u64,
    /// Sectors that nobody can know after a crash without a member.
    pub unknown: u64,
    /// Members that were rebuilt or replaced.
    pub rebuilt: u64,
    /// Pages whose memory went back to the system.
    pub given_back: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Report) {
        self.steps += other.steps;
        self.requests += other.requests;
        self.cycles += other.cycles;
        self.starts += other.starts;
        self.cuts += other.cuts;
        self.lost += other.lost;
        self.losses += other.losses;
        self.unknown += other.unknown;
        self.rebuilt += other.rebuilt;
        self.given_back += other.given_back;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} steps, {} requests, {} cycles, {} starts, {} cuts with {} sectors in caches, {} members failed, {} rebuilt, {} sectors unknown, {} pages given back",
            self.steps,
            self.requests,
            self.cycles,
            self.starts,
            self.cuts,
            self.lost,
            self.losses,
            self.rebuilt,
            self.unknown,
            self.given_back
        )
    }
}

/// Runs one seed, from a new array to one that was stopped in order and holds what it should.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Failure>> {
    #[cfg(feature = "planted")]
    Bug::plant(options.planted);
    let failure = |step, what, events| {
        Box::new(Failure {
            seed,
            step,
            what,
            events,
        })
    };
    let mut world = World::new(seed, options).map_err(|what| failure(0, what, Vec::new()))?;
    match caught(|| drive(&mut world)) {
        Ok(()) => {
            let mut report = world.report;
            report.steps = world.c.log.step;
            report.requests = world.c.requests;
            Ok(report)
        }
        Err(what) => {
            let found = failure(world.c.log.step, what, world.c.log.lines());
            // Nothing of it is in order, so nothing of it is used again, and its end must not hide the reason.
            std::mem::forget(world);
            Err(found)
        }
    }
}

fn drive(world: &mut World) -> Result<(), String> {
    let cycles = world.c.profile.cycles;
    for _ in 0..cycles {
        world.boot(false)?;
        // Now and then nobody looks before there is work.
        let looks = world.c.rng.u8(..8) > 0;
        let cut = world.c.rng.u8(..8) == 0;
        let goes_on = !looks || world.read_back(true, cut)?;
        if goes_on {
            world.work()?;
            match world.c.rng.u8(..8) {
                0 => {
                    world.rest()?;
                    // An array that ended leaves stripes as they happen to be.
                    if !world.c.may_fail {
                        world.look()?;
                    }
                }
                1 if !world.c.may_fail => {
                    let cut = world.c.rng.bool();
                    world.stop(cut)?;
                }
                _ => {}
            }
        }
        world.cut();
        world.report.cycles += 1;
    }
    world.boot(true)?;
    world.read_back(true, false)?;
    world.stop(false)?;
    world.cut();
    world.boot(true)?;
    world.read_back(true, false)?;
    world.stop(false)
}
