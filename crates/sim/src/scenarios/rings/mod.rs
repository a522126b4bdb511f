//! The whole path between a workload and its disk: the same front end, rings, lanes and parser as in
//! production.
//!
//! ```text
//!   users ── Frontend ── rings ── Lanes ── CrashDisk
//!     │      └ process ┘          └ process ┘   │
//!     └───────── Checker: what may a sector hold? ┘
//! ```
//!
//! Either process dies between two steps or in the middle of a call ([`crate::fuse`]). The disk may lose its
//! cache, rings are broken, and connections are closed and follow one another with the real handshake.
//! docs/decisions/0006-reconnect.md says what must hold.

mod channel;
mod memory;
mod profile;
mod server;
mod trouble;

use crate::bugs::{Bug, Code, logic};
use crate::disk::{CrashDisk, DiskSetup, Sabotage};
use crate::fuse::{Fuse, Killed, Side};
use crate::log::Log;
use crate::scheduler::{Actors, Group};
use crate::user::User;
use crate::workload::Workload;
use crate::{ScenarioState, panicked};
use fastrand::Rng;
use memory::{FrontMemory, SimGranter};
use profile::RingsProfile;
use pvblk_block::{Buffer, memory as bill};
use pvblk_client::rings::{Frontend, LimitBounds, MergePolicy};
use server::Server;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub fn bugs() -> Vec<Bug> {
    let mut all = vec![
        Bug::AckBeforeWrite,
        Bug::FlushOneQueue,
        Bug::LockBeforeIo,
        Bug::ReplayAnswered,
        Bug::IgnoreCacheMark,
    ];
    all.extend(logic(Code::FrontEnd));
    all
}

/// The policy that serves, with limits that few requests reach.
pub enum LowLimits {}

impl MergePolicy for LowLimits {
    const IN_FLIGHT: Option<LimitBounds> = Some(LimitBounds { least: 1, first: 2 });
}

/// Time of one step of the disk: limits in flight are tried for a while each. Nothing waits for a time: whoever would, hangs.
const DISK_TIME: Duration = Duration::from_micros(300);

/// The front end's process.
pub struct Front {
    /// The device under test.
    device: Arc<Frontend<LowLimits>>,
    users: Vec<User>,
    memory: Arc<FrontMemory>,
    /// Granter of the connection, or of the last one.
    granter: Arc<SimGranter>,
    /// Frames of that connection's rings: of all, and of each.
    ring_frames: (usize, usize),
    /// There is no connection, so requests wait.
    suspended: bool,
    /// Segments of a request that the back end has granted.
    segments: u16,
    /// Memory that its users took in addition.
    hoard: Vec<Buffer>,
    /// Pages that were free before users had taken any.
    free_pages: usize,
}

/// The state of the scenario.
pub struct Rings {
    w: Workload,
    profile: RingsProfile,
    /// The disk survives both processes.
    disk: Arc<CrashDisk>,
    /// `None` while the front end's process is dead.
    front: Option<Front>,
    /// `None` while the server's process is dead.
    server: Option<Server>,
    /// Memory of a dead front end that lanes may still use.
    orphan: Option<Arc<FrontMemory>>,
    /// Counter of calls, at one of which a process dies.
    fuse: Arc<Fuse>,
    /// At this step the process dies between two steps, if it hasn't died at a call until then.
    doomed: Option<(u64, Side)>,
    /// Both processes die together.
    together: bool,
    /// Kills, ends and broken rings that are still to come.
    troubles: u32,
    /// A ring of this connection was overwritten.
    disturbed: bool,
    /// No process dies any more, and no request is submitted.
    ending: bool,
    /// Name on the memory bill.
    name: String,
}

impl ScenarioState for Rings {
    fn new(seed: u64, bug: Option<Bug>, log: Log) -> Result<Rings, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut rng = Rng::with_seed(seed);
        let profile = RingsProfile::new(&mut rng);
        if log.verbose {
            eprintln!("{profile:?}");
        }
        let fuse = Arc::new(Fuse::default());
        let disk = CrashDisk::new(DiskSetup {
            sectors: profile.load.sectors,
            zeroes: profile.discard,
            marks: profile.mark_known,
            stamped: true,
            sabotage: Sabotage::new(bug),
            fuse: Arc::clone(&fuse),
            ..DiskSetup::default()
        });
        Ok(Rings {
            disk: Arc::new(disk),
            troubles: profile.troubles,
            w: Workload::new(rng, log, profile.load.clone(), true, bug),
            profile,
            front: None,
            server: None,
            orphan: None,
            fuse,
            doomed: None,
            together: false,
            disturbed: false,
            ending: false,
            name: format!("sim {}", NEXT.fetch_add(1, Ordering::Relaxed)),
        })
    }

    fn drive(&mut self) -> Result<(), String> {
        for _ in 0..self.profile.steps {
            self.guarded(|r| r.step(true))?;
        }
        self.ending = true;
        self.troubles = 0;
        if let Some((_, side)) = self.doomed {
            self.kill(side)?;
        }
        if let Some(front) = &self.front {
            front.granter.be_generous();
        }
        self.rest()?;
        self.read_back(None)?;
        self.take_down()
    }

    fn log(&mut self) -> &mut Log {
        &mut self.w.log
    }
}

impl Actors for Rings {
    fn dice(&mut self) -> &mut Rng {
        &mut self.w.rng
    }

    fn workload(&mut self) -> Option<&mut Workload> {
        Some(&mut self.w)
    }

    /// Users, lanes, the disk, and the actor that starts, stops and watches processes.
    fn groups(&self) -> [Group; 5] {
        let [users, lanes, disk] = self.profile.pace;
        [
            (self.users().len(), users),
            (self.lanes(), lanes),
            (1, disk),
            (1, 2),
            (0, 0),
        ]
    }

    fn act(&mut self, actor: usize, fill: bool) -> Result<bool, String> {
        let (users, lanes) = (self.users().len(), self.lanes());
        let moved = match &mut self.front {
            Some(front) if actor < users => front.users[actor].step(&mut self.w, fill)?,
            _ if actor < users + lanes => self.lane(actor - users)?,
            _ if actor == users + lanes => {
                let moved = self.disk.step(&mut self.w.rng);
                if moved {
                    self.w.log.add("the disk moves", []);
                    self.w.log.clock.advance(DISK_TIME);
                }
                moved
            }
            _ => self.control()?,
        };
        self.disk.take_trouble().map_or(Ok(moved), Err)
    }

    fn users(&self) -> &[User] {
        self.front.as_ref().map_or(&[], |f| &f.users)
    }

    fn is_settled(&self) -> bool {
        let serves = self.server.as_ref();
        serves.is_some_and(|s| !s.ending && s.lanes() > 0)
            && self.front.as_ref().is_some_and(|f| !f.suspended)
            && self.disk.busy() + self.disk.late() == 0
    }
}

impl Rings {
    /// Calls `f`. A process that dies in it is taken away; any other panic is a finding.
    fn guarded(&mut self, f: fn(&mut Rings) -> Result<(), String>) -> Result<(), String> {
        match catch_unwind(AssertUnwindSafe(|| f(self))) {
            Ok(result) => result,
            Err(payload) => match payload.downcast::<Killed>() {
                Ok(killed) => {
                    self.w.log.add("a process dies in the middle of a call", []);
                    self.w.log.count("kills in the middle of a call", 1);
                    self.kill(killed.0)
                }
                Err(payload) => Err(panicked(&*payload)),
            },
        }
    }

    fn lanes(&self) -> usize {
        self.server.as_ref().map_or(0, Server::lanes)
    }

    fn lane(&mut self, lane: usize) -> Result<bool, String> {
        let Some(server) = &mut self.server else {
            return Ok(false);
        };
        let spurious = !self.ending && self.w.rng.u8(..32) == 0;
        let log = &mut self.w.log;
        match server.step(lane, spurious) {
            Ok(moved) => {
                if moved {
                    log.add("lane # moves", [lane as u64]);
                }
                Ok(moved)
            }
            Err(why) if !self.disturbed => Err(why),
            Err(_) => {
                log.add("lane # finds its ring broken", [lane as u64]);
                server.stop();
                Ok(true)
            }
        }
    }

    /// Takes both processes down, and checks that everything is given back.
    fn take_down(&mut self) -> Result<(), String> {
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
        if self.profile.load.batch == 1 {
            // Nothing is merged in the plug.
            let merged = front.users.iter().map(User::merged).sum();
            self.w.log.count("merged while they waited", merged);
        }
        self.check_frames()?;
        self.server = None;
        let Some(front) = self.front.take() else {
            return Ok(());
        };
        let memory = front.memory.clone();
        drop(front);
        memory.give_back()?;
        let ours = |l: &bill::MemoryLine| l.owner.starts_with(&format!("{}:", self.name));
        match bill::bill().iter().find(|l| ours(l)) {
            Some(line) => Err(format!("still on the memory bill: {}", line.owner)),
            None => Ok(()),
        }
    }
}
