//! Bugs that the search has to find.

use crate::bound::{Bound, bound};
use crate::vocabulary::bugs;

bugs! {
    /// A bug that can be planted in the model.
    LogAfterData "log-after-data" HoleIsLogged "0:a 0:b 1:a"
        "Data and parity are written while the log is being written."
    LogReusedEarly "log-reused-early" HoleIsLogged "0:a 0:b 1:a"
        "A log is written over though its stripes are in the members' caches only."
    LogIgnoresFlushError "log-ignores-flush-error" HoleIsLogged "0:a 0:b 1:a"
        "A log is written over after a flush that a member failed."
    LogNotOnIncoming "log-not-on-incoming" HoleIsLogged "0:a 0:b 1:a"
        "The log of a device that is being recovered isn't written."
    PartialParityIsParity "partial-parity-is-parity" RepairIsRight "0:a 0:b 1:a"
        "The log holds the new parity in place of the partial one."
    RecoveryClearsLogEarly "recovery-clears-log-early" HoleIsLogged "0:a 0:b 1:a"
        "After a power cut the log is emptied before the parity that it repaired is stable."
    FlushNotAwaited "flush-not-awaited" FlushedStays "0:a 0:b 1:a"
        "A flush is acknowledged without a flush of the members."
    FlushSkipsIncoming "flush-skips-incoming" FlushedStays "0:a 0:b 1:a"
        "A flush leaves out the device that is being recovered."
    ParityNotFua "parity-not-fua" FlushedStays "0:a! 0:b/2"
        "Parity of a write with FUA goes to the member's cache only."
    CalculatedBeforeRead "calculated-before-read" ReadBeforeCalculated "0:a 0:b 1:a"
        "Parity is calculated while blocks for it are being read."
    PartialTakenForWhole "partial-taken-for-whole" OnlyWritten "0:a! 0:b/2"
        "A block that is written in part is taken for a whole one."
    JoinedAfterClose "joined-after-close" ClosedOnce "0:a 0:b 1:a"
        "A write joins a batch whose parity is calculated."
    WaiterDropped "waiter-dropped" EveryoneEnds "0:a 0:b 1:a"
        "The owner releases the stripe with a plain store, over a write that has just joined the list."
    EpochNotChecked "epoch-not-checked" OnlyWritten "0:a 0:b 1:a"
        "The writer of a log begins a unit without a look at the epoch."
    ClaimNotChecked "claim-not-checked" PlannedForTheseMembers "0:a 0:b 1:a"
        "The owner doesn't look at the epoch after its claim."
    StalePlanKept "stale-plan-kept" PlannedForTheseMembers "0:a 0:b 1:a"
        "A batch that waited for its log goes on with what it read and planned in the epoch before."
    CursorReadTwice "cursor-read-twice" ReadBeforeCalculated "0:a 0:b/2 0:a/2!"
        "A batch is closed by another position of the rebuild than it was planned by."
    ParkNotRechecked "park-not-rechecked" EveryoneEnds "0:a 0:b 1:a"
        "The owner doesn't look at the epoch again after it has parked."
    ToldBeforeRelease "told-before-release" EveryoneEnds "0:a 0:b 1:a"
        "The owner looks whether somebody stops the stripes before it releases its own, and not after."
    KickNotDrained "kick-not-drained" ReadBeforeCalculated "0:a 0:b 1:a"
        "Superblocks name the failed member while stripes are being written."
    KickNotFlushed "kick-not-flushed" OnlyWritten "0:a 0:b 1:a"
        "Superblocks name the failed member before the others are flushed."
    AcknowledgedUnnamed "acknowledged-unnamed" IdleIsRight "0:a 0:b 1:a"
        "A write that a member failed is acknowledged before superblocks name the member."
    MissingWithOthers "missing-with-others" OnlyWritten "0:a 0:b 1:a"
        "A missing block is written together with others of its stripe."
    CursorNotRespected "cursor-not-respected" IncomingIsCurrent "0:a 0:b 1:a"
        "A write behind the rebuild's cursor doesn't go to the incoming device."
    SyncReleasesEarly "sync-releases-early" OnlyWritten "0:a 0:b 1:a"
        "Rebuilding releases the stripe when it has read it, before it has written."
    CommittedBeforeFlush "committed-before-flush" HoleIsLogged "0:a 0:b 1:a"
        "Superblocks say that stripes are recovered that are in the incoming device's cache only."
    TakenOverEarly "taken-over-early" HoleIsLogged "0:a 0:b 1:a"
        "Superblocks call the incoming device the member before all stripes are recovered."
}

impl Bug {
    /// A bound in which a search finds the bug.
    pub fn bound(self) -> Bound {
        let writes: Vec<&str> = self.within().split(' ').collect();
        Bound {
            modify: self == Bug::CursorReadTwice,
            ..bound(&writes)
        }
    }
}
