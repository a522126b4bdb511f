//! A server that dies at any point and loses its cache, under queues that go on.

use super::kept::{CHUNK, COST, Plant};
use super::model::ModelServer;
use super::*;
use pvblk_block::{
    Buffer, Completion, DeviceEvent, Op, Queue, Readiness, Request, RequestFlags, Status,
};
use pvblk_protocol::nbd::{Mode, tflag};
use std::collections::BTreeMap;
use std::time::Instant;

const SECTORS: usize = 256;
const HANG: Duration = Duration::from_secs(60);
const FLAGS: u16 = tflag::HAS_FLAGS
    | tflag::SEND_FLUSH
    | tflag::SEND_FUA
    | tflag::SEND_TRIM
    | tflag::SEND_WRITE_ZEROES
    | tflag::CAN_MULTI_CONN;

fn mode(rng: &mut fastrand::Rng) -> Mode {
    [Mode::Simple, Mode::Structured, Mode::Extended][rng.usize(..3)]
}

fn config(connections: u16) -> NbdClientConfig {
    NbdClientConfig {
        connections: Some(connections),
        on_reconnect: OnReconnect::Resend,
        ..NbdClientConfig::default()
    }
}

fn connect(server: &ModelServer, config: NbdClientConfig) -> (Arc<NbdClient>, Vec<Queue>) {
    let queues = config.connections.unwrap_or(1);
    let uri = NbdUri::new(NbdAddr::Unix(server.path().into()), "disk");
    let client = Arc::new(NbdClient::connect(&uri, config).unwrap());
    let device: Arc<dyn BlockDevice> = Arc::clone(&client) as _;
    let queues = (0..queues).map(|_| Queue::open(&device, &QueueContext::new(8)).unwrap());
    let queues = queues.collect();
    (client, queues)
}

/// Runs random requests on several queues against a server that crashes now and then. An error is the first thing that is wrong.
fn run(seed: u64, plant: Option<Plant>) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut flags = FLAGS;
    if rng.u8(..4) == 0 {
        flags &= !tflag::SEND_FUA;
    }
    let server = ModelServer::start(SECTORS * 512, flags, mode(&mut rng), rng.u64(..));
    let keep_bytes = [40 << 10, 100 << 10, 64 << 20][rng.usize(..3)];
    let count = rng.u16(1..=3);
    let (client, mut queues) = connect(
        &server,
        NbdClientConfig {
            keep_bytes,
            plant,
            ..config(count)
        },
    );
    server.model.lock().crash_odds = [40, 120, 400][rng.usize(..3)];
    let mut oracle = vec![0u8; SECTORS * 512];
    // Sectors with a request in flight, of which one may write.
    let mut busy: BTreeMap<u64, (Op, usize, usize)> = BTreeMap::new();
    let mut data: BTreeMap<u64, Buffer> = BTreeMap::new();
    let mut tag = 0;
    let mut done: Vec<Completion> = Vec::new();
    let mut begin = Instant::now();
    let steps = 1500;
    for step in 0.. {
        let issue = step < steps && rng.u8(..8) != 0;
        let i = rng.usize(..queues.len());
        if issue && queues[i].in_flight() < 8 {
            let mut batch = Vec::new();
            for _ in 0..rng.usize(1..=3) {
                let op = [
                    Op::Write,
                    Op::Write,
                    Op::Write,
                    Op::Read,
                    Op::WriteZeroes,
                    Op::Flush,
                ][rng.usize(..6)];
                // Mostly a few places, so that newer data go over older ones.
                let most = if rng.bool() { 16 } else { SECTORS };
                let at = rng.usize(..most);
                let n = rng.usize(1..=8).min(SECTORS - at);
                let clashes = |(o, a, m): &(Op, usize, usize)| {
                    (o.is_write() || op.is_write()) && *a < at + n && at < a + m
                };
                if op == Op::Flush {
                    if rng.u8(..4) == 0 {
                        batch.push(Request::new(op, 0, 0, tag));
                        tag += 1;
                    }
                    continue;
                }
                if busy.values().any(clashes) || queues[i].in_flight() + batch.len() >= 8 {
                    continue;
                }
                busy.insert(tag, (op, at, n));
                let mut request = if op == Op::WriteZeroes {
                    Request::new(op, at as u64, n as u64, tag)
                } else {
                    let b = Buffer::anonymous(n * 512).unwrap();
                    if op == Op::Write {
                        let bytes: Vec<u8> = (0..n * 512).map(|_| rng.u8(..)).collect();
                        b.write(0, &bytes);
                    }
                    data.insert(tag, b.clone());
                    Request::with_buffers(op, at as u64, vec![b], tag)
                };
                if op.is_write() && rng.u8(..6) == 0 {
                    request.flags = RequestFlags::FUA;
                }
                tag += 1;
                batch.push(request);
            }
            queues[i].submit(&mut batch);
        }
        // A queue that isn't looked at for a while finds old answers.
        let polled = rng.usize(..queues.len());
        let all = step >= steps || rng.u8(..4) == 0;
        for (n, queue) in queues.iter_mut().enumerate() {
            if all || n == polled {
                queue.poll(&mut done);
            }
        }
        if !done.is_empty() {
            begin = Instant::now();
        }
        for c in done.drain(..) {
            let r = &c.request;
            if c.status != Status::Ok {
                return Err(format!("{:?} of {r:?}", c.status));
            }
            let Some((op, at, n)) = busy.remove(&r.tag) else {
                continue;
            };
            let bytes = at * 512..(at + n) * 512;
            let buffer = data.remove(&r.tag).map(|b| b.to_vec());
            match (op, buffer) {
                (Op::Write, Some(b)) => oracle[bytes].copy_from_slice(&b),
                (Op::Read, Some(b)) if oracle[bytes.clone()] != b => {
                    return Err(format!("step {step}: other data at sector {at}"));
                }
                (Op::WriteZeroes, _) => oracle[bytes].fill(0),
                _ => {}
            }
        }
        if step >= steps && queues.iter().all(|q| q.in_flight() == 0) {
            break;
        }
        if begin.elapsed() > HANG {
            return Err(format!("requests are stuck; {:?}", client.failure()));
        }
        if rng.u8(..64) == 0 || queues.iter().all(|q| q.in_flight() == 8) {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    // A last crash without a flush loses nothing either, and a flush leaves nothing to lose.
    let mut m = server.model.lock();
    m.crash_odds = 0;
    m.crash();
    drop(m);
    let all = Buffer::anonymous(SECTORS * 512).unwrap();
    let read = Request::with_buffers(Op::Read, 0, vec![all.clone()], 0);
    finish(&mut queues[0], vec![read])?;
    if all.to_vec() != oracle {
        return Err("other data after the last crash".into());
    }
    finish(&mut queues[0], vec![Request::new(Op::Flush, 0, 0, 0)])?;
    match server.model.lock().stable == oracle {
        true => Ok(()),
        false => Err("other data are stable after a flush".into()),
    }
}

/// Submits requests and sleeps until they are done, as a user does.
fn finish(queue: &mut Queue, mut batch: Vec<Box<Request>>) -> Result<Vec<Completion>, String> {
    queue.submit(&mut batch);
    let mut done = Vec::new();
    sleep_until_done(queue, &mut done)?;
    match done.iter().find(|c| c.status != Status::Ok) {
        Some(c) => Err(format!("{:?} of {:?}", c.status, c.request)),
        None => Ok(done),
    }
}

fn sleep_until_done(queue: &mut Queue, done: &mut Vec<Completion>) -> Result<(), String> {
    let poller = pvblk_sys::Poller::new().unwrap();
    poller.add(queue.wait_fd().unwrap(), 0, false).unwrap();
    let mut events = Vec::new();
    while queue.in_flight() > 0 {
        if queue.poll(done) == 0 && matches!(queue.arm(), Readiness::Wait(_)) {
            events.clear();
            poller.wait(&mut events, Some(HANG)).unwrap();
            if events.is_empty() {
                return Err("nobody wakes the queue".into());
            }
            queue.woken();
        }
    }
    Ok(())
}

fn seeds(count: u64) -> impl Iterator<Item = u64> {
    let first = pvblk_testing::seed_or(0x5eed);
    println!("seeds {first}..{}", first + count);
    first..first + count
}

/// Number of seeds: `PVBLK_NBD_SEEDS`, or a few.
fn count() -> u64 {
    let text = std::env::var("PVBLK_NBD_SEEDS").unwrap_or_default();
    text.parse().unwrap_or(24)
}

#[test]
fn a_server_that_crashes_and_loses_its_cache_loses_nothing_of_ours() {
    for seed in seeds(count()) {
        if let Err(why) = run(seed, None) {
            panic!("seed {seed}: {why}");
        }
    }
}

#[test]
fn planted_bugs_are_found() {
    for plant in Plant::RANDOM {
        let found = seeds(2000).find_map(|seed| run(seed, Some(plant)).err().map(|e| (seed, e)));
        let (seed, why) = found.unwrap_or_else(|| panic!("{plant:?} isn't found"));
        println!("{plant:?}: seed {seed}: {why}");
    }
}

/// A write that found no room is answered by the flush that covers it. The server answers this flush and crashes, and the volume has
/// connected again and replayed older data before its queue reads the answer. An error says that data are wrong.
fn late_flush(plant: Option<Plant>) -> Result<(), String> {
    let sectors = CHUNK as u64 / 512;
    let server = ModelServer::start(4 * CHUNK, FLAGS, Mode::Structured, 1);
    let (client, mut queues) = connect(
        &server,
        NbdClientConfig {
            keep_bytes: 2 * COST,
            plant,
            ..config(1)
        },
    );
    let queue = &mut queues[0];
    let filled = |byte: u8, bytes: usize| {
        let b = Buffer::anonymous(bytes).unwrap();
        b.write(0, &vec![byte; bytes]);
        vec![b]
    };
    // One chunk is kept of the first write, and the second one gets half of the room that it needs.
    let old = Request::with_buffers(Op::Write, sectors, filled(1, CHUNK), 1);
    finish(queue, vec![old])?;
    // The volume's own flush, since half of the room is taken, and that of the write.
    server.model.lock().crash_after_flush = Some(2);
    let new = Request::with_buffers(Op::Write, 0, filled(2, 2 * CHUNK), 2);
    queue.submit(&mut vec![new]);
    let mut done = Vec::new();
    let begin = Instant::now();
    while server.model.lock().commands[1] < 2 {
        assert!(begin.elapsed() < HANG);
        std::thread::sleep(Duration::from_millis(1));
    }
    // Takes the answer to the write, and sends both flushes.
    let poller = pvblk_sys::Poller::new().unwrap();
    poller.add(queue.wait_fd().unwrap(), 0, false).unwrap();
    assert!(matches!(queue.arm(), Readiness::Wait(_)));
    poller.wait(&mut Vec::new(), Some(HANG)).unwrap();
    assert_eq!(queue.poll(&mut done), 0);
    while server.model.lock().accepted < 2 || client.failure().is_some() {
        assert!(begin.elapsed() < HANG);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(server.model.lock().crashes, 1);
    sleep_until_done(queue, &mut done)?;
    let all = Buffer::anonymous(2 * CHUNK).unwrap();
    let read = Request::with_buffers(Op::Read, 0, vec![all.clone()], 3);
    finish(queue, vec![read])?;
    match all.to_vec().iter().position(|&b| b != 2) {
        Some(at) => Err(format!("older data at byte {at}")),
        None => Ok(()),
    }
}

#[test]
fn a_flush_whose_answer_is_read_after_the_replay_covers_nothing() {
    late_flush(None).unwrap();
    let why = late_flush(Some(Plant::LateFlush)).unwrap_err();
    assert_eq!(why, format!("older data at byte {CHUNK}"));
}

#[test]
fn a_server_that_is_away_is_waited_for_and_a_larger_export_is_a_resize() {
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let (client, mut queues) = connect(&server, config(2));
    let (tell, told) = std::sync::mpsc::channel();
    let _events = client.events().subscribe(move |e| tell.send(e).unwrap());
    // Without a request: the thread notices.
    server.away();
    let begin = Instant::now();
    while client.failure().is_none() {
        assert!(begin.elapsed() < HANG);
        std::thread::sleep(Duration::from_millis(1));
    }
    let b = Buffer::anonymous(4096).unwrap();
    b.write(0, &[5; 4096]);
    for queue in &mut queues {
        queue.submit(&mut vec![Request::with_buffers(
            Op::Write,
            0,
            vec![b.clone()],
            1,
        )]);
        let mut done = Vec::new();
        assert_eq!(queue.poll(&mut done), 0);
    }
    server.model.lock().told_bytes = Some(SECTORS as u64 * 512 - 4096);
    server.listen();
    std::thread::sleep(Duration::from_millis(300));
    assert!(client.failure().is_some(), "a smaller export is refused");
    let bytes = SECTORS as u64 * 512 + 8192;
    server.model.lock().told_bytes = Some(bytes);
    for queue in &mut queues {
        let mut done = Vec::new();
        sleep_until_done(queue, &mut done).unwrap();
        assert_eq!(done[0].status, Status::Ok);
    }
    let sectors = SECTORS as u64 + 16;
    assert_eq!(client.capacity_sectors(), sectors);
    assert_eq!(
        told.recv_timeout(HANG).unwrap(),
        DeviceEvent::Resized { sectors }
    );
    assert_eq!(client.failure(), None);
    assert!(server.model.lock().visible[..4096].iter().all(|&b| b == 5));
}

#[test]
fn after_the_wait_requests_fail_for_good() {
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let wait = Some(Duration::from_millis(200));
    let (client, mut queues) = connect(&server, NbdClientConfig { wait, ..config(1) });
    server.away();
    let queue = &mut queues[0];
    queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 1)]);
    let mut done = Vec::new();
    sleep_until_done(queue, &mut done).unwrap();
    assert_eq!(done[0].status, Status::IoError);
    let why = client.failure().unwrap();
    assert!(why.contains("not back after 0.2 s"), "{why}");
    server.listen();
    assert!(finish(queue, vec![Request::new(Op::Flush, 0, 0, 1)]).is_err());
    let device: Arc<dyn BlockDevice> = client;
    assert!(Queue::open(&device, &QueueContext::new(1)).is_err());
}

#[test]
fn with_fail_everything_fails_when_the_server_is_gone() {
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let (client, mut queues) = connect(
        &server,
        NbdClientConfig {
            on_reconnect: OnReconnect::Fail,
            ..config(2)
        },
    );
    let (tell, told) = std::sync::mpsc::channel();
    let _events = client.events().subscribe(move |e| tell.send(e).unwrap());
    server.model.lock().crash();
    // No request is in flight.
    assert_eq!(told.recv_timeout(HANG).unwrap(), DeviceEvent::Gone);
    assert!(client.failure().unwrap().contains("hung up"));
    for queue in &mut queues {
        assert!(finish(queue, vec![Request::new(Op::Flush, 0, 0, 1)]).is_err());
    }
}

/// A queue that is closed with requests in flight takes its connection with it, and the next queue gets another one.
#[test]
fn connections_that_are_closed_in_use_are_made_again() {
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let (client, mut queues) = connect(&server, config(2));
    let device: Arc<dyn BlockDevice> = client;
    for _ in 0..5 {
        let mut queue = queues.pop().unwrap();
        queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 1)]);
        drop(queue);
        let mut queue = Queue::open(&device, &QueueContext::new(1)).unwrap();
        finish(&mut queue, vec![Request::new(Op::Flush, 0, 0, 1)]).unwrap();
        queues.push(queue);
    }
    assert!(server.model.lock().crashes == 0 && server.model.lock().accepted >= 3);
}

#[test]
fn holes_are_told_and_what_is_written_is_data_at_once() {
    use pvblk_block::ExtentKind::{Data, Hole};
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let (client, mut queues) = connect(&server, config(2));
    let device: Arc<dyn BlockDevice> = client;
    let map = |from: u64, to: u64| {
        let mut out = Vec::new();
        device.extents(from, to - from, &mut out).unwrap();
        let told = out.iter().map(|e| (e.sector, e.sectors, e.kind));
        told.collect::<Vec<_>>()
    };
    let all = SECTORS as u64;
    assert_eq!(map(0, all), [(0, all, Hole)]);
    let b = Buffer::anonymous(4096).unwrap();
    b.write(0, &[5; 4096]);
    let write = Request::with_buffers(Op::Write, 104, vec![b], 1);
    finish(&mut queues[0], vec![write]).unwrap();
    assert_eq!(
        map(0, all),
        [(0, 104, Hole), (104, 8, Data), (112, all - 112, Hole)]
    );
    assert_eq!(map(104, 120), [(104, 8, Data), (112, 8, Hole)]);
    // A server that is away has told nothing: all is data.
    server.away();
    assert_eq!(map(0, 16), [(0, 16, Data)]);
}

/// Where a write is at the server while somebody asks, the answer doesn't hold when the write has ended.
#[test]
fn a_hole_that_was_told_before_a_write_ended_is_asked_for_again() {
    use pvblk_block::ExtentKind::{Data, Hole};
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let (client, mut queues) = connect(&server, config(2));
    let device: Arc<dyn BlockDevice> = client;
    let kind = || {
        let mut out = Vec::new();
        device.extents(104, 8, &mut out).unwrap();
        out.iter().map(|e| e.kind).collect::<Vec<_>>()
    };
    server.model.lock().holds_writes = true;
    let b = Buffer::anonymous(4096).unwrap();
    b.write(0, &[5; 4096]);
    let write = Request::with_buffers(Op::Write, 104, vec![b], 1);
    queues[0].submit(&mut vec![write]);
    // Whichever of the two the server sees first, it hasn't executed the write.
    assert_eq!(kind(), [Hole]);
    server.model.lock().holds_writes = false;
    finish(&mut queues[0], vec![]).unwrap();
    assert_eq!(kind(), [Data]);
}

/// A server that comes back, and then answers nothing of what it is sent again, isn't waited for for longer than one that stays away.
#[test]
fn a_replay_that_is_not_answered_is_given_up() {
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let patient = NbdClientConfig {
        wait: Some(std::time::Duration::from_millis(300)),
        ..config(1)
    };
    let (_client, mut queues) = connect(&server, patient);
    let b = Buffer::anonymous(512).unwrap();
    let write = Request::with_buffers(Op::Write, 0, vec![b], 1);
    finish(&mut queues[0], vec![write]).unwrap();
    let mut model = server.model.lock();
    model.holds_writes = true;
    model.crash();
    drop(model);
    assert!(finish(&mut queues[0], vec![Request::new(Op::Flush, 0, 0, 2)]).is_err());
}

/// It would cost all others' time, and the log.
#[test]
fn a_server_that_only_accepts_is_not_called_all_the_time() {
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let (client, mut queues) = connect(&server, config(1));
    let begin = std::time::Instant::now();
    server.model.lock().hangs_up = true;
    let flush = Request::new(Op::Flush, 0, 0, 1);
    queues[0].submit(&mut vec![flush]);
    let mut done = Vec::new();
    while begin.elapsed().as_millis() < 1500 {
        // A queue sends again when it is polled.
        assert_eq!(queues[0].poll(&mut done), 0);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let accepted = server.model.lock().accepted;
    // The first one, one at once, and then after 50, 100, 200 ms and so on.
    let most = 3 + (begin.elapsed().as_millis() / 50 + 1).ilog2();
    assert!((2..=most).contains(&accepted), "{accepted} of {most}");
    server.model.lock().hangs_up = false;
    finish(&mut queues[0], vec![]).unwrap();
    drop(client);
}

/// Such an answer was asked for again, and again.
#[test]
fn an_answer_that_tells_of_no_whole_sector_ends_a_question() {
    use pvblk_block::ExtentKind::Data;
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let (client, _queues) = connect(&server, config(2));
    let device: Arc<dyn BlockDevice> = client;
    server.model.lock().told_status = Some(vec![(100, 3), (412, 3)]);
    let mut out = Vec::new();
    device.extents(0, 4, &mut out).unwrap();
    assert!(out.iter().all(|e| e.kind == Data), "{out:?}");
    assert_eq!(out.iter().map(|e| e.sectors).sum::<u64>(), 4);
}

/// A smaller export is refused, unless the user asks to look.
#[test]
fn a_smaller_size_is_taken_on_refresh() {
    let server = ModelServer::start(SECTORS * 512, FLAGS, Mode::Structured, 1);
    let (client, mut queues) = connect(&server, config(2));
    let smaller = SECTORS as u64 - 64;
    server.model.lock().told_bytes = Some(smaller * 512);
    let device: Arc<dyn BlockDevice> = client;
    device.refresh().unwrap();
    let begin = Instant::now();
    while device.capacity_sectors() != smaller {
        assert!(begin.elapsed() < HANG);
        std::thread::sleep(Duration::from_millis(1));
    }
    finish(&mut queues[0], vec![Request::new(Op::Flush, 0, 0, 1)]).unwrap();
}
