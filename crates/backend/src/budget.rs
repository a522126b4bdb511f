//! [`Budget`]: bytes that peers may make the server hold, for one disk and for all together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A bound in bytes, for one owner, under a bound for all owners.
///
/// An owner always gets its floor, so that owners who took the whole total leave room for the others to work in. So all together hold at most the total's
/// limit and the sum of the floors.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    floor: u64,
    used: AtomicU64,
    total: Option<Arc<Budget>>,
}

impl Budget {
    /// A bound for all owners together.
    pub fn total(limit: u64) -> Arc<Budget> {
        Arc::new(Budget {
            limit,
            floor: 0,
            used: AtomicU64::new(0),
            total: None,
        })
    }

    /// A bound for one owner under `total`. It has its first `floor` bytes whatever the others have.
    pub fn of_owner(total: &Arc<Budget>, limit: u64, floor: u64) -> Arc<Budget> {
        Arc::new(Budget {
            limit,
            floor: floor.min(limit),
            used: AtomicU64::new(0),
            total: Some(Arc::clone(total)),
        })
    }

    /// A budget without a bound, which still counts.
    pub fn unlimited() -> Arc<Budget> {
        Budget::total(u64::MAX)
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may be in use.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes `bytes`, given back when the claim is dropped or shrinks; `None` if they don't fit.
    pub fn take(self: &Arc<Budget>, bytes: u64) -> Option<Claim> {
        let mut claim = Claim {
            budget: Arc::clone(self),
            bytes: 0,
        };
        claim.resize(bytes).then_some(claim)
    }

    fn add(&self, bytes: u64) -> bool {
        let mut before = self.used.load(Ordering::Relaxed);
        let after = loop {
            let Some(after) = before.checked_add(bytes).filter(|&n| n <= self.limit) else {
                return false;
            };
            match self.used.compare_exchange_weak(
                before,
                after,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => break after,
                Err(now) => before = now,
            }
        };
        // Only the part above the floor counts for the total.
        let above = self.above(after) - self.above(after - bytes);
        if let Some(total) = &self.total
            && !total.add(above)
        {
            let before = self.used.fetch_sub(bytes, Ordering::Relaxed);
            // Others may have crossed the floor meanwhile: the total stays the sum of what is above it.
            let given_up = self.above(before) - self.above(before - bytes);
            total.used.fetch_add(above, Ordering::Relaxed);
            total.used.fetch_sub(given_up, Ordering::Relaxed);
            return false;
        }
        true
    }

    fn remove(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(total) = &self.total {
            total.remove(self.above(before) - self.above(before - bytes));
        }
    }

    fn above(&self, used: u64) -> u64 {
        used.saturating_sub(self.floor)
    }
}

/// Bytes of a [`Budget`].
#[derive(Debug)]
pub struct Claim {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Claim {
    /// Bytes that it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes or gives back the difference to `bytes`; false if they don't fit: then nothing changes.
    pub fn resize(&mut self, bytes: u64) -> bool {
        if bytes > self.bytes && !self.budget.add(bytes - self.bytes) {
            return false;
        }
        if bytes < self.bytes {
            self.budget.remove(self.bytes - bytes);
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.budget.remove(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_has_its_floor_when_others_took_the_total() {
        let total = Budget::total(100);
        let greedy = Budget::of_owner(&total, 120, 10);
        let modest = Budget::of_owner(&total, 120, 10);
        let most = greedy.take(110).unwrap();
        assert_eq!((greedy.used(), total.used()), (110, 100));
        assert!(greedy.take(1).is_none() && modest.take(11).is_none());
        let floor = modest.take(10).unwrap();
        assert!(modest.take(1).is_none());
        drop(most);
        assert_eq!((greedy.used(), total.used()), (0, 0));
        let mut more = modest.take(90).unwrap();
        assert_eq!(total.used(), 90);
        assert!(!more.resize(111) && more.bytes() == 90);
        assert!(more.resize(5));
        drop(floor);
        assert_eq!((modest.used(), total.used()), (5, 0));
    }

    #[test]
    fn threads_that_take_and_give_leave_nothing_behind() {
        let total = Budget::total(1000);
        let owners: Vec<_> = (0..4).map(|_| Budget::of_owner(&total, 400, 50)).collect();
        std::thread::scope(|s| {
            for (i, owner) in owners.iter().cycle().take(8).enumerate() {
                s.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(i as u64);
                    let mut held = Vec::new();
                    for _ in 0..5000 {
                        held.extend(owner.take(rng.u64(0..200)));
                        if held.len() > 4 || rng.bool() {
                            held.pop();
                        }
                    }
                });
            }
        });
        assert!(owners.iter().all(|o| o.used() == 0));
        assert_eq!(total.used(), 0);
    }
}
