//! Rings, event channels and pages of one guest's disk.

use super::hypervisor::Hypervisor;
use super::mapper::{CutOff, XenMapper};
use crate::kit::MappingBudget;
use crate::xenbus::Connector;
use crate::xenbus::serving::{Serves, Serving};
use pvblk_backend::BlkifQueueParts;
use pvblk_block::Error;
use pvblk_protocol::blkif::BackRing;
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_protocol::xenbus::{FrontKeys, QueueKeys};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Resources of one handshake.
pub(super) struct XenConnector {
    pub serving: Serving,
    pub hypervisor: Arc<dyn Hypervisor>,
    /// Limit of persistent mappings of all disks of the server.
    pub budget: Arc<MappingBudget>,
    /// The guest's domain.
    pub domid: u16,
    /// Stops copies to and from the guest's pages; one for each connection.
    pub cut_off: CutOff,
}

impl XenConnector {
    fn queue(
        &self,
        index: usize,
        keys: &QueueKeys,
        front: &FrontKeys,
        persistent: bool,
    ) -> Result<BlkifQueueParts, Error> {
        let who = &self.serving;
        let os = |what: String| move |e| Error::os(format!("queue {index}: {what}"), e);
        let pages = self.hypervisor.pages(self.domid);
        let pages = pages.map_err(os("opening /dev/xen/gntdev".into()))?;
        let name = format!("disk {}, {}, queue {index}", who.disk, who.peer);
        let owner = format!("disk {}: copies for {}, queue {index}", who.disk, who.peer);
        let mapper = XenMapper::new(
            pages,
            persistent.then_some(&self.budget),
            &self.cut_off,
            who.front.service().pressure(),
            (&who.disk, &owner),
            who.front.device().buffer_source(),
        );
        let ring = mapper.map_ring(&keys.ring_refs);
        let ring = ring.map_err(os(format!("mapping ring-ref {:?}", keys.ring_refs)))?;
        let ring = BackRing::with_abi(ring, front.abi).ok_or_else(|| {
            Error::protocol(format!("queue {index}: a ring has 1, 2, 4, 8 or 16 pages"))
        })?;
        let port = keys.event_channel;
        let channel = self.hypervisor.bind(self.domid, port);
        let channel = channel.map_err(os(format!("binding event-channel {port}")))?;
        Ok(BlkifQueueParts {
            name,
            ring,
            channel,
            mapper: Box::new(mapper),
            max_indirect_segments: who.offers.indirect_limit(),
        })
    }
}

impl Serves for XenConnector {
    fn serving(&mut self) -> &mut Serving {
        &mut self.serving
    }

    fn name(&self) -> String {
        let Serving { disk, peer, .. } = &self.serving;
        format!("disk {disk}, {peer}")
    }
}

impl Connector for XenConnector {
    fn enter(&mut self) -> Result<bool, Error> {
        self.serving.front.enter()
    }

    fn connect(&mut self, front: &FrontKeys) -> Result<DiskProperties, Error> {
        self.cut_off = CutOff::default();
        let persistent = front.persistent && self.serving.offers.persistent;
        let queues = front.queues.iter().enumerate();
        let queues = queues.map(|(i, keys)| self.queue(i, keys, front, persistent));
        let queues = queues.collect::<Result<Vec<_>, Error>>()?;
        let (count, pages) = (queues.len(), front.ring.pages());
        let disk = self.serving.attach(queues)?;
        let (name, kept) = (
            self.name(),
            if persistent { "persistent" } else { "copied" },
        );
        self.serving.connected(format_args!(
            "{name}: {count} queues of {pages} pages, grants {kept}"
        ));
        Ok(disk)
    }

    fn disconnect(&mut self) -> bool {
        // The front end has left or was disconnected: its references may grant other pages from now on.
        self.cut_off.store(true, Ordering::Release);
        self.serving.front.leave()
    }

    fn refuse(&mut self, why: &str) {
        let name = self.name();
        self.serving.refuse(&name, why);
    }
}
