//! The number of requests that a source takes at a time, which is also the most that it answers with one signal.

use pvblk_block::{TrialRules, Trials, Work};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// Number of requests that a source takes in one pull. With all that there are both sides take turns instead of working side by side; with few, each
/// costs more. The best number depends on the peer and whether it sleeps, on the device and on the time that a wake-up takes, so it is found by trial
/// ([`Trials`]) of the rate of requests, from a half of those that there are.
#[derive(Debug)]
pub struct PullBatch {
    /// The most that there were at a time in this epoch and in the one before.
    most: usize,
    most_before: usize,
    /// Looks at the clock that are left of this epoch.
    looks: u32,
    number: Trials,
    /// Requests that were taken, and how many there will be at the next look at the clock.
    taken: u64,
    look_at: u64,
    choice: Arc<PullChoice>,
}

/// The choice of a [`PullBatch`], for others to see or to fix.
#[derive(Debug, Default)]
pub struct PullChoice {
    /// 0: none yet.
    most: AtomicU32,
    /// 0: the batch chooses.
    fixed: AtomicU32,
    /// Times at which the peer was woken.
    signals: AtomicU64,
}

const RULES: TrialRules = TrialRules {
    factors: &[(2, 1), (1, 2)],
    least: 1,
    most: 128,
    gain: 1.0 / 32.0,
    calm: 32,
    most_calm: 128,
};
/// Fewest requests between two looks at the clock.
const LOOK_EVERY: u64 = 256;
/// Looks at the clock of an epoch.
const EPOCH: u32 = 32;
/// So many times as many as there were lately are another load.
const DEEPER: usize = 4;

impl Default for PullBatch {
    fn default() -> PullBatch {
        PullBatch {
            most: 0,
            most_before: 0,
            looks: EPOCH,
            number: Trials::new(RULES, 1),
            taken: 0,
            look_at: LOOK_EVERY,
            choice: Arc::default(),
        }
    }
}

impl PullBatch {
    /// The number for this pull, of `pending` requests that could be taken now.
    #[inline]
    pub fn next(&mut self, pending: usize) -> usize {
        if let Some(fixed) = self.choice.fixed() {
            return fixed;
        }
        if pending > self.most {
            self.rises(pending);
        }
        if self.taken >= self.look_at {
            self.look(Instant::now());
        }
        let most = self.number.get();
        self.taken += pending.min(most as usize) as u64;
        self.choice.set(most);
        most as usize
    }

    /// The most that there were at a time, lately.
    fn lately(&self) -> usize {
        self.most.max(self.most_before)
    }

    #[cold]
    fn rises(&mut self, pending: usize) {
        if pending > DEEPER * self.lately() {
            self.begin_with(pending / 2);
        }
        self.most = pending;
    }

    /// Begins with the power of two that is `number` or the next below.
    #[cold]
    fn begin_with(&mut self, number: usize) {
        let number = 1 << number.max(1).ilog2();
        let number = number.min(RULES.most);
        if self.number.chosen() != number {
            self.number.begin_with(number);
        }
    }

    #[cold]
    fn look(&mut self, now: Instant) {
        self.look_at = self.taken + LOOK_EVERY;
        self.looks -= 1;
        if self.looks == 0 {
            self.looks = EPOCH;
            self.most_before = std::mem::take(&mut self.most);
        }
        let lately = self.lately();
        // Where the number is greater than what there is, a half of it changes nothing.
        if self.number.chosen() as usize > lately.max(1) {
            self.begin_with(lately);
        }
        // A single request can't be divided.
        if lately > 1 {
            let work = Work {
                pieces: self.taken,
                amount: self.taken,
            };
            self.number.look(now, work, lately as u64);
        }
    }

    /// Notes that responses were made visible, and whether the peer was woken for them.
    #[inline]
    pub fn pushed(&mut self, woke: bool) {
        if woke {
            self.choice.count_signal();
        }
    }

    pub fn choice(&self) -> &Arc<PullChoice> {
        &self.choice
    }
}

impl PullChoice {
    /// Lets the source take so many requests at a time, at least 1, whatever it would choose.
    pub fn fix(&self, most: u32) {
        self.fixed.store(most.max(1), Ordering::Relaxed);
        self.set(most.max(1));
    }

    /// The most requests that were to be taken in the last pull, or are to be always; 0 before the first pull.
    pub fn most(&self) -> u32 {
        self.most.load(Ordering::Relaxed)
    }

    /// Times at which the peer was woken for responses.
    pub fn signals(&self) -> u64 {
        self.signals.load(Ordering::Relaxed)
    }

    #[inline]
    fn fixed(&self) -> Option<usize> {
        let fixed = self.fixed.load(Ordering::Relaxed);
        (fixed > 0).then_some(fixed as usize)
    }

    #[inline]
    fn set(&self, most: u32) {
        if self.most.load(Ordering::Relaxed) != most {
            self.most.store(most, Ordering::Relaxed);
        }
    }

    /// Only the source's thread counts.
    #[inline]
    fn count_signal(&self) {
        let signals = self.signals.load(Ordering::Relaxed);
        self.signals.store(signals + 1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A batch with a peer that has `pending` requests each time, and gets a rate for each number that is taken.
    struct Peer {
        batch: PullBatch,
        now: Instant,
        pending: usize,
    }

    impl Peer {
        fn new(pending: usize) -> Peer {
            Peer {
                batch: PullBatch::default(),
                now: Instant::now(),
                pending,
            }
        }

        /// The time goes on; the batch's own looks at the clock are left out.
        fn runs(&mut self, seconds: f64, rate: impl Fn(f64) -> f64) {
            let end = self.now + Duration::from_secs_f64(seconds);
            while self.now < end {
                self.batch.look_at = u64::MAX;
                let taken = self.batch.next(self.pending).min(self.pending);
                self.now += Duration::from_secs_f64(taken as f64 / rate(taken as f64));
                self.batch.look(self.now);
            }
        }

        fn number(&self) -> u32 {
            self.batch.number.chosen()
        }
    }

    /// A rate that is highest when `best` are taken at a time.
    fn peak(best: f64) -> impl Fn(f64) -> f64 {
        move |taken| 1e6 * (taken / best).min(best / taken)
    }

    #[test]
    fn the_number_with_the_highest_rate_is_taken() {
        let mut peer = Peer::new(32);
        for best in [32, 4, 16, 1, 8] {
            peer.runs(3.0, peak(f64::from(best)));
            assert_eq!(peer.number(), best);
        }
    }

    #[test]
    fn it_follows_what_there_is() {
        let mut peer = Peer::new(128);
        for pending in [128, 2, 64, 1] {
            peer.pending = pending;
            let half = (pending as u32).div_ceil(2);
            peer.runs(3.0, peak(f64::from(half)));
            assert_eq!(peer.number(), half);
        }
    }

    #[test]
    fn other_numbers_are_rare_where_nothing_is_gained() {
        let mut peer = Peer::new(32);
        peer.runs(2.0, |_| 1e6);
        let mut others = 0;
        for _ in 0..2000 {
            peer.runs(0.001, |_| 1e6);
            others += usize::from(peer.batch.choice().most() != 16);
        }
        assert!(others < 100, "{others} of 2000");
        assert_eq!(peer.number(), 16);
    }

    #[test]
    fn a_half_is_taken_before_anything_is_known() {
        let mut batch = PullBatch::default();
        assert_eq!([0, 2, 4, 8].map(|n| batch.next(n)), [1, 1, 1, 1]);
        assert_eq!([33, 40, 500, 0].map(|n| batch.next(n)), [16, 16, 128, 128]);
    }

    #[test]
    fn a_fixed_number_is_taken_whatever_there_is() {
        let mut batch = PullBatch::default();
        batch.choice().fix(3);
        assert_eq!(batch.choice().most(), 3);
        assert_eq!([0, 5, 500].map(|n| batch.next(n)), [3, 3, 3]);
    }

    #[test]
    fn signals_are_counted() {
        let mut batch = PullBatch::default();
        for woke in [true, false, true] {
            batch.pushed(woke);
        }
        assert_eq!(batch.choice().signals(), 2);
    }
}
