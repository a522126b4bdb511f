//! [`Fence`]: nobody begins to use a disk while requests of a user who is gone are at work there.

use parking_lot::Mutex;
use std::sync::Arc;

type Waiter = Box<dyn FnOnce() + Send>;

/// A disk's fence, over all exports. A front end that comes back sends again what wasn't answered; an old write that is still at work could
/// land on top of a newer one (docs/decisions/0006-reconnect.md). So who serves front ends closes the fence when one is gone with
/// requests at work, and lets nobody begin while it is closed.
#[derive(Default)]
pub struct Fence(Mutex<State>);

#[derive(Default)]
struct State {
    closed: usize,
    waiters: Vec<Waiter>,
}

/// Keeps a [`Fence`] closed until it is dropped.
pub struct Closed(Arc<Fence>);

impl Fence {
    /// Closes it, until all that was returned by such calls is dropped.
    #[must_use]
    pub fn close(self: &Arc<Fence>) -> Closed {
        self.0.lock().closed += 1;
        Closed(Arc::clone(self))
    }

    /// True if nobody may begin now.
    pub fn is_closed(&self) -> bool {
        self.0.lock().closed > 0
    }

    /// Has `tell` called once when the fence opens, on any thread; false if it is open: then `tell` isn't called.
    /// It may be closed again by the time that `tell` runs.
    pub fn when_open(&self, tell: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.0.lock();
        let closed = state.closed > 0;
        if closed {
            state.waiters.push(Box::new(tell));
        }
        closed
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.closed -= 1;
        if state.closed == 0 {
            let waiters = std::mem::take(&mut state.waiters);
            drop(state);
            waiters.into_iter().for_each(|tell| tell());
        }
    }
}

impl std::fmt::Debug for Fence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let closed = self.0.lock().closed;
        f.debug_struct("Fence").field("closed", &closed).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn it_opens_when_the_last_one_is_gone_and_tells_each_waiter_once() {
        let fence = Arc::new(Fence::default());
        let told = Arc::new(AtomicUsize::new(0));
        let wait = || {
            let told = Arc::clone(&told);
            fence.when_open(move || {
                told.fetch_add(1, Ordering::Relaxed);
            })
        };
        assert!(!wait() && !fence.is_closed());
        let (a, b) = (fence.close(), fence.close());
        assert!(wait() && wait());
        drop(a);
        assert!(fence.is_closed() && told.load(Ordering::Relaxed) == 0);
        drop(b);
        assert!(!fence.is_closed() && told.load(Ordering::Relaxed) == 2);
        drop(fence.close());
        assert_eq!(told.load(Ordering::Relaxed), 2);
    }
}
