//! A lane: a queue of the device below, and what is to go there.
//!
//! Each queue of the cache has one, and there is one for what no request needs. A lane's owner steps it; while the owner has no request in
//! flight, which its user then doesn't poll, anybody does who waits.

use crate::core::Io;
use parking_lot::Mutex;
use pvblk_block::{BlockDevice, Completion, Error, Queue, QueueContext, Readiness, Request};
use pvblk_sys::{EventFd, Poller};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Most requests of one lane at the device.
const DEPTH: u32 = 128;

pub(crate) struct Lane {
    below: Mutex<Below>,
    /// Requests that haven't come back.
    in_flight: AtomicUsize,
    /// Its owner has requests in flight, so it is polled.
    pub busy: AtomicBool,
    /// Its owner armed, and may sleep.
    pub armed: AtomicBool,
    pub letters: Mutex<Letters>,
    /// There are letters, or something has come to be done.
    pub any: AtomicBool,
    pub bell: EventFd,
}

/// What others leave for an owner.
#[derive(Default)]
pub(crate) struct Letters {
    pub ios: Vec<Io>,
    pub done: Vec<Completion>,
}

struct Below {
    queue: Queue,
    backlog: VecDeque<Box<Request>>,
    batch: Vec<Box<Request>>,
}

impl Lane {
    pub fn open(device: &Arc<dyn BlockDevice>, context: &QueueContext) -> Result<Lane, Error> {
        let context = QueueContext {
            depth: DEPTH,
            ..context.clone()
        };
        Ok(Lane {
            below: Mutex::new(Below {
                queue: Queue::open(device, &context)?,
                backlog: VecDeque::new(),
                batch: Vec::new(),
            }),
            in_flight: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            armed: AtomicBool::new(false),
            letters: Mutex::default(),
            any: AtomicBool::new(false),
            bell: EventFd::new().map_err(|e| Error::os("cache: opening a queue", e))?,
        })
    }

    pub fn describe(&self) -> String {
        let set = |flag: &AtomicBool| flag.load(Ordering::SeqCst);
        format!(
            "{} in flight, {} letters{}{}{}",
            self.in_flight.load(Ordering::SeqCst),
            self.letters.lock().ios.len(),
            if set(&self.busy) { ", busy" } else { "" },
            if set(&self.armed) { ", armed" } else { "" },
            if set(&self.any) { ", rung" } else { "" },
        )
    }

    pub fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) == 0
    }

    /// Gives requests to the device, in order.
    pub fn submit(&self, requests: impl Iterator<Item = Box<Request>>) {
        let mut below = self.below.lock();
        let before = below.backlog.len();
        below.backlog.extend(requests);
        let more = below.backlog.len() - before;
        self.in_flight.fetch_add(more, Ordering::SeqCst);
        below.push();
    }

    /// Takes what is done. `wait`: also if somebody else is just doing it.
    pub fn poll(&self, out: &mut Vec<Completion>, wait: bool) {
        if self.is_idle() {
            return;
        }
        let below = match wait {
            true => Some(self.below.lock()),
            false => self.below.try_lock(),
        };
        let Some(mut below) = below else { return };
        let count = below.queue.poll(out);
        self.in_flight.fetch_sub(count, Ordering::SeqCst);
        if count > 0 {
            below.push();
        }
    }

    /// Asks the device to wake whoever waits on the descriptor.
    pub fn arm(&self) -> Readiness {
        self.below.lock().queue.arm()
    }

    /// Takes what is done, and asks to be woken for the rest, in the name of whoever else waits for this lane.
    pub fn poll_for_others(&self, out: &mut Vec<Completion>) {
        self.poll(out, false);
        let mut rounds = 0;
        while !self.is_idle() && rounds < 4 {
            let Some(mut below) = self.below.try_lock() else {
                return;
            };
            if below.queue.arm() != Readiness::Ready {
                return;
            }
            let count = below.queue.poll(out);
            self.in_flight.fetch_sub(count, Ordering::SeqCst);
            below.push();
            rounds += 1;
        }
    }

    pub fn woken(&self) {
        self.below.lock().queue.woken();
    }

    /// Has a poller wait for it too, as soon as there is a descriptor: before the first request there may be none. `waits` says whether it does.
    pub fn wait_in(&self, poller: &Poller, token: u64, waits: &mut bool) -> io::Result<()> {
        if !*waits {
            let added = self
                .with_fd(|fd| poller.add(fd, token, false))
                .transpose()?;
            *waits = added.is_some();
        }
        Ok(())
    }

    /// The opposite.
    pub fn wait_no_more(&self, poller: &Poller, waits: &mut bool) {
        if std::mem::take(waits) {
            let _ = self.with_fd(|fd| poller.remove(fd));
        }
    }

    /// Calls `f` with the descriptor, if there is one.
    pub fn with_fd<T>(&self, f: impl FnOnce(std::os::fd::BorrowedFd<'_>) -> T) -> Option<T> {
        self.below.lock().queue.wait_fd().map(f)
    }

    /// Wakes the owner, if it sleeps.
    pub fn ring(&self) {
        self.any.store(true, Ordering::SeqCst);
        if self.armed.load(Ordering::SeqCst) {
            self.bell.notify();
        }
    }
}

impl Below {
    fn push(&mut self) {
        while self.queue.in_flight() + self.batch.len() < DEPTH as usize
            && let Some(request) = self.backlog.pop_front()
        {
            self.batch.push(request);
        }
        if !self.batch.is_empty() {
            self.queue.submit(&mut self.batch);
        }
    }
}

/// The earlier of two times, where there are any.
pub(crate) fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    a.into_iter().chain(b).min()
}
