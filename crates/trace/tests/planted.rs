//! Random traces with known delays: the analysis must find every delay, exactly and at the right hop, also through
//! files. `PVBLK_SEED=N` repeats a run.

use fastrand::Rng;
use pvblk_block::Op;
use pvblk_trace::blktrace::{Capture, Writer};
use pvblk_trace::latency::{Analyzer, Hop, Report, deviation};
use pvblk_trace::{Action, Device, Event, Extra, op_name};
use std::collections::BTreeMap;

/// Distance in sectors between a request and its sector before the remap.
const FAR: u64 = 1 << 40;

type Expected = BTreeMap<(Device, &'static str, Hop), Vec<u64>>;

/// Events, and the results that the analysis must find in them.
#[derive(Default)]
struct Plan {
    events: Vec<Event>,
    expected: Expected,
    /// Total time of each submitter that has one request at a time.
    elapsed: BTreeMap<(Device, u32), u64>,
    sectors: u64,
}

impl Plan {
    fn event(&mut self, ns: u64, action: Action, like: &Event) {
        let extra = match action {
            Action::Remap => Extra::Remap {
                // Sectors of the partition are further up, those of the device on it even more.
                from: Device::new(9, u32::from(like.sector < FAR)),
                sector: like.sector + FAR,
            },
            _ => Extra::None,
        };
        self.events.push(Event {
            time_ns: ns,
            action,
            extra,
            ..*like
        });
    }

    fn expect(&mut self, like: &Event, hop: Hop, ns: u64) {
        let key = (like.device, op_name(like.op), hop);
        self.expected.entry(key).or_default().push(ns);
    }

    /// Adds one request, or several that are merged, from `begin` on; returns the end.
    fn life(&mut self, rng: &mut Rng, begin: u64, like: &Event) -> u64 {
        let delay = |rng: &mut Rng| {
            let most = 1 << rng.u32(1..24);
            rng.u64(1..=most)
        };
        let (remap, get, insert) = (rng.bool(), rng.u8(..4) > 0, rng.u8(..4) > 0);
        let flush = like.op == Op::Flush;
        let mut first = *like;
        first.bytes = if flush { 0 } else { 512 * rng.u32(1..=64) };
        first.sector = if flush { 0 } else { self.sectors };
        let mut ns = begin;
        let remap = remap && !flush;
        if remap {
            if rng.bool() {
                // First to a partition, and from there to the traced disk.
                let mut partition = first;
                partition.sector += FAR;
                self.event(ns, Action::Remap, &partition);
                ns += delay(rng);
            }
            self.event(ns, Action::Remap, &first);
            ns += delay(rng);
        }
        let queued = ns;
        self.event(ns, Action::Queue, &first);
        if get {
            ns += delay(rng);
            self.event(ns, Action::Get, &first);
            self.expect(like, Hop::Q2G, ns - queued);
            self.expect(like, Hop::A2G, ns - if remap { begin } else { queued });
        }
        let got = ns;
        if insert {
            ns += delay(rng);
            self.event(ns, Action::Insert, &first);
            if get {
                self.expect(like, Hop::G2I, ns - got);
            }
        }
        let inserted = ns;
        // Other requests merge behind it, or in front.
        let mut whole = first;
        let mut merged = Vec::new();
        let joins = if like.op == Op::Read && like.submitter >= 100 {
            rng.u8(..4)
        } else {
            0
        };
        for _ in 0..joins {
            let mut other = first;
            other.bytes = 512 * rng.u32(1..=8);
            let front = rng.bool() && whole.sector > u64::from(other.bytes / 512);
            other.sector = if front {
                whole.sector - u64::from(other.bytes / 512)
            } else {
                whole.end()
            };
            ns += delay(rng);
            let queued = ns;
            self.event(ns, Action::Queue, &other);
            ns += delay(rng);
            let action = if front {
                Action::FrontMerge
            } else {
                Action::BackMerge
            };
            self.event(ns, action, &other);
            self.expect(like, Hop::Q2M, ns - queued);
            whole.sector = whole.sector.min(other.sector);
            whole.bytes += other.bytes;
            merged.push((queued, ns));
        }
        ns += delay(rng);
        self.event(ns, Action::Issue, &whole);
        let issued = ns;
        match (get, insert) {
            (_, true) => self.expect(like, Hop::I2D, ns - inserted),
            (true, false) => self.expect(like, Hop::G2D, ns - got),
            (false, false) => self.expect(like, Hop::Q2D, ns - queued),
        }
        ns += delay(rng);
        self.event(ns, Action::Complete, &whole);
        self.expect(like, Hop::D2C, ns - issued);
        self.expect(like, Hop::Q2C, ns - queued);
        for (queued, at) in merged {
            self.expect(like, Hop::M2D, issued - at);
            self.expect(like, Hop::D2C, ns - issued);
            self.expect(like, Hop::Q2C, ns - queued);
        }
        ns
    }

    fn submitter(&mut self, rng: &mut Rng, device: Device, submitter: u32) {
        let like = Event {
            time_ns: 0,
            action: Action::Queue,
            device,
            queue: submitter % 3,
            submitter,
            op: Op::Read,
            fua: false,
            sector: 0,
            bytes: 0,
            error: 0,
            extra: Extra::None,
        };
        let (mut ns, mut gap) = (rng.u64(1..1 << 20), None);
        let begin = ns;
        for _ in 0..rng.u32(1..60) {
            // Requests are far from each other, except those that are to be merged.
            self.sectors += 4096;
            let ops = [Op::Read, Op::Write, Op::Discard, Op::Flush];
            // Only submitters distinguish flushes, so submitters with a deep queue don't flush.
            let op = ops[rng.usize(..if submitter >= 100 { 3 } else { 4 })];
            let request = Event { op, ..like };
            if submitter >= 100 {
                // Any number in flight.
                let begin = begin + rng.u64(..1 << 26);
                self.life(rng, begin, &request);
                continue;
            }
            if let Some(gap) = gap {
                self.expect(&request, Hop::C2A, gap);
            }
            let end = self.life(rng, ns, &request);
            self.elapsed.insert((device, submitter), end - begin);
            gap = Some(rng.u64(1..1 << 22));
            ns = end + gap.unwrap_or(0);
        }
    }
}

fn plan(rng: &mut Rng) -> Plan {
    let mut plan = Plan::default();
    for device in 0..rng.u32(1..4) {
        for submitter in 0..rng.u32(1..4) {
            plan.submitter(rng, Device::new(Device::MAJOR, device), submitter);
        }
        if rng.bool() {
            plan.submitter(rng, Device::new(Device::MAJOR, device), 100);
        }
    }
    plan.events.sort_by_key(|e| e.time_ns);
    plan
}

fn check(plan: &Plan, report: &Report) {
    let mut found = Expected::new();
    for ((device, op), hops) in &report.hops {
        for hop in Hop::ALL {
            let mut values = hops.of(hop).values().to_vec();
            // Submitters with a deep queue also have gaps, which aren't planned.
            let planned = plan.expected.get(&(*device, *op, hop));
            let is_deep = report.submitters.contains_key(&(*device, 100));
            if values.is_empty() || hop == Hop::C2A && is_deep {
                continue;
            }
            values.sort_unstable();
            assert!(planned.is_some(), "{device} {op} {hop:?} isn't planned");
            found.insert((*device, *op, hop), values);
        }
    }
    for (key, expected) in &plan.expected {
        let is_deep = report.submitters.contains_key(&(key.0, 100));
        if key.2 == Hop::C2A && is_deep {
            continue;
        }
        let mut expected = expected.clone();
        expected.sort_unstable();
        assert_eq!(found.get(key), Some(&expected), "{key:?}");
    }
    for (key, elapsed) in &plan.elapsed {
        let of = &report.submitters[key];
        assert_eq!(of.elapsed_ns, *elapsed);
    }
    for of in report.submitters.values() {
        let explained = of.explained();
        assert!((explained - 1.0).abs() < 1e-6, "{explained} of {of:?}");
    }
    for device in report.devices.values() {
        assert_eq!((device.unfinished, device.unmatched), (0, 0));
    }
}

#[test]
fn planted_delays_are_found() {
    let mut rng = pvblk_testing::random();
    for _ in 0..200 {
        let plan = plan(&mut rng);
        let mut lives = 0;
        let report = Analyzer::run(&plan.events, |_| lives += 1);
        check(&plan, &report);
        let ends: usize = plan
            .expected
            .iter()
            .filter(|((_, _, hop), _)| *hop == Hop::Q2C)
            .map(|(_, values)| values.len())
            .sum();
        assert_eq!(lives, ends);
    }
}

#[test]
fn planted_delays_are_found_through_files() {
    let mut rng = pvblk_testing::random();
    let dir = tempfile::tempdir().unwrap();
    for n in 0..20 {
        let plan = plan(&mut rng);
        let prefix = dir.path().join(format!("t{n}"));
        let mut writer = Writer::create(&prefix).unwrap();
        for event in &plan.events {
            writer.event(event).unwrap();
        }
        let files = writer.finish().unwrap();
        assert!((1..=3).contains(&files));
        let capture = Capture::read(&[prefix]).unwrap();
        assert_eq!((capture.missing, capture.notes.len()), (0, 0));
        assert_eq!(capture.events.len(), plan.events.len());
        check(&plan, &Analyzer::run(&capture.events, |_| {}));
    }
}

/// Only the gap between requests grows.
#[test]
fn a_longer_gap_shows_only_in_c2a() {
    let run = |gap: u64| {
        let mut plan = Plan::default();
        let mut ns = 0;
        for n in 0..100u64 {
            let like = Event {
                time_ns: 0,
                action: Action::Queue,
                device: Device::new(8, 0),
                queue: 0,
                submitter: 1,
                op: Op::Read,
                fua: false,
                sector: n * 8,
                bytes: 4096,
                error: 0,
                extra: Extra::None,
            };
            for (action, after) in [
                (Action::Queue, gap),
                (Action::Get, 100),
                (Action::Insert, 200),
                (Action::Issue, 300),
                (Action::Complete, 100_000 + n),
            ] {
                ns += after;
                plan.event(ns, action, &like);
            }
        }
        Analyzer::run(&plan.events, |_| {})
    };
    let rows = deviation(&run(10_000), &run(22_869));
    assert_eq!(rows.len(), 1);
    for column in &rows[0].columns {
        let percent = column.percent.unwrap();
        let expected = match column.name.as_str() {
            "avg-C2A" | "avg-C2A-in-avg+-stddev" => 128.69,
            _ => 0.0,
        };
        assert!((percent - expected).abs() < 1e-6, "{column:?}");
    }
}
