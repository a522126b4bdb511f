//! Disks that guests of a name get whenever such a guest appears: after its reboot, too, which makes it another domain.
//!
//! A domain's name is the toolstack's word, never the guest's: libxl makes `/local/domain/<id>` and `name` in it with permissions
//! `n0,r<id>`, which the guest may read only. It does so in one transaction with `/libxl/<id>`, long before it introduces the domain to
//! xenstore and before that one runs. So a watch of `/libxl` (few write there, no guest may) tells of it in time for a restored guest,
//! which looks for its disks' directories once, in its first moment; `@introduceDomain` tells where another toolstack works.
//!
//! The name counts that a domain has when it is seen first: who is renamed later keeps what it has, and gets nothing new.

use super::node::{Node, device_name};
use super::toolstack::{DOMAINS, free_device, make_directories};
use super::xenstore::Xenstore;
use crate::xenbus::number::quote;
use pvblk_block::Error;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Where libxl has its own notes of each domain.
pub(super) const LIBXL: &str = "/libxl";

/// From the end of a device's directories to the next ones in their place: a guest that sees only the new ones takes them for the old.
const PAUSE: Duration = Duration::from_secs(1);

/// A disk that each domain of a name is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingOrder {
    /// The disk's name at the server.
    pub disk: String,
    /// The guest's name.
    pub guest: String,
    /// The device's number in the guest; `None`: the first that is free. A disk that the toolstack adds later takes no heed of ours.
    pub device: Option<u32>,
}

/// An order to be carried out for one domain.
struct Due {
    order: usize,
    domid: u16,
    /// Where the device was before.
    device: Option<u32>,
    not_before: Option<Instant>,
}

/// All orders, and how far they are carried out.
pub(super) struct Standing {
    orders: Vec<StandingOrder>,
    own: u16,
    /// Domains that were there at the last look, with the names that they had at their first.
    seen: BTreeMap<u16, String>,
    due: Vec<Due>,
}

impl Standing {
    pub fn new(orders: Vec<StandingOrder>, own: u16) -> Standing {
        Standing {
            orders,
            own,
            seen: BTreeMap::new(),
            due: Vec::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    /// The guest's name, if an order is about this disk of it.
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

    /// Sees which domains are there. Each gets what is ordered for it once: what is detached by hand stays so while the domain lives.
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
            // One that has none yet is looked at again.
            let Some(name) = xenstore.read(&name_path(domid))? else {
                continue;
            };
            for (order, o) in self.orders.iter().enumerate() {
                if o.guest == name {
                    self.due.push(Due {
                        order,
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

    /// The directories of this device of the guest of that name were removed, and are to come again.
    pub fn again(&mut self, node: Node, disk: &str, guest: &str) {
        let about = |o: &StandingOrder| o.disk == disk && o.guest == guest;
        if let Some(order) = self.orders.iter().position(about) {
            self.due.push(Due {
                order,
                domid: node.domid,
                device: Some(node.devid),
                not_before: Some(Instant::now() + PAUSE),
            });
        }
    }

    /// When something is due that is not due yet.
    pub fn deadline(&self) -> Option<Instant> {
        self.due.iter().filter_map(|due| due.not_before).min()
    }

    /// Makes the directories that are due. What fails is told and not tried again: nothing is to be expected of another time.
    pub fn carry_out(&mut self, xenstore: &mut Xenstore) {
        let now = Instant::now();
        let later = |due: &Due| due.not_before.is_some_and(|at| at > now);
        let (later, due) = std::mem::take(&mut self.due).into_iter().partition(later);
        self.due = later;
        for due in due {
            let StandingOrder { disk, guest, .. } = &self.orders[due.order];
            let who = format!("disk {disk} for guest {}", quote(guest));
            match self.attach(xenstore, &due) {
                Ok(Some(node)) => tracing::info!("{who}: attached as {node}"),
                Ok(None) => tracing::debug!("{who}: domain {} has it, or is gone", due.domid),
                Err(e) => tracing::error!("{who}, domain {}: {e}", due.domid),
            }
        }
    }

    /// As `pvblk xen attach`; `None` where there is nothing to do.
    fn attach(&self, xenstore: &mut Xenstore, due: &Due) -> Result<Option<Node>, Error> {
        let (order, domid) = (&self.orders[due.order], due.domid);
        // Devices that other orders name for this guest.
        let named = |devid: u32| {
            let mut others = self.orders.iter().filter(|o| o.guest == order.guest);
            others.any(|o| o.device == Some(devid))
        };
        let all = Node { domid, devid: 0 }.guests_back_ends(self.own);
        xenstore.transaction(|t| {
            // A domain that is gone would come back as a directory.
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
