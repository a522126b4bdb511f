//! Maps grant references of a local front end.

use super::memory::{GuestMemory, runs};
use crate::kit::{MappingBudget, MappingShare};
use pvblk_backend::{Access, GrantError, GrantMapper};
use pvblk_block::memory::Gauge;
use pvblk_block::{Buffer, Error, ErrorKind};
use pvblk_protocol::blkif::grant::{GRANT_ENTRY_SIZE, GrantEntry};
use pvblk_sys::{PAGE_SIZE, Region};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Turns references into buffers: one look at the grant table, no system call.
///
/// Each queue maps the memory for itself. That costs address space only, and gives each queue a reference count of
/// its own: every buffer counts as a user of its region, and a counter shared by all queues would be one cache line
/// that every request of every CPU writes to.
pub struct LocalMapper {
    memory: Arc<Region>,
    table: usize,
    entries: u32,
    frames: u32,
    shares: Vec<MappingShare>,
    _gauge: Gauge,
}

impl LocalMapper {
    /// Maps a front end's memory for one queue. `gauge` is the connection's line in the report on memory use, which
    /// stays as long as one of its queues. Errors if the budget is used up or the system refuses.
    pub fn new(
        memory: &GuestMemory,
        budget: &Arc<MappingBudget>,
        gauge: &Gauge,
    ) -> Result<LocalMapper, Error> {
        let share = take(budget, memory.len(), 1)?;
        let region = Region::shared(memory.file(), 0, memory.len(), true)
            .map_err(|e| Error::os("mapping the front end's memory", e))?;
        Ok(LocalMapper {
            memory: Arc::new(region),
            table: memory.table_offset(),
            entries: memory.table_entries(),
            frames: memory.frames(),
            shares: vec![share],
            _gauge: gauge.clone(),
        })
    }

    /// Reads one entry of the table, once, and checks the copy. The front end may change the entry at any time.
    #[inline]
    fn resolve(&self, gref: u32, writable: bool) -> Result<u32, GrantError> {
        if gref >= self.entries {
            return Err(GrantError::Bad(gref));
        }
        let at = self.table + gref as usize * GRANT_ENTRY_SIZE;
        // The front end writes the frame before the flags, so read the flags first.
        let flags = self.memory.atomic_u32(at).load(Ordering::Acquire);
        let frame = self.memory.atomic_u32(at + 4).load(Ordering::Relaxed);
        let entry = GrantEntry::decode(flags, frame).ok_or(GrantError::Bad(gref))?;
        if entry.frame >= self.frames {
            return Err(GrantError::Frame(gref));
        }
        if writable && entry.read_only {
            return Err(GrantError::ReadOnly(gref));
        }
        Ok(entry.frame)
    }

    /// Maps the pages of this queue's ring side by side. They must be granted for writing.
    pub fn map_ring(
        &mut self,
        memory: &GuestMemory,
        budget: &Arc<MappingBudget>,
        ring_refs: &[u32],
    ) -> Result<Region, Error> {
        let each = ring_refs.iter().enumerate().map(|(i, &gref)| {
            let frame = self.resolve(gref, true).map(u64::from);
            frame.map_err(|e| Error::caused(ErrorKind::Protocol, format!("ring page {i}"), e))
        });
        let frames = each.collect::<Result<Vec<u64>, Error>>()?;
        let share = take(budget, frames.len() * PAGE_SIZE, runs(&frames))?;
        self.shares.push(share);
        Region::from_frames(memory.file(), &frames, true)
            .map_err(|e| Error::os("mapping the ring", e))
    }
}

fn take(budget: &Arc<MappingBudget>, bytes: usize, mappings: u64) -> Result<MappingShare, Error> {
    budget.take(bytes as u64, mappings).ok_or_else(|| {
        Error::new(
            ErrorKind::Exhausted,
            "all front ends together have mapped too much; ask for fewer queues or less memory",
        )
    })
}

impl GrantMapper for LocalMapper {
    #[inline]
    fn map(
        &mut self,
        gref: u32,
        offset: usize,
        len: usize,
        writable: bool,
    ) -> Result<(Buffer, Access), GrantError> {
        let frame = self.resolve(gref, writable)?;
        let at = frame as usize * PAGE_SIZE + offset;
        let buffer = Buffer::new(&self.memory, at, len).ok_or(GrantError::Frame(gref))?;
        Ok((buffer, Access::Direct))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::memory::MemoryKind;
    use pvblk_protocol::blkif::grant::RESERVED_GRANTS;

    /// A memory of 8 frames, the first of them the table, and the owner's mapping of it.
    fn mapper() -> (Region, GuestMemory, Arc<MappingBudget>, LocalMapper) {
        let file = pvblk_sys::create_sealed("t", 8 * PAGE_SIZE as u64).unwrap();
        let file = pvblk_sys::PeerFd::new(file, &pvblk_sys::Closer::new());
        let memory = GuestMemory::from_peer(file, 0, 1).unwrap();
        let owner = Region::shared(memory.file(), 0, memory.len(), true).unwrap();
        let budget = MappingBudget::new();
        let gauge = Gauge::new("mapper test", MemoryKind::Shared, 0);
        let mapper = LocalMapper::new(&memory, &budget, &gauge).unwrap();
        (owner, memory, budget, mapper)
    }

    fn grant(owner: &Region, gref: u32, frame: u32, read_only: bool) {
        let at = gref as usize * GRANT_ENTRY_SIZE;
        let flags = GrantEntry { frame, read_only }.encode_flags(0);
        owner.atomic_u32(at + 4).store(frame, Ordering::Relaxed);
        owner.atomic_u32(at).store(flags, Ordering::Release);
    }

    #[test]
    fn every_reference_is_checked() {
        let (owner, _memory, _budget, mut m) = mapper();
        let r = RESERVED_GRANTS;
        assert_eq!(m.map(r, 0, 4096, false).unwrap_err(), GrantError::Bad(r));
        for bad in [512, u32::MAX] {
            assert_eq!(m.map(bad, 0, 1, false).unwrap_err(), GrantError::Bad(bad));
        }
        grant(&owner, r, 7, true);
        owner.write(7 * PAGE_SIZE + 512, b"data");
        assert_eq!(m.map(r, 512, 4, false).unwrap().0.to_vec(), b"data");
        assert_eq!(m.map(r, 0, 1, true).unwrap_err(), GrantError::ReadOnly(r));
        for frame in [8, 9, u32::MAX] {
            grant(&owner, r, frame, false);
            assert_eq!(m.map(r, 0, 1, true).unwrap_err(), GrantError::Frame(r));
        }
    }

    #[test]
    fn a_ring_must_be_writable_and_its_mappings_are_given_back() {
        let (owner, memory, budget, mut m) = mapper();
        grant(&owner, 8, 5, false);
        grant(&owner, 9, 3, false);
        grant(&owner, 10, 4, true);
        let ring = m.map_ring(&memory, &budget, &[8, 9]).unwrap();
        ring.write(PAGE_SIZE, b"ring");
        let mut seen = [0; 4];
        owner.read(3 * PAGE_SIZE, &mut seen);
        assert_eq!(&seen, b"ring");
        let e = m.map_ring(&memory, &budget, &[8, 10]).unwrap_err();
        assert!(e.to_string().contains("ring page 1"), "{e}");
        assert_eq!(budget.bytes(), 10 * PAGE_SIZE as u64);
        drop(m);
        assert_eq!(budget.bytes(), 0);
    }
}
