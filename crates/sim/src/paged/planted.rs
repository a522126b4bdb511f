//! Bugs on purpose, for a test that the simulation finds them.

use crate::raid;
#[cfg(feature = "planted")]
use pvblk_cache::planted::{CacheBug, plant};

/// A bug to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// One of the disk's.
    Disk(raid::Bug),
    /// One of the cache's own.
    #[cfg(feature = "planted")]
    Cache(CacheBug),
}

impl Bug {
    /// All of them, with names.
    pub const ALL: &[(&str, Bug)] = &[
        ("fua-forgotten", Bug::Disk(raid::Bug::FuaForgotten)),
        ("flush-one-queue", Bug::Disk(raid::Bug::FlushOneQueue)),
        ("ack-before-write", Bug::Disk(raid::Bug::AckBeforeWrite)),
        #[cfg(feature = "planted")]
        (
            "flush-skips-writing",
            Bug::Cache(CacheBug::FlushSkipsWriting),
        ),
        #[cfg(feature = "planted")]
        ("flush-not-passed", Bug::Cache(CacheBug::FlushNotPassed)),
        #[cfg(feature = "planted")]
        ("redirtied-is-clean", Bug::Cache(CacheBug::RedirtiedIsClean)),
        #[cfg(feature = "planted")]
        ("fua-only-cached", Bug::Cache(CacheBug::FuaOnlyCached)),
        #[cfg(feature = "planted")]
        ("range-drops-first", Bug::Cache(CacheBug::RangeDropsFirst)),
        #[cfg(feature = "planted")]
        ("failed-is-clean", Bug::Cache(CacheBug::FailedIsClean)),
        #[cfg(feature = "planted")]
        ("behind-not-awaited", Bug::Cache(CacheBug::BehindNotAwaited)),
        #[cfg(feature = "planted")]
        ("part-without-read", Bug::Cache(CacheBug::PartWithoutRead)),
        #[cfg(feature = "planted")]
        ("dirty-reclaimed", Bug::Cache(CacheBug::DirtyReclaimed)),
        #[cfg(feature = "planted")]
        ("changed-in-place", Bug::Cache(CacheBug::ChangedInPlace)),
        #[cfg(feature = "planted")]
        ("dirty-given-back", Bug::Cache(CacheBug::DirtyGivenBack)),
        #[cfg(feature = "planted")]
        (
            "neighbour-given-back",
            Bug::Cache(CacheBug::NeighbourGivenBack),
        ),
    ];

    /// Gives this thread's caches the bug, if it is one of theirs.
    #[cfg(feature = "planted")]
    pub fn plant(bug: Option<Bug>) {
        plant(match bug {
            Some(Bug::Cache(bug)) => Some(bug),
            _ => None,
        });
    }
}
