//! The background work of an array that serves: it recovers spares, makes parity right, and clears bits of
//! the bitmap.

use super::control::Parts;
use super::manage::PendingOrders;
use super::pace::{Pace, Speeds};
use super::queue::ArrayQueue;
use super::returns::{Returns, add_whole};
use super::told::{Seen, Told};
use super::{ArrayShared, ManagedArray, MemberDevice, Raid5};
use crate::Member;
use crate::core::Core;
use pvblk_block::stacked::{Background, BackgroundThread, Due};
use pvblk_block::{BlockDevice, DeviceQueue, Error, QueueContext, Readiness, SystemClock};
use pvblk_sys::Poller;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval at which the bitmap is swept: md's `daemon_sleep`.
pub(super) const SWEEP: Duration = Duration::from_secs(5);
/// Interval at which counts of read errors are halved.
pub(super) const FORGIVE: Duration = Duration::from_hours(1);
/// Longest sleep of the thread.
const NAP: Duration = Duration::from_millis(200);
/// The same while something is under way.
const SLICE: Duration = Duration::from_millis(20);

/// The background work of an array: [`BackgroundWork::step`] has to be called again and again. [`Raid5::keep`] starts
/// a thread for it.
pub struct BackgroundWork {
    pub(super) shared: Arc<ArrayShared>,
    pub(super) queue: ArrayQueue,
    pub(super) returns: Returns,
    /// Next tick of members' time.
    pub(super) tick_at: Duration,
    pace: Pace,
    /// Number of devices that became members, as far as it was reported.
    takeovers: u64,
    told: Told,
    sweep_at: Duration,
    forgive_at: Duration,
}

impl BackgroundWork {
    /// One for each array. Errors if its queue can't be opened.
    pub fn new(array: &Raid5) -> Result<BackgroundWork, Error> {
        let context = QueueContext::new(64);
        let mut queue = ArrayQueue::open(&array.shared, &context, array.floor())?;
        queue.step(|core, owner| core.set_background_queue(Some(owner)));
        let seen = Seen::of(&array.shared.core.lock());
        Ok(BackgroundWork {
            told: Told::new(seen, array.places()),
            queue,
            shared: Arc::clone(&array.shared),
            returns: Returns::default(),
            tick_at: Duration::ZERO,
            pace: Pace::default(),
            takeovers: 0,
            sweep_at: SWEEP,
            forgive_at: FORGIVE,
        })
    }

    /// Does the work that is due; `now` counts from any moment. Returns the time for which no more will be
    /// due, unless I/O ends.
    pub fn step(&mut self, now: Duration) -> Duration {
        while self.queue.progress() {}
        let orders = self.shared.control.orders.take();
        self.follow(&orders, now);
        self.step_away(now, orders.frozen);
        let shared = Arc::clone(&self.shared);
        let (seen, wanted, needs_spare, sync, requests, takeovers, lag) = {
            let core = shared.core.lock();
            (
                Seen::of(&core),
                core.sync_wanted(),
                core.wants_spare(),
                core.sync_now(),
                core.requests(),
                core.takeovers(),
                core.superblocks_lag(),
            )
        };
        let parts: &dyn Parts = &*shared;
        let told = self.told.look(seen, || parts.places());
        parts.forget_old_names(!told.is_empty() || takeovers != self.takeovers, lag);
        told.into_iter()
            .for_each(|event| shared.control.events.raise(event));
        if takeovers != self.takeovers {
            self.takeovers = takeovers;
            tracing::info!(
                "raid5: the array is made of other devices now; start it with {} next time",
                parts.spec_parts().list()
            );
        }
        self.pace.note_requests(now, requests);
        if !orders.frozen {
            if let Some(place) = needs_spare {
                self.take_spare(place);
            }
            if let (Some(action), None) = (wanted, sync) {
                self.queue.step(|core, owner| {
                    if let Err(e) = core.start_sync(owner, action) {
                        tracing::warn!("raid5: {e}");
                    }
                });
                self.pace.begin(now);
            }
        }
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP;
            self.queue.step(Core::sweep);
        }
        if now >= self.forgive_at {
            self.forgive_at = now + FORGIVE;
            self.queue.step(|core, _| core.forgive_read_errors());
            self.returns.forgive();
        }
        let sync = shared.core.lock().sync_now();
        let nap = match sync {
            None => NAP,
            Some(_) => self.go_on(now, &orders),
        };
        let tick = shared
            .control
            .limit
            .map(|_| self.tick_at.saturating_sub(now));
        tick.map_or(nap, |tick| nap.min(tick))
    }

    /// True if work is under way, or will be.
    pub fn is_busy(&self) -> bool {
        let core = self.shared.core.lock();
        let (sync, wanted) = (core.sync_now(), core.sync_wanted());
        let spare = core.wants_spare().is_some();
        drop(core);
        let spare = spare && self.shared.control.has_spare();
        let waits = !self.shared.control.orders.is_frozen() && (wanted.is_some() || spare);
        sync.is_some() || waits || self.queue.is_busy()
    }

    /// True if its queue may have completions.
    pub fn is_ready(&mut self) -> bool {
        matches!(self.queue.arm(), Readiness::Ready)
    }

    /// More stripes, as many as the speed allows.
    fn go_on(&mut self, now: Duration, orders: &PendingOrders) -> Duration {
        let speeds = Speeds {
            min_kib: orders.speed_min_kib,
            max_kib: orders.speed_max_kib,
        };
        let most = self.pace.stripes(now, speeds);
        let begun = self.queue.step(|core, _| core.sync_more(most));
        self.pace.note_begun(begun);
        let sync = self.shared.core.lock().sync_now();
        if let Some(sync) = sync
            && !self.pace.is_checkpoint_due(now, &sync)
        {
            return SLICE;
        }
        self.queue.step(|core, _| core.checkpoint());
        SLICE
    }

    /// Follows the orders of users.
    fn follow(&mut self, orders: &PendingOrders, now: Duration) {
        for &place in &orders.fail {
            self.queue.step(|core, owner| core.fail_place(place, owner));
        }
        if orders.stop {
            self.queue.step(|core, _| core.stop_sync());
        }
        if let Some(place) = orders.replace {
            self.take_spare(place);
        }
        if let Some(action) = orders.action {
            let started = self
                .queue
                .step(|core, owner| core.start_sync(owner, action));
            match started {
                Ok(()) => self.pace.begin(now),
                Err(e) => tracing::warn!("raid5: {e}"),
            }
        }
    }

    /// The spare that was added last becomes the member of a place.
    fn take_spare(&mut self, place: usize) {
        let shared = Arc::clone(&self.shared);
        // The core is locked meanwhile, so whoever asks finds the spare in one of the lists.
        let taken = self.queue.step(|core, owner| {
            let mut spares = shared.control.spares.lock();
            let usable = |s: &Member| s.is_spare() && !s.device.limits().read_only;
            let Some(at) = spares.iter().rposition(usable) else {
                return Ok(None);
            };
            let ability = spares[at].device.limits().into();
            let superblock = spares[at].superblock.clone();
            let slot = core.take_in(place, superblock, false, ability, owner)?;
            let Member { device, name, .. } = spares.remove(at);
            drop(spares);
            let named = name.clone();
            shared.set_device(slot, MemberDevice { device, name });
            Ok::<_, Error>(Some(named))
        });
        match taken {
            Ok(None) => {}
            Ok(Some(name)) => tracing::info!("raid5: {name} becomes member {place}"),
            // Another time.
            Err(e) => {
                tracing::debug!("raid5: {e}");
                self.shared.control.orders.again(place);
            }
        }
    }
}

impl Drop for BackgroundWork {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.queue.step(|core, _| {
                core.stop_sync();
                core.set_background_queue(None);
            });
        }
    }
}

/// The work of an array's background thread.
struct BackgroundTask {
    background: BackgroundWork,
    begin: Instant,
    /// The poller has its queue's descriptor.
    in_poller: bool,
}

impl Background for BackgroundTask {
    fn step(&mut self) -> Due {
        let nap = self.background.step(self.begin.elapsed());
        if let Some(whole) = self.background.take_whole() {
            add_whole(&self.background.shared, whole);
        }
        Due::At(Instant::now() + nap)
    }

    fn arm(&mut self, poller: &Poller) -> io::Result<Due> {
        if !self.in_poller
            && let Some(fd) = self.background.queue.wait_fd()
        {
            poller.add(fd, 1, false)?;
            self.in_poller = true;
        }
        Ok(self.background.queue.arm().into())
    }

    fn woken(&mut self) {
        self.background.queue.woken();
    }
}

impl Raid5 {
    /// From now on a thread looks after it, until it is closed.
    pub fn keep(&self) -> Result<(), Error> {
        let os = |e| Error::os("raid5: starting a thread", e);
        let work = BackgroundTask {
            background: BackgroundWork::new(self)?,
            begin: Instant::now(),
            in_poller: false,
        };
        let wait = &self.shared.control.wait;
        let thread = BackgroundThread::start("pvblk-raid5", wait, Arc::new(SystemClock), work);
        *self.thread.lock() = Some(thread.map_err(os)?);
        Ok(())
    }
}

/// The default speed.
pub(super) const SPEED_MIN_KIB: u64 = 1000;
/// The same: md's `sync_speed_min` and `sync_speed_max`.
pub(super) const SPEED_MAX_KIB: u64 = 200_000;
