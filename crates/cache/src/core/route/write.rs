//! Writes: into the page's frame, or into a new one while the old one is being written.

use super::MOST_PENDING;
use crate::core::pieces::meeting;
use crate::core::requests::Ongoing;
use crate::core::waiters::{Chain, NO_PAGE};
use crate::core::writeback::{Admission, Outcome};
use crate::core::{BACKGROUND, Core};
use crate::policy::Policy;
use pvblk_block::planted::{Plant, has};
use pvblk_block::{RequestFlags, SECTOR, Status};

impl<P: Policy> Core<P> {
    /// True if the request is done. `sync`: it is when the device has its data.
    pub(in crate::core) fn go_on_with_write(
        &mut self,
        number: u32,
        write: &mut Ongoing,
        sync: bool,
    ) -> bool {
        if write.at < write.end && self.is_behind_end(write) {
            self.fail_rest(write);
        }
        let begin = write.at;
        let goes_on = self.write_pages(number, write, sync);
        if sync && write.at > begin {
            self.write_out(begin, write.at, (write.owner, write.request.followed));
        }
        goes_on && write.pending == 0
    }

    /// Goes from page to page; false if it has to wait.
    fn write_pages(&mut self, number: u32, write: &mut Ongoing, sync: bool) -> bool {
        while write.at < write.end {
            if !self.fill_and_start(number, write) {
                return false;
            }
            if write.pending >= MOST_PENDING {
                return false;
            }
            let page = write.at;
            if self.ranges.wait(page, number) {
                return false;
            }
            if !sync && !self.may_dirty(page, write) {
                self.requests.park(number, write);
                return false;
            }
            if write.status != Status::Ok {
                // The rest isn't begun.
                return true;
            }
            let frame = match self.memory.find(page) {
                Some(frame) if self.memory.is_reading(frame) => {
                    self.waiters.add(frame, number, NO_PAGE);
                    return false;
                }
                Some(frame) if self.writes.is_writing(frame) && !has(Plant::ChangedInPlace) => {
                    match self.supersede(page, frame, write) {
                        Some(new) => new,
                        None => {
                            self.waiters.add(frame, number, NO_PAGE);
                            return false;
                        }
                    }
                }
                Some(frame) => frame,
                None if self.is_whole(write, page) => match self.allocate(write) {
                    Some(frame) => {
                        self.memory.place(page, frame, false);
                        frame
                    }
                    None => {
                        self.requests.park(number, write);
                        return false;
                    }
                },
                None => {
                    write.filling = Some(self.reads.miss_of_write(page));
                    continue;
                }
            };
            self.memory.copy_in(&write.request, page, frame);
            self.writes.make_dirty(page, frame);
            if sync {
                let fua = write.request.flags.contains(RequestFlags::FUA);
                self.writes.sync(page, frame, number, fua);
                write.pending += 1;
            }
            write.at += 1;
        }
        true
    }

    /// True if the part of `page` that is written can be written as it is.
    fn is_whole(&self, write: &Ongoing, page: u64) -> bool {
        let (_, first, len) = meeting(&write.request, page);
        let bytes = (self.io.sectors_of(page) * SECTOR) as usize;
        has(Plant::PartWithoutRead) || (first == 0 && len == bytes)
    }

    /// The page is being written: it gets another frame with a copy, and the old one is only the device's. `None`: there is none.
    fn supersede(&mut self, page: u64, old: u32, write: &Ongoing) -> Option<u32> {
        let new = self.memory.allocate_at_once(write.owner)?;
        let copies = !self.is_whole(write, page);
        self.memory.supersede(page, old, new, copies);
        self.writes.supersede(old, new, copies);
        self.waiters.move_chain(old, new);
        Some(new)
    }

    /// True if one more page may become dirty. If not, the write waits; or it has failed, since nothing can be written.
    fn may_dirty(&mut self, page: u64, write: &mut Ongoing) -> bool {
        match self.writes.admit(page, write.throttle, self.moment.now) {
            Admission::Yes => write.throttle = None,
            Admission::Failed => self.fail_rest(write),
            Admission::Wait(throttle) => {
                write.throttle = Some(throttle);
                write.allocation.reset();
                self.write_in_background(write.owner);
                return false;
            }
        }
        true
    }

    /// A write of pages to the device has ended.
    pub(in crate::core) fn write_ended(&mut self, first: u64, frames: Vec<u32>, status: Status) {
        let ok = status == Status::Ok;
        self.writes.io_ended(ok, self.moment.now);
        for (page, &frame) in (first..).zip(&frames) {
            let written = self.writes.written(page, frame, ok);
            let waiting = self.waiters.detach(frame);
            match written.outcome {
                Outcome::Clean | Outcome::Failed => {}
                Outcome::Old => self.old_version_ended(page, frame, written.epoch, status),
                Outcome::Dropped => {
                    self.memory.drop_page(frame);
                    self.page_is_there(waiting, frame, Status::Ok);
                    self.synced(written.syncs, status);
                    continue;
                }
            }
            if !ok {
                self.fail_flushes(written.epoch, status);
            }
            self.synced(written.syncs, status);
            self.page_is_there(waiting, frame, Status::Ok);
        }
        self.writes.keep_run(frames);
        self.write_urgent();
        self.go_on_with_flushes();
    }

    /// The older version of a page isn't at the device any more: the page may be written now, or is dropped, and requests that waited for that go on.
    fn old_version_ended(&mut self, page: u64, old: u32, epoch: u64, status: Status) {
        self.memory.free_old(old);
        let Some(frame) = self.memory.find(page) else {
            return;
        };
        let ok = status == Status::Ok;
        let failed = self.writes.old_version_ended(page, frame, epoch, ok);
        if failed.is_some() {
            self.memory.drop_page(frame);
        }
        let waiting = self.waiters.detach(frame);
        self.page_is_there(waiting, frame, Status::Ok);
        if let Some(syncs) = failed {
            self.synced(syncs, status);
        }
    }

    /// Data of these requests was written, or couldn't be.
    fn synced(&mut self, chain: Chain, status: Status) {
        if chain.is_empty() {
            return;
        }
        let all = self.writes.drain(chain);
        for &(number, _) in &all {
            let Some(write) = self.requests.get_mut(number) else {
                continue;
            };
            write.pending -= 1;
            if status != Status::Ok {
                write.status = status;
            }
            if write.pending == 0 || write.pending == MOST_PENDING / 2 {
                self.go_on(number);
            }
        }
        self.writes.keep(all);
    }

    /// Writes pages whose older versions have been written and that a request waits for.
    fn write_urgent(&mut self) {
        for page in self.writes.take_urgent() {
            let waiting = self.writes.waits_for(page);
            let waiting = waiting.and_then(|number| self.requests.get(number));
            let whom = waiting.map_or((BACKGROUND, false), |r| (r.owner, r.request.followed));
            self.write_out(page, page + 1, whom);
        }
    }
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
