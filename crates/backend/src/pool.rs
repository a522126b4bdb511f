//! Buffers for sources that bring no memory of their own, such as a socket.

use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, BufferSource, Region};
use pvblk_sys::PAGE_SIZE;
use std::collections::HashMap;
use std::sync::Arc;

/// log2 of the largest class, in pages: 32 MiB.
const MAX_ORDER: usize = 13;
/// Classes: 4 KiB, 8 KiB, ... 32 MiB.
const CLASSES: usize = MAX_ORDER + 1;
/// Buffers of up to this many bytes are carved from slabs.
const CARVED: usize = 64 << 10;
/// Bytes of a slab.
const SLAB: usize = 256 << 10;

/// A pool of page-granular buffers, used by one source.
///
/// It starts with nothing and grows on demand: from the device's own memory where there is some (which
/// saves a copy), else from private pages. Free buffers wait in last-in-first-out lists, one for each
/// power of two, so that a steady load cycles through the same few cache-hot pages and allocates
/// nothing. Free memory goes back to the system by [`BufferPool::trim`] and [`BufferPool::decay`];
/// a buffer that is in use is never touched by them, because the pool doesn't hold it.
pub struct BufferPool {
    source: Option<Arc<dyn BufferSource>>,
    /// Free and warm: private pieces that were touched, and pieces of the source.
    hot: [Vec<Buffer>; CLASSES],
    /// Free private pieces without memory behind them.
    cold: [Vec<Buffer>; CLASSES],
    /// Our own regions by address; all others are the source's.
    slabs: HashMap<usize, Slab>,
    /// Pages in `hot`.
    free_pages: usize,
    /// Pages taken and not yet given back.
    used_pages: usize,
    /// Most pages, free and used.
    limit_pages: usize,
    /// Least `free_pages` since the last decay: that many were not needed.
    low_free: usize,
    gauge: Gauge,
}

/// A region of ours.
struct Slab {
    _region: Arc<Region>,
    class: usize,
    pieces: usize,
}

/// The class that holds `len` bytes.
#[inline]
fn class_of(len: usize) -> usize {
    len.div_ceil(PAGE_SIZE).next_power_of_two().trailing_zeros() as usize
}

#[inline]
fn class_len(class: usize) -> usize {
    PAGE_SIZE << class
}

#[inline]
fn address(buffer: &Buffer) -> usize {
    Arc::as_ptr(buffer.region()) as usize
}

impl BufferPool {
    /// An empty pool of at most `limit_pages` (4 KiB each), on the memory bill as `owner`. `source` is
    /// the device's ([`pvblk_block::BlockDevice::buffer_source`]).
    pub fn new(
        owner: &str,
        source: Option<Arc<dyn BufferSource>>,
        limit_pages: usize,
    ) -> BufferPool {
        let cap = (limit_pages * PAGE_SIZE) as u64;
        BufferPool {
            source,
            hot: Default::default(),
            cold: Default::default(),
            slabs: HashMap::new(),
            free_pages: 0,
            used_pages: 0,
            limit_pages,
            low_free: 0,
            gauge: Gauge::new(owner, MemoryKind::Anonymous, cap),
        }
    }

    /// Pages (4 KiB) in use, rounded up to the pool's classes.
    pub fn used_pages(&self) -> usize {
        self.used_pages
    }

    /// Free pages (4 KiB) that are kept warm.
    pub fn free_pages(&self) -> usize {
        self.free_pages
    }

    /// Appends buffers of `len` bytes together to `out`: one piece if there is one, else several, each but
    /// the last a multiple of 4096 bytes long. Their contents are left over from earlier uses of this pool.
    /// Returns false, and takes nothing, if the limit is reached or the system has no memory.
    #[inline]
    pub fn take(&mut self, len: usize, out: &mut Vec<Buffer>) -> bool {
        let class = class_of(len);
        if len != 0
            && class < CLASSES
            && let Some(piece) = self.hot[class].pop()
        {
            self.account_hot(class);
            out.push(cut(piece, len));
            return true;
        }
        self.take_slow(len, out)
    }

    /// Moves a piece that left `hot` to the used ones.
    #[inline]
    fn account_hot(&mut self, class: usize) {
        self.free_pages -= 1 << class;
        self.used_pages += 1 << class;
        self.low_free = self.low_free.min(self.free_pages);
    }

    #[cold]
    fn take_slow(&mut self, len: usize, out: &mut Vec<Buffer>) -> bool {
        let before = out.len();
        let mut left = len;
        let mut class = class_of(len.min(class_len(MAX_ORDER)));
        // Several pieces of the device's memory are better than one of ours, which it has to copy.
        let mut private = self.source.is_none();
        while left > 0 {
            class = class.min(class_of(left));
            let piece = match self.hot[class].pop() {
                Some(piece) => {
                    self.account_hot(class);
                    Some(piece)
                }
                None => self.grow(class, private),
            };
            match piece {
                Some(piece) => {
                    let n = left.min(class_len(class));
                    out.push(cut(piece, n));
                    left -= n;
                }
                // Smaller pieces may still be found.
                None if class > 0 => class -= 1,
                None if !private => {
                    private = true;
                    class = class_of(left.min(class_len(MAX_ORDER)));
                }
                None => {
                    let mut taken = out.split_off(before);
                    self.give(&mut taken);
                    return false;
                }
            }
        }
        len > 0
    }

    /// One more piece of `class`: from the device, or `private`ly from a cold piece or from the system.
    fn grow(&mut self, class: usize, private: bool) -> Option<Buffer> {
        let pages = 1 << class;
        if self.used_pages + pages > self.limit_pages {
            return None;
        }
        if self.used_pages + self.free_pages + pages > self.limit_pages {
            self.trim(self.limit_pages - self.used_pages - pages);
        }
        let len = class_len(class);
        let piece = if private {
            if self.cold[class].is_empty() {
                self.add_slab(class)?;
            }
            let piece = self.cold[class].pop()?;
            self.gauge.add(len as u64);
            piece
        } else {
            self.source.as_ref()?.allocate(len)?
        };
        self.used_pages += pages;
        Some(piece)
    }

    /// A fresh region whose pieces are all cold: it takes memory when they are first written.
    fn add_slab(&mut self, class: usize) -> Option<()> {
        let len = class_len(class);
        let pieces = if len <= CARVED { SLAB / len } else { 1 };
        let region = Arc::new(Region::anonymous(pieces * len).ok()?);
        // In reverse, so that they are taken in the order of their addresses.
        let carved = (0..pieces)
            .rev()
            .filter_map(|i| Buffer::new(&region, i * len, len));
        self.cold[class].extend(carved);
        let key = Arc::as_ptr(&region) as usize;
        self.slabs.insert(
            key,
            Slab {
                _region: region,
                class,
                pieces,
            },
        );
        Some(())
    }

    /// Takes back buffers from [`BufferPool::take`], each as it was, and leaves `buffers` empty. The
    /// caller knows that nobody reads or writes them any more.
    #[inline]
    pub fn give(&mut self, buffers: &mut Vec<Buffer>) {
        for buffer in buffers.drain(..) {
            let class = class_of(buffer.len());
            let len = class_len(class);
            let piece = if buffer.len() == len {
                Some(buffer)
            } else {
                Buffer::new(buffer.region(), buffer.offset(), len)
            };
            // Always there: `take` cut it from a whole piece.
            if let Some(piece) = piece {
                self.hot[class].push(piece);
            }
            self.free_pages += 1 << class;
            self.used_pages = self.used_pages.saturating_sub(1 << class);
        }
    }

    /// Writes off buffers of `len` bytes together that will never be given back.
    pub fn lose(&mut self, len: usize) {
        self.used_pages = self.used_pages.saturating_sub(len.div_ceil(PAGE_SIZE));
    }

    /// Gives free memory back, what wasn't used longest first, until at most `keep_pages` are free.
    pub fn trim(&mut self, keep_pages: usize) {
        let mut released = Vec::new();
        for class in (0..CLASSES).rev() {
            let excess = self.free_pages.saturating_sub(keep_pages);
            let n = self.hot[class].len().min(excess.div_ceil(1 << class));
            self.free_pages -= n << class;
            for piece in self.hot[class].drain(..n) {
                if self.slabs.contains_key(&address(&piece)) {
                    self.gauge.sub(piece.len() as u64);
                    released.push(piece);
                } else if let Some(source) = &self.source {
                    source.free(piece);
                }
            }
        }
        self.low_free = self.free_pages;
        if !released.is_empty() || (keep_pages == 0 && !self.slabs.is_empty()) {
            self.release(released);
        }
    }

    /// Gives back what was not needed since the last call, but keeps `keep_pages` free. For a busy user,
    /// a few times a second.
    pub fn decay(&mut self, keep_pages: usize) {
        let unneeded = self.low_free;
        if unneeded > 0 && self.free_pages > keep_pages {
            self.trim(keep_pages.max(self.free_pages - unneeded));
        }
        self.low_free = self.free_pages;
    }

    /// Drops regions of which all pieces are free and cold, and empties the released pieces of others.
    fn release(&mut self, released: Vec<Buffer>) {
        let mut cold: HashMap<usize, usize> = HashMap::new();
        for piece in released.iter().chain(self.cold.iter().flatten()) {
            *cold.entry(address(piece)).or_default() += 1;
        }
        let mut classes = [false; CLASSES];
        self.slabs.retain(|key, slab| {
            let gone = cold.get(key) == Some(&slab.pieces);
            classes[slab.class] |= gone;
            !gone
        });
        for class in (0..CLASSES).filter(|&c| classes[c]) {
            self.cold[class].retain(|p| self.slabs.contains_key(&address(p)));
        }
        for piece in released {
            if self.slabs.contains_key(&address(&piece)) {
                // Nobody else holds this piece, so no I/O on it is in flight. Should the system refuse,
                // the memory stays; the piece is as good as before.
                let _ = piece.region().release(piece.offset(), piece.len());
                self.cold[class_of(piece.len())].push(piece);
            }
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
        self.trim(0);
    }
}

impl std::fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BufferPool")
            .field("used_pages", &self.used_pages)
            .field("free_pages", &self.free_pages)
            .field("slabs", &self.slabs.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
