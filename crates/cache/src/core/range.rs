//! Discard and write-zeroes: they hold their range while the device does them, and then its pages leave the cache.
//!
//! Not before: if the device fails, what was dirty is still to be written. Hits go on meanwhile and find what was there before.

use super::{Core, Job, Kind, NONE, RangeHold, State};
use crate::config::PAGE_SECTORS;
use crate::policy::Policy;
use pvblk_block::planted::{Plant, has};

impl<P: Policy> Core<P> {
    pub(super) fn next_range(&mut self) -> u64 {
        self.range_number += 1;
        self.range_number
    }

    /// From now on nobody begins anything in these pages.
    pub(super) fn hold(&mut self, job: u32, number: u64, first: u64, end: u64) {
        self.ranges.push(RangeHold {
            job,
            number,
            first,
            end,
            sent: false,
            waiters: Vec::new(),
        });
    }

    /// Whether a range holds the page.
    pub(super) fn is_held(&self, page: u64) -> bool {
        self.ranges.iter().any(|r| (r.first..r.end).contains(&page))
    }

    /// Whether the device is just doing such a range.
    pub(super) fn is_being_done(&self, page: u64) -> bool {
        let done = |r: &RangeHold| r.sent && (r.first..r.end).contains(&page);
        self.ranges.iter().any(done)
    }

    /// If one does, the job waits for its end.
    pub(super) fn wait_for_range(&mut self, page: u64, job: u32) -> bool {
        let holds = |r: &&mut RangeHold| (r.first..r.end).contains(&page);
        match self.ranges.iter_mut().find(holds) {
            Some(range) => {
                range.waiters.push(job);
                true
            }
            None => false,
        }
    }

    /// The range isn't held any more, and those who waited go on.
    pub(super) fn release(&mut self, number: u64) {
        let at = self.ranges.iter().position(|r| r.number == number);
        let Some(at) = at else { return };
        let range = self.ranges.remove(at);
        debug_assert!(self.jobs.contains(range.job as usize));
        for id in range.waiters {
            self.run(id);
        }
        self.pump_flushes();
    }

    /// True if the job is done: only if it has failed.
    pub(super) fn run_range(&mut self, id: u32, job: &mut Job) -> bool {
        let Kind::Range { number, sent } = job.kind else {
            return true;
        };
        if sent {
            return false;
        }
        let (first, end) = (
            job.request.sector / PAGE_SECTORS,
            job.request.end().div_ceil(PAGE_SECTORS),
        );
        // One that was there before comes first.
        let older = |r: &mut RangeHold| r.number < number && r.first < end && first < r.end;
        if let Some(range) = self.ranges.iter_mut().find_map(|r| older(r).then_some(r)) {
            range.waiters.push(id);
            return false;
        }
        for (page, frame) in self.cached(first, end) {
            let whole = page * PAGE_SECTORS >= job.request.sector
                && (page * PAGE_SECTORS + self.sectors_of(page)) <= job.request.end();
            let f = &self.frames[frame as usize];
            let busy = matches!(f.state, State::Reading | State::Writing)
                || f.behind
                || f.syncs != NONE
                || f.waits != NONE;
            if busy {
                self.wait_on(frame, id, u64::MAX);
                return false;
            }
            if f.state == State::Dirty && !whole {
                if f.failed {
                    job.status = pvblk_block::Status::IoError;
                    self.release(number);
                    return true;
                }
                self.write_out(page, page + 1, job.owner);
                self.wait_on(frame, id, u64::MAX);
                return false;
            }
            if has(Plant::RangeDropsFirst) {
                self.drop_any(frame);
            }
        }
        job.kind = Kind::Range { number, sent: true };
        if let Some(range) = self.ranges.iter_mut().find(|r| r.number == number) {
            range.sent = true;
        }
        self.pass(id, job);
        false
    }

    /// The device has done the job, or not: what it covers isn't in the cache any more, but for what is dirty and was not done. Parts of pages were
    /// written out before.
    pub(super) fn range_done(&mut self, job: &Job, ok: bool) {
        let Kind::Range { number, .. } = job.kind else {
            return;
        };
        let first = job.request.sector / PAGE_SECTORS;
        let end = job.request.end().div_ceil(PAGE_SECTORS);
        for (_, frame) in self.cached(first, end) {
            if ok || self.frames[frame as usize].state != State::Dirty {
                self.drop_any(frame);
            }
        }
        // A flush passed over what was held.
        self.flush_at = 0;
        self.release(number);
    }

    fn drop_any(&mut self, frame: u32) {
        if self.frames[frame as usize].state == State::Dirty {
            self.forget_dirty(frame);
        }
        self.drop_page(frame, 0);
    }

    /// Pages that are in the cache, by number, and their frames.
    fn cached(&self, first: u64, end: u64) -> Vec<(u64, u32)> {
        if end - first <= self.frames.len() as u64 {
            let find = |page| Some((page, self.table.find_locked(page)?));
            return (first..end).filter_map(find).collect();
        }
        // Rather all frames than all pages.
        let frames = (0..).zip(self.frames.iter());
        let inside = |f: &super::Frame| {
            f.state != State::Free && !f.orphan && (first..end).contains(&f.page)
        };
        let found = frames.filter(|(_, f)| inside(f));
        let mut found: Vec<_> = found.map(|(at, f)| (f.page, at)).collect();
        found.sort_unstable();
        found
    }
}
