//! Members that stall, are kicked for it, and come back: what is waited for, what is written again, and what a late answer may change.

#[path = "support/gate.rs"]
mod gate;
#[path = "support/started.rs"]
mod started;

use fastrand::Rng;
use gate::{Gate, GateState};
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Buffer, Close, Completion, Op, Queue, QueueContext, Request, RequestFlags, Status,
};
use pvblk_raid5::{
    ArrayOptions, Assembly, BackgroundWork, Blocking, Consistency, CreateOptions, MemberState,
    Policy, Raid5, ReAdded, Role, SUPER_SECTOR, Superblock, SyncAction, find_newest, ppl_signature,
    read_superblock, sleepy,
};
use started::prepared;
use std::sync::Arc;
use std::time::Duration;

const POLICIES: [Consistency; 3] = [Consistency::Ppl, Consistency::Resync, Consistency::Bitmap];

const MEMBERS: usize = 3;
const MEMBER_BYTES: u64 = 16 << 20;
/// Sectors for each bit of the bitmap.
const CHUNK: u64 = 128;
const LIMIT: Duration = Duration::from_secs(1);

struct Disk {
    name: String,
    device: Arc<dyn BlockDevice>,
    gate: Arc<Mutex<GateState>>,
}

struct TestArray {
    disks: Vec<Disk>,
    array: Arc<Raid5>,
    background: BackgroundWork,
    queue: Option<Queue>,
    now: Duration,
    /// First sector of the members' data.
    data: u64,
    /// The number in each sector of the array.
    holds: Vec<u64>,
    next: u64,
    rng: Rng,
}

fn disk(name: String) -> Disk {
    let memory = pvblk_volume::open(&format!("mem:{MEMBER_BYTES}")).unwrap();
    let (device, gate) = Gate::over(&memory);
    Disk { name, device, gate }
}

fn bytes(number: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

fn named(disk: &Disk) -> (String, Arc<dyn BlockDevice>) {
    (disk.name.clone(), Arc::clone(&disk.device))
}

impl TestArray {
    fn new(consistency: Consistency, options: ArrayOptions) -> TestArray {
        let disks: Vec<Disk> = (0..MEMBERS).map(|n| disk(n.to_string())).collect();
        let mut how = CreateOptions::new("test:0");
        how.chunk_sectors = 16;
        how.consistency = consistency;
        how.assume_clean = true;
        how.bitmap_chunk_bytes = (consistency == Consistency::Bitmap).then_some(CHUNK * 512);
        let all: Vec<_> = disks.iter().map(named).collect();
        let options = ArrayOptions {
            stripes: 16,
            ..options
        };
        let assembly = prepared(all, Some(&how));
        let data = assembly.newest().data_offset_sectors;
        let array = Raid5::start(assembly, &options).unwrap();
        let background = BackgroundWork::new(&array);
        let device: Arc<dyn BlockDevice> = array.clone();
        let mut world = TestArray {
            disks,
            background,
            queue: Some(Queue::open(&device, &QueueContext::new(64)).unwrap()),
            holds: vec![0; array.capacity_sectors() as usize],
            array,
            now: Duration::ZERO,
            data,
            next: 1,
            rng: Rng::with_seed(7),
        };
        world.pass(Duration::from_secs(1));
        world
    }

    /// Another server begins.
    fn start(&mut self, assembly: Assembly) {
        self.array = Raid5::start(assembly, &TestArray::limited(false)).unwrap();
        self.background = BackgroundWork::new(&self.array);
        let device: Arc<dyn BlockDevice> = self.array.clone();
        self.queue = Some(Queue::open(&device, &QueueContext::new(64)).unwrap());
    }

    fn limited(re_add: bool) -> ArrayOptions {
        ArrayOptions {
            member_timeout: Some(LIMIT),
            re_add,
            ..ArrayOptions::default()
        }
    }

    /// Time passes, and the background thread steps.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += Duration::from_millis(100);
            for _ in 0..8 {
                self.background.work(self.now);
            }
        }
    }

    fn submit(&mut self, requests: Vec<Box<Request>>) -> usize {
        let mut batch = requests;
        let count = batch.len();
        self.queue.as_mut().unwrap().submit(&mut batch);
        count
    }

    /// Polls for the completions of so many requests, while time passes, at most for `most`.
    fn finish(&mut self, count: usize, most: Duration) -> Vec<Completion> {
        let (mut done, end) = (Vec::new(), self.now + most);
        while done.len() < count && self.now < end {
            for _ in 0..20 {
                self.queue.as_mut().unwrap().poll(&mut done);
            }
            self.pass(Duration::from_millis(100));
        }
        done
    }

    /// A write of a range, which is what a read finds there from now on.
    fn write(&mut self, sector: u64, sectors: u64, flags: RequestFlags) -> Box<Request> {
        let buffer = Buffer::anonymous((sectors * 512) as usize).unwrap();
        for n in 0..sectors {
            buffer.write((n * 512) as usize, &bytes(self.next << 32 | (sector + n)));
            self.holds[(sector + n) as usize] = self.next << 32 | (sector + n);
        }
        self.next += 1;
        let mut request = Request::with_buffers(Op::Write, sector, vec![buffer], self.next);
        request.flags = flags;
        request
    }

    fn write_now(&mut self, sector: u64, sectors: u64) {
        let request = self.write(sector, sectors, RequestFlags::empty());
        self.submit(vec![request]);
        let done = self.finish(1, Duration::from_secs(60));
        assert_eq!(done[0].status, Status::Ok);
    }

    fn read(&mut self, sector: u64, sectors: u64) -> Box<Request> {
        let buffer = Buffer::anonymous((sectors * 512) as usize).unwrap();
        self.next += 1;
        Request::with_buffers(Op::Read, sector, vec![buffer], self.next)
    }

    fn is_right(&self, done: &Completion) -> bool {
        let request = &done.request;
        let right = |n: u64| {
            let mut found = [0; 512];
            request.buffers[0].read((n * 512) as usize, &mut found);
            found == bytes(self.holds[(request.sector + n) as usize])
        };
        done.status == Status::Ok && (0..request.sectors).all(right)
    }

    /// True if everything is as it was written.
    fn is_whole(&mut self) -> bool {
        let mut whole = true;
        for sector in (0..self.holds.len() as u64).step_by(1024) {
            let sectors = 1024.min(self.holds.len() as u64 - sector);
            let request = self.read(sector, sectors);
            self.submit(vec![request]);
            let done = self.finish(1, Duration::from_secs(60));
            whole &= self.is_right(&done[0]);
        }
        whole
    }

    fn close(&self, disk: usize) {
        self.disks[disk].gate.lock().closed = true;
    }

    fn open(&self, disk: usize) {
        self.disks[disk].gate.lock().closed = false;
    }

    fn failed(&self) -> Option<usize> {
        self.array.state().failed
    }

    /// The place that a device is recovered for.
    fn rebuilding(&self) -> Option<usize> {
        let members = self.array.state().members.into_iter();
        let mut rebuilt = members.filter(|m| matches!(m.state, MemberState::Rebuilding(_)));
        rebuilt.next()?.place
    }

    fn settle(&mut self) {
        for _ in 0..100_000 {
            self.pass(Duration::from_millis(100));
            if !self.background.is_busy() {
                return;
            }
        }
        panic!("it never ends: {:?}", self.array.state().sync);
    }

    /// Sectors of members whose parity is wrong.
    fn mismatches(&mut self) -> u64 {
        self.array.sync(Some(SyncAction::Check)).unwrap();
        self.settle();
        self.array.state().mismatch_sectors
    }

    /// Bits of the bitmap are cleared.
    fn sweep(&mut self) {
        self.pass(Duration::from_secs(40));
    }

    /// Rebuilds the missing member onto a device that wasn't one.
    fn take_spare(&mut self) {
        let spare = disk("spare".into());
        let added = self
            .array
            .add(&spare.name, &spare.device, false, &mut sleepy());
        added.unwrap();
        self.disks.push(spare);
        self.settle();
    }

    fn superblock(&self, disk: usize) -> Superblock {
        let disk = &self.disks[disk];
        read_superblock(&disk.name, &disk.device, &mut sleepy()).unwrap()
    }

    /// Sectors of a member's data that were written since the last call.
    fn written(&self, disk: usize) -> Vec<(u64, u64)> {
        let all = std::mem::take(&mut self.disks[disk].gate.lock().written);
        let data = all.into_iter().filter(|(sector, _)| *sector >= self.data);
        data.map(|(sector, sectors)| (sector - self.data, sectors))
            .collect()
    }

    fn re_add(&mut self, disk: usize) -> Result<ReAdded, pvblk_block::Error> {
        let Disk { name, device, .. } = &self.disks[disk];
        self.array.re_add(name, device, &mut sleepy())
    }
}

const FOREVER: Duration = Duration::from_secs(3600);

#[test]
fn without_a_limit_a_member_is_waited_for() {
    let mut world = TestArray::new(Consistency::Bitmap, ArrayOptions::default());
    world.close(1);
    let requests: Vec<_> = (0..8).map(|n| world.read(n * 16, 8)).collect();
    let count = world.submit(requests);
    let done = world.finish(count, FOREVER / 4);
    assert!(done.len() < count);
    assert_eq!(world.failed(), None);
    world.open(1);
    let rest = world.finish(count - done.len(), FOREVER);
    assert!(rest.iter().all(|d| world.is_right(d)));
}

#[test]
fn a_member_that_stalls_is_kicked_and_the_others_answer() {
    for consistency in POLICIES {
        for disk in 0..MEMBERS {
            let mut world = TestArray::new(consistency, TestArray::limited(false));
            // Their bits are set.
            (0..3).for_each(|n| world.write_now(n * 2048, 2048));
            world.close(disk);
            let mut requests = Vec::new();
            for n in 0..16 {
                requests.push(world.read(n * 16, 16));
                // Whole stripes, whose data isn't copied where there is no limit, and parts of others.
                requests.push(world.write(1024 + n * 32, 32, RequestFlags::STABLE_BUFFERS));
                requests.push(world.write(4096 + n * 40, 3, RequestFlags::empty()));
            }
            let count = world.submit(requests);
            // It has its time.
            let early = world.finish(count, LIMIT - Duration::from_millis(200));
            assert!(early.len() < count);
            assert_eq!(world.failed(), None);
            let rest = world.finish(count - early.len(), LIMIT * 2);
            assert_eq!(early.len() + rest.len(), count, "member {disk}");
            for done in early.iter().chain(&rest) {
                match done.request.op {
                    Op::Read => assert!(world.is_right(done)),
                    _ => assert_eq!(done.status, Status::Ok),
                }
            }
            assert_eq!(world.failed(), Some(disk));
            let other = world.superblock((disk + 1) % MEMBERS);
            assert_eq!(other.roles[disk], Role::Faulty);
            let late: Vec<Buffer> = rest
                .iter()
                .filter(|d| d.request.op == Op::Read)
                .map(|d| d.request.buffers[0].clone())
                .collect();
            // The memory of its reads has another use when it answers at last.
            late.iter().for_each(|b| b.write(0, &[0xee; 512]));
            assert!(world.disks[disk].gate.lock().held > 0);
            world.open(disk);
            world.pass(Duration::from_secs(5));
            assert_eq!(world.disks[disk].gate.lock().held, 0);
            for buffer in &late {
                let mut found = [0; 512];
                buffer.read(0, &mut found);
                assert_eq!(found, [0xee; 512]);
            }
            assert!(world.is_whole());
            world.queue = None;
        }
    }
}

#[test]
fn a_machine_that_stands_still_kicks_nobody() {
    let mut world = TestArray::new(Consistency::Bitmap, TestArray::limited(false));
    world.close(0);
    let requests = (0..8).map(|n| world.read(n * 16, 16)).collect();
    let count = world.submit(requests);
    world.pass(LIMIT / 4);
    // It sleeps for a day.
    world.now += FOREVER * 24;
    world.background.work(world.now);
    assert_eq!(world.failed(), None);
    world.open(0);
    let done = world.finish(count, LIMIT);
    assert!(done.len() == count && done.iter().all(|d| world.is_right(d)));
}

#[test]
fn two_members_that_stall_are_waited_for() {
    let mut world = TestArray::new(Consistency::Bitmap, TestArray::limited(false));
    world.write_now(0, 512);
    world.close(0);
    world.close(2);
    let requests = (0..16).map(|n| world.read(n * 16, 16)).collect();
    let count = world.submit(requests);
    let early = world.finish(count, LIMIT * 10);
    assert!(early.len() < count);
    assert_eq!(world.failed(), None);
    // One of them answers; the other is kicked then.
    world.open(2);
    let rest = world.finish(count - early.len(), LIMIT * 3);
    assert_eq!(early.len() + rest.len(), count);
    assert!(early.iter().chain(&rest).all(|d| world.is_right(d)));
    assert_eq!(world.failed(), Some(0));
    // The last ones are waited for, however long it takes.
    world.close(1);
    let request = world.read(0, 64);
    world.submit(vec![request]);
    assert!(world.finish(1, LIMIT * 10).is_empty());
    world.open(1);
    let done = world.finish(1, LIMIT);
    assert!(world.is_right(&done[0]));
    assert!(!world.array.state().broken);
}

/// Cuts a member off, writes, and returns the chunks of the bitmap that it missed.
fn miss(world: &mut TestArray, disk: usize) -> Vec<u64> {
    world.write_now(0, 2048);
    world.sweep();
    world.close(disk);
    let row = 32;
    let mut chunks = Vec::new();
    for n in 0..6 {
        let sector = 4096 + n * 3000;
        world.write_now(sector, 8);
        // Rows of two data chunks: a member has half of the array's sectors.
        chunks.push(sector / row * 16 / CHUNK);
        chunks.push((sector + 7) / row * 16 / CHUNK);
    }
    assert_eq!(world.failed(), Some(disk));
    chunks.sort_unstable();
    chunks.dedup();
    chunks
}

#[test]
fn what_a_member_missed_is_written_and_no_more() {
    for consistency in POLICIES {
        for disk in 0..MEMBERS {
            let mut world = TestArray::new(consistency, TestArray::limited(false));
            let chunks = miss(&mut world, disk);
            // Requests of before are still there.
            let refused = world.re_add(disk).unwrap_err().to_string();
            assert!(refused.contains("hasn't ended there"), "{refused}");
            let again = world.disks[disk].device.clone();
            let name = world.disks[disk].name.clone();
            let refused = world.array.add(&name, &again, true, &mut sleepy());
            assert!(refused.unwrap_err().to_string().contains("hasn't ended"));
            world.open(disk);
            world.pass(Duration::from_secs(2));
            world.written(disk);
            assert_eq!(world.re_add(disk).unwrap(), ReAdded::ByBitmap);
            world.settle();
            let state = world.array.state();
            assert_eq!((state.failed, state.trouble), (None, None));
            let recovered = state.recovered.unwrap();
            assert!(recovered.by_bitmap && recovered.place == disk);
            assert_eq!(recovered.sectors, chunks.len() as u64 * CHUNK);
            // Each sector once, and of these chunks only.
            let written = world.written(disk);
            let sectors: u64 = written.iter().map(|w| w.1).sum();
            assert_eq!(sectors, chunks.len() as u64 * CHUNK);
            for (sector, sectors) in written {
                assert!(chunks.contains(&(sector / CHUNK)));
                assert!(chunks.contains(&((sector + sectors - 1) / CHUNK)));
            }
            assert!(world.is_whole());
            assert_eq!(world.mismatches(), 0);
            // The bits are cleared later, and the superblocks agree.
            world.sweep();
            assert_eq!(
                world.superblock(disk).events,
                world.superblock((disk + 1) % MEMBERS).events
            );
            assert_eq!(
                world.superblock(disk).recovered_sectors(),
                world.superblock(disk).size_sectors
            );
        }
    }
}

#[test]
fn a_member_comes_back_by_itself_while_others_write() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency, TestArray::limited(true));
        for round in 0..8 {
            let disk = world.rng.usize(..MEMBERS);
            world.close(disk);
            for _ in 0..40 {
                let mut requests = Vec::new();
                for lane in 0..8 {
                    // Each in its own part, so that none overlaps another.
                    let base = lane * world.holds.len() as u64 / 8;
                    let sector = base + world.rng.u64(..3000);
                    let sectors = world.rng.u64(1..64);
                    requests.push(world.write(sector, sectors, RequestFlags::STABLE_BUFFERS));
                }
                let count = world.submit(requests);
                let done = world.finish(count, FOREVER);
                assert!(done.iter().all(|d| d.status == Status::Ok));
                if world.failed() == Some(disk) && world.rng.u8(..8) == 0 {
                    world.open(disk);
                }
            }
            world.open(disk);
            for _ in 0..FOREVER.as_secs() {
                world.pass(Duration::from_secs(1));
                if world.failed().is_none() && !world.background.is_busy() {
                    break;
                }
            }
            let state = world.array.state();
            assert_eq!(state.failed, None, "round {round}");
            assert!(state.recovered.unwrap().by_bitmap);
            assert!(world.is_whole());
            assert_eq!(world.mismatches(), 0);
        }
    }
}

#[test]
fn without_a_bitmap_or_with_an_old_one_it_is_rebuilt_whole() {
    // Another server doesn't know what it missed.
    let mut world = TestArray::new(Consistency::Ppl, TestArray::limited(false));
    miss(&mut world, 1);
    world.open(1);
    world.pass(Duration::from_secs(2));
    world.queue = None;
    world.array.close().unwrap();
    let mut left: Vec<_> = world.disks.iter().map(named).collect();
    left.remove(1);
    world.start(prepared(left, None));
    let ReAdded::Whole(why) = world.re_add(1).unwrap() else {
        panic!("by which bitmap?");
    };
    assert!(
        why.contains("doesn't know what this device missed"),
        "{why}"
    );
    world.settle();
    assert!(!world.array.state().recovered.unwrap().by_bitmap);
    assert!(world.is_whole());
    assert_eq!(world.mismatches(), 0);
    let mut world = TestArray::new(Consistency::Bitmap, TestArray::limited(false));
    miss(&mut world, 1);
    // Another device takes the place, bits are cleared, and then that one fails.
    world.take_spare();
    world.write_now(9000, 100);
    world.sweep();
    world.open(1);
    world.pass(Duration::from_secs(2));
    let refused = world.re_add(1).unwrap_err().to_string();
    assert!(refused.contains("has another device"), "{refused}");
    world.array.fail(1).unwrap();
    world.pass(Duration::from_secs(1));
    let ReAdded::Whole(why) = world.re_add(1).unwrap() else {
        panic!("its bits are gone");
    };
    assert!(why.contains("too old"), "{why}");
    world.settle();
    assert!(world.is_whole());
    assert_eq!(world.mismatches(), 0);
}

/// Nothing can be swept while a member is missing.
#[test]
fn the_background_of_a_degraded_array_rests() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency, ArrayOptions::default());
        world.write_now(0, 512);
        let due = world.background.nap(world.now).unwrap();
        assert!(due <= Duration::from_secs(5), "{due:?}");
        world.array.fail(1).unwrap();
        world.pass(Duration::from_secs(1));
        world.write_now(0, 512);
        world.pass(Duration::from_secs(30));
        let due = world.background.nap(world.now).unwrap();
        assert!(due > Duration::from_secs(60), "{due:?}");
    }
}

/// Once another member has had the place, and bits were cleared, nobody knows what the first one missed.
#[test]
fn a_member_from_before_the_last_one_is_written_whole() {
    let mut world = TestArray::new(Consistency::Ppl, TestArray::limited(false));
    miss(&mut world, 1);
    world.open(1);
    world.take_spare();
    world.write_now(9000, 100);
    world.sweep();
    world.array.fail(1).unwrap();
    world.pass(Duration::from_secs(1));
    let ReAdded::Whole(why) = world.re_add(1).unwrap() else {
        panic!("its bits are gone");
    };
    assert!(
        why.contains("doesn't know what this device missed"),
        "{why}"
    );
    world.settle();
    assert!(world.is_whole());
    assert_eq!(world.mismatches(), 0);
}

/// Entries from before would make parity wrong that is written from then on.
#[test]
fn a_member_that_comes_back_has_an_empty_log() {
    let mut world = TestArray::new(Consistency::Ppl, TestArray::limited(false));
    let entries = |world: &TestArray| {
        let superblock = world.superblock(1);
        let Policy::Ppl(log) = superblock.policy() else {
            panic!("a log");
        };
        let mut area = vec![0; log.sectors as usize * 512];
        let mut blocking = Blocking::open(&world.disks[1].device).unwrap();
        blocking.read(log.sector, &mut area, &mut sleepy()).unwrap();
        let newest = find_newest(&area, ppl_signature(&superblock.set_uuid));
        newest.unwrap().header.entries.len()
    };
    (0..3).for_each(|row| world.write_now(row * 32, 8));
    assert!(entries(&world) > 0);
    world.array.fail(1).unwrap();
    world.pass(Duration::from_secs(1));
    assert_eq!(world.re_add(1).unwrap(), ReAdded::ByBitmap);
    world.settle();
    assert_eq!(entries(&world), 0);
    assert!(world.is_whole());
}

/// All that an earlier server wrote is flushed when the array is made ready.
#[test]
fn after_a_crash_a_member_misses_only_what_is_written_without_it() {
    let mut world = TestArray::new(Consistency::Ppl, TestArray::limited(false));
    world.write_now(0, 2048);
    world.queue = None;
    let all = world.disks.iter().map(named).collect();
    world.start(prepared(all, None));
    world.close(1);
    world.write_now(4096, 8);
    world.open(1);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.re_add(1).unwrap(), ReAdded::ByBitmap);
    world.settle();
    assert_eq!(world.array.state().recovered.unwrap().sectors, CHUNK);
    assert!(world.is_whole());
    assert_eq!(world.mismatches(), 0);
}

#[test]
fn only_the_device_that_was_kicked_comes_back_by_itself() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency, TestArray::limited(true));
        miss(&mut world, 2);
        assert_eq!(world.array.state().away, [(2, "2".to_owned())]);
        // Somebody has used it elsewhere meanwhile.
        world.open(2);
        let mut used = world.superblock(2);
        used.events += 7;
        let device = Arc::clone(&world.disks[2].device);
        let mut blocking = Blocking::open(&device).unwrap();
        blocking
            .write(SUPER_SECTOR, &used.encode(), &mut sleepy())
            .unwrap();
        world.pass(Duration::from_secs(60));
        assert_eq!(world.failed(), Some(2));
        assert!(world.array.state().away.is_empty());
        let refused = world.re_add(2).unwrap_err().to_string();
        assert!(refused.contains("used elsewhere"), "{refused}");
    }
}

#[test]
fn a_member_that_stalls_while_it_comes_back_is_kicked_again() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency, TestArray::limited(true));
        miss(&mut world, 0);
        world.array.set_speed(1, 1).unwrap();
        world.open(0);
        for _ in 0..100 {
            world.pass(Duration::from_millis(100));
            if world.rebuilding() == Some(0) {
                break;
            }
        }
        assert_eq!(world.rebuilding(), Some(0));
        world.close(0);
        let requests = (0..32).map(|n| world.write(n * 600, 8, RequestFlags::empty()));
        let requests = requests.collect();
        let count = world.submit(requests);
        let done = world.finish(count, LIMIT * 3);
        assert_eq!(done.len(), count);
        // No request has to wait for it, perhaps.
        for _ in 0..600 {
            if world.rebuilding().is_none() {
                break;
            }
            world.pass(Duration::from_millis(100));
        }
        assert_eq!(world.rebuilding(), None, "{:?}", world.array.state().sync);
        world.array.set_speed(1000, 200_000).unwrap();
        world.open(0);
        world.pass(Duration::from_secs(60));
        world.settle();
        assert_eq!(world.failed(), None);
        assert!(world.is_whole());
        assert_eq!(world.mismatches(), 0);
        let rebuilding = |m: &pvblk_raid5::ArrayMember| m.state != MemberState::InSync;
        assert!(!world.array.state().members.iter().any(rebuilding));
    }
}

#[test]
fn a_queue_that_is_closed_leaves_abandoned_requests_behind() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency, TestArray::limited(true));
        miss(&mut world, 1);
        assert!(world.disks[1].gate.lock().held > 0);
        let begin = std::time::Instant::now();
        world.queue = None;
        // It doesn't wait for them: that would take 10 s, and end the array.
        assert!(!world.array.state().broken);
        assert!(begin.elapsed() < Duration::from_secs(9));
        world.open(1);
        world.pass(Duration::from_secs(60));
        world.settle();
        assert_eq!(world.failed(), None);
        let device: Arc<dyn BlockDevice> = world.array.clone();
        world.queue = Some(Queue::open(&device, &QueueContext::new(64)).unwrap());
        assert!(world.is_whole());
        assert_eq!(world.mismatches(), 0);
    }
}
