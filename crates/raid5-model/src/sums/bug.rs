//! Bugs that the search has to find.

use super::bound::{Bound, bound};
use crate::vocabulary::bugs;

bugs! {
    /// A bug that can be planted in the model of checksums.
    WriteNotMarked "write-not-marked" SumIsMarked "0:a"
        "A batch writes before its chunk's bit is on the members."
    ClearingNotTaken "clearing-not-taken" SumIsMarked "0:a 0:b sweep"
        "A batch doesn't take back a chunk that a sweep is about to clear."
    SweepNotAwaited "sweep-not-awaited" SumIsMarked "0:a sweep"
        "A sweep doesn't wait for the words that were owned at its begin."
    SumsNotSwept "sums-not-swept" SumIsMarked "0:a sweep"
        "A chunk's bit is cleared before its dirty sums are written."
    SumsInCache "sums-in-cache" SumIsMarked "0:a sweep"
        "Sums are in the members' caches when the bit is cleared."
    SweepNotFlushed "sweep-not-flushed" SumIsMarked "0:a sweep"
        "A sweep clears bits without a flush of the members."
    ParitySumKept "parity-sum-kept" SumIsMarked "0:a sweep"
        "A write gives its data new sums, and parity none."
    SumsSetLate "sums-set-late" SumIsMarked "0:a sweep"
        "Blocks get their sums after the batch has left its word."
    GroupDroppedInUse "group-dropped-in-use" SumIsMarked "0:a 0:b sweep sweep"
        "A group goes from memory though a batch has taken it back."
    DirtyGroupDropped "dirty-group-dropped" SumIsMarked "0:a sweep sweep"
        "A dirty group goes from memory without being written."
    SumsKeptAfterCrash "sums-kept-after-crash" SumIsMarked "0:a cut"
        "A start leaves the sums of marked chunks as they are."
    CleanBeforeForgotten "clean-before-forgotten" SumIsMarked "0:a cut"
        "Superblocks say clean before the sums of marked chunks are unknown."
    MapOfFirst "map-of-first" RepairFits "0:a 0:a? all cut"
        "A start takes the map of the first member, which may have lost that a bit was set."
    MapsJoined "maps-joined" FitsOrTold "0:a 0:a? sweep all cut"
        "A start joins the maps of all members, one of which may have lost that a bit was cleared."
    SumsBesideBlocks "sums-beside-blocks" FitsOrTold "0:a 0:a? sweep all"
        "Sums of a place lie on its own member, which may lose all writes."
    DirectNotCompared "direct-not-compared" FitsOrTold "0:a? 0:b? flip"
        "A direct read doesn't compare its block."
    NotLookedAgain "not-looked-again" FitsOrTold "0:a? 0:b? sweep flip"
        "A direct read doesn't look at the group again after it has compared."
    ComputedNotCompared "computed-not-compared" FitsOrTold "0:a? flip missing0"
        "The block of a missing member that was calculated isn't compared."
    FoundWithoutParity "found-without-parity" FitsOrTold "0:a? flip unknown0"
        "The action `checksum` gives sums to blocks that don't fit their parity."
    FoundSumsLost "found-sums-lost" SumIsMarked "spare missing1"
        "A device becomes the member before its page of sums is written."
    FixedNotCompared "fixed-not-compared" RepairFits "0:a? flip twice"
        "A block that was calculated is written without being compared."
    OthersNotCompared "others-not-compared" RepairFits "0:a 0:a? lost twice"
        "A block is calculated from others that don't fit their sums, and counts as right if it is the one that was read."
    SumTakenForWrong "sum-taken-for-wrong" RepairFits "0:a? flip"
        "A block that doesn't fit gets a new sum, whatever the others say."
    NoneTrusted "none-trusted" OneFaultHeals "0:a 0:a? sweep all"
        "Two blocks that don't fit fail their request, though one device has the one and the other's sum."
    ParityMadeEverywhere "parity-made-everywhere" SumIsMarked "0:a? flip cut"
        "A start makes parity of chunks that aren't marked, of blocks that nobody has compared."
    LoadNotAsked "load-not-asked" EveryoneEnds "0:a?"
        "Groups come into memory for batches that write only."
}

impl Bug {
    /// A bound in which a search finds the bug.
    pub fn bound(self) -> Bound {
        bound(self.within()).expect("words of a bound")
    }
}
