//! The local handshake with front ends that lie, disconnect or send noise.

mod local_support;

use local_support::*;
use pvblk_client::local::{ConnectOptions, connect};
use pvblk_protocol::local::Frame;
use pvblk_protocol::xenbus::Change;
use pvblk_sys::{EventFd, PAGE_SIZE, create_sealed};
use pvblk_testing::wait;
use std::os::fd::AsFd;
use std::time::Duration;

/// The server still serves others, and has no resources of the bad front ends.
fn still_serves(f: &Fixture) {
    wait("everything is unmapped", || {
        f.server.mapped_bytes() == 0 && f.served() == f.ended()
    });
    let options = ConnectOptions {
        queues: 2,
        ring_pages: 2,
        memory_bytes: 1 << 16,
        timeout: Duration::from_secs(60),
        ..ConnectOptions::default()
    };
    let (_parts, mut link) = connect(f.server.path(), "a", &options).unwrap();
    link.close().unwrap();
}

fn spoiled(key: &str, value: Option<&str>) -> Vec<Change> {
    let mut changes: Vec<_> = RINGS.iter().map(|(k, v)| Change::set(*k, v)).collect();
    changes.push(Change {
        key: key.into(),
        value: value.map(str::to_owned),
    });
    // The state comes last, because it makes the server read the keys.
    changes.push(Change::set("state", 3));
    changes
}

#[test]
fn the_unchanged_keys_are_accepted() {
    let f = Fixture::new(offers(2, 8));
    let raw = Raw::new(&f);
    raw.prepare();
    raw.write(&RINGS);
    raw.until("state", "4");
    assert_eq!(f.served(), 1);
    drop(raw);
    wait("detach", || f.ended() == 1);
    still_serves(&f);
}

/// One wrong key, one reason.
#[test]
fn every_hostile_key_is_refused_with_its_reason() {
    let f = Fixture::new(offers(2, 8));
    let cases: &[(&str, Option<&str>, &str)] = &[
        ("protocol", Some("arm-abi"), "protocol is 'arm-abi'"),
        ("ring-ref", None, "ring-ref is missing"),
        ("ring-ref", Some("7"), "reference 7 grants nothing"),
        ("ring-ref", Some("512"), "reference 512 grants nothing"),
        ("ring-ref", Some("4294967295"), "grants nothing"),
        ("ring-ref", Some("9"), "reference 9 names a frame outside"),
        ("ring-ref", Some("10"), "reference 10 is read-only"),
        ("event-channel", None, "event-channel is missing"),
        ("event-channel", Some("2"), "event-channel 2 was not passed"),
        ("multi-queue-num-queues", Some("3"), "1 to 2 were offered"),
        ("multi-queue-num-queues", Some("0"), "1 to 2 were offered"),
        (
            "multi-queue-num-queues",
            Some("2"),
            "queue 0: ring-ref is missing",
        ),
        ("ring-page-order", Some("4"), "0 to 3 were offered"),
        ("ring-page-order", Some("1"), "ring-ref0 is missing"),
        ("num-ring-pages", Some("3"), "not a power of two"),
        ("feature-persistent", Some("\0"), "not a number"),
    ];
    for (key, value, reason) in cases {
        let raw = Raw::new(&f);
        raw.prepare();
        raw.grant(9, RAW_FRAMES, false);
        raw.grant(10, 11, true);
        raw.frame(&Frame::Write(spoiled(key, *value)), &[]);
        let text = raw.refusal();
        assert!(text.contains(reason), "{key}={value:?}: {text}");
        // The front end can still leave in order after a refusal.
        raw.write(&[("state", "6")]);
        raw.until("state", "6");
    }
    still_serves(&f);
}

#[test]
fn a_state_that_is_not_allowed_ends_a_working_connection() {
    let f = Fixture::new(offers(2, 8));
    for state in ["2", "7", "8", "9", "", "connected", "44"] {
        let raw = Raw::new(&f);
        raw.prepare();
        raw.write(&RINGS);
        raw.until("state", "4");
        raw.write(&[("state", state)]);
        assert!(raw.refusal().starts_with("state "), "{state}");
    }
    still_serves(&f);
}

#[test]
fn a_front_end_may_come_back_on_the_same_socket() {
    let f = Fixture::new(offers(2, 8));
    let raw = Raw::new(&f);
    raw.hello();
    for round in 1..=3 {
        raw.until("state", "2");
        raw.memory();
        raw.channel(1);
        raw.grant(8, 9, false);
        raw.write(&RINGS);
        raw.until("state", "4");
        assert_eq!(f.served(), round);
        raw.write(&[("state", "5")]);
        raw.until("state", "5");
        raw.write(&[("state", "6")]);
        raw.until("state", "6");
        assert_eq!(f.ended(), round);
        raw.write(&[("state", "1")]);
    }
    drop(raw);
    still_serves(&f);
}

#[test]
fn bad_memory_is_refused() {
    let f = Fixture::new(offers(2, 8));
    let refused = |setup: &dyn Fn(&Raw)| {
        let raw = Raw::new(&f);
        raw.hello();
        setup(&raw);
        raw.refusal()
    };
    let loose = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&loose, 65536).unwrap();
    let text = refused(&|r| r.memory_of(loose.as_fd(), 0, 1));
    assert!(text.contains("not sealed against shrinking"), "{text}");
    let null = std::fs::File::open("/dev/null").unwrap();
    let text = refused(&|r| r.memory_of(null.as_fd(), 0, 1));
    assert!(text.contains("not a memfd"), "{text}");
    let odd = create_sealed("t", PAGE_SIZE as u64 + 1).unwrap();
    assert!(refused(&|r| r.memory_of(odd.as_fd(), 0, 1)).contains("not whole pages"));
    let vast = create_sealed("t", (64 << 30) + PAGE_SIZE as u64).unwrap();
    assert!(refused(&|r| r.memory_of(vast.as_fd(), 0, 1)).contains("up to 64 GiB"));
    for (first, count) in [
        (0, 0),
        (0, RAW_FRAMES + 1),
        (RAW_FRAMES, 1),
        (u32::MAX, u32::MAX),
    ] {
        let text = refused(&|r| r.memory_of(r.file.as_fd(), first, count));
        assert!(text.contains("is not inside"), "{text}");
    }
    let text = refused(&|r| {
        r.memory();
        r.memory();
    });
    assert!(text.contains("second time"), "{text}");
    let text = refused(&|r| r.write(&RINGS));
    assert!(text.contains("before MEMORY"), "{text}");
    still_serves(&f);
}

#[test]
fn bad_channels_are_refused() {
    let f = Fixture::new(offers(2, 8));
    let refused = |setup: &dyn Fn(&Raw)| {
        let raw = Raw::new(&f);
        raw.hello();
        setup(&raw);
        raw.refusal()
    };
    assert!(refused(&|r| r.channel(0)).contains("not 0"));
    assert!(refused(&|r| (0..2).for_each(|_| r.channel(5))).contains("unique"));
    assert!(refused(&|r| (1..=65).for_each(|p| r.channel(p))).contains("too many"));
    let not_an_event = refused(&|r| {
        let fds = [r.file.as_fd(), r.file.as_fd()];
        r.frame(&Frame::Channel { port: 1 }, &fds);
    });
    assert!(not_an_event.contains("not an eventfd"), "{not_an_event}");
    let late = refused(&|r| {
        r.memory();
        r.channel(1);
        r.grant(8, 9, false);
        r.write(&RINGS);
        r.until("state", "4");
        r.channel(2);
    });
    assert!(late.contains("too late"), "{late}");
    still_serves(&f);
}

#[test]
fn noise_ends_only_its_sender() {
    let f = Fixture::new(offers(2, 8));
    let hello = Frame::Hello {
        disk: "a".into(),
        front: "raw".into(),
    };
    let hello = hello.encode().unwrap();
    let mut version = hello.clone();
    version[8] = 2;
    let event = EventFd::new().unwrap();
    type Noise<'a> = (&'a [u8], usize, bool, &'a str);
    let long_key = Frame::Write(vec![Change::set("k".repeat(257), "")]);
    let long_key = long_key.encode().unwrap();
    let bad_key = Frame::Write(vec![Change::set("../../x", "")])
        .encode()
        .unwrap();
    let flood = |n: usize| {
        let keys = (0..n).map(|i| Change::set(format!("k{i}"), "v"));
        Frame::Write(keys.collect()).encode().unwrap()
    };
    let flood = flood(2049);
    let cases: &[Noise<'_>] = &[
        (&[0xff; 100], 0, false, "unknown type 255"),
        (&[0xff; 100], 0, true, "unknown type 255"),
        (&[1; 65536], 0, false, "malformed"),
        (&[3; 65537], 0, true, "more than 65536 bytes"),
        (&version, 0, false, "speaks version 2"),
        (&hello[..hello.len() - 1], 0, false, "malformed"),
        (&hello, 1, false, "1 descriptors, but its type takes 0"),
        (&hello, 0, true, "second time"),
        (
            &[4, 0, 0, 0, 0, 1, 0, 0, 0],
            0,
            true,
            "0 descriptors, but its type takes 1",
        ),
        (&[4, 0, 0, 0, 0, 1, 0, 0, 0], 16, true, "16 descriptors"),
        (&[5, 1, 0, 0, 0], 2, false, "not HELLO"),
        (&[5, 1, 0, 0, 0], 1, true, "takes 2"),
        (&[3, 0, 0], 0, false, "not HELLO"),
        (&bad_key, 0, true, "not the name of a key"),
        (&long_key, 0, true, "257 bytes"),
        (&flood, 0, true, "more than 2048 keys"),
        (&[], 0, true, "closed"),
    ];
    for (bytes, fds, greet, reason) in cases {
        let raw = Raw::new(&f);
        if *greet {
            raw.hello();
        }
        raw.bytes(bytes, &vec![event.as_fd(); *fds]);
        let text = raw.refusal();
        assert!(text.contains(reason), "{reason}: {text}");
        while raw.next().is_some() {}
    }
    still_serves(&f);
}

/// Ends a front end after each of its steps, and at the start of the back end's response to it.
#[test]
fn a_front_end_may_die_at_every_step() {
    let f = Fixture::new(offers(2, 8));
    let steps: &[&dyn Fn(&Raw)] = &[
        &|_| {},
        &|r| r.hello(),
        &|r| r.until("state", "2"),
        &|r| r.memory(),
        &|r| r.channel(1),
        &|r| r.grant(8, 9, false),
        &|r| r.write(&RINGS),
        &|r| r.until("state", "4"),
        &|r| r.write(&[("state", "4")]),
        &|r| r.write(&[("state", "5")]),
        &|r| r.until("state", "5"),
        &|r| r.write(&[("state", "6")]),
        &|r| r.until("state", "6"),
        &|r| r.write(&[("state", "1")]),
    ];
    for last in 0..steps.len() {
        let raw = Raw::new(&f);
        steps[..=last].iter().for_each(|step| step(&raw));
        drop(raw);
    }
    wait("all detached", || {
        f.served() == f.ended() && f.server.mapped_bytes() == 0
    });
    still_serves(&f);
}

/// Random messages of a valid shape, in any order: nothing may hang, leak or stop the server.
#[test]
fn random_handshakes() {
    let f = Fixture::new(offers(2, 2));
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move |n: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % n
    };
    let keys = [
        "ring-ref",
        "ring-ref0",
        "ring-ref1",
        "event-channel",
        "ring-page-order",
        "num-ring-pages",
        "multi-queue-num-queues",
        "queue-0/ring-ref",
        "queue-0/ring-ref0",
        "queue-0/ring-ref1",
        "queue-0/event-channel",
        "queue-1/ring-ref",
        "queue-1/event-channel",
        "protocol",
        "feature-persistent",
    ];
    for _ in 0..300 {
        let raw = Raw::new(&f);
        raw.hello();
        (8..12).for_each(|g| raw.grant(g, next(70) as u32, next(4) == 0));
        for _ in 0..next(20) {
            match next(8) {
                0 => raw.memory(),
                1 | 2 => raw.channel(next(4) as u32),
                3 => raw.write(&[("state", &next(10).to_string())]),
                _ => {
                    let mut all: Vec<_> = (0..next(6))
                        .map(|_| Change::set(keys[next(15) as usize], next(13)))
                        .collect();
                    if next(2) == 0 {
                        all.push(Change::set("state", 3 + next(2)));
                    }
                    raw.frame(&Frame::Write(all), &[]);
                }
            }
        }
    }
    still_serves(&f);
}
