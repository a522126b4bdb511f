//! [`finish_within`]: the bounded wait of a queue that is closed with I/O at the devices below.

use std::time::{Duration, Instant};

/// Pause after a step that made no progress.
const PAUSE: Duration = Duration::from_micros(100);

/// Steps unfinished work until there is none, for `limit` at most; false if some is left. `step` returns
/// `None` when none is left, else true if it made progress. A thread that panics doesn't wait: its state
/// isn't consistent.
pub fn finish_within(limit: Duration, mut step: impl FnMut() -> Option<bool>) -> bool {
    let begin = Instant::now();
    while !std::thread::panicking() {
        match step() {
            None => return true,
            Some(true) => {}
            Some(false) => std::thread::sleep(PAUSE),
        }
        if begin.elapsed() > limit {
            return false;
        }
    }
    true
}
