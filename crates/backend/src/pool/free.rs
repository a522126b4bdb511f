//! The free list of a pool: memory that isn't in use, and that alone can be given back.

use pvblk_block::{Buffer, Region};
use pvblk_sys::{Idle, PAGE_SIZE};

/// log2 of the largest class, in pages: 32 MiB.
pub(super) const MAX_ORDER: usize = 13;
/// Classes: 4 KiB, 8 KiB, ... 32 MiB.
pub(super) const CLASSES: usize = MAX_ORDER + 1;
/// Buffers of up to this many bytes are carved from slabs.
const CARVED: usize = 64 << 10;
/// Bytes of a slab.
const SLAB: usize = 256 << 10;
/// Bytes that a piece costs besides its pages, about: its own region, with its counters.
pub(super) const PIECE_BYTES: usize = 80;

/// The class that holds `len` bytes.
#[inline]
pub(super) fn class_of(len: usize) -> usize {
    len.div_ceil(PAGE_SIZE).next_power_of_two().trailing_zeros() as usize
}

#[inline]
pub(super) fn class_len(class: usize) -> usize {
    PAGE_SIZE << class
}

/// Free memory with pages behind it.
pub(super) enum Warm {
    /// Private memory, of which there is no other buffer.
    Own(Idle),
    /// Memory of the device.
    Device(Buffer),
}

/// Pieces by class, last in first out.
#[derive(Default)]
pub(super) struct FreeList {
    /// Pieces with pages, and pieces of the device.
    hot: [Vec<Warm>; CLASSES],
    /// Private pieces, without pages behind them.
    cold: [Vec<Idle>; CLASSES],
    /// Pages in `hot`.
    hot_pages: usize,
    /// Pieces that came back while another buffer of them was in use: checked again at the next
    /// drain.
    claimed: Vec<Buffer>,
}

/// Pieces that left the free list to be given back.
#[derive(Default)]
pub(super) struct Drained {
    /// Private pieces with pages behind them.
    pub own: Vec<Idle>,
    /// Private pieces without pages.
    pub cold: Vec<Idle>,
    /// Pieces of the device.
    pub device: Vec<Buffer>,
}

impl FreeList {
    /// Free pages (4 KiB) with something in them.
    #[inline]
    pub fn hot_pages(&self) -> usize {
        self.hot_pages
    }

    /// Number of buffers that are still in use elsewhere.
    pub fn claimed(&self) -> usize {
        self.claimed.len()
    }

    /// Takes a piece with pages into use.
    #[inline]
    pub fn pop_hot(&mut self, class: usize) -> Option<Buffer> {
        let warm = self.hot[class].pop()?;
        self.hot_pages -= 1 << class;
        Some(match warm {
            Warm::Own(idle) => idle.into_buffer(),
            Warm::Device(buffer) => buffer,
        })
    }

    /// Takes a private piece without pages into use, from a new slab if there is none.
    pub fn pop_cold(&mut self, class: usize) -> Option<Buffer> {
        if self.cold[class].is_empty() {
            let len = class_len(class);
            let slab = if len <= CARVED { SLAB } else { len };
            let pieces = Region::anonymous(slab).ok()?.cut(len);
            // The order is reversed, so that pieces are taken in the order of their addresses.
            self.cold[class].extend(pieces.into_iter().rev().map(Idle::fresh));
        }
        let idle = self.cold[class].pop()?;
        idle.check_poison();
        Some(idle.into_buffer())
    }

    /// Takes a buffer back, as it came from here or the device. Returns its pages; 0 if another buffer of it
    /// is still in use, so that it can neither be used nor given back yet.
    #[inline]
    pub fn push(&mut self, buffer: Buffer) -> usize {
        if !buffer.region().is_piece() {
            return self.push_device(buffer);
        }
        match Idle::of(buffer) {
            Ok(idle) => {
                let class = class_of(idle.len());
                self.hot[class].push(Warm::Own(idle));
                self.hot_pages += 1 << class;
                1 << class
            }
            Err(buffer) => {
                self.claimed.push(buffer);
                0
            }
        }
    }

    fn push_device(&mut self, buffer: Buffer) -> usize {
        let class = class_of(buffer.len());
        let len = class_len(class);
        let piece = match buffer.len() == len {
            true => Some(buffer),
            false => Buffer::new(buffer.region(), buffer.offset(), len),
        };
        // There is always a piece: the buffer was cut from a whole one.
        self.hot[class].extend(piece.map(Warm::Device));
        self.hot_pages += 1 << class;
        1 << class
    }

    /// Checks the pieces again that were in use elsewhere; returns the pages that became free.
    #[cold]
    pub fn retry_claimed(&mut self) -> usize {
        let claimed = std::mem::take(&mut self.claimed);
        claimed.into_iter().map(|b| self.push(b)).sum()
    }

    /// Takes free pieces out, least recently used first, until at most `keep_pages` are free; and the pieces
    /// without pages if none stays.
    pub fn drain(&mut self, keep_pages: usize) -> Drained {
        let mut out = Drained::default();
        for class in (0..CLASSES).rev() {
            let excess = self.hot_pages.saturating_sub(keep_pages);
            let n = self.hot[class].len().min(excess.div_ceil(1 << class));
            self.hot_pages -= n << class;
            if n > 0 {
                out.own.reserve(n);
            }
            for warm in self.hot[class].drain(..n) {
                match warm {
                    Warm::Own(idle) => out.own.push(idle),
                    Warm::Device(buffer) => out.device.push(buffer),
                }
            }
            if keep_pages == 0 {
                self.hot[class].shrink_to_fit();
            }
        }
        out
    }

    /// Takes out the pieces without pages too: together with drained ones they may be whole slabs.
    pub fn drain_cold(&mut self, out: &mut Drained) {
        for pieces in &mut self.cold {
            out.cold.append(&mut std::mem::take(pieces));
        }
    }

    /// Takes back pieces whose pages are gone.
    pub fn push_cold(&mut self, mut pieces: Vec<Idle>) {
        // The lowest addresses are taken first.
        pieces.sort_unstable_by_key(|p| std::cmp::Reverse(p.address()));
        for idle in pieces {
            self.cold[class_of(idle.len())].push(idle);
        }
    }

    #[cfg(test)]
    pub fn cold_pieces(&self) -> usize {
        self.cold.iter().map(Vec::len).sum()
    }
}

impl Drained {
    /// Bytes of private pieces with pages behind them.
    pub fn bytes(&self) -> u64 {
        self.own.iter().map(|p| p.len() as u64).sum()
    }

    /// Gives the pages of all these back to the system, in runs that are as long as possible, whichever pool
    /// they are of.
    pub fn release_all<'a>(all: impl Iterator<Item = &'a mut Drained>) {
        if let Err(e) = Idle::release(all.flat_map(|d| &mut d.own)) {
            // The pages stay until they are used again, or the slab goes; only memory is lost.
            tracing::debug!("giving pages back: {e}");
        }
    }

    /// The released pieces are without pages now; whole slabs are unmapped, if `unmap`. Leaves in `cold` the
    /// pieces that are to come back to the free list.
    pub fn after_release(&mut self, unmap: bool) {
        if unmap {
            self.drop_whole_slabs();
        }
        self.cold.append(&mut self.own);
    }

    /// Drops the slabs of which all pieces are here, in either list.
    fn drop_whole_slabs(&mut self) {
        let own = self.own.drain(..).map(|p| (p, true));
        let mut all: Vec<(Idle, bool)> =
            own.chain(self.cold.drain(..).map(|p| (p, false))).collect();
        all.sort_unstable_by_key(|(p, _)| p.address());
        let mut left = all.into_iter().peekable();
        let mut slab: Vec<(Idle, bool)> = Vec::new();
        while let Some(first) = left.next() {
            slab.push(first);
            while let Some(next) = left.next_if(|(p, _)| p.is_beside(&slab[0].0)) {
                slab.push(next);
            }
            if Idle::are_whole(slab.iter().map(|(p, _)| p)) {
                slab.clear(); // unmapped with the last
                continue;
            }
            for (piece, has_pages) in slab.drain(..) {
                match has_pages {
                    true => self.own.push(piece),
                    false => self.cold.push(piece),
                }
            }
        }
    }
}
