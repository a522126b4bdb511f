//! Members: the device of each role, and how far one is that becomes a member.
//!
//! A role is a member's place in the array, a slot is a device. A role has one slot; none if its member failed. One role may have another
//! slot, the incoming device, while that is recovered or replaces a working member. Everything that asks who holds a block of a stripe asks
//! here; only kicks, rebuilds and superblocks change it.

use crate::STRIPE_SECTORS;

/// A device that becomes a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Incoming {
    pub slot: usize,
    pub role: usize,
    /// Stripes before this are there, and its superblock on disk says so.
    pub committed: u64,
    /// Stripes before this are there.
    pub done: u64,
    /// Stripes before this are there, or their batches make sure of it before anything else.
    pub begun: u64,
    /// It was the member, and holds all but what the bitmap marks.
    pub by_bitmap: bool,
}

impl Incoming {
    /// One that holds all stripes before `stripes`.
    pub fn new(slot: usize, role: usize, stripes: u64, by_bitmap: bool) -> Incoming {
        Incoming {
            slot,
            role,
            committed: stripes,
            done: stripes,
            begun: stripes,
            by_bitmap,
        }
    }

    /// True if it has all sectors of a role's data before `end_sector`.
    pub fn holds(&self, role: usize, end_sector: u64) -> bool {
        self.role == role && end_sector <= self.done * STRIPE_SECTORS
    }
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Members {
    slots: Vec<Option<usize>>,
    incoming: Option<Incoming>,
}

impl Members {
    /// `slots`: by role.
    pub fn new(slots: Vec<Option<usize>>, incoming: Option<Incoming>) -> Members {
        Members { slots, incoming }
    }

    /// Devices by role.
    pub fn slots(&self) -> &[Option<usize>] {
        &self.slots
    }

    /// The member of a role.
    pub fn slot(&self, role: usize) -> Option<usize> {
        self.slots.get(role).copied().flatten()
    }

    /// The role of a member.
    pub fn role(&self, slot: usize) -> Option<usize> {
        self.slots.iter().position(|s| *s == Some(slot))
    }

    /// A copy of the incoming device's state.
    pub fn incoming(&self) -> Option<Incoming> {
        self.incoming
    }

    /// The same members at other positions of the incoming device.
    pub fn with(&self, incoming: Incoming) -> Members {
        Members {
            slots: self.slots.clone(),
            incoming: Some(incoming),
        }
    }

    /// The incoming device, if it becomes the member of this role.
    pub fn incoming_of(&self, role: usize) -> Option<Incoming> {
        self.incoming.filter(|i| i.role == role)
    }

    /// True if this is the incoming device's slot.
    pub fn is_incoming(&self, slot: usize) -> bool {
        self.incoming.is_some_and(|i| i.slot == slot)
    }

    /// The role without a member.
    pub fn failed(&self) -> Option<usize> {
        self.slots.iter().position(Option::is_none)
    }

    /// The role without a member, unless the incoming device has its blocks of the stripes before one.
    fn failed_but(&self, there: impl Fn(&Incoming) -> bool) -> Option<usize> {
        let failed = self.failed()?;
        (!self.incoming_of(failed).as_ref().is_some_and(there)).then_some(failed)
    }

    /// The role whose block of a stripe can't be read anywhere, as its batch sees it.
    pub fn missing(&self, stripe: u64) -> Option<usize> {
        self.failed_but(|i| stripe < i.begun)
    }

    /// The role whose block would be missing after a power cut.
    pub fn uncommitted(&self, stripe: u64) -> Option<usize> {
        self.failed_but(|i| stripe < i.committed)
    }

    /// Where a role's block of a stripe is read, and where its log is. It isn't missing.
    pub fn reads(&self, role: usize) -> Option<usize> {
        let incoming = || Some(self.incoming_of(role)?.slot);
        self.slot(role).or_else(incoming)
    }

    /// Where a role's block of a stripe is written: one slot, or two, or none.
    pub fn writes(&self, role: usize, stripe: u64) -> impl Iterator<Item = usize> + use<> {
        let incoming = self.incoming_of(role).filter(|i| stripe < i.begun);
        self.slot(role).into_iter().chain(incoming.map(|i| i.slot))
    }

    /// A role has no member any more; returns the slot that it had.
    pub fn lose(&mut self, role: usize) -> Option<usize> {
        self.slots[role].take()
    }

    /// A device begins to become a member.
    pub fn take_in(&mut self, incoming: Incoming) {
        debug_assert!(self.incoming.is_none(), "one at a time");
        self.incoming = Some(incoming);
    }

    /// There is no incoming device any more.
    pub fn lose_incoming(&mut self) -> Option<Incoming> {
        self.incoming.take()
    }

    /// The incoming device becomes the member; returns it, and the slot of the member before.
    pub fn take_over(&mut self) -> Option<(Incoming, Option<usize>)> {
        let incoming = self.incoming.take()?;
        let old = self.slots[incoming.role].replace(incoming.slot);
        Some((incoming, old))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four members, without one, and with a device for a role.
    fn members(absent: Option<usize>, incoming: Option<usize>) -> Members {
        let mut members = Members::new((0..4).map(Some).collect(), None);
        if let Some(role) = absent {
            members.lose(role);
        }
        if let Some(role) = incoming {
            members.take_in(Incoming::new(9, role, 0, false));
        }
        members
    }

    /// Its incoming device has begun, done and committed all stripes before these.
    fn at(members: &Members, begun: u64, done: u64, committed: u64) -> Members {
        let incoming = members.incoming().expect("one");
        members.with(Incoming {
            begun,
            done,
            committed,
            ..incoming
        })
    }

    fn writes(members: &Members, role: usize, stripe: u64) -> Vec<usize> {
        members.writes(role, stripe).collect()
    }

    #[test]
    fn each_role_has_its_slot() {
        let members = members(Some(2), None);
        assert_eq!(members.slots(), [Some(0), Some(1), None, Some(3)]);
        assert_eq!((members.slot(3), members.role(3)), (Some(3), Some(3)));
        assert_eq!((members.slot(2), members.role(2)), (None, None));
        assert_eq!(members.slot(7), None);
        assert_eq!(members.failed(), Some(2));
        assert_eq!(members.reads(2), None);
        assert_eq!(
            (members.reads(1), writes(&members, 1, 0)),
            (Some(1), vec![1])
        );
    }

    #[test]
    fn a_block_is_missing_until_the_rebuild_has_come_by() {
        let members = members(Some(2), Some(2));
        assert_eq!(
            (members.missing(0), members.uncommitted(0)),
            (Some(2), Some(2))
        );
        let members = at(&members, 5, 0, 0);
        assert_eq!((members.missing(4), members.missing(5)), (None, Some(2)));
        assert_eq!(members.uncommitted(4), Some(2));
        let members = at(&members, 5, 3, 3);
        assert_eq!(
            (members.uncommitted(2), members.uncommitted(3)),
            (None, Some(2))
        );
        // Writes go there as soon as its block isn't missing.
        assert_eq!(
            (writes(&members, 2, 4), writes(&members, 2, 5)),
            (vec![9], vec![])
        );
        assert_eq!(members.reads(2), Some(9));
    }

    #[test]
    fn a_member_that_is_replaced_is_read_and_both_are_written() {
        let members = at(&members(None, Some(1)), 5, 5, 0);
        assert_eq!((members.missing(7), members.uncommitted(7)), (None, None));
        assert_eq!(
            (writes(&members, 1, 4), writes(&members, 1, 5)),
            (vec![1, 9], vec![1])
        );
        assert_eq!(members.reads(1), Some(1));
        assert_eq!(writes(&members, 0, 4), [0]);
        assert!(members.is_incoming(9) && !members.is_incoming(1));
    }

    #[test]
    fn the_incoming_device_takes_over() {
        let mut members = members(None, Some(1));
        let (incoming, old) = members.take_over().expect("one");
        assert_eq!((incoming.slot, incoming.role, old), (9, 1, Some(1)));
        assert_eq!((members.slot(1), members.incoming()), (Some(9), None));
        assert!(members.take_over().is_none() && members.lose_incoming().is_none());
        members.lose(1);
        members.take_in(Incoming::new(7, 1, 0, false));
        assert_eq!(members.take_over().expect("one").1, None);
        assert_eq!((members.failed(), members.slot(1)), (None, Some(7)));
    }
}
