//! Reclaim: frames of clean pages that go so that others can come, in the background and by requests that need memory.

use super::Memory;
use crate::core::writeback::WriteBack;
use crate::lists::On;
use crate::policy::Policy;
use pvblk_block::planted::{Plant, has};

/// Pages of one scan, and wanted of one direct reclaim.
const CLUSTER: usize = 32;
/// Active pages that one scan looks at, at most, to find a cluster that nobody used: the others go round again. With more, a loop over a little more than
/// the cache comes to pages twice before they are used again; with fewer, pages that were used often once stay for longer.
const ACTIVE_LOOKS: usize = 2 * CLUSTER;
/// Scans of one step of background reclaim.
const BACKGROUND_SCANS: usize = 8;

/// The side that reclaims, for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Background,
    Request,
}

impl<P: Policy> Memory<P> {
    /// Free frames are few: background reclaim has something to do.
    pub(super) fn ask_background(&mut self) {
        self.counters.pageoutrun += u64::from(!self.wants_background);
        self.wants_background = true;
    }

    /// True if background reclaim has something to do.
    pub fn wants_reclaim(&self) -> bool {
        self.wants_background
    }

    /// A part of background reclaim, which [`Memory::wants_reclaim`]. True if it is to be called again at once.
    pub fn background_reclaim(&mut self, owner: usize, writes: &mut WriteBack) -> bool {
        let list = self.list_of[owner];
        for _ in 0..BACKGROUND_SCANS {
            if self.alloc.free_frames() > self.alloc.marks().high {
                self.wants_background = false;
                break;
            }
            let freed = self.reclaim(list, By::Background, writes);
            if self.policy.background_drains_lists() {
                self.alloc.drain();
            }
            if freed == 0 {
                // All is in use. A request that needs memory asks again.
                self.wants_background = false;
                break;
            }
        }
        self.wants_background
    }

    /// Reclaims until a cluster is free or every inactive page was looked at once. Returns how many frames became free.
    pub(super) fn reclaim(&mut self, list: usize, by: By, writes: &mut WriteBack) -> usize {
        let mut freed = 0;
        let mut left = self.lists.len(On::Inactive).max(CLUSTER);
        let mut dirty = 0;
        while freed < CLUSTER && left > 0 {
            freed += self.age_active(list, by, writes);
            if freed >= CLUSTER {
                break;
            }
            let some = CLUSTER.min(left);
            left -= some;
            for _ in 0..some {
                let Some(frame) = self.lists.oldest(On::Inactive) else {
                    break;
                };
                self.count_scanned(by);
                dirty += usize::from(writes.is_dirty(frame));
                // It would have to be read again: the inactive list is too short for what is read in advance.
                let instead = match self.may_give_active() && self.table.is_ahead(frame) {
                    true => self.reclaim_active(list, by, false, writes),
                    false => 0,
                };
                if instead > 0 {
                    self.lists.put(frame, On::Inactive);
                    freed += instead;
                    break;
                }
                freed += usize::from(self.look_at(frame, list, writes));
            }
            if self.lists.len(On::Inactive) == 0 && self.too_active() == 0 {
                break;
            }
        }
        if freed == 0 && dirty == 0 && self.may_give_active() {
            // All that is inactive is in use.
            freed = self.reclaim_active(list, by, true, writes);
        }
        match by {
            By::Background => self.counters.pgsteal_kswapd += freed as u64,
            By::Request => self.counters.pgsteal_direct += freed as u64,
        }
        if dirty > 0 && freed < CLUSTER {
            writes.hurry();
        }
        freed
    }

    /// True if active pages may go though there aren't too many: if inactive pages aren't enough, active ones aren't protected.
    fn may_give_active(&self) -> bool {
        self.policy.gives_up_active() && self.lists.len(On::Active) > 0
    }

    /// Reclaims the oldest active pages; those that were used meanwhile only if `all`. Returns how many frames became free.
    fn reclaim_active(&mut self, list: usize, by: By, all: bool, writes: &mut WriteBack) -> usize {
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
            self.count_scanned(by);
            self.counters.pgdeactivate += 1;
            freed += usize::from(self.look_at(frame, list, writes));
        }
        freed
    }

    /// A page is looked at that may go.
    fn count_scanned(&mut self, by: By) {
        match by {
            By::Background => self.counters.pgscan_kswapd += 1,
            By::Request => self.counters.pgscan_direct += 1,
        }
    }

    /// Looks at the oldest page of a list: true if its frame is free now.
    fn look_at(&mut self, frame: u32, list: usize, writes: &mut WriteBack) -> bool {
        let uses = self.table.uses(frame);
        let may_go =
            writes.is_clean(frame) || has(Plant::DirtyReclaimed) && writes.could_be_lost(frame);
        if !may_go {
            // Being written, or not written yet.
            self.lists.put(frame, On::Inactive);
            return false;
        }
        if uses > 1 {
            self.activate(frame);
            return false;
        }
        self.evict(frame, writes);
        self.free(frame, list);
        true
    }

    /// An inactive page that was used again: it is active, and counts as unused from now on.
    pub(super) fn activate(&mut self, frame: u32) {
        self.table.set_uses(frame, 0);
        self.lists.put(frame, On::Active);
        self.shadows.activated();
        self.counters.pgactivate += 1;
    }

    /// A page goes that may be wanted again; its frame is to be freed then.
    pub(super) fn evict(&mut self, frame: u32, writes: &mut WriteBack) {
        self.shadows.evicted(self.table.page(frame));
        self.evict_for_good(frame, writes);
    }

    /// A page goes of which nothing is remembered; its frame is to be freed then.
    fn evict_for_good(&mut self, frame: u32, writes: &mut WriteBack) {
        let page = self.table.page(frame);
        if !writes.is_clean(frame) {
            // Only with a planted bug.
            writes.forget(page, frame);
        }
        self.counters.readahead_lost += u64::from(self.table.is_ahead(frame));
        self.table.remove(frame);
        self.lists.put(frame, On::None);
    }

    /// Number of active pages beyond those that are protected.
    fn too_active(&self) -> usize {
        let inactive = self.lists.len(On::Inactive) + self.reading;
        let active = self.lists.len(On::Active);
        let protected = self.policy.protected_percent();
        active.saturating_sub((active + inactive) * usize::from(protected) / 100)
    }

    /// Takes the oldest active pages off their list, as many as are too many and a cluster at most. Returns how many frames became free.
    ///
    /// Pages that were used stay, with one use less, if the policy keeps them. Of those that weren't nothing is remembered when they go: they were used
    /// often once, so what they could show is that everything else should be given up for them.
    fn age_active(&mut self, list: usize, by: By, writes: &mut WriteBack) -> usize {
        let keeps_used = self.policy.keeps_used_active();
        let looks = if keeps_used { ACTIVE_LOOKS } else { CLUSTER };
        let (mut freed, mut moved) = (0, 0);
        for _ in 0..looks {
            if self.too_active() == 0 || freed + moved == CLUSTER {
                break;
            }
            let Some(frame) = self.lists.oldest(On::Active) else {
                break;
            };
            self.counters.pgrefill += 1;
            let uses = self.table.uses(frame);
            if keeps_used && uses > 0 {
                self.table.set_uses(frame, uses - 1);
                self.lists.put(frame, On::Active);
                continue;
            }
            self.counters.pgdeactivate += 1;
            if keeps_used && writes.is_clean(frame) {
                self.count_scanned(by);
                self.evict_for_good(frame, writes);
                self.free(frame, list);
                freed += 1;
                continue;
            }
            self.table.set_uses(frame, 0);
            self.lists.put(frame, On::Inactive);
            moved += 1;
        }
        freed
    }
}
