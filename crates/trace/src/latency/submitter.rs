//! Where a submitter's time goes.

use super::hop::{Hop, Mark};

/// One submitter on one device.
///
/// A moment with several requests in flight belongs to each of them in equal parts, so the parts add up to the time
/// that passed. `shared` is a clock that runs the slower the more are in flight: a hop's part is the difference of
/// what it shows at both ends.
#[derive(Clone, Debug, Default)]
pub(super) struct Submitter {
    pub begin_ns: Option<u64>,
    pub now_ns: u64,
    shared: f64,
    in_flight: u64,
    pub idle_ns: f64,
    /// A completion that no request has followed yet.
    pub completed_ns: Option<u64>,
    pub shares_ns: [f64; Hop::ALL.len()],
    pub other_ns: f64,
    pub requests: u64,
}

impl Submitter {
    /// What was added up since the last time; what is in flight stays.
    pub fn take(&mut self) -> Submitter {
        let now = self.clone();
        self.begin_ns = self.begin_ns.map(|_| self.now_ns);
        self.idle_ns = 0.0;
        self.shares_ns = Default::default();
        self.other_ns = 0.0;
        self.requests = 0;
        now
    }

    /// Goes on to `ns`.
    pub fn mark(&mut self, ns: u64) -> Mark {
        if self.begin_ns.is_none() {
            self.begin_ns = Some(ns);
            self.now_ns = ns;
        }
        let passed = ns.saturating_sub(self.now_ns) as f64;
        match self.in_flight {
            0 => self.idle_ns += passed,
            n => self.shared += passed / n as f64,
        }
        self.now_ns = self.now_ns.max(ns);
        Mark {
            ns,
            shared: self.shared,
        }
    }

    /// A request begins; returns the moment, and the time since the completion before it, if it is the first since.
    pub fn begin(&mut self, ns: u64) -> (Mark, Option<u64>) {
        let mark = self.mark(ns);
        self.in_flight += 1;
        self.requests += 1;
        let gap = self.completed_ns.take().map(|c| ns.saturating_sub(c));
        (mark, gap)
    }

    /// Another part of a request that was split.
    pub fn also(&mut self, ns: u64) -> Mark {
        let mark = self.mark(ns);
        self.in_flight += 1;
        mark
    }

    /// A request turns out never to have begun.
    pub fn give_up(&mut self, ns: u64) {
        self.mark(ns);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// A request ends.
    pub fn end(&mut self, ns: u64) -> Mark {
        let mark = self.mark(ns);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.completed_ns = Some(ns);
        mark
    }
}
