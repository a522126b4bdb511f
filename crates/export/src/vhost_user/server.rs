//! The server of vhost-user front ends: one control thread for all sockets and sessions.

use super::bucket::Bucket;
use super::host::VhostHost;
use super::session::{Ended, Session};
use super::shares::{Seat, Shares};
use crate::socket_file::{SocketFile, SocketType};
use parking_lot::Mutex;
use pvblk_backend::{Seldom, seldom};
use pvblk_block::{BlockDevice, DeviceEvent, Error, ErrorKind, Subscription};
use pvblk_sys::{Closer, EventFd, Poller};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long requests in flight get to end when the server stops.
const STOP_TIME: Duration = Duration::from_secs(10);
/// How long accepting pauses when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Seconds of the control thread that one socket's front ends may use at once, and of each second.
const TIME: (f64, f64) = (0.032, 0.1);
/// Connections at one socket at once, and a second later on.
const CONNECTIONS: (f64, f64) = (64.0, 16.0);

const INBOX: u64 = u64::MAX;

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
        let inbox = Arc::new(Inbox {
            notes: Mutex::default(),
            wake: EventFd::new().map_err(os)?,
        });
        let poller = Poller::new().map_err(os)?;
        poller.add(inbox.wake.as_fd(), INBOX, false).map_err(os)?;
        let shares = Shares::new(listens.len(), host.most_unallocated());
        let mut ports = Vec::new();
        for (i, Listen { disk, path }) in listens.iter().enumerate() {
            let device = host.device(disk).ok_or_else(|| {
                Error::config(format!(
                    "there is no disk {disk} to serve at {}",
                    path.display()
                ))
            })?;
            let listener = SocketFile::bind(path, SocketType::STREAM)?;
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
                seat: shares.seat(i),
                time: Bucket::new(TIME),
                connections: Bucket::new(CONNECTIONS),
                accepts_from: None,
                heard_from: None,
                session: None,
                listening: true,
                _events: events,
            });
        }
        let mut control = Control {
            host,
            inbox: Arc::clone(&inbox),
            poller,
            ports,
            next_session: 1,
            paused_until: None,
            resume_at: None,
            stopping: None,
        };
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
    /// Seconds of the control thread.
    time: Bucket,
    connections: Bucket,
    /// Nobody is accepted until then.
    accepts_from: Option<Instant>,
    /// Its front end isn't heard until then.
    heard_from: Option<Instant>,
    /// Closes what front ends send.
    closer: Arc<Closer>,
    /// The listener is waited for.
    listening: bool,
    session: Option<Connected>,
    _events: Subscription,
}

/// The control thread's own.
struct Control {
    host: Arc<dyn VhostHost>,
    inbox: Arc<Inbox>,
    poller: Poller,
    ports: Vec<Port>,
    next_session: u64,
    paused_until: Option<Instant>,
    /// When to look for sockets whose pause is over.
    resume_at: Option<Instant>,
    stopping: Option<Instant>,
}

impl Control {
    fn run(&mut self) {
        let mut events = Vec::new();
        loop {
            if let Some(end) = self.stopping {
                let left = self.ports.iter().filter(|p| p.session.is_some()).count();
                if left == 0 {
                    return;
                }
                if Instant::now() >= end {
                    // Their queues own their memory, so they stay until the workers are done with them.
                    tracing::error!("vhost-user: {left} front ends still have requests in flight");
                    return;
                }
            }
            let deadlines = self.stopping.into_iter().chain(self.paused_until);
            let deadlines = deadlines.chain(self.resume_at);
            let timeout = deadlines
                .min()
                .map(|t| t.saturating_duration_since(Instant::now()));
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
            for note in self.inbox.take() {
                self.note(note);
            }
            let now = Instant::now();
            if self.resume_at.is_some_and(|at| at <= now) {
                self.resume(now);
            }
            if self.paused_until.is_some_and(|t| t <= Instant::now()) {
                self.paused_until = None;
                for port in 0..self.ports.len() {
                    self.listen(port);
                }
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
                self.paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                return self.listen(index);
            }
        };
        let now = Instant::now();
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
            port.seat.clone(),
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
        let Some(connected) = self.ports.get_mut(index).and_then(|p| p.session.as_mut()) else {
            return;
        };
        let start = Instant::now();
        let result = connected.session.readable();
        self.judge(index, result);
        self.used_time(index, start);
    }

    /// Counts the time since `start` to a socket. One that uses too much rests, so that others are heard.
    fn used_time(&mut self, index: usize, start: Instant) {
        let now = Instant::now();
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
            let later = port.accepts_from.into_iter().chain(port.heard_from).min();
            if accepts {
                self.listen(index);
            }
            if hears {
                self.hear(index);
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
                let start = Instant::now();
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
                self.stopping = Some(Instant::now() + STOP_TIME);
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
