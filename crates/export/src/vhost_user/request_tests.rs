//! One test for each rule of virtio-blk, and what good requests become.

use super::super::virtqueue::Virtqueue;
use super::*;
use pvblk_block::Region;
use pvblk_protocol::virtio::Driver;
use std::sync::Arc;

const GUEST: u64 = 0x10000;
const ALL: Offered = Offered {
    discard: true,
    write_zeroes: true,
};

fn driver() -> Driver {
    let region = Arc::new(Region::anonymous(1 << 20).unwrap());
    Driver::new(region, GUEST, 16, false)
}

/// Parses the chain of `pieces` between head and status.
fn run(
    d: &Driver,
    kind: u32,
    pieces: &[(u64, u32, bool)],
    offered: Offered,
) -> (Result<Chain, Broken>, Box<Request>) {
    d.build(0, kind, 8, pieces, false);
    let mut queue = Virtqueue::new(d.place(), 16, 0, false, true);
    let (mut chain, memory) = (Vec::new(), GuestMemory::of_driver(d));
    queue.chain(0, &memory, &mut chain).unwrap();
    let mut request = Request::new(Op::Flush, 0, 0, 0);
    let parsed = parse(&chain, &memory, offered, &mut request);
    (parsed, request)
}

fn bad(d: &Driver, kind: u32, pieces: &[(u64, u32, bool)]) -> Bad {
    run(d, kind, pieces, ALL).0.unwrap().asked.unwrap_err()
}

#[test]
fn reads_and_writes_use_the_guests_own_pages() {
    let d = driver();
    let data = d.at(d.data_offset());
    for (kind, op) in [(0, Op::Read), (1, Op::Write)] {
        let write = op == Op::Read;
        let pieces = [
            (data, 512, write),
            (data + 512, 512, write),
            (data + 8192, 4096, write),
        ];
        let (chain, request) = run(&d, kind, &pieces, ALL);
        let chain = chain.unwrap();
        assert_eq!(chain.asked, Ok(Parsed::Submit));
        assert_eq!((request.op, request.sector, request.sectors), (op, 8, 10));
        let places: Vec<_> = request
            .buffers
            .iter()
            .map(|b| (b.offset(), b.len()))
            .collect();
        assert_eq!(
            places,
            [(d.data_offset(), 1024), (d.data_offset() + 8192, 4096)]
        );
        assert!(
            request
                .buffers
                .iter()
                .all(|b| Arc::ptr_eq(b.region(), d.region()))
        );
        assert_eq!(chain.writable, if write { 5121 } else { 1 });
        assert_eq!(d.at(chain.status.offset()), d.status_at(0));
    }
}

#[test]
fn other_requests() {
    let d = driver();
    let (chain, request) = run(&d, 4, &[], ALL);
    assert_eq!(
        (chain.unwrap().asked, request.op),
        (Ok(Parsed::Submit), Op::Flush)
    );
    assert_eq!((request.sector, request.sectors), (0, 0));
    let range = d.range(0, 1 << 40, 77, 0);
    let (chain, request) = run(&d, 11, &[(range, 16, false)], ALL);
    assert_eq!(
        (chain.unwrap().asked, request.op),
        (Ok(Parsed::Submit), Op::Discard)
    );
    assert_eq!((request.sector, request.sectors), (1 << 40, 77));
    for (flags, expect) in [(0, RequestFlags::NO_UNMAP), (1, RequestFlags::empty())] {
        let range = d.range(0, 1, 2, flags);
        let (chain, request) = run(&d, 13, &[(range, 16, false)], ALL);
        assert_eq!(
            (chain.unwrap().asked, request.op),
            (Ok(Parsed::Submit), Op::WriteZeroes)
        );
        assert_eq!(
            (request.sector, request.sectors, request.flags),
            (1, 2, expect)
        );
    }
    let (chain, request) = run(&d, 8, &[(d.at(d.data_offset()), 20, true)], ALL);
    assert_eq!(chain.unwrap().asked, Ok(Parsed::Id));
    assert_eq!(request.buffers[0].len(), 20);
}

#[test]
fn a_request_without_a_status_byte() {
    let d = driver();
    d.descriptor(0, d.head(0, 4, 0), 16, 0, 0);
    let mut queue = Virtqueue::new(d.place(), 16, 0, false, true);
    let mut chain = Vec::new();
    queue
        .chain(0, &GuestMemory::of_driver(&d), &mut chain)
        .unwrap();
    let mut request = Request::new(Op::Flush, 0, 0, 0);
    let parsed = parse(&chain, &GuestMemory::of_driver(&d), ALL, &mut request);
    assert_eq!(parsed.unwrap_err(), Broken::NoStatus);
}

#[test]
fn a_truncated_head() {
    let d = driver();
    let head = d.head(0, 0, 0);
    d.descriptor(0, head, 15, 1, 1);
    d.descriptor(1, d.status_at(0), 1, 2, 0);
    let mut queue = Virtqueue::new(d.place(), 16, 0, false, true);
    let mut chain = Vec::new();
    queue
        .chain(0, &GuestMemory::of_driver(&d), &mut chain)
        .unwrap();
    let mut request = Request::new(Op::Flush, 0, 0, 0);
    let parsed = parse(&chain, &GuestMemory::of_driver(&d), ALL, &mut request).unwrap();
    assert_eq!(parsed.asked, Err(Bad::ShortHead(15)));
}

#[test]
fn a_head_in_pieces_is_one_head() {
    let d = driver();
    let head = d.head(0, 1, 3);
    let data = d.at(d.data_offset());
    for (i, (at, len, flags)) in [
        (head, 7, 1),
        (head + 7, 9, 1),
        (data, 512, 1),
        (d.status_at(0), 1, 2),
    ]
    .into_iter()
    .enumerate()
    {
        d.descriptor(i as u16, at, len, flags, i as u16 + 1);
    }
    let mut queue = Virtqueue::new(d.place(), 16, 0, false, true);
    let mut chain = Vec::new();
    queue
        .chain(0, &GuestMemory::of_driver(&d), &mut chain)
        .unwrap();
    let mut request = Request::new(Op::Flush, 0, 0, 0);
    let parsed = parse(&chain, &GuestMemory::of_driver(&d), ALL, &mut request).unwrap();
    assert_eq!(parsed.asked, Ok(Parsed::Submit));
    assert_eq!(
        (request.op, request.sector, request.sectors),
        (Op::Write, 3, 1)
    );
}

#[test]
fn data_outside_the_memory() {
    let d = driver();
    for (at, len) in [
        (0, 512),
        (GUEST + (1 << 20) - 511, 512),
        (u64::MAX - 511, 512),
        (u64::MAX, 512),
    ] {
        for kind in [0, 1] {
            let (parsed, _) = run(&d, kind, &[(at, len, kind == 0)], ALL);
            assert_eq!(parsed.unwrap_err(), Broken::Address(at, len));
        }
    }
}

#[test]
fn a_status_outside_the_memory() {
    let d = driver();
    for (at, len) in [(0, 1), (GUEST + (1 << 20), 1), (u64::MAX, 2)] {
        d.descriptor(0, d.head(0, 4, 0), 16, 1, 1);
        d.descriptor(1, at, len, 2, 0);
        let mut queue = Virtqueue::new(d.place(), 16, 0, false, true);
        let mut chain = Vec::new();
        queue
            .chain(0, &GuestMemory::of_driver(&d), &mut chain)
            .unwrap();
        let mut request = Request::new(Op::Flush, 0, 0, 0);
        let parsed = parse(&chain, &GuestMemory::of_driver(&d), ALL, &mut request);
        assert_eq!(parsed.unwrap_err(), Broken::Address(at, len));
    }
}

#[test]
fn data_on_the_wrong_side() {
    let d = driver();
    let data = d.at(d.data_offset());
    assert_eq!(bad(&d, 0, &[(data, 512, false)]), Bad::Data(0, 512));
    assert_eq!(bad(&d, 1, &[(data, 512, true)]), Bad::Data(512, 0));
    assert_eq!(
        bad(&d, 1, &[(data, 512, false), (data, 512, true)]),
        Bad::Data(512, 512)
    );
    assert_eq!(bad(&d, 0, &[]), Bad::Data(0, 0));
}

#[test]
fn data_that_is_not_whole_sectors() {
    let d = driver();
    let data = d.at(d.data_offset());
    assert_eq!(bad(&d, 0, &[(data, 511, true)]), Bad::Data(511, 0));
    // Whole in sum, but not the pieces.
    assert_eq!(
        bad(&d, 0, &[(data, 100, true), (data + 4096, 412, true)]),
        Bad::Piece(100)
    );
}

#[test]
fn unknown_types_and_types_that_were_not_offered() {
    let d = driver();
    for kind in [2, 3, 5, 14, 15, 0x8000_0000, u32::MAX] {
        assert_eq!(bad(&d, kind, &[]), Bad::UnknownType(kind));
        assert!(bad(&d, kind, &[]).is_unsupported());
    }
    let none = Offered {
        discard: false,
        write_zeroes: false,
    };
    let range = d.range(0, 1, 2, 0);
    for kind in [11, 13] {
        let asked = run(&d, kind, &[(range, 16, false)], none).0.unwrap().asked;
        assert_eq!(asked, Err(Bad::UnknownType(kind)));
    }
}

#[test]
fn ranges_that_are_not_one_and_flags_that_are_not_there() {
    let d = driver();
    for len in [1, 15, 17, 32] {
        assert_eq!(
            bad(&d, 11, &[(d.range(0, 1, 2, 0), len, false)]),
            Bad::Ranges(len.into())
        );
    }
    assert_eq!(bad(&d, 11, &[]), Bad::Ranges(0));
    // Unmap says nothing about a discard.
    assert_eq!(
        bad(&d, 11, &[(d.range(0, 1, 2, 1), 16, false)]),
        Bad::RangeFlags(1)
    );
    assert_eq!(
        bad(&d, 13, &[(d.range(0, 1, 2, 2), 16, false)]),
        Bad::RangeFlags(2)
    );
}

#[test]
fn room_for_the_name_that_is_too_small() {
    let d = driver();
    assert_eq!(
        bad(&d, 8, &[(d.at(d.data_offset()), 19, true)]),
        Bad::ShortId(19)
    );
}
