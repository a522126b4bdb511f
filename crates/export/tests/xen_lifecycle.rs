//! Xen guests' disks from attach to detach: orders, ends and accidents of both sides, of the toolstack, and of
//! xenstore itself.

mod xen_support;

use parking_lot::Mutex;
use pvblk_export::xen::Xenstore;
use pvblk_export::xen::node::Node;
use pvblk_protocol::blkif::wire::{OP_WRITE, RSP_OKAY};
use pvblk_protocol::xenstore::{HEAD, Head, Operation};
use pvblk_testing::wait;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use xen_support::*;

const KEPT: Wishes = Wishes {
    queues: 2,
    order: 1,
    persistent: true,
};

/// Puts writes that stay at the device.
fn load(guest: &mut Guest, ram: &Ram, count: usize) -> Vec<u64> {
    let before = ram.held.load(Ordering::Acquire);
    ram.hold.store(true, Ordering::Release);
    let put = |i: usize| {
        let page = guest.page(false);
        guest.put(0, OP_WRITE, 8 * i as u64, &[whole(page.gref)])
    };
    let ids = (0..count).map(put).collect();
    guest.kick(0);
    wait("they are at the device", || {
        ram.held.load(Ordering::Acquire) == before + count
    });
    ids
}

/// Records the number of mapped pages whenever the server's state is written.
fn watch_states(bed: &Bed, guest: &Guest) -> Arc<Mutex<Vec<(String, usize)>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (path, memory, notes) = (
        guest.back("state"),
        Arc::clone(&guest.memory),
        Arc::clone(&seen),
    );
    bed.daemon.on_change(move |changed, value| {
        if changed == path
            && let Some(value) = value
        {
            notes.lock().push((value.to_owned(), memory.mapped()));
        }
    });
    seen
}

#[test]
fn detach_goes_through_states_5_and_6_with_everything_unmapped_before_6() {
    for wishes in [SMALL, KEPT] {
        let bed = Bed::new();
        let mut guest = bed.connected(7, "a", wishes);
        guest.check();
        let mapped = guest.memory.mapped();
        assert!(mapped >= wishes.queues << wishes.order);
        let seen = watch_states(&bed, &guest);
        let (node, mut tools) = (guest.node, bed.toolstack());
        let detach = std::thread::spawn(move || tools.detach(node, WAIT, false));
        guest.until_back("5");
        // Until the guest has closed it may finish its requests.
        guest.check();
        guest.set_state("5");
        guest.check();
        guest.set_state("6");
        detach.join().unwrap().unwrap();
        let seen = seen.lock().clone();
        let states: Vec<&str> = seen.iter().map(|(s, _)| s.as_str()).collect();
        assert!(states.ends_with(&["5", "6"]), "{states:?}");
        assert!(
            states[..states.len() - 1].iter().all(|s| *s == "5"),
            "{states:?}"
        );
        assert_eq!((seen[0].1, seen[seen.len() - 1].1), (mapped, 0));
        for path in [node.back_end(0), node.front_end()] {
            assert_eq!(bed.daemon.read(&path), None, "{path}");
        }
        assert_eq!(bed.xen.open.load(Ordering::Acquire), 0);
        assert_eq!(bed.toolstack().list().unwrap(), []);
    }
}

/// A step of the server may follow directly after a write of the toolstack.
#[test]
fn a_detach_whose_state_was_overwritten_is_noticed() {
    let bed = Bed::new();
    let guest = bed.connected(7, "a", SMALL);
    bed.daemon.edit(|tree| {
        tree.write(&guest.back("online"), "0");
        tree.write(&guest.back("state"), "4");
    });
    guest.until_back("5");
}

/// Requests that the guest didn't wait for end before anything is unmapped.
#[test]
fn closed_is_published_only_after_the_last_request() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", KEPT);
    let mut other = bed.connected(8, "b", SMALL);
    load(&mut guest, &bed.a, 20);
    let seen = watch_states(&bed, &guest);
    guest.set_state("6");
    guest.until_back("5");
    // However often the guest writes its state.
    guest.set_state("6");
    bed.still_serves(&mut other);
    assert!(guest.memory.mapped() >= 20);
    assert!(seen.lock().iter().all(|(state, _)| state == "5"));
    bed.a.hold.store(false, Ordering::Release);
    guest.until_back("6");
    assert_eq!(seen.lock().last().unwrap(), &("6".to_owned(), 0));
    bed.still_serves(&mut other);
}

#[test]
fn a_guest_may_come_back_while_the_disk_is_online() {
    let bed = Bed::new();
    let mut guest = bed.guest(7);
    bed.attach(&guest, "a");
    for wishes in [SMALL, KEPT, SMALL, Wishes { queues: 4, ..SMALL }] {
        guest.connect(wishes);
        guest.check();
        guest.close();
        assert_eq!(guest.memory.mapped(), 0);
        guest.set_state("1");
    }
    guest.until_back("2");
    bed.daemon.write(&guest.back("online"), "0");
    guest.set_state("6");
    guest.until_back("6");
    guest.set_state("1");
    // Its turn comes after the turn of this guest, which is served.
    bed.connected(8, "a", SMALL).check();
    assert_eq!(bed.daemon.read(&guest.back("state")).as_deref(), Some("6"));
}

#[test]
fn a_guest_that_is_destroyed_under_load_leaves_nothing() {
    for wishes in [SMALL, KEPT] {
        let bed = Bed::new();
        let mut guest = bed.connected(7, "a", wishes);
        let mut other = bed.connected(8, "b", SMALL);
        load(&mut guest, &bed.a, 20);
        guest.destroy();
        guest.until_back("5");
        other.check();
        assert!(
            guest.memory.mapped() > 0,
            "the requests at the device have their pages"
        );
        bed.a.hold.store(false, Ordering::Release);
        bed.daemon.until_gone(&guest.node.back_end(0));
        assert_eq!(guest.memory.mapped(), 0);
        bed.still_serves(&mut other);
        other.close();
        wait("every way to a guest is closed", || {
            bed.xen.open.load(Ordering::Acquire) == 0
        });
    }
}

/// A guest may be destroyed before it has a driver.
#[test]
fn a_guest_that_is_destroyed_before_it_connects_leaves_nothing() {
    let bed = Bed::new();
    let guest = bed.guest(7);
    bed.attach(&guest, "a");
    guest.until_back("2");
    guest.destroy();
    bed.daemon.until_gone(&guest.node.back_end(0));
}

/// The server finds it when it starts.
#[test]
fn a_guest_that_was_destroyed_without_a_server_leaves_nothing() {
    let mut bed = Bed::new();
    let guest = bed.connected(7, "a", SMALL);
    let waits = bed.guest(8);
    bed.attach(&waits, "a");
    waits.until_back("2");
    bed.server = None;
    guest.destroy();
    waits.destroy();
    bed.start();
    bed.daemon.until_gone(&guest.node.back_end(0));
    bed.daemon.until_gone(&waits.node.back_end(0));
}

#[test]
fn a_directory_that_is_removed_unexpectedly_ends_its_queues() {
    for wishes in [SMALL, KEPT] {
        let bed = Bed::new();
        let mut guest = bed.connected(7, "a", wishes);
        let mut other = bed.connected(8, "b", SMALL);
        load(&mut guest, &bed.a, 20);
        bed.daemon.remove(&guest.node.back_end(0));
        // Also for the server: it doesn't write there any more.
        other.check();
        guest.set_state("5");
        other.check();
        assert!(guest.memory.mapped() > 0);
        bed.a.hold.store(false, Ordering::Release);
        wait("everything is unmapped", || guest.memory.mapped() == 0);
        assert_eq!(bed.daemon.read(&guest.back("state")), None);
        bed.still_serves(&mut other);
    }
}

/// An old write could overwrite a newer one.
#[test]
fn no_guest_begins_while_requests_of_a_lost_one_are_in_flight() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let mut other = bed.connected(8, "b", SMALL);
    load(&mut guest, &bed.a, 5);
    bed.daemon.remove(&guest.node.back_end(0));
    let mut next = bed.guest(9);
    bed.attach(&next, "a");
    bed.still_serves(&mut other);
    assert_eq!(bed.daemon.read(&next.back("state")).as_deref(), Some("1"));
    bed.a.hold.store(false, Ordering::Release);
    next.connect(SMALL);
    next.check();
}

/// Domain numbers are never used twice, so directories of past guests would add up until they fit into no reply.
#[test]
fn nothing_is_left_of_many_guests_that_came_and_went() {
    let mut bed = Bed::new();
    let mut tools = bed.toolstack();
    for domid in 1000..1900 {
        let guest = bed.guest(domid);
        tools.attach(guest.node, "a").unwrap();
        if domid.is_multiple_of(2) {
            guest.until_back("2");
            guest.destroy();
            bed.daemon.until_gone(&guest.node.back_end(0));
        } else {
            tools.detach(guest.node, WAIT, false).unwrap();
            bed.daemon.remove(&format!("/local/domain/{domid}"));
        }
    }
    bed.daemon.until_gone("/local/domain/0/backend/pvblk/1898");
    assert_eq!(tools.list().unwrap(), []);
    bed.server = None;
    bed.start();
    bed.connected(7, "a", SMALL).check();
    assert_eq!(tools.list().unwrap().len(), 1);
    // Another device of the same guest stays.
    let mut guest = bed.connected(9, "a", SMALL);
    let second = Node {
        domid: 9,
        devid: 51728,
    };
    tools.attach(second, "b").unwrap();
    tools.detach(second, WAIT, false).unwrap();
    guest.check();
    assert_eq!(tools.list().unwrap().len(), 2);
}

/// `detach --force` and `attach` of another disk, before the server looks.
#[test]
fn a_directory_that_was_replaced_is_another_disk() {
    for connected in [true, false] {
        let bed = Bed::new();
        let mut guest = bed.guest(7);
        bed.attach(&guest, "a");
        guest.until_back("2");
        if connected {
            guest.connect(SMALL);
            guest.check();
        }
        let (back, front) = (guest.node.back_end(0), guest.node.front_end());
        bed.daemon.edit(|tree| {
            tree.remove(&back);
            tree.remove(&front);
            tree.write(&format!("{front}/state"), "1");
            for (key, value) in [
                ("frontend", front.as_str()),
                ("disk", "b"),
                ("online", "1"),
                ("state", "1"),
            ] {
                tree.write(&format!("{back}/{key}"), value);
            }
        });
        guest.connect(SMALL);
        guest.write(0, 0, 0, &[0xbb; 4096]);
        let mut b = bed.connected(8, "b", SMALL);
        assert!(
            b.read(0, 0, 0, 4096) == [0xbb; 4096],
            "connected: {connected}"
        );
    }
}

/// Queues of a removed device and those of the next device with the same number end independently.
#[test]
fn ends_of_an_older_device_of_the_same_number_are_distinguished() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let mut other = bed.connected(8, "b", SMALL);
    load(&mut guest, &bed.a, 5);
    let rings = std::mem::take(&mut guest.queues);
    bed.daemon.edit(|tree| {
        tree.remove(&guest.node.back_end(0));
        tree.remove(&guest.node.front_end());
    });
    let waits = bed.guest(9);
    // The server has seen that the first directory is gone once it has seen this one.
    bed.attach(&waits, "a");
    other.check();
    bed.attach(&guest, "b");
    guest.connect(SMALL);
    guest.check();
    // The second's end is not the first's: no guest may begin on disk a yet.
    guest.set_state("5");
    guest.until_back("5");
    guest.set_state("6");
    guest.until_back("6");
    bed.still_serves(&mut other);
    assert_eq!(bed.daemon.read(&waits.back("state")).as_deref(), Some("1"));
    bed.a.hold.store(false, Ordering::Release);
    waits.until_back("2");
    drop(rings);
}

#[test]
fn a_server_may_stop_and_start_between_uses() {
    let mut bed = Bed::new();
    let mut guest = bed.guest(7);
    bed.attach(&guest, "a");
    for wishes in [SMALL, KEPT, SMALL] {
        guest.connect(wishes);
        guest.check();
        guest.close();
        bed.server = None;
        assert_eq!(guest.memory.mapped(), 0);
        guest.set_state("1");
        bed.start();
    }
    guest.until_back("2");
}

/// A server that stops asks its guests to release their disks.
#[test]
fn a_server_that_stops_lets_its_guests_leave_in_order() {
    let mut bed = Bed::new();
    let mut guest = bed.connected(7, "a", KEPT);
    guest.check();
    let server = bed.server.take();
    let stop = std::thread::spawn(move || drop(server));
    guest.until_back("5");
    guest.check();
    guest.set_state("5");
    guest.set_state("6");
    guest.until_back("6");
    stop.join().unwrap();
    assert_eq!(guest.memory.mapped(), 0);
    assert_eq!(bed.xen.open.load(Ordering::Acquire), 0);
}

#[test]
fn rings_of_a_killed_server_are_not_taken_over() {
    let mut bed = Bed::new();
    bed.server = None;
    for state in ["3", "4"] {
        let mut guest = bed.guest(7);
        bed.attach(&guest, "a");
        let keys = guest.keys(SMALL);
        guest.publish(&keys, state);
        bed.daemon.write(&guest.back("state"), "4");
        let maps = bed.xen.maps.load(Ordering::Relaxed);
        bed.start();
        guest.until_back("5");
        guest.set_state("5");
        guest.set_state("6");
        guest.until_back("6");
        assert_eq!(bed.xen.maps.load(Ordering::Relaxed), maps);
        guest.set_state("1");
        guest.connect(SMALL);
        guest.check();
        guest.close();
        bed.toolstack().detach(guest.node, WAIT, false).unwrap();
        bed.server = None;
    }
}

#[test]
fn servers_share_the_kind_and_leave_each_others_disks_alone() {
    let bed = Bed::new();
    let (c, d) = (Ram::new(SECTORS), Ram::new(SECTORS));
    let second = bed.serve(&[("c", &c), ("d", &d)]);
    let mut on_a = bed.connected(7, "a", SMALL);
    let mut on_c = bed.connected(8, "c", SMALL);
    let nobodys = bed.guest(9);
    bed.attach(&nobodys, "nobody's");
    on_a.write(0, 0, 0, &[0xaa; 512]);
    on_c.write(0, 0, 0, &[0xcc; 512]);
    assert_eq!(on_a.read(0, 0, 0, 512), [0xaa; 512]);
    on_c.set_state("5");
    on_c.set_state("6");
    on_c.until_back("6");
    drop(second);
    on_a.check();
    assert_eq!(
        bed.daemon.read(&nobodys.back("state")).as_deref(),
        Some("1")
    );
    assert_eq!(bed.daemon.read(&nobodys.back("error")), None);
    let mut tools = bed.toolstack();
    let error = tools.wait_connected(nobodys.node, Duration::ZERO, |_| {});
    let text = error.unwrap_err().to_string();
    assert!(text.contains("no server took disk"), "{text}");
    // No server has the disk, so none responds; `--force` removes it.
    let error = tools
        .detach(nobodys.node, Duration::ZERO, false)
        .unwrap_err();
    assert!(error.to_string().contains("--force"), "{error}");
    tools.detach(nobodys.node, Duration::ZERO, true).unwrap();
    assert_eq!(bed.daemon.read(&nobodys.node.back_end(0)), None);
}

#[test]
fn the_toolstack_says_in_one_line_what_is_wrong() {
    let bed = Bed::new();
    let guest = bed.guest(7);
    let mut tools = bed.toolstack();
    let one_line = |e: pvblk_block::Error, part: &str| {
        let text = e.to_string();
        assert!(text.contains(part) && !text.contains('\n'), "{text}");
    };
    assert_eq!(tools.domain("7").unwrap(), 7);
    assert_eq!(tools.domain("guest7").unwrap(), 7);
    one_line(tools.domain("6").unwrap_err(), "there is no domain 6");
    one_line(
        tools.domain("99999").unwrap_err(),
        "there is no domain 99999",
    );
    one_line(
        tools.domain("guest\n6").unwrap_err(),
        "there is no guest named 'guest\\n6'",
    );
    assert_eq!(tools.free_device(7).unwrap(), 51712);
    tools.attach(guest.node, "a").unwrap();
    one_line(
        tools.attach(guest.node, "b").unwrap_err(),
        "domain 7 has xvda already",
    );
    assert_eq!(bed.daemon.read(&guest.back("disk")).as_deref(), Some("a"));
    assert_eq!(tools.free_device(7).unwrap(), 51728);
    let late = tools.wait_connected(guest.node, Duration::ZERO, |_| {});
    guest.until_back("2");
    drop(late);
    let error = tools
        .wait_connected(guest.node, Duration::ZERO, |_| {})
        .unwrap_err();
    one_line(error, "the guest did not take the disk");
    let other = Node {
        domid: 7,
        devid: 51728,
    };
    one_line(
        tools.detach(other, WAIT, false).unwrap_err(),
        "is not attached",
    );
    bed.daemon
        .refuse(|operation, _| (operation == Operation::Mkdir).then_some("EQUOTA"));
    one_line(tools.attach(other, "a").unwrap_err(), "quota");
    assert_eq!(bed.daemon.read(&other.back_end(0)), None);
    bed.daemon
        .refuse(|operation, _| (operation == Operation::Mkdir).then_some("EACCES"));
    one_line(tools.attach(other, "a").unwrap_err(), "may not");
}

/// Other clients change the nodes in between, a few times.
#[test]
fn a_transaction_is_repeated_until_no_other_client_interferes() {
    let bed = Bed::new();
    let (mut mine, mut others) = (bed.daemon.client(), bed.daemon.client());
    let mut turns = 0;
    let seen = mine.transaction(|t| {
        turns += 1;
        let value = t.read("/local/domain/0/x")?;
        if turns < 4 {
            others.transaction(|o| o.write("/local/domain/0/x", &turns.to_string()))?;
        }
        t.write("/local/domain/0/y", "done")?;
        Ok(value)
    });
    assert_eq!((turns, seen.unwrap().as_deref()), (4, Some("3")));
    assert_eq!(
        bed.daemon.read("/local/domain/0/y").as_deref(),
        Some("done")
    );
}

/// The server's error message in a directory is itself a change of that directory.
#[test]
fn an_error_message_is_written_once() {
    let bed = Bed::new();
    let mut guest = bed.guest(7);
    let back = guest.node.back_end(0);
    bed.daemon.edit(|tree| {
        for (key, value) in [
            ("disk", "a"),
            ("online", "1"),
            ("state", "1"),
            ("frontend", "/local/domain/9/device/vbd/51712"),
        ] {
            tree.write(&format!("{back}/{key}"), value);
        }
    });
    let error = format!("{back}/error");
    bed.daemon
        .until("the error message", |t| t.read(&error).is_some());
    let text = bed.daemon.read(&error).unwrap();
    assert!(text.contains("frontend is"), "{text}");
    for domid in 20..30 {
        bed.connected(domid, "b", SMALL).check();
    }
    let writes = bed.daemon.requests(Operation::Write, &error);
    assert!(writes <= 2, "{writes} times");
    // The directory can be corrected.
    bed.daemon.remove(&error);
    bed.daemon.write(&guest.front("state"), "1");
    bed.daemon
        .write(&guest.back("frontend"), &guest.node.front_end());
    guest.connect(SMALL);
    guest.check();
}

/// A watch that is refused leaves nothing half done.
#[test]
fn a_device_that_cannot_be_watched_is_refused_and_may_be_tried_again() {
    let bed = Bed::new();
    let mut guest = bed.guest(7);
    let front = guest.front("state");
    bed.daemon.refuse(move |operation, path| {
        (operation == Operation::Watch && path == front).then_some("E2BIG")
    });
    bed.attach(&guest, "a");
    let error = guest.back("error");
    bed.daemon
        .until("the error message", |t| t.read(&error).is_some());
    let text = bed.daemon.read(&error).unwrap();
    assert!(text.contains("quota"), "{text}");
    bed.daemon.refuse(|_, _| None);
    bed.daemon.write(&guest.back("online"), "1");
    guest.connect(SMALL);
    guest.check();
    assert_eq!(bed.daemon.read(&error), None);
}

/// An event may arrive together with a reply.
#[test]
fn an_event_behind_a_reply_is_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let daemon = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut request = [0; HEAD + 2];
        socket.read_exact(&mut request).unwrap();
        let head = |operation: Operation, request, len| Head {
            operation: operation as u32,
            request,
            transaction: 0,
            len,
        };
        let mut bytes = head(Operation::Read, 1, 1).encode().to_vec();
        bytes.extend(b"v");
        bytes.extend(head(Operation::WatchEvent, 0, 4).encode());
        bytes.extend(b"p\0t\0");
        socket.write_all(&bytes).unwrap();
        socket
    });
    let mut client = Xenstore::connect_to(&path).unwrap();
    assert_eq!(client.read("x").unwrap().as_deref(), Some("v"));
    let socket = daemon.join().unwrap();
    // No more bytes come, so no poll of the socket would report the event.
    assert!(client.has_events());
    let changes = client.take_events().changes;
    let told: Vec<_> = changes.into_iter().map(|e| (e.path, e.token)).collect();
    assert_eq!(told, [("p".to_owned(), "t".to_owned())]);
    drop(socket);
}

/// A guest that doesn't respond, as after a crash.
#[test]
fn a_guest_that_does_not_leave_does_not_delay_a_server_whose_requests_have_ended() {
    let mut bed = Bed::new();
    let mut guest = bed.connected(7, "a", KEPT);
    guest.check();
    let seen = watch_states(&bed, &guest);
    bed.server = None;
    assert_eq!(guest.memory.mapped(), 0);
    assert_eq!(bed.xen.open.load(Ordering::Acquire), 0);
    // The guest has not closed, so Closed isn't published.
    assert_eq!(seen.lock().len(), 1);
}

/// Counts log lines about the end of xenstore.
struct ErrorCounter(Arc<AtomicUsize>);

impl tracing::Subscriber for ErrorCounter {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        // Without those of the back end: on a loaded machine a worker may be blocked for a while.
        *metadata.level() == tracing::Level::ERROR && metadata.target().starts_with("pvblk_export")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// The only test whose server logs errors.
#[test]
fn disks_go_on_when_xenstore_is_gone_and_the_log_says_so_once() {
    let errors = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::set_global_default(ErrorCounter(Arc::clone(&errors))).unwrap();
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let mut other = bed.connected(8, "b", KEPT);
    // The reply to this read comes with an event, and then the connection ends.
    bed.daemon.last_word(&guest.front("state"));
    // The other guest's state can't be read any more, which doesn't mean that it is gone.
    bed.daemon.edit(|tree| {
        tree.write(&guest.front("state"), "4");
        tree.write(&other.front("state"), "4");
    });
    wait("the log tells it", || errors.load(Ordering::Acquire) > 0);
    for _ in 0..200 {
        guest.check();
        other.check();
    }
    bed.a.resize(40960);
    for _ in 0..200 {
        guest.check();
    }
    assert_eq!(errors.load(Ordering::Acquire), 1);
    assert_eq!(guest.try_write(0, 0, 0, &[1; 512]), RSP_OKAY);
}

#[test]
fn a_state_that_can_not_be_read_is_not_a_guest_that_has_left() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let mut other = bed.connected(8, "b", SMALL);
    let state = guest.front("state");
    bed.daemon
        .refuse(move |op, path| (op == Operation::Read && path == state).then_some("EIO"));
    bed.daemon.fire("@releaseDomain");
    bed.still_serves(&mut other);
    assert_eq!(bed.daemon.read(&guest.back("state")).as_deref(), Some("4"));
    guest.check();
}
