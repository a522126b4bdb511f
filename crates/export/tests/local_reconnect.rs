//! Reconnecting to a local server: on the same memory, and never while requests of the earlier connection are in
//! flight.

mod local_support;

use local_support::*;
use pvblk_client::local::{ConnectOptions, connect};
use pvblk_export::local::LocalServer;
use pvblk_protocol::blkif::grant::GrantEntry;
use pvblk_testing::wait;
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
    let (mut parts, link) = connect(f.server.path(), "a", &options(2, 8, 60_000)).unwrap();
    f.keep_a_write(&mut parts);
    drop((parts, link));
    wait("the other queue ends", || f.ended() == 1);
    let early = connect(f.server.path(), "a", &options(2, 8, 300));
    assert!(early.is_err(), "the old requests are still at work");
    assert_eq!(f.served(), 2);
    let path = f.server.path().to_owned();
    let waiting = std::thread::spawn(move || connect(&path, "a", &options(2, 8, 60_000)).is_ok());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(f.served(), 2);
    f.release();
    assert!(waiting.join().unwrap(), "it may connect now");
}

/// It has seen the offers, and publishes its rings after the other one is gone.
#[test]
fn a_front_end_that_was_offered_the_disk_before_waits() {
    let f = Fixture::new(offers(1, 1));
    let (mut parts, link) = connect(f.server.path(), "a", &options(1, 1, 60_000)).unwrap();
    let raw = Raw::new(&f);
    raw.prepare();
    raw.until("state", "2");
    f.keep_a_write(&mut parts);
    drop((parts, link));
    // The server has seen that it is gone.
    let early = connect(f.server.path(), "a", &options(1, 1, 300));
    assert!(early.is_err());
    raw.write(&RINGS);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!((f.served(), f.ended()), (1, 0));
    f.release();
    raw.until("state", "4");
    assert_eq!(f.served(), 2);
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
        let offer = offers(offer.0, offer.1);
        let mut server = LocalServer::bind(&path, &f.service, offer).unwrap();
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
