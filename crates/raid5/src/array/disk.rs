//! [`OnDisk`]: members and their superblocks, as on disk.

use crate::blocking::Idle;
use crate::core::{Change, Errand, Sums};
use crate::identity::now_secs;
use crate::repair::{
    At, Disk, Disks, Page, Says, empty_log, erase_map, names_missing, read_group, write_group,
    write_pages, write_progress, write_superblocks_on,
};
use crate::sums::SUMS_PAGE_BYTES;
use crate::words::Chunks;
use crate::{Assembly, BitmapHeader, Feature, Incoming, Member, STRIPE_SECTORS, Superblock};
use pvblk_block::Error;
use std::collections::HashSet;
use std::ops::Range;

/// Superblocks as they were last written, for users, who don't wait for those that are being written.
pub(super) struct Written {
    pub superblock: Superblock,
    /// They don't say clean.
    pub dirty: bool,
    /// They may call a device a member that isn't one any more.
    pub lag: bool,
    /// The header of the write-intent bitmap, or of the private map, if there is one.
    pub bitmap: Option<BitmapHeader>,
}

/// See the module's documentation.
pub(super) struct OnDisk {
    pub assembly: Assembly,
    /// Queues of its devices, which stay open: to open one may take long, and needs descriptors.
    disks: Disks,
    /// Slots of the members, by place.
    slots: Vec<usize>,
    /// Slot of the device that is being rebuilt.
    incoming: usize,
    /// A device that is to be rebuilt, with its slot.
    arriving: Option<(usize, Member, Disk)>,
    /// Groups of sums that the incoming device was given since it came.
    given: HashSet<usize>,
    /// Devices that superblocks leave out, with their slots, and superblocks as they were, or were about to be.
    gone: Vec<(usize, Superblock)>,
}

impl OnDisk {
    /// As the array is at its start: a member's slot is its place.
    pub fn new(assembly: Assembly) -> Result<OnDisk, Error> {
        let places = assembly.members.len();
        Ok(OnDisk {
            disks: Disks::open(&assembly)?,
            gone: Vec::new(),
            given: HashSet::new(),
            slots: (0..places).collect(),
            incoming: assembly.incoming_slot().unwrap_or(places),
            arriving: None,
            assembly,
        })
    }

    /// A device arrives at a slot: an errand will say so. `by_bitmap`: it was the member, and holds all but what the bitmap, or its like,
    /// marks. An error gives the device back: it can't be opened, or its log can't be made empty.
    pub fn arrive(
        &mut self,
        slot: usize,
        mut member: Member,
        by_bitmap: bool,
        idle: &mut Idle<'_>,
    ) -> Result<(), Box<(Member, Error)>> {
        let opened = Disk::open(&member).and_then(|mut disk| {
            // A spare's is empty. Entries from before would make parity wrong that is written from now on.
            if by_bitmap {
                empty_log(&member, &mut disk, idle)?;
            }
            if self.assembly.bitmap.is_none() {
                erase_map(&member.superblock, disk.blocking(), idle)?;
            }
            Ok(disk)
        });
        let disk = match opened {
            Ok(disk) => disk,
            Err(error) => return Err(Box::new((member, error))),
        };
        let feature = Feature::RECOVERY_BITMAP.0;
        let superblock = &mut member.superblock;
        superblock.feature_map &= !feature;
        // With bits in memory only, a restart goes on from the position, and rebuilds the rest whole.
        if let Some(bitmap) = &mut self.assembly.bitmap {
            bitmap.set_guided(by_bitmap.then_some(superblock.device_uuid));
            if by_bitmap && !bitmap.header().is_private() {
                superblock.feature_map |= feature;
            }
        }
        self.arriving = Some((slot, member, disk));
        Ok(())
    }

    /// No errand will say that a device arrives.
    pub fn forget_arrival(&mut self) {
        self.arriving = None;
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

    /// Without a member there is no parity that could be made right.
    fn settle(&mut self) {
        if self.assembly.failed().is_some() {
            self.assembly.unsynced.clear();
        }
    }

    /// Takes the devices that superblocks leave out since the last call, with their slots and superblocks.
    pub fn take_gone(&mut self) -> Vec<(usize, Superblock)> {
        std::mem::take(&mut self.gone)
    }

    /// As [`OnDisk::write_sums`] of all that are dirty, at the end in order: devices that fail it are left out. Errors if there are too many.
    pub fn write_last_sums(&mut self, sums: &Sums, idle: &mut Idle<'_>) -> Result<(), Error> {
        loop {
            let failed = self.write_sums(sums, &sums.dirty(), idle)?;
            if failed == 0 {
                return Ok(());
            }
            let members = self.assembly.members.iter().zip(&self.slots);
            let stay = members.filter(|(m, slot)| m.is_some() && failed & 1 << **slot == 0);
            if stay.count() + 1 < self.slots.len() {
                return Err(Error::config(
                    "raid5: checksums can't be written to the members, so it isn't clean",
                ));
            }
            self.leave_out(failed);
        }
    }

    /// The next superblocks leave these slots (a mask) out.
    fn leave_out(&mut self, failed: u64) {
        for at in At::all(&self.assembly) {
            let slot = self.slot(at);
            if failed & 1 << slot == 0 {
                continue;
            }
            let left = match at {
                At::Member(place) => self.assembly.members[place].take(),
                At::Incoming => self.assembly.incoming.take().map(|i| i.member),
            };
            self.disks.drop_at(at);
            self.gone.extend(left.map(|left| (slot, left.superblock)));
        }
    }

    /// Devices couldn't be written to.
    fn note_thrown_out(&mut self) {
        for (at, member) in std::mem::take(&mut self.assembly.thrown_out) {
            self.gone.push((self.slot(at), member.superblock));
        }
    }

    /// The end in order, when everything is written: all is on stable storage, and superblocks say clean.
    pub fn end(&mut self, idle: &mut Idle<'_>) -> Result<(), Error> {
        let (assembly, disks) = (&mut self.assembly, &mut self.disks);
        write_superblocks_on(assembly, disks, Says::CleanEnd, now_secs(), idle)
    }

    /// The slot of the device that is being rebuilt, if there is one.
    pub fn incoming_slot(&self) -> usize {
        self.incoming
    }

    /// The slot of a device.
    fn slot(&self, at: At) -> usize {
        match at {
            At::Member(place) => self.slots[place],
            At::Incoming => self.incoming,
        }
    }

    /// Counts of blocks that were calculated, by slot, which superblocks have.
    pub fn set_corrected(&mut self, corrected: impl Fn(usize) -> u32) {
        for at in At::all(&self.assembly) {
            let slot = self.slot(at);
            if let Some(member) = at.of_mut(&mut self.assembly) {
                member.superblock.corrected_reads = corrected(slot);
            }
        }
    }

    /// Writes superblocks for an errand that was applied; returns the slots (a mask) that failed that. Others' superblocks leave them out if the
    /// errand is a name. `before`: those that had superblocks before the first try.
    pub fn write(
        &mut self,
        errand: Errand,
        before: u64,
        idle: &mut Idle<'_>,
    ) -> Result<u64, Error> {
        match errand {
            Errand::Name { dirty, .. } => {
                let says = match dirty || self.assembly.dirty {
                    true => Says::Dirty,
                    false => Says::StillClean,
                };
                let (assembly, disks) = (&mut self.assembly, &mut self.disks);
                let written = write_superblocks_on(assembly, disks, says, now_secs(), idle);
                self.note_thrown_out();
                written?;
                self.settle();
                Ok(before & !self.live())
            }
            Errand::Recovered { .. } | Errand::Resynced(_) => {
                let (assembly, disks) = (&mut self.assembly, &mut self.disks);
                let failed = write_progress(assembly, disks, now_secs(), idle)?;
                Ok(self.mask(&failed))
            }
        }
    }

    /// The slots of these devices, as a mask.
    fn mask(&self, devices: &[At]) -> u64 {
        let slots = devices.iter().map(|at| self.slot(*at));
        slots.fold(0, |mask, slot| mask | 1 << slot)
    }

    /// Sets the bits of these stripes on all devices; returns the slots (a mask) that failed that.
    pub fn set_bits(&mut self, stripes: &[u64], idle: &mut Idle<'_>) -> Result<u64, Error> {
        let geometry = &self.assembly.geometry;
        if let Some(bitmap) = &mut self.assembly.bitmap {
            for stripe in stripes {
                bitmap.set(geometry.stripe_member_sector(*stripe), STRIPE_SECTORS);
            }
        }
        self.write_bits(idle)
    }

    /// Takes the bits of chunks away that nobody counts on, and whose stripes are on stable storage. Returns the slots (a mask) that failed that.
    pub fn clear_bits(&mut self, chunks: &Chunks, idle: &mut Idle<'_>) -> Result<u64, Error> {
        // Superblocks may leave a member out that words still have: it missed nothing that was cleared before.
        if self.assembly.failed().is_some() {
            return Ok(0);
        }
        let events = self.assembly.events();
        let Some(bitmap) = &mut self.assembly.bitmap else {
            return Ok(0);
        };
        let is_clear = |chunk: usize| chunks.is_clear(chunk);
        if !bitmap.begin_clearing(events, is_clear) {
            return Ok(0);
        }
        let failed = self.write_bits(idle)?;
        if failed != 0 {
            return Ok(failed);
        }
        if let Some(bitmap) = &mut self.assembly.bitmap {
            bitmap.clear(is_clear);
        }
        self.write_bits(idle)
    }

    fn write_bits(&mut self, idle: &mut Idle<'_>) -> Result<u64, Error> {
        let failed = write_pages(&mut self.assembly, &mut self.disks, idle)?;
        Ok(self.mask(&failed))
    }

    /// A group of sums comes into memory. Errors only if `idle` ends it.
    pub fn load_sums(
        &mut self,
        sums: &Sums,
        group: usize,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        let which = (group, self.given.contains(&group));
        let pages = read_group(&self.assembly, &mut self.disks, which, idle)?;
        let unknown: Page = [0; SUMS_PAGE_BYTES];
        let pages = pages.iter().map(|page| page.as_ref().unwrap_or(&unknown));
        sums.load(group, pages.map(Page::as_slice));
        Ok(())
    }

    /// Writes those of these groups that are dirty; returns the slots (a mask) that failed that.
    pub fn write_sums(
        &mut self,
        sums: &Sums,
        groups: &[usize],
        idle: &mut Idle<'_>,
    ) -> Result<u64, Error> {
        for &group in groups {
            if !sums.begin_writing(group) {
                continue;
            }
            let places = 0..self.assembly.geometry.members();
            let pages: Vec<Page> = places.map(|place| sums.copy(place, group)).collect();
            let written = write_group(&self.assembly, &mut self.disks, (group, &pages), idle);
            let failed = written.inspect_err(|_| sums.not_written(group))?;
            if !failed.is_empty() {
                sums.not_written(group);
                return Ok(self.mask(&failed));
            }
            if self.assembly.incoming.is_some() {
                self.given.insert(group);
            }
        }
        Ok(0)
    }

    /// Parity of these sectors is right.
    fn forget_marks(&mut self, sectors: Range<u64>) {
        if let Some(bitmap) = &mut self.assembly.bitmap {
            bitmap.resynced(sectors);
        }
    }

    /// The superblocks as they are on disk.
    pub fn written(&self) -> Written {
        Written {
            superblock: self.assembly.newest().clone(),
            dirty: self.assembly.dirty,
            lag: names_missing(&self.assembly),
            bitmap: self.assembly.bitmap.as_ref().map(|b| b.header().clone()),
        }
    }

    /// The next superblocks say this.
    pub fn apply(&mut self, errand: Errand) {
        let assembly = &mut self.assembly;
        match errand {
            Errand::Name { failed, change, .. } => {
                self.leave_out(failed);
                self.settle();
                let assembly = &mut self.assembly;
                if let Some(Change::TakesIn { slot, role }) = change
                    && let Some((slot, member, disk)) = self.arriving.take_if(|at| at.0 == slot)
                {
                    self.incoming = slot;
                    self.given.clear();
                    self.disks.take_in(role, disk);
                    assembly.incoming = Some(Incoming {
                        place: role,
                        member,
                        recovered_sectors: 0,
                    });
                }
                let takes_over = change == Some(Change::TakesOver);
                if let Some(incoming) = assembly.incoming.take_if(|_| takes_over) {
                    let place = incoming.place;
                    let old = (self.slots[place], assembly.members[place].take());
                    if let (slot, Some(old)) = old {
                        self.gone.push((slot, old.superblock));
                    }
                    self.slots[place] = self.incoming;
                    self.given.clear();
                    self.disks.take_over();
                    let mut member = incoming.member;
                    member.superblock.recovery_offset_sectors = 0;
                    assembly.members[place] = Some(member);
                    // The writes that the one before it missed are on this one. Parity that wasn't made yet still isn't.
                    if let Some(bitmap) = &mut assembly.bitmap {
                        bitmap.resynced(0..assembly.geometry.member_sectors());
                        bitmap.need(&assembly.unsynced);
                    }
                }
            }
            Errand::Recovered { slot, stripes } => {
                let is_it = slot == self.incoming;
                if let Some(incoming) = assembly.incoming.as_mut().filter(|_| is_it) {
                    incoming.recovered_sectors = stripes * STRIPE_SECTORS;
                }
            }
            Errand::Resynced(stripes) => {
                let first = stripes * STRIPE_SECTORS;
                let begin = assembly.unsynced.first().map(|range| range.start);
                let left = assembly.unsynced.iter();
                let left = left.map(|range| range.start.max(first)..range.end);
                assembly.unsynced = left
                    .filter(|range: &Range<u64>| !range.is_empty())
                    .collect();
                if begin.is_some_and(|begin| begin < first) {
                    // From the first sector on: a chunk may be made right in two steps.
                    self.forget_marks(0..first);
                }
            }
        }
    }
}
