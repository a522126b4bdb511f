//! [`SyncQueue`]: the queue that rebuilds a member or makes parity right, at the speed of [`Pace`], and that takes devices in and throws them out.

use super::queue::QueueState;
use super::shared::Shared;
use crate::array::MemberDevice;
use crate::array::manage::PendingOrders;
use crate::array::pace::{Pace, Speeds};
use crate::core::{Action, Device, Early, QueueCore, Sums, SyncEnd, SyncNow};
use crate::{Idle, Member, Role, STRIPE_SECTORS};
use pvblk_block::planted::{Plant, has};
use pvblk_block::stacked::Due;
use pvblk_block::{Error, QueueContext};
use pvblk_sys::Poller;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which the bitmap is swept: md's `daemon_sleep`.
const SWEEP: Duration = Duration::from_secs(5);
/// Least interval at which sums go from memory, while there are too many.
const SQUEEZE: Duration = Duration::from_millis(100);
/// Interval at which more stripes may begin.
const SLICE: Duration = Duration::from_millis(20);
/// Sleep after a queue couldn't be opened, or a slot wasn't free.
const RETRY: Duration = Duration::from_secs(1);

/// Actions of an array, for users.
#[derive(Clone, Debug, Default)]
pub(super) struct Syncs {
    pub now: Option<SyncNow>,
    /// Those that have begun.
    pub begun: u64,
    /// Of the last check or repair.
    pub mismatch_sectors: u64,
    /// The reason why the last one didn't come to its end.
    pub trouble: Option<String>,
    /// The last rebuild that came to its end: its place, sectors, and whether only those that the bitmap marks.
    pub recovered: Option<(usize, u64, bool)>,
}

impl Syncs {
    /// `now`: None if it is over already.
    fn begin(&mut self, action: Action, now: Option<SyncNow>) {
        self.begun += 1;
        self.trouble = None;
        if matches!(action, Action::Check | Action::Repair) {
            self.mismatch_sectors = 0;
        }
        self.now = now;
    }

    fn goes_on(&mut self, sync: Option<SyncNow>) {
        self.now = self.now.and(sync);
    }

    /// `place`: that of the device that was rebuilt.
    fn end(&mut self, end: SyncEnd, place: Option<usize>) {
        self.now = None;
        if matches!(end.action, Action::Check | Action::Repair) {
            self.mismatch_sectors = end.mismatch_sectors;
        }
        let rebuilt = place.filter(|_| end.action == Action::Recover && end.early.is_none());
        let rebuilt = rebuilt.map(|place| (place, end.done_sectors, end.by_bitmap));
        self.recovered = rebuilt.or(self.recovered);
        self.trouble = trouble(&end);
    }
}

/// The reason why an action didn't come to its end, as far as users have to know it: others begin again.
fn trouble(end: &SyncEnd) -> Option<String> {
    let stripes = |sectors: u64| sectors / STRIPE_SECTORS;
    let (done, of) = (stripes(end.done_sectors), stripes(end.of_sectors));
    let action = end.action;
    match (action, end.early?) {
        (Action::Check | Action::Repair, Early::Stopped) => {
            Some(format!("{action} was stopped after {done} of {of} stripes"))
        }
        (Action::Check | Action::Repair, _) => Some(format!(
            "{action} ended when a member failed, after {done} of {of} stripes"
        )),
        (Action::Recover, Early::Unreadable(sector)) => Some(format!(
            "rebuilding stops: sector {sector} of another member can't be read, or isn't what was written"
        )),
        _ => None,
    }
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct SyncQueue {
    /// None while there is nothing to be done.
    queue: Option<Box<QueueState>>,
    pace: Pace,
    /// Stripes that the queue was last allowed to begin.
    allowed: u64,
    /// The place that a device is rebuilt for.
    rebuilds: Option<usize>,
    /// The queue's descriptor is in the poller.
    in_poller: bool,
    /// The place whose member is to be replaced.
    replaces: Option<usize>,
    /// The time at which it is tried again to take a device in.
    retry_at: Option<Duration>,
    /// The time at which it is tried again to begin an action.
    begin_at: Option<Duration>,
    /// The time of the last sweep of the bitmap.
    swept_at: Duration,
    /// The time of the last sweep of any kind.
    squeezed_at: Duration,
    /// Its sweep hasn't ended, or bits weren't taken away after that.
    sweeps: bool,
}

impl SyncQueue {
    /// Does what is due; `now` counts from any moment.
    pub fn work(
        &mut self,
        shared: &Arc<Shared>,
        orders: &PendingOrders,
        now: Duration,
        idle: &mut Idle<'_>,
    ) {
        self.pace.note_requests(now, shared.common.requests());
        self.retry_at.take_if(|at| now >= *at);
        if let Some(queue) = &mut self.queue {
            while queue.progress() {}
        }
        if let Err(error) = self.follow(shared, orders, idle) {
            tracing::debug!("{}: {error}", shared.control.name);
            self.retry_at.get_or_insert(now + RETRY);
        }
        self.end_arrival(shared);
        self.end_action(shared, idle);
        self.sweep(shared, now, idle);
        self.kick_stalled(shared);
        let is_under_way = |queue: &QueueState| queue.sync_now().is_some();
        if !self.queue.as_deref().is_some_and(is_under_way) {
            self.begin(shared, orders, now);
        }
        let Some(queue) = &mut self.queue else { return };
        let speeds = Speeds {
            min_kib: orders.speed_min_kib,
            max_kib: orders.speed_max_kib,
        };
        let (pace, allowed) = (&mut self.pace, &mut self.allowed);
        queue.step(|core| {
            let unused = core.allow_stripes(0);
            pace.note_begun(allowed.saturating_sub(unused));
            *allowed = pace.stripes(now, speeds);
            core.allow_stripes(*allowed);
        });
        let sync = queue.sync_now();
        if let Some(sync) = sync
            && self.pace.is_checkpoint_due(now, &sync)
        {
            queue.step(|core| core.checkpoint());
        }
        shared.syncs.lock().goes_on(sync);
        self.end_action(shared, idle);
        let sweeps = self.sweeps;
        if let Some(queue) = self.queue.take_if(|queue| queue.is_idle() && !sweeps) {
            queue.close();
        }
    }

    /// Takes bits of the bitmap away that aren't needed any more, every few seconds.
    fn sweep(&mut self, shared: &Arc<Shared>, now: Duration, idle: &mut Idle<'_>) {
        let Some(chunks) = shared.common.chunks() else {
            return;
        };
        let is_whole = shared.common.missing().is_none() && !shared.common.is_broken();
        let is_due = now >= self.swept_at + SWEEP && !self.sweeps;
        let clears = is_due && is_whole && chunks.any();
        let squeezes = has_too_many_sums(shared) && now >= self.squeezed_at + SQUEEZE;
        if clears || squeezes {
            self.swept_at = if clears { now } else { self.swept_at };
            self.squeezed_at = now;
            let opened = self.queue(shared).and_then(|queue| {
                queue.follow_members()?;
                queue.step(|core| core.start_sweep(clears));
                Ok(queue.is_sweeping())
            });
            match opened {
                Ok(sweeps) => {
                    self.sweeps |= sweeps;
                    // It begins only if no member was left out: bits of what an earlier one missed may go from here on.
                    shared.control.missed.lock().take_if(|_| sweeps && clears);
                }
                Err(error) => tracing::debug!("{}: {error}", shared.control.name),
            }
        }
        let Some(queue) = &mut self.queue else { return };
        queue.step(QueueCore::go_on_sweeping);
        if let (Some(sums), Some(groups)) = (shared.common.sums(), queue.swept_sums()) {
            let mut disk = shared.disk.lock();
            let failed = shared.try_writing_sums(&mut disk, (sums, &groups), idle);
            let failed = failed.unwrap_or_else(|| disk.live());
            drop(disk);
            queue.step(|core| core.sums_written(failed));
        }
        let is_sweeping = queue.is_sweeping();
        if !std::mem::replace(&mut self.sweeps, is_sweeping) || is_sweeping || !is_whole {
            return;
        }
        let mut disk = shared.disk.lock();
        let failed =
            shared.try_writing(&mut disk, idle, |disk, idle| disk.clear_bits(chunks, idle));
        drop(disk);
        if let Some(failed) = failed.filter(|failed| *failed != 0) {
            queue.step(|core| core.devices_failed(failed));
        }
    }

    /// Members that didn't answer in time are kicked.
    fn kick_stalled(&mut self, shared: &Arc<Shared>) {
        let stalled = shared.patience.take_stalled() & shared.common.devices().1;
        if stalled == 0 {
            return;
        }
        match self.queue(shared) {
            Ok(queue) => queue.step(|core| core.devices_failed(stalled)),
            Err(error) => {
                tracing::debug!("{}: {error}", shared.control.name);
                shared.patience.put_off(stalled);
            }
        }
    }

    /// Writes all dirty sums: those that an action has found aren't marked, so nothing else would write them soon.
    fn write_sums(&mut self, shared: &Arc<Shared>, idle: &mut Idle<'_>) {
        let Some(sums) = shared.common.sums() else {
            return;
        };
        let mut disk = shared.disk.lock();
        let failed = shared.try_writing_sums(&mut disk, (sums, &sums.dirty()), idle);
        drop(disk);
        if let (Some(failed), Some(queue)) = (failed.filter(|f| *f != 0), &mut self.queue) {
            queue.step(|core| core.devices_failed(failed));
        }
    }

    /// Tells of the end of an action, if one has ended.
    fn end_action(&mut self, shared: &Arc<Shared>, idle: &mut Idle<'_>) {
        let queue = self.queue.as_mut();
        if let Some(synced) = queue.and_then(|queue| queue.take_synced()) {
            self.write_sums(shared, idle);
            shared.syncs.lock().end(synced, self.rebuilds);
            tell(shared, &synced);
        }
    }

    /// The queue, which is opened if there is none.
    fn queue(&mut self, shared: &Arc<Shared>) -> Result<&mut QueueState, Error> {
        if self.queue.is_none() {
            let queue = QueueState::open(shared, &QueueContext::new(64))?;
            (self.queue, self.in_poller) = (Some(Box::new(queue)), false);
        }
        let queue = self.queue.as_deref_mut();
        Ok(queue.expect("it was just opened"))
    }

    /// Follows orders of users, and takes a spare in for a member that is missing. Errors if that is to be tried again.
    fn follow(
        &mut self,
        shared: &Arc<Shared>,
        orders: &PendingOrders,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        self.replaces = orders.replace.or(self.replaces);
        if let Some(queue) = self.queue.as_mut().filter(|_| orders.stop) {
            queue.step(QueueCore::stop_sync);
        }
        if !orders.fail.is_empty() {
            let again = |_: &Error| shared.control.orders.fail_again(&orders.fail);
            let queue = self.queue(shared).inspect_err(again)?;
            let slots = shared.common.slots_by_role();
            let slots = orders.fail.iter().filter_map(|place| *slots.get(*place)?);
            let out = slots.fold(0, |mask, slot| mask | 1 << slot);
            // A device that can't be opened may go, but it isn't to take others along.
            if let Err(error) = queue.follow_members()
                && queue.unopened() & !out != 0
            {
                shared.control.orders.fail_again(&orders.fail);
                return Err(error);
            }
            for place in &orders.fail {
                queue.step(|core| core.throw_out(*place));
            }
            // The place may need the spare that another one would get.
            return Ok(());
        }
        if shared.control.arriving.lock().is_some() || self.retry_at.is_some() {
            return Ok(());
        }
        let missing = shared.common.missing();
        let is_free = shared.common.takes_device();
        if let Some(place) = self.replaces.take_if(|_| !is_free || missing.is_some()) {
            let name = &shared.control.name;
            tracing::warn!("{name}: member {place} can't be replaced now");
        }
        let missing = missing.filter(|_| is_free);
        match missing.or(self.replaces).filter(|_| !orders.frozen) {
            Some(place) => match self.take_returning(shared, place) {
                Some(member)
                    if shared.patience.is_left_at(Arc::as_ptr(&member.device))
                        && !has(Plant::LateWriteIsCurrent) =>
                {
                    let error = Error::config("I/O of its membership is left there");
                    Err(self.put_off(shared, member, true, error))
                }
                Some(member) => self.take_member(shared, place, member, true, idle),
                None => self.take_spare(shared, place, idle),
            },
            None => Ok(()),
        }
    }

    /// The spare that was added last is to become the member of a place.
    fn take_spare(
        &mut self,
        shared: &Arc<Shared>,
        place: usize,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        let usable = |s: &&Member| s.is_spare() && !s.device.limits().read_only;
        let spare = |s: &Member| Member {
            device: Arc::clone(&s.device),
            name: s.name.clone(),
            superblock: s.superblock.clone(),
        };
        let chosen = shared.control.spares.lock().iter().rfind(usable).map(spare);
        let Some(member) = chosen else {
            if let Some(place) = self.replaces.take() {
                let name = &shared.control.name;
                tracing::warn!("{name}: there is no spare that can replace member {place}");
            }
            return Ok(());
        };
        self.take_member(shared, place, member, false, idle)
    }

    /// The device that is to come back to a place that has no member, if there is one.
    fn take_returning(&mut self, shared: &Shared, place: usize) -> Option<Member> {
        let returning = shared.control.returning.lock().take();
        let is_missing = shared.common.missing() == Some(place);
        // Asked again: others may have had the place since it came.
        let is_it = |m: &Member| {
            m.superblock.role() == Role::Active(place as u16)
                && shared.why_whole(place, &m.superblock).is_none()
        };
        returning.filter(|m| is_missing && is_it(m))
    }

    /// A device is to become the member of a place. `by_bitmap`: it was that, and holds all but what the bitmap marks; else it is a spare.
    fn take_member(
        &mut self,
        shared: &Arc<Shared>,
        place: usize,
        member: Member,
        by_bitmap: bool,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        // Before anything is noted. Superblocks of the whole array are written with its own, so that has to be possible.
        let opened = self.queue(shared).and_then(QueueState::follow_members);
        if let Err(error) = opened {
            return Err(self.put_off(shared, member, by_bitmap, error));
        }
        let spares = shared.control.spares.lock();
        if !by_bitmap && !spares.iter().any(|spare| spare.name == member.name) {
            // It was taken away meanwhile.
            return Ok(());
        }
        let limits = member.device.limits();
        let known = Arc::new(Device::of(&member.superblock, &limits));
        let name = member.name.clone();
        let at_slot = MemberDevice {
            device: Arc::clone(&member.device),
            name: name.clone(),
        };
        let slot = shared.devices.arrive(at_slot, &known);
        let Some((slot, opened)) = slot else {
            let error = Error::config("queues still have members that were lost");
            drop(spares);
            return Err(self.put_off(shared, member, by_bitmap, error));
        };
        *shared.control.arriving.lock() = Some(name);
        drop(spares);
        let raw = Arc::clone(&member.device);
        let member = Member {
            device: opened,
            ..member
        };
        let arrived = shared.disk.lock().arrive(slot, member, by_bitmap, idle);
        if let Err(failed) = arrived {
            let (member, error) = *failed;
            shared.note_left(slot);
            shared.devices.settle();
            *shared.control.arriving.lock() = None;
            let member = Member {
                device: raw,
                ..member
            };
            return Err(self.put_off(shared, member, by_bitmap, error));
        }
        self.replaces = None;
        let queue = self.queue(shared)?;
        queue.step(|core| core.take_in(slot, place, known, by_bitmap));
        Ok(())
    }

    /// A device can't be taken in now; it is tried again.
    fn put_off(&self, shared: &Shared, member: Member, by_bitmap: bool, error: Error) -> Error {
        if by_bitmap {
            shared.control.returning.lock().get_or_insert(member);
        }
        error
    }

    /// Goes on when the device that arrives is one of the array's, or never will be.
    fn end_arrival(&mut self, shared: &Arc<Shared>) {
        let ended = self.queue.as_mut();
        let Some(is_in) = ended.and_then(|queue| queue.step(QueueCore::is_taken_in)) else {
            return;
        };
        let control = &shared.control;
        let mut spares = control.spares.lock();
        let Some(name) = control.arriving.lock().take() else {
            return;
        };
        match is_in {
            true => tracing::info!("{}: {name} becomes a member", control.name),
            false => tracing::warn!("{}: {name} can't be taken in", control.name),
        }
        shared.devices.settle();
        shared.disk.lock().forget_arrival();
        // It isn't a spare any more, also if its superblock may have been written.
        if is_in || !shared.common.is_broken() {
            spares.retain(|spare| spare.name != name);
        }
    }

    /// Begins the action that has to be done, if there is one.
    fn begin(&mut self, shared: &Arc<Shared>, orders: &PendingOrders, now: Duration) {
        let wanted = shared.common.wanted().filter(|_| !orders.frozen);
        let Some(action) = wanted.or(orders.action) else {
            self.begin_at = None;
            return;
        };
        if self.begin_at.is_some_and(|at| now < at) && orders.action.is_none() {
            return;
        }
        let started = self.queue(shared).and_then(|queue| {
            queue.follow_members()?;
            queue.step(|core| core.start_sync(action))?;
            Ok(queue.sync_now())
        });
        match started {
            Ok(sync) => {
                tracing::info!("{}: {action} begins", shared.control.name);
                self.pace.begin(now);
                self.allowed = 0;
                self.begin_at = None;
                let recovered = shared.common.recovered();
                self.rebuilds = recovered.map(|(place, _)| place);
                shared.syncs.lock().begin(action, sync);
            }
            Err(error) => {
                tracing::warn!("{}: {error}", shared.control.name);
                self.begin_at = Some(now + RETRY);
            }
        }
    }

    /// True if its queue has work, or a member waits for a replacement.
    pub fn is_busy(&self) -> bool {
        self.queue.is_some() || self.replaces.is_some()
    }

    /// The longest sleep; `None`: for ever.
    pub fn nap(&self, shared: &Shared, now: Duration) -> Option<Duration> {
        let retries = self.retry_at.or(self.begin_at).map(|_| RETRY);
        // Without a member no bit is taken away: its return brings the thread here.
        let is_whole = shared.common.missing().is_none() && !shared.common.is_broken();
        let chunks = shared.common.chunks().filter(|_| is_whole);
        let chunks = chunks.filter(|chunks| chunks.any());
        let sweep = chunks.map(|_| (self.swept_at + SWEEP).saturating_sub(now));
        let squeezes = has_too_many_sums(shared);
        let squeeze = squeezes.then(|| (self.squeezed_at + SQUEEZE).saturating_sub(now));
        let slice = self.queue.as_ref().map(|_| SLICE);
        slice.or(retries.into_iter().chain(sweep).chain(squeeze).min())
    }

    pub fn arm(&mut self, poller: &Poller) -> io::Result<Due> {
        let Some(queue) = &mut self.queue else {
            return Ok(Due::Never);
        };
        if !self.in_poller {
            poller.add(queue.wait_fd(), 1, false)?;
            self.in_poller = true;
        }
        Ok(queue.arm().into())
    }

    pub fn woken(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.woken();
        }
    }

    /// Stops action and sweep; the queue has to be finished.
    pub fn stop(&mut self) -> Option<QueueState> {
        let mut queue = self.queue.take()?;
        queue.step(QueueCore::stop_sync);
        queue.step(QueueCore::stop_sweep);
        Some(*queue)
    }
}

/// True if sums are to go from memory.
fn has_too_many_sums(shared: &Shared) -> bool {
    let sums = shared.common.sums();
    sums.is_some_and(Sums::are_too_many) && !shared.common.is_broken()
}

/// An action has ended.
fn tell(shared: &Shared, synced: &SyncEnd) {
    let SyncEnd {
        action,
        done_sectors,
        ..
    } = synced;
    let name = &shared.control.name;
    match (synced.early.is_none(), action) {
        (true, Action::Recover) => {
            tracing::info!(
                "{name}: the array is made of other devices now; start it with {} next time",
                shared.spec_parts().list()
            );
        }
        (true, _) => tracing::info!("{name}: {action} is done"),
        (false, _) => tracing::warn!(
            "{name}: {action} ended early, after {done_sectors} sectors of each member"
        ),
    }
}
