//! A guest's capture beside the server's: its requests appear above ours, on one clock.

use pvblk_block::Op;
use pvblk_trace::blktrace::Capture;
use pvblk_trace::latency::{Analyzer, Part, Paths};
use pvblk_trace::{Action, Device, Event, Extra};

const GUEST: Device = Device(202 << 20);
const PARTITION: Device = Device(202 << 20 | 1);
const OTHER: Device = Device(202 << 20 | 16);
const BACK: Device = Device(240 << 20);
const VOLUME: Device = Device(240 << 20 | 1);
/// The guest was started this long after the host.
const BEHIND_NS: u64 = 77_000_000_000;

fn event(device: Device, action: Action, time_ns: u64, sector: u64) -> Event {
    Event {
        time_ns,
        action,
        device,
        queue: 0,
        submitter: 0,
        op: Op::Read,
        fua: false,
        sector,
        bytes: 4096,
        error: 0,
        extra: Extra::None,
    }
}

/// Events of 200 reads through a partition, at the server and in the guest.
fn captures() -> (Capture, Capture) {
    let (mut server, mut guest) = (Capture::default(), Capture::default());
    server.devices.insert(BACK, "a/back".into());
    server.devices.insert(VOLUME, "a/file".into());
    for n in 0..200u64 {
        let (begin, sector) = (BEHIND_NS + n * 100_000, n * 8);
        for (action, after_ns) in [
            (Action::Remap, 0),
            (Action::Queue, 1_000),
            (Action::Get, 2_000),
            (Action::Insert, 3_000),
            (Action::Issue, 10_000),
            (Action::Complete, 80_000),
        ] {
            let mut seen = event(GUEST, action, begin - BEHIND_NS + after_ns, sector);
            if action == Action::Remap {
                seen.extra = Extra::Remap {
                    from: PARTITION,
                    sector: 0,
                };
            }
            guest.events.push(seen);
            // A disk of another guest.
            seen.device = OTHER;
            seen.sector += 1 << 30;
            guest.events.push(seen);
        }
        for (device, action, after_ns) in [
            (BACK, Action::Queue, 20_000),
            (BACK, Action::Issue, 25_000),
            (VOLUME, Action::Remap, 25_500),
            (VOLUME, Action::Queue, 26_000),
            (VOLUME, Action::Issue, 30_000),
            (VOLUME, Action::Complete, 50_000),
            (BACK, Action::Complete, 70_000),
        ] {
            let mut seen = event(device, action, begin + after_ns, sector);
            if action == Action::Remap {
                seen.extra = Extra::Remap { from: BACK, sector };
            }
            server.events.push(seen);
        }
    }
    guest.sort();
    server.sort();
    (server, guest)
}

#[test]
fn guest_ring_back_end_and_volume_stand_apart() {
    let (mut capture, guest) = captures();
    let clock = capture.add_guest(&guest, "a").unwrap();
    capture.sort();
    // Down and up took 10 us each: the split is exact.
    assert_eq!((clock.requests, clock.within_ns), (200, 10_000));
    assert_eq!(clock.server_ns(0), BEHIND_NS);
    assert_eq!(capture.device_name(GUEST), "a/guest");
    assert!(capture.events.iter().all(|e| e.device != OTHER));

    let mut paths = Paths::default();
    for (device, name) in &capture.devices {
        paths.name(*device, name);
    }
    Analyzer::run(&capture.events, |life| paths.life(life));
    let found = paths.take();
    let path = &found[&GUEST];
    assert_eq!((path.total.count(), path.alone), (200, 0));
    let hops: Vec<_> = path
        .hops
        .iter()
        .map(|h| (h.device, h.part, h.times.values()[0]))
        .collect();
    let expected = [
        (GUEST, Part::Wait, 9_000),
        (GUEST, Part::Down(BACK), 10_000),
        (BACK, Part::Wait, 5_000),
        (BACK, Part::Down(VOLUME), 1_000),
        (VOLUME, Part::Wait, 4_000),
        (VOLUME, Part::Work, 20_000),
        (BACK, Part::Up(VOLUME), 20_000),
        (GUEST, Part::Up(BACK), 10_000),
    ];
    assert_eq!(hops, expected);
}

#[test]
fn two_guests_whose_disks_have_one_number_keep_apart() {
    let (mut capture, guest) = captures();
    let again: Vec<Event> = capture
        .events
        .iter()
        .map(|e| Event {
            device: Device(e.device.0 + 2),
            ..*e
        })
        .collect();
    capture.events.extend(again);
    capture.devices.insert(Device(BACK.0 + 2), "b/back".into());
    capture.sort();
    capture.add_guest(&guest, "a").unwrap();
    capture.add_guest(&guest, "b").unwrap();
    assert_eq!(capture.device_name(GUEST), "a/guest");
    assert_eq!(capture.device_name(Device(GUEST.0 + 1)), "b/guest");
}

#[test]
fn captures_of_other_disks_are_an_error_and_add_nothing() {
    let (mut capture, guest) = captures();
    let before = capture.events.clone();
    let why = capture.add_guest(&guest, "vm7").unwrap_err();
    assert_eq!(why, "no disk vm7 was traced; there are: a");
    let why = Capture::default().add_guest(&guest, "a").unwrap_err();
    assert!(why.contains("no back end"), "{why}");
    let mut others = guest;
    others.events.retain(|e| e.device == OTHER);
    let why = capture.add_guest(&others, "a").unwrap_err();
    assert!(why.starts_with("0 of its requests"), "{why}");
    assert_eq!(capture.events, before);
}
