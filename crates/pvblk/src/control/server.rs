//! The serving side. Whoever connects is the server's own user: the socket is private.

use super::{ERROR, OK, TRACE};
use anyhow::{Context, Result};
use pvblk_export::socket_file::{SocketFile, SocketType};
use pvblk_sys::{EventFd, Poller};
use pvblk_trace::blktrace::{CaptureWriter, Writer};
use pvblk_trace::{Feed, Next};
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Most connections at a time.
const MOST: usize = 16;
/// Longest question in bytes.
const LONGEST: u64 = 1024;
/// How long a question may take, and how long the asker may not read.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a quiet trace looks whether anybody is still there.
const LOOK: Duration = Duration::from_millis(50);

struct Shared {
    feed: Arc<Feed>,
    stopping: AtomicBool,
    live: AtomicUsize,
}

/// Listens until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    bell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `path`.
    pub fn bind(path: &Path, feed: Arc<Feed>) -> Result<Server> {
        let file = SocketFile::bind(path, SocketType::STREAM)?;
        let shared = Arc::new(Shared {
            feed,
            stopping: AtomicBool::new(false),
            live: AtomicUsize::new(0),
        });
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
        self.bell.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept_all(file: &SocketFile, poller: &Poller, shared: &Arc<Shared>) {
    let mut events = Vec::new();
    while !shared.stopping.load(Ordering::Acquire) {
        events.clear();
        if let Err(e) = poller.wait(&mut events, None) {
            tracing::error!("{}: waiting for connections: {e}", file.path().display());
            break;
        }
        match file.accept() {
            Ok(Some(fd)) => start(fd.into(), shared),
            Ok(None) => {}
            Err(e) => {
                // Out of descriptors, most likely: don't spin on the connection that can't be taken.
                tracing::warn!("{}: accepting: {e}", file.path().display());
                std::thread::sleep(LOOK);
            }
        }
    }
    // Traces that run have a little time to end in order.
    for _ in 0..100 {
        if shared.live.load(Ordering::Acquire) == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Counts down also when a thread ends early.
struct Seat(Arc<Shared>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Ordering::AcqRel);
    }
}

fn start(mut socket: UnixStream, shared: &Arc<Shared>) {
    let taken = shared.live.fetch_add(1, Ordering::AcqRel);
    let seat = Seat(Arc::clone(shared));
    let prepared = socket
        .set_nonblocking(false)
        .and_then(|()| socket.set_read_timeout(Some(PATIENCE)))
        .and_then(|()| socket.set_write_timeout(Some(PATIENCE)));
    if prepared.is_err() {
        return;
    }
    if taken >= MOST {
        let _ = writeln!(
            socket,
            "{ERROR}{MOST} are connected already: end one of them"
        );
        return;
    }
    let body = move || {
        let seat = seat;
        if let Err(e) = answer(&socket, &seat.0) {
            tracing::debug!("control connection: {e}");
        }
    };
    let thread = std::thread::Builder::new().name("pvblk-control-1".into());
    if let Err(e) = thread.spawn(body) {
        tracing::warn!("starting a thread for a control connection: {e}");
    }
}

fn answer(socket: &UnixStream, shared: &Shared) -> std::io::Result<()> {
    let mut question = String::new();
    BufReader::new(socket.take(LONGEST)).read_line(&mut question)?;
    let mut output = socket;
    match question.trim_end() {
        TRACE => match shared.feed.subscribe() {
            Ok(subscription) => {
                writeln!(output, "{OK}")?;
                trace(socket, shared, &subscription)
            }
            Err(e) => writeln!(output, "{ERROR}starting a trace: {e}"),
        },
        _ => writeln!(output, "{ERROR}the only question is {TRACE}"),
    }
}

fn trace(
    socket: &UnixStream,
    shared: &Shared,
    subscription: &pvblk_trace::Subscription,
) -> std::io::Result<()> {
    let output = BufWriter::with_capacity(1 << 16, socket.try_clone()?);
    let mut capture = CaptureWriter::new(Writer::stream(output), subscription.collector().clone());
    let mut told = 0;
    // From now on a read only asks whether the other side is shut.
    socket.set_read_timeout(Some(Duration::from_micros(1)))?;
    loop {
        match subscription.next(LOOK) {
            Next::Events(events) => capture.events(&events)?,
            Next::Nothing => {}
            Next::End => break,
        }
        capture.flush()?;
        let lost = subscription.lost();
        capture.lost(lost - told)?;
        told = lost;
        if shared.stopping.load(Ordering::Acquire) || is_shut(socket)? {
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
