//! The listener's thread, and negotiations on short-lived threads of their own.

use super::config::NbdConfig;
use super::handshake::{ExportTable, Handshake, Negotiated, Step};
use super::listener::{Listener, NbdAddr, Stream};
use super::source::NbdSource;
use parking_lot::Mutex;
use pvblk_backend::{RequestSource, Seldom, seldom};
use pvblk_block::Error;
use pvblk_sys::{EventFd, Poller};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Takes a negotiated connection: the export's name and the source. Runs on the negotiation's thread.
pub type Deliver = dyn Fn(&str, Box<dyn RequestSource>) + Send + Sync;

/// Bytes taken from a negotiating client at once.
const PIECE: usize = 4096;
/// How long [`NbdServer::stop`] waits for clients to take their last replies.
const LINGER: Duration = Duration::from_secs(2);

/// A live connection, negotiating or served.
struct Connection {
    socket: Weak<OwnedFd>,
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
        poller.add(bell.as_fd(), 1, false).map_err(os)?;
        let shared = Arc::new(Shared {
            exports,
            deliver,
            config,
            addr: local.clone(),
            stopping: AtomicBool::new(false),
            next_id: AtomicU64::new(1),
            live: Arc::default(),
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
        match listener.accept() {
            Ok(stream) => start(stream, shared),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => {
                // Out of descriptors, most likely: don't spin on the connection that can't be taken.
                seldom!(
                    warn,
                    Seldom::of(&shared.addr.to_string(), "accept"),
                    "{}: accepting a connection: {e}",
                    shared.addr
                );
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Starts a negotiation on a thread of its own, if the bounds allow.
fn start(stream: Stream, shared: &Arc<Shared>) {
    let socket: Arc<OwnedFd> = Arc::new(stream.into());
    let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
    {
        let mut live = shared.live.lock();
        let negotiating = live.values().filter(|c| c.negotiating).count();
        let config = &shared.config;
        if live.len() >= config.max_connections || negotiating >= config.max_handshakes {
            seldom!(
                warn,
                Seldom::of(&shared.addr.to_string(), "refused"),
                "{}: connection refused: {} are live (at most {}), {negotiating} negotiate (at most {})",
                shared.addr,
                live.len(),
                config.max_connections,
                config.max_handshakes
            );
            return;
        }
        live.insert(
            id,
            Connection {
                socket: Arc::downgrade(&socket),
                negotiating: true,
            },
        );
    }
    let guard = Guard {
        live: Arc::clone(&shared.live),
        id,
    };
    let place = shared.addr.to_string();
    let shared = Arc::clone(shared);
    let spawned = std::thread::Builder::new()
        .name(format!("pvblk-nbd-{id}"))
        .stack_size(256 * 1024)
        .spawn(move || negotiate_and_deliver(socket, guard, &shared));
    if let Err(e) = spawned {
        let count = Seldom::of(&place, "thread");
        seldom!(warn, count, "starting an NBD negotiation: {e}");
    }
}

fn negotiate_and_deliver(socket: Arc<OwnedFd>, guard: Guard, shared: &Shared) {
    let name = format!("nbd {} connection {}", shared.addr, guard.id);
    let deadline = Instant::now() + shared.config.handshake_timeout;
    let negotiated = match negotiate(&socket, &*shared.exports, deadline) {
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
    {
        let mut live = shared.live.lock();
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        if let Some(c) = live.get_mut(&guard.id) {
            c.negotiating = false;
        }
    }
    let export = negotiated.export.clone();
    let connection = name;
    let name = format!("{connection} export {export:?}");
    let config = &shared.config;
    let mut disk = export.clone();
    if disk.is_empty() {
        // The default export is the first.
        disk.extend(shared.exports.list().into_iter().next().map(|e| e.name));
    }
    seldom!(
        info,
        Seldom::of(&disk, "connected"),
        "{connection}: serves export {export:?}"
    );
    let guard = Some(Box::new(guard) as _);
    let source = NbdSource::with_guard(&name, &disk, socket, *negotiated, config, guard);
    (shared.deliver)(&export, Box::new(source));
}

/// Negotiates; `None` if the client left in order.
fn negotiate(
    socket: &OwnedFd,
    exports: &dyn ExportTable,
    deadline: Instant,
) -> Result<Option<Box<Negotiated>>, Error> {
    let mut handshake = Handshake::new(exports);
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
        // On an error the client still gets what was to be said before it.
        let step = handshake.feed(&piece[..n]);
        let output = handshake.take_output();
        if !output.is_empty() {
            send_all(socket, &output, deadline)?;
        }
        match step? {
            Step::More => {}
            Step::Done(n) => return Ok(Some(n)),
            Step::Aborted => return Ok(None),
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
#[path = "server_tests.rs"]
mod tests;
