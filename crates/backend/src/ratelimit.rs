//! Log lines that a peer can cause as often as it likes are rate-limited: eight lines come out, and then few,
//! each with a count. All of them come out at level `debug`.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Number of first lines, which all come out.
const FIRST: u64 = 8;
/// After the first lines, one comes out when their number has doubled, or when the last one is at
/// least this old.
const QUIET: Duration = Duration::from_secs(60);
/// Most pairs of a place and a kind that are counted separately; the rest share one count.
const MOST: usize = 1 << 16;

/// Limits the lines of one kind about one disk, or about one listening socket.
#[derive(Debug, Default)]
pub struct RateLimit(Mutex<Logged>);

#[derive(Debug, Default)]
struct Logged {
    times: u64,
    last: Option<Instant>,
}

/// The end of a line: empty for the first lines, and then the number of lines that there would have
/// been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times(u64);

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0..=FIRST => Ok(()),
            n => write!(f, " ({n} times so far)"),
        }
    }
}

impl RateLimit {
    /// The limit for `kind` lines about `place`, which is a disk or a socket of the configuration. All
    /// callers in this process share it, so that a peer that connects again doesn't begin anew.
    pub fn of(place: &str, kind: &'static str) -> Arc<RateLimit> {
        static ALL: LazyLock<Mutex<RateLimits>> = LazyLock::new(Mutex::default);
        ALL.lock().of(place, kind)
    }

    /// RateLimits one line; `None` if it is not to be logged.
    pub fn next(&self) -> Option<Times> {
        self.next_at(Instant::now())
    }

    fn next_at(&self, now: Instant) -> Option<Times> {
        let mut logged = self.0.lock();
        logged.times += 1;
        let n = logged.times;
        let is_old = logged.last.is_none_or(|last| now >= last + QUIET);
        if n > FIRST && !n.is_power_of_two() && !is_old {
            return None;
        }
        logged.last = Some(now);
        Some(Times(n))
    }
}

#[derive(Default)]
struct RateLimits {
    of: HashMap<&'static str, HashMap<String, Arc<RateLimit>>>,
    len: usize,
    rest: Arc<RateLimit>,
}

impl RateLimits {
    fn of(&mut self, place: &str, kind: &'static str) -> Arc<RateLimit> {
        let places = self.of.entry(kind).or_default();
        if let Some(found) = places.get(place) {
            return Arc::clone(found);
        }
        if self.len == MOST {
            return Arc::clone(&self.rest);
        }
        self.len += 1;
        let new = Arc::<RateLimit>::default();
        places.insert(place.to_owned(), Arc::clone(&new));
        new
    }
}

/// Logs a line, limited by a [`RateLimit`]; lines beyond the limit come out at `debug`. `ratelimited!(warn,
/// limit, "{name}: {why}")`.
#[macro_export]
macro_rules! ratelimited {
    ($level:ident, $count:expr, $($line:tt)+) => {
        match $count.next() {
            Some(times) => tracing::$level!("{}{times}", format_args!($($line)+)),
            None => tracing::debug!($($line)+),
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_lines_and_then_seldom_one() {
        let (limit, now) = (RateLimit::default(), Instant::now());
        let logged = |at| limit.next_at(at).map(|t| t.to_string());
        for _ in 0..8 {
            assert_eq!(logged(now).as_deref(), Some(""));
        }
        let lines: Vec<String> = (8..10_000).filter_map(|_| logged(now)).collect();
        assert_eq!(lines.len(), 10, "{lines:?}");
        assert_eq!(lines[0], " (16 times so far)");
        // Rare events are logged.
        let later = now + QUIET;
        assert_eq!(logged(later).as_deref(), Some(" (10001 times so far)"));
        assert_eq!(logged(later + QUIET / 2), None);
        assert_eq!(
            logged(later + QUIET).as_deref(),
            Some(" (10003 times so far)")
        );
    }

    #[test]
    fn disks_and_kinds_are_counted_for_themselves_in_bounded_memory() {
        let mut counts = RateLimits::default();
        let first = counts.of("a", "refused");
        assert!(Arc::ptr_eq(&first, &counts.of("a", "refused")));
        assert!(!Arc::ptr_eq(&first, &counts.of("b", "refused")));
        assert!(!Arc::ptr_eq(&first, &counts.of("a", "connected")));
        for n in 0..MOST {
            counts.of(&n.to_string(), "refused");
        }
        assert_eq!(counts.len, MOST);
        let another = counts.of("another", "refused");
        assert!(Arc::ptr_eq(&counts.rest, &another));
        assert!(Arc::ptr_eq(&first, &counts.of("a", "refused")));
    }

    #[test]
    fn who_comes_again_does_not_begin_anew() {
        let logged = (0..100).filter_map(|_| RateLimit::of("rate limit's own", "test").next());
        assert_eq!(logged.count(), 8 + 3);
    }
}
