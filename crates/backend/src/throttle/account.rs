//! An account of one limit: the generic cell rate algorithm (ITU-T I.371), which needs one number.
//!
//! It is the time at which all that passed would have passed at the limit's rate. Each request moves it on by its cost, the time that it takes at
//! that rate. As long as the account is no more than the burst ahead of the present, requests pass at once; so a disk that was idle passes a burst, and one that
//! is used all the time passes at the rate, also when its requests come late by less than half of the burst.

use std::sync::atomic::{AtomicU64, Ordering};

/// Rates are kept as the cost of one unit: nanoseconds in 32.32 bits. 0: no limit.
const FRACTION: u32 = 32;

/// The cost of one unit at so many per second, rounded up.
fn cost_of_one(rate: u64) -> u64 {
    match rate {
        0 => 0,
        rate => (1_000_000_000u64 << FRACTION).div_ceil(rate),
    }
}

/// Bursts before and after a change, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Bursts {
    pub old: u64,
    pub new: u64,
}

/// A limit's rate, which may change while it is used.
#[derive(Debug, Default)]
pub struct LimitRate(AtomicU64);

impl LimitRate {
    /// The cost of `amount` units in nanoseconds; 0 if there is no limit.
    #[inline]
    pub fn cost(&self, amount: u64) -> u64 {
        let one = self.0.load(Ordering::Relaxed);
        let cost = (u128::from(one) * u128::from(amount)) >> FRACTION;
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// Sets it to so many units per second, 0 for no limit. In `accounts` the used part of the burst stays the same part, and debts beyond it the
    /// same number of units.
    pub fn set<'a>(
        &self,
        rate: u64,
        (now, bursts): (u64, Bursts),
        accounts: impl Iterator<Item = &'a Account>,
    ) {
        let (old, new) = (self.0.load(Ordering::Relaxed), cost_of_one(rate));
        let scaled = |n: u64, (old, new): (u64, u64)| {
            let new = u128::from(n) * u128::from(new) / u128::from(old.max(1));
            u64::try_from(new).unwrap_or(u64::MAX)
        };
        for account in accounts.filter(|_| old > 0) {
            let ahead = account.0.load(Ordering::Relaxed).saturating_sub(now);
            let used = ahead.min(bursts.old);
            let debt = scaled(ahead - used, (old, new));
            let ahead = scaled(used, (bursts.old, bursts.new)).saturating_add(debt);
            let paid = now.saturating_add(ahead);
            account.0.store(paid, Ordering::Relaxed);
        }
        self.0.store(new, Ordering::Relaxed);
    }
}

/// Time before the account is paid off at which a request of this cost may pass.
#[inline]
fn allowance(cost: u64, burst: u64) -> u64 {
    burst - cost.min(burst / 2)
}

/// The use of one limit. Times are in nanoseconds since the throttle was made.
#[derive(Debug, Default)]
pub struct Account(AtomicU64);

impl Account {
    /// Charges `cost`, and returns the time at which what it was charged for may pass.
    #[inline]
    pub fn charge(&self, cost: u64, burst: u64, now: u64) -> u64 {
        let charged = |paid: u64| Some(paid.max(now).saturating_add(cost));
        let before = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged);
        let (Ok(before) | Err(before)) = before;
        before.max(now).saturating_sub(allowance(cost, burst))
    }

    /// The time at which the last of what was charged may pass, if that costs `cost`.
    #[inline]
    pub fn due(&self, cost: u64, burst: u64) -> u64 {
        let before = self.0.load(Ordering::Relaxed).saturating_sub(cost);
        before.saturating_sub(allowance(cost, burst))
    }

    /// A request that was charged `cost` passes now. If that is so late that the account was paid off meanwhile, it is charged as if it came now.
    #[inline]
    pub fn passes(&self, cost: u64, now: u64) {
        self.0
            .fetch_max(now.saturating_add(cost), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn at(now: u64) -> (u64, Bursts) {
        let bursts = Bursts {
            old: 20 * MS,
            new: 20 * MS,
        };
        (now, bursts)
    }

    fn at_rate(rate: u64) -> LimitRate {
        let limit = LimitRate::default();
        limit.set(rate, at(0), std::iter::empty());
        limit
    }

    #[test]
    fn costs_are_exact_to_a_thousandth_and_never_too_low() {
        for rate in [1, 3, 7, 1000, 999_983, 50_000_000, 1_000_000_000] {
            for amount in [1, 4096, 1 << 20] {
                let exact = amount as f64 * 1e9 / rate as f64;
                let cost = at_rate(rate).cost(amount) as f64;
                assert!(
                    cost <= exact * 1.001 + 1.0 && cost >= exact * 0.999 - 1.0,
                    "{rate} {amount}"
                );
            }
        }
        assert_eq!(LimitRate::default().cost(1 << 40), 0);
        assert_eq!(at_rate(1).cost(u64::MAX), u64::MAX);
    }

    #[test]
    fn a_burst_passes_and_then_one_at_a_time() {
        let (limit, account) = (at_rate(1000), Account::default());
        let cost = limit.cost(1);
        let times: Vec<_> = (0..14)
            .map(|_| account.charge(cost, 10 * MS, 5 * MS))
            .collect();
        let at_once = times.iter().filter(|t| **t <= 5 * MS).count();
        assert_eq!(at_once, 10, "{times:?}");
        assert_eq!(times[10..], [6 * MS, 7 * MS, 8 * MS, 9 * MS]);
        // After a while of rest there is one more burst, and no more than that.
        let later = 1000 * MS;
        let times = (0..14).map(|_| account.charge(cost, 10 * MS, later));
        assert_eq!(times.filter(|t| *t <= later).count(), 10);
    }

    #[test]
    fn one_that_is_longer_than_the_burst_passes_when_half_of_it_is_left() {
        let (limit, account) = (at_rate(1000), Account::default());
        let cost = limit.cost(100);
        assert_eq!(account.charge(cost, 10 * MS, 0), 0);
        assert_eq!(account.charge(cost, 10 * MS, 0), 95 * MS);
    }

    #[test]
    fn what_comes_late_by_less_than_half_the_burst_loses_nothing() {
        for (cost, burst) in [(MS, 20 * MS), (30 * MS, 20 * MS)] {
            let account = Account::default();
            let (mut now, mut passed) = (0, 0);
            while now < 10_000 * MS {
                let at = account.charge(cost, burst, now);
                now = now.max(at + burst / 3);
                account.passes(cost, now);
                passed += 1;
            }
            let full = 10_000 * MS / cost;
            assert!(
                passed >= full && passed <= full + burst / cost + 2,
                "{passed} of {full}"
            );
        }
    }

    #[test]
    fn debts_are_kept_in_units_and_the_burst_in_parts_when_limits_change() {
        let (limit, account) = (at_rate(10), Account::default());
        let one = || std::iter::once(&account);
        account.charge(limit.cost(100), 20 * MS, 0);
        // 10 s to pay for 100; 2 s of it are over. 7980 ms are beyond the burst: 79.8 ms at the new rate.
        let now = 2000 * MS;
        limit.set(1000, at(now), one());
        assert_eq!(account.due(0, 0) - now, 20 * MS + 79_800_000);
        limit.set(10, at(now), one());
        assert_eq!(account.due(0, 0) - now, 8000 * MS);
        // Half of the burst stays half of it, at a lower rate, too.
        let now = 10_000 * MS - 10 * MS;
        limit.set(1, at(now), one());
        assert_eq!(account.due(0, 0) - now, 10 * MS);
        let bursts = Bursts {
            old: 20 * MS,
            new: 2000 * MS,
        };
        limit.set(1, (now, bursts), one());
        assert_eq!(account.due(0, 0) - now, 1000 * MS);
        limit.set(0, at(now), one());
        assert_eq!(account.due(0, 0), now + 20 * MS);
        limit.set(10, at(now), one());
        assert!(account.charge(limit.cost(1), 20 * MS, now) <= now + 20 * MS);
    }
}
