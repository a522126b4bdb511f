//! StandingOrders orders: disks that are attached to every domain of a guest's name, also after the guest's reboot, which
//! makes a new domain.
//!
//! The toolstack sets a domain's name, never the guest: libxl creates `/local/domain/<id>` and `name` in it with
//! permissions `n0,r<id>`, so the guest may only read it. It does so in one transaction with `/libxl/<id>`, long
//! before the domain is introduced to xenstore and runs. A restored guest looks for its disks' directories once, in
//! its first moment; the watch of `/libxl`, where few write and no guest may, reports the domain before that.
//! `@introduceDomain` reports it with other toolstacks.
//!
//! A domain's name is the one that it had when it was first seen: a domain that is renamed later keeps its disks, and
//! gets no new ones.

use super::node::{Node, device_name};
use super::toolstack::{DOMAINS, free_device, make_directories};
use super::xenstore::Xenstore;
use pvblk_block::Error;
use pvblk_protocol::xenbus::number::quote;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Directory of libxl's own records of each domain.
pub(super) const LIBXL: &str = "/libxl";

/// Pause between the removal of a device's directories and the new ones in their place: a guest that saw only the new
/// ones would take them for the old.
const PAUSE: Duration = Duration::from_secs(1);

/// An order to attach a disk to each domain of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingOrder {
    /// The disk's name at the server.
    pub disk: String,
    /// The guest's name.
    pub guest: String,
    /// The device's number in the guest; `None`: the first free one. The toolstack doesn't avoid our numbers when it
    /// adds a disk later.
    pub device: Option<u32>,
}

/// An order to be carried out for one domain.
struct PendingAttach {
    order: StandingOrder,
    domid: u16,
    /// The number of the device that this one replaces.
    device: Option<u32>,
    not_before: Option<Instant>,
}

/// All orders, and their progress.
pub(super) struct StandingOrders {
    orders: Vec<StandingOrder>,
    own: u16,
    /// Domains at the last look, with the names that they had when first seen.
    seen: BTreeMap<u16, String>,
    due: Vec<PendingAttach>,
}

impl StandingOrders {
    pub fn new(orders: Vec<StandingOrder>, own: u16) -> StandingOrders {
        StandingOrders {
            orders,
            own,
            seen: BTreeMap::new(),
            due: Vec::new(),
        }
    }

    /// Adds an order, which also applies to the guest if it is there already. Errors if there is one that says the same, or names the same device.
    pub fn add(&mut self, order: StandingOrder) -> Result<(), Error> {
        let StandingOrder { disk, guest, .. } = &order;
        for other in self.orders.iter().filter(|o| o.guest == *guest) {
            if other.disk == *disk {
                let why = format!("guest {} gets disk {disk} already", quote(guest));
                return Err(Error::config(why));
            }
            if order.device.is_some() && other.device == order.device {
                let (guest, other) = (quote(guest), &other.disk);
                let why = format!("that device of guest {guest} is disk {other}");
                return Err(Error::config(why));
            }
        }
        let there = self.seen.iter().filter(|(_, name)| *name == guest);
        self.due.extend(there.map(|(&domid, _)| PendingAttach {
            order: order.clone(),
            domid,
            device: None,
            not_before: None,
        }));
        self.orders.push(order);
        Ok(())
    }

    /// Takes an order back; a disk that a guest has already stays attached. False if there is none.
    pub fn remove(&mut self, order: &StandingOrder) -> bool {
        let before = self.orders.len();
        self.orders.retain(|o| o != order);
        self.due.retain(|d| d.order != *order);
        self.orders.len() < before
    }

    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    /// The guest's name, if there is an order for this disk and guest.
    pub fn guest(&mut self, xenstore: &mut Xenstore, node: Node, disk: &str) -> Option<String> {
        if !self.orders.iter().any(|o| o.disk == disk) {
            return None;
        }
        let name = match self.seen.get(&node.domid) {
            Some(name) => name.clone(),
            None => xenstore.read(&name_path(node.domid)).ok()??,
        };
        let about = |o: &StandingOrder| o.disk == disk && o.guest == name;
        self.orders.iter().any(about).then_some(name)
    }

    /// Looks for new domains. Each gets its disks once: a disk that is detached by hand is not attached again while
    /// the domain lives.
    pub fn look(&mut self, xenstore: &mut Xenstore) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let names = xenstore.list(DOMAINS)?.unwrap_or_default();
        let number = |name: &String| Node::parse(name, "0").map(|n| n.domid);
        let there: BTreeSet<u16> = names.iter().filter_map(number).collect();
        self.seen.retain(|domid, _| there.contains(domid));
        for domid in there {
            if self.seen.contains_key(&domid) {
                continue;
            }
            // A domain without a name is looked at again later.
            let Some(name) = xenstore.read(&name_path(domid))? else {
                continue;
            };
            for order in &self.orders {
                if order.guest == name {
                    self.due.push(PendingAttach {
                        order: order.clone(),
                        domid,
                        device: None,
                        not_before: None,
                    });
                }
            }
            self.seen.insert(domid, name);
        }
        Ok(())
    }

    /// Repeats an order: the directories of this device were removed and are to be created again.
    pub fn again(&mut self, node: Node, disk: &str, guest: &str) {
        let about = |o: &StandingOrder| o.disk == disk && o.guest == guest;
        if let Some(order) = self.orders.iter().find(|o| about(o)) {
            self.due.push(PendingAttach {
                order: order.clone(),
                domid: node.domid,
                device: Some(node.devid),
                not_before: Some(Instant::now() + PAUSE),
            });
        }
    }

    /// Time at which the next pause ends.
    pub fn deadline(&self) -> Option<Instant> {
        self.due.iter().filter_map(|due| due.not_before).min()
    }

    /// Creates the directories that are due. A failure is logged and not tried again, because it would fail again.
    pub fn carry_out(&mut self, xenstore: &mut Xenstore) {
        let now = Instant::now();
        let later = |due: &PendingAttach| due.not_before.is_some_and(|at| at > now);
        let (later, due) = std::mem::take(&mut self.due).into_iter().partition(later);
        self.due = later;
        for due in due {
            let StandingOrder { disk, guest, .. } = &due.order;
            let who = format!("disk {disk} for guest {}", quote(guest));
            match self.attach(xenstore, &due) {
                Ok(Some(node)) => tracing::info!("{who}: attached as {node}"),
                Ok(None) => tracing::debug!(
                    "{who}: domain {} has the disk already, or is gone",
                    due.domid
                ),
                Err(e) => tracing::error!("{who}, domain {}: {e}", due.domid),
            }
        }
    }

    /// Attaches as `pvblk xen attach` does; `None` if there is nothing to do.
    fn attach(&self, xenstore: &mut Xenstore, due: &PendingAttach) -> Result<Option<Node>, Error> {
        let (order, domid) = (&due.order, due.domid);
        // Devices that other orders name for this guest.
        let named = |devid: u32| {
            let mut others = self.orders.iter().filter(|o| o.guest == order.guest);
            others.any(|o| o.device == Some(devid))
        };
        let all = Node { domid, devid: 0 }.guests_back_ends(self.own);
        xenstore.transaction(|t| {
            // Writing to a domain that is gone would create its directory again.
            if t.read(&name_path(domid))?.is_none() {
                return Ok(None);
            }
            for devid in t.list(&all)?.unwrap_or_default() {
                if t.read(&format!("{all}/{devid}/disk"))?.as_ref() == Some(&order.disk) {
                    return Ok(None);
                }
            }
            let devid = match due.device.or(order.device) {
                Some(devid) => devid,
                None => free_device(|path| t.list(path), domid, named)?,
            };
            let node = Node { domid, devid };
            make_directories(t, node, self.own, &order.disk)?;
            Ok(Some(node))
        })
    }
}

impl std::fmt::Display for StandingOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "disk {} for guest {}", self.disk, quote(&self.guest))?;
        match self.device {
            Some(devid) => write!(f, " as {}", device_name(devid)),
            None => Ok(()),
        }
    }
}

fn name_path(domid: u16) -> String {
    format!("{DOMAINS}/{domid}/name")
}
