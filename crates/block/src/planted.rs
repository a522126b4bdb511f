//! Planted bugs that the simulation has to find (crates/sim). A bug is here only if no device below, no
//! request from above and no clock could make the same mistake: all others are made in the simulation.
//! Without the feature `planted` [`has`] is a constant, and none of them is compiled.

macro_rules! plants {
    ($($(#[doc = $about:literal])+ $plant:ident $name:literal)*) => {
        /// A bug in the code of an array, of a page cache or of a front end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Plant {
            $($(#[doc = $about])+ $plant,)*
        }

        impl Plant {
            pub const ALL: &[Plant] = &[$(Plant::$plant),*];

            /// Name on a command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Plant::$plant => $name,)*
                }
            }

            /// One sentence that says what goes wrong.
            pub const fn about(self) -> &'static str {
                match self {
                    $(Plant::$plant => concat!($($about),+),)*
                }
            }
        }
    };
}

plants! {
    /// RAID-5: A log is overwritten though its stripes may be in the members' caches only.
    LogReusedEarly "array-log-reused-early"
    /// RAID-5: The log has the new parity instead of the partial one.
    WrongPartialParity "array-wrong-partial-parity"
    /// RAID-5: Pages of another stripe count as valid.
    StalePages "array-stale-pages"
    /// RAID-5: A block that is written in part is taken for a whole one.
    PartialTakenForWhole "array-partial-taken-for-whole"
    /// RAID-5: The missing member's block is written together with others.
    MissingWithOthers "array-missing-with-others"
    /// RAID-5: A write doesn't reach the device that is being recovered.
    IncomingForgotten "array-incoming-forgotten"
    /// RAID-5: Pages that a stripe has no more still count as valid.
    GivenBackIsValid "array-given-back-is-valid"
    /// RAID-5: A stripe that is zeroed in part becomes a hole.
    HolesTooLarge "array-holes-too-large"
    /// RAID-5: A member's read that was given up still changes a stripe's pages.
    LateReadLands "array-late-read-lands"
    /// RAID-5: A member is taken back while a write to it that was given up may still land.
    LateWriteIsCurrent "array-late-write-is-current"
    /// RAID-5: Without a bitmap, chunks that a missing member misses aren't marked.
    MissedNotMarked "array-missed-not-marked"
    /// RAID-5: At its start an array ignores the marks of its map or bitmap.
    MapForgotten "array-map-forgotten"
    /// RAID-5: A chunk's mark is taken away while a batch of it is in flight.
    SweepNotAwaited "array-sweep-not-awaited"
    /// RAID-5: Checksums of chunks that were being written count after a crash.
    SumsKeptAfterCrash "array-sums-kept-after-crash"
    /// RAID-5: A chunk's mark is taken away while its checksums on disk are those of older blocks.
    SumsNotSwept "array-sums-not-swept"
    /// RAID-5: Superblocks name a failed member while the others have data in their caches.
    KickNotFlushed "array-kick-not-flushed"
    /// Page cache: A page that was written to during its write-back counts as clean.
    RedirtiedIsClean "redirtied-is-clean"
    /// Page cache: A discard or a write-zeroes drops dirty pages before the device has done it.
    RangeDropsFirst "range-drops-first"
    /// Page cache: A page is written back again while the write of its older version is in flight.
    BehindNotAwaited "behind-not-awaited"
    /// Page cache: A part of a page is written without reading the rest.
    PartWithoutRead "part-without-read"
    /// Page cache: Dirty pages are reclaimed.
    DirtyReclaimed "dirty-reclaimed"
    /// Page cache: Data of a page is changed in place during its write-back.
    ChangedInPlace "changed-in-place"
    /// Page cache: The memory of dirty pages is given back to the system.
    DirtyGivenBack "dirty-given-back"
    /// Page cache: The memory that is given back begins one page too late.
    NeighbourGivenBack "neighbour-given-back"
    /// Page cache: A read whose page has gone before it was copied counts as done.
    GoneNotReadAgain "gone-not-read-again"
    /// Front end: A request joins one that waits although sectors lie between them.
    JoinsOverGap "joins-over-gap"
    /// Front end: Requests that are held when a connection ends are forgotten.
    HeldNotParked "held-not-parked"
    /// Front end: A request that is held isn't let go when there is room for it.
    HeldNotReleased "held-not-released"
}

#[cfg(feature = "planted")]
thread_local! {
    static PLANT: std::cell::Cell<Option<Plant>> = const { std::cell::Cell::new(None) };
}

/// Plants a bug, and no other, in all code that this thread runs from now on.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<Plant>) {
    PLANT.set(bug);
}

/// True if this thread has the bug.
#[cfg(feature = "planted")]
pub fn has(bug: Plant) -> bool {
    PLANT.get() == Some(bug)
}

/// True if this thread has the bug: never.
#[cfg(not(feature = "planted"))]
#[inline]
pub const fn has(_: Plant) -> bool {
    false
}
