//! Every bug that a scenario has to find. Most are mistakes of the disk below, of a request on its way, or of the other side of a connection: to
//! what is stored, a disk that ignores something is the same as an array that forgot to ask for it. Those that only the logic itself can
//! make are `pvblk_block::planted::Plant`, and need the feature `planted`.

use pvblk_block::planted::Plant;

macro_rules! bugs {
    ($($(#[doc = $about:literal])+ $bug:ident $name:literal)*) => {
        /// A bug to be found.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[doc = $about])+ $bug,)*
            /// A bug of the array's or the page cache's own.
            Logic(Plant),
        }

        impl Bug {
            /// Its name on the command line.
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
    /// A killed server's disk is free while its writes are still on their way.
    LockBeforeIo "lock-before-io"
    /// Writes that were answered are done again after the next connection.
    ReplayAnswered "replay-answered"
    /// After its cache was lost, the disk says that it is still the one that was there.
    IgnoreCacheMark "ignore-cache-mark"
    /// Flushes reach all members but one.
    FlushOneLess "flush-one-less"
    /// Flushes reach one member.
    FlushOneMember "array-flush-one-member"
    /// Flushes don't reach the device that is being rebuilt, whose superblock says how far it is.
    PositionNotFlushed "array-position-not-flushed"
    /// Logs aren't written.
    NoLog "no-log"
    /// Stripes are written while their log is.
    LogNotAwaited "log-not-awaited"
    /// Stripes are written while the bitmap is.
    IntentNotAwaited "array-intent-not-awaited"
    /// The first superblocks stay for ever: nothing says dirty, or that a member is gone.
    NoMarks "no-marks"
    /// Superblocks that call a member faulty aren't written.
    NoFaulty "no-faulty"
    /// Requests are answered before the superblocks name a kicked member.
    KickNotAwaited "array-kick-not-awaited"
    /// Writes begin before the superblocks say dirty.
    NoDirtyMark "array-no-dirty-mark"
    /// Superblocks change without a new event number.
    EventsNotRaised "array-events-not-raised"
    /// Parity isn't written now and then.
    ParityForgotten "parity-forgotten"
    /// A write is answered when all but one of its blocks are written.
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
    /// A stop is over when the first disk fails.
    FirstFailureEnds "first-failure-ends"
}

/// Those of an array; the others are a page cache's.
const ARRAY: &[Plant] = &[
    Plant::LogReusedEarly,
    Plant::WrongPartialParity,
    Plant::StaleHead,
    Plant::PartialTakenForWhole,
    Plant::MissingWithOthers,
    Plant::IncomingForgotten,
    Plant::QueueListedWhileHeld,
    Plant::BusyGivenBack,
    Plant::GivenBackIsValid,
    Plant::HolesTooLarge,
];

/// The bugs of the logic of arrays, or of page caches; none without the feature `planted`.
pub fn logic(arrays: bool) -> impl Iterator<Item = Bug> {
    let there = cfg!(feature = "planted");
    let all = Plant::ALL.iter().filter(move |_| there);
    let fits = move |p: &&Plant| ARRAY.contains(p) == arrays;
    all.filter(fits).map(|p| Bug::Logic(*p))
}
