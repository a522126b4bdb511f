//! A worker without work does nothing: a notification, a hang-up or a passed deadline must not wake it again
//! and again.

mod support;

use pvblk_backend::{
    Backend, BackendOptions, Disk, Polled, Pulled, RequestSource, SourceEnd, ThrottleLimits,
};
use pvblk_block::trace::Tracing;
use pvblk_block::{Buffer, Completion, Op, Readiness, Request, RequestFlags, Status};
use pvblk_testing::wait;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::device::Device;

/// A socket source that has as many requests to give as it may have in flight, and counts how often it is bothered.
struct Socket {
    socket: UnixStream,
    depth: u32,
    gives: Vec<Box<Request>>,
    bothered: Arc<AtomicU64>,
    rested: Arc<AtomicU64>,
}

impl RequestSource for Socket {
    fn describe(&self) -> String {
        "socket".into()
    }
    fn depth(&self) -> u32 {
        self.depth
    }
    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        out.extend(self.gives.drain(..room.min(self.gives.len())));
        let mut flags = out.iter().map(|r| r.flags);
        let ordered = flags.any(|f| f.contains(RequestFlags::BARRIER));
        Ok(Pulled {
            ordered,
            ..Pulled::default()
        })
    }
    fn complete(&mut self, done: &mut Vec<Completion>) {
        done.clear();
    }
    fn push(&mut self) -> Result<usize, SourceEnd> {
        self.bothered.fetch_add(1, Ordering::Relaxed);
        Ok(0)
    }
    fn arm(&mut self) -> Readiness {
        Readiness::Wait(None)
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
    fn poll_is_syscall(&self) -> bool {
        true
    }
    fn rest(&mut self) {
        self.rested.fetch_add(1, Ordering::Relaxed);
    }
}

fn rig(spin_max: Duration) -> (Arc<Device>, Backend, Disk) {
    let device = Arc::new(Device::default());
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        spin_max,
        ..BackendOptions::default()
    })
    .unwrap();
    let disk = Disk::new("d", device.clone(), Tracing::off());
    (device, backend, disk)
}

/// A source that gives `requests`, its client's end, and the numbers of times that it was bothered and that it rested.
fn source(requests: Vec<Box<Request>>) -> (Socket, UnixStream, [Arc<AtomicU64>; 2]) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let counters: [Arc<AtomicU64>; 2] = Default::default();
    let source = Socket {
        socket: ours,
        depth: requests.len() as u32,
        gives: requests,
        bothered: counters[0].clone(),
        rested: counters[1].clone(),
    };
    (source, theirs, counters)
}

/// Number of times that `counter` moves in a while. A worker that spins moves it some hundred
/// thousand times.
fn moves(counter: &AtomicU64) -> u64 {
    std::thread::sleep(Duration::from_millis(50));
    let before = counter.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(200));
    counter.load(Ordering::Relaxed) - before
}

#[test]
fn a_hung_up_client_with_a_request_at_a_slow_device_costs_nothing() {
    let (device, backend, disk) = rig(Duration::ZERO);
    let (source, client, [bothered, rested]) = source(vec![Request::new(Op::Flush, 0, 0, 7)]);
    drop(client);
    backend
        .attach(&disk, Box::new(source), Box::new(|_| {}))
        .unwrap();
    wait("the device gets it", || device.held().len() == 1);
    let n = moves(&bothered);
    assert!(n < 1000, "the lane was stepped {n} times while it waited");
    // The source gives memory back that it keeps for reuse, once.
    wait("it rests", || rested.load(Ordering::Relaxed) == 1);
    assert_eq!(moves(&rested), 0);
    device.complete(0, Status::Ok);
}

/// The time at which a limit lets the next request pass is known, so nothing is gained by polling until then.
#[test]
fn a_lane_that_limits_hold_is_not_polled() {
    let (device, backend, disk) = rig(Duration::from_secs(3600));
    // The second one waits for an hour.
    disk.throttle().set("write-bw=1,burst=1ms".parse().unwrap());
    let data = Buffer::anonymous(4096).unwrap();
    let write = |tag| Request::with_buffers(Op::Write, 0, vec![data.clone()], tag);
    let (source, _client, [bothered, rested]) = source((0..4).map(write).collect());
    backend
        .attach(&disk, Box::new(source), Box::new(|_| {}))
        .unwrap();
    let is_held = || disk.throttle().held_back().requests > 0;
    wait("some wait for the limit", is_held);
    wait("the device gets one", || device.held().len() == 1);
    device.complete(0, Status::Ok);
    // A lane that is polled doesn't rest. It rests twice if the completion came late.
    wait("it rests", || rested.load(Ordering::Relaxed) >= 1);
    let n = moves(&bothered);
    assert!(n < 1000, "the lane was stepped {n} times while it was held");
    assert!(is_held());
    disk.throttle().set(ThrottleLimits::default());
}

/// A device that is slow isn't polled; the next request, which a fast client sends at once, is polled for all the same.
#[test]
fn a_slow_device_leaves_polling_for_requests_as_it_is() {
    let longest = Duration::from_millis(4);
    let (device, backend, disk) = rig(longest);
    let (mut source, _client, _) =
        source((0..8).map(|n| Request::new(Op::Flush, 0, 0, n)).collect());
    source.depth = 1;
    backend
        .attach(&disk, Box::new(source), Box::new(|_| {}))
        .unwrap();
    for _ in 0..8 {
        wait("the device gets one", || device.held().len() == 1);
        std::thread::sleep(longest * 2);
        device.complete(0, Status::Ok);
    }
    let chosen = Polled {
        requests: longest / 4,
        device: Duration::ZERO,
    };
    wait("the device isn't polled", || {
        disk.counters().lanes()[0].polled == chosen
    });
}

/// A lane that waits for another one's barrier looks at the gate every 100 µs, whatever it holds.
#[test]
fn a_lane_behind_a_barrier_costs_little() {
    let (device, backend, disk) = rig(Duration::ZERO);
    let mut barrier = Request::new(Op::Flush, 0, 0, 7);
    barrier.flags = RequestFlags::BARRIER;
    let (first, _client, _) = source(vec![barrier]);
    backend
        .attach(&disk, Box::new(first), Box::new(|_| {}))
        .unwrap();
    wait("the barrier is at the device", || device.held().len() == 1);
    let data = Buffer::anonymous(4096).unwrap();
    let write = |tag| Request::with_buffers(Op::Write, 8 * tag, vec![data.clone()], tag);
    let (second, _client, [bothered, _]) = source((0..64).map(write).collect());
    backend
        .attach(&disk, Box::new(second), Box::new(|_| {}))
        .unwrap();
    wait("it looks", || bothered.load(Ordering::Relaxed) > 0);
    let (before, begin) = (bothered.load(Ordering::Relaxed), Instant::now());
    std::thread::sleep(Duration::from_millis(200));
    let looks = u128::from(bothered.load(Ordering::Relaxed) - before);
    let most = begin.elapsed().as_micros() / 100;
    assert!(looks < 3 * most, "{looks} steps, where {most} were enough");
    assert_eq!(device.held().len(), 1);
    device.complete(0, Status::Ok);
    // Its flush, and then the writes.
    wait("the gate is open", || {
        while !device.held().is_empty() {
            device.complete(0, Status::Ok);
        }
        device.seen().len() >= 2 * 65
    });
}
