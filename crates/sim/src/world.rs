//! [`World`]: two processes, a disk, and a scheduler that decides who moves next and who dies.

use crate::checker::Checker;
use crate::disk::{CrashDisk, DiskSetup};
use crate::fuse::{Fuse, Side};
use crate::log::Log;
use crate::memory::{FrontMemory, SimGranter};
use crate::profile::{Profile, pick};
use crate::server::Server;
use crate::submitter::{Submitter, Workload};
use crate::{Options, Report};
use fastrand::Rng;
use pvblk_block::{Buffer, memory};
use pvblk_frontend::Frontend;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Steps in which everything must come to rest.
const MOST_STEPS: u64 = 60_000;

/// The front end's process.
pub struct Front {
    /// The device under test.
    pub device: Arc<Frontend>,
    /// Its users.
    pub submitters: Vec<Submitter>,
    /// Its memory.
    pub memory: Arc<FrontMemory>,
    /// Of its connection, or of the last one.
    pub granter: Arc<SimGranter>,
    /// Frames of that connection's rings: of all, and of each.
    pub ring_frames: (usize, usize),
    /// Nothing to talk to: requests wait.
    pub suspended: bool,
    /// Segments of a request that it was promised.
    pub segments: u16,
    /// Memory that its users took besides.
    pub hoard: Vec<Buffer>,
    /// Pages that were free when nobody had taken any.
    pub free_pages: usize,
}

/// See the module's documentation.
pub struct World {
    /// What submitters share.
    pub w: Workload,
    /// The disk survives everybody.
    pub disk: Arc<CrashDisk>,
    /// Alive, or not.
    pub front: Option<Front>,
    /// Alive, or not.
    pub server: Option<Server>,
    /// Memory of a dead front end that lanes may still use.
    pub orphan: Option<Arc<FrontMemory>>,
    /// Cuts calls.
    pub fuse: Arc<Fuse>,
    /// The fuse is doused at this step, and who was to die dies between two steps.
    pub doomed: Option<(u64, Side)>,
    /// Both die together.
    pub together: bool,
    /// Kills, ends and broken rings to come.
    pub troubles: u32,
    /// A ring of this connection was written over.
    pub disturbed: bool,
    /// Nobody dies any more, and nothing new is submitted.
    pub ending: bool,
    /// For the memory bill.
    pub name: String,
    /// What happened, in numbers.
    pub report: Report,
    idle: u32,
}

impl World {
    /// A disk, and nobody who uses it.
    pub fn new(seed: u64, options: &Options) -> World {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut rng = Rng::with_seed(seed);
        let profile = Profile::new(&mut rng);
        let fuse = Arc::new(Fuse::default());
        let setup = DiskSetup {
            sectors: profile.sectors,
            discard: profile.discard,
            mark_known: profile.mark_known,
            planted: options.planted,
        };
        World {
            disk: Arc::new(CrashDisk::new(setup, &fuse)),
            troubles: profile.troubles,
            w: Workload {
                checker: Checker::new(profile.sectors),
                rng,
                log: Log::new(options.verbose),
                profile,
                requests: 0,
            },
            front: None,
            server: None,
            orphan: None,
            fuse,
            doomed: None,
            together: false,
            disturbed: false,
            ending: false,
            name: format!("sim {}", NEXT.fetch_add(1, Ordering::Relaxed)),
            report: Report::default(),
            idle: 0,
        }
    }

    /// One step of somebody. To be called again after a [`crate::fuse::Killed`] was caught and told to [`World::kill`].
    pub fn step(&mut self) -> Result<(), String> {
        self.w.log.step += 1;
        let moved = match self.choose() {
            Some(actor) => self.act(actor)?,
            None => self.control()?,
        };
        if let Some(why) = self.disk.take_trouble() {
            return Err(why);
        }
        if moved {
            self.idle = 0;
            return Ok(());
        }
        self.idle += 1;
        if self.idle < 64 || !self.ending {
            return Ok(());
        }
        // Nobody who was asked had anything to do. Ask all of them.
        self.idle = 0;
        let mut any = self.control()?;
        for actor in 0..self.actors() {
            any |= self.act(actor)?;
        }
        if any || self.is_quiet() {
            return Ok(());
        }
        let in_flight = |f: &Front| {
            f.submitters
                .iter()
                .map(Submitter::in_flight)
                .collect::<Vec<_>>()
        };
        Err(format!(
            "everybody sleeps, and requests are in flight: {:?}",
            self.front.as_ref().map(in_flight)
        ))
    }

    fn submitters(&self) -> usize {
        self.front.as_ref().map_or(0, |f| f.submitters.len())
    }

    fn lanes(&self) -> usize {
        self.server.as_ref().map_or(0, Server::lanes)
    }

    /// Submitters, lanes, the disk.
    fn actors(&self) -> usize {
        self.submitters() + self.lanes() + 1
    }

    /// Who moves; nobody means control.
    fn choose(&mut self) -> Option<usize> {
        let (submitters, lanes) = (self.submitters(), self.lanes());
        let [s, l, d] = self.w.profile.pace.map(|p| p as usize);
        let shares = [submitters * s, lanes * l, d];
        let mut at = self.w.rng.usize(..shares.iter().sum::<usize>() + 2);
        let counts = [submitters, lanes, 1];
        let mut first = 0;
        for (share, count) in shares.into_iter().zip(counts) {
            if at < share {
                return Some(first + at % count);
            }
            at -= share;
            first += count;
        }
        None
    }

    fn act(&mut self, actor: usize) -> Result<bool, String> {
        let (submitters, lanes) = (self.submitters(), self.lanes());
        if actor < submitters
            && let Some(front) = &mut self.front
        {
            return front.submitters[actor].step(&mut self.w, !self.ending);
        }
        if actor < submitters + lanes
            && let Some(server) = &mut self.server
        {
            let lane = actor - submitters;
            let spurious = !self.ending && self.w.rng.u8(..32) == 0;
            match server.step(lane, spurious) {
                Ok(moved) => {
                    if moved {
                        self.w.log.add("lane # moves", [lane as u64]);
                    }
                    return Ok(moved);
                }
                Err(why) if !self.disturbed => return Err(why),
                Err(_) => {
                    self.w
                        .log
                        .add("lane # finds its ring broken", [lane as u64]);
                    server.stop();
                    return Ok(true);
                }
            }
        }
        let moved = self.disk.step(&mut self.w.rng);
        if moved {
            self.w.log.add("the disk moves", []);
        }
        Ok(moved)
    }

    /// True if nothing is in flight, and all stands.
    pub fn is_quiet(&self) -> bool {
        let serves = self
            .server
            .as_ref()
            .is_some_and(|s| !s.ending && s.lanes() > 0);
        let front = self.front.as_ref();
        serves
            && front
                .is_some_and(|f| !f.suspended && f.submitters.iter().all(|s| s.in_flight() == 0))
    }

    /// Steps until everything is answered. Nobody dies any more.
    pub fn come_to_rest(&mut self) -> Result<(), String> {
        self.ending = true;
        self.troubles = 0;
        if let Some((_, side)) = self.doomed {
            self.kill(side)?;
        }
        if let Some(front) = &self.front {
            front.granter.be_generous();
        }
        for _ in 0..MOST_STEPS {
            if self.is_quiet() && !self.disk.is_busy() {
                return Ok(());
            }
            self.step()?;
        }
        Err(format!("no end after {MOST_STEPS} steps"))
    }

    /// Reads the whole disk.
    pub fn read_back(&mut self) -> Result<(), String> {
        self.w.log.add("all is read back", []);
        let mut from = 0;
        while from < self.w.profile.sectors {
            if let Some(front) = &mut self.front {
                let submitter = pick(&mut self.w.rng, &[0, front.submitters.len() - 1]);
                from = front.submitters[submitter].read_back(&mut self.w, from);
            }
            self.come_to_rest()?;
        }
        Ok(())
    }

    /// Takes everything down, and looks at what is left over.
    pub fn take_down(&mut self) -> Result<(), String> {
        let Some(front) = &mut self.front else {
            return Err("there is no front end".into());
        };
        let live = front.granter.live_data(front.ring_frames.0);
        if !front.granter.is_persistent() && live > 0 {
            return Err(format!("{live} grants are left over"));
        }
        let mapped = front.memory.uses();
        if mapped > 0 {
            return Err(format!(
                "{mapped} references are still mapped, and nothing is in flight"
            ));
        }
        self.check_frames()?;
        self.server = None;
        let Some(front) = self.front.take() else {
            return Ok(());
        };
        let memory = front.memory.clone();
        drop(front);
        memory.give_back()?;
        let ours = |l: &memory::MemoryLine| l.owner.starts_with(&format!("{}:", self.name));
        match memory::bill().iter().find(|l| ours(l)) {
            Some(line) => Err(format!("still on the memory bill: {}", line.owner)),
            None => Ok(()),
        }
    }
}
