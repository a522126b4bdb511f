//! vhost-user-blk against a front end of our own: data, queues, front ends in turn, memory that comes and goes, resizes.

mod vhost_support;

use pvblk_protocol::vhost_user::{Code, ConfigHead, MemoryRegion, SingleRegion, features, flags};
use pvblk_protocol::virtio::Driver;
use pvblk_sys::{Region, fdpass};
use pvblk_testing::wait;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost_support::{Bed, ENTRIES, Front, GUEST, QUEUE_MEMORY, USER};
use zerocopy::{FromBytes, IntoBytes};

#[test]
fn what_is_written_is_read_on_every_queue() {
    let bed = Bed::new();
    let mut guest = bed.guest("a", 4);
    for queue in 0..4 {
        let data: Vec<u8> = (0..8192)
            .map(|i| (i / 512 + u32::from(queue) * 16) as u8)
            .collect();
        guest.write(queue, u64::from(queue) * 100, &data);
    }
    for queue in 0..4u16 {
        // By another queue than wrote it.
        let got = guest.read((queue + 1) % 4, u64::from(queue) * 100, 8192);
        for (i, sector) in got.chunks(512).enumerate() {
            assert_eq!(sector, [(i as u32 + u32::from(queue) * 16) as u8; 512]);
        }
    }
    assert_eq!(guest.io(0, 4, 0, &[], 0).0, 0);
    assert_eq!(bed.a.flushes.load(Ordering::Relaxed), 1);
    // Discard and write-zeroes.
    for (kind, sector) in [(11u32, 1u64), (13, 3)] {
        let range = [
            &sector.to_le_bytes()[..],
            &1u32.to_le_bytes(),
            &0u32.to_le_bytes(),
        ]
        .concat();
        assert_eq!(guest.io(1, kind, 0, &range, 0).0, 0);
    }
    let got = guest.read(2, 0, 2048 + 512);
    let firsts: Vec<u8> = got.chunks(512).map(|s| s[0]).collect();
    assert_eq!(firsts, [0, 0, 2, 0, 4]);
    assert_eq!(
        guest.io(0, 8, 0, &[], 20).1,
        *b"a\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    );
    // Outside the disk, and what nobody knows.
    assert_eq!(guest.io(0, 0, 2048, &[], 512).0, 1);
    assert_eq!(guest.io(0, 99, 0, &[], 0).0, 2);
}

#[test]
fn many_requests_in_flight_come_back_once() {
    let bed = Bed::new();
    let mut guest = bed.guest("a", 2);
    for round in 0..50u64 {
        for queue in 0..2u16 {
            for head in 0..ENTRIES {
                let driver = &guest.drivers[usize::from(queue)];
                let offset = driver.data_offset() + usize::from(head) * 4096;
                let kind = u32::from(round % 2 == 0);
                driver
                    .region()
                    .write(offset, &[(round / 2) as u8 + head as u8; 512]);
                if kind == 0 {
                    driver.region().write(offset, &[0xee; 512]);
                }
                let sector = u64::from(queue) * 1000 + u64::from(head);
                driver.build(
                    head,
                    kind,
                    sector,
                    &[(driver.at(offset), 512, kind == 0)],
                    true,
                );
                guest.submit(queue, head);
            }
        }
        for queue in 0..2 {
            let mut seen = [false; ENTRIES as usize];
            for _ in 0..ENTRIES {
                let (head, _) = guest.wait_used(queue);
                assert!(!std::mem::replace(&mut seen[head as usize], true), "twice");
                let driver = &guest.drivers[usize::from(queue)];
                assert_eq!(driver.status(head as u16), 0);
                let mut got = [0; 512];
                driver
                    .region()
                    .read(driver.data_offset() + head as usize * 4096, &mut got);
                assert_eq!(got, [(round / 2) as u8 + head as u8; 512]);
            }
        }
    }
}

#[test]
fn front_ends_come_one_after_another() {
    let bed = Bed::new();
    let mut first = bed.guest("a", 1);
    first.write(0, 7, &[7; 512]);
    let mut second = bed.front("a");
    // It isn't heard while the first is there; another disk's is.
    bed.guest("b", 1).write(0, 0, &[1; 512]);
    second.send(Code::GetFeatures as u32, 0, &[], &[]);
    bed.a.hold.store(true, Ordering::Release);
    let driver = &first.drivers[0];
    driver.build(
        0,
        1,
        8,
        &[(driver.at(driver.data_offset()), 512, false)],
        false,
    );
    first.submit(0, 0);
    wait("the request is at the device", || {
        bed.a.held.load(Ordering::Acquire) == 1
    });
    drop(first);
    let waits = second
        .socket
        .set_read_timeout(Some(std::time::Duration::from_millis(50)));
    waits.unwrap();
    let mut byte = [0];
    assert!(
        fdpass::recv(second.socket.as_fd(), &mut byte, true).is_err(),
        "heard while requests are in flight"
    );
    second
        .socket
        .set_read_timeout(Some(vhost_support::WAIT))
        .unwrap();
    bed.a.hold.store(false, Ordering::Release);
    assert_eq!(second.answer().unwrap().0, Code::GetFeatures as u32);
    second.negotiate();
    second.add_memory();
    second.start(0, 0);
    assert_eq!(second.read(0, 7, 512), [7; 512]);
}

#[test]
fn a_stopped_ring_tells_where_it_stopped_and_goes_on_from_there() {
    let bed = Bed::new();
    let mut guest = bed.guest("a", 2);
    for i in 0..5 {
        guest.write(0, i, &[i as u8; 512]);
    }
    bed.a.hold.store(true, Ordering::Release);
    let driver = &guest.drivers[0];
    driver.build(
        0,
        1,
        9,
        &[(driver.at(driver.data_offset()), 512, false)],
        false,
    );
    guest.submit(0, 0);
    wait("the request is at the device", || {
        bed.a.held.load(Ordering::Acquire) == 1
    });
    guest.send(Code::GetVringBase as u32, 0, &Front::state(0, 0), &[]);
    guest.send(Code::GetQueueNum as u32, 0, &[], &[]);
    std::thread::sleep(std::time::Duration::from_millis(20));
    bed.a.hold.store(false, Ordering::Release);
    // In order: first the base, when what was in flight is answered.
    let (code, body, _) = guest.answer().unwrap();
    assert_eq!(
        (code, &body[4..]),
        (Code::GetVringBase as u32, &[6, 0, 0, 0][..])
    );
    assert_eq!(guest.answer().unwrap().0, Code::GetQueueNum as u32);
    assert_eq!(guest.wait_used(0), (0, 1));
    guest.start(0, 6);
    assert_eq!(guest.read(0, 4, 512), [4; 512]);
    // Disabled and enabled again.
    guest.must(Code::SetVringEnable, &Front::state(0, 0), &[]);
    guest.must(Code::SetVringEnable, &Front::state(0, 1), &[]);
    assert_eq!(guest.read(0, 3, 512), [3; 512]);
}

#[test]
fn memory_comes_and_goes_while_rings_run() {
    let bed = Bed::new();
    let mut guest = bed.guest("a", 1);
    guest.write(0, 0, &[5; 512]);
    // A region that isn't a queue's own goes away: its addresses are no memory any more.
    let away = guest.single(3);
    guest.must(Code::RemMemReg, away.as_bytes(), &[]);
    guest.write(0, 1, &[6; 512]);
    // It comes back at another address.
    let mut moved: SingleRegion = away;
    moved.region.guest_address = 1 << 35;
    moved.region.user_address = 1 << 45;
    guest.must(Code::AddMemReg, moved.as_bytes(), &[guest.memory.as_fd()]);
    let driver = &guest.drivers[0];
    driver.build(0, 0, 0, &[(1 << 35, 512, true)], true);
    guest.submit(0, 0);
    assert_eq!(guest.wait_used(0), (0, 513));
    let mut got = [0; 512];
    guest.drivers[3].region().read(0, &mut got);
    assert_eq!(got, [5; 512]);
    // The old way: all at once.
    let table: Vec<u8> = (0..4)
        .flat_map(|i| guest.region(i).as_bytes().to_vec())
        .collect();
    let table = [&4u64.to_le_bytes()[..], &table].concat();
    guest.must(Code::SetMemTable, &table, &[guest.memory.as_fd(); 4]);
    assert_eq!(guest.read(0, 1, 512), [6; 512]);
}

/// libblkio shares its rings in a file of 15,120 bytes: the last page of the mapping is behind its end in part.
#[test]
fn memory_that_ends_inside_a_page() {
    const LEN: usize = 15_120;
    let bed = Bed::new();
    let mut guest = bed.front("a");
    guest.negotiate();
    let file = memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, LEN as u64).unwrap();
    let region = |size: u64| MemoryRegion {
        guest_address: GUEST,
        size,
        user_address: USER,
        file_offset: 0,
    };
    let single = |size| SingleRegion {
        padding: 0,
        region: region(size),
    };
    guest.must(
        Code::AddMemReg,
        single(LEN as u64).as_bytes(),
        &[file.as_fd()],
    );
    // Ring and data in it; a driver of whole pages sees the same.
    let whole = Region::shared(file.as_fd(), 0, LEN.next_multiple_of(4096), true).unwrap();
    guest.drivers[0] = Driver::new(Arc::new(whole), GUEST, 8, true);
    let data = guest.drivers[0].data_offset();
    assert!(data + 1024 <= LEN, "{data}");
    guest.must(Code::SetVringNum, &Front::state(0, 8), &[]);
    guest.must(Code::SetVringAddr, guest.place(0).as_bytes(), &[]);
    guest.must(
        Code::SetVringKick,
        &0u64.to_le_bytes(),
        &[guest.kicks[0].as_fd()],
    );
    guest.must(
        Code::SetVringCall,
        &0u64.to_le_bytes(),
        &[guest.calls[0].as_fd()],
    );
    guest.must(
        Code::SetVringErr,
        &0u64.to_le_bytes(),
        &[guest.errs[0].as_fd()],
    );
    guest.must(Code::SetVringEnable, &Front::state(0, 1), &[]);
    for sector in 0..8 {
        guest.write(0, sector, &[sector as u8 + 1; 512]);
    }
    for sector in 0..8 {
        assert_eq!(guest.read(0, sector, 512), [sector as u8 + 1; 512]);
    }
    // Up to the last byte, and not behind it.
    let last = GUEST + LEN as u64 - 512;
    guest.drivers[0].build(0, 0, 3, &[(last, 512, true)], true);
    guest.submit(0, 0);
    assert_eq!(guest.wait_used(0), (0, 513));
    let mut got = [0; 512];
    guest.drivers[0].region().read(LEN - 512, &mut got);
    assert_eq!(got, [4; 512]);
    guest.drivers[0].build(0, 0, 3, &[(last + 1, 512, true)], true);
    guest.submit(0, 0);
    wait("the ring is stopped", || guest.errs[0].drain());
}

#[test]
fn buffers_outlive_their_region() {
    let bed = Bed::new();
    let mut guest = bed.guest("a", 1);
    bed.a.hold.store(true, Ordering::Release);
    let far = GUEST + 3 * QUEUE_MEMORY as u64;
    guest.drivers[3].region().write(0, &[9; 512]);
    guest.drivers[0].build(0, 1, 5, &[(far, 512, false)], true);
    guest.submit(0, 0);
    wait("the request is at the device", || {
        bed.a.held.load(Ordering::Acquire) == 1
    });
    guest.must(Code::RemMemReg, guest.single(3).as_bytes(), &[]);
    bed.a.hold.store(false, Ordering::Release);
    assert_eq!(guest.wait_used(0), (0, 1));
    assert_eq!(guest.read(0, 5, 512), [9; 512]);
}

#[test]
fn a_resize_is_told_and_seen() {
    let bed = Bed::new();
    let guest = bed.guest("a", 1);
    let capacity = |guest: &Front| {
        let head = ConfigHead {
            offset: 0,
            size: 60,
            flags: 0,
        };
        let body = guest.ask(Code::GetConfig, &[head.as_bytes(), &[0; 60]].concat());
        assert_eq!(ConfigHead::read_from_bytes(&body[..12]).unwrap(), head);
        u64::from_le_bytes(body[12..20].try_into().unwrap())
    };
    assert_eq!(capacity(&guest), 2048);
    let flags_of = SocketFlags::CLOEXEC;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, flags_of, None).unwrap();
    guest.must(Code::SetBackendReqFd, &[], &[theirs.as_fd()]);
    bed.a.resize(4096);
    let mut note = [0; 64];
    let (n, _) = fdpass::recv(ours.as_fd(), &mut note, true).unwrap();
    assert_eq!(note[..n], [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(capacity(&guest), 4096);
    // Nothing in it can be written, but what is there may be said again.
    let head = ConfigHead {
        offset: 20,
        size: 4,
        flags: 0,
    };
    let said =
        |bytes: [u8; 4]| guest.tell(Code::SetConfig, &[head.as_bytes(), &bytes].concat(), &[]);
    assert_eq!(said(512u32.to_le_bytes()), Some(true));
    assert_eq!(said(4096u32.to_le_bytes()), Some(false));
}

#[test]
fn a_guest_without_event_index_and_kicks_is_served_too() {
    let bed = Bed::new();
    let mut guest = bed.front("a");
    guest.negotiate();
    // Neither event index nor indirect descriptors; the kick is polled for.
    let few = guest.taken & !(1 << 28 | 1 << 29);
    guest.must(Code::SetFeatures, &few.to_le_bytes(), &[]);
    guest.add_memory();
    guest.drivers.iter_mut().for_each(|d| d.event_index = false);
    guest.must(Code::SetVringNum, &Front::state(0, ENTRIES.into()), &[]);
    guest.must(Code::SetVringAddr, guest.place(0).as_bytes(), &[]);
    guest.must(
        Code::SetVringCall,
        &0u64.to_le_bytes(),
        &[guest.calls[0].as_fd()],
    );
    guest.must(Code::SetVringEnable, &Front::state(0, 1), &[]);
    guest.must(Code::SetVringKick, &256u64.to_le_bytes(), &[]);
    for i in 0..10u64 {
        let driver = &guest.drivers[0];
        let at = driver.data_offset();
        driver.region().write(at, &[i as u8; 512]);
        driver.build(0, 1, i, &[(driver.at(at), 512, false)], false);
        guest.drivers[0].make_available(0);
        assert_eq!(guest.wait_used(0), (0, 1));
    }
}

#[test]
fn a_server_that_stops_answers_what_is_in_flight() {
    let mut bed = Bed::new();
    let mut guest = bed.guest("a", 1);
    let driver = &guest.drivers[0];
    driver.build(
        0,
        1,
        9,
        &[(driver.at(driver.data_offset()), 512, false)],
        false,
    );
    bed.a.hold.store(true, Ordering::Release);
    guest.submit(0, 0);
    wait("the request is at the device", || {
        bed.a.held.load(Ordering::Acquire) == 1
    });
    let ram = std::sync::Arc::clone(&bed.a);
    let free = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(30));
        ram.hold.store(false, Ordering::Release);
    });
    bed.server.stop();
    free.join().unwrap();
    assert_eq!(guest.wait_used(0), (0, 1));
    assert!(guest.is_closed());
}

#[test]
fn what_is_told_is_what_is_offered() {
    let bed = Bed::new();
    let guest = bed.guest("a", 0);
    assert_eq!(guest.ask(Code::GetQueueNum, &[]), 4u64.to_le_bytes());
    assert_eq!(guest.ask(Code::GetMaxMemSlots, &[]), 128u64.to_le_bytes());
    assert_eq!(features::OFFERED & 1 << 1, 0, "no migration");
    assert_eq!(flags::NEED_REPLY, 8);
    assert_eq!(USER % 4096, 0);
}
