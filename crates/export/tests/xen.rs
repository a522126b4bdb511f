//! Requests of Xen guests, over a xenstore and a hypervisor that the test provides.

mod xen_support;

use pvblk_export::xen::MAX_PERSISTENT;
use pvblk_protocol::blkif::wire::{OP_READ, OP_WRITE, RSP_OKAY, Segment};
use pvblk_protocol::xenbus::XenbusState;
use pvblk_sys::PAGE_SIZE;
use pvblk_testing::wait;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use xen_support::guest::Page;
use xen_support::*;

const KEPT: Wishes = Wishes {
    queues: 1,
    order: 0,
    persistent: true,
};

const LARGE: Wishes = Wishes {
    queues: 4,
    order: 3,
    persistent: true,
};

/// Bytes that differ between places.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn both_ends_agree_on_queues_pages_and_grants() {
    let bed = Bed::new();
    for (domid, wishes) in [(7, SMALL), (8, KEPT), (9, LARGE)] {
        let mut guest = bed.connected(domid, "a", wishes);
        let mut tools = bed.toolstack();
        let listed = tools.wait_connected(guest.node, WAIT, |_| {}).unwrap();
        let pages = 1 << wishes.order;
        assert_eq!(
            (listed.queues, listed.ring_pages),
            (wishes.queues as u32, pages)
        );
        assert_eq!(listed.persistent, wishes.persistent);
        assert_eq!((listed.disk.as_str(), listed.error), ("a", None));
        assert_eq!(listed.guest, Some(format!("guest{domid}")));
        let disk = [("sectors", "32768"), ("sector-size", "512"), ("mode", "w")];
        for (key, value) in disk {
            assert_eq!(
                bed.daemon.read(&guest.back(key)).as_deref(),
                Some(value),
                "{key}"
            );
        }
        guest.check();
        // The rings, and with persistent grants the page of data on each queue.
        let kept = usize::from(wishes.persistent) * wishes.queues;
        assert_eq!(guest.memory.mapped(), wishes.queues * pages as usize + kept);
        assert_eq!(tools.list().unwrap().len(), usize::from(domid) - 6);
    }
}

/// Compares with a copy of the disk's expected contents.
fn mixed(wishes: Wishes) {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", wishes);
    let sectors = 4096;
    let mut disk = vec![0; sectors * 512];
    let sizes = [1, 7, 8, 9, 64, 88, 89, 300, 1000, 2040];
    for (round, n) in sizes.into_iter().cycle().take(60).enumerate() {
        let queue = round % wishes.queues;
        let first = (round % 8) as u8;
        let at = round * 131 % (sectors - n);
        let bytes = at * 512..(at + n) * 512;
        let data = noise(round as u64 + 1, n * 512);
        guest.write(queue, at as u64, first, &data);
        disk[bytes].copy_from_slice(&data);
        let at = round * 577 % (sectors - n);
        let read = guest.read((queue + 1) % wishes.queues, at as u64, first, n * 512);
        assert!(read == disk[at * 512..(at + n) * 512], "round {round}");
    }
    match wishes.persistent {
        true => assert_eq!(bed.xen.copies.load(Ordering::Relaxed), 0),
        false => assert_eq!(guest.memory.mapped(), wishes.queues << wishes.order),
    }
    guest.close();
    assert_eq!(guest.memory.mapped(), 0);
}

#[test]
fn kept_grants_move_data_of_all_sizes_without_copies() {
    mixed(KEPT);
    mixed(LARGE);
}

#[test]
fn copied_grants_move_data_of_all_sizes_without_mappings() {
    mixed(SMALL);
    mixed(Wishes {
        persistent: false,
        ..LARGE
    });
}

#[test]
fn indirect_requests_have_up_to_256_segments() {
    for wishes in [SMALL, KEPT] {
        let bed = Bed::new();
        let mut guest = bed.connected(7, "a", wishes);
        let limit = bed
            .daemon
            .read(&guest.back("feature-max-indirect-segments"));
        assert_eq!(limit.as_deref(), Some("256"));
        for segments in [1, 12, 255, 256] {
            let data = noise(segments, segments as usize * PAGE_SIZE);
            let (pages, list) = guest.pages(0, data.len() / 512, false);
            guest.load(&pages, 0, &data);
            let (id, _) = guest.put_indirect(0, OP_WRITE, 64, &list);
            guest.kick(0);
            let answer = guest.answer(0, id);
            // Counted by its inner operation, as Linux's back end does.
            assert_eq!((answer.status, answer.operation), (RSP_OKAY, OP_WRITE));
            guest.load(&pages, 0, &vec![0; data.len()]);
            let (id, _) = guest.put_indirect(0, OP_READ, 64, &list);
            guest.kick(0);
            assert_eq!(guest.status(0, id), RSP_OKAY);
            assert!(guest.store(&pages, 0, data.len()) == data, "{segments}");
            pages.into_iter().for_each(|p| guest.give_page(p));
        }
        let page = guest.page(false);
        for segments in [0, 257] {
            let (id, _) = guest.put_indirect(0, OP_WRITE, 0, &vec![whole(page.gref); segments]);
            guest.kick(0);
            assert_ne!(guest.status(0, id), RSP_OKAY, "{segments}");
        }
    }
}

/// Copies are cheap if one call does many of them.
#[test]
fn a_batch_needs_few_copy_calls() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let entries = guest.queues[0].ring.entries() as usize;
    for op in [OP_WRITE, OP_READ] {
        let before = bed.xen.copy_calls.load(Ordering::Relaxed);
        let copies = bed.xen.copies.load(Ordering::Relaxed);
        bed.a.hold.store(true, Ordering::Release);
        let pages: Vec<Page> = (0..entries).map(|_| guest.page(false)).collect();
        let put = |(i, p): (usize, &Page)| {
            guest.load(&[*p], 0, &noise(i as u64 + 7, PAGE_SIZE));
            guest.put(0, op, 8 * i as u64, &[whole(p.gref)])
        };
        let ids: Vec<u64> = pages.iter().enumerate().map(put).collect();
        guest.kick(0);
        wait("all are at the device", || {
            bed.a.held.load(Ordering::Acquire) == entries
        });
        bed.a.hold.store(false, Ordering::Release);
        for id in ids {
            assert_eq!(guest.status(0, id), RSP_OKAY);
        }
        for (i, p) in pages.iter().enumerate() {
            assert!(guest.store(&[*p], 0, PAGE_SIZE) == noise(i as u64 + 7, PAGE_SIZE));
        }
        let calls = bed.xen.copy_calls.load(Ordering::Relaxed) - before;
        let copied = bed.xen.copies.load(Ordering::Relaxed) - copies;
        assert_eq!(copied, entries);
        assert!(calls <= entries / 4, "{calls} calls for {entries} requests");
    }
}

#[test]
fn flush_and_discard_reach_the_disk() {
    for wishes in [SMALL, KEPT] {
        let bed = Bed::new();
        let mut guest = bed.connected(7, "a", wishes);
        for (key, value) in [
            ("feature-flush-cache", "1"),
            ("feature-discard", "1"),
            ("discard-granularity", "4096"),
        ] {
            assert_eq!(
                bed.daemon.read(&guest.back(key)).as_deref(),
                Some(value),
                "{key}"
            );
        }
        let data = noise(3, 64 * 512);
        guest.write(0, 64, 0, &data);
        assert_eq!(guest.flush(0), RSP_OKAY);
        assert_eq!(bed.a.flushes.load(Ordering::Relaxed), 1);
        let id = guest.put_discard(0, 72, 16);
        guest.kick(0);
        assert_eq!(guest.status(0, id), RSP_OKAY);
        let read = guest.read(0, 64, 0, data.len());
        assert!(read[..8 * 512] == data[..8 * 512] && read[24 * 512..] == data[24 * 512..]);
        assert!(read[8 * 512..24 * 512].iter().all(|&b| b == 0));
    }
}

/// Writes one page.
fn write_page(guest: &mut Guest, page: Page, sector: u64, data: &[u8]) {
    guest.load(&[page], 0, data);
    let id = guest.put(0, OP_WRITE, sector, &[whole(page.gref)]);
    guest.kick(0);
    assert_eq!(guest.status(0, id), RSP_OKAY);
}

#[test]
fn beyond_the_limit_the_persistent_pages_unused_longest_are_unmapped() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", KEPT);
    let maps = || bed.xen.maps.load(Ordering::Relaxed);
    let pages: Vec<Page> = (0..2 * MAX_PERSISTENT).map(|_| guest.page(false)).collect();
    let data = |i: usize| noise(i as u64 + 1, PAGE_SIZE);
    for (i, page) in pages[..MAX_PERSISTENT].iter().enumerate() {
        write_page(&mut guest, *page, 8 * i as u64, &data(i));
    }
    let ring = 1;
    assert_eq!(guest.memory.mapped(), ring + MAX_PERSISTENT);
    // One page too many is copied while all others were used lately.
    let before = maps();
    let last = MAX_PERSISTENT;
    write_page(&mut guest, pages[last], 8 * last as u64, &data(last));
    assert_eq!(maps(), before, "nothing went for it");
    // The first is used again and again, until the others are old.
    for _ in 0..4 * MAX_PERSISTENT + 1 {
        write_page(&mut guest, pages[0], 0, &data(0));
    }
    write_page(&mut guest, pages[last], 8 * last as u64, &data(last));
    assert!(guest.memory.mapped() < ring + MAX_PERSISTENT);
    assert_eq!(maps() - before, 1);
    write_page(&mut guest, pages[0], 0, &data(0));
    assert_eq!(maps() - before, 1, "what was used lately stayed mapped");
    write_page(&mut guest, pages[1], 8, &data(1));
    assert_eq!(maps() - before, 2, "what wasn't used longest went");
    for (i, page) in pages.iter().enumerate() {
        write_page(&mut guest, *page, 8 * i as u64, &data(i));
        if i.is_multiple_of(100) {
            assert!(guest.memory.mapped() <= ring + MAX_PERSISTENT);
        }
    }
    for (i, page) in pages.iter().enumerate().rev() {
        let id = guest.put(0, OP_READ, 8 * i as u64, &[whole(page.gref)]);
        guest.load(&[*page], 0, &[0; PAGE_SIZE]);
        guest.kick(0);
        assert_eq!(guest.status(0, id), RSP_OKAY);
        assert!(guest.store(&[*page], 0, PAGE_SIZE) == data(i), "page {i}");
    }
    assert!(guest.memory.mapped() <= ring + MAX_PERSISTENT);
    assert!(bed.xen.copies.load(Ordering::Relaxed) > 0);
    guest.close();
    assert_eq!(guest.memory.mapped(), 0);
}

#[test]
fn a_page_is_copied_if_all_persistent_pages_are_in_use() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", Wishes { order: 4, ..KEPT });
    let count = MAX_PERSISTENT / 11 + 40;
    for op in [OP_WRITE, OP_READ] {
        let before = bed.xen.copies.load(Ordering::Relaxed);
        bed.a.hold.store(true, Ordering::Release);
        let mut requests = Vec::new();
        for i in 0..count {
            let pages: Vec<Page> = (0..11).map(|_| guest.page(false)).collect();
            let data = noise(i as u64 + 1, 11 * PAGE_SIZE);
            if op == OP_WRITE {
                guest.load(&pages, 0, &data);
            }
            let segments: Vec<Segment> = pages.iter().map(|p| whole(p.gref)).collect();
            requests.push((guest.put(0, op, 88 * i as u64, &segments), pages, data));
        }
        guest.kick(0);
        wait("all are at the device", || {
            bed.a.held.load(Ordering::Acquire) == count
        });
        assert!(guest.memory.mapped() <= 16 + MAX_PERSISTENT);
        bed.a.hold.store(false, Ordering::Release);
        for (id, pages, data) in requests {
            assert_eq!(guest.status(0, id), RSP_OKAY);
            assert!(guest.store(&pages, 0, data.len()) == data);
        }
        assert!(bed.xen.copies.load(Ordering::Relaxed) > before);
    }
    guest.close();
    assert_eq!(guest.memory.mapped(), 0);
}

/// Copies of a queue take at most 32 MiB: later requests wait, and are not refused.
#[test]
fn copies_are_bounded_and_other_requests_wait() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", Wishes { order: 3, ..SMALL });
    let mut other = bed.connected(8, "b", SMALL);
    bed.a.hold.store(true, Ordering::Release);
    let page = guest.page(true);
    let data = noise(1, PAGE_SIZE);
    guest.load(&[page], 0, &data);
    // As long as a request goes to the device whole.
    let (fit, all) = (128, 160);
    let segments = vec![whole(page.gref); 64];
    let mut ids = Vec::new();
    for _ in 0..all {
        ids.push(guest.put_indirect(0, OP_WRITE, 0, &segments).0);
        guest.kick(0);
    }
    let held = || bed.a.held.load(Ordering::Acquire);
    wait("as many as fit are at the device", || held() == fit);
    for _ in 0..20 {
        other.check();
        assert_eq!(held(), fit);
    }
    bed.a.hold.store(false, Ordering::Release);
    for id in ids {
        assert_eq!(guest.status(0, id), RSP_OKAY);
    }
    assert!(guest.read(0, 504, 0, PAGE_SIZE) == data);
}

#[test]
fn a_new_size_is_published_and_the_state_is_written_again() {
    let bed = Bed::new();
    let guest = bed.connected(7, "a", SMALL);
    let told = Arc::new(AtomicUsize::new(0));
    let (path, seen) = (guest.back("state"), Arc::clone(&told));
    bed.daemon.on_change(move |changed, value| {
        if changed == path && value == Some("4") {
            seen.fetch_add(1, Ordering::AcqRel);
        }
    });
    bed.a.resize(40960);
    bed.daemon.until_is(&guest.back("sectors"), "40960");
    wait("state is written again", || {
        told.load(Ordering::Acquire) == 1
    });
    let listed = bed.toolstack().look(guest.node).unwrap().unwrap();
    assert_eq!(listed.back, Some(XenbusState::Connected));
}

/// A copy names a page by a reference, which may grant another page once its guest has left.
#[test]
fn nothing_is_copied_to_a_guest_that_has_left() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", SMALL);
    let mut other = bed.connected(8, "b", SMALL);
    guest.write(0, 0, 0, &noise(1, PAGE_SIZE));
    bed.a.hold.store(true, Ordering::Release);
    let page = guest.page(false);
    let before = [7; PAGE_SIZE];
    guest.load(&[page], 0, &before);
    guest.put(0, OP_READ, 0, &[whole(page.gref)]);
    guest.kick(0);
    wait("the read is at the device", || {
        bed.a.held.load(Ordering::Acquire) == 1
    });
    bed.daemon.remove(&guest.node.back_end(0));
    // Attaches a new guest, so earlier changes have been handled.
    bed.still_serves(&mut other);
    bed.a.hold.store(false, Ordering::Release);
    wait("everything is unmapped", || guest.memory.mapped() == 0);
    assert!(guest.store(&[page], 0, PAGE_SIZE) == before);
}

#[test]
fn a_persistent_page_that_can_not_be_mapped_is_copied() {
    let bed = Bed::new();
    let mut guest = bed.connected(7, "a", KEPT);
    let data = noise(1, PAGE_SIZE);
    let page = guest.page(true);
    write_page(&mut guest, page, 0, &data);
    assert!(guest.read(0, 0, 0, PAGE_SIZE) == data);
    assert!(bed.xen.copies.load(Ordering::Relaxed) > 0);
}

/// A driver domain sees only the disk's directory of a guest, and can't find out if other nodes exist.
#[test]
fn a_guest_that_is_destroyed_leaves_nothing_in_a_driver_domain() {
    for connects in [false, true] {
        let bed = Bed::new();
        let gone = Arc::new(AtomicBool::new(false));
        let hidden = Arc::clone(&gone);
        bed.daemon.refuse(move |_, path| {
            let home = path == "/local/domain/7" || path == "/local/domain/7/name";
            let left = path.starts_with("/local/domain/7/") && hidden.load(Ordering::Acquire);
            (home || left).then_some("EACCES")
        });
        let mut guest = bed.guest(7);
        bed.attach(&guest, "a");
        guest.until_back("2");
        bed.connected(8, "b", SMALL).check();
        bed.daemon.fire("@releaseDomain");
        bed.connected(9, "b", SMALL).check();
        guest.connect(SMALL);
        guest.check();
        if !connects {
            guest.close();
            guest.set_state("1");
            guest.until_back("2");
        }
        gone.store(true, Ordering::Release);
        guest.destroy();
        bed.daemon.until_gone("/local/domain/0/backend/pvblk/7");
        assert_eq!(guest.memory.mapped(), 0);
    }
}
