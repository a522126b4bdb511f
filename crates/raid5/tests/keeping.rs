//! An array that is looked after: sectors that can't be read, rebuilds, replacements, checks.

#[path = "support/failing.rs"]
mod failing;

use failing::Failing;
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Buffer, Close, Completion, Op, Queue, QueueContext, Request, RequestFlags, Status,
};
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, BackgroundWork, Blocking, Consistency, CreateOptions,
    MemberState, Raid5, SyncAction, WritePath, assemble, create, prepare, sleepy,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const POLICIES: [Consistency; 3] = [Consistency::Ppl, Consistency::Resync, Consistency::Bitmap];

const MEMBERS: usize = 4;
const SECTORS: u64 = 16384;

/// A member in memory with sectors that can't be read until they are written.
struct Disk {
    name: String,
    device: Arc<dyn BlockDevice>,
    bad: Arc<Mutex<BTreeSet<u64>>>,
}

fn disk(name: &str) -> Disk {
    let bad: Arc<Mutex<BTreeSet<u64>>> = Arc::default();
    let sectors = Arc::clone(&bad);
    let fails = Arc::new(move |request: &Request| {
        let (mut bad, range) = (sectors.lock(), request.sector..request.end());
        if request.op == Op::Write {
            bad.retain(|s| !range.contains(s));
        }
        request.op == Op::Read && bad.range(range).next().is_some()
    });
    let memory = pvblk_volume::open(&format!("mem:{}", SECTORS * 512)).unwrap();
    Disk {
        name: name.into(),
        device: Failing::over(&memory, fails),
        bad,
    }
}

fn named(disks: &[Disk]) -> Vec<(String, Arc<dyn BlockDevice>)> {
    let one = |d: &Disk| (d.name.clone(), Arc::clone(&d.device));
    disks.iter().map(one).collect()
}

/// An array of members full of `0, 1, 2…` by sector, and the first sector of their data.
struct TestArray {
    disks: Vec<Disk>,
    array: Arc<Raid5>,
    background: Option<BackgroundWork>,
    now: Duration,
    data: u64,
}

impl TestArray {
    fn new(consistency: Consistency) -> TestArray {
        let disks: Vec<Disk> = (0..MEMBERS).map(|n| disk(&n.to_string())).collect();
        let mut options = CreateOptions::new("test:0");
        options.chunk_sectors = 16;
        options.consistency = consistency;
        let made = create(named(&disks), &options, &mut sleepy()).unwrap();
        let data = made.newest().data_offset_sectors;
        drop(made);
        let (array, background) = serve(named(&disks));
        let mut world = TestArray {
            array,
            disks,
            background: Some(background),
            now: Duration::ZERO,
            data,
        };
        world.settle();
        for at in (0..world.capacity()).step_by(64) {
            assert_eq!(world.write(at, 64, 1), Status::Ok);
        }
        world
    }

    fn add_spare(&mut self) {
        let spare = disk("spare");
        let added = self
            .array
            .add(&spare.name, &spare.device, false, &mut sleepy());
        added.unwrap();
        self.disks.push(spare);
    }

    fn capacity(&self) -> u64 {
        self.array.capacity_sectors().min(4096)
    }

    fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.array) as _
    }

    fn run(&mut self, mut request: Box<Request>) -> Completion {
        let mut queue = Queue::open(&self.device(), &QueueContext::new(4)).unwrap();
        let mut done = Vec::new();
        request.tag = 1;
        queue.submit(&mut vec![request]);
        for _ in 0..1_000_000 {
            queue.poll(&mut done);
            if let Some(completion) = done.pop() {
                return completion;
            }
            if let Some(background) = &mut self.background {
                background.work(self.now);
            }
        }
        panic!("a request never ends");
    }

    fn write(&mut self, sector: u64, sectors: u64, stamp: u64) -> Status {
        let buffer = Buffer::anonymous((sectors * 512) as usize).unwrap();
        for n in 0..sectors {
            buffer.write((n * 512) as usize, &bytes(sector + n, stamp));
        }
        self.run(Request::with_buffers(Op::Write, sector, vec![buffer], 0))
            .status
    }

    /// All sectors, by their stamps; `None` for those that can't be read.
    fn stamps(&mut self) -> Vec<Option<u64>> {
        let mut all = Vec::new();
        for sector in (0..self.capacity()).step_by(8) {
            let buffer = Buffer::anonymous(8 * 512).unwrap();
            let done = self.run(Request::with_buffers(Op::Read, sector, vec![buffer], 0));
            for n in 0..8 {
                let mut found = [0; 512];
                done.request.buffers[0].read((n * 512) as usize, &mut found);
                let stamp = u64::from_le_bytes(found[..8].try_into().unwrap());
                let right = found == bytes(sector + n, stamp);
                all.push((done.status == Status::Ok && right).then_some(stamp));
            }
        }
        all
    }

    fn holds(&mut self, stamp: u64) -> bool {
        self.stamps().iter().all(|s| *s == Some(stamp))
    }

    /// Until nothing is under way.
    /// The background does what is due.
    fn step(&mut self) {
        let background = self.background.as_mut().expect("it serves");
        background.work(self.now);
    }

    fn settle(&mut self) {
        for _ in 0..1_000_000 {
            self.now += Duration::from_millis(50);
            let Some(background) = &mut self.background else {
                return;
            };
            background.work(self.now);
            if !background.is_busy() {
                return;
            }
        }
        panic!("it never ends: {:?}", self.array.state().sync);
    }

    /// Number of sectors whose parity is wrong, by a check.
    fn check(&mut self, action: SyncAction) -> u64 {
        self.array.sync(Some(action)).unwrap();
        self.background.as_mut().unwrap().work(self.now);
        self.settle();
        self.array.state().mismatch_sectors
    }

    fn raw(&self, disk: usize, sector: u64, bytes: &[u8]) {
        let mut blocking = Blocking::open(&self.disks[disk].device).unwrap();
        blocking
            .write(self.data + sector, bytes, &mut sleepy())
            .unwrap();
    }

    fn restart(&mut self) {
        self.background = None;
        self.array.close().unwrap();
        let (array, background) = serve(named(&self.disks));
        (self.array, self.background) = (array, Some(background));
    }

    fn failed(&self) -> Option<usize> {
        self.array.state().failed
    }

    fn corrected(&self) -> u32 {
        let members = self.array.state().members;
        members.iter().map(|m| m.corrected_reads).sum()
    }
}

fn bytes(sector: u64, stamp: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    bytes[..8].copy_from_slice(&stamp.to_le_bytes());
    bytes[8..16].copy_from_slice(&sector.to_le_bytes());
    bytes[504..].copy_from_slice(&(sector ^ stamp << 32).to_le_bytes());
    bytes
}

fn serve(disks: Vec<(String, Arc<dyn BlockDevice>)>) -> (Arc<Raid5>, BackgroundWork) {
    let options = AssembleOptions {
        resync_later: true,
        ..AssembleOptions::default()
    };
    let mut assembly = assemble(disks, &options, &mut sleepy()).unwrap();
    prepare(&mut assembly, &options, &mut |_, _| {}, &mut sleepy()).unwrap();
    let stripes = ArrayOptions {
        stripes: 16,
        ..ArrayOptions::default()
    };
    let array = Raid5::start(assembly, &stripes).unwrap();
    let background = BackgroundWork::new(&array);
    (array, background)
}

#[test]
fn a_sector_that_cannot_be_read_is_calculated_and_written() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency);
        world.restart();
        let data = world.data;
        for (disk, sector) in [(0, 3), (1, 40), (2, 57), (2, 200), (3, 8)] {
            world.disks[disk].bad.lock().insert(data + sector);
        }
        assert!(world.holds(1));
        assert_eq!(world.failed(), None);
        // Parity isn't read by a reader; a check finds the rest.
        assert_eq!(world.check(SyncAction::Check), 0);
        assert!(world.disks.iter().all(|d| d.bad.lock().is_empty()));
        assert_eq!(world.corrected(), 5);
        // They are counted in the superblocks.
        assert_eq!(world.write(0, 1, 1), Status::Ok);
        world.array.fail(0).unwrap();
        world.settle();
        let state = world.array.state();
        assert_eq!(state.failed, Some(0));
        assert!(state.superblock.corrected_reads > 0);
    }
}

#[test]
fn two_unreadable_blocks_of_a_stripe_fail_their_requests_only() {
    let mut world = TestArray::new(Consistency::Ppl);
    world.restart();
    let data = world.data;
    for disk in [0, 1] {
        world.disks[disk].bad.lock().insert(data + 2);
    }
    let lost = world.stamps().iter().filter(|s| s.is_none()).count();
    assert_eq!(lost, 16);
    assert_eq!(world.failed(), None);
    assert_eq!(world.write(0, 8, 1), Status::IoError);
    // A stripe that is written whole needs none of its old data.
    assert_eq!(world.write(0, 48, 1), Status::Ok);
    assert!(world.holds(1));
    assert_eq!(world.check(SyncAction::Check), 0);
}

#[test]
fn a_device_that_keeps_failing_to_read_is_kicked() {
    let mut world = TestArray::new(Consistency::Ppl);
    world.restart();
    let data = world.data;
    world.disks[2].bad.lock().extend(data..data + 1024);
    assert!(world.holds(1));
    assert_eq!(world.failed(), Some(2));
}

#[test]
fn a_spare_is_rebuilt_and_parity_is_right() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency);
        world.add_spare();
        assert_eq!(world.array.state().members[4].state, MemberState::Spare);
        world.array.fail(1).unwrap();
        world.settle();
        let state = world.array.state();
        assert_eq!((state.failed, state.members.len()), (None, 4));
        assert_eq!(state.members[1].name, "spare");
        assert!(world.holds(1));
        assert_eq!(world.check(SyncAction::Check), 0);
        // The failed member is stale, the spare is the member.
        world.restart();
        assert_eq!(world.failed(), None);
        assert!(world.holds(1));
        assert_eq!(world.check(SyncAction::Check), 0);
        assert!(
            !world
                .array
                .state()
                .members
                .iter()
                .any(|m| m.name == "1" && m.place.is_some())
        );
    }
}

/// Somebody asks while the spare becomes a member.
#[test]
fn a_spare_that_is_taken_is_listed_all_the_while() {
    for _ in 0..100 {
        let mut world = TestArray::new(Consistency::Resync);
        world.add_spare();
        let (array, stop) = (Arc::clone(&world.array), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let state = array.state();
                    let is_there = state.members.iter().any(|m| m.name == "spare");
                    assert!(is_there, "{:?}", state.members);
                }
            });
            world.array.fail(1).unwrap();
            world.settle();
            stop.store(true, Ordering::Relaxed);
            asks.join().expect("it is always there");
        });
    }
}

#[test]
fn a_rebuild_goes_on_after_a_restart() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency);
        let spare = disk("spare");
        let add = |array: &Raid5| array.add(&spare.name, &spare.device, false, &mut sleepy());
        add(&world.array).unwrap();
        world.array.set_speed(1, 1).unwrap();
        world.array.fail(3).unwrap();
        let background = world.background.as_mut().unwrap();
        // 4 KiB each four seconds.
        for second in 0..200 {
            world.now = Duration::from_secs(second);
            background.work(world.now);
        }
        let done = world.array.state().sync.expect("a rebuild").done_sectors;
        assert!((200..=400).contains(&done), "{done}");
        world.disks.push(spare);
        assert!(world.holds(1));
        world.restart();
        let state = world.array.state();
        let member = state.members.iter().find(|m| m.name == "spare").unwrap();
        // A stripe was under way, perhaps.
        let MemberState::Rebuilding(rebuilt) = member.state else {
            panic!("{:?}", member.state);
        };
        assert!((done..=done + 8).contains(&rebuilt), "{done} {rebuilt}");
        assert!(world.holds(1));
        assert_eq!(world.write(0, 64, 2), Status::Ok);
        assert_eq!(world.write(0, 64, 1), Status::Ok);
        world.settle();
        assert_eq!(world.failed(), None);
        assert!(world.holds(1));
        assert_eq!(world.check(SyncAction::Check), 0);
    }
}

#[test]
fn a_living_member_is_replaced() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency);
        assert!(world.array.replace(0).is_err(), "there is no spare");
        world.add_spare();
        world.array.replace(0).unwrap();
        world.settle();
        let state = world.array.state();
        assert_eq!(state.failed, None);
        assert_eq!(state.members[0].name, "spare");
        assert!(world.holds(1));
        assert_eq!(world.check(SyncAction::Check), 0);
        world.restart();
        assert_eq!(world.failed(), None);
        assert_eq!(world.array.places()[0].as_deref(), Some("spare"));
        assert!(world.holds(1));
    }
}

#[test]
fn wrong_parity_is_counted_and_repaired() {
    let mut world = TestArray::new(Consistency::Ppl);
    assert_eq!(world.check(SyncAction::Check), 0);
    world.restart();
    // Any block of a stripe may be the wrong one: it can't be known which.
    world.raw(2, 80, &[0xaa; 512]);
    world.raw(3, 160, &[0xbb; 4096]);
    assert_eq!(world.check(SyncAction::Check), 16);
    assert_eq!(world.check(SyncAction::Repair), 16);
    assert_eq!(world.check(SyncAction::Check), 0);
}

#[test]
fn stripes_come_and_go_while_it_serves() {
    let mut world = TestArray::new(Consistency::Ppl);
    for stripes in [300, 8, 33, 4096, 17] {
        world.array.set_stripes(stripes).unwrap();
        let stamp = stripes as u64;
        for at in (0..world.capacity()).step_by(64) {
            assert_eq!(world.write(at, 64, stamp), Status::Ok);
        }
        assert!(world.holds(stamp));
        let state = world.array.state();
        assert_eq!((state.stripes, state.active_stripes), (stripes, 0));
    }
    assert!(world.array.set_stripes(7).is_err());
    assert!(world.array.set_stripes(32769).is_err());
    assert_eq!(world.check(SyncAction::Check), 0);
}

#[test]
fn stable_buffers_may_be_in_any_pieces() {
    let seed = pvblk_testing::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = TestArray::new(Consistency::Ppl);
    for stamp in 2..40 {
        for row in (0..world.capacity()).step_by(48) {
            let sectors = 48.min(world.capacity() - row);
            let mut buffers = Vec::new();
            let mut at = 0;
            while at < sectors {
                let some = match rng.u8(..3) {
                    0 => rng.u64(1..=sectors - at),
                    _ => (sectors - at).min(8 * rng.u64(1..6)),
                };
                let buffer = Buffer::anonymous((some * 512) as usize).unwrap();
                for n in 0..some {
                    buffer.write((n * 512) as usize, &bytes(row + at + n, stamp));
                }
                buffers.push(buffer);
                at += some;
            }
            let mut request = Request::with_buffers(Op::Write, row, buffers, 0);
            request.flags = RequestFlags::STABLE_BUFFERS;
            assert_eq!(world.run(request).status, Status::Ok);
        }
        assert!(world.holds(stamp), "seed {seed}");
    }
    assert_eq!(world.check(SyncAction::Check), 0, "seed {seed}");
}

#[test]
fn who_asks_twice_loses_one_member_at_most() {
    let mut world = TestArray::new(Consistency::Ppl);
    world.array.fail(1).unwrap();
    // The first isn't done yet.
    world.array.fail(2).unwrap();
    world.settle();
    assert_eq!(world.failed(), Some(1));
    assert!(!world.array.state().broken);
    assert!(world.array.fail(2).is_err());
    assert!(world.holds(1));
}

#[test]
fn a_check_that_is_stopped_says_so() {
    let mut world = TestArray::new(Consistency::Ppl);
    world.array.set_speed(1, 1).unwrap();
    world.array.sync(Some(SyncAction::Check)).unwrap();
    let background = world.background.as_mut().unwrap();
    for second in 0..20 {
        background.work(Duration::from_secs(second));
    }
    world.array.sync(None).unwrap();
    background.work(Duration::from_secs(20));
    let state = world.array.state();
    assert_eq!(state.sync, None);
    let trouble = state.trouble.expect("it wasn't finished");
    assert!(trouble.starts_with("check was stopped after "), "{trouble}");
}

/// Sequential writes of a block each, 64 in flight; how many blocks were read for them.
fn stream(path: WritePath) -> u64 {
    let mut world = TestArray::new(Consistency::Resync);
    world.restart();
    world.array.set_write_path(path);
    let mut queue = Queue::open(&world.device(), &QueueContext::new(64)).unwrap();
    let (mut next, mut batch, mut done) = (0, Vec::new(), Vec::new());
    let mut free: Vec<u64> = (0..64).collect();
    let before = world.array.counts();
    while next < world.capacity() || queue.in_flight() > 0 {
        while next < world.capacity()
            && let Some(tag) = free.pop()
        {
            let buffer = Buffer::anonymous(4096).unwrap();
            for n in 0..8 {
                buffer.write((n * 512) as usize, &bytes(next + n, 7));
            }
            batch.push(Request::with_buffers(Op::Write, next, vec![buffer], tag));
            next += 8;
        }
        queue.submit(&mut batch);
        world.step();
        queue.poll(&mut done);
        for completion in done.drain(..) {
            assert_eq!(completion.status, Status::Ok);
            free.push(completion.request.tag);
        }
    }
    drop(queue);
    assert!(world.holds(7));
    assert_eq!(world.check(SyncAction::Check), 0);
    world.array.counts().prereads - before.prereads
}

#[test]
fn the_stripe_queue_lets_a_stream_write_whole_stripes() {
    // Two blocks are left over at the end, and each takes two reads.
    assert_eq!(stream(WritePath::StripeQueue), 4);
    let direct = stream(WritePath::Direct);
    assert!(direct > 8, "{direct}");
}

#[test]
fn the_write_path_changes_while_requests_wait() {
    let mut world = TestArray::new(Consistency::Ppl);
    let mut queue = Queue::open(&world.device(), &QueueContext::new(16)).unwrap();
    let mut done = Vec::new();
    for round in 0..200u64 {
        let path = [WritePath::StripeQueue, WritePath::Direct][(round % 2) as usize];
        let sector = round % 40 * 8;
        let buffer = Buffer::anonymous(4096).unwrap();
        (0..8).for_each(|n| buffer.write((n * 512) as usize, &bytes(sector + n, 1)));
        queue.submit(&mut vec![Request::with_buffers(
            Op::Write,
            sector,
            vec![buffer],
            0,
        )]);
        world.array.set_write_path(path);
        while queue.in_flight() > 8 {
            world.step();
            queue.poll(&mut done);
            done.clear();
        }
    }
    while queue.in_flight() > 0 {
        world.step();
        queue.poll(&mut done);
        done.clear();
    }
    drop(queue);
    assert!(world.holds(1));
    assert_eq!(world.check(SyncAction::Check), 0);
}

/// Sequential writes of some sectors each, with buffers that stay as they are or may change; blocks that are
/// written, and that the array moves for them.
fn moves(sectors: u64, flags: RequestFlags) -> (u64, u64) {
    let mut world = TestArray::new(Consistency::Resync);
    world.array.set_write_path(WritePath::Direct);
    let before = world.array.counts();
    for row in 0..20 {
        let buffer = Buffer::anonymous((sectors * 512) as usize).unwrap();
        let mut request = Request::with_buffers(Op::Write, row * 48, vec![buffer], 0);
        request.flags = flags;
        assert_eq!(world.run(request).status, Status::Ok);
    }
    let after = world.array.counts();
    let blocks = |bytes: u64| bytes / 4096 / 20;
    let written = after.written_bytes - before.written_bytes;
    (
        blocks(written),
        blocks(after.moved_bytes - before.moved_bytes),
    )
}

#[test]
fn bytes_that_are_moved_are_counted() {
    let none = RequestFlags::empty();
    // A copy, and a XOR of three blocks.
    assert_eq!(moves(8, none), (1, 2 + 4));
    // Two stripes of three blocks, copied and summed.
    assert_eq!(moves(48, none), (6, 2 * (6 + 4)));
    assert_eq!(moves(48, RequestFlags::STABLE_BUFFERS), (6, 2 * 4));
}
