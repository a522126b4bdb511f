//! The interface between users of blocks and devices.

use crate::trace::Tracing;
use crate::{Capabilities, Completion, Error, EventHub, Limits, MergeCounts, Queue, Request};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// Code that stores or forwards blocks. All users of a device share it.
///
/// A device over one other device implements [`crate::Decorator`] instead, and gets this trait with it. A
/// device over several makes its capabilities of [`crate::Forwards`].
pub trait BlockDevice: Send + Sync {
    /// A short description for messages: the volume's specification where there is one.
    fn describe(&self) -> String;

    /// Name of the device's layer in traces.
    fn floor(&self) -> String {
        self.describe()
    }

    /// Limits of the device, which are fixed while it is open.
    fn limits(&self) -> Limits;

    /// Capacity in sectors (512 B); may change, with a [`crate::DeviceEvent::Resized`].
    fn capacity_sectors(&self) -> u64;

    /// Opens one more queue. A queue is used by one thread at a time and shares no lock with others on its
    /// hot path. Users call [`Queue::open`] instead, whose handle adds the guarantees.
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error>;

    /// The hub that tells subscribers of changes.
    fn events(&self) -> &EventHub;

    /// The optional capabilities of the device. Cheap, but not for hot paths. Users call the methods of `dyn
    /// BlockDevice` named after the capabilities; each has a result for a device without the capability.
    fn capabilities(&self) -> Capabilities<'_>;
}

/// Properties of a queue to open.
#[derive(Clone)]
pub struct QueueContext {
    /// Most requests that the user will have in flight: at least 1.
    pub depth: u32,
    /// Number of the queue among its user's, from 0; a hint for spreading over a device's hardware queues.
    pub index: u32,
    /// Number of the submitter, for traces.
    pub submitter: u32,
    /// Destination of trace events.
    pub tracing: Tracing,
    /// Where the device counts requests that it merges into others. A device that opens queues of others for requests of its own gives those
    /// a count of their own.
    pub merges: Arc<MergeCounts>,
}

impl QueueContext {
    /// A context for `depth` requests in flight, not traced.
    pub fn new(depth: u32) -> QueueContext {
        QueueContext {
            depth,
            index: 0,
            submitter: 0,
            tracing: Tracing::off(),
            merges: Arc::default(),
        }
    }

    /// The same context without tracing.
    #[must_use]
    pub fn untraced(&self) -> QueueContext {
        QueueContext {
            tracing: Tracing::off(),
            ..self.clone()
        }
    }
}

/// The permission to sleep that a queue gives its user.
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
    /// Takes all requests of `batch`, in order. A device may merge within the batch: requests that belong
    /// together are in one batch.
    fn submit(&mut self, batch: &mut Vec<Box<Request>>);

    /// Appends completions to `out`, as many as there are now (or a bounded batch of them), without blocking.
    fn poll(&mut self, out: &mut Vec<Completion>);

    /// Asks to be woken through the descriptor; the last check before sleeping.
    fn arm(&mut self) -> Readiness;

    /// Clears the descriptor, which was readable, so that it isn't reported for ever. Called whether or not
    /// requests are in flight.
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
