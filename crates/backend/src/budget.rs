//! [`Budget`]: bytes that peers may make the server hold, for a disk and in total.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// A bound in bytes for one owner, under a bound for all owners.
///
/// An owner always gets its floor, so that owners that took the whole total leave room for the others to work
/// in. So all together hold at most the sum of the total's limit and of the floors.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    floor: u64,
    used: AtomicU64,
    total: Option<Arc<Budget>>,
    /// Waiters to be woken when bytes are given back.
    waiters: Mutex<VecDeque<Arc<Waiter>>>,
    /// Number of waiters in the list; read without its lock.
    waiting: AtomicUsize,
}

/// Number of waiters that are woken when bytes are given back. They are woken in order, so that each has its
/// turn.
const WOKEN_AT_ONCE: usize = 8;

/// A user of budgets that waits for bytes.
pub struct Waiter {
    /// True for the lists that it is in: that of its own budget, and that of the total.
    queued: [AtomicBool; 2],
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Waiter {
    /// A waiter. `wake` is called on any thread, and must not block.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Arc<Waiter> {
        Arc::new(Waiter {
            queued: Default::default(),
            wake: Box::new(wake),
        })
    }
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter").finish_non_exhaustive()
    }
}

impl Budget {
    /// A bound for all owners together.
    pub fn total(limit: u64) -> Arc<Budget> {
        Budget::make(limit, 0, None)
    }

    /// A bound for one owner under `total`. It has its first `floor` bytes whatever the others
    /// have.
    pub fn of_owner(total: &Arc<Budget>, limit: u64, floor: u64) -> Arc<Budget> {
        Budget::make(limit, floor.min(limit), Some(Arc::clone(total)))
    }

    fn make(limit: u64, floor: u64, total: Option<Arc<Budget>>) -> Arc<Budget> {
        Arc::new(Budget {
            limit,
            floor,
            used: AtomicU64::new(0),
            total,
            waiters: Mutex::default(),
            waiting: AtomicUsize::new(0),
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

    /// Most bytes that may be in use.
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

    /// False if `bytes` don't fit even if no other owner has any.
    pub fn may_hold(&self, bytes: u64) -> bool {
        let total = self.total.as_ref();
        bytes <= self.limit && total.is_none_or(|t| self.above(bytes) <= t.limit)
    }

    /// Bytes that its owner could take now.
    pub fn free(&self) -> u64 {
        let used = self.used();
        let own = self.limit.saturating_sub(used);
        let total = self.total.as_ref().map_or(u64::MAX, |t| {
            let rest = t.limit.saturating_sub(t.used());
            rest.saturating_add(self.floor.saturating_sub(used))
        });
        own.min(total)
    }

    /// True if more than half of it, or of the total, is in use: then owners should keep no memory that they
    /// don't need.
    pub fn is_scarce(&self) -> bool {
        let half = |b: &Budget| b.used() > b.limit / 2;
        half(self) || self.total.as_deref().is_some_and(half)
    }

    /// True if a waiter waits for bytes of it, or of the total.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        let any = |b: &Budget| b.waiting.load(Ordering::Relaxed) > 0;
        any(self) || self.total.as_deref().is_some_and(any)
    }

    /// Wakes `waiter` when bytes are given back: to be called when they didn't fit, and followed by another
    /// attempt.
    pub fn wait(&self, waiter: &Arc<Waiter>) {
        self.enlist(waiter);
        if let Some(total) = &self.total
            && total.is_scarce()
        {
            total.enlist(waiter);
        }
        // A thread that gives bytes back after the next attempt sees the waiter.
        fence(Ordering::SeqCst);
    }

    fn enlist(&self, waiter: &Arc<Waiter>) {
        if waiter.queued[self.list()].swap(true, Ordering::AcqRel) {
            return;
        }
        let mut waiters = self.waiters.lock();
        waiters.push_back(Arc::clone(waiter));
        self.waiting.store(waiters.len(), Ordering::Relaxed);
    }

    /// Index of this budget's mark in a waiter.
    fn list(&self) -> usize {
        usize::from(self.total.is_none())
    }

    /// Wakes some of the waiters, because there may be room: a waiter that was woken passes on the room that
    /// it doesn't need.
    pub fn pass_on(&self) {
        self.wake_some();
        if let Some(total) = &self.total {
            total.wake_some();
        }
    }

    fn wake_some(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut waiters = self.waiters.lock();
        let n = waiters.len().min(WOKEN_AT_ONCE);
        let woken: Vec<_> = waiters.drain(..n).collect();
        self.waiting.store(waiters.len(), Ordering::Relaxed);
        drop(waiters);
        for waiter in woken {
            waiter.queued[self.list()].store(false, Ordering::Release);
            (waiter.wake)();
        }
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
            // Other threads may have crossed the floor meanwhile: the total stays the sum of the parts above
            // it.
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
        if bytes > 0 {
            fence(Ordering::SeqCst);
            self.wake_some();
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
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The budget that the bytes are of.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Takes or gives back the difference to `bytes`; false if they don't fit: then nothing
    /// changes.
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
    fn those_who_wait_are_woken_in_order_wherever_bytes_come_back() {
        let total = Budget::total(100);
        let (a, b) = (
            Budget::of_owner(&total, 80, 10),
            Budget::of_owner(&total, 80, 10),
        );
        assert!(a.may_hold(80) && !a.may_hold(81));
        let log = Arc::new(Mutex::new(Vec::new()));
        let waiter = |name: usize| {
            let log = Arc::clone(&log);
            Waiter::new(move || log.lock().push(name))
        };
        let all: Vec<_> = (0..20).map(waiter).collect();
        let (mut mine, mut other) = (a.take(80).unwrap(), b.take(20).unwrap());
        assert!(a.is_scarce() && b.is_scarce() && b.free() == 20);
        assert!(b.take(50).is_none());
        all.iter().for_each(|w| b.wait(w));
        b.wait(&all[0]);
        assert!(log.lock().is_empty());
        other.resize(10);
        assert_eq!(log.lock()[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        // The total gets the bytes back that another owner had.
        log.lock().clear();
        mine.resize(10);
        assert!(!log.lock().is_empty());
        for _ in 0..5 {
            b.pass_on();
        }
        assert_eq!(log.lock().last(), Some(&19));
        assert!(!b.is_awaited());
        log.lock().clear();
        a.wait(&all[3]);
        drop((mine, other));
        assert_eq!(*log.lock(), [3]);
        assert!(!a.is_awaited() && !a.is_scarce());
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
