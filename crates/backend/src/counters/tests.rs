use super::*;
use crate::pull_batch::PullBatch;
use crate::worker::Polled;
use pvblk_block::Request;

const READ: usize = Op::Read as usize;
const FLUSH: usize = Op::Flush as usize;

fn named(name: &str) -> Arc<Connection> {
    Connection::new(name.into())
}

/// Ticks of so many nanoseconds, or a few more.
fn ticks_of(ns: u64) -> u64 {
    let of_a_billion = ticks::to_ns(1_000_000_000);
    ns * 1_000_000_000 / of_a_billion + 2
}

/// A request that was taken at `taken` and has ended.
fn ended(op: Op, sectors: u64, status: Status, taken: u64) -> Completion {
    let mut request = Request::new(op, 0, sectors, 0);
    request.taken = taken;
    Completion { request, status }
}

fn open(disk: &Arc<DiskCounters>, connection: &Arc<Connection>) -> Counting {
    disk.open(connection, format!("a queue of {}", connection.name()))
}

#[test]
fn lanes_tell_their_worker_and_what_was_chosen() {
    let disk = Arc::new(DiskCounters::default());
    let (gone, lane) = (open(&disk, &named("one")), open(&disk, &named("two")));
    drop(gone);
    lane.came_to(3);
    let polled = Polled {
        requests: Duration::from_micros(25),
        device: Duration::from_micros(100),
    };
    lane.polled_for(polled);
    let mut pulls = PullBatch::default();
    pulls.choice().fix(8);
    pulls.pushed(true);
    pulls.pushed(true);
    lane.chooses(Arc::clone(pulls.choice()));
    let mut batch = vec![Request::new(Op::Read, 0, 1, 0)];
    lane.taken(&mut batch, ticks::now(), true);
    let now = LaneNow {
        name: "a queue of two".to_owned(),
        connection: "two".to_owned(),
        in_flight: 1,
        worker: 3,
        polled,
        pull: Some(8),
        requests: 0,
        signals: Some(2),
    };
    assert_eq!(disk.lanes(), [now]);
}

#[test]
fn operations_stand_in_their_own_order() {
    for (index, op) in OPERATIONS.into_iter().enumerate() {
        assert_eq!(op as usize, index);
    }
}

#[test]
fn each_request_is_counted_once_and_sums_outlive_the_lane() {
    let disk = Arc::new(DiskCounters::default());
    let (one, two) = (named("one"), named("two"));
    let (a, b) = (open(&disk, &one), open(&disk, &one));
    let other = open(&disk, &two);
    let start = ticks::now() - ticks_of(1_000_000);
    let take = |lane: &Counting, ops: &[Op]| {
        let mut batch: Vec<_> = ops.iter().map(|&op| Request::new(op, 0, 1, 0)).collect();
        assert_eq!(lane.taken(&mut batch, start, true), ops.len() as u64);
        assert!(batch.iter().all(|r| r.taken == start));
    };
    take(&a, &[Op::Read; 3]);
    a.merges().add(Op::Read);
    let later = start + ticks_of(50_000);
    let two = [(8, Status::Ok), (16, Status::IoError)];
    let end = a.ended(&two.map(|(n, s)| ended(Op::Read, n, s, start)), later, 1);
    assert!(end.failed && !end.later);
    take(&b, &[Op::Flush]);
    b.ended(&[ended(Op::Flush, 0, Status::Ok, start)], later, 0);
    let check = |t: &Totals, in_flight: u32| {
        let (read, flush) = (&t.operations[READ], &t.operations[FLUSH]);
        assert_eq!((read.requests, read.bytes, read.errors), (2, 24 * 512, 1));
        assert_eq!((flush.requests, flush.bytes, flush.errors), (1, 0, 0));
        assert!((100_000..110_000).contains(&read.time_ns), "{read:?}");
        assert!((50_000..57_000).contains(&read.latency.quantile(0.5)));
        assert_eq!((t.in_flight, read.in_flight), (in_flight, in_flight.into()));
        assert_eq!((read.merges, flush.in_flight), (1, 0));
        // 50 µs of each lane at least.
        assert!(t.busy_ns >= 100_000, "{}", t.busy_ns);
    };
    check(&disk.totals(), 1);
    let by_name = disk.connections();
    assert_eq!(by_name.len(), 2);
    check(&by_name[0].1, 1);
    assert_eq!(by_name[1], ("two".into(), Totals::default()));
    let before = disk.totals();
    drop((a, b));
    // The lane with a request in flight is gone, and the request with it.
    check(&disk.totals(), 0);
    assert_eq!(disk.connections().len(), 1);
    take(&other, &[Op::Write, Op::Read, Op::Write]);
    let write = disk.totals().operations[Op::Write as usize].clone();
    assert_eq!((write.in_flight, write.requests), (2, 0));
    // Operations in turn: each is counted as its own.
    let mixed = [Op::Write, Op::Read, Op::Write].map(|op| ended(op, 1, Status::Ok, start));
    other.ended(&mixed, later, 0);
    let since = disk.totals().since(&before);
    assert_eq!(since.operations[READ].requests, 1);
    assert_eq!(since.operations[READ].bytes, 512);
    assert_eq!(
        since.operations[READ]
            .latency
            .buckets()
            .map(|(_, n)| n)
            .sum::<u64>(),
        1
    );
    assert_eq!(since.operations[FLUSH].requests, 0);
    let write = &since.operations[Op::Write as usize];
    assert_eq!((write.requests, write.bytes), (2, 1024));
    assert_eq!(write.in_flight, 0);
}

#[test]
fn an_idle_disk_keeps_no_histograms() {
    let disk = Arc::new(DiskCounters::default());
    drop(open(&disk, &named("one")));
    let lane = open(&disk, &named("two"));
    assert!(lane.lane.operations.iter().all(|o| o.get().is_none()));
    let totals = disk.totals();
    assert!(
        totals
            .operations
            .iter()
            .all(|o| o.latency == Histogram::default())
    );
}
