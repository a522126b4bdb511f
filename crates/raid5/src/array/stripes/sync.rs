//! [`SyncQueue`]: the queue that rebuilds a member or makes parity right, at the speed of [`Pace`].

use super::Shared;
use super::queue::QueueState;
use crate::array::background::{SPEED_MAX_KIB, SPEED_MIN_KIB};
use crate::array::pace::{Pace, Speeds};
use crate::core::stripes::SyncEnd;
use pvblk_block::QueueContext;
use pvblk_block::stacked::Due;
use pvblk_sys::Poller;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which more stripes may begin.
const SLICE: Duration = Duration::from_millis(20);
/// Sleep after a queue couldn't be opened.
const RETRY: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Default)]
pub(super) struct SyncQueue {
    /// None while there is nothing to be done.
    queue: Option<Box<QueueState>>,
    pace: Pace,
    /// Stripes that the queue was last allowed to begin.
    allowed: u64,
    /// The queue's descriptor is in the poller.
    in_poller: bool,
    /// A queue couldn't be opened; the time at which that is tried again.
    retry_at: Option<Duration>,
}

impl SyncQueue {
    /// Does what is due; `now` counts from any moment.
    pub fn work(&mut self, shared: &Arc<Shared>, now: Duration) {
        self.pace.note_requests(now, shared.common.requests());
        if let Some(queue) = &mut self.queue {
            while queue.progress() {}
        }
        let is_under_way = |queue: &QueueState| queue.sync_now().is_some();
        if !self.queue.as_deref().is_some_and(is_under_way) {
            self.begin(shared, now);
        }
        let Some(queue) = &mut self.queue else { return };
        let speeds = Speeds {
            min_kib: SPEED_MIN_KIB,
            max_kib: SPEED_MAX_KIB,
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
        if let Some(synced) = queue.take_synced() {
            tell(shared, &synced);
            shared.orders.set_synced(synced);
        }
        if let Some(queue) = self.queue.take_if(|queue| queue.is_idle()) {
            queue.close();
        }
    }

    /// Begins the action that has to be done, if there is one.
    fn begin(&mut self, shared: &Arc<Shared>, now: Duration) {
        let wanted = shared.common.wanted();
        let Some(action) = wanted.or_else(|| shared.orders.action()) else {
            return;
        };
        if self.queue.is_none() {
            if self.retry_at.is_some_and(|at| now < at) {
                return;
            }
            self.retry_at = None;
            match QueueState::open(shared, &QueueContext::new(64)) {
                Ok(queue) => (self.queue, self.in_poller) = (Some(Box::new(queue)), false),
                Err(error) => {
                    tracing::warn!("{}: {action}: {error}", shared.name);
                    self.retry_at = Some(now + RETRY);
                    return;
                }
            }
        }
        let Some(queue) = &mut self.queue else { return };
        let started = queue.step(|core| core.start_sync(action));
        if wanted.is_none() {
            shared.orders.action_is_taken();
        }
        match started {
            Ok(()) => {
                tracing::info!("{}: {action} begins", shared.name);
                self.pace.begin(now);
                self.allowed = 0;
            }
            Err(error) => {
                tracing::warn!("{}: {error}", shared.name);
                shared.orders.set_synced(SyncEnd {
                    action,
                    is_whole: false,
                    done_sectors: 0,
                    mismatch_sectors: 0,
                });
            }
        }
    }

    /// The longest sleep; `None`: for ever.
    pub fn nap(&self) -> Option<Duration> {
        let retries = self.retry_at.is_some().then_some(RETRY);
        self.queue.as_ref().map(|_| SLICE).or(retries)
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

    /// Stops the action; its queue has to be finished.
    pub fn stop(&mut self) -> Option<QueueState> {
        let mut queue = self.queue.take()?;
        queue.step(|core| core.stop_sync());
        Some(*queue)
    }
}

/// An action has ended.
fn tell(shared: &Shared, synced: &SyncEnd) {
    let SyncEnd {
        action,
        done_sectors,
        ..
    } = synced;
    match synced.is_whole {
        true => tracing::info!("{}: {action} is done", shared.name),
        false => tracing::warn!(
            "{}: {action} ended early, after {done_sectors} sectors of each member",
            shared.name
        ),
    }
}
