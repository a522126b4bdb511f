//! [`Backend`]: a fixed set of workers, and the disks they serve.

use crate::active::{ActiveList, Looked, Place};
use crate::budget::Budget;
use crate::counters::DiskCounters;
use crate::events::Health;
use crate::gate::{Gate, Pass};
use crate::lane::Lane;
use crate::questions::Questions;
use crate::source::RequestSource;
use crate::stall::Stall;
use crate::throttle::{Connection, Throttle};
use crate::users::Users;
use crate::worker::watchdog::{Watchdog, WatchdogSignal};
use crate::worker::{
    Command, CommandQueue, End, LaneHome, LaneId, LaneWaker, OnEnd, SpinWindow, Wish, Worker,
};
use pvblk_block::trace::{Tracer, Tracing};
use pvblk_block::{
    BlockDevice, DiskThreads, Error, MergeCounts, Queue, QueueContext, Subscription, SystemClock,
};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Options of a back end.
#[derive(Clone, Debug)]
pub struct BackendOptions {
    /// Number of worker threads; 0: one for each CPU that the process may use.
    pub workers: usize,
    /// Longest time that a worker polls a queue before it sleeps on it.
    pub spin_max: Duration,
    /// CPUs to which workers are pinned in turn; empty: the kernel chooses.
    pub pin: Vec<usize>,
    /// Choices that workers don't make, for comparisons.
    pub fixed: FixedChoices,
}

/// Settings that a back end chooses for each lane by its load, unless they are fixed.
#[derive(Clone, Copy, Debug, Default)]
pub struct FixedChoices {
    /// Time that a worker polls a queue before it sleeps on it.
    pub spin: Option<Duration>,
    /// Most requests that are taken at a time, at least 1.
    pub pull: Option<u32>,
}

impl Default for BackendOptions {
    /// One worker per CPU, polling for at most 100 µs: a client that sleeps needs some 25 to 60 µs from an answer to its next request.
    fn default() -> BackendOptions {
        BackendOptions {
            workers: 0,
            spin_max: Duration::from_micros(100),
            pin: Vec::new(),
            fixed: FixedChoices::default(),
        }
    }
}

/// A disk: a device and the state that its queues share.
pub struct Disk {
    name: String,
    device: Arc<dyn BlockDevice>,
    gate: Arc<Gate>,
    next_queue: AtomicU32,
    tracing: Tracing,
    layer: &'static str,
    aside: Arc<DiskThreads>,
    memory: Arc<Budget>,
    stall: Arc<Stall>,
    questions: Arc<Questions>,
    refreshing: AtomicBool,
    users: Arc<Users>,
    counters: Arc<DiskCounters>,
    throttle: Arc<Throttle>,
    health: Arc<Health>,
    place: Arc<Place>,
    /// Set once the disk has a list of disks that are looked at.
    looked: OnceLock<Arc<Looked>>,
    _events: Subscription,
}

/// Threads for slow calls to a disk's device, besides those that the device has itself.
const ASIDE_THREADS: usize = 2;

impl Disk {
    /// A disk of this name over a device. The lanes' own trace events have the layer `back`: Q when a request
    /// was taken from its source, D when it went to the device, C when its completion went to the source.
    pub fn new(name: impl Into<String>, device: Arc<dyn BlockDevice>, tracing: Tracing) -> Disk {
        let name = name.into();
        let place = Arc::<Place>::default();
        let stall = Arc::new(Stall::at(&place));
        let condition = device.events().condition();
        let health = Health::new(&name, condition, &stall, Arc::new(SystemClock));
        let health = Arc::new(health);
        let told = Arc::downgrade(&health);
        let events = device.events().subscribe(move |event| {
            if let Some(health) = told.upgrade() {
                health.device(event);
            }
        });
        Disk {
            health,
            _events: events,
            users: Users::new(&name, false),
            name,
            device,
            gate: Arc::default(),
            next_queue: AtomicU32::new(0),
            tracing,
            layer: "back",
            aside: Arc::new(DiskThreads::new("pvblk-aside", ASIDE_THREADS)),
            memory: Budget::unlimited(),
            stall,
            questions: Arc::default(),
            refreshing: AtomicBool::new(false),
            counters: Arc::new(DiskCounters::at(&place)),
            place,
            looked: OnceLock::new(),
            throttle: Arc::default(),
        }
    }

    /// The disk with a bound for the bytes that its peers may make the server hold.
    #[must_use]
    pub fn with_memory(mut self, memory: Arc<Budget>) -> Disk {
        self.memory = memory;
        self
    }

    /// The disk for one front end at a time.
    #[must_use]
    pub fn exclusive(self) -> Disk {
        self.users.set_exclusive(true);
        self
    }

    /// The present front ends and clients of the disk, and its fence.
    pub fn users(&self) -> &Arc<Users> {
        &self.users
    }

    /// The disk with limits that go by another clock than the system's.
    #[must_use]
    pub fn with_throttle(mut self, throttle: Arc<Throttle>) -> Disk {
        self.throttle = throttle;
        self
    }

    /// The limits of its requests.
    pub fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    /// Counters of its requests.
    pub fn counters(&self) -> &Arc<DiskCounters> {
        &self.counters
    }

    /// The budget that buffers with its peers' data, replies and requests count to.
    pub fn memory(&self) -> &Arc<Budget> {
        &self.memory
    }

    /// The disk's record of lanes that are blocked in a call.
    pub fn stall(&self) -> &Arc<Stall> {
        &self.stall
    }

    /// Its last known state, and the facts that this follows from.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// From now on the disk is put on `list` when requests are taken.
    pub(crate) fn enlist(&self, list: &Arc<ActiveList>) {
        let looked = Arc::new(Looked {
            place: Arc::clone(&self.place),
            counters: Arc::clone(&self.counters),
            health: Arc::clone(&self.health),
            throttle: Arc::clone(&self.throttle),
        });
        self.place.link(list, self.looked.get_or_init(|| looked));
    }

    /// Threads for calls to its device that may take long: extents, refresh, questions, its end.
    pub fn aside(&self) -> &Arc<DiskThreads> {
        &self.aside
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The disk with another layer in traces than `back`.
    #[must_use]
    pub fn with_layer(mut self, layer: &'static str) -> Disk {
        self.layer = layer;
        self
    }

    /// Opens one more queue of the device, for `depth` requests in flight, and the trace hooks of its user. The device counts in `merges`.
    pub(crate) fn open_queue(
        &self,
        depth: u32,
        merges: Arc<MergeCounts>,
    ) -> Result<(Queue, Tracer), Error> {
        let index = self.next_queue.fetch_add(1, Ordering::Relaxed);
        let tracer = self.tracing.tracer(self.layer, index, index);
        let context = QueueContext {
            depth,
            index,
            submitter: index,
            tracing: self.tracing.below(&tracer),
            merges,
        };
        Ok((Queue::open(&self.device, &context)?, tracer))
    }

    /// A pass through the disk's gate, at which all of the disk's lanes can be held back.
    pub fn pass(&self) -> Pass {
        self.gate.pass()
    }

    /// Lets its device look at its backing again, on a thread of its own, unless that is under way
    /// already.
    pub fn refresh(self: &Arc<Disk>) {
        if self.refreshing.swap(true, Ordering::AcqRel) {
            return;
        }
        let disk = Arc::clone(self);
        let job = move || {
            let before = disk.device.capacity_sectors();
            match disk.device.refresh() {
                Err(e) => tracing::error!("disk {}: {e}", disk.name),
                Ok(()) => {
                    let now = disk.device.capacity_sectors();
                    if now != before {
                        let name = &disk.name;
                        tracing::info!("disk {name}: resized from {before} to {now} sectors");
                    }
                }
            }
            disk.refreshing.store(false, Ordering::Release);
        };
        if self.aside.run(Box::new(job)).is_err() {
            self.refreshing.store(false, Ordering::Release);
            tracing::error!("disk {}: no thread to look at its backing", self.name);
        }
    }

    /// Asks its device a question (see [`BlockDevice::ask`]), one at a time, on a thread of its own. The wait
    /// for the answer is bounded: an error says that it takes too long, while the device goes on with it.
    pub fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        self.questions.ask(&self.device, &self.aside, question)
    }

    /// Refuses questions from now on. False if the last one hasn't ended after `patience`.
    pub(crate) fn no_more_questions(&self, patience: Duration) -> bool {
        self.questions.close(patience)
    }

    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }
}

/// Name of a lane, to detach it.
#[derive(Clone, Debug)]
pub struct SourceId(Arc<LaneHome>);

/// Workers that serve any number of sources. A drop ends all sources at once, also those with
/// requests in flight: where completions matter, detach the sources and wait for their `on_end`
/// first.
pub struct Backend {
    workers: Vec<Arc<Worker>>,
    /// Of each worker.
    queues: Arc<[Arc<CommandQueue>]>,
    watchdog: Option<Watchdog>,
    next_lane: AtomicU64,
    fixed: FixedChoices,
}

/// Longest wait for a blocked worker at the end of the back end.
const LAST_CALL: Duration = Duration::from_secs(5);

impl Backend {
    /// Starts the workers, and the watchdog that replaces a worker's thread when it is blocked.
    pub fn start(options: &BackendOptions) -> Result<Backend, Error> {
        let count = match options.workers {
            0 => pvblk_sys::cpu::allowed().len().max(1),
            n => n,
        };
        let os = |e| Error::os("starting a worker", e);
        pvblk_sys::ticks::calibrate();
        let signal = Arc::new(WatchdogSignal::default());
        let mut backend = Backend {
            workers: Vec::new(),
            queues: Arc::default(),
            watchdog: None,
            next_lane: AtomicU64::new(1),
            fixed: options.fixed,
        };
        let spin = match options.fixed.spin {
            Some(window) => SpinWindow::fixed(window),
            None => SpinWindow::new(options.spin_max),
        };
        for i in 0..count {
            let pin = (!options.pin.is_empty()).then(|| options.pin[i % options.pin.len()]);
            let name = format!("pvblk-worker-{i}");
            let (worker, lanes) =
                Worker::new(name, spin.clone(), pin, Arc::clone(&signal)).map_err(os)?;
            worker.start(move |_| Some(lanes)).map_err(os)?;
            backend.workers.push(worker);
        }
        let queues = backend.workers.iter().map(|w| Arc::clone(&w.commands));
        backend.queues = queues.collect();
        let watchdog = Watchdog::start(backend.workers.clone(), &signal);
        backend.watchdog = Some(watchdog.map_err(|e| Error::os("starting the watchdog", e))?);
        Ok(backend)
    }

    /// Names of the workers, each with a number that changes whenever it makes progress; `None`: it sleeps.
    pub(crate) fn turns(&self) -> Vec<(String, Option<u64>)> {
        let turn = |w: &Arc<Worker>| (w.name().to_owned(), w.turn());
        self.workers.iter().map(turn).collect()
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Serves `source` from `disk` on the worker with the fewest lanes, and later perhaps on another one. `on_end` is called once, on the worker, when
    /// the source has ended and all of its resources are freed; it must not block.
    pub fn attach(
        &self,
        disk: &Disk,
        source: Box<dyn RequestSource>,
        on_end: OnEnd,
    ) -> Result<SourceId, Error> {
        self.attach_as(disk, None, source, on_end)
    }

    /// As [`Backend::attach`], a source of `connection`; without one it is a connection of its own.
    pub fn attach_as(
        &self,
        disk: &Disk,
        connection: Option<Arc<Connection>>,
        mut source: Box<dyn RequestSource>,
        on_end: OnEnd,
    ) -> Result<SourceId, Error> {
        let id = LaneId(self.next_lane.fetch_add(1, Ordering::Relaxed));
        let lanes = self.lanes();
        let worker = (0..lanes.len()).min_by_key(|at| lanes[*at]).unwrap_or(0);
        let home = LaneHome::new(id, &self.queues, worker);
        source.bind(LaneWaker(Arc::clone(&home)));
        if let Some(most) = self.fixed.pull {
            source.fix_pull(most);
        }
        let lane = Box::new(Lane::open_as(disk, connection, source)?);
        let end = End::new(on_end, &home);
        home.worker()
            .send(Command::Attach(Arc::clone(&home), lane, end));
        Ok(SourceId(home))
    }

    /// Makes a worker give the lane with the most work, if one has had any, to another worker. Nobody needs to call this: the watchdog
    /// moves lanes from workers that are busy all the time. Panics if there is no such worker.
    pub fn move_a_lane(&self, from: usize, to: usize) {
        assert!(to < self.queues.len(), "there is no worker {to}");
        let wish = Wish {
            to,
            most: 1000,
            stays: Duration::ZERO,
        };
        self.queues[from].send(Command::Share(wish));
    }

    /// Number of lanes that each worker has or will have.
    pub fn lanes(&self) -> Vec<usize> {
        let count = |queue: &Arc<CommandQueue>| queue.lanes.load(Ordering::Relaxed);
        self.queues.iter().map(count).collect()
    }

    /// Stops a source after its outstanding requests have completed. Its `on_end` is called with
    /// [`crate::SourceEnd::Closed`], unless it had ended already.
    pub fn detach(&self, id: &SourceId) {
        id.0.reach(true);
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.commands.send(Command::Exit);
        }
        for worker in &self.workers {
            // The last owner may be a callback on a worker, which can't wait for itself.
            if !worker.is_current() && !worker.wait_over(LAST_CALL) {
                tracing::error!(
                    "{} is blocked: what it was doing is given up",
                    worker.name()
                );
            }
        }
    }
}
