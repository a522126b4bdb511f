//! Xen guests that lie, break rules or send noise. Each loses its own disk at most: another guest's disk still
//! responds, and new ones are served.

mod xen_support;

use pvblk_backend::{BlkifQueueParts, BlkifSource, Pressure, RequestSource};
use pvblk_block::Readiness;
use pvblk_export::xen::{CutOff, Hypervisor, XenMapper};
use pvblk_protocol::blkif::BackRing;
use pvblk_protocol::blkif::wire::{
    ENTRY_SIZE, OP_FLUSH, OP_READ, OP_WRITE, RSP_ERROR, RSP_OKAY, Segment,
};
use pvblk_protocol::xenstore::Operation;
use pvblk_sys::PAGE_SIZE;
use pvblk_sys::xen::CopyDirection;
use pvblk_testing::wait;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use xen_support::*;

/// Offsets in a ring (ring.h).
const REQ_PROD: usize = 0;
const RSP_EVENT: usize = 12;
const ENTRIES: usize = 64;

const KEPT: Wishes = Wishes {
    persistent: true,
    ..SMALL
};

/// A server, and a guest that follows the rules on the other disk.
fn bed() -> (Bed, Guest) {
    let bed = Bed::new();
    let other = bed.connected(8, "b", KEPT);
    (bed, other)
}

/// The server has disconnected the guest, and publishes the reason.
fn refused(bed: &Bed, guest: &mut Guest, reason: &str) {
    let error = guest.back("error");
    bed.daemon.until("a reason", |t| t.read(&error).is_some());
    let text = bed.daemon.read(&error).unwrap();
    assert!(text.contains(reason), "{reason}: {text}");
    guest.set_state("6");
    guest.until_back("6");
    assert_eq!(guest.memory.mapped(), 0, "{reason}");
}

/// Keys that are replaced; `None` removes a key.
type Keys = Vec<(&'static str, Option<String>)>;

/// Publishes valid keys with some of them replaced or removed, and goes to state 3.
fn spoiled(guest: &mut Guest, wishes: Wishes, changes: &[(&str, Option<String>)]) {
    guest.until_back("2");
    let mut keys = guest.keys(wishes);
    for (key, value) in changes {
        keys.retain(|(k, _)| k != key);
        keys.extend(value.clone().map(|v| (key.to_string(), v)));
    }
    guest.publish(&keys, "3");
}

/// Publishes one bad set of keys after the other; the guest may come back each time.
fn refusals(cases: &[(Wishes, Keys, &str)]) {
    let (bed, mut other) = bed();
    let mut guest = bed.guest(7);
    bed.attach(&guest, "a");
    for (wishes, changes, reason) in cases {
        spoiled(&mut guest, *wishes, changes);
        refused(&bed, &mut guest, reason);
        guest.set_state("1");
    }
    guest.connect(SMALL);
    guest.check();
    bed.still_serves(&mut other);
}

fn key(name: &'static str, value: impl ToString) -> Keys {
    vec![(name, Some(value.to_string()))]
}

const TWO_PAGES: Wishes = Wishes { order: 1, ..SMALL };
const TWO_QUEUES: Wishes = Wishes { queues: 2, ..SMALL };

#[test]
fn a_ring_ref_that_grants_nothing_is_refused() {
    refusals(&[
        (
            SMALL,
            key("ring-ref", 4_000_000_000u32),
            "mapping ring-ref [4000000000]",
        ),
        (TWO_PAGES, key("ring-ref1", 0), "mapping ring-ref"),
        // The first queue's ring was mapped before.
        (
            TWO_QUEUES,
            key("queue-1/ring-ref", 1),
            "queue 1: mapping ring-ref [1]",
        ),
    ]);
}

#[test]
fn a_ring_ref_that_is_granted_read_only_is_refused() {
    let (bed, mut other) = bed();
    let mut guest = bed.guest(7);
    bed.attach(&guest, "a");
    let page = guest.page(true);
    spoiled(&mut guest, SMALL, &key("ring-ref", page.gref));
    refused(&bed, &mut guest, "mapping ring-ref");
    bed.still_serves(&mut other);
}

#[test]
fn a_port_that_cannot_be_bound_is_refused() {
    let unbound = 77;
    refusals(&[
        (
            SMALL,
            key("event-channel", unbound),
            "binding event-channel 77",
        ),
        (
            SMALL,
            key("event-channel", u32::MAX),
            "binding event-channel 4294967295",
        ),
        (
            TWO_QUEUES,
            key("queue-1/event-channel", unbound),
            "queue 1: binding event-channel 77",
        ),
        (SMALL, key("event-channel", 0), "event-channel is 0"),
    ]);
}

#[test]
fn keys_out_of_range_are_refused_with_their_names() {
    let dup = |a, b| {
        let same = |name| (name, Some("9".to_owned()));
        vec![same(a), same(b)]
    };
    refusals(&[
        (
            SMALL,
            key("multi-queue-num-queues", 5),
            "multi-queue-num-queues is 5",
        ),
        (
            SMALL,
            key("multi-queue-num-queues", 0),
            "multi-queue-num-queues is 0",
        ),
        (
            SMALL,
            key("multi-queue-num-queues", u64::MAX),
            "multi-queue-num-queues is 18446744073709551615",
        ),
    ]);
    refusals(&[
        (SMALL, key("ring-page-order", 5), "ring-page-order is 5"),
        (
            SMALL,
            key("ring-page-order", u32::MAX),
            "ring-page-order is 4294967295",
        ),
    ]);
    refusals(&[
        (SMALL, key("num-ring-pages", 3), "num-ring-pages is 3"),
        (SMALL, key("num-ring-pages", 1 << 31), "num-ring-pages"),
    ]);
    refusals(&[
        (
            TWO_PAGES,
            dup("ring-ref0", "ring-ref1"),
            "grant reference 9 is used by two",
        ),
        (
            TWO_QUEUES,
            dup("queue-0/ring-ref", "queue-1/ring-ref"),
            "grant reference 9 is used by two",
        ),
        (
            TWO_QUEUES,
            dup("queue-0/event-channel", "queue-1/event-channel"),
            "event-channel 9 belongs",
        ),
        (
            SMALL,
            key("ring-ref", "99999999999999999999999"),
            "ring-ref",
        ),
        (SMALL, key("ring-ref", 1u64 << 32), "ring-ref is 4294967296"),
        (SMALL, key("ring-ref", "-1"), "not a number"),
        (SMALL, key("ring-ref", "x".repeat(4000)), "ring-ref is 'xxx"),
        (
            SMALL,
            vec![("event-channel", None)],
            "event-channel is missing",
        ),
        (SMALL, key("protocol", "arm-abi"), "protocol is 'arm-abi'"),
        (
            SMALL,
            key("feature-persistent", "yes"),
            "feature-persistent",
        ),
    ]);
}

#[test]
fn a_grant_that_is_revoked_in_flight_fails_its_own_request_only() {
    let (bed, mut other) = bed();
    let mut guest = bed.connected(7, "a", SMALL);
    // Writes: revoked between the ring and the copy.
    let pages: Vec<_> = (0..8).map(|_| guest.page(false)).collect();
    let (memory, victims) = (
        Arc::clone(&guest.memory),
        [pages[1].gref, pages[2].gref, pages[5].gref],
    );
    bed.xen
        .on_copy(move |_, _| victims.iter().for_each(|&g| memory.revoke(g)));
    let before = guest.memory.mapped();
    // The second has two pages whose copy fails, and one whose copy succeeds.
    let lists = [vec![0], vec![1, 2, 3], vec![4], vec![5], vec![6, 7]];
    let put = |(i, list): (usize, &Vec<usize>)| {
        let segments: Vec<_> = list.iter().map(|&p| whole(pages[p].gref)).collect();
        guest.put(0, OP_WRITE, 64 * i as u64, &segments)
    };
    let ids: Vec<u64> = lists.iter().enumerate().map(put).collect();
    guest.kick(0);
    let statuses: Vec<i16> = ids.iter().map(|&id| guest.status(0, id)).collect();
    assert_eq!(
        statuses,
        [RSP_OKAY, RSP_ERROR, RSP_OKAY, RSP_ERROR, RSP_OKAY]
    );
    bed.xen.stop_on_copy();
    // Data of the refused requests was not written.
    guest.write(0, 0, 0, &[7; 512]);
    assert_eq!(guest.read(0, 64, 0, 3 * PAGE_SIZE), vec![0; 3 * PAGE_SIZE]);

    // Reads: revoked while they are at the device.
    bed.a.hold.store(true, Ordering::Release);
    let pages: Vec<_> = (0..3).map(|_| guest.page(false)).collect();
    let ids: Vec<u64> = pages
        .iter()
        .map(|p| guest.put(0, OP_READ, 0, &[whole(p.gref)]))
        .collect();
    guest.kick(0);
    wait("they are at the device", || {
        bed.a.held.load(Ordering::Acquire) == 3
    });
    guest.memory.revoke(pages[1].gref);
    bed.a.hold.store(false, Ordering::Release);
    let statuses: Vec<i16> = ids.iter().map(|&id| guest.status(0, id)).collect();
    assert_eq!(statuses, [RSP_OKAY, RSP_ERROR, RSP_OKAY]);
    assert_eq!(guest.store(&pages[2..], 0, 1), [7]);
    assert_eq!(guest.memory.mapped(), before);
    // More than 32 MiB in all: buffers of the failed requests are given back.
    for _ in 0..40 {
        let mut ids = Vec::new();
        for _ in 0..30 {
            let mut segments = vec![whole(pages[0].gref); 9];
            segments.extend([whole(1), whole(2)]);
            ids.push(guest.put(0, OP_WRITE, 0, &segments));
        }
        guest.kick(0);
        for id in ids {
            assert_eq!(guest.status(0, id), RSP_ERROR);
        }
    }
    guest.check();
    bed.still_serves(&mut other);
}

#[test]
fn a_request_with_a_bad_grant_is_an_error_and_the_next_one_is_served() {
    for wishes in [SMALL, KEPT] {
        let (bed, mut other) = bed();
        let mut guest = bed.connected(7, "a", wishes);
        let good = guest.page(false);
        for op in [OP_READ, OP_WRITE] {
            for segments in [vec![whole(4_000_000_000)], vec![whole(good.gref), whole(0)]] {
                let id = guest.put(0, op, 0, &segments);
                let next = guest.put(0, op, 0, &[whole(good.gref)]);
                guest.kick(0);
                assert_eq!(guest.status(0, id), RSP_ERROR);
                assert_eq!(guest.status(0, next), RSP_OKAY);
            }
        }
        // The page of an indirect request's segments, and one of the segments.
        let (id, list) = guest.put_indirect(0, OP_WRITE, 0, &[whole(good.gref)]);
        guest.memory.revoke(list.gref);
        let (bad, _) = guest.put_indirect(0, OP_WRITE, 0, &[whole(good.gref), whole(3)]);
        guest.kick(0);
        assert_eq!(
            (guest.status(0, id), guest.status(0, bad)),
            (RSP_ERROR, RSP_ERROR)
        );
        guest.check();
        bed.still_serves(&mut other);
    }
}

#[test]
fn segments_outside_their_page_are_an_error() {
    for wishes in [SMALL, KEPT] {
        let (bed, mut other) = bed();
        let mut guest = bed.connected(7, "a", wishes);
        let page = guest.page(false);
        for (first_sect, last_sect) in [(0, 8), (7, 6), (255, 255), (0, 255), (8, 8)] {
            let segment = Segment {
                first_sect,
                last_sect,
                ..whole(page.gref)
            };
            let id = guest.put(0, OP_READ, 0, &[segment]);
            let (indirect, _) = guest.put_indirect(0, OP_READ, 0, &[segment]);
            guest.kick(0);
            assert_eq!(guest.status(0, id), RSP_ERROR);
            assert_eq!(guest.status(0, indirect), RSP_ERROR);
        }
        guest.check();
        bed.still_serves(&mut other);
    }
}

/// The hypervisor refuses the copy, and the server reports it.
#[test]
fn a_read_into_a_page_that_is_granted_read_only_is_an_error() {
    for wishes in [SMALL, KEPT] {
        let (bed, mut other) = bed();
        let mut guest = bed.connected(7, "a", wishes);
        guest.write(0, 0, 0, &[9; PAGE_SIZE]);
        let page = guest.page(true);
        let id = guest.put(0, OP_READ, 0, &[whole(page.gref)]);
        guest.kick(0);
        assert_eq!(guest.status(0, id), RSP_ERROR);
        assert_eq!(guest.store(&[page], 0, PAGE_SIZE), vec![0; PAGE_SIZE]);
        guest.check();
        bed.still_serves(&mut other);
    }
}

#[test]
fn an_impossible_index_stops_that_disk_only() {
    for wishes in [SMALL, KEPT] {
        for index in [33, 1000, u32::MAX, 1 << 31] {
            let (bed, mut other) = bed();
            let mut guest = bed.connected(7, "a", wishes);
            guest.set_index(0, REQ_PROD, index);
            guest.queues[0].port.ring();
            refused(&bed, &mut guest, "the disk is stopped");
            bed.still_serves(&mut other);
        }
    }
}

/// Valid requests are carried out with their own data, whatever requests follow.
#[test]
fn writes_before_an_impossible_index_are_written_with_their_data() {
    let (bed, mut other) = bed();
    let mut guest = bed.connected(7, "a", SMALL);
    let (memory, frame) = (
        Arc::clone(&guest.memory),
        guest.queues[0].frames[0] as usize,
    );
    // While the first eight are copied, so that it is found after the last three.
    bed.xen.on_copy(move |_, _| {
        let index = memory.all.atomic_u32(frame * PAGE_SIZE + REQ_PROD);
        index.store(5000, Ordering::Release);
    });
    for i in 0..11 {
        let page = guest.page(true);
        guest.load(&[page], 0, &[i + 1; PAGE_SIZE]);
        guest.put(0, OP_WRITE, 8 * u64::from(i), &[whole(page.gref)]);
    }
    guest.kick(0);
    refused(&bed, &mut guest, "the disk is stopped");
    bed.xen.stop_on_copy();
    let mut next = bed.connected(9, "a", SMALL);
    for i in 0..11 {
        let data = next.read(0, 8 * u64::from(i), 0, PAGE_SIZE);
        assert_eq!(data, [i + 1; PAGE_SIZE], "sector {}", 8 * i);
    }
    bed.still_serves(&mut other);
}

#[test]
fn a_state_that_is_not_allowed_closes_that_disk_only() {
    let (bed, mut other) = bed();
    for state in [
        "1",
        "2",
        "7",
        "8",
        "9",
        "",
        "connected",
        "44",
        "-4",
        "4\0",
        "\u{664}",
    ] {
        let mut guest = bed.connected(7, "a", KEPT);
        guest.check();
        guest.set_state(state);
        if state == "1" {
            // The guest closes and begins again; the reason has been removed by then.
            guest.until_back("2");
            assert_eq!(guest.memory.mapped(), 0);
        } else {
            refused(&bed, &mut guest, "state ");
        }
        bed.toolstack().detach(guest.node, WAIT, false).unwrap();
        let guest = bed.guest(7);
        bed.attach(&guest, "a");
        guest.until_back("2");
        guest.set_state(state);
        if state != "1" {
            let error = guest.back("error");
            bed.daemon.until("a reason", |t| t.read(&error).is_some());
        }
        guest.set_state("6");
        guest.until_back("6");
        bed.toolstack().detach(guest.node, WAIT, false).unwrap();
        other.check();
    }
    bed.still_serves(&mut other);
}

/// A guest that writes without end is handled once in each turn.
#[test]
fn a_guest_that_writes_its_state_without_end_costs_bounded_work() {
    let (bed, mut other) = bed();
    let guest = bed.connected(7, "a", SMALL);
    let path = guest.front("state");
    let before = bed.daemon.requests(Operation::Read, &path);
    let writes = 100_000;
    std::thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..writes / 100 {
                bed.daemon
                    .edit(|tree| (0..100).for_each(|_| tree.write(&path, "4")));
            }
        });
        for _ in 0..200 {
            other.check();
        }
    });
    bed.still_serves(&mut other);
    let looks = bed.daemon.requests(Operation::Read, &path) - before;
    assert!(looks <= writes / 10, "{looks} looks at {writes} writes");
    // Also below `state`, with a different path each time.
    for i in 0..10_000 {
        bed.daemon.write(&format!("{path}/{i}"), "");
    }
    bed.still_serves(&mut other);
    guest.until_back("4");
}

/// Event channels are masked while a ring is drained (XSA-332).
#[test]
fn a_guest_that_notifies_without_end_wakes_the_server_once_a_sleep() {
    let (bed, mut other) = bed();
    let mut guest = bed.connected(7, "a", SMALL);
    let port = Arc::clone(&guest.queues[0].port);
    let rings = 200_000;
    std::thread::scope(|s| {
        s.spawn(|| (0..rings).for_each(|_| port.ring()));
        for _ in 0..200 {
            guest.check();
            other.check();
        }
    });
    let (clears, rearms) = (&port.clears, &port.rearms);
    wait("the worker sleeps, with the port unmasked", || {
        clears.load(Ordering::Acquire) == rearms.load(Ordering::Acquire)
    });
    let heard = clears.load(Ordering::Acquire);
    assert!(heard > 0 && heard < rings, "{heard} of {rings}");
    guest.check();
    bed.still_serves(&mut other);

    // Never unmasked while there are requests.
    bed.a.hold.store(true, Ordering::Release);
    let entries = guest.queues[0].ring.entries();
    let page = guest.page(false);
    let ids: Vec<u64> = (0..entries)
        .map(|_| guest.put(0, OP_READ, 0, &[whole(page.gref)]))
        .collect();
    guest.kick(0);
    wait("the ring is full", || {
        bed.a.held.load(Ordering::Acquire) == entries as usize
    });
    let before = rearms.load(Ordering::Acquire);
    for _ in 0..100 {
        port.ring();
        other.check();
    }
    assert!(
        rearms.load(Ordering::Acquire) <= before + 1,
        "a full ring needs no notification"
    );
    bed.a.hold.store(false, Ordering::Release);
    for id in ids {
        assert_eq!(guest.status(0, id), RSP_OKAY);
    }
}

#[test]
fn a_port_is_unmasked_only_before_sleep() {
    let bed = Bed::new();
    let mut guest = bed.guest(7);
    guest.keys(SMALL);
    let (queue, handle) = (&guest.queues[0], Handle(Arc::clone(&bed.xen)));
    let port = Arc::clone(&queue.port);
    let pressure = Arc::new(Pressure::new(0));
    let pages = handle.pages(7).unwrap();
    let (cut_off, names) = (CutOff::default(), ("a", "test"));
    let mapper = XenMapper::new(pages, None, &cut_off, &pressure, names, None);
    let mut source = BlkifSource::new(BlkifQueueParts {
        name: "test".into(),
        ring: BackRing::new(mapper.map_ring(&queue.refs).unwrap()).unwrap(),
        channel: handle.bind(7, queue.port_number).unwrap(),
        mapper: Box::new(mapper),
        max_indirect_segments: 0,
    });
    let counts = || {
        let count = |n: &AtomicUsize| n.load(Ordering::Acquire);
        (count(&port.clears), count(&port.rearms))
    };
    source.woken();
    assert_eq!(counts(), (1, 0));
    port.ring();
    source.woken();
    assert_eq!(counts(), (1, 0), "a masked notification isn't seen");
    guest.put(0, OP_FLUSH, 0, &[]);
    guest.kick(0);
    assert_eq!(source.arm(), Readiness::Ready);
    assert_eq!(counts(), (1, 0), "there is something to do");
    let mut out = Vec::new();
    source.pull(1, &mut out).unwrap();
    assert_eq!((out.len(), source.arm()), (1, Readiness::Wait(None)));
    assert_eq!(counts(), (1, 1));
    // A notification that arrived meanwhile wakes at once.
    source.woken();
    assert_eq!(counts(), (2, 1));
}

/// Also after the last key, while the server reads the keys.
#[test]
fn a_front_end_may_vanish_at_every_step() {
    let (bed, mut other) = bed();
    for wishes in [
        SMALL,
        Wishes {
            queues: 2,
            ..TWO_PAGES
        },
    ] {
        for last in 0.. {
            let mut guest = bed.guest(7);
            bed.attach(&guest, "a");
            guest.until_back("2");
            let mut keys = guest.keys(wishes);
            keys.extend(["3", "4", "5", "6", "1"].map(|s| ("state".to_owned(), s.to_owned())));
            for (key, value) in keys.iter().take(last) {
                bed.daemon.write(&guest.front(key), value);
            }
            bed.daemon.remove(&guest.node.front_end());
            if last.is_multiple_of(2) {
                guest.destroy();
                bed.daemon.until_gone(&guest.node.back_end(0));
            } else {
                bed.daemon.remove(&guest.node.back_end(0));
            }
            wait("everything is unmapped", || guest.memory.mapped() == 0);
            if last == keys.len() {
                break;
            }
        }
    }
    bed.still_serves(&mut other);
}

/// Padding would show our memory (XSA-216).
#[test]
fn padding_of_responses_is_zero() {
    for wishes in [SMALL, KEPT] {
        let (bed, mut other) = bed();
        let mut guest = bed.connected(7, "a", wishes);
        let base = guest.queues[0].frames[0] as usize * PAGE_SIZE;
        let entries = guest.queues[0].ring.entries() as usize;
        let page = guest.page(false);
        for slot in 0..entries {
            let gref = if slot % 2 == 0 { page.gref } else { 1 };
            let id = guest.put(0, OP_READ, 0, &[whole(gref)]);
            // The request's own bytes are at the padding's offsets.
            let at = base + ENTRIES + slot * ENTRY_SIZE;
            guest.memory.all.write(at + 2, &[0xee; 2]);
            guest.memory.all.write(at + 4, &[0xee; 4]);
            guest.kick(0);
            guest.answer(0, id);
            let mut bytes = [0xff; 16];
            guest.memory.all.read(at, &mut bytes);
            assert_eq!(bytes[..8], id.to_ne_bytes());
            assert_eq!((bytes[9], &bytes[12..]), (0, &[0; 4][..]), "slot {slot}");
        }
        bed.still_serves(&mut other);
    }
}

/// Once it was taken, an entry is private (XSA-155).
#[test]
fn a_request_changed_after_it_was_taken_has_no_effect() {
    let (bed, mut other) = bed();
    let mut guest = bed.connected(7, "a", SMALL);
    let (mine, wrong) = (guest.page(false), guest.page(false));
    guest.load(&[mine], 0, &[1; PAGE_SIZE]);
    guest.load(&[wrong], 0, &[2; PAGE_SIZE]);
    let (memory, at) = (
        Arc::clone(&guest.memory),
        guest.queues[0].frames[0] as usize * PAGE_SIZE + ENTRIES,
    );
    let changed = Arc::new(AtomicUsize::new(0));
    let times = Arc::clone(&changed);
    bed.xen.on_copy(move |direction, copies| {
        assert_eq!((direction, copies.len()), (CopyDirection::FromGuest, 1));
        // Another id, sector, reference and range than were checked.
        memory.all.write(at + 8, &[0xaa; 8]);
        memory.all.write(at + 16, &99u64.to_ne_bytes());
        memory.all.write(at + 24, &wrong.gref.to_ne_bytes());
        memory.all.write(at + 28, &[0, 255]);
        times.fetch_add(1, Ordering::AcqRel);
    });
    let id = guest.put(0, OP_WRITE, 16, &[whole(mine.gref)]);
    guest.kick(0);
    assert_eq!(guest.status(0, id), RSP_OKAY);
    assert_eq!(changed.load(Ordering::Acquire), 1);
    bed.xen.stop_on_copy();
    assert_eq!(guest.read(0, 16, 0, PAGE_SIZE), [1; PAGE_SIZE]);

    // The segments of an indirect request: copied once, before any of them is examined.
    let (memory, turn) = (Arc::clone(&guest.memory), AtomicUsize::new(0));
    let list_frame = Arc::new(AtomicUsize::new(0));
    let list = Arc::clone(&list_frame);
    bed.xen.on_copy(move |_, _| {
        // The first copy is that of the segments; the second that of the data.
        if turn.fetch_add(1, Ordering::AcqRel) == 1 {
            let at = list.load(Ordering::Acquire) * PAGE_SIZE;
            memory.all.write(at, &wrong.gref.to_ne_bytes());
            memory.all.write(at + 4, &[7, 0]);
        }
    });
    let (id, page) = guest.put_indirect(0, OP_WRITE, 24, &[whole(mine.gref)]);
    list_frame.store(page.frame as usize, Ordering::Release);
    guest.kick(0);
    assert_eq!(guest.status(0, id), RSP_OKAY);
    bed.xen.stop_on_copy();
    assert_eq!(guest.read(0, 24, 0, PAGE_SIZE), [1; PAGE_SIZE]);
    bed.still_serves(&mut other);
}

/// The guest's own indices only decide if it is notified.
#[test]
fn a_guest_that_wants_no_notification_gets_none() {
    let (bed, mut other) = bed();
    let mut guest = bed.connected(7, "a", SMALL);
    let page = guest.page(false);
    guest.put(0, OP_READ, 0, &[whole(page.gref)]);
    guest.set_index(0, RSP_EVENT, 1000);
    let before = guest.queues[0].port.notifies.load(Ordering::Acquire);
    guest.kick(0);
    wait("the answer", || {
        guest.queues[0].ring.take().unwrap().is_some()
    });
    bed.still_serves(&mut other);
    assert_eq!(
        guest.queues[0].port.notifies.load(Ordering::Acquire),
        before
    );
}
