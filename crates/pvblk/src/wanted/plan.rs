//! [`plan`]: the steps that lead from the disks that are served to those that are wanted.

use super::{DiskWanted, Listeners};
use std::collections::BTreeMap;
use std::fmt;

/// Disks and sockets: those that are served, or those that are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    pub disks: BTreeMap<String, DiskWanted>,
    pub listeners: Listeners,
}

/// A way for peers to reach one disk.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Export {
    /// `unix:PATH`
    VhostUser(String),
    /// `GUEST` or `GUEST:DEVICE`
    XenAttach(String),
}

/// A socket for peers of all disks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listener {
    /// `unix:PATH`
    Local(String),
    /// `unix:PATH` or `tcp:HOST:PORT`
    Nbd(String),
}

/// One change to what is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    CloseListener(Listener),
    RemoveExport {
        disk: String,
        export: Export,
    },
    /// With all its exports.
    RemoveDisk {
        disk: String,
    },
    SetExclusive {
        disk: String,
        exclusive: bool,
    },
    SetLimit {
        disk: String,
        limit: Option<String>,
    },
    /// With all its exports.
    AddDisk {
        disk: String,
        wanted: DiskWanted,
    },
    AddExport {
        disk: String,
        export: Export,
    },
    OpenListener(Listener),
}

impl Step {
    /// The disk that it changes.
    pub fn disk(&self) -> Option<&str> {
        match self {
            Step::CloseListener(_) | Step::OpenListener(_) => None,
            Step::RemoveExport { disk, .. }
            | Step::RemoveDisk { disk }
            | Step::SetExclusive { disk, .. }
            | Step::SetLimit { disk, .. }
            | Step::AddDisk { disk, .. }
            | Step::AddExport { disk, .. } => Some(disk),
        }
    }

    /// Its place among the steps of a plan: whatever frees a path, a lock or a guest's device comes before whatever may take it.
    pub fn turn(&self) -> u8 {
        match self {
            Step::CloseListener(_) => 0,
            Step::RemoveExport { .. } => 1,
            Step::RemoveDisk { .. } => 2,
            Step::SetExclusive { .. } | Step::SetLimit { .. } => 3,
            Step::AddDisk { .. } => 4,
            Step::AddExport { .. } => 5,
            Step::OpenListener(_) => 6,
        }
    }
}

impl DiskWanted {
    /// Its exports of its own.
    fn exports(&self) -> impl Iterator<Item = Export> {
        let sockets = self.vhost_user.iter().cloned().map(Export::VhostUser);
        sockets.chain(self.xen_attach.iter().cloned().map(Export::XenAttach))
    }
}

impl Listeners {
    pub fn all(&self) -> impl Iterator<Item = Listener> {
        let local = self.local.iter().cloned().map(Listener::Local);
        local.chain(self.nbd.iter().cloned().map(Listener::Nbd))
    }
}

/// Steps from what is served to what is wanted. A disk that is the same in both has none; one whose volume is another is removed and added.
pub fn plan(present: &Served, wanted: &Served) -> Vec<Step> {
    let mut steps = Vec::new();
    for (name, now) in &present.disks {
        match wanted.disks.get(name) {
            Some(then) if then.volume == now.volume => change(&mut steps, name, now, then),
            _ => steps.push(Step::RemoveDisk { disk: name.clone() }),
        }
    }
    for (name, then) in &wanted.disks {
        let now = present.disks.get(name);
        if now.is_none_or(|now| now.volume != then.volume) {
            steps.push(Step::AddDisk {
                disk: name.clone(),
                wanted: then.clone(),
            });
        }
    }
    let (now, then): (Vec<_>, Vec<_>) = (
        present.listeners.all().collect(),
        wanted.listeners.all().collect(),
    );
    let closed = now.iter().filter(|l| !then.contains(l)).cloned();
    steps.extend(closed.map(Step::CloseListener));
    let opened = then.iter().filter(|l| !now.contains(l)).cloned();
    steps.extend(opened.map(Step::OpenListener));
    // Stable: disks stay in the order of their names.
    steps.sort_by_key(Step::turn);
    steps
}

/// Steps of a disk that goes on.
fn change(steps: &mut Vec<Step>, name: &str, now: &DiskWanted, then: &DiskWanted) {
    let disk = || name.to_owned();
    let (has, gets): (Vec<_>, Vec<_>) = (now.exports().collect(), then.exports().collect());
    let leave = has.iter().filter(|e| !gets.contains(e)).cloned();
    steps.extend(leave.map(|export| Step::RemoveExport {
        disk: disk(),
        export,
    }));
    if now.exclusive != then.exclusive {
        steps.push(Step::SetExclusive {
            disk: disk(),
            exclusive: then.exclusive,
        });
    }
    if now.limit != then.limit {
        steps.push(Step::SetLimit {
            disk: disk(),
            limit: then.limit.clone(),
        });
    }
    let come = gets.iter().filter(|e| !has.contains(e)).cloned();
    steps.extend(come.map(|export| Step::AddExport {
        disk: disk(),
        export,
    }));
}

impl fmt::Display for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Export::VhostUser(socket) => write!(f, "vhost-user on {socket}"),
            Export::XenAttach(guest) => write!(f, "Xen guest {guest}"),
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listener::Local(socket) => write!(f, "rings on {socket}"),
            Listener::Nbd(socket) => write!(f, "NBD on {socket}"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::CloseListener(listener) => write!(f, "close {listener}"),
            Step::OpenListener(listener) => write!(f, "open {listener}"),
            Step::RemoveExport { disk, export } => write!(f, "disk {disk}: remove {export}"),
            Step::AddExport { disk, export } => write!(f, "disk {disk}: add {export}"),
            Step::RemoveDisk { disk } => write!(f, "disk {disk}: remove"),
            Step::AddDisk { disk, wanted } => write!(f, "disk {disk}: add {}", wanted.volume),
            Step::SetExclusive { disk, exclusive } => {
                write!(f, "disk {disk}: set exclusive to {exclusive}")
            }
            Step::SetLimit { disk, limit } => match limit {
                Some(limit) => write!(f, "disk {disk}: set limit to {limit}"),
                None => write!(f, "disk {disk}: lift the limit"),
            },
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
