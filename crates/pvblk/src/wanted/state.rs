//! [`WantedState`]: what is wanted of this server now, and the one place that changes it.

use super::changes::Occasion;
use super::{Changes, Configured, DiskWanted, Listeners, RealFolder, Store};
use anyhow::{Result, anyhow};
use parking_lot::{Condvar, Mutex};
use pvblk_volume::VolumeSpec;
use std::sync::{Arc, OnceLock};

/// The wanted state: the configuration, and changes at run time over it.
///
/// A change is stored when the method that makes it returns. Several that come at the same time are stored together.
pub struct WantedState {
    inner: Mutex<Inner>,
    /// Signalled when a write has ended.
    written: Condvar,
}

struct Inner {
    configured: Configured,
    /// With those that aren't stored yet.
    changes: Changes,
    /// `None` while a thread writes, and without `--state`.
    store: Option<Store>,
    /// As they were last stored.
    stored: Arc<Changes>,
    is_kept: bool,
    /// The changes that the next write stores.
    batch: Arc<Batch>,
}

/// The members of an array as they are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub volume: String,
    /// Devices that may have become members since the volume was written.
    pub joining: Vec<String>,
}

impl Seen {
    fn of(changes: &Changes, configured: &Configured, name: &str) -> Option<Seen> {
        let joining = changes.disks.get(name).map(|c| c.joining.clone());
        changes.disk(configured, name).map(|wanted| Seen {
            volume: wanted.volume.clone(),
            joining: joining.unwrap_or_default(),
        })
    }
}

/// Changes that are stored by one write: how that ended, when it has.
type Batch = OnceLock<Result<(), String>>;

impl WantedState {
    /// Reads what is stored in a folder; with `None` changes last as long as this process.
    pub fn open(configured: Configured, folder: Option<RealFolder>) -> Result<WantedState> {
        let store = folder.map(|folder| Store::on(Box::new(folder)));
        match store.transpose()? {
            Some((store, changes)) => Ok(WantedState::new(configured, Some(store), changes)),
            None => Ok(WantedState::new(configured, None, Changes::default())),
        }
    }

    /// With a store, and what was read from it.
    pub fn new(configured: Configured, store: Option<Store>, changes: Changes) -> WantedState {
        let read = changes;
        let changes = read.over(&configured, Occasion::Start);
        if let Some(store) = &store
            && changes != read
            // A merge with a later file starts from this one.
            && let Err(e) = store.save(&changes)
        {
            tracing::warn!("{e}; changes at run time can't be kept until that works");
        }
        WantedState {
            inner: Mutex::new(Inner {
                configured,
                stored: Arc::new(changes.clone()),
                changes,
                is_kept: store.is_some(),
                store,
                batch: Arc::default(),
            }),
            written: Condvar::new(),
        }
    }

    /// The disks that are wanted: the configuration's in their order, then those that were added.
    pub fn disks(&self) -> Vec<(String, DiskWanted)> {
        let inner = self.inner.lock();
        inner.changes.wanted(&inner.configured)
    }

    /// Disk `name`, if it is wanted.
    pub fn disk(&self, name: &str) -> Option<DiskWanted> {
        let inner = self.inner.lock();
        inner.changes.disk(&inner.configured, name).cloned()
    }

    /// True if this disk was added at run time, on this volume, and is wanted still.
    pub fn has_added(&self, name: &str, volume: &VolumeSpec) -> bool {
        let inner = self.inner.lock();
        let is_added = inner.configured.disk(name).is_none();
        let wanted = inner.changes.disk(&inner.configured, name);
        let has_volume = |wanted: &DiskWanted| {
            let stored = wanted.volume.parse::<VolumeSpec>();
            stored.is_ok_and(|stored| stored == *volume)
        };
        is_added && wanted.is_some_and(has_volume)
    }

    /// Devices that may have become members of the array of disk `name` since its volume was written.
    pub fn joining(&self, name: &str) -> Vec<String> {
        let inner = self.inner.lock();
        let change = inner.changes.disks.get(name);
        change.map(|c| c.joining.clone()).unwrap_or_default()
    }

    pub fn listeners(&self) -> Listeners {
        let inner = self.inner.lock();
        inner.changes.listeners(&inner.configured).clone()
    }

    /// Disks that the configuration names and that were removed at run time.
    pub fn held_back(&self) -> Vec<String> {
        let inner = self.inner.lock();
        let names = inner.changes.held_back(&inner.configured);
        names.map(str::to_owned).collect()
    }

    /// Wants disk `name` so, or not at all. The inverse of a change is a call with what was wanted before.
    pub fn set(&self, name: &str, wanted: Option<DiskWanted>) -> Result<()> {
        self.change(|changes, configured| {
            let differs = changes.disk(configured, name) != wanted.as_ref();
            if differs {
                changes.set(configured, name, wanted);
            }
            differs
        })
    }

    /// Changes disk `name`, if it is wanted.
    pub fn edit(&self, name: &str, edit: impl FnOnce(&mut DiskWanted)) -> Result<()> {
        self.change(|changes, configured| {
            let Some(before) = changes.disk(configured, name).cloned() else {
                return false;
            };
            let mut wanted = before.clone();
            edit(&mut wanted);
            let differs = wanted != before;
            if differs {
                changes.set(configured, name, Some(wanted));
            }
            differs
        })
    }

    /// Changes the sockets for peers of all disks.
    pub fn edit_listeners(&self, edit: impl FnOnce(&mut Listeners)) -> Result<()> {
        self.change(|changes, configured| {
            let before = changes.listeners(configured);
            let mut wanted = before.clone();
            edit(&mut wanted);
            let differs = wanted != *before;
            if differs {
                changes.set_listeners(configured, wanted);
            }
            differs
        })
    }

    /// Notes, before it happens, that a device may become a member of the array of disk `name`.
    pub fn add_joining(&self, name: &str, device: &str) -> Result<()> {
        self.change(|changes, configured| changes.add_joining(configured, name, device))
    }

    /// The volume of disk `name` and the devices that may have joined its array, if the disk is wanted.
    pub fn members(&self, name: &str) -> Option<Seen> {
        let inner = self.inner.lock();
        Seen::of(&inner.changes, &inner.configured, name)
    }

    /// Notes the volume of disk `name`, whose array has changed by itself since `seen`. A command that came meanwhile notes its own; returns false then.
    pub fn settle_members(&self, name: &str, seen: &Seen, volume: &str) -> Result<bool> {
        let mut is_noted = false;
        self.change(|changes, configured| {
            is_noted = Seen::of(changes, configured, name).as_ref() == Some(seen);
            let differs = is_noted && seen.volume != volume;
            if differs {
                changes.set_members(configured, name, volume);
                for device in &seen.joining {
                    changes.add_joining(configured, name, device);
                }
            }
            differs
        })?;
        Ok(is_noted)
    }

    /// Notes the volume of disk `name` whose array has the members that it names, and no others.
    pub fn set_members(&self, name: &str, volume: &str) -> Result<()> {
        self.change(|changes, configured| {
            changes.set_members(configured, name, volume);
            true
        })
    }

    /// The state after a reload of `configured`, with nothing changed.
    pub fn preview(&self, configured: &Configured) -> Changes {
        self.inner.lock().changes.over(configured, Occasion::Reload)
    }

    /// Takes the configuration as it was read again; one thread at a time.
    pub fn reload(&self, configured: Configured) -> Result<()> {
        let before = std::mem::replace(&mut self.inner.lock().configured, configured);
        let over = |changes: &mut Changes, configured: &Configured| {
            *changes = changes.over(configured, Occasion::Reload);
            true
        };
        let stored = self.change(over);
        if stored.is_err() {
            self.inner.lock().configured = before;
        }
        stored
    }

    /// Makes a change, which says whether it changed anything; it is stored when this returns. After an error it hasn't been made.
    fn change(&self, change: impl FnOnce(&mut Changes, &Configured) -> bool) -> Result<()> {
        let mut inner = self.inner.lock();
        let Inner {
            changes,
            configured,
            ..
        } = &mut *inner;
        let is_changed = change(changes, configured);
        // A disk that is as it is wanted may be so by a change that is being stored.
        let is_stored = !is_changed && inner.store.is_some();
        if is_stored || !inner.is_kept {
            return Ok(());
        }
        let batch = Arc::clone(&inner.batch);
        loop {
            if let Some(result) = batch.get() {
                return result.clone().map_err(|why| anyhow!("{why}"));
            }
            match inner.store.take() {
                Some(store) => inner = self.write(store, inner),
                None => self.written.wait(&mut inner),
            }
        }
    }

    /// Stores all changes that were made until now, without the lock meanwhile.
    fn write<'a>(&'a self, store: Store, mut inner: Locked<'a>) -> Locked<'a> {
        let (changes, batch) = (
            Arc::new(inner.changes.clone()),
            std::mem::take(&mut inner.batch),
        );
        let old = Arc::clone(&inner.stored);
        drop(inner);
        let result = store.save(&changes).map_err(|e| {
            // The new file may be there all the same.
            match e.is_new && store.save(&old).is_err() {
                true => format!("{e}; it isn't known whether the next start finds this change"),
                false => format!("{e}; nothing is changed"),
            }
        });
        let mut inner = self.inner.lock();
        inner.store = Some(store);
        match &result {
            Ok(()) => inner.stored = changes,
            Err(_) => {
                // Changes that came meanwhile were made over those that failed.
                inner.changes = (*old).clone();
                let later = std::mem::take(&mut inner.batch);
                let _ = later.set(result.clone());
            }
        }
        let _ = batch.set(result);
        self.written.notify_all();
        inner
    }
}

type Locked<'a> = parking_lot::MutexGuard<'a, Inner>;

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
