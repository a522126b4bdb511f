//! Several requests at one sector at a time. All flushes are at sector 0 and have no length, so only their order and
//! their submitters distinguish them.

use pvblk_block::Op;
use pvblk_trace::blktrace::{Capture, Writer};
use pvblk_trace::latency::{Analyzer, Life, Report};
use pvblk_trace::{Action, Device, Event, Extra};

const UPPER: Device = Device(240 << 20);
const MEMBER: Device = Device(240 << 20 | 1);

/// A request on a member of an array, by `submitter`.
fn request(op: Op, submitter: u32) -> Event {
    Event {
        time_ns: 0,
        action: Action::Queue,
        device: MEMBER,
        queue: submitter,
        submitter,
        op,
        fua: false,
        sector: 0,
        bytes: if op == Op::Flush { 0 } else { 4096 },
        error: 0,
        extra: Extra::None,
    }
}

/// Adds the step `action` of each request of a batch at `time_ns`.
fn batch(events: &mut Vec<Event>, time_ns: u64, action: Action, requests: &[Event]) {
    let extra = match action {
        Action::Remap => Extra::Remap {
            from: UPPER,
            sector: 0,
        },
        _ => Extra::None,
    };
    events.extend(requests.iter().map(|r| Event {
        time_ns,
        action,
        extra,
        ..*r
    }));
}

fn analyze(events: &[Event]) -> (Report, Vec<Life>) {
    let mut lives = Vec::new();
    let report = Analyzer::run(events, |life| lives.push(life.clone()));
    (report, lives)
}

fn all_are_paired(report: &Report) {
    let of = &report.devices[&MEMBER];
    assert_eq!((of.unmatched, of.unfinished), (0, 0));
}

/// A batch is remapped as a whole before it is queued, because events of one moment are sorted by their steps.
#[test]
fn a_batch_with_flushes_is_remapped_and_then_queued() {
    let flush = request(Op::Flush, 0);
    let requests = [
        request(Op::Read, 0),
        flush,
        flush,
        request(Op::Read, 0),
        request(Op::Write, 0),
    ];
    let mut events = Vec::new();
    for begin in [1000, 2000] {
        batch(&mut events, begin, Action::Remap, &requests);
    }
    for begin in [1000, 2000] {
        batch(&mut events, 2000 + begin / 10, Action::Queue, &requests);
        batch(&mut events, 3000 + begin / 10, Action::Issue, &requests);
        batch(&mut events, 4000 + begin / 10, Action::Complete, &requests);
    }
    events.sort_by_key(|e| (e.time_ns, e.action));
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    let mut writer = Writer::create(&prefix).unwrap();
    events.iter().for_each(|e| writer.event(e).unwrap());
    writer.finish().unwrap();
    let stored = Capture::read(&[prefix]).unwrap().events;
    for events in [events, stored] {
        let (report, lives) = analyze(&events);
        all_are_paired(&report);
        assert_eq!(lives.len(), 2 * requests.len());
        for op in [Op::Read, Op::Write, Op::Flush] {
            let steps = |l: &Life| (l.remap_ns, l.queue_ns, l.issue_ns, l.complete_ns);
            let mut found: Vec<_> = lives.iter().filter(|l| l.op == op).map(steps).collect();
            found.sort_unstable();
            found.dedup();
            let first = (Some(1000), 2100, Some(3100), 4100);
            assert_eq!(found, [first, (Some(2000), 2200, Some(3200), 4200)]);
        }
    }
}

/// Any number of flushes of several submitters; those of one submitter end in the order in which they began.
#[test]
fn flushes_of_several_submitters_are_distinguished() {
    let mut rng = pvblk_testing::random();
    for _ in 0..100 {
        let (mut events, mut expected) = (Vec::new(), Vec::new());
        for submitter in 0..3 {
            let flush = [request(Op::Flush, submitter)];
            let mut last = [0; 4];
            for _ in 0..rng.u32(1..30) {
                let mut at = last[0];
                for (step, last) in last.iter_mut().enumerate() {
                    at = at.max(*last) + rng.u64(1..if step == 3 { 1000 } else { 100 });
                    *last = at;
                }
                let actions = [
                    Action::Remap,
                    Action::Queue,
                    Action::Issue,
                    Action::Complete,
                ];
                for (action, at) in actions.into_iter().zip(last) {
                    batch(&mut events, at, action, &flush);
                }
                expected.push((submitter, last));
            }
        }
        events.sort_by_key(|e| (e.time_ns, e.action));
        let (report, lives) = analyze(&events);
        all_are_paired(&report);
        let times = |l: &Life| Some([l.remap_ns?, l.queue_ns, l.issue_ns?, l.complete_ns]);
        let found = lives.iter().map(|l| (l.submitter, times(l).unwrap()));
        let mut found: Vec<_> = found.collect();
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected);
    }
}

/// In a kernel, the process that an interrupt hit reports the end of a flush, which may be another's.
#[test]
fn the_completing_process_need_not_be_the_submitter() {
    let (a, b) = ([request(Op::Flush, 0)], [request(Op::Flush, 1)]);
    let mut events = Vec::new();
    for (time_ns, action, who) in [
        (10, Action::Queue, &a),
        (20, Action::Queue, &b),
        (30, Action::Issue, &b),
        (40, Action::Complete, &a),
        (50, Action::Issue, &a),
        (60, Action::Complete, &b),
    ] {
        batch(&mut events, time_ns, action, who);
    }
    let (report, lives) = analyze(&events);
    all_are_paired(&report);
    let steps = |l: &Life| (l.submitter, l.queue_ns, l.issue_ns, l.complete_ns);
    let found: Vec<_> = lives.iter().map(steps).collect();
    assert_eq!(found, [(1, 20, Some(30), 40), (0, 10, Some(50), 60)]);
}
