//! Members that fail while stripes are being written: the kick waits for writes at the others, flushes them, and then names the member.

#[path = "support/script.rs"]
mod script;
#[path = "support/started.rs"]
mod started;

use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Buffer, Close, Completion, Op, Queue, QueueContext, Request, RequestFlags, Status,
};
use pvblk_raid5::{
    ArrayOptions, BackgroundWork, Blocking, Consistency, CreateOptions, Geometry, Raid5, Role,
    read_superblock, sleepy,
};
use script::{Event, Fate, Kind, Script, Scripted};
use started::prepared;
use std::sync::Arc;
use std::time::Duration;

const MEMBERS: usize = 3;
const MEMBER_BYTES: u64 = 16 << 20;
/// Sectors of a chunk.
const CHUNK: u64 = 16;
/// Sectors of a row's data.
const ROW: u64 = CHUNK * (MEMBERS as u64 - 1);

struct TestArray {
    plain: Vec<Arc<dyn BlockDevice>>,
    devices: Vec<Arc<dyn BlockDevice>>,
    array: Arc<Raid5>,
    background: Option<BackgroundWork>,
    queue: Option<Queue>,
    script: Arc<Mutex<Script>>,
    now: Duration,
    data: u64,
    geometry: Geometry,
    done: Vec<Completion>,
}

impl TestArray {
    fn new(consistency: Consistency, options: ArrayOptions) -> TestArray {
        let script: Arc<Mutex<Script>> = Arc::default();
        let memory = format!("mem:{MEMBER_BYTES}");
        let plain: Vec<_> = (0..=MEMBERS)
            .map(|_| pvblk_volume::open(&memory).unwrap())
            .collect();
        let over = |(n, plain)| Scripted::over(plain, n, &script);
        let devices: Vec<_> = plain.iter().enumerate().map(over).collect();
        let mut how = CreateOptions::new("test:0");
        how.chunk_sectors = CHUNK as u32;
        how.consistency = consistency;
        // Its writes are none of those that are scripted.
        how.private_map = false;
        how.assume_clean = true;
        let named = |(n, d): (usize, &Arc<dyn BlockDevice>)| (n.to_string(), Arc::clone(d));
        let all: Vec<_> = devices
            .iter()
            .enumerate()
            .take(MEMBERS)
            .map(named)
            .collect();
        let options = ArrayOptions {
            stripes: 16,
            ..options
        };
        let assembly = prepared(all, Some(&how));
        let data = assembly.newest().data_offset_sectors;
        let geometry = assembly.geometry;
        let array = Raid5::start(assembly, &options).unwrap();
        script.lock().data = data;
        let device: Arc<dyn BlockDevice> = array.clone();
        let mut world = TestArray {
            background: Some(BackgroundWork::new(&array)),
            queue: Some(Queue::open(&device, &QueueContext::new(64)).unwrap()),
            plain,
            devices,
            array,
            script,
            now: Duration::ZERO,
            data,
            geometry,
            done: Vec::new(),
        };
        // The superblocks say dirty.
        world.write(99, 20 * ROW, 8);
        world.turn();
        assert_eq!(world.statuses(), [(99, Status::Ok)]);
        world.script.lock().events.clear();
        world.done.clear();
        world
    }

    fn rule(&self, rule: impl Fn(usize, Kind, u64) -> Fate + Send + 'static) {
        self.script.lock().rule = Box::new(rule);
    }

    fn submit(&mut self, request: Box<Request>) {
        self.queue.as_mut().unwrap().submit(&mut vec![request]);
    }

    /// A write whose sectors hold its number.
    fn write(&mut self, number: u64, sector: u64, sectors: u64) {
        let buffer = Buffer::anonymous((sectors * 512) as usize).unwrap();
        buffer.write(0, &vec![number as u8; buffer.len()]);
        self.submit(Request::with_buffers(
            Op::Write,
            sector,
            vec![buffer],
            number,
        ));
    }

    fn flush(&mut self, number: u64) {
        self.submit(Request::new(Op::Flush, 0, 0, number));
    }

    /// Everybody is polled, until nothing moves any more.
    fn turn(&mut self) {
        for _ in 0..60 {
            let mut done = Vec::new();
            if let Some(queue) = &mut self.queue {
                queue.poll(&mut done);
            }
            for completion in &done {
                let event = Event::Done(completion.request.tag);
                self.script.lock().events.push(event);
            }
            self.done.append(&mut done);
            self.now += Duration::from_millis(100);
            if let Some(background) = &mut self.background {
                background.work(self.now);
            }
        }
    }

    fn statuses(&self) -> Vec<(u64, Status)> {
        self.done
            .iter()
            .map(|c| (c.request.tag, c.status))
            .collect()
    }

    /// Numbers of the events that fit.
    fn places(&self, fits: impl Fn(Event) -> bool) -> Vec<usize> {
        let script = self.script.lock();
        let all = script.events.iter().enumerate();
        all.filter(|(_, e)| fits(**e)).map(|(at, _)| at).collect()
    }

    fn count(&self, fits: impl Fn(Event) -> bool) -> usize {
        self.places(fits).len()
    }

    /// The bytes of a sector of the array are all this number; by what the members have, without one of them.
    fn holds(&self, sector: u64, without: usize) -> u8 {
        let place = self.geometry.pieces(sector, 1).next().unwrap().place;
        let byte = |member: usize| {
            let mut block = Blocking::open(&self.plain[member]).unwrap();
            let mut bytes = [0; 512];
            let at = self.data + place.member_sector;
            block.read(at, &mut bytes, &mut sleepy()).unwrap();
            assert!(bytes.iter().all(|b| *b == bytes[0]), "{bytes:?}");
            bytes[0]
        };
        match place.member == without {
            true => (0..MEMBERS)
                .filter(|m| *m != without)
                .fold(0, |sum, m| sum ^ byte(m)),
            false => byte(place.member),
        }
    }

    /// Members 1 and 2 are flushed between the last data and the last superblock, which names a device.
    fn flushed_after_data_and_before_names(&self) {
        let named = self.places(|e| matches!(e, Event::Begun(1 | 2, Kind::Superblock)));
        let last = *named.last().unwrap();
        let data = self.places(|e| matches!(e, Event::Ended(1 | 2, Kind::Data)));
        let first = *data.iter().rfind(|at| **at < last).unwrap();
        for member in 1..MEMBERS {
            let flushed = self.places(|e| e == Event::Ended(member, Kind::Flush));
            let between = flushed.iter().any(|at| (first..last).contains(at));
            assert!(between, "{:?}", self.script.lock().events);
        }
    }

    /// True if a member's superblock says that another device has a place, or is being rebuilt for one.
    fn is_a_member_of(&self, member: usize, other: usize) -> bool {
        let superblock = read_superblock("m", &self.plain[member], &mut sleepy()).unwrap();
        matches!(superblock.roles.get(other), Some(Role::Active(_)))
    }

    /// True if a member's superblock calls another one faulty.
    fn calls_faulty(&self, member: usize, other: usize) -> bool {
        let superblock = read_superblock("m", &self.plain[member], &mut sleepy()).unwrap();
        superblock.roles[other] == Role::Faulty
    }
}

const POLICIES: [Consistency; 3] = [Consistency::Ppl, Consistency::Bitmap, Consistency::Resync];

fn superblock(e: Event) -> bool {
    matches!(e, Event::Begun(_, Kind::Superblock))
}

fn flush(e: Event) -> bool {
    matches!(e, Event::Begun(_, Kind::Flush))
}

/// Member 0 fails its write of the first row, which is written whole; a second one's writes are at them, too.
fn two_rows_at_the_members(world: &mut TestArray) {
    world.rule(|_, kind, _| match kind {
        Kind::Data => Fate::Waits,
        _ => Fate::Passes,
    });
    world.write(1, 0, ROW);
    // Not a neighbour, so that members don't get it in one request.
    world.write(2, 2 * ROW, ROW);
    world.turn();
    let data = |e| matches!(e, Event::Begun(_, Kind::Data));
    assert_eq!(
        world.count(data),
        2 * MEMBERS,
        "{:?}",
        world.script.lock().events
    );
    world.script.lock().events.clear();
}

#[test]
fn stripes_end_then_members_are_flushed_then_named_then_writes_end() {
    for policy in POLICIES {
        let mut world = TestArray::new(policy, ArrayOptions::default());
        let data = world.data;
        two_rows_at_the_members(&mut world);
        world.flush(3);
        // The first row's writes end, one of them as failed.
        world.rule(move |member, kind, sector| match (kind, member) {
            (Kind::Data, 0) => Fate::Fails,
            (Kind::Data, _) if sector >= data + CHUNK => Fate::Waits,
            _ => Fate::Passes,
        });
        world.turn();
        assert_eq!(world.array.failed(), None, "superblocks don't say so yet");
        assert_eq!(
            world.count(superblock),
            0,
            "{policy:?}: the second row isn't written"
        );
        assert_eq!(world.statuses(), []);
        // The second row's end.
        world.script.lock().events.clear();
        world.rule(|_, kind, _| match kind {
            Kind::Flush => Fate::Waits,
            _ => Fate::Passes,
        });
        world.turn();
        assert_eq!(world.count(flush), MEMBERS - 1, "{policy:?}");
        assert_eq!(world.count(superblock), 0, "{policy:?}: nothing is flushed");
        assert_eq!(world.statuses(), []);
        // Flushes end.
        world.rule(|_, _, _| Fate::Passes);
        world.turn();
        assert_eq!(world.array.failed(), Some(0));
        let all = [1, 2, 3].map(|n| (n, Status::Ok));
        let mut statuses = world.statuses();
        statuses.sort_unstable_by_key(|s| s.0);
        assert_eq!(statuses, all, "{policy:?}");
        let last = |fits: fn(Event) -> bool| *world.places(fits).last().unwrap();
        let first = |fits: fn(Event) -> bool| world.places(fits)[0];
        let written = last(|e| matches!(e, Event::Ended(1 | 2, Kind::Data)));
        let flushed = last(|e| matches!(e, Event::Ended(_, Kind::Flush)));
        let named = last(|e| matches!(e, Event::Ended(_, Kind::Superblock)));
        assert!(written < first(flush), "{:?}", world.script.lock().events);
        assert!(flushed < first(superblock));
        assert!(named < first(|e| matches!(e, Event::Done(_))));
        for (sector, number) in [(0, 1), (CHUNK, 1), (2 * ROW, 2), (2 * ROW + CHUNK, 2)] {
            assert_eq!(world.holds(sector, 0), number);
        }
    }
}

#[test]
fn an_order_to_fail_a_member_goes_the_same_way() {
    for policy in POLICIES {
        let mut world = TestArray::new(policy, ArrayOptions::default());
        two_rows_at_the_members(&mut world);
        world.array.fail(0).unwrap();
        world.turn();
        let early = world.count(|e| superblock(e) || flush(e));
        assert_eq!(early, 0, "{policy:?}: stripes are being written");
        world.rule(|_, _, _| Fate::Passes);
        world.turn();
        assert_eq!(world.statuses().len(), 2);
        let written = |e| matches!(e, Event::Ended(1 | 2, Kind::Data));
        let written = *world.places(written).last().unwrap();
        let flushes = world.places(|e| matches!(e, Event::Ended(_, Kind::Flush)));
        let named = world.places(superblock)[0];
        assert!(written < flushes[0] && flushes[MEMBERS - 2] < named);
        assert!(world.calls_faulty(1, 0) && world.calls_faulty(2, 0));
    }
}

#[test]
fn a_member_that_is_kicked_for_its_time_is_not_waited_for() {
    let options = ArrayOptions {
        member_timeout: Some(Duration::from_secs(1)),
        ..ArrayOptions::default()
    };
    let mut world = TestArray::new(Consistency::Bitmap, options);
    two_rows_at_the_members(&mut world);
    world.rule(|member, kind, _| match (kind, member) {
        (_, 0) => Fate::Waits,
        _ => Fate::Passes,
    });
    (0..4).for_each(|_| world.turn());
    assert_eq!(world.array.failed(), Some(0));
    assert_eq!(world.statuses().len(), 2);
    let flushed = world.places(|e| matches!(e, Event::Ended(1 | 2, Kind::Flush)));
    assert!(flushed[1] < world.places(superblock)[0]);
    world.rule(|_, _, _| Fate::Passes);
    world.turn();
}

#[test]
fn a_second_failure_ends_the_array_and_names_nobody() {
    for second in [Kind::Data, Kind::Flush] {
        let mut world = TestArray::new(Consistency::Ppl, ArrayOptions::default());
        two_rows_at_the_members(&mut world);
        world.rule(move |member, kind, _| match (member, kind) {
            (0, Kind::Data) => Fate::Fails,
            (_, Kind::Data) if second == Kind::Data => Fate::Waits,
            (1, Kind::Flush) => Fate::Fails,
            _ => Fate::Passes,
        });
        world.turn();
        world.rule(move |member, kind, _| match member == 1 && kind == second {
            true => Fate::Fails,
            false => Fate::Passes,
        });
        world.turn();
        assert!(world.array.state().broken);
        let statuses = world.statuses();
        assert_eq!(statuses.len(), 2);
        assert!(
            statuses.iter().all(|s| s.1 == Status::IoError),
            "{statuses:?}"
        );
        assert!((0..MEMBERS).all(|m| (0..MEMBERS).all(|o| !world.calls_faulty(m, o))));
    }
}

/// A write of one block whose log waits.
fn a_unit_in_flight(world: &mut TestArray, sector: u64, sectors: u64) {
    world.rule(|_, kind, _| match kind {
        Kind::Log => Fate::Waits,
        _ => Fate::Passes,
    });
    world.write(1, sector, sectors);
    world.turn();
    assert_eq!(world.count(|e| matches!(e, Event::Begun(_, Kind::Log))), 1);
}

#[test]
fn a_kick_waits_for_a_unit_in_flight() {
    // Data blocks of the first row are on members 0 and 1, and parity on member 2.
    for kicked in 0..MEMBERS {
        let mut world = TestArray::new(Consistency::Ppl, ArrayOptions::default());
        a_unit_in_flight(&mut world, 0, ROW);
        world.array.fail(kicked).unwrap();
        world.turn();
        let data = |e| matches!(e, Event::Begun(_, Kind::Data));
        // The log is still being written.
        assert!(!world.calls_faulty((kicked + 1) % MEMBERS, kicked));
        assert_eq!(world.count(data), 0);
        world.rule(|_, _, _| Fate::Passes);
        world.turn();
        assert_eq!(world.statuses(), [(1, Status::Ok)]);
        for sector in [0, CHUNK, ROW - 1] {
            assert_eq!(world.holds(sector, kicked), 1, "{kicked}");
        }
    }
}

#[test]
fn a_log_that_fails_kicks_its_member_and_its_unit_is_planned_anew() {
    let mut world = TestArray::new(Consistency::Ppl, ArrayOptions::default());
    a_unit_in_flight(&mut world, 0, 8);
    world.rule(|_, kind, _| match kind {
        Kind::Log => Fate::Fails,
        _ => Fate::Passes,
    });
    world.turn();
    assert_eq!(world.array.failed(), Some(2));
    assert_eq!(world.statuses(), [(1, Status::Ok)]);
    let named = world.places(|e| matches!(e, Event::Ended(_, Kind::Superblock)));
    let data = world.places(|e| matches!(e, Event::Begun(_, Kind::Data)));
    assert!(named.last() < data.first());
    assert_eq!(world.holds(0, 2), 1);
}

/// Adds the spare, whose first stripes can be written, and no others.
fn add_a_spare_that_stops(world: &mut TestArray) {
    let data = world.data;
    world.rule(move |member, kind, sector| match (member, kind) {
        (3, Kind::Data) if sector > data + 64 * CHUNK => Fate::Waits,
        _ => Fate::Passes,
    });
    let spare = Arc::clone(&world.devices[MEMBERS]);
    world.array.add("3", &spare, true, &mut sleepy()).unwrap();
}

#[test]
fn a_device_that_is_rebuilt_and_fails_is_named_after_a_flush() {
    for consistency in POLICIES {
        let mut world = TestArray::new(consistency, ArrayOptions::default());
        world.array.fail(0).unwrap();
        world.turn();
        // The spare's first stripes are rebuilt, and then its writes fail.
        add_a_spare_that_stops(&mut world);
        world.turn();
        assert_eq!(world.array.rebuilding(), Some(0));
        world.rule(|_, kind, _| match kind {
            Kind::Data => Fate::Waits,
            _ => Fate::Passes,
        });
        // Its words aren't those of the stripes that are being rebuilt.
        world.write(1, 10 * ROW, ROW);
        world.turn();
        world.script.lock().events.clear();
        world.rule(move |member, kind, _| match (member, kind) {
            (3, Kind::Data) => Fate::Fails,
            (_, Kind::Data) => Fate::Waits,
            _ => Fate::Passes,
        });
        world.turn();
        // Others tell how far the rebuild was.
        assert!(world.is_a_member_of(1, 3), "{consistency:?}");
        world.rule(|_, _, _| Fate::Passes);
        world.turn();
        assert_eq!(world.array.rebuilding(), None);
        assert_eq!(world.statuses(), [(1, Status::Ok)]);
        assert!(!world.is_a_member_of(1, 3) && !world.is_a_member_of(2, 3));
        world.flushed_after_data_and_before_names();
        assert!((0..ROW).all(|s| world.holds(10 * ROW + s, 0) == 1));
    }
}

#[test]
fn a_kick_while_another_waits() {
    // Member 1 is being replaced; then member 0 fails, and the new device, too.
    let mut world = TestArray::new(Consistency::Ppl, ArrayOptions::default());
    add_a_spare_that_stops(&mut world);
    world.array.replace(1).unwrap();
    world.turn();
    assert_eq!(world.array.rebuilding(), Some(1));
    world.rule(|_, kind, _| match kind {
        Kind::Data => Fate::Waits,
        _ => Fate::Passes,
    });
    world.write(1, 0, ROW);
    world.turn();
    world.script.lock().events.clear();
    for failing in [0, 3] {
        world.rule(move |member, kind, _| match (member, kind) {
            (member, Kind::Data) if member == failing => Fate::Fails,
            (_, Kind::Data) => Fate::Waits,
            _ => Fate::Passes,
        });
        world.turn();
        assert!(!world.calls_faulty(1, 0) && world.is_a_member_of(1, 3));
    }
    world.rule(|_, _, _| Fate::Passes);
    world.turn();
    assert_eq!(
        (world.array.failed(), world.array.rebuilding()),
        (Some(0), None)
    );
    assert_eq!(world.statuses(), [(1, Status::Ok)]);
    world.flushed_after_data_and_before_names();
    assert!(world.calls_faulty(1, 0) && world.calls_faulty(2, 0));
    assert!((0..ROW).all(|s| world.holds(s, 0) == 1));
}

#[test]
fn a_stop_comes_in_the_middle() {
    for steps in 0..2 {
        let mut world = TestArray::new(Consistency::Ppl, ArrayOptions::default());
        two_rows_at_the_members(&mut world);
        world.array.fail(0).unwrap();
        world.rule(move |_, kind, _| match kind {
            Kind::Data if steps == 0 => Fate::Waits,
            Kind::Flush if steps == 1 => Fate::Waits,
            _ => Fate::Passes,
        });
        world.turn();
        assert!(!world.calls_faulty(1, 0));
        world.rule(|_, _, _| Fate::Passes);
        world.queue = None;
        world.background = None;
        world.array.close().unwrap();
        assert!(world.calls_faulty(1, 0) && world.calls_faulty(2, 0));
        let superblock = read_superblock("1", &world.plain[1], &mut sleepy()).unwrap();
        assert!(superblock.is_clean());
        let written = world.places(|e| matches!(e, Event::Ended(1 | 2, Kind::Data)));
        let flushed = world.places(|e| matches!(e, Event::Ended(_, Kind::Flush)));
        let named = world.places(|e| matches!(e, Event::Ended(_, Kind::Superblock)));
        assert!(written[3] < flushed[0] && flushed[1] < named[0]);
    }
}

#[test]
fn writes_with_fua_and_flushes_end_after_the_names() {
    let mut world = TestArray::new(Consistency::Resync, ArrayOptions::default());
    world.rule(|_, kind, _| match kind {
        Kind::Data | Kind::Flush => Fate::Waits,
        _ => Fate::Passes,
    });
    world.flush(1);
    let buffer = Buffer::anonymous((ROW * 512) as usize).unwrap();
    let mut request = Request::with_buffers(Op::Write, 0, vec![buffer], 2);
    request.flags = RequestFlags::FUA;
    world.submit(request);
    world.turn();
    world.script.lock().events.clear();
    world.rule(|member, kind, _| match (member, kind) {
        (0, Kind::Flush) => Fate::Fails,
        _ => Fate::Passes,
    });
    world.turn();
    assert_eq!(world.array.failed(), Some(0));
    assert!(world.calls_faulty(1, 0) && world.calls_faulty(2, 0));
    let mut statuses = world.statuses();
    statuses.sort_unstable_by_key(|s| s.0);
    assert_eq!(statuses, [(1, Status::Ok), (2, Status::Ok)]);
    let named = world.places(|e| matches!(e, Event::Ended(_, Kind::Superblock)));
    let done = world.places(|e| matches!(e, Event::Done(_)));
    assert!(named[MEMBERS - 2] < done[0]);
}
