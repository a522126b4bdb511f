//! The number of requests that a source takes at a time. Where the device is done at once, it is also the most that one signal answers.

use pvblk_block::{TrialRules, Trials, Work};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of requests that a source takes in one pull, 1 to 32. With all that there are both sides take turns instead of working side by side; with few,
/// each costs more. The best number depends on the peer and whether it sleeps, on the device and on the time that a wake-up takes, so it is found by trial
/// ([`Trials`]) of the rate of requests, from a half of those that there are, and at least 8.
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
    /// Time at which the worker began to sleep.
    asleep: Option<Instant>,
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

/// At most 32, so that a step doesn't keep neighbours waiting.
const RULES: TrialRules = TrialRules {
    factors: &[(1, 2), (2, 1)],
    least: 1,
    most: 32,
    gain: 1.0 / 32.0,
    calm: 32,
    most_calm: 128,
};
/// The number before anything is known: requests that come together are merged by the device if they are taken together.
const FIRST: usize = 8;
/// Fewest requests between two looks at the clock.
const LOOK_EVERY: u64 = 256;
/// Looks at the clock of an epoch.
const EPOCH: u32 = 32;
/// So many times the number that is taken are another load, if there weren't as many lately.
const DEEPER: usize = 4;
/// Time without requests in which the load is taken to pause. A client that waits for us doesn't rest that long.
const LONG_GAP: Duration = Duration::from_millis(2);

impl Default for PullBatch {
    fn default() -> PullBatch {
        PullBatch {
            most: 0,
            most_before: 0,
            looks: EPOCH,
            number: Trials::new(RULES, FIRST as u32),
            taken: 0,
            look_at: LOOK_EVERY,
            asleep: None,
            choice: Arc::default(),
        }
    }
}

impl PullBatch {
    /// The number for this pull, of `pending` requests that could be taken now. [`PullBatch::took`] has to follow.
    #[inline]
    pub fn next(&mut self, pending: usize) -> usize {
        if let Some(fixed) = self.choice.fixed() {
            return fixed;
        }
        if pending > self.most {
            self.rises(pending);
        }
        if pending > 0 && self.asleep.is_some() {
            self.awake(Instant::now());
        }
        let most = self.number.get();
        self.choice.set(most);
        most as usize
    }

    /// Notes the number of requests that were taken, good or bad.
    #[inline]
    pub fn took(&mut self, requests: usize) {
        self.taken += requests as u64;
        if self.taken >= self.look_at && self.choice.fixed().is_none() {
            self.look(Instant::now());
        }
    }

    /// The worker is about to sleep.
    pub fn sleeps(&mut self) {
        if self.choice.fixed().is_none() {
            self.asleep.get_or_insert_with(Instant::now);
        }
    }

    #[cold]
    fn awake(&mut self, now: Instant) {
        let slept = self.asleep.take();
        let gap = slept.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        if gap > LONG_GAP {
            self.number.paused(gap);
        }
    }

    /// The most that there were at a time, lately.
    fn lately(&self) -> usize {
        self.most.max(self.most_before)
    }

    #[cold]
    fn rises(&mut self, pending: usize) {
        let number = self.number.chosen() as usize;
        if pending > self.lately() && pending > DEEPER * number {
            self.begin_with((pending / 2).max(FIRST));
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
        // Of a number that is twice what there is, a half would change nothing.
        let enough = self.lately().max(1).next_power_of_two();
        if self.number.chosen() as usize > enough {
            self.begin_with(enough);
        }
        let work = Work {
            pieces: self.taken,
            amount: self.taken,
        };
        self.number.look(now, work, self.lately() as u64);
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
                let taken = self.batch.next(self.pending).min(self.pending);
                self.batch.look_at = u64::MAX;
                self.batch.took(taken);
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
        let mut peer = Peer::new(64);
        for pending in [64, 2, 40, 1, 20] {
            peer.pending = pending;
            let half = 1 << (pending as u32).div_ceil(2).ilog2();
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
            others += usize::from(peer.batch.choice().most() != 8);
        }
        assert!(others < 100, "{others} of 2000");
        assert_eq!(peer.number(), 8);
    }

    #[test]
    fn all_of_few_and_a_half_of_many_are_taken_before_anything_is_known() {
        let mut batch = PullBatch::default();
        assert_eq!([0, 2, 8, 32].map(|n| batch.next(n)), [8; 4]);
        assert_eq!([33, 40, 500, 0].map(|n| batch.next(n)), [16, 16, 32, 32]);
    }

    /// With 20 requests, 32 take all, and 16 nearly all.
    #[test]
    fn trials_become_rare_where_all_are_best() {
        let mut peer = Peer::new(20);
        peer.runs(2.0, |taken| 1e6 * taken);
        assert_eq!(peer.number(), 32);
        let mut others = 0;
        for _ in 0..2000 {
            peer.runs(0.001, |taken| 1e6 * taken);
            others += usize::from(peer.batch.choice().most() < 20);
        }
        assert!(others < 100, "{others} of 2000");
    }

    #[test]
    fn a_window_with_a_pause_says_nothing() {
        let mut peer = Peer::new(32);
        peer.runs(2.0, |_| 1e6);
        let number = peer.number();
        for n in 0..400 {
            peer.runs(0.003, |_| 1e6);
            // Pauses come while another number is tried, or they don't.
            if peer.batch.choice().most() == number || n % 2 == 0 {
                peer.batch.asleep = Some(peer.now);
                peer.now += Duration::from_millis(50);
                peer.batch.awake(peer.now);
            }
        }
        assert_eq!(peer.number(), number);
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
