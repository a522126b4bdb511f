//! A token bucket: a socket's share of what its neighbours need too, some at once and then so much a second.

use std::time::{Duration, Instant};

/// A bucket that fills steadily, in units of its user's choice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    level: f64,
    most: f64,
    per_second: f64,
    at: Instant,
}

impl Bucket {
    /// A full one.
    pub fn new((most, per_second): (f64, f64), now: Instant) -> Bucket {
        Bucket {
            level: most,
            most,
            per_second,
            at: now,
        }
    }

    fn fill(&mut self, now: Instant) {
        let filled = now.saturating_duration_since(self.at).as_secs_f64() * self.per_second;
        self.level = (self.level + filled).min(self.most);
        self.at = now;
    }

    /// Takes `amount`, also if there isn't as much; when it is empty then: how long until there is something again.
    pub fn take(&mut self, amount: f64, now: Instant) -> Option<Duration> {
        self.fill(now);
        self.level -= amount;
        (self.level <= 0.0).then(|| {
            let enough = self.most / 16.0;
            Duration::from_secs_f64((enough - self.level) / self.per_second)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_what_it_has_and_then_what_comes_in() {
        let start = Instant::now();
        let mut bucket = Bucket::new((16.0, 2.0), start);
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        assert!((0..15).all(|_| bucket.take(1.0, start).is_none()));
        // The last one of what it had: half a second until a sixteenth is there.
        let rest = bucket.take(1.0, start).unwrap().as_secs_f64();
        assert!((0.4..0.6).contains(&rest), "{rest}");
        assert!(bucket.take(0.9, at(rest + 0.1)).is_none());
        // Debts are paid first.
        let rest = bucket.take(5.0, at(rest + 0.1)).unwrap().as_secs_f64();
        assert!((2.5..3.5).contains(&rest), "{rest}");
        assert_eq!(bucket.take(1.0, at(100.0)), None);
    }
}
