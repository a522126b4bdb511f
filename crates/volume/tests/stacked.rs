//! Users that sleep until they are woken, several at a time, on devices over devices: a wake-up that is lost is a request that never ends.
//! `crates/block/tests/loom.rs` checks the protocol in small models; here it is the devices themselves, and the kernel's epoll.

use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Request, RequestFlags,
    Status,
};
use pvblk_cache::{CacheConfig, PageCache};
use pvblk_raid5::{ArrayOptions, Assembly, Consistency, Layout, Member, NewArray, Raid5};
use pvblk_sys::Poller;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(120);
const MEMBER_BYTES: u64 = 16 << 20;
/// Blocks of 4 KiB that users meet in.
const BLOCKS: u64 = 1024;
const USERS: u32 = 4;
const REQUESTS: u64 = 1500;
const DEPTH: usize = 4;

/// Over members that end I/O at a time, or at once.
fn array(delayed: bool) -> Arc<dyn BlockDevice> {
    let created = NewArray {
        set_uuid: [7; 16],
        name: "stacked:0",
        created_secs: 1,
        layout: Layout::LeftSymmetric,
        chunk_sectors: 16,
        device_sectors: &[MEMBER_BYTES / 512; 3],
        size_sectors: None,
        consistency: Consistency::Ppl,
        checksums: false,
        clean: true,
    }
    .build()
    .unwrap();
    let members = (0..3).map(|i| {
        let spec = match delayed {
            true => format!("delay:30us:mem:{MEMBER_BYTES}"),
            false => format!("mem:{MEMBER_BYTES}"),
        };
        Some(Member {
            device: pvblk_volume::open(&spec).unwrap(),
            name: format!("m{i}"),
            superblock: created.superblock(i, [i as u8; 16]),
        })
    });
    let assembly = Assembly::new(created.geometry(), members.collect(), false);
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    array.keep().unwrap();
    array
}

/// Sleeps as a worker does: until the descriptor is readable or the deadline has come.
struct User {
    queue: Queue,
    poller: Poller,
    in_poller: bool,
    free: Vec<Box<Request>>,
    done: Vec<Completion>,
}

impl User {
    fn new(device: &Arc<dyn BlockDevice>, index: u32) -> User {
        let context = QueueContext {
            index,
            ..QueueContext::new(DEPTH as u32)
        };
        let request = |tag| {
            let buffers = vec![Buffer::anonymous(4096).unwrap()];
            Request::with_buffers(Op::Read, 0, buffers, tag)
        };
        User {
            queue: Queue::open(device, &context).unwrap(),
            poller: Poller::new().unwrap(),
            in_poller: false,
            free: (0..DEPTH as u64).map(request).collect(),
            done: Vec::new(),
        }
    }

    fn take(&mut self) -> usize {
        let count = self.queue.poll(&mut self.done);
        for completion in self.done.drain(..) {
            assert_eq!(completion.status, Status::Ok);
            self.free.push(completion.request);
        }
        count
    }

    /// Until something is done.
    fn sleep(&mut self) {
        let begin = Instant::now();
        while self.take() == 0 {
            let Readiness::Wait(deadline) = self.queue.arm() else {
                continue;
            };
            if !self.in_poller
                && let Some(fd) = self.queue.wait_fd()
            {
                self.poller.add(fd, 0, false).unwrap();
                self.in_poller = true;
            }
            let timeout = deadline.map_or(HANG, |at| at.saturating_duration_since(Instant::now()));
            self.poller.wait(&mut Vec::new(), Some(timeout)).unwrap();
            assert!(begin.elapsed() < HANG, "a wake-up was lost");
            self.queue.woken();
        }
    }

    fn run(&mut self, rng: &mut fastrand::Rng) {
        let mut batch = Vec::new();
        for _ in 0..REQUESTS {
            if self.free.is_empty() || rng.u8(..4) == 0 && self.queue.in_flight() > 0 {
                self.sleep();
            }
            let mut request = self.free.pop().unwrap();
            let (mut op, mut flags) = (Op::Read, RequestFlags::empty());
            let block = match rng.u8(..16) {
                0 => {
                    op = Op::Flush;
                    0
                }
                n => {
                    if n < 8 {
                        op = Op::Write;
                        flags.set(RequestFlags::FUA, n == 1);
                    }
                    rng.u64(..BLOCKS)
                }
            };
            match op {
                Op::Flush => request.buffers.clear(),
                _ if request.buffers.is_empty() => {
                    request.buffers.push(Buffer::anonymous(4096).unwrap());
                }
                _ => {}
            }
            let (tag, sectors) = (request.tag, 8 * request.buffers.len() as u64);
            request.reset(op, flags, block * 8, sectors, tag);
            batch.push(request);
            self.queue.submit(&mut batch);
        }
        while self.queue.in_flight() > 0 {
            self.sleep();
        }
    }
}

fn all_requests_end(device: &Arc<dyn BlockDevice>, seed: u64) {
    std::thread::scope(|scope| {
        for index in 0..USERS {
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed + u64::from(index));
                User::new(device, index).run(&mut rng);
            });
        }
    });
    device.close().unwrap();
}

#[test]
fn sleepers_on_an_array_are_woken() {
    for delayed in [false, true] {
        all_requests_end(&array(delayed), 1);
    }
}

/// Nothing steps the cache but its users' queues.
#[test]
fn sleepers_on_a_cache_over_an_array_are_woken() {
    for delayed in [false, true] {
        let config = CacheConfig::new(1 << 20);
        let cache = PageCache::new(&config, array(delayed)).unwrap();
        let cache: Arc<dyn BlockDevice> = Arc::new(cache);
        all_requests_end(&cache, 2);
    }
}

/// The cache has a background thread, which writes dirty pages and polls unattended lower queues.
#[test]
fn sleepers_on_a_cache_with_a_thread_are_woken() {
    let config = CacheConfig::new(1 << 20);
    let cache = PageCache::new(&config, array(true)).unwrap();
    cache.keep().unwrap();
    let cache: Arc<dyn BlockDevice> = Arc::new(cache);
    all_requests_end(&cache, 3);
}
