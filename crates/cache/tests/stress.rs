//! Several threads at once, and a device that changes its size.

use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Request, Status,
};
use pvblk_cache::{CacheConfig, PageCache};
use std::sync::Arc;

const PAGES: u64 = 2048;
const WORDS: usize = 512;

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
    let seed = std::env::var("PVBLK_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| fastrand::u64(..));
    println!("replay with PVBLK_SEED={seed}");
    let inner = pvblk_volume::open("mem:8M").unwrap();
    let cache = Arc::new(PageCache::new(&CacheConfig::new(1 << 20), inner).unwrap());
    let device: Arc<dyn BlockDevice> = cache.clone();
    let mut user = User::new(&device, 0);
    (0..PAGES).for_each(|page| user.write(page, 0));
    drop(user);
    std::thread::scope(|scope| {
        for reader in 1..4u32 {
            let device = &device;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed ^ u64::from(reader));
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
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut user = User::new(&device, 0);
        let mut counts = vec![0; PAGES as usize];
        for _ in 0..20_000 {
            let page = rng.u64(..256);
            counts[page as usize] += 1;
            user.write(page, counts[page as usize]);
        }
    });
    cache.check().unwrap();
    let c = cache.counters();
    assert!(
        c.hits > 1000 && c.pgsteal_direct + c.pgsteal_kswapd > 1000,
        "{c:?}"
    );
}

/// A file that grew can be read to its new end; one that shrank can't be read behind it, and dirty pages there are gone.
#[test]
fn a_device_that_changes_its_size() {
    let dir = std::env::temp_dir().join(format!("pvblk-cache-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(4 << 20).unwrap();
    let inner = pvblk_volume::open(&format!("file:{}", path.display())).unwrap();
    let cache = Arc::new(PageCache::new(&CacheConfig::new(1 << 20), inner).unwrap());
    let device: Arc<dyn BlockDevice> = cache.clone();
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
    cache.check().unwrap();
    drop(user);
    device.close().unwrap();
    assert_eq!(file.metadata().unwrap().len(), 2 << 20);
    std::fs::remove_dir_all(&dir).unwrap();
}
