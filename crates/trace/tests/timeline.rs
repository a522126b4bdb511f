//! A timeline tells what the analysis tells: read from its file, the slices' sums are those of hops and paths.

mod wire;

use pvblk_block::Op;
use pvblk_trace::latency::{Analyzer, Hop, Paths};
use pvblk_trace::perfetto::Timeline;
use pvblk_trace::{Action, Device, Event, Extra, op_name};
use std::collections::{BTreeMap, HashMap, HashSet};
use wire::Message;

const FRONT: Device = Device(240 << 20);
const BACK: Device = Device(240 << 20 | 1);
const VOLUME: Device = Device(240 << 20 | 2);
const NAMES: [(Device, &str); 3] = [
    (FRONT, "vm1/front"),
    (BACK, "vm1/back"),
    (VOLUME, "vm1/mem:1G"),
];

/// Requests through three layers, of which many are in flight at a time; each has sectors of its own.
fn events(rng: &mut fastrand::Rng, count: u64) -> Vec<Event> {
    let mut events = Vec::new();
    for n in 0..count {
        let op = [Op::Read, Op::Write][rng.usize(0..2)];
        let queue = rng.u32(0..2);
        let mut now = 1_000_000 + rng.u64(0..count * 1000);
        let mut step = |device, action, extra| {
            events.push(Event {
                time_ns: now,
                action,
                device,
                queue: queue + 10 * device.minor(),
                submitter: 7,
                op,
                fua: false,
                sector: n * 8,
                bytes: 4096,
                error: 0,
                extra,
            });
            now += if rng.u8(..4) == 0 {
                0
            } else {
                rng.u64(1..20_000)
            };
        };
        let (above, below) = (Extra::Request(n), Extra::Request(1 << 32 | n));
        let remap = Extra::Remap {
            from: BACK,
            sector: n * 8,
        };
        for action in [Action::Queue, Action::Get, Action::Insert, Action::Issue] {
            step(FRONT, action, above);
        }
        step(BACK, Action::Queue, below);
        step(BACK, Action::Issue, below);
        step(VOLUME, Action::Remap, remap);
        step(VOLUME, Action::Queue, below);
        step(VOLUME, Action::Issue, below);
        step(VOLUME, Action::Complete, below);
        step(BACK, Action::Complete, below);
        step(FRONT, Action::Complete, above);
    }
    events.sort_by_key(|e| (e.time_ns, e.action));
    events
}

fn draw(events: &[Event]) -> (Vec<u8>, pvblk_trace::perfetto::Drawn) {
    let mut timeline = Timeline::new(Vec::new());
    for (device, name) in NAMES {
        timeline.name(device, name);
    }
    for event in events {
        timeline.event(event).unwrap();
    }
    timeline.finish().unwrap()
}

/// Figures of a file.
#[derive(Default)]
struct Read {
    /// Number and sum of slices, by track and name.
    slices: BTreeMap<(String, String), (u64, u64)>,
    /// Flows that begin or go on at a slice of this name.
    flows: HashMap<String, HashSet<u64>>,
    /// The last and the greatest value of each counter.
    counters: BTreeMap<String, (u64, u64)>,
    /// Number of lanes by name.
    lanes: BTreeMap<String, usize>,
    /// Sum of the notes called `lost`.
    lost: u64,
}

fn read(bytes: &[u8]) -> Read {
    let packets = Message::read(bytes).messages(1);
    let (mut tracks, mut names, mut notes) = (HashMap::new(), HashMap::new(), HashMap::new());
    let mut read = Read::default();
    let mut steps = Vec::new();
    for (at, packet) in packets.iter().enumerate() {
        assert_eq!(packet.number(10), Some(1), "one sequence");
        assert_eq!(packet.number(13), Some(if at == 0 { 1 } else { 2 }));
        if let Some(track) = packet.message(60) {
            let name = track.text(2).unwrap().to_owned();
            let parent = track.number(5);
            assert!(parent.is_none_or(|p| tracks.contains_key(&p)));
            *read.lanes.entry(name.clone()).or_default() += 1;
            tracks.insert(track.number(1).unwrap(), name);
        }
        if let Some(told) = packet.message(12) {
            for (field, known) in [(2, &mut names), (3, &mut notes)] {
                for name in told.messages(field) {
                    let old = known.insert(name.number(1).unwrap(), name.text(2).unwrap());
                    assert_eq!(old, None);
                }
            }
        }
        if let Some(event) = packet.message(11) {
            let track = event.number(11).unwrap();
            assert!(tracks.contains_key(&track));
            let name = event.number(10).map(|iid| names[&iid]);
            for note in event.messages(4) {
                if notes[&note.number(1).unwrap()] == "lost" {
                    read.lost += note.number(3).unwrap();
                }
            }
            for flow in event.numbers(47) {
                let name = name.unwrap().to_owned();
                read.flows.entry(name).or_default().insert(flow);
            }
            steps.push((packet.number(8).unwrap(), event, track, name));
        }
    }
    // Readers sort by time and keep the file's order at one moment.
    steps.sort_by_key(|s| s.0);
    let mut open: HashMap<u64, Vec<(&str, u64)>> = HashMap::new();
    for (time, event, track, name) in steps {
        let open = open.entry(track).or_default();
        let track = tracks[&track].clone();
        match event.number(9) {
            Some(1) => open.push((name.unwrap(), time)),
            Some(2) => {
                let (name, begin) = open.pop().expect("an end without a begin");
                let sum = read.slices.entry((track, name.to_owned())).or_default();
                *sum = (sum.0 + 1, sum.1 + time - begin);
            }
            Some(4) => {
                let value = event.number(30).unwrap();
                let counter = read.counters.entry(track).or_default();
                *counter = (value, counter.1.max(value));
            }
            other => panic!("type {other:?}"),
        }
    }
    assert!(open.values().all(Vec::is_empty), "a begin without an end");
    read
}

impl Read {
    /// Number and sum of the slices called `name` on tracks that begin with `track`.
    fn sum(&self, track: &str, name: &str) -> (u64, u64) {
        let of = self.slices.iter();
        let of = of.filter(|((t, n), _)| t.starts_with(track) && n == name);
        of.fold((0, 0), |sum, (_, s)| (sum.0 + s.0, sum.1 + s.1))
    }
}

#[test]
fn sums_are_those_of_hops_and_paths() {
    let mut rng = pvblk_testing::random();
    let events = events(&mut rng, 3000);
    let (bytes, drawn) = draw(&events);
    assert_eq!((drawn.requests, drawn.lost), (9000, 0));
    let read = read(&bytes);
    let mut paths = Paths::default();
    for (device, name) in NAMES {
        paths.name(device, name);
    }
    let mut analyzer = Analyzer::new();
    for event in &events {
        paths.event(event);
        analyzer.event(event, &mut |life| paths.life(life));
    }
    let report = analyzer.finish();
    let figures = |s: &pvblk_trace::latency::Samples| (s.count() as u64, s.sum_ns() as u64);
    for (device, name) in NAMES {
        let track = format!("{name} queue");
        let all = report.all_of(device);
        for hop in [Hop::Q2G, Hop::G2I, Hop::I2D, Hop::Q2D, Hop::D2C] {
            let sum = read.sum(&track, hop.name());
            assert_eq!(sum, figures(all.of(hop)), "{name} {}", hop.name());
        }
        let requests = [Op::Read, Op::Write].map(|op| read.sum(&track, op_name(op)));
        let whole = requests[0].1 + requests[1].1 - read.sum(&track, "A2Q").1;
        assert_eq!(whole, figures(all.of(Hop::Q2C)).1);
    }
    let path = &paths.take()[&FRONT];
    assert_eq!(path.total.count(), 3000);
    for hop in &path.hops {
        let name = paths.hop_name(hop.device, hop.part);
        assert_eq!(
            read.sum("vm1/front way", &name),
            figures(&hop.times),
            "{name}"
        );
    }
    assert!(read.sum("vm1/front way", "vm1/front: down to ring").1 > 0);
    // Each request of the two lower layers is the end of a flow that begins at a D2C.
    let begun = &read.flows["D2C"];
    assert_eq!(begun.len(), 6000);
    let ends = read.flows["read"].union(&read.flows["write"]).count();
    assert_eq!(ends, 9000);
    assert!(
        begun
            .iter()
            .all(|f| read.flows["read"].contains(f) || read.flows["write"].contains(f))
    );
    for (device, name) in NAMES {
        let (last, most) = read.counters[&format!("{name} in flight")];
        assert!(last == 0 && most > 1, "{device}: {last}, {most}");
        let lanes: usize = [0, 1]
            .map(|q| read.lanes[&format!("{name} queue {}", q + 10 * device.minor())])
            .iter()
            .sum();
        // A request with A begins before it is counted, and one that ends as others begin leaves its lane to none of them.
        assert!(
            lanes as u64 <= 3 * most,
            "{lanes} lanes for {most} requests"
        );
    }
}

/// Requests across a gap are no slices; the gap is one.
#[test]
fn gaps_are_marked() {
    let mut rng = pvblk_testing::random();
    let mut events = events(&mut rng, 500);
    let middle = events.len() / 2;
    let from_ns = events[middle].time_ns;
    // As one from a capture, of one device, and then one of all that overlaps with it.
    for (device, from_ns, lost) in [
        (BACK, from_ns, 3),
        (Device::ALL, from_ns + 1, 5),
        (Device::ALL, from_ns + 100, 7),
    ] {
        let mut gap = events[0];
        (gap.time_ns, gap.device, gap.action) = (from_ns, device, Action::Gap);
        gap.extra = Extra::Gap {
            until_ns: from_ns + 10_000,
            lost,
        };
        events.push(gap);
    }
    events.sort_by_key(|e| (e.time_ns, e.action));
    let (bytes, drawn) = draw(&events);
    let read = read(&bytes);
    assert_eq!((drawn.lost, read.lost), (15, 15));
    assert_eq!(read.sum("events lost", "events lost"), (3, 10_000 + 10_099));
    assert!(
        drawn.requests < 1500 && drawn.requests > 500,
        "{}",
        drawn.requests
    );
    let (last, _) = read.counters["vm1/front in flight"];
    assert_eq!(last, 0);
}

/// Names are data: any text, and a device that has none.
#[test]
fn names_are_any_text() {
    let mut rng = pvblk_testing::random();
    let events = events(&mut rng, 10);
    let mut timeline = Timeline::new(Vec::new());
    timeline.name(FRONT, "<b>/\u{1f4be}\n/front");
    for event in &events {
        timeline.event(event).unwrap();
    }
    let (bytes, _) = timeline.finish().unwrap();
    let read = read(&bytes);
    assert!(read.lanes.contains_key("<b>/\u{1f4be}\n/front in flight"));
    assert!(read.lanes.contains_key("240,1 in flight"));
}
