//! Maps or copies pages that a Xen guest granted: persistent grants stay mapped, other data is copied by the
//! hypervisor.
//!
//! A guest that offers persistent grants uses the same pages again and again. Each page is mapped at its first use
//! and stays mapped, so a request costs no system call and no hypercall for its data. At most [`MAX_PERSISTENT`]
//! pages of a queue and [`MAX_MAPPINGS`] of all queues stay mapped. Beyond that, pages that weren't used for long are
//! unmapped; if there are none, a further page is copied, as are pages of guests without persistent grants. A page
//! that can't be mapped is copied, too: if its reference grants nothing, the copy fails. A copy needs no unmapping
//! before the response, and all copies of a batch are one call.
//!
//! A guest can't take a page back while it is mapped, but a copy only names a grant reference: once the front end has
//! left, the reference may grant another page. So nothing is copied from then on ([`CutOff`]).

use super::hypervisor::ForeignPages;
use crate::kit::{MappingBudget, MappingShare};
use pvblk_backend::{Access, BufferPool, GrantError, GrantMapper, PageUse, Pressure};
use pvblk_block::{Buffer, BufferSource};
use pvblk_sys::xen::{CopyDirection, GrantCopy};
use pvblk_sys::{PAGE_SIZE, Region};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most persistent mappings of one queue, as in Linux's back end (`max_persistent_grants`).
pub const MAX_PERSISTENT: usize = 1056;
/// Most persistent mappings of all queues of a server. Each is a mapping of its own, of which a process has 65530
/// (`vm.max_map_count`).
pub const MAX_MAPPINGS: u64 = 16_384;
/// Uses of other pages after which an unused page may be unmapped for a new one. A guest that cycles over more pages
/// than may stay has no such pages: some stay mapped, and the others are copied.
const OLD: u64 = 4 * MAX_PERSISTENT as u64;
/// Pages unmapped at once, since the search looks at all pages.
const EVICT: usize = MAX_PERSISTENT / 20;
/// Pages copied after which other queues have their turn; a mapping counts as eight copies.
const PAUSE_AFTER: u32 = 1024;
const MAPPING_COST: u32 = 8;
/// Most pages that the copies of one queue may take: 32 MiB.
const MAX_COPY_PAGES: usize = 8192;

/// A persistently mapped page.
struct MappedPage {
    page: Arc<Region>,
    _share: MappingShare,
    /// Value of the mapper's count of uses at the last use.
    used: u64,
}

/// Set when a connection's front end has left; shared by its queues.
pub type CutOff = Arc<AtomicBool>;

/// The persistent mappings of one queue.
struct PersistentMappings {
    held: HashMap<u32, MappedPage>,
    budget: Arc<MappingBudget>,
    /// Uses of pages so far.
    uses: u64,
    /// Value of `uses` at the last rest.
    rested: u64,
    /// No unused page was found; search again at this count of uses.
    look_again: u64,
}

impl PersistentMappings {
    /// Makes room for one more page; false if it is to be copied.
    fn has_room(&mut self) -> bool {
        if self.held.len() < MAX_PERSISTENT {
            return true;
        }
        if self.uses < self.look_again {
            return false;
        }
        let before = self.uses.saturating_sub(OLD);
        let old = |(&gref, h): (&u32, &MappedPage)| {
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

/// Access of one queue to its guest's pages.
pub struct XenMapper {
    pages: Box<dyn ForeignPages>,
    /// `None`: the guest doesn't use persistent grants.
    persistent: Option<PersistentMappings>,
    cut_off: CutOff,
    /// Work since the last pause: pages copied, and mappings in units of copies.
    work: u32,
    pool: BufferPool,
    scratch: Vec<Buffer>,
}

impl XenMapper {
    /// Creates a mapper for one queue of the disk `disk`. Pages stay mapped within `persistent`, if the guest uses
    /// persistent grants. Copies use buffers of `source`, if the device has some, and are limited under `pressure`.
    pub fn new(
        pages: Box<dyn ForeignPages>,
        persistent: Option<&Arc<MappingBudget>>,
        cut_off: &CutOff,
        pressure: &Arc<Pressure>,
        (disk, owner): (&str, &str),
        source: Option<Arc<dyn BufferSource>>,
    ) -> XenMapper {
        XenMapper {
            pages,
            persistent: persistent.map(|budget| PersistentMappings {
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

    /// The mapped page of a persistent grant; `None` if it is to be copied.
    fn held(&mut self, gref: u32) -> Option<&Arc<Region>> {
        let persistent = self.persistent.as_mut()?;
        persistent.uses += 1;
        if !persistent.held.contains_key(&gref) {
            if !persistent.has_room() {
                return None;
            }
            let share = persistent.budget.take(PAGE_SIZE as u64, 1)?;
            self.work += MAPPING_COST;
            // Persistent grants permit writing, since a page serves reads and writes in turn.
            let page = Arc::new(self.pages.map(&[gref], true).ok()?);
            let held = MappedPage {
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

    /// Allocates a private buffer of up to a page.
    fn private(&mut self, gref: u32, len: usize) -> Result<Buffer, GrantError> {
        if !self.pool.take(len, &mut self.scratch) {
            return Err(GrantError::Busy(gref));
        }
        self.work += 1;
        // At most a page, so it is one buffer.
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
        // Unmaps pages that were not used since the last rest; a guest at rest keeps those that it used last.
        if let Some(persistent) = &mut self.persistent {
            let rested = std::mem::replace(&mut persistent.rested, persistent.uses);
            persistent
                .held
                .retain(|_, h| h.used > rested || Arc::strong_count(&h.page) > 1);
        }
    }
}
