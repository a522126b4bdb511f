//! Guests whose server went away with answered writes in its cache: their next flush says so, once.

mod vhost_support;

use std::sync::atomic::Ordering;
use vhost_support::kept::{Guest, IO_ERROR, OK, QUEUES};
use vhost_support::{Bed, ENTRIES};

/// The server is replaced; `cache_lost`: with what its cache held.
fn next_server(guest: &mut Guest, bed: &mut Bed, cache_lost: bool) {
    bed.restart();
    if cache_lost {
        bed.a.cache.fetch_add(1, Ordering::Relaxed);
    }
    guest.reconnect();
}

#[test]
fn a_write_that_no_flush_covered_is_told_once() {
    let mut bed = Bed::new();
    let mut guest = Guest::new(&bed.path("a"));
    guest.front.write(0, 1, &[1; 512]);
    next_server(&mut guest, &mut bed, true);
    guest.is_told(0);
    // It was told: neither another connection nor another server repeats it, as nothing was written since.
    guest.reconnect();
    assert_eq!(guest.flush(1), OK);
    next_server(&mut guest, &mut bed, true);
    assert_eq!([guest.flush(0), guest.flush(1)], [OK, OK]);
}

#[test]
fn what_was_flushed_or_is_not_lost_fails_nothing() {
    let mut bed = Bed::new();
    let mut guest = Guest::new(&bed.path("a"));
    for queue in 0..QUEUES {
        guest.front.write(queue, queue.into(), &[1; 512]);
    }
    // Not lost: the cache is the same.
    next_server(&mut guest, &mut bed, false);
    assert_eq!(guest.flush(1), OK);
    // Lost, but covered by that flush on one queue, which is enough for both.
    next_server(&mut guest, &mut bed, true);
    assert_eq!([guest.flush(0), guest.flush(1)], [OK, OK]);
    // A write after the flush isn't covered by it.
    guest.front.write(1, 3, &[3; 512]);
    next_server(&mut guest, &mut bed, true);
    guest.is_told(0);
}

#[test]
fn until_it_is_told_every_server_after_it_fails_the_flush() {
    let mut bed = Bed::new();
    let mut guest = Guest::new(&bed.path("a"));
    guest.front.write(0, 1, &[1; 512]);
    next_server(&mut guest, &mut bed, true);
    guest.front.write(0, 2, &[2; 512]);
    // The next one has the same cache as this, but nobody was told of the loss before.
    next_server(&mut guest, &mut bed, false);
    guest.reconnect();
    guest.is_told(1);
}

#[test]
fn flushes_that_were_submitted_before_it_was_told_fail_on_every_queue() {
    let mut bed = Bed::new();
    let mut guest = Guest::new(&bed.path("a"));
    guest.front.write(0, 1, &[1; 512]);
    bed.restart();
    bed.a.cache.fetch_add(1, Ordering::Relaxed);
    // More of them than a pull takes, while nobody serves: the first queue's may be told before the second is started.
    for queue in 0..QUEUES {
        for head in 0..ENTRIES {
            let driver = &mut guest.front.drivers[usize::from(queue)];
            driver.build(head, 4, 0, &[], true);
            driver.make_available(head);
        }
    }
    guest.reconnect();
    for queue in 0..QUEUES {
        for _ in 0..ENTRIES {
            let (head, _) = guest.front.wait_used(queue);
            let status = guest.front.drivers[usize::from(queue)].status(head as u16);
            assert_eq!(status, IO_ERROR, "queue {queue}, flush {head}");
        }
    }
    assert_eq!([guest.flush(0), guest.flush(1)], [OK, OK]);
}

#[test]
fn an_area_of_the_first_release_says_nothing_of_the_cache() {
    let mut bed = Bed::new();
    let mut guest = Guest::new(&bed.path("a"));
    guest.forget_the_cache_mark();
    next_server(&mut guest, &mut bed, false);
    guest.is_told(0);
    next_server(&mut guest, &mut bed, false);
    assert_eq!(guest.flush(1), OK);
    // A cache that lives as long as the kernel can't have been lost while the guest lived.
    guest.forget_the_cache_mark();
    bed.a
        .cache
        .store(pvblk_sys::boot_mark().unwrap(), Ordering::Relaxed);
    next_server(&mut guest, &mut bed, false);
    assert_eq!(guest.flush(0), OK);
}
