//! Changes are stored before they are answered, and a reload is carried out. Decision 27.

use super::exporting::Export;
use super::{DiskChange, Entry, Refused, Registry, Stage, Why};
use crate::wanted::plan::{self, Listener, Served, Step};
use crate::wanted::{DiskWanted, Seen, Steps, WantedState};
use anyhow::Result;
use std::sync::Arc;
use std::time::Duration;

/// Time for each step of a reload.
const PATIENCE: Duration = Duration::from_secs(60);

/// A registry whose disks a reload changes.
pub struct SharedRegistry(pub Arc<Registry>);

/// The disk that was wanted before a change that may have to be taken back.
pub(super) struct Before(Option<DiskWanted>);

impl Registry {
    /// Stores changes in `state` from now on.
    pub fn keep_in(&self, state: &Arc<WantedState>) {
        let _ = self.kept.set(Arc::clone(state));
    }

    pub fn kept(&self) -> Option<&Arc<WantedState>> {
        self.kept.get()
    }

    /// True if disk `name` is wanted.
    pub(super) fn is_kept(&self, name: &str) -> bool {
        self.kept
            .get()
            .is_some_and(|state| state.disk(name).is_some())
    }

    /// Stores that disk `name` is wanted so, or not at all. Waits for the state's medium.
    pub(super) fn keep(&self, name: &str, wanted: Option<DiskWanted>) -> Result<Before, Refused> {
        let Some(state) = self.kept.get() else {
            return Ok(Before(None));
        };
        let before = state.disk(name);
        state
            .set(name, wanted)
            .map_err(|e| Refused::new(Why::Failed, format!("disk {name}: {e}")))?;
        Ok(Before(before))
    }

    /// Stores the settings of disk `name`; nothing, if it has been removed meanwhile.
    pub(super) fn keep_settings(
        &self,
        name: &str,
        exclusive: bool,
        limit: Option<&str>,
    ) -> Result<(), Refused> {
        let Some(state) = self.kept.get() else {
            return Ok(());
        };
        let stored = state.edit(name, |wanted| {
            wanted.exclusive = exclusive;
            wanted.limit = limit.map(str::to_owned);
        });
        stored.map_err(|e| Refused::new(Why::Failed, format!("disk {name}: {e}")))
    }

    /// Takes a change back that is stored, since it could not be made.
    pub(super) fn take_back_kept(&self, name: &str, before: Before) {
        let Some(state) = self.kept.get() else {
            return;
        };
        if let Err(e) = state.set(name, before.0) {
            tracing::error!("disk {name}: the next start finds it as it was not made to be: {e}");
        }
    }

    /// Stores that an export is wanted, or isn't any more; returns the text by which it was.
    pub(super) fn keep_export(
        &self,
        export: &Export,
        is_wanted: bool,
    ) -> Result<Option<String>, Refused> {
        let Some(state) = self.kept.get() else {
            return Ok(None);
        };
        let mut was = None;
        let stored = match export {
            Export::VhostUser { disk, .. } | Export::XenAttach { disk, .. } => {
                state.edit(disk, |wanted| {
                    was = export.text_in(wanted);
                    export.note(wanted, is_wanted);
                })
            }
            Export::Nbd(place) | Export::Local(place) => state.edit_listeners(|listeners| {
                let list = match export {
                    Export::Nbd(_) => &mut listeners.nbd,
                    _ => &mut listeners.local,
                };
                was = list.iter().find(|l| export.is_at(l)).cloned();
                list.retain(|l| !export.is_at(l));
                if is_wanted {
                    list.push(place.clone());
                }
            }),
        };
        stored.map_err(|e| Refused::new(Why::Failed, e.to_string()))?;
        Ok(was)
    }

    /// Notes the volume by which a disk's array, which goes on, is found now.
    pub fn set_members(&self, name: &str, volume: &str) -> Result<()> {
        if let Some(state) = self.kept.get() {
            state.set_members(name, volume)?;
        }
        self.note_volume(name, volume);
        Ok(())
    }

    /// The same for an array that changed by itself since `seen`, unless a command changes it, too.
    pub fn settle_members(&self, name: &str, seen: &Seen, volume: &str) -> Result<()> {
        if let Some(state) = self.kept.get()
            && state.settle_members(name, seen, volume)?
        {
            self.note_volume(name, volume);
        }
        Ok(())
    }

    fn note_volume(&self, name: &str, volume: &str) {
        if let Some(entry) = self.state.lock().entries.get_mut(name) {
            entry.wanted.volume = volume.to_owned();
        }
    }
}

impl Steps for SharedRegistry {
    fn present(&self) -> Served {
        let state = self.0.state.lock();
        let serving = state
            .entries
            .iter()
            .filter(|(_, e)| e.stage == Stage::Serving);
        let disks = serving.map(|(name, entry)| (name.clone(), entry.wanted.clone()));
        Served {
            disks: disks.collect(),
            listeners: self.0.exports.listeners(),
        }
    }

    fn forget_failed(&self, wanted: &Served) {
        let mut state = self.0.state.lock();
        let is_wanted = |name: &String| wanted.disks.contains_key(name);
        let kept = |name: &String, e: &mut Entry| e.stage != Stage::Failed || is_wanted(name);
        state.entries.retain(kept);
    }

    fn carry_out(&self, step: &Step) -> Result<()> {
        let registry = &self.0;
        let set = |disk: &str, change: &DiskChange| registry.set(disk, change).map(drop);
        match step {
            Step::CloseListener(listener) => registry
                .remove_export(&Export::of_all(listener), false, PATIENCE)
                .map(drop),
            Step::OpenListener(listener) => registry
                .add_export(&Export::of_all(listener), PATIENCE)
                .map(drop),
            Step::RemoveExport { disk, export } => registry
                .remove_export(&Export::of_disk(disk, export), false, PATIENCE)
                .map(drop),
            Step::AddExport { disk, export } => registry
                .add_export(&Export::of_disk(disk, export), PATIENCE)
                .map(drop),
            Step::RemoveDisk { disk } => registry.remove(disk, false, PATIENCE).map(drop),
            Step::AddDisk { disk, wanted } => registry.add(disk, wanted, PATIENCE).map(drop),
            Step::SetExclusive { disk, exclusive } => {
                let change = DiskChange {
                    exclusive: Some(*exclusive),
                    ..DiskChange::default()
                };
                set(disk, &change)
            }
            Step::SetLimit { disk, limit } => {
                let change = DiskChange {
                    limit: Some(limit.clone().unwrap_or_default()),
                    ..DiskChange::default()
                };
                set(disk, &change)
            }
        }
        .map_err(Into::into)
    }
}

impl Export {
    fn of_all(listener: &Listener) -> Export {
        match listener {
            Listener::Local(socket) => Export::Local(socket.clone()),
            Listener::Nbd(address) => Export::Nbd(address.clone()),
        }
    }

    fn of_disk(disk: &str, export: &plan::Export) -> Export {
        let disk = disk.to_owned();
        match export {
            plan::Export::VhostUser(socket) => Export::VhostUser {
                disk,
                socket: socket.clone(),
            },
            plan::Export::XenAttach(guest) => Export::XenAttach {
                disk,
                guest: guest.clone(),
            },
        }
    }
}
