//! Threads of an experiment.

use anyhow::Result;
use std::thread::ScopedJoinHandle;

/// Waits for a thread. Its error is the caller's, and so is its panic.
pub(crate) fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
