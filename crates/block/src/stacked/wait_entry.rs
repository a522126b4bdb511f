//! [`WaitEntry`]: how a sleeper is woken and nothing is lost.

use super::primitives::{Event, Flag, Native, Primitives};
use std::io;

/// The wait queue entry of one queue or thread. Its owner sleeps in steps, and others wake it:
///
/// ```text
/// owner:  prepare_to_wait ─▶ look: is_pending? ─no─▶ wait for the event ─▶ finish_wait, drain ─▶ take_pending ─▶ …
/// others: publish what there is ─▶ wake: pending, barrier, sleeping? ─yes─▶ notify the event
/// ```
///
/// A full barrier stands between the owner's "sleeping" and its look, and between the other's "pending" and its look: at least one of
/// them sees the other. A wake-up may be given more than once or too late, and is then one that finds nothing.
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

    /// There is something for the owner: it looks before it sleeps, or is woken. The thing to find must be there before.
    #[inline]
    pub fn wake(&self) {
        self.pending.raise();
        // Pairs with the one in `prepare_to_wait`.
        P::full_barrier();
        if self.sleeping.load_relaxed() {
            self.event.notify();
        }
    }

    /// There is something for the owner, which it finds when it looks. It isn't woken.
    #[inline]
    pub(super) fn raise(&self) {
        self.pending.raise();
    }

    /// Signals the event whether the owner sleeps or not, also if it sleeps without having prepared, having no request in flight.
    pub fn notify(&self) {
        self.event.notify();
    }

    /// The owner is about to sleep: it must look at [`WaitEntry::is_pending`], and at whatever else it waits for, after this.
    #[inline]
    pub fn prepare_to_wait(&self) {
        self.sleeping.store_relaxed(true);
        // Pairs with the one in `wake`.
        P::full_barrier();
    }

    /// The owner is awake; true if it had prepared to wait.
    #[inline]
    pub fn finish_wait(&self) -> bool {
        let prepared = self.sleeping.load_relaxed();
        if prepared {
            // Without ordering: a waker that still sees the owner asleep notifies it once too often.
            self.sleeping.store_relaxed(false);
        }
        prepared
    }

    /// Whether there is something that the owner hasn't taken.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.pending.load_acquire()
    }

    /// True if there is something; the owner takes all of it then.
    #[inline]
    pub fn take_pending(&self) -> bool {
        // One that is missed here is seen by the look before sleeping.
        self.pending.load_relaxed() && self.pending.take()
    }

    /// Whether the owner may sleep.
    #[inline]
    pub fn is_sleeping(&self) -> bool {
        self.sleeping.load_relaxed()
    }

    /// The event that the owner waits for.
    pub fn event(&self) -> &P::Event {
        &self.event
    }
}
