//! A worker's lanes and the descriptors that it waits for. No method here makes a call of a lane
//! that could block.

use super::commands::{Command, CommandQueue, LaneHome, LaneId, Wish};
use super::end::End;
use super::load::{BusyTime, WEIGH_EVERY, Weight, choose};
use super::pace::{Idle, SpinWindow, SpinWindows, YieldPolicy};
use super::shares::Shares;
use super::watchdog::WatchdogSignal;
use crate::lane::{Hold, Lane};
use crate::stall::{Blocked, Stall};
use pvblk_sys::{PollEvent, Poller};
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time of sleep after which a lane gives back memory that it keeps for reuse: as long as Linux' back end
/// keeps pages of an idle ring.
pub const REST: Duration = Duration::from_millis(100);

/// Interval at which a lane of a stalled disk is looked at.
const STALLED: Duration = Duration::from_millis(20);

/// After several disks had work at the same time, this many rounds in which one that has work alone still
/// takes short steps: its neighbours may only be waiting for their clients.
pub const ROUNDS_OF_COMPANY: u32 = 1000;

pub const COMMAND_EVENT: u64 = u64::MAX;

/// The begin of a time in which a lane has no work.
#[derive(Clone, Copy)]
pub struct IdleSince {
    since: Instant,
    hold: Option<Hold>,
    /// Requests were at the device.
    at_device: bool,
}

/// One lane and its state. A drop drops the lane first, and then reports its end.
pub struct LaneEntry {
    pub home: Arc<LaneHome>,
    /// `None` while a thread is in a call of it.
    pub lane: Option<Box<Lane>>,
    /// Set if the thread in that call was replaced.
    pub away: Option<Arc<Blocked>>,
    /// The lane is to be stopped when it is back.
    pub stop: bool,
    pub name: String,
    pub stall: Arc<Stall>,
    /// Its disk's, in [`Shares`].
    pub share: usize,
    /// `None` once it is reported, or about to be.
    pub end: Option<End>,
    /// The lane is to be ended, because of a panic in the worker's own code.
    pub lost: bool,
    pub asleep: bool,
    pub idle_since: Option<IdleSince>,
    pub slept_at: Instant,
    /// The lane was awake since it gave memory back.
    pub used: bool,
    pub deadline: Option<Instant>,
    spin: SpinWindows,
    pub device_fd_added: bool,
    /// The poller's interest in the source: reading and writing.
    pub interest: (bool, bool),
    pub weight: Weight,
    /// Time at which it came from another worker.
    arrived: Option<Instant>,
}

const NOTHING: (bool, bool) = (false, false);

impl LaneEntry {
    /// The lane has found no work at `now`, or earlier. Returns true if it is polled on.
    pub fn is_polled_on(&mut self, now: Instant) -> bool {
        let idle = *self.idle_since.get_or_insert_with(|| {
            let lane = self.lane.as_deref();
            IdleSince {
                since: now,
                hold: lane.and_then(Lane::hold),
                at_device: lane.is_some_and(Lane::waits_for_device),
            }
        });
        // The time at which limits let requests pass is known.
        let may_poll = idle.hold != Some(Hold::Limits);
        may_poll && now.duration_since(idle.since) < self.spin.of(idle.at_device).get()
    }

    /// The lane may have work at `now`, after it had none.
    pub fn end_idle(&mut self, now: Instant) {
        // Where requests are held, the time tells nothing of the source or the device.
        if let Some(idle) = self.idle_since.take()
            && idle.hold.is_none()
        {
            self.spin.of_mut(idle.at_device).learn(Idle {
                time: now.saturating_duration_since(idle.since),
                slept: self.asleep,
            });
            if let Some(lane) = &self.lane {
                lane.counting().polled_for(self.spin.get());
            }
        }
    }

    /// Makes the poller wait for the events that the lane wants of its source. A source without such events
    /// is taken out: a descriptor whose peer hung up is reported for ever, whatever is waited for.
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

    /// Takes the lane's descriptors out of the poller.
    fn leave(&mut self, poller: &Poller) {
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
pub struct LaneTable {
    pub poller: Poller,
    pub entries: Vec<Option<LaneEntry>>,
    /// Some entries are [lost](LaneEntry::lost).
    pub any_lost: bool,
    /// Commands that were taken from the queue, and are not yet carried out.
    pub commands: VecDeque<Command>,
    /// Indices of the entries whose lanes are stepped.
    pub active: Vec<usize>,
    pub deadlines: BTreeSet<(Instant, usize)>,
    /// Time at which lanes are to give memory back.
    pub rest_at: Option<Instant>,
    /// The time as last read: by every lane that went to sleep, and after every wait. In a Xen domain a look
    /// at the clock is a system call.
    pub now: Instant,
    pub events: Vec<PollEvent>,
    /// For a lane that comes.
    spin: SpinWindow,
    pub yields: YieldPolicy,
    /// Number of the first of `active` that woke up since the last round: their turns come first.
    pub fresh: usize,
    pub shares: Shares,
    /// Number of rounds for which lanes take shorter steps, because several disks had work lately.
    pub company: u32,
    pub busy: BusyTime,
    /// Time at which lanes' work was weighed last.
    weighed: Instant,
    pub exiting: bool,
}

impl LaneTable {
    pub fn new(commands: &CommandQueue, spin: SpinWindow) -> std::io::Result<LaneTable> {
        Ok(LaneTable {
            poller: poller(commands)?,
            entries: Vec::new(),
            any_lost: false,
            commands: VecDeque::new(),
            active: Vec::new(),
            deadlines: BTreeSet::new(),
            rest_at: None,
            now: Instant::now(),
            events: Vec::new(),
            spin,
            yields: YieldPolicy::default(),
            fresh: 0,
            shares: Shares::default(),
            company: 0,
            busy: BusyTime::default(),
            weighed: Instant::now(),
            exiting: false,
        })
    }

    /// Puts a new lane into a free entry; gives it back with the reason if the poller doesn't take its source.
    pub fn admit(
        &mut self,
        home: Arc<LaneHome>,
        lane: Box<Lane>,
        end: End,
    ) -> Result<(), (std::io::Error, Box<Lane>, End)> {
        let index = self.free_index();
        if let Some(fd) = lane.source_fd()
            && let Err(e) = self.poller.add(fd, source_token(index), false)
        {
            return Err((e, lane, end));
        }
        self.put(index, home, lane, end);
        Ok(())
    }

    /// Takes a lane that another worker had. The poller gets its source when it sleeps, as after [`LaneTable::take_over`].
    pub fn take_in(&mut self, home: Arc<LaneHome>, mut lane: Box<Lane>, end: End) {
        // Another thread may have seen what its descriptor told.
        lane.poll_source();
        let index = self.free_index();
        self.now = Instant::now();
        let arrived = Some(self.now);
        let entry = self.put(index, home, lane, end);
        entry.interest = NOTHING;
        entry.arrived = arrived;
    }

    fn free_index(&mut self) -> usize {
        match self.entries.iter().position(Option::is_none) {
            Some(i) => i,
            None => {
                self.entries.push(None);
                self.entries.len() - 1
            }
        }
    }

    fn put(
        &mut self,
        index: usize,
        home: Arc<LaneHome>,
        lane: Box<Lane>,
        end: End,
    ) -> &mut LaneEntry {
        self.active.push(index);
        let spin = SpinWindows::from(self.spin.clone());
        lane.counting().came_to(home.number());
        lane.counting().polled_for(spin.get());
        self.entries[index].insert(LaneEntry {
            home,
            name: lane.describe(),
            share: self.shares.enter(lane.stall()),
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
            spin,
            device_fd_added: false,
            interest: (true, false),
            weight: Weight::default(),
            arrived: None,
        })
    }

    /// Takes out the lane that suits another worker best, if there is one: see [`choose`]. Lanes of stalled disks stay.
    pub fn give(&mut self, wish: Wish) -> Option<(Arc<LaneHome>, Box<Lane>, End)> {
        let now = Instant::now();
        let may_move = |entry: &LaneEntry| {
            let has_settled = entry
                .arrived
                .is_none_or(|at| now.duration_since(at) >= wish.stays);
            let is_here = entry.lane.is_some() && entry.end.is_some() && !entry.lost;
            is_here && has_settled && !entry.stall.is_on()
        };
        let lanes = self.entries.iter().enumerate();
        let lanes = lanes.filter_map(|(index, entry)| Some((index, entry.as_ref()?)));
        let lanes = lanes.map(|(index, entry)| (index, &entry.weight, may_move(entry)));
        let index = choose(lanes, wish.most)?;
        self.disconnect(index);
        let entry = self.entries[index].take()?;
        if let Some(at) = self.active.iter().position(|active| *active == index) {
            self.active.remove(at);
            self.fresh -= usize::from(at < self.fresh);
        }
        Some((entry.home, entry.lane?, entry.end?))
    }

    /// Takes a lane's descriptors and its deadline out: it leaves this worker.
    pub fn disconnect(&mut self, index: usize) {
        let Some(Some(entry)) = self.entries.get_mut(index) else {
            return;
        };
        entry.leave(&self.poller);
        if let Some(at) = entry.deadline.take() {
            self.deadlines.remove(&(at, index));
        }
    }

    /// Lets lanes' older work count less, now and then.
    pub fn weigh(&mut self) {
        if self.now.duration_since(self.weighed) >= WEIGH_EVERY {
            self.weighed = self.now;
            let entries = self.entries.iter_mut().flatten();
            entries.for_each(|entry| entry.weight.weigh());
        }
    }

    pub fn find(&self, id: LaneId) -> Option<usize> {
        let is_it = |b: &Option<LaneEntry>| b.as_ref().is_some_and(|b| b.home.id() == id);
        self.entries.iter().position(is_it)
    }

    pub fn entry(&mut self, index: usize) -> Option<&mut LaneEntry> {
        self.entries.get_mut(index)?.as_mut()
    }

    /// Makes the poller wait for exactly the events that the lane wants; false if the poller refuses (then
    /// the lane keeps spinning).
    pub fn prepare_descriptors(&mut self, index: usize) -> bool {
        let Some(Some(entry)) = self.entries.get_mut(index) else {
            return true;
        };
        if entry.set_interest(&self.poller, index).is_err() {
            return false;
        }
        if !entry.device_fd_added
            && let Some(fd) = entry.lane.as_ref().and_then(|l| l.device_fd())
        {
            if self.poller.add(fd, device_token(index), false).is_err() {
                return false;
            }
            entry.device_fd_added = true;
        }
        true
    }

    /// Puts a lane to sleep, until its descriptors are reported or `deadline` has come.
    pub fn sleep(&mut self, index: usize, deadline: Option<Instant>) {
        let now = self.now;
        let Some(entry) = self.entry(index) else {
            return;
        };
        entry.asleep = true;
        entry.slept_at = now;
        entry.deadline = deadline;
        let rests = entry.used;
        if rests {
            self.rest_at.get_or_insert(now + REST);
        }
        if let Some(at) = deadline {
            self.deadlines.insert((at, index));
        }
    }

    /// Puts the lane of a stalled disk to sleep, without its descriptors.
    pub fn park(&mut self, index: usize) {
        self.now = Instant::now();
        if let Some(Some(entry)) = self.entries.get_mut(index) {
            entry.leave(&self.poller);
        }
        self.sleep(index, Some(self.now + STALLED));
    }

    pub fn next_timeout(&self) -> Option<Duration> {
        let first = self.deadlines.first().map(|(at, _)| *at);
        let first = first.into_iter().chain(self.rest_at).min()?;
        Some(first.saturating_duration_since(self.now))
    }

    pub fn wake(&mut self, index: usize) {
        let Some(Some(entry)) = self.entries.get_mut(index) else {
            return;
        };
        if let Some(at) = entry.deadline.take() {
            self.deadlines.remove(&(at, index));
        }
        if entry.lane.is_none() || !entry.asleep {
            return;
        }
        entry.end_idle(self.now);
        entry.asleep = false;
        entry.used = true;
        let disk = Arc::as_ptr(&entry.stall);
        let first = self.active.first().and_then(|&i| self.entries[i].as_ref());
        if first.is_some_and(|other| Arc::as_ptr(&other.stall) != disk) {
            self.company = ROUNDS_OF_COMPANY;
        }
        // A lane that slept has had no part of the last round.
        let at = self.fresh.min(self.active.len());
        self.active.insert(at, index);
        self.fresh = at + 1;
    }

    /// Goes on after the thread was replaced: with a new poller, since descriptors of the lane that the old
    /// thread is in can't be taken out of the old one. All lanes that are here are woken, so that no wake-up
    /// of the old poller is missed.
    pub fn take_over(&mut self, poller: Poller, signal: &WatchdogSignal) {
        self.poller = poller;
        self.deadlines.clear();
        self.active.clear();
        self.fresh = 0;
        self.events.clear();
        self.now = Instant::now();
        self.busy.forget();
        for (index, entry) in self.entries.iter_mut().enumerate() {
            let Some(entry) = entry else {
                continue;
            };
            entry.interest = NOTHING;
            entry.device_fd_added = false;
            entry.deadline = None;
            entry.asleep = false;
            entry.idle_since = None;
            match &mut entry.lane {
                Some(lane) => {
                    lane.poll_source();
                    self.active.push(index);
                }
                None if entry.away.is_some() => {}
                None => {
                    let blocked = entry.stall.begin(&entry.name, self.now);
                    signal.watch(&blocked);
                    entry.away = Some(blocked);
                }
            }
        }
    }

    /// Wakes all lanes that are here.
    pub fn wake_all(&mut self) {
        for index in 0..self.entries.len() {
            if let Some(Some(entry)) = self.entries.get_mut(index)
                && let Some(lane) = &mut entry.lane
            {
                lane.poll_source();
                self.wake(index);
            }
        }
    }

    /// Goes on after a panic in the worker's own code, with a new poller: of this table only the lanes and
    /// the callbacks for their ends are used. Lanes of replaced threads come back as usual.
    pub fn lose_all(&mut self) {
        self.active.clear();
        self.fresh = 0;
        self.deadlines.clear();
        self.events.clear();
        self.rest_at = None;
        self.now = Instant::now();
        self.busy.forget();
        self.any_lost = true;
        for entry in self.entries.iter_mut().flatten() {
            entry.interest = NOTHING;
            entry.device_fd_added = false;
            entry.deadline = None;
            entry.lost = entry.away.is_none();
        }
    }

    /// Takes a lane back from a replaced thread; `None` if the thread has dropped it.
    pub fn lane_back(&mut self, id: LaneId, lane: Option<Box<Lane>>) {
        let Some(index) = self.find(id) else {
            return;
        };
        let Some(entry) = &mut self.entries[index] else {
            return;
        };
        self.now = Instant::now();
        if let Some(blocked) = entry.away.take() {
            blocked.end(self.now);
        }
        let Some(mut lane) = lane else {
            self.entries[index] = None;
            return;
        };
        lane.poll_source();
        if entry.stop {
            lane.stop();
        }
        entry.lane = Some(lane);
        entry.asleep = false;
        entry.idle_since = None;
        self.active.push(index);
    }
}

/// A poller that the worker's commands wake.
pub fn poller(commands: &CommandQueue) -> std::io::Result<Poller> {
    let poller = Poller::new()?;
    poller.add(commands.event.as_fd(), COMMAND_EVENT, false)?;
    Ok(poller)
}

fn source_token(index: usize) -> u64 {
    (index as u64) << 1
}

fn device_token(index: usize) -> u64 {
    (index as u64) << 1 | 1
}
