//! A RAID-5 array whose machine loses power: the array of production on members that lose their caches, fail,
//! and come back.
//!
//! ```text
//!   users ── Raid5 ── CrashDisk …
//!     │                   │
//!     └── Checker ── RawMembers ─┘   what may a sector hold, and is parity right?
//! ```
//!
//! The power is cut at any step, also while the array is being started or stopped. Then the array is started
//! again, everything is read back, and the members themselves are checked. docs/decisions/0009-raid5.md and
//! 0048-stripes-own-themselves.md say what must hold.

mod array;
mod away;
mod boot;
mod inspect;
mod profile;
mod sabotage;
mod shape;

pub use array::Array;

use crate::ScenarioState;
use crate::bugs::{Bug, Code, logic};
use crate::log::Log;
use crate::scheduler::Actors;

pub fn bugs() -> Vec<Bug> {
    let mut all = vec![
        Bug::FuaForgotten,
        Bug::FlushOneLess,
        Bug::FlushOneQueue,
        Bug::AckBeforeWrite,
        Bug::NoLog,
        Bug::LogNotAwaited,
        Bug::NoMarks,
        Bug::NoFaulty,
        Bug::ParityForgotten,
        Bug::SilentFailure,
        Bug::NoDirtyMark,
        Bug::EventsNotRaised,
        Bug::KickNotAwaited,
        Bug::AnsweredEarly,
        Bug::FlushOneMember,
        Bug::PositionNotFlushed,
        Bug::IntentNotAwaited,
    ];
    all.extend(logic(Code::Array));
    all
}

impl ScenarioState for Array {
    fn new(seed: u64, bug: Option<Bug>, log: Log) -> Result<Array, String> {
        Array::new(seed, bug, log)
    }

    fn drive(&mut self) -> Result<(), String> {
        for _ in 0..self.profile.cycles {
            self.boot(false)?;
            // Now and then the array isn't read back before there is work.
            let looks = self.w.rng.u8(..8) > 0;
            let cut = self.w.rng.u8(..8) == 0;
            let most = (looks && cut).then(|| self.w.rng.u64(..400));
            if !looks || self.read_and_look(most)? {
                self.work()?;
                match self.w.rng.u8(..8) {
                    _ if self.is_cut() => {}
                    0 => {
                        self.rest()?;
                        // A failed array leaves stripes unfinished.
                        if !self.w.may_fail {
                            self.look()?;
                        }
                    }
                    1 if !self.w.may_fail => {
                        let cut = self.w.rng.bool();
                        self.stop(cut)?;
                    }
                    _ => {}
                }
            }
            self.cut();
            self.cycles += 1;
            self.w.log.count("cycles", 1);
        }
        self.boot(true)?;
        self.read_and_look(None)?;
        self.stop(false)?;
        self.cut();
        self.boot(true)?;
        self.read_and_look(None)?;
        self.stop(false)
    }

    fn log(&mut self) -> &mut Log {
        &mut self.w.log
    }
}

impl Array {
    /// Reads everything back, and checks the members.
    fn read_and_look(&mut self, most: Option<u64>) -> Result<bool, String> {
        let done = self.read_back(most)?;
        if done {
            self.look()?;
        }
        Ok(done)
    }
}
