//! Kicks: the queue that sees a member fail stops all words, waits until the I/O in flight has ended, and changes the members. The first
//! write stops words as well, until superblocks say dirty.
//!
//! In order: words in flight are drained, the other members flushed, superblocks name the one that failed, members change, words go on. So
//! the others hold all that was written together with its blocks when it is left out. A device that is rebuilt becomes a member in the same way.

use super::io::Purpose;
use super::membership::Membership;
use super::queue::{Errand, Mail, QueueCore};
use super::{Data, bit};
use crate::core::members::Members;
use crate::core::slots::Unsynced;
use crate::head_pages::bits;
use crate::words::{InFlight, Stop};
use pvblk_block::Op;
use pvblk_block::planted::{Plant, has};
use std::sync::Arc;

/// A kick by this queue.
pub struct Kick {
    stop: Stop,
    /// Unless its device fails before superblocks are written.
    change: Option<Change>,
    /// Slots that are to be thrown out, as a mask, if the others have all data.
    out: u64,
    phase: Phase,
}

/// A change of the incoming device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It becomes the member.
    TakesOver,
    /// A device becomes the incoming one of a role.
    TakesIn { slot: usize, role: usize },
}

enum Phase {
    /// Words in flight end.
    Draining { stripes: InFlight, logs: InFlight },
    /// The others are flushed; so many aren't.
    Flushing(usize),
    /// Superblocks are written, which name these slots (a mask), or tell of a change.
    Naming {
        failed: u64,
        change: Option<Change>,
        dirty: bool,
    },
}

impl Kick {
    /// True if superblocks are being written that tell of a slot.
    pub(super) fn names(&self, slot: usize) -> bool {
        match self.phase {
            Phase::Naming { failed, change, .. } => {
                let comes = matches!(change, Some(Change::TakesIn { slot: s, .. }) if s == slot);
                comes || failed & bit(slot) != 0
            }
            Phase::Draining { .. } | Phase::Flushing(_) => false,
        }
    }
}

impl QueueCore {
    /// A member failed I/O: words are stopped, by this queue or another. True if the caller has to wait for that: when words go on it asks
    /// again. False if the member isn't one any more.
    pub(super) fn member_failed(&mut self, slot: usize) -> bool {
        self.look();
        if self.now.broken || !self.now.live().any(|live| live == slot) {
            return false;
        }
        self.stop_words();
        true
    }

    /// Words are stopped, by this queue or another. A batch that wants it is parked, since the stop would wait for it.
    pub(super) fn stop_words(&mut self) {
        if let Ok(stop) = self.common.epoch.stop(self.me) {
            self.has_stopped(stop);
        }
    }

    /// This queue has stopped words.
    pub(super) fn has_stopped(&mut self, stop: Stop) {
        // A stop that has just ended may have changed them.
        self.now = self.common.membership();
        let stripes = self.common.words.in_flight(&stop);
        let logs = self.common.logs.as_ref();
        let logs = logs.map(|logs| logs.in_flight(&stop)).unwrap_or_default();
        self.kick = Some(Kick {
            stop,
            change: self.wanted_change(),
            out: 0,
            phase: Phase::Draining { stripes, logs },
        });
        self.send(self.me, Mail::Drained);
    }

    /// Slots that have failed, or are thrown out in this queue's kick, as a mask.
    fn kick_failed(&self) -> u64 {
        let mut failed = self.common.failed(&self.now);
        for slot in bits(self.kick.as_ref().map_or(0, |kick| kick.out)) {
            let all = failed | bit(slot);
            if !self.breaks(all, self.kick_changes(all)) {
                failed = all;
            }
        }
        failed
    }

    /// True if members that failed in the kick leave too few, though the incoming device may become one.
    fn breaks(&self, failed: u64, change: Option<Change>) -> bool {
        let mut members = self.now.members.clone();
        if change == Some(Change::TakesOver) {
            members.take_over();
        }
        self.are_too_few(&members, failed)
    }

    /// True if the members without these slots (a mask) don't have all data.
    fn are_too_few(&self, members: &Members, failed: u64) -> bool {
        let present = members.slots().iter().flatten();
        let stay = present.filter(|slot| failed & bit(**slot) == 0).count();
        stay < self.common.geometry.data_members()
    }

    /// The change in this queue's kick, in which these slots (a mask) failed.
    fn kick_changes(&self, failed: u64) -> Option<Change> {
        let incoming = self.now.members.incoming();
        let is_well = incoming.is_some_and(|incoming| failed & bit(incoming.slot) == 0);
        let change = self.kick.as_ref()?.change;
        change.filter(|change| *change != Change::TakesOver || is_well)
    }

    /// A word is drained: if none is left, the other members are flushed.
    pub(super) fn go_on_kicking(&mut self) {
        let Some(Kick {
            phase: Phase::Draining { stripes, logs },
            ..
        }) = &mut self.kick
        else {
            return;
        };
        let common = &self.common;
        let mut in_flight = common.words.is_in_flight(stripes);
        in_flight |= common.logs.as_ref().is_some_and(|l| l.is_in_flight(logs));
        if in_flight {
            return;
        }
        let out = self.take_out();
        if let Some(kick) = &mut self.kick {
            kick.out = out;
        }
        let failed = self.common.failed(&self.now);
        let mut slots = self.common.volatile(&self.now);
        // Those that are to be thrown out are flushed, too: they stay if another one fails meanwhile.
        slots.retain(|slot| failed & bit(*slot) == 0);
        if self.breaks(failed, self.kick_changes(failed)) || has(Plant::KickNotFlushed) {
            slots.clear();
        }
        self.set_phase(Phase::Flushing(slots.len() + 1));
        for slot in slots {
            self.start(Purpose::Kick, (slot, Op::Flush, false), 0, Data::None);
        }
        self.kick_flush_over();
    }

    fn set_phase(&mut self, phase: Phase) {
        if let Some(kick) = &mut self.kick {
            kick.phase = phase;
        }
    }

    /// One of the flushes has ended. After the last one, superblocks name the members that failed, unless there are too many.
    pub(super) fn kick_flush_over(&mut self) {
        let Some(kick) = &mut self.kick else { return };
        if let Phase::Flushing(left) = &mut kick.phase {
            *left -= 1;
            if *left > 0 {
                return;
            }
        }
        let failed = self.kick_failed();
        let change = self.kick_changes(failed);
        let is_changed = failed != 0 || change.is_some() || !self.now.dirty;
        if self.breaks(failed, change) || !is_changed {
            return self.change_members(None);
        }
        // An array that nobody has written to stays clean when devices come and go: a writer stops words again.
        // But parity that may be wrong can't be told of once a member is missing.
        let is_unsynced = self.now.unsynced().first().is_some();
        let dirty = self.now.dirty || failed == 0 && change.is_none() || failed != 0 && is_unsynced;
        self.set_phase(Phase::Naming {
            failed,
            change,
            dirty,
        });
        self.errands.push(Errand::Name {
            dirty,
            failed,
            change,
        });
    }

    /// Superblocks are written; these slots (a mask) failed that, and the others' superblocks name them too.
    pub(super) fn named(&mut self, failed: u64) {
        bits(failed).for_each(|slot| self.common.note_failure(slot));
        let Some(Kick {
            phase: Phase::Naming { failed: named, .. },
            ..
        }) = self.kick
        else {
            debug_assert!(false, "superblocks that nobody asked for");
            return;
        };
        self.change_members(Some(named | failed));
    }

    /// Words go on. Slots that superblocks name as failed (a mask, if they were written) aren't members any more. Another may have failed a read
    /// or a flush meanwhile, which need no word: it stays a member until superblocks name it, so whoever waits for that stops words again.
    fn change_members(&mut self, named: Option<u64>) {
        let Some(Kick { stop, phase, .. }) = self.kick.take() else {
            return;
        };
        // Some of them may be thrown out, and so haven't failed.
        let named_live = named.unwrap_or(0) & self.now.live_mask();
        let failed = self.common.failed(&self.now) | named_live;
        let gone = failed & named.unwrap_or(0);
        let mut next = Membership::clone(&self.now);
        let (change, dirty) = match phase {
            Phase::Naming { change, dirty, .. } => (change, dirty),
            Phase::Draining { .. } | Phase::Flushing(_) => (None, false),
        };
        let takes_over = change == Some(Change::TakesOver);
        if let Some(incoming) = next.members.incoming() {
            if gone & bit(incoming.slot) != 0 {
                tracing::warn!("raid5: the member that was being rebuilt failed");
                next.members.lose_incoming();
                next.forget_progress();
                if takes_over {
                    // Superblocks know the one before it no more.
                    next.members.lose(incoming.role);
                }
            } else if takes_over {
                tracing::info!("raid5: member {} is rebuilt", incoming.role);
                next.members.take_over();
                next.forget_progress();
                next.takeovers += 1;
            }
        }
        next.broken |= self.are_too_few(&next.members, failed);
        next.dirty |= dirty;
        for slot in bits(gone) {
            if let Some(role) = next.members.role(slot) {
                tracing::warn!("raid5: member {role} failed and is kicked");
                next.members.lose(role);
                next.unsynced = Arc::new(Unsynced::default());
            }
        }
        if let Some(Change::TakesIn { slot, role }) = change
            && let Some(arriving) = &self.orders.arriving
        {
            let is_in = named.unwrap_or(0) & bit(slot) == 0 && !next.broken;
            if is_in {
                let device = Arc::clone(&arriving.device);
                next.take_in(slot, role, device, arriving.by_bitmap);
            }
            self.end_arrival(is_in);
        }
        if next.broken {
            tracing::error!("raid5: two members failed: the array stops");
        }
        self.common.set_membership(next);
        self.common.epoch.go_on(stop);
        for queue in self.common.queues() {
            self.send(queue, Mail::GoOn);
        }
    }
}
