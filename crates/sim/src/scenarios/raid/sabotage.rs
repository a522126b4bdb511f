//! Faults of members that know the array's areas on them: superblocks, logs, a bitmap, data and parity.

use super::shape::Shape;
use crate::bugs::Bug;
use crate::disk::{Fate, Flushes, Sabotage};
use crate::stamp::SECTOR_BYTES;
use pvblk_raid5::{Role, SUPER_BYTES, Superblock};
use std::ops::Range;

/// The areas of a member, in sectors.
#[derive(Clone, Debug)]
pub struct Areas {
    /// Number of the member; a number from `shape.members` on is a spare's.
    pub number: usize,
    /// Sectors of the superblock.
    pub mark: Range<u64>,
    /// Sectors of the bitmap.
    pub bitmap: Range<u64>,
    /// The partial parity log.
    pub log: Range<u64>,
    /// Data and parity.
    pub data: Range<u64>,
    /// Layout of the array.
    pub shape: Shape,
}

/// The faults of a member for this bug.
pub fn of_member(bug: Option<Bug>, areas: Areas) -> Sabotage {
    let mut sabotage = Sabotage::new(bug);
    let n = areas.number;
    let skips = match bug {
        Some(Bug::FlushOneLess) => n == 1,
        Some(Bug::FlushOneMember) => n > 0,
        Some(Bug::PositionNotFlushed) => n >= areas.shape.members,
        _ => false,
    };
    if skips {
        sabotage.flushes = Flushes::None;
    }
    let Some(bug) = bug else { return sabotage };
    let (mut writes, mut events) = (0u64, None);
    let fate = move |sector: u64, write: &[u8], at: usize| {
        writes += 1;
        let is_mark = areas.mark.contains(&sector);
        let wrong = match bug {
            Bug::NoLog => areas.log.contains(&sector).then_some(Fate::Lost),
            Bug::LogNotAwaited => areas.log.contains(&sector).then_some(Fate::Late),
            Bug::IntentNotAwaited => areas.bitmap.contains(&sector).then_some(Fate::Late),
            Bug::NoMarks => is_mark.then_some(Fate::Lost),
            Bug::NoFaulty if is_mark => calls_faulty(write).then_some(Fate::Lost),
            Bug::KickNotAwaited if is_mark => calls_faulty(write).then_some(Fate::Late),
            Bug::NoDirtyMark if is_mark => calls_dirty(write).then_some(Fate::Late),
            Bug::EventsNotRaised if is_mark => with_events(&mut events, write, at),
            Bug::ParityForgotten => {
                (writes.is_multiple_of(16) && areas.is_parity(sector)).then_some(Fate::Lost)
            }
            Bug::AnsweredEarly => (n == 0 && areas.data.contains(&sector)).then_some(Fate::Late),
            _ => None,
        };
        wrong.unwrap_or(Fate::Done)
    };
    if sabotage.fates.is_none() {
        sabotage.fates = Some(Box::new(fate));
    }
    sabotage
}

impl Areas {
    fn is_parity(&self, sector: u64) -> bool {
        self.number < self.shape.members
            && self.data.contains(&sector)
            && self.shape.parity(sector - self.data.start) == self.number
    }
}

/// The superblock in the data of a write.
fn superblock(write: &[u8]) -> Option<Superblock> {
    let mut whole = [0; SUPER_BYTES];
    let len = write.len().min(SUPER_BYTES);
    whole[..len].copy_from_slice(&write[..len]);
    Superblock::parse(&whole).ok()
}

fn calls_faulty(write: &[u8]) -> bool {
    superblock(write).is_some_and(|s| s.roles.contains(&Role::Faulty))
}

fn calls_dirty(write: &[u8]) -> bool {
    superblock(write).is_some_and(|s| !s.is_clean())
}

/// The sector at byte `at` of a superblock, with the first event number that was seen.
fn with_events(first: &mut Option<u64>, write: &[u8], at: usize) -> Option<Fate> {
    let mut superblock = superblock(write)?;
    superblock.events = *first.get_or_insert(superblock.events);
    let bytes = superblock.encode();
    let sector = bytes.get(at..at + SECTOR_BYTES)?;
    Some(Fate::Instead(Box::new(sector.try_into().ok()?)))
}
