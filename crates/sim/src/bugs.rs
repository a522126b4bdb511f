//! The bugs that scenarios have to find. Most are faults of the disk below, of a request on its way, or of
//! the other side of a connection: for the stored data a disk that ignores a flush is the same as an array
//! that forgot to send it. Bugs that only the array's, the cache's or the front end's own code can make are
//! `pvblk_block::planted::Plant`, and need the feature `planted`.

use pvblk_block::planted::Plant;

macro_rules! bugs {
    ($($(#[doc = $about:literal])+ $bug:ident $name:literal)*) => {
        /// A bug that a scenario has to find.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[doc = $about])+ $bug,)*
            /// A bug in the code of the array, of the page cache or of the front end.
            Logic(Plant),
        }

        impl Bug {
            /// Name on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Bug::$bug => $name,)*
                    Bug::Logic(plant) => plant.name(),
                }
            }

            /// One sentence that says what goes wrong.
            pub const fn about(self) -> &'static str {
                match self {
                    $(Bug::$bug => concat!($($about),+),)*
                    Bug::Logic(plant) => plant.about(),
                }
            }
        }
    };
}

bugs! {
    /// The disk acknowledges every fourth sector before it writes it.
    AckBeforeWrite "ack-before-write"
    /// A flush makes only writes of its own disk queue durable.
    FlushOneQueue "flush-one-queue"
    /// Writes with FUA stay in the disk's cache.
    FuaForgotten "fua-forgotten"
    /// A disk that fails doesn't say so: it loses writes and reads what was there before.
    SilentFailure "silent-failure"
    /// A killed server's disk isn't locked while its writes are still on their way.
    LockBeforeIo "lock-before-io"
    /// Writes that were completed are done again after the next connection.
    ReplayAnswered "replay-answered"
    /// After its cache was lost, the disk still shows the old incarnation.
    IgnoreCacheMark "ignore-cache-mark"
    /// Flushes reach all members but one.
    FlushOneLess "flush-one-less"
    /// Flushes reach one member.
    FlushOneMember "array-flush-one-member"
    /// Flushes don't reach the device that is being recovered, whose superblock says how far
    /// recovery is.
    PositionNotFlushed "array-position-not-flushed"
    /// Logs aren't written.
    NoLog "no-log"
    /// Stripes are written while their log is.
    LogNotAwaited "log-not-awaited"
    /// Stripes are written while the bitmap is.
    IntentNotAwaited "array-intent-not-awaited"
    /// Superblocks never change: they neither say dirty, nor that a member has failed.
    NoMarks "no-marks"
    /// Superblocks that call a member faulty aren't written.
    NoFaulty "no-faulty"
    /// Requests complete before the superblocks name a failed member.
    KickNotAwaited "array-kick-not-awaited"
    /// Writes begin before the superblocks say dirty.
    NoDirtyMark "array-no-dirty-mark"
    /// Superblocks change without a new event number.
    EventsNotRaised "array-events-not-raised"
    /// Parity isn't written now and then.
    ParityForgotten "parity-forgotten"
    /// A write completes when all but one of its blocks are written.
    AnsweredEarly "array-answered-early"
    /// A flush of a page cache doesn't wait for pages that are being written back.
    FlushSkipsWriting "flush-skips-writing"
    /// A flush of a page cache isn't passed on to the disk.
    FlushNotPassed "flush-not-passed"
    /// A FUA write to a page cache completes when it is in the cache.
    FuaOnlyCached "fua-only-cached"
    /// A page whose write-back failed counts as clean.
    FailedIsClean "failed-is-clean"
    /// A connection gives buffers back while their request is at the disk.
    GiveInFlight "give-in-flight"
    /// A squeeze takes a page that is in flight.
    ReleaseInFlight "release-in-flight"
    /// A connection forgets to give some buffers back.
    Forget "forget"
    /// A stop ends when the first disk fails.
    FirstFailureEnds "first-failure-ends"
}

impl Bug {
    /// True if only members that stall and come back can show it.
    pub fn is_of_stalls(self) -> bool {
        let of_stalls = [
            Plant::LateReadLands,
            Plant::LateWriteIsCurrent,
            Plant::MissedNotMarked,
            Plant::MapForgotten,
            Plant::SweepNotAwaited,
        ];
        matches!(self, Bug::Logic(plant) if of_stalls.contains(&plant))
    }
}

/// Bugs of a front end.
const FRONT_END: &[Plant] = &[
    Plant::JoinsOverGap,
    Plant::HeldNotParked,
    Plant::HeldNotReleased,
];

/// Bugs of an array; the others are a page cache's.
const ARRAY: &[Plant] = &[
    Plant::LogReusedEarly,
    Plant::WrongPartialParity,
    Plant::StalePages,
    Plant::PartialTakenForWhole,
    Plant::MissingWithOthers,
    Plant::IncomingForgotten,
    Plant::GivenBackIsValid,
    Plant::HolesTooLarge,
    Plant::LateReadLands,
    Plant::LateWriteIsCurrent,
    Plant::MissedNotMarked,
    Plant::MapForgotten,
    Plant::SweepNotAwaited,
    Plant::SumsKeptAfterCrash,
    Plant::SumsNotSwept,
    Plant::KickNotFlushed,
];

/// Code that a bug is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Array,
    Cache,
    FrontEnd,
}

impl Code {
    fn of(plant: Plant) -> Code {
        match plant {
            p if ARRAY.contains(&p) => Code::Array,
            p if FRONT_END.contains(&p) => Code::FrontEnd,
            _ => Code::Cache,
        }
    }
}

/// The bugs in such code; none without the feature `planted`.
pub fn logic(code: Code) -> impl Iterator<Item = Bug> {
    let there = cfg!(feature = "planted");
    let all = Plant::ALL.iter().filter(move |_| there);
    let fits = move |p: &&Plant| Code::of(**p) == code;
    all.filter(fits).map(|p| Bug::Logic(*p))
}
