//! The time that members have for an I/O, and devices that aren't members any more. docs/decisions/0033-members-that-stall.md has the rules.

use super::devices::AtSlot;
use super::patient::Patient;
use super::shared::Shared;
use crate::Superblock;
use crate::array::returns::{Away, Gone};
use crate::core::TICKS;
use crate::head_pages::bits;
use parking_lot::Mutex;
use pvblk_block::BlockDevice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Patience {
    /// Time of the next tick.
    tick_at: Mutex<Duration>,
    /// Slots that were given up and that aren't kicked yet, as a mask.
    stalled: AtomicU64,
    /// Superblocks of devices, by slot, that others' superblocks leave out.
    going: Mutex<Vec<(usize, Superblock)>>,
    /// Devices that aren't members any more, as long as a queue has them open, or requests of ours are left there.
    gone: Mutex<Vec<Arc<Patient>>>,
}

impl Patience {
    /// Takes the slots that are to be kicked, since they didn't answer in time, as a mask.
    pub fn take_stalled(&self) -> u64 {
        self.stalled.swap(0, Ordering::Relaxed)
    }

    /// Slots couldn't be kicked now.
    pub fn put_off(&self, slots: u64) {
        self.stalled.fetch_or(slots, Ordering::Relaxed);
    }

    /// Superblocks on disk leave these devices out, which had these superblocks.
    pub fn will_go(&self, devices: Vec<(usize, Superblock)>) {
        self.going.lock().extend(devices);
    }

    /// True if I/O of its membership is left at a device.
    pub fn is_left(&self, away: &Away) -> bool {
        self.is_left_at(away.device.as_ptr())
    }

    /// The same, by the device's address.
    pub fn is_left_at(&self, device: *const dyn BlockDevice) -> bool {
        let gone = self.gone.lock();
        let its =
            |patient: &&Arc<Patient>| std::ptr::addr_eq(Arc::as_ptr(patient.device()), device);
        gone.iter().filter(its).any(|patient| patient.is_left())
    }
}

impl Shared {
    /// Gives members up that didn't answer in time, if a quarter of it has passed since the last call that did so.
    pub(super) fn tick(&self, now: Duration) {
        let (Some(ticks), Some(limit)) = (self.devices.ticks(), self.control.limit) else {
            return;
        };
        {
            let mut at = self.patience.tick_at.lock();
            if now < *at {
                return;
            }
            *at = now + limit / TICKS;
        }
        self.give_up_late();
        ticks.pass();
        // A queue that sleeps takes its completions, so that nothing counts as waiting that has ended; and it ends what was given up.
        self.queues.for_each(|_, queue| queue.wait().notify());
    }

    fn give_up_late(&self) {
        for gone in self.patience.gone.lock().iter() {
            // Reads need no word, so a kick doesn't wait for them.
            if gone.waits() >= TICKS {
                gone.give_up();
            }
        }
        let devices = self.devices.all();
        let patient = |slot: usize| devices.get(slot)?.as_ref()?.patient.as_ref();
        let members = self.common.slots_by_role();
        let members = members
            .iter()
            .flatten()
            .fold(0, |mask, slot| mask | 1 << slot);
        for (slot, device) in devices.iter().enumerate() {
            let Some(late) = patient(slot).filter(|p| !p.is_given_up()) else {
                continue;
            };
            let waited = late.waits();
            if waited < TICKS {
                continue;
            }
            let others = bits(members & !(1 << slot)).filter_map(patient);
            let others_wait = others.filter(|p| !p.is_given_up()).any(|p| p.waits() >= 1);
            let is_member = members & 1 << slot != 0;
            let name = device.as_ref().map_or("", |d| d.member.name.as_str());
            // Before its I/O ends: a read that fails is the device's end, too.
            let needs = is_member && (others_wait || self.common.missing().is_some());
            if needs
                || !self
                    .common
                    .note_late(slot, if is_member { members } else { 0 })
            {
                if waited == TICKS {
                    tracing::warn!(
                        "raid5: {name} does not answer in time, and is waited for: the array can't do without it now"
                    );
                }
                continue;
            }
            tracing::warn!("raid5: {name} does not answer in time");
            late.give_up();
            self.patience.put_off(1 << slot);
        }
    }

    /// Looks after requests that are left at devices; true if there are some.
    pub(super) fn poll_left(&self) -> bool {
        let devices = self.devices.all().into_iter().flatten();
        let patients = devices.filter_map(|device| device.patient.clone());
        patients.for_each(|patient| patient.poll_left());
        let mut gone = self.patience.gone.lock();
        gone.retain(|patient| {
            patient.poll_left();
            patient.is_open()
        });
        !gone.is_empty()
    }

    /// The device that arrived at a slot isn't to be a member: I/O may be left there.
    pub(super) fn note_left(&self, slot: usize) {
        let devices = self.devices.all();
        let at_slot = devices.get(slot).and_then(Option::as_ref);
        let patient = at_slot.and_then(|device| device.patient.clone());
        self.patience.gone.lock().extend(patient);
    }

    /// Notes the devices that have gone: those whose slots aren't among these (a mask).
    pub(super) fn note_gone(&self, live: u64) {
        let has_gone = |(slot, _): &mut (usize, Superblock)| live & 1 << *slot == 0;
        let gone: Vec<_> = {
            let mut going = self.patience.going.lock();
            going.extract_if(.., has_gone).collect()
        };
        if gone.is_empty() {
            return;
        }
        let devices = self.devices.all();
        let at_slot = |slot: usize| -> Option<Arc<AtSlot>> { devices.get(slot)?.clone() };
        let gone = gone.into_iter().filter_map(|(slot, superblock)| {
            let device = at_slot(slot)?;
            let patient = device.patient.clone();
            let stalled = patient.as_ref().is_some_and(|p| p.is_given_up());
            self.patience.gone.lock().extend(patient);
            Some(Gone {
                device: device.member.clone(),
                superblock,
                stalled,
            })
        });
        let gone: Vec<Gone> = gone.collect();
        self.note_away(gone);
    }
}
