//! Planted bugs that the tests on a real cluster have to find. Without the feature `planted` none of them is compiled.

/// A mistake that lets two clients write, or hides a change of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plant {
    /// The lock of an owner that seems dead is broken without blocking the owner.
    TakenUnblocked,
    /// Nobody looks whether the lock is still there.
    LockUnchecked,
    /// Changes of the image's header are ignored.
    WatchMissed,
}

/// True if the environment's `PVBLK_PLANTED` names this bug.
#[cfg(feature = "planted")]
pub(super) fn has(bug: Plant) -> bool {
    static NAME: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let name = match bug {
        Plant::TakenUnblocked => "taken-unblocked",
        Plant::LockUnchecked => "lock-unchecked",
        Plant::WatchMissed => "watch-missed",
    };
    let planted = NAME.get_or_init(|| std::env::var("PVBLK_PLANTED").ok());
    planted.as_deref() == Some(name)
}

/// False: there are no planted bugs.
#[cfg(not(feature = "planted"))]
#[inline]
pub(super) const fn has(_: Plant) -> bool {
    false
}
