//! A worker: a thread that owns lanes and has one place to wait.
//!
//! A lane is *active* (stepped in turn) or *asleep* (its descriptors are in the poller, nothing else
//! is spent on it). A lane that finds nothing to do stays active for its spin window, because a wake-up
//! across CPUs costs far more than a polled hand-off; then it arms both ends and sleeps. The window
//! tunes itself between nothing and the limit: it grows when sleeps turn out short, shrinks when they
//! are long, so that an idle disk costs no CPU.
//!
//! A worker is a [`Seat`], and a thread that has its [`Roster`]. While the thread is in a call of a lane, where a page fault or a hung
//! medium can hold it up, the roster can be seized: the [watchdog](watchdog) starts a fresh thread, which goes on with all the
//! other lanes. The thread before brings its lane back by mail when it returns, and ends.

mod end;
mod mailbox;
mod mend;
mod pace;
mod roster;
pub mod watchdog;

use crate::lane::{Lane, TURN_SECTORS};
use crate::source::SourceEnd;
pub use end::End;
use end::finish;
pub use mailbox::{Command, LaneId, LaneWaker, Mailbox, OnEnd};
use parking_lot::{Condvar, Mutex};
use pvblk_block::Readiness;
use pvblk_sys::{Baton, Holder};
use roster::{BELL, REST, ROUNDS_OF_COMPANY, Roster};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};
use watchdog::Attention;

/// Steps of active lanes between two looks at the sleeping ones.
const STEPS_PER_LOOK: u32 = 32;
/// So many sectors of data (8 KiB) count as one more step.
const SECTORS_PER_STEP: u64 = 16;
/// Steps of the only active lane in one call.
const STEPS_ALONE: u32 = 8;
/// Idle steps between two offers of the CPU to others: about a microsecond.
const STEPS_PER_YIELD: u32 = 8;

/// All of a worker that outlives its thread.
pub struct Seat {
    name: String,
    pin: Option<usize>,
    pub mailbox: Arc<Mailbox>,
    baton: Arc<Baton<Roster>>,
    /// Of the thread that has the roster.
    tid: AtomicI32,
    /// It waits for its lanes.
    asleep: AtomicBool,
    attention: Arc<Attention>,
    over: Mutex<bool>,
    ended: Condvar,
}

impl Seat {
    /// A seat, and its roster for the first thread.
    pub fn new(
        name: String,
        spin_max: Duration,
        pin: Option<usize>,
        attention: Arc<Attention>,
    ) -> std::io::Result<(Arc<Seat>, Holder<Roster>)> {
        let mailbox = Arc::new(Mailbox::new()?);
        let (baton, holder) = Baton::new(Roster::new(&mailbox, spin_max)?);
        let seat = Seat {
            name,
            pin,
            mailbox,
            baton,
            tid: AtomicI32::new(0),
            asleep: AtomicBool::new(false),
            attention,
            over: Mutex::new(false),
            ended: Condvar::new(),
        };
        Ok((Arc::new(seat), holder))
    }

    /// Its threads' name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True on the thread that has the roster.
    pub fn is_current(&self) -> bool {
        self.tid.load(Ordering::Acquire) == tid()
    }

    /// Starts a thread that has the roster `take` gives it, if there is one.
    pub fn start(
        self: &Arc<Seat>,
        take: impl FnOnce(&Seat) -> Option<Holder<Roster>> + Send + 'static,
    ) -> std::io::Result<()> {
        let seat = Arc::clone(self);
        let body = move || {
            let Some(roster) = take(&seat) else {
                return;
            };
            if let Some(cpu) = seat.pin
                && let Err(e) = pvblk_sys::cpu::pin(cpu)
            {
                tracing::warn!("keeping {} on CPU {cpu}: {e}", seat.name);
            }
            // Modelled and timed completions are due to the microsecond.
            let _ = pvblk_sys::cpu::set_timer_slack_ns(1000);
            seat.tid.store(tid(), Ordering::Release);
            let mut shift = Shift {
                seat: &seat,
                roster,
                out: None,
            };
            loop {
                match catch_unwind(AssertUnwindSafe(|| shift.run())) {
                    Ok(Ok(())) => {
                        *seat.over.lock() = true;
                        seat.ended.notify_all();
                        break;
                    }
                    Ok(Err(Replaced)) => break,
                    Err(_) => match catch_unwind(AssertUnwindSafe(|| shift.mend())) {
                        Ok(Ok(())) => {}
                        Ok(Err(Replaced)) => break,
                        Err(_) => abort(&seat.name),
                    },
                }
            }
        };
        let thread = std::thread::Builder::new().name(self.name.clone());
        thread.stack_size(512 * 1024).spawn(body)?;
        Ok(())
    }

    /// Waits until the worker has exited; false if it hasn't after `patience`.
    pub fn wait_over(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut over = self.over.lock();
        while !*over {
            if self.ended.wait_until(&mut over, deadline).timed_out() {
                return *over;
            }
        }
        true
    }
}

/// A worker that can't go on would leave its peers waiting for ever. Their requests are safe with them: they come back to the next server.
fn abort(name: &str) -> ! {
    tracing::error!("{name}: a bug that it can't go on after: the server aborts");
    // The log has a thread of its own.
    std::thread::sleep(Duration::from_millis(200));
    std::process::abort()
}

fn tid() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// The thread was replaced while it was in a call: it has nothing any more.
struct Replaced;

/// A thread's time with the roster.
struct Shift<'a> {
    seat: &'a Seat,
    roster: Holder<Roster>,
    /// The lane that it is in a call of.
    out: Option<(LaneId, Box<Lane>)>,
}

/// Of one call into an active lane.
struct Stepped {
    moved: bool,
    /// Sectors of data that were copied.
    work: u64,
    end: Option<SourceEnd>,
}

impl Shift<'_> {
    /// Runs until told to exit.
    fn run(&mut self) -> Result<(), Replaced> {
        let mut steps = 0u32;
        let mut offers = 0u32;
        loop {
            if self.seat.mailbox.is_pending() || !self.roster.commands.is_empty() {
                self.take_commands()?;
            }
            if self.roster.exiting {
                for index in 0..self.roster.berths.len() {
                    self.remove(index, SourceEnd::Closed)?;
                }
                return Ok(());
            }
            if self.roster.any_lost {
                self.end_lost()?;
            }
            let (moved, work) = self.step_active()?;
            steps += 1;
            if self.has_sleepers() {
                steps += (work / SECTORS_PER_STEP).min(STEPS_PER_LOOK.into()) as u32;
            }
            offers += 1;
            if !moved && offers.is_multiple_of(STEPS_PER_YIELD) && !self.roster.active.is_empty() {
                self.roster.courtesy.offer();
            }
            if self.roster.active.is_empty() {
                let timeout = self.roster.next_timeout();
                self.look(timeout)?;
            } else if steps >= STEPS_PER_LOOK || (!moved && steps >= STEPS_PER_LOOK / 4) {
                steps = 0;
                self.look(Some(Duration::ZERO))?;
            }
        }
    }

    /// Lanes sleep here whose descriptors are to be looked at.
    #[inline]
    fn has_sleepers(&self) -> bool {
        self.roster.berths.len() > self.roster.active.len()
    }

    /// Calls a lane, if it is here. Whatever can block is done in here.
    #[inline]
    fn call<R>(
        &mut self,
        index: usize,
        f: impl FnOnce(&mut Lane) -> R,
    ) -> Result<Option<R>, Replaced> {
        let Some(berth) = self.roster.berth(index) else {
            return Ok(None);
        };
        let Some(lane) = berth.lane.take() else {
            return Ok(None);
        };
        let (_, lane) = self.out.insert((berth.id, lane));
        let (result, kept) = self.roster.away(|| f(lane));
        let Some((id, lane)) = self.out.take() else {
            return Ok(None);
        };
        if !kept {
            self.seat.mailbox.send(Command::Back(id, Some(lane)));
            return Err(Replaced);
        }
        if let Some(berth) = self.roster.berth(index) {
            berth.lane = Some(lane);
        }
        Ok(Some(result))
    }

    fn take_commands(&mut self) -> Result<(), Replaced> {
        self.seat.mailbox.take(&mut self.roster.commands);
        while let Some(command) = self.roster.commands.pop_front() {
            match command {
                Command::Attach(id, lane, end) => self.attach(id, lane, end)?,
                Command::Detach(id) => self.reach(id, true),
                Command::Wake(id) => self.reach(id, false),
                Command::Back(id, lane) => self.roster.lane_back(id, lane),
                Command::Exit => self.roster.exiting = true,
            }
        }
        Ok(())
    }

    fn attach(&mut self, id: LaneId, lane: Box<Lane>, end: End) -> Result<(), Replaced> {
        let Err((e, lane, end)) = self.roster.admit(id, lane, end) else {
            return Ok(());
        };
        let what = format!("{}: waiting for it", lane.describe());
        let why = SourceEnd::Broken(pvblk_block::Error::os(what, e));
        let ((), kept) = self.roster.away(|| finish(Some(lane), Some(end), why));
        if kept { Ok(()) } else { Err(Replaced) }
    }

    /// Tells a lane to stop, or that there may be something to pull, and wakes it.
    fn reach(&mut self, id: LaneId, stop: bool) {
        let Some(index) = self.roster.find(id) else {
            return;
        };
        if let Some(berth) = self.roster.berth(index) {
            berth.stop |= stop;
            if let Some(lane) = &mut berth.lane {
                match stop {
                    true => lane.stop(),
                    false => lane.poll_source(),
                }
            }
        }
        self.roster.wake(index);
    }

    /// Steps each active lane, but of a disk that has copied much only those before it did; returns whether anything moved, and how many sectors of data were copied.
    fn step_active(&mut self) -> Result<(bool, u64), Replaced> {
        let (mut moved, mut work) = (false, 0);
        let company = self.roster.company > 0;
        self.roster.company = self.roster.company.saturating_sub(1);
        // Lanes have neighbours whose turn matters.
        let shared = company || self.has_sleepers();
        let most = if shared { TURN_SECTORS } else { u64::MAX };
        self.roster.had_turn.clear();
        let mut first = None;
        let (mut i, mut visits) = (0, self.roster.active.len());
        while visits > 0 && i < self.roster.active.len() {
            visits -= 1;
            let index = self.roster.active[i];
            let rounds = match self.roster.active.len() {
                1 => STEPS_ALONE,
                _ => 1,
            };
            let Some(berth) = self.roster.berth(index) else {
                self.roster.active.swap_remove(i);
                continue;
            };
            if berth.stall.is_on() {
                self.roster.active.swap_remove(i);
                self.roster.park(index);
                continue;
            }
            let deaf = !berth.interest.0;
            let disk = Arc::as_ptr(&berth.stall) as usize;
            if *first.get_or_insert(disk) != disk {
                self.roster.company = ROUNDS_OF_COMPANY;
            }
            if self.roster.had_turn.contains(&disk) {
                i += 1;
                continue;
            }
            let stepped = self.call(index, |lane| {
                lane.set_company(company);
                steps(lane, rounds, deaf, most)
            })?;
            let Some(Stepped {
                moved: it,
                work: its,
                end,
            }) = stepped
            else {
                self.roster.active.swap_remove(i);
                continue;
            };
            work += its;
            if it || (its >= TURN_SECTORS && end.is_none()) {
                if let Some(berth) = self.roster.berth(index) {
                    berth.idle_since = None;
                }
                moved = true;
                if shared && its >= TURN_SECTORS {
                    // Those of its disk's lanes that have to wait for the next round come first then.
                    self.roster.had_turn.push(disk);
                    self.roster.active.remove(i);
                    self.roster.active.push(index);
                } else {
                    i += 1;
                }
            } else if let Some(end) = end {
                self.roster.active.swap_remove(i);
                self.remove(index, end)?;
            } else if self.try_sleep(index)? {
                self.roster.active.swap_remove(i);
            } else {
                i += 1;
            }
        }
        Ok((moved, work))
    }

    fn remove(&mut self, index: usize, end: SourceEnd) -> Result<(), Replaced> {
        let roster = &mut *self.roster;
        let Some(Some(berth)) = roster.berths.get_mut(index) else {
            return Ok(());
        };
        if berth.lane.is_none() {
            if let (true, Some(end)) = (roster.exiting, berth.end.take()) {
                end.forget();
            }
            return Ok(()); // a thread that was replaced has it
        }
        berth.leave(&roster.poller);
        if let Some(at) = berth.deadline.take() {
            roster.deadlines.remove(&(at, index));
        }
        let (id, lane, told) = (berth.id, berth.lane.take(), berth.end.take());
        let ((), kept) = self.roster.away(|| finish(lane, told, end));
        if !kept {
            self.seat.mailbox.send(Command::Back(id, None));
            return Err(Replaced);
        }
        self.roster.berths[index] = None;
        // Unmapping takes time, and deadlines of others go by the last look.
        self.roster.now = Instant::now();
        Ok(())
    }

    /// Puts a lane that found nothing to do to sleep, if its spin window is over and neither end is ready.
    fn try_sleep(&mut self, index: usize) -> Result<bool, Replaced> {
        let now = Instant::now();
        self.roster.now = now;
        let Some(berth) = self.roster.berth(index) else {
            return Ok(true);
        };
        let since = *berth.idle_since.get_or_insert(now);
        if now.duration_since(since) < berth.spin {
            if let Some(lane) = &mut berth.lane
                && lane.polls_by_syscall()
            {
                lane.poll_source();
            }
            std::hint::spin_loop();
            return Ok(false);
        }
        let deadline = match self.call(index, Lane::arm)? {
            Some(Readiness::Ready) => return Ok(false),
            Some(Readiness::Wait(deadline)) => deadline,
            None => return Ok(true),
        };
        // A timer is late by more than this: spin the rest.
        if deadline.is_some_and(|d| d.saturating_duration_since(now) < Duration::from_micros(20)) {
            return Ok(false);
        }
        if !self.roster.prepare_descriptors(index) {
            return Ok(false);
        }
        self.roster.sleep(index, deadline);
        Ok(true)
    }

    /// Lanes that slept long enough give back what they keep for reuse.
    fn rest(&mut self) -> Result<(), Replaced> {
        let now = self.roster.now;
        self.roster.rest_at = None;
        for index in 0..self.roster.berths.len() {
            let Some(berth) = self.roster.berth(index) else {
                continue;
            };
            if !berth.used || !berth.asleep {
                continue;
            }
            let at = berth.slept_at + REST;
            if at <= now {
                berth.used = false;
                self.call(index, Lane::rest)?;
                continue;
            }
            let other = self.roster.rest_at.unwrap_or(at);
            self.roster.rest_at = Some(other.min(at));
        }
        Ok(())
    }

    /// Waits up to `timeout` for sleeping lanes and wakes those with something to do.
    fn look(&mut self, timeout: Option<Duration>) -> Result<(), Replaced> {
        let mut events = std::mem::take(&mut self.roster.events);
        events.clear();
        let sleeps = timeout != Some(Duration::ZERO);
        if sleeps {
            self.seat.asleep.store(true, Ordering::SeqCst);
        }
        if let Err(e) = self.roster.poller.wait(&mut events, timeout) {
            tracing::error!("waiting for events: {e}");
        }
        if sleeps {
            self.seat.asleep.store(false, Ordering::SeqCst);
            self.seat.attention.a_worker_woke();
        }
        let due = !self.roster.deadlines.is_empty() || self.roster.rest_at.is_some();
        if !events.is_empty() || due {
            self.roster.now = Instant::now();
        }
        for event in &events {
            if event.token == BELL {
                // Here, and not where commands are taken: the bell may ring after they were. What it
                // rings for is seen anyway: `pending` is set before it rings.
                self.seat.mailbox.bell.drain();
                continue;
            }
            let index = (event.token >> 1) as usize;
            let of_source = event.token & 1 == 0;
            self.call(index, |lane| match of_source {
                true => lane.source_woken(),
                false => lane.device_woken(),
            })?;
            self.roster.wake(index);
        }
        self.roster.events = events;
        if self.roster.rest_at.is_some_and(|at| at <= self.roster.now) {
            self.rest()?;
        }
        while let Some(&(at, index)) = self.roster.deadlines.first() {
            if at > self.roster.now {
                break;
            }
            self.roster.wake(index);
        }
        Ok(())
    }
}

/// Steps a lane up to `rounds` times, as long as it moves, and until it has copied `most` sectors.
#[inline]
fn steps(lane: &mut Lane, rounds: u32, deaf: bool, most: u64) -> Stepped {
    let (mut moved, mut work) = (false, 0);
    for _ in 0..rounds {
        let it = lane.step();
        work += lane.work();
        if !it {
            let end = if moved { None } else { lane.finished() };
            return Stepped { moved, work, end };
        }
        if deaf {
            // It was full and the poller doesn't listen for it; now there may be room.
            lane.poll_source();
        }
        moved = true;
        if work >= most {
            break;
        }
    }
    Stepped {
        moved,
        work,
        end: None,
    }
}
