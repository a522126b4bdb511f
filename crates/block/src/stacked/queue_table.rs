//! [`QueueTable`]: the queues of a device, by number.

use super::completion_queue::CompletionQueue;
use super::primitives::{Count, Lock, Native, Primitives};
use super::shared_lower_queue::SharedLowerQueue;
use super::wait_entry::WaitEntry;
use std::sync::Arc;

/// A queue of a stacked device, as the other queues of the device see it.
pub trait Neighbour<P: Primitives = Native>: Send + Sync + 'static {
    /// Entries that others leave for the queue.
    type Entries: Default + Send + 'static;

    /// The completion queue in which others leave entries.
    fn completions(&self) -> &CompletionQueue<Self::Entries, P>;

    /// The lower queue of this queue, if others poll it while this queue has no request in flight.
    fn lower(&self) -> Option<&SharedLowerQueue<P>> {
        None
    }
}

enum Slot<Q> {
    Free,
    Open(Arc<Q>),
    /// The queue is closed, and its lower queue isn't idle.
    Closed(Arc<Q>),
}

impl<Q> Slot<Q> {
    fn neighbour(&self) -> Option<&Arc<Q>> {
        match self {
            Slot::Free => None,
            Slot::Open(queue) | Slot::Closed(queue) => Some(queue),
        }
    }
}

/// The queues of a device, by number, and the count of those that sleep: the kernel's wait queue, whose entries are numbered.
pub struct QueueTable<Q: Neighbour<P>, P: Primitives = Native> {
    slots: P::Lock<Vec<Slot<Q>>>,
    /// Number of queues that prepared to wait through [`QueueTable::prepare_to_wait`].
    sleepers: P::Count,
}

impl<Q: Neighbour<P>, P: Primitives> Default for QueueTable<Q, P> {
    fn default() -> QueueTable<Q, P> {
        QueueTable {
            slots: P::Lock::new(Vec::new()),
            sleepers: P::Count::new(),
        }
    }
}

fn is_idle<P: Primitives, Q: Neighbour<P>>(queue: &Q) -> bool {
    queue.lower().is_none_or(SharedLowerQueue::is_idle)
}

impl<Q: Neighbour<P>, P: Primitives> QueueTable<Q, P> {
    /// Adds a queue that is opened: returns the lowest free number.
    pub fn open(&self, queue: &Arc<Q>) -> usize {
        let mut slots = self.slots.lock();
        let all = &mut *slots;
        let is_free = |slot: &Slot<Q>| match slot {
            Slot::Free => true,
            Slot::Open(_) => false,
            Slot::Closed(queue) => is_idle(&**queue),
        };
        let number = all.iter().position(is_free).unwrap_or(all.len());
        let slot = Slot::Open(Arc::clone(queue));
        match all.get_mut(number) {
            Some(free) => *free = slot,
            None => all.push(slot),
        }
        number
    }

    /// Closes a queue. The others poll its lower queue until it is idle; only then its number is free.
    pub fn close(&self, number: usize) {
        let mut slots = self.slots.lock();
        let slot = &mut slots[number];
        *slot = match std::mem::replace(slot, Slot::Free) {
            Slot::Open(queue) if !is_idle(&*queue) => {
                queue.lower().inspect(|lower| lower.unattend());
                Slot::Closed(queue)
            }
            _ => Slot::Free,
        };
        drop(slots);
        self.wake_sleepers(number);
    }

    /// The queue with this number, while it is open.
    pub fn get(&self, number: usize) -> Option<Arc<Q>> {
        match self.slots.lock().get(number) {
            Some(Slot::Open(queue)) => Some(Arc::clone(queue)),
            _ => None,
        }
    }

    /// Calls `f` with each queue, including those that are closed and not idle.
    pub fn for_each(&self, mut f: impl FnMut(usize, &Arc<Q>)) {
        let slots = self.slots.lock();
        for (number, slot) in slots.iter().enumerate() {
            if let Some(queue) = slot.neighbour() {
                f(number, queue);
            }
        }
    }

    /// Posts once to each queue whose number is listed, and empties the list. Entries for a queue that isn't
    /// open are left.
    pub fn post(&self, numbers: &mut Vec<usize>, mut add: impl FnMut(usize, &Q, &mut Q::Entries)) {
        numbers.sort_unstable();
        numbers.dedup();
        for number in numbers.drain(..) {
            if let Some(queue) = self.get(number) {
                let completions = queue.completions();
                completions.post(|entries| add(number, &queue, entries));
            }
        }
    }

    /// Prepares to wait as [`WaitEntry::prepare_to_wait`]; the queue is counted as one that
    /// [`QueueTable::wake_sleepers`] wakes.
    pub fn prepare_to_wait(&self, entry: &WaitEntry<P>) {
        if !entry.is_sleeping() {
            self.sleepers.add(1);
        }
        entry.prepare_to_wait();
    }

    /// Ends the wait as [`WaitEntry::finish_wait`].
    #[inline]
    pub fn finish_wait(&self, entry: &WaitEntry<P>) {
        if entry.finish_wait() {
            self.sleepers.sub(1);
        }
    }

    /// Wakes all queues that sleep, except `but`: there is something to wait for that there wasn't when they
    /// went to sleep.
    pub fn wake_sleepers(&self, but: usize) {
        // Pairs with the barrier of `prepare_to_wait`: either this thread sees a sleeper, or the sleeper sees
        // the change.
        P::full_barrier();
        if self.sleepers.load() == 0 {
            return;
        }
        self.for_each(|number, queue| {
            let entry = queue.completions().wait();
            if number != but && entry.is_sleeping() {
                entry.wake();
            }
        });
    }

    /// To be called when a queue has no request in flight any more, so that its user doesn't poll: the others
    /// take over the I/O of its lower queue.
    ///
    /// `handed`: the queue gave I/O to another lower queue that was idle and unattended
    /// ([`SharedLowerQueue::submit`]); queues that slept then don't wait for it.
    pub fn leave(&self, number: usize, lower: &SharedLowerQueue<P>, handed: bool) {
        lower.unattend();
        if handed || !lower.is_idle() {
            self.wake_sleepers(number);
        }
    }

    /// Queues, other than `but`, whose lower queues have I/O in flight and are unattended.
    pub fn unattended(&self, but: usize) -> Vec<Arc<Q>> {
        let mut found = Vec::new();
        self.for_each(|number, queue| {
            let is_orphan = |l: &SharedLowerQueue<P>| !l.is_attended() && !l.is_idle();
            if number != but && queue.lower().is_some_and(is_orphan) {
                found.push(Arc::clone(queue));
            }
        });
        found
    }
}
