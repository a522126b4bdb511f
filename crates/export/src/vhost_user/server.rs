//! The server of vhost-user front ends: one control thread for all sockets and sessions.

use super::areas::Areas;
use super::bucket::Bucket;
use super::host::VhostHost;
use super::inflight::area_bytes;
use super::session::{Ended, Session};
use super::shares::{Seat, Shares};
use super::virtqueue::MAX_ENTRIES;
use crate::socket_file::{SocketFile, SocketType};
use parking_lot::Mutex;
use pvblk_backend::{Seldom, seldom};
use pvblk_block::{BlockDevice, DeviceEvent, Error, ErrorKind, Subscription};
use pvblk_sys::socket::{refuse_descriptors, take_descriptors};
use pvblk_sys::{Closer, EventFd, PollEvent, Poller};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long requests in flight get to end when the server stops.
const STOP_TIME: Duration = Duration::from_secs(10);
/// How long accepting pauses when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// How long a message may take to come in full. One that never does would keep its session, and the descriptors that came with its beginning.
const HALF_TIME: Duration = Duration::from_secs(10);

/// How long a front end isn't heard while too many of its descriptors wait to be closed, and after how long its session is ended for that.
const CLOSING: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(10));

/// Seconds of the control thread that one socket's front ends may use at once, and of each second.
const TIME: (f64, f64) = (0.032, 0.1);
/// Connections at one socket at once, and a second later on.
const CONNECTIONS: (f64, f64) = (64.0, 16.0);

const INBOX: u64 = u64::MAX;

/// What time it is. Tests have one of their own.
type Clock = Box<dyn Fn() -> Instant + Send>;

/// A socket and the disk behind it.
#[derive(Clone, Debug)]
pub struct Listen {
    /// The disk's name.
    pub disk: String,
    /// Where front ends connect, one after another.
    pub path: PathBuf,
}

/// What other threads tell the control thread.
#[derive(Debug)]
enum Note {
    RingEnded {
        port: usize,
        session: u64,
        ring: u16,
        generation: u64,
        reason: Option<String>,
    },
    Device(usize, DeviceEvent),
    Stop,
}

#[derive(Debug)]
struct Inbox {
    notes: Mutex<Vec<Note>>,
    wake: EventFd,
}

impl Inbox {
    fn put(&self, note: Note) {
        let mut notes = self.notes.lock();
        // A resize that was not looked at yet covers the next one.
        if let Note::Device(port, DeviceEvent::Resized { .. }) = note {
            let same =
                |n: &Note| matches!(n, Note::Device(p, DeviceEvent::Resized { .. }) if *p == port);
            if notes.iter().any(same) {
                return;
            }
        }
        notes.push(note);
        self.wake.notify();
    }

    fn take(&self) -> Vec<Note> {
        self.wake.drain();
        std::mem::take(&mut self.notes.lock())
    }
}

/// Serves disks to vhost-user front ends, each disk at its own socket. Dropping it stops it.
pub struct VhostServer {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

impl VhostServer {
    /// Listens at all of `listens` (mode 0600). At each socket one front end is served at a time; the next one waits until
    /// the last one's requests have ended. Errors if a disk doesn't exist or a path can't be used.
    pub fn bind(listens: &[Listen], host: Arc<dyn VhostHost>) -> Result<VhostServer, Error> {
        let os = |e| Error::os("starting the vhost-user server", e);
        let mut control = Control::new(listens, host, Box::new(Instant::now))?;
        let inbox = Arc::clone(&control.inbox);
        let thread = std::thread::Builder::new()
            .name("pvblk-vhost".into())
            .spawn(move || control.run())
            .map_err(os)?;
        Ok(VhostServer {
            inbox,
            thread: Some(thread),
        })
    }

    /// Removes the sockets, lets requests in flight end, then closes the connections: guests go on with the next server. Returns after
    /// at most 10 seconds.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.inbox.put(Note::Stop);
            if thread.join().is_err() {
                tracing::error!("the vhost-user server's control thread panicked");
            }
        }
    }
}

impl Drop for VhostServer {
    fn drop(&mut self) {
        self.stop();
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

struct Port {
    disk: String,
    device: Arc<dyn BlockDevice>,
    listener: Option<SocketFile>,
    seat: Seat,
    areas: Arc<Mutex<Areas>>,
    /// Seconds of the control thread.
    time: Bucket,
    connections: Bucket,
    /// Nobody is accepted until then.
    accepts_from: Option<Instant>,
    /// Its front end isn't heard until then.
    heard_from: Option<Instant>,
    /// Closes what front ends send.
    closer: Arc<Closer>,
    /// Since when it has no room for more.
    full_since: Option<Instant>,
    /// The listener is waited for.
    listening: bool,
    session: Option<Connected>,
    _events: Subscription,
}

impl Port {
    /// Until when the rest of a message has to be there.
    fn half_until(&self) -> Option<Instant> {
        let connected = self.session.as_ref().filter(|c| !c.over)?;
        Some(connected.session.half_since()? + HALF_TIME)
    }
}

/// The control thread's own.
struct Control {
    host: Arc<dyn VhostHost>,
    inbox: Arc<Inbox>,
    poller: Poller,
    clock: Clock,
    /// Kept for reuse.
    events: Vec<PollEvent>,
    ports: Vec<Port>,
    next_session: u64,
    paused_until: Option<Instant>,
    /// When to look for sockets whose pause is over.
    resume_at: Option<Instant>,
    stopping: Option<Instant>,
}

impl Control {
    fn new(listens: &[Listen], host: Arc<dyn VhostHost>, clock: Clock) -> Result<Control, Error> {
        let os = |e| Error::os("starting the vhost-user server", e);
        let inbox = Arc::new(Inbox {
            notes: Mutex::default(),
            wake: EventFd::new().map_err(os)?,
        });
        let poller = Poller::new().map_err(os)?;
        poller.add(inbox.wake.as_fd(), INBOX, false).map_err(os)?;
        let shares = Shares::new(listens.len(), host.most_unallocated());
        let longest = area_bytes(host.queues(), MAX_ENTRIES as u16);
        let mut ports = Vec::new();
        for (i, Listen { disk, path }) in listens.iter().enumerate() {
            let device = host.device(disk).ok_or_else(|| {
                Error::config(format!(
                    "there is no disk {disk} to serve at {}",
                    path.display()
                ))
            })?;
            let listener = SocketFile::bind(path, SocketType::STREAM)?;
            // A front end that waits for its turn isn't read, and what it sends stays with this process: it could be another front end's own end.
            let _ = refuse_descriptors(listener.as_fd());
            poller
                .add(listener.as_fd(), listener_token(i), false)
                .map_err(os)?;
            let told = Arc::clone(&inbox);
            let events = device
                .events()
                .subscribe(move |event| told.put(Note::Device(i, event)));
            ports.push(Port {
                disk: disk.clone(),
                device,
                listener: Some(listener),
                closer: Closer::new(),
                full_since: None,
                seat: shares.seat(i),
                areas: Arc::new(Mutex::new(Areas::new(disk, shares.seat(i), longest))),
                time: Bucket::new(TIME, clock()),
                connections: Bucket::new(CONNECTIONS, clock()),
                accepts_from: None,
                heard_from: None,
                session: None,
                listening: true,
                _events: events,
            });
        }
        Ok(Control {
            host,
            inbox,
            poller,
            clock,
            events: Vec::new(),
            ports,
            next_session: 1,
            paused_until: None,
            resume_at: None,
            stopping: None,
        })
    }

    fn run(&mut self) {
        loop {
            if let Some(end) = self.stopping {
                let left = self.ports.iter().filter(|p| p.session.is_some()).count();
                if left == 0 {
                    return;
                }
                if (self.clock)() >= end {
                    // Their queues own their memory, so they stay until the workers are done with them.
                    tracing::error!("vhost-user: {left} front ends still have requests in flight");
                    return;
                }
            }
            let deadlines = self.stopping.into_iter().chain(self.paused_until);
            let deadlines = deadlines.chain(self.resume_at);
            let timeout = deadlines
                .min()
                .map(|t| t.saturating_duration_since((self.clock)()));
            self.turn(timeout);
        }
    }

    /// Waits up to `timeout`, and does what there is to do then.
    fn turn(&mut self, timeout: Option<Duration>) {
        let mut events = std::mem::take(&mut self.events);
        if let Err(e) = self.poller.wait(&mut events, timeout) {
            // Nothing of ours can cause this; without a pause the loop would spin.
            tracing::error!("waiting for vhost-user front ends: {e}");
            std::thread::sleep(ACCEPT_PAUSE);
        }
        for event in events.drain(..) {
            let port = (event.token >> 1) as usize;
            match event.token {
                INBOX => {}
                token if token & 1 == 0 => self.accept(port),
                _ => self.readable(port),
            }
        }
        self.events = events;
        for note in self.inbox.take() {
            self.note(note);
        }
        let now = (self.clock)();
        if self.resume_at.is_some_and(|at| at <= now) {
            self.resume(now);
        }
        if self.paused_until.is_some_and(|t| t <= now) {
            self.paused_until = None;
            for port in 0..self.ports.len() {
                self.listen(port);
            }
        }
    }

    /// Waits for connections exactly while there is none.
    fn listen(&mut self, index: usize) {
        let port = &mut self.ports[index];
        let paused = self.paused_until.is_some() || port.accepts_from.is_some();
        let want = port.session.is_none() && !paused;
        if let Some(listener) = &port.listener
            && want != port.listening
        {
            port.listening = want;
            let fd = listener.as_fd();
            // With neither it stays quiet: a listener has no hangup.
            let _ = self.poller.set(fd, listener_token(index), want, false);
        }
    }

    fn accept(&mut self, index: usize) {
        let port = &mut self.ports[index];
        let Some(listener) = port.listener.as_ref().filter(|_| port.session.is_none()) else {
            return;
        };
        let socket = match listener.accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(e) => {
                seldom!(
                    error,
                    Seldom::of(&port.disk, "accept"),
                    "accepting at {}: {e}",
                    listener.path().display()
                );
                // Out of descriptors: the listener stays readable, so look away for a while.
                self.paused_until = Some((self.clock)() + ACCEPT_PAUSE);
                return self.listen(index);
            }
        };
        // Its own, which is read: it has descriptors from now on.
        let _ = take_descriptors(socket.as_fd());
        let now = (self.clock)();
        if let Some(pause) = port.connections.take(1.0, now) {
            port.accepts_from = Some(now + pause);
            self.resume_at(now + pause);
        }
        let port = &mut self.ports[index];
        let id = self.next_session;
        self.next_session += 1;
        let name = format!("disk {}, vhost-user front end {id}", port.disk);
        let inbox = Arc::clone(&self.inbox);
        let ended: Ended = Arc::new(move |ring, generation, reason| {
            inbox.put(Note::RingEnded {
                port: index,
                session: id,
                ring,
                generation,
                reason,
            });
        });
        seldom!(
            info,
            Seldom::of(&port.disk, "connected"),
            "{name}: connected"
        );
        let host_and_device = (Arc::clone(&self.host), Arc::clone(&port.device));
        let session = Session::new(
            name,
            &port.disk,
            host_and_device,
            (port.seat.clone(), Arc::clone(&port.areas)),
            ended,
            (socket, Arc::clone(&port.closer)),
        );
        port.session = Some(Connected {
            id,
            session,
            heard: false,
            over: false,
        });
        self.listen(index);
        self.hear(index);
    }

    /// Waits for messages exactly while they can be answered. A socket that isn't read is taken out: one that hung up is reported for ever.
    fn hear(&mut self, index: usize) {
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
            true => self.poller.add(fd, session_token(index), false),
            false => self.poller.remove(fd),
        };
        if let Err(e) = result {
            let failed = Err(Error::os("waiting for its messages", e));
            self.judge(index, failed);
        }
    }

    fn readable(&mut self, index: usize) {
        if !self.has_room(index) {
            return;
        }
        let Some(connected) = self.ports.get_mut(index).and_then(|p| p.session.as_mut()) else {
            return;
        };
        let start = (self.clock)();
        let result = connected.session.readable(&*self.clock);
        let half = connected.session.half_since();
        self.judge(index, result);
        if let Some(since) = half {
            self.resume_at(since + HALF_TIME);
        }
        self.used_time(index, start);
    }

    /// False while too many descriptors that came from a socket wait to be closed: then its front end isn't heard, and is let go in the end.
    fn has_room(&mut self, index: usize) -> bool {
        let Some(port) = self.ports.get_mut(index) else {
            return false;
        };
        if port.closer.has_room() {
            port.full_since = None;
            return true;
        }
        let now = (self.clock)();
        let since = *port.full_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= CLOSING.1 {
            let why = "closing the descriptors that front ends of this disk sent takes too long";
            self.judge(index, Err(Error::new(ErrorKind::Exhausted, why)));
            return false;
        }
        port.heard_from = Some(now + CLOSING.0);
        self.resume_at(now + CLOSING.0);
        self.hear(index);
        false
    }

    /// Ends a session whose message doesn't come in full, unless the rest of it is there now.
    fn half_is_over(&mut self, index: usize, now: Instant) {
        self.readable(index);
        let half = self.ports[index].half_until();
        if half.is_some_and(|until| until <= now) {
            let seconds = HALF_TIME.as_secs();
            let why = format!("the rest of a message did not come within {seconds} seconds");
            self.judge(index, Err(Error::protocol(why)));
        }
    }

    /// Counts the time since `start` to a socket. One that uses too much rests, so that others are heard.
    fn used_time(&mut self, index: usize, start: Instant) {
        let now = (self.clock)();
        let port = &mut self.ports[index];
        if let Some(pause) = port.time.take((now - start).as_secs_f64(), now) {
            port.heard_from = Some(now + pause);
            self.resume_at(now + pause);
            self.hear(index);
        }
    }

    fn resume_at(&mut self, at: Instant) {
        self.resume_at = Some(self.resume_at.map_or(at, |other| other.min(at)));
    }

    /// Sockets whose pause is over are heard again.
    fn resume(&mut self, now: Instant) {
        self.resume_at = None;
        for index in 0..self.ports.len() {
            let port = &mut self.ports[index];
            let over = |at: &mut Option<Instant>| at.take_if(|at| *at <= now).is_some();
            let (accepts, hears) = (over(&mut port.accepts_from), over(&mut port.heard_from));
            // What came while it rested is read first.
            let half = port.half_until().filter(|_| port.heard_from.is_none());
            let later = [
                port.accepts_from,
                port.heard_from,
                half.filter(|t| *t > now),
            ];
            let later = later.into_iter().flatten().min();
            if accepts {
                self.listen(index);
            }
            if hears {
                self.hear(index);
            }
            if half.is_some_and(|until| until <= now) {
                self.half_is_over(index, now);
            }
            if let Some(at) = later {
                self.resume_at(at);
            }
        }
    }

    /// Ends a session that failed or that its front end closed.
    fn judge(&mut self, index: usize, result: Result<bool, Error>) {
        let port = &mut self.ports[index];
        let Some(connected) = &mut port.session else {
            return;
        };
        let name = connected.session.name();
        match result {
            Ok(true) => {}
            _ if connected.over => {}
            Ok(false) => {
                seldom!(
                    info,
                    Seldom::of(&port.disk, "ended"),
                    "{name}: disconnected"
                );
                connected.over = true;
            }
            Err(e) if e.kind() == ErrorKind::Disconnected => {
                seldom!(info, Seldom::of(&port.disk, "ended"), "{name}: {e}");
                connected.over = true;
            }
            Err(e) => {
                seldom!(
                    warn,
                    Seldom::of(&port.disk, "broken"),
                    "{name}: {e}; the connection is ended"
                );
                connected.over = true;
            }
        }
        self.hear(index);
        self.finish(index);
    }

    /// Drops a session that is over and whose rings have stopped, and lets the next one in.
    fn finish(&mut self, index: usize) {
        let port = &mut self.ports[index];
        if port
            .session
            .as_mut()
            .is_some_and(|c| c.over && c.session.end())
        {
            port.session = None;
            self.listen(index);
        }
    }

    fn note(&mut self, note: Note) {
        match note {
            Note::RingEnded {
                port,
                session,
                ring,
                generation,
                reason,
            } => {
                let connected = self.ports[port].session.as_mut();
                let Some(connected) = connected.filter(|c| c.id == session) else {
                    return;
                };
                let start = (self.clock)();
                let result = connected.session.ring_ended(ring, generation, reason);
                // Messages that came while it waited are read now: the poller tells of them again.
                self.judge(port, result.map(|()| true));
                self.used_time(port, start);
            }
            Note::Device(port, DeviceEvent::Resized { .. }) => {
                if let Some(connected) = &self.ports[port].session {
                    connected.session.config_changed();
                }
            }
            Note::Device(port, DeviceEvent::Gone) => {
                let gone = Error::new(ErrorKind::Os, "the disk is gone");
                self.judge(port, Err(gone));
            }
            Note::Stop => {
                self.stopping = Some((self.clock)() + STOP_TIME);
                for index in 0..self.ports.len() {
                    let port = &mut self.ports[index];
                    // Removes the file, so that nobody else comes.
                    port.listener = None;
                    if let Some(connected) = &mut port.session {
                        connected.over = true;
                    }
                    self.hear(index);
                    self.finish(index);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
