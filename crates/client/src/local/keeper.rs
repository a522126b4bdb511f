//! Keeps a front end connected: follows its link, and reconnects after its server went away.

use super::link::{FrontLink, LinkEvent};
use crate::rings::Frontend;
use parking_lot::Mutex;
use pvblk_block::Error;
use pvblk_sys::{EventFd, Poller};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pauses between attempts to reconnect: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Longest time for one attempt: a server that hangs in its handshake would use up the rest.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Change of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeeperEvent {
    /// The server is gone, or asks to end; requests wait for its return.
    Lost {
        /// Reason for logs.
        reason: String,
    },
    /// The front end is connected again; requests go on.
    Back {
        /// Time during which requests waited.
        after: Duration,
    },
    /// The server asks to end, and reconnecting is off: finish all requests, then call [`Keeper::stop`].
    Closing {
        /// The server's reason.
        reason: String,
    },
    /// The device was given up; requests fail. The last event.
    Ended {
        /// Reason for logs.
        reason: String,
    },
}

type Tell = Box<dyn Fn(KeeperEvent) + Send>;

/// The control thread of one front end.
pub struct Keeper {
    stop: Arc<EventFd>,
    thread: Option<std::thread::JoinHandle<()>>,
    ended: Arc<Mutex<Option<String>>>,
    gone: Arc<AtomicBool>,
}

impl Keeper {
    /// Follows `link` of `device`. When the server is gone or closes, requests wait up to `patience` for a new
    /// server; with `None` they fail at once. `tell` is called on the control thread.
    pub fn start(
        link: FrontLink,
        device: Arc<Frontend>,
        patience: Option<Duration>,
        tell: impl Fn(KeeperEvent) + Send + 'static,
    ) -> io::Result<Keeper> {
        let stop = Arc::new(EventFd::new()?);
        let poller = Poller::new()?;
        poller.add(stop.as_fd(), STOP, false)?;
        poller.add(device.trouble_fd(), TROUBLE, false)?;
        poller.add(link.fd(), LINK, false)?;
        device.set_recovery(patience.is_some());
        let (ended, gone) = (Arc::default(), Arc::default());
        let mut control = ReconnectThread {
            link,
            device,
            patience,
            poller,
            stop: Arc::clone(&stop),
            tell: Box::new(tell),
            ended: Arc::clone(&ended),
            gone: Arc::clone(&gone),
        };
        let thread = std::thread::Builder::new()
            .name("pvblk-link".into())
            .spawn(move || control.run())?;
        Ok(Keeper {
            stop,
            thread: Some(thread),
            ended,
            gone,
        })
    }

    /// True while the server is gone: requests in flight get no response, and a flush can't succeed.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Ends the connection in order, after all requests have completed. Returns the reason if the server ended it
    /// first.
    pub fn stop(mut self) -> Option<String> {
        self.finish();
        self.ended.lock().take()
    }

    fn finish(&mut self) {
        self.stop.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.finish();
    }
}

const LINK: u64 = 0;
const STOP: u64 = 1;
const TROUBLE: u64 = 2;

/// Reason for the end of attempts to reconnect.
enum GivenUp {
    /// Time is up; the error of the last attempt.
    Late(Error),
    Stopped,
}

struct ReconnectThread {
    link: FrontLink,
    device: Arc<Frontend>,
    patience: Option<Duration>,
    poller: Poller,
    stop: Arc<EventFd>,
    tell: Tell,
    ended: Arc<Mutex<Option<String>>>,
    gone: Arc<AtomicBool>,
}

impl ReconnectThread {
    fn run(&mut self) {
        let mut events = Vec::new();
        loop {
            events.clear();
            if let Err(e) = self.poller.wait(&mut events, None) {
                return self.give_up(&format!("waiting for the server: {e}"));
            }
            if events.iter().any(|e| e.token == STOP) {
                break;
            }
            if !self.look() {
                return;
            }
        }
        if let Err(e) = self.link.close() {
            tracing::warn!("closing the disk: {e}");
        }
    }

    /// Handles events of the server and the rings. False after the last one.
    fn look(&mut self) -> bool {
        for event in self.link.step() {
            match event {
                LinkEvent::Resized { sectors } => self.device.resize(sectors),
                LinkEvent::Closing { reason } => {
                    let reason = reason.unwrap_or_else(|| "the server closes the disk".into());
                    if self.patience.is_some() {
                        return self.lost(&reason);
                    }
                    self.ended.lock().get_or_insert(reason.clone());
                    (self.tell)(KeeperEvent::Closing { reason });
                }
                LinkEvent::Closed => return self.lost("the server closed the disk"),
                LinkEvent::Gone { reason } => return self.lost(&reason),
            }
        }
        match self.device.take_trouble() {
            Some(why) => self.lost(&format!("a ring broke: {why}")),
            None => true,
        }
    }

    fn give_up(&mut self, reason: &str) {
        self.gone.store(true, Ordering::Release);
        self.device.disconnect(reason);
        let reason = self.ended.lock().get_or_insert(reason.to_owned()).clone();
        (self.tell)(KeeperEvent::Ended { reason });
    }

    /// Handles the loss of the connection. True if there is a new one.
    fn lost(&mut self, reason: &str) -> bool {
        let begin = Instant::now();
        let Some(patience) = self.patience else {
            self.give_up(reason);
            return false;
        };
        self.gone.store(true, Ordering::Release);
        self.device.suspend();
        (self.tell)(KeeperEvent::Lost {
            reason: reason.to_owned(),
        });
        if let Err(e) = self.poller.remove(self.link.fd()) {
            self.give_up(&format!("waiting for the server: {e}"));
            return false;
        }
        // A server that closes in order waits for our agreement; one that is gone doesn't see it.
        if !self.link.has_ended() {
            let _ = self.link.close();
        }
        match self.reconnect(begin + patience) {
            Ok(()) => {
                self.gone.store(false, Ordering::Release);
                let after = begin.elapsed();
                (self.tell)(KeeperEvent::Back { after });
                true
            }
            Err(GivenUp::Late(last)) => {
                let seconds = patience.as_secs_f64();
                self.give_up(&format!("{reason}; not back after {seconds} s: {last}"));
                false
            }
            Err(GivenUp::Stopped) => {
                self.give_up(&format!("{reason}; stopped before the server was back"));
                false
            }
        }
    }

    fn reconnect(&mut self, deadline: Instant) -> Result<(), GivenUp> {
        let mut pause = FIRST_PAUSE;
        let mut told = String::new();
        loop {
            let now = Instant::now();
            let left = deadline.saturating_duration_since(now);
            let result = self.link.reconnect(ATTEMPT.min(left)).and_then(|parts| {
                self.device.reconnect(parts)?;
                self.poller
                    .add(self.link.fd(), LINK, false)
                    .map_err(|e| Error::os("waiting for the server", e))
            });
            let Err(e) = result else { return Ok(()) };
            if told != e.to_string() {
                told = e.to_string();
                tracing::info!("not connected yet: {told}");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GivenUp::Late(e));
            }
            if self.sleep(pause.min(left)) {
                return Err(GivenUp::Stopped);
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Sleeps; true if [`Keeper::stop`] was called.
    fn sleep(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut events = Vec::new();
        let only_stop = Poller::new().and_then(|p| {
            p.add(self.stop.as_fd(), STOP, false)?;
            p.wait(&mut events, Some(time))
        });
        if only_stop.is_err() {
            std::thread::sleep(end.saturating_duration_since(Instant::now()));
        }
        !events.is_empty()
    }
}
