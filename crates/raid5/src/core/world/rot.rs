//! Sums of blocks in a run, and a device whose blocks become others by themselves.

use super::device::SECTOR;
use super::{DATA_SECTORS, World};
use crate::head_pages::Block;
use crate::sums::{SUM_BYTES, SUMS_PAGE_BYTES, sum_of};
use crate::{Geometry, STRIPE_BYTES, STRIPE_SECTORS};
use std::collections::BTreeMap;
use std::ops::Range;

/// The sums of all stripes of these members' contents, as a page for each role.
pub fn sums_of(geometry: &Geometry, contents: &[Vec<u8>]) -> Vec<[u8; SUMS_PAGE_BYTES]> {
    let page = |role: usize| {
        let mut page = [0; SUMS_PAGE_BYTES];
        for stripe in 0..geometry.stripes() {
            let at = (DATA_SECTORS + stripe * STRIPE_SECTORS) as usize * SECTOR;
            let block: &Block = contents[role][at..][..STRIPE_BYTES]
                .try_into()
                .expect("4 KiB");
            let sum = sum_of(block, role, stripe).to_le_bytes();
            page[stripe as usize * SUM_BYTES..][..SUM_BYTES].copy_from_slice(&sum);
        }
        page
    };
    (0..geometry.members()).map(page).collect()
}

/// The device that rots.
pub struct Rot {
    slot: usize,
    /// By stripe, blocks as they were before they became others. None: the array has written over it since.
    rotten: BTreeMap<u64, Option<Vec<u8>>>,
}

impl Rot {
    pub fn of(slot: usize) -> Rot {
        Rot {
            slot,
            rotten: BTreeMap::new(),
        }
    }

    /// The array has written these sectors of a device.
    pub fn written(&mut self, slot: usize, sectors: Range<u64>) {
        if slot != self.slot {
            return;
        }
        for (stripe, before) in &mut self.rotten {
            let first = DATA_SECTORS + stripe * STRIPE_SECTORS;
            if sectors.start < first + STRIPE_SECTORS && first < sectors.end {
                *before = None;
            }
        }
    }
}

impl World {
    /// Sums come into memory, if they aren't there.
    pub(super) fn load_sums(&mut self) {
        if let Some(sums) = self.common.sums().filter(|sums| !sums.has(0)) {
            sums.load(0, self.sums.iter().map(|page| page.as_slice()));
        }
    }

    /// Sums are written for which a queue's sweep waits.
    pub(super) fn write_sums(&mut self, queue: usize) {
        let Some(groups) = self.queue(queue).swept_sums() else {
            return;
        };
        let sums = self.common.sums().expect("sums that are swept");
        for group in groups {
            assert_eq!(group, 0);
            assert!(sums.begin_writing(group), "a clean group is swept");
            for (role, page) in self.sums.iter_mut().enumerate() {
                *page = sums.copy(role, group);
            }
        }
        self.queue(queue).sums_written(0);
        let sums = self.common.sums().expect("sums that are swept");
        self.ways.sums_dropped += usize::from(!sums.has(0));
    }

    /// A block becomes another one, unless it is being written or has rotten before.
    pub(super) fn rot(&mut self) {
        let Some(slot) = self.rot.as_ref().map(|rot| rot.slot) else {
            return;
        };
        let stripe = self.rng.u64(..self.geometry.stripes());
        let sector = DATA_SECTORS + stripe * STRIPE_SECTORS;
        let is_written =
            |io: &super::Io| io.io.slot == slot && io.io.op.is_write() && io.io.sector == sector;
        if self.ios.iter().any(is_written) {
            return;
        }
        let device = &mut self.devices[slot];
        let before = device.read(sector, STRIPE_BYTES).to_vec();
        let mut after = before.clone();
        // A lost write, a block of another place, or a bit.
        match self.rng.u32(..3) {
            0 => after.fill(0x11),
            1 => {
                let other = DATA_SECTORS + self.rng.u64(..self.geometry.stripes()) * STRIPE_SECTORS;
                after.copy_from_slice(device.read(other, STRIPE_BYTES));
            }
            _ => after[self.rng.usize(..STRIPE_BYTES)] ^= 1 << self.rng.u32(..8),
        }
        let Some(rot) = &mut self.rot else { return };
        if before == after || rot.rotten.contains_key(&stripe) {
            return;
        }
        device.write(sector, &after, true);
        rot.rotten.insert(stripe, Some(before));
        self.ways.rotten += 1;
    }

    /// Blocks that nobody has read are made right. No block of any other device was found wrong.
    pub(super) fn end_rot(&mut self) {
        let membership = self.common.membership();
        let misfits = |slot: usize| membership.device(slot).misfits() as usize;
        let slot = self.rot.as_ref().map(|rot| rot.slot);
        for other in (0..self.devices.len()).filter(|other| Some(*other) != slot) {
            assert_eq!(misfits(other), 0, "device {other} was well");
        }
        let Some(rot) = self.rot.take() else { return };
        self.ways.rot_found += misfits(rot.slot);
        for (stripe, before) in rot.rotten {
            if let Some(before) = before {
                let sector = DATA_SECTORS + stripe * STRIPE_SECTORS;
                self.devices[rot.slot].write(sector, &before, true);
            }
        }
    }
}
