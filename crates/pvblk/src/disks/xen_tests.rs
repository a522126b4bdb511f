//! Standing orders for Xen guests that come and go at run time, with a simulated xenstore and hypervisor.

#[path = "../../../export/tests/xen_support/mod.rs"]
mod xen_support;

use super::tests::{Bed, HANG};
use super::{Export, Why};
use crate::wanted::DiskWanted;
use pvblk_export::xen::XenServer;
use pvblk_export::xen::node::Node;
use pvblk_protocol::xenbus::BackendOffers;
use std::sync::Arc;
use xen_support::{Guest, Handle, SMALL};

const XVDA: u32 = 51712;

/// A domain 0 without a server, and a server of ours without disks in it.
fn beds() -> (xen_support::Bed, Bed) {
    let mut xen = xen_support::Bed::new();
    xen.server = None;
    let bed = Bed::new();
    let hypervisor = Arc::new(Handle(Arc::clone(&xen.xen)));
    let service = &bed.registry.service;
    let offers = BackendOffers::default();
    let server = XenServer::start(xen.daemon.client(), hypervisor, service, offers, Vec::new());
    bed.registry.exports.set_xen(server.unwrap());
    (xen, bed)
}

/// A guest that was just introduced.
fn introduced(xen: &xen_support::Bed, domid: u16, name: &str) -> Guest {
    let guest = Guest::named(&xen.daemon, &xen.xen, domid, name);
    xen.daemon.fire("@introduceDomain");
    guest
}

fn is_offered(xen: &xen_support::Bed, domid: u16) -> bool {
    let node = Node { domid, devid: XVDA };
    let place = format!("{}/disk", node.back_end(0));
    xen.daemon.read(&place).is_some()
}

fn gone(xen: &xen_support::Bed, guest: Guest) {
    let place = guest.node.back_end(0);
    guest.destroy();
    xen.daemon.until_gone(&place);
}

fn order(guest: &str) -> Export {
    Export::XenAttach {
        disk: "a".into(),
        guest: guest.into(),
    }
}

#[test]
fn standing_orders_come_and_go_with_their_disk_and_by_themselves() {
    let (xen, bed) = beds();
    // It runs already when the disk is added, to a server that had no order.
    let mut guest = introduced(&xen, 7, "debian");
    let wanted = DiskWanted {
        xen_attach: vec!["debian:xvda".into()],
        ..DiskWanted::new("mem:16M")
    };
    let shown = bed.registry.add("a", &wanted, HANG).unwrap();
    assert!(
        shown.exports.contains(&"xen:debian:xvda".to_owned()),
        "{shown:?}"
    );
    guest.connect(SMALL);
    guest.check();
    assert_eq!(bed.remove("a", false).unwrap_err().why, Why::InUse);
    // An order by itself, for a guest that comes later.
    bed.registry.add_export(&order("other"), HANG).unwrap();
    let twice = bed.registry.add_export(&order("other"), HANG).unwrap_err();
    assert_eq!(twice.why, Why::Exists);
    let mut other = introduced(&xen, 8, "other");
    other.connect(SMALL);
    other.check();
    // Taken back: the guest keeps its disk, and its next domain gets none.
    bed.registry
        .remove_export(&order("other"), false, HANG)
        .unwrap();
    let none = bed
        .registry
        .remove_export(&order("other"), false, HANG)
        .unwrap_err();
    assert_eq!(none.why, Why::NoDisk);
    other.check();
    gone(&xen, other);
    let other = introduced(&xen, 9, "other");
    // The order that stays holds for the next domain of its guest, which the server sees after that one.
    gone(&xen, guest);
    let mut guest = introduced(&xen, 10, "debian");
    guest.connect(SMALL);
    guest.check();
    assert!(!is_offered(&xen, 9));
    other.destroy();
    // The order goes with the disk.
    bed.remove("a", true).unwrap();
    guest.destroy();
    let guest = introduced(&xen, 11, "debian");
    let wanted = DiskWanted {
        xen_attach: vec!["last".into()],
        ..DiskWanted::new("mem:16M")
    };
    bed.registry.add("b", &wanted, HANG).unwrap();
    let mut last = introduced(&xen, 12, "last");
    last.connect(SMALL);
    last.check();
    assert!(!is_offered(&xen, 11));
    guest.destroy();
    xen.daemon.end_guests();
    bed.registry.exports.stop();
}

#[test]
fn orders_that_cannot_be_kept_leave_no_disk_and_no_order() {
    let (xen, bed) = beds();
    let wanted = |orders: &[&str]| DiskWanted {
        xen_attach: orders.iter().map(|o| (*o).to_owned()).collect(),
        ..DiskWanted::new("mem:16M")
    };
    bed.registry
        .add("a", &wanted(&["debian:xvda"]), HANG)
        .unwrap();
    // The device is another disk's; the order before it is taken back with the disk.
    let refused = bed
        .registry
        .add("b", &wanted(&["other:xvda", "debian:xvda"]), HANG);
    let refused = refused.unwrap_err();
    assert!(refused.text.contains("is disk a"), "{refused}");
    bed.registry
        .add("c", &wanted(&["other:xvda"]), HANG)
        .unwrap();
    let mut other = introduced(&xen, 8, "other");
    other.connect(SMALL);
    other.check();
    // A server without --xen.
    bed.registry.exports.stop();
    let refused = bed
        .registry
        .add("d", &wanted(&["debian"]), HANG)
        .unwrap_err();
    assert!(refused.text.contains("start it with --xen"), "{refused}");
    // Its device may still be closing.
    let left = bed.registry.show("d");
    assert!(left.map_or(true, |d| d.state == "removing"));
    xen.daemon.end_guests();
}
