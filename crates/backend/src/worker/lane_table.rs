//! A worker's lanes and what it waits for. Nothing here calls into a lane in a way that could block.

use super::end::End;
use super::mailbox::{Command, LaneId, Mailbox};
use super::pace::{Courtesy, tuned};
use super::watchdog::Attention;
use crate::lane::Lane;
use crate::stall::{Blocked, Stall};
use pvblk_sys::{PollEvent, Poller};
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A lane that slept for so long gives back what it keeps for reuse: as long as Linux' back end keeps pages of an idle ring.
pub const REST: Duration = Duration::from_millis(100);

/// How often a lane of a stalled disk is looked at.
const STALLED: Duration = Duration::from_millis(20);

/// So many rounds after several disks had work at the same time, one that has work alone still takes short steps: its neighbours may only
/// be waiting for their clients.
pub const ROUNDS_OF_COMPANY: u32 = 1000;

pub const BELL: u64 = u64::MAX;

/// One lane's place. Dropping it drops the lane first, and then tells its end.
pub struct Berth {
    pub id: LaneId,
    /// `None` while a thread is in a call of it.
    pub lane: Option<Box<Lane>>,
    /// The thread in that call was replaced.
    pub away: Option<Arc<Blocked>>,
    /// To be told to the lane when it is back.
    pub stop: bool,
    pub name: String,
    pub stall: Arc<Stall>,
    /// `None` once it is told, or about to be.
    pub end: Option<End>,
    /// A panic in the worker's own code took it: it is to be ended.
    pub lost: bool,
    pub asleep: bool,
    pub idle_since: Option<Instant>,
    pub slept_at: Instant,
    /// It was awake since it gave back what it keeps.
    pub used: bool,
    pub deadline: Option<Instant>,
    pub spin: Duration,
    pub device_fd_added: bool,
    /// Reading and writing, as the poller knows it.
    pub interest: (bool, bool),
}

const NOTHING: (bool, bool) = (false, false);

impl Berth {
    /// Makes the poller wait for what the lane wants of its source. One that wants nothing is taken out: a
    /// descriptor whose peer hung up is reported for ever, whatever is waited for.
    fn set_interest(&mut self, poller: &Poller, index: usize) -> std::io::Result<()> {
        let Some(lane) = &self.lane else {
            return Ok(());
        };
        let interest = (lane.wants_read(), lane.wants_write());
        let Some(fd) = lane.source_fd() else {
            return Ok(());
        };
        if interest == self.interest {
            return Ok(());
        }
        if interest == NOTHING {
            poller.remove(fd)?;
        } else {
            if self.interest == NOTHING {
                poller.add(fd, source_token(index), false)?;
                self.interest = (true, false);
            }
            poller.set(fd, source_token(index), interest.0, interest.1)?;
        }
        self.interest = interest;
        Ok(())
    }

    /// Takes its descriptors out of the poller.
    pub fn leave(&mut self, poller: &Poller) {
        let Some(lane) = &self.lane else {
            return;
        };
        if self.interest != NOTHING
            && let Some(fd) = lane.source_fd()
        {
            let _ = poller.remove(fd);
        }
        if self.device_fd_added
            && let Some(fd) = lane.device_fd()
        {
            let _ = poller.remove(fd);
        }
        self.interest = NOTHING;
        self.device_fd_added = false;
    }
}

/// The lanes of a worker.
pub struct Roster {
    pub poller: Poller,
    pub berths: Vec<Option<Berth>>,
    /// Some berths are [lost](Berth::lost).
    pub any_lost: bool,
    /// Taken from the mailbox, and not yet done.
    pub commands: VecDeque<Command>,
    /// Indices of the berths whose lanes are stepped.
    pub active: Vec<usize>,
    pub deadlines: BTreeSet<(Instant, usize)>,
    /// When to look for lanes that are to rest.
    pub rest_at: Option<Instant>,
    /// As last read: by every lane that went to sleep, and after every wait. In a Xen domain a look at the clock is a system call.
    pub now: Instant,
    pub events: Vec<PollEvent>,
    pub spin_max: Duration,
    pub courtesy: Courtesy,
    /// Disks of which a lane copied much in this round, by the addresses of their [`Stall`]s.
    pub had_turn: Vec<usize>,
    /// Rounds for which lanes take shorter steps, as several disks had work lately.
    pub company: u32,
    pub exiting: bool,
}

impl Roster {
    pub fn new(mailbox: &Mailbox, spin_max: Duration) -> std::io::Result<Roster> {
        Ok(Roster {
            poller: poller(mailbox)?,
            berths: Vec::new(),
            any_lost: false,
            commands: VecDeque::new(),
            active: Vec::new(),
            deadlines: BTreeSet::new(),
            rest_at: None,
            now: Instant::now(),
            events: Vec::new(),
            spin_max,
            courtesy: Courtesy::default(),
            had_turn: Vec::new(),
            company: 0,
            exiting: false,
        })
    }

    /// Puts a lane into a free berth; gives it back with the reason if the poller doesn't take its source.
    pub fn admit(
        &mut self,
        id: LaneId,
        lane: Box<Lane>,
        end: End,
    ) -> Result<(), (std::io::Error, Box<Lane>, End)> {
        let index = match self.berths.iter().position(Option::is_none) {
            Some(i) => i,
            None => {
                self.berths.push(None);
                self.berths.len() - 1
            }
        };
        if let Some(fd) = lane.source_fd()
            && let Err(e) = self.poller.add(fd, source_token(index), false)
        {
            return Err((e, lane, end));
        }
        self.berths[index] = Some(Berth {
            id,
            name: lane.describe(),
            stall: Arc::clone(lane.stall()),
            lane: Some(lane),
            away: None,
            stop: false,
            end: Some(end),
            lost: false,
            asleep: false,
            idle_since: None,
            slept_at: Instant::now(),
            used: true,
            deadline: None,
            spin: self.spin_max / 2,
            device_fd_added: false,
            interest: (true, false),
        });
        self.active.push(index);
        Ok(())
    }

    pub fn find(&self, id: LaneId) -> Option<usize> {
        let is_it = |b: &Option<Berth>| b.as_ref().is_some_and(|b| b.id == id);
        self.berths.iter().position(is_it)
    }

    pub fn berth(&mut self, index: usize) -> Option<&mut Berth> {
        self.berths.get_mut(index)?.as_mut()
    }

    /// Waits for exactly what the lane wants; false if the poller refuses (then the lane keeps spinning).
    pub fn prepare_descriptors(&mut self, index: usize) -> bool {
        let Some(Some(berth)) = self.berths.get_mut(index) else {
            return true;
        };
        if berth.set_interest(&self.poller, index).is_err() {
            return false;
        }
        if !berth.device_fd_added
            && let Some(fd) = berth.lane.as_ref().and_then(|l| l.device_fd())
        {
            if self.poller.add(fd, device_token(index), false).is_err() {
                return false;
            }
            berth.device_fd_added = true;
        }
        true
    }

    /// Puts a lane to sleep, until its descriptors are reported or `deadline` has come.
    pub fn sleep(&mut self, index: usize, deadline: Option<Instant>) {
        let now = self.now;
        let Some(berth) = self.berth(index) else {
            return;
        };
        berth.asleep = true;
        berth.slept_at = now;
        berth.deadline = deadline;
        let rests = berth.used;
        if rests {
            self.rest_at.get_or_insert(now + REST);
        }
        if let Some(at) = deadline {
            self.deadlines.insert((at, index));
        }
    }

    /// Puts the lane of a stalled disk to sleep, deaf to its descriptors.
    pub fn park(&mut self, index: usize) {
        self.now = Instant::now();
        if let Some(Some(berth)) = self.berths.get_mut(index) {
            berth.leave(&self.poller);
        }
        self.sleep(index, Some(self.now + STALLED));
    }

    pub fn next_timeout(&self) -> Option<Duration> {
        let first = self.deadlines.first().map(|(at, _)| *at);
        let first = first.into_iter().chain(self.rest_at).min()?;
        Some(first.saturating_duration_since(self.now))
    }

    pub fn wake(&mut self, index: usize) {
        let Some(Some(berth)) = self.berths.get_mut(index) else {
            return;
        };
        if let Some(at) = berth.deadline.take() {
            self.deadlines.remove(&(at, index));
        }
        let Some(lane) = berth.lane.as_ref().filter(|_| berth.asleep) else {
            return;
        };
        // A look at a socket is a system call: poll it for less time.
        let max = if lane.polls_by_syscall() {
            self.spin_max * 2 / 5
        } else {
            self.spin_max
        };
        berth.asleep = false;
        berth.used = true;
        berth.idle_since = None;
        berth.spin = tuned(
            berth.spin.min(max),
            self.now.duration_since(berth.slept_at),
            max,
        );
        let disk = Arc::as_ptr(&berth.stall);
        let first = self.active.first().and_then(|&i| self.berths[i].as_ref());
        if first.is_some_and(|other| Arc::as_ptr(&other.stall) != disk) {
            self.company = ROUNDS_OF_COMPANY;
        }
        self.active.push(index);
    }

    /// After the thread before was replaced: with a new poller, since descriptors of the lane that it is in can't be taken out of the old one. All
    /// lanes that are here are awake, so that no wake-up of the old poller is missed.
    pub fn take_over(&mut self, poller: Poller, attention: &Attention) {
        self.poller = poller;
        self.deadlines.clear();
        self.active.clear();
        self.events.clear();
        self.now = Instant::now();
        for (index, berth) in self.berths.iter_mut().enumerate() {
            let Some(berth) = berth else {
                continue;
            };
            berth.interest = NOTHING;
            berth.device_fd_added = false;
            berth.deadline = None;
            berth.asleep = false;
            berth.idle_since = None;
            match &mut berth.lane {
                Some(lane) => {
                    lane.poll_source();
                    self.active.push(index);
                }
                None if berth.away.is_some() => {}
                None => {
                    let blocked = berth.stall.begin(&berth.name, self.now);
                    attention.watch(&blocked);
                    berth.away = Some(blocked);
                }
            }
        }
    }

    /// Wakes all lanes that are here.
    pub fn wake_all(&mut self) {
        for index in 0..self.berths.len() {
            if let Some(Some(berth)) = self.berths.get_mut(index)
                && let Some(lane) = &mut berth.lane
            {
                lane.poll_source();
                self.wake(index);
            }
        }
    }

    /// After a panic in the worker's own code, with a new poller: nothing in here is trusted but the lanes and who is to be told of their
    /// ends. Lanes that replaced threads have come back as usual.
    pub fn lose_all(&mut self) {
        self.active.clear();
        self.deadlines.clear();
        self.events.clear();
        self.rest_at = None;
        self.now = Instant::now();
        self.any_lost = true;
        for berth in self.berths.iter_mut().flatten() {
            berth.interest = NOTHING;
            berth.device_fd_added = false;
            berth.deadline = None;
            berth.lost = berth.away.is_none();
        }
    }

    /// A replaced thread brought a lane back, or has dropped it.
    pub fn lane_back(&mut self, id: LaneId, lane: Option<Box<Lane>>) {
        let Some(index) = self.find(id) else {
            return;
        };
        let Some(berth) = &mut self.berths[index] else {
            return;
        };
        self.now = Instant::now();
        if let Some(blocked) = berth.away.take() {
            blocked.end(self.now);
        }
        let Some(mut lane) = lane else {
            self.berths[index] = None;
            return;
        };
        lane.poll_source();
        if berth.stop {
            lane.stop();
        }
        berth.lane = Some(lane);
        berth.asleep = false;
        berth.idle_since = None;
        self.active.push(index);
    }
}

/// A poller that a worker's bell wakes.
pub fn poller(mailbox: &Mailbox) -> std::io::Result<Poller> {
    let poller = Poller::new()?;
    poller.add(mailbox.bell.as_fd(), BELL, false)?;
    Ok(poller)
}

fn source_token(index: usize) -> u64 {
    (index as u64) << 1
}

fn device_token(index: usize) -> u64 {
    (index as u64) << 1 | 1
}
