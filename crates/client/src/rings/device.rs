//! [`Frontend`]: the block device.

use super::connection::{Link, max_sectors};
use super::frames::Frames;
use super::hardware_queue::has_flush;
use super::parts::FrontParts;
use super::plug::{InStream, MergePolicy};
use super::software_queue::SoftwareQueue;
use super::statistics::Statistics;
use pvblk_block::trace::Tracer;
use pvblk_block::{
    BlockDevice, BufferSource, Buffers, Capabilities, Capacity, Clock, DeviceEvent, DeviceQueue,
    Error, EventHub, Limits, QueueContext, SystemClock,
};
use pvblk_protocol::xenbus::DiskProperties;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A disk that a back end serves over rings.
///
/// It may outlive its back end: between [`Frontend::suspend`] and [`Frontend::reconnect`] requests wait, and those
/// that were in flight are replayed. See docs/decisions/0006-reconnect.md.
pub struct Frontend<M: MergePolicy = InStream> {
    name: String,
    /// Of the first connection; later ones can do as much.
    properties: DiskProperties,
    capacity: Capacity,
    events: EventHub,
    frames: Arc<Frames>,
    link: Arc<Link<M>>,
    open: OpenQueue<M>,
}

type OpenQueue<M> =
    fn(&Arc<Link<M>>, &QueueContext, Tracer) -> std::io::Result<Box<dyn DeviceQueue>>;

fn open<M: MergePolicy>(
    link: &Arc<Link<M>>,
    context: &QueueContext,
    tracer: Tracer,
) -> std::io::Result<Box<dyn DeviceQueue>> {
    Ok(Box::new(SoftwareQueue::new(link, context, tracer)?))
}

/// As [`open`]. Not generic, so that the queues of every front end that serves are compiled in this crate, where the compiler inlines what they call;
/// a generic function is compiled in the crate that names its type.
fn open_in_stream(
    link: &Arc<Link<InStream>>,
    context: &QueueContext,
    tracer: Tracer,
) -> std::io::Result<Box<dyn DeviceQueue>> {
    open(link, context, tracer)
}

impl Frontend {
    /// A device over negotiated queues. Errors if the memory is too small for their indirect pages and bounces.
    pub fn new(parts: FrontParts) -> Result<Arc<Frontend>, Error> {
        Frontend::build(parts, Arc::new(SystemClock), open_in_stream)
    }
}

impl<M: MergePolicy> Frontend<M> {
    /// As [`Frontend::new`], merging otherwise, and with a clock of the caller's.
    pub fn with_policy(
        parts: FrontParts,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Frontend<M>>, Error> {
        Frontend::build(parts, clock, open)
    }

    fn build(
        parts: FrontParts,
        clock: Arc<dyn Clock>,
        open: OpenQueue<M>,
    ) -> Result<Arc<Frontend<M>>, Error> {
        let (name, properties) = (parts.name.clone(), parts.properties);
        let frames = Arc::new(Frames::new(
            Arc::clone(parts.granter.memory()),
            parts.granter.first_data_frame(),
        ));
        Ok(Arc::new(Frontend {
            name,
            properties,
            capacity: Capacity::new(properties.sectors),
            events: EventHub::default(),
            link: Arc::new(Link::new(parts, &frames, clock)?),
            frames,
            open,
        }))
    }

    /// Rings of the connection, or of the last one.
    pub fn queues(&self) -> usize {
        self.link.last().hardware.len()
    }

    /// Entries of each ring of the connection, or of the last one.
    pub fn ring_entries(&self) -> u32 {
        let connection = self.link.last();
        let first = connection.hardware.first();
        first.map_or(0, |q| q.state.lock().entries())
    }

    /// Starts to count on all rings of this connection, for [`Frontend::statistics`]. It costs a look at the clock
    /// for each batch.
    pub fn count(&self) {
        for queue in &self.link.last().hardware {
            queue.state.lock().count();
        }
    }

    /// The counts since [`Frontend::count`], all rings together; nothing without it, nor after a reconnect.
    pub fn statistics(&self) -> Statistics {
        let mut all = Statistics::default();
        for queue in &self.link.last().hardware {
            if let Some(one) = queue.state.lock().statistics() {
                all.add(&one);
            }
        }
        all
    }

    /// The back end published another capacity, in 512-byte sectors.
    pub fn resize(&self, sectors: u64) {
        if self.capacity.set(sectors) {
            self.events.raise(DeviceEvent::Resized { sectors });
        }
    }

    /// With true, a ring that breaks is left for [`Frontend::suspend`]; with false, as at first, all requests on it end with errors.
    pub fn set_recovery(&self, recovers: bool) {
        let flag = &self.link.trouble.recovers;
        flag.store(recovers, Ordering::Relaxed);
    }

    /// Readable when a ring broke: see [`Frontend::take_trouble`].
    pub fn trouble_fd(&self) -> BorrowedFd<'_> {
        self.link.trouble.bell.as_fd()
    }

    /// Why a ring of this connection broke, if one did. Told once; the connection is of no more use.
    pub fn take_trouble(&self) -> Option<String> {
        self.link.trouble.take()
    }

    /// True between a connection and its end.
    pub fn is_connected(&self) -> bool {
        self.link.is_up()
    }

    /// The connection is over. Requests in flight are kept and wait, as does all that is submitted from now on,
    /// for [`Frontend::reconnect`] or [`Frontend::disconnect`].
    pub fn suspend(&self) {
        self.link.suspend();
    }

    /// Goes on with another connection to the same disk, on the same memory: fewer rings or smaller ones will do.
    /// Requests that wait are submitted to it by the threads that submitted them.
    ///
    /// No back end may still act on requests of an earlier connection. Errors, and still waits, if the disk can do
    /// less than before, or has lost what it held.
    pub fn reconnect(&self, parts: FrontParts) -> Result<(), Error> {
        let sectors = parts.properties.sectors;
        self.link.resume(parts)?;
        self.resize(sectors);
        Ok(())
    }

    /// The back end is gone: everything in flight and all that comes later completes with an error.
    pub fn disconnect(&self, why: &str) {
        tracing::error!("{}: given up: {why}", self.name);
        self.events.set_gone();
        self.link.give_up();
        self.events.raise(DeviceEvent::Gone);
    }
}

impl<M: MergePolicy> BlockDevice for Frontend<M> {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn floor(&self) -> String {
        "front".into()
    }

    fn limits(&self) -> Limits {
        let p = &self.properties;
        Limits {
            logical_sector_bytes: p.sector_size,
            physical_sector_bytes: p.physical_sector_size,
            optimal_bytes: 0,
            readahead_bytes: 0,
            caches_reads: false,
            max_sectors: max_sectors(p),
            max_segments: 1024,
            discard_granularity_bytes: if p.discard { p.discard_granularity } else { 0 },
            write_zeroes: false,
            read_only: p.read_only,
            volatile_cache: has_flush(p),
            non_rotational: true,
            exclusive: false,
        }
    }

    fn capacity_sectors(&self) -> u64 {
        self.capacity.sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let tracer = context
            .tracing
            .tracer(&self.floor(), context.index, context.submitter);
        (self.open)(&self.link, context, tracer)
            .map_err(|e| Error::os(format!("{}: opening a queue", self.name), e))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            buffers: Some(self),
            ..Capabilities::none()
        }
    }
}

impl<M: MergePolicy> Buffers for Frontend<M> {
    fn buffer_source(&self) -> Arc<dyn BufferSource> {
        let frames: Arc<Frames> = Arc::clone(&self.frames);
        frames
    }
}
