//! Several threads at once, and a device that changes its size.

use pvblk_block::{
    BlockDevice, Buffer, CacheState, Completion, DeviceEvent, ManualClock, Op, Queue, QueueContext,
    Readiness, Request, Status,
};
use pvblk_cache::{CacheConfig, PageCache};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGES: u64 = 2048;
/// For a test that would hang, however loaded the machine is.
const PATIENCE: Duration = Duration::from_secs(240);
const WORDS: usize = 512;

/// Says that it is over, also where a check failed: the other threads end by it.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct User {
    queue: Queue,
    buffer: Buffer,
    done: Vec<Completion>,
}

impl User {
    fn new(device: &Arc<dyn BlockDevice>, index: u32) -> User {
        let context = QueueContext {
            index,
            ..QueueContext::new(1)
        };
        User {
            queue: Queue::open(device, &context).unwrap(),
            buffer: Buffer::anonymous(4096).unwrap(),
            done: Vec::new(),
        }
    }

    fn run(&mut self, request: Box<Request>) -> Status {
        self.queue.submit(&mut vec![request]);
        while self.queue.poll(&mut self.done) == 0 {
            if self.queue.arm() != Readiness::Ready {
                std::thread::yield_now();
            }
        }
        self.done.pop().unwrap().status
    }

    fn page(&mut self, op: Op, page: u64) -> Status {
        let buffers = vec![self.buffer.clone()];
        self.run(Request::with_buffers(op, page * 8, buffers, 0))
    }

    /// The number of the page in each word, and how often it was written.
    fn write(&mut self, page: u64, count: u64) {
        let word = (page << 32 | count).to_le_bytes();
        self.buffer.write(0, &word.repeat(WORDS));
        assert_eq!(self.page(Op::Write, page), Status::Ok);
    }

    fn check(&mut self, page: u64) -> u64 {
        assert_eq!(self.page(Op::Read, page), Status::Ok);
        let mut data = [0; 4096];
        self.buffer.read(0, &mut data);
        let (words, _) = data.as_chunks::<8>();
        let first = u64::from_le_bytes(words[0]);
        assert!(
            words.iter().all(|w| u64::from_le_bytes(*w) == first),
            "page {page} is of two writes"
        );
        assert_eq!(first >> 32, page, "another page's data");
        first & 0xffff_ffff
    }
}

/// Hits copy without a lock while reclaim gives their frames to other pages, and a writer changes them.
#[test]
fn readers_get_their_pages_while_frames_change_hands() {
    change_hands(1 << 20, false);
}

/// The same while memory goes back to the system, in small blocks and in large pages.
#[test]
fn readers_get_their_pages_while_memory_is_given_back() {
    change_hands(1 << 20, true);
    change_hands(16 << 20, true);
}

fn change_hands(bytes: u64, squeezed: bool) {
    let inner = pvblk_volume::open("mem:8M").unwrap();
    let cache = Arc::new(PageCache::new(&CacheConfig::new(bytes), inner).unwrap());
    let device: Arc<dyn BlockDevice> = cache.clone();
    let mut user = User::new(&device, 0);
    (0..PAGES).for_each(|page| user.write(page, 0));
    drop(user);
    let mut rng = pvblk_testing::random();
    let mut counts = vec![0; PAGES as usize];
    // How far each thread comes is the scheduler's choice, so it takes as many rounds as it needs.
    let begin = Instant::now();
    loop {
        round(&device, squeezed, &mut rng, &mut counts);
        if squeezed {
            // Nobody uses any page now: what is clean goes, unless all looks at ages were just before.
            for _ in 0..2 {
                std::thread::sleep(Duration::from_millis(110));
                device.give_way();
            }
        }
        cache.check().unwrap();
        let c = cache.counters();
        let went = match squeezed {
            true => c.pages_given_back,
            false => c.pgsteal_direct + c.pgsteal_kswapd,
        };
        assert!(squeezed || c.pages_given_back == 0, "{c:?}");
        if c.hits > 1000 && went > 1000 {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{c:?}");
    }
}

/// Three readers and a writer, and perhaps somebody who takes their memory away.
fn round(
    device: &Arc<dyn BlockDevice>,
    squeezed: bool,
    rng: &mut fastrand::Rng,
    counts: &mut [u64],
) {
    let written = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = Over(&written);
        if squeezed {
            scope.spawn(|| {
                while !written.load(Ordering::Relaxed) {
                    device.give_way();
                    std::thread::sleep(Duration::from_micros(500));
                }
            });
        }
        for reader in 1..4u32 {
            let mut rng = rng.fork();
            scope.spawn(move || {
                let mut user = User::new(device, reader);
                let mut seen = vec![0; PAGES as usize];
                for _ in 0..30_000 {
                    // Some often, the rest seldom.
                    let page = match rng.u8(..4) {
                        0 => rng.u64(..PAGES),
                        _ => rng.u64(..128),
                    };
                    let count = user.check(page);
                    let last = std::mem::replace(&mut seen[page as usize], count);
                    assert!(count >= last, "page {page} is older than it was");
                }
            });
        }
        let mut user = User::new(device, 0);
        for _ in 0..20_000 {
            let page = rng.u64(..256);
            counts[page as usize] += 1;
            user.write(page, counts[page as usize]);
        }
        drop(over);
    });
}

/// Clean pages go, what is dirty stays until it is written, and what is on the bill is what the kernel counts at most.
#[test]
fn memory_goes_back_but_for_what_is_not_on_the_device() {
    let inner = pvblk_volume::open("mem:64M").unwrap();
    let config = CacheConfig::new(32 << 20);
    let clock = Arc::new(ManualClock::default());
    let cache = PageCache::with_clock(&config, inner, clock.clone()).unwrap();
    let cache = Arc::new(cache);
    let device: Arc<dyn BlockDevice> = cache.clone();
    assert_eq!(device.spare_bytes(), 0);
    let mut user = User::new(&device, 0);
    (0..6000).for_each(|page| user.write(page, 1));
    let full = device.spare_bytes();
    assert!(cache.resident_bytes() <= full);
    assert!((6000 * 4096..=32 << 20).contains(&full), "{full}");
    let flush = Request::new(Op::Flush, 0, 0, 0);
    assert_eq!(user.run(flush), Status::Ok);
    (0..100).for_each(|page| user.write(10 * page, 2));
    // Those were used since; the next pass takes them, and the one before leaves only small blocks around what is dirty.
    device.give_way();
    clock.advance(Duration::from_millis(110));
    device.give_way();
    device.give_way();
    let c = cache.counters();
    let left = c.nr_warm_pages * 4096;
    assert_eq!(c.nr_dirty + c.nr_writeback, 100, "{c:?}");
    assert!(
        left <= 100 * (64 << 10) && left < full / 2,
        "{left} of {full}"
    );
    assert_eq!(c.pages_given_back * 4096, full - left);
    // The kernel may have made large pages of small ones again since.
    let resident = cache.resident_bytes();
    assert!(
        resident < full / 2,
        "{resident} of {full}, {left} on the bill"
    );
    // There is nothing more to be had for a while.
    assert_eq!((device.spare_bytes(), device.give_way()), (0, 0));
    cache.check().unwrap();
    (0..6000).for_each(|page| {
        let count = if page < 1000 && page % 10 == 0 { 2 } else { 1 };
        assert_eq!(user.check(page), count);
    });
}

/// A file that grew can be read to its new end; one that shrank can't be read behind it, and dirty pages there are gone.
#[test]
fn a_device_that_changes_its_size() {
    let dir = std::env::temp_dir().join(format!("pvblk-cache-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("disk");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    file.set_len(4 << 20).unwrap();
    let inner = pvblk_volume::open(&format!("file:{}", path.display())).unwrap();
    let cache = Arc::new(PageCache::new(&CacheConfig::new(1 << 20), inner).unwrap());
    let device: Arc<dyn BlockDevice> = cache.clone();
    // Listeners ask for the size, so it is the new one by then.
    let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
    let (weak, sizes) = (Arc::downgrade(&device), Arc::clone(&seen));
    let _listens = device.events().subscribe(move |event| {
        if let (DeviceEvent::Resized { .. }, Some(device)) = (event, weak.upgrade()) {
            sizes.lock().unwrap().push(device.capacity_sectors());
        }
    });
    let mut user = User::new(&device, 0);
    user.write(1023, 5);
    file.set_len(8 << 20).unwrap();
    device.refresh().unwrap();
    assert_eq!(device.capacity_sectors(), 16384);
    user.write(2000, 7);
    assert_eq!((user.check(1023), user.check(2000)), (5, 7));
    file.set_len(2 << 20).unwrap();
    device.refresh().unwrap();
    assert_eq!(device.capacity_sectors(), 4096);
    assert_eq!(user.page(Op::Read, 1023), Status::Invalid);
    user.write(511, 9);
    assert_eq!(user.check(511), 9);
    // In the middle of a dirty page, of which the device keeps a half.
    file.set_len((2 << 20) - 2048).unwrap();
    device.refresh().unwrap();
    assert_eq!(*seen.lock().unwrap(), [16384, 4096, 4092]);
    assert_eq!(user.run(Request::new(Op::Flush, 0, 0, 0)), Status::Ok);
    let mut half = [0; 2048];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut half, (2 << 20) - 4096).unwrap();
    assert!(half.iter().any(|b| *b != 0));
    cache.check().unwrap();
    drop(user);
    device.close().unwrap();
    assert_eq!(file.metadata().unwrap().len(), (2 << 20) - 2048);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Each page is told as it is: read, written, on the device; a part of a page as the whole one.
#[test]
fn the_pages_in_the_cache_are_told() {
    use CacheState::{Absent, Clean, Dirty};
    let inner = pvblk_volume::open("mem:8M").unwrap();
    let config = CacheConfig {
        // Nothing but what is asked for.
        readahead_bytes: Some(0),
        ..CacheConfig::new(4 << 20)
    };
    let device: Arc<dyn BlockDevice> = Arc::new(PageCache::new(&config, inner).unwrap());
    let told = |from: u64, to: u64| {
        let mut out = Vec::new();
        let able = device.capabilities().cached.unwrap();
        able.cached(from, to - from, &mut out);
        let mut end = from;
        let one = |e: &pvblk_block::Extent<CacheState>| {
            assert_eq!(std::mem::replace(&mut end, e.sector + e.sectors), e.sector);
            (e.sectors, e.kind)
        };
        let all: Vec<_> = out.iter().map(one).collect();
        assert_eq!(end, to);
        all
    };
    let mut user = User::new(&device, 0);
    assert_eq!(told(0, 16384), [(16384, Absent)]);
    assert_eq!(user.page(Op::Read, 1), Status::Ok);
    user.write(2, 1);
    user.write(300, 1);
    let all = [
        (8, Absent),
        (8, Clean),
        (8, Dirty),
        (297 * 8, Absent),
        (8, Dirty),
        (16384 - 2408, Absent),
    ];
    assert_eq!(told(0, 16384), all);
    assert_eq!(told(12, 18), [(4, Clean), (2, Dirty)]);
    assert_eq!(user.run(Request::new(Op::Flush, 0, 0, 0)), Status::Ok);
    assert_eq!(told(8, 32), [(16, Clean), (8, Absent)]);
}
