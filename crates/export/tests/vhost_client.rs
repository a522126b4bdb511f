//! The client against our own server: data, order, many requests, several queues, and the end of either side.

mod vhost_support;

use pvblk_block::{
    BlockDevice, Buffer, Buffers, Completion, Op, Queue, QueueContext, Readiness, Refresh, Request,
    RequestFlags, Status,
};
use pvblk_client::vhost_user::{VhostClient, VhostClientConfig};
use pvblk_sys::Poller;
use pvblk_testing::wait;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vhost_support::{Bed, WAIT};

fn config(queues: u16, entries: u16) -> VhostClientConfig {
    VhostClientConfig {
        queues,
        entries,
        memory_bytes: 4 << 20,
        ..VhostClientConfig::default()
    }
}

fn client(bed: &Bed, queues: u16, entries: u16) -> Arc<VhostClient> {
    Arc::new(VhostClient::connect(&bed.path("a"), &config(queues, entries)).unwrap())
}

struct User {
    queue: Queue,
    poller: Poller,
}

impl User {
    fn new(client: &Arc<VhostClient>) -> User {
        let device: Arc<dyn BlockDevice> = client.clone();
        let queue = Queue::open(&device, &QueueContext::new(256)).unwrap();
        let poller = Poller::new().unwrap();
        poller.add(queue.wait_fd().unwrap(), 0, false).unwrap();
        User { queue, poller }
    }

    /// Submits and sleeps, as a blocking user does, until all have come back.
    fn run(&mut self, mut requests: Vec<Box<Request>>) -> Vec<Completion> {
        let count = requests.len();
        self.queue.submit(&mut requests);
        self.collect(count)
    }

    fn collect(&mut self, count: usize) -> Vec<Completion> {
        let (mut done, deadline) = (Vec::new(), Instant::now() + WAIT);
        while done.len() < count {
            assert!(Instant::now() < deadline, "{} of {count}", done.len());
            self.queue.poll(&mut done);
            if done.len() < count
                && let Readiness::Wait(until) = self.queue.arm()
            {
                let second = Duration::from_secs(1);
                let wait = until.map_or(second, |u| u.saturating_duration_since(Instant::now()));
                self.poller.wait(&mut Vec::new(), Some(wait)).unwrap();
                self.queue.woken();
            }
        }
        done
    }

    fn one(&mut self, request: Box<Request>) -> Status {
        self.run(vec![request])[0].status
    }

    fn data(&mut self, op: Op, sector: u64, buffers: Vec<Buffer>) -> Status {
        self.one(Request::with_buffers(op, sector, buffers, 0))
    }
}

fn filled(buffer: Buffer, byte: u8) -> Buffer {
    buffer.write(0, &vec![byte; buffer.len()]);
    buffer
}

#[test]
fn data_come_back_from_shared_memory_and_from_any_other() {
    let bed = Bed::new();
    let client = client(&bed, 1, 64);
    assert_eq!(client.capacity_sectors(), 2048);
    let source = client.buffer_source();
    let mut user = User::new(&client);
    let shared = |byte| filled(source.allocate(8192).unwrap(), byte);
    let own = |byte| filled(Buffer::anonymous(4096).unwrap(), byte);
    assert_eq!(user.data(Op::Write, 8, vec![shared(1)]), Status::Ok);
    // Both kinds in one request: it is copied.
    assert_eq!(
        user.data(Op::Write, 24, vec![own(2), shared(3)]),
        Status::Ok
    );
    let (a, b) = (own(0), shared(0));
    assert_eq!(
        user.data(Op::Read, 8, vec![b.clone(), a.clone()]),
        Status::Ok
    );
    assert_eq!((b.to_vec(), a.to_vec()), (vec![1; 8192], vec![2; 4096]));
    assert_eq!(user.data(Op::Read, 32, vec![b.clone()]), Status::Ok);
    assert_eq!(b.to_vec(), vec![3; 8192]);
    // Beyond the end is refused before it is sent.
    assert_eq!(user.data(Op::Read, 2048, vec![a]), Status::Invalid);
    assert_eq!(client.failure(), None);
}

#[test]
fn flushes_fua_and_ranges_do_what_they_say() {
    let bed = Bed::new();
    let client = client(&bed, 1, 16);
    let mut user = User::new(&client);
    let flushes = || bed.a.flushes.load(Ordering::Relaxed);
    let buffer = filled(Buffer::anonymous(4096).unwrap(), 7);
    assert_eq!(user.one(Request::new(Op::Flush, 0, 0, 0)), Status::Ok);
    assert_eq!(flushes(), 1);
    let mut fua = Request::with_buffers(Op::Write, 0, vec![buffer.clone()], 0);
    fua.flags = RequestFlags::FUA;
    assert_eq!(user.one(fua), Status::Ok);
    assert_eq!(flushes(), 2);
    for op in [Op::Discard, Op::WriteZeroes] {
        assert_eq!(user.data(Op::Write, 0, vec![buffer.clone()]), Status::Ok);
        assert_eq!(user.one(Request::new(op, 0, 8, 0)), Status::Ok);
        let read = filled(Buffer::anonymous(4096).unwrap(), 9);
        assert_eq!(user.data(Op::Read, 0, vec![read.clone()]), Status::Ok);
        assert_eq!(read.to_vec(), vec![0; 4096], "{op:?}");
    }
}

#[test]
fn more_requests_than_entries_wait_their_turn() {
    let bed = Bed::new();
    let client = client(&bed, 2, 8);
    std::thread::scope(|scope| {
        for first in [0u64, 1024] {
            let client = &client;
            scope.spawn(move || {
                let mut user = User::new(client);
                let write = |n: u64| {
                    let buffer = filled(Buffer::anonymous(4096).unwrap(), n as u8);
                    Request::with_buffers(Op::Write, first + 8 * n, vec![buffer], n)
                };
                let done = user.run((0..128).map(write).collect());
                assert!(done.iter().all(|c| c.status == Status::Ok));
                let read = |n: u64| {
                    let buffer = Buffer::anonymous(4096).unwrap();
                    Request::with_buffers(Op::Read, first + 8 * n, vec![buffer], n)
                };
                for c in user.run((0..128).map(read).collect()) {
                    let data = c.request.buffers[0].to_vec();
                    assert_eq!(data, vec![c.request.tag as u8; 4096]);
                }
            });
        }
    });
    // Both rings are free again, and there is no third.
    let device: Arc<dyn BlockDevice> = client.clone();
    let open = || Queue::open(&device, &QueueContext::new(1));
    let (_a, _b) = (open().unwrap(), open().unwrap());
    let e = open().err().expect("a third queue").to_string();
    assert!(e.contains("queues="), "{e}");
}

/// Data that has to be copied waits for memory that somebody else has.
#[test]
fn without_shared_memory_a_copy_waits() {
    let bed = Bed::new();
    let client = client(&bed, 1, 16);
    let source = client.buffer_source();
    let all = source.allocate(4 << 20).unwrap();
    let mut user = User::new(&client);
    let freed = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        source.free(all);
    });
    let buffer = filled(Buffer::anonymous(4096).unwrap(), 1);
    assert_eq!(user.data(Op::Write, 0, vec![buffer]), Status::Ok);
    freed.join().unwrap();
}

#[test]
fn a_server_that_goes_away_ends_everything_with_errors() {
    let bed = Bed::new();
    let client = client(&bed, 1, 16);
    let mut user = User::new(&client);
    bed.a.hold.store(true, Ordering::Release);
    let buffer = Buffer::anonymous(4096).unwrap();
    let mut batch = vec![Request::with_buffers(Op::Read, 0, vec![buffer.clone()], 5)];
    user.queue.submit(&mut batch);
    wait("the disk has it", || {
        bed.a.held.load(Ordering::Acquire) == 1
    });
    let Bed { server, a, .. } = bed;
    let end = std::thread::spawn(move || drop(server));
    std::thread::sleep(Duration::from_millis(50));
    // An orderly end waits for what is in flight.
    assert_eq!(client.failure(), None);
    a.hold.store(false, Ordering::Release);
    let done = user.collect(1);
    assert_eq!((done[0].request.tag, done[0].status), (5, Status::Ok));
    end.join().unwrap();
    wait("it is noticed", || client.failure().is_some());
    assert_eq!(user.data(Op::Read, 0, vec![buffer]), Status::IoError);
    let why = client.failure().unwrap();
    assert!(why.contains("gone"), "{why}");
}

/// More rings' worth of requests than fit, so that used and available indices of the last server matter to the next one.
#[test]
fn a_patient_client_goes_on_with_the_next_server() {
    let mut bed = Bed::new();
    let config = VhostClientConfig {
        patience: Some(WAIT),
        ..config(2, 8)
    };
    let client = Arc::new(VhostClient::connect(&bed.path("a"), &config).unwrap());
    let mut user = User::new(&client);
    for round in 0..3u8 {
        let write = |n: u64| {
            let buffer = filled(Buffer::anonymous(4096).unwrap(), round);
            Request::with_buffers(Op::Write, 8 * n, vec![buffer], n)
        };
        let done = user.run((0..19).map(write).collect());
        assert!(done.iter().all(|c| c.status == Status::Ok));
        bed = match round {
            // What is submitted while nobody is there waits.
            1 => {
                let Bed { server, .. } = &mut bed;
                server.stop();
                user.queue.submit(&mut (0..5).map(write).collect());
                let next = bed.after();
                assert_eq!(user.collect(5).len(), 5);
                next
            }
            _ => bed.after(),
        };
    }
    let buffer = filled(Buffer::anonymous(4096).unwrap(), 9);
    assert_eq!(user.data(Op::Write, 0, vec![buffer.clone()]), Status::Ok);
    assert_eq!(user.data(Op::Read, 0, vec![buffer.clone()]), Status::Ok);
    assert_eq!(buffer.to_vec(), vec![9; 4096]);
    client.refresh().unwrap();
    assert_eq!(client.failure(), None);
    // Nobody comes any more: that is the end, after the client's patience.
    drop(client);
}

#[test]
fn another_size_is_seen_when_asked_for_and_clients_come_one_after_the_other() {
    let bed = Bed::new();
    let first = client(&bed, 1, 16);
    bed.a.resize(4096);
    first.refresh().unwrap();
    assert_eq!(first.capacity_sectors(), 4096);
    drop(first);
    for _ in 0..3 {
        let next = client(&bed, 4, 64);
        assert_eq!(next.capacity_sectors(), 4096);
        let mut user = User::new(&next);
        assert_eq!(user.one(Request::new(Op::Flush, 0, 0, 0)), Status::Ok);
    }
    let e = VhostClient::connect(&bed.path("a"), &config(5, 16)).err();
    assert!(e.expect("too many").to_string().contains("has 4"));
}
