//! Disks for front ends on rings: local ones and Xen guests.

use crate::config::ServeConfig;
use crate::hub::Hub;
use pvblk_backend::{BlkifQueueParts, Fence, Pressure};
use pvblk_block::{BlockDevice, Error};
use pvblk_export::xenbus::{Attachment, DiskHost, Ended, attach_queues};
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::xenbus::BackendOffers;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Lets the handshake find and attach disks.
pub struct RingHost {
    hub: Arc<Hub>,
    max_queues: u32,
    max_ring: RingSize,
    persistent: bool,
    attached: AtomicU64,
}

impl RingHost {
    /// Of the hub's disks, with what `config` lets front ends ask for.
    pub fn new(hub: Arc<Hub>, config: &ServeConfig) -> RingHost {
        RingHost {
            hub,
            max_queues: config.max_queues,
            max_ring: config.max_ring,
            persistent: config.persistent_grants,
            attached: AtomicU64::new(1),
        }
    }
}

impl DiskHost for RingHost {
    fn device(&self, disk: &str) -> Option<Arc<dyn BlockDevice>> {
        Some(Arc::clone(self.hub.disk(disk)?.device()))
    }

    fn fence(&self, disk: &str) -> Option<Arc<Fence>> {
        Some(Arc::clone(self.hub.disk(disk)?.fence()))
    }

    fn offers(&self) -> BackendOffers {
        BackendOffers {
            max_queues: Some(self.max_queues),
            max_ring: Some(self.max_ring),
            persistent: self.persistent,
            ..BackendOffers::default()
        }
    }

    fn pressure(&self) -> Arc<Pressure> {
        Arc::clone(self.hub.pressure())
    }

    fn attach(
        &self,
        disk: &str,
        front: &str,
        queues: Vec<BlkifQueueParts>,
        ended: Ended,
    ) -> Result<Box<dyn Attachment>, Error> {
        let disk = self
            .hub
            .disk(disk)
            .ok_or_else(|| Error::config(format!("no disk named {disk}")))?;
        let count = queues.len();
        // Front ends choose their names, and two may choose the same.
        let number = self.attached.fetch_add(1, Ordering::Relaxed);
        let user = disk
            .users()
            .enter(&format!("{front} (front end {number})"))?;
        let attached = attach_queues(queues, &ended, |source, on_end| {
            self.hub.attach_detachable(&disk, &user, source, on_end)
        })?;
        tracing::debug!("disk {}: {front} attached, {count} queues", disk.name());
        Ok(attached)
    }
}
