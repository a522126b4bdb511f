//! How requests come back from the disk's threads to the queue that sent them.

use parking_lot::Mutex;
use pvblk_block::Completion;
use pvblk_sys::EventFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// One queue's finished requests. Each request that is away holds a reference.
pub(super) struct Mailbox {
    /// A look without the lock: something is in `done`.
    any: AtomicBool,
    closed: AtomicBool,
    inner: Mutex<Inner>,
    /// `None` if the process has no descriptor left for it; then the queue looks from time to time.
    bell: Option<EventFd>,
}

#[derive(Default)]
struct Inner {
    done: Vec<Completion>,
    /// The queue sleeps, or is about to.
    waits: bool,
    rung: bool,
}

impl Mailbox {
    pub(super) fn new() -> Mailbox {
        Mailbox {
            any: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            inner: Mutex::default(),
            bell: EventFd::new().ok(),
        }
    }

    /// A thread is done with a request.
    pub(super) fn deliver(&self, completion: Completion) {
        let mut inner = self.inner.lock();
        inner.done.push(completion);
        self.any.store(true, Ordering::Release);
        if std::mem::take(&mut inner.waits) {
            inner.rung = true;
            // Under the lock, so that whoever takes what is in there finds the bell rung, and clears it.
            self.bell.iter().for_each(EventFd::notify);
        }
    }

    /// Moves what has come to `out`; returns how much.
    #[inline]
    pub(super) fn take(&self, out: &mut Vec<Completion>) -> usize {
        if !self.any.load(Ordering::Acquire) {
            return 0;
        }
        let mut inner = self.inner.lock();
        self.any.store(false, Ordering::Relaxed);
        let count = inner.done.len();
        out.append(&mut inner.done);
        inner.waits = false;
        if std::mem::take(&mut inner.rung) {
            self.bell.iter().for_each(|bell| _ = bell.drain());
        }
        count
    }

    /// Asks for the bell. True if there is something to take now.
    pub(super) fn arm(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.waits = inner.done.is_empty();
        !inner.waits
    }

    pub(super) fn bell(&self) -> Option<&EventFd> {
        self.bell.as_ref()
    }

    pub(super) fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_ref().map(AsFd::as_fd)
    }

    /// The queue is gone: requests that no thread has begun are not begun any more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.inner.lock().done.clear();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}
