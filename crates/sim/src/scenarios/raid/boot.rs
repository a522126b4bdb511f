//! Starting and stopping the array, with power cuts in between.

use super::array::{Array, ArrayProcess};
use super::profile::{Losses, Policy};
use super::shape::BLOCK_SECTORS;
use crate::disk::CrashDisk;
use crate::scheduler::Actors;
use crate::user::User;
use fastrand::Rng;
use pvblk_block::{BlockDevice, Error, ErrorKind};
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, BackgroundWork, Raid5, WritePath, assemble, prepare,
};
use std::sync::Arc;
use std::time::Duration;

/// Most tries of a start: each may be cut.
const MOST_STARTS: u32 = 12;
/// Turns without any movement after which a wait is taken for endless.
const MOST_TURNS: u32 = 10_000;

/// The reason why a start or a stop ended early.
enum Stop {
    Cut,
    Refused(String),
    Wrong(String),
}

/// The actors that move while a start or stop waits.
pub struct Turns<'a> {
    disks: &'a [Arc<CrashDisk>],
    rng: &'a mut Rng,
    /// Turns until the power is cut.
    left: Option<u64>,
    still: u32,
    /// Disks that stall answer again when nothing else moves: some have to be waited for.
    ends_stalls: bool,
    cut: bool,
    wrong: Option<String>,
}

impl<'a> Turns<'a> {
    pub fn new(disks: &'a [Arc<CrashDisk>], rng: &'a mut Rng, left: Option<u64>) -> Turns<'a> {
        Turns {
            disks,
            rng,
            left,
            still: 0,
            ends_stalls: false,
            cut: false,
            wrong: None,
        }
    }

    pub fn turn(&mut self) -> Result<(), Error> {
        let stop = |why: &str| Err(Error::new(ErrorKind::Os, why));
        if self.left == Some(0) {
            self.cut = true;
            return stop("the power is cut");
        }
        self.left = self.left.map(|n| n - 1);
        let at = self.rng.usize(..self.disks.len());
        self.still += 1;
        if self.disks[at].step(self.rng) {
            self.still = 0;
        }
        if let Some(why) = self.disks[at].take_trouble() {
            self.wrong = Some(why);
            return stop("trouble");
        }
        if self.ends_stalls && self.still == MOST_TURNS / 2 {
            self.disks.iter().for_each(|disk| disk.stall(false));
        }
        if self.still > MOST_TURNS {
            self.wrong = Some("somebody waits for nothing".into());
            return stop("trouble");
        }
        Ok(())
    }

    /// Stalls end when nothing else moves.
    pub fn end_stalls(&mut self) {
        self.ends_stalls = true;
    }

    /// True if the power was cut; and the fault that was found.
    pub fn end(self) -> (bool, Option<String>) {
        (self.cut, self.wrong)
    }

    /// The reason that belongs to the error of an operation.
    fn sort(self, e: Error) -> Stop {
        match (self.wrong, self.cut) {
            (Some(why), _) => Stop::Wrong(why),
            (None, true) => Stop::Cut,
            (None, false) => Stop::Refused(e.to_string()),
        }
    }
}

impl Array {
    /// Starts the array; some tries are cut on the way.
    pub fn boot(&mut self, calm: bool) -> Result<(), String> {
        self.choose_gone(calm);
        let mut force = false;
        for attempt in 0..MOST_STARTS {
            let rng = &mut self.w.rng;
            let early = attempt + 4 < MOST_STARTS;
            let cuts = !calm && early && rng.u32(..8) < self.profile.cut_starts;
            let most = [30, 300, 1500][rng.usize(..3)];
            let left = cuts.then(|| rng.u64(..most));
            self.w.log.count("starts", 1);
            match self.start(force, left) {
                Ok(()) => return Ok(()),
                Err(Stop::Cut) => {
                    // The array may have begun to compute all parity, and have said so.
                    self.synced &= self.gone;
                    self.cut();
                    self.choose_gone(calm);
                }
                Err(Stop::Wrong(why)) => return Err(why),
                // A start needs all members to be readable, except for one that is missing.
                Err(Stop::Refused(_)) if self.disks.iter().any(|d| d.repair()) => {
                    self.w.log.add("bad sectors can be read again", []);
                    self.cut();
                }
                Err(Stop::Refused(why)) => {
                    if self.w.log.verbose {
                        eprintln!("{why}");
                    }
                    let returning = self.profile.limit.is_some() && self.victim.is_some();
                    let without =
                        self.gone || self.w.array.stale || returning || self.is_called_faulty();
                    if force || !without || self.profile.policy == Policy::Ppl {
                        return Err(format!("the array doesn't start: {why}"));
                    }
                    self.w.log.add("the start is refused", []);
                    match self.gone && !self.w.array.stale && self.w.rng.bool() {
                        true => self.gone = false,
                        false => force = true,
                    }
                    self.cut();
                }
            }
        }
        Err("the array doesn't start".into())
    }

    /// True if a superblock says that a member has failed: with the planted bug not every such
    /// superblock is written.
    fn is_called_faulty(&self) -> bool {
        use pvblk_raid5::Role;
        let all = (0..self.disks.len()).filter_map(|m| self.superblock(m));
        all.into_iter().any(|s| s.roles.contains(&Role::Faulty))
    }

    fn choose_gone(&mut self, calm: bool) {
        let rng = &mut self.w.rng;
        if self.profile.losses == Losses::Starting && self.cycles > 0 && self.synced {
            let by_role = &self.by_role;
            self.victim
                .get_or_insert_with(|| by_role[rng.usize(..by_role.len())]);
        }
        let often = match self.profile.losses {
            Losses::Starting => 2,
            _ => 3,
        };
        self.gone = self.victim.is_some() && self.synced && rng.u8(..often) == 0 && !calm;
    }

    fn start(&mut self, force: bool, left: Option<u64>) -> Result<(), Stop> {
        let log = &mut self.w.log;
        log.step += 1;
        match self.victim {
            Some(v) if self.gone => log.add("the array is started without member #", [v as u64]),
            _ => log.add("the array is started", []),
        }
        let mut devices: Vec<(String, Arc<dyn BlockDevice>)> = Vec::new();
        for (n, disk) in self.disks.iter().enumerate() {
            if self.gone && self.victim == Some(n) {
                continue;
            }
            devices.push((n.to_string(), Arc::clone(disk) as Arc<dyn BlockDevice>));
        }
        self.w.rng.shuffle(&mut devices);
        let options = AssembleOptions {
            force,
            resync_later: self.profile.later,
        };
        let mut turns = Turns::new(&self.disks, &mut self.w.rng, left);
        let mut idle = || turns.turn();
        let assembled = assemble(devices, &options, &mut idle);
        let prepared = assembled.and_then(|mut assembly| {
            let dirty = assembly.dirty;
            prepare(&mut assembly, &options, &mut |_, _| {}, &mut idle)?;
            Ok((assembly, dirty))
        });
        let (assembly, dirty) = match prepared {
            Ok(prepared) => prepared,
            Err(e) => return Err(turns.sort(e)),
        };
        if self.w.log.verbose {
            assembly.notes.iter().for_each(|note| eprintln!("{note}"));
        }
        let wrong = |why: &str| Err(Stop::Wrong(why.into()));
        if dirty {
            self.w.log.add("it was dirty", []);
            if self.clean && self.bug.is_none() {
                return wrong("the array was stopped in order, and comes back dirty");
            }
        }
        let without = assembly.failed();
        let disk = |name: &str| name.parse::<usize>().ok();
        for (place, member) in assembly.members.iter().enumerate() {
            let Some(at) = member.as_ref().and_then(|m| disk(&m.name)) else {
                continue;
            };
            if self.retired.contains(&at) {
                return wrong("a member that was replaced is taken for fresh");
            }
            if self.by_role[place] != at {
                // This is the last event before the power went.
                self.w.log.add(
                    "member # has taken the place of #",
                    [at as u64, self.by_role[place] as u64],
                );
                self.take_place(place, at);
            }
        }
        for spare in assembly.spares.iter().filter(|spare| spare.is_spare()) {
            self.retired.retain(|at| Some(*at) != disk(&spare.name));
        }
        let missing = without.map(|place| self.by_role[place]);
        if let Some(member) = missing {
            self.w.log.add("it is without member #", [member as u64]);
            if self.victim != Some(member) && self.second != Some(member) {
                return wrong("the array does without a member that never failed");
            }
            self.victim = Some(member);
        } else if self.returning {
            // It was the last event before the power went.
            self.w.log.count("returned", 1);
            (self.victim, self.w.array.stale) = (None, false);
        } else if self.w.array.stale {
            return wrong("a member that missed writes is taken for fresh");
        }
        self.second = None;
        (self.kicked, self.returning) = (None, false);
        let incoming = assembly.incoming.as_ref();
        let from = incoming.filter(|i| Some(i.place) == without);
        let from = from.map_or(0, |i| i.recovered_sectors);
        let options = ArrayOptions {
            stripes: self.profile.stripes,
            path: match self.profile.queued {
                true => WritePath::StripeQueue,
                false => WritePath::Direct,
            },
            member_timeout: self.profile.limit.map(Duration::from_millis),
            re_add: self.profile.re_add,
            ..ArrayOptions::default()
        };
        let started = Raid5::start(assembly, &options);
        let array = started.map_err(|e| Stop::Refused(e.to_string()))?;
        let background = BackgroundWork::new(&array);
        let device: Arc<dyn BlockDevice> = array.clone();
        self.w.checker.started();
        let users = User::open_all(&device, &mut self.w).map_err(Stop::Wrong)?;
        // The speed is high enough for a clock that hardly moves.
        array
            .set_speed(4000, 40_000)
            .map_err(|e| Stop::Wrong(e.to_string()))?;
        self.process = Some(ArrayProcess {
            array,
            background: Some(background),
            users,
        });
        if let Some(place) = without {
            let unknown = self.degrade(place, from);
            self.w.log.count("sectors unknown", unknown);
        }
        self.clean = false;
        Ok(())
    }

    /// Stops the array in order, or cuts the power meanwhile.
    pub fn stop(&mut self, cut: bool) -> Result<(), String> {
        // An orderly end flushes all members, and waits for them.
        if let Some(disk) = self.stalled.take() {
            self.disks[disk].stall(false);
        }
        self.rest()?;
        self.look()?;
        self.w.log.add("the array is stopped", []);
        let left = cut.then(|| self.w.rng.u64(..40));
        let Some(process) = &mut self.process else {
            return Err("nobody to stop".into());
        };
        process.users.clear();
        process.background = None;
        let mut turns = Turns::new(&self.disks, &mut self.w.rng, left);
        let stopped = process.array.stop(&mut || turns.turn());
        match stopped {
            Ok(()) => {
                let now = self.w.checker.now();
                let all = self.w.checker.flush_submitted(now);
                self.w.checker.flush_done(all);
                self.clean = !self.w.may_fail;
            }
            Err(e) => match turns.sort(e) {
                Stop::Cut => {}
                // A stop fails with a member that fails meanwhile; then the array stays dirty.
                Stop::Refused(_) if self.disks.iter().any(|d| d.is_failing()) => {}
                Stop::Wrong(why) | Stop::Refused(why) => {
                    return Err(format!("stopping fails: {why}"));
                }
            },
        }
        Ok(())
    }

    /// Ends the versions of blocks that can't be computed after the array was started, after a power cut,
    /// without the member at `missing`. Where a stripe was being changed, parity and data of the others
    /// needn't fit each other. A log saves the blocks that weren't being changed themselves, and those that
    /// were changed while the member was missing already: such a change is the only one of its stripe. A kick
    /// saves what was written before its superblocks, so what is left are members that don't come back after a
    /// cut, and, without a log, what was written after the kick. Before sector `from` of the members the missing
    /// one is recovered. Returns the number of sectors whose contents are unknown.
    fn degrade(&mut self, missing: usize, from: u64) -> u64 {
        let (shape, log) = (self.shape(), self.profile.policy == Policy::Ppl);
        let checker = &mut self.w.checker;
        let mut count = 0;
        for at in from..shape.member_sectors() {
            let Some((_, sector)) = shape.column(at).find(|&(m, _)| m == missing) else {
                continue;
            };
            let changes = shape.column(at).any(|(_, s)| checker.is_open(s));
            let block = sector - sector % BLOCK_SECTORS;
            if changes && (!log || checker.is_whole(block, BLOCK_SECTORS)) {
                checker.anything(sector);
                count += 1;
            }
        }
        count
    }
}
