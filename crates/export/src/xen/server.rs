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
use crate::local::MappingBudget;
use crate::xenbus::serving::{Serving, StopDeadlines};
use crate::xenbus::{ConnectionEvent, DiskHost, Inbox};
use parking_lot::Mutex;
use pvblk_backend::{Seldom, seldom};
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::xenbus::XenbusState;
use pvblk_protocol::xenbus::number::{quote, sentence};
use pvblk_sys::Poller;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest time for guests to release their disks in order when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Longest time for requests in flight to end when the server stops.
const STOP_TIME: Duration = Duration::from_secs(10);
/// Most attached disks of one server.
const MAX_ATTACHED: usize = 4096;

const XENSTORE: u64 = 0;
const INBOX: u64 = 1;

/// Tokens of watches; the token of a front end is the two numbers of its node.
const BACK_ENDS: &str = "back-ends";
const RELEASED: &str = "released";
const INTRODUCED: &str = "introduced";

/// Serves disks to Xen guests: each directory below `backend/pvblk` of this domain whose `disk` names one of the
/// host's disks. Dropping the server stops it.
pub struct XenServer {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    own: u16,
}

impl XenServer {
    /// Starts to serve. Errors if xenstore refuses, or if standing orders need this domain to see others and it may
    /// not.
    pub fn start(
        mut xenstore: Xenstore,
        hypervisor: Arc<dyn Hypervisor>,
        host: Arc<dyn DiskHost>,
        orders: Vec<StandingOrder>,
    ) -> Result<XenServer, Error> {
        let os = |e| Error::os("starting the Xen server", e);
        let own = own_domain(&mut xenstore)?;
        let base = node::back_ends(own);
        let poller = Poller::new().map_err(os)?;
        let inbox = Arc::new(Inbox::new().map_err(os)?);
        poller.add(xenstore.as_fd(), XENSTORE, false).map_err(os)?;
        poller.add(inbox.as_fd(), INBOX, false).map_err(os)?;
        xenstore.watch(&base, BACK_ENDS)?;
        xenstore.watch("@releaseDomain", RELEASED)?;
        let mut standing = StandingOrders::new(orders, own);
        if !standing.is_empty() {
            standing.look(&mut xenstore).map_err(|e| {
                let what = format!("domain {own} can't attach disks to guests by name");
                Error::caused(ErrorKind::Config, what, e)
                    .advise(format!("use `pvblk xen attach --back-end {own}` in dom0"))
            })?;
            xenstore.watch("@introduceDomain", INTRODUCED)?;
            xenstore.watch(LIBXL, INTRODUCED)?;
        }
        let mut control = XenControlThread {
            xenstore: Arc::new(Mutex::new(xenstore)),
            hypervisor,
            host,
            own,
            base,
            poller,
            inbox: Arc::clone(&inbox),
            budget: MappingBudget::of_mappings(MAX_MAPPINGS),
            attached: BTreeMap::new(),
            next_id: 0,
            draining: HashMap::new(),
            standing,
            freed: false,
            left_over: Vec::new(),
            stopping: None,
            lost: false,
        };
        let thread = std::thread::Builder::new()
            .name("pvblk-xen".into())
            .spawn(move || control.run())
            .map_err(os)?;
        Ok(XenServer {
            inbox,
            thread: Some(thread),
            own,
        })
    }

    /// The domain in which the server runs.
    pub fn domain(&self) -> u16 {
        self.own
    }

    /// Asks all guests to release their disks, lets requests in flight end, and returns after at most 10 seconds.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.inbox.put(ConnectionEvent::Stop);
            if thread.join().is_err() {
                tracing::error!("the Xen server's control thread panicked");
            }
        }
    }
}

impl Drop for XenServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The number of this domain; 0 if xenstore has no key for it, as in old versions.
pub(super) fn own_domain(xenstore: &mut Xenstore) -> Result<u16, Error> {
    let text = xenstore.read("domid")?.unwrap_or_else(|| "0".into());
    text.trim()
        .parse()
        .map_err(|_| Error::protocol(format!("xenstore's domid is {}", quote(&text))))
}

/// State of the control thread.
struct XenControlThread {
    xenstore: Arc<Mutex<Xenstore>>,
    hypervisor: Arc<dyn Hypervisor>,
    host: Arc<dyn DiskHost>,
    own: u16,
    base: String,
    poller: Poller,
    inbox: Arc<Inbox>,
    budget: Arc<MappingBudget>,
    attached: BTreeMap<Node, GuestDisk>,
    /// Next value of [`GuestDisk::id`].
    next_id: u64,
    /// Connections whose directories are gone and whose requests in flight have to end.
    draining: HashMap<u64, XenConnector>,
    standing: StandingOrders,
    /// A disk was released in this turn: other guests may wait for it.
    freed: bool,
    /// Closed devices of an earlier server, to be replaced by new ones.
    left_over: Vec<Node>,
    stopping: Option<StopDeadlines>,
    /// True after the connection to xenstore failed.
    lost: bool,
}

impl XenControlThread {
    fn run(&mut self) {
        let mut events = Vec::new();
        while !self.is_done() {
            // Replies of xenstore may bring events with them, so look for events before sleeping.
            let timeout = match !self.lost && self.xenstore.lock().has_events() {
                true => Some(Duration::ZERO),
                false => self.timeout(),
            };
            events.clear();
            if let Err(e) = self.poller.wait(&mut events, timeout) {
                tracing::error!("waiting for Xen guests: {e}");
                std::thread::sleep(Duration::from_millis(500));
            }
            if !self.lost
                && let Err(e) = self.look()
            {
                // GuestDisk guests keep their disks; no others can be attached.
                tracing::error!(
                    "{e}; Xen guests can't be attached or detached any more; restart the server"
                );
                let _ = self.poller.remove(self.xenstore.lock().as_fd());
                self.lost = true;
            }
            for event in self.inbox.take() {
                self.handle_event(event);
            }
            if self.stopping.is_none() && !self.lost {
                self.carry_out();
            }
            self.check_deadlines();
        }
        for (_, connector) in self.draining.drain() {
            leak(connector);
        }
        while let Some((_, a)) = self.attached.pop_first() {
            if a.connector.serving.is_running() {
                leak(a.connector);
            }
        }
    }

    fn is_done(&self) -> bool {
        self.stopping.is_some_and(|s| {
            let now = Instant::now();
            // A guest that doesn't release its disk in time delays the stop only while its requests are in flight.
            let over = |a: &GuestDisk| {
                a.state() == XenbusState::Closed
                    || s.grace <= now && !a.connector.serving.is_running()
            };
            let gone = self.attached.values().all(over) && self.draining.is_empty();
            gone || now >= s.end
        })
    }

    fn timeout(&self) -> Option<Duration> {
        let deadlines = self.attached.values().filter_map(|a| a.deadline);
        let stop = self.stopping.map(|s| match Instant::now() < s.grace {
            true => s.grace,
            false => s.end,
        });
        let more = self.freed || !self.left_over.is_empty();
        let due = match self.stopping.is_some() || self.lost {
            true => None,
            false if more => Some(Instant::now()),
            false => self.standing.deadline(),
        };
        let first = deadlines.chain(stop).chain(due).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Handles events of xenstore. A guest that writes without end is handled once in each turn.
    fn look(&mut self) -> Result<(), Error> {
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
            self.own_changed(node);
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
    fn own_changed(&mut self, node: Node) {
        let directory = node.back_end(self.own);
        let there = self.xenstore.lock().read(&format!("{directory}/frontend"));
        let replaced = self.attached.get(&node).map(GuestDisk::is_replaced);
        if let (Ok(Some(_)), Some(Ok(true))) = (&there, replaced) {
            self.vanished(node);
        }
        match (there, self.attached.contains_key(&node)) {
            (Ok(Some(_)), true) => self.with(node, GuestDisk::own_changed),
            (Ok(Some(front)), false) if self.stopping.is_none() => {
                if let Err(e) = self.adopt(node, &front) {
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
    fn adopt(&mut self, node: Node, front: &str) -> Result<(), Error> {
        let directory = node.back_end(self.own);
        let read = |key: &str| self.xenstore.lock().read(&format!("{directory}/{key}"));
        let Some(disk) = read("disk")? else {
            return Ok(());
        };
        let Some(device) = self.host.device(&disk) else {
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
        let names = (sentence(&disk), node.to_string());
        self.next_id += 1;
        let id = self.next_id;
        let serving = Serving::new(&self.host, &self.inbox, id, names, device);
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
        let disk = &mine.connector.serving.disk;
        let has_it = |a: &GuestDisk| {
            let namesake = mine.guest.is_some() && a.guest == mine.guest;
            namesake
                && a.node.domid != node.domid
                && a.connector.serving.disk == *disk
                && a.has_disk()
        };
        let mut others = self.attached.values().filter(|a| a.node != node);
        self.stopping.is_some() || !mine.connector.serving.may_begin() || others.any(has_it)
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
                let count = Seldom::of(&attached.connector.serving.disk, "held");
                let name = attached.name();
                seldom!(
                    info,
                    count,
                    "{name}: waits: another front end still has the disk, or its requests are in flight"
                );
            }
            (true, false) => {}
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
        let (own, disk) = (self.own, attached.store.disk.clone());
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
        let Some(mut attached) = self.attached.remove(&node) else {
            return;
        };
        tracing::info!("{}: detached", attached.name());
        self.freed = true;
        let path = node.front_state();
        if let Err(e) = self.xenstore.lock().unwatch(&path, &token(node)) {
            tracing::warn!("{e}");
        }
        use crate::xenbus::Connector;
        if !attached.connector.disconnect() {
            self.draining.insert(attached.id, attached.connector);
        }
    }

    /// Removes our directory if the guest is gone and its queues have ended or never began: no toolstack knows our
    /// kind.
    fn sweep(&mut self, node: Node) {
        let idle = |a: &GuestDisk| !a.connector.serving.is_running();
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
            let count = Seldom::of(&attached.connector.serving.disk, "step");
            seldom!(warn, count, "{}: {e}", attached.name());
        }
        self.freed |= had && !attached.has_disk();
        if attached.take_left_over() {
            self.left_over.push(node);
        }
    }

    fn handle_event(&mut self, event: ConnectionEvent) {
        let (id, generation) = match event {
            ConnectionEvent::Stop => return self.stop(),
            ConnectionEvent::Drained { id, generation } => (id, Some(generation)),
            ConnectionEvent::FenceOpened { .. } => {
                self.freed = true;
                return;
            }
            ConnectionEvent::Ended { id, .. }
            | ConnectionEvent::Resized { id }
            | ConnectionEvent::DeviceGone { id } => (id, None),
        };
        if let Some(generation) = generation
            && let Some(connector) = self.draining.get_mut(&id)
            && connector.serving.drained(generation)
        {
            self.draining.remove(&id);
            self.freed = true;
        } else if let Some(node) = self.attached.values().find(|a| a.id == id).map(|a| a.node) {
            self.with(node, |a| a.handle_event(event));
            self.sweep(node);
        }
    }

    fn stop(&mut self) {
        let now = Instant::now();
        self.stopping = Some(StopDeadlines {
            grace: now + STOP_GRACE,
            end: now + STOP_TIME,
        });
        for node in self.attached.keys().copied().collect::<Vec<_>>() {
            self.with(node, GuestDisk::close);
        }
    }

    fn check_deadlines(&mut self) {
        let now = Instant::now();
        self.attached.values_mut().for_each(|a| a.late(now));
        if self.stopping.is_some_and(|s| s.grace <= now) {
            for node in self.attached.keys().copied().collect::<Vec<_>>() {
                self.with(node, |a| {
                    match a.connector.serving.is_detaching() || !a.connector.serving.is_running() {
                        true => Ok(()),
                        false => a.break_off("the server stops"),
                    }
                });
            }
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

/// Leaks the connector: requests in flight may still write to the guest's pages, so freeing them isn't safe.
fn leak(connector: XenConnector) {
    let serving = &connector.serving;
    tracing::error!(
        "disk {}, {}: requests are still in flight; its pages stay mapped",
        serving.disk,
        serving.front
    );
    std::mem::forget(connector);
}
