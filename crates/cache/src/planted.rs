//! Bugs of the cache that a simulation has to find. Without the feature `planted` there are none, and nothing is asked.

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheBug {
    /// A flush doesn't wait for pages that are being written.
    FlushSkipsWriting,
    /// A flush isn't passed on to the device.
    FlushNotPassed,
    /// A page that was written to while it was written back counts as clean.
    RedirtiedIsClean,
    /// A FUA write completes when it is in the cache.
    FuaOnlyCached,
    /// Discards and write-zeroes take dirty pages along before the device has done them.
    RangeDropsFirst,
    /// A page whose write-back failed counts as clean.
    FailedIsClean,
    /// A page is written again while its older version still is.
    BehindNotAwaited,
    /// A part of a page is written without reading the rest.
    PartWithoutRead,
    /// Dirty pages are reclaimed.
    DirtyReclaimed,
    /// Data of a page that is being written is changed in place.
    ChangedInPlace,
    /// Memory of dirty pages is given back to the system.
    DirtyGivenBack,
    /// The memory that is given back begins one page too late.
    NeighbourGivenBack,
}

impl CacheBug {
    /// All of them.
    pub const ALL: [CacheBug; 12] = [
        CacheBug::FlushSkipsWriting,
        CacheBug::FlushNotPassed,
        CacheBug::RedirtiedIsClean,
        CacheBug::FuaOnlyCached,
        CacheBug::RangeDropsFirst,
        CacheBug::FailedIsClean,
        CacheBug::BehindNotAwaited,
        CacheBug::PartWithoutRead,
        CacheBug::DirtyReclaimed,
        CacheBug::ChangedInPlace,
        CacheBug::DirtyGivenBack,
        CacheBug::NeighbourGivenBack,
    ];
}

#[cfg(feature = "planted")]
thread_local! {
    static BUG: std::cell::Cell<Option<CacheBug>> = const { std::cell::Cell::new(None) };
}

/// Caches that are stepped by this thread have this bug from now on.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<CacheBug>) {
    BUG.set(bug);
}

#[cfg(feature = "planted")]
pub(crate) fn has(bug: CacheBug) -> bool {
    BUG.get() == Some(bug)
}

#[cfg(not(feature = "planted"))]
#[inline]
pub(crate) const fn has(_: CacheBug) -> bool {
    false
}
