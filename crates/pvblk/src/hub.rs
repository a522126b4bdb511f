//! What is being served: disks, and the sources that are attached to them.

use crate::control::Asked;
use parking_lot::{Condvar, Mutex};
use pvblk_backend::{Backend, Disk, OnEnd, Pressure, RequestSource, SourceEnd, SourceId};
use pvblk_block::{BlockDevice, Completion, Error, Op, Queue, QueueContext, Request, Status};
use pvblk_export::nbd::{ExportInfo, ExportTable};
use pvblk_export::vhost_user::Detach;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Disks in the order given, and every live source.
pub struct Hub {
    backend: Backend,
    disks: Vec<Arc<Disk>>,
    live: Mutex<HashMap<u64, Option<SourceId>>>,
    ended: Condvar,
    next: AtomicU64,
    pressure: Arc<Pressure>,
}

/// How long the last flush may take.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(20);

/// A source's key in the hub.
pub type Key = u64;

impl Hub {
    pub fn new(backend: Backend, disks: Vec<Arc<Disk>>, pressure: Arc<Pressure>) -> Arc<Hub> {
        disks.iter().for_each(|d| pressure.add_device(d.device()));
        Arc::new(Hub {
            backend,
            disks,
            live: Mutex::default(),
            ended: Condvar::new(),
            next: AtomicU64::new(1),
            pressure,
        })
    }

    /// What buffers give way to.
    pub fn pressure(&self) -> &Arc<Pressure> {
        &self.pressure
    }

    pub fn disks(&self) -> &[Arc<Disk>] {
        &self.disks
    }

    pub fn disk(&self, name: &str) -> Option<&Arc<Disk>> {
        self.disks.iter().find(|d| d.name() == name)
    }

    /// The disk of an NBD export; the empty name is the first disk's.
    pub fn export(&self, name: &str) -> Option<&Arc<Disk>> {
        match name {
            "" => self.disks.first(),
            _ => self.disk(name),
        }
    }

    /// Serves `source`; `ended` is called on a worker when all of it is gone.
    pub fn attach(
        self: &Arc<Hub>,
        disk: &Disk,
        source: Box<dyn RequestSource>,
        ended: impl FnOnce(SourceEnd) + Send + 'static,
    ) -> Result<Key, Error> {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        // Before the worker knows it: it may end at once.
        self.live.lock().insert(key, None);
        let hub = Arc::downgrade(self);
        let on_end = move |end| {
            if let Some(hub) = hub.upgrade() {
                hub.live.lock().remove(&key);
                hub.ended.notify_all();
            }
            ended(end);
        };
        match self.backend.attach(disk, source, Box::new(on_end)) {
            Ok(id) => {
                if let Some(entry) = self.live.lock().get_mut(&key) {
                    *entry = Some(id);
                }
                Ok(key)
            }
            Err(e) => {
                self.live.lock().remove(&key);
                Err(e)
            }
        }
    }

    /// As [`Hub::attach`]; returns what stops the source.
    pub fn attach_detachable(
        self: &Arc<Hub>,
        disk: &Disk,
        source: Box<dyn RequestSource>,
        on_end: OnEnd,
    ) -> Result<Detach, Error> {
        let key = self.attach(disk, source, on_end)?;
        let hub = Arc::clone(self);
        Ok(Box::new(move || hub.detach(key)))
    }

    /// Stops a source after what it has outstanding.
    pub fn detach(&self, key: Key) {
        if let Some(Some(id)) = self.live.lock().get(&key) {
            self.backend.detach(*id);
        }
    }

    /// Stops all sources and waits for them; false if some are still there at the deadline.
    pub fn drain(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut live = self.live.lock();
        for id in live.values().flatten() {
            self.backend.detach(*id);
        }
        while !live.is_empty() {
            if self.ended.wait_until(&mut live, deadline).timed_out() {
                return live.is_empty();
            }
        }
        true
    }

    /// Looks at all backings again.
    pub fn refresh(&self) {
        for disk in &self.disks {
            let before = disk.device().capacity_sectors();
            if let Err(e) = disk.device().refresh() {
                tracing::error!("disk {}: {e}", disk.name());
                continue;
            }
            let now = disk.device().capacity_sectors();
            if now != before {
                tracing::info!(
                    "disk {}: resized from {before} to {now} sectors",
                    disk.name()
                );
            }
        }
    }

    /// Puts everything that was written on stable storage; to be called when nothing is attached any more.
    pub fn flush(&self) -> Result<(), Error> {
        for disk in &self.disks {
            if disk.device().limits().read_only {
                continue;
            }
            let status = flush(disk.device())?;
            if status != Status::Ok {
                let why = format!("disk {}: the last flush ended as {status:?}", disk.name());
                return Err(Error::new(pvblk_block::ErrorKind::Os, why));
            }
            disk.device().close()?;
        }
        Ok(())
    }
}

fn flush(device: &Arc<dyn BlockDevice>) -> Result<Status, Error> {
    let mut queue = Queue::open(device, &QueueContext::new(1))?;
    queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 0)]);
    let mut done: Vec<Completion> = Vec::new();
    let deadline = Instant::now() + FLUSH_TIMEOUT;
    while queue.poll(&mut done) == 0 {
        if Instant::now() > deadline {
            let why = format!("{}: the last flush did not end", device.describe());
            return Err(Error::new(pvblk_block::ErrorKind::Os, why));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(done[0].status)
}

impl ExportTable for Hub {
    fn list(&self) -> Vec<ExportInfo> {
        self.disks
            .iter()
            .map(|d| ExportInfo {
                name: d.name().to_owned(),
                description: d.device().describe(),
            })
            .collect()
    }

    fn open(&self, name: &str) -> Option<Arc<dyn BlockDevice>> {
        self.export(name).map(|d| Arc::clone(d.device()))
    }
}

impl Asked for Hub {
    fn ask(&self, disk: &str, question: &str) -> Result<String, Error> {
        let Some(found) = self.disk(disk) else {
            let names: Vec<&str> = self.disks.iter().map(|d| d.name()).collect();
            return Err(Error::config(format!(
                "no disk named {disk}; there are {}",
                names.join(", ")
            )));
        };
        let answer = found.device().ask(question);
        answer.unwrap_or_else(|| {
            Err(Error::config(format!(
                "disk {disk} is {}: it knows no such questions; an array answers where it is served",
                found.device().describe()
            )))
        })
    }
}
