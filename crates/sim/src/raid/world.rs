//! An array, its users and its members, one step at a time.

use super::disk::{CrashMember, Failure};
use super::image::Mercy;
use super::inspect::Raw;
use super::oracle::Oracle;
use super::planted::{Areas, Bug, MemberBug};
use super::profile::{Losses, Policy, Profile};
use super::shape::Shape;
use super::submitter::{Common, Submitter};
use super::{Options, Report};
use crate::log::Log;
use crate::profile::pick;
use fastrand::Rng;
use pvblk_block::Reclaim;
use pvblk_volume::raid5::{
    Consistency, Keeper, Layout, NewArray, PplHeader, Raid5, SUPER_SECTOR, Superblock, WriteIntent,
    ppl_signature,
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Steps in which everything must come to rest.
const MOST_STEPS: u64 = 400_000;

/// The process that serves the array.
pub struct Life {
    pub array: Arc<Raid5>,
    pub keeper: Option<Keeper>,
    pub submitters: Vec<Submitter>,
}

/// See the module's documentation.
pub struct World {
    pub c: Common,
    pub disks: Vec<Arc<CrashMember>>,
    /// Where each member's data begins.
    pub data_sectors: Vec<u64>,
    pub life: Option<Life>,
    /// Which disk is at which place.
    pub by_role: Vec<usize>,
    /// Disks that were members, and whose places others have.
    pub retired: Vec<usize>,
    /// All parity was right when the array last served.
    pub synced: bool,
    /// The keeper's clock.
    pub now: Duration,
    /// The only disk that fails or stays away (but for one that fails after it until the next start), until it is rebuilt.
    pub victim: Option<usize>,
    /// It isn't there at this start.
    pub gone: bool,
    /// A second member failed.
    pub second: Option<usize>,
    /// Another device is becoming a member.
    rebuilding: bool,
    /// The array was stopped in order, and nobody wrote since.
    pub clean: bool,
    /// A member that is slower than the others.
    lazy: usize,
    pub report: Report,
    pub planted: Option<Bug>,
    idle: u32,
}

impl World {
    /// New members of an array that was never started.
    pub fn new(seed: u64, options: &Options) -> Result<World, String> {
        let mut rng = Rng::with_seed(seed);
        let profile = Profile::new(&mut rng).with_zeroes(seed);
        let shape = profile.shape;
        let mut log = Log::new(options.verbose);
        let all = [shape.members as u64, shape.chunk, shape.rows];
        log.add("an array of # members, chunks of # sectors, # rows", all);
        if options.verbose {
            eprintln!("{profile:?}");
        }
        let mut world = World {
            disks: Vec::new(),
            data_sectors: Vec::new(),
            life: None,
            by_role: (0..shape.members).collect(),
            retired: Vec::new(),
            synced: true,
            now: Duration::ZERO,
            rebuilding: false,
            victim: None,
            gone: false,
            second: None,
            clean: !profile.junk,
            lazy: rng.usize(..2 * shape.members),
            report: Report::default(),
            planted: options.planted,
            idle: 0,
            c: Common {
                oracle: Oracle::new(shape.sectors(), profile.junk),
                rng,
                log,
                writes: 0,
                requests: 0,
                may_fail: false,
                degraded: false,
                alone: false,
                stale: false,
                next: 0,
                verify: None,
                settles: false,
                profile,
            },
        };
        world.create()?;
        Ok(world)
    }

    /// Writes superblocks and logs, closer together than mdadm does, so that starts are short.
    fn create(&mut self) -> Result<(), String> {
        let (p, rng) = (&self.c.profile, &mut self.c.rng);
        let (shape, policy, junk, rotational) = (p.shape, p.policy, p.junk, p.rotational);
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
            clean: !junk,
        };
        let created = created.build().map_err(|e| e.to_string())?;
        let bitmap = created.bitmap().cloned().map(|mut header| {
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
            let data = log.0.end + 8 * rng.u64(1..4);
            superblock.data_offset_sectors = data;
            superblock.data_size_sectors = sectors - data;
            superblock.bblog_size_sectors = 0;
            superblock.bblog_offset_sectors = 0;
            if policy == Policy::Ppl {
                let ([a, b], [c, d]) = (8u16.to_le_bytes(), (log.1 as u16).to_le_bytes());
                superblock.bitmap_or_ppl = [a, b, c, d];
            }
            let bug = MemberBug::new(self.planted, member);
            let mut disk = CrashMember::new(member, sectors, bug).with_arms(rotational);
            if p.holes {
                disk = disk.with_zeroes();
            }
            disk.put(SUPER_SECTOR, &superblock.encode());
            if policy == Policy::Ppl {
                let header = PplHeader::empty(ppl_signature(&superblock.set_uuid));
                disk.put(log.0.start, &header.encode());
            }
            if let Some(bitmap) = &bitmap {
                disk.put(SUPER_SECTOR + 8, bitmap.page(0));
            }
            if junk || member >= shape.members {
                let mut bytes = vec![0; shape.member_sectors() as usize * 512];
                rng.fill(&mut bytes);
                disk.put(data, &bytes);
            }
            disk.set_areas(Areas {
                mark: SUPER_SECTOR..SUPER_SECTOR + 8,
                log: log.0,
                data: data..data + shape.member_sectors(),
                shape: (member < shape.members).then_some(shape),
            });
            self.data_sectors.push(data);
            self.disks.push(Arc::new(disk));
        }
        Ok(())
    }

    pub fn shape(&self) -> Shape {
        self.c.profile.shape
    }

    /// One step of somebody; `fill`: something new may be asked for.
    pub fn step(&mut self, fill: bool) -> Result<(), String> {
        self.c.log.step += 1;
        let [s, d] = self.c.profile.pace.map(|p| p as usize);
        let submitters = self.life.as_ref().map_or(0, |l| l.submitters.len());
        if self.c.rng.u8(..8) == 0 {
            self.keep();
            if let Some(life) = &self.life {
                life.array.check_queues()?;
            }
        }
        let at = self.c.rng.usize(..submitters * s + self.disks.len() * d);
        let moved = match at.checked_sub(submitters * s) {
            None => self.act(at % submitters, fill)?,
            Some(at) => self.act(submitters + at % self.disks.len(), fill)?,
        };
        if moved {
            self.idle = 0;
            return Ok(());
        }
        self.idle += 1;
        if self.idle < 256 || fill {
            return Ok(());
        }
        // Nobody who was asked had anything to do. Ask all of them, and twice, since one who finds nothing arms and looks again.
        self.idle = 0;
        let mut any = false;
        for _ in 0..3 {
            any |= self.keep();
            for actor in 0..submitters + self.disks.len() {
                any |= self.act(actor, fill)?;
            }
        }
        match any || self.is_quiet() {
            true => Ok(()),
            false => Err(format!(
                "everybody sleeps, and requests are in flight: {:?}",
                self.in_flight()
            )),
        }
    }

    /// Submitters first, then members.
    fn act(&mut self, actor: usize, fill: bool) -> Result<bool, String> {
        let Some(life) = &mut self.life else {
            return Err("nobody is there".into());
        };
        self.c.degraded = life.array.failed().is_some();
        let rebuilding = life.array.rebuilding().is_some();
        self.c.alone = self.c.degraded && !rebuilding;
        if rebuilding && !self.rebuilding {
            self.c.oracle.rebuilding();
        }
        self.rebuilding = rebuilding;
        let submitters = life.submitters.len();
        if actor < submitters {
            return life.submitters[actor].step(&mut self.c, fill);
        }
        let disk = actor - submitters;
        if fill && disk == self.lazy && self.c.rng.u8(..8) > 0 {
            return Ok(true);
        }
        let moved = self.disks[disk].step(&mut self.c.rng);
        if moved {
            self.c.log.add("member # moves", [disk as u64]);
        }
        match self.disks[disk].take_trouble() {
            Some(why) => Err(why),
            None => Ok(moved),
        }
    }

    /// The keeper does something, at a later time; whether something is under way.
    fn keep(&mut self) -> bool {
        let Some(life) = &mut self.life else {
            return false;
        };
        let step = pick(&mut self.c.rng, &[1, 20, 100, 100, 3000]);
        self.now += Duration::from_millis(step);
        let Some(keeper) = &mut life.keeper else {
            return false;
        };
        keeper.step(self.now);
        let busy = keeper.is_busy();
        let state = life.array.places();
        for (place, name) in state.into_iter().enumerate() {
            let Some(disk) = name.and_then(|n| n.parse().ok()) else {
                continue;
            };
            let old = self.by_role[place];
            if old == disk {
                continue;
            }
            // It was rebuilt, or replaced.
            self.c
                .log
                .add("member # takes the place of #", [disk as u64, old as u64]);
            self.report.rebuilt += 1;
            self.by_role[place] = disk;
            self.retired.push(old);
            if self.victim == Some(old) {
                (self.victim, self.c.stale) = (None, false);
            }
        }
        busy
    }

    fn in_flight(&self) -> Vec<usize> {
        let life = self.life.iter().flat_map(|l| &l.submitters);
        life.map(Submitter::in_flight).collect()
    }

    fn is_quiet(&self) -> bool {
        let reads = self.c.verify.is_some_and(|v| v < self.shape().sectors());
        let keeper = self.life.as_ref().and_then(|l| l.keeper.as_ref());
        let kept = keeper.is_none_or(|k| !k.is_busy());
        !reads
            && kept
            && self.in_flight().iter().all(|&n| n == 0)
            && self.disks.iter().all(|d| d.busy() == 0)
    }

    /// A cycle's work, and what goes wrong meanwhile.
    pub fn work(&mut self) -> Result<(), String> {
        let losses = self.c.profile.losses;
        let steps = self.c.rng.u64(1..=self.c.profile.steps);
        let fails = matches!(losses, Losses::Serving | Losses::Two) && self.c.rng.bool();
        let first = self.c.rng.u64(..steps);
        let second = first + self.c.rng.u64(..=steps - first);
        self.c.verify = None;
        let mut end = steps;
        let mut step = 0;
        let replaces = self.c.profile.spare && self.c.rng.u8(..4) == 0;
        while step < end {
            if replaces && step == second {
                self.replace();
            }
            if fails && step == first {
                self.fail_first();
            }
            if fails && losses == Losses::Two && step == second {
                self.fail_second();
            }
            if self.c.profile.squeezes && self.c.rng.u8(..16) == 0 {
                self.squeeze();
            }
            let before = self.c.degraded;
            self.step(true)?;
            step += 1;
            if self.c.degraded && !before && self.c.rng.u8(..4) == 0 {
                // The superblocks are just being told.
                end = end.min(step + self.c.rng.u64(..64));
            }
        }
        Ok(())
    }

    /// The system is short of memory.
    fn squeeze(&mut self) {
        let Some(life) = &self.life else { return };
        // Heads that are given up while they are in use keep what they hold.
        if self.c.rng.u8(..4) == 0 {
            let stripes = pick(&mut self.c.rng, &[8, 9, 16, 32]);
            if life.array.set_stripes(stripes).is_ok() {
                self.c.log.add("# stripes from now on", [stripes as u64]);
            }
        }
        let bytes = life.array.give_way();
        self.c.log.add("# bytes are given back", [bytes]);
        self.report.given_back += bytes / 4096;
    }

    /// A spare, if there is one, is to replace a member.
    fn replace(&mut self) {
        let Some(life) = &self.life else { return };
        let place = self.c.rng.usize(..self.by_role.len());
        if life.array.replace(place).is_ok() {
            self.c.log.add("member # is to be replaced", [place as u64]);
        }
    }

    /// A member fails, unless the array has to do without one already, or needs all of them.
    fn fail_first(&mut self) {
        let without = self.life.as_ref().and_then(|l| l.array.failed());
        if without.is_some() || !self.is_synced() {
            return;
        }
        let rng = &mut self.c.rng;
        let by_role = &self.by_role;
        let victim = *self
            .victim
            .get_or_insert_with(|| by_role[rng.usize(..by_role.len())]);
        let disk = &self.disks[victim];
        self.report.losses += 1;
        let how = pick(
            rng,
            &[Failure::All, Failure::Reads, Failure::Writes, Failure::None],
        );
        match how {
            Failure::None => {
                for _ in 0..8 {
                    disk.spoil(
                        self.data_sectors[victim]
                            + rng.u64(..self.c.profile.shape.member_sectors()),
                    );
                }
                self.c.log.add("member # gets bad sectors", [victim as u64]);
            }
            how => {
                disk.fail(how);
                let how = how as u64;
                self.c.log.add("member # fails (#)", [victim as u64, how]);
            }
        }
    }

    /// Another one fails: that is the end, until the power is cut.
    fn fail_second(&mut self) {
        // Unless the array has seen the first one fail, it is the second that it does without.
        let without = self.life.as_ref().and_then(|l| l.array.failed());
        let Some(victim) = without else { return };
        let members = self.by_role.len();
        let other = self.by_role[(victim + self.c.rng.usize(1..members)) % members];
        self.disks[other].fail(Failure::All);
        self.second = Some(other);
        self.c.may_fail = true;
        self.c.log.add("member # fails too", [other as u64]);
    }

    /// Steps until everything is answered.
    pub fn rest(&mut self) -> Result<(), String> {
        for _ in 0..MOST_STEPS {
            if self.is_quiet() {
                return Ok(());
            }
            self.step(false)?;
        }
        let state = self.life.as_ref().map(|l| l.array.state().sync);
        Err(format!(
            "no end after {MOST_STEPS} steps: {:?} in flight, {state:?}",
            self.in_flight()
        ))
    }

    /// Reads everything back. `settles`: it is the first time after a cut. Returns false if the power was cut on the way.
    pub fn read_back(&mut self, settles: bool, cut: bool) -> Result<bool, String> {
        self.c.log.add("all is read back", []);
        self.c.settles = settles;
        self.c.verify = Some(0);
        let most = match cut {
            true => self.c.rng.u64(..400),
            false => MOST_STEPS,
        };
        for _ in 0..most {
            if self.is_quiet() {
                self.c.verify = None;
                self.look()?;
                return Ok(true);
            }
            self.step(self.c.verify.is_some_and(|v| v < self.shape().sectors()))?;
        }
        self.c.verify = None;
        match cut {
            true => Ok(false),
            false => {
                let state = self.life.as_ref().map(|l| l.array.state().sync);
                Err(format!(
                    "no end of reading after {MOST_STEPS} steps: {:?} in flight, {state:?}",
                    self.in_flight()
                ))
            }
        }
    }

    /// Whether all parity is right.
    fn is_synced(&self) -> bool {
        let state = self.life.as_ref().map(|l| l.array.in_sync_sectors());
        state.is_some_and(|s| s.is_none())
    }

    /// Looks at the members, while nothing is in flight.
    pub fn look(&mut self) -> Result<(), String> {
        self.c.log.add("the members are looked at", []);
        let in_sync = self.life.as_ref().and_then(|l| l.array.in_sync_sectors());
        let raw = Raw {
            shape: self.shape(),
            disks: &self.disks,
            data_sectors: &self.data_sectors,
            by_role: &self.by_role,
            missing: self.life.as_ref().and_then(|l| l.array.failed()),
            in_sync: in_sync.unwrap_or(u64::MAX),
        };
        raw.check(&self.c.oracle)
    }

    /// The power goes, for all or, without `power`, only the process dies.
    pub fn cut(&mut self) {
        if let Some(life) = &self.life {
            // Superblocks may not have been told yet.
            let told = life.array.state().sync.is_none();
            self.synced = told && self.is_synced();
        }
        let rng = &mut self.c.rng;
        let kinds = [
            Mercy::None,
            Mercy::All,
            Mercy::Sectors,
            Mercy::Sectors,
            Mercy::Writes,
        ];
        let same = rng.bool().then(|| pick(rng, &kinds));
        self.c.log.add("the power is cut", []);
        for disk in &self.disks {
            let mercy = same.unwrap_or_else(|| pick(rng, &kinds));
            self.report.lost += disk.cut(mercy, rng);
            disk.fail(Failure::None);
            // Where parity has to be made anew, nothing can be calculated from it.
            disk.mend();
        }
        self.report.cuts += 1;
        self.rebuilding = false;
        self.c.may_fail = false;
        self.c.oracle.cut();
        self.bury();
    }

    /// Nothing of the process ends in order: its destructors run as in a panic, where they don't wait for anything.
    fn bury(&mut self) {
        let Some(life) = self.life.take() else { return };
        let _ = catch_unwind(AssertUnwindSafe(move || {
            let _life = life;
            resume_unwind(Box::new(()));
        }));
    }

    /// A superblock as it is on a member now.
    pub fn superblock(&self, member: usize) -> Option<Superblock> {
        let sectors = (0..8).map(|n| self.disks[member].current(SUPER_SECTOR + n));
        let bytes: Vec<u8> = sectors.flatten().collect();
        Superblock::parse(bytes.as_slice().try_into().ok()?).ok()
    }
}
