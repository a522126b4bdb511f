//! A worker: a thread that owns lanes and has one place to wait.
//!
//! A lane is *active* (stepped in turn) or *asleep* (its descriptors are in the poller, nothing else
//! is spent on it). A lane that finds nothing to do stays active for its spin window, because a wake-up
//! across CPUs costs far more than a polled hand-off; then it arms both ends and sleeps. The window
//! tunes itself between nothing and the limit: it grows when sleeps turn out short, shrinks when they
//! are long, so that an idle disk costs no CPU.

use crate::lane::Lane;
use crate::source::SourceEnd;
use parking_lot::Mutex;
use pvblk_block::Readiness;
use pvblk_sys::{EventFd, PollEvent, Poller};
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Called once when a lane is over.
pub type OnEnd = Box<dyn FnOnce(SourceEnd) + Send>;

/// Names a lane for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneId(pub u64);

pub enum Command {
    Attach(LaneId, Box<Lane>, OnEnd),
    Detach(LaneId),
    Wake(LaneId),
    Exit,
}

/// Wakes a lane from any thread: its source has something to do that its descriptor doesn't tell.
#[derive(Clone)]
pub struct LaneWaker {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) lane: LaneId,
}

impl LaneWaker {
    /// The lane pulls from its source soon, unless it is gone. Never blocks.
    pub fn wake(&self) {
        self.mailbox.send(Command::Wake(self.lane));
    }
}

/// What others see of a worker.
pub struct Mailbox {
    commands: Mutex<Vec<Command>>,
    pending: AtomicBool,
    bell: EventFd,
    /// Lanes that are or will be here.
    pub lanes: AtomicUsize,
}

impl Mailbox {
    pub fn new() -> std::io::Result<Mailbox> {
        Ok(Mailbox {
            commands: Mutex::default(),
            pending: AtomicBool::new(false),
            bell: EventFd::new()?,
            lanes: AtomicUsize::new(0),
        })
    }

    pub fn send(&self, command: Command) {
        self.commands.lock().push(command);
        self.pending.store(true, Ordering::Release);
        self.bell.notify();
    }
}

const BELL: u64 = u64::MAX;
/// Steps of active lanes between two looks at the sleeping ones.
const STEPS_PER_LOOK: u32 = 32;
/// Idle steps between two offers of the CPU to others: about a microsecond.
const STEPS_PER_YIELD: u32 = 8;
/// A lane that slept for so long gives back what it keeps for reuse: as long as Linux' back end keeps pages of an idle ring.
const REST: Duration = Duration::from_millis(100);
/// A spin window that grows from nothing starts here.
const SPIN_START: Duration = Duration::from_micros(4);

struct Berth {
    id: LaneId,
    lane: Box<Lane>,
    on_end: Option<OnEnd>,
    asleep: bool,
    idle_since: Option<Instant>,
    slept_at: Instant,
    /// It was awake since it gave back what it keeps.
    used: bool,
    deadline: Option<Instant>,
    spin: Duration,
    device_fd_added: bool,
    interest: (bool, bool),
}

pub struct Worker {
    mailbox: Arc<Mailbox>,
    poller: Poller,
    berths: Vec<Option<Berth>>,
    active: Vec<usize>,
    deadlines: BTreeSet<(Instant, usize)>,
    /// When to look for lanes that are to rest.
    rest_at: Option<Instant>,
    /// As last read: by every lane that went to sleep, and after every wait. In a Xen domain a look at the clock is a system call.
    now: Instant,
    events: Vec<PollEvent>,
    spin_max: Duration,
    courtesy: Courtesy,
}

impl Worker {
    pub fn new(mailbox: Arc<Mailbox>, spin_max: Duration) -> std::io::Result<Worker> {
        let poller = Poller::new()?;
        poller.add(mailbox.bell.as_fd(), BELL, false)?;
        Ok(Worker {
            mailbox,
            poller,
            berths: Vec::new(),
            active: Vec::new(),
            deadlines: BTreeSet::new(),
            rest_at: None,
            now: Instant::now(),
            events: Vec::new(),
            spin_max,
            courtesy: Courtesy::default(),
        })
    }

    /// Runs until told to exit.
    pub fn run(mut self) {
        let mut steps = 0u32;
        loop {
            if self.mailbox.pending.load(Ordering::Acquire) && self.take_commands() {
                for index in 0..self.berths.len() {
                    self.remove(index, SourceEnd::Closed);
                }
                return;
            }
            let moved = self.step_active();
            steps += 1;
            if !moved && steps.is_multiple_of(STEPS_PER_YIELD) && !self.active.is_empty() {
                self.courtesy.offer();
            }
            if self.active.is_empty() {
                self.look(self.next_timeout());
            } else if steps >= STEPS_PER_LOOK || (!moved && steps >= STEPS_PER_LOOK / 4) {
                steps = 0;
                self.look(Some(Duration::ZERO));
            }
        }
    }

    /// True if the worker is to exit.
    fn take_commands(&mut self) -> bool {
        self.mailbox.pending.store(false, Ordering::Release);
        let commands = std::mem::take(&mut *self.mailbox.commands.lock());
        let mut exit = false;
        for command in commands {
            match command {
                Command::Attach(id, lane, on_end) => self.attach(id, lane, on_end),
                Command::Detach(id) => self.reach(id, Lane::stop),
                Command::Wake(id) => self.reach(id, Lane::poll_source),
                Command::Exit => exit = true,
            }
        }
        exit
    }

    /// Tells a lane something and wakes it, if it is still here.
    fn reach(&mut self, id: LaneId, tell: impl FnOnce(&mut Lane)) {
        let is_it = |b: &Option<Berth>| b.as_ref().is_some_and(|b| b.id == id);
        let Some(index) = self.berths.iter().position(is_it) else {
            return;
        };
        if let Some(b) = &mut self.berths[index] {
            tell(&mut b.lane);
        }
        self.wake(index);
    }

    fn attach(&mut self, id: LaneId, lane: Box<Lane>, on_end: OnEnd) {
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
            let why = pvblk_block::Error::os(format!("{}: waiting for it", lane.describe()), e);
            self.mailbox.lanes.fetch_sub(1, Ordering::Relaxed);
            drop(lane);
            on_end(SourceEnd::Broken(why));
            return;
        }
        self.berths[index] = Some(Berth {
            id,
            lane,
            on_end: Some(on_end),
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
    }

    /// Steps each active lane once; true if anything moved.
    fn step_active(&mut self) -> bool {
        let mut moved = false;
        let mut i = 0;
        while i < self.active.len() {
            let index = self.active[i];
            let Some(berth) = &mut self.berths[index] else {
                self.active.swap_remove(i);
                continue;
            };
            if berth.lane.step() {
                if !berth.interest.0 {
                    // It was full and the poller doesn't listen for it; now there may be room.
                    berth.lane.poll_source();
                }
                berth.idle_since = None;
                moved = true;
                i += 1;
                continue;
            }
            if let Some(end) = berth.lane.finished() {
                self.active.swap_remove(i);
                self.remove(index, end);
                continue;
            }
            if self.try_sleep(index) {
                self.active.swap_remove(i);
            } else {
                i += 1;
            }
        }
        moved
    }

    fn remove(&mut self, index: usize, end: SourceEnd) {
        let Some(mut berth) = self.berths[index].take() else {
            return;
        };
        if let Some(fd) = berth.lane.source_fd() {
            let _ = self.poller.remove(fd);
        }
        if let (true, Some(fd)) = (berth.device_fd_added, berth.lane.device_fd()) {
            let _ = self.poller.remove(fd);
        }
        if let Some(at) = berth.deadline {
            self.deadlines.remove(&(at, index));
        }
        self.mailbox.lanes.fetch_sub(1, Ordering::Relaxed);
        let on_end = berth.on_end.take();
        // The lane, its queue and its mappings are gone before anybody is told.
        drop(berth);
        // Unmapping takes time, and deadlines of others go by the last look.
        self.now = Instant::now();
        if let Some(f) = on_end {
            f(end);
        }
    }

    /// Puts a lane that found nothing to do to sleep, if its spin window is over and neither end is ready.
    fn try_sleep(&mut self, index: usize) -> bool {
        let Some(berth) = &mut self.berths[index] else {
            return true;
        };
        let now = Instant::now();
        self.now = now;
        let since = *berth.idle_since.get_or_insert(now);
        if now.duration_since(since) < berth.spin {
            if berth.lane.polls_by_syscall() {
                berth.lane.poll_source();
            }
            std::hint::spin_loop();
            return false;
        }
        let deadline = match berth.lane.arm() {
            Readiness::Ready => return false,
            Readiness::Wait(deadline) => deadline,
        };
        // A timer is late by more than this: spin the rest.
        if deadline.is_some_and(|d| d.saturating_duration_since(now) < Duration::from_micros(20)) {
            return false;
        }
        if !self.prepare_descriptors(index) {
            return false;
        }
        let Some(berth) = &mut self.berths[index] else {
            return true;
        };
        berth.asleep = true;
        berth.slept_at = now;
        berth.deadline = deadline;
        if berth.used {
            self.rest_at.get_or_insert(now + REST);
        }
        if let Some(at) = deadline {
            self.deadlines.insert((at, index));
        }
        true
    }

    /// Waits for exactly what the lane wants; false if the poller refuses (then the lane keeps spinning).
    fn prepare_descriptors(&mut self, index: usize) -> bool {
        let Some(berth) = &mut self.berths[index] else {
            return true;
        };
        if set_interest(&self.poller, index, berth).is_err() {
            return false;
        }
        if !berth.device_fd_added
            && let Some(fd) = berth.lane.device_fd()
        {
            if self.poller.add(fd, device_token(index), false).is_err() {
                return false;
            }
            berth.device_fd_added = true;
        }
        true
    }

    fn next_timeout(&self) -> Option<Duration> {
        let first = self.deadlines.first().map(|(at, _)| *at);
        let first = first.into_iter().chain(self.rest_at).min()?;
        Some(first.saturating_duration_since(self.now))
    }

    /// Lanes that slept long enough give back what they keep for reuse.
    fn rest(&mut self) {
        let now = self.now;
        self.rest_at = None;
        for berth in self.berths.iter_mut().flatten() {
            if !berth.used || !berth.asleep {
                continue;
            }
            let at = berth.slept_at + REST;
            if at <= now {
                berth.used = false;
                berth.lane.rest();
                continue;
            }
            self.rest_at = Some(self.rest_at.map_or(at, |other| other.min(at)));
        }
    }

    /// Waits up to `timeout` for sleeping lanes and wakes those with something to do.
    fn look(&mut self, timeout: Option<Duration>) {
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        if let Err(e) = self.poller.wait(&mut events, timeout) {
            tracing::error!("waiting for events: {e}");
        }
        if !events.is_empty() || !self.deadlines.is_empty() || self.rest_at.is_some() {
            self.now = Instant::now();
        }
        for event in &events {
            if event.token == BELL {
                // Here, and not where commands are taken: the bell may ring after they were. What it
                // rings for is seen anyway: `pending` is set before it rings.
                self.mailbox.bell.drain();
                continue;
            }
            let index = (event.token >> 1) as usize;
            if let Some(Some(berth)) = self.berths.get_mut(index) {
                if event.token & 1 == 0 {
                    berth.lane.source_woken();
                } else {
                    berth.lane.device_woken();
                }
            }
            self.wake(index);
        }
        self.events = events;
        if self.rest_at.is_some_and(|at| at <= self.now) {
            self.rest();
        }
        while let Some(&(at, index)) = self.deadlines.first() {
            if at > self.now {
                break;
            }
            self.wake(index);
        }
    }

    fn wake(&mut self, index: usize) {
        let Some(Some(berth)) = self.berths.get_mut(index) else {
            return;
        };
        if let Some(at) = berth.deadline.take() {
            self.deadlines.remove(&(at, index));
        }
        if !berth.asleep {
            return;
        }
        berth.asleep = false;
        berth.used = true;
        berth.idle_since = None;
        // A look at a socket is a system call: poll it for less time.
        let max = if berth.lane.polls_by_syscall() {
            self.spin_max * 2 / 5
        } else {
            self.spin_max
        };
        berth.spin = tuned(
            berth.spin.min(max),
            self.now.duration_since(berth.slept_at),
            max,
        );
        self.active.push(index);
    }
}

/// Makes the poller wait for what the lane wants of its source. One that wants nothing is taken out: a
/// descriptor whose peer hung up is reported for ever, whatever is waited for.
fn set_interest(poller: &Poller, index: usize, berth: &mut Berth) -> std::io::Result<()> {
    let interest = (berth.lane.wants_read(), berth.lane.wants_write());
    let Some(fd) = berth.lane.source_fd() else {
        return Ok(());
    };
    if interest == berth.interest {
        return Ok(());
    }
    const NOTHING: (bool, bool) = (false, false);
    if interest == NOTHING {
        poller.remove(fd)?;
    } else {
        if berth.interest == NOTHING {
            poller.add(fd, source_token(index), false)?;
            berth.interest = (true, false);
        }
        poller.set(fd, source_token(index), interest.0, interest.1)?;
    }
    berth.interest = interest;
    Ok(())
}

/// The next spin window after a sleep of `slept`.
fn tuned(spin: Duration, slept: Duration, max: Duration) -> Duration {
    if slept <= max {
        (spin * 2).clamp(SPIN_START, max.max(SPIN_START)).min(max)
    } else if spin <= SPIN_START {
        Duration::ZERO
    } else {
        spin / 2
    }
}

fn source_token(index: usize) -> u64 {
    (index as u64) << 1
}

fn device_token(index: usize) -> u64 {
    (index as u64) << 1 | 1
}

/// Gives the CPU away while polling: whoever we wait for may need this very one. But not to those who
/// keep it: an offer that was taken for long is not repeated for a while.
#[derive(Default)]
struct Courtesy {
    not_before: Option<Instant>,
    pause: Duration,
}

/// A peer that answers takes the CPU for less than this; somebody who computes, for a whole time slice.
const TAKEN_FOR_LONG: Duration = Duration::from_micros(500);
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

impl Courtesy {
    fn offer(&mut self) {
        let before = Instant::now();
        if self.not_before.is_some_and(|t| before < t) {
            return;
        }
        std::thread::yield_now();
        self.learn(before, Instant::now());
    }

    fn learn(&mut self, before: Instant, after: Instant) {
        if after.duration_since(before) < TAKEN_FOR_LONG {
            self.not_before = None;
            self.pause /= 2;
        } else {
            self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
            self.not_before = Some(after + self.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spin_window_follows_the_load_and_stays_in_bounds() {
        let max = Duration::from_micros(50);
        let mut spin = Duration::ZERO;
        for _ in 0..10 {
            spin = tuned(spin, Duration::from_micros(10), max);
            assert!(spin <= max);
        }
        assert_eq!(spin, max);
        for _ in 0..10 {
            spin = tuned(spin, Duration::from_millis(10), max);
        }
        assert_eq!(spin, Duration::ZERO);
        assert_eq!(tuned(spin, Duration::ZERO, Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn a_taken_cpu_is_not_offered_again_soon() {
        let mut c = Courtesy::default();
        let start = Instant::now();
        c.learn(start, start + Duration::from_micros(20));
        assert_eq!(c.not_before, None);
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            c.learn(start, start + Duration::from_millis(3));
            assert!(c.pause >= last && c.pause <= PAUSE_MAX);
            last = c.pause;
        }
        assert_eq!(last, PAUSE_MAX);
        c.learn(start, start + Duration::from_micros(20));
        assert!(c.not_before.is_none() && c.pause < PAUSE_MAX);
    }
}
