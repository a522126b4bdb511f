//! The superblocks while the array serves: dirty before the first write, a kicked member named before anybody is answered.

use super::super::planted::{Raid5Bug, has};
use super::{Core, Data, Purpose};
use crate::raid5::{Role, SUPER_BYTES, SUPER_SECTOR, Superblock};
use pvblk_block::{Buffer, Error, Op, Region};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) struct Meta {
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
    kicking: bool,
    /// Writes that haven't ended.
    left: usize,
    /// They changed while they were being written.
    again: bool,
    /// What is written next leaves a member out that the last ones had.
    leaves_out: bool,
}

impl Meta {
    pub fn new(
        mut superblocks: Vec<Option<Superblock>>,
        dirty: bool,
        unit_bytes: usize,
    ) -> Result<Meta, Error> {
        // A member that is missing must not come back as if it were fresh: the others say so before anything changes.
        let missing = superblocks.iter().position(Option::is_none);
        let mut changed = false;
        for role in superblocks.iter_mut().flatten().flat_map(|s| &mut s.roles) {
            if matches!(*role, Role::Active(r) if Some(usize::from(r)) == missing) {
                *role = Role::Faulty;
                changed = true;
            }
        }
        let was_dirty = dirty;
        let dirty = dirty && !changed;
        let region = Region::anonymous(superblocks.len() * SUPER_BYTES)
            .map_err(|e| Error::os("memory for superblocks", e))?;
        Ok(Meta {
            superblocks,
            region: Arc::new(region),
            unit_bytes,
            was_dirty,
            dirty,
            dirtying: false,
            kicking: false,
            left: 0,
            again: false,
            leaves_out: changed,
        })
    }

    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    pub fn is_kicking(&self) -> bool {
        self.kicking
    }

    pub fn superblocks(&self) -> (&[Option<Superblock>], bool) {
        let dirty = self.was_dirty || self.dirty || self.dirtying;
        (&self.superblocks, dirty)
    }
}

impl Core {
    /// Before the first write.
    pub(super) fn mark_dirty(&mut self, runner: usize) {
        if self.meta.dirtying || self.meta.dirty {
            return;
        }
        self.meta.dirtying = true;
        for superblock in self.meta.superblocks.iter_mut().flatten() {
            superblock.resync_offset_sectors = 0;
        }
        self.write_meta(runner);
    }

    /// After a member failed.
    pub(super) fn mark_kicked(&mut self, member: usize, runner: usize) {
        if let Some(kicked) = self.meta.superblocks[member].take() {
            let number = kicked.dev_number as usize;
            for superblock in self.meta.superblocks.iter_mut().flatten() {
                if let Some(role) = superblock.roles.get_mut(number) {
                    *role = Role::Faulty;
                }
            }
        }
        self.meta.kicking = true;
        self.meta.leaves_out = true;
        self.write_meta(runner);
    }

    fn write_meta(&mut self, runner: usize) {
        if self.meta.left > 0 {
            self.meta.again = true;
            return;
        }
        // Twice: a member that is left out may have got the last change although it told an error, and who is one event
        // behind counts as fresh. Not two events at once, or those that a power cut keeps from it would look stale.
        self.meta.again = std::mem::take(&mut self.meta.leaves_out);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |d| d.as_secs());
        let unit = self.meta.unit_bytes;
        let mut writes = Vec::new();
        for (member, superblock) in self.meta.superblocks.iter_mut().enumerate() {
            let Some(superblock) = superblock else {
                continue;
            };
            if !has(Raid5Bug::EventsNotRaised) {
                superblock.events += 1;
            }
            superblock.utime = now;
            let at = member * SUPER_BYTES;
            // No more than it takes, as md: an old bitmap may begin in the same 4 KiB.
            let bytes = superblock.written_bytes().next_multiple_of(unit);
            self.meta.region.write(at, &superblock.encode());
            let page = Buffer::new(&self.meta.region, at, bytes);
            writes.push((member, Data::of(page)));
        }
        self.meta.left = writes.len();
        for (member, page) in writes {
            let io = (member, Op::Write, true);
            self.start(runner, Purpose::Meta, io, SUPER_SECTOR, page);
        }
    }

    /// One of the superblocks is written, or its member is kicked.
    pub(super) fn meta_written(&mut self, runner: usize) {
        self.meta.left -= 1;
        if self.meta.left > 0 {
            return;
        }
        if self.meta.again && !self.broken {
            self.write_meta(runner);
            return;
        }
        self.meta.kicking = false;
        self.done.append(&mut self.held);
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
    }
}
