//! The server of local front ends: one control thread for the listener and all connections.

use super::connection::Connection;
use super::connector::LocalServerContext;
use crate::kit::{ControlThread, Event, FrontEnd, Io, Listener, MappingBudget, Server, Stopping};
use crate::socket_file::{SocketFile, SocketType};
use crate::xenbus::serving::Serving;
use parking_lot::Mutex;
use pvblk_backend::Service;
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::local::Frame;
use pvblk_protocol::local::socket;
use pvblk_protocol::xenbus::BackendOffers;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Most front ends of one server, including those that are ending.
const MAX_CONNECTIONS: usize = 1024;
/// Longest time for front ends to disconnect in order when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Longest time for requests in flight to end when the server stops.
const STOP_TIME: Duration = Duration::from_secs(10);

const LISTENER: u64 = 0;
const FIRST_ID: u64 = 1;

/// Serves disks to local front ends at a Unix socket. Dropping it stops it.
pub struct LocalServer {
    live: Arc<AtomicUsize>,
    budget: Arc<MappingBudget>,
    thread: ControlThread,
    path: PathBuf,
}

impl LocalServer {
    /// Listens at `path` (mode 0600) and serves the disks of `service` from then on, with `offers` to each front end. A socket file that a dead
    /// server left is replaced. Errors if the path is in use, too long, or can't be made.
    pub fn bind(
        path: &Path,
        service: &Arc<Service>,
        offers: BackendOffers,
    ) -> Result<LocalServer, Error> {
        LocalServer::start(
            SocketFile::bind(path, SocketType::SEQPACKET)?,
            service,
            offers,
            MappingBudget::new(),
        )
    }

    /// As [`LocalServer::bind`], on a socket that listens already (`SOCK_SEQPACKET`), with a budget that several servers may share.
    pub fn start(
        socket: SocketFile,
        service: &Arc<Service>,
        offers: BackendOffers,
        budget: Arc<MappingBudget>,
    ) -> Result<LocalServer, Error> {
        let path = socket.path().to_owned();
        let shared = Arc::new(LocalServerContext {
            service: Arc::clone(service),
            offers,
            budget,
            closers: Mutex::default(),
        });
        let budget = Arc::clone(&shared.budget);
        let what = "local server";
        let live = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&live);
        let place = path.display().to_string();
        let thread = ControlThread::start("pvblk-local", what, |io| {
            let listener = Listener::new(socket, place, LISTENER, io);
            Ok(LocalConnections {
                shared,
                listener: Some(listener.map_err(|e| Error::os(format!("starting the {what}"), e))?),
                connections: HashMap::new(),
                leaving: HashMap::new(),
                next_id: FIRST_ID,
                stopping: false,
                scratch: Vec::new(),
                live: counted,
            })
        })?;
        Ok(LocalServer {
            live,
            budget,
            thread,
            path,
        })
    }

    /// Front ends that are connected, or have requests at work.
    pub fn connections(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Address space that front ends' memory takes now, in bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.budget.bytes()
    }

    /// Begins to stop; [`stop`](Self::stop), or the drop, then waits for the rest.
    pub fn begin_stop(&self) {
        self.thread.begin_stop();
    }

    /// Removes the socket, asks all front ends to disconnect, lets requests in flight end, and returns after at most
    /// 10 seconds.
    pub fn stop(&mut self) {
        self.thread.stop();
    }
}

/// State of the control thread.
struct LocalConnections {
    shared: Arc<LocalServerContext>,
    listener: Option<Listener<SocketFile>>,
    connections: HashMap<u64, Connection>,
    /// Front ends whose socket is closed and whose requests in flight have to end.
    leaving: HashMap<u64, Serving>,
    next_id: u64,
    stopping: bool,
    scratch: Vec<u8>,
    /// Number of both, for the server's owner.
    live: Arc<AtomicUsize>,
}

impl Server for LocalConnections {
    fn ready(&mut self, token: u64, io: &Io) {
        match token {
            LISTENER => self.accept(io),
            id => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    let result = connection.readable(&mut self.scratch);
                    self.judge(id, result);
                }
            }
        }
    }

    fn event(&mut self, id: u64, event: Event, _io: &Io) {
        if let (Event::Removed, Some(connection)) = (&event, self.connections.get(&id)) {
            let name = connection.name();
            let why = "the disk was removed";
            tracing::info!("{name}: {why}");
            self.end(id, Some(why));
        } else if let Some(connection) = self.connections.get_mut(&id) {
            let result = connection.event(event);
            self.judge(id, result);
        } else if let Event::Left { generation } = event
            && let Some(serving) = self.leaving.get_mut(&id)
            && serving.front.left(generation)
        {
            self.leaving.remove(&id);
        }
    }

    fn due(&self) -> Option<Instant> {
        let deadlines = self.connections.values().filter_map(|c| c.deadline);
        let listener = self.listener.as_ref().and_then(Listener::due);
        deadlines.chain(listener).min()
    }

    fn passed(&mut self, stopping: Option<Stopping>, io: &Io) {
        if let Some(listener) = &mut self.listener {
            listener.passed(io);
        }
        let now = io.now();
        let grace_over = stopping.is_some_and(|s| s.grace <= now);
        let late = |c: &Connection| grace_over || c.deadline.is_some_and(|t| t <= now);
        let late = self.connections.iter().filter(|(_, c)| late(c));
        let late: Vec<u64> = late.map(|(&id, _)| id).collect();
        let why = match grace_over {
            true => "the server stops",
            false => "the front end took too long",
        };
        late.into_iter().for_each(|id| self.end(id, Some(why)));
        let live = self.connections.len() + self.leaving.len();
        self.live.store(live, Ordering::Relaxed);
    }

    fn stop(&mut self, io: &Io) -> Stopping {
        // Removes the socket file, so that no front end connects any more.
        self.listener = None;
        self.stopping = true;
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            if let Some(connection) = self.connections.get_mut(&id) {
                let result = connection.stop();
                self.judge(id, result);
            }
        }
        let now = io.now();
        Stopping {
            grace: now + STOP_GRACE,
            end: now + STOP_TIME,
        }
    }

    fn is_over(&self, _: Stopping, _: Instant) -> bool {
        self.connections.is_empty() && self.leaving.is_empty()
    }

    fn give_up(&mut self) {
        for Serving { disk, peer, .. } in self.leaving.values() {
            tracing::error!(
                "disk {disk}, front end {peer}: requests are still in flight; its memory stays mapped"
            );
        }
    }
}

impl LocalConnections {
    fn accept(&mut self, io: &Io) {
        let Some(listener) = &mut self.listener else {
            return;
        };
        let Some(socket) = listener.accept(io, SocketFile::accept) else {
            return;
        };
        if self.connections.len() + self.leaving.len() >= MAX_CONNECTIONS {
            let text = format!("{MAX_CONNECTIONS} front ends are connected already; stop some");
            let _ = socket::send(socket.as_fd(), &Frame::Error(text), &[], None);
            return;
        }
        let id = self.next_id;
        self.next_id += 1;
        let (shared, inbox) = (Arc::clone(&self.shared), Arc::clone(&io.inbox));
        let connection = Connection::new(shared, inbox, id, socket, listener.place());
        match io.add(connection.fd(), id) {
            Ok(()) => drop(self.connections.insert(id, connection)),
            Err(e) => tracing::error!("taking a local front end: {e}"),
        }
    }

    /// Ends a connection after an error, or after it has closed while the server stops.
    fn judge(&mut self, id: u64, result: Result<(), Error>) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        match result {
            Ok(()) if self.stopping && connection.is_closed() => self.end(id, None),
            Ok(()) => {}
            Err(e) => {
                let (disk, peer) = (connection.disk(), connection.peer());
                let events = self.shared.service.events();
                FrontEnd::log_end(events, disk, peer, &connection.name(), &e);
                let reason = (e.kind() != ErrorKind::Disconnected).then(|| e.to_string());
                self.end(id, reason.as_deref());
            }
        }
    }

    fn end(&mut self, id: u64, reason: Option<&str>) {
        if let Some(connection) = self.connections.remove(&id)
            && let Some(serving) = connection.end(reason)
        {
            self.leaving.insert(id, serving);
        }
    }
}
