//! Clients that hold memory here and don't go on.

use super::{Expect, NbdSource};
use pvblk_backend::SourceEnd;
use std::time::Instant;

/// Watches a number that grows as long as the client goes on.
#[derive(Debug, Default)]
pub(super) struct Stall {
    seen: u64,
    since: Option<Instant>,
}

impl Stall {
    /// To be called before each sleep, with whether the client's progress is waited for. Returns since when there has been none.
    fn look(&mut self, is_awaited: bool, progress: u64) -> Option<Instant> {
        if !is_awaited {
            self.since = None;
        } else if self.since.is_none() || progress != self.seen {
            self.seen = progress;
            self.since = Some(Instant::now());
        }
        self.since
    }
}

impl NbdSource {
    /// When the client is let go unless it goes on: it has to take replies, or to send the rest of a write's data.
    pub(super) fn stalled_at(&mut self) -> Option<Instant> {
        let replies = self.outbox.len() > 0 && self.full;
        // While all requests are at the device nothing is read, and the client isn't to blame.
        let payload = matches!(self.expect, Expect::Payload { .. })
            && self.in_flight < self.depth
            && !self.leaving;
        let replies = self.unread.look(replies, self.outbox.passed());
        let payload = self.unsent.look(payload, self.received);
        let since = replies.into_iter().chain(payload).min()?;
        Some(since + self.stall_timeout)
    }

    /// True when it is time to look whether the client has gone on.
    pub(super) fn is_late(&self) -> bool {
        self.let_go_at.is_some_and(|at| Instant::now() >= at)
    }

    /// The end, if the client's time is over.
    pub(super) fn check_stall(&mut self) -> Result<(), SourceEnd> {
        self.let_go_at = self.stalled_at();
        if self.let_go_at.is_none_or(|at| Instant::now() < at) {
            return Ok(());
        }
        let what = match self.unread.since {
            Some(_) => "took none of its replies",
            None => "sent nothing more of a write's data",
        };
        let seconds = self.stall_timeout.as_secs_f64();
        self.bury();
        Err(self.broken(format_args!("the client {what} for {seconds} s: let go")))
    }
}
