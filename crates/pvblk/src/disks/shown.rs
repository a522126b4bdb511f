//! The answers of `pvblk disk list` and `show`.

use super::{Entry, Refused, Registry, Stage};
use crate::exports::NbdPlace;
use crate::web::DiskFigures;
use pvblk_backend::events::{EventLog, Present};
use pvblk_backend::{Disk, LaneNow};
use pvblk_export::kit::plain_address;
use serde::{Deserialize, Serialize};
use std::ops::Bound;
use std::sync::Arc;

/// Most disks of one page.
pub const MOST_OF_PAGE: usize = 1000;

/// A disk, for programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskShown {
    pub name: String,
    /// `opening`, `serving`, `removing`, or `failed`: it is wanted and could not be opened.
    pub state: String,
    /// `healthy`, `degraded`, `stalled` or `failed`.
    pub health: String,
    /// Why it could not be opened, if it is failed.
    #[serde(default)]
    pub reason: Option<String>,
    /// The volume that it stands on, as it was given.
    pub volume: String,
    /// 0 until it is open.
    pub size_bytes: u64,
    pub read_only: bool,
    pub exclusive: bool,
    pub limit: Option<String>,
    /// Front ends and clients.
    pub users: Vec<DiskUser>,
    /// Connections and front ends that use it now, in the order in which they came.
    #[serde(default)]
    pub clients: Vec<ClientShown>,
    /// Queues of these, in the order in which they came. `disk list` leaves them out.
    #[serde(default)]
    pub queues: Vec<QueueShown>,
    /// Where it can be reached.
    pub exports: Vec<String>,
    /// Since when it has been in this state, in seconds.
    pub state_secs: u64,
}

/// A user of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUser {
    pub name: String,
    /// Queues or connections.
    pub count: usize,
}

/// A connection or front end that uses a disk, as far as the kernel or the hypervisor knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientShown {
    /// As the log names it.
    pub name: String,
    /// `nbd`, `rings`, `vhost-user` or `xen`.
    pub via: String,
    /// Path of the socket, address and port, or domain.
    pub address: String,
    /// Process and user at the other end of a Unix socket.
    pub pid: Option<u32>,
    pub uid: Option<u32>,
    /// For how long it has used the disk, in seconds.
    pub secs: u64,
}

/// A queue of a front end, or the connection of a client, and what the server has chosen for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueShown {
    /// As the log names it.
    pub name: String,
    /// Requests that were taken and haven't ended.
    pub in_flight: u64,
    /// Number of the worker that serves it, from 0.
    pub worker: u32,
    /// For how long it is polled, in microseconds, before its worker sleeps, while no request is at the device.
    pub polled_us: u64,
    /// The same while requests are.
    #[serde(default)]
    pub device_polled_us: u64,
    /// The most requests that are taken at a time; none: as many as a buffer of the socket holds.
    pub pull: Option<u32>,
    /// Requests that have ended since the queue came.
    pub requests: u64,
    /// Times at which the peer was woken since then; none: it reads from a socket.
    pub signals: Option<u64>,
}

impl From<LaneNow> for QueueShown {
    fn from(lane: LaneNow) -> QueueShown {
        QueueShown {
            name: lane.name,
            in_flight: lane.in_flight,
            worker: lane.worker,
            polled_us: lane.polled.requests.as_micros() as u64,
            device_polled_us: lane.polled.device.as_micros() as u64,
            pull: lane.pull,
            requests: lane.requests,
            signals: lane.signals,
        }
    }
}

/// Some disks, in the order of their names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskPage {
    pub disks: Vec<DiskShown>,
    /// The `after` of the next page; none: this is the last one.
    pub next: Option<String>,
}

/// A disk that is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    pub name: String,
    /// `gone`: its data is stable, its backing closed.
    pub state: String,
}

impl Removed {
    pub(super) fn gone(name: &str) -> Removed {
        Removed {
            name: name.to_owned(),
            state: "gone".to_owned(),
        }
    }
}

/// Where all disks are offered.
struct Places {
    nbd: Vec<NbdPlace>,
    local: Vec<String>,
    events: Arc<EventLog>,
}

impl Places {
    fn clients(&self, disk: &str) -> Vec<ClientShown> {
        let shown = |p: &Arc<Present>| ClientShown {
            name: p.name.clone(),
            via: p.peer.via.to_owned(),
            address: p.peer.address.clone(),
            pid: p.peer.pid,
            uid: p.peer.uid,
            secs: p.since.elapsed().as_secs(),
        };
        self.events.present(disk).iter().map(shown).collect()
    }
}

impl Registry {
    /// One disk. If its name was given to another one while its own I/O goes on, the one that is served.
    pub fn show(&self, name: &str) -> Result<DiskShown, Refused> {
        let places = self.places();
        if let Some(entry) = self.state.lock().entries.get(name) {
            let queues = entry.disk.as_ref().map_or_else(Vec::new, queues);
            let shown = shown(name, entry, &places);
            return Ok(DiskShown { queues, ..shown });
        }
        let retired = self.service.retired();
        let found = retired.iter().find(|(disk, _)| disk.name() == name);
        let (disk, _) = found.ok_or_else(|| Refused::no_disk(name))?;
        let (queues, leaving) = (queues(disk), leaving(disk));
        Ok(DiskShown { queues, ..leaving })
    }

    /// Disks whose names come after `after`, at most `most` and never more than [`MOST_OF_PAGE`]. Those that were removed and still have I/O come with the first
    /// page, after those that aren't.
    pub fn list(&self, after: Option<&str>, most: usize) -> DiskPage {
        let most = most.clamp(1, MOST_OF_PAGE);
        let places = self.places();
        let state = self.state.lock();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = state.entries.range::<str, _>((from, Bound::Unbounded));
        let page = rest.by_ref().take(most);
        let mut disks: Vec<DiskShown> = page.map(|(n, e)| shown(n, e, &places)).collect();
        let more = rest.next().is_some();
        let next = disks.last().filter(|_| more).map(|d| d.name.clone());
        drop(state);
        if after.is_none() {
            let state = self.state.lock();
            let retired = self.service.retired();
            let is_ours = |disk: &Arc<Disk>| {
                let entry = state.entries.get(disk.name());
                let ours = entry.and_then(|e| e.disk.as_ref());
                ours.is_some_and(|d| Arc::ptr_eq(d, disk))
            };
            let only_retired = retired.iter().filter(|(d, _)| !is_ours(d));
            disks.extend(only_retired.take(MOST_OF_PAGE).map(|(d, _)| leaving(d)));
        }
        DiskPage { disks, next }
    }

    /// All disks in the order of their names, for metrics; each with its device's user if it is open.
    pub fn glances(&self) -> Vec<(DiskFigures, Option<Arc<Disk>>)> {
        let state = self.state.lock();
        let glance = |(name, entry): (&String, &Entry)| {
            let disk = entry.disk.as_ref();
            let users = disk.map_or(0, |d| d.users().names().iter().map(|(_, n)| n).sum());
            let figures = DiskFigures {
                name: name.clone(),
                state: entry.state().to_owned(),
                health: entry.health(),
                volume: entry.wanted.volume.clone(),
                size_bytes: disk.map_or(0, |d| d.device().capacity_sectors() * 512),
                limit: entry.wanted.limit.clone(),
                connections: users as u64,
                counts: None,
            };
            (figures, disk.cloned())
        };
        state.entries.iter().map(glance).collect()
    }

    /// Number of disks that are wanted and could not be opened.
    pub fn failed(&self) -> usize {
        let state = self.state.lock();
        let failed = state.entries.values();
        failed.filter(|e| e.stage == Stage::Failed).count()
    }

    /// Why disk `name` isn't open, if it is wanted and could not be opened.
    pub fn failure(&self, name: &str) -> Option<Refused> {
        let state = self.state.lock();
        state.failed(name).map(|entry| Refused::busy(name, entry))
    }

    fn places(&self) -> Places {
        let local = self.exports.local_paths();
        Places {
            nbd: self.exports.nbd_places(),
            local: local
                .iter()
                .map(|p| format!("unix:{}", p.display()))
                .collect(),
            events: Arc::clone(self.service.events()),
        }
    }
}

fn health(disk: &Arc<Disk>) -> String {
    disk.health().state().to_string()
}

impl Entry {
    /// The word for its stage.
    fn state(&self) -> &'static str {
        match self.stage {
            Stage::Opening | Stage::GivenUp => "opening",
            Stage::Serving => "serving",
            Stage::Removing => "removing",
            Stage::Failed => "failed",
        }
    }

    /// Empty until it is open.
    fn health(&self) -> String {
        match &self.disk {
            Some(disk) => health(disk),
            None if self.stage == Stage::Failed => "failed".to_owned(),
            None => String::new(),
        }
    }
}

fn users(disk: &Disk) -> Vec<DiskUser> {
    let names = disk.users().names().into_iter();
    names
        .map(|(name, count)| DiskUser { name, count })
        .collect()
}

fn queues(disk: &Arc<Disk>) -> Vec<QueueShown> {
    let lanes = disk.counters().lanes();
    lanes.into_iter().map(QueueShown::from).collect()
}

fn shown(name: &str, entry: &Entry, places: &Places) -> DiskShown {
    let wanted = &entry.wanted;
    let device = entry.disk.as_ref().map(|d| d.device());
    let mut exports = Vec::new();
    if entry.stage == Stage::Serving {
        exports.extend(places.nbd.iter().map(|a| a.uri(name)));
        exports.extend(
            places
                .local
                .iter()
                .map(|l| format!("rings:{l},disk={name}")),
        );
        let sockets = wanted.vhost_user.iter().map(|s| plain_address(s));
        exports.extend(sockets.map(|s| format!("vhost-user:{s}")));
        exports.extend(wanted.xen_attach.iter().map(|g| format!("xen:{g}")));
    }
    let is_failed = entry.stage == Stage::Failed;
    DiskShown {
        name: name.to_owned(),
        state: entry.state().to_owned(),
        health: entry.health(),
        reason: entry.reason.clone().filter(|_| is_failed),
        volume: wanted.volume.clone(),
        size_bytes: device.map_or(0, |d| d.capacity_sectors() * 512),
        read_only: device.is_some_and(|d| d.limits().read_only),
        exclusive: wanted.exclusive,
        limit: wanted.limit.clone(),
        users: entry.disk.as_ref().map_or_else(Vec::new, |d| users(d)),
        clients: places.clients(name),
        queues: Vec::new(),
        exports,
        state_secs: entry.since.elapsed().as_secs(),
    }
}

/// A disk whose name is free already.
fn leaving(disk: &Arc<Disk>) -> DiskShown {
    DiskShown {
        name: disk.name().to_owned(),
        state: "removing".to_owned(),
        health: health(disk),
        reason: None,
        volume: disk.device().describe(),
        size_bytes: disk.device().capacity_sectors() * 512,
        read_only: disk.device().limits().read_only,
        exclusive: disk.users().is_exclusive(),
        limit: None,
        users: users(disk),
        clients: Vec::new(),
        queues: Vec::new(),
        exports: Vec::new(),
        state_secs: 0,
    }
}
