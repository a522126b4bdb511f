//! A lane of a disk with limits: requests that have to wait, in order of arrival, reads apart from requests that change the disk.
//!
//! The first of each kind has been charged and passes at its time; those behind it are charged when they are first. So lanes of a disk take turns
//! without knowing of each other.

use super::Lane;
use crate::throttle::{Connection, KINDS, Throttle, kind};
use pvblk_block::trace::Phase;
use pvblk_block::{Readiness, Request};
use std::collections::VecDeque;
use std::sync::Arc;

/// Interval in nanoseconds at which waiting requests are looked at again, since the limits may have changed: 100 ms.
const LOOK_AGAIN: u64 = 100_000_000;

/// Waiting requests of one kind.
#[derive(Default)]
struct Waiting {
    requests: VecDeque<Box<Request>>,
    /// Time at which the first may pass, if there is one: it is charged.
    at: u64,
}

/// The limits of a lane's disk and connection, and the requests that wait because of them.
pub(super) struct LaneThrottle {
    shared: Arc<Throttle>,
    connection: Arc<Connection>,
    kinds: [Waiting; KINDS],
    /// Kept for its memory: the batch that is sorted.
    incoming: Vec<Box<Request>>,
    /// That of the limits by which the first ones were charged.
    generation: u64,
    /// Nothing is pulled before this time: requests that must stay in order passed in advance. 0: none did.
    pause: u64,
    /// Requests wait, or there is a pause: the disk's throttle knows, and stays on for this lane.
    holds: bool,
}

impl LaneThrottle {
    pub(super) fn new(shared: &Arc<Throttle>, connection: Arc<Connection>) -> LaneThrottle {
        shared.enter(&connection);
        LaneThrottle {
            shared: Arc::clone(shared),
            connection,
            kinds: Default::default(),
            incoming: Vec::new(),
            generation: 0,
            pause: 0,
            holds: false,
        }
    }

    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.shared.is_on()
    }

    /// True while requests wait, or nothing is pulled because some passed in advance.
    #[inline]
    pub(super) fn holds(&self) -> bool {
        self.holds
    }

    /// True while nothing is pulled, because requests passed in advance.
    #[inline]
    pub(super) fn is_paused(&self) -> bool {
        self.pause > 0
    }

    /// Ends a pause whose time has come, or whose limits have changed. True while there is one.
    fn pauses(&mut self) -> bool {
        let over = self.pause <= self.shared.now();
        if over || self.shared.generation() != self.generation {
            self.pause = 0;
            self.note(0, self.waiting());
        }
        self.is_paused()
    }

    /// Takes requests that have to wait out of `batch`, and puts those before it that waited and may pass now.
    fn sort(&mut self, batch: &mut Vec<Box<Request>>) {
        let now = self.shared.now();
        self.follow_changes();
        std::mem::swap(batch, &mut self.incoming);
        let before = self.waiting();
        for kind in 0..KINDS {
            self.release(kind, now, batch);
        }
        let passed = before - self.waiting();
        for request in self.incoming.drain(..) {
            let Some(kind) = kind(request.op) else {
                batch.push(request);
                continue;
            };
            let waiting = &mut self.kinds[kind];
            if waiting.requests.is_empty() {
                let at = self.shared.charge(&self.connection, &request, kind, now);
                if at <= now {
                    batch.push(request);
                    continue;
                }
                waiting.at = at;
            }
            waiting.requests.push_back(request);
        }
        self.note(passed, before);
    }

    /// Takes all that waits, and then `batch`, which has to stay in order: they pass in advance, and nothing is pulled until they would have passed.
    fn advance(&mut self, batch: &mut Vec<Box<Request>>) {
        let now = self.shared.now();
        let before = self.waiting();
        self.follow_changes();
        std::mem::swap(batch, &mut self.incoming);
        self.drain(batch);
        for request in self.incoming.drain(..) {
            if let Some(kind) = kind(request.op) {
                let at = self.shared.charge(&self.connection, &request, kind, now);
                self.pause = self.pause.max(at);
            }
            batch.push(request);
        }
        if self.pause <= now {
            self.pause = 0;
        }
        self.note(before, before);
    }

    /// Appends all that waits to `out`. A pause is to follow.
    fn drain(&mut self, out: &mut impl Extend<Box<Request>>) {
        let now = self.shared.now();
        for (kind, waiting) in self.kinds.iter_mut().enumerate() {
            let mut at = waiting.at;
            // The first one is charged.
            for request in waiting.requests.iter().skip(1) {
                at = self.shared.charge(&self.connection, request, kind, now);
            }
            if !waiting.requests.is_empty() {
                self.pause = self.pause.max(at);
            }
            out.extend(waiting.requests.drain(..));
        }
    }

    /// Appends requests that waited and may pass to `out`.
    fn release(&mut self, kind: usize, now: u64, out: &mut Vec<Box<Request>>) {
        let waiting = &mut self.kinds[kind];
        while let Some(request) = waiting.requests.front() {
            if waiting.at > now {
                break;
            }
            self.shared.passes(&self.connection, request, kind, now);
            out.extend(waiting.requests.pop_front());
            if let Some(next) = waiting.requests.front() {
                waiting.at = self.shared.charge(&self.connection, next, kind, now);
            }
        }
    }

    /// Finds new times for the first ones if limits have changed; they keep old ones that are earlier.
    fn follow_changes(&mut self) {
        let generation = self.shared.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.pause = 0;
        for (kind, waiting) in self.kinds.iter_mut().enumerate() {
            if let Some(request) = waiting.requests.front() {
                let due = self.shared.due(&self.connection, request, kind);
                waiting.at = waiting.at.min(due);
            }
        }
    }

    fn waiting(&self) -> u64 {
        let all = self.kinds.iter().map(|w| w.requests.len() as u64);
        all.sum()
    }

    /// Counts: of `before` requests that waited `passed` don't any more.
    fn note(&mut self, passed: u64, before: u64) {
        let now = self.waiting();
        if passed > 0 {
            self.shared.count_passed(passed);
        }
        let more = now + passed - before;
        if more > 0 {
            self.shared.count_held(more);
        }
        let holds = now > 0 || self.is_paused();
        if self.holds != holds {
            self.holds = holds;
            self.shared.holds(holds);
        }
    }

    /// The time at which the lane has to be stepped again; `None` if nothing waits.
    fn deadline(&self) -> Option<u64> {
        let firsts = self.kinds.iter().filter(|w| !w.requests.is_empty());
        let firsts = firsts.map(|w| w.at);
        let at = firsts.chain(Some(self.pause).filter(|p| *p > 0)).min()?;
        let now = self.shared.now();
        let soonest = now + self.shared.shortest_sleep();
        Some(at.max(soonest).min(now + LOOK_AGAIN))
    }

    /// For [`Lane::arm`]: as long as nothing passes, the lane may sleep until then.
    pub(super) fn arm(&self) -> Readiness {
        let deadline = self.deadline();
        Readiness::Wait(deadline.map(|at| self.shared.instant(at)))
    }
}

impl Drop for LaneThrottle {
    fn drop(&mut self) {
        if self.holds {
            self.shared.count_passed(self.waiting());
            self.shared.holds(false);
        }
    }
}

impl Lane {
    /// Instead of a pull, in a lane of a disk with limits: true if there is one now, and otherwise requests that waited may have passed.
    #[cold]
    pub(super) fn may_pull_limited(&mut self) -> bool {
        if !self.throttle.is_paused() {
            return true;
        }
        if self.throttle.pauses() {
            return false;
        }
        // Its descriptor wasn't waited for.
        self.may_pull = true;
        true
    }

    /// Lets the batch wait for the limits of its disk, as far as it has to, and lets those pass that waited. Returns the sectors of the batch then.
    #[cold]
    pub(super) fn limit(&mut self, ordered: bool) -> u64 {
        match ordered {
            true => self.throttle.advance(&mut self.batch),
            false => self.throttle.sort(&mut self.batch),
        }
        // Those that pass.
        let passing = self.batch.iter().map(|r| &**r);
        self.tracer.requests(Phase::Get, passing);
        let sectors = self.batch.iter().map(|r| r.sectors);
        sectors.fold(0, u64::saturating_add)
    }

    /// Lets requests pass that waited, without a pull.
    #[cold]
    pub(super) fn pass_waiting(&mut self) -> (bool, bool) {
        let sectors = self.limit(false);
        if self.batch.is_empty() {
            return (false, false);
        }
        self.submit(false, sectors)
    }

    /// The source has ended: requests that wait pass now, in advance. Returns as [`Lane::pull`].
    #[cold]
    pub(super) fn let_go(&mut self) -> (bool, bool) {
        let waiting = self.throttle.waiting();
        if waiting == 0 {
            return (false, false);
        }
        let before = self.held.len();
        self.throttle.drain(&mut self.held);
        let passing = self.held.iter().skip(before).map(|r| &**r);
        self.tracer.requests(Phase::Get, passing);
        self.throttle.pause = 0;
        self.throttle.note(waiting, waiting);
        (true, true)
    }
}
