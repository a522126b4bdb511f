//! [`Stall`]: records that a lane of a disk is blocked in a call.

use crate::active::Place;
use crate::ratelimit::{RateLimit, Times};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// A stall that ends sooner isn't logged: it has cost the disk's neighbours nothing, and a guest or a loaded
/// machine can cause as many as it likes.
const TOLD_AFTER: Duration = Duration::from_secs(1);

/// Counts the lanes of a disk that are blocked in a call. While one is, the disk's other lanes aren't
/// stepped: they might block at the same place, and each would take a thread.
#[derive(Debug, Default)]
pub struct Stall {
    /// Number of lanes in such a call.
    lanes: AtomicU32,
    since: Mutex<Option<Instant>>,
    /// Number of stalls that ended before they were logged.
    short: AtomicU64,
    told: RateLimit,
    /// Of the disk, on the list of disks that are looked at.
    place: Arc<Place>,
}

impl Stall {
    /// Of a disk with this place on a list.
    pub(crate) fn at(place: &Arc<Place>) -> Stall {
        Stall {
            place: Arc::clone(place),
            ..Stall::default()
        }
    }

    /// True while a lane of the disk is blocked.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.lanes.load(Ordering::Relaxed) > 0
    }

    /// Time since the stall began; `None` if there is none.
    pub fn lasts(&self) -> Option<Duration> {
        Some(self.since.lock().as_ref()?.elapsed())
    }

    /// Counts one more blocked lane, until [`Blocked::end`].
    pub(crate) fn begin(self: &Arc<Stall>, lane: &str, now: Instant) -> Arc<Blocked> {
        let mut since = self.since.lock();
        if self.lanes.fetch_add(1, Ordering::Relaxed) == 0 {
            *since = Some(now);
        }
        drop(since);
        fence(Ordering::SeqCst);
        self.place.join();
        Arc::new(Blocked {
            stall: Arc::clone(self),
            lane: lane.to_owned(),
            since: now,
            line: Mutex::new(Line::Due),
        })
    }
}

/// A lane that is blocked in a call.
#[derive(Debug)]
pub struct Blocked {
    stall: Arc<Stall>,
    lane: String,
    since: Instant,
    line: Mutex<Line>,
}

/// The log's line about a blocked lane.
#[derive(Debug)]
enum Line {
    /// The line isn't due until the stall has lasted [`TOLD_AFTER`].
    Due,
    Written(Times),
    /// The line is left out: there were too many before it.
    LeftOut,
    /// The lane's call has returned.
    Over,
}

impl Blocked {
    /// Logs the line once the stall has lasted long enough. True while that is still to be done.
    pub fn is_due(&self, now: Instant) -> bool {
        let mut line = self.line.lock();
        if !matches!(*line, Line::Due) {
            return false;
        }
        if now.saturating_duration_since(self.since) < TOLD_AFTER {
            return true;
        }
        let lane = &self.lane;
        *line = match self.stall.told.next() {
            Some(times) => {
                tracing::error!(
                    "{lane}: stalled: its worker is blocked in the kernel or on a lock; other disks go on{times}"
                );
                Line::Written(times)
            }
            None => {
                tracing::debug!("{lane}: stalled");
                Line::LeftOut
            }
        };
        false
    }

    /// Notes that the lane's call has returned.
    pub(crate) fn end(&self, now: Instant) {
        let stall = &self.stall;
        let mut since = stall.since.lock();
        if stall.lanes.fetch_sub(1, Ordering::Relaxed) == 1 {
            *since = None;
        }
        drop(since);
        let (lane, lasted) = (&self.lane, now.saturating_duration_since(self.since));
        let seconds = lasted.as_secs_f64();
        match std::mem::replace(&mut *self.line.lock(), Line::Over) {
            Line::Due => {
                let short = stall.short.fetch_add(1, Ordering::Relaxed) + 1;
                tracing::debug!(
                    "{lane}: was blocked for {seconds:.3} s; {short} short stalls of this disk so far"
                );
            }
            Line::Written(times) => tracing::warn!("{lane}: back after {seconds:.1} s{times}"),
            Line::LeftOut | Line::Over => tracing::debug!("{lane}: back after {seconds:.1} s"),
        }
    }
}

#[cfg(test)]
#[path = "stall_tests.rs"]
mod tests;
