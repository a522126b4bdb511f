//! Queues that have no descriptor before their first request, as files have: a thread that waits for them
//! must find it all the same.

use pvblk_bench::{self as bench, RunOptions};
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Op,
    Queue, QueueContext, Readiness, Request,
};
use pvblk_cache::{CacheConfig, PageCache};
use pvblk_sys::{EventFd, Poller};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A limit that only a bug reaches.
const NEVER: Duration = Duration::from_secs(20);

/// Memory whose completions come a little later, from another thread.
struct Late {
    inner: Arc<dyn BlockDevice>,
    woken: Arc<AtomicU64>,
}

impl Late {
    fn device() -> (Arc<dyn BlockDevice>, Arc<AtomicU64>) {
        let (inner, woken) = (pvblk_volume::open("mem:4M").unwrap(), Arc::default());
        let late = Late {
            inner,
            woken: Arc::clone(&woken),
        };
        (Arc::new(late), woken)
    }
}

struct LateQueue {
    inner: Box<dyn DeviceQueue>,
    event: Option<Arc<EventFd>>,
    completed: Arc<AtomicBool>,
    woken: Arc<AtomicU64>,
}

impl Decorator for Late {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }
    fn describe(&self) -> String {
        "late".into()
    }
    fn open_device_queue(&self, c: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(LateQueue {
            inner: self.inner.open_device_queue(c)?,
            event: None,
            completed: Arc::default(),
            woken: Arc::clone(&self.woken),
        }))
    }
    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

impl DeviceQueue for LateQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.inner.submit(batch);
        let event = self
            .event
            .get_or_insert_with(|| Arc::new(EventFd::new().unwrap()));
        let (event, completed) = (Arc::clone(event), Arc::clone(&self.completed));
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(2));
            completed.store(true, Ordering::SeqCst);
            event.notify();
        });
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        // The descriptor stays readable until the completions have been taken, as that of an
        // io_uring.
        if self.completed.swap(false, Ordering::SeqCst) {
            if let Some(event) = &self.event {
                event.drain();
            }
            self.inner.poll(out);
        }
    }
    fn arm(&mut self) -> Readiness {
        match self.completed.load(Ordering::SeqCst) {
            true => Readiness::Ready,
            false => Readiness::Wait(None),
        }
    }
    fn woken(&mut self) {
        self.woken.fetch_add(1, Ordering::SeqCst);
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.event.as_ref().map(|b| b.as_fd())
    }
}

#[test]
fn bench_waits_on_a_descriptor_that_came_late() {
    let (device, woken) = Late::device();
    let jobs = bench::parse_jobs("[j]\nrw=randread\nsize=64k\nbs=4k\niodepth=1", "test").unwrap();
    let report = bench::run(&jobs.jobs, &device, &RunOptions::default()).unwrap();
    assert!(!report.failed());
    // One wake-up for each of the 16 reads; two may have completed before the thread sleeps.
    let woken = woken.load(Ordering::SeqCst);
    assert!(woken >= 14, "{woken}");
}

/// A queue of a cache over such a device, and the poller of its user.
struct Rig {
    queue: Queue,
    poller: Poller,
    buffer: Buffer,
    done: Vec<Completion>,
}

impl Rig {
    fn new() -> Rig {
        let (inner, _) = Late::device();
        let config = CacheConfig::new(1 << 20);
        let cache: Arc<dyn BlockDevice> = Arc::new(PageCache::new(&config, inner).unwrap());
        let queue = Queue::open(&cache, &QueueContext::new(1)).unwrap();
        let poller = Poller::new().unwrap();
        poller.add(queue.wait_fd().unwrap(), 0, false).unwrap();
        Rig {
            queue,
            poller,
            buffer: Buffer::anonymous(4096).unwrap(),
            done: Vec::new(),
        }
    }

    fn read(&mut self, page: u64) {
        let buffers = vec![self.buffer.clone()];
        let request = Request::with_buffers(Op::Read, page * 8, buffers, 0);
        self.queue.submit(&mut vec![request]);
        while self.queue.poll(&mut self.done) == 0 {
            if self.queue.arm() != Readiness::Ready {
                assert!(self.wakes(NEVER), "nobody woke the cache's queue");
            }
        }
    }

    /// True if a descriptor wakes the user within `within`.
    fn wakes(&mut self, within: Duration) -> bool {
        let mut events = Vec::new();
        self.poller.wait(&mut events, Some(within)).unwrap();
        if !events.is_empty() {
            self.queue.woken();
        }
        !events.is_empty()
    }
}

#[test]
fn a_cache_waits_on_a_descriptor_that_came_late() {
    Rig::new().read(512);
}

/// Data that is read in advance arrives when its queue has nothing to do: that wakes once, and not for ever.
#[test]
fn a_cache_at_rest_sleeps_though_its_device_has_something() {
    let mut rig = Rig::new();
    // The third page is the second window's mark, or is in it.
    (0..3).for_each(|page| rig.read(page));
    let mut woken = 0;
    loop {
        assert_eq!(rig.queue.arm(), Readiness::Wait(None));
        if !rig.wakes(Duration::from_millis(300)) {
            break;
        }
        rig.queue.poll(&mut rig.done);
        woken += 1;
        assert!(woken < 10, "it is woken for ever");
    }
}
