//! Distributes events from the rings to subscribers, in order of time.

use crate::recorder::LATEST_NS;
use crate::{Collector, Device, Event, Recorder};
use parking_lot::{Condvar, Mutex};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Interval at which the rings are emptied while all requests are followed.
const PERIOD: Duration = Duration::from_millis(4);
/// Most of these intervals between two times while only some are followed: their rings fill more slowly, and a machine at rest is woken less.
const MOST_PERIODS: u32 = 16;

/// Events that may wait for all subscribers together, each of whom has an even share: 72 MiB.
const MOST_WAITING: usize = 1 << 20;

/// Sorts the events of several queues by time.
#[derive(Debug, Default)]
pub struct Sorter {
    waiting: Vec<Event>,
    /// Time of the last event that was given out.
    given_ns: u64,
    late: u64,
}

impl Sorter {
    /// The vector to which new events are appended, in any order.
    pub fn input(&mut self) -> &mut Vec<Event> {
        &mut self.waiting
    }

    /// Takes out, in order, all events before `until_ns`. An event that arrives after younger ones were given out is
    /// late: it is given out with the next batch, also if `until_ns` is earlier than it was.
    pub fn take_until(&mut self, until_ns: u64) -> Vec<Event> {
        let until_ns = until_ns.max(self.given_ns);
        self.waiting.sort_by_key(|e| (e.time_ns, e.action));
        let count = self.waiting.partition_point(|e| e.time_ns < until_ns);
        let given_ns = self.given_ns;
        let late = self.waiting.iter().take_while(|e| e.time_ns < given_ns);
        self.late += late.count() as u64;
        let rest = self.waiting.split_off(count);
        let taken = std::mem::replace(&mut self.waiting, rest);
        self.given_ns = taken.last().map_or(given_ns, |e| e.time_ns.max(given_ns));
        taken
    }

    /// Number of late events.
    pub fn late(&self) -> u64 {
        self.late
    }
}

/// State shared by a feed and a subscription.
#[derive(Debug)]
struct SubscriptionState {
    /// Time in nanoseconds up to which events are wanted.
    until_ns: AtomicU64,
    /// Number of events that wait for the subscriber.
    waiting: AtomicUsize,
    /// Number of events lost because too many waited.
    lost: AtomicU64,
}

struct Subscriber {
    state: Arc<SubscriptionState>,
    /// It wants one request of so many.
    every: u32,
    to: Sender<Arc<Vec<Event>>>,
    /// Events that were lost and for which the subscriber has got no gap yet: the time of the first, and their number.
    missed: Option<(u64, u64)>,
}

/// A thread that empties a recorder's rings while there are subscribers.
pub struct Feed {
    recorder: Recorder,
    collector: Collector,
    /// The thread runs while there are subscribers.
    subscribers: Mutex<Vec<Subscriber>>,
    /// A subscriber came.
    came: Condvar,
}

impl Feed {
    /// Creates a feed of the events of `recorder`; nothing else may start, stop or drain the recorder.
    pub fn new(recorder: Recorder) -> Arc<Feed> {
        Arc::new(Feed {
            collector: recorder.collector(),
            recorder,
            subscribers: Mutex::default(),
            came: Condvar::new(),
        })
    }

    /// The collector, for names of devices and losses.
    pub fn collector(&self) -> &Collector {
        &self.collector
    }

    /// Subscribes to all events from now on. The first subscriber starts the recording; it ends with the last one.
    pub fn subscribe(self: &Arc<Feed>) -> io::Result<Subscription> {
        self.subscribe_every(1)
    }

    /// As [`Feed::subscribe`], to the events of one request in `every`; to those of more requests while another subscriber wants more: see
    /// [`Collector::every`].
    pub fn subscribe_every(self: &Arc<Feed>, every: u32) -> io::Result<Subscription> {
        let state = Arc::new(SubscriptionState {
            until_ns: AtomicU64::new(u64::MAX),
            waiting: AtomicUsize::new(0),
            lost: AtomicU64::new(0),
        });
        let (to, from) = channel();
        let mut subscribers = self.subscribers.lock();
        if subscribers.is_empty() {
            self.recorder.start_every(every);
            let feed = Arc::clone(self);
            let thread = std::thread::Builder::new().name("pvblk-trace".into());
            let run = thread.spawn(move || feed.run());
            run.inspect_err(|_| self.recorder.stop())?;
        }
        subscribers.push(Subscriber {
            state: Arc::clone(&state),
            every: every.max(1),
            to,
            missed: None,
        });
        self.follow(&subscribers);
        self.came.notify_one();
        Ok(Subscription {
            state,
            from: Mutex::new(from),
            feed: Arc::clone(self),
        })
    }

    /// Follows as many requests as the subscriber who wants most.
    fn follow(&self, subscribers: &[Subscriber]) {
        if let Some(every) = subscribers.iter().map(|s| s.every).min() {
            self.recorder.set_every(every);
        }
    }

    /// Waits until the rings should be emptied; a new subscriber may want it earlier.
    fn pause(&self) {
        let begin = Instant::now();
        let mut subscribers = self.subscribers.lock();
        loop {
            let period = PERIOD * self.collector.every().clamp(1, MOST_PERIODS);
            let waited = self.came.wait_until(&mut subscribers, begin + period);
            if waited.timed_out() {
                return;
            }
        }
    }

    fn run(&self) {
        let mut sorter = Sorter::default();
        loop {
            self.pause();
            // Read the clock before the rings are emptied: nearly all events until then are in them.
            let now_ns = self.collector.now_ns();
            self.collector.drain(sorter.input());
            let until_ns = now_ns.saturating_sub(LATEST_NS);
            let batch = Arc::new(sorter.take_until(until_ns));
            let mut subscribers = self.subscribers.lock();
            let before = subscribers.len();
            hand_out(&mut subscribers, &batch, until_ns);
            if subscribers.len() < before {
                self.follow(&subscribers);
            }
            if subscribers.is_empty() {
                // Under the lock, so that a new subscriber starts the recording after this stop.
                self.recorder.stop();
                return;
            }
        }
    }
}

/// Gives all subscribers the events before `until_ns`; those who are done leave.
fn hand_out(subscribers: &mut Vec<Subscriber>, batch: &Arc<Vec<Event>>, until_ns: u64) {
    let share = MOST_WAITING / subscribers.len().max(1);
    subscribers.retain_mut(|s| s.give(batch, until_ns, share));
}

impl Subscriber {
    /// Hands over events before `until_ns`, or counts them as lost if more than `share` wait already; false when this one is done.
    fn give(&mut self, batch: &Arc<Vec<Event>>, until_ns: u64, share: usize) -> bool {
        let state = &*self.state;
        let wanted_ns = state.until_ns.load(Ordering::Relaxed);
        let done = until_ns > wanted_ns;
        let wanted = &batch[..batch.partition_point(|e| e.time_ns <= wanted_ns)];
        let first_ns = wanted.first().map_or(until_ns, |e| e.time_ns);
        let misses = !wanted.is_empty() && state.waiting.load(Ordering::Relaxed) > share;
        if misses {
            let lost = wanted.iter().map(|e| e.lost().max(1)).sum();
            state.lost.fetch_add(lost, Ordering::Relaxed);
            self.missed.get_or_insert((first_ns, 0)).1 += lost;
        }
        let given = match misses {
            true => &[],
            false => wanted,
        };
        // The next batch that comes begins with a gap for all that was missed before it.
        let missed = self.missed.take_if(|_| done || !given.is_empty());
        let gap = missed.map(|(from_ns, lost)| {
            let until_ns = if misses { until_ns } else { first_ns };
            Event::gap(Device::ALL, from_ns, until_ns.max(from_ns), lost)
        });
        let part = match given.len() == batch.len() && gap.is_none() {
            true => Arc::clone(batch),
            false => Arc::new(gap.iter().chain(given).copied().collect()),
        };
        if !part.is_empty() {
            state.waiting.fetch_add(part.len(), Ordering::Relaxed);
            if self.to.send(part).is_err() {
                return false;
            }
        }
        // Without events, no send would fail and show that the subscriber is gone.
        !done && Arc::strong_count(&self.state) > 1
    }
}

/// One subscriber's end of a feed; dropping it ends the subscription.
pub struct Subscription {
    state: Arc<SubscriptionState>,
    from: Mutex<Receiver<Arc<Vec<Event>>>>,
    feed: Arc<Feed>,
}

/// Result of waiting for events.
#[derive(Debug)]
pub enum Next {
    /// Events in order of time.
    Events(Arc<Vec<Event>>),
    /// No events came in time.
    Nothing,
    /// No more events will come.
    End,
}

impl Subscription {
    /// Waits up to `patience` for events.
    pub fn next(&self, patience: Duration) -> Next {
        match self.from.lock().recv_timeout(patience) {
            Ok(events) => {
                self.state
                    .waiting
                    .fetch_sub(events.len(), Ordering::Relaxed);
                Next::Events(events)
            }
            Err(RecvTimeoutError::Timeout) => Next::Nothing,
            Err(RecvTimeoutError::Disconnected) => Next::End,
        }
    }

    /// Ends the subscription now: earlier events still come, and then [`Next::End`].
    pub fn finish(&self) {
        let now_ns = self.feed.collector.now_ns();
        self.state.until_ns.fetch_min(now_ns, Ordering::Relaxed);
    }

    /// Number of events lost because this subscriber was too slow.
    pub fn lost(&self) -> u64 {
        self.state.lost.load(Ordering::Relaxed)
    }

    /// The collector, for names of devices and losses.
    pub fn collector(&self) -> &Collector {
        &self.feed.collector
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::trace::{Phase, Tracing};
    use pvblk_block::{Op, Request};

    fn take(subscription: &Subscription) -> Vec<Event> {
        let mut all = Vec::new();
        loop {
            match subscription.next(Duration::from_secs(60)) {
                Next::Events(events) => all.extend_from_slice(&events),
                Next::Nothing => panic!("no events in a minute"),
                Next::End => return all,
            }
        }
    }

    #[test]
    fn each_subscriber_gets_what_was_recorded_while_it_was_there() {
        let feed = Feed::new(Recorder::idle(0));
        let tracing = Tracing::to(Arc::new(feed.recorder.clone()), "x");
        let mut tracer = tracing.tracer("d", 0, 0);
        let mut record = |n: u64| {
            let mut request = Request::new(Op::Read, n, 8, n);
            request.followed = true;
            tracer.request(Phase::Queue, &request);
        };
        for round in 0..3 {
            let first = feed.subscribe().unwrap();
            record(round);
            let second = feed.subscribe().unwrap();
            record(round + 100);
            second.finish();
            let sectors =
                |events: Vec<Event>| -> Vec<u64> { events.iter().map(|e| e.sector).collect() };
            // The second subscriber may also get events recorded just before it came.
            assert_eq!(sectors(take(&second)).last(), Some(&(round + 100)));
            first.finish();
            record(round + 200);
            assert_eq!(sectors(take(&first)), [round, round + 100]);
            while !feed.subscribers.lock().is_empty() {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn what_waits_for_subscribers_who_do_not_read_is_bounded_in_all() {
        const BATCH: usize = 50_000;
        let feed = Feed::new(Recorder::idle(0));
        let subscriptions: Vec<_> = (0..8).map(|_| feed.subscribe().unwrap()).collect();
        let batch = Arc::new(vec![crate::event::tests::event(); BATCH]);
        for _ in 0..2 * MOST_WAITING / BATCH {
            hand_out(&mut feed.subscribers.lock(), &batch, 0);
        }
        let waiting = |s: &Subscription| s.state.waiting.load(Ordering::Relaxed);
        let all: usize = subscriptions.iter().map(waiting).sum();
        assert!(all <= MOST_WAITING + 8 * 2 * BATCH, "{all}");
        for s in &subscriptions {
            assert!(waiting(s) > BATCH && s.lost() > 0);
        }
    }

    #[test]
    fn all_get_what_the_one_who_wants_most_gets() {
        let feed = Feed::new(Recorder::idle(0));
        let every = || feed.collector().every();
        let few = feed.subscribe_every(64).unwrap();
        assert_eq!(every(), 64);
        let more = feed.subscribe_every(8).unwrap();
        let fewer = feed.subscribe_every(1000).unwrap();
        assert_eq!(every(), 8);
        drop(more);
        let begin = std::time::Instant::now();
        while every() != 64 {
            assert!(begin.elapsed() < Duration::from_secs(30), "{}", every());
            std::thread::yield_now();
        }
        drop((few, fewer));
    }

    #[test]
    fn events_come_in_order_of_time() {
        let mut sorter = Sorter::default();
        let event = |time_ns| Event {
            time_ns,
            ..crate::event::tests::event()
        };
        sorter.input().extend([event(5), event(3), event(9)]);
        let times = |events: Vec<Event>| -> Vec<u64> { events.iter().map(|e| e.time_ns).collect() };
        assert_eq!(times(sorter.take_until(6)), [3, 5]);
        sorter.input().extend([event(7), event(4)]);
        assert_eq!(times(sorter.take_until(9)), [4, 7]);
        assert_eq!(sorter.late(), 1);
        sorter.input().push(event(6));
        assert_eq!(times(sorter.take_until(5)), [6]);
        assert!(sorter.take_until(5).is_empty());
        assert_eq!(sorter.late(), 2);
        assert_eq!(times(sorter.take_until(10)), [9]);
    }
}
