//! `delay`: a modelled device over another one. [`DelaySpec`] describes the model.

mod model;
mod planted;

use crate::hold::Held;
use crate::spec::DelaySpec;
use model::{Model, QueueClock};
use planted::Planted;
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Questions,
    QueueContext, Readiness, Request, SECTOR,
};
use pvblk_block::{Clock, SystemClock};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// A modelled device: requests are executed on the inner device when they are submitted, and their
/// completions held back until the model says that they are due.
pub struct DelayVolume {
    spec: DelaySpec,
    inner: Arc<dyn BlockDevice>,
    model: Arc<Model>,
    clock: Arc<dyn Clock>,
    planted: Arc<Planted>,
}

impl DelayVolume {
    /// Puts the model over `inner`. Fails if a value of `spec` is out of its range.
    pub fn new(spec: &DelaySpec, inner: Arc<dyn BlockDevice>) -> Result<DelayVolume, Error> {
        DelayVolume::with_clock(spec, inner, Arc::new(SystemClock))
    }

    /// As [`DelayVolume::new`], with a clock of the caller's.
    pub fn with_clock(
        spec: &DelaySpec,
        inner: Arc<dyn BlockDevice>,
        clock: Arc<dyn Clock>,
    ) -> Result<DelayVolume, Error> {
        if let Some(why) = spec.problem() {
            return Err(Error::config(format!("{spec}: {why}")));
        }
        Ok(DelayVolume {
            spec: spec.clone(),
            model: Arc::new(Model::new(spec, clock.now())),
            inner,
            clock,
            planted: Arc::default(),
        })
    }
}

impl Decorator for DelayVolume {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn describe(&self) -> String {
        format!("{}:{}", self.spec, self.inner.describe())
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let depth = context.depth as usize;
        Ok(Box::new(DelayQueue {
            // Both devices are one layer: the inner device has no handle that would record Q and C.
            inner: self.inner.open_device_queue(&context.untraced())?,
            model: Arc::clone(&self.model),
            clock: Arc::clone(&self.clock),
            planted: Arc::clone(&self.planted),
            queue: QueueClock::default(),
            times: HashMap::with_capacity(depth),
            below: 0,
            arrived: Vec::with_capacity(depth),
            held: Held::with_capacity(depth),
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
            questions: Some(self),
            memory: inner.memory,
            buffers: inner.buffers,
        }
    }
}

impl Questions for DelayVolume {
    fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        let own = self.planted.answer(question);
        own.or_else(|| self.inner.ask(question))
    }
}

/// The time at which a request was submitted, and the time at which it is due.
struct Times {
    submitted: Instant,
    due: Instant,
}

struct DelayQueue {
    inner: Box<dyn DeviceQueue>,
    model: Arc<Model>,
    clock: Arc<dyn Clock>,
    planted: Arc<Planted>,
    queue: QueueClock,
    /// Of each request in flight, by [`address`].
    times: HashMap<usize, Times>,
    /// Requests on the inner device.
    below: usize,
    arrived: Vec<Completion>,
    held: Held,
    tracer: Tracer,
}

/// The key of a request while the inner device has it: a device returns the same box. The tag need
/// not be unique, and the scratch belongs to the inner device.
pub(crate) fn address(request: &Request) -> usize {
    std::ptr::from_ref(request).addr()
}

/// The earlier of two deadlines, where there are any.
pub(crate) fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    a.into_iter().chain(b).min()
}

impl DeviceQueue for DelayQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        // Before the clock is read, so that a trace's time of service has all of the planted time in it.
        self.tracer
            .requests(Phase::Issue, batch.iter().map(|r| &**r));
        let now = self.clock.now();
        for request in batch.iter() {
            let bytes = match request.op.has_data() {
                true => request.sectors * SECTOR,
                false => 0,
            };
            let times = Times {
                submitted: now,
                due: self.model.reserve(now, bytes, &mut self.queue),
            };
            self.times.insert(address(request), times);
        }
        self.below += batch.len();
        self.inner.submit(batch);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let now = self.clock.now();
        if self.below > 0 {
            self.inner.poll(&mut self.arrived);
            self.below = self.below.saturating_sub(self.arrived.len());
            for completion in self.arrived.drain(..) {
                let times = self.times.get(&address(&completion.request));
                self.held.push(times.map_or(now, |t| t.due), completion);
            }
        }
        let before = out.len();
        self.held.take_due(now, out);
        for completion in &out[before..] {
            if let Some(times) = self.times.remove(&address(&completion.request)) {
                self.planted
                    .add(now.saturating_duration_since(times.submitted));
            }
        }
    }

    fn arm(&mut self) -> Readiness {
        let mut deadline = self.held.next_due();
        if deadline.is_some_and(|due| due <= self.clock.now()) {
            return Readiness::Ready;
        }
        if self.below > 0 {
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
