//! The log of what a peer can make happen as often as it likes: eight lines, then seldom one with a count. All of them are
//! there at level `debug`.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// So many lines come out as they are.
const FIRST: u64 = 8;
/// After them one comes out when their number has doubled, or when the last one is so long ago.
const QUIET: Duration = Duration::from_secs(60);
/// Pairs of a place and a kind that are told apart; the rest share one count.
const MOST: usize = 1 << 16;

/// The lines of one kind about one disk, or about one listening socket.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    times: u64,
    last: Option<Instant>,
}

/// Goes at the end of a line: nothing for the first ones, and then how often it would have come.
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

impl Seldom {
    /// The count of `kind` lines about `place`, which is a disk or a socket of the configuration: the same one for all who ask in
    /// this process, so that a peer that connects again doesn't begin anew.
    pub fn of(place: &str, kind: &'static str) -> Arc<Seldom> {
        static ALL: LazyLock<Mutex<Counts>> = LazyLock::new(Mutex::default);
        ALL.lock().of(place, kind)
    }

    /// Counts one; `None` if it is not to be logged.
    pub fn next(&self) -> Option<Times> {
        self.next_at(Instant::now())
    }

    fn next_at(&self, now: Instant) -> Option<Times> {
        let mut told = self.0.lock();
        told.times += 1;
        let n = told.times;
        let is_old = told.last.is_none_or(|last| now >= last + QUIET);
        if n > FIRST && !n.is_power_of_two() && !is_old {
            return None;
        }
        told.last = Some(now);
        Some(Times(n))
    }
}

#[derive(Default)]
struct Counts {
    of: HashMap<&'static str, HashMap<String, Arc<Seldom>>>,
    len: usize,
    rest: Arc<Seldom>,
}

impl Counts {
    fn of(&mut self, place: &str, kind: &'static str) -> Arc<Seldom> {
        let places = self.of.entry(kind).or_default();
        if let Some(found) = places.get(place) {
            return Arc::clone(found);
        }
        if self.len == MOST {
            return Arc::clone(&self.rest);
        }
        self.len += 1;
        let new = Arc::<Seldom>::default();
        places.insert(place.to_owned(), Arc::clone(&new));
        new
    }
}

/// Logs a line, counted by a [`Seldom`]; one too many is only for `debug`. `seldom!(warn, count, "{name}: {why}")`.
#[macro_export]
macro_rules! seldom {
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
        let (seldom, now) = (Seldom::default(), Instant::now());
        let told = |at| seldom.next_at(at).map(|t| t.to_string());
        for _ in 0..8 {
            assert_eq!(told(now).as_deref(), Some(""));
        }
        let lines: Vec<String> = (8..10_000).filter_map(|_| told(now)).collect();
        assert_eq!(lines.len(), 10, "{lines:?}");
        assert_eq!(lines[0], " (16 times so far)");
        // What happens seldom is logged.
        let later = now + QUIET;
        assert_eq!(told(later).as_deref(), Some(" (10001 times so far)"));
        assert_eq!(told(later + QUIET / 2), None);
        assert_eq!(
            told(later + QUIET).as_deref(),
            Some(" (10003 times so far)")
        );
    }

    #[test]
    fn disks_and_kinds_are_counted_for_themselves_in_bounded_memory() {
        let mut counts = Counts::default();
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
        let told = (0..100).filter_map(|_| Seldom::of("seldom's own", "test").next());
        assert_eq!(told.count(), 8 + 3);
    }
}
