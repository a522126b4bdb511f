//! The boundary between those who use blocks and those who store them.

use crate::trace::Tracing;
use crate::{Capabilities, Completion, Error, EventHub, Limits, Queue, Request};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// Something that stores or forwards blocks. Shared by all its users.
///
/// A device that stands on one other device implements [`crate::Decorator`] instead, and gets this trait with it. A device that stands on several
/// makes its capabilities of [`crate::Forwards`].
pub trait BlockDevice: Send + Sync {
    /// A short description for people, as a volume spec where there is one.
    fn describe(&self) -> String;

    /// Its name in traces.
    fn floor(&self) -> String {
        self.describe()
    }

    /// Fixed while the device is open.
    fn limits(&self) -> Limits;

    /// Capacity in sectors (512 B); may change, with a [`crate::DeviceEvent::Resized`].
    fn capacity_sectors(&self) -> u64;

    /// Opens one more queue. A queue is used by one thread at a time and shares no lock with others on its hot path.
    /// Call [`Queue::open`] instead: its handle adds the guarantees.
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error>;

    /// Tells subscribers of changes.
    fn events(&self) -> &EventHub;

    /// The optional things that this device can do. Cheap, but not for hot paths. Users call the methods of `dyn BlockDevice` named after
    /// the capabilities; each says what holds where a capability is missing.
    fn capabilities(&self) -> Capabilities<'_>;
}

/// What a queue is opened for.
#[derive(Clone)]
pub struct QueueContext {
    /// Most requests that its user will have in flight: at least 1.
    pub depth: u32,
    /// Which of its user's queues this is, from 0; a hint for spreading over a device's hardware queues.
    pub index: u32,
    /// Who submits, for traces.
    pub submitter: u32,
    /// Where trace events go.
    pub tracing: Tracing,
}

impl QueueContext {
    /// A context for `depth` requests in flight, not traced.
    pub fn new(depth: u32) -> QueueContext {
        QueueContext {
            depth,
            index: 0,
            submitter: 0,
            tracing: Tracing::off(),
        }
    }

    /// The same without tracing.
    #[must_use]
    pub fn untraced(&self) -> QueueContext {
        QueueContext {
            tracing: Tracing::off(),
            ..*self
        }
    }
}

/// What a queue's user has to do before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Don't sleep: there may be completions to poll now.
    Ready,
    /// Sleep until the queue's descriptor is readable or this time has come, if there is one.
    Wait(Option<Instant>),
}

/// One queue of a device, as the device implements it. Used through [`Queue`].
///
/// A device accepts everything submitted, up to the context's depth, and completes every request
/// exactly once, in any order. It may change `scratch` of a request, and must return all else as it was.
pub trait DeviceQueue: Send {
    /// Takes all requests of `batch`, in order. The batch is where the submitter unplugs: what belongs together comes together.
    fn submit(&mut self, batch: &mut Vec<Box<Request>>);

    /// Appends completions to `out`, as many as there are now (or a bounded batch of them), without blocking.
    fn poll(&mut self, out: &mut Vec<Completion>);

    /// Asks to be woken through the descriptor; the last check before sleeping.
    fn arm(&mut self) -> Readiness;

    /// The descriptor was readable: forget that, so that it isn't reported for ever. Called whether or not
    /// anything is in flight.
    fn woken(&mut self) {}

    /// Readable when there may be completions; `None` if `submit` completes everything at once or by deadline. A queue may have none before its
    /// first request, so that idle disks cost nothing: ask again after [`DeviceQueue::arm`]. Once there is one, it stays the same.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;
}

impl Queue {
    /// Opens a queue of `device` and wraps it in the handle that checks.
    pub fn open(device: &Arc<dyn BlockDevice>, context: &QueueContext) -> Result<Queue, Error> {
        let inner = device.open_device_queue(context)?;
        Ok(Queue::from_parts(Arc::clone(device), inner, context))
    }
}
