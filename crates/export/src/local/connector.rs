//! Resources of one connection on the back end's side.

use super::mapper::LocalMapper;
use super::memory::GuestMemory;
use crate::kit::MappingBudget;
use crate::xenbus::Connector;
use crate::xenbus::serving::{Serves, Serving};
use parking_lot::Mutex;
use pvblk_backend::{BlkifQueueParts, Service};
use pvblk_block::Error;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_protocol::blkif::{BackRing, EventFdChannel};
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_protocol::xenbus::{BackendOffers, FrontKeys, MAX_QUEUES};
use pvblk_sys::{Closer, PeerEvent, PeerFd};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Resources that all connections of a server share.
pub(super) struct LocalServerContext {
    pub service: Arc<Service>,
    pub offers: BackendOffers,
    pub budget: Arc<MappingBudget>,
    /// By disk: the closer of descriptors that its front ends send.
    pub closers: Mutex<HashMap<String, Arc<Closer>>>,
}

impl LocalServerContext {
    /// The closer of descriptors from front ends of this disk; `""` stands for front ends that have not named a disk.
    pub fn closer(&self, disk: &str) -> Arc<Closer> {
        Arc::clone(self.closers.lock().entry(disk.into()).or_default())
    }
}

/// Memory, event channels and queues of one connection.
pub(super) struct LocalConnector {
    shared: Arc<LocalServerContext>,
    pub serving: Serving,
    memory: Option<GuestMemory>,
    channels: BTreeMap<u32, EventFdChannel>,
}

impl LocalConnector {
    pub fn new(shared: Arc<LocalServerContext>, serving: Serving) -> LocalConnector {
        LocalConnector {
            shared,
            serving,
            memory: None,
            channels: BTreeMap::new(),
        }
    }

    /// Takes the front end's memory; only before it connects.
    pub fn take_memory(
        &mut self,
        file: PeerFd,
        table_first: u32,
        table_frames: u32,
    ) -> Result<(), Error> {
        if self.serving.front.is_at_work() || self.memory.is_some() {
            return Err(Error::protocol("the front end sent MEMORY a second time"));
        }
        self.memory = Some(GuestMemory::from_peer(file, table_first, table_frames)?);
        Ok(())
    }

    /// Takes an event channel; only before the front end connects.
    pub fn take_channel(
        &mut self,
        port: u32,
        from_peer: PeerFd,
        to_peer: PeerFd,
    ) -> Result<(), Error> {
        if self.serving.front.is_at_work() || self.channels.len() == MAX_QUEUES as usize {
            return Err(Error::protocol(format!(
                "CHANNEL {port}: there are too many event channels, or it was sent too late (after the rings were published)"
            )));
        }
        let event =
            |fd| PeerEvent::from_peer(fd).map_err(|e| Error::os(format!("CHANNEL {port}"), e));
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

    fn queues(
        &mut self,
        memory: &GuestMemory,
        front: &FrontKeys,
    ) -> Result<Vec<BlkifQueueParts>, Error> {
        let who = &self.serving;
        let mapped = front.queues.len() * (memory.len() + front.ring.bytes());
        let owner = format!("disk {}: memory of front end {}", who.disk, who.peer);
        let gauge = Gauge::fixed(owner, MemoryKind::Shared, mapped as u64);
        let mut queues = Vec::with_capacity(front.queues.len());
        for (i, keys) in front.queues.iter().enumerate() {
            let refuse = |e: Error| e.context(format!("queue {i}"));
            let channel = self.channels.remove(&keys.event_channel).ok_or_else(|| {
                let port = keys.event_channel;
                Error::protocol(format!("queue {i}: event-channel {port} was not passed"))
            })?;
            let budget = &self.shared.budget;
            let mut mapper = LocalMapper::new(memory, budget, &gauge).map_err(refuse)?;
            let pages = mapper
                .map_ring(memory, budget, &keys.ring_refs)
                .map_err(refuse)?;
            let ring = BackRing::with_abi(pages, front.abi).ok_or_else(|| {
                Error::protocol(format!("queue {i}: a ring has 1, 2, 4, 8 or 16 pages"))
            })?;
            queues.push(BlkifQueueParts {
                name: format!("disk {}, front end {}, queue {i}", who.disk, who.peer),
                ring,
                channel: Box::new(channel),
                mapper: Box::new(mapper),
                max_indirect_segments: who.offers.indirect_limit(),
            });
        }
        Ok(queues)
    }
}

impl Serves for LocalConnector {
    fn serving(&mut self) -> &mut Serving {
        &mut self.serving
    }

    fn name(&self) -> String {
        let Serving { disk, peer, .. } = &self.serving;
        format!("disk {disk}, front end {peer}")
    }
}

impl Connector for LocalConnector {
    fn enter(&mut self) -> Result<bool, Error> {
        self.serving.front.enter()
    }

    fn connect(&mut self, front: &FrontKeys) -> Result<DiskProperties, Error> {
        let memory = self
            .memory
            .take()
            .ok_or_else(|| Error::protocol("the rings were published before MEMORY was passed"))?;
        let queues = self.queues(&memory, front);
        // Channels that no queue uses are dropped, also after an error.
        self.channels.clear();
        let queues = queues?;
        let (name, count) = (self.name(), queues.len());
        let disk = self.serving.attach(queues)?;
        self.serving
            .connected(format_args!("{name}: {count} queues"));
        Ok(disk)
    }

    fn disconnect(&mut self) -> bool {
        self.memory = None;
        self.channels.clear();
        self.serving.front.leave()
    }

    fn refuse(&mut self, why: &str) {
        let name = self.name();
        self.serving.refuse(&name, why);
    }
}
