//! Buffer memory: how much is kept, and when it is given back.

use super::file::File;
use crate::cli::ServeArgs;
use anyhow::{Result, bail};
use pvblk_backend::{FLOOR_PAGES_PER_WORKER, MAX_BUFFER_PAGES, SQUEEZE_DURATION};
use std::time::Duration;

/// The buffer memory that is kept, and the time when it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Pages that each connection keeps.
    pub max_pages: usize,
    /// Time for which none are kept under pressure.
    pub squeeze: Duration,
    /// Pages for each worker that are kept even then.
    pub floor_pages: usize,
    /// Listen for pressure.
    pub listen: bool,
}

impl Buffers {
    pub(super) fn resolve(args: &ServeArgs, file: &File) -> Result<Buffers> {
        let mut buffers = Buffers::default();
        if let Some(n) = args.max_buffer_pages.or(file.max_buffer_pages) {
            buffers.max_pages = buffer_pages(n)?;
        }
        let squeeze = args.buffer_squeeze_duration_ms;
        if let Some(ms) = squeeze.or(file.buffer_squeeze_duration_ms) {
            buffers.squeeze = squeeze_duration(ms)?;
        }
        if let Some(n) = args.buffer_floor_pages.or(file.buffer_floor_pages) {
            buffers.floor_pages = floor_pages(n)?;
        }
        buffers.listen = !(args.no_pressure || file.no_pressure);
        Ok(buffers)
    }
}

impl Default for Buffers {
    fn default() -> Buffers {
        Buffers {
            max_pages: MAX_BUFFER_PAGES,
            squeeze: SQUEEZE_DURATION,
            floor_pages: FLOOR_PAGES_PER_WORKER,
            listen: true,
        }
    }
}

/// Most pages that a connection can be told to keep: as many as it can have in flight.
const MOST_BUFFER_PAGES: usize = 16384;
const LONGEST_SQUEEZE: Duration = Duration::from_secs(60);

/// Checks a number of pages to keep.
pub fn buffer_pages(pages: usize) -> Result<usize> {
    if pages > MOST_BUFFER_PAGES {
        bail!("--max-buffer-pages {pages}: at most {MOST_BUFFER_PAGES}");
    }
    Ok(pages)
}

/// Checks the length of a squeeze.
pub fn squeeze_duration(ms: u64) -> Result<Duration> {
    let duration = Duration::from_millis(ms);
    if duration > LONGEST_SQUEEZE {
        bail!(
            "--buffer-squeeze-duration-ms {ms}: at most {}",
            LONGEST_SQUEEZE.as_millis()
        );
    }
    Ok(duration)
}

/// Checks a worker's floor.
fn floor_pages(pages: usize) -> Result<usize> {
    if pages > FLOOR_PAGES_PER_WORKER {
        bail!("--buffer-floor-pages {pages}: at most {FLOOR_PAGES_PER_WORKER}");
    }
    Ok(pages)
}
