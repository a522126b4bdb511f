//! Completions that the disk's threads leave for a queue until it is polled.

use parking_lot::Mutex;
use pvblk_block::Completion;
use pvblk_sys::EventFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// One queue's completions. Each request at a thread holds a reference.
pub(super) struct FileCompletions {
    /// True if `done` has completions; read without the lock.
    any: AtomicBool,
    closed: AtomicBool,
    inner: Mutex<Inner>,
    /// `None` if the process had no descriptor left; then the queue looks from time to time.
    event: Option<EventFd>,
}

#[derive(Default)]
struct Inner {
    done: Vec<Completion>,
    /// The queue sleeps, or is about to.
    waits: bool,
    notified: bool,
}

impl FileCompletions {
    pub(super) fn new() -> FileCompletions {
        FileCompletions {
            any: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            inner: Mutex::default(),
            event: EventFd::new().ok(),
        }
    }

    /// Adds the completion of a request that a thread has done.
    pub(super) fn deliver(&self, completion: Completion) {
        let mut inner = self.inner.lock();
        inner.done.push(completion);
        self.any.store(true, Ordering::Release);
        if std::mem::take(&mut inner.waits) {
            inner.notified = true;
            // This happens under the lock, so that the thread that takes the completions finds the event
            // signalled, and clears it.
            self.event.iter().for_each(EventFd::notify);
        }
    }

    /// Moves the completions to `out`; returns their number.
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
        if std::mem::take(&mut inner.notified) {
            self.event.iter().for_each(|event| _ = event.drain());
        }
        count
    }

    /// Asks for a wake-up. True if there is a completion to take now.
    pub(super) fn arm(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.waits = inner.done.is_empty();
        !inner.waits
    }

    pub(super) fn event(&self) -> Option<&EventFd> {
        self.event.as_ref()
    }

    pub(super) fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.event.as_ref().map(AsFd::as_fd)
    }

    /// Closes the queue: requests that no thread has begun are not begun any more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.inner.lock().done.clear();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}
