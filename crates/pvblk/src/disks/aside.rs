//! Jobs on threads of their own, for askers that don't wait for ever.

use super::{Refused, Why};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// A deadline, and the time that an asker gave from the beginning, for messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    patience: Duration,
}

impl Deadline {
    /// In `patience` from now.
    pub fn after(patience: Duration) -> Deadline {
        Deadline {
            at: Instant::now() + patience,
            patience,
        }
    }

    pub fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// The time that the asker gave, in seconds.
    pub fn secs(&self) -> u64 {
        self.patience.as_secs()
    }
}

/// The answer to something that goes on elsewhere.
pub(super) struct Answer<T>(Receiver<T>);

/// An answer that hasn't come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// It may come later.
    Late,
    /// It never will.
    Never,
}

/// The two ends of an answer.
pub(super) fn answer<T>() -> (SyncSender<T>, Answer<T>) {
    let (tell, told) = sync_channel(1);
    (tell, Answer(told))
}

impl<T> Answer<T> {
    /// The answer, if it comes until the deadline. May be called again after [`NoAnswer::Late`].
    pub fn until(&self, deadline: &Deadline) -> Result<T, NoAnswer> {
        self.0.recv_timeout(deadline.left()).map_err(|e| match e {
            RecvTimeoutError::Timeout => NoAnswer::Late,
            RecvTimeoutError::Disconnected => NoAnswer::Never,
        })
    }

    /// The answer, if it is there already.
    pub fn now(&self) -> Option<T> {
        self.0.try_recv().ok()
    }

    /// The answer of something that is about to end; `None`: there will be none.
    pub fn at_last(&self) -> Option<T> {
        self.0.recv().ok()
    }
}

/// Does something on a thread of its own, which may take longer than its asker waits. `what` begins the error.
pub(super) fn within<T: Send + 'static>(
    patience: Duration,
    what: &str,
    job: impl FnOnce() -> Result<T, Refused> + Send + 'static,
) -> Result<T, Refused> {
    let deadline = Deadline::after(patience);
    let (tell, told) = answer();
    let thread = std::thread::Builder::new().name("pvblk-export".into());
    let spawned = thread.spawn(move || {
        let _ = tell.send(job());
    });
    if let Err(e) = spawned {
        let text = format!("{what}: starting a thread for it: {e}");
        return Err(Refused::new(Why::Failed, text));
    }
    told.until(&deadline).unwrap_or_else(|no| {
        Err(match no {
            NoAnswer::Late => {
                let secs = deadline.secs();
                let text =
                    format!("{what} takes longer than {secs} s: it goes on, see `pvblk disk list`");
                Refused::new(Why::Late, text)
            }
            NoAnswer::Never => Refused::new(Why::Failed, format!("{what}: its thread panicked")),
        })
    })
}
