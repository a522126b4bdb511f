//! Disks for virtual machines.

use crate::hub::Hub;
use pvblk_backend::{OnEnd, RequestSource};
use pvblk_block::{BlockDevice, Error};
use pvblk_export::vhost_user::{Detach, VhostHost};
use std::sync::Arc;

/// Lets vhost-user sessions find disks and attach queues.
pub struct VhostDisks {
    hub: Arc<Hub>,
    queues: u32,
    most_unallocated: Option<u64>,
}

impl VhostDisks {
    pub fn new(hub: Arc<Hub>, queues: u32, most_unallocated: Option<u64>) -> VhostDisks {
        VhostDisks {
            hub,
            queues,
            most_unallocated,
        }
    }
}

impl VhostHost for VhostDisks {
    fn device(&self, disk: &str) -> Option<Arc<dyn BlockDevice>> {
        Some(Arc::clone(self.hub.disk(disk)?.device()))
    }

    fn queues(&self) -> u16 {
        // At most 64: see `config`.
        self.queues as u16
    }

    fn most_unallocated(&self) -> Option<u64> {
        self.most_unallocated
    }

    fn attach(
        &self,
        disk: &str,
        source: Box<dyn RequestSource>,
        on_end: OnEnd,
    ) -> Result<Detach, Error> {
        let found = self.hub.disk(disk);
        let found = found.ok_or_else(|| Error::config(format!("no disk named {disk}")))?;
        // One machine at a time uses a disk's socket.
        let user = found.users().enter("a virtual machine by vhost-user")?;
        self.hub.attach_detachable(&found, &user, source, on_end)
    }
}
