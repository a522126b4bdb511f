//! Target `blktrace`: captures that anybody may have written. Whatever is read can be written again and is the same,
//! and requests are neither lost nor invented between the events and the report.

use arbitrary::{Result, Unstructured};
use pvblk_block::Op;
use pvblk_trace::blktrace::{Capture, MAGIC, RECORD_BYTES, Record, VERSION, record_of};
use pvblk_trace::latency::{Analyzer, Hop};
use pvblk_trace::{Action, Device, Event, Extra};
use zerocopy::IntoBytes;

pub fn blktrace(data: &[u8]) {
    // Once as a file, once with sound headers over any fields, once as choices of a busy device.
    file(data);
    file(&records(data));
    let _ = busy(&mut Unstructured::new(data));
}

fn file(bytes: &[u8]) {
    let mut capture = Capture::default();
    match capture.add("file", bytes) {
        Ok(()) => assert!(capture.notes.len() <= 1, "{:?}", capture.notes),
        Err(e) => {
            assert!(e.offset < bytes.len() as u64);
            assert_eq!(e.to_string().lines().count(), 1);
        }
    }
    // A record may have a gap before it.
    assert!(capture.events.len() <= 2 * (bytes.len() / RECORD_BYTES));
    for event in &capture.events {
        if let Extra::Gap { until_ns, .. } = event.extra {
            assert!(event.action == Action::Gap && until_ns >= event.time_ns);
            continue;
        }
        let (record, payload, len) = record_of(event);
        let again = record.event(&payload[..len]);
        assert_eq!(again.as_ref(), Ok(&Some(*event)));
        assert_eq!(record.swapped().swapped(), record);
    }
    capture.sort();
    analyze(&capture.events);
}

/// The same bytes with each magic, version and payload length made right.
fn records(data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for chunk in data.chunks_exact(RECORD_BYTES) {
        let Ok(bytes) = chunk.try_into() else { break };
        let mut fields: [u8; RECORD_BYTES] = bytes;
        fields[..4].copy_from_slice(&(MAGIC | VERSION).to_ne_bytes());
        let Some((mut record, _)) = Record::decode(&fields) else {
            break;
        };
        // Few categories and all codes, so that most records are of requests.
        record.action = (record.action & 0x00f7_0000) | ((record.action & 0xff) % 18);
        record.sector >>= 1;
        record.payload_bytes = match record.action & 0xff {
            15 => 16,
            10 | 11 | 13 => 8,
            _ => 0,
        };
        out.extend(record.as_bytes());
        out.extend(&chunk[..usize::from(record.payload_bytes)]);
    }
    out
}

/// Events of a few submitters on a few sectors of two devices.
fn busy(u: &mut Unstructured) -> Result<()> {
    const ACTIONS: [Action; 11] = [
        Action::Gap,
        Action::Queue,
        Action::Complete,
        Action::Issue,
        Action::Get,
        Action::Insert,
        Action::BackMerge,
        Action::FrontMerge,
        Action::Remap,
        Action::Split,
        Action::Requeue,
    ];
    let mut events = Vec::new();
    let mut time_ns = 0;
    let named = u.arbitrary::<bool>()?;
    while !u.is_empty() {
        time_ns += u64::from(u.arbitrary::<u8>()?);
        let action = *u.choose(&ACTIONS)?;
        let sector = u.int_in_range(0..=31u64)?;
        let sectors = u.int_in_range(0..=8u32)?;
        let extra = match action {
            Action::Split => Extra::Split(sector + u64::from(sectors / 2)),
            Action::Remap => Extra::Remap {
                from: Device(0),
                sector: 0,
            },
            Action::Gap => Extra::Gap {
                until_ns: time_ns + u64::from(u.arbitrary::<u8>()?),
                lost: 1,
            },
            Action::Requeue => Extra::None,
            _ if named => Extra::Request(u.int_in_range(0..=7)?),
            _ => Extra::None,
        };
        events.push(Event {
            time_ns,
            action,
            device: Device::new(Device::MAJOR, u.int_in_range(0..=1)?),
            queue: 0,
            submitter: u.int_in_range(0..=2)?,
            op: *u.choose(&[Op::Read, Op::Write, Op::Flush])?,
            fua: false,
            sector,
            bytes: sectors * 512,
            error: 0,
            extra,
        });
    }
    analyze(&events);
    Ok(())
}

fn analyze(events: &[Event]) {
    let mut lives = 0u64;
    let report = Analyzer::run(events, |life| {
        lives += 1;
        assert!(life.queue_ns <= life.complete_ns);
        assert!(life.remap_ns.is_none_or(|a| a <= life.queue_ns));
        let mut hops = life.hops();
        assert!(hops.all(|(hop, ns)| hop == Hop::A2G || ns <= life.total_ns()));
    });
    let queued = events.iter().filter(|e| e.action == Action::Queue).count() as u64;
    let of = report.devices.values();
    let begun = queued + of.clone().map(|d| d.splits).sum::<u64>();
    let unfinished: u64 = of.clone().map(|d| d.unfinished).sum();
    assert!(lives <= begun, "a request ended twice");
    let unknown: u64 = of.clone().map(|d| d.unknown).sum();
    assert!(lives + unfinished + unknown >= begun, "a request is lost");
    let gaps = events.iter().filter(|e| e.action == Action::Gap).count();
    let counted: u64 = of.map(|d| d.events).sum();
    assert_eq!(counted, (events.len() - gaps) as u64);
    let totals = report.hops.values().map(|h| h.of(Hop::Q2C).count() as u64);
    assert_eq!(totals.sum::<u64>(), lives);
    for submitter in report.submitters.values() {
        assert!(submitter.explained() <= 1.0 + 1e-6, "{submitter:?}");
    }
}

/// A few lives as a file: seeds for the fuzzer.
pub fn sample(devices: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for n in 0..8u32 {
        let steps = [
            Action::Remap,
            Action::Queue,
            Action::Get,
            Action::BackMerge,
            Action::Insert,
            Action::Split,
            Action::Issue,
            Action::Complete,
        ];
        for (at, action) in steps.into_iter().enumerate() {
            let (mut record, payload, len) = record_of(&Event {
                time_ns: u64::from(n) * 1000 + at as u64 * 10,
                action,
                device: Device::new(8, n % devices),
                queue: 0,
                submitter: n % 3,
                op: [Op::Read, Op::Write, Op::Discard, Op::Flush][n as usize % 4],
                fua: n == 5,
                sector: u64::from(n) * 8,
                bytes: 4096,
                error: 0,
                extra: Extra::Split(u64::from(n) * 8 + 4),
            });
            record.sequence = n * 8 + at as u32 + 1;
            bytes.extend(record.as_bytes());
            bytes.extend(&payload[..len]);
        }
    }
    bytes
}
