//! [`CompletionQueue`]: completions and I/O that queues leave for one another.

use super::primitives::{Lock, Native, Primitives};
use super::queue_table::Neighbour;
use super::wait_entry::WaitEntry;
use std::io;

/// Completions for one queue's user, and I/O that is to go through its lower queue, left by other queues. `T`
/// holds them, in vectors that keep their memory; each entry is added once and taken once.
pub struct CompletionQueue<T: Send + 'static, P: Primitives = Native> {
    entries: P::Lock<T>,
    wait: WaitEntry<P>,
}

impl<T: Default + Send + 'static, P: Primitives> CompletionQueue<T, P> {
    /// An empty queue. Errors if the process has no descriptor left.
    pub fn new() -> io::Result<CompletionQueue<T, P>> {
        Ok(CompletionQueue {
            entries: P::Lock::new(T::default()),
            wait: WaitEntry::new()?,
        })
    }

    /// Adds entries, and wakes the owner.
    pub fn post(&self, add: impl FnOnce(&mut T)) {
        add(&mut self.entries.lock());
        self.wait.wake();
    }

    /// Adds entries without waking the owner: for callers that know whether it sleeps, and signal its event
    /// themselves.
    #[inline]
    pub fn leave(&self, add: impl FnOnce(&mut T)) {
        add(&mut self.entries.lock());
        self.wait.raise();
    }

    /// If there may be entries, calls `take` with all of them, for the owner to take them out. False if there
    /// are none.
    #[inline]
    pub fn collect(&self, take: impl FnOnce(&mut T)) -> bool {
        let any = self.wait.take_pending();
        if any {
            take(&mut self.entries.lock());
        }
        any
    }

    /// The entries, without regard to wake-ups: the caller looks and wakes by rules of its own.
    pub fn entries(&self) -> <P::Lock<T> as Lock<T>>::Guard<'_> {
        self.entries.lock()
    }

    /// The wait queue entry of the owner.
    #[inline]
    pub fn wait(&self) -> &WaitEntry<P> {
        &self.wait
    }
}

impl<T: Default + Send, P: Primitives> Neighbour<P> for CompletionQueue<T, P> {
    type Entries = T;

    fn completions(&self) -> &CompletionQueue<T, P> {
        self
    }
}
