//! Kinds of events, and their stable names.

use std::fmt;
use std::str::FromStr;

/// The weight of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    Info,
    /// Something works less well than it should.
    Warning,
    /// Requests fail or don't end, or data is at risk.
    Error,
}

impl Severity {
    pub fn name(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal, $severity:ident;)*) => {
        /// A kind of event. Its name never gets another meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
        }

        impl Kind {
            /// All kinds, in the order of the reference.
            pub const ALL: &[Kind] = &[$(Kind::$kind,)*];

            /// The name in text, JSON, and the arguments of programs.
            pub fn name(self) -> &'static str {
                match self {
                    $(Kind::$kind => $name,)*
                }
            }

            pub fn severity(self) -> Severity {
                match self {
                    $(Kind::$kind => Severity::$severity,)*
                }
            }
        }
    };
}

kinds! {
    /// A disk is served from now on.
    DiskAdded = "disk-added", Info;
    /// A disk isn't served any more.
    DiskRemoved = "disk-removed", Info;
    /// Properties of a disk were changed.
    DiskChanged = "disk-changed", Info;
    /// The size of a disk changed.
    DiskResized = "disk-resized", Info;
    /// The device of a disk is gone for good; its requests fail.
    DiskGone = "disk-gone", Error;
    /// Another client took the lock of a disk away: nothing is sent to it any more.
    LockLost = "lock-lost", Error;
    /// A member of an array failed and isn't used any more.
    MemberFailed = "member-failed", Error;
    /// An array began to be served without a member.
    MemberMissing = "member-missing", Error;
    /// A device that was a member is there again, and gets what it missed.
    MemberBack = "member-back", Info;
    /// A device is being made the member of an array.
    RebuildStarted = "rebuild-started", Info;
    /// The device that was rebuilt is the member.
    RebuildFinished = "rebuild-finished", Info;
    /// The device that was being rebuilt isn't any more, and didn't become the member.
    RebuildStopped = "rebuild-stopped", Error;
    /// An array has no redundancy: the next member that fails ends it.
    ArrayDegraded = "array-degraded", Warning;
    /// An array has all its members again.
    ArrayWhole = "array-whole", Info;
    /// An array has lost two members; its requests fail.
    ArrayFailed = "array-failed", Error;
    /// Writes fail because the file system or device below is full.
    BackingFull = "backing-full", Error;
    /// Requests fail with an I/O error.
    BackingFailing = "backing-failing", Error;
    /// A request is older than the limit, and hasn't ended.
    BackingHanging = "backing-hanging", Error;
    /// Requests end well again.
    BackingBack = "backing-back", Info;
    /// The limits of a disk have held requests back for a second without a pause.
    LimitReached = "limit-reached", Info;
    /// A front end or client uses a disk.
    PeerAttached = "peer-attached", Info;
    /// A front end or client doesn't use a disk any more.
    PeerLeft = "peer-left", Info;
    /// A front end or client isn't let in.
    PeerRefused = "peer-refused", Warning;
    /// A front end or client broke its protocol; its connection has ended.
    PeerBroken = "peer-broken", Warning;
    /// Free memory was given back to the system, which is short of it.
    MemorySqueezed = "memory-squeezed", Info;
    /// Some events were left out before this reader got them.
    EventsLost = "events-lost", Warning;
}

impl Kind {
    /// True if only the server's own user causes it, so that there can't be too many.
    pub(super) fn is_unlimited(self) -> bool {
        matches!(
            self,
            Kind::DiskAdded | Kind::DiskRemoved | Kind::DiskChanged
        )
    }

    /// True if no other line of the log tells of it.
    pub(super) fn is_logged(self) -> bool {
        matches!(
            self,
            Kind::DiskGone
                | Kind::LockLost
                | Kind::MemberFailed
                | Kind::MemberMissing
                | Kind::MemberBack
                | Kind::RebuildStarted
                | Kind::RebuildFinished
                | Kind::RebuildStopped
                | Kind::ArrayDegraded
                | Kind::ArrayWhole
                | Kind::ArrayFailed
                | Kind::BackingFull
                | Kind::BackingFailing
                | Kind::BackingHanging
                | Kind::BackingBack
                | Kind::LimitReached
        )
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No kind has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownKind;

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(name: &str) -> Result<Kind, UnknownKind> {
        let mut all = Kind::ALL.iter().copied();
        all.find(|kind| kind.name() == name).ok_or(UnknownKind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_with_hyphens_and_differ() {
        for &kind in Kind::ALL {
            let name = kind.name();
            assert_eq!(name.parse(), Ok(kind));
            let letters = name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
            assert!(letters && name.contains('-'), "{name}");
        }
        assert_eq!("nothing".parse::<Kind>(), Err(UnknownKind));
    }
}
