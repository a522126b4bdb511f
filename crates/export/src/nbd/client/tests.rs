use super::*;
use crate::nbd::testing::{MemDevice, Rig, Rng};
use crate::nbd::{Deliver, ExportInfo, ExportTable, NbdConfig, NbdServer};
use pvblk_backend::{Backend, BackendOptions, Disk, RequestSource};
use pvblk_block::trace::Tracing;
use pvblk_block::{Buffer, Completion, Op, Queue, Request, RequestFlags, Status};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{chunk, last_chunk, simple_reply, tflag, transmission_flags};
use std::io::{Read, Write};
use std::time::Instant;

fn terms(device: &MemDevice, structured: bool) -> Terms {
    let (min_block, preferred_block, max_block) = proto::block_sizes(&device.limits);
    Terms {
        size_bytes: device.capacity_sectors() * SECTOR,
        flags: transmission_flags(&device.limits, structured),
        structured,
        min_block,
        preferred_block,
        max_block,
    }
}

/// A client that has a negotiated connection already.
fn client(socket: OwnedFd, terms: Terms) -> Arc<NbdClient> {
    Arc::new(NbdClient {
        uri: "nbd+unix:///disk?socket=/nowhere".parse().unwrap(),
        config: NbdClientConfig::default(),
        terms,
        shared: Arc::default(),
        first: Mutex::new(Some(socket)),
    })
}

fn queue(client: &Arc<NbdClient>) -> Queue {
    let device: Arc<dyn BlockDevice> = Arc::clone(client) as _;
    Queue::open(&device, &QueueContext::new(16)).unwrap()
}

/// A client and our server's source on one thread; the terms may differ from the device's.
fn with_rig(device: &Arc<MemDevice>, terms: Terms) -> (Rig, Arc<NbdClient>, Queue) {
    let mut rig = Rig::new(device, terms.structured, &NbdConfig::default());
    let socket = rig.client.take().unwrap();
    let client = client(socket.into(), terms);
    let queue = queue(&client);
    (rig, client, queue)
}

/// Steps both sides until everything is answered.
fn finish(rig: &mut Rig, queue: &mut Queue) -> Vec<Completion> {
    let mut done = Vec::new();
    let start = Instant::now();
    while queue.in_flight() > 0 {
        queue.arm();
        queue.poll(&mut done);
        rig.step();
        assert!(start.elapsed().as_secs() < 60, "requests are stuck");
    }
    done
}

/// Random requests that don't overlap, against what the device must hold.
fn oracle(structured: bool) {
    let mut rng = Rng::from_env(0x0a11_ce5e);
    let device = MemDevice::sized(1 << 20);
    let (mut rig, client, mut queue) = with_rig(&device, terms(&device, structured));
    let mut oracle = vec![0u8; 1 << 20];
    for _ in 0..200 {
        let (mut at, mut batch, mut reads) = (0, Vec::new(), Vec::new());
        while at < 2048 && batch.len() < 16 {
            let sectors = (1 + rng.power(9)).min(2048 - at);
            let len = sectors as usize * 512;
            let buffer = Buffer::anonymous(len).unwrap();
            let cut = rng.below(sectors) as usize * 512;
            let buffers = [buffer.slice(0, cut), buffer.slice(cut, len - cut)];
            let buffers = buffers.into_iter().flatten().filter(|b| !b.is_empty());
            let bytes = at as usize * 512..at as usize * 512 + len;
            let mut request = match rng.below(10) {
                0..4 => {
                    let data: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
                    buffer.write(0, &data);
                    oracle[bytes].copy_from_slice(&data);
                    Request::with_buffers(Op::Write, at, buffers.collect(), at)
                }
                4..8 => {
                    reads.push((buffer.clone(), bytes));
                    Request::with_buffers(Op::Read, at, buffers.collect(), at)
                }
                8 => {
                    oracle[bytes].fill(0);
                    Request::new(Op::WriteZeroes, at, sectors, at)
                }
                _ => Request::new(Op::Flush, 0, 0, at),
            };
            if request.op.is_write() && rng.below(4) == 0 {
                request.flags = RequestFlags::FUA;
            }
            batch.push(request);
            at += sectors;
        }
        queue.submit(&mut batch);
        let done = finish(&mut rig, &mut queue);
        assert!(done.iter().all(|c| c.status == Status::Ok));
        for (buffer, bytes) in reads {
            assert!(buffer.to_vec() == oracle[bytes]);
        }
    }
    assert_eq!(client.failure(), None);
    assert!(*device.data.lock() == oracle);
}

#[test]
fn data_survives_with_structured_replies() {
    oracle(true);
}

#[test]
fn data_survives_with_simple_replies() {
    oracle(false);
}

#[test]
fn errors_come_back_to_their_requests() {
    for structured in [true, false] {
        let device = MemDevice::sized(1 << 20);
        let (mut rig, client, mut queue) = with_rig(&device, terms(&device, structured));
        device.fail_at.store(8, Ordering::Relaxed);
        let data = Buffer::anonymous(8192).unwrap();
        let mut batch: Vec<_> = (0..4)
            .map(|i| {
                let op = if i < 2 { Op::Read } else { Op::Write };
                let b = data.slice(0, 4096).unwrap();
                Request::with_buffers(op, i % 2 * 8, vec![b], i)
            })
            .collect();
        queue.submit(&mut batch);
        for c in finish(&mut rig, &mut queue) {
            let want = match c.request.sector {
                8 => Status::IoError,
                _ => Status::Ok,
            };
            assert_eq!(c.status, want);
        }
        assert_eq!(client.failure(), None, "the connection goes on");
    }
}

#[test]
fn what_the_server_lacks_is_made_up_for() {
    let device = MemDevice::sized(1 << 20);
    let mut poor = terms(&device, true);
    poor.flags &= !tflag::SEND_FUA;
    let (mut rig, _, mut queue) = with_rig(&device, poor);
    let mut request = Request::new(Op::WriteZeroes, 0, 8, 0);
    request.flags = RequestFlags::FUA;
    queue.submit(&mut vec![request]);
    assert_eq!(finish(&mut rig, &mut queue)[0].status, Status::Ok);
    let ops: Vec<Op> = device.log.lock().drain(..).map(|l| l.0).collect();
    assert_eq!(ops, [Op::WriteZeroes, Op::Flush]);
    // Without FLUSH nothing is volatile, and a flush has nothing to do.
    poor.flags &= !tflag::SEND_FLUSH;
    let (mut rig, client, mut queue) = with_rig(&device, poor);
    assert!(!client.limits().volatile_cache);
    queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 0)]);
    assert_eq!(finish(&mut rig, &mut queue)[0].status, Status::Ok);
    assert!(device.log.lock().is_empty());
}

#[test]
fn a_second_connection_needs_a_server_that_can() {
    let device = MemDevice::sized(1 << 20);
    let mut alone = terms(&device, true);
    alone.flags &= !tflag::CAN_MULTI_CONN;
    let (_rig, client, _queue) = with_rig(&device, alone);
    let device: Arc<dyn BlockDevice> = client;
    let e = Queue::open(&device, &QueueContext::new(1)).err().unwrap();
    assert!(e.to_string().contains("CAN_MULTI_CONN"), "{e}");
}

/// The chunk of a read's data.
fn data(cookie: u64, offset: u64, len: usize, last: bool) -> Vec<u8> {
    let mut b = last_chunk(chunk::OFFSET_DATA, cookie, 8 + len as u32).to_vec();
    b[5] = u8::from(last);
    b.extend(offset.to_be_bytes());
    b.extend(vec![7; len]);
    b
}

fn hole(cookie: u64, offset: u64, len: u32, last: bool) -> Vec<u8> {
    let mut b = last_chunk(chunk::OFFSET_HOLE, cookie, 12).to_vec();
    b[5] = u8::from(last);
    b.extend(offset.to_be_bytes());
    b.extend(len.to_be_bytes());
    b
}

/// What comes of a read of 4 KiB at byte 4096 that is answered with `answer(cookie)`, in pieces of `piece` bytes.
fn answered(
    structured: bool,
    piece: usize,
    answer: impl Fn(u64) -> Vec<u8>,
) -> (Status, Option<String>, Vec<u8>) {
    let (mut server, socket) = UnixStream::pair().unwrap();
    let device = MemDevice::sized(1 << 20);
    let client = client(socket.into(), terms(&device, structured));
    let mut queue = queue(&client);
    let buffer = Buffer::anonymous(4096).unwrap();
    buffer.write(0, &[1; 4096]);
    queue.submit(&mut vec![Request::with_buffers(
        Op::Read,
        8,
        vec![buffer.clone()],
        0,
    )]);
    let mut request = [0; 28];
    server.read_exact(&mut request).unwrap();
    let cookie = proto::u64_at(&request, 8);
    let mut done = Vec::new();
    for piece in answer(cookie).chunks(piece) {
        // A client that found a mistake may have hung up already.
        let _ = server.write_all(piece);
        queue.poll(&mut done);
        if !done.is_empty() {
            break; // nobody reads what comes after
        }
    }
    drop(server);
    let start = Instant::now();
    while done.is_empty() {
        queue.poll(&mut done);
        assert!(start.elapsed().as_secs() < 60, "the read is stuck");
    }
    (done[0].status, client.failure(), buffer.to_vec())
}

#[test]
fn answers_in_any_pieces_are_put_together() {
    for piece in [1, 7, 100, 5000] {
        let (status, failure, got) = answered(true, piece, |c| {
            let mut b = data(c, 6144, 2048, false);
            b.extend(hole(c, 4096, 1024, false));
            b.extend(data(c, 5120, 1024, false));
            b.extend(last_chunk(chunk::NONE, c, 0));
            b
        });
        assert_eq!((status, failure), (Status::Ok, None));
        assert!(got[..1024].iter().all(|&b| b == 0) && got[1024..].iter().all(|&b| b == 7));
        let (status, failure, got) = answered(false, piece, |c| {
            let mut b = simple_reply(c, 0).to_vec();
            b.extend([9; 4096]);
            b
        });
        assert_eq!((status, failure), (Status::Ok, None));
        assert!(got.iter().all(|&b| b == 9));
        let (status, failure, _) = answered(true, piece, |c| {
            let mut b = last_chunk(chunk::ERROR, c, 8).to_vec();
            b.extend([0, 0, 0, 28, 0, 2, b'n', b'o']);
            b
        });
        assert_eq!((status, failure), (Status::NoSpace, None));
    }
}

#[test]
fn an_answer_that_makes_no_sense_ends_the_connection() {
    type Answer = Box<dyn Fn(u64) -> Vec<u8>>;
    let cases: Vec<(bool, &str, Answer)> = vec![
        (true, "hung up", Box::new(|_| Vec::new())),
        (true, "starts with 0x01010101", Box::new(|_| vec![1; 20])),
        (
            true,
            "not in flight",
            Box::new(|c| data(c + 1, 4096, 4096, true)),
        ),
        (
            true,
            "not in flight",
            Box::new(|c| data(c + (1 << 32), 4096, 4096, true)),
        ),
        (
            true,
            "a simple reply to a read",
            Box::new(|c| simple_reply(c, 0).to_vec()),
        ),
        (
            false,
            "was not negotiated",
            Box::new(|c| data(c, 4096, 4096, true)),
        ),
        (
            true,
            "didn't ask for",
            Box::new(|c| data(c, 4095, 16, true)),
        ),
        (
            true,
            "didn't ask for",
            Box::new(|c| data(c, 8000, 4096, true)),
        ),
        (true, "didn't ask for", Box::new(|c| hole(c, 4096, 0, true))),
        (
            true,
            "didn't ask for",
            Box::new(|c| hole(c, u64::MAX, u32::MAX, true)),
        ),
        (
            true,
            "type 1 with 8 bytes",
            Box::new(|c| data(c, 4096, 0, true)),
        ),
        (
            true,
            "type 1 with 4105 bytes",
            Box::new(|c| data(c, 4096, 4097, true)),
        ),
        (
            true,
            "has already",
            Box::new(|c| [data(c, 4096, 16, false), data(c, 4100, 16, true)].concat()),
        ),
        (
            true,
            "without all of its data",
            Box::new(|c| data(c, 4096, 4095, true)),
        ),
        (
            true,
            "without all of its data",
            Box::new(|c| last_chunk(0, c, 0).to_vec()),
        ),
        (
            true,
            "not the last",
            Box::new(|c| {
                let mut b = last_chunk(0, c, 0);
                b[5] = 0;
                b.to_vec()
            }),
        ),
        (
            true,
            "type 5",
            Box::new(|c| last_chunk(chunk::BLOCK_STATUS, c, 12).to_vec()),
        ),
        (
            true,
            "without an error",
            Box::new(|c| {
                let mut b = last_chunk(chunk::ERROR, c, 6).to_vec();
                b.extend([0; 6]);
                b
            }),
        ),
    ];
    for (structured, says, answer) in cases {
        let (status, failure, _) = answered(structured, 4096, answer);
        assert_eq!(status, Status::IoError, "{says}");
        let why = failure.unwrap_or_default();
        assert!(why.contains(says), "{says}: {why}");
    }
}

/// Whatever bytes come, the read ends, and nothing panics.
#[test]
fn random_bytes_do_no_harm() {
    let mut rng = Rng::from_env(0x0bad_b17e);
    for _ in 0..500 {
        let structured = rng.below(2) == 0;
        let plan: Vec<(u64, u64, u64)> = (0..4)
            .map(|_| (rng.below(6), rng.power(14), rng.power(13)))
            .collect();
        let (status, failure, _) = answered(structured, 1 + rng.below(64) as usize, |c| {
            let mut b = Vec::new();
            for &(kind, at, len) in &plan {
                match kind {
                    0 => b.extend(data(c, at, len as usize, len % 2 == 0)),
                    1 => b.extend(hole(c, at, len as u32, at % 2 == 0)),
                    2 => b.extend(simple_reply(c, at as u32 % 3)),
                    3 => b.extend(last_chunk(at as u16, c, len as u32)),
                    4 => b.extend(at.to_be_bytes()),
                    _ => b.extend(data(c, 4096, 4096, true)),
                }
            }
            b
        });
        assert!(failure.is_some() || status != Status::Invalid || !structured);
    }
}

struct One(Arc<MemDevice>);

impl ExportTable for One {
    fn list(&self) -> Vec<ExportInfo> {
        Vec::new()
    }
    fn open(&self, name: &str) -> Option<Arc<dyn BlockDevice>> {
        (name == "disk").then(|| Arc::clone(&self.0) as _)
    }
}

#[test]
fn a_real_server_serves_several_queues_that_sleep() {
    let device = MemDevice::sized(8 << 20);
    let options = BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    };
    let backend = Backend::start(&options).unwrap();
    let disk = Disk::new("disk", Arc::clone(&device) as _, Tracing::off());
    let deliver: Arc<Deliver> = Arc::new(move |_: &str, source: Box<dyn RequestSource>| {
        backend.attach(&disk, source, Box::new(|_| {})).unwrap();
    });
    let exports = Arc::new(One(Arc::clone(&device)));
    let path = std::env::temp_dir().join(format!("pvblk-nbd-{}-client", std::process::id()));
    for addr in [format!("unix:{}", path.display()), "tcp:127.0.0.1:0".into()] {
        let server = NbdServer::bind(
            &addr.parse().unwrap(),
            NbdConfig::default(),
            exports.clone(),
            Arc::clone(&deliver),
        )
        .unwrap();
        let uri = |export: &str| NbdUri {
            addr: server.local_addr(),
            export: export.into(),
        };
        let e = NbdClient::connect(&uri("other"), NbdClientConfig::default()).err();
        assert!(e.unwrap().to_string().contains("no such export"));
        let client = NbdClient::connect(&uri("disk"), NbdClientConfig::default()).unwrap();
        assert_eq!(client.capacity_sectors(), (8 << 20) / 512);
        let shared: Arc<dyn BlockDevice> = Arc::new(client);
        let mut queues: Vec<Queue> = (0..3).map(|_| open_queue(&shared)).collect();
        // More than a socket holds, so that it fills up and both sides wait.
        let data = Buffer::anonymous(1 << 20).unwrap();
        for op in [Op::Write, Op::Read] {
            for queue in &mut queues {
                let mut batch: Vec<_> = (0..8)
                    .map(|i| Request::with_buffers(op, i * 2048, vec![data.clone()], i))
                    .collect();
                queue.submit(&mut batch);
            }
            for queue in &mut queues {
                let done = sleep_until_done(queue);
                assert!(done.iter().all(|c| c.status == Status::Ok));
            }
        }
    }
}

fn open_queue(device: &Arc<dyn BlockDevice>) -> Queue {
    Queue::open(device, &QueueContext::new(8)).unwrap()
}

fn sleep_until_done(queue: &mut Queue) -> Vec<Completion> {
    let poller = pvblk_sys::Poller::new().unwrap();
    poller.add(queue.wait_fd().unwrap(), 0, false).unwrap();
    let (mut done, mut events) = (Vec::new(), Vec::new());
    while queue.in_flight() > 0 {
        if queue.poll(&mut done) == 0 && matches!(queue.arm(), pvblk_block::Readiness::Wait(_)) {
            events.clear();
            let patience = std::time::Duration::from_secs(20);
            poller.wait(&mut events, Some(patience)).unwrap();
            assert!(!events.is_empty(), "nobody wakes the queue");
            queue.woken();
        }
    }
    done
}
