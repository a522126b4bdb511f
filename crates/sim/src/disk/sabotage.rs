//! What a disk may be told to do wrong, so that a scenario has something to find.

use crate::bugs::Bug;
use crate::stamp::Bytes;
use fastrand::Rng;

/// Answered writes that a disk keeps in order to do them again.
const KEPT: usize = 8;

/// What becomes of a sector that is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is written.
    Done,
    /// It isn't, and nobody is told.
    Lost,
    /// Later.
    Late,
    /// Something else is written.
    Instead(Box<Bytes>),
}

/// Decides over a sector of a write, given all bytes of the write and where in them the sector is.
pub type Fates = Box<dyn FnMut(u64, &[u8], usize) -> Fate + Send>;

/// Why a sector is written after its request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its process was killed, and the kernel goes on with it: no bug.
    Killed,
    /// It was acknowledged too early. Later writes of the sector come after it all the same.
    Promised,
    /// It is done again.
    Again,
}

/// A sector that is written after its request has ended.
pub struct Late {
    /// Where.
    pub sector: u64,
    /// What.
    pub bytes: Bytes,
    /// The queue of its request.
    pub queue: usize,
    /// Number of its request.
    pub id: u64,
    /// Why.
    pub why: Why,
}

/// Whose writes a flush makes durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flushes {
    /// Everybody's.
    #[default]
    All,
    /// Its own queue's.
    OwnQueue,
    /// Nobody's.
    None,
}

/// See the module's documentation. The default does nothing wrong.
#[derive(Default)]
pub struct Sabotage {
    /// What flushes do.
    pub flushes: Flushes,
    /// FUA means nothing.
    pub forgets_fua: bool,
    /// Failures aren't told: writes are lost.
    pub hides_failure: bool,
    /// A killed process' writes don't keep others away.
    pub forgets_lock: bool,
    /// It says that its cache is the one that was there, after it was lost too.
    pub same_cache: bool,
    /// Answered writes are done again when a queue is opened.
    pub replays: bool,
    /// Of each sector that is written.
    pub fates: Option<Fates>,
    answered: Vec<Late>,
}

impl Sabotage {
    /// What any disk does for this bug.
    pub fn new(bug: Option<Bug>) -> Sabotage {
        let is = |b| bug == Some(b);
        let late = match bug {
            Some(Bug::AckBeforeWrite) => Some(4),
            Some(Bug::FlushSkipsWriting) => Some(1),
            _ => None,
        };
        Sabotage {
            flushes: match bug {
                Some(Bug::FlushOneQueue) => Flushes::OwnQueue,
                Some(Bug::FlushNotPassed) => Flushes::None,
                _ => Flushes::All,
            },
            forgets_fua: is(Bug::FuaForgotten),
            hides_failure: is(Bug::SilentFailure) || is(Bug::FailedIsClean),
            forgets_lock: is(Bug::LockBeforeIo),
            same_cache: is(Bug::IgnoreCacheMark),
            replays: is(Bug::ReplayAnswered),
            fates: late.map(every),
            answered: Vec::new(),
        }
    }

    /// What becomes of a sector.
    pub fn fate(&mut self, sector: u64, write: &[u8], at: usize) -> Fate {
        let fates = self.fates.as_mut();
        fates.map_or(Fate::Done, |f| f(sector, write, at))
    }

    /// A sector's write is done.
    pub fn done(&mut self, sector: u64, bytes: &Bytes, queue: usize, id: u64) {
        if !self.replays {
            return;
        }
        if self.answered.len() == KEPT {
            self.answered.remove(0);
        }
        self.answered.push(Late {
            sector,
            bytes: *bytes,
            queue,
            id,
            why: Why::Again,
        });
    }

    /// What is done again, now that a queue is opened.
    pub fn replay(&mut self) -> impl Iterator<Item = Late> + '_ {
        self.answered.drain(..)
    }
}

/// One of `n` sectors is late.
fn every(n: u64) -> Fates {
    let mut sectors = 0u64;
    Box::new(move |_, _, _| {
        sectors += 1;
        match sectors.is_multiple_of(n) {
            true => Fate::Late,
            false => Fate::Done,
        }
    })
}

/// One of what is late; `None` if nothing is, or the dice say so.
pub fn take_late(late: &mut Vec<Late>, rng: &mut Rng) -> Option<Late> {
    let at = rng.usize(..late.len().max(1));
    (at < late.len()).then(|| late.swap_remove(at))
}
