//! Orders of a run: devices are taken in, and members thrown out.

use super::device::{Device, SECTOR};
use super::{DATA_SECTORS, World, devices_of};
use std::sync::Arc;

impl World {
    /// An order, if one is possible.
    pub(super) fn order_rarely(&mut self) {
        self.note_arrivals();
        match self.rng.bool() {
            true if self.rng.u32(..4) > 0 && self.take_back() => {}
            true => self.take_in(),
            false => self.throw_out(),
        }
    }

    /// True if a device can arrive.
    fn takes_device(&self) -> bool {
        let mut orders = self.queues.iter().flatten().map(|queue| &queue.orders);
        let is_busy = orders.any(|orders| orders.arriving.is_some());
        !is_busy && self.common.takes_device()
    }

    /// True if the device that arrives was the member, and holds all but what the bitmap marks.
    pub(super) fn comes_by_bitmap(&self) -> bool {
        let orders = self.queues.iter().flatten().map(|queue| &queue.orders);
        let mut arriving = orders.filter_map(|orders| orders.arriving.as_ref());
        arriving.any(|arriving| arriving.by_bitmap)
    }

    /// The device that was a member comes back, as after a cut of its power; true if there is one.
    fn take_back(&mut self) -> bool {
        let gone = self.disk.gone.filter(|_| self.bits.is_some());
        let Some((slot, role)) = gone.filter(|(slot, _)| self.is_free(*slot)) else {
            return false;
        };
        if self.devices[slot].dead || !self.takes_device() || self.common.missing() != Some(role) {
            return false;
        }
        let old = &self.devices[slot];
        let mut contents = old.cut(&[], &mut self.rng);
        // Its log is made empty before superblocks tell of it.
        contents[..DATA_SECTORS as usize * SECTOR].fill(0);
        self.ways.taken_back += 1;
        self.arrive((slot, role), Device::new(contents, old.volatile), true);
        true
    }

    /// A new device arrives, for a missing member or another one.
    fn take_in(&mut self) {
        let Some(slot) = (0..self.devices.len()).find(|slot| self.is_free(*slot)) else {
            return;
        };
        if !self.takes_device() {
            return;
        }
        let missing = self.common.missing();
        let role = missing.unwrap_or_else(|| self.rng.usize(..self.geometry.members()));
        let old = &self.devices[slot];
        let mut device = Device::new(vec![0xee; old.contents().len()], old.volatile);
        device.dead = self.rng.u32(..8) == 0;
        self.ways.slots_reused += usize::from(slot < self.geometry.members());
        self.disk.gone.take_if(|gone| gone.0 == slot);
        self.arrive((slot, role), device, false);
    }

    fn arrive(&mut self, (slot, role): (usize, usize), device: Device, by_bitmap: bool) {
        self.devices[slot] = device;
        self.doomed &= !(1 << slot);
        self.unreadable &= !(1 << slot);
        let known = devices_of(
            slot + 1,
            self.devices[slot].volatile,
            self.zeroes,
            self.room,
        );
        let known = known.into_iter().next_back().expect("one");
        let queue = self.rng.usize(..self.queues.len());
        self.open(queue);
        self.queue(queue)
            .take_in(slot, role, Arc::new(known), by_bitmap);
        self.collect(queue);
    }

    /// True if a slot is nobody's, and no queue uses it.
    fn is_free(&self, slot: usize) -> bool {
        let is_live = self.disk.live().any(|live| live == slot);
        let is_known = self.common.devices().1 & 1 << slot != 0;
        let is_used = self.queues.iter().flatten().any(|q| q.uses(slot));
        let has_ios = self.ios.iter().any(|io| io.io.slot == slot);
        !is_live && !is_known && !is_used && !has_ios
    }

    /// A member, or the device that is rebuilt, is thrown out, unless another one may be about to fail.
    fn throw_out(&mut self) {
        if self.disk.missing() > 0 && self.disk.incoming.is_none() {
            return;
        }
        // The member's blocks would be lost.
        if self.common.first_unsynced().is_some() {
            return;
        }
        let missing = self.common.missing();
        let role = missing.unwrap_or_else(|| self.rng.usize(..self.geometry.members()));
        let queue = self.rng.usize(..self.queues.len());
        self.open(queue);
        self.ways.thrown_out += 1;
        self.queue(queue).throw_out(role);
        self.collect(queue);
    }

    /// Looks at the arrivals that have ended.
    pub(super) fn note_arrivals(&mut self) {
        for queue in self.queues.iter_mut().flatten() {
            match queue.is_taken_in() {
                Some(true) => self.ways.taken_in += 1,
                Some(false) => self.ways.refused += 1,
                None => {}
            }
        }
    }
}
