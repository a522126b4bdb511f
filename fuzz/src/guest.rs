//! A peer's memory: ring pages, a grant table, and data pages; and a private copy of what it must hold.

use pvblk_backend::{Access, GrantError, GrantMapper, PageUse};
use pvblk_block::Buffer;
use pvblk_protocol::blkif::EventChannel;
use pvblk_protocol::blkif::grant::{
    GRANT_ENTRY_SIZE, GRANTS_PER_PAGE, GrantEntry, RESERVED_GRANTS,
};
use pvblk_sys::{EventFd, PAGE_SIZE, Region, create_sealed};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

pub const DATA_PAGES: usize = 14;

/// Memory that both sides map, and the model of its contents.
pub struct Guest {
    /// Pages of the ring, from frame 0.
    pub ring_pages: usize,
    /// The back end's mapping.
    pub memory: Arc<Region>,
    /// The back end's mapping of the ring, to be taken by it.
    pub ring: Option<Region>,
    peer: Region,
    /// The expected content of the memory.
    pub shadow: Vec<u8>,
    scratch: Vec<u8>,
}

impl Guest {
    /// Fresh memory: an initialised ring; references `8 + i` to data page `i`, the last two pages read-only
    /// and two of them not granted.
    pub fn new(ring_pages: usize) -> Guest {
        let frames = ring_pages + 1 + DATA_PAGES;
        let len = frames * PAGE_SIZE;
        let fd = create_sealed("fuzz", len as u64).expect("memory");
        let map = |len| Region::shared(fd.as_fd(), 0, len, true).expect("memory");
        let mut guest = Guest {
            ring_pages,
            memory: Arc::new(map(len)),
            ring: Some(map(ring_pages * PAGE_SIZE)),
            peer: map(len),
            shadow: vec![0; len],
            scratch: vec![0; len],
        };
        guest.poke(4, &1u32.to_ne_bytes());
        guest.poke(12, &1u32.to_ne_bytes());
        // Whatever isn't written stays: zeros would hide what leaks.
        let rest = vec![0xa5; ring_pages * PAGE_SIZE - 64];
        guest.poke(64, &rest);
        for i in 0..DATA_PAGES {
            if i % 7 != 3 {
                let read_only = i + 2 >= DATA_PAGES;
                guest.grant(RESERVED_GRANTS + i as u32, guest.data_frame(i), read_only);
            }
        }
        guest
    }

    /// Frame of data page `i`.
    pub fn data_frame(&self, i: usize) -> u32 {
        (self.ring_pages + 1 + i) as u32
    }

    /// Frames of the memory.
    pub fn frames(&self) -> usize {
        self.shadow.len() / PAGE_SIZE
    }

    /// Offset of the grant table.
    pub fn table_at(&self) -> usize {
        self.ring_pages * PAGE_SIZE
    }

    /// The peer writes; what lies outside the memory is cut off.
    pub fn poke(&mut self, at: usize, bytes: &[u8]) {
        let at = at.min(self.shadow.len());
        let n = bytes.len().min(self.shadow.len() - at);
        self.peer.write(at, &bytes[..n]);
        self.shadow[at..at + n].copy_from_slice(&bytes[..n]);
    }

    /// The peer grants a frame.
    pub fn grant(&mut self, gref: u32, frame: u32, read_only: bool) {
        let at = self.table_at() + gref as usize % GRANTS_PER_PAGE * GRANT_ENTRY_SIZE;
        let flags = GrantEntry { frame, read_only }.encode_flags(0);
        self.poke(at, &flags.to_ne_bytes());
        self.poke(at + 4, &frame.to_ne_bytes());
    }

    /// The word at `at`, as the memory must hold it.
    pub fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.bytes(at))
    }

    /// Bytes at `at`, as the memory must hold them.
    pub fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut b = [0; N];
        b.copy_from_slice(&self.shadow[at..at + N]);
        b
    }

    /// Panics if any byte of the memory isn't as it must be.
    pub fn check(&mut self, after: &str) {
        self.peer.read(0, &mut self.scratch);
        if self.scratch != self.shadow {
            let differs = |&i: &usize| self.scratch[i] != self.shadow[i];
            let at = (0..self.shadow.len()).find(differs).unwrap_or(0);
            panic!(
                "after {after}: byte {at:#x} (page {}, offset {:#x}) is {:#x}, must be {:#x}",
                at / PAGE_SIZE,
                at % PAGE_SIZE,
                self.scratch[at],
                self.shadow[at]
            );
        }
    }

    /// The offset in the memory to which a reference must resolve.
    pub fn resolve(&self, gref: u32, offset: usize, writable: bool) -> Option<usize> {
        if gref < RESERVED_GRANTS || gref as usize >= GRANTS_PER_PAGE {
            return None;
        }
        let at = self.table_at() + gref as usize * GRANT_ENTRY_SIZE;
        let (flags, frame) = (self.word(at), self.word(at + 4) as usize);
        let permits = flags & 3 == 1 && !(writable && flags & 4 != 0);
        (permits && frame < self.frames()).then_some(frame * PAGE_SIZE + offset)
    }
}

/// References in use, and how many may be at once.
#[derive(Default)]
pub struct Maps {
    /// Uses of each reference.
    pub live: BTreeMap<u32, u32>,
    /// Sum of the uses.
    pub total: usize,
    /// Most uses at once.
    pub budget: usize,
}

/// Looks references up in the guest's table, as a real mapper does, and counts uses.
pub struct TableMapper {
    memory: Arc<Region>,
    table_at: usize,
    counted: bool,
    maps: Arc<Mutex<Maps>>,
}

impl TableMapper {
    /// A mapper over a guest; `counted`: each use must be ended.
    pub fn new(guest: &Guest, counted: bool, maps: Arc<Mutex<Maps>>) -> TableMapper {
        TableMapper {
            memory: Arc::clone(&guest.memory),
            table_at: guest.table_at(),
            counted,
            maps,
        }
    }
}

impl GrantMapper for TableMapper {
    fn map(
        &mut self,
        gref: u32,
        offset: usize,
        len: usize,
        writable: bool,
    ) -> Result<(Buffer, Access), GrantError> {
        assert!(offset + len <= PAGE_SIZE && len > 0, "the caller's promise");
        if gref < RESERVED_GRANTS || gref as usize >= GRANTS_PER_PAGE {
            return Err(GrantError::Bad(gref));
        }
        let at = self.table_at + gref as usize * GRANT_ENTRY_SIZE;
        let word = |at| self.memory.atomic_u32(at).load(Ordering::Acquire);
        let entry = GrantEntry::decode(word(at), word(at + 4)).ok_or(GrantError::Bad(gref))?;
        if writable && entry.read_only {
            return Err(GrantError::ReadOnly(gref));
        }
        let at = (entry.frame as usize)
            .checked_mul(PAGE_SIZE)
            .ok_or(GrantError::Frame(gref))?;
        let buffer = Buffer::new(&self.memory, at + offset, len).ok_or(GrantError::Frame(gref))?;
        if self.counted {
            let mut maps = self.maps.lock().expect("one thread");
            if maps.total == maps.budget {
                return Err(GrantError::Exhausted(gref));
            }
            maps.total += 1;
            *maps.live.entry(gref).or_default() += 1;
            return Ok((buffer, Access::Mapped));
        }
        Ok((buffer, Access::Direct))
    }

    fn release(&mut self, page: PageUse) {
        assert!(self.counted, "released without need");
        let gref = page.gref;
        let mut maps = self.maps.lock().expect("one thread");
        let uses = maps.live.get_mut(&gref).expect("unmapped, but not mapped");
        *uses -= 1;
        if *uses == 0 {
            maps.live.remove(&gref);
        }
        maps.total -= 1;
    }
}

/// A doorbell that counts.
pub struct CountingChannel {
    fd: Arc<EventFd>,
    rung: Arc<AtomicU32>,
}

impl CountingChannel {
    /// The doorbell and its counter.
    pub fn new() -> (CountingChannel, Arc<AtomicU32>) {
        thread_local!(static FD: Arc<EventFd> = Arc::new(EventFd::new().expect("an eventfd")));
        let rung = Arc::new(AtomicU32::new(0));
        let channel = CountingChannel {
            fd: FD.with(Arc::clone),
            rung: Arc::clone(&rung),
        };
        (channel, rung)
    }
}

impl EventChannel for CountingChannel {
    fn notify(&self) {
        self.rung.fetch_add(1, Ordering::Relaxed);
    }
    fn clear(&self) {}
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
