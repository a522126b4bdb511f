//! Memory of the cache: which frame has which page, which frames are free, and which go next.

mod allocation;
mod check;
mod giving;
mod reclaim;

pub use allocation::{Allocation, Moment};
pub use giving::{Giving, Next};

use super::pieces::{copy, meeting};
use super::writeback::WriteBack;
use super::{Request, Store};
use crate::alloc::{Allocator, End, MAX_ORDER};
use crate::config::{CacheConfig, PAGE_BYTES};
use crate::counters::Counters;
use crate::lists::{Lists, On, Shadows};
use crate::policy::Policy;
use crate::table::Table;
use pvblk_block::Region;
use pvblk_block::memory::Gauge;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A read whose pages have this part of the frames, or less, finds them when all have come: between the first and the last, reclaim takes older ones.
const KEPT_PART: u64 = 16;
/// Pages of the largest such read: others want their frames, too.
const MOST_KEPT: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    /// The allocator has it, or a request that has not enough of them yet.
    Free,
    /// A page is being read into it.
    Reading {
        /// The list that it goes to then.
        on: On,
    },
    /// It has a page, which may be read.
    Cached,
    /// It has the older version of a page, which is being written.
    Old,
}

/// The memory machine. It owns the frames: the allocator, the table from pages to frames, the two lists, the memory of pages that are gone, and the data.
///
/// ```text
///            place, to be read              read
///          ┌──────────────────▶ reading ─────────────▶ cached ──supersede──▶ old
///  free ───┤                       │ read error          ▲ │                  │
///    ▲     └──place, to be written─┼─────────────────────┘ │ reclaim, drop    │ written
///    └─────────────────────────────┴───────────────────────┴──────────────────┘
/// ```
///
/// **Events in:** a frame is wanted, now or for a request that can wait ([`Allocation`]); a page is placed, read, dropped, moved to another frame; background
/// reclaim takes a turn; memory is given back to the system. **Out:** frames; and, to the write-back machine, that reclaim met dirty pages. It asks
/// that machine whether a frame's data is at the device, and knows nothing of requests and I/O.
///
/// **Invariants.**
/// - *A frame is in exactly one place:* free in the allocator; free and held by a request; being read, found by its page, on no list; cached, found by
///   its page, on one list; old, not found, on no list.
/// - A page has one frame that can be found. Its data can be read without a lock unless it is being read or changed.
/// - Only a frame that is cached and clean is reclaimed, dropped or given back.
/// - `reading` counts the frames that are being read; they count as inactive.
/// - A request that holds frames and gets no more gives up or goes on with fewer; it doesn't wait for ever.
pub struct Memory<P> {
    table: Arc<Table>,
    region: Arc<Region>,
    /// On the bill: the frames' part of the system's memory.
    gauge: Gauge,
    policy: P,
    timeout: Duration,
    alloc: Allocator<P>,
    lists: Lists,
    shadows: Shadows,
    frames: Box<[Frame]>,
    reading: usize,
    /// The allocator's list that each owner uses.
    list_of: Vec<usize>,
    /// Background reclaim was asked for.
    wants_background: bool,
    /// When the uses of active pages were last looked at, to give back those without any.
    aged: Option<Instant>,
    counters: Counters,
}

impl<P: Policy> Memory<P> {
    /// Bytes for each frame, about, besides the table.
    pub const FRAME_BYTES: usize = size_of::<Frame>() + 48;

    pub fn new(config: &CacheConfig, policy: P, store: Store, cpus: usize) -> Memory<P> {
        let frames = config.frames();
        let lists = match config.lists {
            0 => cpus,
            n => n as usize,
        };
        Memory {
            table: store.table,
            region: store.region,
            gauge: store.memory,
            timeout: config.timeout,
            alloc: Allocator::new(frames, lists, policy.clone()),
            lists: Lists::new(frames),
            shadows: Shadows::new(frames),
            frames: vec![Frame::Free; frames].into(),
            reading: 0,
            list_of: vec![0],
            wants_background: false,
            aged: None,
            counters: Counters::default(),
            policy,
        }
    }

    /// A queue is opened that uses the list of CPU `index`.
    pub fn open(&mut self, owner: usize, index: u32) {
        if self.list_of.len() <= owner {
            self.list_of.resize(owner + 1, 0);
        }
        self.list_of[owner] = index as usize;
    }

    pub fn counters(&self) -> Counters {
        Counters {
            nr_free_pages: self.alloc.free_frames() as u64,
            nr_listed_pages: self.alloc.listed_frames() as u64,
            nr_inactive_file: (self.lists.len(On::Inactive) + self.reading) as u64,
            nr_active_file: self.lists.len(On::Active) as u64,
            nr_warm_pages: self.alloc.warm_frames() as u64,
            ..self.counters
        }
    }

    /// Free blocks of each order.
    pub fn free_blocks(&self) -> [usize; MAX_ORDER + 1] {
        self.alloc.blocks()
    }

    /// The frame that has the page, whether it can be read or not.
    pub fn find(&self, page: u64) -> Option<u32> {
        self.table.find_locked(page)
    }

    pub fn is_reading(&self, frame: u32) -> bool {
        matches!(self.frames[frame as usize], Frame::Reading { .. })
    }

    /// Pages allocated so far, and those of them that were read in advance and reclaimed unused.
    pub fn read_ahead_losses(&self) -> (u64, u64) {
        (self.counters.pgalloc, self.counters.readahead_lost)
    }

    /// Frames that reads may have at the same time.
    pub fn room_for_reads(&self) -> u64 {
        let frames = self.frames.len() - self.alloc.marks().high;
        let percent = usize::from(self.policy.kept_from_reads_percent());
        let kept = self.lists.len(On::Active).min(frames * percent / 100);
        (frames - kept) as u64
    }

    /// Gives a free frame a page: it is to be read into it, or, without `reading`, to be written to at once.
    pub fn place(&mut self, page: u64, frame: u32, reading: bool) {
        debug_assert!(self.frames[frame as usize] == Frame::Free);
        self.table.insert(page, frame);
        let mut on = On::Inactive;
        if let Some(distance) = self.shadows.refault(page) {
            self.counters.workingset_refault_file += 1;
            let active = self.lists.len(On::Active) as u64;
            let frames = self.frames.len() as u64;
            if self.policy.returns_as_active(distance, active, frames) {
                self.counters.workingset_activate_file += 1;
                on = On::Active;
            }
        }
        if reading {
            self.frames[frame as usize] = Frame::Reading { on };
            self.reading += 1;
        } else {
            self.frames[frame as usize] = Frame::Cached;
            self.lists.put(frame, on);
        }
    }

    /// The page, which is being read, is one that nobody asked for.
    pub fn set_ahead(&mut self, frame: u32) {
        self.table.set_ahead(frame);
    }

    /// True if the page was read in advance and nobody has used it.
    pub fn is_ahead(&self, frame: u32) -> bool {
        self.table.is_ahead(frame)
    }

    /// The read that has this page, present or on its way, is to start the next window.
    pub fn mark(&mut self, frame: u32) {
        self.table.mark(frame);
    }

    /// Removes a mark; true if there was one.
    pub fn unmark(&mut self, frame: u32) -> bool {
        let marked = self.table.is_marked(frame);
        if marked {
            self.table.unmark(frame);
        }
        marked
    }

    /// The page has been read: its data may be used.
    pub fn read(&mut self, frame: u32) {
        self.reading -= 1;
        let state = std::mem::replace(&mut self.frames[frame as usize], Frame::Cached);
        if let Frame::Reading { on } = state {
            self.lists.put(frame, on);
        }
        self.table.open(frame, self.table.is_marked(frame));
    }

    /// True if so many pages of a read are most likely still there when all of them have come.
    pub fn keeps(&self, pages: u64) -> bool {
        pages <= MOST_KEPT && KEPT_PART * pages <= self.frames.len() as u64
    }

    /// Copies the part of a page that a request reads.
    pub fn copy_out(&self, request: &Request, page: u64, frame: u32) {
        let (skip, first, len) = meeting(request, page);
        let offset = frame as usize * PAGE_BYTES + first;
        copy(&request.buffers, skip, &self.region, offset, len, false);
    }

    /// Counts an access. True if it is the first use of a page that was read in advance.
    pub fn touch(&mut self, frame: u32) -> bool {
        self.table.touch(frame)
    }

    /// Copies the part of a page that a request writes, and opens it to readers.
    pub fn copy_in(&mut self, request: &Request, page: u64, frame: u32) {
        let (skip, first, len) = meeting(request, page);
        let offset = frame as usize * PAGE_BYTES + first;
        let marked = self.table.is_marked(frame);
        self.table.shut(frame);
        copy(&request.buffers, skip, &self.region, offset, len, true);
        self.table.open(frame, marked);
        self.table.touch(frame);
    }

    /// Moves a page from the frame that is being written to a free one. With `copies`, its data as well; else all of it is about to be written.
    pub fn supersede(&mut self, page: u64, old: u32, new: u32, copies: bool) {
        debug_assert!(self.frames[new as usize] == Frame::Free);
        if copies {
            let (to, from) = (new as usize * PAGE_BYTES, old as usize * PAGE_BYTES);
            self.region.copy_from(to, &self.region, from, PAGE_BYTES);
        }
        let uses = self.table.uses(old);
        let on = self.lists.on(old);
        self.table.remove(old);
        self.lists.put(old, On::None);
        self.frames[old as usize] = Frame::Old;
        self.frames[new as usize] = Frame::Cached;
        self.table.insert(page, new);
        self.table.set_uses(new, uses);
        self.lists.put(new, on);
    }

    /// Takes a page out of the cache, which could not be read or isn't wanted any more; its frame is free then.
    pub fn drop_page(&mut self, frame: u32) {
        self.reading -= usize::from(self.is_reading(frame));
        self.table.remove(frame);
        self.lists.put(frame, On::None);
        self.free(frame, 0);
    }

    /// Frees the frame of an older version, which isn't at the device any more.
    pub fn free_old(&mut self, frame: u32) {
        debug_assert!(self.frames[frame as usize] == Frame::Old);
        self.free(frame, 0);
    }

    /// Frees frames that a request got and has not placed.
    pub fn give_up(&mut self, owner: usize, frames: impl Iterator<Item = u32>) {
        let list = self.list_of[owner];
        frames.for_each(|frame| self.free(frame, list));
    }

    fn free(&mut self, frame: u32, list: usize) {
        self.clear(frame);
        self.alloc.give(list, End::Cold, frame);
    }

    fn clear(&mut self, frame: u32) {
        self.frames[frame as usize] = Frame::Free;
        self.counters.pgfree += 1;
    }

    /// Drops every clean page, as `drop_caches` does. Returns how many those were.
    pub fn drop_clean(&mut self, writes: &WriteBack) -> usize {
        let mut dropped = 0;
        for frame in 0..self.frames.len() as u32 {
            if self.frames[frame as usize] == Frame::Cached && writes.is_clean(frame) {
                self.drop_page(frame);
                dropped += 1;
            }
        }
        self.alloc.drain();
        dropped
    }

    /// The frames that have pages, by page, from `first` on and before `end`.
    pub fn pages(&self, first: u64, end: u64) -> Vec<(u64, u32)> {
        if end - first <= self.frames.len() as u64 {
            let find = |page| Some((page, self.find(page)?));
            return (first..end).filter_map(find).collect();
        }
        // Rather all frames than all pages.
        let frames = 0..self.frames.len() as u32;
        let inside = |frame| Some((self.page_of(frame)?, frame));
        let found = frames.filter_map(inside);
        let mut found: Vec<_> = found.filter(|(p, _)| (first..end).contains(p)).collect();
        found.sort_unstable();
        found
    }

    /// The page that a frame has.
    pub fn page_of(&self, frame: u32) -> Option<u64> {
        match self.frames[frame as usize] {
            Frame::Reading { .. } | Frame::Cached => Some(self.table.page(frame)),
            Frame::Free | Frame::Old => None,
        }
    }

    /// Number of all frames.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    fn count_memory(&self) {
        let bytes = self.alloc.warm_frames() * PAGE_BYTES;
        self.gauge.set(bytes as u64);
    }
}
