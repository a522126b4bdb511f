//! Grant references of a Xen guest: persistent ones stay mapped, the others' data is copied by the hypervisor.
//!
//! A guest that offers persistent grants uses the same pages again and again: each is mapped at its first use and stays, so that a
//! request costs no system call and no hypercall for its data. There are at most [`MAX_PERSISTENT`] of them per queue; then what wasn't
//! used longest goes, and where all are in use, a page is copied as those of other guests are. A copy needs no mapping that must
//! be undone before the answer, and all copies of a batch are one call.

use super::hypervisor::ForeignPages;
use pvblk_backend::{Access, BufferPool, GrantError, GrantMapper, PageUse, Pressure};
use pvblk_block::{Buffer, BufferSource};
use pvblk_sys::xen::{CopyDirection, GrantCopy};
use pvblk_sys::{PAGE_SIZE, Region};
use std::collections::HashMap;
use std::sync::Arc;

/// Most pages of one queue that stay mapped: as Linux's back end (`max_persistent_grants`).
pub const MAX_PERSISTENT: usize = 1056;
/// Of those, how many go together when there is no room: looking for them means looking at all.
const EVICT: usize = MAX_PERSISTENT / 20;
/// Most pages of one queue that copies may take, 32 MiB.
const MAX_COPY_PAGES: usize = 8192;

/// A page that stays mapped.
struct Held {
    page: Arc<Region>,
    /// Of the mapper's count of uses.
    used: u64,
}

/// One queue's way to its guest's pages.
pub struct XenMapper {
    pages: Box<dyn ForeignPages>,
    /// `None`: the guest doesn't keep grants.
    persistent: Option<HashMap<u32, Held>>,
    uses: u64,
    pool: BufferPool,
    scratch: Vec<Buffer>,
}

impl XenMapper {
    /// A mapper for one queue of the disk `disk`; copies lie in buffers of `source`, if the device has some, and give way to `pressure`.
    pub fn new(
        pages: Box<dyn ForeignPages>,
        persistent: bool,
        pressure: &Arc<Pressure>,
        (disk, owner): (&str, &str),
        source: Option<Arc<dyn BufferSource>>,
    ) -> XenMapper {
        XenMapper {
            pages,
            persistent: persistent.then(HashMap::new),
            uses: 0,
            pool: BufferPool::new(pressure, disk, owner, source, MAX_COPY_PAGES),
            scratch: Vec::new(),
        }
    }

    /// Maps the pages of the queue's ring side by side.
    pub fn map_ring(&self, ring_refs: &[u32]) -> std::io::Result<Region> {
        self.pages.map(ring_refs, true)
    }

    /// The page of a grant that is kept; `None` if there is no room for one more.
    fn held(&mut self, gref: u32) -> Result<Option<&Arc<Region>>, GrantError> {
        self.uses += 1;
        let Some(held) = &mut self.persistent else {
            return Ok(None);
        };
        if !held.contains_key(&gref) {
            if held.len() >= MAX_PERSISTENT && !evict(held) {
                return Ok(None);
            }
            // What a guest keeps it grants for writing, since a page serves reads and writes in turn.
            let page = self
                .pages
                .map(&[gref], true)
                .map_err(|_| GrantError::Bad(gref))?;
            let page = Arc::new(page);
            held.insert(gref, Held { page, used: 0 });
        }
        let uses = self.uses;
        Ok(held.get_mut(&gref).map(|h| {
            h.used = uses;
            &h.page
        }))
    }
}

/// Unmaps what wasn't used longest and isn't in use; false if everything is.
fn evict(held: &mut HashMap<u32, Held>) -> bool {
    let idle =
        |(&gref, h): (&u32, &Held)| (Arc::strong_count(&h.page) == 1).then_some((h.used, gref));
    let mut oldest: Vec<(u64, u32)> = held.iter().filter_map(idle).collect();
    oldest.sort_unstable();
    for (_, gref) in oldest.iter().take(EVICT) {
        held.remove(gref);
    }
    !oldest.is_empty()
}

impl GrantMapper for XenMapper {
    fn map(
        &mut self,
        gref: u32,
        offset: usize,
        len: usize,
        _writable: bool,
    ) -> Result<(Buffer, Access), GrantError> {
        if let Some(page) = self.held(gref)? {
            let buffer = Buffer::new(page, offset, len).ok_or(GrantError::Frame(gref))?;
            return Ok((buffer, Access::Direct));
        }
        if !self.pool.take(len, &mut self.scratch) {
            return Err(GrantError::Busy(gref));
        }
        // At most a page, so in one piece.
        let buffer = self.scratch.pop().ok_or(GrantError::Busy(gref))?;
        Ok((buffer, Access::Copied))
    }

    fn read(&mut self, gref: u32, dst: &mut [u8]) -> Result<(), GrantError> {
        if let Some(page) = self.held(gref)? {
            page.read(0, dst);
            return Ok(());
        }
        if !self.pool.take(dst.len().min(PAGE_SIZE), &mut self.scratch) {
            return Err(GrantError::Busy(gref));
        }
        let buffer = self.scratch.pop().ok_or(GrantError::Busy(gref))?;
        let mut copies = [GrantCopy {
            gref,
            offset: 0,
            buffer,
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
        self.pages.copy(direction, copies);
    }

    fn release(&mut self, page: PageUse) {
        self.scratch.push(page.buffer);
        self.pool.give(&mut self.scratch);
    }

    fn rest(&mut self) {
        self.pool.rest();
    }
}
