//! Bugs on purpose, for a test that the simulation finds them. Most are in the members: a member that ignores something is the same
//! to what is stored as an array that forgot to ask for it.

use super::shape::Shape;
use super::stamp::Bytes;
use fastrand::Rng;
#[cfg(feature = "planted")]
use pvblk_volume::raid5::planted::{Raid5Bug, plant};
use pvblk_volume::raid5::{Role, SUPER_BYTES, Superblock};
use std::ops::Range;

/// A bug to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Writes with FUA stay in the cache.
    FuaForgotten,
    /// Flushes reach all members but one.
    FlushOneLess,
    /// A flush makes only writes of its own queue durable.
    FlushOneQueue,
    /// Some writes are acknowledged before they are done.
    AckBeforeWrite,
    /// Logs aren't written.
    NoLog,
    /// Logs are written, but not before what they are for.
    LogNotAwaited,
    /// The first superblocks stay for ever: nothing says dirty, or that a member is gone.
    NoMarks,
    /// Superblocks that call a member faulty aren't written.
    NoFaulty,
    /// Parity isn't written now and then.
    ParityForgotten,
    /// A member that fails is read all the same, as it was before.
    SilentFailure,
    /// One of the array's own.
    #[cfg(feature = "planted")]
    Array(Raid5Bug),
}

impl Bug {
    /// All of them, with names.
    pub const ALL: &[(&str, Bug)] = &[
        ("fua-forgotten", Bug::FuaForgotten),
        ("flush-one-less", Bug::FlushOneLess),
        ("flush-one-queue", Bug::FlushOneQueue),
        ("ack-before-write", Bug::AckBeforeWrite),
        ("no-log", Bug::NoLog),
        ("log-not-awaited", Bug::LogNotAwaited),
        ("no-marks", Bug::NoMarks),
        ("no-faulty", Bug::NoFaulty),
        ("parity-forgotten", Bug::ParityForgotten),
        ("silent-failure", Bug::SilentFailure),
        #[cfg(feature = "planted")]
        ("array-log-not-awaited", Bug::Array(Raid5Bug::LogNotAwaited)),
        #[cfg(feature = "planted")]
        (
            "array-log-reused-early",
            Bug::Array(Raid5Bug::LogReusedEarly),
        ),
        #[cfg(feature = "planted")]
        (
            "array-wrong-partial-parity",
            Bug::Array(Raid5Bug::WrongPartialParity),
        ),
        #[cfg(feature = "planted")]
        ("array-no-dirty-mark", Bug::Array(Raid5Bug::NoDirtyMark)),
        #[cfg(feature = "planted")]
        (
            "array-events-not-raised",
            Bug::Array(Raid5Bug::EventsNotRaised),
        ),
        #[cfg(feature = "planted")]
        (
            "array-kick-not-awaited",
            Bug::Array(Raid5Bug::KickNotAwaited),
        ),
        #[cfg(feature = "planted")]
        ("array-answered-early", Bug::Array(Raid5Bug::AnsweredEarly)),
        #[cfg(feature = "planted")]
        (
            "array-flush-one-member",
            Bug::Array(Raid5Bug::FlushOneMember),
        ),
        #[cfg(feature = "planted")]
        ("array-stale-cache", Bug::Array(Raid5Bug::StaleCache)),
        #[cfg(feature = "planted")]
        (
            "array-partial-taken-for-whole",
            Bug::Array(Raid5Bug::PartialTakenForWhole),
        ),
        #[cfg(feature = "planted")]
        (
            "array-missing-with-others",
            Bug::Array(Raid5Bug::MissingWithOthers),
        ),
        #[cfg(feature = "planted")]
        (
            "array-incoming-forgotten",
            Bug::Array(Raid5Bug::IncomingForgotten),
        ),
        #[cfg(feature = "planted")]
        (
            "array-position-not-flushed",
            Bug::Array(Raid5Bug::PositionNotFlushed),
        ),
        #[cfg(feature = "planted")]
        (
            "array-intent-not-awaited",
            Bug::Array(Raid5Bug::IntentNotAwaited),
        ),
        #[cfg(feature = "planted")]
        (
            "array-queue-listed-while-held",
            Bug::Array(Raid5Bug::QueueListedWhileHeld),
        ),
        #[cfg(feature = "planted")]
        ("array-busy-given-back", Bug::Array(Raid5Bug::BusyGivenBack)),
        #[cfg(feature = "planted")]
        (
            "array-given-back-is-valid",
            Bug::Array(Raid5Bug::GivenBackIsValid),
        ),
        #[cfg(feature = "planted")]
        ("array-holes-too-large", Bug::Array(Raid5Bug::HolesTooLarge)),
    ];

    /// Gives this thread's arrays the bug, if it is one of theirs.
    #[cfg(feature = "planted")]
    pub fn plant(bug: Option<Bug>) {
        plant(match bug {
            Some(Bug::Array(bug)) => Some(bug),
            _ => None,
        });
    }
}

/// Where things are on a member.
#[derive(Clone, Debug, Default)]
pub struct Areas {
    /// The superblock.
    pub mark: Range<u64>,
    /// The partial parity log.
    pub log: Range<u64>,
    /// Data and parity.
    pub data: Range<u64>,
    /// Chunks of parity, for the bug that forgets them.
    pub shape: Option<Shape>,
}

/// What becomes of a sector that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is written.
    Done,
    /// It isn't.
    Lost,
    /// Later.
    Late,
}

/// A sector that was acknowledged and is written later.
pub struct Late {
    pub sector: u64,
    pub bytes: Bytes,
    pub queue: usize,
    pub id: u64,
}

/// The bug of one member.
#[derive(Default)]
pub struct MemberBug {
    bug: Option<Bug>,
    number: usize,
    pub areas: Areas,
    late: Vec<Late>,
    writes: u64,
}

impl MemberBug {
    /// Member `number`'s share of it.
    pub fn new(bug: Option<Bug>, number: usize) -> MemberBug {
        MemberBug {
            bug,
            number,
            ..MemberBug::default()
        }
    }

    /// Which queue's writes a flush makes durable; `None`: it does nothing.
    pub fn flush(&self, queue: usize) -> Option<Option<usize>> {
        match self.bug {
            Some(Bug::FlushOneLess) if self.number == 1 => None,
            Some(Bug::FlushOneQueue) => Some(Some(queue)),
            _ => Some(None),
        }
    }

    /// Whether FUA means anything.
    pub fn honours_fua(&self) -> bool {
        self.bug != Some(Bug::FuaForgotten)
    }

    /// Whether a member that fails doesn't say so, but loses what is written.
    pub fn hides_failure(&self) -> bool {
        self.bug == Some(Bug::SilentFailure)
    }

    /// What becomes of a sector of a write.
    pub fn fate(&mut self, sector: u64, write: &[u8]) -> Fate {
        let areas = &self.areas;
        self.writes += 1;
        match self.bug {
            Some(Bug::AckBeforeWrite) if self.writes.is_multiple_of(4) => Fate::Late,
            Some(Bug::NoLog) if areas.log.contains(&sector) => Fate::Lost,
            Some(Bug::LogNotAwaited) if areas.log.contains(&sector) => Fate::Late,
            Some(Bug::NoMarks) if areas.mark.contains(&sector) => Fate::Lost,
            Some(Bug::NoFaulty) if areas.mark.contains(&sector) && calls_faulty(write) => {
                Fate::Lost
            }
            Some(Bug::ParityForgotten)
                if self.writes.is_multiple_of(16) && self.is_parity(sector) =>
            {
                Fate::Lost
            }
            _ => Fate::Done,
        }
    }

    fn is_parity(&self, sector: u64) -> bool {
        let parity = |s: &Shape| s.parity(sector - self.areas.data.start) == self.number;
        self.areas.data.contains(&sector) && self.areas.shape.as_ref().is_some_and(parity)
    }

    /// Keeps a sector for later.
    pub fn put_off(&mut self, sector: u64, bytes: Bytes, queue: usize, id: u64) {
        self.late.push(Late {
            sector,
            bytes,
            queue,
            id,
        });
    }

    /// One that is written now.
    pub fn take_late(&mut self, rng: &mut Rng) -> Option<Late> {
        let at = rng.usize(..self.late.len().max(1));
        (at < self.late.len()).then(|| self.late.swap_remove(at))
    }

    /// The power goes.
    pub fn cut(&mut self) {
        self.late.clear();
    }
}

/// Whether these are the bytes of a superblock that calls a member faulty.
fn calls_faulty(bytes: &[u8]) -> bool {
    let mut whole = [0; SUPER_BYTES];
    let len = bytes.len().min(SUPER_BYTES);
    whole[..len].copy_from_slice(&bytes[..len]);
    Superblock::parse(&whole).is_ok_and(|s| s.roles.contains(&Role::Faulty))
}
