//! A source against a raw client, one case at a time.

use super::*;
use crate::nbd::testing::{MODES, MemDevice, Reply, Rig, pattern};
use pvblk_block::{Op, RequestFlags};
use pvblk_protocol::nbd::{Mode, cflag, err};
use std::sync::atomic::Ordering;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const ZEROES: u16 = 6;
const STATUS: u16 = 7;
const MIB: usize = 1 << 20;

#[test]
fn every_command_works_in_each_mode() {
    for mode in MODES {
        let device = MemDevice::sized(4 * MIB);
        let mut rig = Rig::new(&device, mode, &NbdConfig::default());
        let a = pattern(8192, 1);
        assert_eq!(rig.call(WRITE, 0, 4096, 8192, &a).error, 0);
        assert_eq!(&device.data.lock()[4096..12288], &a[..]);
        assert_eq!(rig.call(READ, 0, 4096, 8192, &[]).data, a);
        assert_eq!(rig.call(READ, 0, 4608, 512, &[]).data, a[512..1024]);
        assert_eq!(
            rig.call(READ, 0, 0, 0, &[]),
            Reply {
                cookie: 103,
                error: 0,
                data: vec![]
            }
        );
        assert_eq!(rig.call(WRITE, 0, 0, 0, &[]).error, 0);
        assert_eq!(rig.call(FLUSH, 0, 0, 0, &[]).error, 0);
        assert_eq!(rig.call(WRITE, cflag::FUA, 0, 512, &a[..512]).error, 0);
        assert_eq!(rig.call(TRIM, 0, 4096, 4096, &[]).error, 0);
        assert_eq!(rig.call(TRIM, cflag::FUA, 4096, 4096, &[]).error, 0);
        let flags = cflag::NO_HOLE | cflag::FUA | cflag::FAST_ZERO;
        assert_eq!(rig.call(ZEROES, flags, 8192, 4096, &[]).error, 0);
        assert_eq!(rig.call(READ, 0, 4096, 8192, &[]).data, vec![0; 8192]);
        let log = device.log.lock().clone();
        let stable = RequestFlags::STABLE_BUFFERS;
        assert_eq!(
            log,
            [
                (Op::Write, stable),
                (Op::Read, RequestFlags::empty()),
                (Op::Read, RequestFlags::empty()),
                (Op::Flush, RequestFlags::empty()),
                (Op::Write, stable | RequestFlags::FUA),
                (Op::Discard, RequestFlags::empty()),
                (Op::Discard, RequestFlags::empty()),
                (Op::Flush, RequestFlags::empty()),
                (Op::WriteZeroes, RequestFlags::FUA | RequestFlags::NO_UNMAP),
                (Op::Read, RequestFlags::empty()),
            ]
        );
        let (_, bye) = rig.encode(DISC, 0, 0, 0);
        rig.send(&bye);
        rig.settle();
        assert!(matches!(rig.end, Some(SourceEnd::Closed)));
    }
}

#[test]
fn block_status_describes_from_the_start_without_a_gap() {
    let device = MemDevice::sized(MIB);
    let mut rig = Rig::new(&device, Mode::Structured, &NbdConfig::default());
    device.data.lock()[8192..12288].fill(1);
    let extents = |r: Reply| {
        assert_eq!((r.error, &r.data[..4]), (0, &[0, 0, 0, 1][..]));
        r.data[4..]
            .chunks(8)
            .map(|c| (proto::u32_at(c, 0), proto::u32_at(c, 4)))
            .collect::<Vec<_>>()
    };
    let all = extents(rig.call(STATUS, 0, 0, MIB as u32, &[]));
    assert_eq!(all, [(8192, 3), (4096, 0), (MIB as u32 - 12288, 3)]);
    let one = extents(rig.call(STATUS, cflag::REQ_ONE, 8704, 65536, &[]));
    assert_eq!(one, [(3584, 0)]);
    // Every second sector: the reply is bounded.
    device.data.lock().chunks_mut(1024).for_each(|c| c[0] = 1);
    let many = extents(rig.call(STATUS, 0, 0, MIB as u32, &[]));
    assert_eq!(many.len(), 1024);
    assert_eq!(many[..3], [(512, 0), (512, 3), (512, 0)]);
}

#[test]
fn extended_headers_carry_lengths_of_64_bits() {
    let device = MemDevice::sized(MIB);
    let mut rig = Rig::new(&device, Mode::Extended, &NbdConfig::default());
    device.data.lock()[8192..12288].fill(1);
    let r = rig.call(STATUS, 0, 0, MIB as u32, &[]);
    let descriptors = r.data[8..].chunks(16);
    let all: Vec<_> = descriptors
        .map(|c| (proto::u64_at(c, 0), proto::u64_at(c, 8)))
        .collect();
    // The context's number, and that of the descriptors.
    assert_eq!(r.data[..8], [0, 0, 0, 1, 0, 0, 0, 3]);
    assert_eq!(all, [(8192, 3), (4096, 0), (MIB as u64 - 12288, 3)]);
    // A length whose lower half alone would fit.
    let long = (1 << 32) + 512;
    for (command, flags, len, payload, error) in [
        (TRIM, 0, long, 0, err::EINVAL),
        (ZEROES, 0, long, 0, err::ENOSPC),
        (READ, 0, long, 0, err::EINVAL),
        (STATUS, 0, long, 0, err::EINVAL),
        // A write's payload needs no flag, since QEMU sends none; that of others is dropped.
        (WRITE, 0, 512, 512, 0),
        (STATUS, cflag::PAYLOAD_LEN, 12, 12, err::EINVAL),
        (TRIM, cflag::PAYLOAD_LEN, 512, 512, err::EINVAL),
        (READ, 0, 0, 0, 0),
    ] {
        let (cookie, mut bytes) = rig.encode_long(command, flags, 0, len);
        bytes.extend(vec![9; payload]);
        rig.send(&bytes);
        let r = rig.reply();
        assert_eq!((r.cookie, r.error), (cookie, error), "{command} {len}");
    }
    let (_, bytes) = rig.encode_long(WRITE, cflag::PAYLOAD_LEN, 0, 1 << 32);
    rig.send(&bytes);
    rig.settle();
    assert!(matches!(rig.end, Some(SourceEnd::Broken(_))));
}

/// Descriptors by context, from the payloads of a reply with extended headers.
fn by_context(mut data: &[u8]) -> Vec<(u32, Vec<(u64, u64)>)> {
    let mut all = Vec::new();
    while !data.is_empty() {
        let count = proto::u32_at(data, 4) as usize;
        let (chunk, rest) = data.split_at(8 + 16 * count);
        let one = |c: &[u8]| (proto::u64_at(c, 0), proto::u64_at(c, 8));
        let descriptors = chunk[8..].chunks(16).map(one).collect();
        all.push((proto::u32_at(chunk, 0), descriptors));
        data = rest;
    }
    all
}

#[test]
fn each_context_has_a_chunk_and_a_payload_picks_some() {
    let device = MemDevice::sized(MIB);
    device.has_cache.store(true, Ordering::Relaxed);
    device.data.lock()[4096..8192].fill(1);
    let mut rig = Rig::new(&device, Mode::Extended, &NbdConfig::default());
    let rest = MIB as u64 - 8192;
    let allocation = (1, vec![(4096, 3), (4096, 0), (rest, 3)]);
    let cache = (2, vec![(4096, 0), (4096, 3), (8192, 1), (rest - 8192, 0)]);
    let r = rig.call(STATUS, 0, 0, MIB as u32, &[]);
    assert_eq!(by_context(&r.data), [allocation.clone(), cache.clone()]);
    let mut ask = |flags, offset: u64, len: u64, ids: &[u32], pieces: usize| {
        let mut payload = len.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend(id.to_be_bytes()));
        let flags = flags | cflag::PAYLOAD_LEN;
        let (cookie, mut bytes) = rig.encode_long(STATUS, flags, offset, payload.len() as u64);
        bytes.extend(payload);
        for piece in bytes.chunks(pieces) {
            rig.send(piece);
            rig.settle();
        }
        let r = rig.reply();
        assert_eq!(r.cookie, cookie);
        match r.error {
            0 => Ok(by_context(&r.data)),
            error => Err(error),
        }
    };
    let all = MIB as u64;
    for pieces in [1000, 5, 1] {
        let one = ask(0, 0, all, &[2], pieces);
        assert_eq!(one, Ok(vec![cache.clone()]));
    }
    assert_eq!(ask(0, 0, all, &[1], 40), Ok(vec![allocation.clone()]));
    // In any order, and with the flag that bounds each chunk.
    let both = ask(0, 0, all, &[2, 1], 40);
    assert_eq!(both, Ok(vec![allocation, cache]));
    let one = ask(cflag::REQ_ONE, 6144, all - 6144, &[2, 1], 40);
    assert_eq!(one, Ok(vec![(1, vec![(2048, 0)]), (2, vec![(2048, 3)])]));
    // All else is EINVAL, and the connection goes on.
    for (flags, offset, len, ids) in [
        (0, 0, all, &[][..]),
        (0, 0, all, &[1, 1]),
        (0, 0, all, &[3]),
        (0, 0, all, &[0, 1]),
        (0, 0, all, &[1, 2, 1]),
        (0, 0, 0, &[1]),
        (0, 1, all, &[1]),
        (0, 0, 1 << 32, &[1]),
        (0, u64::MAX, 2, &[1]),
        (cflag::NO_HOLE, 0, all, &[1]),
    ] {
        let got = ask(flags, offset, len, ids, 40);
        assert_eq!(got, Err(err::EINVAL), "{flags} {offset} {len} {ids:?}");
    }
    // So is a payload of 32 MiB, which is dropped, and one that isn't a list of numbers.
    for len in [9, 13, 32 << 20] {
        let (cookie, bytes) = rig.encode_long(STATUS, cflag::PAYLOAD_LEN, 0, len);
        rig.send(&bytes);
        rig.send(&vec![0; len as usize]);
        let r = rig.reply();
        assert_eq!((r.cookie, r.error), (cookie, err::EINVAL), "{len} bytes");
    }
    assert_eq!(rig.call(READ, 0, 0, 512, &[]).error, 0);
    // A client that leaves in the middle of a question is one that broke off.
    let (_, bytes) = rig.encode_long(STATUS, cflag::PAYLOAD_LEN, 0, 12);
    rig.send(&[bytes, vec![0; 5]].concat());
    rig.client = None;
    rig.settle();
    assert!(matches!(rig.end, Some(SourceEnd::Broken(_))));
}

/// A block status ends a pull early, with requests still unread in the inbox: that is no time to look at the socket.
#[test]
fn a_client_may_leave_behind_requests_that_wait_their_turn() {
    for count in [2, 6000] {
        let device = MemDevice::sized(MIB);
        let mut rig = Rig::new(&device, Mode::Structured, &NbdConfig::default());
        let mut all = Vec::new();
        for _ in 0..count {
            all.extend(rig.encode(STATUS, 0, 0, 4096).1);
        }
        all.extend(rig.encode(DISC, 0, 0, 0).1);
        // All of it is in the socket before the source looks; the largest case also fills the inbox.
        let client = rig.client.as_ref().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(client, 1 << 20).unwrap();
        let sent = std::io::Write::write(&mut &*client, &all).unwrap();
        let whole = sent == all.len();
        assert!(whole || count > 2, "{sent} of {} bytes", all.len());
        if whole {
            client.shutdown(std::net::Shutdown::Write).unwrap();
        }
        rig.send(&all[sent..]);
        for _ in 0..count {
            assert_eq!(rig.reply().error, 0);
        }
        rig.settle();
        assert!(matches!(rig.end, Some(SourceEnd::Closed)), "{:?}", rig.end);
    }
}

#[test]
fn bad_requests_are_answered_and_the_connection_lives_on() {
    for mode in MODES {
        let device = MemDevice::sized(MIB);
        let mut rig = Rig::new(&device, mode, &NbdConfig::default());
        let data = pattern(65536, 3);
        for (command, flags, offset, len, payload, error) in [
            (WRITE, 0, MIB as u64, 65536, 65536, err::ENOSPC),
            (WRITE, 0x8000, 0, 65536, 65536, err::EINVAL),
            (READ, 0, MIB as u64, 512, 0, err::EINVAL),
            (READ, 0, 0, (32 << 20) + 512, 0, err::EINVAL),
            (5, 0, 0, 512, 0, err::EINVAL),
            (99, 0, 0, 512, 0, err::EINVAL),
            (FLUSH, 0, 512, 0, 0, err::EINVAL),
        ] {
            let r = rig.call(command, flags, offset, len, &data[..payload]);
            assert_eq!(
                (r.error, r.data.len()),
                (error, 0),
                "{command} {flags} {offset} {len}"
            );
        }
        assert!(device.log.lock().is_empty());
        // Device errors, then success.
        device.fail_at.store(8, Ordering::Relaxed);
        assert_eq!(rig.call(READ, 0, 0, 8192, &[]).error, err::EIO);
        assert_eq!(rig.call(WRITE, 0, 0, 8192, &data[..8192]).error, err::EIO);
        assert_eq!(rig.call(TRIM, cflag::FUA, 0, 8192, &[]).error, err::EIO);
        assert_eq!(rig.call(WRITE, 0, 0, 4096, &data[..4096]).error, 0);
        // A device that became smaller or larger.
        device.sectors.store(8, Ordering::Relaxed);
        assert_eq!(rig.call(READ, 0, 4096, 512, &[]).error, err::EINVAL);
        device.sectors.store(2048, Ordering::Relaxed);
        device.fail_at.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(rig.call(READ, 0, 0, 4096, &[]).data, data[..4096]);
    }
}

#[test]
fn violations_break_only_the_connection() {
    let device = MemDevice::sized(MIB);
    let mut rig = Rig::plain(&device);
    assert_eq!(rig.call(READ, 0, 0, 512, &[]).error, 0);
    rig.send(&[0x11; 28]);
    rig.settle();
    let Some(SourceEnd::Broken(e)) = &rig.end else {
        panic!("{:?}", rig.end)
    };
    assert!(e.to_string().contains("no request"), "{e}");
}

#[test]
fn the_end_of_the_stream_is_in_order_only_between_requests() {
    for (cut, orderly) in [(0, true), (27, false), (28, false), (600, false)] {
        let device = MemDevice::sized(MIB);
        let mut rig = Rig::plain(&device);
        let (_, mut bytes) = rig.encode(WRITE, 0, 0, 1024);
        bytes.extend([7; 1024]);
        rig.send(&bytes[..cut]);
        rig.client = None;
        rig.settle();
        let closed = matches!(rig.end, Some(SourceEnd::Closed));
        assert_eq!(closed, orderly, "{cut}: {:?}", rig.end);
        assert!(device.log.lock().is_empty());
    }
}

#[test]
fn requests_in_flight_are_answered_after_goodbye() {
    let device = MemDevice::sized(MIB);
    let mut rig = Rig::plain(&device);
    device.hold.store(true, Ordering::Relaxed);
    let mut bytes = Vec::new();
    for i in 0..5 {
        bytes.extend(rig.encode(READ, 0, i * 4096, 4096).1);
    }
    bytes.extend(rig.encode(TRIM, cflag::FUA, 0, 4096).1);
    bytes.extend(rig.encode(DISC, 0, 0, 0).1);
    rig.send(&bytes);
    (0..20).for_each(|_| assert!(rig.step()));
    assert!(rig.end.is_none(), "the trim's flush is still to come");
    device.hold.store(false, Ordering::Relaxed);
    let mut cookies: Vec<_> = (0..6).map(|_| rig.reply().cookie).collect();
    cookies.sort();
    assert_eq!(cookies, (100..106).collect::<Vec<_>>());
    rig.settle();
    assert!(matches!(rig.end, Some(SourceEnd::Closed)));
    assert_eq!(rig.source.memory.pool().used_pages(), 0);
}

#[test]
fn many_requests_are_pipelined_within_the_depth() {
    let device = MemDevice::sized(4 * MIB);
    device
        .data
        .lock()
        .iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = (i / 512) as u8);
    let config = NbdConfig {
        depth: 16,
        ..NbdConfig::default()
    };
    let mut rig = Rig::new(&device, Mode::Structured, &config);
    let mut bytes = Vec::new();
    for i in 0..1000u64 {
        bytes.extend(rig.encode(READ, 0, i % 1000 * 4096, 4096).1);
    }
    rig.send(&bytes);
    let mut seen = vec![false; 1000];
    let mut in_order = true;
    for n in 0..1000 {
        let r = rig.reply();
        let i = r.cookie as usize - 100;
        in_order &= i == n;
        assert!(!std::mem::replace(&mut seen[i], true));
        assert!(
            r.data
                .chunks(512)
                .enumerate()
                .all(|(k, c)| c.iter().all(|&b| b == (i * 8 + k) as u8))
        );
    }
    assert!(!in_order, "the device completes out of order");
    assert_eq!(rig.in_flight_most, 16);
    assert!(rig.nothing_more());
    assert!(rig.source.slots.used() == 0 && rig.source.memory.pool().used_pages() == 0);
}

#[test]
fn bytes_may_come_one_by_one() {
    let device = MemDevice::sized(MIB);
    let mut rig = Rig::plain(&device);
    let data = pattern(1024, 9);
    let (_, mut bytes) = rig.encode(WRITE, 0, 512, 1024);
    bytes.extend(&data);
    let (_, read) = rig.encode(READ, 0, 512, 1024);
    bytes.extend(read);
    for b in bytes {
        rig.send(&[b]);
    }
    assert_eq!(rig.reply().error, 0);
    assert_eq!(rig.reply().data, data);
}

#[test]
fn the_largest_requests_pass_a_narrow_socket() {
    let device = MemDevice::sized(40 * MIB);
    let mut rig = Rig::new(&device, Mode::Structured, &NbdConfig::default());
    rig.narrow_socket();
    let data = pattern(32 * MIB, 5);
    assert_eq!(rig.call(WRITE, 0, 4096, 32 << 20, &data).error, 0);
    assert!(rig.call(READ, 0, 4096, 32 << 20, &[]).data == data);
    // Several in a row, of which each alone fills the memory that is allowed.
    let mut bytes = Vec::new();
    for _ in 0..4 {
        bytes.extend(rig.encode(READ, 0, 4096, 32 << 20).1);
    }
    rig.send(&bytes);
    for _ in 0..4 {
        assert!(rig.reply().data == data);
    }
    assert!(rig.source.memory.pool().free_pages() <= (64 << 20) / 4096);
}

#[test]
fn large_requests_are_cut_to_what_the_device_takes() {
    for (max_sectors, max_segments, logical) in
        [(8, 1, 512), (88, 11, 512), (9, 1, 4096), (65536, 1, 512)]
    {
        let limits = Limits {
            max_sectors,
            max_segments,
            logical_sector_bytes: logical,
            ..Limits::default()
        };
        let device = MemDevice::with(4 * MIB, limits);
        let config = NbdConfig {
            depth: 8,
            ..NbdConfig::default()
        };
        let mut rig = Rig::new(&device, Mode::Simple, &config);
        let data = pattern(3 * MIB, 2);
        assert_eq!(rig.call(WRITE, cflag::FUA, 8192, 3 << 20, &data).error, 0);
        assert!(device.data.lock()[8192..][..3 * MIB] == data);
        assert!(rig.call(READ, 0, 8192, 3 << 20, &[]).data == data);
        assert_eq!(
            rig.call(READ, 0, 12288, 20480, &[]).data,
            data[4096..][..20480]
        );
        assert!(rig.in_flight_most <= 8);
        // The first error wins, and only one reply comes.
        device.fail_at.store(1000, Ordering::Relaxed);
        let (_, mut bytes) = rig.encode(READ, 0, 0, 2 << 20);
        bytes.extend(rig.encode(READ, 0, 3 << 20, 4096).1);
        rig.send(&bytes);
        let mut errors: Vec<_> = (0..2).map(|_| rig.reply().error).collect();
        errors.sort();
        assert_eq!(errors, [0, err::EIO]);
        assert!(rig.nothing_more());
        assert!(
            device
                .log
                .lock()
                .iter()
                .all(|(op, f)| *op == Op::Read || f.contains(RequestFlags::FUA))
        );
    }
}

#[test]
fn a_client_that_does_not_read_is_held_up_and_costs_nothing() {
    let device = MemDevice::sized(4 * MIB);
    let config = NbdConfig {
        depth: 4,
        ..NbdConfig::default()
    };
    let mut rig = Rig::new(&device, Mode::Simple, &config);
    rig.narrow_socket();
    rig.stalled = true;
    let mut bytes = Vec::new();
    for i in 0..200u64 {
        bytes.extend(rig.encode(READ, 0, i * 4096, 4096).1);
        bytes.extend(rig.encode(99, 0, 0, 0).1);
    }
    rig.send(&bytes);
    rig.settle();
    assert!(!rig.source.wants_read() && rig.source.wants_write());
    // Twice the depth, and what was at the device when that was reached.
    assert!(rig.source.slots.used() <= 8 && rig.source.outbox.len() <= 12);
    assert!(rig.source.memory.pool().used_pages() <= 8);
    rig.stalled = false;
    for _ in 0..400 {
        rig.reply();
    }
    assert!(rig.nothing_more());
    assert!(rig.source.wants_read());
}

#[test]
fn memory_in_flight_is_bounded_by_holding_the_client_up() {
    let device = MemDevice::sized(64 * MIB);
    let config = NbdConfig {
        depth: 1000,
        max_in_flight_bytes: 32 << 20,
        ..NbdConfig::default()
    };
    let mut rig = Rig::new(&device, Mode::Simple, &config);
    device.hold.store(true, Ordering::Relaxed);
    let mut bytes = Vec::new();
    for _ in 0..20 {
        bytes.extend(rig.encode(READ, 0, 0, 8 << 20).1);
    }
    rig.send(&bytes);
    (0..200).for_each(|_| assert!(rig.step()));
    assert_eq!(rig.source.slots.used(), 4);
    assert!(!rig.source.wants_read());
    device.hold.store(false, Ordering::Relaxed);
    for _ in 0..20 {
        assert_eq!(rig.reply().data.len(), 8 << 20);
        assert!(rig.source.memory.pool().used_pages() <= 8192 && rig.source.slots.used() <= 4);
    }
}

#[test]
fn an_idle_connection_gives_its_memory_back_but_for_the_limit() {
    let device = MemDevice::sized(MIB);
    let config = NbdConfig::default();
    config.pressure.set_max_buffer_pages(4);
    let mut rig = Rig::new(&device, Mode::Simple, &config);
    rig.call(WRITE, 0, 0, 4096, &pattern(4096, 1));
    rig.call(WRITE, 0, 0, 65536, &pattern(65536, 1));
    rig.call(READ, 0, 0, 65536, &[]);
    assert!(rig.source.memory.pool().free_pages() > 0);
    let until = Instant::now() + Duration::from_secs(60);
    while let Readiness::Wait(Some(at)) = rig.source.arm() {
        assert!(Instant::now() < until);
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
    }
    assert_eq!(
        (
            rig.source.memory.pool().free_pages() <= 4,
            rig.source.incoming.inbox().capacity()
        ),
        (true, 0)
    );
    config.pressure.squeeze();
    assert_eq!(rig.source.memory.pool().free_pages(), 0);
    assert_eq!(
        rig.call(READ, 0, 0, 512, &[]).data,
        pattern(65536, 1)[..512]
    );
}

#[test]
fn a_client_that_vanishes_ends_the_source_once() {
    let device = MemDevice::sized(4 * MIB);
    let mut rig = Rig::plain(&device);
    device.hold.store(true, Ordering::Relaxed);
    let mut bytes = Vec::new();
    for i in 0..50 {
        bytes.extend(rig.encode(READ, 0, i * 4096, 4096).1);
    }
    rig.send(&bytes);
    rig.client = None;
    (0..20).for_each(|_| assert!(rig.step()));
    device.hold.store(false, Ordering::Relaxed);
    rig.settle();
    assert!(rig.end.is_some());
    assert!(!rig.source.wants_write());
    assert_eq!(rig.source.memory.pool().used_pages(), 0);
}

#[test]
fn first_requests_may_come_with_the_handshake() {
    let device = MemDevice::sized(MIB);
    let mut rig = Rig::plain(&device);
    let (_, bytes) = rig.encode(READ, 0, 0, 4096);
    *rig.source.incoming.inbox() = crate::nbd::receive::Inbox::new(bytes);
    assert_eq!(rig.reply().data.len(), 4096);
}

/// They cost the worker as much as others, so its lane is charged for them.
#[test]
fn requests_that_the_source_answers_are_counted() {
    let device = MemDevice::sized(4 * MIB);
    let mut rig = Rig::new(&device, Mode::Simple, &NbdConfig::default());
    let mut bytes = Vec::new();
    for _ in 0..5 {
        bytes.extend(rig.encode(99, 0, 0, 0).1);
    }
    bytes.extend(rig.encode(READ, 0, 0, 512).1);
    // Not by the rig, which steps the source.
    let mut client = rig.client.as_ref().unwrap();
    std::io::Write::write_all(&mut client, &bytes).unwrap();
    let mut out = Vec::new();
    let pulled = rig.source.pull(16, &mut out).unwrap();
    assert_eq!((pulled.answered, out.len()), (5, 1));
}
