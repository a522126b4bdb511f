//! Requests of 4 KiB to devices over devices, for callgrind to count their instructions (`scripts/stacked.sh`). One thread over memory, and the
//! same requests in every run.
//!
//! `stacked_cost KIND REQUESTS`, where a kind is one of the names in `main`.

use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Request, Status,
};
use pvblk_cache::{CacheConfig, PageCache};
use pvblk_raid5::{ArrayOptions, Assembly, Consistency, Layout, Member, NewArray, Raid5};
use std::sync::Arc;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const MEMBER_BYTES: u64 = 64 << 20;
/// Blocks of 4 KiB that are used of a device: those of a cache that holds all of them, or is too small.
const BLOCKS: u64 = 4096;

fn array() -> Outcome<Arc<dyn BlockDevice>> {
    let created = NewArray {
        set_uuid: [7; 16],
        name: "cost:0",
        created_secs: 1,
        layout: Layout::LeftSymmetric,
        chunk_sectors: 128,
        device_sectors: &[MEMBER_BYTES / 512; 4],
        size_sectors: None,
        consistency: Consistency::Resync,
        checksums: false,
        clean: true,
    }
    .build()?;
    let mut members = Vec::new();
    for i in 0..4 {
        members.push(Some(Member {
            device: pvblk_volume::open(&format!("mem:{MEMBER_BYTES}"))?,
            name: format!("m{i}"),
            superblock: created.superblock(i, [i as u8; 16]),
        }));
    }
    let assembly = Assembly::new(created.geometry(), members, false);
    let array = Raid5::start(assembly, &ArrayOptions::default())?;
    array.keep()?;
    Ok(array)
}

fn cache(bytes: u64) -> Outcome<Arc<dyn BlockDevice>> {
    let inner = pvblk_volume::open("mem:64M")?;
    Ok(Arc::new(PageCache::new(&CacheConfig::new(bytes), inner)?))
}

/// One user of a device with one request.
struct User {
    queue: Queue,
    request: Option<Box<Request>>,
    done: Vec<Completion>,
    batch: Vec<Box<Request>>,
}

impl User {
    fn new(device: &Arc<dyn BlockDevice>) -> Outcome<User> {
        let buffers = vec![Buffer::anonymous(4096)?];
        Ok(User {
            queue: Queue::open(device, &QueueContext::new(1))?,
            request: Some(Request::with_buffers(Op::Read, 0, buffers, 0)),
            done: Vec::new(),
            batch: Vec::new(),
        })
    }

    fn submit(&mut self, op: Op, block: u64) {
        let mut request = self.request.take().expect("one at a time");
        request.op = op;
        request.sector = block * 8;
        self.batch.push(request);
        self.queue.submit(&mut self.batch);
    }

    /// Polls as a worker does that is about to sleep, until the request is done.
    fn step(&mut self) -> bool {
        if self.queue.poll(&mut self.done) == 0 && self.queue.arm() == Readiness::Ready {
            return self.request.is_some();
        }
        if let Some(completion) = self.done.pop() {
            assert_eq!(completion.status, Status::Ok);
            self.request = Some(completion.request);
        }
        self.request.is_some()
    }
}

/// Steps each of them once, and says whether all are done.
fn step_all(users: &mut [User]) -> bool {
    let steps = users.iter_mut().map(User::step);
    steps.filter(|done| !done).count() == 0
}

#[inline(never)]
fn counted(users: &mut [User], op: Op, blocks: &[u64]) {
    for some in blocks.chunks(users.len()) {
        for (user, &block) in users.iter_mut().zip(some) {
            user.submit(op, block);
        }
        while !step_all(users) {}
    }
}

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1);
    let kind = args.next().ok_or("which kind?")?;
    let requests: usize = args.next().ok_or("how many requests?")?.parse()?;
    let (device, op, users) = match kind.as_str() {
        "cache-hit" => (cache(2 * 4096 * BLOCKS)?, Op::Read, 1),
        "cache-miss" => (cache(4096 * BLOCKS / 16)?, Op::Read, 1),
        "cache-write" => (cache(4096 * BLOCKS / 16)?, Op::Write, 1),
        "cache-two-queues" => (cache(4096 * BLOCKS / 16)?, Op::Write, 2),
        "array-read" => (array()?, Op::Read, 1),
        "array-write" => (array()?, Op::Write, 1),
        "array-two-queues" => (array()?, Op::Write, 2),
        other => return Err(format!("{other}: no such kind").into()),
    };
    let mut all = Vec::new();
    for _ in 0..users {
        all.push(User::new(&device)?);
    }
    let warm: Vec<u64> = (0..BLOCKS).collect();
    let mut rng = fastrand::Rng::with_seed(1);
    // Two queues meet in a stripe: neighbours are a chunk of 16 blocks apart.
    let random: Vec<u64> = (0..requests / users)
        .map(|_| rng.u64(..BLOCKS / 32) * 32 + rng.u64(..16))
        .flat_map(|block| [block, block + 16].into_iter().take(users))
        .collect();
    let warm_op = if kind == "cache-hit" { Op::Read } else { op };
    for some in warm.chunks(users) {
        for (user, &block) in all.iter_mut().zip(some) {
            user.submit(warm_op, block);
        }
        while !step_all(&mut all) {}
    }
    counted(&mut all, op, &random);
    Ok(())
}
