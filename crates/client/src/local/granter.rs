//! The grant table, as its owner writes it.

use crate::rings::Granter;
use parking_lot::Mutex;
use pvblk_block::Region;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_protocol::blkif::grant::{
    GRANT_ENTRY_SIZE, GRANTS_PER_PAGE, GrantEntry, RESERVED_GRANTS,
};
use pvblk_protocol::local::BACKEND_DOMID;
use pvblk_sys::PAGE_SIZE;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Grants frames of a memory that starts with its grant table.
///
/// Every frame has a reference of its own, `RESERVED_GRANTS + frame`: queues that grant different frames share no
/// lock and no list. A frame that is granted more than once at a time takes a reference from a common pool of the
/// same size.
pub struct LocalGranter {
    memory: Arc<Region>,
    first_data_frame: u32,
    frames: u32,
    /// One flag for each entry, in private memory: the peer may change the shared table.
    used: Box<[AtomicBool]>,
    spare: Mutex<SpareReferences>,
    _table_bill: Gauge,
}

/// The pool of references that belong to no frame.
struct SpareReferences {
    /// References from here on were never used.
    fresh: u32,
    /// A stack: the entry of the last returned reference is likely in the CPU's cache.
    returned: Vec<u32>,
}

impl LocalGranter {
    /// Frames needed for the grant table of a memory with `other` frames.
    pub fn table_frames(other: u32) -> u32 {
        // The table's own frames have references too, two in 512.
        let mut table = 1;
        while entries(table) < references(other + table) {
            table += 1;
        }
        table
    }

    /// Takes over a memory whose first `table_frames` frames are the table, all zeros. `name` is for the report on
    /// memory use.
    pub fn new(
        memory: Arc<Region>,
        table_frames: u32,
        first_data_frame: u32,
        name: &str,
    ) -> LocalGranter {
        let frames = (memory.len() / PAGE_SIZE) as u32;
        let count = entries(table_frames).min(references(frames)) as u32;
        let used = (0..count).map(|_| AtomicBool::new(false)).collect();
        let spare = SpareReferences {
            fresh: RESERVED_GRANTS + frames,
            returned: Vec::new(),
        };
        // One flag for each reference now; the list of the pool grows.
        let (flags, list) = (u64::from(count), 4 * u64::from(frames));
        let owner = format!("{name}: grant references");
        let table_bill = Gauge::new(owner, MemoryKind::Heap, flags + list);
        table_bill.add(flags);
        LocalGranter {
            memory,
            first_data_frame,
            frames,
            used,
            spare: Mutex::new(spare),
            _table_bill: table_bill,
        }
    }

    fn take(&self, gref: u32) -> bool {
        self.used
            .get(gref as usize)
            .is_some_and(|used| !used.swap(true, Ordering::Acquire))
    }

    fn take_spare(&self) -> Option<u32> {
        let mut spare = self.spare.lock();
        if let Some(gref) = spare.returned.pop() {
            return Some(gref);
        }
        let fresh = spare.fresh;
        ((fresh as usize) < self.used.len()).then(|| {
            spare.fresh += 1;
            fresh
        })
    }

    fn entry(&self, gref: u32) -> usize {
        gref as usize * GRANT_ENTRY_SIZE
    }
}

fn entries(table_frames: u32) -> u64 {
    u64::from(table_frames) * GRANTS_PER_PAGE as u64
}

fn references(frames: u32) -> u64 {
    u64::from(RESERVED_GRANTS) + 2 * u64::from(frames)
}

impl Granter for LocalGranter {
    fn memory(&self) -> &Arc<Region> {
        &self.memory
    }

    fn first_data_frame(&self) -> u32 {
        self.first_data_frame
    }

    fn grant(&self, frame: u32, read_only: bool) -> Option<u32> {
        assert!(frame < self.frames, "a frame outside the memory");
        let own = RESERVED_GRANTS + frame;
        let gref = if self.take(own) {
            own
        } else {
            let gref = self.take_spare()?;
            self.used[gref as usize].store(true, Ordering::Relaxed);
            gref
        };
        let at = self.entry(gref);
        let flags = GrantEntry { frame, read_only }.encode_flags(BACKEND_DOMID);
        // Write the frame first: the flags make the entry valid.
        let memory = &self.memory;
        memory.atomic_u32(at + 4).store(frame, Ordering::Relaxed);
        memory.atomic_u32(at).store(flags, Ordering::Release);
        Some(gref)
    }

    fn end(&self, gref: u32) {
        let Some(used) = self.used.get(gref as usize) else {
            return;
        };
        if !used.load(Ordering::Relaxed) {
            debug_assert!(false, "reference {gref} was not granted");
            return;
        }
        self.memory
            .atomic_u32(self.entry(gref))
            .store(0, Ordering::Release);
        used.store(false, Ordering::Release);
        if gref >= RESERVED_GRANTS + self.frames {
            self.spare.lock().returned.push(gref);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granter(frames: u32) -> LocalGranter {
        let table = LocalGranter::table_frames(frames);
        let bytes = (table + frames) as usize * PAGE_SIZE;
        let memory = Arc::new(Region::anonymous(bytes).unwrap());
        LocalGranter::new(memory, table, table, "test")
    }

    #[test]
    fn every_frame_can_be_granted_twice_and_again_after_its_end() {
        let g = granter(600);
        let first = g.first_data_frame();
        for _ in 0..2 {
            let mut all = Vec::new();
            for frame in first..first + 600 {
                all.push(g.grant(frame, false).unwrap());
                all.push(g.grant(frame, true).unwrap());
            }
            let mut unique = all.clone();
            unique.sort_unstable();
            unique.dedup();
            assert_eq!(unique.len(), all.len());
            assert!(unique[0] >= RESERVED_GRANTS);
            all.into_iter().for_each(|r| g.end(r));
        }
        // One frame may take the whole pool, and no more.
        let many = std::iter::from_fn(|| g.grant(first, false)).count();
        assert_eq!(many as u32, 1 + g.frames);
    }

    #[test]
    fn the_grant_table_has_an_entry_for_each_reference() {
        for frames in [1, 250, 255, 512, 1 << 14, 1 << 24] {
            let table = LocalGranter::table_frames(frames);
            assert!(entries(table) >= references(frames + table));
        }
    }

    #[test]
    fn an_ended_grant_permits_nothing() {
        let g = granter(2);
        let r = g.grant(g.first_data_frame(), true).unwrap();
        let word = |at| g.memory.atomic_u32(at).load(Ordering::Relaxed);
        let at = g.entry(r);
        assert!(
            GrantEntry::decode(word(at), word(at + 4))
                .unwrap()
                .read_only
        );
        g.end(r);
        assert_eq!(GrantEntry::decode(word(at), word(at + 4)), None);
    }
}
