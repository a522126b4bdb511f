//! Free-running indices of a ring and the rule for notifications (xen/include/public/io/ring.h).
//!
//! A ring has two directions, requests and responses. In each, a [`Producer`] owns a `prod` index and a [`Consumer`]
//! owns an `event` index: "notify me when `prod` passes this". The types here hold the private state of one side and
//! are generic over the shared index, so that the same code runs on shared pages and under loom.
//! pages and under loom.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The peer published an impossible index: it is broken or hostile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ring index {index} is {distance} past ours, the most possible is {limit}")]
pub struct RingBroken {
    /// The index that the peer published.
    pub index: u32,
    /// Distance of the peer's index from ours.
    pub distance: u32,
    /// Largest possible distance.
    pub limit: u32,
}

/// One 32-bit index that both sides can reach.
pub trait SharedIndex {
    /// Loads with acquire ordering: the peer's writes before its release store are visible afterwards.
    fn load_acquire(&self) -> u32;
    /// Loads without ordering.
    fn load_relaxed(&self) -> u32;
    /// Stores with release ordering: our writes before it are visible after the peer's acquire load.
    fn store_release(&self, value: u32);
    /// A full barrier: a store before it and a load after it are not reordered.
    fn full_barrier();
}

impl SharedIndex for AtomicU32 {
    #[inline]
    fn load_acquire(&self) -> u32 {
        self.load(Ordering::Acquire)
    }
    #[inline]
    fn load_relaxed(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }
    #[inline]
    fn store_release(&self, value: u32) {
        self.store(value, Ordering::Release);
    }
    #[inline]
    fn full_barrier() {
        fence(Ordering::SeqCst);
    }
}

/// The producing side of one direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Producer {
    private: u32,
    published: u32,
}

impl Producer {
    /// A producer whose next index is `index`.
    pub fn starting_at(index: u32) -> Producer {
        Producer {
            private: index,
            published: index,
        }
    }

    /// Index of the next entry to fill; entries below it are filled.
    #[inline]
    pub fn next(&self) -> u32 {
        self.private
    }

    /// Counts one more entry as filled.
    #[inline]
    pub fn advance(&mut self) {
        self.private = self.private.wrapping_add(1);
    }

    /// Makes filled entries visible. Returns true if the consumer asked to be notified of one of them.
    ///
    /// The full barrier pairs with the one in [`Consumer::arm`]: either this side sees the new event index, or the
    /// consumer sees the new entries.
    #[inline]
    pub fn publish<I: SharedIndex>(&mut self, prod: &I, event: &I) -> bool {
        let old = self.published;
        if self.private == old {
            return false;
        }
        prod.store_release(self.private);
        self.published = self.private;
        I::full_barrier();
        should_notify(old, self.private, event.load_relaxed())
    }
}

/// True if `event` lies in the half-open interval `(old, new]` (ring.h, `RING_PUSH_*_AND_CHECK_NOTIFY`).
#[inline]
pub fn should_notify(old: u32, new: u32, event: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

/// The consuming side of one direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Consumer {
    next: u32,
    /// The producer's index at the last look.
    seen: u32,
}

impl Consumer {
    /// A consumer whose next index is `index`.
    pub fn starting_at(index: u32) -> Consumer {
        Consumer {
            next: index,
            seen: index,
        }
    }

    /// Index of the next entry to consume.
    #[inline]
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Counts one more entry as consumed.
    #[inline]
    pub fn advance(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Entries known to be published, without a look at shared memory.
    #[inline]
    pub fn known(&self) -> u32 {
        self.seen.wrapping_sub(self.next)
    }

    /// Looks for new entries; returns the number known. Errors if there are more than `limit`, the most possible.
    #[inline]
    pub fn refresh<I: SharedIndex>(&mut self, prod: &I, limit: u32) -> Result<u32, RingBroken> {
        let index = prod.load_acquire();
        let distance = index.wrapping_sub(self.next);
        if distance > limit {
            return Err(RingBroken {
                index,
                distance,
                limit,
            });
        }
        self.seen = index;
        Ok(distance)
    }

    /// Asks to be notified of the next entry. Returns true if there is one already: then don't sleep.
    #[inline]
    pub fn arm<I: SharedIndex>(&self, prod: &I, event: &I) -> bool {
        event.store_release(self.next.wrapping_add(1));
        I::full_barrier();
        prod.load_acquire() != self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifies_only_if_the_event_is_passed_also_across_the_wrap() {
        for base in [0, 1000, u32::MAX - 1] {
            let at = |n: u32| base.wrapping_add(n);
            assert!(should_notify(at(0), at(1), at(1)));
            assert!(!should_notify(at(1), at(2), at(1)));
            assert!(should_notify(at(1), at(4), at(3)));
            assert!(!should_notify(at(1), at(4), at(5)));
            assert!(!should_notify(at(3), at(3), at(3)));
        }
    }

    #[test]
    fn an_impossible_producer_index_is_detected() {
        let prod = AtomicU32::new(u32::MAX);
        let mut c = Consumer::starting_at(u32::MAX - 3);
        assert_eq!(c.refresh(&prod, 3), Ok(3));
        prod.store(5, Ordering::Relaxed);
        assert_eq!(c.refresh(&prod, 8).unwrap_err().distance, 9);
        prod.store(u32::MAX - 4, Ordering::Relaxed);
        assert!(c.refresh(&prod, 512).is_err());
        assert_eq!(c.known(), 3);
    }
}
