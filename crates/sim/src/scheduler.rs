//! Who moves next: one actor in each step, chosen by the dice among all of a world, each with its share. When nobody whom the dice chose has
//! moved for a while, all are asked; when nobody moves at all, time passes; and when no time helps either, somebody waits for ever.

use crate::World;
use crate::user::User;
use crate::workload::Workload;
use fastrand::Rng;

/// Steps in which everything must come to rest.
const MOST_STEPS: u64 = 400_000;
/// Steps without any movement after which all are asked.
const PATIENCE: u32 = 64;

/// A number of actors that are alike, and the share of each.
pub type Group = (usize, u32);

/// What the scheduler has to know of a world.
pub trait Actors: World {
    /// All chance.
    fn dice(&mut self) -> &mut Rng;

    /// What its users share, if it has any.
    fn workload(&mut self) -> Option<&mut Workload> {
        None
    }

    /// All who can move, in the order in which they are numbered.
    fn groups(&self) -> [Group; 5];

    /// What is looked at before a step.
    fn look_around(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Lets an actor do one thing; false if it sleeps. `fill`: new work and new trouble may begin.
    fn act(&mut self, actor: usize, fill: bool) -> Result<bool, String>;

    /// Nobody moves: time passes until somebody will. False if nobody waits for any time.
    fn pass_time(&mut self) -> bool {
        false
    }

    /// Users of the device under test.
    fn users(&self) -> &[User] {
        &[]
    }

    /// Nothing is in flight besides, and everything stands.
    fn is_settled(&self) -> bool;

    /// What is unfinished, for messages.
    fn unfinished(&self) -> String {
        String::new()
    }

    /// Nothing is in flight, and nothing is still to be read back.
    fn is_quiet(&mut self) -> bool {
        let w = self.workload();
        let reads = w.is_some_and(|w| w.verify.is_some_and(|v| v < w.load.sectors));
        !reads && self.users().iter().all(|u| u.in_flight() == 0) && self.is_settled()
    }

    /// One step of somebody.
    fn step(&mut self, fill: bool) -> Result<(), String> {
        self.log().step += 1;
        self.look_around()?;
        let actor = self.choose();
        if self.act(actor, fill)? {
            self.log().still = 0;
            return Ok(());
        }
        let log = self.log();
        log.still += 1;
        if log.still < PATIENCE {
            return Ok(());
        }
        log.still = 0;
        self.wake_all(fill)
    }

    /// Chooses who moves.
    fn choose(&mut self) -> usize {
        let groups = self.groups();
        let all: usize = groups.iter().map(|(n, share)| n * *share as usize).sum();
        let mut at = self.dice().usize(..all);
        let mut first = 0;
        for (actors, share) in groups {
            let shares = actors * share as usize;
            if at < shares {
                return first + at % actors;
            }
            at -= shares;
            first += actors;
        }
        0
    }

    /// Asks all, and more than once, since one who finds nothing arms and looks again.
    fn wake_all(&mut self, fill: bool) -> Result<(), String> {
        for _ in 0..3 {
            let actors: usize = self.groups().iter().map(|(n, _)| n).sum();
            for actor in 0..actors {
                if self.act(actor, fill)? {
                    return Ok(());
                }
            }
        }
        if self.pass_time() || fill || self.is_quiet() {
            return Ok(());
        }
        Err(self.stuck("everybody sleeps"))
    }

    /// Steps until everything is answered.
    fn rest(&mut self) -> Result<(), String> {
        for _ in 0..MOST_STEPS {
            if self.is_quiet() {
                return Ok(());
            }
            self.step(false)?;
        }
        Err(self.stuck("there is no end"))
    }

    /// Reads everything back, in `most` steps if that is given; false if they didn't suffice.
    fn read_back(&mut self, most: Option<u64>) -> Result<bool, String> {
        self.log().add("all is read back", []);
        self.verify(Some(0));
        let mut quiet = false;
        for _ in 0..most.unwrap_or(MOST_STEPS) {
            quiet = self.is_quiet();
            if quiet {
                break;
            }
            let w = self.workload();
            let fill = w.is_some_and(|w| w.verify.is_some_and(|v| v < w.load.sectors));
            self.step(fill)?;
        }
        self.verify(None);
        match quiet || most.is_some() {
            true => Ok(quiet),
            false => Err(self.stuck("there is no end of reading")),
        }
    }

    /// From which sector on everything is to be read back.
    fn verify(&mut self, from: Option<u64>) {
        if let Some(w) = self.workload() {
            w.verify = from;
        }
    }

    /// What is wrong when nothing goes on.
    fn stuck(&self, what: &str) -> String {
        let in_flight: Vec<_> = self.users().iter().map(User::in_flight).collect();
        format!("{what}; in flight: {in_flight:?} {}", self.unfinished())
    }
}
