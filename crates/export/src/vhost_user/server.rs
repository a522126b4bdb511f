//! The server of vhost-user front ends: one control thread for all sockets and sessions.

use super::areas::Areas;
use super::bucket::Bucket;
use super::inflight::area_bytes;
use super::ports::PortTable;
use super::session::Session;
use super::shares::{Seat, Shares};
use super::virtqueue::MAX_ENTRIES;
use crate::kit::{ControlThread, Event, FrontEnd, Io, Listener, Orders, Server, Stopping};
use crate::socket_file::{SocketFile, SocketType};
use parking_lot::Mutex;
use pvblk_backend::events::Peer;
use pvblk_backend::{Disk, RateLimit, Service, ratelimited};
use pvblk_block::{Error, ErrorKind};
use pvblk_sys::Closer;
use pvblk_sys::socket::{refuse_descriptors, take_descriptors};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time for requests in flight to end when the server stops.
const STOP_TIME: Duration = Duration::from_secs(10);

/// Longest time for a message to come in full. One that never does would keep its session, and the descriptors that came with its beginning.
const HALF_TIME: Duration = Duration::from_secs(10);

/// Pause of a front end while too many of its descriptors wait to be closed, and the time after which its session is ended for that.
const CLOSING: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(10));

/// Seconds of the control thread that one socket's front ends may use at once, and of each second.
const TIME: (f64, f64) = (0.032, 0.1);
/// Connections at one socket at once, and a second later on.
const CONNECTIONS: (f64, f64) = (64.0, 16.0);

const WHAT: &str = "vhost-user server";

/// A socket and the disk behind it.
#[derive(Clone, Debug)]
pub struct Listen {
    /// The disk's name.
    pub disk: String,
    /// Where front ends connect, one after another.
    pub path: PathBuf,
}

/// Bounds for front ends.
#[derive(Clone, Copy, Debug)]
pub struct VhostLimits {
    /// Most queues of a front end, at least 1.
    pub queues: u16,
    /// Bytes that guests' memories may have altogether that nobody has allocated yet; `None`: no limit.
    pub unallocated: Option<u64>,
}

/// Serves disks to vhost-user front ends, each disk at its own sockets. Dropping it stops it.
pub struct VhostServer {
    thread: ControlThread,
    orders: Arc<Orders<PortOrder>>,
}

/// An order of the server's owner.
enum PortOrder {
    Add(Arc<Disk>, SocketFile),
    Remove { path: PathBuf, force: bool },
}

impl VhostServer {
    /// Listens at all of `listens` (mode 0600). At each socket one front end is served at a time; the next one waits until
    /// the last one's requests have ended. Errors if a disk doesn't exist or a path can't be used.
    pub fn bind(
        listens: &[Listen],
        service: &Arc<Service>,
        limits: VhostLimits,
    ) -> Result<VhostServer, Error> {
        let sockets = listens.iter().map(|Listen { disk, path }| {
            let found = service.disks().find(disk);
            let found = found.ok_or_else(|| {
                let place = path.display();
                Error::config(format!("there is no disk {disk} to serve at {place}"))
            })?;
            Ok((found, SocketFile::bind(path, SocketType::STREAM)?))
        });
        VhostServer::start(sockets.collect::<Result<_, Error>>()?, service, limits)
    }

    /// Listens at these sockets, each for its disk.
    pub fn start(
        sockets: Vec<(Arc<Disk>, SocketFile)>,
        service: &Arc<Service>,
        limits: VhostLimits,
    ) -> Result<VhostServer, Error> {
        let orders = Arc::default();
        let taken = Arc::clone(&orders);
        let thread = ControlThread::start("pvblk-vhost", WHAT, |io| {
            Ports::new(sockets, service, limits, taken, io)
        })?;
        Ok(VhostServer { thread, orders })
    }

    /// Listens at one more socket. A disk may have several.
    pub fn add(&self, disk: &Arc<Disk>, socket: SocketFile) -> Result<(), Error> {
        let order = PortOrder::Add(Arc::clone(disk), socket);
        self.orders.give(&self.thread, order)
    }

    /// Removes the socket at `path`. A front end that is connected there keeps it, with an error, unless `force`: then it is
    /// disconnected when its requests in flight have ended, and the path is free at once.
    pub fn remove(&self, path: &Path, force: bool) -> Result<(), Error> {
        let path = path.to_owned();
        self.orders
            .give(&self.thread, PortOrder::Remove { path, force })
    }

    /// Begins to stop; [`stop`](Self::stop), or the drop, then waits for the rest.
    pub fn begin_stop(&self) {
        self.thread.begin_stop();
    }

    /// Removes the sockets, lets requests in flight end, then closes the connections: guests go on with the next server. Returns after
    /// at most 10 seconds.
    pub fn stop(&mut self) {
        self.thread.stop();
    }
}

fn listener_token(port: usize) -> u64 {
    (port as u64) << 1
}

fn session_token(port: usize) -> u64 {
    (port as u64) << 1 | 1
}

struct Connected {
    id: u64,
    session: Session,
    /// In the poller.
    heard: bool,
    /// Over, when its rings have stopped.
    over: bool,
}

pub(super) struct Port {
    disk: Arc<Disk>,
    path: PathBuf,
    /// It goes with its session.
    removed: bool,
    listener: Option<Listener<SocketFile>>,
    seat: Seat,
    areas: Arc<Mutex<Areas>>,
    /// Seconds of the control thread.
    time: Bucket,
    connections: Bucket,
    /// Its front end isn't heard until then.
    heard_from: Option<Instant>,
    /// Closes what front ends send.
    closer: Arc<Closer>,
    /// Since when it has no room for more.
    full_since: Option<Instant>,
    session: Option<Connected>,
}

impl Port {
    /// Where it listens, unless it is being removed.
    pub fn path(&self) -> Option<&Path> {
        (!self.removed).then_some(&self.path)
    }

    /// Frees its path; it goes with its session.
    fn remove(&mut self) {
        self.removed = true;
        self.listener = None;
    }

    /// Until when the rest of a message has to be there.
    fn half_until(&self) -> Option<Instant> {
        let connected = self.session.as_ref().filter(|c| !c.over)?;
        Some(connected.session.half_since()? + HALF_TIME)
    }
}

/// The control thread's own.
struct Ports {
    service: Arc<Service>,
    queues: u16,
    /// Bytes of the longest area for requests in flight.
    longest: u64,
    shares: Arc<Shares>,
    orders: Arc<Orders<PortOrder>>,
    ports: PortTable,
    /// Ports that go at the end of this turn.
    gone: Vec<usize>,
    /// The port of each session, by the session's number.
    sessions: HashMap<u64, usize>,
    next_session: u64,
    /// When to look for sockets whose pause is over.
    resume_at: Option<Instant>,
}

impl Server for Ports {
    fn ready(&mut self, token: u64, io: &Io) {
        let port = (token >> 1) as usize;
        if !self.ports.has(port) {
            // It was removed in this turn.
            return;
        }
        match token & 1 {
            0 => self.accept(port, io),
            _ => self.readable(port, io),
        }
    }

    fn event(&mut self, id: u64, event: Event, io: &Io) {
        let Some(&index) = self.sessions.get(&id) else {
            return;
        };
        let Some(connected) = &mut self.ports[index].session else {
            return;
        };
        let session = &mut connected.session;
        let start = io.now();
        let result = match event {
            // Messages that came while it waited are read now: the poller tells of them again.
            Event::QueueEnded {
                queue,
                generation,
                reason,
            } => session.ring_ended(queue, generation, reason),
            Event::FenceOpen if !connected.over => session.start_rings(),
            Event::Left { generation } => {
                session.front.left(generation);
                Ok(())
            }
            Event::Resized => {
                session.config_changed();
                Ok(())
            }
            Event::DeviceGone => Err(Error::new(ErrorKind::Os, "the disk is gone")),
            Event::Removed => {
                self.ports[index].remove();
                let why = "the disk was removed";
                Err(Error::new(ErrorKind::Disconnected, why))
            }
            Event::FenceOpen | Event::ThreadEnded => Ok(()),
        };
        self.judge(index, result.map(|()| true), io);
        self.used_time(index, start, io);
    }

    fn due(&self) -> Option<Instant> {
        self.resume_at
    }

    fn passed(&mut self, _: Option<Stopping>, io: &Io) {
        let now = io.now();
        if self.resume_at.is_some_and(|at| at <= now) {
            self.resume(now, io);
        }
        for order in self.orders.take() {
            let (what, giver) = order.split();
            giver.answer(self.carry_out(what, io));
        }
        for index in std::mem::take(&mut self.gone) {
            self.ports.take(index);
        }
    }

    fn stop(&mut self, io: &Io) -> Stopping {
        for index in self.ports.numbers() {
            let port = &mut self.ports[index];
            // Removes the file, so that nobody else comes.
            port.listener = None;
            if let Some(connected) = &mut port.session {
                connected.over = true;
            }
            self.hear(index, io);
            self.finish(index, io);
        }
        let end = io.now() + STOP_TIME;
        Stopping { grace: end, end }
    }

    fn is_over(&self, _: Stopping, _: Instant) -> bool {
        self.sessions.is_empty()
    }

    fn give_up(&mut self) {
        // Their queues own their memory, so it stays until the workers are done with it.
        let left = self.sessions.len();
        tracing::error!("vhost-user: {left} front ends still have requests in flight");
    }
}

impl Ports {
    fn new(
        sockets: Vec<(Arc<Disk>, SocketFile)>,
        service: &Arc<Service>,
        limits: VhostLimits,
        orders: Arc<Orders<PortOrder>>,
        io: &Io,
    ) -> Result<Ports, Error> {
        let mut ports = Ports {
            service: Arc::clone(service),
            queues: limits.queues,
            longest: area_bytes(limits.queues, MAX_ENTRIES as u16),
            shares: Shares::new(sockets.len(), limits.unallocated),
            orders,
            ports: PortTable::default(),
            gone: Vec::new(),
            sessions: HashMap::new(),
            next_session: 1,
            resume_at: None,
        };
        for (disk, socket) in sockets {
            ports.add(disk, socket, io)?;
        }
        Ok(ports)
    }

    fn carry_out(&mut self, order: PortOrder, io: &Io) -> Result<(), Error> {
        match order {
            PortOrder::Add(disk, socket) => self.add(disk, socket, io),
            PortOrder::Remove { path, force } => self.remove(&path, force, io),
        }
    }

    fn add(&mut self, disk: Arc<Disk>, socket: SocketFile, io: &Io) -> Result<(), Error> {
        let path = socket.path().to_owned();
        // A front end that waits for its turn isn't read, and what it sends stays with this process: it could be another front end's own end.
        let _ = refuse_descriptors(socket.as_fd());
        let index = self.ports.next();
        let place = path.display().to_string();
        let listener = Listener::new(socket, place, listener_token(index), io);
        let listener = listener.map_err(|e| Error::os(format!("starting the {WHAT}"), e))?;
        let seat = self.shares.seat(index);
        let areas = Areas::new(disk.name(), seat.clone(), self.longest);
        self.ports.put(Port {
            disk,
            path,
            removed: false,
            listener: Some(listener),
            closer: Closer::new(),
            full_since: None,
            seat,
            areas: Arc::new(Mutex::new(areas)),
            time: Bucket::new(TIME, io.now()),
            connections: Bucket::new(CONNECTIONS, io.now()),
            heard_from: None,
            session: None,
        });
        Ok(())
    }

    fn remove(&mut self, path: &Path, force: bool, io: &Io) -> Result<(), Error> {
        let Some(index) = self.ports.at(path) else {
            let why = format!("there is no vhost-user socket {}", path.display());
            return Err(Error::config(why));
        };
        let port = &mut self.ports[index];
        if !force && port.session.is_some() {
            let why = format!("a virtual machine is connected at {}", path.display());
            return Err(Error::new(ErrorKind::Exhausted, why));
        }
        port.remove();
        let why = Error::new(ErrorKind::Disconnected, "its socket was removed");
        match port.session {
            Some(_) => self.judge(index, Err(why), io),
            None => self.ports.take(index),
        }
        Ok(())
    }

    /// Waits for connections exactly while there is none.
    fn listen(&mut self, index: usize, io: &Io) {
        let port = &mut self.ports[index];
        let Some(listener) = &mut port.listener else {
            return;
        };
        listener.want(io, port.session.is_none());
        if let Some(due) = listener.due() {
            self.resume_at(due);
        }
    }

    fn accept(&mut self, index: usize, io: &Io) {
        let port = &mut self.ports[index];
        let Some(listener) = &mut port.listener else {
            return;
        };
        let Some(socket) = listener.accept(io, SocketFile::accept) else {
            return self.listen(index, io);
        };
        port.seat.renew();
        // Its own, which is read: it has descriptors from now on.
        let _ = take_descriptors(socket.as_fd());
        if let Some(pause) = port.connections.take(1.0, io.now()) {
            listener.pause(io, pause);
        }
        let id = self.next_session;
        self.next_session += 1;
        let disk = port.disk.name();
        let name = format!("disk {disk}, vhost-user front end {id}");
        ratelimited!(info, RateLimit::of(disk, "connected"), "{name}: connected");
        let user = "a virtual machine by vhost-user".to_owned();
        let peer = Peer::of_socket("vhost-user", socket.as_fd(), listener.place());
        let found = Arc::clone(&port.disk);
        let front = FrontEnd::new(&self.service, found, &io.inbox, id, user, peer);
        let session = Session::new(
            name,
            front,
            self.queues,
            (port.seat.clone(), Arc::clone(&port.areas)),
            (socket, Arc::clone(&port.closer)),
        );
        port.session = Some(Connected {
            id,
            session,
            heard: false,
            over: false,
        });
        self.sessions.insert(id, index);
        self.listen(index, io);
        self.hear(index, io);
    }

    /// Waits for messages exactly while they can be answered. A socket that isn't read is taken out: one that hung up is reported for ever.
    fn hear(&mut self, index: usize, io: &Io) {
        let rests = self.ports[index].heard_from.is_some();
        let Some(connected) = &mut self.ports[index].session else {
            return;
        };
        let want = connected.session.wants_messages() && !connected.over && !rests;
        if want == connected.heard {
            return;
        }
        connected.heard = want;
        let fd = connected.session.fd();
        let result = match want {
            true => io.add(fd, session_token(index)),
            false => io.remove(fd),
        };
        if let Err(e) = result {
            let failed = Err(Error::os("waiting for its messages", e));
            self.judge(index, failed, io);
        }
    }

    fn readable(&mut self, index: usize, io: &Io) {
        if !self.has_room(index, io) {
            return;
        }
        let Some(connected) = self.ports.get(index).and_then(|p| p.session.as_mut()) else {
            return;
        };
        let start = io.now();
        let result = connected.session.readable(io.clock());
        let half = connected.session.half_since();
        self.judge(index, result, io);
        if let Some(since) = half {
            self.resume_at(since + HALF_TIME);
        }
        self.used_time(index, start, io);
    }

    /// False while too many descriptors that came from a socket wait to be closed: then its front end isn't heard, and is let go in the end.
    fn has_room(&mut self, index: usize, io: &Io) -> bool {
        let Some(port) = self.ports.get(index) else {
            return false;
        };
        if port.closer.has_room() {
            port.full_since = None;
            return true;
        }
        let now = io.now();
        let since = *port.full_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= CLOSING.1 {
            let why = "closing the descriptors that front ends of this disk sent takes too long";
            self.judge(index, Err(Error::new(ErrorKind::Exhausted, why)), io);
            return false;
        }
        port.heard_from = Some(now + CLOSING.0);
        self.resume_at(now + CLOSING.0);
        self.hear(index, io);
        false
    }

    /// Ends a session whose message doesn't come in full, unless the rest of it is there now.
    fn half_is_over(&mut self, index: usize, now: Instant, io: &Io) {
        self.readable(index, io);
        let half = self.ports[index].half_until();
        if half.is_some_and(|until| until <= now) {
            let seconds = HALF_TIME.as_secs();
            let why = format!("the rest of a message did not come within {seconds} seconds");
            self.judge(index, Err(Error::protocol(why)), io);
        }
    }

    /// Counts the time since `start` to a socket. One that uses too much rests, so that others are heard.
    fn used_time(&mut self, index: usize, start: Instant, io: &Io) {
        let now = io.now();
        let port = &mut self.ports[index];
        if let Some(pause) = port.time.take((now - start).as_secs_f64(), now) {
            port.heard_from = Some(now + pause);
            self.resume_at(now + pause);
            self.hear(index, io);
        }
    }

    fn resume_at(&mut self, at: Instant) {
        self.resume_at = Some(self.resume_at.map_or(at, |other| other.min(at)));
    }

    /// Sockets whose pause is over are heard again.
    fn resume(&mut self, now: Instant, io: &Io) {
        self.resume_at = None;
        for index in self.ports.numbers() {
            let port = &mut self.ports[index];
            let hears = port.heard_from.take_if(|at| *at <= now).is_some();
            let listener = port.listener.as_mut();
            let accepts_from = listener.and_then(|l| {
                l.passed(io);
                l.due()
            });
            // What came while it rested is read first.
            let half = port.half_until().filter(|_| port.heard_from.is_none());
            let later = [accepts_from, port.heard_from, half.filter(|t| *t > now)];
            let later = later.into_iter().flatten().min();
            if hears {
                self.hear(index, io);
            }
            if half.is_some_and(|until| until <= now) {
                self.half_is_over(index, now, io);
            }
            if let Some(at) = later {
                self.resume_at(at);
            }
        }
    }

    /// Ends a session that failed or that its front end closed.
    fn judge(&mut self, index: usize, result: Result<bool, Error>, io: &Io) {
        let port = &mut self.ports[index];
        let Some(connected) = &mut port.session else {
            return;
        };
        let why = match result {
            Ok(true) => None,
            Ok(false) => Some(Error::new(ErrorKind::Disconnected, "disconnected")),
            Err(e) => Some(e),
        };
        if let Some(why) = why.filter(|_| !connected.over) {
            connected.over = true;
            let (disk, session) = (port.disk.name(), &connected.session);
            let events = self.service.events();
            FrontEnd::log_end(
                events,
                Some(disk),
                session.front.peer(),
                session.name(),
                &why,
            );
        }
        self.hear(index, io);
        self.finish(index, io);
    }

    /// Drops a session that is over and whose rings have stopped, and lets the next one in.
    fn finish(&mut self, index: usize, io: &Io) {
        let port = &mut self.ports[index];
        if let Some(over) = port.session.take_if(|c| c.over && c.session.end()) {
            self.sessions.remove(&over.id);
            match port.removed {
                true => self.gone.push(index),
                false => self.listen(index, io),
            }
        }
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
