//! Disks of Xen guests from attach to detach, over a xenstore and a hypervisor of the test's own.

mod xen_support;

use xen_support::*;

#[test]
fn first() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    guest.check();
    guest.close();
    assert_eq!(guest.memory.mapped(), 0);
}
