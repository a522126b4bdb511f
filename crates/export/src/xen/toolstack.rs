//! Attaching and detaching disks, as Xen's toolstack does for its own kinds of back ends.

use super::node::{Node, back_ends, device_name, parse_device};
use super::server::own_domain;
use super::xenstore::{Transaction, Xenstore};
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::xenbus::XenbusState;
use pvblk_protocol::xenbus::number::{quote, sentence};
use std::time::{Duration, Instant};

/// Directory of all domains.
pub(super) const DOMAINS: &str = "/local/domain";

/// State of one attached disk in xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Guest and device.
    pub node: Node,
    /// The guest's name, if it has one.
    pub guest: Option<String>,
    /// The disk's name at its server.
    pub disk: String,
    /// State of the back end; `None` if the key is invalid.
    pub back: Option<XenbusState>,
    /// State of the front end; `None` if the key is absent or invalid.
    pub front: Option<XenbusState>,
    /// Queues that the guest uses; 0: not known yet.
    pub queues: u32,
    /// Pages of each ring; 0: not known yet.
    pub ring_pages: u32,
    /// True if both ends use persistent grants.
    pub persistent: bool,
    /// The server's error message.
    pub error: Option<String>,
}

impl Listed {
    /// The device's name, or its number.
    pub fn device(&self) -> String {
        device_name(self.node.devid)
    }
}

/// Removes our directory of a device, and the guest's if it was the last one there. Domain numbers are never used
/// twice, so directories of past guests would soon not fit into one reply.
pub(super) fn remove_back_end(t: &mut Transaction<'_>, node: Node, own: u16) -> Result<(), Error> {
    t.remove(&node.back_end(own))?;
    let above = node.guests_back_ends(own);
    match t.list(&above)? {
        Some(others) if others.is_empty() => t.remove(&above),
        _ => Ok(()),
    }
}

/// The first of xvda, xvdb and so on that the guest doesn't have and for which `is_taken` is false.
pub(super) fn free_device(
    list: impl FnOnce(&str) -> Result<Option<Vec<String>>, Error>,
    domid: u16,
    is_taken: impl Fn(u32) -> bool,
) -> Result<u32, Error> {
    let there = list(&format!("{DOMAINS}/{domid}/device/vbd"))?.unwrap_or_default();
    let free = |devid: &u32| !there.contains(&devid.to_string()) && !is_taken(*devid);
    let names = (b'a'..=b'p').map(|letter| format!("xvd{}", char::from(letter)));
    let mut numbers = names.filter_map(|name| parse_device(&name).ok());
    let found = numbers.find(free);
    found.ok_or_else(|| Error::config("xvda to xvdp are all in use; name a device"))
}

/// Creates both directories of a device, for a server in domain `own`. Errors if one exists already.
pub(super) fn make_directories(
    t: &mut Transaction<'_>,
    node: Node,
    own: u16,
    disk: &str,
) -> Result<(), Error> {
    let (back, front) = (node.back_end(own), node.front_end());
    let Node { domid, devid } = node;
    let device = device_name(devid);
    for path in [&front, &back] {
        if t.read(path)?.is_some() {
            return Err(Error::config(format!(
                "domain {domid} has {device} already ({path}); detach it first"
            )));
        }
    }
    // A server in a driver domain may remove the guest's directory with its last device.
    t.make(&node.guests_back_ends(own), &[format!("n{own}")])?;
    // Each side reads the other's directory and writes its own.
    t.make(&front, &[format!("n{domid}"), format!("r{own}")])?;
    t.make(&back, &[format!("n{own}"), format!("r{domid}")])?;
    let mut put = |directory: &str, keys: &[(&str, &str)]| {
        keys.iter()
            .try_for_each(|(key, value)| t.write(&format!("{directory}/{key}"), value))
    };
    let (domid, devid) = (domid.to_string(), devid.to_string());
    put(
        &front,
        &[
            ("backend", &back),
            ("backend-id", &own.to_string()),
            ("virtual-device", &devid),
            ("device-type", "disk"),
            ("state", "1"),
        ],
    )?;
    put(
        &back,
        &[
            ("frontend", &front),
            ("frontend-id", &domid),
            ("disk", disk),
            ("dev", &device),
            ("online", "1"),
            ("removable", "0"),
            ("bootable", "1"),
            ("device-type", "disk"),
            ("state", "1"),
        ],
    )
}

/// Xenstore with the rights to attach disks.
pub struct Toolstack {
    xenstore: Xenstore,
    own: u16,
}

impl Toolstack {
    pub fn connect() -> Result<Toolstack, Error> {
        Toolstack::over(Xenstore::connect()?)
    }

    /// As [`Toolstack::connect`], over an existing connection.
    pub fn over(mut xenstore: Xenstore) -> Result<Toolstack, Error> {
        let own = own_domain(&mut xenstore)?;
        Ok(Toolstack { xenstore, own })
    }

    /// Sets the domain of the servers, if it isn't this one.
    pub fn set_back_end(&mut self, domid: u16) {
        self.own = domid;
    }

    /// Finds a guest's domain number by its number or name.
    pub fn domain(&mut self, guest: &str) -> Result<u16, Error> {
        let home = |domid: &str| format!("{DOMAINS}/{domid}");
        if guest.bytes().all(|b| b.is_ascii_digit()) && !guest.is_empty() {
            let node = Node::parse(guest, "0");
            return match node {
                Some(node) if self.xenstore.read(&home(guest))?.is_some() => Ok(node.domid),
                _ => Err(Error::config(format!(
                    "there is no domain {guest}; see xl list"
                ))),
            };
        }
        for domid in self.xenstore.list(DOMAINS)?.unwrap_or_default() {
            let name = self.xenstore.read(&format!("{}/name", home(&domid)))?;
            if name.as_deref() == Some(guest)
                && let Some(node) = Node::parse(&domid, "0")
            {
                return Ok(node.domid);
            }
        }
        Err(Error::config(format!(
            "there is no guest named {}; see xl list",
            quote(guest)
        )))
    }

    /// The first of xvda, xvdb and so on that the guest doesn't have.
    pub fn free_device(&mut self, domid: u16) -> Result<u32, Error> {
        let list = |path: &str| self.xenstore.list(path);
        free_device(list, domid, |_| false)
    }

    /// Creates both directories; the server that has the disk then serves it. Errors if the guest has that device
    /// already.
    pub fn attach(&mut self, node: Node, disk: &str) -> Result<(), Error> {
        let own = self.own;
        self.xenstore
            .transaction(|t| make_directories(t, node, own, disk))
    }

    /// Waits until the guest uses the disk; calls `tell` with each state on the way. Errors with the server's
    /// message, or after `time`.
    pub fn wait_connected(
        &mut self,
        node: Node,
        time: Duration,
        mut tell: impl FnMut(&Listed),
    ) -> Result<Listed, Error> {
        let mut last = None;
        let listed = self.wait(node, time, |listed| {
            if last.as_ref() != Some(listed) {
                tell(listed);
                last = Some(listed.clone());
            }
            listed.error.is_some()
                || (listed.back == Some(XenbusState::Connected)
                    && listed.front == Some(XenbusState::Connected))
        })?;
        let listed = listed.ok_or_else(|| Error::config("the disk was detached meanwhile"))?;
        if let Some(why) = &listed.error {
            return Err(Error::new(ErrorKind::Protocol, why.clone()));
        }
        let seconds = time.as_secs();
        match listed.back {
            Some(XenbusState::Connected) if listed.front == Some(XenbusState::Connected) => {
                Ok(listed)
            }
            None | Some(XenbusState::Initialising) => Err(Error::config(format!(
                "no server took disk {} within {seconds} s; is `pvblk serve --xen` running, with a disk of that name?",
                quote(&listed.disk)
            ))),
            _ => Err(Error::config(format!(
                "the guest did not take the disk within {seconds} s; has it a Xen block driver?"
            ))),
        }
    }

    /// Asks for the end, waits until the guest has released the disk, and removes both directories. With `force` it
    /// doesn't wait.
    pub fn detach(&mut self, node: Node, time: Duration, force: bool) -> Result<(), Error> {
        let (back, front) = (node.back_end(self.own), node.front_end());
        let there = self.xenstore.transaction(|t| {
            let Some(state) = t.read(&format!("{back}/state"))? else {
                return Ok(false);
            };
            t.write(&format!("{back}/online"), "0")?;
            // A closed back end stays closed; otherwise the key is the server's to write.
            if state != "6" {
                t.write(&format!("{back}/state"), "5")?;
            }
            Ok(true)
        })?;
        if !there {
            return Err(Error::config(format!("{node} is not attached")));
        }
        if !force {
            let closed = |l: &Listed| l.back == Some(XenbusState::Closed);
            let after = self.wait(node, time, closed)?;
            if after.is_some_and(|l| !closed(&l)) {
                return Err(Error::config(format!(
                    "the guest did not let go of {} within {} s; unmount it there, then try again, or use --force",
                    device_name(node.devid),
                    time.as_secs()
                )));
            }
        }
        let own = self.own;
        self.xenstore.transaction(|t| {
            t.remove(&front)?;
            remove_back_end(t, node, own)
        })
    }

    /// Lists all attached disks.
    pub fn list(&mut self) -> Result<Vec<Listed>, Error> {
        let base = back_ends(self.own);
        let mut all = Vec::new();
        for domid in self.xenstore.list(&base)?.unwrap_or_default() {
            let devices = self.xenstore.list(&format!("{base}/{domid}"))?;
            for devid in devices.unwrap_or_default() {
                if let Some(node) = Node::parse(&domid, &devid) {
                    all.extend(self.look(node)?);
                }
            }
        }
        all.sort_by_key(|l| l.node);
        Ok(all)
    }

    /// Reads one disk; `None` if it isn't attached.
    pub fn look(&mut self, node: Node) -> Result<Option<Listed>, Error> {
        let (back, front) = (node.back_end(self.own), node.front_end());
        let xenstore = &mut self.xenstore;
        let Some(disk) = xenstore.read(&format!("{back}/disk"))? else {
            return Ok(None);
        };
        let mut read = |path: String| xenstore.read(&path);
        let state = |text: Option<String>| text.and_then(|s| XenbusState::parse(&s));
        let front_state = state(read(node.front_state())?);
        let uses = front_state.is_some_and(|s| !s.has_left() && s != XenbusState::InitWait);
        let number = |text: Option<String>, otherwise| match text {
            Some(text) => text.parse().unwrap_or(0),
            None => otherwise,
        };
        let queues = number(read(format!("{front}/multi-queue-num-queues"))?, 1);
        let order = number(read(format!("{front}/ring-page-order"))?, 0);
        Ok(Some(Listed {
            node,
            guest: read(format!("/local/domain/{}/name", node.domid))?,
            disk: sentence(&disk),
            back: state(read(format!("{back}/state"))?),
            front: front_state,
            queues: if uses { queues } else { 0 },
            ring_pages: if uses { 1 << order.min(4) } else { 0 },
            persistent: read(format!("{front}/feature-persistent"))?.as_deref() == Some("1")
                && read(format!("{back}/feature-persistent"))?.as_deref() == Some("1"),
            error: read(format!("{back}/error"))?.map(|e| sentence(&e)),
        }))
    }

    /// Reads a disk whenever one of its states changes, until `done` or until the time is over; returns the last
    /// reading.
    fn wait(
        &mut self,
        node: Node,
        time: Duration,
        mut done: impl FnMut(&Listed) -> bool,
    ) -> Result<Option<Listed>, Error> {
        let paths = [node.back_end(self.own), node.front_state()];
        for path in &paths {
            self.xenstore.watch(path, "wait")?;
        }
        let deadline = Instant::now() + time;
        let result = loop {
            self.xenstore.take_events();
            match self.look(node) {
                Ok(Some(listed)) if !done(&listed) && Instant::now() < deadline => {}
                other => break other,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if let Err(e) = self.xenstore.wait(left) {
                break Err(e);
            }
        };
        for path in &paths {
            self.xenstore.unwatch(path, "wait")?;
        }
        self.xenstore.take_events();
        result
    }
}
