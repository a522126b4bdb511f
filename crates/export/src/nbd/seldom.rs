//! Lines of the log that clients cause: some at once, the others counted.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Lines that are logged at once.
const AT_ONCE: u32 = 8;
/// After these, one in so long.
const PAUSE: Duration = Duration::from_secs(10);

/// Bounds the lines about clients: eight at once, then one in ten seconds, which says how many were left out.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    told: u32,
    last: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// How many lines were left out since the last one, if there is to be one now.
    pub(super) fn next(&self, now: Instant) -> Option<u64> {
        let mut s = self.0.lock();
        if s.last.is_none_or(|last| now.duration_since(last) >= PAUSE) {
            // Time that has passed without a line makes room for some.
            s.told = match s.left_out {
                0 => 0,
                _ => AT_ONCE - 1,
            };
        }
        if s.told >= AT_ONCE {
            s.left_out += 1;
            return None;
        }
        s.told += 1;
        s.last = Some(now);
        Some(std::mem::take(&mut s.left_out))
    }

    /// Logs a warning, if there is to be one now.
    pub fn warn(&self, text: std::fmt::Arguments<'_>) {
        match self.next(Instant::now()) {
            Some(0) => tracing::warn!("{text}"),
            Some(n) => tracing::warn!("{text} ({n} more lines about clients were left out)"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_lines_come_at_once_and_then_one_now_and_then() {
        let log = Seldom::default();
        let start = Instant::now();
        let lines = |from: u64| -> Vec<u64> {
            (0..1000)
                .filter_map(|ms| log.next(start + Duration::from_millis(from + ms)))
                .collect()
        };
        assert_eq!(lines(0), [0; 8]);
        assert_eq!(lines(5000), []);
        assert_eq!(lines(20_000), [992 + 1000]);
        assert_eq!(lines(31_000), [999]);
        assert_eq!(lines(42_000), [999]);
    }
}
