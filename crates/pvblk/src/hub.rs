//! What is being served: disks, and the sources that are attached to them.

use crate::control::Asked;
use pvblk_backend::{
    Backend, Disk, DiskEnd, Key, OnEnd, Pressure, RequestSource, Service, SourceEnd, StopTimes,
    User,
};
use pvblk_block::{BlockDevice, Error};
use pvblk_export::nbd::{ExportInfo, ExportTable};
use pvblk_export::vhost_user::Detach;
use std::sync::Arc;

/// The served disks, and the pressure that their memory gives way to.
pub struct Hub {
    service: Service,
    pressure: Arc<Pressure>,
    /// The disk of the default export.
    first: String,
}

impl Hub {
    /// Of `disks`; that named `first`, if it is there, is the default export.
    pub fn new(
        backend: Backend,
        disks: Vec<Arc<Disk>>,
        first: String,
        pressure: Arc<Pressure>,
    ) -> Arc<Hub> {
        disks.iter().for_each(|d| pressure.add_device(d.device()));
        Arc::new(Hub {
            service: Service::new(backend, disks),
            pressure,
            first,
        })
    }

    /// The memory that is given back when it is short.
    pub fn pressure(&self) -> &Arc<Pressure> {
        &self.pressure
    }

    pub fn disks(&self) -> Vec<Arc<Disk>> {
        self.service.disks()
    }

    pub fn disk(&self, name: &str) -> Option<Arc<Disk>> {
        self.service.disk(name)
    }

    /// The disk of an NBD export; the empty name is that of the first disk that was asked for, also where that one isn't served.
    pub fn export(&self, name: &str) -> Option<Arc<Disk>> {
        match name {
            "" => self.disk(&self.first),
            _ => self.disk(name),
        }
    }

    /// Serves `source`; `ended` is called on a worker when all of it is gone.
    pub fn attach(
        &self,
        disk: &Arc<Disk>,
        user: &Arc<User>,
        source: Box<dyn RequestSource>,
        ended: impl FnOnce(SourceEnd) + Send + 'static,
    ) -> Result<Key, Error> {
        self.service.attach(disk, user, source, ended)
    }

    /// As [`Hub::attach`]; returns what stops the source.
    pub fn attach_detachable(
        self: &Arc<Hub>,
        disk: &Arc<Disk>,
        user: &Arc<User>,
        source: Box<dyn RequestSource>,
        on_end: OnEnd,
    ) -> Result<Detach, Error> {
        let key = self.attach(disk, user, source, on_end)?;
        let hub = Arc::clone(self);
        Ok(Box::new(move || hub.service.detach(key)))
    }

    /// Looks at all backings again. Doesn't wait.
    pub fn refresh(&self) {
        self.service.refresh();
    }

    /// Ends all sources and flushes all disks, each for itself; see [`Service::stop`].
    pub fn stop(&self, times: StopTimes) -> Vec<DiskEnd> {
        self.service.stop(times)
    }
}

impl ExportTable for Hub {
    /// None if the first disk isn't served: another one's data is not for those who want that.
    fn default_export(&self) -> Option<ExportInfo> {
        self.export("").as_deref().map(info)
    }

    fn list(&self) -> Vec<ExportInfo> {
        self.disks().iter().map(|d| info(d)).collect()
    }

    fn open(&self, name: &str) -> Option<Arc<dyn BlockDevice>> {
        self.export(name).map(|d| Arc::clone(d.device()))
    }

    fn page(&self, from: usize, most: usize) -> Vec<ExportInfo> {
        let disks = self.disks();
        disks
            .iter()
            .skip(from)
            .take(most)
            .map(|d| info(d))
            .collect()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.disk(name).map(|d| info(&d))
    }

    fn disk(&self, name: &str) -> Option<Arc<Disk>> {
        self.export(name)
    }
}

fn info(disk: &Disk) -> ExportInfo {
    ExportInfo {
        name: disk.name().to_owned(),
        description: disk.device().describe(),
    }
}

impl Asked for Hub {
    fn ask(&self, disk: &str, question: &str) -> Result<String, Error> {
        let Some(found) = self.disk(disk) else {
            let disks = self.disks();
            let names: Vec<&str> = disks.iter().map(|d| d.name()).collect();
            return Err(Error::config(format!(
                "no disk named {disk}; there are {}",
                names.join(", ")
            )));
        };
        found.ask(question).unwrap_or_else(|| {
            Err(Error::config(format!(
                "disk {disk} is {}: it knows no such questions; an array answers where it is served",
                found.device().describe()
            )))
        })
    }
}
