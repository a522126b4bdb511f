//! The limit in flight: requests of streams wait, and are merged, while the ring has as many requests in flight as its device can use.
//!
//! It is found by trial ([`Trials`]): of the rate of sectors that come back. Other limits that are tried are twice and half the limit, and a quarter more
//! and less.

use pvblk_block::{TrialRules, Trials, Work};
use std::time::{Duration, Instant};

/// Bounds of a [`Limit`]; its upper bound is the number of the ring's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitBounds {
    pub least: u32,
    /// The limit before anything is known. A ring with as many entries or fewer has no other.
    pub first: u32,
}

/// Time without held requests in which the load is taken to pause.
const LONG_GAP: Duration = Duration::from_millis(2);
/// Answers, as a multiple of the limit, after which it becomes less if it wasn't reached.
const UNUSED_TURNS: u64 = 64;

/// See the module's documentation. It knows no clock: the time is told with what happens. The work that it is told are answers of the ring, and sectors
/// of their requests.
#[derive(Debug)]
pub struct Limit {
    bounds: LimitBounds,
    most: u32,
    trials: Trials,
    /// Time and answers when it was told last.
    last: Option<(Instant, u64)>,
}

impl Limit {
    /// For a ring of `entries`.
    pub fn new(bounds: LimitBounds, entries: u32) -> Limit {
        let rules = TrialRules {
            factors: &[(2, 1), (1, 2), (5, 4), (4, 5)],
            least: bounds.least.min(entries),
            most: entries,
            gain: 1.0 / 64.0,
            calm: 8,
            most_calm: 32,
        };
        Limit {
            bounds,
            most: entries,
            trials: Trials::new(rules, bounds.first.min(entries)),
            last: None,
        }
    }

    #[inline]
    pub fn get(&self) -> usize {
        self.trials.get() as usize
    }

    fn is_fixed(&self) -> bool {
        self.most <= self.bounds.first || self.bounds.least == self.bounds.first
    }

    /// True if it is greater than at first.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.trials.get() > self.bounds.first
    }

    /// A request is held, and none was until now.
    pub fn holds_again(&mut self, now: Instant, work: Work) {
        if self.is_fixed() {
            return;
        }
        if let Some((last, _)) = self.last {
            let gap = now.saturating_duration_since(last);
            if gap > LONG_GAP {
                self.trials.paused(gap);
            }
        }
        self.look(now, work);
    }

    /// A request of a stream goes on with `taken` others in flight, and the limit is greater than at first: one that isn't reached is of
    /// no use.
    #[cold]
    pub fn goes_unused(&mut self, taken: usize, work: Work) {
        let since = self.last.map_or(0, |(_, answers)| answers);
        let few = work.pieces - since < UNUSED_TURNS * u64::from(self.trials.get());
        if few || taken < self.bounds.first as usize {
            return;
        }
        let less = (self.trials.chosen() / 2).max(self.bounds.first);
        self.trials.begin_with(less);
        self.last = self.last.map(|(at, _)| (at, work.pieces));
    }

    /// Answers came while requests are held.
    pub fn answered(&mut self, now: Instant, work: Work) {
        if !self.is_fixed() {
            self.look(now, work);
        }
    }

    fn look(&mut self, now: Instant, work: Work) {
        self.last = Some((now, work.pieces));
        let turn = u64::from(self.trials.get());
        self.trials.look(now, work, turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: LimitBounds = LimitBounds {
        least: 8,
        first: 32,
    };

    /// A ring whose device gives a rate, in sectors per second, for each limit.
    struct Ring {
        limit: Limit,
        now: Instant,
        work: Work,
    }

    impl Ring {
        fn new(entries: u32) -> Ring {
            Ring {
                limit: Limit::new(BOUNDS, entries),
                now: Instant::now(),
                work: Work::default(),
            }
        }

        /// Lets answers come, of 8 sectors each and 10 at once, for that many seconds.
        fn runs(&mut self, seconds: f64, rate: impl Fn(f64) -> f64) {
            let end = self.now + Duration::from_secs_f64(seconds);
            while self.now < end {
                self.work.pieces += 10;
                self.work.amount += 80;
                let rate = rate(self.limit.get() as f64);
                self.now += Duration::from_secs_f64(80.0 / rate);
                self.limit.answered(self.now, self.work);
            }
        }

        fn chosen(&self) -> u32 {
            self.limit.trials.chosen()
        }

        /// Fails unless the limit is near `best` after that many seconds in which the rate is highest there.
        fn finds(&mut self, best: f64, seconds: f64) {
            self.runs(seconds, peak(best));
            let found = f64::from(self.chosen()) / best;
            assert!(
                (0.8..=1.25).contains(&found),
                "{} for {best}",
                self.chosen()
            );
        }
    }

    /// A rate that is highest with the limit `best`.
    fn peak(best: f64) -> impl Fn(f64) -> f64 {
        move |limit| 1e6 * (limit / best).min(best / limit)
    }

    #[test]
    fn the_limit_with_the_highest_rate_is_found() {
        for best in [8.0, 12.0, 32.0, 50.0, 120.0, 256.0] {
            let mut ring = Ring::new(256);
            ring.finds(best, 5.0);
        }
    }

    #[test]
    fn it_follows_the_device() {
        let mut ring = Ring::new(512);
        for best in [256.0, 16.0, 400.0, 32.0] {
            ring.finds(best, 10.0);
        }
    }

    #[test]
    fn it_stays_where_nothing_is_gained() {
        let mut ring = Ring::new(256);
        ring.runs(5.0, |_| 1e6);
        assert_eq!(ring.chosen(), 32);
        // Trials are rare then.
        let mut other = 0.0;
        for _ in 0..1000 {
            ring.runs(0.004, |_| 1e6);
            other += f64::from(u8::from(ring.limit.get() != 32));
        }
        assert!(other < 200.0, "{other} of 1000");
    }

    #[test]
    fn a_small_ring_has_no_limit_but_its_entries() {
        let mut ring = Ring::new(32);
        ring.runs(2.0, peak(8.0));
        assert_eq!(ring.limit.get(), 32);
        assert_eq!(Limit::new(BOUNDS, 16).get(), 16);
    }

    /// A rate of a window with a pause says nothing of the limit.
    #[test]
    fn pauses_do_not_count() {
        let mut ring = Ring::new(256);
        for n in 0..400 {
            ring.runs(0.003, |_| 1e6);
            // Pauses come while the greater limit is tried, or they don't.
            if ring.limit.get() <= 32 || n % 2 == 0 {
                ring.now += Duration::from_millis(50);
                ring.limit.holds_again(ring.now, ring.work);
            }
        }
        assert_eq!(ring.chosen(), 32);
    }

    #[test]
    fn a_limit_that_is_not_reached_goes_back() {
        let mut ring = Ring::new(256);
        ring.runs(5.0, peak(256.0));
        assert!(ring.limit.is_raised());
        for _ in 0..100 {
            ring.work.pieces += 1000;
            ring.limit.goes_unused(31, ring.work);
        }
        assert!(
            ring.limit.is_raised(),
            "the load is low, so nothing is known"
        );
        for _ in 0..100 {
            ring.work.pieces += 1000;
            ring.limit.goes_unused(40, ring.work);
        }
        assert_eq!(ring.limit.get(), 32);
    }
}
