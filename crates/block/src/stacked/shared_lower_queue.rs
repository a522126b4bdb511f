//! [`SharedLowerQueue`]: a lower queue whose I/O goes on when its owner's user stops polling.

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
/// Its owner *attends* to it while the owner has requests in flight, since its user polls then. At other
/// times the lower queue is *unattended*, and every queue that sleeps waits for it too. [`super::QueueTable`]
/// hands it over:
///
/// ```text
/// owner:   attended ─▶ its last request is done: unattended, barrier ─▶ does anybody sleep? ─▶ wake them
/// sleeper: prepare_to_wait (with its barrier) ─▶ which lower queues are unattended and not idle? ─▶ arm them, wait for them
/// ```
pub struct SharedLowerQueue<P: Primitives = Native> {
    lower: P::Lock<LowerQueue>,
    /// Number of requests that haven't completed: changed under the lock, read without it.
    in_flight: P::Count,
    attended: P::Flag,
}

impl<P: Primitives> SharedLowerQueue<P> {
    /// An unattended queue over a lower queue that is idle.
    pub fn new(lower: LowerQueue) -> SharedLowerQueue<P> {
        SharedLowerQueue {
            lower: P::Lock::new(lower),
            in_flight: P::Count::new(),
            attended: P::Flag::new(false),
        }
    }

    /// Number of requests that haven't completed.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load()
    }

    /// True if no request is in flight.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0
    }

    /// True if the owner attends to the queue.
    #[inline]
    pub fn is_attended(&self) -> bool {
        self.attended.load_relaxed()
    }

    /// Marks the queue as attended from now on. [`super::QueueTable::leave`] is the opposite.
    #[inline]
    pub fn attend(&self) {
        self.attended.store_relaxed(true);
    }

    pub(super) fn unattend(&self) {
        self.attended.store_relaxed(false);
    }

    /// Submits requests to the device, in order. True if the lower queue was idle: queues that sleep don't
    /// wait for it yet.
    pub fn submit(&self, requests: impl Iterator<Item = Box<Request>>) -> bool {
        let mut lower = self.lower.lock();
        let before = lower.in_flight();
        requests.for_each(|request| lower.push(request));
        self.in_flight.add(lower.in_flight() - before);
        lower.submit();
        before == 0
    }

    /// Appends completions, for the owner.
    pub fn poll(&self, out: &mut Vec<Completion>) {
        if !self.is_idle() {
            let mut lower = self.lower.lock();
            self.in_flight.sub(lower.poll(out));
        }
    }

    /// Appends completions, and asks for a wake-up for the rest, for all queues that wait. False if there may be more completions and no
    /// wake-up was asked for: then [`super::QueueTable::wake_sleepers`] must follow, once the completions are handled. So it is while another
    /// thread has the lower queue, and does nothing but wait for it, or leave it.
    pub fn poll_unattended(&self, out: &mut Vec<Completion>) -> bool {
        if self.is_idle() {
            return true;
        }
        let Some(mut lower) = self.lower.try_lock() else {
            return false;
        };
        for _ in 0..=MOST_ROUNDS {
            self.in_flight.sub(lower.poll(out));
            if lower.is_idle() || lower.arm() != Readiness::Ready {
                return true;
            }
        }
        false
    }

    /// Asks for a wake-up, as [`LowerQueue::arm`].
    pub fn arm(&self) -> Readiness {
        self.lower.lock().arm()
    }

    /// Asks for a wake-up, as [`LowerQueue::arm_in`]; for the owner.
    pub fn arm_in(&self, poller: &Poller, token: u64) -> io::Result<Readiness> {
        self.lower.lock().arm_in(poller, token)
    }

    /// Leaves the poller, as [`LowerQueue::leave_poller`]; for the owner.
    pub fn leave_poller(&self, poller: &Poller) {
        self.lower.lock().leave_poller(poller);
    }

    /// Clears the descriptor, as [`LowerQueue::woken`].
    pub fn woken(&self) {
        self.lower.lock().woken();
    }

    /// Calls `f` with the descriptor, if there is one.
    pub fn with_fd<T>(&self, f: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        self.lower.lock().wait_fd().map(f)
    }
}
