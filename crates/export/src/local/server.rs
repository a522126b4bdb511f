//! The server of local front ends: one control thread for the listener and all connections.

use super::connection::Connection;
use super::connector::{LocalConnector, LocalServerContext};
use super::memory::MappingBudget;
use crate::socket_file::{SocketFile, SocketType};
use crate::xenbus::serving::StopDeadlines;
use crate::xenbus::{ConnectionEvent, DiskHost, Inbox};
use parking_lot::Mutex;
use pvblk_backend::{Seldom, seldom};
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::local::Frame;
use pvblk_protocol::local::socket;
use pvblk_sys::Poller;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most front ends of one server, including those that are ending.
const MAX_CONNECTIONS: usize = 1024;
/// Longest time for front ends to disconnect in order when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Longest time for requests in flight to end when the server stops.
const STOP_TIME: Duration = Duration::from_secs(10);
/// Pause of accepting while the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

const LISTENER: u64 = 0;
const INBOX: u64 = 1;
const FIRST_ID: u64 = 2;

/// Serves disks to local front ends at a Unix socket. Dropping it stops it.
pub struct LocalServer {
    shared: Arc<LocalServerContext>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
}

impl LocalServer {
    /// Listens at `path` (mode 0600) and serves the host's disks from then on. A socket file that a dead
    /// server left is replaced. Errors if the path is in use, too long, or can't be made.
    pub fn bind(path: &Path, host: Arc<dyn DiskHost>) -> Result<LocalServer, Error> {
        let os = |e| Error::os("starting the local server", e);
        let listener = SocketFile::bind(path, SocketType::SEQPACKET)?;
        let shared = Arc::new(LocalServerContext {
            host,
            inbox: Arc::new(Inbox::new().map_err(os)?),
            budget: MappingBudget::new(),
            closers: Mutex::default(),
        });
        let poller = Poller::new().map_err(os)?;
        poller.add(listener.as_fd(), LISTENER, false).map_err(os)?;
        poller.add(shared.inbox.as_fd(), INBOX, false).map_err(os)?;
        let mut control = LocalControlThread {
            shared: Arc::clone(&shared),
            poller,
            listener: Some(listener),
            paused_until: None,
            connections: HashMap::new(),
            draining: HashMap::new(),
            next_id: FIRST_ID,
            stopping: None,
            scratch: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name("pvblk-local".into())
            .spawn(move || control.run())
            .map_err(os)?;
        Ok(LocalServer {
            shared,
            thread: Some(thread),
            path: path.to_owned(),
        })
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Address space that front ends' memory takes now, in bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.shared.budget.bytes()
    }

    /// Removes the socket, asks all front ends to disconnect, lets requests in flight end, and returns after at most
    /// 10 seconds.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.shared.inbox.put(ConnectionEvent::Stop);
            if thread.join().is_err() {
                tracing::error!("the local server's control thread panicked");
            }
        }
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// State of the control thread.
struct LocalControlThread {
    shared: Arc<LocalServerContext>,
    poller: Poller,
    listener: Option<SocketFile>,
    paused_until: Option<Instant>,
    connections: HashMap<u64, Connection>,
    /// Connections whose socket is closed and whose requests in flight have to end.
    draining: HashMap<u64, LocalConnector>,
    next_id: u64,
    stopping: Option<StopDeadlines>,
    scratch: Vec<u8>,
}

impl LocalControlThread {
    fn run(&mut self) {
        let mut events = Vec::new();
        while !self.is_done() {
            if let Err(e) = self.poller.wait(&mut events, self.timeout()) {
                // No peer can cause this error; ignoring it would make the loop spin.
                tracing::error!("waiting for local front ends: {e}");
                std::thread::sleep(ACCEPT_PAUSE);
            }
            for event in events.drain(..) {
                match event.token {
                    LISTENER => self.accept(),
                    INBOX => {}
                    id => self.readable(id),
                }
            }
            for event in self.shared.inbox.take() {
                self.handle_event(event);
            }
            self.check_deadlines();
        }
        for (_, connector) in self.draining.drain() {
            tracing::error!(
                "disk {}, front end {}: requests are still in flight; its memory stays mapped",
                connector.serving.disk,
                connector.serving.front
            );
            // The queues may still write to the memory: leaking it is safe, freeing it isn't.
            std::mem::forget(connector);
        }
    }

    fn is_done(&self) -> bool {
        self.stopping.is_some_and(|s| {
            (self.connections.is_empty() && self.draining.is_empty()) || Instant::now() >= s.end
        })
    }

    fn timeout(&self) -> Option<Duration> {
        let deadlines = self.connections.values().filter_map(|c| c.deadline);
        let stop = self.stopping.map(|s| {
            if self.connections.is_empty() {
                s.end
            } else {
                s.grace
            }
        });
        let first = deadlines.chain(stop).chain(self.paused_until).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        let socket = match listener.accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(e) => {
                let path = listener.path().display();
                seldom!(
                    error,
                    Seldom::of(&path.to_string(), "accept"),
                    "accepting at {path}: {e}"
                );
                // The process is out of descriptors and the listener stays readable: pause accepting.
                let _ = self.poller.set(listener.as_fd(), LISTENER, false, false);
                self.paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                return;
            }
        };
        if self.connections.len() + self.draining.len() >= MAX_CONNECTIONS {
            let text = format!("{MAX_CONNECTIONS} front ends are connected already; stop some");
            let _ = socket::send(socket.as_fd(), &Frame::Error(text), &[], None);
            return;
        }
        let id = self.next_id;
        self.next_id += 1;
        let connection = Connection::new(Arc::clone(&self.shared), id, socket);
        match self.poller.add(connection.fd(), id, false) {
            Ok(()) => drop(self.connections.insert(id, connection)),
            Err(e) => tracing::error!("taking a local front end: {e}"),
        }
    }

    fn readable(&mut self, id: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            let result = connection.readable(&mut self.scratch);
            self.judge(id, result);
        }
    }

    fn handle_event(&mut self, event: ConnectionEvent) {
        let id = match event {
            ConnectionEvent::Stop => return self.stop(),
            ConnectionEvent::Ended { id, .. }
            | ConnectionEvent::Drained { id, .. }
            | ConnectionEvent::Resized { id }
            | ConnectionEvent::FenceOpened { id }
            | ConnectionEvent::DeviceGone { id } => id,
        };
        if let Some(connection) = self.connections.get_mut(&id) {
            let result = connection.handle_event(event);
            self.judge(id, result);
        } else if let ConnectionEvent::Drained { generation, .. } = event
            && let Some(connector) = self.draining.get_mut(&id)
            && connector.serving.drained(generation)
        {
            self.draining.remove(&id);
        }
    }

    /// Ends a connection after an error, or after it has closed while the server stops.
    fn judge(&mut self, id: u64, result: Result<(), Error>) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        match result {
            Ok(()) if self.stopping.is_some() && connection.is_closed() => self.end(id, None),
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::Disconnected => {
                seldom!(
                    info,
                    Seldom::of(connection.disk(), "ended"),
                    "{}: {e}",
                    connection.name()
                );
                self.end(id, None);
            }
            Err(e) => {
                seldom!(
                    warn,
                    Seldom::of(connection.disk(), "broken"),
                    "{}: {e}",
                    connection.name()
                );
                self.end(id, Some(&e.to_string()));
            }
        }
    }

    fn end(&mut self, id: u64, reason: Option<&str>) {
        if let Some(connection) = self.connections.remove(&id)
            && let Some(connector) = connection.end(reason)
        {
            self.draining.insert(id, connector);
        }
    }

    fn stop(&mut self) {
        let now = Instant::now();
        // Removes the socket file, so that no front end connects any more.
        self.listener = None;
        self.paused_until = None;
        self.stopping = Some(StopDeadlines {
            grace: now + STOP_GRACE,
            end: now + STOP_TIME,
        });
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            if let Some(connection) = self.connections.get_mut(&id) {
                let result = connection.stop();
                self.judge(id, result);
            }
        }
    }

    fn check_deadlines(&mut self) {
        let now = Instant::now();
        if self.paused_until.is_some_and(|t| t <= now) {
            self.paused_until = None;
            if let Some(listener) = &self.listener {
                let _ = self.poller.set(listener.as_fd(), LISTENER, true, false);
            }
        }
        let grace_over = self.stopping.is_some_and(|s| s.grace <= now);
        let late = |c: &Connection| grace_over || c.deadline.is_some_and(|t| t <= now);
        let ids: Vec<_> = self
            .connections
            .iter()
            .filter(|(_, c)| late(c))
            .map(|(&id, _)| id)
            .collect();
        let why = if grace_over {
            "the server stops"
        } else {
            "the front end took too long"
        };
        for id in ids {
            self.end(id, Some(why));
        }
    }
}
