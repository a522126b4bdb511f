//! The whole path in one process: front end, ring, back end, volume; against an oracle.

use pvblk_backend::{Backend, BackendOptions, BlkifSource, Disk, FixedChoices, Polled};
use pvblk_block::trace::Tracing;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Region, Request,
    RequestFlags, Status,
};
use pvblk_client::rings::{Frontend, Granter};
use pvblk_lab::loopback::Loopback;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

struct Rig {
    device: Arc<dyn BlockDevice>,
    disk: Disk,
    _backend: Backend,
}

fn rig(volume: &str, loopback: Loopback, workers: usize) -> Rig {
    rig_with(volume, loopback, workers, FixedChoices::default())
}

fn rig_with(volume: &str, loopback: Loopback, workers: usize, fixed: FixedChoices) -> Rig {
    let inner = pvblk_volume::open(volume).unwrap();
    let (front, back) = loopback.wire(inner.as_ref()).unwrap();
    let backend = Backend::start(&BackendOptions {
        workers,
        fixed,
        ..BackendOptions::default()
    })
    .unwrap();
    let disk = Disk::new("t", inner, Tracing::off());
    for parts in back {
        backend
            .attach(&disk, Box::new(BlkifSource::new(parts)), Box::new(|_| {}))
            .unwrap();
    }
    Rig {
        device: Frontend::new(front).unwrap(),
        disk,
        _backend: backend,
    }
}

#[test]
fn choices_are_told_and_can_be_fixed() {
    let fixed = FixedChoices {
        spin: Some(Duration::from_micros(70)),
        pull: Some(3),
    };
    for (fixed, micros, pull) in [(fixed, 70, 3), (FixedChoices::default(), 25, 8)] {
        let time = Duration::from_micros(micros);
        let polled = Polled {
            requests: time,
            device: time,
        };
        let expected = (polled, Some(pull));
        let rig = rig_with("mem:2M", Loopback::default(), 1, fixed);
        // The worker may still be about to take the lane.
        let told = || {
            let lane = &rig.disk.counters().lanes()[0];
            (lane.polled, lane.pull)
        };
        let start = std::time::Instant::now();
        while told() != expected && start.elapsed().as_secs() < 60 {
            std::thread::yield_now();
        }
        assert_eq!(told(), expected);
    }
}

fn wait_all(queue: &mut Queue) -> Vec<Completion> {
    let mut out = Vec::new();
    let start = std::time::Instant::now();
    while queue.in_flight() > 0 {
        queue.poll(&mut out);
        assert!(start.elapsed().as_secs() < 60, "requests are stuck");
        std::thread::yield_now();
    }
    out
}

/// Random batches of reads, writes, flushes and discards, never two at a time on one sector.
fn oracle_round(loopback: Loopback, workers: usize, native: bool, rng: &mut fastrand::Rng) {
    const SECTORS: u64 = 4096;
    let rig = rig("mem:2M", loopback, workers);
    let mut oracle = vec![0u8; SECTORS as usize * 512];
    let mut queues: Vec<Queue> = (0..3)
        .map(|i| {
            let mut c = QueueContext::new(64);
            c.index = i;
            Queue::open(&rig.device, &c).unwrap()
        })
        .collect();
    let source = rig.device.buffer_source().unwrap();
    for _ in 0..60 {
        let mut at = 0;
        let mut expect: Vec<(u64, u64)> = Vec::new();
        let mut batches: Vec<Vec<Box<Request>>> = vec![vec![], vec![], vec![]];
        let mut held = Vec::new();
        while at < SECTORS {
            let sectors = rng
                .u64(1..=rig.device.limits().max_sectors as u64)
                .min(SECTORS - at)
                .min(if rng.bool() { 16 } else { 4096 });
            let choice = rng.u32(0..10);
            let q = rng.usize(0..3);
            let tag = at;
            if choice < 8 {
                let len = sectors as usize * 512;
                let (buffers, whole) = if native {
                    let b = source.allocate(len.next_multiple_of(4096)).unwrap();
                    held.push(b.clone());
                    (vec![b.slice(0, len).unwrap()], b)
                } else {
                    // The buffers are odd parts of foreign memory, and must be bounced.
                    let b = Buffer::anonymous(len).unwrap();
                    let cut = rng.usize(0..=sectors as usize) * 512;
                    let parts = [b.slice(0, cut).unwrap(), b.slice(cut, len - cut).unwrap()];
                    (
                        parts.into_iter().filter(|p| !p.is_empty()).collect(),
                        b.clone(),
                    )
                };
                if choice < 4 {
                    let mut data = vec![0u8; len];
                    rng.fill(&mut data);
                    whole.write(0, &data);
                    oracle[at as usize * 512..][..len].copy_from_slice(&data);
                    let mut r = Request::with_buffers(Op::Write, at, buffers, tag);
                    if rng.u32(0..8) == 0 {
                        r.flags = RequestFlags::FUA;
                    }
                    batches[q].push(r);
                } else {
                    batches[q].push(Request::with_buffers(Op::Read, at, buffers, tag));
                    expect.push((at, sectors));
                }
            } else if choice == 8 {
                batches[q].push(Request::new(Op::Flush, 0, 0, u64::MAX));
                continue;
            }
            at += sectors;
        }
        for b in &mut batches {
            rng.shuffle(b);
        }
        for (q, b) in batches.iter_mut().enumerate() {
            queues[q].submit(b);
        }
        let mut reads = 0;
        for q in &mut queues {
            for c in wait_all(q) {
                assert_eq!(c.status, Status::Ok);
                if c.request.op == Op::Read {
                    reads += 1;
                    let mut got = Vec::new();
                    for b in &c.request.buffers {
                        got.extend(b.to_vec());
                    }
                    let from = c.request.sector as usize * 512;
                    assert!(
                        got == oracle[from..from + got.len()],
                        "read at sector {} differs",
                        c.request.sector
                    );
                }
            }
        }
        assert_eq!(reads, expect.len());
        for b in held {
            source.free(b);
        }
    }
}

#[test]
fn data_survives_every_kind_of_ring() {
    let mut rng = pvblk_testing::random();
    for (queues, ring_pages, indirect, persistent, flush, native) in [
        (1, 1, 256, true, true, true),
        (1, 1, 0, false, true, false),
        (2, 8, 256, true, false, true),
        (4, 16, 32, false, true, true),
        (2, 2, 256, true, true, false),
    ] {
        let loopback = Loopback {
            queues,
            ring_pages,
            indirect,
            persistent,
            flush,
            ..Loopback::default()
        };
        oracle_round(loopback, 2, native, &mut rng);
    }
}

#[test]
fn errors_come_back_to_the_request_that_caused_them() {
    let rig = rig("fault:seed=7,read-error=0.3:mem:1M", Loopback::default(), 1);
    let mut queue = Queue::open(&rig.device, &QueueContext::new(64)).unwrap();
    let source = rig.device.buffer_source().unwrap();
    let buffer = source.allocate(64 * 4096).unwrap();
    let mut failed = 0;
    for _ in 0..20 {
        // The requests are neighbours, so that they are merged.
        let mut batch: Vec<_> = (0..64u64)
            .map(|i| {
                let b = buffer.slice(i as usize * 4096, 4096).unwrap();
                Request::with_buffers(Op::Read, i * 8, vec![b], i)
            })
            .collect();
        queue.submit(&mut batch);
        let done = wait_all(&mut queue);
        assert_eq!(done.len(), 64);
        failed += done.iter().filter(|c| c.status != Status::Ok).count();
    }
    // A merged request that fails is split: neither all nor none fail.
    assert!(failed > 100 && failed < 1000, "{failed} of 1280 failed");
}

#[test]
fn a_vanished_back_end_fails_what_is_in_flight() {
    let inner = pvblk_volume::open("mem:1M").unwrap();
    let (front, back) = Loopback::default().wire(inner.as_ref()).unwrap();
    let device = Frontend::new(front).unwrap();
    let shared: Arc<dyn BlockDevice> = device.clone();
    let mut queue = Queue::open(&shared, &QueueContext::new(100)).unwrap();
    let mut batch: Vec<_> = (0..100).map(|i| Request::new(Op::Flush, 0, 0, i)).collect();
    queue.submit(&mut batch); // 32 on the ring, the rest waits
    drop(back);
    device.disconnect("gone");
    let done = wait_all(&mut queue);
    assert_eq!(done.len(), 100);
    assert!(done.iter().all(|c| c.status == Status::IoError));
}

#[test]
fn submitters_come_and_go_with_requests_in_flight() {
    let rig = rig("mem:2M", Loopback::default(), 1);
    let source = rig.device.buffer_source().unwrap();
    let pages = source.allocate(64 * 4096).unwrap();
    for round in 0..200u64 {
        let mut queue = Queue::open(&rig.device, &QueueContext::new(64)).unwrap();
        let mut batch: Vec<_> = (0..64)
            .map(|i| {
                let b = pages.slice(i as usize * 4096, 4096).unwrap();
                // The requests aren't neighbours, so each takes a tag of its own.
                Request::with_buffers(Op::Read, i * 16, vec![b], i)
            })
            .collect();
        queue.submit(&mut batch);
        if round % 2 == 0 {
            drop(queue); // gives them up
        } else {
            let done = wait_all(&mut queue);
            let mut tags: Vec<u64> = done.iter().map(|c| c.request.tag).collect();
            tags.sort();
            assert!(tags.into_iter().eq(0..64), "its own answers, each once");
        }
    }
}

/// True if the queue's descriptor is readable, or becomes so in time.
fn is_woken(queue: &Queue, patience: Duration) -> bool {
    let poller = pvblk_sys::Poller::new().unwrap();
    poller.add(queue.wait_fd().unwrap(), 0, false).unwrap();
    let mut events = Vec::new();
    poller.wait(&mut events, Some(patience)).unwrap();
    !events.is_empty()
}

/// The first submitter to wake clears the ring's only event channel: the other one must still hear of its own
/// response.
#[test]
fn the_first_to_wake_leaves_the_others_a_wake_up() {
    let rig = rig("delay:20ms,channels=1:mem:1M", Loopback::default(), 1);
    let open = || Queue::open(&rig.device, &QueueContext::new(4)).unwrap();
    let (mut first, mut second) = (open(), open());
    let wakes = |q: &Queue| is_woken(q, Duration::from_secs(60));
    // The device has one channel: the second response comes 20 ms after the first.
    let data = Buffer::anonymous(8192).unwrap();
    for (i, q) in [&mut first, &mut second].into_iter().enumerate() {
        let b = data.slice(i * 4096, 4096).unwrap();
        q.submit(&mut vec![Request::with_buffers(Op::Read, 0, vec![b], 0)]);
        q.arm();
    }
    assert!(wakes(&first));
    first.woken();
    assert_eq!(wait_all(&mut first).len(), 1);
    // From here on the ring isn't polled until the second submitter is woken.
    assert!(wakes(&second), "the second submitter was never woken");
    second.woken();
    assert_eq!(wait_all(&mut second).len(), 1);
}

/// A submitter that was the listener, has nothing in flight any more and still clears the event channel must
/// pass on what the responses allow: here, the flush of another submitter's FUA write.
#[test]
fn an_idle_submitter_who_wakes_first_does_not_hold_up_a_busy_one() {
    let rig = rig("delay:5ms,channels=1:mem:1M", Loopback::default(), 1);
    let open = || Queue::open(&rig.device, &QueueContext::new(4)).unwrap();
    let (mut busy, mut idle) = (open(), open());
    let wakes = |q: &Queue| is_woken(q, Duration::from_secs(60));
    let listens = |q: &Queue| is_woken(q, Duration::ZERO);
    let data = Buffer::anonymous(4096).unwrap();
    let read = Request::with_buffers(Op::Read, 0, vec![data.clone()], 0);
    idle.submit(&mut vec![read]);
    idle.arm();
    assert!(wakes(&idle));
    idle.woken();
    assert_eq!(wait_all(&mut idle).len(), 1);
    let mut write = Request::with_buffers(Op::Write, 0, vec![data], 0);
    write.flags = RequestFlags::FUA;
    busy.submit(&mut vec![write]);
    busy.arm();
    assert!(wakes(&idle), "it hasn't looked away yet");
    idle.woken();
    assert_eq!(idle.poll(&mut Vec::new()), 0);
    assert!(!listens(&idle), "it has nothing to wait for");
    // The busy submitter was told to sleep, so it polls only when it is woken.
    assert!(wakes(&busy), "the flush never got to the back end");
    busy.woken();
    assert_eq!(wait_all(&mut busy).len(), 1);
}

/// Refuses the next few grants, as a full grant table does.
struct Refusing {
    inner: Arc<dyn Granter>,
    left: Arc<AtomicU32>,
}

impl Granter for Refusing {
    fn memory(&self) -> &Arc<Region> {
        self.inner.memory()
    }
    fn first_data_frame(&self) -> u32 {
        self.inner.first_data_frame()
    }
    fn grant(&self, frame: u32, read_only: bool) -> Option<u32> {
        let refuses = self.left.load(Ordering::Relaxed);
        self.left
            .store(refuses.saturating_sub(1), Ordering::Relaxed);
        (refuses == 0).then(|| self.inner.grant(frame, read_only))?
    }
    fn end(&self, gref: u32) {
        self.inner.end(gref);
    }
}

/// The last responses on the ring were another submitter's, and there was no grant yet: the waiting submitter
/// must try again.
#[test]
fn a_request_without_a_grant_is_tried_again_by_its_own_submitter() {
    // The delay is long enough for two submissions on a machine with other load.
    let inner = pvblk_volume::open("delay:1s,channels=1:mem:1M").unwrap();
    let wiring = Loopback {
        persistent: false,
        ..Loopback::default()
    };
    let (mut front, mut back) = wiring.wire(inner.as_ref()).unwrap();
    let left = Arc::new(AtomicU32::new(0));
    front.granter = Arc::new(Refusing {
        inner: front.granter,
        left: Arc::clone(&left),
    });
    let backend = Backend::start(&BackendOptions::default()).unwrap();
    let disk = Disk::new("t", inner, Tracing::off());
    let source = Box::new(BlkifSource::new(back.remove(0)));
    backend.attach(&disk, source, Box::new(|_| {})).unwrap();
    let device: Arc<dyn BlockDevice> = Frontend::new(front).unwrap();
    let open = || Queue::open(&device, &QueueContext::new(4)).unwrap();
    let (mut first, mut refused) = (open(), open());
    let data = Buffer::anonymous(8192).unwrap();
    let read = |i: usize| {
        let b = data.slice(i * 4096, 4096).unwrap();
        Request::with_buffers(Op::Read, 0, vec![b], 0)
    };
    first.submit(&mut vec![read(0)]);
    left.store(3, Ordering::Relaxed); // the submission, and what the first tries when it is woken and when it polls
    refused.submit(&mut vec![read(1)]);
    first.arm();
    assert_eq!(refused.arm(), Readiness::Wait(None));
    let wakes = |q: &Queue| is_woken(q, Duration::from_secs(60));
    assert!(wakes(&first));
    first.woken();
    assert_eq!(wait_all(&mut first).len(), 1);
    assert!(wakes(&refused), "nobody tries again");
    refused.woken();
    assert_eq!(wait_all(&mut refused).len(), 1);
}

/// A descriptor that stays readable would wake an idle worker for ever.
#[test]
fn an_idle_queue_can_be_silenced() {
    let rig = rig("mem:1M", Loopback::default(), 1);
    let mut queue = Queue::open(&rig.device, &QueueContext::new(4)).unwrap();
    for _ in 0..50 {
        queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 0)]);
        queue.arm();
        wait_all(&mut queue);
    }
    // The last notification may still be on its way, but none follows it.
    let begin = std::time::Instant::now();
    loop {
        queue.woken();
        if !is_woken(&queue, Duration::from_millis(20)) {
            return;
        }
        assert!(begin.elapsed().as_secs() < 60, "it is never silent");
    }
}

/// Many threads sleep on one ring, with few requests each: all must be woken by the one that listens. A lost
/// wake-up is a hang.
#[test]
fn many_sleepers_on_one_ring_all_wake() {
    const THREADS: u64 = 24;
    let seed = pvblk_testing::seed();
    let rig = rig("delay:50us:mem:4M", Loopback::default(), 2);
    let threads: Vec<_> = (0..THREADS)
        .map(|t| {
            let device = Arc::clone(&rig.device);
            std::thread::spawn(move || sleeper(&device, t, seed ^ t << 32))
        })
        .collect();
    for t in threads {
        t.join().unwrap();
    }
}

fn sleeper(device: &Arc<dyn BlockDevice>, number: u64, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let depth = rng.usize(1..=3);
    let mut queue = Queue::open(device, &QueueContext::new(depth as u32)).unwrap();
    let poller = pvblk_sys::Poller::new().unwrap();
    poller.add(queue.wait_fd().unwrap(), 0, false).unwrap();
    let page = Buffer::anonymous(4096).unwrap();
    let (mut done, mut events) = (Vec::new(), Vec::new());
    let (mut sent, mut received) = (0, 0);
    while received < 300 {
        let mut batch = Vec::new();
        while sent < 300 && queue.in_flight() + batch.len() < depth && rng.u32(0..4) > 0 {
            let b = page.clone();
            batch.push(Request::with_buffers(Op::Read, number * 8, vec![b], sent));
            sent += 1;
        }
        queue.submit(&mut batch);
        if queue.in_flight() == 0 {
            continue;
        }
        received += queue.poll(&mut done);
        if done
            .drain(..)
            .map(|c| assert_eq!(c.status, Status::Ok))
            .count()
            > 0
        {
            continue;
        }
        if queue.arm() != pvblk_block::Readiness::Ready {
            let patience = std::time::Duration::from_secs(30);
            poller.wait(&mut events, Some(patience)).unwrap();
            assert!(!events.is_empty(), "thread {number} was never woken");
            events.clear();
            queue.woken();
        }
    }
}
