//! The listener's thread, and negotiations on short-lived threads of their own.

use super::config::NbdConfig;
use super::handshake::Handshake;
use super::listener::{Listener, Peer};
use super::negotiate::{Met, identity, negotiate, tls_use};
use super::shares::Ticket;
use super::source::NbdSource;
use crate::kit::{self, ControlThread, Event, Inbox, Io, Server, Stopping};
use crate::socket_file::SocketFile;
use parking_lot::Mutex;
use pvblk_backend::events::{self, Kind, Presence};
use pvblk_backend::{Disk, RateLimit, RequestSource, Service, SourceEnd, ratelimited};
use pvblk_block::Error;
use pvblk_protocol::nbd::NbdAddr;
use rustix::net::Shutdown;
use std::cell::Cell;
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Told how each connection ended: the disk, the connection's name, and the end. On a worker.
type OnEnd = dyn Fn(&str, &str, SourceEnd) + Send + Sync;

/// Time for which a new client waits for the place of one that negotiates: a flood of them gets at most a thousand threads a second.
const PACE: Duration = Duration::from_millis(1);
/// Threads of negotiations that exist, for each one that may negotiate: one that was let go may take a while to end, as the close of what its
/// client sent may wait.
const THREADS_EACH: usize = 2;
/// Pause of the listener before it looks again whether one of too many has ended.
const FULL: Duration = Duration::from_millis(20);
/// Time for which [`NbdServer::stop`] waits for clients to take their last replies.
const LINGER: Duration = Duration::from_secs(2);

/// A live connection, negotiating or served.
struct Connection {
    socket: Weak<OwnedFd>,
    peer: Peer,
    /// Cut connections don't.
    negotiating: bool,
}

/// Connections by number. Sources hold it, and nothing else of the server, which has the workers.
type Live = Mutex<HashMap<u64, Connection>>;

struct Shared {
    service: Arc<Service>,
    on_end: Arc<OnEnd>,
    config: NbdConfig,
    addr: NbdAddr,
    stopping: AtomicBool,
    next_id: AtomicU64,
    live: Arc<Live>,
    /// Threads of negotiations, until their very end.
    threads: Arc<AtomicUsize>,
}

/// Takes its connection off the list when dropped.
struct Guard {
    live: Arc<Live>,
    inbox: Arc<Inbox>,
    id: u64,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.live.lock().remove(&self.id);
        self.inbox.put(self.id, Event::ThreadEnded);
    }
}

/// Counts a thread while it exists.
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new(count: &Arc<AtomicUsize>) -> Alive {
        count.fetch_add(1, Ordering::AcqRel);
        Alive(Arc::clone(count))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A socket at which an NBD server can listen.
pub struct NbdSocket(Listener);

impl NbdSocket {
    /// As for [`NbdServer::bind`].
    pub fn bind(addr: &NbdAddr, allow_remote: bool) -> Result<NbdSocket, Error> {
        Listener::bind(addr, allow_remote).map(NbdSocket)
    }

    /// A Unix socket that listens already.
    pub fn unix(socket: SocketFile) -> NbdSocket {
        NbdSocket(Listener::Unix(socket))
    }

    /// A TCP socket that listens already and doesn't block.
    pub fn tcp(socket: TcpListener) -> NbdSocket {
        NbdSocket(Listener::Tcp(socket))
    }
}

/// A listening NBD server. Dropping it stops it.
pub struct NbdServer {
    shared: Arc<Shared>,
    thread: ControlThread,
}

impl NbdServer {
    /// Listens on `addr` and serves the disks of `service` to clients, each connection on one lane.
    ///
    /// A Unix socket is made with mode 0600; a stale one in its place is replaced. A TCP address that
    /// other machines reach is refused unless [`NbdConfig::allow_remote`].
    pub fn bind(
        addr: &NbdAddr,
        config: NbdConfig,
        service: &Arc<Service>,
    ) -> Result<NbdServer, Error> {
        NbdServer::telling(addr, config, service, Arc::new(log_end))
    }

    /// As [`NbdServer::bind`], on a socket that listens already.
    pub fn start(
        socket: NbdSocket,
        config: NbdConfig,
        service: &Arc<Service>,
    ) -> Result<NbdServer, Error> {
        NbdServer::on(socket.0, config, service, Arc::new(log_end))
    }

    /// As [`NbdServer::bind`], with another one who is told of connections' ends.
    fn telling(
        addr: &NbdAddr,
        config: NbdConfig,
        service: &Arc<Service>,
        on_end: Arc<OnEnd>,
    ) -> Result<NbdServer, Error> {
        let socket = Listener::bind(addr, config.allow_remote)?;
        NbdServer::on(socket, config, service, on_end)
    }

    fn on(
        socket: Listener,
        mut config: NbdConfig,
        service: &Arc<Service>,
        on_end: Arc<OnEnd>,
    ) -> Result<NbdServer, Error> {
        config.pressure = Arc::clone(service.pressure());
        let _ = pvblk_sys::socket::refuse_descriptors(socket.as_fd());
        let addr = socket.local_addr()?;
        let place = addr.to_string();
        let shared = Arc::new(Shared {
            service: Arc::clone(service),
            on_end,
            config,
            addr,
            stopping: AtomicBool::new(false),
            next_id: AtomicU64::new(1),
            live: Arc::default(),
            threads: Arc::default(),
        });
        let clients = Arc::clone(&shared);
        let thread = ControlThread::start("pvblk-nbd", "NBD server", |io| {
            let listener = kit::Listener::new(socket, place, LISTENER, io);
            Ok(Clients {
                listener: Some(listener.map_err(|e| Error::os("starting the NBD server", e))?),
                shared: clients,
                is_full: false,
            })
        })?;
        Ok(NbdServer { shared, thread })
    }

    /// Where it listens, with the real port.
    pub fn local_addr(&self) -> NbdAddr {
        self.shared.addr.clone()
    }

    /// True if it has TLS.
    pub fn has_tls(&self) -> bool {
        self.shared.config.tls.is_some()
    }

    /// Live connections, negotiations included.
    pub fn connections(&self) -> usize {
        self.shared.live.lock().len()
    }

    /// Begins to stop; [`stop`](Self::stop), or the drop, then waits for the rest.
    pub fn begin_stop(&self) {
        self.thread.begin_stop();
    }

    /// Stops listening, removes the socket, and takes nothing more from its clients: what they have sent so far is
    /// answered if the workers still run. Waits for that for at most 2 s; what takes longer is answered while its lane is
    /// detached. Stop servers before workers.
    pub fn stop(&mut self) {
        self.thread.stop();
    }
}

fn log_end(disk: &str, who: &str, end: SourceEnd) {
    match end {
        SourceEnd::Closed => tracing::debug!("{who}: closed"),
        SourceEnd::Broken(e) => ratelimited!(warn, RateLimit::of(disk, "broken"), "{who}: {e}"),
    }
}

const LISTENER: u64 = 0;

/// The control thread's own.
struct Clients {
    listener: Option<kit::Listener<Listener>>,
    shared: Arc<Shared>,
    /// It was told that there are too many threads.
    is_full: bool,
}

impl Server for Clients {
    fn ready(&mut self, _listener: u64, io: &Io) {
        let Some(listener) = &mut self.listener else {
            return;
        };
        let most = self.shared.config.max_handshakes.max(1) * THREADS_EACH;
        if self.shared.threads.load(Ordering::Acquire) >= most {
            // Clients wait in the socket's queue meanwhile.
            if !std::mem::replace(&mut self.is_full, true) {
                let addr = self.shared.addr.to_string();
                ratelimited!(
                    warn,
                    RateLimit::of(&addr, "threads"),
                    "{addr}: {most} threads of negotiations haven't ended: new clients wait"
                );
            }
            return listener.pause(io, FULL);
        }
        self.is_full = false;
        if let Some((socket, peer)) = listener.accept(io, Listener::accept)
            && start(socket, peer, &self.shared, io)
        {
            listener.pause(io, PACE);
        }
    }

    fn event(&mut self, _id: u64, _event: Event, _io: &Io) {}

    fn due(&self) -> Option<Instant> {
        self.listener.as_ref()?.due()
    }

    fn passed(&mut self, _: Option<Stopping>, io: &Io) {
        if let Some(listener) = &mut self.listener {
            listener.passed(io);
        }
    }

    /// Shuts all sockets down; those that still negotiate in both directions.
    fn stop(&mut self, io: &Io) -> Stopping {
        self.listener = None;
        self.shared.stopping.store(true, Ordering::Release);
        for c in self.shared.live.lock().values() {
            if let Some(socket) = c.socket.upgrade() {
                let how = match c.negotiating {
                    true => Shutdown::Both,
                    false => Shutdown::Read,
                };
                // It may be closed already.
                let _ = rustix::net::shutdown(&socket, how);
            }
        }
        let end = io.now() + LINGER;
        Stopping { grace: end, end }
    }

    fn is_over(&self, _: Stopping, _: Instant) -> bool {
        self.shared.live.lock().is_empty()
    }

    /// Requests that take longer are answered while their lane is detached.
    fn give_up(&mut self) {}
}

/// The negotiation that has to go when there are too many: the oldest of the client that has most, so that a flood meets only itself.
fn surplus(live: &HashMap<u64, Connection>) -> Option<u64> {
    let negotiating = || live.iter().filter(|(_, c)| c.negotiating);
    let mut of_peer: HashMap<Peer, usize> = HashMap::new();
    negotiating().for_each(|(_, c)| *of_peer.entry(c.peer).or_default() += 1);
    let most = of_peer.values().max()?;
    negotiating()
        .filter(|(_, c)| of_peer.get(&c.peer) == Some(most))
        .map(|(&id, _)| id)
        .min()
}

/// Starts a negotiation on a thread of its own; true if another one was let go for it.
fn start(socket: OwnedFd, peer: Peer, shared: &Arc<Shared>, io: &Io) -> bool {
    let socket = Arc::new(socket);
    // A kernel that can't leaves it to the watchdog.
    let _ = pvblk_sys::socket::refuse_descriptors(socket.as_fd());
    let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
    let cut = {
        let mut live = shared.live.lock();
        let new = Connection {
            socket: Arc::downgrade(&socket),
            peer,
            negotiating: true,
        };
        live.insert(id, new);
        let negotiating = live.values().filter(|c| c.negotiating).count();
        match negotiating > shared.config.max_handshakes.max(1) {
            true => surplus(&live).and_then(|id| live.get_mut(&id)).map(|c| {
                c.negotiating = false;
                c.socket.upgrade()
            }),
            false => None,
        }
    };
    let crowded = cut.is_some();
    if let Some(socket) = cut {
        let (addr, most) = (shared.addr.to_string(), shared.config.max_handshakes);
        ratelimited!(
            warn,
            RateLimit::of(&addr, "refused"),
            "{addr}: more than {most} clients negotiate: the oldest one of those with most is let go"
        );
        if let Some(socket) = socket {
            let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        }
    }
    let guard = Guard {
        live: Arc::clone(&shared.live),
        inbox: Arc::clone(&io.inbox),
        id,
    };
    let alive = Alive::new(&shared.threads);
    let shared = Arc::clone(shared);
    let spawned = std::thread::Builder::new()
        .name(format!("pvblk-nbd-{id}"))
        .stack_size(256 * 1024)
        .spawn(move || {
            let _alive = alive;
            negotiate_and_deliver(socket, guard, &shared);
        });
    if let Err(e) = spawned {
        let limit = RateLimit::of("NBD", "no thread");
        ratelimited!(warn, limit, "starting an NBD negotiation: {e}");
    }
    crowded
}

fn negotiate_and_deliver(socket: Arc<OwnedFd>, guard: Guard, shared: &Shared) {
    let name = format!("nbd {} connection {}", shared.addr, guard.id);
    let peer = known(&socket, &shared.addr);
    let events = shared.service.events();
    let deadline = Instant::now() + shared.config.handshake_timeout;
    // Counts the client in when it picks its export.
    let place: Cell<Option<(Arc<Disk>, Ticket)>> = Cell::new(None);
    let door = |disk: &Arc<Disk>| {
        let shares = &shared.config.shares;
        let ticket = shares.enter(disk.name(), &shares.of(disk));
        let ticket = ticket.inspect_err(|why| {
            let addr = &shared.addr;
            let count = RateLimit::of(disk.name(), "refused");
            ratelimited!(warn, count, "{addr}: client refused: {why}");
            peer.tell(
                events,
                Kind::PeerRefused,
                Some(disk.name()),
                &why.to_string(),
            );
        })?;
        place.set(Some((Arc::clone(disk), ticket)));
        Ok(())
    };
    let config = &shared.config;
    let client = identity(&socket, &config.rules);
    let mut handshake = Handshake::with_door(shared.service.disks(), &door).admitting(
        &config.rules,
        client,
        tls_use(config),
    );
    let denied = |disk: &str, client: &str| {
        let why = format!("{client} has no right to disk {disk}");
        let addr = &shared.addr;
        ratelimited!(warn, RateLimit::of(disk, "denied"), "{addr}: {why}");
        peer.tell(events, Kind::PeerRefused, Some(disk), &why);
    };
    let tls = config.tls.as_deref();
    let met = negotiate(&name, socket, &mut handshake, tls, deadline, &denied);
    let Met { negotiated, stream } = match met {
        Ok(Some(met)) => met,
        Ok(None) => return tracing::debug!("{name}: closed by the client while negotiating"),
        Err(e) => {
            ratelimited!(
                warn,
                RateLimit::of(&shared.addr.to_string(), "negotiation"),
                "{name}: {e}"
            );
            peer.tell(events, Kind::PeerRefused, None, &e.to_string());
            return;
        }
    };
    let Some((disk, ticket)) = place.take() else {
        return tracing::error!("{name}: it came in without a place");
    };
    {
        let mut live = shared.live.lock();
        match live.get_mut(&guard.id) {
            // One that was let go at the last moment is cut already.
            Some(c) if c.negotiating => c.negotiating = false,
            _ => return,
        }
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
    }
    let export = disk.name();
    ratelimited!(
        info,
        RateLimit::of(export, "connected"),
        "{name}: serves export {export:?}"
    );
    tracing::debug!(
        "{name}: {:?} headers, contexts {:?}",
        negotiated.mode,
        negotiated.contexts
    );
    let certificate = handshake.client().names.first();
    let certificate = certificate.map(|name| format!(" certificate {name:?}"));
    let name = format!(
        "{name} export {export:?}{}",
        certificate.unwrap_or_default()
    );
    let share = Arc::clone(&ticket.share);
    let presence = Presence::begin(events, export, &name, &peer);
    let guard = Some(Box::new((presence, guard, ticket)) as _);
    let source = NbdSource::with_share(&name, export, stream, *negotiated, config, share, guard);
    let (who, of_disk) = (source.describe(), export.to_owned());
    let refused = peer.clone();
    let (told, on_end) = (who.clone(), Arc::clone(&shared.on_end));
    let log = Arc::clone(events);
    let ended = move |end| {
        if let SourceEnd::Broken(e) = &end {
            peer.tell(&log, Kind::PeerBroken, Some(&of_disk), &e.to_string());
        }
        on_end(&of_disk, &told, end);
    };
    // Connections of one client can't be told from those of several.
    let served = shared
        .service
        .serve_client(&disk, "NBD", Box::new(source), ended);
    if let Err(e) = served {
        ratelimited!(error, RateLimit::of(export, "attach"), "{who}: {e}");
        refused.tell(events, Kind::PeerRefused, Some(export), &e.to_string());
    }
}

/// The client as the system knows it.
fn known(socket: &OwnedFd, addr: &NbdAddr) -> events::Peer {
    match addr {
        NbdAddr::Unix(path) => {
            events::Peer::of_socket("nbd", socket.as_fd(), path.display().to_string())
        }
        NbdAddr::Tcp { .. } => {
            let from = rustix::net::getpeername(socket).ok().flatten();
            let from = from.and_then(|a| SocketAddr::try_from(a).ok());
            // One that is gone already has no address.
            events::Peer::at("nbd", from.map_or_else(String::new, |a| a.to_string()))
        }
    }
}

#[cfg(test)]
#[path = "neighbour_tests.rs"]
mod neighbour_tests;
#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
