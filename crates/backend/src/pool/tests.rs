use super::*;
use pvblk_block::Region;
use pvblk_block::memory::bill;

fn pool(owner: &str, source: Option<Arc<dyn BufferSource>>, limit: usize) -> BufferPool {
    BufferPool::new(&Arc::default(), "disk", owner, source, limit)
}

fn address(buffer: &Buffer) -> usize {
    Arc::as_ptr(buffer.region()) as usize
}

fn live(owner: &str) -> u64 {
    let lines = bill();
    lines.iter().find(|l| l.owner == owner).unwrap().live_bytes
}

#[test]
fn a_steady_load_cycles_through_the_same_pages() {
    let mut pool = pool("pool cycle", None, 1024);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..100 {
        let mut taken: Vec<_> = (0..32).map(|_| Vec::new()).collect();
        for t in &mut taken {
            assert!(pool.take(4096, t));
            seen.insert((address(&t[0]), t[0].offset()));
        }
        assert_eq!(pool.used_pages(), 32);
        for t in &mut taken {
            pool.give(t);
        }
    }
    assert_eq!(seen.len(), 32);
    assert_eq!(live("pool cycle"), 32 * 4096);
    pool.trim(0);
    assert_eq!(live("pool cycle"), 0);
    assert_eq!(pool.shared.inner.lock().free.cold_pieces(), 0);
}

#[test]
fn pages_in_use_survive_a_trim_and_free_ones_read_zero() {
    let mut pool = pool("pool trim", None, 1024);
    let (mut a, mut b) = (vec![], vec![]);
    assert!(pool.take(4096, &mut a) && pool.take(4096, &mut b));
    a[0].write(0, b"kept");
    b[0].write(0, b"gone");
    pool.give(&mut b);
    pool.trim(0);
    assert_eq!(live("pool trim"), 4096);
    assert_eq!(&a[0].to_vec()[..4], b"kept");
    // The same slab's other pieces are there, without pages.
    assert_eq!(pool.shared.inner.lock().free.cold_pieces(), 63);
    (0..63).for_each(|_| assert!(pool.take(4096, &mut b)));
    assert!(b.iter().all(|b| b.to_vec()[..4] == [0; 4]));
    pool.give(&mut b);
    pool.trim(0);
    pool.give(&mut a);
    pool.trim(1);
    assert_eq!(pool.free_pages(), 1);
    pool.trim(0);
    assert_eq!(live("pool trim"), 0);
    assert_eq!(pool.shared.inner.lock().free.cold_pieces(), 0);
}

#[test]
fn odd_lengths_come_back_whole_and_the_limit_holds() {
    let mut pool = pool("pool limit", None, 64);
    for len in [
        512,
        4096,
        5 * 4096,
        20 << 10,
        33 << 10,
        200 << 10,
        256 << 10,
    ] {
        let mut t = vec![];
        assert!(pool.take(len, &mut t), "{len}");
        assert_eq!(pvblk_sys::total_len(&t), len);
        t[0].write(len.min(t[0].len()) - 1, b"x");
        pool.give(&mut t);
        assert_eq!(pool.used_pages(), 0);
        assert!(pool.free_pages() <= 64);
    }
    let mut t = vec![];
    assert!(!pool.take(0, &mut t));
    assert!(!pool.take(257 << 10, &mut t) && t.is_empty());
    assert_eq!(pool.used_pages(), 0);
    // Not one piece of 64 pages any more, but smaller ones.
    let mut one = vec![];
    assert!(pool.take(4096, &mut one));
    assert!(pool.take(63 * 4096, &mut t));
    assert!(t.len() > 1);
    assert!(!pool.take(4096, &mut one));
    pool.give(&mut t);
    pool.give(&mut one);
    assert_eq!(pool.used_pages(), 0);
}

#[test]
fn decay_gives_back_only_what_was_not_needed() {
    let mut pool = pool("pool decay", None, 1024);
    pool.shared.pressure.set_max_buffer_pages(10);
    let mut many = vec![];
    (0..100).for_each(|_| assert!(pool.take(4096, &mut many)));
    pool.give(&mut many);
    pool.decay();
    assert_eq!(pool.free_pages(), 100);
    (0..40).for_each(|_| assert!(pool.take(4096, &mut many)));
    pool.give(&mut many);
    pool.decay();
    assert_eq!(pool.free_pages(), 40);
    pool.decay();
    assert_eq!(pool.free_pages(), 10);
    assert_eq!(live("pool decay"), 10 * 4096);
}

/// Ten pages in pieces of at most two.
struct Small {
    region: Arc<Region>,
    free: Mutex<Vec<usize>>,
}
impl BufferSource for Small {
    fn allocate(&self, len: usize) -> Option<Buffer> {
        if len > 8192 {
            return None;
        }
        let slot = self.free.lock().pop()?;
        Buffer::new(&self.region, slot * 8192, len)
    }
    fn free(&self, buffer: Buffer) {
        assert!(Arc::ptr_eq(buffer.region(), &self.region));
        self.free.lock().push(buffer.offset() / 8192);
    }
}

#[test]
fn the_devices_memory_is_used_first_and_goes_back_to_it() {
    let small = Arc::new(Small {
        region: Arc::new(Region::anonymous(5 * 8192).unwrap()),
        free: Mutex::new((0..5).collect()),
    });
    let mut pool = pool("pool source", Some(small.clone()), 1024);
    let mut t = vec![];
    assert!(pool.take(12 << 10, &mut t));
    assert_eq!(t.len(), 2);
    assert!(t.iter().all(|b| Arc::ptr_eq(b.region(), &small.region)));
    for _ in 0..5 {
        assert!(pool.take(8192, &mut t));
    }
    assert_eq!(live("pool source"), 2 * 8192);
    pool.give(&mut t);
    pool.trim(0);
    assert_eq!(small.free.lock().len(), 5);
    assert_eq!(live("pool source"), 0);
    assert!(pool.take(8192, &mut t));
    pool.give(&mut t);
    drop(pool);
    assert_eq!(small.free.lock().len(), 5);
}

#[test]
fn a_page_that_somebody_still_has_is_neither_used_again_nor_given_back() {
    let mut pool = pool("pool claimed", None, 64);
    let mut a = vec![];
    assert!(pool.take(4096, &mut a));
    a[0].write(0, b"in flight");
    let of_a_device = a[0].clone();
    pool.give(&mut a);
    assert_eq!((pool.free_pages(), pool.used_pages()), (0, 1));
    pool.trim(0);
    assert_eq!(&of_a_device.to_vec()[..9], b"in flight");
    assert!(pool.take(4096, &mut a));
    assert!(!Arc::ptr_eq(a[0].region(), of_a_device.region()));
    pool.give(&mut a);
    assert_eq!(pool.counters().claimed, 1);
    drop(of_a_device);
    pool.trim(0);
    assert_eq!((pool.used_pages(), live("pool claimed")), (0, 0));
}

#[test]
fn pages_count_to_the_budget_until_the_system_has_them() {
    use crate::budget::Budget;
    let total = Budget::total(1 << 20);
    let disk = Budget::of_owner(&total, 256 << 10, 64 << 10);
    let new = |owner| pool(owner, None, 1024).with_budget(&disk);
    let (mut a, mut b) = (new("budget a"), new("budget b"));
    let (mut of_a, mut of_b, mut more) = (Vec::new(), Vec::new(), Vec::new());
    assert!(a.take(128 << 10, &mut of_a));
    assert_eq!((disk.used(), total.used()), (128 << 10, 64 << 10));
    // An owner that has as much as is left gets no more, others do.
    assert!(!a.take(4096, &mut more) && a.is_short_of_budget());
    assert!(b.take(64 << 10, &mut of_b));
    assert!(!b.take(128 << 10, &mut more) && b.is_short_of_budget());
    assert!(more.is_empty());
    // Free pages count, too; they go when the pool rests, as more than half is in use.
    a.give(&mut of_a);
    assert_eq!(disk.used(), 192 << 10);
    assert!(disk.is_scarce());
    a.rest();
    assert_eq!((disk.used(), a.free_pages()), (64 << 10, 0));
    // A pool's own free pages go first when it needs other ones.
    b.give(&mut of_b);
    assert!(b.take(256 << 10, &mut of_b) && !b.is_short_of_budget());
    assert_eq!((disk.used(), b.free_pages()), (256 << 10, 0));
    b.lose(256 << 10);
    of_b.clear();
    assert_eq!(disk.used(), 0);
    assert!(a.take(4096, &mut of_a));
    drop(of_a);
    drop(a);
    assert_eq!((disk.used(), total.used()), (0, 0));
}

#[test]
fn free_pages_go_bit_by_bit_while_others_wait_for_them() {
    use crate::budget::{Budget, Waiter};
    use std::sync::atomic::{AtomicUsize, Ordering};
    let disk = Budget::total(16 << 20);
    let mut pool = pool("awaited", None, 4096).with_budget(&disk);
    let mut buffers = Vec::new();
    (0..128).for_each(|_| assert!(pool.take(64 << 10, &mut buffers)));
    let woken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    let waiter = Waiter::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    pool.settle();
    assert_eq!(pool.used_pages(), 2048);
    disk.wait(&waiter);
    for piece in buffers.drain(..) {
        pool.give(&mut vec![piece]);
    }
    pool.settle();
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    assert!(disk.used() < 8 << 20 && !disk.is_awaited());
    let job = pool.rest_elsewhere(false).unwrap();
    assert_eq!(pool.free_pages(), 1024);
    job();
    assert_eq!(disk.used(), 4 << 20);
    pool.rest_elsewhere(true).unwrap()();
    assert_eq!((pool.free_pages(), disk.used()), (0, 0));
}
