//! Queues of an array that are closed with work or sleep, and superblocks.

#[path = "support/failing.rs"]
mod failing;
#[path = "support/gate.rs"]
mod gate;
#[path = "support/started.rs"]
mod started;

use failing::Failing;
use gate::{Gate, GateState};
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Buffer, Close, Completion, Op, Queue, QueueContext, Readiness, Request, Status,
};
use pvblk_raid5::{
    ArrayOptions, BackgroundWork, Consistency, CreateOptions, Raid5, WritePath, read_superblock,
    sleepy,
};
use pvblk_sys::Poller;
use started::prepared;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

type Named = (String, Arc<dyn BlockDevice>);

fn disks() -> Vec<Named> {
    let disk = |n: usize| (n.to_string(), pvblk_volume::open("mem:16M").unwrap());
    (0..3).map(disk).collect()
}

fn how(consistency: Consistency) -> CreateOptions {
    let mut how = CreateOptions::new("test:0");
    how.chunk_sectors = 16;
    how.consistency = consistency;
    how.assume_clean = true;
    how
}

fn start(disks: &[Named], new: Option<&CreateOptions>) -> Arc<Raid5> {
    let assembly = prepared(disks.to_vec(), new);
    Raid5::start(assembly, &ArrayOptions::default()).unwrap()
}

fn queue(array: &Arc<Raid5>) -> Queue {
    let device: Arc<dyn BlockDevice> = array.clone();
    Queue::open(&device, &QueueContext::new(16)).unwrap()
}

fn write(sector: u64, byte: u8) -> Box<Request> {
    let buffer = Buffer::anonymous(4096).unwrap();
    buffer.write(0, &[byte; 4096]);
    Request::with_buffers(Op::Write, sector, vec![buffer], 0)
}

/// Until a request is done; returns its data.
fn finish(queue: &mut Queue, background: &mut BackgroundWork) -> Vec<u8> {
    let mut done = Vec::new();
    for _ in 0..1_000_000 {
        background.work(Duration::ZERO);
        queue.poll(&mut done);
        if let Some(Completion { request, status }) = done.pop() {
            assert_eq!(status, Status::Ok);
            return request.buffers[0].to_vec();
        }
    }
    panic!("it never ends");
}

fn read(queue: &mut Queue, background: &mut BackgroundWork, sector: u64) -> Vec<u8> {
    let buffer = Buffer::anonymous(4096).unwrap();
    let request = Request::with_buffers(Op::Read, sector, vec![buffer], 0);
    queue.submit(&mut vec![request]);
    finish(queue, background)
}

#[test]
fn the_background_finishes_a_queue_that_is_closed_with_work() {
    let disks = disks();
    drop(start(&disks, Some(&how(Consistency::Ppl))));
    let (gated, gates): (Vec<Named>, Vec<Arc<Mutex<GateState>>>) = disks
        .iter()
        .map(|(name, disk)| {
            let (gate, state) = Gate::over(disk);
            ((name.clone(), gate), state)
        })
        .unzip();
    let array = start(&gated, None);
    let mut background = BackgroundWork::new(&array);
    let (mut first, mut second) = (queue(&array), queue(&array));
    first.submit(&mut vec![write(64, 1)]);
    finish(&mut first, &mut background);
    gates.iter().for_each(|gate| gate.lock().closed = true);
    // The stripe is the first queue's, whose reads are held; the second waits for it.
    first.submit(&mut vec![write(0, 2)]);
    assert!(gates.iter().any(|gate| gate.lock().held > 0));
    second.submit(&mut vec![write(8, 3)]);
    drop(first);
    let mut done = Vec::new();
    (0..100).for_each(|_| {
        background.work(Duration::ZERO);
        assert_eq!(second.poll(&mut done), 0);
    });
    gates.iter().for_each(|gate| gate.lock().closed = false);
    finish(&mut second, &mut background);
    assert_eq!(read(&mut second, &mut background, 0), [2; 4096]);
    assert_eq!(read(&mut second, &mut background, 8), [3; 4096]);
    drop(second);
    array.close().unwrap();
    let (_, superblock) = clean(&disks);
    assert!(superblock, "it ended in order");
}

#[test]
fn a_stream_ends_though_its_queue_was_closed() {
    let disks = disks();
    let array = start(&disks, Some(&how(Consistency::Resync)));
    array.set_write_path(WritePath::StripeQueue);
    let mut background = BackgroundWork::new(&array);
    let mut queue = queue(&array);
    queue.submit(&mut vec![write(320, 1)]);
    finish(&mut queue, &mut background);
    // A row has four blocks. The first is written at once, and nobody takes its completions; the second isn't complete.
    queue.submit(&mut (0..7).map(|block| write(block * 8, 2)).collect());
    drop(queue);
    // Its chunk is marked first.
    (0..100).for_each(|_| background.work(Duration::ZERO));
    assert!(!background.is_busy());
    drop(background);
    array.close().unwrap();
    assert_eq!(clean(&disks), (true, true), "it ended in order");
}

/// True if superblocks are equal in their events, and true if they are clean.
fn clean(disks: &[Named]) -> (bool, bool) {
    let read = |(name, disk): &Named| read_superblock(name, disk, &mut sleepy()).unwrap();
    let all: Vec<_> = disks.iter().map(read).collect();
    (
        all.iter().all(|s| s.events == all[0].events),
        all.iter().all(|s| s.is_clean()),
    )
}

#[test]
fn superblocks_are_dirty_while_it_writes_and_name_a_member_that_failed() {
    let disks = disks();
    let array = start(&disks, Some(&how(Consistency::Ppl)));
    let mut background = BackgroundWork::new(&array);
    let mut queue = queue(&array);
    assert_eq!(read(&mut queue, &mut background, 0), [0; 4096]);
    assert_eq!(clean(&disks), (true, true), "it only read");
    queue.submit(&mut vec![write(0, 1)]);
    finish(&mut queue, &mut background);
    assert_eq!(clean(&disks), (true, false), "it writes");
    drop(queue);
    array.close().unwrap();
    assert_eq!(clean(&disks), (true, true));

    let dead = Arc::new(AtomicBool::new(false));
    let fails = Arc::clone(&dead);
    let mut failing = disks.clone();
    failing[1].1 = Failing::over(
        &disks[1].1,
        // It would take superblocks, so they have to leave it out.
        Arc::new(move |r| r.sector > 16 && fails.load(Ordering::Relaxed)),
    );
    let array = start(&failing, None);
    let mut background = BackgroundWork::new(&array);
    let mut queue = crate::queue(&array);
    dead.store(true, Ordering::Relaxed);
    (0..8).for_each(|n| {
        queue.submit(&mut vec![write(8 * n, 7)]);
        finish(&mut queue, &mut background);
    });
    assert_eq!(array.failed(), Some(1));
    drop(queue);
    array.close().unwrap();
    // The member that failed is there again, and isn't taken.
    let assembly = prepared(disks.clone(), None);
    assert_eq!(assembly.failed(), Some(1));
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    let mut background = BackgroundWork::new(&array);
    let mut queue = crate::queue(&array);
    for n in 0..8 {
        assert_eq!(read(&mut queue, &mut background, 8 * n), [7; 4096]);
    }
}

/// Users that sleep between requests, on stripes of each other's.
#[test]
fn queues_that_sleep_are_woken() {
    let array = start(&disks(), Some(&how(Consistency::Ppl)));
    array.keep().unwrap();
    let gate = Barrier::new(3);
    std::thread::scope(|scope| {
        for me in 0..3 {
            let mut queue = queue(&array);
            let gate = &gate;
            scope.spawn(move || {
                let poller = Poller::new().unwrap();
                let fd = queue.wait_fd().unwrap();
                poller.add(fd, 0, false).unwrap();
                let (mut done, mut events) = (Vec::new(), Vec::new());
                gate.wait();
                for n in 0..300_u64 {
                    queue.submit(&mut vec![write(n % 4 * 16 + me % 2 * 8, me as u8)]);
                    while queue.poll(&mut done) == 0 {
                        if let Readiness::Wait(_) = queue.arm() {
                            poller.wait(&mut events, None).unwrap();
                            events.clear();
                            queue.woken();
                        }
                    }
                    assert_eq!(done.pop().unwrap().status, Status::Ok);
                }
            });
        }
    });
    array.close().unwrap();
}
