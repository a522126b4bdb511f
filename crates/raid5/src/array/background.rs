//! [`BackgroundWork`]: work that blocks on members, and that of queues which were closed with work.

use super::device::Raid5;
use super::disk::OnDisk;
use super::queue::QueueState;
use super::shared::Shared;
use super::sync::SyncQueue;

use crate::array::returns::{Places, Returns, add_whole};
use crate::array::told::{Seen, Told};
use crate::blocking::{Idle, sleepy};
use crate::core::{Errand, Mail, Opening, Sums, TICKS};
use crate::sums::group_of;

use crate::words::Owner;

use parking_lot::Mutex;
use pvblk_block::stacked::{Background, Due, WaitEntry};
use pvblk_block::{BlockDevice, Error};
use pvblk_sys::Poller;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval at which counts of read errors are halved.
const FORGIVE: Duration = Duration::from_hours(1);
/// Interval at which queues that were closed with work are looked at.
const LOOK: Duration = Duration::from_millis(1);

/// The same for devices that went, and at which requests are left.
const LOOK_LEFT: Duration = Duration::from_millis(20);

/// Metadata is tried so often, in this interval: the process may be short of descriptors or memory for a moment. Then the array stops.
const TRIES: usize = 3;
const PAUSE: Duration = Duration::from_millis(100);

/// Superblocks that a queue wants to be written.
struct Chore {
    by: Owner,
    errand: Errand,
}

/// The work that queues leave for the background.
pub(super) struct Chores {
    wait: Arc<WaitEntry>,
    superblocks: Mutex<Vec<Chore>>,
    /// Stripes that batches are to begin with, each with the queue that waits for it.
    openings: Mutex<Vec<(Owner, Opening)>>,
    /// Queues that were closed with work; `None`: nobody finishes them any more.
    queues: Mutex<Option<Vec<QueueState>>>,
}

impl Chores {
    /// `wait`: the background thread's.
    pub fn new(wait: &Arc<WaitEntry>) -> Chores {
        Chores {
            wait: Arc::clone(wait),
            superblocks: Mutex::default(),
            openings: Mutex::default(),
            queues: Mutex::new(Some(Vec::new())),
        }
    }

    /// Superblocks are to be written; the queue gets the answer.
    pub fn write_superblocks(&self, by: Owner, errand: Errand) {
        self.superblocks.lock().push(Chore { by, errand });
        self.wait.wake();
    }

    /// Bits of stripes are to be set, and sums to come into memory; the queue gets an answer for each. Empties the list.
    pub fn open(&self, by: Owner, openings: &mut Vec<Opening>) {
        if openings.is_empty() {
            return;
        }
        let openings = openings.drain(..).map(|opening| (by, opening));
        self.openings.lock().extend(openings);
        self.wait.wake();
    }

    /// The background looks whether there is something to do.
    pub fn wake(&self) {
        self.wait.wake();
    }

    /// A queue was closed with work.
    pub fn finish(&self, queue: QueueState) {
        self.put_back(queue);
        self.wait.wake();
    }

    /// True if superblocks or bits are to be written, or sums to be read.
    fn has_writes(&self) -> bool {
        !self.superblocks.lock().is_empty() || !self.openings.lock().is_empty()
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

/// The background work of an array: [`Raid5::keep`] starts a thread for it, tests step it.
pub struct BackgroundWork {
    shared: Arc<Shared>,
    forgive_at: Duration,
    sync: SyncQueue,
    returns: Returns,
    told: Told,
    /// Devices that went have requests left.
    leaves_some: bool,
    /// The array is being closed: no action is begun.
    is_last: bool,
}

impl BackgroundWork {
    pub fn new(array: &Raid5) -> BackgroundWork {
        BackgroundWork {
            told: Told::new(seen(&array.shared), array.places()),
            shared: Arc::clone(&array.shared),
            forgive_at: FORGIVE,
            sync: SyncQueue::default(),
            returns: Returns::default(),
            leaves_some: false,
            is_last: false,
        }
    }

    /// That of an array that is being closed.
    pub(super) fn last(array: &Raid5) -> BackgroundWork {
        let mut background = BackgroundWork::new(array);
        background.is_last = true;
        background
    }

    /// Does what is due; `now` counts from any moment.
    pub fn work(&mut self, now: Duration) {
        let begin = Instant::now();
        self.work_with(&|| now + begin.elapsed(), &mut sleepy());
    }

    /// The same by another clock; `idle` is called while it waits for metadata; an error of it ends the array's work.
    pub fn work_with(&mut self, clock: &dyn Fn() -> Duration, idle: &mut Idle<'_>) {
        let shared = Arc::clone(&self.shared);
        let now = clock();
        // A member that stalls while its metadata is written is given up, too.
        let ended = Cell::new(false);
        let mut idle = || {
            shared.tick(clock());
            idle().inspect_err(|_| ended.set(true))
        };
        shared.tick(now);
        let wanted = std::mem::take(&mut *self.shared.chores.superblocks.lock());
        for Chore { by, errand } in wanted {
            if ended.get() {
                return;
            }
            let failed = self.write_superblocks(errand, &mut idle);
            let answer = match errand {
                Errand::Name { .. } => Mail::Named(failed),
                Errand::Recovered { .. } | Errand::Resynced(_) => Mail::Told(failed),
            };
            self.shared.post(&mut vec![(by, answer)]);
        }
        if ended.get() {
            return;
        }
        // Later: a page would be written to a member too that superblocks are about to leave out.
        self.open(&mut idle);
        if ended.get() {
            return;
        }
        let mut queues = self.shared.chores.take_queues();
        let over = queues.extract_if(.., |queue| {
            queue.go_on();
            queue.is_idle()
        });
        over.for_each(QueueState::close);
        queues
            .into_iter()
            .for_each(|queue| self.shared.chores.put_back(queue));
        if now >= self.forgive_at {
            self.forgive_at = now + FORGIVE;
            self.shared.common.forgive_read_errors();
            self.returns.forgive();
        }
        if !self.is_last {
            let orders = self.shared.control.orders.take();
            self.look_for_returns(now, orders.frozen);
            self.sync.work(&self.shared, &orders, now, &mut idle);
        }
        self.leaves_some = self.shared.poll_left();
        let live = self.shared.common.devices().1;
        self.shared.note_gone(live);
        let gone = self.shared.devices.forget(live);
        if !gone.is_empty() {
            // Idle queues are woken too: as long as one has a device open, no other program can have it.
            let queues = &self.shared.queues;
            queues.for_each(|_, queue| queue.wait().notify());
            drop(gone);
        }
        self.tell();
    }

    /// Looks after devices that are to come back; `frozen`: nothing is to begin.
    fn look_for_returns(&mut self, now: Duration, frozen: bool) {
        let common = &self.shared.common;
        let arrives = self.shared.control.arriving.lock().is_some();
        let is_free = common.takes_device() && !arrives;
        let places = Places {
            wants: common.missing().filter(|_| is_free),
            incoming: common.recovered().map(|(place, _)| place),
            frozen,
        };
        self.returns.step(&self.shared, now, places);
    }

    /// The device that is to be added as a spare, since it came back and is to be rebuilt whole. Adding waits for the device.
    pub fn take_whole(&mut self) -> Option<(String, Arc<dyn BlockDevice>)> {
        self.returns.take_whole()
    }

    /// True if work is under way, or will be.
    pub fn is_busy(&self) -> bool {
        let (common, control) = (&self.shared.common, &self.shared.control);
        let takes_spare = common.missing().is_some() && common.takes_device();
        let has_device = control.has_spare() || control.returning.lock().is_some();
        let waits = common.wanted().is_some() || takes_spare && has_device;
        let is_left = self.shared.chores.has_writes() || self.shared.chores.has_queues();
        let orders = control.orders.pending();
        self.sync.is_busy() || is_left || orders.has_any() || waits && !orders.frozen
    }

    /// The time for which nothing will be due, unless I/O ends or somebody asks for something; `None`: for ever.
    pub fn nap(&self, now: Duration) -> Option<Duration> {
        let look = self.shared.chores.has_queues().then_some(LOOK);
        let forgive = self.forgive_at.saturating_sub(now);
        let tick = self.shared.control.limit.map(|limit| limit / TICKS);
        let left = self.leaves_some.then_some(LOOK_LEFT);
        let naps = look.into_iter().chain(self.sync.nap(&self.shared, now));
        let naps = naps.chain(tick).chain(left);
        naps.chain([forgive]).min()
    }

    /// Tells subscribers of changes of the members.
    fn tell(&mut self) {
        let shared = &self.shared;
        let told = self.told.look(seen(&self.shared), || shared.places());
        let lag = self.shared.written.lock().lag;
        shared.forget_old_names(!told.is_empty(), lag);
        let events = &self.shared.control.events;
        told.into_iter().for_each(|event| events.raise(event));
    }

    /// Writes superblocks; returns the slots (a mask) that failed that.
    fn write_superblocks(&self, errand: Errand, idle: &mut Idle<'_>) -> u64 {
        let shared = &self.shared;
        let mut disk = shared.disk.lock();
        // A start at the position that superblocks tell counts on the sums of all before.
        let tells = matches!(errand, Errand::Recovered { .. } | Errand::Resynced(_));
        if let Some(sums) = shared.common.sums().filter(|_| tells) {
            let failed = shared.try_writing_sums(&mut disk, (sums, &sums.dirty()), idle);
            if failed != Some(0) {
                return failed.unwrap_or_else(|| disk.live());
            }
        }
        disk.apply(errand);
        disk.set_corrected(|slot| shared.common.corrected(slot));
        let before = disk.live();
        let written = shared.try_writing(&mut disk, idle, |disk, idle| {
            disk.write(errand, before, idle)
        });
        let gone = disk.take_gone();
        gone.iter().for_each(|(_, was)| shared.note_missed(was));
        shared.patience.will_go(gone);
        written.unwrap_or(before)
    }

    /// Sets the bits that queues wait for, all at once, and brings the sums into memory that they need.
    fn open(&self, idle: &mut Idle<'_>) {
        let shared = &self.shared;
        let wanted = std::mem::take(&mut *shared.chores.openings.lock());
        if wanted.is_empty() {
            return;
        }
        let openings = || wanted.iter().map(|(_, opening)| opening);
        let writes = openings().filter(|opening| opening.writes);
        let stripes: Vec<u64> = writes.map(|opening| opening.stripe).collect();
        let mut disk = shared.disk.lock();
        let mut failed = Some(0);
        if !stripes.is_empty() {
            failed =
                shared.try_writing(&mut disk, idle, |disk, idle| disk.set_bits(&stripes, idle));
        }
        // Else batches see the stop that follows, and ask again.
        if failed == Some(0) {
            shared.common.bits_are_set(stripes);
        }
        if let Some(sums) = shared.common.sums().filter(|_| failed == Some(0)) {
            let groups: BTreeSet<usize> = openings().map(|o| group_of(o.stripe)).collect();
            let loaded = shared.try_writing(&mut disk, idle, |disk, idle| {
                let mut missing = groups.iter().filter(|group| !sums.has(**group));
                missing.try_for_each(|group| disk.load_sums(sums, *group, idle))
            });
            failed = loaded.map(|()| 0);
        }
        let failed = failed.unwrap_or(disk.live());
        drop(disk);
        let answer = |(by, Opening { stripe, .. })| (by, Mail::Intended { stripe, failed });
        shared.post(&mut wanted.into_iter().map(answer).collect());
    }
}

impl Shared {
    /// As [`OnDisk::write_sums`], and tries that again; as [`Shared::try_writing`].
    pub(super) fn try_writing_sums(
        &self,
        disk: &mut OnDisk,
        (sums, groups): (&Sums, &[usize]),
        idle: &mut Idle<'_>,
    ) -> Option<u64> {
        self.try_writing(disk, idle, |disk, idle| disk.write_sums(sums, groups, idle))
    }

    /// Writes metadata, and tries that again. `None`: it isn't possible, or `idle` has ended it.
    pub(super) fn try_writing<T>(
        &self,
        disk: &mut OnDisk,
        idle: &mut Idle<'_>,
        mut write: impl FnMut(&mut OnDisk, &mut Idle<'_>) -> Result<T, Error>,
    ) -> Option<T> {
        let ended = Cell::new(false);
        let mut idle = || idle().inspect_err(|_| ended.set(true));
        for _ in 0..TRIES {
            match write(disk, &mut idle) {
                Ok(done) => {
                    *self.written.lock() = disk.written();
                    return Some(done);
                }
                Err(error) => tracing::error!("{}: metadata: {error}", self.control.name),
            }
            if ended.get() {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        None
    }
}

/// The members at this moment.
pub(super) fn seen(shared: &Shared) -> Seen {
    let common = &shared.common;
    Seen {
        failed: common.missing(),
        broken: common.is_broken(),
        rebuilding: common.recovered().map(|(place, _)| place),
        takeovers: common.takeovers(),
    }
}

impl Background for BackgroundWork {
    fn step(&mut self) -> Due {
        let now = self.shared.begin.elapsed();
        self.work(now);
        if let Some(whole) = self.take_whole() {
            add_whole(&self.shared, whole);
        }
        let nap = self.nap(now);
        nap.map_or(Due::Never, |nap| Due::At(Instant::now() + nap))
    }

    fn arm(&mut self, poller: &Poller) -> io::Result<Due> {
        if self.shared.chores.has_writes() {
            return Ok(Due::Now);
        }
        self.sync.arm(poller)
    }

    fn woken(&mut self) {
        self.sync.woken();
    }
}

impl Drop for BackgroundWork {
    fn drop(&mut self) {
        // Nobody steps a core that has panicked.
        if std::thread::panicking() {
            return;
        }
        if let Some(queue) = self.sync.stop() {
            self.shared.chores.finish(queue);
        }
    }
}
