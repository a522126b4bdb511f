//! A cache, its users and its disk, one step at a time.

use super::planted::Bug;
use super::profile::Profile;
use super::submitter::{Common, Submitter};
use super::{Options, Report};
use crate::log::Log;
use crate::profile::pick;
use crate::raid::disk::{CrashMember, Failure};
use crate::raid::image::Mercy;
use crate::raid::oracle::Oracle;
use crate::raid::planted::MemberBug;
use fastrand::Rng;
use pvblk_block::{BlockDevice, Clock, ManualClock, Reclaim};
use pvblk_cache::{Due, Keeper, PageCache};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps in which everything must come to rest.
const MOST_STEPS: u64 = 400_000;

/// The process that has the cache.
struct Life {
    submitters: Vec<Submitter>,
    keeper: Option<Keeper>,
    keeper_due: Due,
    cache: Arc<PageCache>,
}

/// See the module's documentation.
pub struct World {
    pub c: Common,
    pub report: Report,
    disk: Arc<CrashMember>,
    clock: Arc<ManualClock>,
    life: Option<Life>,
    idle: u32,
}

impl World {
    /// A disk of zeros.
    pub fn new(seed: u64, options: &Options) -> World {
        let mut rng = Rng::with_seed(seed);
        let profile = Profile::new(&mut rng);
        let mut log = Log::new(options.verbose);
        let pages = profile.config.size_bytes / 4096;
        log.add(
            "a cache of # pages over # sectors",
            [pages, profile.sectors],
        );
        if options.verbose {
            eprintln!("{profile:?}");
        }
        let bug = match options.planted {
            Some(Bug::Disk(bug)) => Some(bug),
            _ => None,
        };
        let disk = CrashMember::new(0, profile.sectors, MemberBug::new(bug, 0));
        World {
            disk: Arc::new(disk.with_zeroes()),
            clock: Arc::new(ManualClock::default()),
            life: None,
            report: Report::default(),
            idle: 0,
            c: Common {
                oracle: Oracle::new(profile.sectors, false),
                rng,
                log,
                writes: 0,
                requests: 0,
                may_fail: false,
                next: 0,
                verify: None,
                settles: false,
                profile,
            },
        }
    }

    /// A new cache and its users.
    pub fn boot(&mut self) -> Result<(), String> {
        self.c.log.add("a cache is made", []);
        let (p, clock) = (&self.c.profile, Arc::clone(&self.clock));
        let disk: Arc<dyn BlockDevice> = self.disk.clone();
        let cache = PageCache::with_clock(&p.config, disk, clock).map_err(|e| e.to_string())?;
        let cache = Arc::new(cache);
        let device: Arc<dyn BlockDevice> = cache.clone();
        let depths = p.depths.iter().zip(0..);
        let open = |(&depth, n)| Submitter::new(&device, n, depth);
        self.life = Some(Life {
            submitters: depths.map(open).collect::<Result<_, _>>()?,
            keeper: p.kept.then(|| Keeper::new(&cache)),
            keeper_due: Due::Now,
            cache,
        });
        Ok(())
    }

    fn step(&mut self, fill: bool) -> Result<(), String> {
        self.c.log.step += 1;
        let Some(life) = &self.life else {
            return Err("nobody is there".into());
        };
        if self.c.rng.u8(..16) == 0 {
            life.cache.check()?;
        }
        let [s, d, k] = self.c.profile.pace.map(|p| p as usize);
        let submitters = life.submitters.len();
        let keepers = if life.keeper.is_some() { k } else { 0 };
        let at = self.c.rng.usize(..submitters * s + d + keepers);
        let actor = match at.checked_sub(submitters * s) {
            None => at % submitters,
            Some(at) => submitters + usize::from(at >= d),
        };
        if self.act(actor, fill)? {
            self.idle = 0;
            return Ok(());
        }
        self.idle += 1;
        if self.idle < 64 {
            return Ok(());
        }
        self.idle = 0;
        self.wake_all(fill)
    }

    /// Nobody who was asked had anything to do. Asks all of them, and twice, since one who finds nothing arms and looks again; then time passes.
    fn wake_all(&mut self, fill: bool) -> Result<(), String> {
        let actors = self.life.as_ref().map_or(0, |l| l.submitters.len()) + 2;
        for _ in 0..3 {
            for actor in 0..actors {
                if self.act(actor, fill)? {
                    return Ok(());
                }
            }
        }
        let Some(life) = &self.life else {
            return Ok(());
        };
        let sleepers = life.submitters.iter().filter_map(Submitter::deadline);
        let keeper = match life.keeper_due {
            Due::At(at) => Some(at),
            _ => None,
        };
        match sleepers.chain(keeper).min() {
            Some(at) => {
                self.c.log.add("time passes", []);
                self.clock.advance_to(at);
                Ok(())
            }
            None if fill || self.is_quiet() => Ok(()),
            None => Err(format!(
                "everybody sleeps, and requests are in flight: {:?}: {}",
                self.in_flight(),
                life.cache.unfinished()
            )),
        }
    }

    /// Submitters first, then the disk, then the keeper. Whether it did anything.
    fn act(&mut self, actor: usize, fill: bool) -> Result<bool, String> {
        let Some(life) = &mut self.life else {
            return Ok(false);
        };
        let now: Instant = self.clock.now();
        let submitters = life.submitters.len();
        if actor < submitters {
            return life.submitters[actor].step(&mut self.c, now, fill);
        }
        if actor > submitters {
            let Some(keeper) = &mut life.keeper else {
                return Ok(false);
            };
            life.keeper_due = keeper.step();
            return Ok(life.keeper_due == Due::Now);
        }
        let moved = self.disk.step(&mut self.c.rng);
        if moved {
            self.c.log.add("the disk moves", []);
        }
        match self.disk.take_trouble() {
            Some(why) => Err(why),
            None => Ok(moved),
        }
    }

    fn in_flight(&self) -> Vec<usize> {
        let life = self.life.iter().flat_map(|l| &l.submitters);
        life.map(Submitter::in_flight).collect()
    }

    fn unfinished(&self) -> String {
        let life = self.life.as_ref();
        life.map_or(String::new(), |l| l.cache.unfinished())
    }

    fn is_quiet(&self) -> bool {
        let reads = self.c.verify.is_some_and(|v| v < self.c.profile.sectors);
        !reads && self.in_flight().iter().all(|&n| n == 0)
    }

    /// A cycle's work, and what goes wrong meanwhile.
    pub fn work(&mut self) -> Result<(), String> {
        let steps = self.c.rng.u64(1..=self.c.profile.steps);
        let fails = self.c.profile.fails && self.c.rng.bool();
        let first = self.c.rng.u64(..steps);
        let last = first + self.c.rng.u64(..=(steps - first).min(200));
        self.c.verify = None;
        for step in 0..steps {
            if fails && step == first {
                let kinds = [
                    Failure::Writes,
                    Failure::Writes,
                    Failure::Reads,
                    Failure::All,
                ];
                let how = pick(&mut self.c.rng, &kinds);
                self.c.log.add("the disk fails (#)", [how as u64]);
                self.disk.fail(how);
                self.c.may_fail = true;
                self.report.failures += 1;
            }
            if fails && step == last {
                self.c.log.add("the disk works again", []);
                self.disk.fail(Failure::None);
            }
            if self.c.profile.squeezes && self.c.rng.u8(..32) == 0 {
                self.squeeze();
            }
            if self.c.rng.u8(..64) == 0 {
                self.clock
                    .advance(Duration::from_millis(self.c.rng.u64(..8)));
            }
            self.step(true)?;
        }
        self.disk.fail(Failure::None);
        Ok(())
    }

    /// The system is short of memory.
    fn squeeze(&mut self) {
        let Some(life) = &self.life else { return };
        let bytes = life.cache.give_way();
        self.c.log.add("# bytes are given back", [bytes]);
        self.report.given_back += bytes / 4096;
    }

    /// Steps until everything is answered.
    pub fn rest(&mut self) -> Result<(), String> {
        for _ in 0..MOST_STEPS {
            if self.is_quiet() {
                return Ok(());
            }
            self.step(false)?;
        }
        Err(format!(
            "no end after {MOST_STEPS} steps: {:?} in flight: {}",
            self.in_flight(),
            self.unfinished()
        ))
    }

    /// Reads everything back. `settles`: it is the first time after a cut. Returns false if the power was cut on the way.
    pub fn read_back(&mut self, settles: bool, cut: bool) -> Result<bool, String> {
        self.c.log.add("all is read back", []);
        self.c.settles = settles;
        self.c.verify = Some(0);
        let most = match cut {
            true => self.c.rng.u64(..200),
            false => MOST_STEPS,
        };
        let mut quiet = false;
        for _ in 0..most {
            quiet = self.is_quiet();
            if quiet {
                break;
            }
            self.step(self.c.verify.is_some_and(|v| v < self.c.profile.sectors))?;
        }
        self.c.verify = None;
        match quiet || cut {
            true => Ok(quiet),
            false => Err(format!(
                "no end of reading after {MOST_STEPS} steps: {:?} in flight: {}",
                self.in_flight(),
                self.unfinished()
            )),
        }
    }

    /// The power goes.
    pub fn cut(&mut self) {
        if let Some(life) = &self.life {
            let c = life.cache.counters();
            self.report.dirty += c.nr_dirty + c.nr_writeback;
            self.report.reclaimed += c.pgsteal_direct + c.pgsteal_kswapd;
            self.report.stalls += c.stalls;
            self.report.throttled += c.throttled;
            self.report.ahead += c.readahead_pages;
        }
        let kinds = [
            Mercy::None,
            Mercy::None,
            Mercy::All,
            Mercy::Sectors,
            Mercy::Writes,
        ];
        let mercy = pick(&mut self.c.rng, &kinds);
        self.c.log.add("the power is cut", []);
        self.report.lost += self.disk.cut(mercy, &mut self.c.rng);
        self.report.cuts += 1;
        self.disk.fail(Failure::None);
        self.c.may_fail = false;
        self.c.oracle.cut();
        // Nothing of the process ends in order: its destructors run as in a panic, where they don't wait for anything.
        let Some(life) = self.life.take() else { return };
        let _ = catch_unwind(AssertUnwindSafe(move || {
            let _life = life;
            resume_unwind(Box::new(()));
        }));
    }
}
