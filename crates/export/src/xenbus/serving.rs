//! One front end's queues at work: attached to a disk, watched, and detached again.

use super::host::{Attachment, DiskHost};
use super::inbox::{Inbox, Note};
use super::number::sentence;
use super::{BackendNegotiation, BackendOffers, Connector, Store};
use pvblk_backend::{BlkifQueueParts, Fence, Pressure, Seldom, seldom};
use pvblk_block::{BlockDevice, DeviceEvent, Error, Subscription};
use pvblk_frontend::DiskProperties;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A connector whose queues are those of a [`Serving`].
pub(crate) trait Serves: Connector {
    /// Its queues.
    fn serving(&mut self) -> &mut Serving;

    /// For logs.
    fn name(&self) -> String;
}

/// What another thread told of a connection is a step of its handshake.
pub(crate) fn note(
    note: Note,
    negotiation: &mut BackendNegotiation,
    store: &mut dyn Store,
    connector: &mut impl Serves,
) -> Result<(), Error> {
    let serving = connector.serving();
    match note {
        Note::Ended {
            generation, reason, ..
        } if serving.is_serving(generation) => {
            negotiation.break_off(store, connector, &sentence(&reason))
        }
        Note::Drained { generation, .. } if serving.drained(generation) => {
            negotiation.drained(store, connector)
        }
        Note::Resized { .. } => negotiation.resize(store, serving.sectors()),
        Note::DeviceGone { .. } => {
            negotiation.break_off(store, connector, "the disk's device is gone")
        }
        Note::Ended { .. } | Note::Drained { .. } | Note::FenceOpened { .. } | Note::Stop => Ok(()),
    }
}

/// Queues at work.
struct Running {
    attachment: Box<dyn Attachment>,
    detaching: bool,
    _events: Subscription,
}

/// What a connector has besides memory and event channels. What happens to it is told to an inbox, by the connection's number.
pub(crate) struct Serving {
    host: Arc<dyn DiskHost>,
    inbox: Arc<Inbox>,
    id: u64,
    /// The disk's name.
    pub disk: String,
    /// The front end's name, for logs.
    pub front: String,
    /// The disk itself.
    pub device: Arc<dyn BlockDevice>,
    /// What the front end was offered.
    pub offers: BackendOffers,
    fence: Arc<Fence>,
    /// A note about the fence is under way.
    waits_for_fence: Arc<AtomicBool>,
    generation: u64,
    running: Option<Running>,
    /// A note about a resize is under way.
    resize_noted: Arc<AtomicBool>,
}

impl Serving {
    /// Nothing at work yet, for the connection `id`, to the disk and front end of these names.
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

    /// For [`Connector::refuse`]; `name` is the connector's.
    pub fn refuse(&self, name: &str, why: &str) {
        seldom!(warn, Seldom::of(&self.disk, "refused"), "{name}: {why}");
    }

    /// Logs that a connection was made.
    pub fn connected(&self, what: std::fmt::Arguments<'_>) {
        seldom!(info, Seldom::of(&self.disk, "connected"), "{what}");
    }

    /// What buffers for its data give way to.
    pub fn pressure(&self) -> Arc<Pressure> {
        self.host.pressure()
    }

    /// A detach is done; true if it was that of the queues now.
    pub fn drained(&mut self, generation: u64) -> bool {
        let ours = generation == self.generation;
        if ours {
            self.running = None;
        }
        ours
    }

    /// True while there are queues, ending ones included.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// True while requests of a front end that was let go of are at work.
    pub fn is_detaching(&self) -> bool {
        self.running.as_ref().is_some_and(|r| r.detaching)
    }

    /// True for the queues now, and only while they aren't ending.
    pub fn is_serving(&self, generation: u64) -> bool {
        generation == self.generation && self.running.as_ref().is_some_and(|r| !r.detaching)
    }

    /// The device's size in whole logical sectors, in 512-byte sectors. Called after a resize was noted.
    pub fn sectors(&self) -> u64 {
        self.resize_noted.store(false, Ordering::Release);
        whole_sectors(self.device.as_ref())
    }

    /// Puts the queues to work; returns the disk as the front end is to see it. After an error nothing is at work.
    pub fn attach(&mut self, queues: Vec<BlkifQueueParts>) -> Result<DiskProperties, Error> {
        self.generation += 1;
        let (inbox, id, generation) = (Arc::clone(&self.inbox), self.id, self.generation);
        let told = AtomicBool::new(false);
        let ended = Arc::new(move |reason| {
            if !told.swap(true, Ordering::AcqRel) {
                inbox.put(Note::Ended {
                    id,
                    generation,
                    reason,
                });
            }
        });
        // Subscribed before the size is read, so that no change falls between.
        self.resize_noted.store(false, Ordering::Release);
        let events = self.subscribe();
        let attachment = self.host.attach(&self.disk, &self.front, queues, ended)?;
        self.running = Some(Running {
            attachment,
            detaching: false,
            _events: events,
        });
        Ok(properties(self.device.as_ref(), &self.offers))
    }

    /// Lets the requests in flight end, then frees everything; true if that has happened already, else there is a note later.
    /// Called any number of times.
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
                inbox.put(Note::Drained { id, generation });
            }));
        }
        false
    }

    /// True if its front end may begin: no requests of another one that is gone are at work on the disk. Otherwise there is a note when
    /// that has changed.
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
            inbox.put(Note::FenceOpened { id });
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
                    inbox.put(Note::Resized { id });
                }
            }
            DeviceEvent::Gone => {
                if !gone.swap(true, Ordering::AcqRel) {
                    inbox.put(Note::DeviceGone { id });
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

/// A device in blkif's words. Write-through devices offer no flush: every completed write is stable already.
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
