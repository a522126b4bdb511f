//! Cost of a hit of 4 KiB, beside a bare copy of as much between the same two regions, and a bare look-up in a lock-free way.
//!
//! `cargo run --release -p pvblk-volume --example cache_hit_cost [PAGES]`: how many pages are read at random; default 1024 (4 MiB).

use pvblk_block::{BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Region, Request};
use pvblk_cache::{CacheConfig, PageCache};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: u32 = 9;
const READS: u64 = 200_000;

/// The best of several rounds, for one read.
fn best(mut round: impl FnMut() -> Duration) -> f64 {
    let times = (0..ROUNDS).map(|_| round().as_secs_f64());
    times.fold(f64::INFINITY, f64::min) * 1e9 / READS as f64
}

fn main() {
    let pages = std::env::args().nth(1).and_then(|a| a.parse().ok());
    let pages: u64 = pages.unwrap_or(1024);
    let mut rng = fastrand::Rng::with_seed(1);
    let order: Vec<u64> = (0..READS).map(|_| rng.u64(..pages)).collect();

    let region = Arc::new(Region::anonymous(pages as usize * 4096).expect("memory"));
    region.zero(0, region.len());
    let buffer = Buffer::anonymous(4096).expect("memory");
    let copy = best(|| {
        let begin = Instant::now();
        for &page in &order {
            buffer.copy_from(black_box(&region), page as usize * 4096);
        }
        begin.elapsed()
    });

    // One load of a table at a random place, that the next depends on: what any look-up pays.
    let table: Vec<AtomicU64> = (0..4 * pages).map(AtomicU64::new).collect();
    let lookup = best(|| {
        let begin = Instant::now();
        let mut sum = 0;
        for &page in &order {
            let at = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            sum ^= table[(at % (4 * pages)) as usize].load(Ordering::Acquire);
        }
        black_box(sum);
        begin.elapsed()
    });

    let inner = pvblk_volume::open("mem:4G").expect("a volume");
    let config = CacheConfig::new((pages * 4096 * 2).max(1 << 20));
    let cache = PageCache::new(&config, inner).expect("a cache");
    let device: Arc<dyn BlockDevice> = Arc::new(cache);
    let mut queue = Queue::open(&device, &QueueContext::new(32)).expect("a queue");
    let requests = |n: usize| {
        let one = |tag| Request::with_buffers(Op::Read, 0, vec![buffer.clone()], tag);
        (0..n as u64).map(one).collect::<Vec<_>>()
    };
    let mut read = |all: &[u64], depth: usize| {
        let (mut free, mut done) = (requests(depth), Vec::<Completion>::new());
        let mut batch = Vec::with_capacity(depth);
        let begin = Instant::now();
        for some in all.chunks(depth) {
            for &page in some {
                let mut r = free.pop().expect("one for each");
                r.sector = page * 8;
                batch.push(r);
            }
            queue.submit(&mut batch);
            while done.len() < some.len() {
                queue.poll(&mut done);
            }
            while let Some(c) = done.pop() {
                free.push(c.request);
            }
        }
        begin.elapsed()
    };
    let every: Vec<u64> = (0..pages).collect();
    read(&every, 1);
    let (one, many) = (best(|| read(&order, 1)), best(|| read(&order, 32)));
    println!("{pages} pages at random, nanoseconds for each 4 KiB:");
    println!("  bare copy {copy:.0}, look-up {lookup:.1}");
    println!(
        "  hit, one at a time {one:.0} ({:.2} of both), 32 in a batch {many:.0} ({:.2})",
        one / (copy + lookup),
        many / (copy + lookup)
    );
}
