//! The listener's thread, and negotiations on short-lived threads of their own.

use super::config::NbdConfig;
use super::handshake::{Door, ExportTable, Handshake, Negotiated, Step};
use super::listener::{Listener, Peer, Stream};
use super::shares::Ticket;
use super::source::NbdSource;
use parking_lot::Mutex;
use pvblk_backend::{RequestSource, Seldom, seldom};
use pvblk_block::Error;
use pvblk_protocol::nbd::NbdAddr;
use pvblk_sys::{EventFd, Poller};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::cell::Cell;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Takes a negotiated connection: the export's name and the source. Runs on the negotiation's thread.
pub type Deliver = dyn Fn(&str, Box<dyn RequestSource>) + Send + Sync;

/// Bytes taken from a negotiating client at once.
const PIECE: usize = 4096;
/// How long a new client waits for the place of one that negotiates: a flood of them gets at most a thousand threads a second.
const PACE: Duration = Duration::from_millis(1);
/// Threads of negotiations that exist, for each one that may negotiate: one that was let go may take a while to end, as the close of what its
/// client sent may wait.
const THREADS_EACH: usize = 2;
/// How long the listener waits before it looks again whether one of too many has ended.
const FULL: Duration = Duration::from_millis(20);
/// How long [`NbdServer::stop`] waits for clients to take their last replies.
const LINGER: Duration = Duration::from_secs(2);

/// A live connection, negotiating or served.
struct Connection {
    socket: Weak<OwnedFd>,
    peer: Peer,
    /// Cut connections don't.
    negotiating: bool,
}

/// Connections by number. Sources hold it, and nothing else of the server: `deliver` may own the workers.
type Live = Mutex<HashMap<u64, Connection>>;

struct Shared {
    exports: Arc<dyn ExportTable>,
    deliver: Arc<Deliver>,
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
    id: u64,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.live.lock().remove(&self.id);
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

/// A listening NBD server. Dropping it stops it.
pub struct NbdServer {
    shared: Arc<Shared>,
    bell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl NbdServer {
    /// Listens on `addr` and calls `deliver` with each connection that picked one of `exports`.
    ///
    /// A Unix socket is made with mode 0600; a stale one in its place is replaced. A TCP address that
    /// other machines reach is refused unless [`NbdConfig::allow_remote`].
    pub fn bind(
        addr: &NbdAddr,
        config: NbdConfig,
        exports: Arc<dyn ExportTable>,
        deliver: Arc<Deliver>,
    ) -> Result<NbdServer, Error> {
        let listener = Listener::bind(addr, &config)?;
        let local = listener.local_addr()?;
        let os = |e| Error::os(format!("serving {local}"), e);
        let bell = Arc::new(EventFd::new().map_err(os)?);
        let poller = Poller::new().map_err(os)?;
        poller.add(listener.as_fd(), 0, false).map_err(os)?;
        let _ = pvblk_sys::socket::refuse_descriptors(listener.as_fd());
        poller.add(bell.as_fd(), 1, false).map_err(os)?;
        let shared = Arc::new(Shared {
            exports,
            deliver,
            config,
            addr: local.clone(),
            stopping: AtomicBool::new(false),
            next_id: AtomicU64::new(1),
            live: Arc::default(),
            threads: Arc::default(),
        });
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name("pvblk-nbd".into())
                .stack_size(256 * 1024)
                .spawn(move || accept_all(&listener, &poller, &shared))
                .map_err(os)?
        };
        Ok(NbdServer {
            shared,
            bell,
            thread: Some(thread),
        })
    }

    /// Where it listens, with the real port.
    pub fn local_addr(&self) -> NbdAddr {
        self.shared.addr.clone()
    }

    /// Live connections, negotiations included.
    pub fn connections(&self) -> usize {
        self.shared.live.lock().len()
    }

    /// Stops listening, removes the socket, and takes nothing more from its clients: what they have sent so far is
    /// answered if the workers still run. Waits for that for at most 2 s; what takes longer is answered while its lane is
    /// detached. Stop servers before workers.
    pub fn stop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.shared.stopping.store(true, Ordering::Release);
        self.bell.notify();
        if thread.join().is_err() {
            tracing::error!("the thread of {} panicked", self.shared.addr);
        }
        self.end_connections(Shutdown::Read);
        let deadline = Instant::now() + LINGER;
        while self.connections() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Shuts all sockets down; those that still negotiate in both directions.
    fn end_connections(&self, how: Shutdown) {
        for c in self.shared.live.lock().values() {
            if let Some(socket) = c.socket.upgrade() {
                let how = if c.negotiating { Shutdown::Both } else { how };
                // It may be closed already.
                let _ = rustix::net::shutdown(&socket, how);
            }
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept_all(listener: &Listener, poller: &Poller, shared: &Arc<Shared>) {
    let mut events = Vec::new();
    while !shared.stopping.load(Ordering::Acquire) {
        events.clear();
        if let Err(e) = poller.wait(&mut events, None) {
            tracing::error!("{}: waiting for connections: {e}", shared.addr);
            return;
        }
        if !events.iter().any(|e| e.token == 0) {
            continue;
        }
        if !has_room(shared) {
            return;
        }
        match listener.accept() {
            Ok((stream, peer)) => start(stream, peer, shared),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => {
                // Out of descriptors, most likely: don't spin on the connection that can't be taken.
                let addr = shared.addr.to_string();
                seldom!(
                    warn,
                    Seldom::of(&addr, "accept"),
                    "{addr}: accepting a connection: {e}"
                );
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Waits until one more thread may be started; false if the server stops before. Clients wait in the socket's queue meanwhile.
fn has_room(shared: &Shared) -> bool {
    let most = shared.config.max_handshakes.max(1) * THREADS_EACH;
    let mut told = false;
    while shared.threads.load(Ordering::Acquire) >= most {
        if shared.stopping.load(Ordering::Acquire) {
            return false;
        }
        if !std::mem::replace(&mut told, true) {
            let addr = shared.addr.to_string();
            seldom!(
                warn,
                Seldom::of(&addr, "threads"),
                "{addr}: {most} threads of negotiations haven't ended: new clients wait"
            );
        }
        std::thread::sleep(FULL);
    }
    true
}

/// Which negotiation has to go when there are too many: the oldest of the client that has most, so that a flood meets only itself.
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

/// Starts a negotiation on a thread of its own.
fn start(stream: Stream, peer: Peer, shared: &Arc<Shared>) {
    let socket: Arc<OwnedFd> = Arc::new(stream.into());
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
    if let Some(socket) = cut {
        let (addr, most) = (shared.addr.to_string(), shared.config.max_handshakes);
        seldom!(
            warn,
            Seldom::of(&addr, "refused"),
            "{addr}: more than {most} clients negotiate: the oldest one of those with most is let go"
        );
        if let Some(socket) = socket {
            let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        }
        std::thread::sleep(PACE);
    }
    let guard = Guard {
        live: Arc::clone(&shared.live),
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
        tracing::warn!("starting an NBD negotiation: {e}");
    }
}

fn negotiate_and_deliver(socket: Arc<OwnedFd>, guard: Guard, shared: &Shared) {
    let name = format!("nbd {} connection {}", shared.addr, guard.id);
    let deadline = Instant::now() + shared.config.handshake_timeout;
    let counter = Counter {
        shared,
        ticket: Cell::new(None),
    };
    let negotiated = match negotiate(&socket, &counter, deadline) {
        Ok(Some(n)) => n,
        Ok(None) => return tracing::debug!("{name}: closed by the client while negotiating"),
        Err(e) => {
            seldom!(
                warn,
                Seldom::of(&shared.addr.to_string(), "negotiation"),
                "{name}: {e}"
            );
            return;
        }
    };
    let Some(ticket) = counter.ticket.take() else {
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
    let export = negotiated.export.clone();
    seldom!(
        info,
        Seldom::of(&export, "connected"),
        "{name}: serves export {export:?}"
    );
    let name = format!("{name} export {export:?}");
    let config = &shared.config;
    let share = Arc::clone(&ticket.share);
    let guard = Some(Box::new((guard, ticket)) as _);
    let source = NbdSource::with_share(&name, &export, socket, *negotiated, config, share, guard);
    (shared.deliver)(&export, Box::new(source));
}

/// Counts a client in when it picks its export.
struct Counter<'a> {
    shared: &'a Shared,
    ticket: Cell<Option<Ticket>>,
}

impl Door for Counter<'_> {
    fn enter(&self, export: &str) -> Result<(), String> {
        let disk = self.shared.exports.disk(export);
        let shares = &self.shared.config.shares;
        let share = shares.of(export, disk.as_deref());
        let ticket = shares.enter(export, &share).inspect_err(|why| {
            let addr = &self.shared.addr;
            let count = Seldom::of(export, "refused");
            seldom!(warn, count, "{addr}: client refused: {why}");
        })?;
        self.ticket.set(Some(ticket));
        Ok(())
    }
}

/// Negotiates; `None` if the client left in order.
fn negotiate(
    socket: &OwnedFd,
    counter: &Counter<'_>,
    deadline: Instant,
) -> Result<Option<Box<Negotiated>>, Error> {
    let mut handshake = Handshake::with_door(&*counter.shared.exports, counter);
    let mut piece = [0; PIECE];
    send_all(socket, &handshake.take_output(), deadline)?;
    loop {
        wait(socket, PollFlags::IN, deadline)?;
        let n = match rustix::net::recv(socket, &mut piece, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(None),
            Ok((n, _)) => n,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(Error::os("receiving options", e)),
        };
        let mut bytes = &piece[..n];
        loop {
            // On an error the client still gets what was to be said before it.
            let step = handshake.feed(std::mem::take(&mut bytes));
            let output = handshake.take_output();
            if !output.is_empty() {
                send_all(socket, &output, deadline)?;
            }
            match step? {
                Step::More => break,
                Step::Output => {}
                Step::Done(n) => return Ok(Some(n)),
                Step::Aborted => return Ok(None),
            }
        }
    }
}

fn send_all(socket: &OwnedFd, mut bytes: &[u8], deadline: Instant) -> Result<(), Error> {
    while !bytes.is_empty() {
        wait(socket, PollFlags::OUT, deadline)?;
        match rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(n) => bytes = &bytes[n..],
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::os("sending option replies", e)),
        }
    }
    Ok(())
}

/// Waits until the socket is ready, or errors when the negotiation's time is over.
fn wait(socket: &OwnedFd, events: PollFlags, deadline: Instant) -> Result<(), Error> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    let mut fds = [PollFd::new(socket, events)];
    match rustix::event::poll(&mut fds, Some(&timeout)) {
        Ok(0) => Err(Error::protocol("the client took too long to negotiate")),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Error::os("waiting for the client", e)),
    }
}

#[cfg(test)]
#[path = "neighbour_tests.rs"]
mod neighbour_tests;
#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
