//! Faults that a disk can be told to have, so that a scenario has something to find.

use crate::bugs::Bug;
use crate::stamp::Bytes;
use fastrand::Rng;

/// Number of completed writes that a disk remembers in order to do them again.
const KEPT: usize = 8;

/// The fate of a sector that is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The sector is written.
    Done,
    /// The sector isn't written, and the write succeeds.
    Lost,
    /// The sector is written later.
    Late,
    /// Other contents are written.
    Instead(Box<Bytes>),
}

/// Decides the fate of a sector of a write, given the sector, all bytes of the write, and the
/// sector's offset among them.
pub type Fates = Box<dyn FnMut(u64, &[u8], usize) -> Fate + Send>;

/// The reason why a sector is written after its request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The process was killed, and the kernel goes on with the write: no bug.
    Killed,
    /// The write was acknowledged too early. Later writes of the sector come after it all the same.
    Promised,
    /// The write is done again.
    Again,
}

/// A sector that is written after its request has ended.
pub struct Late {
    /// Number of the sector.
    pub sector: u64,
    /// Bytes that it gets.
    pub bytes: Bytes,
    /// The queue of the request.
    pub queue: usize,
    /// Number of the request.
    pub id: u64,
    /// Cause of the delay.
    pub why: Why,
}

/// The writes that a flush makes stable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flushes {
    /// Those of all queues.
    #[default]
    All,
    /// Those of the flush's own queue.
    OwnQueue,
    /// None of them.
    None,
}

/// The faults of a disk. The default has none.
#[derive(Default)]
pub struct Sabotage {
    /// Writes that flushes make stable.
    pub flushes: Flushes,
    /// FUA has no effect.
    pub forgets_fua: bool,
    /// Failed writes succeed, and are lost.
    pub hides_failure: bool,
    /// A killed process' writes don't keep other processes away.
    pub forgets_lock: bool,
    /// The incarnation stays the same after the cache was lost.
    pub same_cache: bool,
    /// Completed writes are done again when a queue is opened.
    pub replays: bool,
    /// Decides the fate of each sector that is written.
    pub fates: Option<Fates>,
    answered: Vec<Late>,
}

impl Sabotage {
    /// The faults that any disk has for this bug.
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

    /// The fate of a sector.
    pub fn fate(&mut self, sector: u64, write: &[u8], at: usize) -> Fate {
        let fates = self.fates.as_mut();
        fates.map_or(Fate::Done, |f| f(sector, write, at))
    }

    /// Notes that a sector has been written.
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

    /// The writes that are done again, now that a queue is opened.
    pub fn replay(&mut self) -> impl Iterator<Item = Late> + '_ {
        self.answered.drain(..)
    }
}

/// Fates by which one of `n` sectors is late.
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

/// Takes one of the late sectors; `None` if there is none, or by chance.
pub fn take_late(late: &mut Vec<Late>, rng: &mut Rng) -> Option<Late> {
    let at = rng.usize(..late.len().max(1));
    (at < late.len()).then(|| late.swap_remove(at))
}
