//! Writers wait while too much is dirty.

use super::WriteBack;
use std::time::Instant;

/// A writer that waits until less is dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle {
    since: Instant,
    /// Writes that had failed by then.
    errors: u64,
}

/// True if one more page may become dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Yes,
    /// The writer waits, and dirty pages are to be written.
    Wait(Throttle),
    /// Nothing can be written, so waiting would be in vain.
    Failed,
}

impl WriteBack {
    fn is_too_dirty(&self) -> bool {
        self.unwritten_frames() >= self.throttle_from
    }

    /// Asks for a page that is to become dirty; `waiting`: the writer's wait so far.
    pub fn admit(&mut self, page: u64, waiting: Option<Throttle>, now: Instant) -> Admission {
        let Some(waiting) = waiting else {
            if !self.is_too_dirty() || self.dirty.contains_key(&page) {
                return Admission::Yes;
            }
            return Admission::Wait(Throttle {
                since: now,
                errors: self.counters.write_errors,
            });
        };
        let failed = self.counters.write_errors != waiting.errors && self.writing == 0;
        if self.is_too_dirty() && !failed {
            return Admission::Wait(waiting);
        }
        let slept = now.saturating_duration_since(waiting.since);
        self.counters.throttled += 1;
        self.counters.throttled_ns += slept.as_nanos() as u64;
        match self.is_too_dirty() {
            true => Admission::Failed,
            false => Admission::Yes,
        }
    }

    /// True if a writer that waits is to ask again.
    pub fn is_over(&self, throttle: Throttle) -> bool {
        !self.is_too_dirty() || self.counters.write_errors != throttle.errors
    }

    /// True if dirty pages may be tried: the last write didn't fail just now.
    pub fn may_retry(&self, now: Instant) -> bool {
        now >= self.retry_at
    }

    /// The time from which on dirty pages may be tried again.
    pub fn retry_at(&self) -> Instant {
        self.retry_at
    }

    /// True if no write is at the device, so only a writer that waits can begin one.
    pub fn is_idle(&self) -> bool {
        self.writing == 0
    }
}
