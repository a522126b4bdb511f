//! Accounting of a submitter's time.

use super::hop::{Hop, Mark};

/// One submitter on one device.
///
/// A moment with several requests in flight belongs to each of them in equal parts, so the parts add up to the
/// elapsed time. `shared` is a clock that runs slower the more requests are in flight: a hop's part is the difference
/// of its values at both ends.
#[derive(Clone, Debug, Default)]
pub(super) struct Submitter {
    pub begin_ns: Option<u64>,
    pub now_ns: u64,
    shared: f64,
    in_flight: u64,
    pub idle_ns: f64,
    /// Time of a completion after which no request has begun yet.
    pub completed_ns: Option<u64>,
    pub shares_ns: [f64; Hop::ALL.len()],
    pub other_ns: f64,
    pub requests: u64,
}

impl Submitter {
    /// Takes the sums since the last call; requests in flight stay.
    pub fn take(&mut self) -> Submitter {
        let now = self.clone();
        self.begin_ns = self.begin_ns.map(|_| self.now_ns);
        self.idle_ns = 0.0;
        self.shares_ns = Default::default();
        self.other_ns = 0.0;
        self.requests = 0;
        now
    }

    /// Advances to `ns`.
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

    /// Begins a request; returns the moment, and, for the first request after a completion, the time since it.
    pub fn begin(&mut self, ns: u64) -> (Mark, Option<u64>) {
        let mark = self.mark(ns);
        self.in_flight += 1;
        self.requests += 1;
        let gap = self.completed_ns.take().map(|c| ns.saturating_sub(c));
        (mark, gap)
    }

    /// Begins another part of a request that was split.
    pub fn also(&mut self, ns: u64) -> Mark {
        let mark = self.mark(ns);
        self.in_flight += 1;
        mark
    }

    /// Takes back the beginning of a request that never arrived.
    pub fn give_up(&mut self, ns: u64) {
        self.mark(ns);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Ends a request.
    pub fn end(&mut self, ns: u64) -> Mark {
        let mark = self.mark(ns);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.completed_ns = Some(ns);
        mark
    }
}
