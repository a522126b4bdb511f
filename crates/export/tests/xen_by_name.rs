//! Standing orders: disks for guests by name, while guests start, reboot and are restored, and servers start and
//! stop.

mod xen_support;

use pvblk_export::xen::node::Node;
use pvblk_protocol::blkif::wire::OP_WRITE;
use pvblk_protocol::xenstore::Operation;
use pvblk_testing::wait;
use xen_support::*;

const XVDA: u32 = 51712;
const XVDB: u32 = 51728;

/// A guest that was just introduced.
fn introduced(bed: &Bed, domid: u16, name: &str) -> Guest {
    let guest = Guest::named(&bed.daemon, &bed.xen, domid, name);
    bed.daemon.fire("@introduceDomain");
    guest
}

/// Waits until the server has handled all earlier events: another guest comes and gets its disk.
fn settled(bed: &Bed, domid: u16) {
    let mut other = introduced(bed, domid, "other");
    other.connect(SMALL);
    other.check();
    other.destroy();
    bed.daemon.until_gone(&other.node.back_end(0));
}

fn disk_of(bed: &Bed, domid: u16, devid: u32) -> Option<String> {
    let back = Node { domid, devid }.back_end(0);
    bed.daemon.read(&format!("{back}/disk"))
}

/// Puts a write that stays at the device.
fn hold(guest: &mut Guest, ram: &Ram) {
    ram.hold.store(true, std::sync::atomic::Ordering::Release);
    let page = guest.page(false);
    guest.put(0, OP_WRITE, 0, &[whole(page.gref)]);
    guest.kick(0);
    wait("it is at the device", || {
        ram.held.load(std::sync::atomic::Ordering::Acquire) == 1
    });
}

fn release(ram: &Ram) {
    ram.hold.store(false, std::sync::atomic::Ordering::Release);
}

#[test]
fn guests_of_a_name_get_their_disk_each_time_that_they_start() {
    let mut bed = Bed::with_orders(&[("a", "debian", Some(XVDA)), ("b", "other", None)]);
    for domid in [7, 9] {
        let mut guest = introduced(&bed, domid, "debian");
        guest.connect(SMALL);
        if domid == 9 {
            assert!(guest.read(0, 64, 0, 512) == [0xdd; 512]);
        }
        guest.write(0, 64, 0, &[0xdd; 512]);
        guest.destroy();
        bed.daemon.until_gone(&guest.node.back_end(0));
    }
    // Similar names get nothing.
    for (domid, name) in [(10, "debian2"), (11, "debia"), (12, "Debian"), (13, "")] {
        introduced(&bed, domid, name);
        settled(&bed, domid + 100);
        assert_eq!(disk_of(&bed, domid, XVDA), None, "{name:?}");
    }
    // A guest that runs before the server starts.
    bed.server = None;
    let mut guest = introduced(&bed, 14, "debian");
    assert_eq!(disk_of(&bed, 14, XVDA), None);
    bed.start();
    guest.connect(SMALL);
    assert!(guest.read(0, 64, 0, 512) == [0xdd; 512]);
}

/// libxl writes its own records before the introduction, and a restored guest looks for its disks right after that.
#[test]
fn a_guest_gets_its_disk_before_it_is_introduced() {
    let bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    settled(&bed, 100);
    bed.daemon.edit(|tree| {
        tree.write("/local/domain/7/name", "debian");
        tree.write("/libxl/7", "");
    });
    bed.daemon
        .until_is("/local/domain/0/backend/pvblk/7/51712/state", "2");
}

/// A toolstack may write the name after the domain's directory.
#[test]
fn a_domain_without_a_name_is_looked_at_again() {
    let bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    bed.daemon.write("/local/domain/7/vm", "x");
    bed.daemon.fire("@introduceDomain");
    settled(&bed, 100);
    let mut guest = introduced(&bed, 7, "debian");
    guest.connect(SMALL);
    guest.check();
}

#[test]
fn disks_by_order_have_the_same_directories_as_disks_by_hand() {
    let bed = Bed::with_orders(&[("a", "debian", None)]);
    let ordered = introduced(&bed, 7, "debian");
    ordered.until_back("2");
    let by_hand = bed.guest(8);
    bed.attach(&by_hand, "a");
    by_hand.until_back("2");
    let strip = |guest: &Guest, domid: &str| {
        let text = bed.daemon.edit(|tree| tree.below(&guest.node.back_end(0)))
            + &bed.daemon.edit(|tree| tree.below(&guest.node.front_end()));
        text.replace(&format!("/{domid}/"), "/N/")
            .replace(&format!("\"{domid}\""), "\"N\"")
    };
    let text = strip(&ordered, "7");
    assert!(text.contains("virtual-device"), "{text}");
    assert_eq!(text, strip(&by_hand, "8"));
}

/// Requests of the first domain are in flight when the second appears, as after a reboot under load.
#[test]
fn a_rebooted_guest_waits_for_the_requests_of_its_former_domain() {
    let bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    let mut first = introduced(&bed, 7, "debian");
    first.connect(SMALL);
    hold(&mut first, &bed.a);
    first.destroy();
    let mut second = introduced(&bed, 8, "debian");
    // The directories exist at once, because a restored guest looks for them once.
    bed.daemon.until_is(&second.front("state"), "1");
    settled(&bed, 100);
    assert_eq!(bed.daemon.read(&second.back("state")).as_deref(), Some("1"));
    release(&bed.a);
    second.connect(SMALL);
    second.check();
}

/// A domain that is kept, for a dump for example, keeps its queues until it is destroyed.
#[test]
fn two_domains_of_a_name_never_have_the_disk_at_once() {
    let bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    let mut first = introduced(&bed, 7, "debian");
    first.connect(SMALL);
    first.check();
    bed.daemon.write("/local/domain/7/name", "debian-kept");
    let mut second = introduced(&bed, 8, "debian");
    bed.daemon.until_is(&second.front("state"), "1");
    settled(&bed, 100);
    assert_eq!(bed.daemon.read(&second.back("state")).as_deref(), Some("1"));
    first.check();
    // None of its requests is in flight, so no event reports their end.
    first.destroy();
    second.connect(SMALL);
    second.check();
    // Nor while the first could connect at any moment.
    let waits = introduced(&bed, 9, "debian");
    bed.daemon.until_is(&waits.front("state"), "1");
    settled(&bed, 101);
    assert_eq!(bed.daemon.read(&waits.back("state")).as_deref(), Some("1"));
    second.close();
    waits.until_back("2");
    // A domain that has released the disk may not come back.
    second.set_state("1");
    settled(&bed, 103);
    assert_eq!(bed.daemon.read(&second.back("state")).as_deref(), Some("6"));
    second.set_state("6");
    let third = introduced(&bed, 10, "debian");
    bed.daemon.until_is(&third.front("state"), "1");
    settled(&bed, 102);
    assert_eq!(bed.daemon.read(&third.back("state")).as_deref(), Some("1"));
    waits.destroy();
    third.until_back("2");
    // By hand everything is allowed as before.
    bed.connected(20, "a", SMALL).check();
}

#[test]
fn a_disk_detached_by_hand_stays_so_until_the_domain_is_gone() {
    let bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    let mut guest = introduced(&bed, 7, "debian");
    guest.connect(SMALL);
    guest.check();
    guest.set_state("6");
    bed.toolstack().detach(guest.node, WAIT, false).unwrap();
    bed.daemon.fire("@introduceDomain");
    settled(&bed, 100);
    assert_eq!(disk_of(&bed, 7, XVDA), None);
    // By hand it may come back, too.
    guest.let_go();
    bed.attach(&guest, "a");
    guest.connect(SMALL);
    guest.check();
    guest.destroy();
    let mut next = introduced(&bed, 8, "debian");
    next.connect(SMALL);
    next.check();
}

#[test]
fn a_guest_that_has_the_device_or_the_disk_keeps_what_it_has() {
    let bed = Bed::with_orders(&[
        ("a", "debian", Some(XVDA)),
        ("b", "debian", None),
        ("b", "other", None),
    ]);
    // The kernel's own back end has xvda, and the second order doesn't take a device that another order names.
    let path = "/local/domain/7/device/vbd/51712/backend";
    bed.daemon.write(path, "elsewhere");
    introduced(&bed, 7, "debian");
    settled(&bed, 100);
    assert_eq!(bed.daemon.read(path).as_deref(), Some("elsewhere"));
    assert_eq!(disk_of(&bed, 7, XVDA), None);
    assert_eq!(disk_of(&bed, 7, XVDB).as_deref(), Some("b"));
    // Attached by hand, as another device.
    let mut tools = bed.toolstack();
    bed.daemon.write("/local/domain/8/name", "debian");
    let (domid, devid) = (8, 51744);
    tools.attach(Node { domid, devid }, "a").unwrap();
    bed.daemon.fire("@introduceDomain");
    settled(&bed, 101);
    assert_eq!(disk_of(&bed, 8, XVDA), None);
    assert_eq!(disk_of(&bed, 8, XVDB).as_deref(), Some("b"));
}

#[test]
fn a_guest_that_is_renamed_keeps_what_it_has_and_gets_nothing_new() {
    let bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    let mut guest = introduced(&bed, 7, "debian");
    guest.connect(SMALL);
    introduced(&bed, 8, "another");
    settled(&bed, 100);
    bed.daemon.write("/local/domain/7/name", "another");
    bed.daemon.write("/local/domain/8/name", "debian");
    bed.daemon.fire("@introduceDomain");
    settled(&bed, 101);
    guest.check();
    assert_eq!(disk_of(&bed, 8, XVDA), None);
}

/// A guest that has closed never comes back by itself, so a new device replaces the old one.
#[test]
fn a_server_that_was_restarted_gives_guests_their_disks_again() {
    let mut bed = Bed::with_orders(&[("a", "debian", Some(XVDB))]);
    let mut guest = introduced(&bed, 7, "debian");
    guest.node.devid = XVDB;
    guest.connect(SMALL);
    for leaves_late in [false, true] {
        guest.write(0, 8, 0, &[0x77; 512]);
        if leaves_late {
            // As after a server was killed: the next one asks the guest to disconnect.
            bed.server = None;
            guest.let_go();
            bed.daemon.write(&guest.back("state"), "4");
            bed.start();
            guest.until_back("5");
            guest.set_state("6");
        } else {
            guest.close();
            bed.server = None;
            bed.start();
        }
        bed.daemon.until_gone(&guest.node.front_end());
        assert_eq!(bed.daemon.read(&guest.node.back_end(0)), None);
        guest.connect(SMALL);
        assert!(guest.read(0, 8, 0, 512) == [0x77; 512]);
    }
    // The guest may disconnect and come back by itself while the server runs.
    let id = bed.daemon.read(&guest.front("backend"));
    guest.close();
    guest.set_state("1");
    guest.connect(SMALL);
    guest.check();
    assert_eq!(bed.daemon.read(&guest.front("backend")), id);
}

/// One that is being detached, one without a standing order, and one that the guest closed while this server ran.
#[test]
fn other_closed_devices_are_left_alone() {
    let mut bed = Bed::with_orders(&[
        ("a", "debian", None),
        ("a", "third", None),
        ("b", "fourth", None),
        ("b", "other", None),
    ]);
    let mut offline = introduced(&bed, 7, "debian");
    offline.connect(SMALL);
    let mut nobodys = bed.connected(8, "b", SMALL);
    let mut leaving = introduced(&bed, 10, "fourth");
    leaving.connect(SMALL);
    for guest in [&mut offline, &mut nobodys, &mut leaving] {
        guest.close();
    }
    bed.daemon.write(&offline.back("online"), "0");
    bed.server = None;
    leaving.set_state("5");
    bed.start();
    // It is being detached when it closes.
    leaving.until_back("5");
    bed.daemon.write(&leaving.back("online"), "0");
    leaving.set_state("6");
    leaving.until_back("6");
    let mut closed = introduced(&bed, 9, "third");
    closed.connect(SMALL);
    closed.close();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    settled(&bed, 100);
    for guest in [&offline, &nobodys, &closed, &leaving] {
        for state in [guest.back("state"), guest.front("state")] {
            assert_eq!(bed.daemon.read(&state).as_deref(), Some("6"), "{state}");
        }
        assert_eq!(
            bed.daemon
                .requests(Operation::Remove, &guest.node.front_end()),
            0
        );
    }
}

#[test]
fn a_domain_without_the_right_to_see_others_is_told_so_at_the_start() {
    let mut bed = Bed::with_orders(&[("a", "debian", None)]);
    bed.daemon.refuse(|op, path| {
        (op == Operation::Directory && path == "/local/domain").then_some("EACCES")
    });
    let refused = |bed: &Bed| bed.try_serve(&[("a", &bed.a)]).err().map(|e| e.to_string());
    let text = refused(&bed).unwrap();
    assert!(
        text.contains("by name") && text.contains("pvblk xen attach --back-end 0"),
        "{text}"
    );
    assert!(text.contains("may not") && !text.contains('\n'), "{text}");
    // Without orders the server needs no such permission.
    bed.orders.clear();
    assert_eq!(refused(&bed), None);
}

/// A failure isn't repeated, and other guests get their disks.
#[test]
fn a_directory_that_may_not_be_made_stops_no_other_guest() {
    let bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    let front = "/local/domain/7/device/vbd/51712";
    bed.daemon
        .refuse(move |op, path| (op == Operation::Mkdir && path == front).then_some("EACCES"));
    let guest = introduced(&bed, 7, "debian");
    settled(&bed, 100);
    settled(&bed, 101);
    assert_eq!(bed.daemon.requests(Operation::Mkdir, front), 1);
    assert_eq!(bed.daemon.read(&guest.node.back_end(0)), None);
    bed.daemon.refuse(|_, _| None);
    bed.attach(&guest, "a");
    guest.until_back("2");
}

/// The directory of a domain that is gone must not be created again.
#[test]
fn a_domain_that_is_gone_before_its_turn_gets_nothing() {
    for _ in 0..20 {
        if gone_before_its_turn() {
            return;
        }
    }
    panic!("a second was never enough to end a domain");
}

/// False if the guest may have had its turn before: this machine was too slow.
fn gone_before_its_turn() -> bool {
    let mut bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    let mut guest = introduced(&bed, 7, "debian");
    guest.connect(SMALL);
    guest.close();
    bed.server = None;
    let begin = std::time::Instant::now();
    bed.start();
    // Its new device comes a second later.
    bed.daemon.until_gone(&guest.node.front_end());
    // No event reports the end before that.
    bed.xen.destroy(7);
    bed.daemon.remove("/local/domain/7");
    if begin.elapsed() >= std::time::Duration::from_secs(1) {
        return false;
    }
    std::thread::sleep(std::time::Duration::from_millis(1500));
    settled(&bed, 100);
    assert_eq!(bed.daemon.read("/local/domain/7"), None);
    assert_eq!(bed.daemon.read("/local/domain/0/backend/pvblk/7"), None);
    true
}

/// More events than are kept: the server looks at everything.
#[test]
fn a_guest_is_seen_when_events_were_lost() {
    let bed = Bed::with_orders(&[("a", "debian", None), ("b", "other", None)]);
    settled(&bed, 100);
    bed.daemon.edit(|tree| {
        for i in 0..5000 {
            let path = format!("/local/domain/0/backend/pvblk/x{i}");
            tree.write(&path, "");
            tree.remove(&path);
        }
        tree.write("/local/domain/7/name", "debian");
    });
    bed.daemon
        .until_is("/local/domain/0/backend/pvblk/7/51712/state", "2");
}

/// A guest can watch for each new device; it must not make the server create devices without end.
#[test]
fn a_guest_that_closes_a_new_device_at_once_gets_no_other() {
    let mut bed = Bed::with_orders(&[("a", "debian", Some(XVDA)), ("b", "other", None)]);
    bed.server = None;
    let guest = introduced(&bed, 7, "debian");
    bed.attach(&guest, "a");
    guest.set_state("6");
    bed.start();
    guest.until_back("6");
    settled(&bed, 100);
    assert_eq!(bed.daemon.read(&guest.back("state")).as_deref(), Some("6"));
}
