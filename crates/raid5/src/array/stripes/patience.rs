//! The time that members have for an I/O, and devices that aren't members any more. docs/decisions/0033-members-that-stall.md has the rules.

use super::Shared;
use super::devices::AtSlot;
use super::patient::Patient;
use crate::Superblock;
use crate::array::control::Parts;
use crate::array::returns::{Away, Gone};
use crate::core::TICKS;
use crate::head_pages::bits;
use parking_lot::Mutex;
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
    pub fn will_go(&self, devices: impl Iterator<Item = (usize, Superblock)>) {
        self.going.lock().extend(devices);
    }

    /// True if I/O of its membership is left at a device.
    pub fn is_left(&self, away: &Away) -> bool {
        let gone = self.gone.lock();
        let its = |patient: &&Arc<Patient>| {
            std::ptr::addr_eq(Arc::as_ptr(patient.device()), away.device.as_ptr())
        };
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
        let live = self.common.devices().1;
        let devices = self.devices.all();
        let patient = |slot: usize| devices.get(slot)?.as_ref()?.patient.as_ref();
        let members = self.common.slots_by_role();
        let is_member = |slot: usize| members.contains(&Some(slot));
        for slot in bits(live) {
            let Some(late) = patient(slot).filter(|p| !p.is_given_up()) else {
                continue;
            };
            let waited = late.waits();
            if waited <= TICKS {
                continue;
            }
            let others = || bits(live).filter(|other| *other != slot);
            let others = || others().filter_map(|other| Some((other, patient(other)?)));
            let is_missing =
                |(other, p): (usize, &Arc<Patient>)| is_member(other) && p.is_given_up();
            let degraded = self.common.missing().is_some() || others().any(is_missing);
            let others_wait = others().any(|(_, p)| !p.is_given_up() && p.waits() > 1);
            let device = || {
                devices[slot]
                    .as_ref()
                    .map_or("", |d| d.member.name.as_str())
            };
            if is_member(slot) && (degraded || others_wait) {
                if waited == TICKS + 1 {
                    tracing::warn!(
                        "raid5: {} does not answer in time, and is waited for: the array can't do without it now",
                        device()
                    );
                }
                continue;
            }
            tracing::warn!("raid5: {} does not answer in time", device());
            // Before its I/O ends: a read that fails is the device's end, too.
            self.common.note_failure(slot);
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
                slot,
                device: device.member.clone(),
                superblock,
                stalled,
            })
        });
        let gone: Vec<Gone> = gone.collect();
        let parts: &dyn Parts = self;
        parts.note_away(gone);
    }
}
