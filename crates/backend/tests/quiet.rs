//! A worker without work does nothing: a notification, a hang-up or a passed deadline must not wake it again
//! and again.

mod support;

use pvblk_backend::{Backend, BackendOptions, Disk, Pulled, RequestSource, SourceEnd};
use pvblk_block::trace::Tracing;
use pvblk_block::{Completion, Op, Readiness, Request, Status};
use pvblk_testing::wait;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::device::Device;

/// A socket source that has one write to do, sees its client hang up, and counts how often it is bothered.
struct HungUp {
    socket: UnixStream,
    first: bool,
    bothered: Arc<AtomicU64>,
    rested: Arc<AtomicU64>,
}

impl RequestSource for HungUp {
    fn describe(&self) -> String {
        "hung up".into()
    }
    fn depth(&self) -> u32 {
        1
    }
    fn pull(&mut self, _: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        if std::mem::take(&mut self.first) {
            out.push(Request::new(Op::Flush, 0, 0, 7));
        }
        Ok(Pulled::default())
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

fn rig() -> (Arc<Device>, Backend, Disk) {
    let device = Arc::new(Device::default());
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        spin_max: Duration::ZERO,
        pin: Vec::new(),
    })
    .unwrap();
    let disk = Disk::new("d", device.clone(), Tracing::off());
    (device, backend, disk)
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
    let (device, backend, disk) = rig();
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let bothered = Arc::new(AtomicU64::new(0));
    let rested = Arc::new(AtomicU64::new(0));
    let source = HungUp {
        socket: ours,
        first: true,
        bothered: bothered.clone(),
        rested: rested.clone(),
    };
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
