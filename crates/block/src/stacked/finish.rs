//! [`finish_within`]: the end of a queue that has something at the devices below.

use std::time::{Duration, Instant};

/// A pause after a step that brought nothing.
const PAUSE: Duration = Duration::from_micros(100);

/// Steps unfinished work until there is none, for `limit` at most; false if there is some left. `step` returns `None` when there is none, else
/// whether it got anywhere. A thread that panics doesn't wait: its state makes no sense.
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
