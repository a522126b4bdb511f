//! Copies between a request's buffers and a page, and the range that both cover.

use crate::config::PAGE_SECTORS;
use pvblk_block::{Buffer, Region, Request, SECTOR};

/// Copies between a request's buffers, from `skip` bytes on, and `len` bytes of a region.
pub fn copy(
    buffers: &[Buffer],
    mut skip: usize,
    region: &Region,
    offset: usize,
    len: usize,
    into_region: bool,
) {
    let mut done = 0;
    for b in buffers {
        if done == len {
            return;
        }
        if skip >= b.len() {
            skip -= b.len();
            continue;
        }
        let some = (b.len() - skip).min(len - done);
        let (there, at) = (b.region(), b.offset() + skip);
        match into_region {
            true => region.copy_from(offset + done, there, at, some),
            false => there.copy_from(at, region, offset + done, some),
        }
        done += some;
        skip = 0;
    }
    debug_assert!(done == len, "a request's buffers are too short");
}

/// Where a request and a page meet: bytes to skip in the request, first byte in the page, bytes.
pub fn meeting(request: &Request, page: u64) -> (usize, usize, usize) {
    let begin = page * PAGE_SECTORS;
    let first = request.sector.max(begin);
    let end = request.end().min(begin + PAGE_SECTORS);
    let bytes = |sectors: u64| (sectors * SECTOR) as usize;
    (
        bytes(first - request.sector),
        bytes(first - begin),
        bytes(end.saturating_sub(first)),
    )
}
