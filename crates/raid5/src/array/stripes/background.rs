//! [`StripeBackground`]: work that blocks on members, and that of queues which were closed with work.

use super::super::background::FORGIVE;
use super::queue::QueueState;
use super::sync::SyncQueue;
use super::{Shared, StripeArray};

use crate::core::Action;
use crate::core::stripes::{Errand, Mail, SyncEnd};

use crate::words::Owner;

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
    /// Queues that were closed with work; `None`: nobody finishes them any more.
    queues: Mutex<Option<Vec<QueueState>>>,
}

impl Orders {
    pub fn new() -> Result<Orders, Error> {
        let wait = WaitEntry::new().map_err(|e| Error::os("raid5: starting", e))?;
        Ok(Orders {
            wait: Arc::new(wait),
            superblocks: Mutex::default(),
            action: Mutex::default(),
            synced: Mutex::default(),
            queues: Mutex::new(Some(Vec::new())),
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

    /// The action that a user wants.
    pub fn action(&self) -> Option<Action> {
        *self.action.lock()
    }

    /// It was begun, or can't be.
    pub fn action_is_taken(&self) {
        *self.action.lock() = None;
    }

    pub fn set_synced(&self, synced: SyncEnd) {
        *self.synced.lock() = Some(synced);
    }

    pub fn synced(&self) -> Option<SyncEnd> {
        *self.synced.lock()
    }

    /// A queue was closed with work.
    pub fn finish(&self, queue: QueueState) {
        self.put_back(queue);
        self.wait.wake();
    }

    fn take_queues(&self) -> Vec<QueueState> {
        self.queues
            .lock()
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// A queue isn't finished yet.
    fn put_back(&self, queue: QueueState) {
        if let Some(queues) = &mut *self.queues.lock() {
            queues.push(queue);
        }
    }

    /// Nobody finishes the queues that are left.
    pub fn abandon(&self) {
        let queues = self.queues.lock().take();
        drop(queues);
    }

    pub fn has_queues(&self) -> bool {
        self.queues
            .lock()
            .as_ref()
            .is_some_and(|queues| !queues.is_empty())
    }
}

/// The background work of an array: [`StripeArray::keep`] starts a thread for it, tests step it.
pub struct StripeBackground {
    shared: Arc<Shared>,
    /// From here its thread counts time.
    begin: Instant,
    forgive_at: Duration,
    sync: SyncQueue,
    /// The array is being closed: no action is begun.
    is_last: bool,
}

impl StripeBackground {
    pub fn new(array: &StripeArray) -> StripeBackground {
        StripeBackground {
            shared: Arc::clone(&array.shared),
            begin: Instant::now(),
            forgive_at: FORGIVE,
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

    /// Does what is due; `now` counts from any moment.
    pub fn work(&mut self, now: Duration) {
        let wanted = std::mem::take(&mut *self.shared.orders.superblocks.lock());
        for Wanted { by, errand } in wanted {
            let failed = self.write_superblocks(errand);
            let answer = match errand {
                Errand::Name { .. } => Mail::Named(failed),
                Errand::Recovered(_) | Errand::Resynced(_) => Mail::Told(failed),
            };
            self.shared.post(&mut vec![(by, answer)]);
        }
        let mut queues = self.shared.orders.take_queues();
        let over = queues.extract_if(.., |queue| {
            queue.progress();
            queue.is_idle()
        });
        over.for_each(QueueState::close);
        queues
            .into_iter()
            .for_each(|queue| self.shared.orders.put_back(queue));
        if now >= self.forgive_at {
            self.forgive_at = now + FORGIVE;
            self.shared.common.forgive_read_errors();
        }
        if !self.is_last {
            self.sync.work(&self.shared, now);
        }
    }

    /// Writes superblocks; returns the slots (a mask) that failed that.
    fn write_superblocks(&self, errand: Errand) -> u64 {
        let mut disk = self.shared.disk.lock();
        disk.apply(errand);
        disk.set_corrected(|slot| self.shared.common.corrected(slot));
        let before = disk.live();
        for _ in 0..TRIES {
            match disk.write(errand) {
                Ok(failed) => return failed,
                Err(error) => tracing::error!("{}: superblocks: {error}", self.shared.name),
            }
            std::thread::sleep(PAUSE);
        }
        before
    }
}

impl Background for StripeBackground {
    fn step(&mut self) -> Due {
        self.work(self.begin.elapsed());
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
        // Nobody steps a core that has panicked.
        if std::thread::panicking() {
            return;
        }
        if let Some(queue) = self.sync.stop() {
            self.shared.orders.finish(queue);
        }
    }
}
