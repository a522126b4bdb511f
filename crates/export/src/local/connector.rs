//! The resources of one connection on the back end's side.

use super::host::{Attachment, DiskHost};
use super::inbox::{Inbox, Note};
use super::mapper::LocalMapper;
use super::memory::{Budget, GuestMemory};
use crate::xenbus::{BackendOffers, Connector, FrontKeys, MAX_QUEUES};
use parking_lot::Mutex;
use pvblk_backend::BlkifQueueParts;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{BlockDevice, DeviceEvent, Error, Subscription};
use pvblk_frontend::DiskProperties;
use pvblk_ring::{BackRing, EventFdChannel};
use pvblk_sys::EventFd;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What all connections of a server share.
pub(super) struct Shared {
    pub host: Arc<dyn DiskHost>,
    pub inbox: Inbox,
    pub budget: Arc<Budget>,
    pub fence: Fence,
}

/// Disks on which requests of a front end that is gone are still at work. Nobody connects to them meanwhile: an old write could
/// land on a newer one (docs/decisions/0006-reconnect.md).
#[derive(Default)]
pub(super) struct Fence(Mutex<HashMap<String, usize>>);

impl Fence {
    /// One more front end of `disk` is gone with requests at work.
    pub fn close(&self, disk: &str) {
        *self.0.lock().entry(disk.to_owned()).or_default() += 1;
    }

    /// The requests of one of them have ended.
    pub fn open(&self, disk: &str) {
        let mut all = self.0.lock();
        if let Some(count) = all.get_mut(disk) {
            *count -= 1;
            if *count == 0 {
                all.remove(disk);
            }
        }
    }

    /// True if nobody may connect to `disk` now.
    pub fn is_closed(&self, disk: &str) -> bool {
        self.0.lock().contains_key(disk)
    }
}

/// Queues at work.
struct Running {
    attachment: Box<dyn Attachment>,
    detaching: bool,
    _events: Subscription,
}

/// Memory, event channels and queues of one connection.
pub(super) struct LocalConnector {
    shared: Arc<Shared>,
    id: u64,
    pub disk: String,
    pub front: String,
    pub device: Arc<dyn BlockDevice>,
    offers: BackendOffers,
    memory: Option<GuestMemory>,
    channels: BTreeMap<u32, EventFdChannel>,
    generation: u64,
    running: Option<Running>,
    /// A note about a resize is under way.
    resize_noted: Arc<AtomicBool>,
}

impl LocalConnector {
    pub fn new(
        shared: Arc<Shared>,
        id: u64,
        (disk, front): (String, String),
        device: Arc<dyn BlockDevice>,
        offers: BackendOffers,
    ) -> LocalConnector {
        LocalConnector {
            shared,
            id,
            disk,
            front,
            device,
            offers,
            memory: None,
            channels: BTreeMap::new(),
            generation: 0,
            running: None,
            resize_noted: Arc::default(),
        }
    }

    /// Takes the front end's memory, before it connects.
    pub fn take_memory(
        &mut self,
        file: OwnedFd,
        table_first: u32,
        table_frames: u32,
    ) -> Result<(), Error> {
        if self.running.is_some() || self.memory.is_some() {
            return Err(Error::protocol("MEMORY came a second time"));
        }
        self.memory = Some(GuestMemory::from_peer(file, table_first, table_frames)?);
        Ok(())
    }

    /// Takes an event channel, before the front end connects.
    pub fn take_channel(
        &mut self,
        port: u32,
        from_peer: OwnedFd,
        to_peer: OwnedFd,
    ) -> Result<(), Error> {
        if self.running.is_some() || self.channels.len() == MAX_QUEUES as usize {
            return Err(Error::protocol(format!(
                "CHANNEL {port} is too many, or too late"
            )));
        }
        let event =
            |fd| EventFd::from_peer(fd).map_err(|e| Error::os(format!("CHANNEL {port}"), e));
        let channel = EventFdChannel {
            to_peer: event(to_peer)?,
            from_peer: event(from_peer)?,
        };
        if port == 0 || self.channels.insert(port, channel).is_some() {
            return Err(Error::protocol(format!(
                "CHANNEL {port}: ports are unique and not 0"
            )));
        }
        Ok(())
    }

    /// A detach is done; true if it was that of the queues now.
    pub fn drained(&mut self, generation: u64) -> bool {
        let ours = generation == self.generation;
        if ours {
            self.running = None;
        }
        ours
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

    fn queues(
        &mut self,
        memory: &GuestMemory,
        front: &FrontKeys,
    ) -> Result<Vec<BlkifQueueParts>, Error> {
        let mapped = front.queues.len() * (memory.len() + front.ring.bytes());
        let owner = format!("disk {}: memory of front end {}", self.disk, self.front);
        let gauge = Gauge::fixed(owner, MemoryKind::Shared, mapped as u64);
        let mut queues = Vec::with_capacity(front.queues.len());
        for (i, keys) in front.queues.iter().enumerate() {
            let refuse = |e: Error| Error::new(e.kind(), format!("queue {i}: {e}"));
            let channel = self.channels.remove(&keys.event_channel).ok_or_else(|| {
                let port = keys.event_channel;
                Error::protocol(format!("queue {i}: event-channel {port} was not passed"))
            })?;
            let budget = &self.shared.budget;
            let mut mapper = LocalMapper::new(memory, budget, &gauge).map_err(refuse)?;
            let pages = mapper
                .map_ring(memory, budget, &keys.ring_refs)
                .map_err(refuse)?;
            let ring = BackRing::new(pages)
                .ok_or_else(|| Error::protocol(format!("queue {i}: no ring has that size")))?;
            queues.push(BlkifQueueParts {
                name: format!("disk {}, front end {}, queue {i}", self.disk, self.front),
                ring,
                channel: Box::new(channel),
                mapper: Box::new(mapper),
                max_indirect_segments: self.offers.indirect_limit(),
            });
        }
        Ok(queues)
    }

    fn subscribe(&self) -> Subscription {
        let (shared, id) = (Arc::clone(&self.shared), self.id);
        let (noted, gone) = (Arc::clone(&self.resize_noted), AtomicBool::new(false));
        self.device.events().subscribe(move |event| match event {
            DeviceEvent::Resized { .. } => {
                if !noted.swap(true, Ordering::AcqRel) {
                    shared.inbox.put(Note::Resized { id });
                }
            }
            DeviceEvent::Gone => {
                if !gone.swap(true, Ordering::AcqRel) {
                    shared.inbox.put(Note::DeviceGone { id });
                }
            }
        })
    }
}

impl Connector for LocalConnector {
    fn connect(&mut self, front: &FrontKeys) -> Result<DiskProperties, Error> {
        let memory = self
            .memory
            .take()
            .ok_or_else(|| Error::protocol("the rings were published before MEMORY was passed"))?;
        let queues = self.queues(&memory, front);
        // Channels that no queue named are of no use, and of no use after an error.
        self.channels.clear();
        let queues = queues?;
        self.generation += 1;
        let (shared, id, generation) = (Arc::clone(&self.shared), self.id, self.generation);
        let told = AtomicBool::new(false);
        let ended = Arc::new(move |reason| {
            if !told.swap(true, Ordering::AcqRel) {
                shared.inbox.put(Note::Ended {
                    id,
                    generation,
                    reason,
                });
            }
        });
        // Subscribed before the size is read, so that no change falls between.
        self.resize_noted.store(false, Ordering::Release);
        let events = self.subscribe();
        let attachment = self
            .shared
            .host
            .attach(&self.disk, &self.front, queues, ended)?;
        self.running = Some(Running {
            attachment,
            detaching: false,
            _events: events,
        });
        Ok(properties(self.device.as_ref(), &self.offers))
    }

    fn disconnect(&mut self) -> bool {
        self.memory = None;
        self.channels.clear();
        let Some(running) = &mut self.running else {
            return true;
        };
        if !running.detaching {
            running.detaching = true;
            let (shared, id, generation) = (Arc::clone(&self.shared), self.id, self.generation);
            running.attachment.detach(Box::new(move || {
                shared.inbox.put(Note::Drained { id, generation });
            }));
        }
        false
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
