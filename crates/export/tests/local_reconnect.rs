//! Reconnecting to a local server: on the same memory, and never while requests of the earlier connection are in
//! flight.

mod local_support;

use local_support::*;
use pvblk_client::local::{ConnectOptions, connect};
use pvblk_export::local::LocalServer;
use pvblk_protocol::blkif::grant::GrantEntry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn options(queues: u32, ring_pages: usize, timeout_ms: u64) -> ConnectOptions {
    ConnectOptions {
        queues,
        ring_pages,
        memory_bytes: 1 << 20,
        name: "test".into(),
        timeout: Duration::from_millis(timeout_ms),
        ..ConnectOptions::default()
    }
}

#[test]
fn no_front_end_connects_while_requests_of_a_dead_one_are_in_flight() {
    let f = Fixture::new(offers(2, 8));
    f.state.hold.store(true, Ordering::Relaxed);
    let (parts, link) = connect(f.server.path(), "a", &options(2, 8, 60_000)).unwrap();
    drop((parts, link));
    eventually("the detach", || {
        f.state.detaches.load(Ordering::Relaxed) == 1
    });
    let early = connect(f.server.path(), "a", &options(2, 8, 300));
    assert!(early.is_err(), "the old requests are still at work");
    assert_eq!(f.state.attaches.load(Ordering::Relaxed), 1);
    let path = f.server.path().to_owned();
    let waiting = std::thread::spawn(move || connect(&path, "a", &options(2, 8, 60_000)).is_ok());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(f.state.attaches.load(Ordering::Relaxed), 1);
    f.state.hold.store(false, Ordering::Relaxed);
    f.state.release();
    assert!(waiting.join().unwrap(), "it may connect now");
}

#[test]
fn a_fence_that_another_export_closed_counts_too() {
    let f = Fixture::new(offers(2, 8));
    let closed = f.state.fence.close();
    let early = connect(f.server.path(), "a", &options(2, 8, 300));
    assert!(early.is_err());
    let path = f.server.path().to_owned();
    let waiting = std::thread::spawn(move || connect(&path, "a", &options(2, 8, 60_000)).is_ok());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(f.state.attaches.load(Ordering::Relaxed), 0);
    drop(closed);
    assert!(waiting.join().unwrap(), "it may connect now");
}

#[test]
fn the_memory_is_kept_and_old_grants_end() {
    let mut f = Fixture::new(offers(4, 8));
    let (parts, mut link) = connect(f.server.path(), "a", &options(3, 4, 60_000)).unwrap();
    let memory = Arc::clone(parts.granter.memory());
    let frame = parts.granter.first_data_frame();
    memory.write(frame as usize * 4096, b"data that waits");
    let old = parts.granter.grant(frame, false).unwrap();
    drop(parts);
    let entry = |gref: u32| {
        let word = |at| memory.atomic_u32(at).load(Ordering::Relaxed);
        let at = gref as usize * 8;
        GrantEntry::decode(word(at), word(at + 4))
    };
    assert!(entry(old).is_some());
    // Another server, with smaller limits.
    let path = f.server.path().to_owned();
    f.server.stop();
    assert!(link.reconnect(Duration::from_millis(200)).is_err());
    for (offer, queues, entries) in [((1, 2), 1, 64), ((8, 16), 3, 128)] {
        let host = FakeHost {
            state: Arc::clone(&f.state),
            offers: offers(offer.0, offer.1),
        };
        let mut server = LocalServer::bind(&path, Arc::new(host)).unwrap();
        let parts = link.reconnect(Duration::from_secs(60)).unwrap();
        assert!(Arc::ptr_eq(parts.granter.memory(), &memory));
        assert_eq!(parts.granter.first_data_frame(), frame);
        assert_eq!(parts.queues.len(), queues);
        assert_eq!(parts.queues[0].ring.entries(), entries);
        assert!(entry(old).is_none(), "granted to the one that is gone");
        let mut data = [0; 15];
        memory.read(frame as usize * 4096, &mut data);
        assert_eq!(&data, b"data that waits");
        parts.granter.grant(frame, false).unwrap();
        drop(parts);
        server.stop();
    }
}
