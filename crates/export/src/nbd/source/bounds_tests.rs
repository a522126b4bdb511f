//! Bounds of the memory that a client can make the server hold, and of the time.

use super::*;
use crate::nbd::shares::DiskShare;
use crate::nbd::testing::{MemDevice, Rig, pattern};
use pvblk_backend::Budget;
use pvblk_block::Op;
use pvblk_protocol::nbd::{Mode, cflag, err};
use std::sync::atomic::Ordering;

const READ: u16 = 0;
const WRITE: u16 = 1;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const ZEROES: u16 = 6;
const STATUS: u16 = 7;
const MIB: usize = 1 << 20;

#[test]
fn parts_of_blocks_are_written_and_the_rest_stays() {
    for (block, native, mode) in [
        (512, true, Mode::Simple),
        (4096, false, Mode::Structured),
        (512, false, Mode::Extended),
    ] {
        let limits = Limits {
            logical_sector_bytes: block as u32,
            write_zeroes: native,
            ..Limits::default()
        };
        let device = MemDevice::with(4 * MIB, limits);
        let mut model = pattern(4 * MIB, 1);
        device.data.lock().copy_from_slice(&model);
        let mut rig = Rig::new(&device, mode, &NbdConfig::default());
        let new = pattern(3 * MIB, 99);
        for (offset, len) in [
            (0, 1),
            (block - 1, 2),
            (7, block),
            (block, block + 1),
            (3 * block - 5, 5),
            (12345, 300_001),
            (1, 3 * MIB - 1),
            (4 * MIB - 1, 1),
        ] {
            let (at, n) = (offset as u64, len as u32);
            assert_eq!(rig.call(WRITE, cflag::FUA, at, n, &new[..len]).error, 0);
            model[offset..offset + len].copy_from_slice(&new[..len]);
            assert!(*device.data.lock() == model, "write {offset} {len}");
            assert!(rig.call(READ, 0, at, n, &[]).data == new[..len]);
        }
        for (offset, len) in [
            (5, 1),
            (block - 1, block + 2),
            (block, block),
            (999, 2 * MIB),
        ] {
            let (at, n) = (offset as u64, len as u32);
            device.log.lock().clear();
            assert_eq!(rig.call(ZEROES, cflag::FUA, at, n, &[]).error, 0);
            model[offset..offset + len].fill(0);
            assert!(*device.data.lock() == model, "zeroes {offset} {len}");
            let is_durable = device.log.lock().iter().any(|(op, flags)| {
                *op == Op::Flush || flags.contains(pvblk_block::RequestFlags::FUA)
            });
            assert!(is_durable);
        }
        // What isn't a whole block stays.
        assert_eq!(
            rig.call(TRIM, 0, 2 * MIB as u64 + 1, 2 * block as u32, &[])
                .error,
            0
        );
        let from = 2 * MIB + block;
        model[from..from + block].fill(0);
        assert_eq!(
            rig.call(TRIM, cflag::FUA, 9, block as u32 - 9, &[]).error,
            0
        );
        assert!(*device.data.lock() == model, "trim");
        if mode == Mode::Structured {
            let r = rig.call(STATUS, 0, 5, 1, &[]);
            assert_eq!((r.error, &r.data[4..8]), (0, &[0, 0, 0, 1][..]));
        }
        assert_eq!(rig.source.memory.pool().used_pages(), 0);
    }
}

#[test]
fn a_write_that_is_too_long_is_dropped_and_answered() {
    let device = MemDevice::sized(MIB);
    let mut rig = Rig::new(&device, Mode::Structured, &NbdConfig::default());
    for len in [(32 << 20) + 1, 100 << 20] {
        let payload = vec![7; len as usize];
        assert_eq!(rig.call(WRITE, 0, 0, len, &payload).error, err::EINVAL);
        assert!(rig.source.incoming.inbox().capacity() <= 128 << 10);
    }
    assert_eq!(rig.call(READ, 0, 0, 512, &[]).data, [0; 512]);
    assert!(device.log.lock().len() == 1);
}

/// 64 requests of 32 MiB: neither the device nor the socket gets more than a bounded part in one step.
#[test]
fn a_step_is_bounded_in_bytes() {
    for optimal in [0, 3 << 16, 5 << 20] {
        let limits = Limits {
            optimal_bytes: optimal,
            ..Limits::default()
        };
        let device = MemDevice::with(64 * MIB, limits);
        let mut rig = Rig::new(&device, Mode::Simple, &NbdConfig::default());
        let data = pattern(32 * MIB, 3);
        assert_eq!(rig.call(WRITE, 0, 0, 32 << 20, &data).error, 0);
        let most = (512 << 10).max(optimal as u64 + (256 << 10));
        assert!(
            rig.most_pulled <= most,
            "{} with {optimal}",
            rig.most_pulled
        );
        let mut bytes = Vec::new();
        for _ in 0..8 {
            bytes.extend(rig.encode(READ, 0, 0, 32 << 20).1);
        }
        rig.send(&bytes);
        for _ in 0..8 {
            assert!(rig.reply().data == data);
        }
        assert!(
            rig.most_pulled <= most,
            "{} with {optimal}",
            rig.most_pulled
        );
        assert!(rig.most_passed <= 256 << 10, "{}", rig.most_passed);
        rig.source.in_company(true);
        rig.most_passed = 0;
        assert!(rig.call(READ, 0, 0, 32 << 20, &[]).data == data);
        assert!(rig.most_passed <= 64 << 10, "{}", rig.most_passed);
        if optimal > 0 {
            // Rows of an array stay whole.
            let crossing = |&(sector, sectors): &(u64, u64)| {
                sector * 512 / u64::from(optimal)
                    != (sector + sectors - 1) * 512 / u64::from(optimal)
                    && !(sector * 512).is_multiple_of(u64::from(optimal))
            };
            assert!(!rig.pulled.iter().any(crossing));
        }
    }
}

#[test]
fn zeros_are_written_where_the_device_has_none() {
    let limits = Limits {
        write_zeroes: false,
        max_sectors: 88,
        ..Limits::default()
    };
    let device = MemDevice::with(8 * MIB, limits);
    device.data.lock().fill(1);
    let mut rig = Rig::new(&device, Mode::Structured, &NbdConfig::default());
    let flags = cflag::FUA | cflag::NO_HOLE;
    assert_eq!(rig.call(ZEROES, flags, MIB as u64, 6 << 20, &[]).error, 0);
    let data = device.data.lock();
    assert!(data[..MIB].iter().all(|&b| b == 1) && data[7 * MIB..].iter().all(|&b| b == 1));
    assert!(data[MIB..7 * MIB].iter().all(|&b| b == 0));
    drop(data);
    let log = device.log.lock().clone();
    assert_eq!(log.last().unwrap().0, Op::Flush);
    assert!(log[..log.len() - 1].iter().all(|(op, _)| *op == Op::Write));
    assert_eq!(
        rig.call(ZEROES, cflag::FAST_ZERO, 0, 512, &[]).error,
        err::EINVAL
    );
    // An error ends it early, and is told once.
    device.fail_at.store(4096, Ordering::Relaxed);
    assert_eq!(
        rig.call(ZEROES, cflag::FUA, 0, 8 << 20, &[]).error,
        err::EIO
    );
    assert!(rig.nothing_more() && rig.source.slots.used() == 0);
}

#[test]
fn what_is_cached_is_read_piece_by_piece_into_bounded_memory() {
    let limits = Limits {
        caches_reads: true,
        ..Limits::default()
    };
    let device = MemDevice::with(64 * MIB, limits);
    let mut rig = Rig::new(&device, Mode::Simple, &NbdConfig::default());
    assert_eq!(rig.call(CACHE, 0, 3, (60 << 20) + 1, &[]).error, 0);
    let read: u64 = rig.pulled.iter().map(|(_, n)| n * 512).sum();
    assert_eq!(read, (60 << 20) + 512);
    assert!(rig.source.memory.pool().counters().peak_pages <= 64);
    assert_eq!(rig.source.memory.pool().used_pages(), 0);
}

#[test]
fn connections_of_a_disk_share_its_memory_and_all_go_on() {
    let device = MemDevice::sized(8 * MIB);
    let total = Budget::total(8 << 20);
    let share = DiskShare::with_memory(Budget::of_owner(&total, 8 << 20, 1 << 20));
    let config = NbdConfig::default();
    let mut rigs: Vec<_> = (0..16)
        .map(|_| {
            let mut rig = Rig::with_share(&device, Mode::Structured, &config, Arc::clone(&share));
            rig.narrow_socket();
            rig.stalled = true;
            rig
        })
        .collect();
    // Clients that ask for 64 MiB each, and read nothing.
    for rig in &mut rigs {
        let mut bytes = Vec::new();
        for _ in 0..64 {
            bytes.extend(rig.encode(READ, 0, 0, 1 << 20).1);
        }
        rig.send(&bytes);
    }
    for _ in 0..200 {
        rigs.iter_mut()
            .for_each(|r| assert!(r.step() || r.end.is_none()));
        assert!(share.memory.used() <= 8 << 20);
    }
    assert!(share.memory.used() >= 4 << 20);
    // Each of them gets its answers in the end.
    for rig in &mut rigs {
        rig.stalled = false;
    }
    let mut left = 16 * 64;
    for _ in 0..10_000_000 {
        for rig in &mut rigs {
            rig.step();
            left -= usize::from(rig.take_reply().is_some());
        }
        assert!(share.memory.used() <= 8 << 20);
        if left == 0 {
            break;
        }
    }
    assert_eq!(left, 0);
    drop(rigs);
    assert_eq!((share.memory.used(), total.used()), (0, 0));
}

#[test]
fn who_holds_memory_and_does_not_go_on_is_let_go_and_nobody_else() {
    let config = NbdConfig {
        stall_timeout: Duration::from_millis(300),
        ..NbdConfig::default()
    };
    let device = MemDevice::sized(8 * MIB);
    let new = || {
        let mut rig = Rig::new(&device, Mode::Simple, &config);
        rig.narrow_socket();
        rig
    };
    let (mut idle, mut header, mut payload, mut deaf, mut bye) =
        (new(), new(), new(), new(), new());
    let mut slow = Rig::new(&device, Mode::Simple, &config);
    idle.call(READ, 0, 0, 512, &[]);
    let bytes = header.encode(WRITE, 0, 0, 4096).1;
    header.send(&bytes[..20]);
    let write = payload.encode(WRITE, 0, 0, 4096).1;
    payload.send(&[&write[..], &[1; 100]].concat());
    for rig in [&mut deaf, &mut bye, &mut slow] {
        let bytes = rig.encode(READ, 0, 0, 4 << 20).1;
        rig.stalled = true;
        rig.send(&bytes);
    }
    let goodbye = bye.encode(2, 0, 0, 0).1;
    bye.send(&goodbye);
    slow.reads_at_most = Some(64 << 10);
    slow.stalled = false;
    let until = Instant::now() + Duration::from_secs(60);
    let mut paused = Instant::now();
    loop {
        for rig in [&mut idle, &mut header, &mut payload, &mut deaf, &mut bye] {
            rig.step();
        }
        // The slow one takes some now and then.
        if paused.elapsed() > Duration::from_millis(20) {
            slow.step();
            paused = Instant::now();
        }
        let over = [&payload, &deaf].iter().all(|r| r.end.is_some()) && !bye.source.wants_write();
        if over && slow.take_reply().is_some() {
            break;
        }
        let ends =
            [&payload, &deaf, &bye, &slow].map(|r| (r.end.is_some(), r.source.wants_write()));
        assert!(Instant::now() < until, "nobody is let go: {ends:?}");
    }
    for (rig, why) in [(&payload, "sent nothing more"), (&deaf, "took none")] {
        let Some(SourceEnd::Broken(e)) = &rig.end else {
            panic!("{:?}", rig.end)
        };
        assert!(e.to_string().contains(why), "{e}");
    }
    for rig in [&idle, &header, &slow] {
        assert!(rig.end.is_none(), "{:?}", rig.end);
    }
    assert_eq!(deaf.source.memory.pool().used_pages(), 0);
    let rest = [&bytes[20..], &[7; 4096]].concat();
    header.send(&rest);
    assert_eq!(header.reply().error, 0);
}
