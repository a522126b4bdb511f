//! Loom's primitives, and events that are waited for as with epoll. Model checks of other crates include this file.

use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use loom::sync::{Mutex, MutexGuard, Notify};
use pvblk_block::stacked::{Count, Event, Flag, Lock, Primitives, Word};
use std::io;
use std::sync::Arc;

/// Primitives, with this kind of flag and with or without the full barrier.
macro_rules! primitives {
    ($(#[$doc:meta])* $name:ident, $flag:ident, $barrier:expr) => {
        $(#[$doc])*
        pub struct $name;

        impl Primitives for $name {
            type Flag = $flag;
            type Count = LoomCount;
            type Event = LoomEvent;
            type Word = LoomWord<0>;
            type Lock<T: Send> = LoomLock<T>;
            fn full_barrier() {
                $barrier
            }
        }
    };
}

primitives!(
    /// The real primitives.
    Loom,
    LoomFlag,
    fence(Ordering::SeqCst)
);
pub struct LoomFlag(pub AtomicBool);

impl Flag for LoomFlag {
    fn new(value: bool) -> LoomFlag {
        LoomFlag(AtomicBool::new(value))
    }
    fn load_relaxed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
    fn load_acquire(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
    fn store_relaxed(&self, value: bool) {
        self.0.store(value, Ordering::Relaxed);
    }
    fn raise(&self) {
        self.0.swap(true, Ordering::Release);
    }
    fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

pub struct LoomCount(AtomicUsize);

impl Count for LoomCount {
    fn new() -> LoomCount {
        LoomCount(AtomicUsize::new(0))
    }
    fn load(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
    fn add(&self, more: usize) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }
    fn sub(&self, less: usize) {
        self.0.fetch_sub(less, Ordering::Relaxed);
    }
}

/// Orderings that a [`LoomWord`] may lack, as bits, so that negative controls find each.
pub const NO_ACQUIRE_LOAD: u8 = 1;
pub const NO_ACQUIRE: u8 = 2;
pub const NO_RELEASE: u8 = 4;

/// A word without the orderings that `WEAK` names; 0: the real one.
pub struct LoomWord<const WEAK: u8>(AtomicU64);

impl<const WEAK: u8> LoomWord<WEAK> {
    fn exchange(&self, old: u64, new: u64, order: Ordering, without: u8) -> Result<(), u64> {
        let order = match WEAK & without {
            0 => order,
            _ => Ordering::Relaxed,
        };
        let done = self.0.compare_exchange(old, new, order, Ordering::Relaxed);
        done.map(drop)
    }
}

impl<const WEAK: u8> Word for LoomWord<WEAK> {
    fn new(value: u64) -> LoomWord<WEAK> {
        LoomWord(AtomicU64::new(value))
    }
    fn load_relaxed(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    fn load_acquire(&self) -> u64 {
        self.0.load(match WEAK & NO_ACQUIRE_LOAD {
            0 => Ordering::Acquire,
            _ => Ordering::Relaxed,
        })
    }
    fn store_relaxed(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
    fn exchange_relaxed(&self, old: u64, new: u64) -> Result<(), u64> {
        self.exchange(old, new, Ordering::Relaxed, 0)
    }
    fn exchange_acquire(&self, old: u64, new: u64) -> Result<(), u64> {
        self.exchange(old, new, Ordering::Acquire, NO_ACQUIRE)
    }
    fn exchange_release(&self, old: u64, new: u64) -> Result<(), u64> {
        self.exchange(old, new, Ordering::Release, NO_RELEASE)
    }
}

pub struct LoomLock<T>(Mutex<T>);

impl<T: Send> Lock<T> for LoomLock<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;
    fn new(value: T) -> LoomLock<T> {
        LoomLock(Mutex::new(value))
    }
    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("nobody panics")
    }
    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

/// A descriptor: readable from a notification until it is drained, for all threads that wait for it.
pub struct LoomEvent(Mutex<Readable>);

#[derive(Default)]
struct Readable {
    is: bool,
    waiters: Vec<Arc<Notify>>,
}

impl LoomEvent {
    fn state(&self) -> MutexGuard<'_, Readable> {
        self.0.lock().expect("nobody panics")
    }

    pub fn take(&self) {
        self.state().is = false;
    }
}

impl Event for LoomEvent {
    fn new() -> io::Result<LoomEvent> {
        Ok(LoomEvent(Mutex::new(Readable::default())))
    }
    fn notify(&self) {
        let mut state = self.state();
        state.is = true;
        state.waiters.iter().for_each(|waiter| waiter.notify());
    }
    fn drain(&self) {
        self.take();
    }
}

/// Sleeps until an event is readable, and leaves it so. As with epoll, a notification that another thread
/// drained in between isn't seen.
pub fn epoll(events: &[&LoomEvent]) {
    let me = Arc::new(Notify::new());
    for event in events {
        event.state().waiters.push(Arc::clone(&me));
    }
    while !events.iter().any(|event| event.state().is) {
        me.wait();
    }
    for event in events {
        event.state().waiters.retain(|w| !Arc::ptr_eq(w, &me));
    }
}
