//! [`Ages`]: the least age of the oldest request of a lane, for two stores a batch and a comparison for each run of requests that were taken together.
//!
//! Now and then the lane sets a mark, and counts the requests in flight at that time. Each request that ends and was taken before the mark counts
//! down. At zero all of them have ended, and the next mark is set. So while the count isn't zero, a request is in flight that is older than
//! the mark. A request that hangs is found at the latest when all others in flight beside it have ended, and the limit has passed then.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Times are in ticks. Written by the thread that steps the lane.
#[derive(Default)]
pub(super) struct Ages {
    /// Requests taken before it count.
    mark: AtomicU64,
    /// Number of those that haven't ended.
    left: AtomicU32,
    /// When requests were taken last.
    taken_at: AtomicU64,
    /// When requests ended last.
    ended_at: AtomicU64,
}

impl Ages {
    /// These requests are taken at `now`, and no other is in flight.
    #[inline]
    pub fn begin(&self, now: u64, in_flight: u32) {
        self.set(now + 1, in_flight);
        self.ended_at.store(now, Ordering::Relaxed);
    }

    #[inline]
    pub fn taken(&self, now: u64) {
        self.taken_at.store(now, Ordering::Relaxed);
    }

    #[inline]
    pub fn mark(&self) -> u64 {
        self.mark.load(Ordering::Relaxed)
    }

    /// So many requests that were taken before the mark have ended.
    #[inline]
    pub fn ended(&self, old: u32) {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(old), Ordering::Relaxed);
    }

    /// Requests have ended at `now`, and so many are in flight.
    #[inline]
    pub fn left(&self, now: u64, in_flight: u32) {
        self.ended_at.store(now, Ordering::Relaxed);
        if self.left.load(Ordering::Relaxed) == 0 {
            // All of them were taken before the mark, also if the clock stands still.
            let mark = now.max(self.taken_at.load(Ordering::Relaxed) + 1);
            self.set(mark, in_flight);
        }
    }

    #[inline]
    fn set(&self, mark: u64, left: u32) {
        self.mark.store(mark, Ordering::Relaxed);
        self.left.store(left, Ordering::Relaxed);
    }

    /// The least age of the oldest request in flight; `passes`: at most the time since any ended.
    pub fn oldest(&self, now: u64, passes: bool) -> Option<u64> {
        if self.left.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let age = now.saturating_sub(self.mark());
        let since = now.saturating_sub(self.ended_at.load(Ordering::Relaxed));
        Some(if passes { age.min(since) } else { age })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane: when its requests in flight were taken.
    #[derive(Default)]
    struct Lane {
        ages: Ages,
        in_flight: Vec<u64>,
    }

    impl Lane {
        fn take(&mut self, now: u64, count: usize) {
            let was_idle = self.in_flight.is_empty();
            self.in_flight.extend(vec![now; count]);
            if was_idle {
                self.ages.begin(now, count as u32);
            }
            self.ages.taken(now);
        }

        fn end(&mut self, now: u64, which: impl Fn(u64) -> bool) {
            let mark = self.ages.mark();
            let ended = |t: &u64| which(*t);
            let old = self.in_flight.iter().filter(|t| ended(t) && **t < mark);
            self.ages.ended(old.count() as u32);
            self.in_flight.retain(|t| !which(*t));
            self.ages.left(now, self.in_flight.len() as u32);
        }

        fn oldest(&self, now: u64) -> Option<u64> {
            self.ages.oldest(now, false)
        }
    }

    #[test]
    fn a_request_that_hangs_among_others_is_found() {
        let mut lane = Lane::default();
        assert_eq!(lane.oldest(5), None);
        lane.take(10, 4);
        lane.take(12, 1); // it hangs
        for now in 13..1000 {
            lane.take(now, 4);
            // Requests end three steps later, in any order.
            lane.end(now, |t| t != 12 && t + 3 <= now);
        }
        let age = lane.oldest(1000).unwrap();
        assert!((980..=988).contains(&age), "{age}");
        // A limit may hold requests back: then it isn't known that this one hangs.
        assert_eq!(lane.ages.oldest(1000, true), Some(1));
        lane.end(1001, |_| true);
        assert_eq!(lane.oldest(1002), None);
    }

    #[test]
    fn a_busy_lane_without_a_hanging_request_is_never_old() {
        let mut lane = Lane::default();
        for now in 1..1000 {
            lane.take(now, 2);
            lane.end(now, |t| t + 5 <= now);
            let age = lane.oldest(now).unwrap_or(0);
            assert!(age <= 10, "{age} at {now}");
        }
    }

    #[test]
    fn a_clock_that_stands_still_does_not_leave_requests_behind() {
        let mut lane = Lane::default();
        for round in 0..100 {
            lane.take(7, 2);
            let last = round % 3 == 0;
            let ages = &lane.ages;
            assert!(ages.left.load(Ordering::Relaxed) as usize <= lane.in_flight.len());
            lane.end(7, |_| last);
        }
        lane.end(7, |_| true);
        assert_eq!(lane.oldest(1_000_000), None);
    }
}
