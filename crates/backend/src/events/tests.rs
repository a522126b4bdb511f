use super::flood::{BURST, MOST, PACE};
use super::health::QUIET;
use super::log::KEPT;
use super::*;
use crate::stall::Stall;
use pvblk_block::{
    Clock, Completion, Condition, DeviceEvent, ManualClock, MemberChange, Op, Request, Status,
};
use std::sync::Arc;
use std::time::Duration;

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(60);

fn log() -> (Arc<EventLog>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    let events = EventLog::with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
    (Arc::new(events), clock)
}

fn broken(disk: &str, n: u64) -> Event {
    Event::new(Kind::PeerBroken, format!("client {n}")).of(disk)
}

/// The events that a reader gets now, as `kind disk left_out`.
fn read(follower: &mut Follower) -> Vec<String> {
    std::iter::from_fn(|| follower.next(Duration::ZERO))
        .map(|e| {
            let disk = e.disk.as_deref().unwrap_or("-");
            format!("{} {disk} {}", e.kind, e.left_out)
        })
        .collect()
}

#[test]
fn a_flood_of_one_disk_and_kind_is_cut_and_its_last_event_told() {
    let (events, clock) = log();
    let mut reader = events.follow(Start::Oldest);
    for n in 0..1000 {
        events.put(broken("a", n));
    }
    assert_eq!(read(&mut reader), vec!["peer-broken a 0"; BURST as usize]);
    // Another disk and another kind have limits of their own.
    events.put(broken("b", 0));
    events.put(Event::new(Kind::PeerAttached, "x").of("a"));
    assert_eq!(read(&mut reader), ["peer-broken b 0", "peer-attached a 0"]);
    events.tick();
    assert!(read(&mut reader).is_empty());
    clock.advance(PACE);
    events.tick();
    let last = reader.next(Duration::ZERO).unwrap();
    assert_eq!(last.text, "client 999");
    assert_eq!(last.left_out, 1000 - u64::from(BURST) - 1);
    let counts = events.counts().into_iter();
    let counts: Vec<_> = counts.filter(|(_, count)| *count > 0).collect();
    assert_eq!(counts, [(Kind::PeerAttached, 1), (Kind::PeerBroken, 1001)]);
    events.tick();
    assert!(read(&mut reader).is_empty());
    // After a quiet time a burst fits again.
    clock.advance(PACE * (BURST + 1));
    events.tick();
    for n in 0..20 {
        events.put(broken("a", n));
    }
    assert_eq!(read(&mut reader).len(), BURST as usize);
}

#[test]
fn limits_take_bounded_memory_and_disks_of_the_user_have_none() {
    let (events, clock) = log();
    let mut reader = events.follow(Start::Oldest);
    for n in 0..2 * MOST {
        events.put(broken(&format!("d{n}"), 0));
        if n % 500 == 0 {
            read(&mut reader);
        }
    }
    assert_eq!(events.buckets(), MOST);
    clock.advance(PACE * BURST);
    events.tick();
    clock.advance(PACE * BURST);
    events.tick();
    assert_eq!(events.buckets(), 0);
    read(&mut reader);
    for _ in 0..100 {
        events.put(Event::new(Kind::DiskAdded, "served").of("a"));
    }
    assert_eq!(read(&mut reader).len(), 100);
}

#[test]
fn a_reader_that_is_overtaken_is_told_how_many_it_missed() {
    let (events, _) = log();
    let mut slow = events.follow(Start::Next);
    let more = 10;
    for n in 0..KEPT + more {
        events.put(Event::new(Kind::DiskAdded, n.to_string()).of("a"));
    }
    let lost = slow.next(Duration::ZERO).unwrap();
    assert_eq!(lost.kind, Kind::EventsLost);
    assert_eq!(lost.field("events"), Some(&Value::Number(more as u64)));
    assert_eq!(lost.number, more as u64);
    let next = slow.next(Duration::ZERO).unwrap();
    assert_eq!((next.number, next.text.as_str()), (more as u64 + 1, "10"));
    assert_eq!(read(&mut slow).len(), KEPT - 1);
    assert_eq!(events.kept(Some("a")).len(), KEPT);
    assert!(events.kept(Some("b")).is_empty());
    // Numbers of an earlier process are beyond the end.
    let mut late = events.follow(Start::After(1 << 40));
    assert!(late.next(Duration::ZERO).is_none());
    let mut from = events.follow(Start::After(events.last() - 1));
    assert_eq!(read(&mut from).len(), 1);
}

#[test]
fn a_reader_waits_for_the_next_event_and_for_the_end() {
    let (events, _) = log();
    let mut reader = events.follow(Start::Next);
    let thread = std::thread::spawn(move || {
        let first = reader.next(HANG).map(|e| e.text.clone());
        (first, reader.next(HANG), reader.is_over())
    });
    events.put(Event::new(Kind::DiskAdded, "one").of("a"));
    events.close();
    let (first, second, over) = thread.join().unwrap();
    assert_eq!(first.as_deref(), Some("one"));
    assert!(second.is_none() && over);
}

#[test]
fn names_of_peers_are_one_short_line() {
    let name = format!("a\n\u{7}{}", "ä".repeat(1000));
    let event = Event::new(Kind::PeerAttached, &name).with("name", name.as_str());
    assert!(event.text.starts_with("a  ä") && event.text.len() <= LONGEST_TEXT);
    match event.field("name") {
        Some(Value::Text(text)) => assert!(text.len() <= LONGEST_FIELD && text.ends_with('ä')),
        other => panic!("{other:?}"),
    }
}

struct OneDisk {
    health: Health,
    stall: Arc<Stall>,
    events: Arc<EventLog>,
    clock: Arc<ManualClock>,
    reader: Follower,
}

fn one_disk(condition: Condition) -> OneDisk {
    let (events, clock) = log();
    let stall = Arc::default();
    let health = Health::new("a", condition, &stall, Arc::clone(&clock) as Arc<dyn Clock>);
    let reader = events.follow(Start::Oldest);
    health.link(&events);
    OneDisk {
        health,
        stall,
        events,
        clock,
        reader,
    }
}

impl OneDisk {
    fn ended(&self, op: Op, status: Status) {
        let request = Request::new(op, 0, 8, 0);
        self.health.ended(&[Completion { request, status }]);
    }

    fn kinds(&mut self) -> Vec<Kind> {
        std::iter::from_fn(|| self.reader.next(Duration::ZERO))
            .map(|e| e.kind)
            .collect()
    }
}

#[test]
fn a_full_backing_is_told_once_and_is_back_when_writes_fit_again() {
    let mut disk = one_disk(Condition::Whole);
    assert_eq!(disk.health.state(), HealthState::Healthy);
    assert!(!disk.health.is_in_trouble());
    for _ in 0..100 {
        disk.ended(Op::Write, Status::NoSpace);
    }
    assert_eq!(disk.kinds(), [Kind::BackingFull]);
    assert_eq!(disk.health.state(), HealthState::Degraded);
    assert_eq!(disk.health.reasons(), [Kind::BackingFull]);
    assert!(disk.health.is_in_trouble());
    // Some writes fit, and reads say nothing about room.
    disk.ended(Op::Write, Status::Ok);
    disk.clock.advance(QUIET);
    disk.ended(Op::Read, Status::Ok);
    assert!(disk.kinds().is_empty());
    disk.ended(Op::Write, Status::Ok);
    assert_eq!(disk.kinds(), [Kind::BackingBack]);
    assert_eq!(disk.health.state(), HealthState::Healthy);
    assert!(!disk.health.is_in_trouble());
    // Mistakes of the peer aren't the backing's.
    for status in [Status::Invalid, Status::ReadOnly, Status::Unsupported] {
        disk.ended(Op::Write, status);
    }
    assert!(disk.kinds().is_empty());
}

#[test]
fn errors_and_hanging_requests_have_a_beginning_and_an_end() {
    let mut disk = one_disk(Condition::Whole);
    disk.ended(Op::Read, Status::IoError);
    assert_eq!(disk.kinds(), [Kind::BackingFailing]);
    let limit = Duration::from_secs(30);
    disk.health.oldest(Some(limit / 2), limit);
    assert_eq!(disk.health.state(), HealthState::Degraded);
    disk.health.oldest(Some(limit), limit);
    disk.health.oldest(Some(limit * 2), limit);
    assert_eq!(disk.kinds(), [Kind::BackingHanging]);
    assert_eq!(disk.health.state(), HealthState::Stalled);
    disk.health.oldest(None, limit);
    disk.clock.advance(QUIET);
    disk.ended(Op::Read, Status::Ok);
    assert_eq!(disk.kinds(), [Kind::BackingBack, Kind::BackingBack]);
    // A call of a lane that is blocked counts, too.
    let blocked = disk.stall.begin("lane", std::time::Instant::now());
    assert_eq!(disk.health.state(), HealthState::Stalled);
    disk.health.oldest(None, Duration::ZERO);
    assert_eq!(disk.kinds(), [Kind::BackingHanging]);
    blocked.end(std::time::Instant::now());
    disk.health.oldest(None, Duration::ZERO);
    assert_eq!(disk.kinds(), [Kind::BackingBack]);
    disk.health.device(DeviceEvent::Gone);
    disk.health.device(DeviceEvent::Gone);
    disk.ended(Op::Read, Status::IoError);
    assert_eq!(disk.kinds(), [Kind::DiskGone]);
    assert_eq!(disk.health.state(), HealthState::Failed);
    assert_eq!(disk.events.last(), 7);
    // A lock that is lost explains the errors that follow, too.
    let mut disk = one_disk(Condition::Whole);
    let why = "its lock was taken away by x";
    for _ in 0..2 {
        disk.health
            .device(DeviceEvent::LockLost { why: why.into() });
    }
    disk.ended(Op::Write, Status::IoError);
    assert_eq!(disk.kinds(), [Kind::LockLost]);
    assert_eq!(disk.health.state(), HealthState::Failed);
    assert_eq!(disk.health.reasons(), [Kind::LockLost]);
    // A disk that is taken away isn't in trouble.
    let mut disk = one_disk(Condition::Whole);
    disk.health.retire();
    disk.health.device(DeviceEvent::Gone);
    disk.ended(Op::Read, Status::IoError);
    disk.health.oldest(Some(limit), limit);
    assert!(disk.kinds().is_empty());
    assert_eq!(disk.health.state(), HealthState::Healthy);
}

#[test]
fn an_array_tells_its_life_and_one_that_begins_degraded_says_so() {
    let mut disk = one_disk(Condition::Degraded { place: 2 });
    assert_eq!(disk.kinds(), [Kind::MemberMissing, Kind::ArrayDegraded]);
    assert_eq!(disk.health.state(), HealthState::Degraded);
    let member = |change| DeviceEvent::Member {
        place: 2,
        name: Arc::from("file:c.img"),
        change,
    };
    let condition = DeviceEvent::Condition;
    disk.health.device(member(MemberChange::RebuildStarted));
    disk.health.device(member(MemberChange::RebuildFinished));
    disk.health.device(condition(Condition::Whole));
    assert_eq!(disk.health.state(), HealthState::Healthy);
    disk.health.device(member(MemberChange::Failed));
    disk.health
        .device(condition(Condition::Degraded { place: 2 }));
    disk.health.device(member(MemberChange::RebuildStopped));
    disk.health.device(condition(Condition::Failed));
    assert_eq!(disk.health.state(), HealthState::Failed);
    assert_eq!(
        disk.kinds(),
        [
            Kind::RebuildStarted,
            Kind::RebuildFinished,
            Kind::ArrayWhole,
            Kind::MemberFailed,
            Kind::ArrayDegraded,
            Kind::RebuildStopped,
            Kind::ArrayFailed
        ]
    );
    let kept = disk.events.kept(Some("a"));
    let failed = kept.iter().find(|e| e.kind == Kind::MemberFailed).unwrap();
    assert_eq!(
        failed.to_string(),
        "disk a: its member at place 2, file:c.img, failed"
    );
}

#[test]
fn limits_are_told_of_once_in_a_while() {
    let mut disk = one_disk(Condition::Whole);
    let since = disk.clock.now();
    disk.health.held_back(5, since);
    assert!(disk.kinds().is_empty());
    for _ in 0..100 {
        disk.clock.advance(Duration::from_secs(1));
        disk.health.held_back(5, since);
    }
    assert_eq!(disk.kinds(), [Kind::LimitReached]);
    assert_eq!(disk.health.state(), HealthState::Healthy);
    disk.clock.advance(Duration::from_secs(60));
    let since = disk.clock.now();
    disk.clock.advance(Duration::from_secs(1));
    disk.health.held_back(1, since);
    assert_eq!(disk.kinds(), [Kind::LimitReached]);
}

#[test]
fn a_presence_is_told_at_its_beginning_and_end() {
    let (events, _) = log();
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let peer = Peer::of_socket("nbd", std::os::fd::AsFd::as_fd(&ours), "/run/nbd.sock");
    drop(Presence::begin(&events, "a", "connection 1", &peer));
    let told = events.kept(None);
    let kinds: Vec<Kind> = told.iter().map(|e| e.kind).collect();
    assert_eq!(kinds, [Kind::PeerAttached, Kind::PeerLeft]);
    for event in told {
        let pid = u64::from(std::process::id());
        assert_eq!(event.field("pid"), Some(&Value::Number(pid)));
        assert!(event.field("uid").is_some() && event.field("address").is_some());
    }
}

#[test]
fn peers_are_on_the_roll_while_they_use_a_disk() {
    let log = Arc::new(EventLog::default());
    let names = |disk: &str| -> Vec<String> {
        let present = log.present(disk);
        present.iter().map(|p| p.name.clone()).collect()
    };
    let peer = Peer::at("nbd", "127.0.0.1:9");
    let first = Presence::begin(&log, "a", "one", &peer);
    let second = Presence::begin(&log, "a", "two", &peer);
    let _other = Presence::begin(&log, "b", "three", &peer);
    assert_eq!(names("a"), ["one", "two"]);
    assert_eq!(log.present("b")[0].peer, peer);
    drop(first);
    assert_eq!(names("a"), ["two"]);
    drop(second);
    assert!(names("a").is_empty());
}
