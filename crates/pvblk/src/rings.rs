//! Disks for front ends on rings: local ones and Xen guests.

use crate::config::ServeConfig;
use crate::hub::{Hub, Key};
use parking_lot::Mutex;
use pvblk_backend::{BlkifQueueParts, BlkifSource, Pressure, SourceEnd};
use pvblk_block::{BlockDevice, Error};
use pvblk_export::xenbus::{Attachment, BackendOffers, DiskHost};
use pvblk_ring::RingSize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Lets the handshake find and attach disks.
pub struct RingHost {
    hub: Arc<Hub>,
    max_queues: u32,
    max_ring: RingSize,
    persistent: bool,
}

impl RingHost {
    /// Of the hub's disks, with what `config` lets front ends ask for.
    pub fn new(hub: Arc<Hub>, config: &ServeConfig) -> RingHost {
        RingHost {
            hub,
            max_queues: config.max_queues,
            max_ring: config.max_ring,
            persistent: config.persistent_grants,
        }
    }
}

type Done = Box<dyn FnOnce() + Send>;

/// Counts the queues of one front end that are still there.
struct Left {
    queues: AtomicUsize,
    done: Mutex<Option<Done>>,
}

impl Left {
    fn one_less(&self) {
        if self.queues.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(done) = self.done.lock().take()
        {
            done();
        }
    }
}

struct Attached {
    hub: Arc<Hub>,
    keys: Vec<Key>,
    left: Arc<Left>,
}

impl Attachment for Attached {
    fn detach(&mut self, done: Done) {
        // One more than there are queues, so that `done` is in place before it can be called.
        *self.left.done.lock() = Some(done);
        for key in &self.keys {
            self.hub.detach(*key);
        }
        self.left.one_less();
    }
}

impl DiskHost for RingHost {
    fn device(&self, disk: &str) -> Option<Arc<dyn BlockDevice>> {
        Some(Arc::clone(self.hub.disk(disk)?.device()))
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
        ended: Arc<dyn Fn(String) + Send + Sync>,
    ) -> Result<Box<dyn Attachment>, Error> {
        let disk = self
            .hub
            .disk(disk)
            .ok_or_else(|| Error::config(format!("no disk named {disk}")))?;
        let count = queues.len();
        let left = Arc::new(Left {
            queues: AtomicUsize::new(count + 1),
            done: Mutex::new(None),
        });
        let mut attached = Attached {
            hub: Arc::clone(&self.hub),
            keys: Vec::new(),
            left: Arc::clone(&left),
        };
        for parts in queues {
            let (left, ended) = (Arc::clone(&left), Arc::clone(&ended));
            let source = Box::new(BlkifSource::new(parts));
            let result = self.hub.attach(disk, source, move |end| {
                left.one_less();
                if let SourceEnd::Broken(e) = end {
                    ended(e.to_string());
                }
            });
            match result {
                Ok(key) => attached.keys.push(key),
                Err(e) => {
                    for key in &attached.keys {
                        self.hub.detach(*key);
                    }
                    return Err(e);
                }
            }
        }
        tracing::info!("disk {}: {front} attached, {count} queues", disk.name());
        Ok(Box::new(attached))
    }
}
