//! [`WaitEntry`]: wakes a sleeping owner, and loses no wake-up.

use super::primitives::{Event, Flag, Native, Primitives};
use std::io;

/// The wait queue entry of one queue or thread. Its owner prepares to wait and looks before it
/// sleeps, and others wake it:
///
/// ```text
/// owner:  prepare_to_wait ─▶ look: is_pending? ─no─▶ wait for the event ─▶ finish_wait, drain ─▶ take_pending ─▶ …
/// others: publish what there is ─▶ wake: pending, barrier, sleeping? ─yes─▶ notify the event
/// ```
///
/// A full barrier stands between the owner's "sleeping" and its look, and between the other's "pending" and
/// its look: at least one of them sees the other. A wake-up may come more than once or too late; the owner
/// finds nothing then.
#[derive(Debug)]
pub struct WaitEntry<P: Primitives = Native> {
    /// There is something that the owner hasn't looked at.
    pending: P::Flag,
    /// The owner may sleep, and has to be notified.
    sleeping: P::Flag,
    event: P::Event,
}

impl<P: Primitives> WaitEntry<P> {
    /// The entry of an owner that is awake. Errors if the process has no descriptor left.
    pub fn new() -> io::Result<WaitEntry<P>> {
        Ok(WaitEntry {
            pending: P::Flag::new(false),
            sleeping: P::Flag::new(false),
            event: P::Event::new()?,
        })
    }

    /// Tells the owner that there is something: it looks before it sleeps, or is woken. The caller publishes
    /// it before this call.
    #[inline]
    pub fn wake(&self) {
        self.pending.raise();
        // Pairs with the barrier in `prepare_to_wait`.
        P::full_barrier();
        if self.sleeping.load_relaxed() {
            self.event.notify();
        }
    }

    /// Tells the owner that there is something, without waking it: the owner finds it when it
    /// looks.
    #[inline]
    pub(super) fn raise(&self) {
        self.pending.raise();
    }

    /// Signals the event whether the owner sleeps or not, also if the owner sleeps without having prepared
    /// because it has no request in flight.
    pub fn notify(&self) {
        self.event.notify();
    }

    /// Prepares to sleep: after this call the owner must look at [`WaitEntry::is_pending`], and at everything
    /// else that it waits for.
    #[inline]
    pub fn prepare_to_wait(&self) {
        self.sleeping.store_relaxed(true);
        // Pairs with the barrier in `wake`.
        P::full_barrier();
    }

    /// Marks the owner as awake; true if it had prepared to wait.
    #[inline]
    pub fn finish_wait(&self) -> bool {
        let prepared = self.sleeping.load_relaxed();
        if prepared {
            // The store needs no ordering: a waker that still sees the owner asleep notifies it
            // once too often.
            self.sleeping.store_relaxed(false);
        }
        prepared
    }

    /// True if there is something that the owner hasn't taken.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.pending.load_acquire()
    }

    /// True if there is something; the owner then takes all of it.
    #[inline]
    pub fn take_pending(&self) -> bool {
        // A flag that is missed here is seen by the look before sleeping.
        self.pending.load_relaxed() && self.pending.take()
    }

    /// True if the owner has prepared to wait.
    #[inline]
    pub fn is_sleeping(&self) -> bool {
        self.sleeping.load_relaxed()
    }

    /// The event that the owner waits for.
    pub fn event(&self) -> &P::Event {
        &self.event
    }
}
