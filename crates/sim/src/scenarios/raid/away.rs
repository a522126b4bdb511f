//! Members that stall for longer than the array waits, and members that come back.

use super::array::Array;
use super::boot::Turns;
use pvblk_block::BlockDevice;
use pvblk_raid5::{ReAdded, Role};
use std::sync::Arc;

impl Array {
    /// Lets a member stall now and then, and sometimes a device that is coming back.
    pub fn begin_stall(&mut self) {
        if self.profile.limit.is_none() || self.stalled.is_some() || self.w.rng.u8(..32) > 0 {
            return;
        }
        let disk = match self.victim.filter(|_| self.w.rng.bool()) {
            Some(victim) => victim,
            None => self.by_role[self.w.rng.usize(..self.by_role.len())],
        };
        self.disks[disk].stall(true);
        self.stalled = Some(disk);
        self.w.log.add("member # stalls", [disk as u64]);
        self.w.log.count("stalls", 1);
    }

    /// Lets the member that stalls answer again, sooner or later.
    pub fn end_stall(&mut self) {
        let Some(disk) = self.stalled else { return };
        if self.w.rng.u8(..=255) > 0 && !(self.victim.is_some() && self.w.rng.u8(..64) == 0) {
            return;
        }
        self.disks[disk].stall(false);
        self.stalled = None;
        self.w.log.add("member # answers again", [disk as u64]);
    }

    /// Notes the member that was kicked: any that is slow may be.
    pub fn note_kicked(&mut self) {
        let process = self.process.as_ref();
        // After a cut it has lost all.
        if self.profile.limit.is_none() || self.is_cut() {
            return;
        }
        let Some(place) = process.and_then(|p| p.without()) else {
            return;
        };
        let disk = self.by_role[place];
        if self.kicked != Some(disk) {
            self.w.log.add("member # is kicked", [disk as u64]);
            self.w.log.count("kicked", 1);
        }
        self.kicked = Some(disk);
        self.victim = Some(disk);
        let process = process.map(|p| &p.array);
        self.returning = process.is_some_and(|a| a.rebuilding() == Some(place));
    }

    /// The disk that the array is without.
    pub fn missing(&self) -> Option<usize> {
        let place = self.process.as_ref()?.without()?;
        Some(self.by_role[place])
    }

    /// True if a member's superblock says that a disk failed.
    pub fn is_named(&self, disk: usize) -> bool {
        let number = self.superblock(disk).map(|s| s.dev_number as usize);
        let others = self.by_role.iter().filter(|d| **d != disk);
        let mut others = others.filter_map(|d| self.superblock(*d));
        number.is_some_and(|n| others.any(|s| s.roles.get(n) == Some(&Role::Faulty)))
    }

    /// Notes the begin and the end of a kick.
    pub fn note_kick(&mut self) {
        if self.is_cut() {
            return;
        }
        let Some(array) = self.process.as_ref().map(|p| &p.array) else {
            return;
        };
        match (array.is_kicking(), self.kicking) {
            (true, None) => {
                let missing = self.missing();
                self.kicking = Some(missing.is_some_and(|disk| !self.is_named(disk)));
            }
            (false, Some(_)) => {
                self.kicking = None;
                if self.missing().is_some() && !array.state().broken {
                    self.w.log.count("kicks", 1);
                    self.w.checker.kicked(false);
                }
            }
            _ => {}
        }
    }

    /// Notes that the member that was kicked is there again.
    pub fn note_returned(&mut self) {
        let Some(process) = self.process.as_ref() else {
            return;
        };
        if self.kicked.is_none() || process.without().is_some() {
            return;
        }
        let recovered = process.array.state().recovered;
        self.w.log.add("all members are there", []);
        self.w.log.count("returned", 1);
        if recovered.is_some_and(|r| r.by_bitmap) {
            self.w.log.count("returned by the bitmap", 1);
        }
        (self.kicked, self.victim, self.returning) = (None, None, false);
        self.w.array.stale = false;
    }

    /// Takes a device back that was a member, this time or earlier.
    pub fn come_back(&mut self) {
        let Some(process) = self.process.as_ref() else {
            return;
        };
        let array = &process.array;
        let place = process.without().filter(|_| array.rebuilding().is_none());
        let (Some(place), true) = (place, self.profile.limit.is_some()) else {
            return;
        };
        let mut all = self.retired.clone();
        all.push(self.by_role[place]);
        let disk = all[self.w.rng.usize(..all.len())];
        if self.stalled == Some(disk) {
            return;
        }
        let device: Arc<dyn BlockDevice> = self.disks[disk].clone();
        let mut turns = Turns::new(&self.disks, &mut self.w.rng, None);
        let again = array.re_add(&disk.to_string(), &device, &mut || turns.turn());
        match again {
            Ok(how) => {
                self.retired.retain(|old| *old != disk);
                let by_bitmap = how == ReAdded::ByBitmap;
                self.note_data(disk);
                self.w.log.add("member # is taken back", [disk as u64]);
                self.w.log.count("taken back", 1);
                if by_bitmap {
                    self.w.log.count("taken back by the bitmap", 1);
                }
            }
            Err(e) => {
                if self.w.log.verbose {
                    eprintln!("{e}");
                }
                self.w.log.count("not taken back", 1);
            }
        }
    }

    /// Adds a device that came back, and is to be rebuilt whole.
    pub fn add_whole(&mut self) {
        let Some(process) = &mut self.process else {
            return;
        };
        let whole = process.background.as_mut().and_then(|b| b.take_whole());
        let Some((name, device)) = whole else { return };
        let mut turns = Turns::new(&self.disks, &mut self.w.rng, None);
        let added = process
            .array
            .add(&name, &device, false, &mut || turns.turn());
        if let (Err(e), true) = (added, self.w.log.verbose) {
            eprintln!("{e}");
        }
        if let Ok(disk) = name.parse() {
            self.retired.retain(|old| *old != disk);
            self.note_data(disk);
        }
    }

    /// A device that was made a spare has its data where the others have theirs.
    fn note_data(&mut self, disk: usize) {
        if let Some(superblock) = self.superblock(disk) {
            self.data_sectors[disk] = superblock.data_offset_sectors;
        }
    }
}
