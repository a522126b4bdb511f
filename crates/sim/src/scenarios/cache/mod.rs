//! A page cache whose machine loses power: the cache of production on a disk that loses its own cache and
//! fails now and then.
//!
//! ```text
//!   users ── PageCache ── CrashDisk
//!     │    background work        │
//!     └── Checker ────────────┘   what may a sector hold?
//! ```
//!
//! After each cut everything is read back, through a new cache. docs/decisions/0012-page-cache.md says what must hold.

mod profile;

use crate::bugs::{Bug, Code, logic};
use crate::disk::{Crash, CrashDisk, DiskSetup, Fails, Sabotage, Survives};
use crate::log::Log;
use crate::scheduler::{Actors, Group};
use crate::user::User;
use crate::workload::Workload;
use crate::{ScenarioState, drop_killed, pick};
use fastrand::Rng;
use profile::CacheProfile;
use pvblk_block::{BlockDevice, Clock, Reclaim};
use pvblk_cache::{BackgroundWork, Due, PageCache};
use std::sync::Arc;
use std::time::Duration;

pub fn bugs() -> Vec<Bug> {
    let all = [
        Bug::FuaForgotten,
        Bug::FlushOneQueue,
        Bug::AckBeforeWrite,
        Bug::FlushSkipsWriting,
        Bug::FlushNotPassed,
        Bug::FuaOnlyCached,
        Bug::FailedIsClean,
    ];
    all.into_iter().chain(logic(Code::Cache)).collect()
}

/// The process that has the cache.
struct CacheProcess {
    users: Vec<User>,
    background: Option<BackgroundWork>,
    background_due: Due,
    cache: Arc<PageCache>,
}

/// The state of the scenario.
pub struct Cached {
    w: Workload,
    profile: CacheProfile,
    disk: Arc<CrashDisk>,
    process: Option<CacheProcess>,
}

impl ScenarioState for Cached {
    fn new(seed: u64, bug: Option<Bug>, mut log: Log) -> Result<Cached, String> {
        let mut rng = Rng::with_seed(seed);
        let profile = CacheProfile::new(&mut rng);
        let pages = profile.config.size_bytes / 4096;
        let sectors = profile.load.sectors;
        log.add("a cache of # pages over # sectors", [pages, sectors]);
        if log.verbose {
            eprintln!("{profile:?}");
        }
        let setup = DiskSetup {
            sectors,
            zeroes: true,
            stamped: true,
            sabotage: Sabotage::new(bug),
            ..DiskSetup::default()
        };
        Ok(Cached {
            disk: Arc::new(CrashDisk::new(setup)),
            process: None,
            w: Workload::new(rng, log, profile.load.clone(), true, bug),
            profile,
        })
    }

    fn drive(&mut self) -> Result<(), String> {
        for _ in 0..self.profile.cycles {
            self.boot()?;
            // Now and then the new cache isn't read back before there is work.
            let looks = self.w.rng.u8(..8) > 0;
            let cut = self.w.rng.u8(..8) == 0;
            let most = (looks && cut).then(|| self.w.rng.u64(..200));
            if !looks || self.read_back(most)? {
                self.work()?;
                if self.w.rng.u8(..4) == 0 {
                    self.rest()?;
                    self.read_back(None)?;
                }
            }
            self.cut();
        }
        self.boot()?;
        self.read_back(None)?;
        self.cut();
        Ok(())
    }

    fn log(&mut self) -> &mut Log {
        &mut self.w.log
    }
}

impl Actors for Cached {
    fn dice(&mut self) -> &mut Rng {
        &mut self.w.rng
    }

    fn workload(&mut self) -> Option<&mut Workload> {
        Some(&mut self.w)
    }

    /// Users, the disk, the background thread.
    fn groups(&self) -> [Group; 5] {
        let background = self.process.as_ref().and_then(|p| p.background.as_ref());
        let [users, disk, keeps] = self.profile.pace;
        let keeps = if background.is_some() { keeps } else { 0 };
        let none = (0, 0);
        [
            (self.users().len(), users),
            (1, disk),
            (1, keeps),
            none,
            none,
        ]
    }

    fn look_around(&mut self) -> Result<(), String> {
        match &self.process {
            Some(process) if self.w.rng.u8(..16) == 0 => process.cache.check(),
            _ => Ok(()),
        }
    }

    fn act(&mut self, actor: usize, fill: bool) -> Result<bool, String> {
        let Some(process) = &mut self.process else {
            return Ok(false);
        };
        let users = process.users.len();
        if actor < users {
            return process.users[actor].step(&mut self.w, fill);
        }
        if actor > users {
            let Some(background) = &mut process.background else {
                return Ok(false);
            };
            process.background_due = background.step();
            return Ok(process.background_due == Due::Now);
        }
        let moved = self.disk.step(&mut self.w.rng);
        if moved {
            self.w.log.add("the disk moves", []);
        }
        self.disk.take_trouble().map_or(Ok(moved), Err)
    }

    fn pass_time(&mut self) -> bool {
        let Some(process) = &self.process else {
            return false;
        };
        let sleepers = process.users.iter().filter_map(User::deadline);
        let background = match process.background_due {
            Due::At(at) => Some(at),
            _ => None,
        };
        let next = sleepers.chain(background).min();
        if let Some(at) = next {
            self.w.log.add("time passes", []);
            self.w.log.clock.advance_to(at);
        }
        next.is_some()
    }

    fn users(&self) -> &[User] {
        self.process.as_ref().map_or(&[], |p| &p.users)
    }

    fn is_settled(&self) -> bool {
        true
    }

    fn unfinished(&self) -> String {
        let process = self.process.as_ref();
        process.map_or(String::new(), |p| p.cache.unfinished())
    }
}

impl Cached {
    /// Makes a new cache and its users.
    fn boot(&mut self) -> Result<(), String> {
        self.w.log.add("a cache is made", []);
        self.w.checker.started();
        let clock: Arc<dyn Clock> = self.w.log.clock.clone();
        let disk: Arc<dyn BlockDevice> = self.disk.clone();
        let cache = PageCache::with_clock(&self.profile.config, disk, clock);
        let cache = Arc::new(cache.map_err(|e| e.to_string())?);
        let device: Arc<dyn BlockDevice> = cache.clone();
        self.process = Some(CacheProcess {
            users: User::open_all(&device, &mut self.w)?,
            background: self.profile.kept.then(|| BackgroundWork::new(&cache)),
            background_due: Due::Now,
            cache,
        });
        Ok(())
    }

    /// Runs a cycle's work, and its faults.
    fn work(&mut self) -> Result<(), String> {
        let steps = self.w.rng.u64(1..=self.profile.steps);
        let fails = self.profile.fails && self.w.rng.bool();
        let first = self.w.rng.u64(..steps);
        let last = first + self.w.rng.u64(..=(steps - first).min(200));
        for step in 0..steps {
            if fails && step == first {
                let kinds = [Fails::Writes, Fails::Writes, Fails::Reads, Fails::All];
                let how = pick(&mut self.w.rng, &kinds);
                self.w.log.add("the disk fails (#)", [how as u64]);
                self.disk.fail(how);
                self.w.may_fail = true;
                self.w.log.count("disk failures", 1);
            }
            if fails && step == last {
                self.w.log.add("the disk works again", []);
                self.disk.fail(Fails::Nothing);
            }
            if self.profile.squeezes && self.w.rng.u8(..32) == 0 {
                self.squeeze();
            }
            if self.w.rng.u8(..64) == 0 {
                let by = Duration::from_millis(self.w.rng.u64(..8));
                self.w.log.clock.advance(by);
            }
            self.step(true)?;
        }
        self.disk.fail(Fails::Nothing);
        Ok(())
    }

    /// Takes memory from the cache, as when the system is short of it.
    fn squeeze(&mut self) {
        let Some(process) = &self.process else { return };
        let bytes = process.cache.give_way();
        self.w.log.add("# bytes are given back", [bytes]);
        self.w.log.count("pages given back", bytes / 4096);
    }

    /// Cuts the power.
    fn cut(&mut self) {
        let log = &mut self.w.log;
        if let Some(process) = &self.process {
            let c = process.cache.counters();
            log.count("pages dirty at cuts", c.nr_dirty + c.nr_writeback);
            log.count("pages reclaimed", c.pgsteal_direct + c.pgsteal_kswapd);
            log.count("stalls", c.stalls);
            log.count("throttled writers", c.throttled);
            log.count("pages read ahead", c.readahead_pages);
        }
        let kinds = [
            Survives::Nothing,
            Survives::Nothing,
            Survives::Everything,
            Survives::AnyVersions,
            Survives::WholeWrites,
        ];
        let survives = pick(&mut self.w.rng, &kinds);
        log.add("the power is cut", []);
        let lost = self.disk.crash(Crash::Power(survives), &mut self.w.rng);
        log.count("cuts", 1);
        log.count("sectors in the disk's cache at cuts", lost);
        self.disk.fail(Fails::Nothing);
        self.w.may_fail = false;
        self.w.checker.abandon();
        self.w.checker.cache_lost();
        drop_killed(self.process.take());
    }
}
