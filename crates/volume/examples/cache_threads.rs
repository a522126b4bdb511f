//! Threads on one cache beside as many threads with a cache each, where no read finds its page.
//!
//! `cargo run --release -p pvblk-volume --example cache_threads [THREADS [DEPTH [ROUNDS]]]`; defaults 4, 32, 9. Each thread reads 4 KiB at random from its own part of a memory
//! disk that is 16 times as large as the cache; the caches of the other way have a thread's part of the frames each. Rounds of both ways and of the first one again (A/A) alternate;
//! the figures are the medians of the ratios of neighbours.

use pvblk_block::{BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Request};
use pvblk_cache::{CacheConfig, PageCache};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Frames for each thread, in bytes, and its part of the disk.
const CACHE_BYTES: u64 = 8 << 20;
const PART_BYTES: u64 = 128 << 20;
const ROUND: Duration = Duration::from_millis(300);

/// Writes all of a disk: memory that was never written costs a page fault where it is read.
fn fill(disk: &Arc<dyn BlockDevice>) {
    let mut queue = Queue::open(disk, &QueueContext::new(1)).expect("a queue");
    let buffer = Buffer::anonymous(1 << 20).expect("memory");
    buffer.write(0, &vec![1; buffer.len()]);
    let mut request = Request::with_buffers(Op::Write, 0, vec![buffer], 0);
    let mut done = Vec::new();
    for sector in (0..disk.capacity_sectors()).step_by(2048) {
        request.sector = sector;
        queue.submit(&mut vec![request]);
        while done.is_empty() {
            queue.poll(&mut done);
        }
        request = done.pop().expect("it is done").request;
    }
}

fn cache(threads: u64) -> Arc<dyn BlockDevice> {
    let inner = pvblk_volume::open(&format!("mem:{}", threads * PART_BYTES)).expect("a disk");
    fill(&inner);
    let config = CacheConfig::new(threads * CACHE_BYTES);
    Arc::new(PageCache::new(&config, inner).expect("a cache"))
}

/// Reads at random from `first` on, in sectors, until told to stop.
fn reads(
    device: &Arc<dyn BlockDevice>,
    first: u64,
    depth: u32,
    (stop, sum): (&AtomicBool, &AtomicU64),
) {
    let mut queue = Queue::open(device, &QueueContext::new(depth)).expect("a queue");
    let mut rng = fastrand::Rng::with_seed(first + 1);
    let mut idle: Vec<Box<Request>> = (0..u64::from(depth))
        .map(|tag| {
            let buffer = Buffer::anonymous(4096).expect("memory");
            Request::with_buffers(Op::Read, 0, vec![buffer], tag)
        })
        .collect();
    let mut done: Vec<Completion> = Vec::new();
    let (mut count, mut in_flight) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        for request in &mut idle {
            request.sector = first + rng.u64(..PART_BYTES / 4096) * 8;
        }
        in_flight += idle.len();
        queue.submit(&mut idle);
        queue.poll(&mut done);
        if done.is_empty() && matches!(queue.arm(), Readiness::Wait(_)) {
            std::thread::yield_now();
        }
        count += done.len() as u64;
        in_flight -= done.len();
        idle.extend(done.drain(..).map(|c| c.request));
    }
    while in_flight > 0 {
        queue.poll(&mut done);
        in_flight -= done.len();
        done.clear();
    }
    sum.fetch_add(count, Ordering::Relaxed);
}

/// Reads a second by one thread for each device, at its part.
fn rate(devices: &[(Arc<dyn BlockDevice>, u64)], depth: u32) -> f64 {
    let (stop, sum) = (AtomicBool::new(false), AtomicU64::new(0));
    let begin = Instant::now();
    std::thread::scope(|s| {
        for (device, first) in devices {
            s.spawn(|| reads(device, *first, depth, (&stop, &sum)));
        }
        std::thread::sleep(ROUND);
        stop.store(true, Ordering::Relaxed);
    });
    sum.into_inner() as f64 / begin.elapsed().as_secs_f64()
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn main() {
    let mut args = std::env::args()
        .skip(1)
        .map(|a| a.parse().expect("a number"));
    let threads = args.next().unwrap_or(4u64);
    let depth = args.next().unwrap_or(32u64) as u32;
    let rounds = args.next().unwrap_or(9);
    let one = cache(threads);
    let shared: Vec<_> = (0..threads)
        .map(|t| (Arc::clone(&one), t * PART_BYTES / 512))
        .collect();
    let own: Vec<_> = (0..threads).map(|_| (cache(1), 0)).collect();
    let (mut ratios, mut control, mut rates) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
    for _ in 0..rounds {
        let (a, b, again) = (
            rate(&shared, depth),
            rate(&own, depth),
            rate(&shared, depth),
        );
        ratios.extend([a / b, again / b]);
        control.push(a / again);
        rates[0].extend([a, again]);
        rates[1].push(b);
    }
    let [a, b] = rates.map(median);
    println!(
        "{threads} threads, {depth} in flight each: one cache {:.0} thousand a second, {threads} caches {:.0}: {:.2} (A/A {:.2})",
        a / 1e3,
        b / 1e3,
        median(ratios),
        median(control)
    );
}
