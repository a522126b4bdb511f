//! [`EventLog`]: the last events of the process, and their readers.

use super::flood::Flood;
use super::peer::Roll;
use super::{Event, Kind, Severity};
use parking_lot::{Condvar, Mutex};
use pvblk_block::{Clock, SystemClock};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Number of events that are kept.
pub(super) const KEPT: usize = 1024;

/// The last events of the process, numbered from 1. [`EventLog::put`] never waits for a reader.
pub struct EventLog {
    /// Tells this log from that of another run of the server.
    run: String,
    clock: Arc<dyn Clock>,
    state: Mutex<LogState>,
    /// Signalled when there are new events, and at the end.
    came: Condvar,
    /// Peers that use disks now.
    pub(super) present: Roll,
}

#[derive(Default)]
struct LogState {
    ring: VecDeque<Arc<Event>>,
    /// Number of the last event; 0: there was none.
    last: u64,
    flood: Flood,
    /// Events by kind, in the order of [`Kind::ALL`], those included that were left out.
    counts: [u64; Kind::ALL.len()],
    closed: bool,
}

/// The first event that a reader gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The oldest one that is kept.
    Oldest,
    /// The next one that happens.
    Next,
    /// The one after this number.
    After(u64),
}

impl Default for EventLog {
    fn default() -> EventLog {
        EventLog::with_clock(Arc::new(SystemClock))
    }
}

impl EventLog {
    /// An empty log, whose limits go by this clock.
    pub fn with_clock(clock: Arc<dyn Clock>) -> EventLog {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        EventLog {
            run: format!("{:x}-{:x}", since.as_nanos(), std::process::id()),
            clock,
            state: Mutex::default(),
            came: Condvar::new(),
            present: Roll::default(),
        }
    }

    /// A word that is another one in each run of the server: numbers of events begin anew then.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// Adds an event, unless there are too many of its kind and disk: then the number of those and the last one
    /// are told later. Takes a short lock; may be called on any thread.
    pub fn put(&self, mut event: Event) {
        event.time = SystemTime::now();
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.counts[event.kind as usize] += 1;
        let admitted = state.flood.admit(event, now);
        let told = admitted.map(|event| state.publish(event));
        drop(state);
        self.told(told.as_slice());
    }

    /// Tells the last events that were left out, where there is room again. To be called once a second or so. True if events may be left out still.
    pub fn tick(&self) -> bool {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let due = state.flood.due(now);
        let told: Vec<Arc<Event>> = due.into_iter().map(|e| state.publish(e)).collect();
        let limits = !state.flood.is_empty();
        drop(state);
        self.told(&told);
        limits
    }

    /// Wakes the readers of these, and logs those that nothing else logs.
    fn told(&self, events: &[Arc<Event>]) {
        if events.is_empty() {
            return;
        }
        self.came.notify_all();
        for event in events.iter().filter(|e| e.kind.is_logged()) {
            let (kind, disk) = (event.kind.name(), event.disk.as_deref());
            let disk = disk.unwrap_or_default();
            match event.severity() {
                Severity::Error => tracing::error!(event = kind, disk, "{event}"),
                Severity::Warning => tracing::warn!(event = kind, disk, "{event}"),
                Severity::Info => tracing::info!(event = kind, disk, "{event}"),
            }
        }
    }

    /// The events that are kept of this disk, or of all, oldest first.
    pub fn kept(&self, disk: Option<&str>) -> Vec<Arc<Event>> {
        let state = self.state.lock();
        let of_disk = |e: &&Arc<Event>| disk.is_none() || e.disk.as_deref() == disk;
        state.ring.iter().filter(of_disk).cloned().collect()
    }

    /// Number of events of each kind since the start, those included that were left out of the log.
    pub fn counts(&self) -> Vec<(Kind, u64)> {
        let counts = self.state.lock().counts;
        Kind::ALL.iter().copied().zip(counts).collect()
    }

    /// Number of the last event; 0: there was none.
    pub fn last(&self) -> u64 {
        self.state.lock().last
    }

    #[cfg(test)]
    pub(super) fn buckets(&self) -> usize {
        self.state.lock().flood.len()
    }

    /// A reader with a position of its own. The log keeps no record of it.
    pub fn follow(self: &Arc<EventLog>, start: Start) -> Follower {
        let state = self.state.lock();
        let after = match start {
            Start::Oldest => state.last - state.ring.len() as u64,
            Start::Next => state.last,
            // One of an earlier process, perhaps.
            Start::After(number) => number.min(state.last),
        };
        Follower {
            log: Arc::clone(self),
            after,
        }
    }

    /// Lets all readers come to their end once they have read what is there. Events that are put later are kept,
    /// and wake nobody.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.came.notify_all();
    }
}

impl LogState {
    /// Adds the event to the ring.
    fn publish(&mut self, mut event: Event) -> Arc<Event> {
        self.last += 1;
        event.number = self.last;
        let event = Arc::new(event);
        if self.ring.len() == KEPT {
            self.ring.pop_front();
        }
        self.ring.push_back(Arc::clone(&event));
        event
    }
}

/// A reader of an [`EventLog`].
pub struct Follower {
    log: Arc<EventLog>,
    /// Number of the last event that it got or missed.
    after: u64,
}

impl Follower {
    /// The next event; waits for it up to `patience`. `None`: there is none yet, or [`Follower::is_over`]. If this reader
    /// was too slow, an event of the kind [`Kind::EventsLost`] stands for those that it missed.
    pub fn next(&mut self, patience: Duration) -> Option<Arc<Event>> {
        let deadline = Instant::now() + patience;
        let mut state = self.log.state.lock();
        while state.last == self.after {
            if state.closed || self.log.came.wait_until(&mut state, deadline).timed_out() {
                return None;
            }
        }
        let first = state.last - state.ring.len() as u64 + 1;
        if self.after + 1 < first {
            let lost = first - self.after - 1;
            self.after = first - 1;
            let text = format!("{lost} events were lost: this reader was too slow");
            let mut event = Event::new(Kind::EventsLost, text).with("events", lost);
            event.number = self.after;
            event.time = state.ring.front().map_or(SystemTime::now(), |e| e.time);
            return Some(Arc::new(event));
        }
        let index = usize::try_from(self.after + 1 - first).ok()?;
        self.after += 1;
        state.ring.get(index).cloned()
    }

    /// True if the log is closed and everything has been read.
    pub fn is_over(&self) -> bool {
        let state = self.log.state.lock();
        state.closed && state.last == self.after
    }
}
