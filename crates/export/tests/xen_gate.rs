//! No guest connects to a disk while requests of a guest that is gone are in flight: an old write could overwrite a
//! newer one.

mod xen_support;

use pvblk_protocol::blkif::wire::OP_WRITE;
use pvblk_testing::wait;
use std::sync::atomic::Ordering;
use xen_support::*;

/// A guest that is destroyed with a write at the device.
fn lost(bed: &Bed, guest: &mut Guest) {
    bed.a.hold.store(true, Ordering::Release);
    let page = guest.page(false);
    guest.put(0, OP_WRITE, 0, &[whole(page.gref)]);
    guest.kick(0);
    wait("it is at the device", || {
        bed.a.held.load(Ordering::Acquire) == 1
    });
    bed.daemon.remove(&guest.node.back_end(0));
}

#[test]
fn a_guest_that_was_offered_the_disk_before_waits() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let mut other = bed.connected(8, "b", SMALL);
    let mut next = bed.guest(9);
    bed.attach(&next, "a");
    next.until_back("2");
    lost(&bed, &mut guest);
    bed.still_serves(&mut other);
    let keys = next.keys(SMALL);
    next.publish(&keys, "3");
    bed.still_serves(&mut other);
    assert_eq!(bed.daemon.read(&next.back("state")).as_deref(), Some("2"));
    bed.a.hold.store(false, Ordering::Release);
    next.until_back("4");
    next.set_state("4");
    next.check();
}

#[test]
fn a_guest_that_closed_before_waits() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let mut other = bed.connected(8, "b", SMALL);
    let mut next = bed.connected(9, "a", SMALL);
    next.close();
    lost(&bed, &mut guest);
    bed.still_serves(&mut other);
    next.set_state("1");
    bed.still_serves(&mut other);
    assert_eq!(bed.daemon.read(&next.back("state")).as_deref(), Some("6"));
    bed.a.hold.store(false, Ordering::Release);
    next.connect(SMALL);
    next.check();
}

#[test]
fn a_server_that_stops_lets_no_guest_begin() {
    let mut bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let next = bed.guest(9);
    lost(&bed, &mut guest);
    bed.attach(&next, "a");
    let idle = bed.guest(10);
    bed.attach(&idle, "b");
    idle.until_back("2");
    bed.a.hold.store(false, Ordering::Release);
    bed.server = None;
    for guest in [&next, &idle] {
        let state = bed.daemon.read(&guest.back("state"));
        assert_ne!(state.as_deref(), Some("2"), "{}", guest.node);
    }
}
