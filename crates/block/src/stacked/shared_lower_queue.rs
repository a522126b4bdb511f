//! [`SharedLowerQueue`]: a lower queue that doesn't stop when its owner does.

use super::lower_queue::LowerQueue;
use super::primitives::{Count, Flag, Lock, Native, Primitives};
use crate::{Completion, Readiness, Request};
use pvblk_sys::Poller;
use std::io;
use std::os::fd::BorrowedFd;

/// Times that a device may say that it is ready after a poll, before [`SharedLowerQueue::poll_unattended`] gives up.
const MOST_ROUNDS: usize = 4;

/// A lower queue with I/O that no request of its owner waits for, such as reading ahead.
///
/// Its owner *attends* to it while it has requests in flight, since its user polls then. At other times it is *unattended*, and every queue
/// that sleeps waits for it too. [`super::QueueTable`] hands it over:
///
/// ```text
/// owner:   attended ─▶ its last request is done: unattended, barrier ─▶ does anybody sleep? ─▶ wake them
/// sleeper: prepare_to_wait (with its barrier) ─▶ which lower queues are unattended and not idle? ─▶ arm them, wait for them
/// ```
pub struct SharedLowerQueue<P: Primitives = Native> {
    lower: P::Lock<LowerQueue>,
    /// Requests that haven't come back: changed under the lock, read without it.
    in_flight: P::Count,
    attended: P::Flag,
}

impl<P: Primitives> SharedLowerQueue<P> {
    /// Unattended, over a lower queue that is idle.
    pub fn new(lower: LowerQueue) -> SharedLowerQueue<P> {
        SharedLowerQueue {
            lower: P::Lock::new(lower),
            in_flight: P::Count::new(),
            attended: P::Flag::new(false),
        }
    }

    /// Requests that haven't come back.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load()
    }

    /// Whether all have.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0
    }

    /// Whether its owner looks after it.
    #[inline]
    pub fn is_attended(&self) -> bool {
        self.attended.load_relaxed()
    }

    /// Its owner looks after it from now on. [`super::QueueTable::leave`] is the opposite.
    #[inline]
    pub fn attend(&self) {
        self.attended.store_relaxed(true);
    }

    pub(super) fn unattend(&self) {
        self.attended.store_relaxed(false);
    }

    /// Gives requests to the device, in order. True if it was idle: queues that sleep don't wait for it yet.
    pub fn submit(&self, requests: impl Iterator<Item = Box<Request>>) -> bool {
        let mut lower = self.lower.lock();
        let before = lower.in_flight();
        requests.for_each(|request| lower.push(request));
        self.in_flight.add(lower.in_flight() - before);
        lower.submit();
        before == 0
    }

    /// Appends completions, for its owner.
    pub fn poll(&self, out: &mut Vec<Completion>) {
        if !self.is_idle() {
            let mut lower = self.lower.lock();
            self.in_flight.sub(lower.poll(out));
        }
    }

    /// Appends completions, unless another thread is just doing so, and asks for a wake-up for the rest, in the name of all queues that wait for it.
    /// False if there is more and no wake-up was asked for: then [`super::QueueTable::wake_sleepers`] must follow, once the completions are dealt with.
    pub fn poll_unattended(&self, out: &mut Vec<Completion>) -> bool {
        if self.is_idle() {
            return true;
        }
        let Some(mut lower) = self.lower.try_lock() else {
            return true;
        };
        for _ in 0..=MOST_ROUNDS {
            self.in_flight.sub(lower.poll(out));
            if lower.is_idle() || lower.arm() != Readiness::Ready {
                return true;
            }
        }
        false
    }

    /// See [`LowerQueue::arm`].
    pub fn arm(&self) -> Readiness {
        self.lower.lock().arm()
    }

    /// See [`LowerQueue::arm_in`]; for its owner.
    pub fn arm_in(&self, poller: &Poller, token: u64) -> io::Result<Readiness> {
        self.lower.lock().arm_in(poller, token)
    }

    /// See [`LowerQueue::leave_poller`]; for its owner.
    pub fn leave_poller(&self, poller: &Poller) {
        self.lower.lock().leave_poller(poller);
    }

    /// See [`LowerQueue::woken`].
    pub fn woken(&self) {
        self.lower.lock().woken();
    }

    /// Calls `f` with the descriptor, if there is one.
    pub fn with_fd<T>(&self, f: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        self.lower.lock().wait_fd().map(f)
    }
}
