//! Flushes: what they cover, and when they are passed on.

use super::WriteBack;
use super::runs::Below;

/// Writes at the device at once for flushes.
const FLUSH_DEPTH: usize = 64;

/// A flush that waits for the writes of what it covers.
#[derive(Clone, Copy, Debug)]
pub struct Flush {
    /// Number of the request.
    pub request: u32,
    /// The queue that it came from.
    pub owner: usize,
    /// It covers the frames that became dirty under this number or an older one.
    epoch: u64,
}

impl WriteBack {
    /// A flush begins: it covers everything that is dirty or being written now.
    pub fn begin_flush(&mut self, request: u32, owner: usize) -> Flush {
        let flush = Flush {
            request,
            owner,
            epoch: self.epoch,
        };
        self.flushes.push(flush);
        self.epoch += 1;
        self.flush_at = 0;
        flush
    }

    /// The flush at a place among those that wait, the oldest first.
    pub fn flush(&self, at: usize) -> Option<Flush> {
        self.flushes.get(at).copied()
    }

    /// The newest number that a flush waits for.
    pub(super) fn newest_flush(&self) -> u64 {
        self.flushes.iter().map(|f| f.epoch).max().unwrap_or(0)
    }

    /// Writes dirty pages that flushes cover, by sector. True if nothing keeps `flush` any more: it doesn't wait then, and is to be passed on.
    pub fn go_on_with_flush(&mut self, flush: Flush, mut below: Below) -> bool {
        let epoch = self.newest_flush();
        while self.ios < FLUSH_DEPTH {
            let Some((&page, &frame)) = self.dirty.range(self.flush_at..).next() else {
                break;
            };
            self.flush_at = page + 1;
            if self.frames[frame as usize].epoch <= epoch {
                self.flush_at = page + self.start(page, u64::MAX, &mut below).max(1);
            }
        }
        let oldest = self.epochs.first_key_value();
        if oldest.is_some_and(|(&e, _)| e <= flush.epoch) {
            return false;
        }
        self.flushes.retain(|f| f.request != flush.request);
        true
    }

    /// The range of a discard was released, which flushes passed over: they search from the first page again.
    pub fn search_again(&mut self) {
        self.flush_at = 0;
    }

    /// A frame that became dirty under this number could not be written: takes the flushes that cover it.
    pub fn take_failed_flushes(&mut self, epoch: u64) -> Vec<u32> {
        let failed = self.flushes.extract_if(.., |f| f.epoch >= epoch);
        failed.map(|f| f.request).collect()
    }
}
