//! Bits of the bitmap, step by step.

use super::MemberIo;
use super::Opening;
use super::membership::Device;
use super::queue::Errand;
use super::tests::{Array, MEMBERS, STRIPES};
use super::world::devices_of;
use crate::core::Action;
use crate::core::members::{Incoming, Members};
use crate::words::Room;
use crate::{STRIPE_BYTES, STRIPE_SECTORS};
use pvblk_block::{Buffer, Op, Request, Status};
use std::sync::Arc;

fn whole() -> Members {
    Members::new((0..MEMBERS).map(Some).collect(), None)
}

fn flushes(ios: &[MemberIo]) -> usize {
    ios.iter().filter(|io| io.op == Op::Flush).count()
}

/// I/O of a queue ends, and all that follows it; the slots that are written.
fn finish(array: &mut Array, queue: usize, mut ios: Vec<MemberIo>) -> Vec<usize> {
    let mut written = Vec::new();
    while !ios.is_empty() {
        for io in ios {
            written.extend((io.op == Op::Write).then_some(io.slot));
            array.queues[queue].ended(io.token, true);
        }
        ios = array.go(queue);
    }
    written
}

/// A sweep until members are flushed for it, which isn't due before the second one.
fn sweep(array: &mut Array) -> Vec<MemberIo> {
    array.queues[0].start_sweep(true);
    assert!(!array.queues[0].is_sweeping(), "a bit goes early");
    array.queues[0].start_sweep(true);
    array.queues[0].go_on_sweeping();
    array.go(0)
}

fn is_clear(array: &Array, stripe: u64) -> bool {
    array
        .common
        .chunks()
        .expect("a bitmap")
        .is_clear(stripe as usize)
}

#[test]
fn a_batch_waits_for_its_bit_only() {
    let mut array = Array::with_bits(whole(), &[1]);
    assert_eq!(array.write(0, 0).len(), 0, "a write without its bit");
    assert_eq!(
        std::mem::take(&mut array.queues[0].intends),
        [Opening {
            stripe: 0,
            writes: true
        }]
    );
    let other = array.write(0, 1);
    array.end(0, other, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
    array.common.bits_are_set([0]);
    array.queues[0].intended(0, 0);
    let writes = array.go(0);
    assert_eq!(writes.len(), MEMBERS);
    array.end(0, writes, MEMBERS);
    assert_eq!(array.done(0), [Status::Ok]);
    assert!(array.queues[0].is_idle());
}

/// A write of a block needs reads, and writes that need reads wait for one another.
#[test]
fn a_batch_that_waits_for_its_bit_holds_up_no_other() {
    let mut array = Array::with_bits(whole(), &[1]);
    let mut ask = |stripe: u64| {
        let sector = array.common.geometry.stripe_array_sector(stripe, 0);
        let data = Buffer::anonymous(STRIPE_BYTES).expect("memory");
        let request = Request::with_buffers(Op::Write, sector, vec![data], stripe);
        array.queues[0].submit(request);
        array.go(0)
    };
    assert_eq!(ask(0).len(), 0, "a read or write without its bit");
    let other = ask(1);
    assert!(!other.is_empty());
    finish(&mut array, 0, other);
    assert_eq!(array.done(0), [Status::Ok]);
    array.common.bits_are_set([0]);
    array.queues[0].intended(0, 0);
    let ios = array.go(0);
    finish(&mut array, 0, ios);
    assert_eq!(array.done(0), [Status::Ok]);
    assert!(array.queues[0].is_idle());
}

#[test]
fn a_member_that_fails_a_bit_is_kicked_before_the_write() {
    let mut array = Array::with_bits(whole(), &[]);
    array.write(0, 0);
    array.common.bits_are_set([0]);
    array.queues[0].intended(0, 1 << 2);
    let ios = array.go(0);
    assert_eq!(flushes(&ios), MEMBERS - 1);
    assert_eq!(
        ios.len(),
        MEMBERS - 1,
        "a write before superblocks name the member"
    );
    array.end(0, ios, MEMBERS);
    let named = array.queues[0].errands.pop();
    assert!(matches!(named, Some(Errand::Name { failed, .. }) if failed == 1 << 2));
    array.queues[0].named(0);
    let writes = array.go(0);
    assert!(!writes.is_empty() && writes.iter().all(|io| io.slot != 2));
    finish(&mut array, 0, writes);
    assert_eq!(array.done(0), [Status::Ok]);
}

#[test]
fn a_sweep_waits_for_a_write_and_flushes_then() {
    let mut array = Array::with_bits(whole(), &[0, 1]);
    let writes = array.write(1, 0);
    let ios = sweep(&mut array);
    assert_eq!(ios.len(), 0, "a flush before a write has ended");
    array.end(1, writes, MEMBERS);
    array.queues[0].go_on_sweeping();
    let ios = array.go(0);
    assert_eq!(flushes(&ios), MEMBERS);
    assert!(!is_clear(&array, 0));
    array.end(0, ios, MEMBERS);
    assert!(is_clear(&array, 0) && is_clear(&array, 1));
    assert!(!array.queues[0].is_sweeping());
}

#[test]
fn a_write_keeps_a_bit_that_is_being_taken_away() {
    let mut array = Array::with_bits(whole(), &[0, 1]);
    let ios = sweep(&mut array);
    assert_eq!(flushes(&ios), MEMBERS);
    let writes = array.write(1, 0);
    assert_eq!(writes.len(), MEMBERS, "its bit is there");
    array.end(0, ios, MEMBERS);
    assert!(!is_clear(&array, 0) && is_clear(&array, 1));
    array.end(1, writes, MEMBERS);
    assert_eq!(array.done(1), [Status::Ok]);
}

#[test]
fn a_sweep_that_a_member_fails_clears_nothing() {
    let mut array = Array::with_bits(whole(), &[0]);
    let ios = sweep(&mut array);
    for io in ios {
        array.queues[0].ended(io.token, io.slot != 1);
    }
    assert!(!is_clear(&array, 0));
    let ios = array.go(0);
    array.end(0, ios, MEMBERS);
    let named = array.queues[0].errands.pop();
    assert!(matches!(named, Some(Errand::Name { failed, .. }) if failed == 1 << 1));
    array.queues[0].named(0);
    array.go(0);
    // Without a member nothing is swept.
    (0..4).for_each(|_| array.queues[0].start_sweep(true));
    assert!(!array.queues[0].is_sweeping() && !is_clear(&array, 0));
}

#[test]
fn a_kick_ends_a_sweep_that_waits() {
    let mut array = Array::with_bits(whole(), &[0, 3]);
    let writes = array.write(1, 0);
    assert_eq!(sweep(&mut array).len(), 0);
    // The write's end is the end of a member.
    for io in writes {
        array.queues[1].ended(io.token, io.slot != 1);
    }
    array.queues[0].go_on_sweeping();
    assert_eq!(array.go(0).len(), 0);
    assert!(!array.queues[0].is_sweeping() && !is_clear(&array, 3));
}

/// A member comes back by the bitmap: only stripes that it marks are recovered, those included that are marked meanwhile.
#[test]
fn a_rebuild_by_the_bitmap_passes_over_unmarked_stripes() {
    let mut members = whole();
    members.lose(1);
    let mut array = Array::with_bits(members, &[2, 6]);
    let room = Room {
        bytes: STRIPE_BYTES as u64,
        segments: 2,
    };
    let device: Device = devices_of(2, true, false, room).remove(1);
    array.queues[0].take_in(1, 1, Arc::new(device), true);
    let ios = array.go(0);
    array.end(0, ios, MEMBERS);
    array.queues[0].errands.clear();
    array.queues[0].named(0);
    array.go(0);
    array.queues[0]
        .start_sync(Action::Recover)
        .expect("a device");
    let now = array.queues[0].sync_now().expect("it goes on");
    assert_eq!((now.of_sectors, now.by_bitmap), (2 * STRIPE_SECTORS, true));
    array.queues[0].allow_stripes(1);
    let mut recovered = Vec::new();
    recover(&mut array, &mut recovered);
    assert_eq!(recovered, [2]);
    // One that was passed over goes to the device, and one behind the position is recovered.
    array.common.bits_are_set([0, 7]);
    let ios = array.submit(1, 0);
    let written = finish(&mut array, 1, ios);
    assert!(written.contains(&1));
    let ios = array.submit(1, 7);
    let written = finish(&mut array, 1, ios);
    assert!(!written.contains(&1));
    assert_eq!(array.done(1), [Status::Ok, Status::Ok]);
    array.queues[0].allow_stripes(u64::MAX);
    recover(&mut array, &mut recovered);
    recovered.sort_unstable();
    assert_eq!(recovered, [2, 6, 7]);
    let incoming: Incoming = array
        .common
        .membership()
        .incoming()
        .expect("not a member yet");
    assert_eq!(incoming.done, STRIPES);
}

/// I/O of queue 0 ends until there is none; adds the stripes that are written to the incoming device.
fn recover(array: &mut Array, recovered: &mut Vec<u64>) {
    loop {
        let ios = array.go(0);
        if ios.iter().all(|io| io.op == Op::Flush) {
            return;
        }
        for io in ios {
            if io.op == Op::Write {
                assert_eq!(io.slot, 1);
                let data = array.common.membership().device(1).slot.data_sectors;
                recovered.push((io.sector - data) / STRIPE_SECTORS);
            }
            array.queues[0].ended(io.token, true);
        }
    }
}

/// Otherwise the chunk's bit would be cleared before the write.
#[test]
fn a_sweep_waits_for_a_write_that_waits_for_its_log() {
    let mut array = Array::with_marks(whole());
    let ios = array.write(1, 0);
    let reads = ios.iter().filter(|io| io.op == Op::Read).count();
    assert!(reads == 0 && !ios.is_empty(), "the log is written first");
    // The background is told that a sweep will be due.
    assert!(!is_clear(&array, 0) && std::mem::take(&mut array.queues[1].marked));
    assert_eq!(sweep(&mut array).len(), 0, "a flush before the write");
    let written = finish(&mut array, 1, ios);
    assert_eq!(array.done(1), [Status::Ok]);
    assert!(written.len() > MEMBERS && !is_clear(&array, 0));
    array.queues[0].go_on_sweeping();
    let flush = array.go(0);
    assert_eq!(flushes(&flush), MEMBERS);
    array.end(0, flush, MEMBERS);
    assert!(is_clear(&array, 0));
    let ios = array.submit(1, 0);
    finish(&mut array, 1, ios);
    assert!(array.queues[1].marked, "the bit is set again");
}
