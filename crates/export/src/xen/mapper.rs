//! Grant references of a Xen guest: persistent ones stay mapped, the others' data is copied by the hypervisor.
//!
//! A guest that offers persistent grants uses the same pages again and again: each is mapped at its first use and stays, so that a
//! request costs no system call and no hypercall for its data. There are at most [`MAX_PERSISTENT`] of them per queue, and
//! [`MAX_MAPPINGS`] of all queues; then what wasn't used for long goes, and where there is no such page, a further one is copied, as those
//! of other guests are. So is one that can't be mapped for whatever reason: if it grants nothing, the copy tells. A copy needs no
//! mapping that must be undone before the answer, and all copies of a batch are one call.
//!
//! A mapped page can't be taken back while we have it, but a copy names a page by a number only: once its front end has left, that
//! number may grant something else. So nothing is copied from then on ([`CutOff`]).

use super::hypervisor::ForeignPages;
use crate::local::{Budget, Share};
use pvblk_backend::{Access, BufferPool, GrantError, GrantMapper, PageUse, Pressure};
use pvblk_block::{Buffer, BufferSource};
use pvblk_sys::xen::{CopyDirection, GrantCopy};
use pvblk_sys::{PAGE_SIZE, Region};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most pages of one queue that stay mapped: as Linux's back end (`max_persistent_grants`).
pub const MAX_PERSISTENT: usize = 1056;
/// Most pages of all queues of a server that stay mapped: each is a mapping of its own, of which a process has 65530 (`vm.max_map_count`).
pub const MAX_MAPPINGS: u64 = 16_384;
/// A page that wasn't used for so many uses of others may go for a new one. A guest that goes round and round over more pages than may stay has
/// none: then some stay, and the others are copied.
const OLD: u64 = 4 * MAX_PERSISTENT as u64;
/// How many go together: looking for them means looking at all.
const EVICT: usize = MAX_PERSISTENT / 20;
/// After so many pages copied other queues have their turn; a mapping costs about as much as eight copies.
const PAUSE_AFTER: u32 = 1024;
const MAPPING_COST: u32 = 8;
/// Most pages of one queue that copies may take, 32 MiB.
const MAX_COPY_PAGES: usize = 8192;

/// A page that stays mapped.
struct Held {
    page: Arc<Region>,
    _share: Share,
    /// Of the mapper's count of uses.
    used: u64,
}

/// Set once a connection's front end has left.
pub type CutOff = Arc<AtomicBool>;

/// The pages of one queue that stay mapped.
struct Persistent {
    held: HashMap<u32, Held>,
    budget: Arc<Budget>,
    /// Uses of pages so far, and those at the last rest.
    uses: u64,
    rested: u64,
    /// Nothing old was found; no look before so many uses.
    look_again: u64,
}

impl Persistent {
    /// Room for one more page; false if it is to be copied.
    fn has_room(&mut self) -> bool {
        if self.held.len() < MAX_PERSISTENT {
            return true;
        }
        if self.uses < self.look_again {
            return false;
        }
        let before = self.uses.saturating_sub(OLD);
        let old = |(&gref, h): (&u32, &Held)| {
            (h.used < before && Arc::strong_count(&h.page) == 1).then_some((h.used, gref))
        };
        let mut oldest: Vec<(u64, u32)> = self.held.iter().filter_map(old).collect();
        oldest.sort_unstable();
        for (_, gref) in oldest.iter().take(EVICT) {
            self.held.remove(gref);
        }
        if oldest.is_empty() {
            self.look_again = self.uses + MAX_PERSISTENT as u64;
        }
        !oldest.is_empty()
    }
}

/// One queue's way to its guest's pages.
pub struct XenMapper {
    pages: Box<dyn ForeignPages>,
    /// `None`: the guest doesn't keep grants.
    persistent: Option<Persistent>,
    cut_off: CutOff,
    /// Pages copied since the last pause, and mappings as so many copies.
    work: u32,
    pool: BufferPool,
    scratch: Vec<Buffer>,
}

impl XenMapper {
    /// A mapper for one queue of the disk `disk`; pages stay mapped within `persistent`, if the guest keeps its grants. Copies lie in buffers of
    /// `source`, if the device has some, and give way to `pressure`.
    pub fn new(
        pages: Box<dyn ForeignPages>,
        persistent: Option<&Arc<Budget>>,
        cut_off: &CutOff,
        pressure: &Arc<Pressure>,
        (disk, owner): (&str, &str),
        source: Option<Arc<dyn BufferSource>>,
    ) -> XenMapper {
        XenMapper {
            pages,
            persistent: persistent.map(|budget| Persistent {
                held: HashMap::new(),
                budget: Arc::clone(budget),
                uses: 0,
                rested: 0,
                look_again: 0,
            }),
            cut_off: Arc::clone(cut_off),
            work: 0,
            pool: BufferPool::new(pressure, disk, owner, source, MAX_COPY_PAGES),
            scratch: Vec::new(),
        }
    }

    /// Maps the pages of the queue's ring side by side.
    pub fn map_ring(&self, ring_refs: &[u32]) -> std::io::Result<Region> {
        self.pages.map(ring_refs, true)
    }

    /// The page of a grant that is kept; `None` if it is to be copied.
    fn held(&mut self, gref: u32) -> Option<&Arc<Region>> {
        let persistent = self.persistent.as_mut()?;
        persistent.uses += 1;
        if !persistent.held.contains_key(&gref) {
            if !persistent.has_room() {
                return None;
            }
            let share = persistent.budget.take(PAGE_SIZE as u64, 1)?;
            self.work += MAPPING_COST;
            // What a guest keeps it grants for writing, since a page serves reads and writes in turn.
            let page = Arc::new(self.pages.map(&[gref], true).ok()?);
            let held = Held {
                page,
                _share: share,
                used: 0,
            };
            persistent.held.insert(gref, held);
        }
        let held = persistent.held.get_mut(&gref)?;
        held.used = persistent.uses;
        Some(&held.page)
    }

    /// A private buffer of up to a page.
    fn private(&mut self, gref: u32, len: usize) -> Result<Buffer, GrantError> {
        if !self.pool.take(len, &mut self.scratch) {
            return Err(GrantError::Busy(gref));
        }
        self.work += 1;
        // At most a page, so in one piece.
        self.scratch.pop().ok_or(GrantError::Busy(gref))
    }
}

impl GrantMapper for XenMapper {
    fn map(
        &mut self,
        gref: u32,
        offset: usize,
        len: usize,
        _writable: bool,
    ) -> Result<(Buffer, Access), GrantError> {
        if let Some(page) = self.held(gref) {
            let buffer = Buffer::new(page, offset, len).ok_or(GrantError::Frame(gref))?;
            return Ok((buffer, Access::Direct));
        }
        Ok((self.private(gref, len)?, Access::Copied))
    }

    fn read(&mut self, gref: u32, dst: &mut [u8]) -> Result<(), GrantError> {
        if let Some(page) = self.held(gref) {
            page.read(0, dst);
            return Ok(());
        }
        let mut copies = [GrantCopy {
            gref,
            offset: 0,
            buffer: self.private(gref, dst.len())?,
            tag: 0,
            failed: false,
        }];
        self.pages.copy(CopyDirection::FromGuest, &mut copies);
        let [GrantCopy { buffer, failed, .. }] = copies;
        if !failed {
            buffer.read(0, dst);
        }
        self.scratch.push(buffer);
        self.pool.give(&mut self.scratch);
        if failed {
            Err(GrantError::Bad(gref))
        } else {
            Ok(())
        }
    }

    fn copy(&mut self, direction: CopyDirection, copies: &mut [GrantCopy]) {
        if self.is_cut_off() {
            copies.iter_mut().for_each(|c| c.failed = true);
            return;
        }
        self.pages.copy(direction, copies);
    }

    fn wants_pause(&mut self) -> bool {
        let pause = self.work >= PAUSE_AFTER;
        if pause {
            self.work = 0;
        }
        pause
    }

    fn is_cut_off(&self) -> bool {
        self.cut_off.load(Ordering::Acquire)
    }

    fn release(&mut self, page: PageUse) {
        self.scratch.push(page.buffer);
        self.pool.give(&mut self.scratch);
        self.pool.settle();
    }

    fn rest(&mut self) {
        self.pool.rest();
        // Pages that a whole stretch of work had no use for: a guest at rest keeps what it used last.
        if let Some(persistent) = &mut self.persistent {
            let rested = std::mem::replace(&mut persistent.rested, persistent.uses);
            persistent
                .held
                .retain(|_, h| h.used > rested || Arc::strong_count(&h.page) > 1);
        }
    }
}
