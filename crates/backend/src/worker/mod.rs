//! A worker: a thread that owns lanes and has one place to wait.
//!
//! A lane is *active* (stepped in turn) or *asleep* (its descriptors are in the poller, and it costs
//! nothing). A lane that finds no work stays active for its spin window, because a wake-up across CPUs costs
//! far more than a polled hand-off; then it arms both ends and sleeps. The window is the limit, a quarter of it, or none,
//! by the lane's last idle times of the same kind (for a request, or for the device), so that an idle disk costs no CPU.
//!
//! A worker is a [`Worker`], which lasts, and a thread that has its [`LaneTable`]. While the thread is in a
//! call of a lane, where a page fault or a hung medium can hold it up, the table can be taken over: the
//! [watchdog](watchdog) starts a fresh thread, which goes on with all the other lanes. The replaced thread
//! sends its lane back by a command when its call returns, and ends.

mod after_panic;
mod commands;
mod end;
mod lane_table;
mod load;
mod pace;
mod shares;
pub mod watchdog;

#[cfg(test)]
mod move_tests;

use crate::lane::{Lane, TURN_SECTORS};
use crate::source::SourceEnd;
pub use commands::{Command, CommandQueue, LaneHome, LaneId, LaneWaker, OnEnd, Wish};
pub use end::End;
use end::finish;
use lane_table::{COMMAND_EVENT, LaneTable, REST, ROUNDS_OF_COMPANY};
use load::Load;
pub use pace::{Polled, SpinWindow};
use parking_lot::{Condvar, Mutex};
use pvblk_block::Readiness;
use pvblk_sys::{Holder, Lease};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use watchdog::WatchdogSignal;

/// Steps of active lanes between two looks at the sleeping ones.
const STEPS_PER_LOOK: u32 = 32;
/// Number of sectors of data (8 KiB) that count as one more step.
const SECTORS_PER_STEP: u64 = 16;
/// Work of several lanes after which the sleeping ones are looked at: sectors of data, 256 KiB, and a measure that counts requests, too.
const LOOK_SECTORS: u64 = 512;
const LOOK_COST: u64 = 2048;
/// Steps of the only active lane in one call.
const STEPS_ALONE: u32 = 8;
/// The part of a worker that outlives its threads.
pub struct Worker {
    name: String,
    pin: Option<usize>,
    pub commands: Arc<CommandQueue>,
    lease: Arc<Lease<LaneTable>>,
    /// Thread id of the thread that has the lane table.
    tid: AtomicI32,
    /// The thread waits for its lanes.
    asleep: AtomicBool,
    /// Microseconds in which its lanes had work.
    busy: AtomicU64,
    signal: Arc<WatchdogSignal>,
    over: Mutex<bool>,
    ended: Condvar,
}

impl Worker {
    /// A worker, and its lane table for the first thread.
    pub fn new(
        name: String,
        spin: SpinWindow,
        pin: Option<usize>,
        signal: Arc<WatchdogSignal>,
    ) -> std::io::Result<(Arc<Worker>, Holder<LaneTable>)> {
        let commands = Arc::new(CommandQueue::new()?);
        let (lease, holder) = Lease::new(LaneTable::new(&commands, spin)?);
        let worker = Worker {
            name,
            pin,
            commands,
            lease,
            tid: AtomicI32::new(0),
            asleep: AtomicBool::new(false),
            busy: AtomicU64::new(0),
            signal,
            over: Mutex::new(false),
            ended: Condvar::new(),
        };
        Ok((Arc::new(worker), holder))
    }

    /// Name of its threads.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A number that changes whenever it steps a lane; `None` while it sleeps.
    pub fn turn(&self) -> Option<u64> {
        (!self.asleep.load(Ordering::Relaxed)).then(|| self.lease.turn())
    }

    fn load(&self, blocked: bool) -> Load {
        Load {
            busy: Duration::from_micros(self.busy.load(Ordering::Relaxed)),
            lanes: self.commands.lanes.load(Ordering::Relaxed),
            blocked,
        }
    }

    /// True on the thread that has the lane table.
    pub fn is_current(&self) -> bool {
        self.tid.load(Ordering::Acquire) == tid()
    }

    /// Starts a thread that gets the lane table from `take`, if there is one.
    pub fn start(
        self: &Arc<Worker>,
        take: impl FnOnce(&Worker) -> Option<Holder<LaneTable>> + Send + 'static,
    ) -> std::io::Result<()> {
        let worker = Arc::clone(self);
        let body = move || {
            let Some(lanes) = take(&worker) else {
                return;
            };
            if let Some(cpu) = worker.pin
                && let Err(e) = pvblk_sys::cpu::pin(cpu)
            {
                tracing::warn!("keeping {} on CPU {cpu}: {e}", worker.name);
            }
            // Modelled and timed completions are due to the microsecond.
            let _ = pvblk_sys::cpu::set_timer_slack_ns(1000);
            worker.tid.store(tid(), Ordering::Release);
            let mut running = WorkerThread {
                worker: &worker,
                lanes,
                out: None,
            };
            loop {
                match catch_unwind(AssertUnwindSafe(|| running.run())) {
                    Ok(Ok(())) => {
                        *worker.over.lock() = true;
                        worker.ended.notify_all();
                        break;
                    }
                    Ok(Err(Replaced)) => break,
                    Err(_) => match catch_unwind(AssertUnwindSafe(|| running.after_panic())) {
                        Ok(Ok(())) => {}
                        Ok(Err(Replaced)) => break,
                        Err(_) => abort(&worker.name),
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

/// Ends the process after a worker can't go on: otherwise its peers would wait for ever. They keep their
/// requests, and send them again to the next server.
fn abort(name: &str) -> ! {
    tracing::error!("{name}: a bug that it can't go on after: the server aborts");
    // The log has a thread of its own.
    std::thread::sleep(Duration::from_millis(200));
    std::process::abort()
}

fn tid() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// The thread was replaced while it was in a call, and has no lanes any more.
struct Replaced;

/// The thread that has a worker's lane table.
struct WorkerThread<'a> {
    worker: &'a Worker,
    lanes: Holder<LaneTable>,
    /// The lane that the thread is in a call of.
    out: Option<(LaneId, Box<Lane>)>,
}

/// The result of one call into an active lane.
struct Stepped {
    moved: bool,
    /// Sectors of data that were copied.
    work: u64,
    /// The worker's time that it took: [`Lane::cost`].
    cost: u64,
    end: Option<SourceEnd>,
}

impl WorkerThread<'_> {
    /// Runs until told to exit.
    fn run(&mut self) -> Result<(), Replaced> {
        let mut steps = 0u32;
        loop {
            if self.worker.commands.is_pending() || !self.lanes.commands.is_empty() {
                self.take_commands()?;
            }
            if self.lanes.exiting {
                for index in 0..self.lanes.entries.len() {
                    self.remove(index, SourceEnd::Closed)?;
                }
                return Ok(());
            }
            if self.lanes.any_lost {
                self.end_lost()?;
            }
            let (moved, work) = self.step_active()?;
            let now = self.lanes.now;
            if self.lanes.busy.round(moved, now) {
                self.note_busy(moved);
            }
            steps += 1;
            if self.has_sleepers() {
                steps += (work / SECTORS_PER_STEP).min(STEPS_PER_LOOK.into()) as u32;
            }
            if !moved
                && !self.lanes.active.is_empty()
                && let Some(now) = self.lanes.yields.idle_step()
            {
                self.lanes.now = now;
            }
            if self.lanes.active.is_empty() {
                let timeout = self.lanes.next_timeout();
                self.look(timeout)?;
            } else if steps >= STEPS_PER_LOOK || (!moved && steps >= STEPS_PER_LOOK / 4) {
                steps = 0;
                if self.has_descriptors_to_look_at() {
                    self.look(Some(Duration::ZERO))?;
                }
            }
        }
    }

    /// Tells the watchdog how long lanes have had work.
    fn note_busy(&mut self, works: bool) {
        let lanes = &mut *self.lanes;
        if works {
            // Nobody has read the clock since the last sleep.
            lanes.now = Instant::now();
        }
        let busy = lanes.busy.until(lanes.now, works);
        let busy = busy.as_micros() as u64;
        self.worker.busy.store(busy, Ordering::Relaxed);
        lanes.weigh();
    }

    /// True if there are lanes that sleep, whose descriptors are to be looked at.
    #[inline]
    fn has_sleepers(&self) -> bool {
        self.lanes.entries.len() > self.lanes.active.len()
    }

    /// True if a look at the poller may tell more than a step of each active lane does. Commands have a flag of their own.
    fn has_descriptors_to_look_at(&self) -> bool {
        let lanes = &self.lanes;
        let tells = |index: &usize| {
            let entry = lanes.entries.get(*index).and_then(Option::as_ref);
            entry
                .and_then(|e| e.lane.as_ref())
                .is_none_or(|lane| lane.is_told_by_descriptor())
        };
        self.has_sleepers() || lanes.active.iter().any(tells)
    }

    /// Calls a lane, if it is here. All calls that can block are made by this method.
    #[inline]
    fn call<R>(
        &mut self,
        index: usize,
        f: impl FnOnce(&mut Lane) -> R,
    ) -> Result<Option<R>, Replaced> {
        let Some(entry) = self.lanes.entry(index) else {
            return Ok(None);
        };
        let Some(lane) = entry.lane.take() else {
            return Ok(None);
        };
        let (_, lane) = self.out.insert((entry.home.id(), lane));
        let (result, kept) = self.lanes.away(|| f(lane));
        let Some((id, lane)) = self.out.take() else {
            return Ok(None);
        };
        if !kept {
            self.worker.commands.send(Command::Back(id, Some(lane)));
            return Err(Replaced);
        }
        if let Some(entry) = self.lanes.entry(index) {
            entry.lane = Some(lane);
        }
        Ok(Some(result))
    }

    fn take_commands(&mut self) -> Result<(), Replaced> {
        self.worker.commands.take(&mut self.lanes.commands);
        while let Some(command) = self.lanes.commands.pop_front() {
            match command {
                Command::Attach(home, lane, end) => self.attach(home, lane, end)?,
                Command::Arrive(home, lane, end) => self.lanes.take_in(home, lane, end),
                Command::Reach(home, stop) => self.reach(&home, stop),
                Command::Share(wish) => self.share(wish)?,
                Command::Back(id, lane) => self.lanes.lane_back(id, lane),
                Command::Exit => {
                    self.lanes.exiting = true;
                    self.worker.commands.close(&mut self.lanes.commands);
                }
            }
        }
        Ok(())
    }

    fn attach(&mut self, home: Arc<LaneHome>, lane: Box<Lane>, end: End) -> Result<(), Replaced> {
        let Err((e, lane, end)) = self.lanes.admit(home, lane, end) else {
            return Ok(());
        };
        let what = format!("{}: waiting for it", lane.describe());
        let why = SourceEnd::Broken(pvblk_block::Error::os(what, e));
        self.finish_outside(lane, end, why)
    }

    /// Ends a lane that isn't in the table.
    fn finish_outside(
        &mut self,
        lane: Box<Lane>,
        end: End,
        why: SourceEnd,
    ) -> Result<(), Replaced> {
        let ((), kept) = self.lanes.away(|| finish(Some(lane), Some(end), why));
        if kept { Ok(()) } else { Err(Replaced) }
    }

    /// Makes a lane stop, or look at its source, and wakes it.
    fn reach(&mut self, home: &Arc<LaneHome>, stop: bool) {
        let Some(index) = self.lanes.find(home.id()) else {
            return home.pass_on(stop);
        };
        if let Some(entry) = self.lanes.entry(index) {
            entry.stop |= stop;
            if let Some(lane) = &mut entry.lane {
                match stop {
                    true => lane.stop(),
                    false => lane.poll_source(),
                }
            }
        }
        self.lanes.now = Instant::now();
        self.lanes.wake(index);
    }

    /// Gives a lane to another worker, as [`Command::Share`] says.
    fn share(&mut self, wish: Wish) -> Result<(), Replaced> {
        if self.lanes.exiting {
            return Ok(());
        }
        let Some((home, lane, end)) = self.lanes.give(wish) else {
            return Ok(());
        };
        let name = &self.worker.name;
        tracing::debug!(
            "{} moves from {name} to worker {}",
            lane.describe(),
            wish.to
        );
        let Err((lane, end)) = home.move_to(wish.to, lane, end) else {
            return Ok(());
        };
        // The back end is about to end.
        self.finish_outside(lane, end, SourceEnd::Closed)
    }

    /// Steps each active lane once whose disk has a share of this round left, those that woke up first; fewer if they have done so much that the
    /// sleeping ones are to be looked at. Returns true if there was any work, and the sectors of data that were copied.
    fn step_active(&mut self) -> Result<(bool, u64), Replaced> {
        let (mut moved, mut work, mut cost) = (false, 0, 0);
        let company = self.lanes.company > 0;
        self.lanes.company = self.lanes.company.saturating_sub(1);
        // Some lanes have neighbours, whose turns should come soon.
        let shared = company || self.has_sleepers();
        let most = if shared { TURN_SECTORS } else { u64::MAX };
        self.lanes.fresh = 0;
        let (mut first, mut waits) = (None, false);
        let (mut i, mut visits) = (0, self.lanes.active.len());
        while visits > 0 && i < self.lanes.active.len() {
            if shared && (work >= LOOK_SECTORS || cost >= LOOK_COST) {
                return Ok((moved, LOOK_SECTORS.max(work)));
            }
            visits -= 1;
            let index = self.lanes.active[i];
            let rounds = match self.lanes.active.len() {
                1 => STEPS_ALONE,
                _ => 1,
            };
            let Some(entry) = self.lanes.entry(index) else {
                self.lanes.active.remove(i);
                continue;
            };
            if entry.stall.is_on() {
                self.lanes.active.remove(i);
                self.lanes.park(index);
                continue;
            }
            let deaf = !entry.interest.0;
            let share = entry.share;
            let disk = Arc::as_ptr(&entry.stall) as usize;
            if *first.get_or_insert(disk) != disk {
                self.lanes.company = ROUNDS_OF_COMPANY;
            }
            if shared && !self.lanes.shares.may(share) {
                waits = true;
                i += 1;
                continue;
            }
            let stepped = self.call(index, |lane| {
                lane.set_company(company);
                steps(lane, rounds, deaf, most)
            })?;
            let Some(stepped) = stepped else {
                self.lanes.active.remove(i);
                continue;
            };
            work += stepped.work;
            // Rounds have an end whatever a step did.
            let step_cost = stepped.cost.max(1);
            cost += step_cost;
            if stepped.moved || (stepped.work >= TURN_SECTORS && stepped.end.is_none()) {
                let now = self.lanes.now;
                if let Some(entry) = self.lanes.entry(index) {
                    entry.end_idle(now);
                    entry.weight.add(step_cost);
                }
                moved = true;
                if shared && self.lanes.shares.charge(share, step_cost) {
                    // In the next round the other lanes of its disk come first.
                    self.lanes.active.remove(i);
                    self.lanes.active.push(index);
                } else {
                    i += 1;
                }
                continue;
            }
            if let Some(end) = stepped.end {
                self.lanes.active.remove(i);
                self.remove(index, end)?;
            } else if self.try_sleep(index)? {
                self.lanes.active.remove(i);
            } else {
                i += 1;
            }
        }
        if waits && !moved {
            self.lanes.shares.next_round();
            moved = true;
        }
        Ok((moved, work))
    }

    fn remove(&mut self, index: usize, end: SourceEnd) -> Result<(), Replaced> {
        let lanes = &mut *self.lanes;
        let Some(Some(entry)) = lanes.entries.get_mut(index) else {
            return Ok(());
        };
        if entry.lane.is_none() {
            if let (true, Some(end)) = (lanes.exiting, entry.end.take()) {
                end.forget();
            }
            return Ok(()); // a thread that was replaced has it
        }
        let (id, told) = (entry.home.id(), entry.end.take());
        lanes.disconnect(index);
        let lane = lanes.entry(index).and_then(|entry| entry.lane.take());
        let ((), kept) = self.lanes.away(|| finish(lane, told, end));
        if !kept {
            self.worker.commands.send(Command::Back(id, None));
            return Err(Replaced);
        }
        self.lanes.entries[index] = None;
        // Unmapping takes time, and the deadlines of other lanes go by this clock.
        self.lanes.now = Instant::now();
        Ok(())
    }

    /// Puts a lane to sleep that found no work, if its spin window is over and neither end is ready.
    fn try_sleep(&mut self, index: usize) -> Result<bool, Replaced> {
        let now = Instant::now();
        self.lanes.now = now;
        let Some(entry) = self.lanes.entry(index) else {
            return Ok(true);
        };
        if entry.is_polled_on(now) {
            if let Some(lane) = &mut entry.lane
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
        // A timer is late by more than this, so the lane spins for the rest.
        if deadline.is_some_and(|d| d.saturating_duration_since(now) < Duration::from_micros(20)) {
            return Ok(false);
        }
        if !self.lanes.prepare_descriptors(index) {
            return Ok(false);
        }
        self.lanes.sleep(index, deadline);
        Ok(true)
    }

    /// Lets lanes that slept long enough give back memory that they keep for reuse.
    fn rest(&mut self) -> Result<(), Replaced> {
        let now = self.lanes.now;
        self.lanes.rest_at = None;
        for index in 0..self.lanes.entries.len() {
            let Some(entry) = self.lanes.entry(index) else {
                continue;
            };
            if !entry.used || !entry.asleep {
                continue;
            }
            let at = entry.slept_at + REST;
            if at <= now {
                entry.used = false;
                self.call(index, Lane::rest)?;
                continue;
            }
            let other = self.lanes.rest_at.unwrap_or(at);
            self.lanes.rest_at = Some(other.min(at));
        }
        Ok(())
    }

    /// Waits up to `timeout` for sleeping lanes and wakes those with work.
    fn look(&mut self, timeout: Option<Duration>) -> Result<(), Replaced> {
        let mut events = std::mem::take(&mut self.lanes.events);
        events.clear();
        let sleeps = timeout != Some(Duration::ZERO);
        if sleeps {
            self.worker.asleep.store(true, Ordering::SeqCst);
        }
        if let Err(e) = self.lanes.poller.wait(&mut events, timeout) {
            tracing::error!("waiting for events: {e}");
        }
        if sleeps {
            self.worker.asleep.store(false, Ordering::SeqCst);
            self.worker.signal.a_worker_woke();
        }
        let due = !self.lanes.deadlines.is_empty() || self.lanes.rest_at.is_some();
        if !events.is_empty() || due {
            self.lanes.now = Instant::now();
        }
        for event in &events {
            if event.token == COMMAND_EVENT {
                // The event is cleared here, and not where commands are taken, because it may be
                // signalled after that. Its command is seen in any case: `pending` is set before
                // the event is signalled.
                self.worker.commands.event.drain();
                continue;
            }
            let index = (event.token >> 1) as usize;
            let of_source = event.token & 1 == 0;
            self.call(index, |lane| match of_source {
                true => lane.source_woken(),
                false => lane.device_woken(),
            })?;
            self.lanes.wake(index);
        }
        self.lanes.events = events;
        if self.lanes.rest_at.is_some_and(|at| at <= self.lanes.now) {
            self.rest()?;
        }
        while let Some(&(at, index)) = self.lanes.deadlines.first() {
            if at > self.lanes.now {
                break;
            }
            self.lanes.wake(index);
        }
        Ok(())
    }
}

/// Steps a lane up to `rounds` times, as long as there is work, and until it has copied `most`
/// sectors.
#[inline]
fn steps(lane: &mut Lane, rounds: u32, deaf: bool, most: u64) -> Stepped {
    let mut sum = Stepped {
        moved: false,
        work: 0,
        cost: 0,
        end: None,
    };
    lane.begin_turn();
    for _ in 0..rounds {
        let moved = lane.step();
        sum.work += lane.work();
        sum.cost += lane.cost();
        if !moved {
            if !sum.moved {
                sum.end = lane.finished();
            }
            break;
        }
        if deaf {
            // The lane was full and the poller doesn't listen for it; now there may be room.
            lane.poll_source();
        }
        sum.moved = true;
        if sum.work >= most {
            break;
        }
    }
    sum
}
