//! Chooses the next actor: one in each step, at random among all actors of a scenario, by their shares. When
//! no chosen actor has had work for a while, all are asked; when none has work, time passes; and when time
//! doesn't help either, an actor waits for ever.

use crate::ScenarioState;
use crate::user::User;
use crate::workload::Workload;
use fastrand::Rng;

/// Steps in which all requests must complete.
const MOST_STEPS: u64 = 400_000;
/// Steps without work after which all actors are asked.
const PATIENCE: u32 = 64;

/// Number of actors of one kind, and the share of each.
pub type Group = (usize, u32);

/// The interface of a scenario to the scheduler.
pub trait Actors: ScenarioState {
    /// The generator of all random choices.
    fn dice(&mut self) -> &mut Rng;

    /// The state that its users share, if it has users.
    fn workload(&mut self) -> Option<&mut Workload> {
        None
    }

    /// The groups of actors, in the order in which actors are numbered.
    fn groups(&self) -> [Group; 5];

    /// Checks that run before each step.
    fn look_around(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Lets an actor do one thing; false if it sleeps. `fill`: it may begin new requests and
    /// faults.
    fn act(&mut self, actor: usize, fill: bool) -> Result<bool, String>;

    /// Lets time pass until an actor has work; false if no actor waits for a time.
    fn pass_time(&mut self) -> bool {
        false
    }

    /// Users of the device under test.
    fn users(&self) -> &[User] {
        &[]
    }

    /// True if nothing is in flight besides the users' requests, and everything is connected.
    fn is_settled(&self) -> bool;

    /// A description of unfinished work, for messages.
    fn unfinished(&self) -> String {
        String::new()
    }

    /// True if no request is in flight, and nothing is still to be read back.
    fn is_quiet(&mut self) -> bool {
        let w = self.workload();
        let reads = w.is_some_and(|w| w.verify.is_some_and(|v| v < w.load.sectors));
        !reads && self.users().iter().all(|u| u.in_flight() == 0) && self.is_settled()
    }

    /// Takes one step of one actor.
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

    /// Chooses the next actor.
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

    /// Asks all actors, and more than once, since an actor without work arms and looks again.
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

    /// Steps until every request has completed.
    fn rest(&mut self) -> Result<(), String> {
        for _ in 0..MOST_STEPS {
            if self.is_quiet() {
                return Ok(());
            }
            self.step(false)?;
        }
        Err(self.stuck("there is no end"))
    }

    /// Reads everything back, in `most` steps if that is given; false if they weren't enough.
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

    /// Sets the sector from which on everything is to be read back.
    fn verify(&mut self, from: Option<u64>) {
        if let Some(w) = self.workload() {
            w.verify = from;
        }
    }

    /// Describes a state in which nothing goes on.
    fn stuck(&self, what: &str) -> String {
        let in_flight: Vec<_> = self.users().iter().map(User::in_flight).collect();
        format!("{what}; in flight: {in_flight:?} {}", self.unfinished())
    }
}
