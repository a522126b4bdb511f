//! The limit in flight: requests of streams wait, and are merged, while the ring has as many requests in flight as its device can use.
//!
//! It is found by trial, as BQL and Kyber find theirs: the rate of sectors that come back is measured with the limit, with another one, and
//! with the limit again. The other one takes its place if the rate was higher than both. Other ones are twice and half the limit, and a
//! quarter more and less, in turn. The longer nothing changes, the rarer are trials.

use std::time::{Duration, Instant};

/// Bounds of a [`Limit`]; its upper bound is the number of the ring's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitBounds {
    pub least: u32,
    /// The limit before anything is known. A ring with as many entries or fewer has no other.
    pub first: u32,
}

/// Answers of a ring, and sectors of their requests, since its begin.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub answers: u64,
    pub sectors: u64,
}

/// Answers of a window, as a multiple of the limit: many turns, since streams get in and out of step.
const TURNS: u64 = 16;
/// Windows that last less are too noisy.
const SHORTEST: Duration = Duration::from_millis(4);
/// Time without held requests in which the load is taken to pause.
const LONG_GAP: Duration = Duration::from_millis(2);
/// The gain for which a limit changes, of the rate.
const GAIN: f64 = 1.0 / 64.0;
/// The share of the rate below which a trial ends early.
const HOPELESS: f64 = 0.75;
/// The change of the rate after which there is a trial at once.
const CHANGE: f64 = 0.25;
/// Most windows between two trials.
const MOST_CALM: u32 = 32;
/// Answers, as a multiple of the limit, after which it becomes less if it wasn't reached.
const UNUSED_TURNS: u64 = 64;

/// Limits to try, as multiples of the limit.
const TRIALS: [(u32, u32); 4] = [(2, 1), (1, 2), (5, 4), (4, 5)];

/// Windows of a trial, in their order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    /// Not before a trial; windows that are left.
    Calm(u32),
    Before,
    /// The rate before it.
    Trial(f64),
    /// The better of the rates before it, and the trial's.
    After(f64, f64),
}

#[derive(Clone, Copy, Debug)]
struct Window {
    begin: Instant,
    totals: Totals,
    /// Time of pauses.
    idle: Duration,
    /// The limit has just changed: nothing is measured.
    settles: bool,
}

/// See the module's documentation. It knows no clock: the time is told with what happens.
#[derive(Debug)]
pub struct Limit {
    bounds: LimitBounds,
    most: u32,
    /// The limit without trials.
    chosen: u32,
    /// The limit in force.
    limit: u32,
    /// Of [`TRIALS`], the next.
    trial: usize,
    /// The rate before the last trial.
    known: f64,
    /// Trials in a row that failed.
    failed: u32,
    stage: Stage,
    window: Option<Window>,
    last: Option<(Instant, u64)>,
}

impl Limit {
    /// For a ring of `entries`.
    pub fn new(bounds: LimitBounds, entries: u32) -> Limit {
        let first = bounds.first.min(entries);
        Limit {
            bounds,
            most: entries,
            chosen: first,
            limit: first,
            trial: 0,
            known: 0.0,
            failed: 0,
            stage: Stage::Before,
            window: None,
            last: None,
        }
    }

    #[inline]
    pub fn get(&self) -> usize {
        self.limit as usize
    }

    fn is_fixed(&self) -> bool {
        self.most <= self.bounds.first || self.bounds.least == self.bounds.first
    }

    /// True if it is greater than at first.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.limit > self.bounds.first
    }

    /// A request is held, and none was until now.
    pub fn holds_again(&mut self, now: Instant, totals: Totals) {
        if self.is_fixed() {
            return;
        }
        if let (Some(window), Some((last, _))) = (&mut self.window, self.last) {
            let gap = now.saturating_duration_since(last);
            if gap > LONG_GAP {
                window.idle += gap;
            }
        }
        self.look(now, totals);
    }

    /// A request of a stream goes on with `taken` others in flight, and the limit is greater than at first: one that isn't reached is of
    /// no use.
    #[cold]
    pub fn goes_unused(&mut self, taken: usize, totals: Totals) {
        let since = self.last.map_or(0, |(_, answers)| answers);
        let few = totals.answers - since < UNUSED_TURNS * u64::from(self.limit);
        if few || taken < self.bounds.first as usize {
            return;
        }
        self.chosen = (self.chosen / 2).max(self.bounds.first);
        self.begin(Stage::Before, self.chosen);
        self.last = self.last.map(|(at, _)| (at, totals.answers));
    }

    /// Answers came while requests are held.
    pub fn answered(&mut self, now: Instant, totals: Totals) {
        if !self.is_fixed() {
            self.look(now, totals);
        }
    }

    /// Ends the window if it is long enough.
    fn look(&mut self, now: Instant, totals: Totals) {
        self.last = Some((now, totals.answers));
        let Some(window) = &self.window else {
            self.window = Some(Window {
                begin: now,
                totals,
                idle: Duration::ZERO,
                settles: true,
            });
            return;
        };
        let took = now.saturating_duration_since(window.begin);
        let answers = totals.answers - window.totals.answers;
        let sectors = totals.sectors - window.totals.sectors;
        let rate = sectors as f64 / took.as_secs_f64().max(1e-9);
        let hopeless = matches!(self.stage, Stage::Trial(before) if rate < before * HOPELESS);
        let (turns, shortest) = match (window.settles, hopeless) {
            (true, _) => (2, Duration::ZERO),
            (false, true) => (TURNS / 4, SHORTEST / 4),
            (false, false) => (TURNS, SHORTEST),
        };
        if answers < turns * u64::from(self.limit) || took < shortest {
            return;
        }
        let counts = !window.settles && window.idle <= took / 4;
        self.window = Some(Window {
            begin: now,
            totals,
            idle: Duration::ZERO,
            settles: false,
        });
        if counts {
            self.step(rate);
        }
    }

    /// A window has ended.
    fn step(&mut self, rate: f64) {
        match self.stage {
            Stage::Calm(left) => {
                let changed =
                    rate > self.known * (1.0 + CHANGE) || rate * (1.0 + CHANGE) < self.known;
                if changed {
                    (self.failed, self.trial) = (0, 0);
                }
                self.stage = match left {
                    left if left > 0 && !changed => Stage::Calm(left - 1),
                    _ => Stage::Before,
                };
            }
            Stage::Before => {
                self.known = rate;
                if self.other() == self.chosen {
                    self.trial = (self.trial + 1) % TRIALS.len();
                }
                self.begin(Stage::Trial(rate), self.other());
            }
            Stage::Trial(before) if rate > before * (1.0 + GAIN) => {
                self.begin(Stage::After(before, rate), self.chosen);
            }
            Stage::Trial(_) => self.fail(),
            Stage::After(before, trial) if trial > before.max(rate) * (1.0 + GAIN) => {
                self.chosen = self.other();
                self.failed = 0;
                self.begin(Stage::Before, self.chosen);
            }
            Stage::After(..) => self.fail(),
        }
    }

    /// The trial brought nothing.
    fn fail(&mut self) {
        self.trial = (self.trial + 1) % TRIALS.len();
        self.failed += 1;
        let calm = (self.failed / TRIALS.len() as u32 * 8).min(MOST_CALM);
        self.begin(Stage::Calm(calm), self.chosen);
    }

    fn begin(&mut self, stage: Stage, limit: u32) {
        self.stage = stage;
        if self.limit != limit {
            self.limit = limit;
            self.window = None;
        }
    }

    /// The limit to try.
    fn other(&self) -> u32 {
        let (times, by) = TRIALS[self.trial];
        let other = self.chosen * times / by;
        other.clamp(self.bounds.least.min(self.most), self.most)
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
        totals: Totals,
    }

    impl Ring {
        fn new(entries: u32) -> Ring {
            Ring {
                limit: Limit::new(BOUNDS, entries),
                now: Instant::now(),
                totals: Totals::default(),
            }
        }

        /// Lets answers come, of 8 sectors each and 10 at once, for that many seconds.
        fn runs(&mut self, seconds: f64, rate: impl Fn(f64) -> f64) {
            let end = self.now + Duration::from_secs_f64(seconds);
            while self.now < end {
                self.totals.answers += 10;
                self.totals.sectors += 80;
                let rate = rate(self.limit.get() as f64);
                self.now += Duration::from_secs_f64(80.0 / rate);
                self.limit.answered(self.now, self.totals);
            }
        }

        fn chosen(&self) -> u32 {
            self.limit.chosen
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
                ring.limit.holds_again(ring.now, ring.totals);
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
            ring.totals.answers += 1000;
            ring.limit.goes_unused(31, ring.totals);
        }
        assert!(
            ring.limit.is_raised(),
            "the load is low, so nothing is known"
        );
        for _ in 0..100 {
            ring.totals.answers += 1000;
            ring.limit.goes_unused(40, ring.totals);
        }
        assert_eq!(ring.limit.get(), 32);
    }
}
