//! [`Devices`]: the devices of an array by slot, for as long as somebody has them.

use super::patient::{Opened, Patient, Ticks};
use crate::array::MemberDevice;
use crate::core::Device;
use parking_lot::Mutex;
use pvblk_block::BlockDevice;
use std::sync::{Arc, Weak};

/// Slots that an array may have, as many as members at most: masks of them are 64 bits.
pub(super) const SLOTS: usize = 64;

/// A device at its slot. Each queue that has a queue at the device keeps one.
pub(super) struct AtSlot {
    pub member: MemberDevice,
    /// It has a limited time for an I/O.
    pub patient: Option<Arc<Patient>>,
    /// The device as the core knows it: another one for each device that the slot has had.
    known: Arc<Device>,
}

impl AtSlot {
    fn new(member: MemberDevice, known: &Arc<Device>, ticks: Option<&Arc<Ticks>>) -> AtSlot {
        AtSlot {
            patient: ticks.map(|ticks| Patient::new(&member.device, ticks)),
            known: Arc::clone(known),
            member,
        }
    }

    /// The device whose queues do the array's I/O.
    pub fn opened(&self) -> MemberDevice {
        let device: Arc<dyn BlockDevice> = match &self.patient {
            Some(patient) => Arc::new(Opened(Arc::clone(patient))),
            None => Arc::clone(&self.member.device),
        };
        MemberDevice {
            device,
            name: self.member.name.clone(),
        }
    }
}

#[derive(Default)]
struct Slot {
    device: Option<Arc<AtSlot>>,
    /// It isn't one of the array's yet.
    arrives: bool,
    /// The last device that isn't the array's any more. Queues may still have I/O there.
    last: Weak<AtSlot>,
}

impl Slot {
    fn is_free(&self) -> bool {
        self.device.is_none() && self.last.strong_count() == 0
    }
}

/// See the module's documentation.
pub(super) struct Devices {
    slots: Mutex<Vec<Slot>>,
    /// Of the time that devices have, if it is limited.
    ticks: Option<Arc<Ticks>>,
}

impl Devices {
    /// `known`: the devices as the core knows them. Slots of missing members are free.
    pub fn new(
        devices: Vec<Option<MemberDevice>>,
        known: &[Arc<Device>],
        ticks: Option<Arc<Ticks>>,
    ) -> Devices {
        let slots = devices.into_iter().zip(known);
        let slots = slots.map(|(member, known)| Slot {
            device: member.map(|member| Arc::new(AtSlot::new(member, known, ticks.as_ref()))),
            ..Slot::default()
        });
        Devices {
            slots: Mutex::new(slots.collect()),
            ticks,
        }
    }

    /// Counts the time that devices have, if it is limited.
    pub fn ticks(&self) -> Option<&Arc<Ticks>> {
        self.ticks.as_ref()
    }

    /// The device of a slot that the core knows as this one.
    pub fn get(&self, slot: usize, known: &Arc<Device>) -> Option<Arc<AtSlot>> {
        let slots = self.slots.lock();
        let device = slots.get(slot)?.device.as_ref()?;
        Arc::ptr_eq(&device.known, known).then(|| Arc::clone(device))
    }

    /// A device arrives: returns its slot, which nobody uses, and the device whose queues do I/O. `None`: there is no slot now.
    pub fn arrive(
        &self,
        member: MemberDevice,
        known: &Arc<Device>,
    ) -> Option<(usize, Arc<dyn BlockDevice>)> {
        let mut slots = self.slots.lock();
        let at = slots.iter().position(Slot::is_free).unwrap_or(slots.len());
        if at >= SLOTS {
            return None;
        }
        let device = Arc::new(AtSlot::new(member, known, self.ticks.as_ref()));
        let opened = device.opened().device;
        let slot = Slot {
            device: Some(device),
            arrives: true,
            last: Weak::new(),
        };
        match slots.get_mut(at) {
            Some(place) => *place = slot,
            None => slots.push(slot),
        }
        Some((at, opened))
    }

    /// The devices that arrive have done so, or never will.
    pub fn settle(&self) {
        let mut slots = self.slots.lock();
        slots.iter_mut().for_each(|slot| slot.arrives = false);
    }

    /// Forgets devices that aren't the array's (`live` is a mask of those that are). Returns them, since closing them may take time.
    pub fn forget(&self, live: u64) -> Vec<Arc<AtSlot>> {
        let mut slots = self.slots.lock();
        let gone = slots
            .iter_mut()
            .enumerate()
            .filter(|(at, slot)| live & 1 << at == 0 && !slot.arrives);
        let gone = gone.filter_map(|(_, slot)| {
            let device = slot.device.take()?;
            slot.last = Arc::downgrade(&device);
            Some(device)
        });
        gone.collect()
    }

    /// Devices by slot.
    pub fn all(&self) -> Vec<Option<Arc<AtSlot>>> {
        let slots = self.slots.lock();
        slots.iter().map(|slot| slot.device.clone()).collect()
    }
}
