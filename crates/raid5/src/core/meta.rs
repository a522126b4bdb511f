//! The superblocks while the array serves: they say dirty before the first write, name a failed member before
//! any request completes without it, and hold the progress of a recovery.

use super::kick::Kick;
use super::{Ability, Core, Data, Incoming, Purpose, Slot};
use crate::identity::now_secs;
use crate::superblock::NO_OFFSET;
use crate::{Feature, Policy, Role, STRIPE_SECTORS, SUPER_BYTES, SUPER_SECTOR, Superblock};
use pvblk_block::{Buffer, Error, Op, Region};
use std::sync::Arc;

/// Changes for the superblocks, and the state that holds once they are on disk.
#[derive(Clone, Copy, Default)]
struct SuperblockChanges {
    /// The incoming device holds all stripes before this.
    committed: Option<u64>,
    /// It is a member now, and the one before it isn't.
    takes_over: bool,
}

pub(super) struct Meta {
    /// Superblocks by slot.
    superblocks: Vec<Option<Superblock>>,
    region: Arc<Region>,
    /// Members' logical sector.
    unit_bytes: usize,
    /// They said dirty on disk at the start.
    was_dirty: bool,
    /// They say dirty on disk, and all else that they must before something is written.
    dirty: bool,
    /// They are to say dirty.
    dirtying: bool,
    /// A member was kicked, and they don't say so on disk.
    pub kick: Kick,
    /// Writes that haven't ended.
    left: usize,
    /// The bitmap is written with the next event number first.
    announcing: bool,
    /// The queue that writes the superblocks: one whose requests wait for it, since a queue without requests
    /// isn't stepped. And the queue that is next.
    runner: usize,
    next_runner: usize,
    /// They changed while they were being written.
    again: bool,
    /// The next superblocks leave out a member that the last ones had.
    leaves_out: bool,
    /// For the next write, and of the one under way.
    next: SuperblockChanges,
    flying: SuperblockChanges,
}

impl Meta {
    pub fn new(
        mut superblocks: Vec<Option<Superblock>>,
        missing: Option<usize>,
        dirty: bool,
        unit_bytes: usize,
    ) -> Result<Meta, Error> {
        // A member that is missing must not come back as if it were fresh: the others say so before anything changes.
        let mut changed = false;
        let live: Vec<usize> = superblocks
            .iter()
            .flatten()
            .map(|s| s.dev_number as usize)
            .collect();
        for superblock in superblocks.iter_mut().flatten() {
            for (number, role) in superblock.roles.iter_mut().enumerate() {
                let lost = matches!(*role, Role::Active(r) if Some(usize::from(r)) == missing);
                if lost && !live.contains(&number) {
                    *role = Role::Faulty;
                    changed = true;
                }
            }
        }
        let was_dirty = dirty;
        let dirty = dirty && !changed;
        Ok(Meta {
            region: Meta::memory(superblocks.len())?,
            superblocks,
            unit_bytes,
            was_dirty,
            dirty,
            dirtying: false,
            kick: Kick::None,
            left: 0,
            announcing: false,
            runner: 0,
            next_runner: 0,
            again: false,
            leaves_out: changed,
            next: SuperblockChanges::default(),
            flying: SuperblockChanges::default(),
        })
    }

    fn memory(slots: usize) -> Result<Arc<Region>, Error> {
        let region = Region::anonymous(slots * SUPER_BYTES)
            .map_err(|e| Error::os("memory for superblocks", e))?;
        Ok(Arc::new(region))
    }

    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    pub fn is_kicking(&self) -> bool {
        self.kick != Kick::None
    }

    /// This queue is to write superblocks that name a device, perhaps when others are written.
    pub fn kick_waits_for(&self, owner: usize) -> bool {
        self.kick == Kick::Naming && self.next_runner == owner
    }

    /// By slot, and whether they say dirty on disk, or may.
    pub fn superblocks(&self) -> (&[Option<Superblock>], bool) {
        let dirty = self.was_dirty || self.dirty || self.dirtying;
        (&self.superblocks, dirty)
    }

    /// Those on disk may still call a device a member that isn't one any more.
    pub fn lag(&self) -> bool {
        self.leaves_out || self.is_kicking() || self.again || self.is_busy()
    }

    /// The event counter.
    pub fn events(&self) -> u64 {
        let all = self.superblocks.iter().flatten();
        all.map(|s| s.events).max().unwrap_or(0)
    }

    /// Drops changes for the incoming device.
    pub fn forget_incoming(&mut self) {
        self.next = SuperblockChanges::default();
        self.flying = SuperblockChanges::default();
    }

    fn is_busy(&self) -> bool {
        self.left > 0 || self.announcing
    }

    /// They leave out a device, whose own is returned.
    pub fn leave_out(&mut self, slot: usize) -> Option<Superblock> {
        let kicked = self.superblocks[slot].take();
        if let Some(kicked) = &kicked {
            self.set_role(kicked.dev_number as usize, Role::Faulty);
        }
        (self.leaves_out, self.again) = (true, true);
        kicked
    }

    fn set_role(&mut self, number: usize, role: Role) {
        for superblock in self.superblocks.iter_mut().flatten() {
            if superblock.roles.len() <= number {
                superblock.roles.resize(number + 1, Role::Spare);
                let used = superblock.roles.len() * 2;
                let room = SUPER_BYTES - 256 - used;
                superblock.rest.resize(room, 0);
            }
            superblock.roles[number] = role;
        }
    }
}

impl Core {
    /// By slot, and whether they say dirty on disk, or may.
    pub fn superblocks(&self) -> (&[Option<Superblock>], bool) {
        self.meta.superblocks()
    }

    /// True if a device was kicked, and they don't say so.
    pub fn is_kicking(&self) -> bool {
        self.meta.is_kicking()
    }

    /// True while superblocks on disk may still call a device a member that isn't one any more.
    pub fn superblocks_lag(&self) -> bool {
        self.meta.lag()
    }

    /// Before the first write.
    pub(super) fn mark_dirty(&mut self, runner: usize) {
        if self.meta.dirtying || self.meta.dirty {
            return;
        }
        self.meta.dirtying = true;
        self.write_meta(runner);
    }

    /// A device begins to become the member of a role: stripes from the first on go there, or those that the bitmap marks. Errors if there is
    /// no memory.
    pub fn take_in(
        &mut self,
        role: usize,
        mut superblock: Superblock,
        by_bitmap: bool,
        ability: Ability,
        runner: usize,
    ) -> Result<usize, Error> {
        if self.members.incoming().is_some() || self.broken {
            return Err(Error::config("a member is being rebuilt already"));
        }
        if self.meta.is_busy() || self.meta.is_kicking() {
            return Err(Error::config("superblocks are being written; try again"));
        }
        let room = Meta::memory(self.slots.all.len() + 1)?;
        let replaces = self.members.slot(role).is_some();
        superblock.feature_map |= Feature::RECOVERY_OFFSET.0;
        superblock.feature_map &= !Feature::RECOVERY_BITMAP.0;
        if by_bitmap {
            superblock.feature_map |= Feature::RECOVERY_BITMAP.0;
        }
        if replaces {
            superblock.feature_map |= Feature::REPLACEMENT.0;
        }
        superblock.recovery_offset_sectors = 0;
        superblock.events = self.meta.events();
        if let Some(like) = self.meta.superblocks.iter().flatten().next() {
            superblock.roles.clone_from(&like.roles);
            superblock.rest.clone_from(&like.rest);
        }
        let number = superblock.dev_number as usize;
        let (places, purposes, meta) = (&self.places, &self.purposes, &mut self.meta);
        let is_quiet = |slot: usize| {
            let of_it =
                |(place, purpose): (&usize, &Option<Purpose>)| *place == slot && purpose.is_some();
            meta.superblocks[slot].is_none() && !places.iter().zip(purposes).any(of_it)
        };
        let slot = self.slots.take(Slot::new(&superblock, ability), is_quiet);
        match meta.superblocks.get_mut(slot) {
            Some(place) => *place = Some(superblock),
            None => {
                meta.region = room;
                meta.superblocks.push(Some(superblock));
            }
        }
        self.meta.set_role(number, Role::Active(role as u16));
        let incoming = Incoming::new(slot, role, 0, by_bitmap);
        self.members.take_in(incoming);
        self.intents.new_member(runner);
        self.write_meta(runner);
        Ok(slot)
    }

    /// Requests superblocks that say that the incoming device holds all stripes before `stripes`, or that it
    /// is a member now. Its data was flushed before.
    pub(super) fn commit(&mut self, stripes: u64, takes_over: bool, runner: usize) {
        self.meta.next.committed = Some(stripes);
        if takes_over {
            self.meta.next.takes_over = true;
            self.hand_over_roles();
        }
        self.write_meta(runner);
    }

    /// In the superblocks, the incoming device is the member.
    fn hand_over_roles(&mut self) {
        let Some(incoming) = self.members.incoming() else {
            return;
        };
        if let Some(superblock) = &mut self.meta.superblocks[incoming.slot] {
            let passing = [
                Feature::RECOVERY_OFFSET,
                Feature::RECOVERY_BITMAP,
                Feature::REPLACEMENT,
            ];
            for feature in passing {
                superblock.feature_map &= !feature.0;
            }
            superblock.recovery_offset_sectors = 0;
        }
        let old = self.members.slot(incoming.role);
        if let Some(old) = old
            && let Some(replaced) = self.meta.superblocks[old].take()
        {
            self.meta
                .set_role(replaced.dev_number as usize, Role::Faulty);
            self.meta.leaves_out = true;
        }
    }

    /// Requests superblocks with the changes. The runner waits for them.
    pub(super) fn write_meta(&mut self, runner: usize) {
        self.meta.next_runner = runner;
        if self.meta.is_busy() || self.meta.kick.goes_first() {
            self.meta.again = true;
            return;
        }
        // The superblocks are written twice. A member that is left out may have got the last change although
        // it returned an error, and a device that is one event behind counts as up to date. The events are
        // two separate ones, because otherwise the devices that a power cut keeps from them would look stale.
        self.meta.again = std::mem::take(&mut self.meta.leaves_out);
        self.meta.runner = runner;
        if self.intents.announce(self.meta.events() + 1) {
            self.meta.announcing = true;
            self.intents.want(0, runner);
            return;
        }
        self.write_superblocks();
    }

    /// The bitmap has the next events.
    pub(super) fn announced(&mut self) {
        if !std::mem::take(&mut self.meta.announcing) || self.broken {
            return;
        }
        match self.meta.kick.goes_first() {
            true => self.meta.again = true,
            false => self.write_superblocks(),
        }
    }

    fn write_superblocks(&mut self) {
        let runner = self.meta.runner;
        let now = now_secs();
        let unit = self.meta.unit_bytes;
        let mut writes = Vec::new();
        self.meta.flying = std::mem::take(&mut self.meta.next);
        let resync_offset = self.resync_offset();
        for (slot, superblock) in self.meta.superblocks.iter_mut().enumerate() {
            let Some(superblock) = superblock else {
                continue;
            };
            superblock.events += 1;
            superblock.utime = now;
            superblock.resync_offset_sectors = resync_offset;
            if let Some(info) = &self.slots.all[slot] {
                superblock.corrected_reads = info.corrected;
            }
            if let Some(stripes) = self.meta.flying.committed
                && superblock.has(Feature::RECOVERY_OFFSET)
            {
                superblock.recovery_offset_sectors = stripes * STRIPE_SECTORS;
            }
            let at = slot * SUPER_BYTES;
            // No more than it takes, as md: an old bitmap may begin in the same 4 KiB.
            let bytes = superblock.written_bytes().next_multiple_of(unit);
            self.meta.region.write(at, &superblock.encode());
            let page = Buffer::new(&self.meta.region, at, bytes);
            writes.push((slot, Data::of(page)));
        }
        self.meta.left = writes.len();
        for (slot, page) in writes {
            let io = (slot, Op::Write, true);
            self.start(runner, Purpose::Meta, io, SUPER_SECTOR, page);
        }
    }

    /// The resync offset for the superblocks. While the array is dirty they hold none, except for an array
    /// with a log: its logs don't list all stripes then, because an offset above zero says that parity behind
    /// it was never made right.
    fn resync_offset(&self) -> u64 {
        let first = self.unsynced.first();
        let offset = first.map(|stripe| stripe * STRIPE_SECTORS);
        let dirty = self.meta.superblocks().1;
        match (dirty, self.policy) {
            (false, _) => offset.unwrap_or(NO_OFFSET),
            (true, Policy::Ppl(_)) => offset.unwrap_or(0),
            (true, _) => 0,
        }
    }

    /// One of the superblocks is written, or its member is kicked.
    pub(super) fn meta_written(&mut self) {
        self.meta.left -= 1;
        if self.meta.left > 0 {
            return;
        }
        let changes = std::mem::take(&mut self.meta.flying);
        if let Some(stripe) = changes.committed {
            self.members.committed_before(stripe);
        }
        // The incoming device takes over when no change is left to be written.
        self.meta.next.takes_over |= changes.takes_over;
        if self.meta.again && !self.broken {
            self.write_meta(self.meta.next_runner);
            return;
        }
        if std::mem::take(&mut self.meta.next.takes_over) && !self.broken {
            self.take_over();
        }
        self.kick_ended();
        for head in std::mem::take(&mut self.unnamed) {
            self.write_pages(head);
        }
        if std::mem::take(&mut self.meta.dirtying) {
            self.meta.dirty = true;
        }
        for id in std::mem::take(&mut self.undirtied) {
            if self.broken {
                self.fail_piece(id);
                continue;
            }
            self.write(id);
            self.piece_done(id);
        }
        self.sync_told();
    }
}
