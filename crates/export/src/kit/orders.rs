//! [`Orders`]: what the owner of a server has its control thread do.

use super::control::ControlThread;
use parking_lot::Mutex;
use pvblk_block::{Error, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

/// A control thread never waits, so it takes an order soon; later than this, it is gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// Orders that wait for the control thread, each with its giver, who waits for the answer: there are no more of them than threads that wait.
pub(crate) struct Orders<T>(Mutex<Vec<Order<T>>>);

/// One order, and the place where its giver waits for the answer.
pub(crate) struct Order<T> {
    pub what: T,
    answer: SyncSender<Result<(), Error>>,
}

impl<T> Order<T> {
    pub fn answer(self, result: Result<(), Error>) {
        // Its giver may have given up.
        let _ = self.answer.send(result);
    }

    /// Splits it into what is to be done and where to tell.
    pub fn split(self) -> (T, Order<()>) {
        let Order { what, answer } = self;
        (what, Order { what: (), answer })
    }
}

impl<T> Default for Orders<T> {
    fn default() -> Orders<T> {
        Orders(Mutex::default())
    }
}

impl<T> Orders<T> {
    /// Has the control thread do this, and waits until it has.
    pub fn give(self: &Arc<Orders<T>>, thread: &ControlThread, what: T) -> Result<(), Error> {
        let (answer, answered) = sync_channel(1);
        self.0.lock().push(Order { what, answer });
        thread.wake();
        answered.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            Err(Error::new(
                ErrorKind::Disconnected,
                "the server is stopping",
            ))
        })
    }

    /// Takes all, on the control thread.
    pub fn take(&self) -> Vec<Order<T>> {
        std::mem::take(&mut *self.0.lock())
    }
}
