//! The serving side. A client that can connect is the server's own user: the socket is private.

use super::lines::Lines;
use super::{ASK, ERROR, MEMORY, Methods, OK, TRACE, session};
use crate::cache;
use crate::disks::Registry;
use crate::events::{self, EventsQuery};
use crate::hops::{self, HopsQuery, Reader};
use crate::memory::Desk;
use crate::wanted::{Reload, members};
use anyhow::{Context, Result};
use parking_lot::Mutex;
use pvblk_backend::{Disk, Disks, Pulse, RateLimit, Service, ratelimited};
use pvblk_block::Error;
use pvblk_export::socket_file::SocketFile;
use pvblk_sys::{EventFd, Poller};
use pvblk_trace::blktrace::{CaptureWriter, Writer};
use pvblk_trace::{Feed, Next};
use std::cell::RefCell;
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most connections at a time.
const MOST: usize = 16;
/// Most disks that an error names.
const MOST_NAMED: usize = 8;
/// So many more are asked for their question and then refused. Yet others find the connection closed.
const REFUSED: usize = 16;
/// Longest time for a question to come, and for the asker to take its answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Period in which a quiet trace looks whether its reader is still there.
const LOOK: Duration = Duration::from_millis(50);

/// The things that clients can reach.
pub struct Reached {
    pub feed: Arc<Feed>,
    pub service: Arc<Service>,
    /// Never waits for a question to a disk.
    pub memory: Desk,
    /// Of a process whose disks come and go.
    pub registry: Option<Arc<Registry>>,
    /// Of a process whose configuration can be read again.
    pub reload: Option<Arc<Reload>>,
}

pub(super) struct Shared {
    pub reached: Reached,
    stopping: AtomicBool,
    /// Sockets of clients that may ask more than once.
    sessions: Mutex<Vec<Weak<UnixStream>>>,
    /// Requests at work on threads of their own.
    pub at_work: AtomicUsize,
    /// Connections that are answered.
    live: AtomicUsize,
    /// Connections that are refused once they have asked.
    refused: AtomicUsize,
}

impl Shared {
    pub fn new(reached: Reached) -> Shared {
        Shared {
            reached,
            stopping: AtomicBool::new(false),
            sessions: Mutex::default(),
            at_work: AtomicUsize::new(0),
            live: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        }
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Ends this client when the server stops.
    pub fn end_at_stop(&self, socket: &Arc<UnixStream>) {
        let mut sessions = self.sessions.lock();
        sessions.retain(|s| s.strong_count() > 0);
        sessions.push(Arc::downgrade(socket));
    }

    /// Answers a question to a disk; both texts are JSON. May take its time, but not for ever. Errors say in one line what to do.
    pub fn ask(&self, disk: &str, question: &str) -> Result<String, Error> {
        if self.is_stopping() {
            return Err(Error::config("the server is stopping"));
        }
        let disks = self.reached.service.disks();
        let found = disks.find(disk).ok_or_else(|| no_disk(disks, disk))?;
        let answer = || self.answer(&found, question);
        match &self.reached.registry {
            Some(registry) => members::ask(registry, &found, question, answer),
            None => answer(),
        }
    }

    fn answer(&self, found: &Arc<Disk>, question: &str) -> Result<String, Error> {
        let disk = found.name();
        found.ask(question).unwrap_or_else(|| {
            if cache::is_question(question) {
                let disks = self.reached.service.disks();
                return Err(Error::config(cache::no_cache(found, &disks.all())));
            }
            Err(Error::config(format!(
                "disk {disk} is {}: it knows no such questions; an array answers where it is served",
                found.device().describe()
            )))
        })
    }
}

/// The error for a disk that isn't served.
pub fn no_disk(disks: &Disks, name: &str) -> Error {
    let some = disks.page(0, MOST_NAMED);
    let mut names: Vec<&str> = some.iter().map(|d| d.name()).collect();
    if disks.len() > MOST_NAMED {
        names.push("more");
    }
    let there = match names.join(", ") {
        none if none.is_empty() => "none is served".to_owned(),
        names => format!("there are {names}"),
    };
    Error::config(format!("no disk named {name}; {there}"))
}

/// Listens until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    bell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at this socket.
    pub fn start(file: SocketFile, methods: &Methods) -> Result<Server> {
        let shared = Arc::clone(&methods.0);
        let bell = Arc::new(EventFd::new().context("starting the control server")?);
        let poller = Poller::new().context("starting the control server")?;
        poller.add(file.as_fd(), 0, false)?;
        poller.add(bell.as_fd(), 1, false)?;
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("pvblk-control".into())
            .spawn(move || accept_all(&file, &poller, &for_thread))
            .context("starting the control server")?;
        Ok(Server {
            shared,
            bell,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        if let Some(registry) = &self.shared.reached.registry {
            registry.stop();
        }
        let sessions = std::mem::take(&mut *self.shared.sessions.lock());
        for socket in sessions.iter().filter_map(Weak::upgrade) {
            // Answers on their way are still written.
            let _ = socket.shutdown(Shutdown::Read);
        }
        self.bell.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept_all(file: &SocketFile, poller: &Poller, shared: &Arc<Shared>) {
    let mut events = Vec::new();
    let pulse = Pulse::new("the control server");
    while !shared.stopping.load(Ordering::Acquire) {
        events.clear();
        pulse.waits();
        if let Err(e) = poller.wait(&mut events, None) {
            tracing::error!("{}: waiting for connections: {e}", file.path().display());
            break;
        }
        pulse.works();
        match file.accept() {
            Ok(Some(fd)) => start(fd.into(), shared),
            Ok(None) => {}
            Err(e) => {
                // Out of descriptors, most likely: don't spin on the connection that can't be taken.
                let path = file.path().display();
                ratelimited!(
                    warn,
                    RateLimit::of(&path.to_string(), "accept"),
                    "{path}: accepting: {e}"
                );
                std::thread::sleep(LOOK);
            }
        }
    }
    pulse.waits();
    // Traces that run have a little time to end in order.
    for _ in 0..100 {
        if shared.live.load(Ordering::Acquire) == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Counts down also when a thread ends early.
struct Seat {
    shared: Arc<Shared>,
    is_refused: bool,
}

impl Seat {
    /// For one more connection; only one thread takes them. `None` if there are too many even to be refused.
    fn take(shared: &Arc<Shared>) -> Option<Seat> {
        let seat = |is_refused| Seat {
            shared: Arc::clone(shared),
            is_refused,
        };
        let free = |is_refused: bool, most| {
            let seat = seat(is_refused);
            (seat.count().fetch_add(1, Ordering::AcqRel) < most).then_some(seat)
        };
        free(false, MOST).or_else(|| free(true, REFUSED))
    }

    fn count(&self) -> &AtomicUsize {
        match self.is_refused {
            false => &self.shared.live,
            true => &self.shared.refused,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.count().fetch_sub(1, Ordering::AcqRel);
    }
}

fn start(socket: UnixStream, shared: &Arc<Shared>) {
    let prepared = socket
        .set_nonblocking(false)
        .and_then(|()| socket.set_write_timeout(Some(PATIENCE)));
    if prepared.is_err() {
        return;
    }
    let Some(seat) = Seat::take(shared) else {
        let _ = refuse(&socket);
        return;
    };
    let socket = Arc::new(socket);
    let body = move || {
        if let Err(e) = answer(&socket, &seat.shared, seat.is_refused) {
            tracing::debug!("control connection: {e}");
        }
    };
    let thread = std::thread::Builder::new().name("pvblk-control-1".into());
    if let Err(e) = thread.spawn(body) {
        tracing::warn!("starting a thread for a control connection: {e}");
    }
}

fn refuse(mut socket: &UnixStream) -> std::io::Result<()> {
    writeln!(
        socket,
        "{ERROR}{MOST} are connected already: end one of them"
    )
}

fn answer(socket: &Arc<UnixStream>, shared: &Arc<Shared>, is_full: bool) -> std::io::Result<()> {
    let mut output = &**socket;
    let mut lines = Lines::new(socket);
    let question = match lines.first()? {
        Ok(question) => question,
        Err(why) if lines.is_json() => return session::refuse_line(socket, why),
        Err(why) => return writeln!(output, "{ERROR}{why}"),
    };
    if is_full {
        // After the question: a socket that is closed with something unread tells of a broken connection instead.
        return match question.starts_with('{') {
            true => session::refuse(socket, &question, MOST),
            false => refuse(socket),
        };
    }
    if question.starts_with('{') {
        return session::run(socket, shared, lines, question);
    }
    if question == TRACE {
        return match shared.reached.feed.subscribe() {
            Ok(subscription) => {
                writeln!(output, "{OK}")?;
                trace(socket, shared, &subscription)
            }
            Err(e) => writeln!(output, "{ERROR}starting a trace: {e}"),
        };
    }
    let mut reply = |answer: Result<String, Error>| match answer {
        Ok(answer) => writeln!(output, "{OK}\n{}", one_line(&answer)),
        Err(e) => writeln!(output, "{ERROR}{}", one_line(&e.to_string())),
    };
    if let Some(json) = question.strip_prefix(MEMORY) {
        return reply(shared.reached.memory.answer(json));
    }
    let Some((disk, json)) = question.strip_prefix(ASK).and_then(|q| q.split_once(' ')) else {
        return writeln!(
            output,
            "{ERROR}the questions are {TRACE}, {ASK}DISK JSON, and {MEMORY}JSON"
        );
    };
    reply(shared.ask(disk, json))
}

/// A text whose names must not look like another line.
fn one_line(text: &str) -> String {
    text.replace(|c: char| c.is_control(), " ")
}

pub(super) fn stream_events(
    socket: &UnixStream,
    shared: &Shared,
    query: &EventsQuery,
) -> std::io::Result<()> {
    let mut output = socket;
    // From now on a read only asks whether the other side is shut.
    socket.set_read_timeout(Some(Duration::from_micros(1)))?;
    let is_over = || Ok(shared.is_stopping() || is_shut(socket)?);
    let events = shared.reached.service.events();
    events::answer(events, query, is_over, |event| writeln!(output, "{event}"))
}

/// A line that a reader takes in its own time.
struct SlowLine<'a> {
    socket: &'a UnixStream,
    left: Vec<u8>,
    /// The time since which nothing of it was taken.
    since: Instant,
}

impl SlowLine<'_> {
    /// Writes what there is room for. An error if the reader has taken nothing for too long.
    fn push(&mut self) -> std::io::Result<()> {
        while !self.left.is_empty() {
            match self.socket.write(&self.left) {
                Ok(n) => {
                    self.left.drain(..n);
                    self.since = Instant::now();
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    let late = self.since.elapsed() > PATIENCE;
                    return if late { Err(e) } else { Ok(()) };
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

pub(super) fn stream_hops(
    socket: &UnixStream,
    shared: &Shared,
    query: &HopsQuery,
) -> std::io::Result<()> {
    socket.set_nonblocking(true)?;
    let line = RefCell::new(SlowLine {
        socket,
        left: Vec::new(),
        since: Instant::now(),
    });
    let reader = || {
        if shared.is_stopping() || is_shut(socket)? {
            return Ok(Reader::IsGone);
        }
        let mut line = line.borrow_mut();
        line.push()?;
        Ok(match line.left.is_empty() {
            true => Reader::Takes,
            false => Reader::IsSlow,
        })
    };
    let put = |object: &str| {
        let mut line = line.borrow_mut();
        line.since = Instant::now();
        line.left.extend_from_slice(object.as_bytes());
        line.left.push(b'\n');
        line.push()
    };
    hops::answer(&shared.reached.feed, query, reader, put)
}

pub(super) fn trace(
    socket: &UnixStream,
    shared: &Shared,
    subscription: &pvblk_trace::Subscription,
) -> std::io::Result<()> {
    let output = BufWriter::with_capacity(1 << 16, socket.try_clone()?);
    let mut capture = CaptureWriter::new(Writer::stream(output), subscription.collector().clone());
    // From now on a read only asks whether the other side is shut.
    socket.set_read_timeout(Some(Duration::from_micros(1)))?;
    loop {
        match subscription.next(LOOK) {
            Next::Events(events) => capture.events(&events)?,
            Next::Nothing => {}
            Next::End => break,
        }
        capture.flush()?;
        if shared.is_stopping() || is_shut(socket)? {
            subscription.finish();
        }
    }
    capture.finish()?;
    Ok(())
}

fn is_shut(mut socket: &UnixStream) -> std::io::Result<bool> {
    match socket.read(&mut [0]) {
        Ok(n) => Ok(n == 0),
        Err(e) if e.kind() == ErrorKind::WouldBlock || e.kind() == ErrorKind::Interrupted => {
            Ok(false)
        }
        Err(e) => Err(e),
    }
}
