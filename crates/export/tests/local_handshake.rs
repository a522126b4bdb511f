//! The local handshake between two well-behaved ends, and its end by either.

mod local_support;

use local_support::*;
use pvblk_block::memory;
use pvblk_client::local::{ConnectOptions, FrontLink, LinkEvent, connect};
use pvblk_client::rings::FrontParts;
use pvblk_client::rings::FrontPersonality;
use pvblk_export::local::LocalServer;
use pvblk_protocol::blkif::wire::{OP_READ, OP_WRITE, RSP_OKAY, RequestHeader, Segment};
use pvblk_protocol::xenbus::BackendOffers;
use pvblk_sys::PAGE_SIZE;
use pvblk_testing::wait;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn options(queues: u32, ring_pages: usize) -> ConnectOptions {
    ConnectOptions {
        queues,
        ring_pages,
        memory_bytes: 1 << 20,
        name: "test".into(),
        timeout: Duration::from_secs(60),
        ..ConnectOptions::default()
    }
}

fn join(f: &Fixture, options: &ConnectOptions) -> (FrontParts, FrontLink) {
    connect(f.server.path(), "a", options).unwrap()
}

fn wait_event(link: &mut FrontLink) -> LinkEvent {
    let mut seen = Vec::new();
    wait("an event of the link", || {
        seen.extend(link.step());
        !seen.is_empty()
    });
    seen.remove(0)
}

#[test]
fn the_smaller_of_wish_and_offer_is_taken() {
    let f = Fixture::new(offers(2, 8));
    let (parts, _link) = join(&f, &options(8, 16));
    assert_eq!(parts.queues.len(), 2);
    assert!(parts.queues.iter().all(|q| q.ring.entries() == 256));
    assert_eq!(parts.properties.sectors, 2048);
    assert_eq!(parts.properties.max_indirect_segments, 256);
    assert!(parts.properties.persistent && parts.properties.flush);
    assert_eq!(f.served(), 2);
    let exclusive = f.service.disks().find("a").unwrap();
    let users = format!("{:?}", exclusive.users());
    assert!(users.contains("test (front end 1)"), "{users}");
}

#[test]
fn an_old_back_end_gets_one_queue_of_one_page() {
    let f = Fixture::new(BackendOffers::oldest());
    let (parts, _link) = join(&f, &options(8, 16));
    assert_eq!(
        (parts.queues.len(), parts.queues[0].ring.entries()),
        (1, 32)
    );
    assert!(!parts.properties.persistent);
    assert_eq!(parts.properties.max_indirect_segments, 0);
}

#[test]
fn an_old_front_end_is_served() {
    let f = Fixture::new(offers(8, 16));
    let old = ConnectOptions {
        personality: FrontPersonality {
            ignores_multi_queue: true,
            ignores_multi_page: true,
            skips_initialised: true,
            deprecated_ring_pages: false,
        },
        persistent: false,
        ..options(8, 16)
    };
    let (parts, mut link) = join(&f, &old);
    assert_eq!(
        (parts.queues.len(), parts.queues[0].ring.entries()),
        (1, 32)
    );
    assert!(!parts.properties.persistent);
    link.close().unwrap();
}

#[test]
fn sixty_four_queues_of_sixteen_pages_fit_one_handshake() {
    let f = Fixture::new(offers(64, 16));
    let (parts, mut link) = join(&f, &options(64, 16));
    assert_eq!(
        (parts.queues.len(), parts.queues[63].ring.entries()),
        (64, 512)
    );
    assert!(f.server.mapped_bytes() > 64 << 20);
    link.close().unwrap();
    assert_eq!(f.server.mapped_bytes(), 0);
}

/// Requests and their data through the rings and the back end, with a notification each way.
#[test]
fn requests_data_and_notifications_pass_both_ways() {
    let f = Fixture::new(offers(2, 2));
    let (mut parts, mut link) = join(&f, &options(2, 2));
    let granter = Arc::clone(&parts.granter);
    let frame = granter.first_data_frame() + 3;
    let at = frame as usize * PAGE_SIZE;
    for (round, front) in parts.queues.iter_mut().enumerate() {
        let text = format!("to the disk {round}");
        for (operation, status) in [(OP_WRITE, RSP_OKAY), (OP_READ, RSP_OKAY), (OP_READ, -1)] {
            // The last one is to be read into a page that is granted for reading only.
            let read_only = operation == OP_WRITE || status != RSP_OKAY;
            let gref = granter.grant(frame, read_only).unwrap();
            granter.memory().write(at + 1024, &[0; 512]);
            if operation == OP_WRITE {
                granter.memory().write(at + 1024, text.as_bytes());
            }
            let header = RequestHeader {
                operation,
                nr_segments: 1,
                id: 77 + round as u64,
                sector_number: 5,
                ..RequestHeader::default()
            };
            let segment = Segment {
                gref,
                first_sect: 2,
                last_sect: 2,
                pad: 0,
            };
            front.ring.put_rw(&header, &[segment]);
            front.ring.publish();
            front.channel.notify();
            let mut response = None;
            wait("a response", || {
                response = front.ring.take().unwrap();
                response.is_some()
            });
            let response = response.unwrap();
            assert_eq!((response.id, response.status), (header.id, status));
            let mut got = vec![0; text.len()];
            granter.memory().read(at + 1024, &mut got);
            let expected = if status == RSP_OKAY {
                text.as_bytes()
            } else {
                &[0; 13]
            };
            assert_eq!(got, expected);
            granter.end(gref);
        }
        // The other side tells of its responses.
        assert!(poll_once(front.channel.fd()));
    }
    link.close().unwrap();
}

#[test]
fn a_resize_reaches_every_front_end() {
    let f = Fixture::new(offers(1, 1));
    let (_a, mut one) = join(&f, &options(1, 1));
    let (_b, mut two) = join(&f, &options(1, 1));
    f.ram.resize(4096);
    for link in [&mut one, &mut two] {
        assert_eq!(wait_event(link), LinkEvent::Resized { sectors: 4096 });
    }
    // Several changes may arrive as one, but the last size always arrives.
    (1..=100).for_each(|n| f.ram.resize(n * 8));
    let mut last = None;
    wait("the last size", || {
        last = one.step().pop().or(last.take());
        last == Some(LinkEvent::Resized { sectors: 800 })
    });
}

#[test]
fn an_orderly_close_frees_everything_and_a_new_connection_works() {
    let f = Fixture::new(offers(2, 4));
    for round in 1..=3 {
        let (_parts, mut link) = join(&f, &options(2, 4));
        link.close().unwrap();
        assert!(link.has_ended() && link.step().is_empty());
        assert_eq!((f.served(), f.ended()), (2 * round, 2 * round));
        assert_eq!(f.server.mapped_bytes(), 0);
    }
}

#[test]
fn a_dead_front_end_is_detached_and_its_memory_freed_after_its_last_request() {
    let f = Fixture::new(offers(1, 1));
    let (mut parts, link) = join(&f, &options(1, 1));
    f.keep_a_write(&mut parts);
    let bill = || {
        let lines = memory::bill().into_iter();
        lines.filter(|l| l.owner.starts_with("disk a: ")).count()
    };
    assert!(bill() > 0);
    drop((parts, link));
    // It still drains; until the end its disk is fenced (see local_reconnect.rs).
    assert!(bill() > 0 && f.server.mapped_bytes() > 0);
    f.release();
    wait("its end", || f.ended() == 1);
    let (_parts, mut link) = join(&f, &options(1, 1));
    link.close().unwrap();
    wait("its memory's end", || f.server.mapped_bytes() == 0);
}

#[test]
fn a_broken_queue_closes_its_connection_with_the_reason() {
    let f = Fixture::new(offers(1, 1));
    let raw = Raw::new(&f);
    raw.prepare();
    raw.write(&RINGS);
    raw.until("state", "4");
    // More requests than the ring has entries.
    raw.memory
        .atomic_u32(9 * PAGE_SIZE)
        .store(1000, Ordering::Relaxed);
    raw.kick();
    let why = raw.refusal();
    assert!(why.contains("queue 0: ") && !why.contains('\n'), "{why}");
    raw.write(&[("state", "6")]);
    raw.until("state", "6");
    assert_eq!((f.served(), f.ended()), (1, 1));
}

#[test]
fn a_disk_without_room_refuses_a_front_end_and_keeps_none_of_its_queues() {
    let f = Fixture::new(offers(3, 1));
    for room in 0..3 {
        *f.ram.room.lock() = Some(room);
        let e = connect(f.server.path(), "a", &options(3, 1)).err().unwrap();
        assert!(e.to_string().contains("no room for a queue"), "{e}");
        // The connection's thread unmaps its memory after its queues have ended.
        wait("all are gone", || {
            f.served() == f.ended() && f.server.mapped_bytes() == 0
        });
    }
    *f.ram.room.lock() = None;
    join(&f, &options(3, 1)).1.close().unwrap();
}

#[test]
fn a_device_that_goes_away_closes_its_connections() {
    let f = Fixture::new(offers(1, 1));
    let (_parts, mut link) = join(&f, &options(1, 1));
    f.ram.vanish();
    assert!(matches!(wait_event(&mut link), LinkEvent::Closing { .. }));
    link.close().unwrap();
}

#[test]
fn a_stopping_server_asks_its_front_ends_to_leave() {
    let mut f = Fixture::new(offers(1, 1));
    let (_parts, mut link) = join(&f, &options(1, 1));
    let path = f.server.path().to_owned();
    let front = std::thread::spawn(move || {
        assert!(matches!(
            wait_event(&mut link),
            LinkEvent::Closing { reason: None }
        ));
        link.close().unwrap();
    });
    f.server.stop();
    front.join().unwrap();
    assert!(!path.exists());
    assert_eq!((f.served(), f.ended()), (1, 1));
    let e = connect(&path, "a", &options(1, 1)).err().unwrap();
    assert!(e.to_string().contains("is `pvblk serve` running"), "{e}");
}

#[test]
fn a_front_end_that_does_not_answer_cannot_hold_up_a_stop() {
    let mut f = Fixture::new(offers(1, 1));
    let (_parts, mut link) = join(&f, &options(1, 1));
    f.server.stop();
    let seen = link.step();
    assert!(
        matches!(seen.last(), Some(LinkEvent::Gone { .. })),
        "{seen:?}"
    );
    assert_eq!(f.ended(), 1);
}

#[test]
fn the_socket_is_private_and_only_a_dead_one_is_replaced() {
    let f = Fixture::new(offers(1, 1));
    let path = f.server.path().to_owned();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let service = service(&Ram::new(2048));
    let bind = |path: &Path| LocalServer::bind(path, &service, offers(1, 1));
    let e = bind(&path).err().unwrap();
    assert!(e.to_string().contains("in use by another server"), "{e}");
    assert!(path.exists());
    // A stream socket of another server isn't ours either.
    let stream = f.dir.path().join("stream");
    let listener = std::os::unix::net::UnixListener::bind(&stream).unwrap();
    assert!(bind(&stream).is_err());
    drop(listener);
    let second = bind(&stream).unwrap();
    // A file that replaced the socket is not removed.
    std::fs::remove_file(&stream).unwrap();
    std::fs::write(&stream, "mine").unwrap();
    drop(second);
    assert!(stream.exists());
    assert!(bind(&stream).is_err());
    let long = f.dir.path().join("x".repeat(120));
    let e = bind(&long).err().unwrap();
    assert!(e.to_string().contains("shorter"), "{e}");
}

#[test]
fn options_out_of_range_are_refused_before_anything_is_sent() {
    let f = Fixture::new(offers(1, 1));
    let e = |o: ConnectOptions| {
        let e = connect(f.server.path(), "a", &o).err().unwrap();
        e.to_string()
    };
    assert!(e(options(0, 1)).contains("1 to 64"));
    assert!(e(options(65, 1)).contains("1 to 64"));
    assert!(e(options(1, 3)).contains("1, 2, 4, 8 or 16"));
    assert!(e(options(1, 32)).contains("1, 2, 4, 8 or 16"));
    let memory = |memory_bytes| ConnectOptions {
        memory_bytes,
        ..options(1, 1)
    };
    assert!(e(memory(0)).contains("63 GiB"));
    assert!(e(memory(u64::MAX)).contains("63 GiB"));
    let unknown = connect(f.server.path(), "no\nsuch", &options(1, 1));
    let text = unknown.err().unwrap().to_string();
    assert!(text.contains("there is no disk 'no\\nsuch' here") && text.contains("--disk"));
}

#[test]
fn a_hundred_front_ends_at_once() {
    let f = Fixture::new(offers(1, 1));
    let mut all: Vec<_> = (0..100).map(|_| join(&f, &options(1, 1))).collect();
    assert_eq!(f.served(), 100);
    for (_, link) in &mut all {
        link.close().unwrap();
    }
    assert_eq!((f.ended(), f.server.mapped_bytes()), (100, 0));
}
