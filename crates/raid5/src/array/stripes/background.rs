//! [`StripeBackground`]: work that blocks on members, and that of queues which were closed with work.

use super::queue::QueueState;
use super::sync::SyncQueue;
use super::{Shared, StripeArray};
use crate::blocking::sleepy;
use crate::core::Action;
use crate::core::stripes::{Errand, Mail, SyncEnd};
use crate::identity::now_secs;
use crate::words::Owner;
use crate::write_superblocks;
use parking_lot::Mutex;
use pvblk_block::Error;
use pvblk_block::stacked::{Background, Due, WaitEntry};
use pvblk_sys::Poller;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval at which queues that were closed with work are looked at.
const LOOK: Duration = Duration::from_millis(1);

/// Superblocks are tried so often, in this interval: the process may be short of descriptors or memory for a moment. Then the array stops.
const TRIES: usize = 3;
const PAUSE: Duration = Duration::from_millis(100);

/// Superblocks that a queue wants to be written.
struct Wanted {
    by: Owner,
    errand: Errand,
}

/// The work that queues leave for the background.
pub(super) struct Orders {
    wait: Arc<WaitEntry>,
    superblocks: Mutex<Vec<Wanted>>,
    /// A user wants it.
    action: Mutex<Option<Action>>,
    /// The end of the last action.
    synced: Mutex<Option<SyncEnd>>,
    /// Queues that were closed with work.
    queues: Mutex<Vec<QueueState>>,
}

impl Orders {
    pub fn new() -> Result<Orders, Error> {
        let wait = WaitEntry::new().map_err(|e| Error::os("raid5: starting", e))?;
        Ok(Orders {
            wait: Arc::new(wait),
            superblocks: Mutex::default(),
            action: Mutex::default(),
            synced: Mutex::default(),
            queues: Mutex::default(),
        })
    }

    pub fn wait(&self) -> &Arc<WaitEntry> {
        &self.wait
    }

    /// Superblocks are to be written; the queue gets the answer.
    pub fn write_superblocks(&self, by: Owner, errand: Errand) {
        self.superblocks.lock().push(Wanted { by, errand });
        self.wait.wake();
    }

    /// An action is to begin when none is under way.
    pub fn sync(&self, action: Action) {
        *self.synced.lock() = None;
        *self.action.lock() = Some(action);
        self.wait.wake();
    }

    pub fn take_action(&self) -> Option<Action> {
        self.action.lock().take()
    }

    pub fn set_synced(&self, synced: SyncEnd) {
        *self.synced.lock() = Some(synced);
    }

    pub fn synced(&self) -> Option<SyncEnd> {
        *self.synced.lock()
    }

    /// A queue was closed with work.
    pub fn finish(&self, queue: QueueState) {
        self.queues.lock().push(queue);
        self.wait.wake();
    }

    /// Nobody finishes the queues that are left.
    pub fn abandon(&self) {
        let queues = std::mem::take(&mut *self.queues.lock());
        drop(queues);
    }

    pub fn has_queues(&self) -> bool {
        !self.queues.lock().is_empty()
    }
}

/// The background work of an array: [`StripeArray::keep`] starts a thread for it, tests step it.
pub struct StripeBackground {
    shared: Arc<Shared>,
    begin: Instant,
    sync: SyncQueue,
    /// The array is being closed: no action is begun.
    is_last: bool,
}

impl StripeBackground {
    pub fn new(array: &StripeArray) -> StripeBackground {
        StripeBackground {
            shared: Arc::clone(&array.shared),
            begin: Instant::now(),
            sync: SyncQueue::default(),
            is_last: false,
        }
    }

    /// That of an array that is being closed.
    pub(super) fn last(array: &StripeArray) -> StripeBackground {
        let mut background = StripeBackground::new(array);
        background.is_last = true;
        background
    }

    /// Does what is due.
    pub fn work(&mut self) {
        let wanted = std::mem::take(&mut *self.shared.orders.superblocks.lock());
        for Wanted { by, errand } in wanted {
            let failed = self.write_superblocks(errand);
            let answer = match errand {
                Errand::Name { .. } => Mail::Named(failed),
                Errand::Recovered(_) | Errand::Resynced(_) => Mail::Told(failed),
            };
            self.shared.post(&mut vec![(by, answer)]);
        }
        let mut queues = std::mem::take(&mut *self.shared.orders.queues.lock());
        let over = queues.extract_if(.., |queue| {
            queue.progress();
            queue.is_idle()
        });
        over.for_each(QueueState::close);
        self.shared.orders.queues.lock().append(&mut queues);
        if !self.is_last {
            self.sync.work(&self.shared, self.begin.elapsed());
        }
    }

    /// Writes superblocks; returns the slots (a mask) that failed that.
    fn write_superblocks(&self, errand: Errand) -> u64 {
        let mut disk = self.shared.disk.lock();
        disk.apply(errand);
        let before = disk.live();
        for _ in 0..TRIES {
            let assembly = &mut disk.assembly;
            match write_superblocks(assembly, false, now_secs(), &mut sleepy()) {
                Ok(()) => return before & !disk.live(),
                Err(error) => tracing::error!("{}: superblocks: {error}", self.shared.name),
            }
            std::thread::sleep(PAUSE);
        }
        before
    }
}

impl Background for StripeBackground {
    fn step(&mut self) -> Due {
        self.work();
        let look = self.shared.orders.has_queues().then_some(LOOK);
        let nap = look.into_iter().chain(self.sync.nap()).min();
        nap.map_or(Due::Never, |nap| Due::At(Instant::now() + nap))
    }

    fn arm(&mut self, poller: &Poller) -> io::Result<Due> {
        if !self.shared.orders.superblocks.lock().is_empty() {
            return Ok(Due::Now);
        }
        self.sync.arm(poller)
    }

    fn woken(&mut self) {
        self.sync.woken();
    }
}

impl Drop for StripeBackground {
    fn drop(&mut self) {
        if let Some(queue) = self.sync.stop() {
            self.shared.orders.finish(queue);
        }
    }
}
