//! [`Disks`]: the disks that a process serves, by name.

use crate::backend::Disk;
use parking_lot::RwLock;
use pvblk_block::Error;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Disks in the order in which they were added. Servers look a disk up when a front end or client names it: a
/// disk that is added is found from then on, and one that is removed isn't found any more.
#[derive(Default)]
pub struct Disks {
    all: RwLock<Served>,
    /// The disk of NBD's default export.
    default: String,
}

#[derive(Default)]
struct Served {
    /// By the number of the addition.
    disks: BTreeMap<u64, Arc<Disk>>,
    numbers: HashMap<String, u64>,
    next: u64,
}

impl Served {
    fn find(&self, name: &str) -> Option<&Arc<Disk>> {
        self.disks.get(self.numbers.get(name)?)
    }

    fn push(&mut self, disk: Arc<Disk>) {
        self.numbers.insert(disk.name().to_owned(), self.next);
        self.disks.insert(self.next, disk);
        self.next += 1;
    }
}

impl Disks {
    /// Of these; the first is the default one.
    pub fn new(all: Vec<Arc<Disk>>) -> Disks {
        let default = all.first().map(|d| d.name().to_owned());
        let mut served = Served::default();
        all.into_iter().for_each(|disk| served.push(disk));
        Disks {
            all: RwLock::new(served),
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
        self.all.read().disks.values().cloned().collect()
    }

    /// Number of disks that are there now.
    pub fn len(&self) -> usize {
        self.all.read().disks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// At most `most` of them, from this place on.
    pub fn page(&self, from: usize, most: usize) -> Vec<Arc<Disk>> {
        let all = self.all.read();
        all.disks.values().skip(from).take(most).cloned().collect()
    }

    /// The disk of this name.
    pub fn find(&self, name: &str) -> Option<Arc<Disk>> {
        self.all.read().find(name).cloned()
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
        if all.find(name).is_some() {
            return Err(Error::config(format!("there is a disk {name} already")));
        }
        all.push(disk);
        Ok(())
    }

    /// Takes this disk out, and none that has taken its name since; false if it isn't there.
    pub(crate) fn remove_this(&self, disk: &Arc<Disk>) -> bool {
        let mut all = self.all.write();
        let ours = all
            .find(disk.name())
            .is_some_and(|found| Arc::ptr_eq(found, disk));
        if ours && let Some(number) = all.numbers.remove(disk.name()) {
            all.disks.remove(&number);
        }
        ours
    }
}
