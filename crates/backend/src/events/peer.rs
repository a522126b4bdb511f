//! [`Peer`]: who a front end or client is, as far as the kernel or the hypervisor says.

use super::{Event, EventLog, Kind};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// A front end, guest or client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The export that it uses: `nbd`, `rings`, `vhost-user` or `xen`.
    pub via: &'static str,
    /// The process that connected to a Unix socket, if it is in the server's namespace.
    pub pid: Option<u32>,
    /// The user of that process.
    pub uid: Option<u32>,
    /// Path of the socket, address and port, or domain.
    pub address: String,
}

impl Peer {
    /// A peer of which only its address is known.
    pub fn at(via: &'static str, address: impl Into<String>) -> Peer {
        Peer {
            via,
            pid: None,
            uid: None,
            address: address.into(),
        }
    }

    /// The peer at the other end of a Unix socket that was accepted at `address`.
    pub fn of_socket(
        via: &'static str,
        socket: BorrowedFd<'_>,
        address: impl Into<String>,
    ) -> Peer {
        let found = pvblk_sys::socket::peer(socket).ok();
        let pid = found.and_then(|(_, pid)| u32::try_from(pid).ok());
        Peer {
            pid: pid.filter(|&pid| pid > 0),
            uid: found.map(|(uid, _)| uid),
            ..Peer::at(via, address)
        }
    }

    /// An event about this peer, which `name` names in the log.
    pub fn event(&self, kind: Kind, disk: Option<&str>, text: impl AsRef<str>) -> Event {
        let mut event = Event::new(kind, text).with("via", self.via);
        if let Some(disk) = disk {
            event = event.of(disk);
        }
        if let Some(pid) = self.pid {
            event = event.with("pid", pid);
        }
        if let Some(uid) = self.uid {
            event = event.with("uid", uid);
        }
        event.with("address", self.address.as_str())
    }

    /// Puts an event that says why the peer isn't let in, or why its connection ended.
    pub fn tell(&self, log: &EventLog, kind: Kind, disk: Option<&str>, why: &str) {
        log.put(self.event(kind, disk, why).with("why", why));
    }
}

/// A peer that uses a disk. Its beginning puts [`Kind::PeerAttached`], its drop [`Kind::PeerLeft`].
pub struct Presence {
    log: Arc<EventLog>,
    number: u64,
    present: Arc<Present>,
}

/// A peer that uses a disk now.
#[derive(Debug)]
pub struct Present {
    pub disk: String,
    /// Its name in the log.
    pub name: String,
    pub peer: Peer,
    /// When it began to use the disk.
    pub since: Instant,
}

/// The peers that use disks now, in the order in which they came: as many as there are connections.
#[derive(Default)]
pub(super) struct Roll(Mutex<(u64, BTreeMap<u64, Arc<Present>>)>);

impl Roll {
    fn enter(&self, present: &Arc<Present>) -> u64 {
        let (last, all) = &mut *self.0.lock();
        *last += 1;
        all.insert(*last, Arc::clone(present));
        *last
    }

    fn leave(&self, number: u64) {
        self.0.lock().1.remove(&number);
    }
}

impl EventLog {
    /// The peers that use a disk now, in the order in which they came.
    pub fn present(&self, disk: &str) -> Vec<Arc<Present>> {
        let all = self.present.0.lock();
        let of_disk = all.1.values().filter(|p| p.disk == disk);
        of_disk.cloned().collect()
    }
}

impl Presence {
    /// The peer uses the disk from now on. `name` is its name in the log.
    pub fn begin(log: &Arc<EventLog>, disk: &str, name: &str, peer: &Peer) -> Presence {
        let present = Arc::new(Present {
            disk: disk.to_owned(),
            name: name.to_owned(),
            peer: peer.clone(),
            since: Instant::now(),
        });
        let presence = Presence {
            log: Arc::clone(log),
            number: log.present.enter(&present),
            present,
        };
        presence.put(Kind::PeerAttached, "uses it");
        presence
    }

    fn put(&self, kind: Kind, what: &str) {
        let Present {
            disk, name, peer, ..
        } = &*self.present;
        let event = peer.event(kind, Some(disk), format!("{name} {what}"));
        self.log.put(event.with("name", name.as_str()));
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.log.present.leave(self.number);
        self.put(Kind::PeerLeft, "has left");
    }
}
