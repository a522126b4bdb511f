//! [`Control`]: the loop of a control thread, and [`ControlThread`]: its handle.

use super::inbox::{Event, Inbox};
use pvblk_backend::Pulse;
use pvblk_block::Error;
use pvblk_sys::{PollEvent, Poller};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A source of the present time. Tests bring their own.
pub(crate) type Clock = Box<dyn Fn() -> Instant + Send>;

/// Pause of the loop when it can't wait for its descriptors, so that it doesn't spin.
const REST: Duration = Duration::from_millis(500);

const INBOX: u64 = u64::MAX;

/// The part of a server that a protocol implements. The loop calls it; it must not wait.
pub(crate) trait Server: Send + 'static {
    /// A descriptor that was added to `io` under this token is ready.
    fn ready(&mut self, token: u64, io: &Io);

    /// Another thread tells something about the front end of this number.
    fn event(&mut self, id: u64, event: Event, io: &Io);

    /// When to be called at the latest, though nothing happens.
    fn due(&self) -> Option<Instant>;

    /// Called at the end of each turn, for times that are over; `stopping`: a stop has begun, and its grace may be over.
    fn passed(&mut self, stopping: Option<Stopping>, io: &Io);

    /// Takes no more peers, and asks those that are there to leave.
    fn stop(&mut self, io: &Io) -> Stopping;

    /// True if a stop needn't go on: nobody is left to wait for.
    fn is_over(&self, stopping: Stopping, now: Instant) -> bool;

    /// The stop's time is over: tells who is still there. Their queues own their memory, so it stays until the workers are done with it.
    fn give_up(&mut self);
}

/// A stop that has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopping {
    /// Until when front ends may leave in order.
    pub grace: Instant,
    /// Until when requests in flight may end.
    pub end: Instant,
}

/// Descriptors that the loop waits for, the inbox, and the time, as a server uses them.
pub(crate) struct Io {
    poller: Poller,
    pub inbox: Arc<Inbox>,
    clock: Clock,
}

impl Io {
    fn new(clock: Clock) -> io::Result<Io> {
        let inbox = Arc::new(Inbox::new()?);
        let poller = Poller::new()?;
        poller.add(inbox.as_fd(), INBOX, false)?;
        Ok(Io {
            poller,
            inbox,
            clock,
        })
    }

    pub fn now(&self) -> Instant {
        (self.clock)()
    }

    pub fn clock(&self) -> &dyn Fn() -> Instant {
        &*self.clock
    }

    /// Waits for `fd` to be readable from now on.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.poller.add(fd, token, false)
    }

    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.poller.remove(fd)
    }

    /// Waits for `fd`, or doesn't for now. Only for descriptors that report nothing by themselves, such as listening sockets.
    pub fn set(&self, fd: BorrowedFd<'_>, token: u64, wanted: bool) {
        // It was added before.
        let _ = self.poller.set(fd, token, wanted, false);
    }
}

/// A server and its loop.
pub(crate) struct Control<S> {
    pub server: S,
    pub io: Io,
    stopping: Option<Stopping>,
    /// Kept for reuse.
    events: Vec<PollEvent>,
    pulse: Arc<Pulse>,
}

impl<S: Server> Control<S> {
    /// A loop around the server that `make` makes.
    pub fn new(
        what: &str,
        clock: Clock,
        make: impl FnOnce(&Io) -> Result<S, Error>,
    ) -> Result<Control<S>, Error> {
        let io = Io::new(clock).map_err(|e| Error::os(format!("starting the {what}"), e))?;
        Ok(Control {
            server: make(&io)?,
            io,
            stopping: None,
            events: Vec::new(),
            pulse: Pulse::new(format!("the {what}")),
        })
    }

    /// Runs until a stop that was asked for is over.
    fn run(mut self) {
        loop {
            let now = self.io.now();
            if let Some(stopping) = self.stopping {
                if self.server.is_over(stopping, now) {
                    return;
                }
                if now >= stopping.end {
                    return self.server.give_up();
                }
            }
            let stop = self.stopping.map(|s| match now < s.grace {
                true => s.grace,
                false => s.end,
            });
            let due = self.server.due().into_iter().chain(stop).min();
            self.turn(due.map(|t| t.saturating_duration_since(now)));
        }
    }

    /// Waits up to `timeout`, and does what there is to do then.
    pub fn turn(&mut self, timeout: Option<Duration>) {
        let mut events = std::mem::take(&mut self.events);
        if let Err(e) = self.io.poller.wait(&mut events, timeout) {
            // No peer can cause this.
            tracing::error!("waiting for front ends: {e}");
            std::thread::sleep(REST);
        }
        self.pulse.works();
        for event in events.drain(..).filter(|e| e.token != INBOX) {
            self.server.ready(event.token, &self.io);
        }
        self.events = events;
        let (told, stop) = self.io.inbox.take();
        for (id, event) in told {
            self.server.event(id, event, &self.io);
        }
        if stop && self.stopping.is_none() {
            self.stopping = Some(self.server.stop(&self.io));
        }
        self.server.passed(self.stopping, &self.io);
        self.pulse.waits();
    }
}

/// The thread of a server. Dropping it stops the server.
pub(crate) struct ControlThread {
    inbox: Arc<Inbox>,
    name: &'static str,
    thread: Option<JoinHandle<()>>,
}

impl ControlThread {
    /// Starts a thread of this name with the server that `make` makes; `what` it is, for errors.
    pub fn start<S: Server>(
        name: &'static str,
        what: &str,
        make: impl FnOnce(&Io) -> Result<S, Error>,
    ) -> Result<ControlThread, Error> {
        let control = Control::new(what, Box::new(Instant::now), make)?;
        let inbox = Arc::clone(&control.io.inbox);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || control.run())
            .map_err(|e| Error::os(format!("starting the {what}"), e))?;
        Ok(ControlThread {
            inbox,
            name,
            thread: Some(thread),
        })
    }

    /// Has the server take a turn: there is something to do for it.
    pub fn wake(&self) {
        self.inbox.wake();
    }

    /// Begins the server's stop and doesn't wait for it, so that several servers can stop side by side.
    pub fn begin_stop(&self) {
        self.inbox.stop();
    }

    /// Stops the server, unless that has begun, and returns when its stop is over.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.inbox.stop();
            if thread.join().is_err() {
                tracing::error!("{} panicked", self.name);
            }
        }
    }
}

impl Drop for ControlThread {
    fn drop(&mut self) {
        self.stop();
    }
}
