//! Atomics, locks and events of the other parts, as traits, so that loom checks the code that runs.

use parking_lot::{Mutex, MutexGuard};
use pvblk_sys::EventFd;
use std::io;
use std::ops::DerefMut;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// A family of primitives: [`Native`] everywhere except in model checks.
pub trait Primitives: Sized + 'static {
    /// A boolean that threads share.
    type Flag: Flag;
    /// A number that threads share.
    type Count: Count;
    /// Fields in 64 bits that threads exchange.
    type Word: Word;
    /// A wake-up that stays until it is taken.
    type Event: Event;
    /// A mutex over a value.
    type Lock<T: Send>: Lock<T>;
    /// A barrier between a store and a load. When two threads each store, pass the barrier, and load the
    /// other's word, at least one sees the other's store.
    fn full_barrier();
}

/// A boolean that threads share.
pub trait Flag: Send + Sync {
    /// A flag with an initial value.
    fn new(value: bool) -> Self;
    /// Loads without ordering.
    fn load_relaxed(&self) -> bool;
    /// Loads. Writes before the [`Flag::raise`] that it sees are visible.
    fn load_acquire(&self) -> bool;
    /// Stores without ordering.
    fn store_relaxed(&self, value: bool);
    /// Stores true. Earlier writes are visible to the thread that takes the flag, also if another thread has
    /// raised it again in between: so this is a read-modify-write, and not a store.
    fn raise(&self);
    /// Stores false and returns the old value; acquires.
    fn take(&self) -> bool;
}

/// A number that threads share, without ordering.
pub trait Count: Send + Sync {
    /// A count of zero.
    fn new() -> Self;
    /// The current value.
    fn load(&self) -> usize;
    fn add(&self, more: usize);
    fn sub(&self, less: usize);
}

/// Fields in 64 bits that threads exchange. An exchange stores `new` if the word is `old`, and returns what the word is if it
/// isn't; that look is without ordering.
pub trait Word: Send + Sync {
    /// A word with initial fields.
    fn new(value: u64) -> Self;
    /// Loads without ordering.
    fn load_relaxed(&self) -> u64;
    /// Loads. Writes before the release that it sees, or that exchanges since then have followed, are visible.
    fn load_acquire(&self) -> u64;
    /// Stores without ordering.
    fn store_relaxed(&self, value: u64);
    /// Exchanges without ordering.
    fn exchange_relaxed(&self, old: u64, new: u64) -> Result<(), u64>;
    /// Exchanges. Writes before earlier releases are visible.
    fn exchange_acquire(&self, old: u64, new: u64) -> Result<(), u64>;
    /// Exchanges. Earlier writes are visible to those who acquire, also if others have exchanged the word since then.
    fn exchange_release(&self, old: u64, new: u64) -> Result<(), u64>;
}

/// A wake-up that stays until it is taken.
pub trait Event: Sized + Send + Sync {
    /// An event that isn't signalled. Errors if the process has no descriptor left.
    fn new() -> io::Result<Self>;
    /// Signals the event: threads that wait for it wake.
    fn notify(&self);
    /// Clears a signal, if there is one.
    fn drain(&self);
}

/// A mutex over a value.
pub trait Lock<T>: Send + Sync {
    /// The guard, which holds the lock until it is dropped.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a;
    /// A mutex around a value.
    fn new(value: T) -> Self;
    /// Waits for the lock.
    fn lock(&self) -> Self::Guard<'_>;
    /// `None` if another thread holds the lock.
    fn try_lock(&self) -> Option<Self::Guard<'_>>;
}

/// The machine's own primitives.
#[derive(Clone, Copy, Debug)]
pub struct Native;

impl Primitives for Native {
    type Flag = AtomicBool;
    type Count = AtomicUsize;
    type Word = AtomicU64;
    type Event = EventFd;
    type Lock<T: Send> = Mutex<T>;

    #[inline]
    fn full_barrier() {
        fence(Ordering::SeqCst);
    }
}

impl Flag for AtomicBool {
    fn new(value: bool) -> AtomicBool {
        AtomicBool::new(value)
    }
    #[inline]
    fn load_relaxed(&self) -> bool {
        self.load(Ordering::Relaxed)
    }
    #[inline]
    fn load_acquire(&self) -> bool {
        self.load(Ordering::Acquire)
    }
    #[inline]
    fn store_relaxed(&self, value: bool) {
        self.store(value, Ordering::Relaxed);
    }
    #[inline]
    fn raise(&self) {
        self.swap(true, Ordering::Release);
    }
    #[inline]
    fn take(&self) -> bool {
        self.swap(false, Ordering::AcqRel)
    }
}

impl Count for AtomicUsize {
    fn new() -> AtomicUsize {
        AtomicUsize::new(0)
    }
    #[inline]
    fn load(&self) -> usize {
        self.load(Ordering::Relaxed)
    }
    #[inline]
    fn add(&self, more: usize) {
        self.fetch_add(more, Ordering::Relaxed);
    }
    #[inline]
    fn sub(&self, less: usize) {
        self.fetch_sub(less, Ordering::Relaxed);
    }
}

/// [`Word::exchange_relaxed`] and its like, with this ordering.
macro_rules! exchange {
    ($name:ident, $order:ident) => {
        #[inline]
        fn $name(&self, old: u64, new: u64) -> Result<(), u64> {
            self.compare_exchange(old, new, Ordering::$order, Ordering::Relaxed)
                .map(drop)
        }
    };
}

impl Word for AtomicU64 {
    fn new(value: u64) -> AtomicU64 {
        AtomicU64::new(value)
    }
    #[inline]
    fn load_relaxed(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }
    #[inline]
    fn load_acquire(&self) -> u64 {
        self.load(Ordering::Acquire)
    }
    #[inline]
    fn store_relaxed(&self, value: u64) {
        self.store(value, Ordering::Relaxed);
    }
    exchange!(exchange_relaxed, Relaxed);
    exchange!(exchange_acquire, Acquire);
    exchange!(exchange_release, Release);
}

impl Event for EventFd {
    fn new() -> io::Result<EventFd> {
        EventFd::new()
    }
    #[inline]
    fn notify(&self) {
        EventFd::notify(self);
    }
    #[inline]
    fn drain(&self) {
        EventFd::drain(self);
    }
}

impl<T: Send> Lock<T> for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;
    fn new(value: T) -> Mutex<T> {
        Mutex::new(value)
    }
    #[inline]
    fn lock(&self) -> MutexGuard<'_, T> {
        self.lock()
    }
    #[inline]
    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.try_lock()
    }
}
