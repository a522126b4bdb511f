//! The array against a plain model: random requests of several queues, members that fail, and then the members' bytes.

#[path = "support/flaky.rs"]
mod flaky;

use fastrand::Rng;
use flaky::Flaky;
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Extent, ExtentKind, Extents, Op, Queue, QueueContext, Request,
    RequestFlags, Status,
};
use pvblk_raid5::{
    ArrayOptions, Assembly, BackgroundWork, Blocking, Consistency, Geometry, Layout, Member,
    NewArray, Raid5, STRIPE_BYTES, SUPER_SECTOR, WritePath, sleepy,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// An array whose background work is stepped.
struct Served {
    array: Arc<Raid5>,
    background: Mutex<BackgroundWork>,
}

impl Served {
    fn device(&self) -> Arc<dyn BlockDevice> {
        self.array.clone()
    }

    fn failed(&self) -> Option<usize> {
        self.array.failed()
    }

    /// Polls the queue, after background work.
    fn poll(&self, queue: &mut Queue, done: &mut Vec<Completion>) -> usize {
        self.background.lock().work(Duration::ZERO);
        queue.poll(done)
    }
}

struct TestArray {
    array: Served,
    geometry: Geometry,
    devices: Vec<Arc<dyn BlockDevice>>,
    dead: Vec<Arc<AtomicBool>>,
    reads: Vec<Arc<AtomicU64>>,
    held: Arc<AtomicBool>,
    data_offset: u64,
}

fn world(
    members: usize,
    layout: Layout,
    chunk: u32,
    consistency: Consistency,
    missing: Option<usize>,
) -> TestArray {
    let sectors = 8192;
    let created = NewArray {
        set_uuid: [7; 16],
        name: "test:0",
        created_secs: 1,
        layout,
        chunk_sectors: chunk,
        device_sectors: &vec![sectors; members],
        consistency,
        checksums: false,
        clean: true,
        size_sectors: None,
    }
    .build()
    .unwrap();
    let (mut devices, mut dead, mut reads): (Vec<Arc<dyn BlockDevice>>, Vec<_>, Vec<_>) =
        Default::default();
    let held = Arc::new(AtomicBool::new(false));
    for n in 0..members {
        let flag = Arc::new(AtomicBool::new(false));
        let count = Arc::new(AtomicU64::new(0));
        let size = format!("mem:{}", sectors * 512);
        devices.push(Arc::new(Flaky {
            inner: pvblk_volume::open(&size).unwrap(),
            // With some chunks one of them can't.
            zeroes: n != 1 || chunk != 16,
            dead: Arc::clone(&flag),
            reads: Arc::clone(&count),
            held: Arc::clone(&held),
        }));
        dead.push(flag);
        reads.push(count);
    }
    let mut all = Vec::new();
    let mut data_offset = 0;
    for (i, device) in devices.iter().enumerate() {
        let superblock = created.superblock(i, [i as u8; 16]);
        data_offset = superblock.data_offset_sectors;
        let mut blocking = Blocking::open(device).unwrap();
        blocking
            .write(SUPER_SECTOR, &superblock.encode(), &mut sleepy())
            .unwrap();
        all.push((missing != Some(i)).then(|| Member {
            device: Arc::clone(device),
            name: format!("m{i}"),
            superblock,
        }));
    }
    let geometry = created.geometry();
    let assembly = Assembly::new(geometry, all, false);
    let options = ArrayOptions {
        stripes: 16,
        ..ArrayOptions::default()
    };
    let array = Raid5::start(assembly, &options).unwrap();
    let array = Served {
        background: Mutex::new(BackgroundWork::new(&array)),
        array,
    };
    TestArray {
        array,
        geometry,
        devices,
        dead,
        reads,
        held,
        data_offset,
    }
}

/// A whole array of four members, with chunks of so many sectors.
fn of_four(chunk: u32, consistency: Consistency) -> TestArray {
    world(4, Layout::LeftSymmetric, chunk, consistency, None)
}

/// Data of a write: each sector says which write it is of.
fn fill(buffer: &Buffer, write: u64) {
    for sector in 0..buffer.len() / 512 {
        let mut bytes = [0u8; 512];
        for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(write << 16 | sector as u64 ^ (i as u64) << 40).to_le_bytes());
        }
        buffer.write(sector * 512, &bytes);
    }
}

fn run(seed: u64, world: &TestArray, kill: Option<usize>) {
    let mut rng = Rng::with_seed(seed);
    let device = world.array.device();
    let capacity = (device.capacity_sectors()).min(2048);
    let mut model = vec![0u8; (capacity * 512) as usize];
    // Sectors that were discarded: zeros, or as they were.
    let mut discarded = vec![false; capacity as usize];
    let discards = device.limits().discard_granularity_bytes > 0;
    let mut queues: Vec<Queue> = (0..2)
        .map(|_| Queue::open(&device, &QueueContext::new(16)).unwrap())
        .collect();
    let mut busy: Vec<(u64, u64)> = Vec::new();
    let mut write = 0;
    let (total, mut sent, mut ended) = (600, 0, 0);
    let mut done = Vec::new();
    let kill_at = kill.map(|_| rng.usize(100..400));
    let mut steps = 0;
    while ended < total {
        steps += 1;
        assert!(
            steps < 2_000_000,
            "seed {seed}: stuck with {ended} of {total}"
        );
        let at = rng.usize(..2);
        if sent < total && rng.u8(..3) == 0 && queues[at].in_flight() < 8 {
            let mut batch = Vec::new();
            for _ in 0..rng.usize(1..4).min(total - sent) {
                let sectors = match rng.u8(..4) {
                    0 => rng.u64(1..8),
                    1 => 8,
                    2 => rng.u64(1..64),
                    _ => (world.geometry.row_sectors()).min(256),
                };
                let sector = match rng.bool() {
                    true => rng.u64(..capacity - sectors),
                    false => rng.u64(..(capacity - sectors) / 8) * 8,
                };
                let op = match rng.u8(..10) {
                    0..3 => Op::Read,
                    3..7 => Op::Write,
                    7 => Op::Flush,
                    8 if discards => Op::Discard,
                    _ => Op::WriteZeroes,
                };
                let (sector, sectors) = match !op.has_data() && rng.u8(..4) == 0 {
                    true => (sector, rng.u64(1..=capacity - sector)),
                    false => (sector, sectors),
                };
                sent += 1;
                if op == Op::Flush {
                    batch.push(Request::new(Op::Flush, 0, 0, 0));
                    continue;
                }
                if busy
                    .iter()
                    .any(|(s, e)| sector < *e && *s < sector + sectors)
                {
                    ended += 1;
                    continue;
                }
                busy.push((sector, sector + sectors));
                write += 1;
                if !op.has_data() {
                    let mut request = Request::new(op, sector, sectors, write);
                    if op == Op::WriteZeroes && rng.bool() {
                        request.flags = RequestFlags::NO_UNMAP;
                    }
                    batch.push(request);
                    continue;
                }
                let buffer = Buffer::anonymous((sectors * 512) as usize).unwrap();
                if op == Op::Write {
                    fill(&buffer, write);
                }
                let mut request = Request::with_buffers(op, sector, vec![buffer], write);
                if op == Op::Write && rng.u8(..8) == 0 {
                    request.flags = RequestFlags::FUA;
                }
                batch.push(request);
            }
            queues[at].submit(&mut batch);
        }
        if kill_at.is_some_and(|k| ended >= k)
            && let Some(member) = kill
        {
            world.dead[member].store(true, Ordering::Relaxed);
        }
        queues[at].woken();
        world.array.poll(&mut queues[at], &mut done);
        for c in done.drain(..) {
            ended += 1;
            let r = &c.request;
            assert_eq!(
                c.status,
                Status::Ok,
                "seed {seed}: {:?} at {}",
                r.op,
                r.sector
            );
            let range = (r.sector * 512) as usize..(r.end() * 512) as usize;
            let sectors = r.sector as usize..r.end() as usize;
            match r.op {
                Op::Write => {
                    model[range].copy_from_slice(&r.buffers[0].to_vec());
                    discarded[sectors].fill(false);
                }
                Op::WriteZeroes => {
                    model[range].fill(0);
                    discarded[sectors].fill(false);
                }
                Op::Discard => discarded[sectors].fill(true),
                Op::Read => {
                    let found = r.buffers[0].to_vec();
                    for (found, at) in found.chunks(512).zip(sectors) {
                        let should = &model[at * 512..][..512];
                        let zeros = discarded[at] && found == [0; 512];
                        assert!(found == should || zeros, "seed {seed}: read at {at}");
                    }
                }
                Op::Flush => {}
            }
            busy.retain(|(s, _)| *s != r.sector || r.op == Op::Flush);
        }
    }
    drop(queues);
    // The contents of the members themselves.
    let failed = world.array.failed();
    let mut raw: Vec<Vec<u8>> = Vec::new();
    for (i, member) in world.devices.iter().enumerate() {
        let mut bytes = vec![0; (world.geometry.member_sectors() * 512) as usize];
        if Some(i) != failed {
            let mut blocking = Blocking::open(member).unwrap();
            blocking
                .read(world.data_offset, &mut bytes, &mut sleepy())
                .unwrap();
        }
        raw.push(bytes);
    }
    let len = raw[0].len();
    if let Some(f) = failed {
        for at in 0..len {
            raw[f][at] = (0..raw.len())
                .filter(|m| *m != f)
                .fold(0, |x, m| x ^ raw[m][at]);
        }
    } else {
        for at in (0..len).step_by(STRIPE_BYTES / 8) {
            let sum = raw.iter().fold(0, |x, m| x ^ m[at]);
            assert_eq!(sum, 0, "seed {seed}: parity at byte {at}");
        }
    }
    for sector in 0..capacity {
        let place = world.geometry.locate(sector);
        let at = (place.member_sector * 512) as usize;
        let is = &raw[place.member][at..at + 512];
        let should = &model[(sector * 512) as usize..][..512];
        let zeros = discarded[sector as usize] && is == [0; 512];
        assert!(
            is == should || zeros,
            "seed {seed}: sector {sector} on member {}",
            place.member
        );
    }
}

fn seeds() -> impl Iterator<Item = u64> {
    let begin = pvblk_testing::seed_or(fastrand::u64(..1 << 32));
    let count = std::env::var("PVBLK_SEEDS")
        .ok()
        .and_then(|s| s.parse().ok());
    begin
        ..begin
            + count.unwrap_or(if pvblk_testing::given_seed().is_some() {
                1
            } else {
                6
            })
}

const LAYOUTS: [Layout; 4] = [
    Layout::LeftSymmetric,
    Layout::RightSymmetric,
    Layout::LeftAsymmetric,
    Layout::RightAsymmetric,
];

fn shapes(seed: u64) -> (usize, Layout, u32, Consistency) {
    let mut rng = Rng::with_seed(seed);
    (
        rng.usize(3..7),
        LAYOUTS[rng.usize(..4)],
        [8, 16, 32][rng.usize(..3)],
        [Consistency::Ppl, Consistency::Resync][rng.usize(..2)],
    )
}

#[test]
fn a_whole_array_holds_what_was_written() {
    for seed in seeds() {
        let (members, layout, chunk, consistency) = shapes(seed);
        let world = world(members, layout, chunk, consistency, None);
        run(seed, &world, None);
    }
}

#[test]
fn a_degraded_array_holds_what_was_written() {
    for seed in seeds() {
        let (members, layout, chunk, consistency) = shapes(seed);
        let missing = seed as usize % members;
        let world = world(members, layout, chunk, consistency, Some(missing));
        run(seed, &world, None);
    }
}

#[test]
fn an_array_goes_on_without_a_member_that_fails() {
    for seed in seeds() {
        let (members, layout, chunk, consistency) = shapes(seed);
        let kill = seed as usize % members;
        let world = world(members, layout, chunk, consistency, None);
        run(seed, &world, Some(kill));
        assert_eq!(world.array.failed(), Some(kill));
    }
}

#[test]
fn whole_stripes_need_no_reads() {
    let world = of_four(16, Consistency::Ppl);
    let device = world.array.device();
    let mut queue = Queue::open(&device, &QueueContext::new(4)).unwrap();
    let bytes = (world.geometry.row_sectors() * 512) as usize * 4;
    let buffer = Buffer::anonymous(bytes).unwrap();
    queue.submit(&mut vec![Request::with_buffers(
        Op::Write,
        0,
        vec![buffer],
        0,
    )]);
    let mut done = Vec::new();
    while world.array.poll(&mut queue, &mut done) == 0 {}
    assert_eq!(done[0].status, Status::Ok);
    let reads: u64 = world.reads.iter().map(|r| r.load(Ordering::Relaxed)).sum();
    assert_eq!(reads, 0);
}

/// Stripes at rest give their memory back and read their data again; others keep theirs.
#[test]
fn stripes_at_rest_give_way() {
    let world = of_four(64, Consistency::Resync);
    let device = world.array.device();
    assert_eq!((device.spare_bytes(), device.give_way()), (0, 0));
    let mut queue = Queue::open(&device, &QueueContext::new(16)).unwrap();
    let buffer = Buffer::anonymous(4096).unwrap();
    let reads = || -> u64 { world.reads.iter().map(|r| r.load(Ordering::Relaxed)).sum() };
    let mut done = Vec::new();
    let mut write = |queue: &mut Queue, stripe: u64, waits: bool| {
        let request = Request::with_buffers(Op::Write, 8 * stripe, vec![buffer.clone()], 0);
        queue.submit(&mut vec![request]);
        while waits && world.array.poll(queue, &mut done) == 0 {}
        done.drain(..)
            .for_each(|c| assert_eq!(c.status, Status::Ok));
    };
    (0..16).for_each(|stripe| write(&mut queue, stripe % 8, true));
    // Each write of a part needed to read, once; then the stripe has the data that it needs.
    let before = reads();
    write(&mut queue, 3, true);
    assert_eq!(reads(), before);
    let spare = device.spare_bytes();
    assert!(spare > 0 && device.give_way() == spare && device.spare_bytes() == 0);
    write(&mut queue, 3, true);
    assert!(reads() > before);
    // A stripe that waits for a member keeps its memory.
    world.held.store(true, Ordering::Relaxed);
    write(&mut queue, 5, false);
    // That of other stripes goes, if it isn't given back together with this one's.
    device.give_way();
    assert!(device.spare_bytes() > 0 && device.give_way() == 0);
    world.held.store(false, Ordering::Relaxed);
    while world.array.poll(&mut queue, &mut done) == 0 {}
    assert_eq!(done[0].status, Status::Ok);
    assert!(device.give_way() > 0);
}

#[test]
fn nobody_waits_for_anothers_reads_or_writes() {
    for path in [WritePath::Direct, WritePath::StripeQueue] {
        let world = of_four(64, Consistency::Resync);
        world.array.array.set_write_path(path);
        let device = world.array.device();
        let queue = |index| {
            let context = QueueContext {
                index,
                ..QueueContext::new(16)
            };
            Queue::open(&device, &context).unwrap()
        };
        let (mut first, mut second) = (queue(0), queue(1));
        let write = |sector, bytes| {
            let buffer = Buffer::anonymous(bytes).unwrap();
            Request::with_buffers(Op::Write, sector, vec![buffer], 0)
        };
        let row = world.geometry.row_sectors();
        let mut done = Vec::new();
        // Superblocks say dirty from here on.
        first.submit(&mut vec![write(0, 4096)]);
        while world.array.poll(&mut first, &mut done) == 0 {}
        done.clear();
        world.held.store(true, Ordering::Relaxed);
        // One that reads, and a row that is written.
        let whole = write(2 * row, row as usize * 512);
        first.submit(&mut vec![write(row, 4096), whole]);
        (0..100).for_each(|_| assert_eq!(first.poll(&mut done), 0));
        // A stream in the middle of a row, of which more could come.
        let stream = (0..5).map(|n| write(3 * row + 8 * n, 4096));
        second.submit(&mut stream.collect());
        let polls = (0..1000).find(|_| {
            second.poll(&mut done);
            done.len() == 5
        });
        assert!(polls.is_some(), "{path}: it waits for the other's");
        assert!(done.iter().all(|d| d.status == Status::Ok));
        world.held.store(false, Ordering::Relaxed);
        done.clear();
        while done.len() < 2 {
            first.poll(&mut done);
        }
    }
}

#[test]
fn an_orderly_end_leaves_clean_superblocks() {
    let world = world(3, Layout::LeftSymmetric, 8, Consistency::Ppl, None);
    run(1, &world, None);
    let read = |device: &Arc<dyn BlockDevice>| {
        let mut page = [0; 4096];
        let mut blocking = Blocking::open(device).unwrap();
        blocking
            .read(SUPER_SECTOR, &mut page, &mut sleepy())
            .unwrap();
        pvblk_raid5::Superblock::parse(&page).unwrap()
    };
    assert!(world.devices.iter().all(|d| !read(d).is_clean()));
    world.array.device().close().unwrap();
    let all: Vec<_> = world.devices.iter().map(read).collect();
    assert!(
        all.iter()
            .all(|s| s.is_clean() && s.events == all[0].events)
    );
}

fn one(world: &TestArray, request: Box<Request>) -> Status {
    let device = world.array.device();
    let mut queue = Queue::open(&device, &QueueContext::new(4)).unwrap();
    queue.submit(&mut vec![request]);
    let mut done = Vec::new();
    while world.array.poll(&mut queue, &mut done) == 0 {}
    done[0].status
}

/// Parts of the array, as (sectors, whether they are data).
fn parts(world: &TestArray, sector: u64, sectors: u64) -> Vec<(u64, bool)> {
    let mut found = Vec::new();
    world
        .array
        .array
        .extents(sector, sectors, &mut found)
        .unwrap();
    let mut at = sector;
    for extent in &found {
        assert_eq!(extent.sector, at, "{found:?}");
        at += extent.sectors;
    }
    assert_eq!(at, sector + sectors);
    let part = |e: &Extent| (e.sectors, e.kind == ExtentKind::Data);
    found.iter().map(part).collect()
}

#[test]
fn discard_and_write_zeroes_leave_holes_that_extents_tell() {
    let world = of_four(32, Consistency::Ppl);
    let row = world.geometry.row_sectors();
    assert_eq!(row, 96);
    let limits = world.array.device().limits();
    assert!(limits.write_zeroes && limits.discard_granularity_bytes == 96 * 512);
    assert_eq!(parts(&world, 0, 10 * row), [(10 * row, false)]);
    let buffer = Buffer::anonymous((10 * row * 512) as usize).unwrap();
    fill(&buffer, 1);
    let write = Request::with_buffers(Op::Write, 0, vec![buffer], 0);
    assert_eq!(one(&world, write), Status::Ok);
    assert_eq!(parts(&world, 0, 10 * row), [(10 * row, true)]);
    // Whole rows only.
    assert_eq!(
        one(&world, Request::new(Op::Discard, 1, row + 94, 0)),
        Status::Ok
    );
    assert_eq!(parts(&world, 0, 10 * row), [(10 * row, true)]);
    let discard = Request::new(Op::Discard, row - 1, 2 * row + 2, 0);
    assert_eq!(one(&world, discard), Status::Ok);
    let holes = [(row, true), (2 * row, false), (7 * row, true)];
    assert_eq!(parts(&world, 0, 10 * row), holes);
    assert_eq!(parts(&world, row + 40, 5), [(5, false)]);
    // A member that is made a hole, and one block of another stripe that isn't one.
    let zeroes = Request::new(Op::WriteZeroes, 5 * row, 2 * row, 0);
    assert_eq!(one(&world, zeroes), Status::Ok);
    let mut zeroes = Request::new(Op::WriteZeroes, 8 * row, row, 0);
    zeroes.flags = RequestFlags::NO_UNMAP;
    assert_eq!(one(&world, zeroes), Status::Ok);
    let holes = [
        (row, true),
        (2 * row, false),
        (2 * row, true),
        (2 * row, false),
    ];
    assert_eq!(parts(&world, 0, 7 * row), holes);
    let rest = parts(&world, 7 * row, 3 * row);
    assert!(rest.iter().all(|(_, data)| *data), "space was given back");
    let mut secure = Request::new(Op::Discard, 0, row, 0);
    secure.flags = RequestFlags::SECURE;
    assert_eq!(one(&world, secure), Status::Unsupported);
    let write = Request::with_buffers(
        Op::Write,
        row + 32,
        vec![Buffer::anonymous(4096).unwrap()],
        0,
    );
    assert_eq!(one(&world, write), Status::Ok);
    // To read a hole of a file in memory may fill it, and the block's parity needs a read.
    assert_eq!(parts(&world, row + 32, 8), [(8, true)]);
    assert_eq!(parts(&world, row + 40, 24), [(24, false)]);
    assert_eq!(
        parts(&world, row + 72, 2 * row - 72),
        [(2 * row - 72, false)]
    );

    // A missing member's data is computed, so it isn't known to be zeros. And no sector is discarded.
    world.dead[0].store(true, Ordering::Relaxed);
    let write = Request::with_buffers(Op::Write, 0, vec![Buffer::anonymous(4096 * 8).unwrap()], 0);
    assert_eq!(one(&world, write), Status::Ok);
    assert_eq!(world.array.failed(), Some(0));
    assert!(parts(&world, 5 * row, 2 * row).contains(&(32, true)));
    assert_eq!(
        one(&world, Request::new(Op::Discard, 3 * row, row, 0)),
        Status::Ok
    );
    assert_eq!(parts(&world, 3 * row, row), [(row, true)]);
    assert_eq!(
        one(&world, Request::new(Op::WriteZeroes, 0, 10 * row, 0)),
        Status::Ok
    );
}
