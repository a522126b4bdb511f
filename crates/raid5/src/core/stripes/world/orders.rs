//! Orders of a run: devices are taken in, and members thrown out.

use super::device::Device;
use super::{World, devices_of};
use std::sync::Arc;

impl World {
    /// An order, if one is possible.
    pub(super) fn order_rarely(&mut self) {
        self.note_arrivals();
        match self.rng.bool() {
            true => self.take_in(),
            false => self.throw_out(),
        }
    }

    /// A new device arrives, for a missing member or another one.
    fn take_in(&mut self) {
        let Some(slot) = (0..self.devices.len()).find(|slot| self.is_free(*slot)) else {
            return;
        };
        let orders = self.queues.iter().flatten().map(|queue| &queue.orders);
        let is_busy = orders.into_iter().any(|orders| orders.arriving.is_some());
        if is_busy || !self.common.takes_device() {
            return;
        }
        let missing = self.common.missing();
        let role = missing.unwrap_or_else(|| self.rng.usize(..self.geometry.members()));
        let old = &self.devices[slot];
        let mut device = Device::new(vec![0xee; old.contents().len()], old.volatile);
        device.dead = self.rng.u32(..8) == 0;
        self.ways.slots_reused += usize::from(slot < self.geometry.members());
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
        self.queue(queue).take_in(slot, role, Arc::new(known));
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
