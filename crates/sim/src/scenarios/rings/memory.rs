//! A front end's memory: grant table, rings, data; mapped once by each side and used again from seed to seed.

use crate::fuse::{Fuse, Side};
use parking_lot::Mutex;
use pvblk_backend::{Access, GrantError, GrantMapper, PageUse};
use pvblk_block::{Buffer, Region};
use pvblk_client::rings::Granter;
use pvblk_protocol::blkif::grant::{
    GRANT_ENTRY_SIZE, GRANTS_PER_PAGE, GrantEntry, RESERVED_GRANTS,
};
use pvblk_sys::{PAGE_SIZE, create_sealed};
use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Frames (4 KiB) of the memory.
const FRAMES: u32 = 640;
const TABLE_FRAMES: u32 = 3;
/// Frames for rings, of all queues.
pub const RING_FRAMES: u32 = 16;
const FIRST_DATA: u32 = TABLE_FRAMES + RING_FRAMES;
const GRANTS: u32 = TABLE_FRAMES * GRANTS_PER_PAGE as u32;

thread_local!(static POOL: RefCell<Vec<FrontMemory>> = const { RefCell::new(Vec::new()) });

/// The memory of a front end.
pub struct FrontMemory {
    file: OwnedFd,
    front: Arc<Region>,
    back: Arc<Region>,
    /// The number of mappings that the back end has of each reference, where it has to unmap.
    uses: Mutex<Vec<u16>>,
}

impl FrontMemory {
    /// Memory with an empty grant table. Data pages keep their old contents.
    pub fn take() -> io::Result<Arc<FrontMemory>> {
        if let Some(m) = POOL.with_borrow_mut(Vec::pop) {
            m.front.zero(0, TABLE_FRAMES as usize * PAGE_SIZE);
            m.forget_uses();
            return Ok(Arc::new(m));
        }
        let bytes = FRAMES as usize * PAGE_SIZE;
        let file = create_sealed("pvblk-sim", bytes as u64)?;
        let map = || Region::shared(file.as_fd(), 0, bytes, true).map_err(io::Error::other);
        Ok(Arc::new(FrontMemory {
            front: Arc::new(map()?),
            back: Arc::new(map()?),
            file,
            uses: Mutex::new(vec![0; GRANTS as usize]),
        }))
    }

    /// Keeps the memory for the next front end; an error names the users that still have it.
    pub fn give_back(self: Arc<FrontMemory>) -> Result<(), String> {
        let held = self.uses();
        let memory = Arc::try_unwrap(self).map_err(|_| "grants or mappings outlive their users")?;
        if held > 0 {
            return Err(format!("{held} references are still mapped"));
        }
        let (front, back) = (&memory.front, &memory.back);
        if Arc::strong_count(front) > 1 || Arc::strong_count(back) > 1 {
            return Err(format!(
                "buffers in the memory of a front end outlive it: {} of its own, {} of the back end's",
                Arc::strong_count(front) - 1,
                Arc::strong_count(back) - 1
            ));
        }
        POOL.with_borrow_mut(|pool| pool.push(memory));
        Ok(())
    }

    /// Number of references that the back end has mapped.
    pub fn uses(&self) -> usize {
        self.uses.lock().iter().map(|&n| usize::from(n)).sum()
    }

    /// Forgets all mappings: the back end was killed.
    pub fn forget_uses(&self) {
        self.uses.lock().fill(0);
    }

    /// First frame of ring `queue`.
    pub fn ring_frame(&self, queue: usize, pages: usize) -> u32 {
        TABLE_FRAMES + (queue * pages) as u32
    }

    /// One side's mapping of `pages` frames from `frame` on.
    pub fn map_ring(&self, frame: u32, pages: usize) -> io::Result<Region> {
        let at = u64::from(frame) * PAGE_SIZE as u64;
        Region::shared(self.file.as_fd(), at, pages * PAGE_SIZE, true).map_err(io::Error::other)
    }

    /// Adds to a 32-bit index at `offset` of a frame, as a broken peer does.
    pub fn disturb(&self, frame: u32, offset: usize, by: u32) {
        let index = self.back.atomic_u32(frame as usize * PAGE_SIZE + offset);
        index.fetch_add(by, Ordering::SeqCst);
    }
}

struct Grants {
    used: Vec<bool>,
    /// References that don't belong to a frame.
    spare: Vec<u32>,
    live: usize,
    /// True for each data frame that is granted; each is granted once, where grants are kept.
    frames: Vec<bool>,
    rng: fastrand::Rng,
}

/// Writes the grant table, and counts grants.
pub struct SimGranter {
    memory: Arc<FrontMemory>,
    persistent: bool,
    /// One of this many grants is refused, as if the table were full; 0: none.
    refuse: AtomicU32,
    grants: Mutex<Grants>,
    fuse: Arc<Fuse>,
}

impl SimGranter {
    /// A granter for one connection. The references of a killed back end leave the table.
    pub fn new(
        memory: &Arc<FrontMemory>,
        persistent: bool,
        refuse: u32,
        seed: u64,
        fuse: &Arc<Fuse>,
    ) -> SimGranter {
        memory.front.zero(0, TABLE_FRAMES as usize * PAGE_SIZE);
        SimGranter {
            memory: Arc::clone(memory),
            persistent,
            refuse: AtomicU32::new(refuse),
            grants: Mutex::new(Grants {
                used: vec![false; GRANTS as usize],
                spare: (RESERVED_GRANTS + FRAMES..GRANTS).rev().collect(),
                live: 0,
                frames: vec![false; FRAMES as usize],
                rng: fastrand::Rng::with_seed(seed),
            }),
            fuse: Arc::clone(fuse),
        }
    }

    /// True if grants stay for the lifetime of the connection.
    pub fn is_persistent(&self) -> bool {
        self.persistent
    }

    /// Refuses no grant any more.
    pub fn be_generous(&self) {
        self.refuse.store(0, Ordering::Relaxed);
    }

    /// Grants frames of a ring.
    pub fn grant_ring(&self, first: u32, pages: usize) -> Vec<u32> {
        let mut g = self.grants.lock();
        let frames = first..first + pages as u32;
        frames.filter_map(|f| self.add(&mut g, f, false)).collect()
    }

    /// Number of references that were granted and not ended, without the rings'.
    pub fn live_data(&self, ring_pages: usize) -> usize {
        self.grants.lock().live - ring_pages
    }

    fn add(&self, g: &mut Grants, frame: u32, read_only: bool) -> Option<u32> {
        let own = RESERVED_GRANTS + frame;
        let gref = if g.used[own as usize] {
            g.spare.pop()?
        } else {
            own
        };
        g.used[gref as usize] = true;
        g.live += 1;
        let at = gref as usize * GRANT_ENTRY_SIZE;
        let flags = GrantEntry { frame, read_only }.encode_flags(0);
        let table = &self.memory.front;
        table.atomic_u32(at + 4).store(frame, Ordering::Relaxed);
        table.atomic_u32(at).store(flags, Ordering::Release);
        Some(gref)
    }
}

impl Granter for SimGranter {
    fn memory(&self) -> &Arc<Region> {
        &self.memory.front
    }

    fn first_data_frame(&self) -> u32 {
        FIRST_DATA
    }

    fn grant(&self, frame: u32, read_only: bool) -> Option<u32> {
        self.fuse.tick(Side::Front);
        let mut g = self.grants.lock();
        assert!(
            (FIRST_DATA..FRAMES).contains(&frame),
            "a grant of frame {frame}, which is no data"
        );
        let refuse = self.refuse.load(Ordering::Relaxed);
        if refuse > 0 && g.rng.u32(..refuse) == 0 {
            return None;
        }
        if self.persistent {
            let twice = std::mem::replace(&mut g.frames[frame as usize], true);
            assert!(
                !twice,
                "frame {frame} is granted twice, and grants are kept"
            );
            assert!(!read_only, "a kept grant is read-only");
        }
        self.add(&mut g, frame, read_only)
    }

    fn end(&self, gref: u32) {
        self.fuse.tick(Side::Front);
        assert!(!self.persistent, "a kept grant was ended");
        let mapped = self.memory.uses.lock()[gref as usize];
        assert!(
            mapped == 0,
            "reference {gref} ends while the back end has it mapped"
        );
        let mut g = self.grants.lock();
        let used = std::mem::replace(&mut g.used[gref as usize], false);
        assert!(used, "reference {gref} ends twice");
        g.live -= 1;
        if gref >= RESERVED_GRANTS + FRAMES {
            g.spare.push(gref);
        }
        let at = gref as usize * GRANT_ENTRY_SIZE;
        self.memory.front.atomic_u32(at).store(0, Ordering::Release);
    }
}

/// Looks references up in the table, and counts mappings.
pub struct SimMapper {
    memory: Arc<FrontMemory>,
    counted: bool,
    fuse: Arc<Fuse>,
}

impl SimMapper {
    /// With `counted`, every mapping must be ended before its request completes.
    pub fn new(memory: &Arc<FrontMemory>, counted: bool, fuse: &Arc<Fuse>) -> SimMapper {
        SimMapper {
            memory: Arc::clone(memory),
            counted,
            fuse: Arc::clone(fuse),
        }
    }

    /// The frame behind a reference.
    pub fn resolve(&self, gref: u32, writable: bool) -> Result<u32, GrantError> {
        if gref >= GRANTS {
            return Err(GrantError::Bad(gref));
        }
        let at = gref as usize * GRANT_ENTRY_SIZE;
        let word = |at| self.memory.back.atomic_u32(at).load(Ordering::Acquire);
        let entry = GrantEntry::decode(word(at), word(at + 4)).ok_or(GrantError::Bad(gref))?;
        if entry.frame >= FRAMES {
            return Err(GrantError::Frame(gref));
        }
        if writable && entry.read_only {
            return Err(GrantError::ReadOnly(gref));
        }
        Ok(entry.frame)
    }
}

impl GrantMapper for SimMapper {
    fn map(
        &mut self,
        gref: u32,
        at: usize,
        len: usize,
        writable: bool,
    ) -> Result<(Buffer, Access), GrantError> {
        self.fuse.tick(Side::Back);
        let frame = self.resolve(gref, writable)? as usize;
        let buffer = Buffer::new(&self.memory.back, frame * PAGE_SIZE + at, len);
        let buffer = buffer.ok_or(GrantError::Frame(gref))?;
        if !self.counted {
            return Ok((buffer, Access::Direct));
        }
        self.memory.uses.lock()[gref as usize] += 1;
        Ok((buffer, Access::Mapped))
    }

    fn release(&mut self, page: PageUse) {
        self.fuse.tick(Side::Back);
        let mut uses = self.memory.uses.lock();
        let n = uses[page.gref as usize].checked_sub(1);
        uses[page.gref as usize] = n.expect("unmapped, but not mapped");
    }
}
