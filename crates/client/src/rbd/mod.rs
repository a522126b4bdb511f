//! Images of a Ceph cluster, through librbd.
//!
//! Requests are operations of librbd, which has threads of its own; their callbacks leave the operation in the queue's
//! [`CompletionQueue`](pvblk_block::stacked::CompletionQueue), and that is all that runs there. An image that is opened for writing has the exclusive lock.
//! If that is taken away nothing more is sent: docs/decisions/0031-rbd.md has the states of the lock and of a request.

mod clusters;
mod objects;
mod planted;
mod queue;
mod shared;
mod spec;

use objects::Objects;
use pvblk_block::{
    BlockDevice, Capabilities, Close, DeviceQueue, Error, EventHub, Extent, ExtentKind, Extents,
    Incarnation, Limits, LossMarks, QueueContext, Refresh,
};
use queue::RbdQueue;
use shared::Shared;
pub use spec::{OnLostLock, RbdSpec};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The mark of a cluster's stable storage, which doesn't end with this process or machine.
const STABLE: u64 = u64::from_be_bytes(*b"ceph-rbd");

/// An open image of a cluster.
pub struct RbdDisk {
    shared: Arc<Shared>,
}

impl RbdDisk {
    /// Connects to the cluster, opens the image, and takes its lock if it is opened for writing. Waits up to 30 s for the monitors, about as long for the
    /// lock of a client that is dead, and without a limit for OSDs.
    pub fn open(spec: &RbdSpec) -> Result<RbdDisk, Error> {
        if let Some(why) = spec.problem() {
            return Err(Error::config(format!("{spec}: {why}")));
        }
        let shared = Shared::open(spec.clone())?;
        Ok(RbdDisk { shared })
    }

    /// Why nothing is sent any more, if that is so.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure()
    }
}

impl BlockDevice for RbdDisk {
    fn describe(&self) -> String {
        self.shared.name.clone()
    }

    fn limits(&self) -> Limits {
        self.shared.limits.get().copied().unwrap_or_default()
    }

    fn capacity_sectors(&self) -> u64 {
        self.shared.capacity.sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let tracer = context
            .tracing
            .tracer(&self.describe(), context.index, context.submitter);
        let queue = RbdQueue::new(&self.shared, tracer)
            .map_err(|e| Error::os(format!("{}: opening a queue", self.shared.name), e))?;
        Ok(Box::new(queue))
    }

    fn events(&self) -> &EventHub {
        &self.shared.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            refresh: Some(self),
            extents: Some(self),
            incarnation: Some(self),
            close: Some(self),
            ..Capabilities::none()
        }
    }
}

impl Refresh for RbdDisk {
    fn refresh(&self) -> Result<(), Error> {
        self.shared.look_at_size();
        Ok(())
    }
}

impl Extents for RbdDisk {
    /// The first question asks the cluster once for the whole image, if it can tell without asking for each object. Only of a snapshot, and of an image
    /// whose lock is ours, the answer stays true.
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        let shared = &self.shared;
        let stays = shared.spec.is_locked() || shared.spec.snapshot.is_some();
        if shared.objects.get().is_none()
            && stays
            && let Some(image) = shared.image()
            && image.has_fast_diff().unwrap_or(false)
            && let (Ok(unit), Ok(bytes)) = (image.stripe_unit(), image.size())
            && let Some(objects) = Objects::new(unit, bytes)
        {
            // From here on writes that complete are marked.
            let is_first = shared.objects.set(objects).is_ok();
            if is_first
                && let Some(objects) = shared.objects.get()
                && let Err(e) = objects.learn(&image)
            {
                tracing::warn!("{}: asking for the parts with data: {e}", shared.name);
            }
        }
        match shared.objects.get() {
            Some(objects) => objects.extents(sector, sectors, out),
            None => {
                let first = out.len();
                Extent::push(out, first, sector, sector + sectors, ExtentKind::Data);
                Ok(())
            }
        }
    }
}

impl LossMarks for RbdDisk {
    fn incarnation(&self) -> Incarnation {
        let stays = self.shared.writes_stay.load(Ordering::Relaxed);
        Incarnation {
            cache: stays.then_some(STABLE),
            contents: None,
        }
    }
}

impl Close for RbdDisk {
    /// Gives the lock back. Errors if it was lost before, with the reason.
    fn close(&self) -> Result<(), Error> {
        self.shared.close()
    }
}
