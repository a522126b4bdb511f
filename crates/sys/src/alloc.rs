//! A global allocator that counts the bytes of the heap, for the report on memory use.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A part of the count, in a pair of cache lines of its own. It wraps around, since a block may be freed by another thread than the one that allocated it.
#[repr(align(128))]
struct Share(AtomicUsize);

/// Number of shares. Threads beyond it share one.
const SHARES: usize = 64;

static LIVE: [Share; SHARES] = [const { Share(AtomicUsize::new(0)) }; SHARES];
static NEXT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The thread's share; `SHARES`: it has none yet. Without a destructor, so it can be used as long as the thread allocates.
    static MINE: Cell<usize> = const { Cell::new(SHARES) };
}

fn mine() -> &'static AtomicUsize {
    let share = MINE.try_with(|mine| {
        if mine.get() == SHARES {
            mine.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARES);
        }
        mine.get()
    });
    &LIVE[share.unwrap_or(0)].0
}

fn count(allocated: usize, freed: usize) {
    mine().fetch_add(allocated.wrapping_sub(freed), Ordering::Relaxed);
}

/// Bytes of the heap in use now, as requested by callers. Zero if [`Counting`] is not the global allocator.
pub fn live_bytes() -> usize {
    let shares = LIVE.iter().map(|share| share.0.load(Ordering::Relaxed));
    // Less than nothing if other threads allocate and free meanwhile.
    let sum = shares.fold(0, usize::wrapping_add) as isize;
    sum.max(0) as usize
}

/// Returns free memory of the heap to the system, as far as the allocator can: glibc keeps free memory between blocks
/// in use.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` touches only free memory of the allocator.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The system's allocator, which counts live bytes. Each thread counts on its own: with one counter 16 threads that write to a RAID-5 array each
/// had the rate of four.
pub struct Counting;

// SAFETY: every call is passed on to `System` unchanged; counting doesn't touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is `System`'s.
        let p = unsafe { System.alloc(layout) };
        if !p.is_null() {
            count(layout.size(), 0);
        }
        p
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let p = unsafe { System.alloc_zeroed(layout) };
        if !p.is_null() {
            count(layout.size(), 0);
        }
        p
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(p, layout) };
        count(0, layout.size());
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        // SAFETY: as above.
        let q = unsafe { System.realloc(p, layout, new) };
        if !q.is_null() {
            count(new, layout.size());
        }
        q
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_another_thread_frees_leave_the_count() {
        let before = live_bytes();
        let layout = Layout::from_size_align(1 << 20, 8).expect("a layout");
        // SAFETY: the layout isn't empty.
        let block = unsafe { Counting.alloc(layout) } as usize;
        assert_eq!(live_bytes(), before + (1 << 20));
        let free = move || {
            // SAFETY: it was allocated with this layout, and nobody uses it any more.
            let grown = unsafe { Counting.realloc(block as *mut u8, layout, 2 << 20) };
            assert_eq!(live_bytes(), before + (2 << 20));
            let layout = Layout::from_size_align(2 << 20, 8).expect("a layout");
            // SAFETY: as above, with its length now.
            unsafe { Counting.dealloc(grown, layout) };
        };
        std::thread::spawn(free).join().expect("it ends");
        assert_eq!(live_bytes(), before);
    }
}
