//! blktrace files: written records can be read, and invalid ones are refused.

use pvblk_block::Op;
use pvblk_trace::blktrace::{Capture, RECORD_BYTES, Reader, Record, Step, Writer, record_of};
use pvblk_trace::{Action, Device, Event, Extra};
use zerocopy::IntoBytes;

fn event() -> Event {
    Event {
        time_ns: 1_234_567_890_123,
        action: Action::Queue,
        device: Device::new(240, 3),
        queue: 0,
        submitter: 42,
        op: Op::Write,
        fua: true,
        sector: 0x1_2345_6789,
        bytes: 8192,
        error: 0,
        extra: Extra::None,
    }
}

/// Events of every kind.
fn events() -> Vec<Event> {
    let remap = Extra::Remap {
        from: Device::new(9, 1),
        sector: 77,
    };
    let mut all: Vec<Event> = [
        (Action::Remap, remap),
        (Action::Queue, Extra::None),
        (Action::Split, Extra::Split(0x1_2345_6790)),
        (Action::Sleep, Extra::None),
        (Action::Get, Extra::None),
        (Action::BackMerge, Extra::None),
        (Action::FrontMerge, Extra::None),
        (Action::Plug, Extra::None),
        (Action::Insert, Extra::None),
        (Action::Unplug, Extra::Waiting(5)),
        (Action::Requeue, Extra::None),
        (Action::Issue, Extra::None),
        (Action::Complete, Extra::None),
    ]
    .map(|(action, extra)| Event {
        action,
        extra,
        ..event()
    })
    .into();
    for op in [Op::Read, Op::Discard] {
        all.push(Event { op, ..event() });
    }
    all.push(Event {
        op: Op::Flush,
        sector: 0,
        bytes: 0,
        ..event()
    });
    all.push(Event {
        action: Action::Complete,
        error: 28,
        ..event()
    });
    all
}

fn bytes_of(event: &Event, swapped: bool) -> Vec<u8> {
    let (record, payload, len) = record_of(event);
    let record = if swapped { record.swapped() } else { record };
    [record.as_bytes(), &payload[..len]].concat()
}

#[test]
fn every_kind_survives_its_bytes_in_both_byte_orders() {
    for swapped in [false, true] {
        let bytes: Vec<u8> = events().iter().flat_map(|e| bytes_of(e, swapped)).collect();
        let mut capture = Capture::default();
        capture.add("file", &bytes[..]).unwrap();
        assert_eq!(capture.events, events());
    }
}

/// The layout, byte by byte, as in docs/decisions/0008-trace.md.
#[test]
fn a_record_in_bytes() {
    let remap = Event {
        action: Action::Remap,
        op: Op::Read,
        fua: false,
        extra: Extra::Remap {
            from: Device::new(9, 0),
            sector: 1024,
        },
        queue: 2,
        ..event()
    };
    let (record, payload, len) = record_of(&remap);
    let mut expected = Vec::new();
    expected.extend(0x6561_7407u32.to_ne_bytes());
    expected.extend(0u32.to_ne_bytes());
    expected.extend(1_234_567_890_123u64.to_ne_bytes());
    expected.extend(0x1_2345_6789u64.to_ne_bytes());
    expected.extend(8192u32.to_ne_bytes());
    expected.extend((15u32 | (0x10 | 1) << 16).to_ne_bytes());
    expected.extend(42u32.to_ne_bytes());
    expected.extend((240u32 << 20 | 3).to_ne_bytes());
    expected.extend(2u32.to_ne_bytes());
    expected.extend(0u16.to_ne_bytes());
    expected.extend(16u16.to_ne_bytes());
    assert_eq!(record.as_bytes(), expected);
    let mut expected = Vec::new();
    expected.extend((9u32 << 20).to_be_bytes());
    expected.extend((240u32 << 20 | 3).to_be_bytes());
    expected.extend(1024u64.to_be_bytes());
    assert_eq!(payload[..len], expected);
}

#[test]
fn names_messages_and_losses_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    // Left by an earlier capture; must not appear in the new one.
    for n in 0..4 {
        std::fs::write(dir.path().join(format!("t.blktrace.{n}")), "old").unwrap();
    }
    let mut writer = Writer::create(&prefix).unwrap();
    let device = Device::new(240, 3);
    writer.device(5, device, "disk a").unwrap();
    writer.process(5, 42, "somebody with a long name").unwrap();
    writer.event(&event()).unwrap();
    writer
        .event(&Event {
            queue: 2,
            ..event()
        })
        .unwrap();
    writer.message(6, device, &"ä".repeat(100)).unwrap();
    let gap = Extra::Gap {
        until_ns: 99,
        lost: 12,
    };
    let gap = Event {
        time_ns: 7,
        action: Action::Gap,
        extra: gap,
        device,
        ..event()
    };
    writer.event(&gap).unwrap();
    assert_eq!(writer.finish().unwrap(), 3, "the hole is filled");
    let capture = Capture::read(&[prefix]).unwrap();
    assert_eq!(capture.events.len(), 3);
    let told = capture.events.iter().find(|e| e.action == Action::Gap);
    assert_eq!(
        told.map(|e| (e.time_ns, e.device, e.extra)),
        Some((7, device, gap.extra))
    );
    assert_eq!(capture.device_name(device), "disk a");
    assert_eq!(capture.processes[&42], "somebody with a");
    assert_eq!((capture.dropped, capture.missing), (12, 0));
    assert_eq!(capture.messages, [(6, device, "ä".repeat(63))]);
}

#[test]
fn a_hole_in_the_numbers_is_a_loss() {
    let mut bytes = Vec::new();
    for sequence in [1u32, 2, 5, 6] {
        let (mut record, ..) = record_of(&event());
        record.sequence = sequence;
        bytes.extend(record.as_bytes());
    }
    let mut capture = Capture::default();
    capture.add("file", &bytes[..]).unwrap();
    assert_eq!((capture.events.len(), capture.missing), (5, 2));
    let gaps: Vec<u64> = capture.events.iter().map(Event::lost).collect();
    assert_eq!(gaps, [0, 0, 2, 0, 0]);
}

#[test]
fn a_cut_off_end_is_noted() {
    let mut bytes = bytes_of(&event(), false);
    bytes.extend(bytes_of(&events()[0], false));
    for end in RECORD_BYTES + 1..bytes.len() {
        let mut capture = Capture::default();
        capture.add("file", &bytes[..end]).unwrap();
        assert_eq!((capture.events.len(), capture.notes.len()), (1, 1), "{end}");
        assert!(capture.notes[0].contains("cut off"));
    }
}

#[test]
fn wrong_bytes_give_one_line_with_the_place() {
    let good = bytes_of(&event(), false);
    let with = |change: &dyn Fn(&mut Record)| {
        let (mut record, ..) = record_of(&events()[0]);
        change(&mut record);
        let mut bytes = record.as_bytes().to_vec();
        bytes.resize(RECORD_BYTES + usize::from(record.payload_bytes), 0);
        [good.clone(), bytes].concat()
    };
    for (bytes, why) in [
        (
            [good.clone(), vec![7; RECORD_BYTES]].concat(),
            "no blktrace record",
        ),
        (with(&|r| r.magic += 1), "version 8"),
        (with(&|r| r.payload_bytes = 15), "15 bytes, not 16"),
        (with(&|r| r.payload_bytes = 0), "0 bytes, not 16"),
        (with(&|r| r.sector = u64::MAX), "beyond all devices"),
        (
            with(&|r| (r.action, r.payload_bytes) = (0x0400_0001, 4)),
            "4 bytes, not 8",
        ),
        (
            with(&|r| (r.action, r.payload_bytes) = (0x0010_0101, 7)),
            "no cgroup",
        ),
        (
            [good.clone(), bytes_of(&event(), true)].concat(),
            "byte order",
        ),
    ] {
        let mut reader = Reader::new("some file", &bytes[..]);
        assert!(matches!(reader.next_step(), Ok(Some(Step::Event(..)))));
        let text = reader.next_step().unwrap_err().to_string();
        assert!(text.contains(why), "{text}");
        assert!(
            text.starts_with("some file, byte 48: ") && !text.contains('\n'),
            "{text}"
        );
    }
}

#[test]
fn unsupported_records_are_skipped() {
    let mut bytes = Vec::new();
    // An abort, a driver's data, one of a later kernel, a command, an unknown notification; one within a cgroup.
    for action in [
        0x10_0010u32,
        0x4000_0011,
        0x10_0030,
        0x210_0001,
        0x400_0009,
        0x11_0101,
    ] {
        let (mut record, ..) = record_of(&event());
        (record.action, record.payload_bytes) = (action, 8);
        bytes.extend(record.as_bytes());
        bytes.extend([0; 8]);
    }
    let mut capture = Capture::default();
    capture.add("file", &bytes[..]).unwrap();
    assert_eq!(capture.events.len(), 1, "the one within a cgroup");
    assert_eq!(capture.notes.len(), 0);
}
