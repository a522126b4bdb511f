//! [`Pace`]: the speed of a rebuild, resync or check, and the moments at which superblocks say how far it is.

use crate::STRIPE_BYTES;
use crate::core::SyncNow;
use std::time::Duration;

/// Speeds, in KiB a second of each member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Speeds {
    /// While others use the array.
    pub min_kib: u64,
    /// While nobody else does.
    pub max_kib: u64,
}

/// The default speed.
pub(super) const SPEED_MIN_KIB: u64 = 1000;
/// The same: md's `sync_speed_min` and `sync_speed_max`.
pub(super) const SPEED_MAX_KIB: u64 = 200_000;

/// Interval at which superblocks are written with the progress, besides each sixteenth of it.
const CHECKPOINT: Duration = Duration::from_secs(10);
/// Time after the last request from which on the array counts as idle.
const QUIET: Duration = Duration::from_millis(300);
/// The most that is done in advance.
const ADVANCE: Duration = Duration::from_millis(200);

/// See the module's documentation. Times count from any moment.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Stripes that may be begun.
    credit: f64,
    last: Duration,
    /// Requests that the array had taken, and when that last changed.
    requests: u64,
    busy_at: Option<Duration>,
    checkpoint_at: Duration,
    sixteenth: u64,
}

impl Pace {
    /// An action begins.
    pub fn begin(&mut self, now: Duration) {
        self.checkpoint_at = now + CHECKPOINT;
        self.sixteenth = 0;
        self.credit = 0.0;
        self.last = now;
    }

    /// The array has taken so many requests.
    pub fn note_requests(&mut self, now: Duration, requests: u64) {
        if requests != self.requests {
            self.requests = requests;
            self.busy_at = Some(now);
        }
    }

    /// Stripes that may be begun now.
    pub fn stripes(&mut self, now: Duration, speeds: Speeds) -> u64 {
        let quiet = self.busy_at.is_none_or(|at| now > at + QUIET);
        let kib = match quiet {
            true => speeds.max_kib,
            false => speeds.min_kib.min(speeds.max_kib),
        };
        let rate = kib as f64 * 1024.0 / STRIPE_BYTES as f64;
        let passed = now.saturating_sub(self.last).as_secs_f64();
        self.last = now;
        // Not much in advance: a burst would be in the way of others.
        let most = (rate * ADVANCE.as_secs_f64()).max(1.0);
        self.credit = (self.credit + passed * rate).min(most);
        self.credit as u64
    }

    /// So many of them were begun.
    pub fn note_begun(&mut self, stripes: u64) {
        self.credit -= stripes as f64;
    }

    /// True if superblocks are to say how far the action is.
    pub fn is_checkpoint_due(&mut self, now: Duration, sync: &SyncNow) -> bool {
        let sixteenth = sync.done_sectors * 16 / sync.of_sectors.max(1);
        let is_due = now >= self.checkpoint_at || sixteenth > self.sixteenth;
        if is_due {
            self.checkpoint_at = now + CHECKPOINT;
            self.sixteenth = sixteenth;
        }
        is_due
    }
}
