//! Memory that an array keeps of members that are gone: none that grows with their number.

#[path = "support/started.rs"]
mod started;

use parking_lot::Mutex;
use pvblk_block::memory::bill;
use pvblk_block::{BlockDevice, Buffer, Op, Queue, QueueContext, Request, Status};
use pvblk_raid5::{ArrayOptions, BackgroundWork, Consistency, CreateOptions, Raid5, sleepy};
use pvblk_sys::Poller;
use started::prepared;
use std::sync::Arc;
use std::time::Duration;

/// Counts the heap of this test's process.
#[global_allocator]
static HEAP: pvblk_sys::alloc::Counting = pvblk_sys::alloc::Counting;

const MEMBER: &str = "mem:4M";

/// The heap is the process's: one test at a time.
static ONE: Mutex<()> = Mutex::new(());

fn member(name: &str) -> (String, Arc<dyn BlockDevice>) {
    (name.into(), pvblk_volume::open(MEMBER).unwrap())
}

struct TestArray {
    array: Arc<Raid5>,
    /// At place 1, at first.
    member: Arc<dyn BlockDevice>,
    background: BackgroundWork,
    queue: Queue,
    now: Duration,
}

impl TestArray {
    fn new(consistency: Consistency) -> TestArray {
        let disks: Vec<_> = ["0", "1", "2"].map(member).into();
        let mut options = CreateOptions::new("test:0");
        options.chunk_sectors = 16;
        options.consistency = consistency;
        let member = Arc::clone(&disks[1].1);
        let assembly = prepared(disks, Some(&options));
        let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
        let background = BackgroundWork::new(&array);
        let device = Arc::clone(&array) as Arc<dyn BlockDevice>;
        TestArray {
            background,
            queue: Queue::open(&device, &QueueContext::new(4)).unwrap(),
            array,
            member,
            now: Duration::ZERO,
        }
    }

    /// Until nothing is under way.
    fn settle(&mut self) {
        for _ in 0..1_000_000 {
            self.now += Duration::from_millis(50);
            self.background.work(self.now);
            if !self.background.is_busy() {
                return;
            }
        }
        panic!("it never ends: {:?}", self.array.state().sync);
    }

    fn run(&mut self, op: Op, sector: u64, byte: u8) -> Buffer {
        let buffer = Buffer::anonymous(4096).unwrap();
        buffer.write(0, &[byte; 4096]);
        let request = Request::with_buffers(op, sector, vec![buffer.clone()], 0);
        self.queue.submit(&mut vec![request]);
        let mut done = Vec::new();
        for _ in 0..1_000_000 {
            self.queue.poll(&mut done);
            if let Some(completion) = done.pop() {
                assert_eq!(completion.status, Status::Ok);
                return buffer;
            }
            self.background.work(self.now);
        }
        panic!("a request never ends");
    }

    /// The member at place 1 fails, and another device takes its place.
    fn cycle(&mut self, n: usize) {
        let (name, device) = member(&format!("new {n}"));
        self.array.fail(1).unwrap();
        self.settle();
        assert_eq!(self.array.state().failed, Some(1));
        self.run(Op::Write, 0, n as u8);
        self.array
            .add(&name, &device, false, &mut sleepy())
            .unwrap();
        self.settle();
        assert_eq!(self.array.state().failed, None);
        assert_eq!(self.array.places()[1].as_deref(), Some(name.as_str()));
        for sector in [0, 16] {
            let found = self.run(Op::Read, sector, 0);
            let mut bytes = [0; 4096];
            found.read(0, &mut bytes);
            assert!(bytes == [if sector == 0 { n as u8 } else { 0 }; 4096]);
        }
    }
}

/// Bytes of the heap, bytes on the memory bill, and lines of the bill.
fn held() -> (usize, u64, usize) {
    let bill = bill();
    let bytes = bill.iter().map(|line| line.live_bytes).sum();
    (pvblk_sys::alloc::live_bytes(), bytes, bill.len())
}

#[test]
fn members_that_are_replaced_leave_nothing_behind() {
    let _one = ONE.lock();
    // Of the first more than there are numbers for devices.
    for (consistency, cycles) in [(Consistency::Ppl, 280), (Consistency::Bitmap, 40)] {
        let mut world = TestArray::new(consistency);
        world.member = pvblk_volume::open("null").unwrap();
        (0..20).for_each(|n| world.cycle(n));
        let before = held();
        (20..20 + cycles).for_each(|n| world.cycle(n));
        let after = held();
        // Each superblock has a table with the numbers, of two or four bytes each.
        let grown = after.0.saturating_sub(before.0);
        assert!(
            grown < 4 << 10,
            "{consistency:?}: {grown} bytes more after {cycles} cycles"
        );
        assert_eq!(
            (before.1, before.2),
            (after.1, after.2),
            "on the memory bill"
        );
        let numbers = world.array.state().superblock.roles.len();
        assert!(numbers <= 256, "{numbers} numbers of devices");
    }
}

#[test]
fn who_is_at_rest_lets_go_of_a_member_that_failed() {
    let _one = ONE.lock();
    let mut world = TestArray::new(Consistency::Ppl);
    world.run(Op::Write, 0, 7);
    let failed = Arc::downgrade(&world.member);
    let poller = Poller::new().unwrap();
    let fd = world.queue.wait_fd().unwrap();
    poller.add(fd, 0, false).unwrap();
    world.member = pvblk_volume::open("null").unwrap();
    world.array.fail(1).unwrap();
    world.settle();
    // As a worker does with a lane that sleeps.
    let mut events = Vec::new();
    poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
    assert_eq!(events.len(), 1, "nobody told it");
    world.queue.woken();
    assert_eq!(failed.strong_count(), 0, "the member is still open");
    world.run(Op::Write, 16, 8);
}
