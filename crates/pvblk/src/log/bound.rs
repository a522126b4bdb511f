//! The bound for lines that peers may cause, over all kinds of them.

use std::time::{Duration, Instant};

/// Bytes that may come in each second in the long run.
pub(super) const PER_SECOND: usize = 64 << 10;
/// Bytes that may come at once after a quiet time.
pub(super) const BURST: usize = 256 << 10;

/// A bucket of bytes.
pub(super) struct Bound {
    left: usize,
    /// The time at which `left` was right.
    at: Instant,
}

impl Bound {
    /// A full bucket.
    pub fn new(now: Instant) -> Bound {
        Bound {
            left: BURST,
            at: now,
        }
    }

    /// Takes so many bytes, if they are there.
    pub fn admit(&mut self, bytes: usize, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at);
        let all = Duration::from_secs((BURST / PER_SECOND) as u64);
        let more = (passed.min(all).as_secs_f64() * PER_SECOND as f64) as usize;
        if more > 0 {
            self.left = (self.left + more).min(BURST);
            self.at = now;
        }
        let fits = bytes <= self.left;
        if fits {
            self.left -= bytes;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_fits_and_then_the_rate() {
        let start = Instant::now();
        let mut bound = Bound::new(start);
        let mut admitted = |now: Instant| (0..10_000).filter(|_| bound.admit(100, now)).count();
        assert_eq!(admitted(start), BURST / 100);
        assert_eq!(admitted(start), 0);
        let second = admitted(start + Duration::from_secs(1));
        assert!((PER_SECOND / 100 - 1..=PER_SECOND / 100 + 1).contains(&second));
        assert_eq!(admitted(start + Duration::from_hours(1)), BURST / 100);
    }
}
