//! The memory bill: every pool, ring and buffer has a named owner and a cap.
//!
//! An owner registers a [`Gauge`] and changes it as it takes and gives back memory; dropping the
//! gauge takes the owner off the bill. There is one registry for the process.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The way in which memory comes from the system, which decides where the kernel counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryKind {
    /// Heap blocks (inside `RssAnon`).
    Heap,
    /// Private pages mapped directly (inside `RssAnon`).
    Anonymous,
    /// Pages shared with a peer or the kernel: guest memory, rings.
    Shared,
    /// Shared memory of a peer that isn't allocated yet: the first to touch it pays for it. Part of the
    /// memory that is mapped as `Shared`.
    Unallocated,
}

/// One owner's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLine {
    /// Name of the owner, such as `disk a: volume`.
    pub owner: String,
    pub kind: MemoryKind,
    /// Bytes in use now.
    pub live_bytes: u64,
    /// Most bytes that the owner may hold.
    pub cap_bytes: u64,
}

#[derive(Debug)]
struct Account {
    owner: String,
    kind: MemoryKind,
    live: AtomicU64,
    cap: AtomicU64,
}

static REGISTRY: Mutex<Vec<Weak<Account>>> = Mutex::new(Vec::new());

/// An owner's own counter of bytes. Clones count for the same owner.
#[derive(Clone, Debug)]
pub struct Gauge(Arc<Account>);

impl Gauge {
    /// Registers an owner with a cap in bytes, which holds none.
    pub fn new(owner: impl Into<String>, kind: MemoryKind, cap_bytes: u64) -> Gauge {
        let account = Arc::new(Account {
            owner: owner.into(),
            kind,
            live: AtomicU64::new(0),
            cap: AtomicU64::new(cap_bytes),
        });
        let mut all = REGISTRY.lock();
        all.retain(|w| w.strong_count() > 0);
        all.push(Arc::downgrade(&account));
        Gauge(account)
    }

    /// Registers an owner that holds `bytes` until it is dropped.
    pub fn fixed(owner: impl Into<String>, kind: MemoryKind, bytes: u64) -> Gauge {
        let gauge = Gauge::new(owner, kind, bytes);
        gauge.add(bytes);
        gauge
    }

    /// Counts `bytes` as taken.
    pub fn add(&self, bytes: u64) {
        self.0.live.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` as given back.
    pub fn sub(&self, bytes: u64) {
        self.0.live.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` as taken if the cap allows; returns true if so.
    pub fn try_add(&self, bytes: u64) -> bool {
        let cap = self.0.cap.load(Ordering::Relaxed);
        self.0
            .live
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |live| {
                live.checked_add(bytes).filter(|&n| n <= cap)
            })
            .is_ok()
    }

    /// Sets the bytes in use, for owners that measure them.
    pub fn set(&self, bytes: u64) {
        self.0.live.store(bytes, Ordering::Relaxed);
    }

    pub fn live_bytes(&self) -> u64 {
        self.0.live.load(Ordering::Relaxed)
    }

    /// Most bytes that the owner may hold.
    pub fn cap_bytes(&self) -> u64 {
        self.0.cap.load(Ordering::Relaxed)
    }

    /// Changes the cap, in bytes.
    pub fn set_cap(&self, bytes: u64) {
        self.0.cap.store(bytes, Ordering::Relaxed);
    }
}

/// The current lines of all owners, by name.
pub fn bill() -> Vec<MemoryLine> {
    let mut lines: Vec<_> = REGISTRY
        .lock()
        .iter()
        .filter_map(Weak::upgrade)
        .map(|a| MemoryLine {
            owner: a.owner.clone(),
            kind: a.kind,
            live_bytes: a.live.load(Ordering::Relaxed),
            cap_bytes: a.cap.load(Ordering::Relaxed),
        })
        .collect();
    lines.sort_by(|a, b| a.owner.cmp(&b.owner));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_on_the_bill_while_it_lives_and_keeps_its_cap() {
        let g = Gauge::new("test owner", MemoryKind::Heap, 100);
        assert!(g.try_add(60));
        assert!(!g.try_add(41));
        assert_eq!(
            bill()
                .iter()
                .find(|l| l.owner == "test owner")
                .unwrap()
                .live_bytes,
            60
        );
        drop(g);
        assert!(bill().iter().all(|l| l.owner != "test owner"));
    }
}
