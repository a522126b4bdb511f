//! Frames for requests: without waiting, by reclaim, or after a sleep.

use super::Memory;
use super::reclaim::By;
use crate::alloc::{End, Reserve};
use crate::core::writeback::WriteBack;
use crate::policy::{AfterFailure, Policy};
use std::time::{Duration, Instant};

/// Reclaims of one allocation before others get a turn.
const ROUNDS: usize = 4;
/// The sleep of a request that isn't to wait and finds nothing to reclaim: a kernel would spin.
const SHORT: Duration = Duration::from_millis(1);

/// The time, and how many I/Os of the cache have ended. A request that sleeps for memory wakes by either.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub now: Instant,
    pub ends: u64,
}

/// The state of a request's allocation of a frame.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocation {
    step: Step,
    /// Pages that its last reclaim freed.
    progress: usize,
}

#[derive(Clone, Copy, Debug, Default)]
enum Step {
    #[default]
    Begin,
    Reclaim,
    /// It has reclaimed, and tries again.
    Retry,
    Sleep {
        since: Instant,
        until: Instant,
        /// It wakes as soon as more I/Os have ended than these.
        ends: Option<u64>,
        /// It wakes as soon as the device isn't congested.
        congested: bool,
    },
}

impl Allocation {
    /// Gives up: the next call begins anew.
    pub fn reset(&mut self) {
        self.step = Step::Begin;
    }

    /// True if it sleeps for memory.
    pub fn is_asleep(&self) -> bool {
        matches!(self.step, Step::Sleep { .. })
    }

    /// Pages that its last reclaim freed.
    pub fn progress(&self) -> usize {
        self.progress
    }

    /// The end of its sleep, if it sleeps.
    pub fn until(&self) -> Option<Instant> {
        match self.step {
            Step::Sleep { until, .. } => Some(until),
            _ => None,
        }
    }

    /// True if its request may go on.
    pub fn is_due(&self, moment: Moment, writes: &WriteBack) -> bool {
        match self.step {
            Step::Begin | Step::Reclaim | Step::Retry => true,
            Step::Sleep {
                until,
                ends,
                congested,
                ..
            } => {
                moment.now >= until
                    || ends.is_some_and(|ends| ends != moment.ends)
                    || (congested && !writes.is_congested())
            }
        }
    }
}

impl<P: Policy> Memory<P> {
    /// A frame for a request of `owner`. `None`: the request is to end its turn, and to come again when its allocation is due.
    pub fn allocate(
        &mut self,
        allocation: &mut Allocation,
        owner: usize,
        moment: Moment,
        writes: &mut WriteBack,
    ) -> Option<u32> {
        let list = self.list_of[owner];
        let yields = self.policy.yields_before_reclaim();
        let mut rounds = 0;
        loop {
            match allocation.step {
                Step::Begin => {
                    if let Some(frame) = self.take(list, Reserve::Low) {
                        return Some(frame);
                    }
                    self.ask_background();
                    if let Some(frame) = self.take(list, Reserve::Min) {
                        return Some(frame);
                    }
                    allocation.step = Step::Reclaim;
                    if yields {
                        return None;
                    }
                }
                Step::Reclaim => {
                    self.counters.allocstall += 1;
                    allocation.progress = self.reclaim(list, By::Request, writes);
                    allocation.step = Step::Retry;
                    if yields {
                        // Others come between, as where a kernel gives up the CPU.
                        return None;
                    }
                    self.alloc.drain();
                }
                Step::Retry => {
                    if let Some(frame) = self.take(list, Reserve::Min) {
                        allocation.step = Step::Begin;
                        return Some(frame);
                    }
                    self.counters.failed_after_progress += u64::from(allocation.progress > 0);
                    let congested = writes.is_congested();
                    allocation.step = self.after_failure(allocation.progress, congested, moment);
                    rounds += 1;
                    let again = matches!(allocation.step, Step::Reclaim) && !yields;
                    if !again || rounds == ROUNDS {
                        return None;
                    }
                }
                Step::Sleep { since, .. } => {
                    if !allocation.is_due(moment, writes) {
                        return None;
                    }
                    self.counters.stalls += 1;
                    let slept = moment.now.saturating_duration_since(since);
                    self.counters.stall_ns += slept.as_nanos() as u64;
                    allocation.step = Step::Begin;
                }
            }
        }
    }

    /// The step after a reclaim that freed `progress` pages, and an allocation that failed all the same.
    fn after_failure(&self, progress: usize, congested: bool, moment: Moment) -> Step {
        let sleep = |time: Duration, any_end: bool, congested: bool| Step::Sleep {
            since: moment.now,
            until: moment.now + time,
            ends: any_end.then_some(moment.ends),
            congested,
        };
        let timeout = self.timeout;
        match self.policy.after_failure(progress, congested) {
            AfterFailure::Reclaim => Step::Reclaim,
            AfterFailure::SleepUntilEnd => sleep(timeout, true, false),
            AfterFailure::SleepBriefly => sleep(SHORT, true, false),
            AfterFailure::SleepTimeout => sleep(timeout, false, false),
            AfterFailure::SleepWhileCongested => sleep(timeout, false, true),
        }
    }

    /// A frame without waiting, from the reserve for requests that can't wait.
    pub fn allocate_at_once(&mut self, owner: usize) -> Option<u32> {
        self.take(self.list_of[owner], Reserve::None)
    }

    fn take(&mut self, list: usize, reserve: Reserve) -> Option<u32> {
        let warm = self.alloc.warm_frames();
        let frame = self.alloc.take(list, End::Cold, reserve)?;
        if self.alloc.warm_frames() != warm {
            self.count_memory();
        }
        self.counters.pgalloc += 1;
        Some(frame)
    }
}
