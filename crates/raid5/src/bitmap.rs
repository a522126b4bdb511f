//! The write-intent bitmap: the parts of the members that may have wrong parity after a crash.
//!
//! It has one bit for each chunk of a member (a chunk of the bitmap, 64 MiB, not of the array). A bit is on
//! disk before a write to its chunk starts, and is cleared lazily, at the third sweep after the last write or
//! later. This module writes nothing: it tells the caller which pages must be on all members before a write
//! may go on ([`WriteIntent::start_write`]) and which should be written some time ([`WriteIntent::sweep`]).
//!
//! Format and rules: mdadm's `bitmap.h` (`bitmap_super_t` and its notes) and `documentation/bitmap.md`.

mod header;

pub use header::{BITMAP_HEADER_BYTES, BitmapError, BitmapHeader};

use super::geometry::STRIPE_SECTORS;
use std::ops::Range;

/// The bitmap is written in pages of this size; the first begins with the header.
pub const PAGE_BYTES: usize = 4096;

/// Writes under way and the bit on disk, as in md: 0 is clean, 1 is cleared by the next sweep, 2 has no writers, and
/// each writer counts one more.
const COUNT: u16 = 0x3fff;
/// Must be resynchronised, so isn't cleared by sweeps.
const NEEDED: u16 = 0x8000;

/// Pages that have to be on all members before a write may start. Ask [`WriteIntent::is_durable`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Intent {
    pages: Vec<(usize, u64)>,
}

impl Intent {
    /// The pages to be written, in order. Empty if the bits were on disk already.
    pub fn pages(&self) -> impl Iterator<Item = usize> {
        self.pages.iter().map(|&(page, _)| page)
    }
}

/// One write of a page to all members. At most one for each page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageWrite {
    /// Number of the page, which belongs `page * 4096` bytes after the bitmap's start.
    pub page: usize,
    version: u64,
}

/// State of the array that a sweep depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// The superblocks' event counter.
    pub events: u64,
    /// A member is missing, or being rebuilt.
    pub degraded: bool,
}

#[derive(Clone, Debug, Default)]
struct Page {
    /// Counts changes in memory.
    wanted: u64,
    /// The last change that is on disk.
    written: u64,
    /// A write is under way.
    writing: bool,
}

/// A bitmap in memory.
#[derive(Clone, Debug)]
pub struct WriteIntent {
    header: BitmapHeader,
    chunk_shift: u32,
    counters: Vec<u16>,
    image: Vec<u8>,
    pages: Vec<Page>,
    /// The version of page 0 with the present `events_cleared`.
    cleared_version: u64,
}

impl WriteIntent {
    /// A new one, which has to be written whole. `all`: every chunk has to be resynchronised; else none.
    pub fn new(header: BitmapHeader, all: bool) -> WriteIntent {
        let bytes = header.area_bytes();
        let fill = if all { 0xff } else { 0 };
        let mut bitmap = WriteIntent::with(header, vec![fill; bytes], 0);
        bitmap.pages.iter_mut().for_each(|p| p.wanted += 1);
        bitmap
    }

    /// The bitmap read from a member: the header and all bytes after it. If it isn't `current`
    /// ([`BitmapHeader::is_current`]), it says nothing, and every bit counts as set.
    ///
    /// Chunks whose bits are set have to be resynchronised if they reach to `in_sync_sectors` or beyond: that
    /// is the superblock's `resync_offset`, and 0 if the array is or was degraded. Bits below are only those
    /// that no sweep has cleared.
    pub fn load(
        area: &[u8],
        current: bool,
        in_sync_sectors: u64,
    ) -> Result<WriteIntent, BitmapError> {
        let header = BitmapHeader::parse(area)?;
        let bytes = header.area_bytes();
        let area = area.get(..bytes).ok_or(BitmapError::Short)?;
        if current {
            return Ok(WriteIntent::with(header, area.to_vec(), in_sync_sectors));
        }
        let mut bitmap = WriteIntent::with(header, vec![0xff; bytes], in_sync_sectors);
        bitmap.pages.iter_mut().for_each(|p| p.wanted += 1);
        Ok(bitmap)
    }

    fn with(header: BitmapHeader, image: Vec<u8>, in_sync_sectors: u64) -> WriteIntent {
        let mut bitmap = WriteIntent {
            chunk_shift: header.chunk_bytes.trailing_zeros() - 9,
            counters: vec![0; header.bits() as usize],
            pages: vec![Page::default(); image.len() / PAGE_BYTES],
            image,
            cleared_version: 0,
            header,
        };
        for chunk in 0..bitmap.counters.len() {
            let (byte, mask) = bit(chunk);
            if bitmap.image[byte] & mask != 0 {
                let end = (chunk as u64 + 1) << bitmap.chunk_shift;
                let end = end.min(bitmap.header.sync_size_sectors);
                let flags = if end > in_sync_sectors { NEEDED } else { 0 };
                bitmap.counters[chunk] = flags | 2;
            }
        }
        bitmap.put_header();
        bitmap
    }

    /// The header as it is in memory.
    pub fn header(&self) -> &BitmapHeader {
        &self.header
    }

    /// Pages, all of which a new bitmap has to write.
    pub fn pages(&self) -> Range<usize> {
        0..self.pages.len()
    }

    /// A write to these sectors of the members is about to start. It may go on when the returned pages are on all members.
    ///
    /// `None`: a chunk has as many writers as can be counted. Nothing was changed; try again when one ended.
    pub fn start_write(&mut self, member_sector: u64, sectors: u64) -> Option<Intent> {
        let chunks = self.chunks(member_sector, sectors);
        let full = |&counter: &u16| counter & COUNT == COUNT;
        if self.counters[chunks.clone()].iter().any(full) {
            return None;
        }
        let mut intent = Intent::default();
        for chunk in chunks {
            let page = bit(chunk).0 / PAGE_BYTES;
            self.set_image(chunk);
            let counter = &mut self.counters[chunk];
            let flags = *counter & !COUNT;
            *counter = flags | ((*counter & COUNT).max(2) + 1);
            let Page {
                wanted, written, ..
            } = self.pages[page];
            // Somebody's bit on this page isn't there yet. It may be this one.
            if wanted > written && intent.pages.last().is_none_or(|&(p, _)| p != page) {
                intent.pages.push((page, wanted));
            }
        }
        intent.pages.iter_mut().for_each(|(page, version)| {
            *version = self.pages[*page].wanted;
        });
        Some(intent)
    }

    /// The write ended. `everywhere`: it reached all members of its stripes. If not, because it failed or a member was missing,
    /// the chunks stay set until they are resynchronised.
    pub fn end_write(&mut self, member_sector: u64, sectors: u64, everywhere: bool) {
        for chunk in self.chunks(member_sector, sectors) {
            let counter = &mut self.counters[chunk];
            debug_assert!(*counter & COUNT > 2, "a write ends that didn't start");
            if *counter & COUNT > 2 {
                *counter -= 1;
            }
            if !everywhere {
                *counter |= NEEDED;
            }
        }
    }

    /// Sets the bits of these sectors of the members: they are on disk when no page of [`WriteIntent::unwritten_pages`] is left. Without
    /// writers that are counted: the caller knows when [`WriteIntent::clear`] is due.
    pub fn set(&mut self, member_sector: u64, sectors: u64) {
        for chunk in self.chunks(member_sector, sectors) {
            self.set_image(chunk);
            let counter = &mut self.counters[chunk];
            *counter = *counter & !COUNT | (*counter & COUNT).max(2);
        }
    }

    /// The bit of a chunk in the image, if it isn't set.
    fn set_image(&mut self, chunk: usize) {
        if self.counters[chunk] & COUNT == 0 {
            let (byte, mask) = bit(chunk);
            self.image[byte] |= mask;
            self.pages[byte / PAGE_BYTES].wanted += 1;
        }
    }

    /// A bit of a chunk that may be cleared goes from the image.
    fn clear_image(&mut self, chunk: usize) -> usize {
        self.counters[chunk] = 0;
        let (byte, mask) = bit(chunk);
        self.image[byte] &= !mask;
        self.pages[byte / PAGE_BYTES].wanted += 1;
        byte / PAGE_BYTES
    }

    /// Bits of these chunks that [`WriteIntent::set`] has set are to be cleared, unless their sectors have to be resynchronised; true if there are
    /// some. Then the unwritten pages have to be on all members, before [`WriteIntent::clear`] is called, since they tell of the clearing.
    /// Members are flushed, and the array isn't degraded. `events`: the superblocks' counter.
    pub fn begin_clearing(&mut self, events: u64, may_clear: impl Fn(usize) -> bool) -> bool {
        if !self.clearable(may_clear).any(|_| true) {
            return false;
        }
        self.header.events_cleared = events;
        self.put_header();
        true
    }

    /// Clears the bits. The unwritten pages have to be written some time.
    pub fn clear(&mut self, may_clear: impl Fn(usize) -> bool) {
        let chunks: Vec<usize> = self.clearable(may_clear).collect();
        for chunk in chunks {
            self.clear_image(chunk);
        }
    }

    fn clearable<'a>(
        &'a self,
        may_clear: impl Fn(usize) -> bool + 'a,
    ) -> impl Iterator<Item = usize> + 'a {
        let all = 0..self.counters.len();
        all.filter(move |chunk| matches!(self.counters[*chunk], 1 | 2) && may_clear(*chunk))
    }

    /// For each chunk: true if its bit is set.
    pub fn marks(&self) -> impl Iterator<Item = bool> {
        self.counters.iter().map(|counter| *counter != 0)
    }

    /// A chunk has two to the power of this sectors.
    pub fn chunk_shift(&self) -> u32 {
        self.chunk_shift
    }

    /// Pages with changes that aren't on disk.
    pub fn unwritten_pages(&self) -> impl Iterator<Item = usize> {
        self.pages().filter(|page| self.is_unwritten(*page))
    }

    /// True if all pages of an intent are on disk.
    pub fn is_durable(&self, intent: &Intent) -> bool {
        let mut pages = intent.pages.iter();
        pages.all(|&(page, version)| self.pages[page].written >= version)
    }

    /// Begins to write a page: take [`WriteIntent::page`] now. `None` while another write of it is under way; begin again when
    /// that ended, if [`WriteIntent::is_unwritten`].
    pub fn begin_page(&mut self, page: usize) -> Option<PageWrite> {
        let state = &mut self.pages[page];
        if std::mem::replace(&mut state.writing, true) {
            return None;
        }
        let version = state.wanted;
        self.number_write();
        Some(PageWrite { page, version })
    }

    /// The next write of a private map has the next number.
    pub(super) fn number_write(&mut self) {
        self.pass_writes(self.header.writes() + 1);
    }

    /// The next write of a private map has a greater number than this.
    pub(super) fn pass_writes(&mut self, number: u64) {
        self.header.set_writes(number.max(self.header.writes()));
        // This isn't a change that has to be written.
        self.image[..BITMAP_HEADER_BYTES].copy_from_slice(&self.header.encode());
    }

    /// The write of a page ended; `ok` if it is on all members that are left, and durable there.
    pub fn end_page(&mut self, write: PageWrite, ok: bool) {
        let state = &mut self.pages[write.page];
        state.writing = false;
        if ok {
            state.written = write.version;
        }
    }

    /// The bytes of a page.
    pub fn page(&self, page: usize) -> &[u8] {
        &self.image[page * PAGE_BYTES..(page + 1) * PAGE_BYTES]
    }

    /// True if a page has changes that aren't on disk.
    pub fn is_unwritten(&self, page: usize) -> bool {
        let page = &self.pages[page];
        page.wanted > page.written
    }

    /// Clears bits that weren't used for two sweeps, and returns the pages that have to be written for it,
    /// some time. Before they are, every member must have been flushed: a bit says that parity on stable
    /// storage may be wrong.
    ///
    /// While the array is degraded no bit is cleared: the missing member may come back, and the writes that
    /// it missed must be known. For the same reason the counter of the last clearing must be on disk before a
    /// bit is cleared; that costs one sweep more when events have passed.
    pub fn sweep(&mut self, health: Health) -> Vec<usize> {
        if health.degraded {
            return Vec::new();
        }
        let mut changed = Vec::new();
        let told = self.header.events_cleared == health.events;
        if self.counters.contains(&1) && !told {
            self.header.events_cleared = health.events;
            self.put_header();
            self.cleared_version = self.pages[0].wanted;
            changed.push(0);
        }
        let may_clear = self.pages[0].written >= self.cleared_version;
        for chunk in 0..self.counters.len() {
            match self.counters[chunk] {
                2 => self.counters[chunk] = 1,
                1 if may_clear => {
                    let page = self.clear_image(chunk);
                    if changed.last() != Some(&page) {
                        changed.push(page);
                    }
                }
                _ => {}
            }
        }
        changed
    }

    /// Takes over a new event counter. The returned page must be on disk before the superblocks have it, so that a bitmap is never older.
    pub fn set_events(&mut self, events: u64) -> Intent {
        self.header.events = events;
        self.put_header();
        Intent {
            pages: vec![(0, self.pages[0].wanted)],
        }
    }

    /// Takes over a new event counter, for a bitmap that is to be written whole: whatever was there before is forgotten.
    pub(super) fn renew(&mut self, events: u64) {
        self.header.events = events;
        self.header.state = 0;
        self.put_header();
    }

    /// Takes all bits away that aren't needed, at once: for an array that is complete and is stopped in order. Every member must have
    /// been flushed, and all pages are to be written before anything else is. Chunks with writes under way keep theirs.
    pub fn clear_unneeded(&mut self) {
        for chunk in 0..self.counters.len() {
            if matches!(self.counters[chunk], 1 | 2) {
                self.clear_image(chunk);
            }
        }
        self.header.events_cleared = self.header.events;
        self.put_header();
    }

    /// All of it, as it is to be on the members. Where that is tried before an array serves or after, no page is written otherwise;
    /// tell [`WriteIntent::all_written`] when it is done.
    pub(super) fn area(&self) -> &[u8] {
        &self.image
    }

    /// All members have [`WriteIntent::area`].
    pub(super) fn all_written(&mut self) {
        for page in &mut self.pages {
            page.written = page.wanted;
            page.writing = false;
        }
    }

    /// True if no chunk is left to resynchronise or to clear.
    pub fn is_clean(&self) -> bool {
        self.counters.iter().all(|&c| c == 0)
    }

    /// Ranges to resynchronise, in sectors of the members; adjacent ones are joined.
    pub fn dirty_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let mut chunk = 0;
        std::iter::from_fn(move || {
            let needed = |&c: &u16| c & NEEDED != 0;
            let first = chunk + self.counters[chunk..].iter().position(needed)?;
            let rest = &self.counters[first..];
            chunk = first + rest.iter().position(|c| !needed(c)).unwrap_or(rest.len());
            let end = (chunk as u64) << self.chunk_shift;
            Some((first as u64) << self.chunk_shift..end.min(self.header.sync_size_sectors))
        })
    }

    /// Sectors of the members whose bits are set; a range for each chunk.
    pub fn marked_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let chunks = self.marks().enumerate();
        let set = chunks.filter_map(|(chunk, is_set)| is_set.then_some(chunk as u64));
        set.map(|chunk| {
            let end = (chunk + 1) << self.chunk_shift;
            chunk << self.chunk_shift..end.min(self.header.sync_size_sectors)
        })
    }

    /// The first sector from `sector` on that lies in a chunk whose bit is set; `None`: there is none.
    pub fn next_set(&self, sector: u64) -> Option<u64> {
        let first = (sector >> self.chunk_shift) as usize;
        let set = self.counters.get(first..)?.iter().position(|c| *c != 0)?;
        Some(sector.max(((first + set) as u64) << self.chunk_shift))
    }

    /// The number of sectors of a range that lie in chunks whose bits are set.
    pub fn set_sectors(&self, range: Range<u64>) -> u64 {
        let chunks = self.chunks(range.start, range.end - range.start);
        let set = chunks.filter(|chunk| self.counters[*chunk] != 0);
        set.map(|chunk| {
            let (start, end) = (chunk as u64, chunk as u64 + 1);
            let start = (start << self.chunk_shift).max(range.start);
            (end << self.chunk_shift).min(range.end) - start
        })
        .sum()
    }

    /// The chunks of these ranges have to be resynchronised: their bits are set until they were. They are on disk when no page of
    /// [`WriteIntent::unwritten_pages`] is left.
    pub fn need(&mut self, ranges: &[Range<u64>]) {
        for range in ranges {
            let sectors = range.end - range.start;
            self.set(range.start, sectors);
            for chunk in self.chunks(range.start, sectors) {
                self.counters[chunk] |= NEEDED;
            }
        }
    }

    /// Sets the device that comes back by this private map: see [`BitmapHeader::guides`].
    pub fn set_guided(&mut self, device_uuid: Option<[u8; 16]>) {
        self.header.set_guided(device_uuid);
        self.put_header();
    }

    /// Notes that parity of these sectors was made right on all members. Chunks that are covered whole are
    /// done, and later sweeps clear their bits. The first stripe counts as covered by the range after it: it
    /// is made right before an array serves ([`super::prepare`]).
    pub fn resynced(&mut self, range: Range<u64>) {
        let chunk_sectors = 1u64 << self.chunk_shift;
        let first = match range.start <= STRIPE_SECTORS {
            true => 0,
            false => range.start.div_ceil(chunk_sectors),
        };
        let end = match range.end >= self.header.sync_size_sectors {
            true => self.counters.len() as u64,
            false => range.end / chunk_sectors,
        };
        for chunk in first..end {
            let counter = &mut self.counters[chunk as usize];
            if *counter & NEEDED != 0 {
                *counter = (*counter & COUNT).max(2);
            }
        }
    }

    fn chunks(&self, member_sector: u64, sectors: u64) -> Range<usize> {
        if sectors == 0 {
            return 0..0;
        }
        let last = (member_sector + sectors - 1) >> self.chunk_shift;
        (member_sector >> self.chunk_shift) as usize..last as usize + 1
    }

    fn put_header(&mut self) {
        let bytes = self.header.encode();
        if self.image[..BITMAP_HEADER_BYTES] != bytes {
            self.image[..BITMAP_HEADER_BYTES].copy_from_slice(&bytes);
            self.pages[0].wanted += 1;
        }
    }
}

/// Where the bit of a chunk is: byte in the area, and mask.
fn bit(chunk: usize) -> (usize, u8) {
    (BITMAP_HEADER_BYTES + chunk / 8, 1 << (chunk % 8))
}

#[cfg(test)]
mod tests;
