//! The NBD client of [`pvblk_client`] against our own server.

use super::testing::{MODES, MemDevice, Rig, Rng, service_of};
use super::{NbdConfig, NbdServer};
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Request, RequestFlags, SECTOR, Status,
};
use pvblk_client::nbd::{NbdClient, NbdClientConfig, NbdUri, Terms};
use pvblk_protocol::nbd::{self as proto, Mode, tflag, transmission_flags};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

fn terms(device: &MemDevice, mode: Mode) -> Terms {
    let (min_block, preferred_block, max_block) = proto::block_sizes(&device.limits);
    Terms {
        size_bytes: device.capacity_sectors() * SECTOR,
        flags: transmission_flags(&device.limits, mode),
        mode,
        min_block,
        preferred_block,
        max_block,
    }
}

fn queue(client: &Arc<NbdClient>) -> Queue {
    let device: Arc<dyn BlockDevice> = Arc::clone(client) as _;
    Queue::open(&device, &QueueContext::new(16)).unwrap()
}

/// A client and our server's source on one thread; the terms may differ from the device's.
fn with_rig(device: &Arc<MemDevice>, terms: Terms) -> (Rig, Arc<NbdClient>, Queue) {
    let mut rig = Rig::new(device, terms.mode, &NbdConfig::default());
    let socket = rig.client.take().unwrap();
    let client = Arc::new(NbdClient::agreed(socket.into(), terms));
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
fn oracle(mode: Mode) {
    let mut rng = Rng::from_env(0x0a11_ce5e);
    let device = MemDevice::sized(1 << 20);
    let (mut rig, client, mut queue) = with_rig(&device, terms(&device, mode));
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
    oracle(Mode::Structured);
}

#[test]
fn data_survives_with_simple_replies() {
    oracle(Mode::Simple);
}

#[test]
fn data_survives_with_extended_headers() {
    oracle(Mode::Extended);
}

#[test]
fn errors_come_back_to_their_requests() {
    for mode in MODES {
        let device = MemDevice::sized(1 << 20);
        let (mut rig, client, mut queue) = with_rig(&device, terms(&device, mode));
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
    let mut poor = terms(&device, Mode::Structured);
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
    let mut alone = terms(&device, Mode::Structured);
    alone.flags &= !tflag::CAN_MULTI_CONN;
    let (_rig, client, _queue) = with_rig(&device, alone);
    let device: Arc<dyn BlockDevice> = client;
    let e = Queue::open(&device, &QueueContext::new(1)).err().unwrap();
    assert!(e.to_string().contains("CAN_MULTI_CONN"), "{e}");
}

#[test]
fn a_real_server_serves_several_queues_that_sleep() {
    let device = MemDevice::sized(8 << 20);
    let service = service_of(&device);
    let path = std::env::temp_dir().join(format!("pvblk-nbd-{}-client", std::process::id()));
    for addr in [format!("unix:{}", path.display()), "tcp:127.0.0.1:0".into()] {
        let server =
            NbdServer::bind(&addr.parse().unwrap(), NbdConfig::default(), &service).unwrap();
        let uri = |export: &str| NbdUri::new(server.local_addr(), export);
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
