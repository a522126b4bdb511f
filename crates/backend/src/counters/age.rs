//! [`Ages`]: the least age of the oldest request of a lane, at the cost of one comparison for a batch that ended.
//!
//! A thread that looks now and then asks for a *mark*. At the next end of requests the lane sets it, and counts the requests that are in flight then. Each of
//! these that ends counts down; at zero there is no mark until the next look asks for one. So while the count isn't zero, a request is in flight that is older
//! than the mark. While no request ends, nothing happens in the lane; [`Seen`] has that case. A request that hangs is found at the latest two looks
//! after all those that were in flight beside it have ended, and the limit has passed then.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// In [`Ages::left`]: a look has asked for a mark.
const WANTED: u32 = u32::MAX;

/// Times are in ticks.
#[derive(Default)]
pub(super) struct Ages {
    /// Requests taken before it count. Written by the thread that steps the lane.
    mark: AtomicU64,
    /// Number of those that haven't ended; 0: there is no mark, and only a look changes that, to [`WANTED`].
    left: AtomicU32,
}

impl Ages {
    /// True if ends of requests are to be noted.
    #[inline]
    pub fn counts(&self) -> bool {
        self.left.load(Ordering::Relaxed) != 0
    }

    /// Requests taken at these times have ended at `now`, and so many are in flight. Requests that are taken later have to be taken after `now`.
    #[cold]
    pub fn ended(&self, taken: impl Iterator<Item = u64>, now: u64, in_flight: u32) {
        let left = match self.left.load(Ordering::Relaxed) {
            WANTED => {
                // All of them were taken before the mark, also if the clock stands still.
                self.mark.store(now + 1, Ordering::Relaxed);
                in_flight
            }
            left => {
                let mark = self.mark.load(Ordering::Relaxed);
                let old = taken.filter(|&at| at < mark).count();
                left.saturating_sub(old as u32)
            }
        };
        self.left.store(left, Ordering::Relaxed);
    }

    /// Asks for a mark if there is none; else the age of a request that is older than the mark.
    fn look(&self, now: u64) -> Option<u64> {
        let asked = self
            .left
            .compare_exchange(0, WANTED, Ordering::Relaxed, Ordering::Relaxed);
        match asked {
            Ok(_) | Err(WANTED) => None,
            Err(_) => Some(now.saturating_sub(self.mark.load(Ordering::Relaxed))),
        }
    }
}

/// Of a lane: since when none of its requests has ended, as seen by the thread that looks.
#[derive(Clone, Copy, Default)]
pub(super) struct Seen {
    /// Number of requests that had ended by then; `None`: none was in flight.
    ended: Option<u64>,
    /// Time of the first look that saw this number.
    since: u64,
}

impl Seen {
    /// A look at a lane of which so many requests have ended, and so many are in flight. Returns the least age of its oldest request; `passes`: at
    /// most the time since any ended.
    pub fn look(
        &mut self,
        ages: &Ages,
        ended: u64,
        in_flight: u64,
        now: u64,
        passes: bool,
    ) -> Option<u64> {
        if in_flight == 0 {
            self.ended = None;
            return None;
        }
        if self.ended != Some(ended) {
            (self.ended, self.since) = (Some(ended), now);
        }
        // Those that were in flight at that look still are.
        let idle = now.saturating_sub(self.since);
        match ages.look(now) {
            Some(age) if !passes => Some(age.max(idle)),
            _ => Some(idle),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane, and the thread that looks at it.
    #[derive(Default)]
    struct Lane {
        ages: Ages,
        seen: Seen,
        /// When its requests in flight were taken.
        in_flight: Vec<u64>,
        ended: u64,
    }

    impl Lane {
        fn take(&mut self, now: u64, count: usize) {
            self.in_flight.extend(vec![now; count]);
        }

        fn end(&mut self, now: u64, which: impl Fn(u64) -> bool) {
            let ended = self.in_flight.extract_if(.., |t| which(*t));
            let ended: Vec<u64> = ended.collect();
            self.ended += ended.len() as u64;
            if !ended.is_empty() && self.ages.counts() {
                let left = self.in_flight.len() as u32;
                self.ages.ended(ended.into_iter(), now, left);
            }
        }

        fn oldest(&mut self, now: u64, passes: bool) -> Option<u64> {
            let (ended, in_flight) = (self.ended, self.in_flight.len() as u64);
            self.seen.look(&self.ages, ended, in_flight, now, passes)
        }
    }

    #[test]
    fn a_request_that_hangs_among_others_is_found() {
        let mut lane = Lane::default();
        assert_eq!(lane.oldest(5, false), None);
        lane.take(10, 4);
        lane.take(12, 1); // it hangs
        for now in 13..1000 {
            lane.take(now, 4);
            // Requests end three steps later, in any order.
            lane.end(now, |t| t != 12 && t + 3 <= now);
            if now % 10 == 0 {
                lane.oldest(now, false);
            }
        }
        let age = lane.oldest(1000, false).unwrap();
        assert!((960..=988).contains(&age), "{age}");
        // A limit may hold requests back: then it isn't known that this one hangs.
        assert!(lane.oldest(1000, true).unwrap() <= 10);
        lane.end(1001, |_| true);
        assert_eq!(lane.oldest(1002, false), None);
    }

    #[test]
    fn requests_of_which_none_ends_are_found() {
        for passes in [false, true] {
            let mut lane = Lane::default();
            lane.take(3, 1);
            lane.oldest(4, passes);
            lane.end(5, |_| true);
            lane.take(6, 2);
            assert_eq!(lane.oldest(10, passes), Some(0));
            assert_eq!(lane.oldest(500, passes), Some(490));
            lane.take(501, 1);
            assert_eq!(lane.oldest(600, passes), Some(590));
            lane.end(700, |t| t == 501);
            assert_eq!(lane.oldest(700, passes), Some(0));
            assert_eq!(lane.oldest(900, passes), Some(200));
        }
    }

    #[test]
    fn a_busy_lane_without_a_hanging_request_is_never_old() {
        let mut lane = Lane::default();
        for now in 1..10_000 {
            lane.take(now, 2);
            lane.end(now, |t| t + 5 <= now);
            if now % 10 == 0 {
                let age = lane.oldest(now, false).unwrap_or(0);
                assert!(age <= 10, "{age} at {now}");
            }
        }
    }

    #[test]
    fn a_clock_that_stands_still_does_not_leave_requests_behind() {
        let mut lane = Lane::default();
        for round in 0..100 {
            lane.take(7, 2);
            lane.oldest(7, false);
            let left = lane.ages.left.load(Ordering::Relaxed);
            assert!(left == WANTED || left as usize <= lane.in_flight.len());
            lane.end(7, |_| round % 3 == 0);
        }
        lane.end(7, |_| true);
        assert_eq!(lane.oldest(1_000_000, false), None);
    }
}
