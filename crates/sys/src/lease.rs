//! [`Lease`]: a value that one thread holds at a time, and that another thread can take over while the holder is in a
//! call that may not return.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A value with one [`Holder`]. The holder is *here* or, inside [`Holder::away`], *away*. While it is away, another
/// thread may [seize](Lease::seize) the value, and the first holder loses it.
///
/// One compare-exchange on `turn` decides between the holder that comes back and a thread that seizes. `turn` is even
/// while the holder is here, odd while it is away, and never repeats. Being away costs a store and a compare-exchange
/// on a cache line that only the holder uses.
pub struct Lease<T> {
    turn: AtomicU64,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached through the one `Holder` only; passing it to another thread takes the acquire and release of
// `turn`, so `T: Send` is enough.
unsafe impl<T: Send> Sync for Lease<T> {}

/// The right to use a [`Lease`]'s value.
pub struct Holder<T> {
    lease: Arc<Lease<T>>,
    /// The even turn at which this holder is here; `None` after the value was seized.
    turn: Option<u64>,
    /// The odd turn at which this holder went away last.
    left: u64,
    /// Makes `&Holder<T>` as thread-safe as `&T`.
    _value: PhantomData<T>,
}

impl<T> Lease<T> {
    /// Creates a lease and its first holder.
    pub fn new(value: T) -> (Arc<Lease<T>>, Holder<T>) {
        let lease = Arc::new(Lease {
            turn: AtomicU64::new(0),
            value: UnsafeCell::new(value),
        });
        let holder = Holder {
            lease: Arc::clone(&lease),
            turn: Some(0),
            left: 0,
            _value: PhantomData,
        };
        (lease, holder)
    }

    /// Number that changes whenever the holder goes away or comes back; odd while it is away.
    pub fn turn(&self) -> u64 {
        self.turn.load(Ordering::Relaxed)
    }

    /// Takes the value over if the holder has been away since `turn` was read.
    pub fn seize(self: &Arc<Lease<T>>, turn: u64) -> Option<Holder<T>> {
        if turn.is_multiple_of(2) {
            return None;
        }
        self.claim(turn).then(|| Holder {
            lease: Arc::clone(self),
            turn: Some(turn + 1),
            left: turn,
            _value: PhantomData,
        })
    }

    /// Moves from away at `turn` to here. Acquire shows the writes of the last holder; release pairs with the next
    /// holder's acquire.
    fn claim(&self, turn: u64) -> bool {
        self.turn
            .compare_exchange(turn, turn + 1, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}

impl<T> Holder<T> {
    /// Runs `f` while the value may be seized. The flag is false if it was seized: this holder is then empty, and
    /// using its value panics.
    #[inline]
    pub fn away<R>(&mut self, f: impl FnOnce() -> R) -> (R, bool) {
        let Some(here) = self.turn else {
            panic!("{SEIZED}");
        };
        // Set before `f`: if `f` panics, this holder can't be used any more, and the value can still be seized.
        self.turn = None;
        self.left = here + 1;
        self.lease.turn.store(here + 1, Ordering::Release);
        let result = f();
        if self.lease.claim(here + 1) {
            self.turn = Some(here + 2);
        }
        (result, self.turn.is_some())
    }
}

impl<T> Holder<T> {
    /// Comes back from an [`Holder::away`] that ended with a panic. False if the value was seized: then this holder has nothing any more.
    pub fn back(&mut self) -> bool {
        if self.turn.is_none() && self.lease.claim(self.left) {
            self.turn = Some(self.left + 1);
        }
        self.turn.is_some()
    }
}

const SEIZED: &str = "the value was seized";

impl<T> Deref for Holder<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        assert!(self.turn.is_some(), "{SEIZED}");
        // SAFETY: this holder is here, so no other is, and none can be made: `seize` needs an odd turn.
        unsafe { &*self.lease.value.get() }
    }
}

impl<T> DerefMut for Holder<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        assert!(self.turn.is_some(), "{SEIZED}");
        // SAFETY: as above; `&mut self` makes the reference unique, and `away` can't be called while it lives.
        unsafe { &mut *self.lease.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_that_is_away_can_lose_the_value_and_one_that_is_here_cannot() {
        let (lease, mut first) = Lease::new(1);
        assert!(lease.seize(lease.turn()).is_none());
        assert_eq!(first.away(|| 5), (5, true));
        *first += 1;
        let mut taken = None;
        let (_, kept) = first.away(|| {
            let turn = lease.turn();
            taken = lease.seize(turn);
            assert!(lease.seize(turn).is_none(), "only one gets it");
        });
        assert!(!kept);
        let mut second = taken.unwrap();
        *second += 1;
        assert_eq!(*second, 3);
        let lost = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| *first));
        assert!(lost.is_err());
        assert_eq!(second.away(|| ()), ((), true));
    }

    #[test]
    fn a_holder_comes_back_after_a_panic_unless_the_value_was_seized() {
        let quietly = |f: &mut dyn FnMut()| {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            assert!(caught.is_err());
        };
        let (lease, mut first) = Lease::new(1);
        assert!(first.back(), "it is here");
        quietly(&mut || first.away(|| panic!("planted")).0);
        assert!(lease.turn() % 2 == 1 && first.back());
        *first += 1;
        quietly(&mut || first.away(|| panic!("planted")).0);
        let mut second = lease.seize(lease.turn()).unwrap();
        assert!(!first.back());
        *second += 1;
        assert_eq!(second.away(|| ()), ((), true));
        assert!(!first.back());
        assert_eq!(*second, 3);
    }

    #[test]
    fn of_many_threads_one_has_the_value() {
        let (lease, mut holder) = Lease::new((0u64, 0u64));
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            let (lost_to, lost) = std::sync::mpsc::channel();
            for _ in 0..2 {
                let (lease, stop, lost_to) = (Arc::clone(&lease), &stop, lost_to.clone());
                s.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        if let Some(mut seized) = lease.seize(lease.turn()) {
                            seized.0 += 1;
                            seized.1 += 1;
                            lost_to.send(seized).unwrap();
                        }
                    }
                });
            }
            for _ in 0..20_000 {
                let (_, kept) = holder.away(std::hint::spin_loop);
                if !kept {
                    holder = lost.recv().unwrap();
                }
                assert_eq!(holder.0, holder.1);
                holder.0 += 1;
                holder.1 += 1;
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(holder.0 >= 20_000);
    }
}
