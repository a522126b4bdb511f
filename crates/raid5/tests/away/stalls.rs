//! Members that stall are waited for as long as they may, and kicked then.

use super::array::{FOREVER, Kind, LIMIT, MEMBERS, TestArray};
use pvblk_block::{Buffer, Op, RequestFlags, Status};
use pvblk_raid5::{ArrayOptions, Role};
use std::time::Duration;

#[test]
fn without_a_limit_a_member_is_waited_for() {
    let mut world = TestArray::new(Kind::BITMAP, ArrayOptions::default());
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
    for kind in Kind::ALL {
        for disk in 0..MEMBERS {
            let mut world = TestArray::new(kind, TestArray::limited(false));
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
    let mut world = TestArray::new(Kind::BITMAP, TestArray::limited(false));
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
    let mut world = TestArray::new(Kind::BITMAP, TestArray::limited(false));
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
