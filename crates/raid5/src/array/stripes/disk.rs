//! [`OnDisk`]: members and their superblocks, as on disk.

use crate::core::stripes::Errand;
use crate::{Assembly, STRIPE_SECTORS};
use std::ops::Range;

/// See the module's documentation.
pub(super) struct OnDisk {
    pub assembly: Assembly,
    /// Slots of the members, by place.
    slots: Vec<usize>,
    /// Slot of the device that is being rebuilt.
    incoming: usize,
}

impl OnDisk {
    /// As the array is at its start: a member's slot is its place, and the incoming device comes after them.
    pub fn new(assembly: Assembly) -> OnDisk {
        let places = assembly.members.len();
        OnDisk {
            slots: (0..places).collect(),
            incoming: places,
            assembly,
        }
    }

    /// Slots of devices that have superblocks, as a mask.
    pub fn live(&self) -> u64 {
        let members = self.assembly.members.iter().zip(&self.slots);
        let members = members.filter_map(|(member, slot)| member.as_ref().map(|_| *slot));
        let incoming = self.assembly.incoming.as_ref().map(|_| self.incoming);
        members
            .chain(incoming)
            .fold(0, |mask, slot| mask | 1 << slot)
    }

    /// The next superblocks say this.
    pub fn apply(&mut self, errand: Errand) {
        let assembly = &mut self.assembly;
        match errand {
            Errand::Name { failed, takes_over } => {
                let has_failed = |slot: usize| failed & 1 << slot != 0;
                for (member, slot) in assembly.members.iter_mut().zip(&self.slots) {
                    member.take_if(|_| has_failed(*slot));
                }
                assembly.incoming.take_if(|_| has_failed(self.incoming));
                if let Some(incoming) = assembly.incoming.take_if(|_| takes_over) {
                    self.slots[incoming.place] = self.incoming;
                    let mut member = incoming.member;
                    member.superblock.recovery_offset_sectors = 0;
                    assembly.members[incoming.place] = Some(member);
                }
            }
            Errand::Recovered(stripes) => {
                if let Some(incoming) = &mut assembly.incoming {
                    incoming.recovered_sectors = stripes * STRIPE_SECTORS;
                }
            }
            Errand::Resynced(stripes) => {
                let first = stripes * STRIPE_SECTORS;
                let left = assembly.unsynced.iter();
                let left = left.map(|range| range.start.max(first)..range.end);
                assembly.unsynced = left
                    .filter(|range: &Range<u64>| !range.is_empty())
                    .collect();
            }
        }
    }
}
