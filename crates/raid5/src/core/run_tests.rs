//! Runs step by step, in an array with chunks of four stripes.

use super::MemberIo;
use super::tests::{Array, MEMBERS, names};
use crate::PplHeader;
use crate::words::Errands;
use pvblk_block::{Buffer, Op, Request, RequestFlags, Status};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A block, and a row of four stripes, in sectors.
const BLOCK: u64 = 8;
const ROW: u64 = 3 * 4 * BLOCK;

/// A write whose sectors have their own numbers as contents.
fn write(sector: u64, sectors: u64, flags: RequestFlags) -> Box<Request> {
    let data = Buffer::anonymous(sectors as usize * 512).expect("memory");
    for n in 0..sectors {
        data.write(n as usize * 512, &contents(sector + n));
    }
    let mut request = Request::with_buffers(Op::Write, sector, vec![data], sector);
    request.flags = flags;
    request
}

fn contents(sector: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    bytes[..8].copy_from_slice(&(sector + 1).to_le_bytes());
    bytes
}

/// I/O of a row's write: stripes of each, and the XOR of all members' bytes, which is 0 if parity is right.
fn check(array: &Array, ios: &[MemberIo], stripes: std::ops::Range<u64>) {
    assert_eq!(ios.len(), MEMBERS, "one for each member");
    let geometry = &array.common.geometry;
    let base = super::world::DATA_SECTORS;
    let mut by_slot = BTreeMap::new();
    for io in ios {
        assert_eq!(
            (io.op, io.sector),
            (Op::Write, base + stripes.start * BLOCK)
        );
        let bytes: Vec<u8> = io.data.buffers().iter().flat_map(Buffer::to_vec).collect();
        assert_eq!(
            bytes.len() as u64,
            (stripes.end - stripes.start) * BLOCK * 512
        );
        by_slot.insert(io.slot, bytes);
    }
    for stripe in stripes.clone() {
        let at = ((stripe - stripes.start) * BLOCK * 512) as usize;
        for index in 0..geometry.data_members() {
            let bytes = &by_slot[&geometry.stripe_data(stripe, index)];
            let first = geometry.stripe_array_sector(stripe, index);
            for n in 0..BLOCK {
                let at = at + n as usize * 512;
                assert_eq!(bytes[at..at + 512], contents(first + n));
            }
        }
    }
    let bytes = by_slot[&0].len();
    let xor = |at: usize| by_slot.values().fold(0, |sum, bytes| sum ^ bytes[at]);
    assert!((0..bytes).all(|at| xor(at) == 0), "parity");
}

#[test]
fn a_row_is_one_write_for_each_member() {
    for flags in [
        RequestFlags::empty(),
        RequestFlags::STABLE_BUFFERS,
        RequestFlags::FUA,
    ] {
        let mut array = Array::with_chunks(16, true);
        array.queues[0].submit(write(ROW, ROW, flags));
        let ios = array.go(0);
        check(&array, &ios, 4..8);
        assert!(
            ios.iter()
                .all(|io| io.fua == flags.contains(RequestFlags::FUA))
        );
        array.end(0, ios, MEMBERS);
        assert_eq!(array.done(0), [Status::Ok]);
        let counts = array.common.counts();
        assert_eq!((counts.rounds, counts.whole, counts.prereads), (4, 4, 0));
        assert_eq!(counts.written_bytes, ROW * 512);
        let borrows = flags.contains(RequestFlags::STABLE_BUFFERS);
        // A XOR of three blocks, and copies.
        let moved = counts.written_bytes * 4 / 3 + if borrows { 0 } else { 2 * ROW * 512 };
        assert_eq!(counts.moved_bytes, moved);
        assert!(array.queues[0].is_idle());
        assert_eq!(array.common.words.busy(), 0);
    }
}

#[test]
fn a_row_of_two_writes_is_one_write_for_each_member() {
    let mut array = Array::with_chunks(16, true);
    array.queues[0].submit(write(0, 2 * 4 * BLOCK, RequestFlags::STABLE_BUFFERS));
    array.queues[0].submit(write(2 * 4 * BLOCK, 4 * BLOCK, RequestFlags::empty()));
    let ios = array.go(0);
    check(&array, &ios, 0..4);
    array.end(0, ios, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok, Status::Ok]);
}

#[test]
fn a_device_that_takes_less_gets_several() {
    let mut array = Array::with_chunks(3, true);
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    assert_eq!(ios.len(), 2 * MEMBERS);
    check(&array, &ios[..MEMBERS], 0..3);
    check(&array, &ios[MEMBERS..], 3..4);
    array.end(0, ios, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
}

#[test]
fn a_stripe_that_is_busy_ends_a_run() {
    let mut array = Array::with_chunks(16, true);
    // Each queue has pages then.
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    array.end(0, ios, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
    // Part of a block, so it reads.
    array.queues[1].submit(write(2 * BLOCK, 1, RequestFlags::empty()));
    let reads = array.go(1);
    assert!(reads.iter().all(|io| io.op == Op::Read));
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    check(&array, &ios[..MEMBERS], 0..2);
    check(&array, &ios[MEMBERS..], 3..4);
    array.end(0, ios, MEMBERS);
    assert_eq!(array.done(0), [], "stripe 2 is the other queue's");
    for io in reads {
        array.queues[1].ended(io.token, true);
    }
    let mut ios = array.go(1);
    while !ios.is_empty() {
        ios.drain(..)
            .for_each(|io| array.queues[1].ended(io.token, true));
        ios = array.go(1);
        ios.append(&mut array.go(0));
        array.deliver(1);
        array.deliver(0);
    }
    array.go(0);
    assert_eq!(
        (array.done(0), array.done(1)),
        (vec![Status::Ok], vec![Status::Ok])
    );
}

#[test]
fn a_run_that_a_member_fails_waits_until_superblocks_name_it() {
    let mut array = Array::with_chunks(16, true);
    array.queues[0].submit(write(0, ROW, RequestFlags::STABLE_BUFFERS));
    let ios = array.go(0);
    check(&array, &ios, 0..4);
    array.end(0, ios, 1);
    assert_eq!(array.done(0), []);
    assert_eq!(array.queues[0].errands, [names(1 << 1)]);
    array.queues[0].named(0);
    assert_eq!(array.go(0).len(), 0);
    assert_eq!(array.done(0), [Status::Ok]);
    assert_eq!(
        (array.common.missing(), array.common.words.busy()),
        (Some(1), 0)
    );
    assert_eq!(array.queues[0].places.in_use(), 0);
    // Without the member stripes go alone.
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let mut ios = array.go(0);
    while !ios.is_empty() {
        assert!(ios.iter().all(|io| io.data.buffers().len() == 1));
        ios.drain(..)
            .for_each(|io| array.queues[0].ended(io.token, true));
        ios = array.go(0);
    }
    assert_eq!(array.done(0), [Status::Ok]);
}

#[test]
fn a_run_that_two_members_fail_fails() {
    let mut array = Array::with_chunks(16, true);
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    for io in array.go(0) {
        array.queues[0].ended(io.token, io.slot > 1);
    }
    assert_eq!(array.go(0).len(), 0);
    assert!(array.common.is_broken());
    assert_eq!(array.done(0), [Status::IoError]);
    assert_eq!(array.common.words.busy(), 0);
}

#[test]
fn nothing_is_written_before_superblocks_say_dirty() {
    let mut array = Array::with_chunks(16, false);
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    assert_eq!(array.go(0).len(), 0);
    assert_eq!(array.queues[0].errands, [names(0)]);
    array.queues[0].named(0);
    let ios = array.go(0);
    assert!(ios.iter().all(|io| io.op == Op::Write));
    array.end(0, ios, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    check(&array, &ios, 0..4);
    array.end(0, ios, MEMBERS);
}

#[test]
fn a_run_waits_for_places_of_another() {
    let mut array = Array::with_chunks(16, true);
    // Eight parts of a queue may be at words: those of two rows.
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    array.queues[0].submit(write(ROW, ROW, RequestFlags::empty()));
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let mut ios = array.go(0);
    assert_eq!(ios.len(), 2 * MEMBERS);
    let second = ios.split_off(MEMBERS);
    array.queues[0].ended(ios[0].token, true);
    assert_eq!(array.go(0).len(), 0);
    for io in &ios[1..] {
        array.queues[0].ended(io.token, true);
    }
    let third = array.go(0);
    check(&array, &third, 0..4);
    array.end(0, second, MEMBERS);
    array.end(0, third, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok; 3]);
}

#[test]
fn a_run_without_pages_holds_up_no_stop_of_its_queue() {
    let mut array = Array::with_chunks(16, true);
    // Each queue has pages then.
    array.queues[0].submit(write(ROW, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    array.end(0, ios, MEMBERS);
    array.queues[1].submit(write(2 * BLOCK, 1, RequestFlags::empty()));
    let reads = array.go(1);
    array.queues[0].submit(write(ROW, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    check(&array, &ios, 4..8);
    // The stop waits for the other queue's stripe.
    array.end(0, ios, 1);
    assert_eq!(array.done(0), [Status::Ok]);
    assert!(array.queues[0].errands.is_empty() && array.queues[0].is_stopping());
    let (common, reserve) = (Arc::clone(&array.common), &mut array.queues[0].reserve);
    let words = (&common.words, &common.epoch);
    let pages = std::iter::from_fn(|| reserve.take_now(words, &mut Errands::default()));
    let pages: Vec<_> = pages.collect();
    assert!(!pages.is_empty() && reserve.is_short());
    // Its steps end.
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    assert_eq!(array.go(0).len(), 0);
    for io in reads {
        array.queues[1].ended(io.token, true);
    }
    assert_eq!(array.go(1).len(), 0);
    array.deliver(1);
    assert_eq!(array.queues[0].errands, [names(1 << 1)]);
}

#[test]
fn a_run_takes_pages_that_a_queue_at_rest_keeps() {
    let mut array = Array::with_chunks(16, true);
    for _ in 0..2 {
        for queue in [1, 0] {
            array.queues[queue].submit(write(0, ROW, RequestFlags::empty()));
            let ios = array.go(queue);
            assert_eq!(ios.len(), MEMBERS);
            array.end(queue, ios, MEMBERS);
            assert_eq!(array.done(queue), [Status::Ok]);
        }
    }
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    array.queues[0].submit(write(ROW, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    check(&array, &ios[..MEMBERS], 0..4);
    check(&array, &ios[MEMBERS..], 4..8);
    array.end(0, ios, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok; 2]);
}

#[test]
fn a_stripe_with_a_bad_block_goes_alone() {
    let mut array = Array::with_chunks(16, true);
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    array.end(0, ios, MEMBERS);
    let (common, owner) = (Arc::clone(&array.common), array.queues[0].me);
    let mut token = common.words.claim_free(1, owner).expect("a free word");
    token.record_mut().known.bad = 1;
    let left = common.words.release(token, &common.epoch);
    assert!(matches!(left, Ok(None)));
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    check(&array, &ios[..MEMBERS], 0..1);
    let is_fix = |io: &MemberIo| io.op == Op::Read && io.data.buffers().len() == 1;
    let reads = ios.iter().filter(|io| is_fix(io)).count();
    assert_eq!(reads, MEMBERS - 1, "its block is calculated first");
}

/// The write of a log's unit, whose only entry is for these stripes, all of them whole.
fn check_log(array: &Array, ios: &[MemberIo], stripes: std::ops::Range<u64>) {
    let geometry = &array.common.geometry;
    let [io] = ios else {
        panic!("one write: {ios:?}");
    };
    let parity = geometry.stripe_parity(stripes.start);
    assert_eq!((io.op, io.slot, io.fua), (Op::Write, parity, true));
    let [header] = io.data.buffers() else {
        panic!("no partial parity");
    };
    let header = PplHeader::parse(&header.to_vec(), 7).expect("a header");
    let [entry] = header.entries[..] else {
        panic!("one entry: {header:?}");
    };
    let first = geometry.stripe_array_sector(stripes.start, 0);
    let bytes = (stripes.end - stripes.start) * 3 * BLOCK * 512;
    assert_eq!(
        (
            entry.data_sector,
            entry.pp_bytes,
            u64::from(entry.data_bytes)
        ),
        (first, 0, bytes)
    );
}

/// A write's log is written, if that doesn't fail; its next I/O.
fn end_log(array: &mut Array, ios: Vec<MemberIo>, ok: bool) -> Vec<MemberIo> {
    for io in ios {
        array.queues[0].ended(io.token, ok);
    }
    array.go(0)
}

#[test]
fn a_row_has_one_entry_in_its_log() {
    let mut array = Array::with_log_and_chunks();
    for flags in [RequestFlags::empty(), RequestFlags::STABLE_BUFFERS] {
        array.queues[0].submit(write(ROW, ROW, flags));
        let mut ios = array.go(0);
        if flags != RequestFlags::empty() {
            // The last unit's stripes may be in caches only.
            assert!(ios.iter().all(|io| io.op == Op::Flush) && ios.len() == MEMBERS);
            ios = end_log(&mut array, ios, true);
        }
        check_log(&array, &ios, 4..8);
        let ios = end_log(&mut array, ios, true);
        check(&array, &ios, 4..8);
        array.end(0, ios, MEMBERS);
        assert_eq!(array.done(0), [Status::Ok]);
        assert!(array.queues[0].is_idle());
        assert_eq!(array.common.words.busy(), 0);
    }
}

#[test]
fn a_run_whose_log_fails_is_planned_anew() {
    let mut array = Array::with_log_and_chunks();
    array.queues[0].submit(write(0, ROW, RequestFlags::STABLE_BUFFERS));
    let ios = array.go(0);
    check_log(&array, &ios, 0..4);
    let parity = ios[0].slot;
    // Nobody knows whether caches are lost, so others are flushed before superblocks name it.
    let flushes = end_log(&mut array, ios, false);
    assert!(
        flushes
            .iter()
            .all(|io| io.op == Op::Flush && io.slot != parity)
    );
    array.end(0, flushes, MEMBERS);
    assert_eq!(array.queues[0].errands, [names(1 << parity)]);
    array.queues[0].named(0);
    // There is no parity, so there is no log.
    let ios = array.go(0);
    assert_eq!(ios.len(), 4 * (MEMBERS - 1));
    assert!(ios.iter().all(|io| io.op == Op::Write && io.slot != parity));
    array.end(0, ios, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
    assert!(array.queues[0].is_idle());
    assert_eq!(array.queues[0].places.in_use(), 0);
    assert_eq!(array.common.words.busy(), 0);
}

#[test]
fn a_run_that_a_member_fails_behind_its_log_keeps_nothing() {
    let mut array = Array::with_log_and_chunks();
    array.queues[0].submit(write(0, ROW, RequestFlags::empty()));
    let ios = array.go(0);
    let ios = end_log(&mut array, ios, true);
    check(&array, &ios, 0..4);
    for io in ios {
        array.queues[0].ended(io.token, io.slot != 1);
    }
    let flushes = array.go(0);
    assert_eq!(array.done(0), []);
    array.end(0, flushes, MEMBERS);
    assert_eq!(array.queues[0].errands, [names(1 << 1)]);
    array.queues[0].named(0);
    assert_eq!(array.go(0).len(), 0);
    assert_eq!(array.done(0), [Status::Ok]);
    assert!(array.queues[0].is_idle());
    assert_eq!(array.common.words.busy(), 0);
    let log = array
        .common
        .logs
        .as_ref()
        .expect("a log")
        .peek(array.common.geometry.stripe_parity(0));
    assert_eq!(log.phase(), crate::words::Phase::Free);
}
