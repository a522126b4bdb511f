//! Members that don't answer in time, and members that come back. docs/decisions/0033-members-that-stall.md has the rules.

use super::{Core, Purpose};
use crate::{STRIPE_SECTORS, Superblock};
use pvblk_block::planted::{Plant, has};

/// Ticks that make up the time a member has for an I/O.
pub(in super::super) const TICKS: u32 = 4;

/// In place of the tick in which an I/O began: its data is being taken over, so that it can't be abandoned.
const CLAIMED: u32 = u32::MAX;

/// A device that is no member any more, as it was.
pub(in super::super) struct Kicked {
    pub slot: usize,
    pub superblock: Superblock,
    /// It did not answer in time.
    pub stalled: bool,
}

/// I/O by the time when it began.
#[derive(Default)]
pub(super) struct Ages {
    /// The number of this tick; they are counted only if members have a time limit.
    now: u32,
    /// The tick in which each I/O began, by token.
    began: Vec<u32>,
    /// Members have a time limit: I/O may be abandoned.
    pub limited: bool,
    /// A member is kicked for its time just now.
    stalls: bool,
    /// Devices that were kicked and not yet told of.
    kicked: Vec<Kicked>,
}

impl Ages {
    /// An I/O begins.
    pub fn begin(&mut self, token: usize) {
        match self.began.get_mut(token) {
            Some(began) => *began = self.now,
            None => self.began.push(self.now),
        }
    }

    /// A device isn't a member any more.
    pub fn note(&mut self, slot: usize, superblock: Superblock) {
        self.kicked.push(Kicked {
            slot,
            superblock,
            stalled: self.stalls,
        });
    }
}

impl Core {
    /// From now on members have a time limit, by [`Core::tick`].
    pub fn limit_members(&mut self) {
        self.ages.limited = true;
    }

    /// The devices that were kicked since the last call.
    pub fn take_kicked(&mut self) -> Vec<Kicked> {
        std::mem::take(&mut self.ages.kicked)
    }

    /// Number of I/Os at a device that haven't come back, the abandoned ones included.
    pub fn at_device(&self, slot: usize) -> usize {
        let here = |(at, purpose): (&usize, &Option<Purpose>)| *at == slot && purpose.is_some();
        let all = self.places.iter().zip(&self.purposes);
        all.filter(|io| here(*io)).count()
    }

    /// True if the array doesn't wait for this I/O any more.
    pub fn is_abandoned(&self, token: super::Token) -> bool {
        matches!(self.purposes[token.0], Some(Purpose::Abandoned))
    }

    /// The slot that an I/O is at, and whether it was abandoned.
    pub fn place_of(&self, token: super::Token) -> (usize, bool) {
        (self.places[token.0], self.is_abandoned(token))
    }

    /// Before data that a member has read is taken over; false if it isn't wanted any more. [`Core::ended`] follows.
    pub fn claim(&mut self, token: super::Token) -> bool {
        self.ages.began[token.0] = CLAIMED;
        !self.is_abandoned(token)
    }

    /// A quarter of the time limit has passed since the last call. Kicks the member that has not answered for the whole time, if the others can do without
    /// it, and abandons its I/O. [`Core::unplug`] follows.
    pub fn tick(&mut self, runner: usize) {
        self.ages.now += 1;
        let now = self.ages.now;
        let mut oldest = vec![now; self.slots.all.len()];
        for (token, purpose) in self.purposes.iter().enumerate() {
            if matches!(purpose, None | Some(Purpose::Abandoned)) {
                continue;
            }
            let began = self.ages.began[token];
            if began != CLAIMED {
                let slot = self.places[token];
                oldest[slot] = oldest[slot].min(began);
            }
        }
        for slot in 0..oldest.len() {
            if now - oldest[slot] <= TICKS || self.broken {
                continue;
            }
            if !self.may_kick(slot, &oldest) {
                if now - oldest[slot] == TICKS + 1 {
                    tracing::warn!(
                        "raid5: {} does not answer in time, and is waited for: the array can't do without it now",
                        self.word_of(slot)
                    );
                }
                continue;
            }
            self.ages.stalls = true;
            self.kick(slot, runner);
            self.ages.stalls = false;
            self.abandon(slot, runner);
        }
    }

    fn word_of(&self, slot: usize) -> String {
        match self.members.role(slot) {
            Some(role) => format!("member {role}"),
            None => "the member that is being rebuilt".into(),
        }
    }

    /// True if the array can do without a device that doesn't answer; `oldest`: the tick in which the oldest I/O of each slot began.
    fn may_kick(&self, slot: usize, oldest: &[u32]) -> bool {
        let is_member = self.members.role(slot).is_some();
        let waits = |other: usize| other != slot && self.ages.now - oldest[other] > 1;
        !is_member || (self.members.failed().is_none() && !self.slots.live().any(waits))
    }

    /// Ends all I/O at a device that isn't a member any more as failed. The device may still do it.
    pub(super) fn abandon(&mut self, slot: usize, runner: usize) {
        for token in 0..self.purposes.len() {
            if self.places[token] != slot || self.ages.began[token] == CLAIMED {
                continue;
            }
            match self.purposes[token] {
                None | Some(Purpose::Abandoned) => {}
                Some(purpose) => {
                    self.purposes[token] = Some(Purpose::Abandoned);
                    self.io_ended(purpose, slot, false, runner);
                }
            }
        }
    }

    /// The end of the stripes from `stripe` on that the incoming device holds already, by the bitmap: `stripe` itself if that has to be recovered.
    pub(super) fn clear_until(&self, stripe: u64) -> u64 {
        let all = self.geometry.stripes();
        let Some(bitmap) = self.bitmap() else {
            return stripe;
        };
        let dirty = bitmap.next_set(self.geometry.stripe_member_sector(stripe));
        if dirty == Some(self.geometry.stripe_member_sector(stripe)) {
            return stripe;
        }
        let end = dirty.map_or(all, |sector| (sector / STRIPE_SECTORS).max(stripe));
        // Rounds that were planned without the device, and may not have set their bits yet.
        let planned = self.heads.all.iter().filter(|h| {
            let round = h.round.as_ref();
            round.is_some_and(|r| r.writes() && r.plan.missing.is_some())
        });
        let planned = planned.map(|h| h.record.stripe);
        let planned = planned.filter(|s| *s >= stripe && !has(Plant::PlannedIsForgotten));
        planned.min().unwrap_or(all).min(end).min(all)
    }

    /// Sectors of each member that have to be recovered from `stripe` on, by the bitmap.
    pub(super) fn marked_from(&self, stripe: u64) -> u64 {
        let first = self.geometry.stripe_member_sector(stripe);
        let end = self.geometry.member_sectors();
        self.bitmap()
            .map_or(end - first, |b| b.set_sectors(first..end))
    }
}
