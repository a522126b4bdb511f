//! [`Disks`]: the disks that a process serves, by name.

use crate::backend::Disk;
use parking_lot::RwLock;
use pvblk_block::Error;
use std::sync::Arc;

/// Disks in the order in which they were added. Servers look a disk up when a front end or client names it: a
/// disk that is added is found from then on, and one that is removed isn't found any more.
#[derive(Default)]
pub struct Disks {
    all: RwLock<Vec<Arc<Disk>>>,
    /// The disk of NBD's default export.
    default: String,
}

impl Disks {
    /// Of these; the first is the default one.
    pub fn new(all: Vec<Arc<Disk>>) -> Disks {
        let default = all.first().map(|d| d.name().to_owned());
        Disks {
            all: RwLock::new(all),
            default: default.unwrap_or_default(),
        }
    }

    /// The same with another default disk, which needn't be there.
    #[must_use]
    pub fn with_default(mut self, name: impl Into<String>) -> Disks {
        self.default = name.into();
        self
    }

    /// All that are there now.
    pub fn all(&self) -> Vec<Arc<Disk>> {
        self.all.read().clone()
    }

    /// At most `most` of them, from this place on.
    pub fn page(&self, from: usize, most: usize) -> Vec<Arc<Disk>> {
        let all = self.all.read();
        all.iter().skip(from).take(most).cloned().collect()
    }

    /// The disk of this name.
    pub fn find(&self, name: &str) -> Option<Arc<Disk>> {
        self.all.read().iter().find(|d| d.name() == name).cloned()
    }

    /// The disk of an NBD export. The empty name is the default disk's; if that one isn't served, the name
    /// has no disk.
    pub fn export(&self, name: &str) -> Option<Arc<Disk>> {
        self.find(match name {
            "" => &self.default,
            _ => name,
        })
    }

    /// Adds a disk. Errors if there is one of its name.
    pub(crate) fn add(&self, disk: Arc<Disk>) -> Result<(), Error> {
        let mut all = self.all.write();
        let name = disk.name();
        if all.iter().any(|d| d.name() == name) {
            return Err(Error::config(format!("there is a disk {name} already")));
        }
        all.push(disk);
        Ok(())
    }

    /// Takes a disk out. Its users go on until their sources end.
    pub(crate) fn remove(&self, name: &str) -> Option<Arc<Disk>> {
        let mut all = self.all.write();
        let index = all.iter().position(|d| d.name() == name)?;
        Some(all.remove(index))
    }
}
