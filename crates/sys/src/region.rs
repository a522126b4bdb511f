//! [`Region`]: a mapping whose bytes a peer may change at any time.

use crate::sigbus::Guard;
use crate::xen::GrantMapping;
use crate::xor;
use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Bytes of one page and of one grant (Xen: `XEN_PAGE_SIZE`, xen/include/public/io/blkif.h).
pub const PAGE_SIZE: usize = 4096;

/// Bytes of a huge page, which the kernel uses where a region is aligned to it (x86-64, and arm64 with 4 KiB pages).
const HUGE_BYTES: usize = 2 << 20;

/// A page-aligned mapping of memory that others may read and write concurrently.
///
/// The peer is hostile, so no value read here may be read a second time and be trusted. Accessors copy. They panic if
/// the caller (never the peer) asks for a range outside the region; check ranges that come from a peer by
/// [`crate::Buffer::new`] first.
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    shared: bool,
    /// Set for a mapping of a file that may shrink.
    guard: Option<Guard>,
    /// Set for a piece: the region that it was cut from, which owns the mapping.
    whole: Option<Arc<Region>>,
    /// Set for granted pages; dropped after the mapping, as the driver requires.
    grants: Option<Box<GrantMapping>>,
    /// Caller's value, dropped after the mapping.
    kept: Option<Box<dyn Any + Send + Sync>>,
}

/// Reason why a region could not be created.
#[derive(Debug)]
pub enum RegionError {
    /// The length is zero, or a frame or range is outside the file.
    Range,
    /// The kernel refused the mapping.
    Os(io::Error),
}

impl std::fmt::Display for RegionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RegionError::Range => write!(f, "range is empty or outside the memory"),
            RegionError::Os(e) => write!(f, "mapping memory: {e}"),
        }
    }
}

impl std::error::Error for RegionError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RegionError::Range => None,
            RegionError::Os(e) => Some(e),
        }
    }
}

// SAFETY: the mapping belongs to the process, not to a thread; all access goes through raw copies or
// atomics, which are sound from any thread (see `read`).
unsafe impl Send for Region {}
// SAFETY: as above; no method hands out a reference to non-atomic data.
unsafe impl Sync for Region {}

fn round_up(len: usize) -> Option<usize> {
    len.checked_add(PAGE_SIZE - 1).map(|n| n & !(PAGE_SIZE - 1))
}

fn map(
    addr: *mut u8,
    len: usize,
    prot: i32,
    flags: i32,
    fd: i32,
    offset: u64,
) -> io::Result<NonNull<u8>> {
    // SAFETY: without MAP_FIXED the kernel picks an unused range; with it (only `from_frames`) the
    // range is one that this function reserved and nobody else knows.
    let p = unsafe { libc::mmap(addr.cast(), len, prot, flags, fd, offset as libc::off_t) };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(p.cast()).ok_or_else(|| io::Error::other("mmap returned null"))
}

impl Region {
    /// Allocates private zeroed memory of `len` bytes (rounded up to pages). The system supplies pages on first
    /// access.
    pub fn anonymous(len: usize) -> Result<Region, RegionError> {
        let len = round_up(len).filter(|&n| n > 0).ok_or(RegionError::Range)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let base = map(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        )
        .map_err(RegionError::Os)?;
        Ok(Region::mapped(base, len, true, false))
    }

    fn mapped(base: NonNull<u8>, len: usize, writable: bool, shared: bool) -> Region {
        Region {
            base,
            len,
            writable,
            shared,
            guard: None,
            whole: None,
            grants: None,
            kept: None,
        }
    }

    /// As [`Region::anonymous`], on huge pages where possible (`MADV_HUGEPAGE`). Neighbouring bytes are then also
    /// neighbours in physical memory: a device gets fewer segments, and the kernel pins them in one step. Memory is
    /// allocated 2 MiB at a time then.
    pub fn anonymous_huge(len: usize) -> Result<Region, RegionError> {
        let region = Region::aligned(len)?;
        // Without huge pages everything works, only slower.
        let _ = advise(region.base.as_ptr(), region.len, libc::MADV_HUGEPAGE);
        Ok(region)
    }

    /// As [`Region::anonymous`], aligned to [`HUGE_BYTES`].
    fn aligned(len: usize) -> Result<Region, RegionError> {
        let len = round_up(len).filter(|&n| n > 0).ok_or(RegionError::Range)?;
        let region = Region::anonymous(len.checked_add(HUGE_BYTES).ok_or(RegionError::Range)?)?;
        let head = region.address().next_multiple_of(HUGE_BYTES) - region.address();
        let base = NonNull::new(region.at(head, len)).ok_or(RegionError::Range)?;
        for (at, n) in [(0, head), (head + len, region.len - head - len)] {
            if n > 0 {
                // SAFETY: the region maps all of the range, which is not shared yet; the rest stays a mapping of its
                // own.
                unsafe { libc::munmap(region.at(at, n).cast(), n) };
            }
        }
        std::mem::forget(region);
        Ok(Region::mapped(base, len, true, false))
    }

    /// Maps `len` bytes of a memory file from `offset` (both multiples of [`PAGE_SIZE`]), shared.
    ///
    /// The caller has checked that the file can't shrink ([`crate::check_sealed`]): a file that shrinks under this
    /// mapping ends the process with SIGBUS.
    pub fn shared(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        writable: bool,
    ) -> Result<Region, RegionError> {
        if len == 0 || !len.is_multiple_of(PAGE_SIZE) || !offset.is_multiple_of(PAGE_SIZE as u64) {
            return Err(RegionError::Range);
        }
        let base = map(
            std::ptr::null_mut(),
            len,
            prot(writable),
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            fd.as_raw_fd(),
            offset,
        )
        .map_err(RegionError::Os)?;
        Ok(Region::mapped(base, len, writable, true))
    }

    /// Maps `len` bytes of a file that may shrink (checked by [`crate::guarded_file`]) from `offset`, shared and
    /// writable; both are multiples of the file's page size. An access beyond the end of the shortened file makes the
    /// region [lost](Region::is_lost): from then on it is private zeros.
    pub fn guarded(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Region, RegionError> {
        let mut region = Region::shared(fd, offset, len, true)?;
        let guard = Guard::new(region.base.as_ptr() as usize, len).map_err(RegionError::Os)?;
        region.guard = Some(guard);
        Ok(region)
    }

    /// Maps pages that another domain granted and that `grants` announced to the driver. Dropping the region frees
    /// them in the driver.
    pub(crate) fn granted(fd: BorrowedFd<'_>, grants: GrantMapping) -> Result<Region, RegionError> {
        let (index, len, writable) = (grants.index(), grants.len(), grants.is_writable());
        let mut region = Region::shared(fd, index, len, writable)?;
        region.grants = Some(Box::new(grants));
        Ok(region)
    }

    /// True if the file was found shorter than the mapping: reads and writes here have no meaning any more.
    #[inline]
    pub fn is_lost(&self) -> bool {
        match &self.whole {
            None => self.guard.as_ref().is_some_and(Guard::is_lost),
            Some(whole) => whole.is_lost(),
        }
    }

    /// Maps single pages (frame numbers in units of [`PAGE_SIZE`]) of a memory file side by side. Multi-page rings
    /// need this: their pages are granted one by one and need not be neighbours.
    ///
    /// The caller has checked the frames against the file's size.
    pub fn from_frames(
        fd: BorrowedFd<'_>,
        frames: &[u64],
        writable: bool,
    ) -> Result<Region, RegionError> {
        let len = frames
            .len()
            .checked_mul(PAGE_SIZE)
            .filter(|&n| n > 0)
            .ok_or(RegionError::Range)?;
        // Reserve one range, then place each page in it.
        let base = map(
            std::ptr::null_mut(),
            len,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
        .map_err(RegionError::Os)?;
        let region = Region::mapped(base, len, writable, true);
        for (i, &frame) in frames.iter().enumerate() {
            let offset = frame
                .checked_mul(PAGE_SIZE as u64)
                .ok_or(RegionError::Range)?;
            // SAFETY: `i * PAGE_SIZE` is inside the reserved range.
            let at = unsafe { base.as_ptr().add(i * PAGE_SIZE) };
            map(
                at,
                PAGE_SIZE,
                prot(writable),
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd.as_raw_fd(),
                offset,
            )
            .map_err(RegionError::Os)?;
        }
        Ok(region)
    }

    /// Length of the mapping in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: there are no empty regions.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if this process may write to the mapping.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "range outside the region"
        );
        // SAFETY: offset <= len of the mapping, checked above.
        unsafe { self.base.as_ptr().add(offset) }
    }

    #[inline]
    pub(crate) fn at_mut(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(self.writable, "region is read-only");
        self.at(offset, len)
    }

    /// Copies `dst.len()` bytes out, starting at `offset`.
    #[inline]
    pub fn read(&self, offset: usize, dst: &mut [u8]) {
        let src = self.at(offset, dst.len());
        // SAFETY: source range checked; `dst` is private memory, so the ranges don't overlap. A peer
        // may write meanwhile: the copy then holds a mix of old and new bytes, and any byte pattern is
        // valid for `u8`. No reference to the source exists, so the compiler can't read it twice.
        unsafe { std::ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) }
    }

    /// XORs `dst.len()` bytes at `offset` into `dst`.
    #[inline]
    pub fn xor_to(&self, offset: usize, dst: &mut [u8]) {
        let (from, to, len) = (self.at(offset, dst.len()), dst.as_mut_ptr(), dst.len());
        let streams = [to.cast_const(), from.cast_const()].into_iter();
        // SAFETY: both have `len` bytes; `to` is private memory. Races as in `read`.
        unsafe { xor::chosen().pass(to, streams, len) }
    }

    /// Makes `len` bytes at `offset` the XOR of as many bytes of each source, given as a region and an offset in it.
    ///
    /// Makes one pass that loads each byte of a source once and stores each byte of the result once, without reading
    /// it. The destination may itself be a source, at the same offset; sources that overlap it otherwise make the
    /// result unspecified. Panics unless there are 1 to 64 sources.
    pub fn xor_from(&self, offset: usize, sources: &[(&Region, usize)], len: usize) {
        assert!(
            (1..=xor::MAX_STREAMS).contains(&sources.len()),
            "1 to 64 sources"
        );
        let to = self.at_mut(offset, len);
        let streams = sources.iter().map(|(r, at)| r.at(*at, len).cast_const());
        // SAFETY: all ranges checked, `to` is writable. Races as in `read`.
        unsafe { xor::chosen().pass(to, streams, len) }
    }

    /// True if `len` bytes at `offset` are zero; returns soon after the first byte that isn't.
    ///
    /// On shared memory the result may be outdated at once: a peer may write at any time.
    pub fn is_zero(&self, offset: usize, len: usize) -> bool {
        let from = self.at(offset, len);
        // SAFETY: range checked. Races as in `read`.
        unsafe { xor::chosen().is_zero(from, len) }
    }

    /// Copies `src` in, starting at `offset`.
    #[inline]
    pub fn write(&self, offset: usize, src: &[u8]) {
        let dst = self.at_mut(offset, src.len());
        // SAFETY: destination range checked and writable; `src` is private memory.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) }
    }

    /// Copies `len` bytes from `src` at `src_offset` to here at `offset`; the ranges may overlap.
    #[inline]
    pub fn copy_from(&self, offset: usize, src: &Region, src_offset: usize, len: usize) {
        let from = src.at(src_offset, len);
        let to = self.at_mut(offset, len);
        // SAFETY: both ranges checked; `copy` allows overlap. Races as in `read`.
        unsafe { std::ptr::copy(from, to, len) }
    }

    /// Tells the CPU that data at `offset` is copied soon, and returns at once: it fetches the first 512 bytes, of which those outside the region are left
    /// out. Random reads of 4 KiB of more memory than the CPU's cache holds are a third faster if the next one's are fetched while one is copied; with 256
    /// or 1024 bytes it is the same.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        let end = offset.saturating_add(512).min(self.len);
        #[cfg(target_arch = "x86_64")]
        for at in (offset..end).step_by(64) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, for an address inside of the region.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.at(at, 1).cast_const().cast()) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = end;
    }

    /// Writes `len` zero bytes at `offset`.
    #[inline]
    pub fn zero(&self, offset: usize, len: usize) {
        let dst = self.at_mut(offset, len);
        // SAFETY: range checked and writable.
        unsafe { std::ptr::write_bytes(dst, 0, len) }
    }

    /// The 32-bit word at `offset` (a multiple of 4), for producer and event indices of rings.
    #[inline]
    pub fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "unaligned atomic");
        let p = self.at_mut(offset, 4);
        // SAFETY: in range, aligned (the base is page-aligned), writable, lives as long as `self`;
        // an atomic may be changed by anyone at any time.
        unsafe { AtomicU32::from_ptr(p.cast()) }
    }

    /// The 64-bit word at `offset` (a multiple of 8), for values that must never be seen half written.
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "unaligned atomic");
        let p = self.at_mut(offset, 8);
        // SAFETY: as in `atomic_u32`.
        unsafe { AtomicU64::from_ptr(p.cast()) }
    }

    /// The 16-bit index at `offset` (a multiple of 2), for virtqueues.
    #[inline]
    pub fn atomic_u16(&self, offset: usize) -> &AtomicU16 {
        assert!(offset.is_multiple_of(2), "unaligned atomic");
        let p = self.at_mut(offset, 2);
        // SAFETY: as in `atomic_u32`.
        unsafe { AtomicU16::from_ptr(p.cast()) }
    }

    /// The byte at `offset`, for values whose memory order matters.
    #[inline]
    pub fn atomic_u8(&self, offset: usize) -> &AtomicU8 {
        let p = self.at_mut(offset, 1);
        // SAFETY: as in `atomic_u32`.
        unsafe { AtomicU8::from_ptr(p) }
    }

    /// Punches a hole of whole pages into the file of a shared region (`MADV_REMOVE`); the pages read as zero
    /// afterwards, in every mapping. The range must be page-aligned. A discard of stored data uses this; memory that
    /// was lent for I/O is returned as [`crate::Idle`] only, whose type proves that it has no users.
    pub fn punch(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE));
        assert!(self.shared, "private memory has no file to punch");
        if len == 0 {
            return Ok(());
        }
        let p = self.at_mut(offset, len);
        advise(p, len, libc::MADV_REMOVE)
    }

    /// Returns whole pages of a private region to the system; their next use finds zeros. For callers that hand out
    /// pages by number, such as a page cache, and know that the contents are not needed. Memory that is lent for I/O
    /// as buffers of its own is returned as [`crate::Idle`] only.
    pub fn release(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE));
        assert!(!self.shared, "shared memory is punched");
        if len == 0 {
            return Ok(());
        }
        advise(self.at_mut(offset, len), len, libc::MADV_DONTNEED)
    }

    /// Cuts a private region into pieces of `piece_len` bytes (a multiple of 4096 that divides its length). Each
    /// piece is a region with a reference counter of its own, which shows whether this piece is in use. The memory is
    /// unmapped when the last piece is dropped.
    pub fn cut(self, piece_len: usize) -> Vec<Region> {
        assert!(!self.shared, "only private memory is cut");
        assert!(piece_len > 0 && piece_len.is_multiple_of(PAGE_SIZE));
        assert!(self.len.is_multiple_of(piece_len), "pieces of one size");
        let whole = Arc::new(self);
        let piece = |offset: usize| {
            let at = whole.at(offset, piece_len);
            NonNull::new(at).map(|base| Region {
                base,
                len: piece_len,
                writable: whole.writable,
                shared: false,
                guard: None,
                whole: Some(Arc::clone(&whole)),
                grants: None,
                kept: None,
            })
        };
        // `at` is inside the mapping, so it is never null.
        (0..whole.len)
            .step_by(piece_len)
            .filter_map(piece)
            .collect()
    }

    /// True if this region was cut from another.
    #[inline]
    pub fn is_piece(&self) -> bool {
        self.whole.is_some() && !self.shared
    }

    /// Returns a second handle of the mapping with a reference counter of its own, so that CPUs don't share a
    /// counter.
    pub fn another(self: &Arc<Region>) -> Region {
        Region {
            base: self.base,
            len: self.len,
            writable: self.writable,
            shared: true,
            guard: None,
            whole: Some(Arc::clone(self)),
            grants: None,
            kept: None,
        }
    }

    /// Attaches a value to the region that is dropped after the mapping.
    pub fn keeping(mut self, kept: impl Any + Send + Sync) -> Region {
        self.kept = Some(Box::new(kept));
        self
    }

    pub(crate) fn whole(&self) -> Option<&Arc<Region>> {
        self.whole.as_ref()
    }

    pub(crate) fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Bytes of this mapping that are resident (`mincore`), for the report on memory use.
    pub fn resident(&self) -> usize {
        let pages = self.len / PAGE_SIZE;
        let mut seen = 0;
        let mut vec = [0u8; 4096];
        let mut page = 0;
        while page < pages {
            let n = vec.len().min(pages - page);
            let p = self.at(page * PAGE_SIZE, n * PAGE_SIZE);
            // SAFETY: the range is mapped and `vec` holds one byte for each of its pages.
            if unsafe { libc::mincore(p.cast(), n * PAGE_SIZE, vec.as_mut_ptr()) } != 0 {
                return self.len;
            }
            seen += vec[..n].iter().filter(|&&b| b & 1 != 0).count();
            page += n;
        }
        seen * PAGE_SIZE
    }
}

/// Advises the kernel on a range inside one of the caller's regions.
fn advise(p: *mut u8, len: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the range is inside a mapping of ours, and the advices used keep it mapped.
    if unsafe { libc::madvise(p.cast(), len, advice) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Drops the pages of neighbouring private regions, `len` bytes in all from the start of the first. `&mut` proves
/// that there are no other references, so no buffer of these regions exists and no I/O on them is in flight.
pub(crate) fn drop_pages(run: &mut [&mut Region], len: usize) -> io::Result<()> {
    let Some(first) = run.first() else {
        return Ok(());
    };
    debug_assert!(run.iter().all(|r| !r.shared) && run.iter().map(|r| r.len).sum::<usize>() == len);
    advise(first.base.as_ptr(), len, libc::MADV_DONTNEED)
}

fn prot(writable: bool) -> i32 {
    if writable {
        libc::PROT_READ | libc::PROT_WRITE
    } else {
        libc::PROT_READ
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // The guard goes first: once the range is free, another mapping may take its place.
        self.guard = None;
        if self.whole.is_some() {
            return; // the whole region owns the mapping
        }
        // A later mapping at this address must be accessible.
        crate::asan::unpoison(self);
        // SAFETY: the range was mapped by us, and buffers hold an `Arc` of us, so none is in use.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region")
            .field("len", &self.len)
            .field("writable", &self.writable)
            .field("shared", &self.shared)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{check_sealed, create_sealed};
    use std::os::fd::AsFd;

    #[test]
    fn frames_are_mapped_side_by_side() {
        let fd = create_sealed("t", 4 * PAGE_SIZE as u64).unwrap();
        let whole = Region::shared(fd.as_fd(), 0, 4 * PAGE_SIZE, true).unwrap();
        whole.write(3 * PAGE_SIZE, b"three");
        whole.write(PAGE_SIZE, b"one");
        let ring = Region::from_frames(fd.as_fd(), &[3, 1], true).unwrap();
        let mut b = [0; 5];
        ring.read(0, &mut b);
        assert_eq!(&b, b"three");
        ring.read(PAGE_SIZE, &mut b[..3]);
        assert_eq!(&b[..3], b"one");
        assert_eq!(check_sealed(fd.as_fd()).unwrap(), 4 * PAGE_SIZE as u64);
    }

    #[test]
    fn a_punched_hole_reads_zero() {
        let fd = create_sealed("t", 8 * PAGE_SIZE as u64).unwrap();
        let r = Region::shared(fd.as_fd(), 0, 8 * PAGE_SIZE, true).unwrap();
        (0..8).for_each(|p| r.write(p * PAGE_SIZE, b"x"));
        r.punch(2 * PAGE_SIZE, 4 * PAGE_SIZE).unwrap();
        assert_eq!(r.resident(), 4 * PAGE_SIZE);
        let mut b = [1];
        r.read(2 * PAGE_SIZE, &mut b);
        assert_eq!(b, [0]);
    }

    #[test]
    fn huge_regions_are_aligned_and_released_pages_read_zero() {
        let r = Region::anonymous_huge(3 << 21).unwrap();
        assert_eq!((r.len(), r.address() % HUGE_BYTES), (3 << 21, 0));
        (0..3).for_each(|n| r.write((n << 21) + 5, b"x"));
        r.release(1 << 21, 1 << 21).unwrap();
        let mut seen = [0, 1, 2].map(|n| {
            let mut byte = [1];
            r.read((n << 21) + 5, &mut byte);
            byte[0]
        });
        assert_eq!(seen, *b"x\0x");
        seen[1] = b'y';
        r.write((1 << 21) + 5, &seen[1..2]);
        r.read((1 << 21) + 5, &mut seen[..1]);
        assert_eq!(seen[0], b'y');
    }

    #[test]
    #[should_panic(expected = "range outside the region")]
    fn a_range_outside_panics() {
        Region::anonymous(1)
            .unwrap()
            .read(PAGE_SIZE - 1, &mut [0; 2]);
    }
}
