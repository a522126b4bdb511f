//! A front end whose back end goes away and comes back: requests that wait, back ends that are
//! refused, losses that are told.

use pvblk_backend::{Backend, BackendOptions, BlkifQueueParts, BlkifSource, Disk};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Request, Status,
};
use pvblk_client::rings::{FrontParts, Frontend};
use pvblk_lab::loopback::{Loopback, LoopbackMemory};
use pvblk_protocol::blkif::wire::{self, Entry};
use pvblk_sys::Poller;
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Rig {
    volume: Arc<dyn BlockDevice>,
    wiring: Loopback,
    memory: LoopbackMemory,
    front: Arc<Frontend>,
    device: Arc<dyn BlockDevice>,
    /// The parts of the connection's back end, until it is served.
    back: Vec<BlkifQueueParts>,
}

impl Rig {
    fn new(wiring: Loopback) -> Rig {
        let volume = pvblk_volume::open("mem:4M").unwrap();
        let memory = wiring.memory().unwrap();
        let (parts, back) = wiring.wire_on(&memory, volume.as_ref()).unwrap();
        let front = Frontend::new(parts).unwrap();
        Rig {
            device: front.clone(),
            volume,
            wiring,
            memory,
            front,
            back,
        }
    }

    fn queue(&self, index: u32) -> Queue {
        let mut context = QueueContext::new(256);
        context.index = index;
        Queue::open(&self.device, &context).unwrap()
    }

    /// The back end of this connection dies, and another one offers `wiring`.
    fn next(&mut self, wiring: Loopback) -> FrontParts {
        self.front.suspend();
        self.back.clear();
        let (parts, back) = wiring.wire_on(&self.memory, self.volume.as_ref()).unwrap();
        self.back = back;
        parts
    }

    fn serve(&mut self) -> Backend {
        let backend = Backend::start(&BackendOptions::default()).unwrap();
        let disk = Disk::new("t", Arc::clone(&self.volume), Tracing::off());
        for parts in self.back.drain(..) {
            let source = Box::new(BlkifSource::new(parts));
            backend.attach(&disk, source, Box::new(|_| {})).unwrap();
        }
        backend
    }
}

/// Polls as a submitter does that sleeps when told to.
fn wait_all(queue: &mut Queue) -> Vec<Completion> {
    let poller = Poller::new().unwrap();
    poller.add(queue.wait_fd().unwrap(), 0, false).unwrap();
    let (mut out, mut events) = (Vec::new(), Vec::new());
    let end = Instant::now() + Duration::from_secs(60);
    while queue.in_flight() > 0 {
        if queue.poll(&mut out) > 0 {
            continue;
        }
        if queue.arm() == Readiness::Ready {
            continue;
        }
        let left = end.saturating_duration_since(Instant::now());
        poller.wait(&mut events, Some(left)).unwrap();
        assert!(Instant::now() < end, "requests are stuck");
        queue.woken();
    }
    out
}

fn block(byte: u8) -> Buffer {
    let b = Buffer::anonymous(4096).unwrap();
    b.write(0, &[byte; 4096]);
    b
}

fn write(sector: u64, byte: u8) -> Box<Request> {
    Request::with_buffers(Op::Write, sector, vec![block(byte)], sector)
}

fn read_byte(queue: &mut Queue, sector: u64) -> u8 {
    let b = block(0xee);
    queue.submit(&mut vec![Request::with_buffers(
        Op::Read,
        sector,
        vec![b.clone()],
        0,
    )]);
    assert_eq!(wait_all(queue)[0].status, Status::Ok);
    let bytes = b.to_vec();
    assert!(bytes.iter().all(|&x| x == bytes[0]), "a torn block");
    bytes[0]
}

fn flush(queue: &mut Queue) -> Status {
    queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 0)]);
    wait_all(queue)[0].status
}

#[test]
fn what_waits_goes_to_the_next_back_end_on_fewer_and_smaller_rings() {
    let many = Loopback {
        queues: 4,
        ring_pages: 4,
        ..Loopback::default()
    };
    let mut rig = Rig::new(many);
    let mut queues: Vec<Queue> = (0..4).map(|i| rig.queue(i)).collect();
    // Requests are on the rings, in the backlog behind them, and (after the loss) submitted before
    // there is a connection.
    for (i, q) in (0u64..).zip(&mut queues) {
        q.submit(&mut (0..200).map(|n| write(i * 2048 + n * 8, n as u8)).collect());
    }
    let one = Loopback {
        queues: 1,
        ring_pages: 1,
        ..many
    };
    let parts = rig.next(one);
    assert!(!rig.front.is_connected());
    for (i, q) in (0u64..).zip(&mut queues) {
        assert_eq!(q.arm(), Readiness::Ready, "it hasn't looked since");
        q.submit(
            &mut (200..256)
                .map(|n| write(i * 2048 + n * 8, n as u8))
                .collect(),
        );
        assert_eq!(q.poll(&mut Vec::new()), 0);
        assert_eq!(q.arm(), Readiness::Wait(None));
    }
    let sleepers: Vec<_> = queues
        .into_iter()
        .map(|mut q| std::thread::spawn(move || (wait_all(&mut q), q)))
        .collect();
    rig.front.reconnect(parts).unwrap();
    let _backend = rig.serve();
    assert_eq!((rig.front.queues(), rig.front.ring_entries()), (1, 32));
    for (i, sleeper) in (0u64..).zip(sleepers) {
        let (done, mut q) = sleeper.join().unwrap();
        assert_eq!(done.len(), 256);
        assert!(done.iter().all(|c| c.status == Status::Ok));
        for n in [0, 99, 199, 200, 255] {
            assert_eq!(read_byte(&mut q, i * 2048 + n * 8), n as u8);
        }
    }
}

#[test]
fn a_lost_cache_fails_one_flush_of_each_queue_and_no_more() {
    let mut rig = Rig::new(Loopback::default());
    let (mut a, mut b) = (rig.queue(0), rig.queue(1));
    let backend = rig.serve();
    a.submit(&mut vec![write(0, 1)]);
    assert_eq!(wait_all(&mut a)[0].status, Status::Ok);
    let again = |rig: &mut Rig, mark: Option<u64>| {
        let mut parts = rig.next(rig.wiring);
        parts.properties.cache_mark = mark;
        rig.front.reconnect(parts).unwrap();
        rig.serve()
    };
    drop(backend);
    let mark = rig.volume.incarnation().cache;
    // The same kernel comes back: nothing is lost, though nothing was flushed.
    let backend = again(&mut rig, mark);
    assert_eq!(flush(&mut a), Status::Ok);
    drop(backend);
    // Another kernel comes, after everything was flushed.
    let backend = again(&mut rig, Some(1));
    assert_eq!((flush(&mut a), flush(&mut b)), (Status::Ok, Status::Ok));
    b.submit(&mut vec![write(8, 2)]);
    assert_eq!(wait_all(&mut b)[0].status, Status::Ok);
    drop(backend);
    // The cache was kept once and then lost: the write is still not covered.
    let backend = again(&mut rig, Some(1));
    drop(backend);
    let backend = again(&mut rig, Some(2));
    for q in [&mut a, &mut b] {
        assert_eq!(flush(q), Status::IoError);
        assert_eq!(flush(q), Status::Ok);
    }
    a.submit(&mut vec![write(0, 3)]);
    wait_all(&mut a);
    drop(backend);
    // This back end tells no incarnation.
    let _backend = again(&mut rig, None);
    assert_eq!(flush(&mut a), Status::IoError);
    let mut late = rig.queue(0);
    assert_eq!(flush(&mut late), Status::Ok, "it never wrote anything");
}

/// A flush covers the writes of former front ends too, whose unflushed data may be lost.
#[test]
fn a_new_front_end_does_not_vouch_for_what_it_found() {
    let mut rig = Rig::new(Loopback::default());
    let mut q = rig.queue(0);
    let again = |rig: &mut Rig, mark| {
        let mut parts = rig.next(rig.wiring);
        parts.properties.cache_mark = Some(mark);
        rig.front.reconnect(parts).unwrap();
        rig.serve()
    };
    let backend = again(&mut rig, 1);
    assert_eq!(flush(&mut q), Status::IoError);
    assert_eq!(flush(&mut q), Status::Ok);
    drop(backend);
    let _backend = again(&mut rig, 2);
    assert_eq!(flush(&mut q), Status::Ok, "all was flushed before");
}

/// A back end that tells no incarnation may have kept the cache, and may lose it the next time.
#[test]
fn a_write_stays_uncovered_after_a_loss_that_may_not_have_been_one() {
    let mut rig = Rig::new(Loopback::default());
    let (mut a, mut b) = (rig.queue(0), rig.queue(1));
    let backend = rig.serve();
    // The flush completes on this connection, but covers no write that completed later.
    a.submit(&mut vec![Request::new(Op::Flush, 0, 0, 0)]);
    b.submit(&mut vec![write(0, 1)]);
    assert_eq!(wait_all(&mut b)[0].status, Status::Ok);
    drop(backend);
    let untold = |rig: &mut Rig| {
        let mut parts = rig.next(rig.wiring);
        parts.properties.cache_mark = None;
        rig.front.reconnect(parts).unwrap();
    };
    untold(&mut rig);
    assert_eq!(wait_all(&mut a)[0].status, Status::IoError);
    untold(&mut rig);
    let _backend = rig.serve();
    assert_eq!(flush(&mut a), Status::IoError);
    assert_eq!(flush(&mut a), Status::Ok);
}

/// A submitter of several flushes believes each of them that was submitted before the first one
/// failed.
#[test]
fn no_flush_that_was_submitted_before_the_loss_is_told_succeeds() {
    let mut rig = Rig::new(Loopback::default());
    let mut q = rig.queue(0);
    let backend = rig.serve();
    q.submit(&mut vec![write(0, 1)]);
    assert_eq!(wait_all(&mut q)[0].status, Status::Ok);
    drop(backend);
    let flushes = || (0..3).map(|_| Request::new(Op::Flush, 0, 0, 0)).collect();
    q.submit(&mut flushes()); // to be replayed
    let mut parts = rig.next(rig.wiring);
    parts.properties.cache_mark = Some(1);
    rig.front.reconnect(parts).unwrap();
    q.submit(&mut flushes());
    let _backend = rig.serve();
    let done = wait_all(&mut q);
    assert_eq!(done.len(), 6);
    assert!(done.iter().all(|c| c.status == Status::IoError), "{done:?}");
    assert_eq!(flush(&mut q), Status::Ok);
}

/// A server that offers fewer queues, or more segments, must not cost the memory or the promises of the one after it.
#[test]
fn a_poorer_or_richer_back_end_leaves_room_for_the_next() {
    let first = Loopback {
        queues: 4,
        data_pages: 512,
        indirect: 32,
        ..Loopback::default()
    };
    let mut rig = Rig::new(first);
    let mut q = rig.queue(0);
    let source = rig.device.buffer_source().unwrap();
    let one = Loopback { queues: 1, ..first };
    let parts = rig.next(one);
    rig.front.reconnect(parts).unwrap();
    // Users take all of the memory that there is.
    let hoard: Vec<_> = std::iter::from_fn(|| source.allocate(4096)).collect();
    for indirect in [256, 32] {
        let parts = rig.next(Loopback { indirect, ..first });
        rig.front.reconnect(parts).unwrap();
        assert_eq!(rig.front.queues(), 4);
    }
    hoard.into_iter().for_each(|b| source.free(b));
    let _backend = rig.serve();
    q.submit(&mut vec![write(0, 1)]);
    assert_eq!(wait_all(&mut q)[0].status, Status::Ok);
}

#[test]
fn a_disk_that_can_do_less_or_lost_all_is_refused_and_asked_again() {
    let mut rig = Rig::new(Loopback::default());
    let mut q = rig.queue(0);
    q.submit(&mut vec![write(0, 7)]);
    type Spoil = fn(&mut FrontParts);
    let spoils: [(Spoil, &str); 5] = [
        (|p| p.properties.contents_mark = Some(1), "lost"),
        (|p| p.properties.sector_size = 4096, "sector-size"),
        (|p| p.properties.read_only = true, "read-only"),
        (|p| p.properties.max_indirect_segments = 32, "segments"),
        (
            |p| (p.properties.flush, p.properties.barrier) = (false, false),
            "flush",
        ),
    ];
    for (spoil, word) in spoils {
        let mut parts = rig.next(rig.wiring);
        spoil(&mut parts);
        let e = rig.front.reconnect(parts).unwrap_err().to_string();
        assert!(e.contains(word), "{e}");
        assert!(!rig.front.is_connected());
    }
    let elsewhere = rig.wiring.wire(rig.volume.as_ref()).unwrap().0;
    assert!(rig.front.reconnect(elsewhere).is_err());
    let mut parts = rig.next(rig.wiring);
    parts.properties.sectors = 1 << 20;
    rig.front.reconnect(parts).unwrap();
    assert_eq!(rig.device.capacity_sectors(), 1 << 20);
    let _backend = rig.serve();
    assert_eq!(wait_all(&mut q)[0].status, Status::Ok);
    assert_eq!(read_byte(&mut q, 0), 7);
}

#[test]
fn a_broken_ring_ends_the_connection_and_nothing_else() {
    let mut rig = Rig::new(Loopback {
        queues: 2,
        ..Loopback::default()
    });
    rig.front.set_recovery(true);
    let (mut a, mut b) = (rig.queue(0), rig.queue(1));
    a.submit(&mut vec![write(0, 1)]);
    b.submit(&mut vec![write(8, 2)]);
    // The response names a request that isn't in flight: the real one has another number.
    let ring = &mut rig.back[0].ring;
    assert!(ring.take(&mut Entry::default()).unwrap());
    ring.respond(7, wire::OP_WRITE, wire::RSP_OKAY);
    ring.publish();
    assert_eq!(a.poll(&mut Vec::new()), 0, "the request waits");
    assert!(rig.front.take_trouble().unwrap().contains("request 7"));
    assert_eq!(rig.front.take_trouble(), None);
    let parts = rig.next(rig.wiring);
    rig.front.reconnect(parts).unwrap();
    let _backend = rig.serve();
    for (q, sector, byte) in [(&mut a, 0, 1), (&mut b, 8, 2)] {
        assert_eq!(wait_all(q)[0].status, Status::Ok);
        assert_eq!(read_byte(q, sector), byte);
    }
}

#[test]
fn what_is_given_up_ends_with_errors_also_while_it_waits() {
    let rig = Rig::new(Loopback::default());
    let mut q = rig.queue(0);
    q.submit(&mut (0..40).map(|n| write(n * 8, 0)).collect());
    rig.front.suspend();
    q.submit(&mut vec![write(0, 0)]);
    let left = {
        let mut other = rig.queue(0);
        other.submit(&mut vec![write(0, 0)]);
        other.in_flight()
    };
    assert_eq!(left, 1, "and it was dropped while it waited");
    rig.front.disconnect("test");
    q.submit(&mut vec![write(8, 0)]);
    let done = wait_all(&mut q);
    assert_eq!(done.len(), 42);
    assert!(done.iter().all(|c| c.status == Status::IoError));
    let parts = rig.wiring.wire_on(&rig.memory, rig.volume.as_ref());
    assert!(rig.front.reconnect(parts.unwrap().0).is_err());
}
