//! Members come back while the array serves.

use super::array::{CHUNK, FOREVER, Kind, LIMIT, MEMBERS, TestArray, miss, named};
use super::started::prepared;
use pvblk_block::{BlockDevice, Close, Queue, QueueContext, RequestFlags, Status};
use pvblk_raid5::{
    ArrayOptions, Blocking, MemberState, Policy, ReAdded, SUPER_SECTOR, find_newest, ppl_signature,
    sleepy,
};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn what_a_member_missed_is_written_and_no_more() {
    for kind in Kind::ALL {
        for disk in 0..MEMBERS {
            let mut world = TestArray::new(kind, TestArray::limited(false));
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
    for kind in Kind::ALL {
        let mut world = TestArray::new(kind, TestArray::limited(true));
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
    let mut world = TestArray::new(Kind::LOG, TestArray::limited(false));
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
    let mut world = TestArray::new(Kind::BITMAP, TestArray::limited(false));
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
    for kind in Kind::ALL {
        let mut world = TestArray::new(kind, ArrayOptions::default());
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
    let mut world = TestArray::new(Kind::LOG, TestArray::limited(false));
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
    let mut world = TestArray::new(Kind::LOG, TestArray::limited(false));
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
    let mut world = TestArray::new(Kind::LOG, TestArray::limited(false));
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
    for kind in Kind::ALL {
        let mut world = TestArray::new(kind, TestArray::limited(true));
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
    for kind in Kind::ALL {
        let mut world = TestArray::new(kind, TestArray::limited(true));
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
    for kind in Kind::ALL {
        let mut world = TestArray::new(kind, TestArray::limited(true));
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
