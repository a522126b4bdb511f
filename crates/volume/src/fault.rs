//! `fault`: errors, stalls and torn writes by seed, over another device. See [`FaultSpec`].

use crate::delay::{address, earliest};
use crate::hold::Held;
use crate::spec::FaultSpec;
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Op,
    QueueContext, Readiness, Request, SECTOR, Status,
};
use pvblk_block::{Clock, SystemClock};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A device that fails on purpose. Its queues meet the same faults again for the same seed, queue
/// index, and order of requests.
pub struct FaultVolume {
    spec: FaultSpec,
    seed: u64,
    inner: Arc<dyn BlockDevice>,
    clock: Arc<dyn Clock>,
    /// Requests that meet no fault before the others do.
    spared: Arc<AtomicU64>,
}

impl FaultVolume {
    /// Puts the faults over `inner`. Fails if a value of `spec` is out of its range. Logs its seed.
    pub fn new(spec: &FaultSpec, inner: Arc<dyn BlockDevice>) -> Result<FaultVolume, Error> {
        FaultVolume::with_clock(spec, inner, Arc::new(SystemClock))
    }

    /// As [`FaultVolume::new`], with a clock of the caller's for the stalls.
    pub fn with_clock(
        spec: &FaultSpec,
        inner: Arc<dyn BlockDevice>,
        clock: Arc<dyn Clock>,
    ) -> Result<FaultVolume, Error> {
        if let Some(why) = spec.problem() {
            return Err(Error::config(format!("{spec}: {why}")));
        }
        let seed = spec.seed.unwrap_or_else(|| fastrand::u64(..));
        let spec = FaultSpec {
            seed: Some(seed),
            ..spec.clone()
        };
        tracing::info!("{spec}: faults by seed {seed}");
        Ok(FaultVolume {
            spared: Arc::new(AtomicU64::new(spec.after)),
            spec,
            seed,
            inner,
            clock,
        })
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.seed
    }
}

impl Decorator for FaultVolume {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn describe(&self) -> String {
        format!("{}:{}", self.spec, self.inner.describe())
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let depth = context.depth as usize;
        // An odd multiplier keeps the queues' seeds apart.
        let queue = u64::from(context.index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ok(Box::new(FaultQueue {
            // Both devices are one layer: the inner device has no handle that would record Q and C.
            inner: self.inner.open_device_queue(&context.untraced())?,
            spec: self.spec.clone(),
            random: fastrand::Rng::with_seed(self.seed ^ queue),
            block_sectors: self.inner.limits().sectors_per_block(),
            clock: Arc::clone(&self.clock),
            spared: Arc::clone(&self.spared),
            plans: HashMap::new(),
            inner_in_flight: 0,
            forward: Vec::with_capacity(depth),
            arrived: Vec::with_capacity(depth),
            held: Held::with_capacity(0),
            done: Vec::with_capacity(depth),
            tracer: context.tracing.tracer(
                &Decorator::floor(self),
                context.index,
                context.submitter,
            ),
        }))
    }

    fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
        Forwards {
            refresh: inner.refresh,
            extents: inner.extents,
            cached: inner.cached,
            incarnation: inner.incarnation,
            close: inner.close,
            questions: inner.questions,
            memory: inner.memory,
            buffers: inner.buffers,
        }
    }
}

/// A request's fate, drawn when it is submitted.
struct Fate {
    error: bool,
    stall: bool,
    /// For a torn write, how many sectors (512 B) are stored.
    torn: Option<u64>,
}

/// The faults of a request, which are made when the inner device completes it.
struct Plan {
    stall: bool,
    /// The write that the inner device was given only the first part of.
    torn: Option<Box<Request>>,
}

struct FaultQueue {
    inner: Box<dyn DeviceQueue>,
    spec: FaultSpec,
    random: fastrand::Rng,
    block_sectors: u64,
    clock: Arc<dyn Clock>,
    spared: Arc<AtomicU64>,
    /// Plans for requests on the inner device that need one, by [`address`].
    plans: HashMap<usize, Plan>,
    inner_in_flight: usize,
    forward: Vec<Box<Request>>,
    arrived: Vec<Completion>,
    held: Held,
    done: Vec<Completion>,
    tracer: Tracer,
}

impl FaultQueue {
    /// Draws as many numbers for each request, whatever they are used for, so that one fault's
    /// probability doesn't change where the others strike.
    fn draw(&mut self, request: &Request) -> Fate {
        let [error, stall, torn, cut] = std::array::from_fn(|_| self.random.f64());
        if self.is_spared() {
            return Fate {
                error: false,
                stall: false,
                torn: None,
            };
        }
        let chance = match request.op {
            Op::Read => self.spec.read_error,
            Op::Write | Op::Discard | Op::WriteZeroes => self.spec.write_error,
            Op::Flush => self.spec.flush_error,
        };
        let blocks = request.sectors / self.block_sectors;
        let kept = (cut * blocks as f64) as u64 * self.block_sectors;
        Fate {
            error: error < chance.unwrap_or(self.spec.error),
            stall: stall < self.spec.stall,
            torn: (request.op == Op::Write && torn < self.spec.torn).then_some(kept),
        }
    }

    fn is_spared(&self) -> bool {
        // Nothing is written once none are left, so that queues don't meet here.
        self.spared.load(Ordering::Relaxed) > 0
            && self
                .spared
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
                .is_ok()
    }

    /// Completes a request, now or after a stall.
    fn complete(&mut self, completion: Completion, stall: bool) {
        if stall {
            let due = self.clock.now() + self.spec.stall_time;
            self.held.push(due, completion);
        } else {
            self.done.push(completion);
        }
    }

    fn take(&mut self, request: Box<Request>) {
        let fate = self.draw(&request);
        let failed = |request| Completion {
            request,
            status: Status::IoError,
        };
        let (to_inner, torn) = match fate.torn {
            _ if fate.error => return self.complete(failed(request), fate.stall),
            Some(0) => return self.complete(failed(request), fate.stall),
            Some(sectors) => (first_part(&request, sectors), Some(request)),
            None => (request, None),
        };
        self.tracer
            .request(Phase::Issue, torn.as_deref().unwrap_or(&to_inner));
        if torn.is_some() || fate.stall {
            let plan = Plan {
                stall: fate.stall,
                torn,
            };
            self.plans.insert(address(&to_inner), plan);
        }
        self.forward.push(to_inner);
    }

    fn collect(&mut self) {
        if self.inner_in_flight == 0 {
            return;
        }
        let mut arrived = std::mem::take(&mut self.arrived);
        self.inner.poll(&mut arrived);
        self.inner_in_flight -= arrived.len();
        for completion in arrived.drain(..) {
            match self.plans.remove(&address(&completion.request)) {
                None => self.done.push(completion),
                Some(Plan { stall, torn: None }) => self.complete(completion, stall),
                Some(Plan {
                    stall,
                    torn: Some(request),
                }) => {
                    let status = Status::IoError;
                    self.complete(Completion { request, status }, stall);
                }
            }
        }
        self.arrived = arrived;
    }
}

/// A write of the first `sectors` sectors (512 B) of `request`.
fn first_part(request: &Request, sectors: u64) -> Box<Request> {
    let mut left = (sectors * SECTOR) as usize;
    let mut buffers: Vec<Buffer> = Vec::new();
    for segment in &request.buffers {
        let len = segment.len().min(left);
        if len == 0 {
            break;
        }
        buffers.extend(segment.slice(0, len));
        left -= len;
    }
    let mut part = Request::with_buffers(request.op, request.sector, buffers, request.tag);
    part.flags = request.flags;
    part.followed = request.followed;
    part
}

impl DeviceQueue for FaultQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        for request in batch.drain(..) {
            self.take(request);
        }
        if !self.forward.is_empty() {
            self.inner_in_flight += self.forward.len();
            self.inner.submit(&mut self.forward);
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.collect();
        out.append(&mut self.done);
        if self.held.next_due().is_some() {
            self.held.take_due(self.clock.now(), out);
        }
    }

    fn arm(&mut self) -> Readiness {
        let mut deadline = self.held.next_due();
        if !self.done.is_empty() || deadline.is_some_and(|due| due <= self.clock.now()) {
            return Readiness::Ready;
        }
        if self.inner_in_flight > 0 {
            match self.inner.arm() {
                Readiness::Ready => return Readiness::Ready,
                Readiness::Wait(inner) => deadline = earliest(deadline, inner),
            }
        }
        Readiness::Wait(deadline)
    }

    fn woken(&mut self) {
        self.inner.woken();
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}
