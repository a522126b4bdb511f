//! [`Shared`]: the parts of an array that its queues, its background work and its users share.

use super::WritePath;
use super::background::Chores;
use super::control::{Control, Snapshot, spares_now};
use super::devices::Devices;
use super::disk::{OnDisk, Written};
use super::lower::Mailbox;
use super::patience::Patience;
use super::sync::Syncs;
use crate::BitmapHeader;
use crate::core::{Common, Mail, State};
use crate::words::Owner;
use parking_lot::Mutex;
use pvblk_block::stacked::QueueTable;
use pvblk_block::{BlockDevice, Error};
use std::sync::Arc;
use std::time::Instant;

/// The array's own name in traces.
pub(super) const FLOOR: &str = "raid5";

pub(super) struct Shared {
    pub(super) control: Control,
    pub(super) common: Arc<Common>,
    /// Members have the slots of their places at the start, and a device that was being rebuilt then has its place's, or comes after them while it replaces a member.
    pub(super) devices: Devices,
    /// Queues by number; a queue's owner number is one more.
    pub(super) queues: QueueTable<Mailbox>,
    pub(super) chores: Chores,
    pub(super) patience: Patience,
    /// Locked while superblocks are written.
    pub(super) disk: Mutex<OnDisk>,
    pub(super) written: Mutex<Written>,
    pub(super) syncs: Mutex<Syncs>,
    /// Held while the number of stripes is set.
    pub(super) setting: Mutex<()>,
    /// From here its thread counts time.
    pub(super) begin: Instant,
}

/// The owner of a queue, by its number. `None`: there are no so many.
pub(super) fn owner(queue: usize) -> Option<Owner> {
    Owner::new(u16::try_from(queue + 1).ok()?)
}

/// The number of an owner's queue.
pub(super) fn number(owner: Owner) -> usize {
    usize::from(owner.number()) - 1
}

impl Shared {
    /// Posts mail, and empties the list. Mail to a queue that is closed is of no interest.
    pub(super) fn post(&self, mail: &mut Vec<(Owner, Mail)>) {
        if mail.is_empty() {
            return;
        }
        let mut to: Vec<usize> = mail.iter().map(|(to, _)| number(*to)).collect();
        self.queues.post(&mut to, |queue, _, entries| {
            let theirs = mail.extract_if(.., |(to, _)| number(*to) == queue);
            entries.extend(theirs.map(|(_, mail)| mail));
        });
        mail.clear();
    }
}

impl Shared {
    pub(super) fn snapshot(&self) -> Snapshot {
        // Before the members: a spare that becomes one in between is in both lists.
        let spares = spares_now(&self.control.spares.lock());
        let syncs = self.syncs.lock().clone();
        let written = self.written.lock();
        let recovered = syncs.recovered;
        // Before the devices: one arrives long before it is a member.
        let state = self.common.state();
        let devices = self.devices.all().into_iter();
        Snapshot {
            state: State {
                dirty: written.dirty,
                events: written.superblock.events,
                sync: syncs.now,
                syncs: syncs.begun,
                mismatch_sectors: syncs.mismatch_sectors,
                trouble: syncs.trouble,
                recovered,
                path: match self.common.has_stripe_queues() {
                    true => WritePath::StripeQueue,
                    false => WritePath::Direct,
                },
                ..state
            },
            superblock: written.superblock.clone(),
            names: devices
                .map(|device| Some(device?.member.name.clone()))
                .collect(),
            spares,
            lag: written.lag,
        }
    }

    /// The user's name of the member at each place; `None`: there is none, or it isn't recovered.
    pub(super) fn places(&self) -> Vec<Option<String>> {
        let devices = self.devices.all();
        let name = |slot: usize| Some(devices.get(slot)?.as_ref()?.member.name.clone());
        let slots = self.common.slots_by_role().into_iter();
        slots.map(|slot| slot.and_then(name)).collect()
    }

    /// The devices that it is made of now.
    pub(super) fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        let devices = self.devices.all().into_iter().flatten();
        devices.map(|d| Arc::clone(&d.member.device)).collect()
    }

    /// The device of the member at a place.
    pub(super) fn device_at(&self, place: usize) -> Option<Arc<dyn BlockDevice>> {
        let (device, _) = self.homes().into_iter().nth(place)??;
        Some(device)
    }

    /// The device of each place's data, and the sector where that begins; `None`: it is on no member that is whole.
    pub(super) fn homes(&self) -> Vec<Option<(Arc<dyn BlockDevice>, u64)>> {
        let devices = self.devices.all();
        let device = |slot: usize| Some(Arc::clone(&devices.get(slot)?.as_ref()?.member.device));
        let home = |(slot, sector): (usize, u64)| Some((device(slot)?, sector));
        let homes = self.common.homes().into_iter();
        homes.map(|at| at.and_then(home)).collect()
    }

    /// The header of the write-intent bitmap, or of the private map, if there is one.
    pub(super) fn bitmap_header(&self) -> Option<BitmapHeader> {
        self.written.lock().bitmap.clone()
    }

    /// The number of stripes is in its bounds.
    pub(super) fn set_stripes(&self, stripes: usize) -> Result<(), Error> {
        let _one = self.setting.lock();
        let mut mail = self.common.set_stripes(stripes)?;
        // Those that are too many and that no batch has go now.
        mail.extend(self.common.give_way().1);
        self.post(&mut mail);
        Ok(())
    }

    pub(super) fn set_write_path(&self, path: WritePath) {
        self.common
            .set_stripe_queues(path == WritePath::StripeQueue);
    }
}
