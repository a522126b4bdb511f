//! `delay`: a modelled device over another one. [`DelaySpec`] describes the model.

mod model;

use crate::hold::Held;
use crate::spec::DelaySpec;
use model::{Model, QueueClock};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, QueueContext,
    Readiness, Request, SECTOR,
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
            queue: QueueClock::default(),
            due: HashMap::with_capacity(depth),
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
            questions: inner.questions,
            memory: inner.memory,
            buffers: inner.buffers,
        }
    }
}

struct DelayQueue {
    inner: Box<dyn DeviceQueue>,
    model: Arc<Model>,
    clock: Arc<dyn Clock>,
    queue: QueueClock,
    /// When each request on the inner device is due, by [`address`].
    due: HashMap<usize, Instant>,
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
        let now = self.clock.now();
        self.tracer
            .requests(Phase::Issue, batch.iter().map(|r| &**r));
        for request in batch.iter() {
            let bytes = match request.op.has_data() {
                true => request.sectors * SECTOR,
                false => 0,
            };
            let due = self.model.reserve(now, bytes, &mut self.queue);
            self.due.insert(address(request), due);
        }
        self.inner.submit(batch);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let now = self.clock.now();
        if !self.due.is_empty() {
            self.inner.poll(&mut self.arrived);
            for completion in self.arrived.drain(..) {
                let due = self.due.remove(&address(&completion.request));
                self.held.push(due.unwrap_or(now), completion);
            }
        }
        self.held.take_due(now, out);
    }

    fn arm(&mut self) -> Readiness {
        let mut deadline = self.held.next_due();
        if deadline.is_some_and(|due| due <= self.clock.now()) {
            return Readiness::Ready;
        }
        if !self.due.is_empty() {
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
