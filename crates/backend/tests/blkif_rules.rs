//! One ring entry at a time: its result, good or bad (blkif.h's rules), and its line in the log.

mod support;

use pvblk_backend::{Pulled, RequestSource, SourceEnd};
use pvblk_block::{Completion, Op, Request, RequestFlags, Status};
use pvblk_protocol::blkif::wire::{
    DISCARD_SECURE, DiscardRequest, IndirectRequest, OP_DISCARD, OP_FLUSH, OP_INDIRECT, OP_READ,
    OP_WRITE, OP_WRITE_BARRIER, RSP_EOPNOTSUPP, RSP_ERROR, RSP_OKAY, RequestHeader, Segment,
};
use support::peer::{NOT_GRANTED, OUTSIDE, Peer, READ_ONLY, WRITABLE};

const ID: u64 = 0xfeed_0000_0000_0042;

fn header(operation: u8, nr_segments: u8) -> RequestHeader {
    RequestHeader {
        operation,
        nr_segments,
        handle: 0,
        pad: 0,
        id: ID,
        sector_number: 1000,
    }
}

fn segment(gref: u32, first_sect: u8, last_sect: u8) -> Segment {
    Segment {
        gref,
        first_sect,
        last_sect,
        pad: 0,
    }
}

fn indirect(indirect_op: u8, nr_segments: u16, gref: u32) -> IndirectRequest {
    IndirectRequest {
        operation: OP_INDIRECT,
        indirect_op,
        nr_segments,
        pad: 0,
        id: ID,
        sector_number: 1000,
        handle: 0,
        pad2: 0,
        indirect_grefs: [gref; 8],
        pad3: 0,
    }
}

/// Puts one request and pulls.
fn pull(peer: &mut Peer, put: impl FnOnce(&mut Peer)) -> (Pulled, Vec<Box<Request>>) {
    put(peer);
    peer.front.publish();
    let mut out = Vec::new();
    let pulled = peer.source.pull(32, &mut out).expect("an honest ring");
    (pulled, out)
}

/// Checks that the request is answered at once, with this status and operation.
#[track_caller]
fn refused(peer: &mut Peer, put: impl FnOnce(&mut Peer), operation: u8, status: i16) {
    let (pulled, out) = pull(peer, put);
    assert!(out.is_empty(), "let through: {out:?}");
    let answered = Pulled {
        answered: 1,
        ..Pulled::default()
    };
    assert_eq!(pulled, answered);
    peer.source.push().unwrap();
    let response = peer.front.take().unwrap().expect("an answer");
    assert_eq!(
        (response.id, response.operation, response.status),
        (ID, operation, status)
    );
    assert!(peer.front.take().unwrap().is_none(), "one answer");
    assert_eq!(peer.mapped(), 0, "a reference stays mapped");
}

/// Checks that the request comes out; returns it, after its response.
#[track_caller]
fn accepted(peer: &mut Peer, put: impl FnOnce(&mut Peer), echo: u8) -> (Box<Request>, bool) {
    let (pulled, mut out) = pull(peer, put);
    assert_eq!(out.len(), 1);
    let request = out.remove(0);
    let copy = Request::with_buffers(request.op, request.sector, request.buffers.clone(), 0);
    let (flags, sectors) = (request.flags, request.sectors);
    assert!(peer.front.take().unwrap().is_none(), "answered too early");
    peer.source.complete(&mut vec![Completion {
        request,
        status: Status::Ok,
    }]);
    peer.source.push().unwrap();
    let response = peer.front.take().unwrap().expect("an answer");
    assert_eq!(
        (response.id, response.operation, response.status),
        (ID, echo, RSP_OKAY)
    );
    assert_eq!(peer.mapped(), 0, "a reference stays mapped");
    let mut copy = copy;
    copy.flags = flags;
    copy.sectors = sectors;
    (copy, pulled.ordered)
}

#[test]
fn bad_reads_and_writes_are_answered_with_an_error() {
    for unmaps in [false, true] {
        let mut peer = Peer::new(32, unmaps);
        let good = segment(WRITABLE, 0, 7);
        // Operation, stated count, segments.
        let table: &[(&str, u8, u8, &[Segment])] = &[
            ("no segments", OP_READ, 0, &[]),
            ("no segments", OP_WRITE, 0, &[]),
            ("12 segments", OP_READ, 12, &[good; 11]),
            ("12 segments", OP_FLUSH, 12, &[good; 11]),
            ("255 segments", OP_WRITE_BARRIER, 255, &[good; 11]),
            ("first past last", OP_READ, 1, &[segment(WRITABLE, 4, 3)]),
            ("last past the page", OP_READ, 1, &[segment(WRITABLE, 0, 8)]),
            (
                "both past the page",
                OP_WRITE,
                1,
                &[segment(WRITABLE, 8, 8)],
            ),
            ("last is 255", OP_WRITE, 1, &[segment(WRITABLE, 0, 255)]),
            (
                "the last of three is bad",
                OP_WRITE,
                3,
                &[good, good, segment(WRITABLE, 7, 0)],
            ),
            (
                "read into a read-only page",
                OP_READ,
                1,
                &[segment(READ_ONLY, 0, 7)],
            ),
            ("not granted", OP_WRITE, 1, &[segment(NOT_GRANTED, 0, 7)]),
            (
                "reference outside the table",
                OP_WRITE,
                1,
                &[segment(1 << 20, 0, 7)],
            ),
            (
                "the largest reference",
                OP_WRITE,
                1,
                &[segment(u32::MAX, 0, 7)],
            ),
            ("a reserved reference", OP_WRITE, 1, &[segment(0, 0, 7)]),
            (
                "frame outside the memory",
                OP_WRITE,
                1,
                &[segment(OUTSIDE, 0, 7)],
            ),
            (
                "flush data not granted",
                OP_FLUSH,
                1,
                &[segment(NOT_GRANTED, 0, 7)],
            ),
            (
                "barrier data out of range",
                OP_WRITE_BARRIER,
                1,
                &[segment(WRITABLE, 0, 9)],
            ),
        ];
        for &(what, operation, count, segments) in table {
            println!("{what}");
            let put = |p: &mut Peer| p.front.put_rw(&header(operation, count), segments);
            refused(&mut peer, put, operation, RSP_ERROR);
        }
    }
}

#[test]
fn unknown_operations_are_answered_with_eopnotsupp_and_their_id() {
    let mut peer = Peer::new(32, true);
    for operation in [4, 7, 8, 127, 255] {
        let put = |p: &mut Peer| {
            p.front
                .put_rw(&header(operation, 1), &[segment(WRITABLE, 0, 7)]);
        };
        refused(&mut peer, put, operation, RSP_EOPNOTSUPP);
    }
    // Indirect requests that were not offered are one of them.
    let mut peer = Peer::new(0, false);
    let put = |p: &mut Peer| p.front.put(&indirect(OP_READ, 1, READ_ONLY));
    refused(&mut peer, put, OP_INDIRECT, RSP_EOPNOTSUPP);
}

/// Front ends know an indirect request by its inner operation, also when it failed: Linux's stops the disk at any
/// other (xen-blkfront.c, `blkif_interrupt`), and so does ours.
#[test]
fn bad_indirect_requests_are_answered_with_an_error_and_the_inner_operation() {
    for unmaps in [false, true] {
        let mut peer = Peer::new(32, unmaps);
        peer.fill_segments(READ_ONLY, &[segment(WRITABLE, 0, 7); 32]);
        let table = [
            ("no segments", OP_READ, 0, READ_ONLY),
            ("more than offered", OP_WRITE, 33, READ_ONLY),
            ("many more than offered", OP_READ, u16::MAX, READ_ONLY),
            ("inner operation is flush", OP_FLUSH, 1, READ_ONLY),
            ("inner operation is indirect", OP_INDIRECT, 1, READ_ONLY),
            ("page of segments not granted", OP_READ, 1, NOT_GRANTED),
            ("page of segments outside", OP_READ, 1, OUTSIDE),
        ];
        for (what, op, count, gref) in table {
            println!("{what}");
            let put = |p: &mut Peer| p.front.put(&indirect(op, count, gref));
            refused(&mut peer, put, op, RSP_ERROR);
        }
        let bad = [
            segment(WRITABLE, 3, 2),
            segment(WRITABLE, 0, 8),
            segment(READ_ONLY, 0, 7),
            segment(NOT_GRANTED, 0, 7),
        ];
        for last in bad {
            let mut segments = [segment(WRITABLE, 0, 7); 32];
            segments[31] = last;
            peer.fill_segments(READ_ONLY, &segments);
            let put = |p: &mut Peer| p.front.put(&indirect(OP_READ, 32, READ_ONLY));
            refused(&mut peer, put, OP_READ, RSP_ERROR);
        }
    }
}

#[test]
fn good_requests_come_out_as_they_were_meant() {
    for unmaps in [false, true] {
        let mut peer = Peer::new(32, unmaps);
        let (none, pre, barrier) = (
            RequestFlags::empty(),
            RequestFlags::PREFLUSH,
            RequestFlags::BARRIER,
        );
        // The columns are operation, whether there is data, and the expected request.
        let table = [
            (OP_READ, true, Op::Read, none),
            (OP_WRITE, true, Op::Write, none),
            (OP_FLUSH, false, Op::Flush, none),
            (OP_FLUSH, true, Op::Write, pre),
            (OP_WRITE_BARRIER, false, Op::Flush, barrier),
            (OP_WRITE_BARRIER, true, Op::Write, barrier),
        ];
        for (operation, data, op, flags) in table {
            let segments = [segment(WRITABLE, 2, 7), segment(WRITABLE, 0, 0)];
            let segments = if data { &segments[..] } else { &[] };
            let count = segments.len() as u8;
            let put = |p: &mut Peer| p.front.put_rw(&header(operation, count), segments);
            let (r, ordered) = accepted(&mut peer, put, operation);
            assert_eq!((r.op, r.flags, ordered), (op, flags, !flags.is_empty()));
            assert_eq!(r.sectors, if data { 7 } else { 0 });
            assert_eq!(r.sector, if data { 1000 } else { 0 });
            let places: Vec<_> = r.buffers.iter().map(|b| (b.offset(), b.len())).collect();
            let at = peer.page(WRITABLE);
            let expected = [(at + 1024, 3072), (at, 512)];
            assert_eq!(places, if data { &expected[..] } else { &[] });
        }
        // A page that is only read may be read-only; 11 segments of all eight sectors are the most.
        let put = |p: &mut Peer| {
            p.front
                .put_rw(&header(OP_WRITE, 11), &[segment(READ_ONLY, 0, 7); 11]);
        };
        assert_eq!(accepted(&mut peer, put, OP_WRITE).0.sectors, 88);
        let mut segments = [segment(WRITABLE, 0, 7); 32];
        segments[31] = segment(WRITABLE, 5, 5);
        peer.fill_segments(READ_ONLY, &segments);
        for op in [OP_READ, OP_WRITE] {
            let put = |p: &mut Peer| p.front.put(&indirect(op, 32, READ_ONLY));
            let (r, ordered) = accepted(&mut peer, put, op);
            assert_eq!((r.sectors, ordered), (31 * 8 + 1, false));
            assert_eq!(
                r.buffers.last().unwrap().offset(),
                peer.page(WRITABLE) + 5 * 512
            );
        }
    }
}

#[test]
fn discards_carry_their_range_and_the_secure_flag() {
    let mut peer = Peer::new(0, false);
    for (flag, secure) in [(0, false), (DISCARD_SECURE, true), (2, false), (0xff, true)] {
        let put = |p: &mut Peer| {
            p.front.put(&DiscardRequest {
                operation: OP_DISCARD,
                flag,
                handle: 0,
                pad: 0,
                id: ID,
                sector_number: u64::MAX - 1,
                nr_sectors: u64::MAX,
            });
        };
        let (r, ordered) = accepted(&mut peer, put, OP_DISCARD);
        assert_eq!(
            (r.op, r.sector, r.sectors),
            (Op::Discard, u64::MAX - 1, u64::MAX)
        );
        assert_eq!(
            (r.flags.contains(RequestFlags::SECURE), ordered),
            (secure, false)
        );
    }
}

#[test]
fn a_status_of_the_device_becomes_one_of_the_protocol() {
    let mut peer = Peer::new(0, true);
    for (status, code) in [
        (Status::Ok, RSP_OKAY),
        (Status::Unsupported, RSP_EOPNOTSUPP),
        (Status::IoError, RSP_ERROR),
        (Status::NoSpace, RSP_ERROR),
        (Status::ReadOnly, RSP_ERROR),
        (Status::Invalid, RSP_ERROR),
    ] {
        let put = |p: &mut Peer| {
            p.front
                .put_rw(&header(OP_READ, 1), &[segment(WRITABLE, 0, 7)])
        };
        let (_, mut out) = pull(&mut peer, put);
        assert_eq!(peer.mapped(), 1);
        let request = out.remove(0);
        peer.source
            .complete(&mut vec![Completion { request, status }]);
        assert_eq!(peer.mapped(), 0, "mapped while it is answered");
        peer.source.push().unwrap();
        assert_eq!(peer.front.take().unwrap().unwrap().status, code);
    }
}

/// A guest that connects again can't do it either: lines are counted for the disk.
#[test]
fn a_guest_cannot_fill_the_log() {
    let begin = std::time::Instant::now();
    let warnings = support::log::count_warnings(|| {
        for _ in 0..10 {
            let mut peer = Peer::new(0, false);
            peer.source.served_as("one disk");
            for _ in 0..10 {
                let put = |p: &mut Peer| p.front.put_rw(&header(99, 0), &[]);
                refused(&mut peer, put, 99, RSP_EOPNOTSUPP);
            }
        }
    });
    // Eight, and those of 16, 32 and 64; or after a minute.
    let most = 11 + begin.elapsed().as_secs() as usize / 60;
    assert!((11..=most).contains(&warnings), "{warnings}");
}

#[test]
fn only_bad_requests_do_not_keep_the_worker() {
    let mut peer = Peer::new(0, false);
    for _ in 0..peer.front.entries() {
        peer.front.put_rw(&header(99, 0), &[]);
    }
    peer.front.publish();
    let mut out = Vec::new();
    peer.source.pull(1, &mut out).unwrap();
    peer.source.push().unwrap();
    let mut answers = 0;
    while peer.front.take().unwrap().is_some() {
        answers += 1;
    }
    assert_eq!(answers, 1, "room bounds bad requests too");
}

/// Answers out of order overwrite entries of requests that are still unfinished; ids must survive that.
#[test]
fn ids_and_operations_survive_answers_out_of_order() {
    let mut peer = Peer::new(0, true);
    let entries = u64::from(peer.front.entries());
    for id in 0..entries {
        let operation = [OP_READ, OP_WRITE, OP_FLUSH][id as usize % 3];
        let mut h = header(operation, 1);
        h.id = id;
        peer.front.put_rw(&h, &[segment(WRITABLE, 0, 7)]);
    }
    peer.front.publish();
    let mut out = Vec::new();
    while out.len() < entries as usize {
        peer.source.pull(64, &mut out).unwrap();
    }
    for request in out.into_iter().rev() {
        let status = Status::Ok;
        peer.source
            .complete(&mut vec![Completion { request, status }]);
    }
    peer.source.push().unwrap();
    for id in (0..entries).rev() {
        let r = peer.front.take().unwrap().unwrap();
        let operation = [OP_READ, OP_WRITE, OP_FLUSH][id as usize % 3];
        assert_eq!((r.id, r.operation), (id, operation));
    }
}

/// An impossible index ends the source, and from then on its ring isn't written (ring's promise: "not to be used
/// again"), although requests in flight still complete.
#[test]
fn a_broken_ring_is_not_written_any_more() {
    let mut peer = Peer::new(0, true);
    let put = |p: &mut Peer| {
        p.front
            .put_rw(&header(OP_READ, 1), &[segment(WRITABLE, 0, 7)])
    };
    let (_, mut out) = pull(&mut peer, put);
    assert_eq!(out.len(), 1);
    peer.set_request_producer(1 + peer.front.entries());
    let end = peer.source.pull(1, &mut Vec::new());
    assert!(matches!(end, Err(SourceEnd::Broken(_))));
    let before = peer.ring_bytes();
    let request = out.remove(0);
    let status = Status::Ok;
    peer.source
        .complete(&mut vec![Completion { request, status }]);
    let _ = peer.source.push();
    assert_eq!(peer.mapped(), 0, "still unmapped");
    assert!(peer.ring_bytes() == before, "a broken ring was written");
}
