//! [`Backend`]: a fixed set of workers, and the disks they serve.

use crate::budget::Budget;
use crate::gate::{Gate, Pass};
use crate::lane::Lane;
use crate::source::RequestSource;
use crate::worker::{Command, LaneId, LaneWaker, Mailbox, OnEnd, Worker};
use pvblk_block::trace::{Tracer, Tracing};
use pvblk_block::{BlockDevice, DiskThreads, Error, Queue, QueueContext};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How a back end runs.
#[derive(Clone, Debug)]
pub struct BackendOptions {
    /// Worker threads; 0: one for each CPU that the process may use.
    pub workers: usize,
    /// Longest time that a worker polls a queue before it sleeps on it.
    pub spin_max: Duration,
    /// Keep worker `i` on the `i`-th of these CPUs (modulo their number); empty: leave it to the kernel.
    pub pin: Vec<usize>,
}

impl Default for BackendOptions {
    /// One worker per CPU, polling for at most 50 µs: about what a wake-up across CPUs costs.
    fn default() -> BackendOptions {
        BackendOptions {
            workers: 0,
            spin_max: Duration::from_micros(50),
            pin: Vec::new(),
        }
    }
}

/// A disk: a device and what its queues share.
pub struct Disk {
    name: String,
    device: Arc<dyn BlockDevice>,
    gate: Arc<Gate>,
    next_queue: AtomicU32,
    tracing: Tracing,
    floor: &'static str,
    aside: Arc<DiskThreads>,
    memory: Arc<Budget>,
}

/// Threads for slow calls to a disk's device, besides those that the device has itself.
const ASIDE_THREADS: usize = 2;

impl Disk {
    /// A disk of this name over a device. Traces tell the lanes' own events under the name `back`: Q when a request
    /// was taken from its source, D when it went to the device, C when its answer went to the source.
    pub fn new(name: impl Into<String>, device: Arc<dyn BlockDevice>, tracing: Tracing) -> Disk {
        Disk {
            name: name.into(),
            device,
            gate: Arc::default(),
            next_queue: AtomicU32::new(0),
            tracing,
            floor: "back",
            aside: Arc::new(DiskThreads::new("pvblk-aside", ASIDE_THREADS)),
            memory: Budget::unlimited(),
        }
    }

    /// The same with a bound for the bytes that its peers may make the server hold.
    #[must_use]
    pub fn with_memory(mut self, memory: Arc<Budget>) -> Disk {
        self.memory = memory;
        self
    }

    /// What holds its peers' data, replies and requests on their way counts here.
    pub fn memory(&self) -> &Arc<Budget> {
        &self.memory
    }

    /// Threads for calls to its device that may take long: extents, refresh, questions, its end.
    pub fn aside(&self) -> &Arc<DiskThreads> {
        &self.aside
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same under another name in traces than `back`.
    #[must_use]
    pub fn with_floor(mut self, floor: &'static str) -> Disk {
        self.floor = floor;
        self
    }

    /// Opens one more queue of the device, for `depth` requests in flight, and a trace point for who uses it.
    pub(crate) fn open_queue(&self, depth: u32) -> Result<(Queue, Tracer), Error> {
        let index = self.next_queue.fetch_add(1, Ordering::Relaxed);
        let tracer = self.tracing.tracer(self.floor, index, index);
        let context = QueueContext {
            depth,
            index,
            submitter: index,
            tracing: self.tracing.below(&tracer),
        };
        Ok((Queue::open(&self.device, &context)?, tracer))
    }

    /// A way through the disk's gate, with which all of the disk's lanes can be held back.
    pub fn pass(&self) -> Pass {
        self.gate.pass()
    }

    /// Its device.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }
}

/// A lane's name and worker, to detach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceId {
    lane: LaneId,
    worker: usize,
}

/// Workers that serve any number of sources. Dropping it ends all sources at once, also those with
/// requests in flight: where answers matter, detach them and wait for their `on_end` first.
pub struct Backend {
    mailboxes: Vec<Arc<Mailbox>>,
    threads: Vec<JoinHandle<()>>,
    next_lane: AtomicU64,
}

impl Backend {
    /// Starts the workers.
    pub fn start(options: &BackendOptions) -> Result<Backend, Error> {
        let count = match options.workers {
            0 => pvblk_sys::cpu::allowed().len().max(1),
            n => n,
        };
        let mut backend = Backend {
            mailboxes: Vec::new(),
            threads: Vec::new(),
            next_lane: AtomicU64::new(1),
        };
        for i in 0..count {
            let os = |e| Error::os("starting a worker", e);
            let mailbox = Arc::new(Mailbox::new().map_err(os)?);
            let worker = Worker::new(Arc::clone(&mailbox), options.spin_max).map_err(os)?;
            let pin = (!options.pin.is_empty()).then(|| options.pin[i % options.pin.len()]);
            let thread = std::thread::Builder::new()
                .name(format!("pvblk-worker-{i}"))
                .stack_size(512 * 1024)
                .spawn(move || {
                    if let Some(cpu) = pin
                        && let Err(e) = pvblk_sys::cpu::pin(cpu)
                    {
                        tracing::warn!("keeping worker {i} on CPU {cpu}: {e}");
                    }
                    // Modelled and timed completions are due to the microsecond.
                    let _ = pvblk_sys::cpu::set_timer_slack_ns(1000);
                    worker.run();
                })
                .map_err(os)?;
            backend.mailboxes.push(mailbox);
            backend.threads.push(thread);
        }
        Ok(backend)
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.mailboxes.len()
    }

    /// Serves `source` from `disk` on the least loaded worker. `on_end` is called once, on the worker,
    /// when the source has ended and everything of it is freed; it must not block.
    pub fn attach(
        &self,
        disk: &Disk,
        mut source: Box<dyn RequestSource>,
        on_end: OnEnd,
    ) -> Result<SourceId, Error> {
        let id = LaneId(self.next_lane.fetch_add(1, Ordering::Relaxed));
        let worker = self.least_loaded();
        let mailbox = &self.mailboxes[worker];
        source.bind(LaneWaker {
            mailbox: Arc::clone(mailbox),
            lane: id,
        });
        let lane = Box::new(Lane::open(disk, source)?);
        mailbox.lanes.fetch_add(1, Ordering::Relaxed);
        mailbox.send(Command::Attach(id, lane, on_end));
        Ok(SourceId { lane: id, worker })
    }

    fn least_loaded(&self) -> usize {
        let load = |m: &Arc<Mailbox>| m.lanes.load(Ordering::Relaxed);
        (0..self.mailboxes.len())
            .min_by_key(|&i| load(&self.mailboxes[i]))
            .unwrap_or(0)
    }

    /// Stops a source after what it has outstanding is answered. Its `on_end` is called with
    /// [`crate::SourceEnd::Closed`], unless it had ended already.
    pub fn detach(&self, id: SourceId) {
        self.mailboxes[id.worker].send(Command::Detach(id.lane));
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        for m in &self.mailboxes {
            m.send(Command::Exit);
        }
        for t in self.threads.drain(..) {
            if t.thread().id() == std::thread::current().id() {
                continue; // the last owner was a callback on a worker
            }
            if t.join().is_err() {
                tracing::error!("a worker panicked");
            }
        }
    }
}
