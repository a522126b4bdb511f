//! Discard and write-zeroes: they hold their range while the device does them, and then its pages leave the cache.
//!
//! Not before: if the device fails, dirty pages are still to be written. Hits go on meanwhile and find the data of before.

use crate::config::PAGE_SECTORS;
use crate::core::Core;
use crate::core::requests::{Kind, Ongoing};
use crate::core::waiters::NO_PAGE;
use crate::policy::Policy;
use pvblk_block::Status;
use pvblk_block::planted::{Plant, has};

impl<P: Policy> Core<P> {
    /// True if the request is done: only if it has failed.
    pub(in crate::core) fn go_on_with_range(
        &mut self,
        id: u32,
        request: &mut Ongoing,
        number: u64,
    ) -> bool {
        if self.ranges.was_sent(number) || self.ranges.wait_for_older(number) {
            return false;
        }
        for (page, frame) in self.memory.pages(request.at, request.end) {
            let whole = page * PAGE_SECTORS >= request.request.sector
                && page * PAGE_SECTORS + self.io.sectors_of(page) <= request.request.end();
            let busy = self.memory.is_reading(frame)
                || self.writes.is_busy(frame)
                || self.waiters.any(frame);
            if busy {
                self.waiters.add(frame, id, NO_PAGE);
                return false;
            }
            if self.writes.is_dirty(frame) && !whole {
                if self.writes.has_failed(frame) {
                    request.status = Status::IoError;
                    self.release(number);
                    return true;
                }
                let whom = (request.owner, request.request.followed);
                self.write_out(page, page + 1, whom);
                self.waiters.add(frame, id, NO_PAGE);
                return false;
            }
            if has(Plant::RangeDropsFirst) {
                self.drop_any(page, frame);
            }
        }
        self.ranges.send(number);
        self.io.pass(id, &request.request, request.owner);
        false
    }

    /// The device has completed a request that was passed on.
    pub(in crate::core) fn passed(&mut self, id: u32, status: Status) {
        let Some(mut request) = self.requests.take(id) else {
            return;
        };
        request.status = status;
        if let Kind::Range { number } = request.kind {
            self.drop_range(&request, status == Status::Ok);
            // Flushes passed over its pages.
            self.writes.search_again();
            self.release(number);
        }
        self.complete(id, request);
        self.go_on_with_flushes();
    }

    /// Takes the pages of a range out of the cache, but for dirty ones if the device has not done it. Parts of pages were written out before.
    fn drop_range(&mut self, request: &Ongoing, ok: bool) {
        for (page, frame) in self.memory.pages(request.at, request.end) {
            if ok || !self.writes.is_dirty(frame) {
                self.drop_any(page, frame);
            }
        }
    }

    fn drop_any(&mut self, page: u64, frame: u32) {
        if self.writes.is_dirty(frame) {
            self.writes.forget(page, frame);
        }
        self.memory.drop_page(frame);
    }

    /// The range isn't held any more, and the requests that waited go on.
    fn release(&mut self, number: u64) {
        for waiting in self.ranges.release(number) {
            self.go_on(waiting);
        }
        self.go_on_with_flushes();
    }
}
