//! Deaths and starts of processes, and ends of connections.

use super::memory::{FrontMemory, SimGranter};
use super::profile::Offers;
use super::server::{Server, Wires, handshake};
use super::{Front, LowLimits, Rings};
use crate::disk::{Crash, Survives};
use crate::fuse::Side;
use crate::pick;
use crate::user::User;
use pvblk_block::{BlockDevice, Buffers};
use pvblk_client::rings::{FrontParts, Frontend};
use pvblk_sys::PAGE_SIZE;
use std::sync::Arc;

/// Offsets of the producers' indices on a ring's first page (ring.h).
const REQ_PROD: usize = 0;
const RSP_PROD: usize = 8;

/// Kinds of faults.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    KillBack,
    KillFront,
    KillBoth,
    Close,
    BreakRequests,
    BreakAnswers,
}

impl Rings {
    /// One step of the actor that starts, stops and watches processes; false if there was nothing
    /// to do.
    pub fn control(&mut self) -> Result<bool, String> {
        if let Some((step, side)) = self.doomed
            && self.w.log.step >= step
        {
            self.kill(side)?;
            return Ok(true);
        }
        let patient = |w: &mut Rings, one_in: u8| w.ending || w.w.rng.u8(..one_in) == 0;
        let lanes = self.server.as_ref().map_or(0, Server::lanes);
        let Some(front) = &mut self.front else {
            if lanes == 0 && self.is_locked_out() {
                return Ok(false);
            }
            if lanes == 0 {
                self.start_front()?;
                return Ok(true);
            }
            return self.end_orphan();
        };
        let trouble = front.device.take_trouble();
        let suspended = front.suspended;
        if let Some(why) = trouble {
            if !self.disturbed {
                return Err(format!("the front end says that {why}"));
            }
            self.w.log.add("the front end finds its ring broken", []);
            self.suspend();
            if let Some(server) = &mut self.server {
                server.stop();
            }
            return Ok(true);
        }
        let ending = self.server.as_mut().is_some_and(|s| s.ending);
        if lanes == 0 || ending {
            if !suspended && patient(self, 4) {
                self.suspend();
                return Ok(true);
            }
            if lanes > 0 {
                let over = self.server.as_mut().is_some_and(Server::has_ended);
                if over {
                    self.w.log.add("the lanes have ended", []);
                }
                return Ok(over);
            }
            if suspended && patient(self, 3) {
                if self.is_locked_out() {
                    return Ok(false);
                }
                self.reconnect()?;
                return Ok(true);
            }
            return Ok(!self.ending);
        }
        if self.troubles > 0
            && self.doomed.is_none()
            && self.w.rng.u32(..self.profile.trouble_one_in) == 0
        {
            self.troubles -= 1;
            self.begin_trouble()?;
            return Ok(true);
        }
        if !self.ending && self.w.rng.u8(..8) == 0 {
            self.hoard();
        }
        Ok(false)
    }

    /// A server that starts now is refused, because the last one's writes are still at work.
    fn is_locked_out(&mut self) -> bool {
        let refused = self.server.is_none() && self.disk.is_locked();
        if refused {
            self.w.log.count("servers refused", 1);
            self.w.log.add("a server doesn't get the disk", []);
        }
        refused
    }

    /// Users allocate or free memory of the front end.
    fn hoard(&mut self) {
        let Some(front) = &mut self.front else { return };
        let source = front.device.buffer_source();
        if self.w.rng.bool() {
            let pages = pick(&mut self.w.rng, &[1, 8, 32]);
            front.hoard.extend(source.allocate(pages * PAGE_SIZE));
        } else {
            front.hoard.drain(..).for_each(|b| source.free(b));
        }
    }

    /// The back end of a dead front end notices that, and finishes.
    fn end_orphan(&mut self) -> Result<bool, String> {
        let Some(server) = &mut self.server else {
            return Ok(false);
        };
        if !server.ending {
            if !self.ending && self.w.rng.u8(..4) > 0 {
                return Ok(false);
            }
            self.w
                .log
                .add("the back end notices that its front end is gone", []);
            server.stop();
            return Ok(true);
        }
        if !server.has_ended() {
            return Ok(false);
        }
        self.w
            .log
            .add("the lanes of the dead front end are over", []);
        self.orphan.take().map_or(Ok(()), FrontMemory::give_back)?;
        Ok(true)
    }

    fn begin_trouble(&mut self) -> Result<(), String> {
        use Trouble::*;
        let all = [
            KillBack,
            KillBack,
            KillBack,
            KillFront,
            KillBoth,
            Close,
            BreakRequests,
            BreakAnswers,
        ];
        let trouble = pick(&mut self.w.rng, &all);
        match trouble {
            KillBack | KillFront | KillBoth => {
                let side = match trouble {
                    KillFront => Side::Front,
                    KillBoth if self.w.rng.bool() => Side::Front,
                    _ => Side::Back,
                };
                self.together = matches!(trouble, KillBoth);
                if self.w.rng.u8(..4) == 0 {
                    return self.kill(side);
                }
                let most = pick(&mut self.w.rng, &[4, 20, 80]);
                let calls = self.w.rng.u32(1..=most);
                self.w
                    .log
                    .add("somebody will die in # calls", [u64::from(calls)]);
                self.fuse.light(side, calls);
                self.doomed = Some((self.w.log.step + 100, side));
            }
            Close => {
                self.w.log.add("the back end closes", []);
                self.w.log.count("orderly ends", 1);
                if let Some(server) = &mut self.server {
                    server.stop();
                }
            }
            BreakRequests | BreakAnswers => self.break_ring(matches!(trouble, BreakAnswers)),
        }
        Ok(())
    }

    fn break_ring(&mut self, answers: bool) {
        let (Some(front), Some(server)) = (&self.front, &self.server) else {
            return;
        };
        let ring = self.w.rng.usize(..server.lanes());
        let frame = front.memory.ring_frame(ring, front.ring_frames.1);
        let at = if answers { RSP_PROD } else { REQ_PROD };
        front.memory.disturb(frame, at, 100_000);
        self.disturbed = true;
        server.ring(ring);
        self.w.log.count("broken rings", 1);
        self.w.log.add("ring # is written over", [ring as u64]);
    }

    /// Takes a dead process away: at once, or at the call at which it died.
    pub fn kill(&mut self, side: Side) -> Result<(), String> {
        self.fuse.douse();
        self.doomed = None;
        let both = std::mem::take(&mut self.together);
        if side == Side::Back || both {
            self.kill_back();
        }
        if side == Side::Front || both {
            self.kill_front()?;
        }
        Ok(())
    }

    fn kill_back(&mut self) {
        let keep = self.w.rng.u32(..8) >= self.profile.power_loss;
        let survives = self.survives();
        let (crash, what) = match (keep, self.w.rng.bool()) {
            (true, _) => (Crash::Process, "the back end is killed"),
            (false, true) => (
                Crash::Cache(survives),
                "the back end is killed, and its cache is lost",
            ),
            (false, false) => (
                Crash::Power(survives),
                "the back end is killed with its machine",
            ),
        };
        self.w.log.count("kills", 1);
        self.w.log.add(what, []);
        self.crash_disk(crash);
        self.server = None;
        if let Some(front) = &self.front {
            front.memory.forget_uses();
        }
        if let Some(memory) = self.orphan.take() {
            memory.forget_uses();
        }
    }

    fn survives(&mut self) -> Survives {
        let kinds = [
            Survives::Nothing,
            Survives::Everything,
            Survives::AnyVersions,
            Survives::WholeWrites,
        ];
        pick(&mut self.w.rng, &kinds)
    }

    fn crash_disk(&mut self, crash: Crash) {
        self.disk.crash(crash, &mut self.w.rng);
        if crash != Crash::Process {
            self.w.log.count("lost caches", 1);
            self.w.checker.cache_lost();
        }
    }

    fn kill_front(&mut self) -> Result<(), String> {
        self.w.log.count("kills", 1);
        self.w.log.add("the front end is killed", []);
        self.w.checker.abandon();
        let Some(front) = self.front.take() else {
            return Ok(());
        };
        let memory = Arc::clone(&front.memory);
        // No destructor that runs here writes to memory that the back end sees.
        drop(front);
        if self.server.as_ref().is_some_and(|s| s.lanes() > 0) {
            self.orphan = Some(memory);
            return Ok(());
        }
        memory.give_back()
    }

    fn suspend(&mut self) {
        if let Some(front) = &mut self.front {
            self.w.log.add("the front end is suspended", []);
            front.device.suspend();
            front.suspended = true;
        }
    }

    /// Runs both halves of a handshake; the wires are the new connection's.
    fn connect(
        &mut self,
        memory: &Arc<FrontMemory>,
        offers: Offers,
    ) -> Result<(FrontParts, Wires), String> {
        let wishes = self.profile.wishes();
        let persistent = wishes.persistent && offers.keys.persistent;
        let refuse = if self.ending { 0 } else { self.profile.refuse };
        let seed = self.w.rng.u64(..);
        let granter = SimGranter::new(memory, persistent, refuse, seed, &self.fuse);
        let mut wires = Wires {
            memory: Arc::clone(memory),
            granter: Arc::new(granter),
            events: Vec::new(),
            counted: self.profile.counted,
            fuse: Arc::clone(&self.fuse),
            ring_frames: 0,
        };
        let server = self.server.get_or_insert_with(|| Server::new(&self.disk));
        self.disturbed = false;
        let parts = handshake(server, &mut wires, wishes, offers, &self.name);
        Ok((parts.map_err(|e| e.to_string())?, wires))
    }

    fn start_front(&mut self) -> Result<(), String> {
        let memory = FrontMemory::take().map_err(|e| e.to_string())?;
        let offers = self.profile.offers(&mut self.w.rng, true, 0);
        let (parts, wires) = self.connect(&memory, offers)?;
        let device = Frontend::<LowLimits>::with_policy(parts, self.w.log.clock.clone())
            .map_err(|e| e.to_string())?;
        device.set_recovery(true);
        self.w.checker.started();
        self.w.log.add(
            "a front end starts: # queues of # entries, # segments",
            [
                device.queues() as u64,
                u64::from(device.ring_entries()),
                u64::from(offers.keys.indirect_limit()),
            ],
        );
        let ring_frames = (wires.ring_frames, wires.ring_frames / wires.events.len());
        let shared: Arc<dyn BlockDevice> = Arc::clone(&device) as _;
        self.front = Some(Front {
            free_pages: count_free(&device),
            device,
            users: Vec::new(),
            memory,
            granter: wires.granter,
            ring_frames,
            suspended: false,
            segments: offers.keys.indirect_limit(),
            hoard: Vec::new(),
        });
        let users = User::open_all(&shared, &mut self.w)?;
        if let Some(front) = &mut self.front {
            front.users = users;
        }
        Ok(())
    }

    fn reconnect(&mut self) -> Result<(), String> {
        let Some(front) = &self.front else {
            return Ok(());
        };
        let (memory, promised) = (Arc::clone(&front.memory), front.segments);
        if self.server.is_none() && self.profile.power_loss > 0 && self.w.rng.u8(..16) == 0 {
            self.w.log.add("the machine starts anew", []);
            let survives = self.survives();
            self.crash_disk(Crash::Power(survives));
        }
        let first = self.ending && self.server.is_some();
        let offers = self.profile.offers(&mut self.w.rng, first, promised);
        self.connect_again(&memory, offers).map(|_| ())
    }

    /// Connects a suspended front end; false if it was refused, as it must be with fewer segments than
    /// granted before.
    fn connect_again(&mut self, memory: &Arc<FrontMemory>, offers: Offers) -> Result<bool, String> {
        let (parts, wires) = self.connect(memory, offers)?;
        let Some(front) = &mut self.front else {
            return Ok(false);
        };
        let segments = offers.keys.indirect_limit();
        let poor = segments.max(11) < front.segments.max(11);
        match front.device.reconnect(parts) {
            Err(_) if poor => {
                self.w.log.add(
                    "a connection with # segments is refused",
                    [u64::from(segments)],
                );
                if let Some(server) = &mut self.server {
                    server.hang_up();
                }
                return Ok(false);
            }
            Err(e) => return Err(format!("the front end refuses a good connection: {e}")),
            Ok(()) if poor => {
                return Err("the front end takes a connection with fewer segments".into());
            }
            Ok(()) => {}
        }
        self.w.log.add(
            "the front end is connected again: # queues of # entries, # segments",
            [
                front.device.queues() as u64,
                u64::from(front.device.ring_entries()),
                u64::from(segments),
            ],
        );
        self.w.log.count("reconnects", 1);
        front.granter = wires.granter;
        front.ring_frames = (wires.ring_frames, wires.ring_frames / wires.events.len());
        front.suspended = false;
        if !self.profile.mark_known {
            self.w.checker.cache_is_doubtful();
        }
        self.w.checker.connected();
        Ok(true)
    }

    /// Checks that all memory except the connection's comes back, also after a connection like the
    /// first one.
    pub fn check_frames(&mut self) -> Result<(), String> {
        self.suspend();
        let Some(server) = &mut self.server else {
            return Ok(());
        };
        server.hang_up();
        let Some(front) = &mut self.front else {
            return Ok(());
        };
        let source = front.device.buffer_source();
        front.hoard.drain(..).for_each(|b| source.free(b));
        front.users.drain(..).for_each(|s| s.close(&*source));
        let (memory, promised) = (Arc::clone(&front.memory), front.segments);
        let offers = self.profile.offers(&mut self.w.rng, true, promised);
        self.connect_again(&memory, offers)?;
        let Some(front) = &mut self.front else {
            return Ok(());
        };
        let free = count_free(&front.device);
        if free == front.free_pages {
            return Ok(());
        }
        Err(format!(
            "{free} pages are free at the end, {} at first",
            front.free_pages
        ))
    }
}

/// Number of free pages of the front end's memory.
fn count_free(device: &Frontend<LowLimits>) -> usize {
    let source = device.buffer_source();
    let mut taken = Vec::new();
    let (mut size, mut pages) = (64, 0);
    while size > 0 {
        match source.allocate(size * PAGE_SIZE) {
            Some(b) => {
                pages += size;
                taken.push(b);
            }
            None => size /= 2,
        }
    }
    taken.into_iter().for_each(|b| source.free(b));
    pages
}
