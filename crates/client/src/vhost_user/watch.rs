//! A thread that notices that the server is gone while all queues sleep, and looks for the next one.

use super::Shared;
use super::resume::Kept;
use pvblk_block::Error;
use pvblk_sys::{EventFd, Poller};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Period in which the next server is looked for.
const PAUSE: Duration = Duration::from_millis(20);

/// A thread that waits for the socket to hang up, until it is dropped.
pub(super) struct Watch {
    bell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

/// The thread's poller, and its events, kept for reuse.
struct Waiter {
    poller: Poller,
    events: Vec<pvblk_sys::PollEvent>,
}

impl Watch {
    pub fn start(socket: UnixStream, shared: &Arc<Shared>) -> Result<Watch, Error> {
        let os = |e| Error::os("watching the server's socket", e);
        let bell = Arc::new(EventFd::new().map_err(os)?);
        let poller = Poller::new().map_err(os)?;
        poller.add(bell.as_fd(), BELL, false).map_err(os)?;
        add(&poller, &socket).map_err(os)?;
        let shared = Arc::clone(shared);
        let mut waiter = Waiter {
            poller,
            events: Vec::new(),
        };
        let body = move || {
            let mut socket = socket;
            while waiter.hung_up(None) {
                // Others have the socket too, so it wouldn't leave the set by itself.
                let _ = waiter.poller.remove(socket.as_fd());
                let next = match &shared.kept {
                    Some(kept) => waiter.next_server(&shared, kept),
                    None => Err("the server is gone".to_owned()),
                };
                match next {
                    Ok(Some(next)) => socket = next,
                    Ok(None) => return,
                    Err(why) => return shared.fail(&why),
                }
            }
        };
        let thread = std::thread::Builder::new().name("pvblk-vhost".into());
        Ok(Watch {
            bell,
            thread: Some(thread.spawn(body).map_err(os)?),
        })
    }
}

const BELL: u64 = 0;
const SOCKET: u64 = 1;

fn add(poller: &Poller, socket: &UnixStream) -> std::io::Result<()> {
    poller.add(socket.as_fd(), SOCKET, false)?;
    // Answers are read by who asked; a hang-up is reported whatever is waited for.
    poller.set(socket.as_fd(), SOCKET, false, false)
}

impl Waiter {
    /// Waits until the socket hangs up; false when the client goes away first, or after `time`.
    fn hung_up(&mut self, time: Option<Duration>) -> bool {
        let deadline = time.map(|t| Instant::now() + t);
        self.events.clear();
        while self.events.is_empty() {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) || self.poller.wait(&mut self.events, left).is_err() {
                return false;
            }
        }
        self.events.iter().any(|e| e.token == SOCKET)
    }

    /// The socket of the next server; `None` when the client goes away, an error when nobody comes in time.
    fn next_server(&mut self, shared: &Shared, kept: &Kept) -> Result<Option<UnixStream>, String> {
        shared.front.lock().hang_up();
        let deadline = Instant::now() + kept.config.patience.unwrap_or_default();
        loop {
            let why = match shared.resume(kept) {
                Ok(socket) => {
                    let added = add(&self.poller, &socket).map_err(|e| e.to_string());
                    return added.map(|()| Some(socket));
                }
                Err(why) => why,
            };
            if Instant::now() >= deadline {
                return Err(format!("the server is gone, and no other came: {why}"));
            }
            // Nothing but the bell can ring here.
            self.hung_up(Some(PAUSE));
            if self.events.iter().any(|e| e.token == BELL) {
                return Ok(None);
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.bell.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
