//! Orders of users: a device is taken in, or a member is thrown out. Both need a stop of this queue.

use super::bit;
use super::kick::Change;
use super::membership::Device;
use super::queue::QueueCore;
use std::sync::Arc;

/// A device that is to become the member of a role.
pub(super) struct Arriving {
    pub slot: usize,
    pub role: usize,
    pub device: Arc<Device>,
    /// It was the member, and holds all but what the bitmap marks.
    pub by_bitmap: bool,
}

/// The orders of a queue that aren't carried out yet.
#[derive(Default)]
pub(super) struct Orders {
    pub arriving: Option<Arriving>,
    /// Slots that are to be thrown out, as a mask.
    out: u64,
    /// The end of the last order to take a device in; true: it is one of the array's.
    taken_in: Option<bool>,
}

impl Orders {
    pub fn is_empty(&self) -> bool {
        self.arriving.is_none() && self.out == 0
    }
}

impl QueueCore {
    /// A device becomes the incoming one of a role, and then its member. Its slot is nobody's, and no queue uses it. `by_bitmap`: it was the
    /// member, and holds all but what the bitmap marks. The answer is [`QueueCore::is_taken_in`].
    pub fn take_in(&mut self, slot: usize, role: usize, device: Arc<Device>, by_bitmap: bool) {
        self.common.forget_failure(slot);
        self.orders.arriving = Some(Arriving {
            slot,
            role,
            device,
            by_bitmap,
        });
        self.orders.taken_in = None;
        self.follow_orders();
    }

    /// The end of an order to take a device in, if it has ended; false: it failed, or the array has.
    pub fn is_taken_in(&mut self) -> Option<bool> {
        self.orders.taken_in.take()
    }

    /// The member of a role isn't one any more, as if it had failed; without a member, the device that is rebuilt for it. Nothing happens if the
    /// others don't have all data.
    pub fn throw_out(&mut self, role: usize) {
        self.look();
        let incoming = self.now.members.incoming();
        let incoming = incoming.filter(|incoming| incoming.role == role);
        let slot = self.now.members.slot(role);
        if let Some(slot) = slot.or(incoming.map(|incoming| incoming.slot)) {
            self.orders.out |= bit(slot);
            self.follow_orders();
        }
    }

    /// Stops words if an order needs that, and drops orders that can't be carried out any more. To be called again when words go on.
    pub(super) fn follow_orders(&mut self) {
        self.look();
        let live = self.now.live_mask();
        self.orders.out &= if self.now.broken { 0 } else { live };
        if let Some(arriving) = &self.orders.arriving {
            let is_in = live & bit(arriving.slot) != 0;
            let can_come = !self.now.broken && self.now.members.incoming().is_none();
            if is_in || !can_come {
                self.end_arrival(is_in);
            }
        }
        if !self.orders.is_empty() {
            self.stop_words();
        }
    }

    /// The device that was to be taken in is one of the array's, or not.
    pub(super) fn end_arrival(&mut self, is_in: bool) {
        self.orders.arriving = None;
        self.orders.taken_in = Some(is_in);
    }

    /// The change that this queue's stop is for.
    pub(super) fn wanted_change(&self) -> Option<Change> {
        if self.takes_over() {
            return Some(Change::TakesOver);
        }
        let arriving = self.orders.arriving.as_ref();
        let arriving = arriving.filter(|_| self.now.members.incoming().is_none());
        arriving.map(|Arriving { slot, role, .. }| Change::TakesIn {
            slot: *slot,
            role: *role,
        })
    }

    /// Takes the slots that are to be thrown out, as a mask.
    pub(super) fn take_out(&mut self) -> u64 {
        std::mem::take(&mut self.orders.out)
    }

    /// True if this queue has I/O at a slot, may begin some, or waits until the slot isn't a member's any more.
    pub fn uses(&self, slot: usize) -> bool {
        let mut ios = self.purposes.iter();
        let mut waits = self.held_flushes.iter();
        self.now.live().any(|live| live == slot)
            || ios.any(|(_, (_, at))| *at == slot)
            || waits.any(|flush| flush.is_at(slot))
            || self.unnamed.iter().any(|unnamed| unnamed.waits_for(slot))
            || self.sync.as_ref().is_some_and(|sync| sync.uses(slot))
            || self.kick.as_ref().is_some_and(|kick| kick.names(slot))
    }
}
