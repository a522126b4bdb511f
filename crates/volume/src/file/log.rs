//! Tells about I/O errors without flooding the log.

use parking_lot::Mutex;
use std::io;
use std::time::{Duration, Instant};

/// The least time between two lines of one volume.
const QUIET: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct ErrorLog(Mutex<Option<(Instant, u64)>>);

impl ErrorLog {
    /// Logs the error, or counts it if the last one was just now. Only failed requests come here.
    #[cold]
    pub(super) fn warn(&self, volume: &str, what: &str, e: &io::Error) {
        if let Some(untold) = self.may_tell(Instant::now()) {
            match untold {
                0 => tracing::warn!("{volume}: {what}: {e}"),
                n => tracing::warn!("{volume}: {what}: {e} (and {n} errors since the last line)"),
            }
        }
    }

    /// The number of errors that were not logged since the last line, if it is time for another.
    fn may_tell(&self, now: Instant) -> Option<u64> {
        let mut last = self.0.lock();
        if let Some((told, untold)) = last.as_mut()
            && now < *told + QUIET
        {
            *untold += 1;
            return None;
        }
        let untold = last.map_or(0, |(_, untold)| untold);
        *last = Some((now, 0));
        Some(untold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_and_then_a_count() {
        let (log, now) = (ErrorLog::default(), Instant::now());
        assert_eq!(log.may_tell(now), Some(0));
        assert_eq!(log.may_tell(now), None);
        assert_eq!(log.may_tell(now + QUIET / 2), None);
        assert_eq!(log.may_tell(now + QUIET), Some(2));
    }
}
