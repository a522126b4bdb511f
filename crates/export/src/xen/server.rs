//! The server of Xen guests: one control thread for xenstore and all handshakes.

use super::connector::XenConnector;
use super::guest_disk::GuestDisk;
use super::hypervisor::Hypervisor;
use super::mapper::{CutOff, MAX_MAPPINGS};
use super::node::{self, Node};
use super::standing::{LIBXL, StandingOrder, StandingOrders};
use super::store::NodeStore;
use super::toolstack::remove_back_end;
use super::xenstore::{WatchEvent, Xenstore};
use crate::kit::{ControlThread, Event, FrontEnd, Io, MappingBudget, Orders, Server, Stopping};
use crate::xenbus::serving::{Serves, Serving};
use parking_lot::Mutex;
use pvblk_backend::events::{Kind, Peer};
use pvblk_backend::{RateLimit, Service, ratelimited};
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::xenbus::number::{quote, sentence};
use pvblk_protocol::xenbus::{BackendOffers, XenbusState};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for guests to release their disks in order when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Longest time for requests in flight to end when the server stops.
const STOP_TIME: Duration = Duration::from_secs(10);
/// Most attached disks of one server.
const MAX_ATTACHED: usize = 4096;

const XENSTORE: u64 = 0;

/// Tokens of watches; the token of a front end is the two numbers of its node.
const BACK_ENDS: &str = "back-ends";
const RELEASED: &str = "released";
const INTRODUCED: &str = "introduced";

/// Serves disks to Xen guests: each directory below `backend/pvblk` of this domain whose `disk` names one of the
/// service's disks. Dropping the server stops it.
pub struct XenServer {
    thread: ControlThread,
    own: u16,
    orders: Arc<Orders<GuestOrder>>,
}

/// An order of the server's owner.
enum GuestOrder {
    Add(StandingOrder),
    Remove(StandingOrder),
}

impl XenServer {
    /// Starts to serve, with `offers` to each front end. Errors if xenstore refuses, or if standing orders need this domain to see others and it may
    /// not.
    pub fn start(
        mut xenstore: Xenstore,
        hypervisor: Arc<dyn Hypervisor>,
        service: &Arc<Service>,
        offers: BackendOffers,
        orders: Vec<StandingOrder>,
    ) -> Result<XenServer, Error> {
        let own = own_domain(&mut xenstore)?;
        let base = node::back_ends(own);
        xenstore.watch(&base, BACK_ENDS)?;
        xenstore.watch("@releaseDomain", RELEASED)?;
        let mut standing = StandingOrders::new(orders, own);
        if !standing.is_empty() {
            watch_domains(&mut xenstore, &mut standing, own)?;
        }
        let service = Arc::clone(service);
        let what = "Xen server";
        let orders = Arc::default();
        let taken = Arc::clone(&orders);
        let thread = ControlThread::start("pvblk-xen", what, |io| {
            io.add(xenstore.as_fd(), XENSTORE)
                .map_err(|e| Error::os(format!("starting the {what}"), e))?;
            Ok(GuestDisks {
                xenstore: Arc::new(Mutex::new(xenstore)),
                hypervisor,
                service,
                offers,
                own,
                base,
                budget: MappingBudget::of_mappings(MAX_MAPPINGS),
                attached: BTreeMap::new(),
                next_id: 0,
                leaving: HashMap::new(),
                watches_domains: !standing.is_empty(),
                standing,
                orders: taken,
                freed: false,
                left_over: Vec::new(),
                stopping: false,
                lost: false,
            })
        })?;
        Ok(XenServer {
            thread,
            own,
            orders,
        })
    }

    /// Takes one more standing order, which also applies to a guest that is there already. Errors if there is one like it, or if this domain may not see others.
    pub fn add_order(&self, order: StandingOrder) -> Result<(), Error> {
        self.orders.give(&self.thread, GuestOrder::Add(order))
    }

    /// Takes a standing order back. Guests keep the disks that they have.
    pub fn remove_order(&self, order: StandingOrder) -> Result<(), Error> {
        self.orders.give(&self.thread, GuestOrder::Remove(order))
    }

    /// The domain in which the server runs.
    pub fn domain(&self) -> u16 {
        self.own
    }

    /// Begins to stop; [`stop`](Self::stop), or the drop, then waits for the rest.
    pub fn begin_stop(&self) {
        self.thread.begin_stop();
    }

    /// Asks all guests to release their disks, lets requests in flight end, and returns after at most 10 seconds.
    pub fn stop(&mut self) {
        self.thread.stop();
    }
}

/// Looks for the domains that are there, and has xenstore tell of others.
fn watch_domains(
    xenstore: &mut Xenstore,
    standing: &mut StandingOrders,
    own: u16,
) -> Result<(), Error> {
    standing.look(xenstore).map_err(|e| {
        let what = format!("domain {own} can't attach disks to guests by name");
        Error::caused(ErrorKind::Config, what, e)
            .advise(format!("use `pvblk xen attach --back-end {own}` in dom0"))
    })?;
    xenstore.watch("@introduceDomain", INTRODUCED)?;
    xenstore.watch(LIBXL, INTRODUCED)
}

/// The number of this domain; 0 if xenstore has no key for it, as in old versions.
pub(super) fn own_domain(xenstore: &mut Xenstore) -> Result<u16, Error> {
    let text = xenstore.read("domid")?.unwrap_or_else(|| "0".into());
    text.trim()
        .parse()
        .map_err(|_| Error::protocol(format!("xenstore's domid is {}", quote(&text))))
}

/// State of the control thread.
struct GuestDisks {
    xenstore: Arc<Mutex<Xenstore>>,
    hypervisor: Arc<dyn Hypervisor>,
    service: Arc<Service>,
    offers: BackendOffers,
    own: u16,
    base: String,
    budget: Arc<MappingBudget>,
    attached: BTreeMap<Node, GuestDisk>,
    /// Next value of [`GuestDisk::id`].
    next_id: u64,
    /// Connections whose directories are gone and whose requests in flight have to end.
    leaving: HashMap<u64, XenConnector>,
    standing: StandingOrders,
    orders: Arc<Orders<GuestOrder>>,
    /// Xenstore tells of domains that come and go.
    watches_domains: bool,
    /// A disk was released in this turn: other guests may wait for it.
    freed: bool,
    /// Closed devices of an earlier server, to be replaced by new ones.
    left_over: Vec<Node>,
    stopping: bool,
    /// True after the connection to xenstore failed.
    lost: bool,
}

impl Server for GuestDisks {
    fn ready(&mut self, _xenstore: u64, io: &Io) {
        self.look(io);
    }

    fn event(&mut self, id: u64, event: Event, _io: &Io) {
        // Others may wait for the same disk.
        self.freed |= matches!(event, Event::FenceOpen);
        if let Event::Removed = event {
            let node = self.attached.values().find(|a| a.id == id).map(|a| a.node);
            if let Some(node) = node {
                self.with(node, |a| a.break_off("the disk was removed"));
                self.vanished(node);
            }
        } else if let Event::Left { generation } = event
            && let Some(connector) = self.leaving.get_mut(&id)
            && connector.serving.front.left(generation)
        {
            self.leaving.remove(&id);
            self.freed = true;
        } else if let Some(node) = self.attached.values().find(|a| a.id == id).map(|a| a.node) {
            self.with(node, |a| a.event(event));
            self.sweep(node);
        }
    }

    fn due(&self) -> Option<Instant> {
        let deadlines = self.attached.values().filter_map(|a| a.deadline);
        let more = self.freed || !self.left_over.is_empty();
        let due = if self.lost {
            None
        } else if self.xenstore.lock().has_events() || more && !self.stopping {
            // Replies of xenstore bring events with them, which the poller doesn't see.
            Some(Instant::now())
        } else {
            self.standing.deadline().filter(|_| !self.stopping)
        };
        deadlines.chain(due).min()
    }

    fn passed(&mut self, stopping: Option<Stopping>, io: &Io) {
        if self.xenstore.lock().has_events() {
            self.look(io);
        }
        for order in self.orders.take() {
            let (what, giver) = order.split();
            giver.answer(self.ordered(what));
        }
        if !self.stopping && !self.lost {
            self.carry_out();
        }
        let now = io.now();
        self.attached.values_mut().for_each(|a| a.late(now));
        if stopping.is_some_and(|s| s.grace <= now) {
            for node in self.attached.keys().copied().collect::<Vec<_>>() {
                self.with(node, |a| match a.front().is_inside() {
                    true => a.break_off("the server stops"),
                    false => Ok(()),
                });
            }
        }
    }

    fn stop(&mut self, io: &Io) -> Stopping {
        self.stopping = true;
        for node in self.attached.keys().copied().collect::<Vec<_>>() {
            self.with(node, GuestDisk::close);
        }
        let now = io.now();
        Stopping {
            grace: now + STOP_GRACE,
            end: now + STOP_TIME,
        }
    }

    fn is_over(&self, stopping: Stopping, now: Instant) -> bool {
        // A guest that doesn't release its disk in time delays the stop only while its requests are in flight.
        let over = |a: &GuestDisk| {
            a.state() == XenbusState::Closed || stopping.grace <= now && !a.is_at_work()
        };
        self.attached.values().all(over) && self.leaving.is_empty()
    }

    fn give_up(&mut self) {
        let attached = self.attached.values().filter(|a| a.is_at_work());
        let leaving = self.leaving.values().map(Serves::name);
        for name in attached.map(GuestDisk::name).chain(leaving) {
            tracing::error!("{name}: requests are still in flight; its pages stay mapped");
        }
    }
}

impl GuestDisks {
    /// Handles what xenstore tells.
    fn look(&mut self, io: &Io) {
        if self.lost {
            return;
        }
        if let Err(e) = self.watched(io) {
            // Attached guests keep their disks; no others can be attached.
            tracing::error!(
                "{e}; Xen guests can't be attached or detached any more; restart the server"
            );
            let _ = io.remove(self.xenstore.lock().as_fd());
            self.lost = true;
        }
    }

    /// Handles events of xenstore. A guest that writes without end is handled once in each turn.
    fn watched(&mut self, io: &Io) -> Result<(), Error> {
        let events = {
            let mut xenstore = self.xenstore.lock();
            xenstore.pump()?;
            xenstore.take_events()
        };
        let (mut ours, mut fronts) = (BTreeSet::new(), BTreeSet::new());
        let mut all = events.lost;
        let mut domains = false;
        for WatchEvent { token, path } in events.changes {
            if token == BACK_ENDS {
                match self.node_of(&path) {
                    Some(node) => drop(ours.insert(node)),
                    None => match self.guest_of(&path) {
                        Some(first) => {
                            let last = Node {
                                devid: u32::MAX,
                                ..first
                            };
                            ours.extend(self.attached.range(first..=last).map(|(node, _)| *node));
                        }
                        None => all = true,
                    },
                }
            } else if token == INTRODUCED {
                domains = true;
            } else if token == RELEASED {
                domains = true;
                fronts.extend(self.attached.keys().copied());
            } else if let Some(node) = parse_token(&token) {
                fronts.insert(node);
            }
        }
        if all {
            ours.extend(self.scan()?);
            fronts.extend(self.attached.keys().copied());
        }
        if domains || all {
            let seen = self.standing.look(&mut self.xenstore.lock());
            // Without the list of domains, standing orders wait; the rest goes on.
            seen.unwrap_or_else(|e| tracing::warn!("{e}"));
        }
        for node in ours {
            self.own_changed(node, io);
        }
        for node in fronts {
            self.with(node, GuestDisk::front_changed);
            self.sweep(node);
        }
        Ok(())
    }

    /// The device to which a path below our directory belongs.
    fn node_of(&self, path: &str) -> Option<Node> {
        let rest = path.strip_prefix(&self.base)?.strip_prefix('/')?;
        let mut names = rest.split('/');
        Node::parse(names.next()?, names.next()?)
    }

    /// The first device of the guest to which this directory belongs.
    fn guest_of(&self, path: &str) -> Option<Node> {
        let domid = path.strip_prefix(&self.base)?.strip_prefix('/')?;
        Node::parse(domid, "0")
    }

    /// All devices that exist, or existed at the last look.
    fn scan(&mut self) -> Result<Vec<Node>, Error> {
        let mut xenstore = self.xenstore.lock();
        let mut nodes: Vec<Node> = self.attached.keys().copied().collect();
        for domid in xenstore.list(&self.base)?.unwrap_or_default() {
            let devices = xenstore.list(&format!("{}/{domid}", self.base))?;
            let devices = devices.unwrap_or_default().into_iter();
            nodes.extend(devices.filter_map(|devid| Node::parse(&domid, &devid)));
        }
        Ok(nodes)
    }

    /// Handles a change of our directory of a device: it appeared, was removed, or the toolstack asks for something.
    fn own_changed(&mut self, node: Node, io: &Io) {
        let directory = node.back_end(self.own);
        let there = self.xenstore.lock().read(&format!("{directory}/frontend"));
        let replaced = self.attached.get(&node).map(GuestDisk::is_replaced);
        if let (Ok(Some(_)), Some(Ok(true))) = (&there, replaced) {
            self.vanished(node);
        }
        match (there, self.attached.contains_key(&node)) {
            (Ok(Some(_)), true) => self.with(node, GuestDisk::own_changed),
            (Ok(Some(front)), false) if !self.stopping => {
                if let Err(e) = self.adopt(node, &front, io) {
                    tracing::warn!("{node}: {e}");
                    self.report(&directory, &e);
                }
            }
            (Ok(None), true) => self.vanished(node),
            (Ok(_), false) => {}
            (Err(e), _) => tracing::warn!("{node}: {e}"),
        }
    }

    /// Writes the reason why a device can't be served to its directory. Done once, because the write is itself a
    /// change of the directory.
    fn report(&self, directory: &str, why: &Error) {
        let path = format!("{directory}/error");
        let text = sentence(&why.to_string());
        let result = self.xenstore.lock().transaction(|t| {
            let there = t.read(directory)?.is_some();
            match there && t.read(&path)?.as_ref() != Some(&text) {
                true => t.write(&path, &text),
                false => Ok(()),
            }
        });
        if let Err(e) = result {
            tracing::warn!("{e}");
        }
    }

    /// Takes a device into service if its disk is one of this server; other disks belong to other servers.
    fn adopt(&mut self, node: Node, front: &str, io: &Io) -> Result<(), Error> {
        let directory = node.back_end(self.own);
        let read = |key: &str| self.xenstore.lock().read(&format!("{directory}/{key}"));
        let Some(disk) = read("disk")? else {
            return Ok(());
        };
        let Some(found) = self.service.disks().find(&disk) else {
            tracing::debug!("{node}: disk {} is not ours", quote(&disk));
            return Ok(());
        };
        if front != node.front_end() {
            return Err(Error::config(format!(
                "frontend is {}, not {}",
                quote(front),
                node.front_end()
            )));
        }
        if self.attached.len() == MAX_ATTACHED {
            return Err(Error::config(format!(
                "{MAX_ATTACHED} disks of guests are attached already"
            )));
        }
        let guest = self.standing.guest(&mut self.xenstore.lock(), node, &disk);
        self.next_id += 1;
        let (id, peer) = (self.next_id, node.to_string());
        let serving = Serving {
            disk: sentence(&disk),
            front: FrontEnd::new(
                &self.service,
                found,
                &io.inbox,
                id,
                peer.clone(),
                Peer::at("xen", format!("domain {}", node.domid)),
            ),
            peer,
            offers: self.offers,
        };
        let connector = XenConnector {
            serving,
            hypervisor: Arc::clone(&self.hypervisor),
            budget: Arc::clone(&self.budget),
            domid: node.domid,
            cut_off: CutOff::default(),
        };
        let store = NodeStore {
            xenstore: Arc::clone(&self.xenstore),
            ours: directory,
            disk,
            peers: front.to_owned(),
            front: None,
        };
        let path = node.front_state();
        self.xenstore.lock().watch(&path, &token(node))?;
        let mut attached = GuestDisk::new((node, id), store, connector);
        attached.guest = guest;
        self.attached.insert(node, attached);
        self.begin(node);
        Ok(())
    }

    /// True while a device may not begin. Either requests of an earlier front end are still in flight on the disk,
    /// and an old write could overwrite a newer one (docs/decisions/0006-reconnect.md). Or the disk belongs to
    /// another domain of the same guest: during a reboot or restore a guest has two domains for a moment. Or the
    /// server stops.
    fn is_held(&self, node: Node) -> bool {
        let Some(mine) = self.attached.get(&node) else {
            return false;
        };
        let disk = mine.disk_key();
        let has_it = |a: &GuestDisk| {
            let namesake = mine.guest.is_some() && a.guest == mine.guest;
            namesake && a.node.domid != node.domid && a.disk_key() == disk && a.has_disk()
        };
        let mut others = self.attached.values().filter(|a| a.node != node);
        self.stopping || !mine.may_enter() || others.any(has_it)
    }

    /// Starts the handshake, if that is allowed.
    fn begin(&mut self, node: Node) {
        let held = self.is_held(node);
        let Some(attached) = self.attached.get_mut(&node) else {
            return;
        };
        match (held, attached.set_held(held)) {
            (false, _) => self.with(node, GuestDisk::start),
            (true, true) => {
                let count = RateLimit::of(attached.disk(), "held");
                let name = attached.name();
                ratelimited!(
                    info,
                    count,
                    "{name}: waits: another front end still has the disk, or its requests are in flight"
                );
            }
            (true, false) => {}
        }
    }

    /// Does what the server's owner wants.
    fn ordered(&mut self, order: GuestOrder) -> Result<(), Error> {
        if self.stopping || self.lost {
            let why = "the Xen server has no connection to xenstore any more, or stops";
            return Err(Error::new(ErrorKind::Disconnected, why));
        }
        match order {
            GuestOrder::Remove(order) => match self.standing.remove(&order) {
                true => Ok(()),
                false => Err(Error::config(format!("there is no order: {order}"))),
            },
            GuestOrder::Add(order) => {
                self.standing.add(order.clone())?;
                if self.watches_domains {
                    return Ok(());
                }
                let mut xenstore = self.xenstore.lock();
                let watched = watch_domains(&mut xenstore, &mut self.standing, self.own);
                match watched {
                    Ok(()) => self.watches_domains = true,
                    Err(_) => drop(self.standing.remove(&order)),
                }
                watched
            }
        }
    }

    /// Carries out the steps that became possible in this turn.
    fn carry_out(&mut self) {
        self.standing.carry_out(&mut self.xenstore.lock());
        // Orders come last, so that an order for a removed device doesn't apply to its successor.
        for node in std::mem::take(&mut self.left_over) {
            if let Err(e) = self.remove_left_over(node) {
                tracing::warn!("{node}: {e}");
            }
        }
        if std::mem::take(&mut self.freed) {
            let waits = |a: &&GuestDisk| a.state() == XenbusState::Initialising || a.is_held();
            let waiting = self.attached.values().filter(waits);
            let waiting: Vec<(Node, XenbusState)> = waiting.map(|a| (a.node, a.state())).collect();
            for (node, state) in waiting {
                match state {
                    XenbusState::Initialising => self.begin(node),
                    _ => self.with(node, GuestDisk::front_changed),
                }
            }
        }
    }

    /// Replaces the device of a guest that has closed: the guest never comes back to it by itself, and its standing
    /// order is still in force.
    fn remove_left_over(&mut self, node: Node) -> Result<(), Error> {
        let Some(attached) = self.attached.get(&node) else {
            return Ok(());
        };
        let Some(guest) = attached.guest.clone() else {
            return Ok(());
        };
        let (own, disk) = (self.own, attached.disk_key().to_owned());
        let (back, front) = (node.back_end(own), node.front_end());
        let removed = self.xenstore.lock().transaction(|t| {
            let closed = t.read(&format!("{back}/disk"))?.as_ref() == Some(&disk)
                && t.read(&format!("{back}/online"))?.as_deref() == Some("1")
                && t.read(&node.front_state())?.as_deref() == Some("6");
            if closed {
                t.remove(&front)?;
                remove_back_end(t, node, own)?;
            }
            Ok(closed)
        })?;
        if removed {
            self.standing.again(node, &disk, &guest);
        }
        Ok(())
    }

    /// Handles the removal of our directory.
    fn vanished(&mut self, node: Node) {
        let Some(attached) = self.attached.remove(&node) else {
            return;
        };
        tracing::info!("{}: detached", attached.name());
        self.freed = true;
        let path = node.front_state();
        if let Err(e) = self.xenstore.lock().unwatch(&path, &token(node)) {
            tracing::warn!("{e}");
        }
        let id = attached.id;
        if let Some(connector) = attached.end() {
            self.leaving.insert(id, connector);
        }
    }

    /// Removes our directory if the guest is gone and its queues have ended or never began: no toolstack knows our
    /// kind.
    fn sweep(&mut self, node: Node) {
        let idle = |a: &GuestDisk| !a.is_at_work();
        if !self.attached.get(&node).is_some_and(idle) {
            return;
        }
        let home = format!("/local/domain/{}", node.domid);
        let own = self.own;
        let mut xenstore = self.xenstore.lock();
        // A driver domain doesn't see a guest's home directory, but it sees the disk's own directory of a live guest.
        let seen = [home, node.front_state()]
            .iter()
            .find_map(|path| xenstore.read_visible(path).transpose());
        let result = match seen {
            None => xenstore.transaction(|t| remove_back_end(t, node, own)),
            Some(other) => other.map(drop),
        };
        if let Err(e) = result {
            tracing::warn!("{node}: {e}");
        }
    }

    fn with(&mut self, node: Node, step: impl FnOnce(&mut GuestDisk) -> Result<(), Error>) {
        let held = self.is_held(node);
        let Some(attached) = self.attached.get_mut(&node) else {
            return;
        };
        attached.set_held(held);
        let had = attached.has_disk();
        if let Err(e) = step(attached) {
            let count = RateLimit::of(attached.disk(), "step");
            ratelimited!(warn, count, "{}: {e}", attached.name());
            let events = self.service.events();
            let peer = Peer::at("xen", format!("domain {}", node.domid));
            peer.tell(
                events,
                Kind::PeerBroken,
                Some(attached.disk()),
                &e.to_string(),
            );
        }
        self.freed |= had && !attached.has_disk();
        if attached.take_left_over() {
            self.left_over.push(node);
        }
    }
}

fn token(node: Node) -> String {
    format!("{}/{}", node.domid, node.devid)
}

fn parse_token(token: &str) -> Option<Node> {
    let (domid, devid) = token.split_once('/')?;
    Node::parse(domid, devid)
}
