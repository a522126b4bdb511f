//! [`Changes`]: what users changed at run time, beside what the configuration says.

use super::{DiskWanted, merge};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The disks and sockets that the configuration names: file and flags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configured {
    /// In the order in which they are served.
    pub disks: Vec<(String, DiskWanted)>,
    pub listeners: Listeners,
}

/// Sockets for peers of all disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listeners {
    /// For front ends on rings, each `unix:PATH` with its options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub local: Vec<String>,
    /// For NBD clients, each `unix:PATH` or `tcp:HOST:PORT` with its options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nbd: Vec<String>,
}

/// Changes at run time. Disks without an entry are as the configuration has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Changes {
    #[serde(default)]
    pub disks: BTreeMap<String, Change>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listeners: Option<ListenersChange>,
}

/// A disk that was added, changed or removed at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// As it is wanted now; `None`: it was removed.
    pub wanted: Option<DiskWanted>,
    /// As the configuration named it then; `None`: it didn't.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured: Option<DiskWanted>,
    /// Devices that may have become members of its array since `wanted` was written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub joining: Vec<String>,
}

/// Sockets that were added or removed at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenersChange {
    pub wanted: Listeners,
    /// As the configuration named them then.
    pub configured: Listeners,
}

/// When the configuration is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// A disk that was removed at run time stays removed.
    Start,
    /// A disk that the configuration names is served, and what it doesn't name any more is forgotten.
    Reload,
}

impl Configured {
    pub fn disk(&self, name: &str) -> Option<&DiskWanted> {
        let found = self.disks.iter().find(|(n, _)| n == name);
        found.map(|(_, disk)| disk)
    }
}

impl Changes {
    /// Brings the changes in line with a configuration that was read.
    #[must_use]
    pub fn over(&self, configured: &Configured, occasion: Occasion) -> Changes {
        let named: BTreeMap<&str, &DiskWanted> = by_name(configured);
        let mut disks = BTreeMap::new();
        for (name, change) in &self.disks {
            let kept = match named.get(name.as_str()) {
                Some(now) => change.over(now, occasion),
                None => change.without(occasion),
            };
            disks.extend(kept.map(|change| (name.clone(), change)));
        }
        let listeners = self.listeners.as_ref();
        Changes {
            disks,
            listeners: listeners.and_then(|change| change.over(&configured.listeners)),
        }
    }

    /// The disks that are wanted: the configuration's in their order, then those that were added, by their names.
    pub fn wanted(&self, configured: &Configured) -> Vec<(String, DiskWanted)> {
        let named = by_name(configured);
        let of_file = configured.disks.iter().filter_map(|(name, disk)| {
            let disk = match self.disks.get(name) {
                Some(change) => change.wanted.as_ref()?,
                None => disk,
            };
            Some((name, disk))
        });
        let added = self.disks.iter().filter_map(|(name, change)| {
            let is_added = change.configured.is_none() && !named.contains_key(name.as_str());
            let disk = change.wanted.as_ref().filter(|_| is_added)?;
            Some((name, disk))
        });
        let all = of_file.chain(added);
        all.map(|(name, disk)| (name.clone(), disk.clone()))
            .collect()
    }

    /// One of them.
    pub fn disk<'a>(&'a self, configured: &'a Configured, name: &str) -> Option<&'a DiskWanted> {
        let of_file = configured.disk(name);
        match self.disks.get(name) {
            None => of_file,
            Some(change) if change.configured.is_some() && of_file.is_none() => None,
            Some(change) => change.wanted.as_ref(),
        }
    }

    /// The sockets that are wanted.
    pub fn listeners<'a>(&'a self, configured: &'a Configured) -> &'a Listeners {
        let changed = self.listeners.as_ref().map(|c| &c.wanted);
        changed.unwrap_or(&configured.listeners)
    }

    /// Disks that the configuration names and that were removed at run time.
    pub fn held_back<'a>(&'a self, configured: &'a Configured) -> impl Iterator<Item = &'a str> {
        let names = configured.disks.iter().map(|(name, _)| name.as_str());
        names.filter(|name| self.disks.get(*name).is_some_and(|c| c.wanted.is_none()))
    }

    /// Notes that disk `name` is wanted so, or isn't wanted any more.
    pub fn set(&mut self, configured: &Configured, name: &str, wanted: Option<DiskWanted>) {
        let volume = |w: Option<&DiskWanted>| w.map(|w| w.volume.clone());
        let same_volume = volume(self.disk(configured, name)) == volume(wanted.as_ref());
        let before = self.disks.remove(name);
        let joining = before.filter(|_| same_volume).map(|c| c.joining);
        let of_file = configured.disk(name);
        let change = Change {
            joining: match wanted {
                Some(_) => joining.unwrap_or_default(),
                None => Vec::new(),
            },
            wanted,
            configured: of_file.cloned(),
        };
        if !change.is_empty() {
            self.disks.insert(name.to_owned(), change);
        }
    }

    /// Notes that a device may become a member of the array of disk `name`; false if that disk isn't wanted.
    pub fn add_joining(&mut self, configured: &Configured, name: &str, device: &str) -> bool {
        let Some(wanted) = self.disk(configured, name).cloned() else {
            return false;
        };
        let joining = self.disks.get(name).map(|c| c.joining.clone());
        let mut joining = joining.unwrap_or_default();
        if !joining.iter().any(|j| j == device) {
            joining.push(device.to_owned());
        }
        let change = Change {
            wanted: Some(wanted),
            configured: configured.disk(name).cloned(),
            joining,
        };
        self.disks.insert(name.to_owned(), change);
        true
    }

    /// Notes the volume of disk `name` whose array has the members that it names, and no others.
    pub fn set_members(&mut self, configured: &Configured, name: &str, volume: &str) {
        let Some(wanted) = self.disk(configured, name).cloned() else {
            return;
        };
        let wanted = DiskWanted {
            volume: volume.to_owned(),
            ..wanted
        };
        self.disks.remove(name);
        self.set(configured, name, Some(wanted));
    }

    /// Notes that these sockets are wanted.
    pub fn set_listeners(&mut self, configured: &Configured, wanted: Listeners) {
        let configured = configured.listeners.clone();
        let change = ListenersChange { wanted, configured };
        self.listeners = Some(change).filter(|c| c.wanted != c.configured);
    }
}

fn by_name(configured: &Configured) -> BTreeMap<&str, &DiskWanted> {
    let disks = configured.disks.iter();
    disks.map(|(name, disk)| (name.as_str(), disk)).collect()
}

impl Change {
    /// True if it says nothing that the configuration doesn't.
    fn is_empty(&self) -> bool {
        self.wanted == self.configured && self.joining.is_empty()
    }

    /// The change of a disk that the configuration names.
    fn over(&self, now: &DiskWanted, occasion: Occasion) -> Option<Change> {
        let wanted = match (&self.wanted, occasion) {
            (None, Occasion::Reload) => return None,
            (None, Occasion::Start) => None,
            (Some(wanted), _) => Some(merge::disk(self.configured.as_ref(), now, wanted)),
        };
        let volume = |w: &Option<DiskWanted>| w.as_ref().map(|w| w.volume.clone());
        let same_volume = volume(&wanted) == volume(&self.wanted);
        let change = Change {
            joining: match same_volume {
                true => self.joining.clone(),
                false => Vec::new(),
            },
            wanted,
            configured: Some(now.clone()),
        };
        (!change.is_empty()).then_some(change)
    }

    /// The change of a disk that the configuration doesn't name.
    fn without(&self, occasion: Occasion) -> Option<Change> {
        // At a start it may be the wrong file: an entry that has no effect is kept for the right one.
        let is_kept = self.configured.is_none() || occasion == Occasion::Start;
        is_kept.then(|| self.clone())
    }
}

impl ListenersChange {
    fn over(&self, now: &Listeners) -> Option<ListenersChange> {
        let (base, wanted) = (&self.configured, &self.wanted);
        let change = ListenersChange {
            wanted: Listeners {
                local: merge::list(&base.local, &now.local, &wanted.local),
                nbd: merge::list(&base.nbd, &now.nbd, &wanted.nbd),
            },
            configured: now.clone(),
        };
        (change.wanted != change.configured).then_some(change)
    }
}

#[cfg(test)]
#[path = "changes_tests.rs"]
mod tests;
