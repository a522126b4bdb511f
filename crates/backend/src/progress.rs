//! [`Progress`]: whether the threads that others depend on still make progress.

use crate::service::Service;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

/// The sign of life of a control thread.
#[derive(Debug)]
pub struct Pulse {
    name: String,
    number: u64,
    /// Odd while the thread is at work; even while it waits.
    turn: AtomicU64,
}

static ALL: LazyLock<Mutex<(u64, Vec<Weak<Pulse>>)>> = LazyLock::new(Mutex::default);

impl Pulse {
    /// The pulse of a thread of this name, which waits. It is looked at until it is dropped.
    pub fn new(name: impl Into<String>) -> Arc<Pulse> {
        let mut all = ALL.lock();
        all.0 += 1;
        let pulse = Arc::new(Pulse {
            name: name.into(),
            number: all.0,
            turn: AtomicU64::new(0),
        });
        all.1.retain(|p| p.strong_count() > 0);
        all.1.push(Arc::downgrade(&pulse));
        pulse
    }

    /// The thread has something to do. Called by the thread alone.
    pub fn works(&self) {
        self.turn.store(self.turn() | 1, Ordering::Relaxed);
    }

    /// The thread has done that, and waits. Called by the thread alone.
    pub fn waits(&self) {
        let next = (self.turn() | 1).wrapping_add(1);
        self.turn.store(next, Ordering::Relaxed);
    }

    fn turn(&self) -> u64 {
        self.turn.load(Ordering::Relaxed)
    }
}

/// A thread as it was seen.
#[derive(Clone, Copy, Debug)]
struct Seen {
    turn: u64,
    since: Instant,
}

/// The last looks at workers and control threads.
#[derive(Debug, Default)]
pub struct Progress {
    workers: HashMap<usize, Seen>,
    pulses: HashMap<u64, Seen>,
}

impl Progress {
    /// The name of a worker or control thread that has been at the same piece of work since a look that is at least
    /// `limit` ago. Threads that sleep are well.
    pub fn stuck(&mut self, service: &Service, now: Instant, limit: Duration) -> Option<String> {
        let mut stuck = None;
        for (index, (name, turn)) in service.backend().turns().into_iter().enumerate() {
            if is_stuck(&mut self.workers, index, turn, now, limit) {
                stuck = Some(name);
            }
        }
        let pulses: Vec<_> = ALL.lock().1.iter().filter_map(Weak::upgrade).collect();
        self.pulses
            .retain(|number, _| pulses.iter().any(|p| p.number == *number));
        for pulse in pulses {
            let turn = pulse.turn();
            let turn = (!turn.is_multiple_of(2)).then_some(turn);
            if is_stuck(&mut self.pulses, pulse.number, turn, now, limit) {
                stuck = Some(pulse.name.clone());
            }
        }
        stuck
    }
}

/// `turn`: of a thread that is at work.
fn is_stuck<K: std::hash::Hash + Eq>(
    seen: &mut HashMap<K, Seen>,
    key: K,
    turn: Option<u64>,
    now: Instant,
    limit: Duration,
) -> bool {
    let Some(turn) = turn else {
        seen.remove(&key);
        return false;
    };
    let last = seen.entry(key).or_insert(Seen { turn, since: now });
    if last.turn != turn {
        *last = Seen { turn, since: now };
    }
    now.saturating_duration_since(last.since) >= limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_stuck_if_it_stays_at_one_piece_of_work() {
        let (mut seen, start) = (HashMap::new(), Instant::now());
        let limit = Duration::from_secs(5);
        let pulse = Pulse::new("test");
        let mut look = |pulse: &Pulse, seconds| {
            let turn = pulse.turn();
            let turn = (!turn.is_multiple_of(2)).then_some(turn);
            is_stuck(
                &mut seen,
                1,
                turn,
                start + Duration::from_secs(seconds),
                limit,
            )
        };
        assert!(!look(&pulse, 0) && !look(&pulse, 100));
        pulse.works();
        assert!(!look(&pulse, 101) && !look(&pulse, 105));
        assert!(look(&pulse, 106) && look(&pulse, 107));
        pulse.waits();
        assert!(!look(&pulse, 108));
        pulse.works();
        assert!(!look(&pulse, 109));
        pulse.waits();
        pulse.works();
        assert!(!look(&pulse, 115));
        assert!(look(&pulse, 120));
    }
}
