//! An array, its users and its members, one step at a time.

use super::boot::Turns;
use super::inspect::RawMembers;
use super::profile::{ArrayProfile, Losses, Policy};
use super::sabotage::{Areas, of_member};
use super::shape::Shape;
use crate::bugs::Bug;
use crate::disk::{Crash, CrashDisk, DiskSetup, Fails, Survives};
use crate::log::Log;
use crate::scheduler::{Actors, Group};
use crate::user::User;
use crate::workload::Workload;
use crate::{drop_killed, pick};
use fastrand::Rng;
use pvblk_block::Reclaim;
use pvblk_raid5::{
    BackgroundWork, BitmapHeader, Consistency, Kept, Layout, MemberState, NewArray, PplHeader,
    Raid5, Role, SUPER_SECTOR, Superblock, WriteIntent, ppl_signature,
};
use std::sync::Arc;
use std::time::Duration;

/// The process that serves the array.
pub struct ArrayProcess {
    pub array: Arc<Raid5>,
    pub background: Option<BackgroundWork>,
    pub users: Vec<User>,
}

impl ArrayProcess {
    /// The place without a member, also if only superblocks leave it out so far.
    pub fn without(&self) -> Option<usize> {
        self.array.failed().or(self.array.left_out())
    }
}

/// The state of the scenario.
pub struct Array {
    pub w: Workload,
    pub profile: ArrayProfile,
    pub disks: Vec<Arc<CrashDisk>>,
    /// First sector of each member's data.
    pub data_sectors: Vec<u64>,
    pub process: Option<ArrayProcess>,
    /// Number of the disk in each role.
    pub by_role: Vec<usize>,
    /// Disks that were members, and whose roles others have.
    pub retired: Vec<usize>,
    /// All parity was right when the array last served.
    pub synced: bool,
    /// The only disk that fails or is missing until it is recovered, except for a second one that fails until
    /// the next start.
    pub victim: Option<usize>,
    /// The victim is missing at this start.
    pub gone: bool,
    /// A second member failed.
    pub second: Option<usize>,
    /// Another device is becoming a member.
    rebuilding: bool,
    /// The disk that stalls.
    pub stalled: Option<usize>,
    /// The disk that was kicked, while the array serves.
    pub kicked: Option<usize>,
    /// A device is being recovered in its place.
    pub returning: bool,
    /// A device is being kicked, and the members' superblocks didn't name the missing one before.
    pub kicking: Option<bool>,
    /// The array was stopped in order, and hasn't been written since.
    pub clean: bool,
    /// A member that is slower than the others.
    lazy: usize,
    /// Number of power cycles that are over.
    pub cycles: u32,
    pub bug: Option<Bug>,
    /// Power is to be cut, since it was while metadata was written.
    is_cut: bool,
    /// A cycle's work goes on.
    works: bool,
    /// Something is wrong that was found while metadata was written.
    trouble: Option<String>,
}

impl Array {
    /// New members of an array that was never started.
    pub fn new(seed: u64, bug: Option<Bug>, mut log: Log) -> Result<Array, String> {
        let mut rng = Rng::with_seed(seed);
        let profile = ArrayProfile::new(&mut rng)
            .with_zeroes(seed)
            .with_stalls(seed, bug.is_some_and(Bug::is_of_stalls))
            .with_map(seed)
            .with_checksums(seed);
        let shape = profile.shape;
        let all = [shape.members as u64, shape.chunk, shape.rows];
        log.add("an array of # members, chunks of # sectors, # rows", all);
        if log.verbose {
            eprintln!("{profile:?}");
        }
        let lazy = rng.usize(..2 * shape.members);
        let mut w = Workload::new(rng, log, profile.load.clone(), !profile.junk, bug);
        w.array.row = (shape.members as u64 - 1) * shape.chunk;
        w.array.lasts = profile.losses == Losses::None && profile.limit.is_none();
        let mut array = Array {
            w,
            disks: Vec::new(),
            data_sectors: Vec::new(),
            process: None,
            by_role: (0..shape.members).collect(),
            retired: Vec::new(),
            synced: true,
            rebuilding: false,
            stalled: None,
            kicked: None,
            returning: false,
            kicking: None,
            victim: None,
            gone: false,
            second: None,
            clean: !profile.junk,
            lazy,
            cycles: 0,
            bug,
            is_cut: false,
            works: false,
            trouble: None,
            profile,
        };
        array.create()?;
        Ok(array)
    }

    /// Writes superblocks and logs, closer together than mdadm does, so that starts are short.
    fn create(&mut self) -> Result<(), String> {
        let (p, rng) = (&self.profile, &mut self.w.rng);
        let (shape, policy, junk) = (p.shape, p.policy, p.junk);
        let sizes = vec![8192 + shape.member_sectors(); shape.members];
        let created = NewArray {
            set_uuid: [7; 16],
            name: "sim:0",
            created_secs: 1,
            layout: Layout::from_md(shape.layout).ok_or("no such layout")?,
            chunk_sectors: shape.chunk as u32,
            device_sectors: &sizes,
            size_sectors: Some(shape.member_sectors()),
            consistency: match policy {
                Policy::Resync => Consistency::Resync,
                Policy::Ppl => Consistency::Ppl,
                Policy::Bitmap => Consistency::Bitmap,
            },
            checksums: false,
            clean: !junk,
        };
        let created = created.build().map_err(|e| e.to_string())?;
        let private = || BitmapHeader::private([7; 16], shape.member_sectors());
        let (header, kept) = match (p.private_map, p.checksums) {
            (true, true) => (private().map(BitmapHeader::with_sums), Kept::MapAndSums),
            (true, false) => (private(), Kept::Map),
            (false, _) => (created.bitmap().cloned(), Kept::Nothing),
        };
        let bitmap = header.map(|mut header| {
            header.chunk_bytes = p.bitmap_chunk as u32 * 512;
            WriteIntent::new(header, junk)
        });
        let spare = usize::from(p.spare);
        for member in 0..shape.members + spare {
            let sectors = sizes[0];
            let place = member.min(shape.members - 1);
            let mut superblock = created.superblock(place, [member as u8 + 1; 16]);
            if member >= shape.members {
                superblock.dev_number = member as u32;
            }
            let log = (
                SUPER_SECTOR + 8..SUPER_SECTOR + 8 + p.log_sectors,
                p.log_sectors,
            );
            // A page of sums before that of the map.
            let sums = if p.checksums { 8 } else { 0 };
            let data = log.0.end + sums + 8 * rng.u64(1..4);
            superblock.data_offset_sectors = data;
            superblock.data_size_sectors = sectors - data;
            superblock.bblog_size_sectors = 0;
            superblock.bblog_offset_sectors = 0;
            superblock.set_updated(1, kept);
            if policy == Policy::Ppl {
                let ([a, b], [c, d]) = (8u16.to_le_bytes(), (log.1 as u16).to_le_bytes());
                superblock.bitmap_or_ppl = [a, b, c, d];
            }
            let areas = Areas {
                number: member,
                mark: SUPER_SECTOR..SUPER_SECTOR + 8,
                bitmap: match policy {
                    Policy::Bitmap => SUPER_SECTOR + 8..SUPER_SECTOR + 16,
                    _ if p.private_map => data - 8..data,
                    _ => 0..0,
                },
                log: log.0.clone(),
                data: data..data + shape.member_sectors(),
                shape,
            };
            let disk = CrashDisk::new(DiskSetup {
                number: member,
                sectors,
                zeroes: p.holes,
                rotational: p.rotational,
                given_up: p.limit.is_some(),
                sabotage: of_member(self.bug, areas.clone()),
                ..DiskSetup::default()
            });
            disk.put(SUPER_SECTOR, &superblock.encode());
            if policy == Policy::Ppl {
                let header = PplHeader::empty(ppl_signature(&superblock.set_uuid));
                disk.put(log.0.start, &header.encode());
            }
            if let Some(bitmap) = &bitmap {
                disk.put(areas.bitmap.start, bitmap.page(0));
            }
            if junk || member >= shape.members {
                let mut bytes = vec![0; shape.member_sectors() as usize * 512];
                rng.fill(&mut bytes);
                disk.put(data, &bytes);
            }
            self.data_sectors.push(data);
            self.disks.push(Arc::new(disk));
        }
        Ok(())
    }

    /// True if the power was cut while metadata was written: what is left of the array is only to be dropped.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    pub fn shape(&self) -> Shape {
        self.profile.shape
    }

    /// Lets the background thread take a turn at a later time; returns whether it had work, or has some now.
    fn keep(&mut self) -> bool {
        let Some(process) = &mut self.process else {
            return false;
        };
        let step = pick(&mut self.w.rng, &[1, 20, 100, 100, 3000]);
        self.w.log.clock.advance(Duration::from_millis(step));
        let Some(background) = &mut process.background else {
            return false;
        };
        // Only while there is work: else the array has to be whole in the end.
        let cuts = self.works && self.w.rng.u8(..64) == 0;
        let left = cuts.then(|| self.w.rng.u64(..60));
        let mut turns = Turns::new(&self.disks, &mut self.w.rng, left);
        turns.end_stalls();
        let had_work = background.is_busy();
        let log = &self.w.log;
        // Time passes while it waits.
        let mut idle = || {
            log.clock.advance(Duration::from_millis(10));
            turns.turn()
        };
        background.work_with(&|| log.elapsed(), &mut idle);
        let (is_cut, trouble) = turns.end();
        self.trouble = self.trouble.take().or(trouble);
        if is_cut {
            self.w
                .log
                .add("the power goes while metadata is written", []);
            self.note_kicked();
            self.note_kick();
            (self.is_cut, self.w.may_fail) = (true, true);
            return true;
        }
        let busy = had_work || background.is_busy();
        if self.profile.checksums {
            let members = process.array.state().members;
            if let Some(member) = members.iter().find(|member| member.checksum_errors > 0) {
                let text = "a block that nobody changed doesn't fit its checksum; member";
                self.trouble = Some(format!("{text} {}", member.name));
            }
        }
        let state = process.array.places();
        for (place, name) in state.into_iter().enumerate() {
            let Some(disk) = name.and_then(|n| n.parse().ok()) else {
                continue;
            };
            let old = self.by_role[place];
            if old == disk {
                continue;
            }
            // The member was recovered, or replaced.
            self.w
                .log
                .add("member # takes the place of #", [disk as u64, old as u64]);
            self.take_place(place, disk);
        }
        self.note_returned();
        self.add_whole();
        busy
    }

    /// True if the array that serves has the disk as a spare, and its superblock says that, too.
    fn is_spare(&self, disk: usize) -> bool {
        let superblock = self.superblock(disk);
        if superblock.is_none_or(|s| s.role() != Role::Spare) {
            return false;
        }
        let name = disk.to_string();
        let members = self.process.iter().flat_map(|p| p.array.state().members);
        let mut spares = members.filter(|m| m.state == MemberState::Spare);
        spares.any(|m| m.name == name)
    }

    /// A disk has a place from now on. The old one is retired, if it isn't in another place, nor a spare that may take one.
    pub fn take_place(&mut self, place: usize, disk: usize) {
        self.w.log.count("rebuilt", 1);
        let old = std::mem::replace(&mut self.by_role[place], disk);
        self.retired.retain(|d| *d != disk);
        if !self.by_role.contains(&old) && !self.is_spare(old) {
            self.retired.push(old);
        }
        if self.victim == Some(old) {
            (self.victim, self.w.array.stale) = (None, false);
        }
    }

    /// Runs a cycle's work, and its faults.
    pub fn work(&mut self) -> Result<(), String> {
        let losses = self.profile.losses;
        let steps = self.w.rng.u64(1..=self.profile.steps);
        let fails = matches!(losses, Losses::Serving | Losses::Two) && self.w.rng.bool();
        let first = self.w.rng.u64(..steps);
        let second = first + self.w.rng.u64(..=steps - first);
        let mut end = steps;
        let mut step = 0;
        let replaces = self.profile.spare && self.w.rng.u8(..4) == 0;
        self.works = true;
        while step < end && !self.is_cut {
            if replaces && step == second {
                self.replace();
            }
            if fails && step == first {
                self.fail_first();
            }
            if fails && losses == Losses::Two && step == second {
                self.fail_second();
            }
            self.begin_stall();
            if self.w.rng.u8(..=255) == 0 && self.profile.limit.is_some() {
                self.come_back();
            }
            if self.profile.squeezes && self.w.rng.u8(..16) == 0 {
                self.squeeze();
            }
            let before = self.w.array.degraded;
            self.step(true)?;
            step += 1;
            if self.w.array.degraded && !before && self.w.rng.u8(..4) == 0 {
                // The superblocks are just being written.
                end = end.min(step + self.w.rng.u64(..64));
            }
        }
        self.works = false;
        Ok(())
    }

    /// Takes memory from the array, as when the system is short of it.
    fn squeeze(&mut self) {
        let Some(process) = &self.process else { return };
        // Stripe heads that are given up while they are in use keep their contents.
        if self.w.rng.u8(..4) == 0 {
            let stripes = pick(&mut self.w.rng, &[8, 9, 16, 32]);
            if process.array.set_stripes(stripes).is_ok() {
                self.w.log.add("# stripes from now on", [stripes as u64]);
            }
        }
        let bytes = process.array.give_way();
        self.w.log.add("# bytes are given back", [bytes]);
        self.w.log.count("pages given back", bytes / 4096);
    }

    /// Starts to replace a member by a spare, if there is one.
    fn replace(&mut self) {
        let Some(process) = &self.process else { return };
        let place = self.w.rng.usize(..self.by_role.len());
        if process.array.replace(place).is_ok() {
            self.w.log.add("member # is to be replaced", [place as u64]);
        }
    }

    /// Lets a member fail, unless the array is without one already, or needs all of them.
    fn fail_first(&mut self) {
        let without = self.process.as_ref().and_then(|p| p.without());
        if without.is_some() || !self.is_synced() {
            return;
        }
        let rng = &mut self.w.rng;
        let by_role = &self.by_role;
        let victim = *self
            .victim
            .get_or_insert_with(|| by_role[rng.usize(..by_role.len())]);
        let disk = &self.disks[victim];
        self.w.log.count("members failed", 1);
        let how = pick(
            rng,
            &[Fails::All, Fails::Reads, Fails::Writes, Fails::Nothing],
        );
        match how {
            Fails::Nothing => {
                for _ in 0..8 {
                    disk.spoil(
                        self.data_sectors[victim] + rng.u64(..self.profile.shape.member_sectors()),
                    );
                }
                self.w.log.add("member # gets bad sectors", [victim as u64]);
            }
            how => {
                disk.fail(how);
                let how = how as u64;
                self.w.log.add("member # fails (#)", [victim as u64, how]);
            }
        }
    }

    /// Lets a second member fail: the array has failed then, until the power is cut.
    fn fail_second(&mut self) {
        // If the array hasn't noticed the first failure, the second failed member is the one that
        // it drops.
        let without = self.process.as_ref().and_then(|p| p.without());
        let Some(victim) = without else { return };
        let members = self.by_role.len();
        let other = self.by_role[(victim + self.w.rng.usize(1..members)) % members];
        self.disks[other].fail(Fails::All);
        self.second = Some(other);
        self.w.may_fail = true;
        self.w.log.add("member # fails too", [other as u64]);
    }

    /// True if all parity is right.
    fn is_synced(&self) -> bool {
        let state = self.process.as_ref().map(|p| p.array.in_sync_sectors());
        state.is_some_and(|s| s.is_none())
    }

    /// Checks the members themselves, while no request is in flight.
    pub fn look(&mut self) -> Result<(), String> {
        self.w.log.add("the members are looked at", []);
        let in_sync = self
            .process
            .as_ref()
            .and_then(|p| p.array.in_sync_sectors());
        let raw = RawMembers {
            shape: self.shape(),
            disks: &self.disks,
            data_sectors: &self.data_sectors,
            by_role: &self.by_role,
            missing: self.process.as_ref().and_then(|p| p.without()),
            in_sync: in_sync.unwrap_or(u64::MAX),
        };
        raw.check(&self.w.checker)
    }

    /// Cuts the power; without `power` only the process dies.
    pub fn cut(&mut self) {
        self.note_kicked();
        self.note_kick();
        let kicked = self.kicking.take().filter(|first| *first);
        let kicked = kicked.and_then(|_| self.missing());
        self.stalled = None;
        if let Some(process) = &self.process {
            // The new superblocks may not have been written yet.
            let told = process.array.state().sync.is_none();
            self.synced = told && self.is_synced();
        }
        let rng = &mut self.w.rng;
        let kinds = [
            Survives::Nothing,
            Survives::Everything,
            Survives::AnyVersions,
            Survives::AnyVersions,
            Survives::WholeWrites,
        ];
        let same = rng.bool().then(|| pick(rng, &kinds));
        self.w.log.add("the power is cut", []);
        let mut lost = 0;
        for disk in &self.disks {
            let survives = same.unwrap_or_else(|| pick(rng, &kinds));
            lost += disk.crash(Crash::Power(survives), rng);
            disk.fail(Fails::Nothing);
            // Where parity has to be computed anew, no data can be computed from it.
            disk.repair();
        }
        self.w.log.count("cuts", 1);
        self.w.log.count("sectors in caches at cuts", lost);
        self.rebuilding = false;
        (self.is_cut, self.works) = (false, false);
        self.w.may_fail = false;
        if kicked.is_some_and(|disk| self.is_named(disk)) {
            self.w.checker.kicked(true);
        }
        self.w.checker.abandon();
        self.w.checker.cache_lost();
        drop_killed(self.process.take());
    }

    /// The superblock that is on a member now.
    pub fn superblock(&self, member: usize) -> Option<Superblock> {
        let sectors = (0..8).map(|n| self.disks[member].current(SUPER_SECTOR + n));
        let bytes: Vec<u8> = sectors.flatten().collect();
        Superblock::parse(bytes.as_slice().try_into().ok()?).ok()
    }
}

impl Actors for Array {
    fn dice(&mut self) -> &mut Rng {
        &mut self.w.rng
    }

    fn workload(&mut self) -> Option<&mut Workload> {
        Some(&mut self.w)
    }

    /// Users, then members.
    fn groups(&self) -> [Group; 5] {
        let [users, disks] = self.profile.pace;
        let none = (0, 0);
        [
            (self.users().len(), users),
            (self.disks.len(), disks),
            none,
            none,
            none,
        ]
    }

    fn look_around(&mut self) -> Result<(), String> {
        if self.w.rng.u8(..8) > 0 {
            return Ok(());
        }
        self.keep();
        if let Some(why) = self.trouble.take() {
            return Err(why);
        }
        self.end_stall();
        Ok(())
    }

    fn act(&mut self, actor: usize, fill: bool) -> Result<bool, String> {
        self.note_kicked();
        self.note_kick();
        let Some(process) = &mut self.process else {
            return Err("nobody is there".into());
        };
        let state = &mut self.w.array;
        state.degraded = process.without().is_some();
        let rebuilding = process.array.rebuilding().is_some();
        state.alone = state.degraded && !rebuilding;
        if rebuilding && !self.rebuilding {
            self.w.checker.make_whole();
        }
        self.rebuilding = rebuilding;
        let users = process.users.len();
        if actor < users {
            return process.users[actor].step(&mut self.w, fill);
        }
        let disk = actor - users;
        if fill && disk == self.lazy && self.w.rng.u8(..8) > 0 {
            return Ok(true);
        }
        let moved = self.disks[disk].step(&mut self.w.rng);
        if moved {
            self.w.log.add("member # moves", [disk as u64]);
        }
        self.disks[disk].take_trouble().map_or(Ok(moved), Err)
    }

    /// The background thread gets a turn at a later time.
    fn pass_time(&mut self) -> bool {
        let stalled = self.stalled.is_some();
        self.end_stall();
        // A look at a device that is away isn't work, and yet its read has to end.
        self.keep() || stalled || self.disks.iter().any(|d| d.busy() > 0)
    }

    fn users(&self) -> &[User] {
        self.process.as_ref().map_or(&[], |p| &p.users)
    }

    fn is_settled(&self) -> bool {
        let background = self.process.as_ref().and_then(|p| p.background.as_ref());
        background.is_none_or(|k| !k.is_busy()) && self.disks.iter().all(|d| d.busy() == 0)
    }

    fn unfinished(&self) -> String {
        let sync = self.process.as_ref().map(|p| p.array.state().sync);
        format!("{sync:?}")
    }
}
