//! The load of workers, and who gives a lane to whom.
//!
//! A worker counts the time in which its lanes had work. The watchdog compares all workers' counts, and asks a worker that is
//! busy all the time to give a lane to one that isn't: the heaviest that leaves the receiver less busy than the giver was.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Rounds with work between two looks at the clock.
const ROUNDS: u32 = 32;

/// The time in which a worker's lanes had work.
#[derive(Default)]
pub struct BusyTime {
    /// Time of the first round with work since the last one without, or of the last look.
    since: Option<Instant>,
    total: Duration,
    rounds: u32,
}

impl BusyTime {
    /// A round is over; `now` as it was read last. True if the clock is to be read, for [`BusyTime::until`].
    #[inline]
    pub fn round(&mut self, moved: bool, now: Instant) -> bool {
        if !moved {
            return self.since.is_some();
        }
        self.since.get_or_insert(now);
        self.rounds += 1;
        if self.rounds < ROUNDS {
            return false;
        }
        self.rounds = 0;
        true
    }

    /// Takes the time until now into the count; `works`: and the time from now on, too. Returns the count.
    pub fn until(&mut self, now: Instant, works: bool) -> Duration {
        if let Some(since) = self.since.take() {
            self.total += now.saturating_duration_since(since);
        }
        self.since = works.then_some(now);
        self.total
    }

    /// The time since the last look isn't work.
    pub fn forget(&mut self) {
        self.since = None;
    }
}

/// Interval after which lanes' work counts half.
pub const WEIGH_EVERY: Duration = Duration::from_millis(100);
/// Shortest time between two moves of a lane.
pub const STAYS: Duration = Duration::from_secs(2);
/// A lane that takes less of its worker's time, in thousandths, isn't worth a move.
const LEAST: u64 = 20;

/// The work of one lane, in the units of [`crate::lane::Lane::cost`].
#[derive(Default)]
pub struct Weight {
    /// Since the last weighing.
    new: u64,
    weight: u64,
}

impl Weight {
    #[inline]
    pub fn add(&mut self, cost: u64) {
        self.new += cost;
    }

    /// Older work counts half from now on.
    pub fn weigh(&mut self) {
        self.weight = self.weight / 2 + std::mem::take(&mut self.new);
    }

    fn sum(&self) -> u64 {
        self.weight + self.new
    }
}

/// The heaviest of those lanes (the bool) that may move, with at most this part of all lanes' work, in thousandths.
pub fn choose<'a>(
    lanes: impl Iterator<Item = (usize, &'a Weight, bool)> + Clone,
    most: u64,
) -> Option<usize> {
    let all: u64 = lanes.clone().map(|(_, weight, _)| weight.sum()).sum();
    let part = |weight: &Weight| (weight.sum() * 1000).checked_div(all).unwrap_or(0);
    lanes
        .filter(|(_, _, may)| *may)
        .map(|(lane, weight, _)| (part(weight), lane))
        .filter(|(part, _)| (LEAST..=most).contains(part))
        .max_by_key(|(part, _)| *part)
        .map(|(_, lane)| lane)
}

/// The time over which loads are compared.
const WINDOW: Duration = Duration::from_millis(200);
/// Loads, in thousandths of the time: who is as busy gives a lane away, and who is no busier gets it.
const BUSY: u64 = 900;
const FREE: u64 = 500;
/// The receiver stays so much less busy than the giver was, or the next lane would come back.
const GAIN: u64 = 100;
/// Two lanes of equal work are never measured as equal.
const UNEVEN: u64 = 50;

/// A worker, as the watchdog sees it.
#[derive(Clone, Copy)]
pub struct Load {
    /// As [`BusyTime`] counts.
    pub busy: Duration,
    pub lanes: usize,
    /// Its thread has been in one call for a while: it counts no time, and has none for others.
    pub blocked: bool,
}

/// A worker gives a lane to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gift {
    pub from: usize,
    pub to: usize,
    /// The most of its lanes' work that the lane may have, in thousandths.
    pub most: u64,
}

/// The loads of workers lately.
#[derive(Default)]
pub struct Balance {
    looks: VecDeque<(Instant, Vec<Duration>)>,
    /// The worker that was asked last. It may have had nothing to give, so others come first.
    last: usize,
}

impl Balance {
    /// A look at all workers. After a gift it takes the time of a whole window until the next.
    pub fn look(&mut self, now: Instant, workers: &[Load]) -> Option<Gift> {
        let busy: Vec<Duration> = workers.iter().map(|worker| worker.busy).collect();
        let is_old = |look: &(Instant, _)| now.duration_since(look.0) >= WINDOW;
        // The last one that is old enough stays.
        while self.looks.get(1).is_some_and(is_old) {
            self.looks.pop_front();
        }
        let gift = self
            .looks
            .front()
            .filter(|look| is_old(look))
            .and_then(|(then, before)| {
                let time = now.duration_since(*then).as_micros().max(1) as u64;
                let load = |at: usize| {
                    let busy = busy[at].saturating_sub(before[at]).as_micros() as u64;
                    (busy * 1000 / time).min(1000)
                };
                let count = workers.len();
                let in_turn = (1..=count).map(|n| (self.last + n) % count);
                let can_give = |at: &usize| workers[*at].lanes > 1 && load(*at) >= BUSY;
                let from = in_turn.clone().find(can_give)?;
                let can_take = |at: &usize| !workers[*at].blocked;
                let to = in_turn
                    .filter(can_take)
                    .min_by_key(|at| (load(*at), workers[*at].lanes))?;
                let (giver, receiver) = (load(from), load(to));
                let time = giver.saturating_sub(receiver + GAIN);
                (receiver <= FREE).then(|| Gift {
                    from,
                    to,
                    most: time.min(giver / 2 + UNEVEN) * 1000 / giver,
                })
            });
        if let Some(gift) = gift {
            self.last = gift.from;
            self.looks.clear();
        }
        self.looks.push_back((now, busy));
        gift
    }

    /// Nobody was looked at for a while.
    pub fn forget(&mut self) {
        self.looks.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(25);

    /// Gifts within two seconds, of workers with these loads (thousandths) and lanes.
    fn gifts(workers: &[(u64, usize)]) -> Vec<Gift> {
        gifts_beside(workers, None)
    }

    /// The same while this worker is blocked.
    fn gifts_beside(workers: &[(u64, usize)], blocked: Option<usize>) -> Vec<Gift> {
        let (begin, mut balance) = (Instant::now(), Balance::default());
        let look = |n: u32| {
            let load = |(at, (share, lanes)): (usize, &(u64, usize))| Load {
                busy: TICK * n * *share as u32 / 1000,
                lanes: *lanes,
                blocked: blocked == Some(at),
            };
            let workers: Vec<Load> = workers.iter().enumerate().map(load).collect();
            balance.look(begin + TICK * n, &workers)
        };
        (0..80).filter_map(look).collect()
    }

    #[test]
    fn a_busy_worker_gives_a_lane_to_the_freest() {
        let all = gifts(&[(400, 1), (1000, 3), (100, 2), (300, 1)]);
        let first = Gift {
            from: 1,
            to: 2,
            most: 550,
        };
        assert_eq!(all[0], first);
        // One in each window.
        assert!((8..=10).contains(&all.len()), "{}", all.len());
    }

    #[test]
    fn nobody_gives_without_need_or_gain() {
        // No worker is busy; it has one lane; the others are busy, too.
        for workers in [
            vec![(800, 3), (0, 0)],
            vec![(1000, 1), (0, 0)],
            vec![(1000, 4), (600, 1)],
            vec![(1000, 4)],
        ] {
            assert_eq!(gifts(&workers), [], "{workers:?}");
        }
    }

    #[test]
    fn nobody_gives_to_a_blocked_worker() {
        let workers = [(1000, 3), (0, 1), (100, 2)];
        assert!(gifts(&workers).iter().all(|gift| gift.to == 1));
        let all = gifts_beside(&workers, Some(1));
        assert!(
            !all.is_empty() && all.iter().all(|gift| gift.to == 2),
            "{all:?}"
        );
        assert_eq!(gifts_beside(&workers[..2], Some(1)), []);
    }

    #[test]
    fn two_lanes_of_equal_work_are_divided() {
        // Also if the receiver has a little to do, and the giver isn't busy all the time.
        for workers in [
            [(1000, 2), (0, 0)],
            [(1000, 2), (50, 24)],
            [(950, 2), (0, 0)],
            [(1000, 2), (400, 1)],
        ] {
            let most = gifts(&workers)[0].most;
            assert!((500..=600).contains(&most), "{workers:?}: {most}");
        }
        // The receiver would be as busy as the giver was.
        assert!(gifts(&[(1000, 2), (500, 1)])[0].most < 450);
    }

    #[test]
    fn all_busy_workers_are_asked_in_turn() {
        let from = |gift: &Gift| gift.from;
        let all: Vec<usize> = gifts(&[(1000, 25), (0, 0), (960, 2)])
            .iter()
            .map(from)
            .collect();
        assert!(all.starts_with(&[2, 0, 2, 0]), "{all:?}");
    }

    #[test]
    fn a_moment_is_no_load() {
        let (begin, mut balance) = (Instant::now(), Balance::default());
        for n in 0..80 {
            // Busy for 100 ms of each 300.
            let busy = TICK * (n / 12 * 4 + (n % 12).min(4));
            let loads = [(busy, 2), (Duration::ZERO, 0)].map(|(busy, lanes)| Load {
                busy,
                lanes,
                blocked: false,
            });
            assert_eq!(balance.look(begin + TICK * n, &loads), None);
        }
    }

    #[test]
    fn the_lane_that_goes_leaves_half_at_most() {
        let weights = |all: &[u64]| -> Vec<Weight> {
            let weight = |cost: &u64| Weight {
                new: *cost,
                weight: 0,
            };
            all.iter().map(weight).collect()
        };
        let chosen = |all: &[u64], stays: usize, most| {
            let weights = weights(all);
            let lanes = weights.iter().enumerate();
            choose(lanes.map(|(at, w)| (at, w, at != stays)), most)
        };
        assert_eq!(chosen(&[95, 5], 9, 500), Some(1));
        assert_eq!(chosen(&[40, 30, 30], 9, 500), Some(0));
        assert_eq!(chosen(&[40, 30, 31], 0, 500), Some(2));
        assert_eq!(chosen(&[60, 40], 9, 300), None);
        // Nothing is gained by a lane that does nothing.
        assert_eq!(chosen(&[1000, 1, 0], 9, 500), None);
        assert_eq!(chosen(&[0, 0], 9, 500), None);
    }

    #[test]
    fn older_work_counts_less() {
        let mut weight = Weight::default();
        weight.add(100);
        weight.weigh();
        weight.add(20);
        assert_eq!(weight.sum(), 120);
        weight.weigh();
        assert_eq!(weight.sum(), 70);
        (0..10).for_each(|_| weight.weigh());
        assert_eq!(weight.sum(), 0);
    }

    #[test]
    fn only_rounds_with_work_count() {
        let (begin, mut busy) = (Instant::now(), BusyTime::default());
        let at = |us| begin + Duration::from_micros(us);
        assert!(!busy.round(false, at(0)));
        assert!(!busy.round(true, at(10)));
        assert!(!busy.round(true, at(10)));
        // It was read for the round without work.
        assert!(busy.round(false, at(40)));
        assert_eq!(busy.until(at(40), false), Duration::from_micros(30));
        let looks = (0..64).filter(|_| busy.round(true, at(100))).count();
        assert_eq!(looks, 2);
        assert_eq!(busy.until(at(150), true), Duration::from_micros(80));
        busy.forget();
        assert_eq!(busy.until(at(1000), false), Duration::from_micros(80));
    }
}
