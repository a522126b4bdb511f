//! Frames for jobs: watermarks, reclaim in the background and by who needs memory, and waiting.

use super::{Core, Filling, Job, Need, State};
use crate::alloc::{End, Reserve};
use crate::lists::On;
use crate::policy::{AfterFailure, Policy};
use pvblk_block::planted::{Plant, has};
use std::time::Duration;

/// Pages of one scan, and wanted of one direct reclaim.
const CLUSTER: usize = 32;
/// Scans of one step of background reclaim.
const BACKGROUND_SCANS: usize = 8;
/// Reclaims of one allocation before others get a turn.
const ROUNDS: usize = 4;
/// Writes at the device that count as congestion.
const CONGESTED: usize = 16;
/// How long one sleeps who isn't to wait and finds nothing to reclaim: a kernel would spin.
const SHORT: Duration = Duration::from_millis(1);

/// Who reclaims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Background,
    Request,
}

impl<P: Policy> Core<P> {
    /// A frame for a job, or its need.
    pub(super) fn frame_for(&mut self, job: &mut Job) -> Option<u32> {
        let list = self.owners[job.owner].list;
        let yields = self.policy.yields_before_reclaim();
        let mut rounds = 0;
        loop {
            match job.need {
                Need::Nothing | Need::Throttle { .. } => {
                    job.need = Need::Nothing;
                    if let Some(frame) = self.take(list, Reserve::Low) {
                        return Some(frame);
                    }
                    self.ask_background();
                    if let Some(frame) = self.take(list, Reserve::Min) {
                        return Some(frame);
                    }
                    job.need = Need::Reclaim;
                    if yields {
                        return None;
                    }
                }
                Need::Reclaim => {
                    self.counters.allocstall += 1;
                    job.progress = self.reclaim(list, Who::Request);
                    job.need = Need::Retry;
                    if yields {
                        // Others come between, as where a kernel gives up the CPU.
                        return None;
                    }
                    self.alloc.drain();
                }
                Need::Retry => {
                    if let Some(frame) = self.take(list, Reserve::Min) {
                        job.need = Need::Nothing;
                        return Some(frame);
                    }
                    self.counters.failed_after_progress += u64::from(job.progress > 0);
                    job.need = self.after_failure(job.progress);
                    rounds += 1;
                    let again = job.need == Need::Reclaim && !yields;
                    if !again || rounds == ROUNDS {
                        return None;
                    }
                }
                need @ Need::Sleep { since, .. } => {
                    if !self.is_due(need) {
                        return None;
                    }
                    self.counters.stalls += 1;
                    let slept = self.now.saturating_duration_since(since);
                    self.counters.stall_ns += slept.as_nanos() as u64;
                    job.need = Need::Nothing;
                }
            }
        }
    }

    /// Memory was reclaimed, `progress` pages of it, and the allocation failed all the same.
    fn after_failure(&self, progress: usize) -> Need {
        let sleep = |time: Duration, any_end: bool, congested: bool| Need::Sleep {
            since: self.now,
            until: self.now + time,
            ends: any_end.then_some(self.ends),
            congested,
        };
        let timeout = self.config.timeout;
        match self.policy.after_failure(progress, self.is_congested()) {
            AfterFailure::Reclaim => Need::Reclaim,
            AfterFailure::SleepUntilEnd => sleep(timeout, true, false),
            AfterFailure::SleepBriefly => sleep(SHORT, true, false),
            AfterFailure::SleepTimeout => sleep(timeout, false, false),
            AfterFailure::SleepWhileCongested => sleep(timeout, false, true),
        }
    }

    /// A frame without waiting, from what is kept back for those who can't.
    pub(super) fn frame_at_once(&mut self, owner: usize) -> Option<u32> {
        let list = self.owners[owner].list;
        self.take(list, Reserve::None)
    }

    fn take(&mut self, list: usize, reserve: Reserve) -> Option<u32> {
        let warm = self.alloc.warm_frames();
        let frame = self.alloc.take(list, End::Cold, reserve)?;
        if self.alloc.warm_frames() != warm {
            self.count_memory();
        }
        self.counters.pgalloc += 1;
        Some(frame)
    }

    /// Gives back frames that a job holds.
    pub(super) fn give_up(&mut self, owner: usize, filling: Filling) {
        let list = self.owners[owner].list;
        for &frame in &filling.frames {
            self.free_frame(frame, list);
        }
        self.keep_list(filling.frames);
    }

    pub(super) fn is_congested(&self) -> bool {
        self.write_ios >= CONGESTED
    }

    fn ask_background(&mut self) {
        self.counters.pageoutrun += u64::from(!self.kswapd);
        self.kswapd = true;
    }

    /// Whether background reclaim has something to do.
    pub fn wants_reclaim(&self) -> bool {
        self.kswapd
    }

    /// A piece of background reclaim. True if it is to be called again at once.
    pub fn background_reclaim(&mut self) -> bool {
        if !self.kswapd {
            return false;
        }
        let list = self.owners[Core::BACKGROUND].list;
        for _ in 0..BACKGROUND_SCANS {
            if self.alloc.free_frames() > self.alloc.marks().high {
                self.kswapd = false;
                break;
            }
            let freed = self.reclaim(list, Who::Background);
            if self.policy.background_drains_lists() {
                self.alloc.drain();
            }
            if freed == 0 {
                // All is in use. Who needs memory asks again.
                self.kswapd = false;
                break;
            }
        }
        self.wake_sleepers();
        self.kswapd
    }

    /// Reclaims until a cluster is free or every inactive page was looked at once. Returns how many frames became free.
    fn reclaim(&mut self, list: usize, who: Who) -> usize {
        let mut freed = 0;
        let mut left = self.lists.len(On::Inactive).max(CLUSTER);
        let mut dirty = 0;
        while freed < CLUSTER && left > 0 {
            self.age_active();
            let some = CLUSTER.min(left);
            left -= some;
            for _ in 0..some {
                let Some(frame) = self.lists.oldest(On::Inactive) else {
                    break;
                };
                match who {
                    Who::Background => self.counters.pgscan_kswapd += 1,
                    Who::Request => self.counters.pgscan_direct += 1,
                }
                dirty += usize::from(self.frames[frame as usize].state == State::Dirty);
                // It would have to be read again: the inactive list is too short for what is read in advance.
                let instead = match self.may_give_active() && self.table.is_ahead(frame) {
                    true => self.reclaim_active(list, who, false),
                    false => 0,
                };
                if instead > 0 {
                    self.lists.put(frame, On::Inactive);
                    freed += instead;
                    break;
                }
                freed += usize::from(self.look_at(frame, list));
            }
            if self.lists.len(On::Inactive) == 0 && self.too_active() == 0 {
                break;
            }
        }
        if freed == 0 && dirty == 0 && self.may_give_active() {
            // All that is inactive is in use.
            freed = self.reclaim_active(list, who, true);
        }
        match who {
            Who::Background => self.counters.pgsteal_kswapd += freed as u64,
            Who::Request => self.counters.pgsteal_direct += freed as u64,
        }
        self.refaults_seen = self.counters.workingset_refault_file;
        if dirty > 0 && freed < CLUSTER {
            self.background.hurry();
        }
        freed
    }

    /// Whether active pages may go though there aren't too many: an inactive list that doesn't do has no right to protect the other.
    fn may_give_active(&self) -> bool {
        self.policy.gives_up_active() && self.lists.len(On::Active) > 0
    }

    /// Reclaims the oldest active pages; those that were used meanwhile only if `all`. Returns how many frames became free.
    fn reclaim_active(&mut self, list: usize, who: Who, all: bool) -> usize {
        let mut freed = 0;
        for _ in 0..CLUSTER {
            let Some(frame) = self.lists.oldest(On::Active) else {
                break;
            };
            self.counters.pgrefill += 1;
            let used = self.table.uses(frame) > 0;
            self.table.set_uses(frame, 0);
            if used && !all {
                self.lists.put(frame, On::Active);
                continue;
            }
            match who {
                Who::Background => self.counters.pgscan_kswapd += 1,
                Who::Request => self.counters.pgscan_direct += 1,
            }
            self.counters.pgdeactivate += 1;
            freed += usize::from(self.look_at(frame, list));
        }
        freed
    }

    /// Looks at the oldest inactive page: true if its frame is free now.
    fn look_at(&mut self, frame: u32, list: usize) -> bool {
        let uses = self.table.uses(frame);
        let f = &self.frames[frame as usize];
        let may_go = f.state == State::Clean
            || (f.state == State::Dirty && !f.behind && has(Plant::DirtyReclaimed));
        if !may_go || f.waits != super::NONE || f.syncs != super::NONE {
            // In use by a device, or not written yet.
            self.lists.put(frame, On::Inactive);
            return false;
        }
        if uses > 1 {
            self.activate(frame);
            return false;
        }
        self.evict(frame);
        self.free_frame(frame, list);
        true
    }

    /// An inactive page that was used again: it is active, and counts as unused from now on.
    pub(super) fn activate(&mut self, frame: u32) {
        self.table.set_uses(frame, 0);
        self.lists.put(frame, On::Active);
        self.shadows.activated();
        self.counters.pgactivate += 1;
    }

    /// A page goes that may be wanted again; its frame is nobody's then.
    pub(super) fn evict(&mut self, frame: u32) {
        if self.frames[frame as usize].state == State::Dirty {
            self.forget_dirty(frame);
        }
        self.shadows.evicted(self.frames[frame as usize].page);
        self.counters.readahead_lost += u64::from(self.table.is_ahead(frame));
        self.table.remove(frame);
        self.lists.put(frame, On::None);
    }

    /// How many active pages are more than what is protected.
    fn too_active(&self) -> usize {
        let inactive = self.lists.len(On::Inactive) + self.reading;
        let active = self.lists.len(On::Active);
        let refaults = self.counters.workingset_refault_file != self.refaults_seen;
        let protected = self.policy.protected_percent(refaults);
        active.saturating_sub((active + inactive) * usize::from(protected) / 100)
    }

    /// Makes the oldest active pages inactive, as many as are too many.
    fn age_active(&mut self) {
        for _ in 0..CLUSTER.min(self.too_active()) {
            let Some(frame) = self.lists.oldest(On::Active) else {
                break;
            };
            self.counters.pgrefill += 1;
            self.counters.pgdeactivate += 1;
            self.table.set_uses(frame, 0);
            self.lists.put(frame, On::Inactive);
        }
    }

    /// Takes a page out of the cache; its frame is free then.
    pub(super) fn drop_page(&mut self, frame: u32, list: usize) {
        debug_assert!(self.frames[frame as usize].waits == super::NONE);
        self.table.remove(frame);
        self.lists.put(frame, On::None);
        self.free_frame(frame, list);
    }

    pub(super) fn clear_frame(&mut self, frame: u32) {
        self.frames[frame as usize] = super::Frame::FREE;
        self.counters.pgfree += 1;
    }

    pub(super) fn free_frame(&mut self, frame: u32, list: usize) {
        self.clear_frame(frame);
        self.alloc.give(list, End::Cold, frame);
    }

    /// Drops every clean page, as `drop_caches` does. Returns how many those were.
    pub fn drop_clean(&mut self) -> usize {
        let mut dropped = 0;
        for frame in 0..self.frames.len() as u32 {
            let f = &self.frames[frame as usize];
            if f.state == State::Clean && f.waits == super::NONE {
                self.drop_page(frame, 0);
                dropped += 1;
            }
        }
        self.alloc.drain();
        dropped
    }
}
