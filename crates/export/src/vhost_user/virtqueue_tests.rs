//! One test for each rule, on a driver that breaks it.

use super::*;
use pvblk_block::Region;
use pvblk_protocol::virtio::{Driver, flags};
use std::sync::Arc;

const GUEST: u64 = 0x10000;

fn driver(entries: u16) -> Driver {
    let region = Arc::new(Region::anonymous(1 << 20).unwrap());
    Driver::new(region, GUEST, entries, false)
}

fn queue(d: &Driver, entries: u16) -> Virtqueue {
    Virtqueue::new(d.place(), entries, 0, d.event_index, true)
}

/// Takes the chain at `head`.
fn walk(d: &Driver, head: u16) -> Result<Vec<Descriptor>, Broken> {
    let mut out = Vec::new();
    queue(d, 8).chain(head, &GuestMemory::of_driver(d), &mut out)?;
    Ok(out)
}

#[test]
fn a_good_chain_is_taken_direct_and_indirect() {
    let mut d = driver(8);
    let data = d.at(d.data_offset());
    for indirect in [false, true] {
        d.build(
            2,
            0,
            5,
            &[(data, 512, true), (data + 4096, 1024, true)],
            indirect,
        );
        let chain = walk(&d, 2).unwrap();
        assert_eq!(
            chain.iter().map(|c| c.len).collect::<Vec<_>>(),
            [16, 512, 1024, 1]
        );
        assert_eq!(
            chain.iter().map(|c| c.writable).collect::<Vec<_>>(),
            [false, true, true, true]
        );
    }
    let mut q = queue(&d, 8);
    assert_eq!(q.available(), Ok(0));
    d.make_available(2);
    assert_eq!(q.available(), Ok(1));
    assert_eq!(q.take(), Ok(2));
    q.add_used(2, 7);
    assert_eq!(d.used(), None);
    q.publish();
    assert_eq!(d.used(), Some((2, 7)));
}

#[test]
fn an_available_index_that_jumps() {
    let mut d = driver(8);
    d.set_available(9);
    assert_eq!(queue(&d, 8).available(), Err(Broken::AvailableIndex(9, 8)));
    // Backwards is a long way forwards.
    d.set_available(0xffff);
    assert_eq!(
        queue(&d, 8).available(),
        Err(Broken::AvailableIndex(0xffff, 8))
    );
    d.set_available(8);
    assert_eq!(queue(&d, 8).available(), Ok(8));
}

#[test]
fn a_head_outside_the_table() {
    let mut d = driver(8);
    d.make_available(8);
    let mut q = queue(&d, 8);
    assert_eq!(q.available(), Ok(1));
    assert_eq!(q.take(), Err(Broken::DescriptorIndex(8, 8)));
}

#[test]
fn a_next_outside_the_table() {
    let d = driver(8);
    d.descriptor(0, GUEST, 16, flags::NEXT, 8);
    assert_eq!(walk(&d, 0), Err(Broken::DescriptorIndex(8, 8)));
}

#[test]
fn a_next_outside_the_indirect_table() {
    let d = driver(8);
    let table = d.data_offset();
    d.write_descriptor(table, GUEST, 16, flags::NEXT, 2);
    d.descriptor(0, d.at(table), 32, flags::INDIRECT, 0);
    assert_eq!(walk(&d, 0), Err(Broken::DescriptorIndex(2, 2)));
}

#[test]
fn a_loop() {
    let d = driver(8);
    d.descriptor(0, GUEST, 1, flags::NEXT, 1);
    d.descriptor(1, GUEST, 1, flags::NEXT, 0);
    assert_eq!(walk(&d, 0), Err(Broken::Loop(8)));
    d.descriptor(3, GUEST, 1, flags::NEXT, 3);
    assert_eq!(walk(&d, 3), Err(Broken::Loop(8)));
}

#[test]
fn a_chain_without_a_loop_that_is_too_long() {
    let d = driver(2048);
    for i in 0..=MAX_INDIRECT as u16 {
        d.descriptor(i, GUEST, 1, flags::NEXT, i + 1);
    }
    let result = queue(&d, 2048).chain(0, &GuestMemory::of_driver(&d), &mut Vec::new());
    assert_eq!(result, Err(Broken::Loop(MAX_INDIRECT as u32)));
}

#[test]
fn a_loop_in_an_indirect_table() {
    let d = driver(8);
    let table = d.data_offset();
    for i in 0..4 {
        d.write_descriptor(table + i * 16, GUEST, 1, flags::NEXT, (i as u16 + 1) % 4);
    }
    d.descriptor(0, d.at(table), 64, flags::INDIRECT, 0);
    assert_eq!(walk(&d, 0), Err(Broken::Loop(4)));
}

#[test]
fn an_indirect_table_in_an_indirect_table() {
    let d = driver(8);
    let table = d.data_offset();
    d.write_descriptor(table, d.at(table), 16, flags::INDIRECT, 0);
    d.descriptor(0, d.at(table), 16, flags::INDIRECT, 0);
    assert_eq!(walk(&d, 0), Err(Broken::IndirectInIndirect));
}

#[test]
fn an_indirect_descriptor_with_a_next() {
    let d = driver(8);
    d.descriptor(
        0,
        d.at(d.data_offset()),
        16,
        flags::INDIRECT | flags::NEXT,
        1,
    );
    assert_eq!(walk(&d, 0), Err(Broken::IndirectAndNext));
}

#[test]
fn an_indirect_table_that_was_not_negotiated() {
    let d = driver(8);
    d.descriptor(0, d.at(d.data_offset()), 16, flags::INDIRECT, 0);
    let mut q = Virtqueue::new(d.place(), 8, 0, false, false);
    let result = q.chain(0, &GuestMemory::of_driver(&d), &mut Vec::new());
    assert_eq!(result, Err(Broken::IndirectNotNegotiated));
}

#[test]
fn an_indirect_table_of_a_wrong_length() {
    let d = driver(8);
    for len in [0, 1, 17, (MAX_INDIRECT as u32 + 1) * 16, u32::MAX] {
        d.descriptor(0, d.at(d.data_offset()), len, flags::INDIRECT, 0);
        assert_eq!(walk(&d, 0), Err(Broken::IndirectLength(len)));
    }
}

#[test]
fn an_indirect_table_that_is_not_memory() {
    let d = driver(8);
    for at in [0, GUEST + (1 << 20) - 16, u64::MAX - 8] {
        d.descriptor(0, at, 32, flags::INDIRECT, 0);
        assert_eq!(walk(&d, 0), Err(Broken::Address(at, 32)));
    }
}

#[test]
fn a_readable_descriptor_after_a_writable_one() {
    let d = driver(8);
    d.descriptor(0, GUEST, 16, flags::NEXT | flags::WRITE, 1);
    d.descriptor(1, GUEST, 16, 0, 0);
    assert_eq!(walk(&d, 0), Err(Broken::ReadableAfterWritable));
    // Also across the border to an indirect table.
    let table = d.data_offset();
    d.write_descriptor(table, GUEST, 16, 0, 0);
    d.descriptor(1, d.at(table), 16, flags::INDIRECT, 0);
    assert_eq!(walk(&d, 0), Err(Broken::ReadableAfterWritable));
}

#[test]
fn a_descriptor_of_no_bytes() {
    let d = driver(8);
    d.descriptor(0, GUEST, 0, 0, 0);
    assert_eq!(walk(&d, 0), Err(Broken::Empty));
}

#[test]
fn a_chain_of_more_than_4_gib() {
    let d = driver(8);
    d.descriptor(0, GUEST, u32::MAX, flags::NEXT, 1);
    d.descriptor(1, GUEST, 1, 0, 0);
    assert_eq!(walk(&d, 0), Err(Broken::TooLong));
}

#[test]
fn notifications_are_asked_for_only_when_somebody_sleeps() {
    for event_index in [false, true] {
        let mut d = driver(8);
        d.event_index = event_index;
        let mut q = queue(&d, 8);
        // The device polls: no kick after the first.
        assert!(!q.arm());
        let before = d.available();
        d.make_available(0);
        assert!(d.needs_kick(before));
        assert!(q.arm(), "there is something to take");
        q.disarm();
        assert_eq!(q.take(), Ok(0));
        let before = d.available();
        if event_index {
            // Only once the event is passed is there another kick.
            q.arm();
            assert!(!q.arm());
            d.make_available(1);
            d.make_available(2);
            assert!(d.needs_kick(before));
            assert!(!d.needs_kick(before + 1));
        } else {
            d.make_available(1);
            assert!(!d.needs_kick(before));
        }
        // The driver polls: no call.
        d.want_calls(false);
        q.add_used(0, 1);
        q.publish();
        assert!(!q.needs_call());
        d.used();
        d.want_calls(true);
        q.add_used(1, 1);
        q.publish();
        assert!(q.needs_call());
    }
}

#[test]
fn indices_wrap() {
    let mut d = driver(8);
    let mut q = queue(&d, 8);
    for i in 0..70_000u32 {
        d.make_available((i % 8) as u16);
        assert_eq!(q.available(), Ok(1));
        let head = q.take().unwrap();
        q.add_used(head, i);
        q.publish();
        assert_eq!(d.used(), Some((i % 8, i)));
    }
}
