//! [`Server`]: listens, and gives each connection its thread.

use crate::Site;
use crate::connection;
use crate::host::Hosts;
use crate::limits::Limits;
use parking_lot::{Condvar, Mutex};
use pvblk_sys::{EventFd, Poller};
use rustix::net::sockopt;
use std::io;
use std::net::{Shutdown, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for the place of a connection that was closed for a new one.
const ROOM: Duration = Duration::from_millis(100);
/// Rest after a connection could not be taken.
const LOOK: Duration = Duration::from_millis(50);
/// Longest time for answers to end when the server stops.
const STOP: Duration = Duration::from_secs(2);

/// A listening socket that doesn't block.
pub trait Listener: AsFd + Send + 'static {
    /// The next connection, if there is one.
    fn accept(&self) -> io::Result<Option<OwnedFd>>;
}

impl Listener for TcpListener {
    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
        match TcpListener::accept(self) {
            Ok((stream, _)) => {
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(&stream, true)?;
                Ok(Some(stream.into()))
            }
            // A peer that gave up meanwhile isn't our error.
            Err(e) if matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Settings of a server.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub hosts: Hosts,
    pub limits: Limits,
}

pub(super) struct Shared {
    pub site: Arc<dyn Site>,
    pub settings: Settings,
    pub stopping: AtomicBool,
    seats: Mutex<Vec<Arc<Seat>>>,
    /// Signalled when a connection has ended.
    left: Condvar,
    streams: AtomicUsize,
}

/// A connection that is open.
pub(super) struct Seat {
    /// Of TCP, too: reads, writes and deadlines are the same.
    pub socket: UnixStream,
    /// Since when no request is at work on it.
    rests: Mutex<Option<Instant>>,
}

impl Seat {
    pub fn rests(&self) {
        *self.rests.lock() = Some(Instant::now());
    }

    pub fn works(&self) {
        *self.rests.lock() = None;
    }
}

/// A place among the streams of events.
pub(super) struct StreamPlace<'a>(&'a AtomicUsize);

impl Drop for StreamPlace<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Shared {
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// A place for one more stream of events, if there is one.
    pub fn stream(&self) -> Option<StreamPlace<'_>> {
        let place = StreamPlace(&self.streams);
        let others = self.streams.fetch_add(1, Ordering::AcqRel);
        (others < self.settings.limits.streams).then_some(place)
    }

    /// A seat for one more connection. If there is none, the connection that rested longest makes room.
    fn seat(&self, socket: UnixStream) -> Option<Arc<Seat>> {
        let seat = Arc::new(Seat {
            socket,
            rests: Mutex::new(Some(Instant::now())),
        });
        let mut seats = self.seats.lock();
        if seats.len() >= self.settings.limits.connections {
            let _ = rests_longest(&seats)?.socket.shutdown(Shutdown::Both);
            let deadline = Instant::now() + ROOM;
            while seats.len() >= self.settings.limits.connections {
                if self.left.wait_until(&mut seats, deadline).timed_out() {
                    return None;
                }
            }
        }
        seats.push(Arc::clone(&seat));
        Some(seat)
    }

    fn leave(&self, seat: &Arc<Seat>) {
        self.seats.lock().retain(|s| !Arc::ptr_eq(s, seat));
        self.left.notify_all();
    }
}

/// The seat that has rested longest; `None` if all are at work.
fn rests_longest(seats: &[Arc<Seat>]) -> Option<&Arc<Seat>> {
    let resting = seats
        .iter()
        .filter_map(|seat| Some(((*seat.rests.lock())?, seat)));
    let longest = resting.min_by_key(|(since, _)| *since);
    longest.map(|(_, seat)| seat)
}

/// Serves until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    bell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `site` and the files of the page on this socket; `place` names it in messages.
    pub fn start(
        listener: impl Listener,
        place: String,
        site: Arc<dyn Site>,
        settings: Settings,
    ) -> io::Result<Server> {
        let shared = Arc::new(Shared {
            site,
            settings,
            stopping: AtomicBool::new(false),
            seats: Mutex::default(),
            left: Condvar::new(),
            streams: AtomicUsize::new(0),
        });
        let bell = Arc::new(EventFd::new()?);
        let poller = Poller::new()?;
        poller.add(listener.as_fd(), 0, false)?;
        poller.add(bell.as_fd(), 1, false)?;
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("pvblk-web".into());
        let thread = thread.spawn(move || accept_all(&listener, &place, &poller, &for_thread))?;
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
        let mut seats = self.shared.seats.lock();
        for seat in &*seats {
            // Answers on their way are still written.
            let _ = seat.socket.shutdown(Shutdown::Read);
        }
        let deadline = Instant::now() + STOP;
        while !seats.is_empty()
            && !self
                .shared
                .left
                .wait_until(&mut seats, deadline)
                .timed_out()
        {}
        for seat in &*seats {
            let _ = seat.socket.shutdown(Shutdown::Both);
        }
    }
}

fn accept_all(listener: &impl Listener, place: &str, poller: &Poller, shared: &Arc<Shared>) {
    let mut events = Vec::new();
    let mut told = false;
    while !shared.is_stopping() {
        events.clear();
        if let Err(e) = poller.wait(&mut events, None) {
            tracing::error!("{place}: waiting for connections: {e}");
            return;
        }
        match listener.accept() {
            Ok(Some(fd)) => {
                told = false;
                start(fd.into(), shared);
            }
            Ok(None) => {}
            Err(e) => {
                // Out of descriptors, most likely: don't spin on the connection that can't be taken.
                if !told {
                    tracing::warn!("{place}: accepting: {e}");
                    told = true;
                }
                std::thread::sleep(LOOK);
            }
        }
    }
}

fn start(socket: UnixStream, shared: &Arc<Shared>) {
    if socket.set_nonblocking(false).is_err() {
        return;
    }
    let Ok(refused) = socket.try_clone() else {
        return;
    };
    let Some(seat) = shared.seat(socket) else {
        refuse(&refused);
        return;
    };
    drop(refused);
    let for_thread = Arc::clone(shared);
    let leaving = Leaving(Arc::clone(shared), seat);
    let body = move || {
        if let Err(e) = connection::run(&for_thread, &leaving.1) {
            tracing::debug!("a connection of a reader: {e}");
        }
    };
    let thread = std::thread::Builder::new().name("pvblk-web-1".into());
    if let Err(e) = thread.spawn(body) {
        tracing::warn!("a reader is let go: the system refuses a thread for it: {e}");
    }
}

/// Takes the seat away also when its thread ends early, or never begins.
struct Leaving(Arc<Shared>, Arc<Seat>);

impl Drop for Leaving {
    fn drop(&mut self) {
        let _ = self.1.socket.shutdown(Shutdown::Both);
        self.0.leave(&self.1);
    }
}

/// Tells a reader that there are too many, unless it would have to be waited for.
fn refuse(socket: &UnixStream) {
    use io::Write;
    let text = "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: text/plain\r\nContent-Length: 34\r\nConnection: close\r\n\r\n\
                too many readers are at work here\n";
    let _ = socket.set_nonblocking(true);
    let mut socket = socket;
    let _ = socket.write_all(text.as_bytes());
    let _ = socket.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connection_that_rested_longest_makes_room() {
        let begin = Instant::now();
        let seat = |rests: Option<u64>| {
            let (socket, _) = UnixStream::pair().unwrap();
            let rests = rests.map(|s| begin + Duration::from_secs(s));
            Arc::new(Seat {
                socket,
                rests: Mutex::new(rests),
            })
        };
        let seats = [seat(None), seat(Some(2)), seat(Some(1)), seat(Some(3))];
        assert!(rests_longest(&seats).is_some_and(|s| Arc::ptr_eq(s, &seats[2])));
        seats[2].works();
        assert!(rests_longest(&seats).is_some_and(|s| Arc::ptr_eq(s, &seats[1])));
        seats[2].rests();
        assert!(rests_longest(&seats[..1]).is_none());
        assert!(rests_longest(&[]).is_none());
    }
}
