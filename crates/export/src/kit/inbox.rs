//! Events that other threads report to a control thread.

use parking_lot::Mutex;
use pvblk_sys::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// An event of one front end. A generation tells one use of the disk, or one start of a queue, from the next.
#[derive(Debug)]
pub(crate) enum Event {
    /// A queue ended: by itself if there is a reason, else because it was told to.
    QueueEnded {
        queue: u16,
        generation: u64,
        reason: Option<String>,
    },
    /// All queues of a front end that left have ended.
    Left { generation: u64 },
    /// The disk's fence is open.
    FenceOpen,
    /// The device's capacity changed.
    Resized,
    /// The device is gone.
    DeviceGone,
    /// The disk was taken out of service: its front ends have to let go of it.
    Removed,
    /// A thread of the server's own has ended.
    ThreadEnded,
}

/// Events in order, with the number of their front end, and an eventfd that wakes the control thread.
///
/// Bounded by construction: an event of a kind comes once for each queue, front end, wait or thread that there is.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    wake: EventFd,
}

#[derive(Debug, Default)]
struct State {
    events: Vec<(u64, Event)>,
    stop: bool,
}

impl Inbox {
    pub fn new() -> io::Result<Inbox> {
        Ok(Inbox {
            state: Mutex::default(),
            wake: EventFd::new()?,
        })
    }

    pub fn put(&self, id: u64, event: Event) {
        self.state.lock().events.push((id, event));
        self.wake.notify();
    }

    /// Has the control thread take a turn.
    pub fn wake(&self) {
        self.wake.notify();
    }

    /// Asks the control thread to stop.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.wake.notify();
    }

    /// Takes the events that are there, and whether a stop was asked for since the last time.
    pub fn take(&self) -> (Vec<(u64, Event)>, bool) {
        self.wake.drain();
        let State { events, stop } = std::mem::take(&mut *self.state.lock());
        (events, stop)
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
