//! Who looks after an array while it serves: rebuilds onto spares, makes parity, and takes bits out of the bitmap.

use super::manage::{Orders, Wishes};
use super::queue::ArrayQueue;
use super::{Device, Raid5, Shared};
use crate::core::Core;
use crate::{Member, STRIPE_BYTES};
use pvblk_block::stacked::{Background, BackgroundThread, Due, WaitEntry};
use pvblk_block::{BlockDevice, DeviceQueue, Error, QueueContext, Readiness, SystemClock};
use pvblk_sys::Poller;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often superblocks tell how far something is, besides each sixteenth of it.
const CHECKPOINT: Duration = Duration::from_secs(10);
/// How often the bitmap is swept: md's `daemon_sleep`.
const SWEEP: Duration = Duration::from_secs(5);
/// How often read errors are halved.
const FORGIVE: Duration = Duration::from_hours(1);
/// How long after the last request the array counts as idle.
const QUIET: Duration = Duration::from_millis(300);
/// How long it sleeps at most, and what it does in advance at most.
const NAP: Duration = Duration::from_millis(200);
/// The same while something is under way.
const SLICE: Duration = Duration::from_millis(20);

/// Looks after an array: somebody calls [`Keeper::step`] again and again. [`Raid5::keep`] makes a thread of it.
pub struct Keeper {
    shared: Arc<Shared>,
    orders: Arc<Orders>,
    queue: ArrayQueue,
    /// Stripes that may be begun.
    credit: f64,
    last: Duration,
    /// Requests that the array had taken, and when that last changed.
    requests: u64,
    /// Devices that became members, as far as that was told.
    takeovers: u64,
    busy_at: Option<Duration>,
    checkpoint_at: Duration,
    sixteenth: u64,
    sweep_at: Duration,
    forgive_at: Duration,
}

impl Keeper {
    /// One for each array. Errors if its queue can't be opened.
    pub fn new(array: &Raid5) -> Result<Keeper, Error> {
        let context = QueueContext::new(64);
        let mut queue = ArrayQueue::open(&array.shared, &context, array.floor())?;
        queue.step(|core, owner| core.set_keeper(Some(owner)));
        Ok(Keeper {
            queue,
            shared: Arc::clone(&array.shared),
            orders: Arc::clone(&array.orders),
            credit: 0.0,
            last: Duration::ZERO,
            requests: 0,
            takeovers: 0,
            busy_at: None,
            checkpoint_at: CHECKPOINT,
            sixteenth: 0,
            sweep_at: SWEEP,
            forgive_at: FORGIVE,
        })
    }

    /// Does what there is to do; `now` counts from any moment. Returns how long nothing more will be to do, unless its I/O ends.
    pub fn step(&mut self, now: Duration) -> Duration {
        while self.queue.progress() {}
        let wishes = self.orders.take();
        self.follow(&wishes);
        let shared = Arc::clone(&self.shared);
        let (wanted, needs_spare, sync, requests, takeovers) = {
            let core = shared.core.lock();
            (
                core.sync_wanted(),
                core.wants_spare(),
                core.sync_now(),
                core.requests(),
                core.takeovers(),
            )
        };
        if takeovers != self.takeovers {
            self.takeovers = takeovers;
            tracing::info!(
                "raid5: the array is made of other devices now; start it with {} next time",
                shared.spec_text()
            );
        }
        if requests != self.requests {
            self.requests = requests;
            self.busy_at = Some(now);
        }
        if !wishes.frozen {
            if let Some(place) = needs_spare {
                self.take_spare(place);
            }
            if let (Some(action), None) = (wanted, sync) {
                self.queue.step(|core, owner| {
                    if let Err(e) = core.start_sync(owner, action) {
                        tracing::warn!("raid5: {e}");
                    }
                });
                self.begin(now);
            }
        }
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP;
            self.queue.step(Core::sweep);
        }
        if now >= self.forgive_at {
            self.forgive_at = now + FORGIVE;
            self.queue.step(|core, _| core.forgive_read_errors());
        }
        let sync = shared.core.lock().sync_now();
        match sync {
            None => NAP,
            Some(_) => self.go_on(now, &wishes),
        }
    }

    /// Whether something is under way, or will be.
    pub fn is_busy(&self) -> bool {
        let core = self.shared.core.lock();
        let (sync, wanted) = (core.sync_now(), core.sync_wanted());
        let spare = core.wants_spare().is_some();
        drop(core);
        let spare = spare && self.shared.spares.lock().iter().any(Member::is_spare);
        let waits = !self.orders.is_frozen() && (wanted.is_some() || spare);
        sync.is_some() || waits || self.queue.is_busy()
    }

    /// Whether its queue has something to be polled for.
    pub fn is_ready(&mut self) -> bool {
        matches!(self.queue.arm(), Readiness::Ready)
    }

    fn begin(&mut self, now: Duration) {
        self.checkpoint_at = now + CHECKPOINT;
        self.sixteenth = 0;
        self.credit = 0.0;
        self.last = now;
    }

    /// More stripes, as many as the speed allows.
    fn go_on(&mut self, now: Duration, wishes: &Wishes) -> Duration {
        let quiet = self.busy_at.is_none_or(|at| now > at + QUIET);
        let kib = match quiet {
            true => wishes.speed_max_kib,
            false => wishes.speed_min_kib.min(wishes.speed_max_kib),
        };
        let rate = kib as f64 * 1024.0 / STRIPE_BYTES as f64;
        let passed = now.saturating_sub(self.last).as_secs_f64();
        self.last = now;
        // Not much in advance: a burst would be in the way of others.
        let most = (rate * NAP.as_secs_f64()).max(1.0);
        self.credit = (self.credit + passed * rate).min(most);
        let begun = self
            .queue
            .step(|core, _| core.sync_more(self.credit as u64));
        self.credit -= begun as f64;
        let sync = self.shared.core.lock().sync_now();
        if let Some(sync) = sync {
            let sixteenth = sync.done_sectors * 16 / sync.of_sectors.max(1);
            if now >= self.checkpoint_at || sixteenth > self.sixteenth {
                self.checkpoint_at = now + CHECKPOINT;
                self.sixteenth = sixteenth;
            } else {
                return SLICE;
            }
        }
        self.queue.step(|core, _| core.checkpoint());
        SLICE
    }

    /// What somebody asked for.
    fn follow(&mut self, wishes: &Wishes) {
        for &place in &wishes.fail {
            self.queue.step(|core, owner| core.fail_place(place, owner));
        }
        if wishes.stop {
            self.queue.step(|core, _| core.stop_sync());
        }
        if let Some(place) = wishes.replace {
            self.take_spare(place);
        }
        if let Some(action) = wishes.action {
            let started = self
                .queue
                .step(|core, owner| core.start_sync(owner, action));
            match started {
                Ok(()) => self.begin(self.last),
                Err(e) => tracing::warn!("raid5: {e}"),
            }
        }
    }

    /// The spare that was added last becomes the member of a place.
    fn take_spare(&mut self, place: usize) {
        let shared = Arc::clone(&self.shared);
        let spare = {
            let mut spares = shared.spares.lock();
            let usable = |s: &Member| s.is_spare() && !s.device.limits().read_only;
            let at = spares.iter().rposition(usable);
            at.map(|at| spares.remove(at))
        };
        let Some(spare) = spare else { return };
        let ability = spare.device.limits().into();
        let device = Device {
            device: Arc::clone(&spare.device),
            name: spare.name.clone(),
        };
        let superblock = spare.superblock.clone();
        let taken = self.queue.step(|core, owner| {
            let slot = core.take_in(place, superblock, ability, owner)?;
            // While the core is locked: whoever writes to the new slot must find its device.
            let mut devices = shared.devices.lock();
            let slots = devices.len().max(slot + 1);
            devices.resize(slots, None);
            devices[slot] = Some(device);
            shared.changes.fetch_add(1, Ordering::AcqRel);
            Ok::<(), Error>(())
        });
        match taken {
            Ok(_) => tracing::info!("raid5: {} becomes member {place}", spare.name),
            // Another time.
            Err(e) => {
                tracing::debug!("raid5: {e}");
                shared.spares.lock().push(spare);
                self.orders.again(place);
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.queue.step(|core, _| {
                core.stop_sync();
                core.set_keeper(None);
            });
        }
    }
}

/// The work of an array's thread: a keeper's steps.
struct KeeperWork {
    keeper: Keeper,
    begin: Instant,
    /// The poller has its queue's descriptor.
    in_poller: bool,
}

impl Background for KeeperWork {
    fn step(&mut self) -> Due {
        let nap = self.keeper.step(self.begin.elapsed());
        Due::At(Instant::now() + nap)
    }

    fn arm(&mut self, poller: &Poller) -> io::Result<Due> {
        if !self.in_poller
            && let Some(fd) = self.keeper.queue.wait_fd()
        {
            poller.add(fd, 1, false)?;
            self.in_poller = true;
        }
        Ok(self.keeper.queue.arm().into())
    }

    fn woken(&mut self) {
        self.keeper.queue.woken();
    }
}

impl Raid5 {
    /// From now on a thread looks after it, until it is closed.
    pub fn keep(&self) -> Result<(), Error> {
        let os = |e| Error::os("raid5: starting a thread", e);
        let work = KeeperWork {
            keeper: Keeper::new(self)?,
            begin: Instant::now(),
            in_poller: false,
        };
        let wait = Arc::new(WaitEntry::new().map_err(os)?);
        let thread = BackgroundThread::start("pvblk-raid5", &wait, Arc::new(SystemClock), work);
        *self.thread.lock() = Some(thread.map_err(os)?);
        Ok(())
    }

    /// Somebody wants something.
    pub(super) fn wake_keeper(&self) {
        if let Some(thread) = &*self.thread.lock() {
            thread.wake();
        }
    }
}

/// What a keeper does when nobody says anything else.
pub(super) const SPEED_MIN_KIB: u64 = 1000;
/// The same: md's `sync_speed_min` and `sync_speed_max`.
pub(super) const SPEED_MAX_KIB: u64 = 200_000;
