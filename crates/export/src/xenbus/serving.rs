//! One front end's queues: attached to a disk, observed, and detached again.

use super::host::{Attachment, DiskHost};
use super::inbox::{ConnectionEvent, Inbox};
use super::{BackendNegotiation, Connector};
use pvblk_backend::{BlkifQueueParts, Fence, Pressure, Seldom, seldom};
use pvblk_block::{BlockDevice, DeviceEvent, Error, Subscription};
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_protocol::xenbus::number::sentence;
use pvblk_protocol::xenbus::{BackendOffers, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A connector whose queues are those of a [`Serving`].
pub(crate) trait Serves: Connector {
    /// The queues of this connector.
    fn serving(&mut self) -> &mut Serving;

    /// Name in log lines.
    fn name(&self) -> String;
}

/// Turns an event from another thread into a step of the handshake.
pub(crate) fn handle_event(
    event: ConnectionEvent,
    negotiation: &mut BackendNegotiation,
    store: &mut dyn Store,
    connector: &mut impl Serves,
) -> Result<(), Error> {
    let serving = connector.serving();
    match event {
        ConnectionEvent::Ended {
            generation, reason, ..
        } if serving.is_serving(generation) => {
            negotiation.break_off(store, connector, &sentence(&reason))
        }
        ConnectionEvent::Drained { generation, .. } if serving.drained(generation) => {
            negotiation.drained(store, connector)
        }
        ConnectionEvent::Resized { .. } => negotiation.resize(store, serving.sectors()),
        ConnectionEvent::DeviceGone { .. } => {
            negotiation.break_off(store, connector, "the disk's device is gone")
        }
        ConnectionEvent::Ended { .. }
        | ConnectionEvent::Drained { .. }
        | ConnectionEvent::FenceOpened { .. }
        | ConnectionEvent::Stop => Ok(()),
    }
}

/// Times at which a server's stop goes on to its next step.
#[derive(Clone, Copy)]
pub(crate) struct StopDeadlines {
    /// End of the time in which front ends may disconnect in order.
    pub grace: Instant,
    /// End of the time in which requests in flight may end.
    pub end: Instant,
}

struct RunningQueues {
    attachment: Box<dyn Attachment>,
    detaching: bool,
    _events: Subscription,
}

/// A connector's part that doesn't depend on the transport. Events of the connection go to an inbox, with the
/// connection's number.
pub(crate) struct Serving {
    host: Arc<dyn DiskHost>,
    inbox: Arc<Inbox>,
    id: u64,
    /// The disk's name.
    pub disk: String,
    /// The front end's name, for logs.
    pub front: String,
    pub device: Arc<dyn BlockDevice>,
    /// Offers to the front end.
    pub offers: BackendOffers,
    fence: Arc<Fence>,
    /// An event about the fence is in the inbox, or will be.
    waits_for_fence: Arc<AtomicBool>,
    generation: u64,
    running: Option<RunningQueues>,
    /// An event about a resize is in the inbox.
    resize_noted: Arc<AtomicBool>,
}

impl Serving {
    /// Creates the serving of connection `id`, without queues, for the disk and front end of these names.
    pub fn new(
        host: &Arc<dyn DiskHost>,
        inbox: &Arc<Inbox>,
        id: u64,
        (disk, front): (String, String),
        device: Arc<dyn BlockDevice>,
    ) -> Serving {
        let fence = host.fence(&disk).unwrap_or_default();
        Serving {
            host: Arc::clone(host),
            inbox: Arc::clone(inbox),
            id,
            disk,
            front,
            device,
            offers: host.offers(),
            fence,
            waits_for_fence: Arc::default(),
            generation: 0,
            running: None,
            resize_noted: Arc::default(),
        }
    }

    /// Implements [`Connector::refuse`]; `name` is the connector's.
    pub fn refuse(&self, name: &str, why: &str) {
        seldom!(warn, Seldom::of(&self.disk, "refused"), "{name}: {why}");
    }

    /// Logs that a connection was made.
    pub fn connected(&self, what: std::fmt::Arguments<'_>) {
        seldom!(info, Seldom::of(&self.disk, "connected"), "{what}");
    }

    /// Memory pressure that limits buffers for the front end's data.
    pub fn pressure(&self) -> Arc<Pressure> {
        self.host.pressure()
    }

    /// Records that a detach is done; true if it was that of the present queues.
    pub fn drained(&mut self, generation: u64) -> bool {
        let ours = generation == self.generation;
        if ours {
            self.running = None;
        }
        ours
    }

    /// True while there are queues, including those that are ending.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// True while requests of an earlier front end are in flight.
    pub fn is_detaching(&self) -> bool {
        self.running.as_ref().is_some_and(|r| r.detaching)
    }

    /// True for the present queues, and only while they aren't ending.
    pub fn is_serving(&self, generation: u64) -> bool {
        generation == self.generation && self.running.as_ref().is_some_and(|r| !r.detaching)
    }

    /// The device's size in whole logical sectors, in units of 512 bytes. Call it after a resize event.
    pub fn sectors(&self) -> u64 {
        self.resize_noted.store(false, Ordering::Release);
        whole_sectors(self.device.as_ref())
    }

    /// Attaches the queues; returns the disk as the front end is to see it. After an error none is attached.
    pub fn attach(&mut self, queues: Vec<BlkifQueueParts>) -> Result<DiskProperties, Error> {
        self.generation += 1;
        let (inbox, id, generation) = (Arc::clone(&self.inbox), self.id, self.generation);
        let told = AtomicBool::new(false);
        let ended = Arc::new(move |reason| {
            if !told.swap(true, Ordering::AcqRel) {
                inbox.put(ConnectionEvent::Ended {
                    id,
                    generation,
                    reason,
                });
            }
        });
        // Subscribe before reading the size, so that no change is missed.
        self.resize_noted.store(false, Ordering::Release);
        let events = self.subscribe();
        let attachment = self.host.attach(&self.disk, &self.front, queues, ended)?;
        self.running = Some(RunningQueues {
            attachment,
            detaching: false,
            _events: events,
        });
        Ok(properties(self.device.as_ref(), &self.offers))
    }

    /// Lets the requests in flight end, then frees everything. True if that has happened already; otherwise an event
    /// follows. May be called any number of times.
    pub fn detach(&mut self) -> bool {
        let Some(running) = &mut self.running else {
            return true;
        };
        if !running.detaching {
            running.detaching = true;
            let (inbox, id, generation) = (Arc::clone(&self.inbox), self.id, self.generation);
            let closed = self.fence.close();
            running.attachment.detach(Box::new(move || {
                drop(closed);
                inbox.put(ConnectionEvent::Drained { id, generation });
            }));
        }
        false
    }

    /// True if the front end may begin: no requests of an earlier one are in flight on the disk. Otherwise an event
    /// follows when that has changed.
    pub fn may_begin(&self) -> bool {
        if !self.fence.is_closed() {
            return true;
        }
        if self.waits_for_fence.swap(true, Ordering::AcqRel) {
            return false;
        }
        let (inbox, id) = (Arc::clone(&self.inbox), self.id);
        let waits = Arc::clone(&self.waits_for_fence);
        let told = self.fence.when_open(move || {
            waits.store(false, Ordering::Release);
            inbox.put(ConnectionEvent::FenceOpened { id });
        });
        if !told {
            self.waits_for_fence.store(false, Ordering::Release);
        }
        !told
    }

    fn subscribe(&self) -> Subscription {
        let (inbox, id) = (Arc::clone(&self.inbox), self.id);
        let (noted, gone) = (Arc::clone(&self.resize_noted), AtomicBool::new(false));
        self.device.events().subscribe(move |event| match event {
            DeviceEvent::Resized { .. } => {
                if !noted.swap(true, Ordering::AcqRel) {
                    inbox.put(ConnectionEvent::Resized { id });
                }
            }
            DeviceEvent::Gone => {
                if !gone.swap(true, Ordering::AcqRel) {
                    inbox.put(ConnectionEvent::DeviceGone { id });
                }
            }
        })
    }
}

fn whole_sectors(device: &dyn BlockDevice) -> u64 {
    let unit = device.limits().sectors_per_block().max(1);
    let sectors = device.capacity_sectors();
    sectors - sectors % unit
}

/// Describes a device by blkif's properties. Write-through devices offer no flush: every completed write is stable
/// already.
fn properties(device: &dyn BlockDevice, offers: &BackendOffers) -> DiskProperties {
    let (limits, incarnation) = (device.limits(), device.incarnation());
    let writable = !limits.read_only;
    let discard = writable && limits.discard_granularity_bytes > 0;
    DiskProperties {
        sectors: whole_sectors(device),
        sector_size: limits.logical_sector_bytes,
        physical_sector_size: limits.physical_sector_bytes,
        read_only: limits.read_only,
        flush: writable && limits.volatile_cache,
        barrier: writable && offers.barrier,
        discard,
        discard_secure: false,
        discard_granularity: if discard {
            limits.discard_granularity_bytes
        } else {
            0
        },
        persistent: offers.persistent,
        max_indirect_segments: offers.indirect_limit(),
        cache_mark: incarnation.cache,
        contents_mark: incarnation.contents,
    }
}
