//! Clients that hold memory here and don't go on.

use std::time::{Duration, Instant};

/// Watches a number that grows as long as the client goes on.
#[derive(Debug, Default)]
struct Progress {
    seen: u64,
    since: Option<Instant>,
}

impl Progress {
    /// Looks at the number, or at `None` while nothing is awaited of the client. Returns since when the client hasn't gone on.
    fn look(&mut self, awaited: Option<u64>) -> Option<Instant> {
        match awaited {
            None => self.since = None,
            Some(now) if self.since.is_none() || now != self.seen => {
                self.seen = now;
                self.since = Some(Instant::now());
            }
            Some(_) => {}
        }
        self.since
    }
}

/// Bytes that the client has taken or sent so far, where it has to take or send more; `None` where it hasn't.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Awaited {
    /// Bytes of replies that it took.
    pub replies: Option<u64>,
    /// Bytes that it sent, of which the rest of a write's data is missing.
    pub payload: Option<u64>,
}

/// The time for which the client may stand still.
#[derive(Debug)]
pub(super) struct Patience {
    limit: Duration,
    replies: Progress,
    payload: Progress,
    /// When it is let go, as of the last look.
    ends: Option<Instant>,
}

impl Patience {
    pub(super) fn new(limit: Duration) -> Patience {
        Patience {
            limit,
            replies: Progress::default(),
            payload: Progress::default(),
            ends: None,
        }
    }

    /// To be called before each sleep. Returns when the client is let go unless it goes on.
    pub(super) fn look(&mut self, awaited: Awaited) -> Option<Instant> {
        let replies = self.replies.look(awaited.replies);
        let payload = self.payload.look(awaited.payload);
        let since = replies.into_iter().chain(payload).min();
        self.ends = since.map(|s| s + self.limit);
        self.ends
    }

    /// True when it is time to look whether the client has gone on.
    pub(super) fn is_late(&self) -> bool {
        self.ends.is_some_and(|at| Instant::now() >= at)
    }

    /// Looks once more; if the client's time is over, says in words why it is let go.
    pub(super) fn verdict(&mut self, awaited: Awaited) -> Option<String> {
        let ends = self.look(awaited)?;
        if Instant::now() < ends {
            return None;
        }
        let fault = match self.replies.since {
            Some(_) => "took none of its replies",
            None => "sent nothing more of a write's data",
        };
        let seconds = self.limit.as_secs_f64();
        Some(format!("the client {fault} for {seconds} s: let go"))
    }
}
