//! Bugs of the array that a simulation has to find. Without the feature `planted` there are none, and nothing is asked.

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raid5Bug {
    /// Stripes are written while their log is.
    LogNotAwaited,
    /// A log is written over though its stripes may be in caches only.
    LogReusedEarly,
    /// The log has the new parity instead of the partial one.
    WrongPartialParity,
    /// Writes begin before the superblocks say dirty.
    NoDirtyMark,
    /// Superblocks change without a new event number.
    EventsNotRaised,
    /// Requests are answered before the superblocks name a kicked member.
    KickNotAwaited,
    /// A write is answered when all but one of its blocks are written.
    AnsweredEarly,
    /// A flush reaches one member.
    FlushOneMember,
    /// A head that gets a new stripe takes the old one's pages for its.
    StaleCache,
    /// A block that is written in part is taken for a whole one.
    PartialTakenForWhole,
    /// The missing member's block is written together with others.
    MissingWithOthers,
    /// What is written while a device is rebuilt doesn't reach that device.
    IncomingForgotten,
    /// Superblocks say how far a rebuild is, though that is in a cache only.
    PositionNotFlushed,
    /// Stripes are written while the bitmap is.
    IntentNotAwaited,
    /// A stripe's queue that its head holds is put on a list as well.
    QueueListedWhileHeld,
    /// The memory of heads that have something to do is given back to the system.
    BusyGivenBack,
    /// Heads whose memory was given back still count as holding what they held.
    GivenBackIsValid,
    /// A stripe that is zeroed in part becomes a hole.
    HolesTooLarge,
}

impl Raid5Bug {
    /// All of them.
    pub const ALL: [Raid5Bug; 18] = [
        Raid5Bug::LogNotAwaited,
        Raid5Bug::LogReusedEarly,
        Raid5Bug::WrongPartialParity,
        Raid5Bug::NoDirtyMark,
        Raid5Bug::EventsNotRaised,
        Raid5Bug::KickNotAwaited,
        Raid5Bug::AnsweredEarly,
        Raid5Bug::FlushOneMember,
        Raid5Bug::StaleCache,
        Raid5Bug::PartialTakenForWhole,
        Raid5Bug::MissingWithOthers,
        Raid5Bug::IncomingForgotten,
        Raid5Bug::PositionNotFlushed,
        Raid5Bug::IntentNotAwaited,
        Raid5Bug::QueueListedWhileHeld,
        Raid5Bug::BusyGivenBack,
        Raid5Bug::GivenBackIsValid,
        Raid5Bug::HolesTooLarge,
    ];
}

#[cfg(feature = "planted")]
thread_local! {
    static BUG: std::cell::Cell<Option<Raid5Bug>> = const { std::cell::Cell::new(None) };
}

/// Arrays that are stepped by this thread have this bug from now on.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<Raid5Bug>) {
    BUG.set(bug);
}

#[cfg(feature = "planted")]
pub(super) fn has(bug: Raid5Bug) -> bool {
    BUG.get() == Some(bug)
}

#[cfg(not(feature = "planted"))]
#[inline]
pub(super) const fn has(_: Raid5Bug) -> bool {
    false
}
