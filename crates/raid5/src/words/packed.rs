//! [`Packed`]: the fields of a word, and those that each transition leaves.

use std::num::{NonZeroU16, NonZeroU32};

const OWNER_SHIFT: u32 = 32;
const PHASE_SHIFT: u32 = 44;
const PAGES_SHIFT: u32 = 46;
const BATCH_SHIFT: u32 = 48;

const LIST: u64 = 0xffff_ffff;
const OWNER: u64 = (Owner::MAX as u64) << OWNER_SHIFT;
const PHASE: u64 = 0b11 << PHASE_SHIFT;
const PAGES: u64 = 1 << PAGES_SHIFT;
const BATCH: u64 = 0xffff << BATCH_SHIFT;

/// Number of a queue as words have it, from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner(NonZeroU16);

impl Owner {
    /// The greatest number that a word holds.
    pub const MAX: u16 = 0xfff;

    /// `None` if the number is 0 or more than [`Owner::MAX`].
    pub fn new(number: u16) -> Option<Owner> {
        let owner = NonZeroU16::new(number).map(Owner);
        owner.filter(|_| number <= Owner::MAX)
    }

    /// Number of the queue, from 1.
    pub fn number(self) -> u16 {
        self.0.get()
    }
}

/// State of a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Nobody owns it, and its list is empty.
    Free = 0,
    /// Its batch takes arrivals. The owner has looked at the epoch, or is about to.
    Claimed = 1,
    /// Its batch takes no arrivals any more; they wait in the list for the next one.
    Closed = 2,
    /// Its owner has no I/O in flight, and waits: for the next epoch, for a log, or for superblocks.
    Waits = 3,
}

/// Fields of a word in 64 bits. The table is in docs/decisions/0048-stripes-own-themselves.md.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packed(pub(super) u64);

impl Packed {
    /// A word that nobody has owned yet.
    pub(super) const FREE: Packed = Packed(0);

    /// Number of the newest arrival; `None`: the list is empty.
    pub fn newest(self) -> Option<NonZeroU32> {
        NonZeroU32::new((self.0 & LIST) as u32)
    }

    /// The queue that owns the word; `None` if it is free.
    pub fn owner(self) -> Option<Owner> {
        Owner::new(((self.0 & OWNER) >> OWNER_SHIFT) as u16)
    }

    pub fn phase(self) -> Phase {
        match (self.0 & PHASE) >> PHASE_SHIFT {
            0 => Phase::Free,
            1 => Phase::Claimed,
            2 => Phase::Closed,
            _ => Phase::Waits,
        }
    }

    /// Number of the batch, which wraps.
    pub fn batch(self) -> u16 {
        (self.0 >> BATCH_SHIFT) as u16
    }

    /// True if the word is free and its record has pages.
    pub fn has_pages(self) -> bool {
        self.0 & PAGES != 0
    }

    /// True if the owner may have I/O in flight.
    pub fn is_in_flight(self) -> bool {
        matches!(self.phase(), Phase::Claimed | Phase::Closed)
    }

    pub(super) fn with_phase(self, phase: Phase) -> Packed {
        Packed(self.0 & !PHASE | (phase as u64) << PHASE_SHIFT)
    }

    /// With this piece as the newest arrival.
    pub(super) fn joined(self, piece: NonZeroU32) -> Packed {
        Packed(self.0 & !LIST | u64::from(piece.get()))
    }

    /// With an empty list.
    pub(super) fn emptied(self) -> Packed {
        Packed(self.0 & !LIST)
    }

    /// A new batch of this queue. Arrivals stay.
    pub(super) fn owned(self, owner: Owner) -> Packed {
        let batch = (self.0 & BATCH).wrapping_add(1 << BATCH_SHIFT);
        let owner = u64::from(owner.number()) << OWNER_SHIFT;
        Packed(self.0 & LIST | owner | batch).with_phase(Phase::Claimed)
    }

    /// Without an owner, and with or without pages. The batch's number stays, so that the next one's differs.
    pub(super) fn released(self, pages: bool) -> Packed {
        Packed(self.0 & (LIST | BATCH) | u64::from(pages) << PAGES_SHIFT)
    }
}
