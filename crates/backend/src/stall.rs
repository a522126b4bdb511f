//! [`Stall`]: a disk one of whose lanes doesn't come back from a call.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Whether lanes of a disk are blocked in a call. While one is, the disk's other lanes aren't stepped: they might block at the same
/// place, and each would take a thread.
#[derive(Debug, Default)]
pub struct Stall {
    /// Lanes in such a call.
    lanes: AtomicU32,
    since: Mutex<Option<Instant>>,
}

impl Stall {
    /// True while a lane of the disk is blocked.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.lanes.load(Ordering::Relaxed) > 0
    }

    /// How long it has lasted.
    pub fn lasts(&self) -> Option<Duration> {
        Some(self.since.lock().as_ref()?.elapsed())
    }

    /// One more lane is blocked.
    pub(crate) fn begin(&self, lane: &str) {
        let mut since = self.since.lock();
        if self.lanes.fetch_add(1, Ordering::Relaxed) == 0 {
            *since = Some(Instant::now());
        }
        drop(since);
        tracing::error!(
            "{lane}: stalled: its worker is blocked in the kernel or on a lock; other disks go on"
        );
    }

    /// One of them is back.
    pub(crate) fn end(&self, lane: &str) {
        let mut since = self.since.lock();
        let began = *since;
        if self.lanes.fetch_sub(1, Ordering::Relaxed) == 1 {
            *since = None;
        }
        drop(since);
        let seconds = began.map_or(0.0, |t| t.elapsed().as_secs_f64());
        tracing::warn!("{lane}: back after {seconds:.1} s");
    }
}
