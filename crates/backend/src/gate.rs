//! Order across all queues of a disk: barriers.
//!
//! A barrier must see every earlier write of the disk complete and let no later one start before it is
//! done, whichever queue they are on (Linux's back end drains only the ring the barrier came on). Each
//! queue publishes how many requests it has at the device; a barrier closes the gate and waits for all
//! of them to be zero.
//!
//! A queue and a barrier decide at the same time by Dekker's scheme: the queue stores its count, then looks
//! at the gate; the barrier closes the gate, then looks at the counts; with a full fence between, at least
//! one of them sees the other's store.

use crossbeam_utils::CachePadded;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The gate of one disk.
#[derive(Debug, Default)]
pub struct Gate {
    /// 0: open; otherwise the number of the pass that closed it.
    closed_by: AtomicU64,
    counts: Mutex<Vec<Arc<CachePadded<AtomicU32>>>>,
    next_pass: AtomicU64,
}

/// One queue's access to the gate.
#[derive(Debug)]
pub struct Pass {
    gate: Arc<Gate>,
    number: u64,
    count: Arc<CachePadded<AtomicU32>>,
}

impl Gate {
    /// A pass for one more queue.
    pub fn pass(self: &Arc<Gate>) -> Pass {
        let count = Arc::new(CachePadded::new(AtomicU32::new(0)));
        self.counts.lock().push(Arc::clone(&count));
        Pass {
            gate: Arc::clone(self),
            number: self.next_pass.fetch_add(1, Ordering::Relaxed) + 1,
            count,
        }
    }
}

impl Pass {
    /// Announces `n` requests at the device, before they are submitted; false if the gate is closed by
    /// another queue: then nothing is announced and nothing may be submitted.
    #[inline]
    pub fn enter(&self, n: u32) -> bool {
        let before = self.count.load(Ordering::Relaxed);
        self.count.store(before + n, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let by = self.gate.closed_by.load(Ordering::Relaxed);
        if by != 0 && by != self.number {
            self.count.store(before, Ordering::Release);
            return false;
        }
        true
    }

    /// Takes back `n` requests that completed.
    #[inline]
    pub fn leave(&self, n: u32) {
        let before = self.count.load(Ordering::Relaxed);
        debug_assert!(n <= before);
        self.count.store(before - n, Ordering::Release);
    }

    /// Closes the gate for all other queues; false if another has closed it.
    pub fn try_close(&self) -> bool {
        let closed = self
            .gate
            .closed_by
            .compare_exchange(0, self.number, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        fence(Ordering::SeqCst);
        closed
    }

    /// True if no queue, this one included, has a request at the device.
    pub fn is_drained(&self) -> bool {
        let counts = self.gate.counts.lock();
        counts.iter().all(|c| c.load(Ordering::Acquire) == 0)
    }

    /// Opens the gate again, if this queue closed it.
    pub fn open(&self) {
        let _ = self.gate.closed_by.compare_exchange(
            self.number,
            0,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.open();
        self.gate
            .counts
            .lock()
            .retain(|c| !Arc::ptr_eq(c, &self.count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_waits_for_all_queues_and_stops_them() {
        let gate = Arc::new(Gate::default());
        let (a, b) = (gate.pass(), gate.pass());
        assert!(a.enter(2));
        assert!(b.try_close());
        assert!(!a.try_close());
        assert!(!a.enter(1));
        assert!(!b.is_drained());
        a.leave(2);
        assert!(b.is_drained());
        assert!(b.enter(1));
        b.leave(1);
        a.open(); // not a's to open
        assert!(!a.enter(1));
        drop(b);
        assert!(a.enter(1));
    }

    #[test]
    fn under_contention_no_write_crosses_a_barrier() {
        use std::sync::atomic::AtomicBool;
        let gate = Arc::new(Gate::default());
        let at_device = Arc::new(AtomicU32::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (0..2)
            .map(|_| {
                let (pass, dev, stop) = (gate.pass(), at_device.clone(), stop.clone());
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        if pass.enter(1) {
                            dev.fetch_add(1, Ordering::SeqCst);
                            dev.fetch_sub(1, Ordering::SeqCst);
                            pass.leave(1);
                        }
                    }
                })
            })
            .collect();
        let barrier = gate.pass();
        for _ in 0..2000 {
            assert!(barrier.try_close());
            while !barrier.is_drained() {
                std::hint::spin_loop();
            }
            for _ in 0..20 {
                assert_eq!(at_device.load(Ordering::SeqCst), 0);
            }
            barrier.open();
        }
        stop.store(true, Ordering::Relaxed);
        for w in writers {
            w.join().unwrap();
        }
    }
}
