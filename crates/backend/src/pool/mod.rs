//! Buffers for sources without memory of their own, such as a socket.
//!
//! Invariants: a page is in use, free, or on its way back to the system, and never two of these. Only the
//! free list gives pages back, and it takes only memory that is [`pvblk_sys::Idle`]: of which there is no
//! other buffer. The lock is held for moves from list to list, never while the system takes pages.

mod free;

use crate::budget::{Budget, Claim};
use crate::pressure::Pressure;
use free::{CLASSES, Drained, FreeList, MAX_ORDER, PIECE_BYTES, class_len, class_of};
use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, BufferSource, Job};
use pvblk_sys::PAGE_SIZE;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// A pool of page-granular buffers, used by one source.
///
/// It starts empty and grows on demand: from the device's own memory where there is some (which saves a
/// copy), else from private pages. Free buffers wait in last-in-first-out lists, one for each power of two,
/// so that a steady load cycles through the same few cache-hot pages and allocates nothing. Free memory goes
/// back to the system when the source says that its I/O is over, and at once, from any thread, when its
/// [`Pressure`] squeezes it.
pub struct BufferPool {
    shared: Arc<PoolShared>,
}

/// Counters of a pool since it was made. Counters of several pools are added field by field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Pages (4 KiB) that are free and have memory behind them.
    pub free_pages: u64,
    /// Pages taken and not yet given back.
    pub used_pages: u64,
    /// Most pages at once, free and used.
    pub peak_pages: u64,
    /// Pages that were taken from the system, or the device, and not from the free list.
    pub allocated_pages: u64,
    /// Pages that sources took.
    pub taken_pages: u64,
    /// Pages given back to the system by squeezes.
    pub squeezed_pages: u64,
    /// Pages given back to the system, by squeezes or otherwise.
    pub returned_pages: u64,
    /// Number of squeezes that found free pages.
    pub squeezes: u64,
    /// Times that a source had to wait because the pool was at its bound, or the system had no memory.
    pub stalls: u64,
    /// Number of buffers that came back while they were in use elsewhere; they are used again when
    /// they are not any more.
    pub claimed: u64,
}

impl std::ops::AddAssign for PoolCounters {
    fn add_assign(&mut self, o: PoolCounters) {
        self.free_pages += o.free_pages;
        self.used_pages += o.used_pages;
        self.peak_pages += o.peak_pages;
        self.allocated_pages += o.allocated_pages;
        self.taken_pages += o.taken_pages;
        self.squeezed_pages += o.squeezed_pages;
        self.returned_pages += o.returned_pages;
        self.squeezes += o.squeezes;
        self.stalls += o.stalls;
        self.claimed += o.claimed;
    }
}

/// State that the owner shares with threads that squeeze the pool.
pub(crate) struct PoolShared {
    inner: Mutex<Inner>,
    /// About `inner.free.hot_pages()`: a squeeze skips an empty pool.
    free_pages: AtomicUsize,
    /// Pages of the process's floor that are reserved for this pool. Changed under the lock, read without it.
    floor_pages: AtomicUsize,
    source: Option<Arc<dyn BufferSource>>,
    gauge: Gauge,
    pressure: Arc<Pressure>,
    disk: String,
    /// The budget that private pages count to.
    budget: OnceLock<Arc<Budget>>,
}

/// Number of free pages that are given back at a time where other owners wait for them: the system needs some
/// tens of microseconds for that many.
const PAGES_AT_A_TIME: usize = 256;

struct Inner {
    free: FreeList,
    /// Pages taken and not yet given back.
    used_pages: usize,
    /// Most pages, free and used.
    limit_pages: usize,
    /// Least number of free pages since the last decay: that many were not needed.
    low_free: usize,
    counters: PoolCounters,
    /// Bytes of private pages, free and used; `None` without a budget.
    claim: Option<Claim>,
    /// Bytes of private pages that were taken from the system since it was made.
    grown: u64,
    /// The last attempt to take pages failed for want of budget.
    short: bool,
}

/// Pages that are on their way to the system; see [`PoolShared::begin`].
pub(crate) struct Leaving {
    drained: Drained,
    /// Bytes of private memory with pages behind it.
    bytes: u64,
}

impl Leaving {
    /// Bytes that the system gets.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives all of these to the system at once.
    pub(crate) fn release_all<'a>(all: impl Iterator<Item = &'a mut Leaving>) {
        Drained::release_all(all.map(|l| &mut l.drained));
    }
}

impl BufferPool {
    /// An empty pool for a disk, of at most `limit_pages` (4 KiB each), on the memory bill as `owner`.
    /// `source` is the device's ([`pvblk_block::BlockDevice::buffer_source`]). `pressure` squeezes the pool
    /// and sets its limit of free pages.
    pub fn new(
        pressure: &Arc<Pressure>,
        disk: &str,
        owner: &str,
        source: Option<Arc<dyn BufferSource>>,
        limit_pages: usize,
    ) -> BufferPool {
        let cap = (limit_pages * (PAGE_SIZE + PIECE_BYTES)) as u64;
        let shared = Arc::new(PoolShared {
            inner: Mutex::new(Inner {
                free: FreeList::default(),
                used_pages: 0,
                limit_pages,
                low_free: 0,
                counters: PoolCounters::default(),
                claim: None,
                grown: 0,
                short: false,
            }),
            free_pages: AtomicUsize::new(0),
            floor_pages: AtomicUsize::new(0),
            source,
            gauge: Gauge::new(owner, MemoryKind::Anonymous, cap),
            pressure: Arc::clone(pressure),
            disk: disk.to_owned(),
            budget: OnceLock::new(),
        });
        pressure.register(&shared);
        BufferPool { shared }
    }

    /// The pool with private pages, free and used, that count to `budget`. To be called before it is used.
    #[must_use]
    pub fn with_budget(self, budget: &Arc<Budget>) -> BufferPool {
        self.shared.inner.lock().claim = budget.take(0);
        let _ = self.shared.budget.set(Arc::clone(budget));
        self
    }

    /// Most bytes that [`BufferPool::take`] of `len` takes of the budget.
    pub fn claimed_for(len: usize) -> u64 {
        let largest = class_len(MAX_ORDER);
        let rest = match len % largest {
            0 => 0,
            n => class_len(class_of(n)),
        };
        (len / largest * largest + rest) as u64
    }

    /// True if the last [`BufferPool::take`] failed because the budget has no room: other owners have to give
    /// back first.
    pub fn is_short_of_budget(&self) -> bool {
        self.shared.inner.lock().short
    }

    /// Pages (4 KiB) in use, rounded up to the pool's classes.
    pub fn used_pages(&self) -> usize {
        self.shared.inner.lock().used_pages
    }

    /// Free pages (4 KiB) that are kept warm.
    pub fn free_pages(&self) -> usize {
        self.shared.inner.lock().free.hot_pages()
    }

    /// The pool's counters.
    pub fn counters(&self) -> PoolCounters {
        self.shared.counters()
    }

    /// Appends buffers of `len` bytes together to `out`: one piece if there is one, else several, each but
    /// the last a multiple of 4096 bytes long. Their contents are left over from earlier uses of this pool.
    /// Returns false, and takes nothing, if the limit is reached or the system has no memory.
    #[inline]
    pub fn take(&mut self, len: usize, out: &mut Vec<Buffer>) -> bool {
        let class = class_of(len);
        let mut inner = self.shared.inner.lock();
        if len != 0
            && class < CLASSES
            && let Some(piece) = inner.pop_hot(class)
        {
            self.shared.note(&inner);
            out.push(cut(piece, len));
            return true;
        }
        let taken = self.shared.take_slow(&mut inner, len, out);
        self.shared.note(&inner);
        taken
    }

    /// Takes back buffers from [`BufferPool::take`], each as it was, and leaves `buffers` empty. The caller
    /// doesn't use them any more; buffers that are still in use elsewhere are left alone until they aren't.
    #[inline]
    pub fn give(&mut self, buffers: &mut Vec<Buffer>) {
        let mut inner = self.shared.inner.lock();
        inner.give(buffers);
        self.shared.note(&inner);
    }

    /// Writes off buffers of `len` bytes together that will never be given back.
    pub fn lose(&mut self, len: usize) {
        let mut inner = self.shared.inner.lock();
        inner.used_pages = inner.used_pages.saturating_sub(len.div_ceil(PAGE_SIZE));
        // If they were private pages, dropping them has unmapped them, or will.
        let lost = (len.div_ceil(PAGE_SIZE) * PAGE_SIZE) as u64;
        if self.shared.source.is_none() {
            inner.unclaim(lost);
            self.shared
                .gauge
                .sub(lost.min(self.shared.gauge.live_bytes()));
        }
    }

    /// To be called after requests have completed. While there is pressure, free memory goes back at once,
    /// except for the pool's share of the floor; otherwise nothing happens.
    #[inline]
    pub fn settle(&mut self) {
        let shared = &self.shared;
        let floor = shared.floor_pages.load(Ordering::Relaxed);
        let free = shared.free_pages.load(Ordering::Relaxed);
        if free > floor && shared.pressure.keeps_none() {
            shared.squeeze_own();
        } else if free > floor && shared.budget.get().is_some_and(|b| b.is_awaited()) {
            shared.trim(free.saturating_sub(PAGES_AT_A_TIME), false);
        }
    }

    /// Gives free memory back, least recently used first, until at most `keep_pages` are free.
    pub fn trim(&mut self, keep_pages: usize) {
        self.shared.trim(keep_pages, true);
    }

    /// To be called when the source's I/O is over: keeps as much free memory as [`Pressure`]
    /// allows.
    pub fn rest(&mut self) {
        let keep = self.shared.pages_to_keep();
        match self.shared.pressure.keeps_none() {
            true => self.shared.squeeze_own(),
            false => {
                self.shared.return_floor();
                self.shared.trim(keep, true);
            }
        }
    }

    /// Does the same as [`BufferPool::rest`], or, with `all`, gives all free memory back. If that is much,
    /// the rest is in the returned job, which should run on a thread that no request waits for: giving many
    /// pages back takes milliseconds.
    pub fn rest_elsewhere(&mut self, all: bool) -> Option<Job> {
        let keep = if all { 0 } else { self.shared.pages_to_keep() };
        self.shared.return_floor();
        self.trim_elsewhere(keep)
    }

    fn trim_elsewhere(&self, keep: usize) -> Option<Job> {
        if self.free_pages() <= keep + PAGES_AT_A_TIME {
            self.shared.trim(keep, true);
            return None;
        }
        let shared = Arc::clone(&self.shared);
        let mut leaving = shared.begin(keep, true);
        Some(Box::new(move || {
            shared.release(&mut leaving, true);
            shared.end(leaving);
        }))
    }

    /// Gives back the memory that was not needed since the last call, but keeps as much as [`Pressure`]
    /// allows. For a busy user, a few times a second.
    pub fn decay(&mut self) {
        if let Some(keep) = self.needed() {
            self.shared.trim(keep, true);
        }
    }

    /// Does the same as [`BufferPool::decay`], with the rest in a job as that of
    /// [`BufferPool::rest_elsewhere`].
    pub fn decay_elsewhere(&mut self) -> Option<Job> {
        let keep = self.needed()?;
        self.trim_elsewhere(keep)
    }

    /// Number of free pages to keep, if there are more than were needed since the last call.
    fn needed(&mut self) -> Option<usize> {
        let keep_pages = self.shared.pages_to_keep();
        let mut inner = self.shared.inner.lock();
        inner.retry_claimed();
        let (free, unneeded) = (inner.free.hot_pages(), inner.low_free);
        inner.low_free = free;
        drop(inner);
        let is_more = unneeded > 0 && free > keep_pages;
        is_more.then(|| keep_pages.max(free - unneeded))
    }
}

impl Inner {
    /// Takes a piece with pages, and counts it as used.
    #[inline]
    fn pop_hot(&mut self, class: usize) -> Option<Buffer> {
        let piece = self.free.pop_hot(class)?;
        self.account_taken(class);
        self.low_free = self.low_free.min(self.free.hot_pages());
        Some(piece)
    }

    #[inline]
    fn account_taken(&mut self, class: usize) {
        self.used_pages += 1 << class;
        self.counters.taken_pages += 1 << class;
    }

    /// Notes that pages went back to the system.
    fn unclaim(&mut self, bytes: u64) {
        if let Some(claim) = &mut self.claim {
            claim.resize(claim.bytes().saturating_sub(bytes));
        }
    }

    fn retry_claimed(&mut self) {
        if self.free.claimed() > 0 {
            let pages = self.free.retry_claimed();
            self.used_pages = self.used_pages.saturating_sub(pages);
        }
    }

    #[inline]
    fn give(&mut self, buffers: &mut Vec<Buffer>) {
        for buffer in buffers.drain(..) {
            let pages = self.free.push(buffer);
            self.counters.claimed += u64::from(pages == 0);
            self.used_pages = self.used_pages.saturating_sub(pages);
        }
    }
}

impl PoolShared {
    /// Publishes the number of free pages for squeezes, which read it without the lock.
    #[inline]
    fn note(&self, inner: &Inner) {
        self.free_pages
            .store(inner.free.hot_pages(), Ordering::Relaxed);
    }

    /// Number of free pages that a pool at rest keeps.
    fn pages_to_keep(&self) -> usize {
        match self.budget.get().is_some_and(|b| b.is_scarce()) {
            true => 0,
            false => self.pressure.max_buffer_pages(),
        }
    }

    /// Claims the budget's bytes for pages that are about to be taken from the system, after giving up free
    /// memory of this pool. A user that has as much as all others could still take gets no more, so that
    /// there is always some left for the others.
    fn claim(&self, inner: &mut Inner, bytes: u64) -> bool {
        inner.short = false;
        let fits = |inner: &mut Inner| match &mut inner.claim {
            None => true,
            Some(claim) => {
                let has = claim.bytes();
                (has == 0 || has < claim.budget().free()) && claim.resize(has + bytes)
            }
        };
        if fits(inner) {
            return true;
        }
        if inner.free.hot_pages() > 0 {
            let mut leaving = self.drain(inner, 0, false);
            self.release(&mut leaving, false);
            self.finish(inner, leaving);
            if fits(inner) {
                return true;
            }
        }
        inner.short = true;
        inner.counters.stalls += 1;
        false
    }

    #[cold]
    fn take_slow(&self, inner: &mut Inner, len: usize, out: &mut Vec<Buffer>) -> bool {
        let before = out.len();
        let most = BufferPool::claimed_for(len);
        let before_growth = inner.grown;
        if !self.claim(inner, most) {
            return false;
        }
        let taken = self.take_pieces(inner, len, before, out);
        if let Some(claim) = &mut inner.claim {
            let grown = inner.grown - before_growth;
            claim.resize(claim.bytes() - most.saturating_sub(grown));
        }
        taken
    }

    fn take_pieces(
        &self,
        inner: &mut Inner,
        len: usize,
        before: usize,
        out: &mut Vec<Buffer>,
    ) -> bool {
        let mut left = len;
        let mut class = class_of(len.min(class_len(MAX_ORDER)));
        // Several pieces of the device's memory are better than one private piece, which the device
        // has to copy.
        let mut private = self.source.is_none();
        while left > 0 {
            class = class.min(class_of(left));
            let piece = match inner.pop_hot(class) {
                Some(piece) => Some(piece),
                None => self.grow(inner, class, private),
            };
            match piece {
                Some(piece) => {
                    let n = left.min(class_len(class));
                    out.push(cut(piece, n));
                    left -= n;
                }
                // There may still be smaller pieces.
                None if class > 0 => class -= 1,
                None if !private => {
                    private = true;
                    class = class_of(left.min(class_len(MAX_ORDER)));
                }
                None => {
                    inner.give(&mut out.split_off(before));
                    inner.counters.stalls += 1;
                    return false;
                }
            }
        }
        len > 0
    }

    /// Gets one more piece of `class`: from the device, or, if `private`, from a cold piece or from the
    /// system.
    fn grow(&self, inner: &mut Inner, class: usize, private: bool) -> Option<Buffer> {
        let pages = 1 << class;
        if inner.used_pages + pages > inner.limit_pages {
            inner.retry_claimed();
            if inner.used_pages + pages > inner.limit_pages {
                return None;
            }
        }
        if inner.used_pages + inner.free.hot_pages() + pages > inner.limit_pages {
            // This is rare: the lock is held, so that no other thread takes the room.
            let keep = inner.limit_pages - inner.used_pages - pages;
            let mut leaving = self.drain(inner, keep, false);
            self.release(&mut leaving, false);
            self.finish(inner, leaving);
        }
        let piece = if private {
            let piece = inner.free.pop_cold(class)?;
            self.gauge.add(class_len(class) as u64);
            inner.grown += class_len(class) as u64;
            piece
        } else {
            self.source.as_ref()?.allocate(class_len(class))?
        };
        inner.account_taken(class);
        inner.counters.allocated_pages += pages as u64;
        let held = (inner.used_pages + inner.free.hot_pages()) as u64;
        inner.counters.peak_pages = inner.counters.peak_pages.max(held);
        Some(piece)
    }

    fn trim(&self, keep_pages: usize, unmap: bool) {
        let mut leaving = self.begin(keep_pages, unmap);
        self.release(&mut leaving, unmap);
        self.end(leaving);
    }

    /// First of three steps to give pages back: takes them off the free list, all but `keep_pages`. From here
    /// on they can't be taken into use.
    pub(crate) fn begin(&self, keep_pages: usize, unmap: bool) -> Leaving {
        self.begin_locked(&mut self.inner.lock(), keep_pages, unmap)
    }

    fn begin_locked(&self, inner: &mut Inner, keep_pages: usize, unmap: bool) -> Leaving {
        inner.retry_claimed();
        let leaving = self.drain(inner, keep_pages, unmap);
        self.note(inner);
        leaving
    }

    fn drain(&self, inner: &mut Inner, keep_pages: usize, unmap: bool) -> Leaving {
        let mut drained = inner.free.drain(keep_pages);
        if unmap {
            inner.free.drain_cold(&mut drained);
        }
        inner.low_free = inner.free.hot_pages();
        let bytes = drained.bytes();
        // The pages are counted here, because the pool may go away before the end.
        inner.counters.returned_pages += bytes / PAGE_SIZE as u64;
        Leaving { drained, bytes }
    }

    /// Second step, without the lock: gives the pages to the system.
    pub(crate) fn release(&self, leaving: &mut Leaving, unmap: bool) {
        self.free_device(leaving);
        Drained::release_all(std::iter::once(&mut leaving.drained));
        self.after_release(leaving, unmap);
    }

    fn after_release(&self, leaving: &mut Leaving, unmap: bool) {
        leaving.drained.after_release(unmap);
        self.gauge.sub(leaving.bytes);
    }

    /// Third step: the remaining addresses come back to the free list, without pages.
    pub(crate) fn end(&self, leaving: Leaving) -> u64 {
        self.finish(&mut self.inner.lock(), leaving)
    }

    fn finish(&self, inner: &mut Inner, leaving: Leaving) -> u64 {
        inner.free.push_cold(leaving.drained.cold);
        inner.unclaim(leaving.bytes);
        leaving.bytes / PAGE_SIZE as u64
    }

    /// Takes all free memory out, on any thread that relieves the pressure; `None` if there is none.
    pub(crate) fn begin_squeeze(&self) -> Option<Leaving> {
        if self.free_pages.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.return_floor();
        let mut inner = self.inner.lock();
        let mut leaving = self.begin_locked(&mut inner, 0, true);
        let pages = leaving.bytes / PAGE_SIZE as u64;
        inner.counters.squeezed_pages += pages;
        inner.counters.squeezes += u64::from(pages > 0);
        drop(inner);
        self.free_device(&mut leaving);
        Some(leaving)
    }

    /// Ends a squeeze: the memory that [`PoolShared::begin_squeeze`] took has been released.
    /// Returns pages.
    pub(crate) fn end_squeeze(&self, mut leaving: Leaving) -> u64 {
        self.after_release(&mut leaving, true);
        self.end(leaving)
    }

    fn free_device(&self, leaving: &mut Leaving) {
        if let Some(source) = &self.source {
            for piece in leaving.drained.device.drain(..) {
                source.free(piece);
            }
        }
    }

    /// The owner's part while there is pressure: memory that became free goes back, except for a share of the
    /// floor. Address space stays, as the next request is near.
    #[cold]
    fn squeeze_own(&self) {
        let mut inner = self.inner.lock();
        let floor = self.floor_pages.load(Ordering::Relaxed);
        let wanted = inner.free.hot_pages().saturating_sub(floor);
        let keep = floor + self.pressure.reserve_floor(wanted);
        self.floor_pages.store(keep, Ordering::Relaxed);
        if inner.free.hot_pages() <= keep {
            return;
        }
        let mut leaving = self.drain(&mut inner, keep, false);
        self.note(&inner);
        drop(inner);
        self.release(&mut leaving, false);
        let mut inner = self.inner.lock();
        let pages = self.finish(&mut inner, leaving);
        inner.counters.squeezed_pages += pages;
    }

    /// Gives the pool's share of the floor back to other pools.
    fn return_floor(&self) {
        let _inner = self.inner.lock();
        self.pressure
            .return_floor(self.floor_pages.swap(0, Ordering::Relaxed));
    }

    /// Gives back the memory beyond a new limit.
    pub(crate) fn keep_at_most(&self, pages: usize) {
        self.trim(pages, true);
    }

    /// Number of free pages, read without the lock.
    pub(crate) fn free_pages_seen(&self) -> usize {
        self.free_pages.load(Ordering::Relaxed)
    }

    pub(crate) fn disk(&self) -> &str {
        &self.disk
    }

    pub(crate) fn counters(&self) -> PoolCounters {
        let inner = self.inner.lock();
        PoolCounters {
            free_pages: inner.free.hot_pages() as u64,
            used_pages: inner.used_pages as u64,
            ..inner.counters
        }
    }
}

/// The first `len` bytes of a piece.
#[inline]
fn cut(piece: Buffer, len: usize) -> Buffer {
    if piece.len() == len {
        return piece;
    }
    // `len` is at most the piece's length.
    piece.slice(0, len).unwrap_or(piece)
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        self.shared.return_floor();
        self.trim(0);
        self.shared.pressure.retire(&self.shared);
    }
}

impl std::fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BufferPool")
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
