//! A front end's memory: a ring, a grant table, data pages; and a back end's source over it.

use parking_lot::Mutex;
use pvblk_backend::{Access, BlkifQueueParts, BlkifSource, GrantError, GrantMapper, PageUse};
use pvblk_block::Buffer;
use pvblk_protocol::blkif::grant::{GRANTS_PER_PAGE, GrantEntry, RESERVED_GRANTS};
use pvblk_protocol::blkif::wire::Segment;
use pvblk_protocol::blkif::{BackRing, EventFdChannel, FrontRing};
use pvblk_sys::{PAGE_SIZE, PeerEvent, Region, create_sealed};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// A reference to a page that may be written.
pub const WRITABLE: u32 = 8;
/// A reference to a page that may only be read.
pub const READ_ONLY: u32 = 9;
/// A reference whose frame is outside the memory.
pub const OUTSIDE: u32 = 10;
/// A reference that grants nothing.
pub const NOT_GRANTED: u32 = 11;

/// Frames: ring, table, one page for each of the first two references.
const FRAMES: usize = 4;

pub struct Peer {
    pub front: FrontRing,
    pub source: BlkifSource,
    memory: Region,
    mapped: Arc<Mutex<Vec<u32>>>,
}

impl Peer {
    /// A ring of one page. `unmaps`: the mapper wants every reference unmapped.
    pub fn new(max_indirect_segments: u16, unmaps: bool) -> Peer {
        let len = FRAMES * PAGE_SIZE;
        let fd = create_sealed("peer", len as u64).unwrap();
        let all = || Region::shared(fd.as_fd(), 0, len, true).unwrap();
        let ring = || Region::shared(fd.as_fd(), 0, PAGE_SIZE, true).unwrap();
        let memory = all();
        for (gref, frame, read_only) in [
            (WRITABLE, 2, false),
            (READ_ONLY, 3, true),
            (OUTSIDE, FRAMES as u32, false),
        ] {
            let flags = GrantEntry { frame, read_only }.encode_flags(0);
            memory.write(PAGE_SIZE + gref as usize * 8, &flags.to_ne_bytes());
            memory.write(PAGE_SIZE + gref as usize * 8 + 4, &frame.to_ne_bytes());
        }
        let front = FrontRing::new(ring()).unwrap();
        let mapped = Arc::new(Mutex::new(Vec::new()));
        let event = || PeerEvent::new().unwrap();
        let source = BlkifSource::new(BlkifQueueParts {
            name: "test".into(),
            ring: BackRing::new(ring()).unwrap(),
            channel: Box::new(EventFdChannel {
                to_peer: event(),
                from_peer: event(),
            }),
            mapper: Box::new(TableMapper {
                memory: Arc::new(all()),
                unmaps,
                mapped: Arc::clone(&mapped),
            }),
            max_indirect_segments,
        });
        Peer {
            front,
            source,
            memory,
            mapped,
        }
    }

    /// References in use; 0 if the mapper doesn't count.
    pub fn mapped(&self) -> usize {
        self.mapped.lock().len()
    }

    /// Offset of a reference's page.
    pub fn page(&self, gref: u32) -> usize {
        (gref - WRITABLE + 2) as usize * PAGE_SIZE
    }

    /// Writes segments to a reference's page.
    pub fn fill_segments(&self, gref: u32, segments: &[Segment]) {
        self.memory.write(self.page(gref), segments.as_bytes());
    }

    /// Lies about `req_prod`.
    pub fn set_request_producer(&self, index: u32) {
        self.memory.atomic_u32(0).store(index, Ordering::Release);
    }

    /// The ring's page.
    pub fn ring_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_SIZE];
        self.memory.read(0, &mut bytes);
        bytes
    }
}

struct TableMapper {
    memory: Arc<Region>,
    unmaps: bool,
    mapped: Arc<Mutex<Vec<u32>>>,
}

impl GrantMapper for TableMapper {
    fn map(
        &mut self,
        gref: u32,
        offset: usize,
        len: usize,
        writable: bool,
    ) -> Result<(Buffer, Access), GrantError> {
        assert!(len > 0 && offset + len <= PAGE_SIZE, "the caller's promise");
        if gref < RESERVED_GRANTS || gref as usize >= GRANTS_PER_PAGE {
            return Err(GrantError::Bad(gref));
        }
        let word = |i| {
            let at = PAGE_SIZE + gref as usize * 8 + i;
            self.memory.atomic_u32(at).load(Ordering::Acquire)
        };
        let entry = GrantEntry::decode(word(0), word(4)).ok_or(GrantError::Bad(gref))?;
        if writable && entry.read_only {
            return Err(GrantError::ReadOnly(gref));
        }
        let at = entry.frame as usize * PAGE_SIZE + offset;
        let buffer = Buffer::new(&self.memory, at, len).ok_or(GrantError::Frame(gref))?;
        if !self.unmaps {
            return Ok((buffer, Access::Direct));
        }
        self.mapped.lock().push(gref);
        Ok((buffer, Access::Mapped))
    }

    fn release(&mut self, page: PageUse) {
        let mut mapped = self.mapped.lock();
        let at = mapped.iter().position(|&g| g == page.gref);
        mapped.swap_remove(at.expect("unmapped, but not mapped"));
    }
}
