//! [`Sums`]: the sums of an array's blocks in memory, as far as they are needed, in groups.
//!
//! A batch finds the group of its stripe in memory, and it stays there until the batch has left its word: groups have the words that chunks of
//! the bitmap have. The background alone brings groups in and takes them out. Sums are read and written by the owner of the stripe's word; direct
//! reads look at them without one, and ask the owner when something doesn't fit.

use crate::STRIPE_SECTORS;
use crate::head_pages::memory;
use crate::sums::{GROUP_SHIFT, GROUP_STRIPES, SUM_BYTES, SUMS_PAGE_BYTES, group_of, groups};
use crate::words::{Chunks, Marked, SeenChunk};
use pvblk_block::memory::Gauge;
use pvblk_block::{Error, Region};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Memory of sums that stays while it isn't used: those of 16 GiB of each member of an array of four, and in any case these groups.
const KEPT_BYTES: u64 = 64 << 20;
const KEPT_GROUPS: usize = 64;
/// Memory of a group's state: a word, and whether it is dirty.
const STATE_BYTES: usize = 9;

/// See the module's documentation.
pub struct Sums {
    members: usize,
    /// A group is set if it is in memory.
    groups: Chunks,
    /// Address space for all groups: of each a page for each place. A group that isn't in memory has none of the system's.
    region: Region,
    /// Groups with sums that the members don't have.
    dirty: Box<[AtomicBool]>,
    /// Groups are to go, though there is room.
    squeezed: AtomicBool,
    gauge: Gauge,
    /// That of the groups' state.
    _state: Gauge,
}

impl Sums {
    /// None of these members' groups is in memory.
    pub fn new(members: usize, member_sectors: u64) -> Result<Sums, Error> {
        let groups = groups(member_sectors);
        let region = Region::anonymous(groups * members * SUMS_PAGE_BYTES);
        Ok(Sums {
            members,
            groups: Chunks::new(GROUP_SHIFT, (0..groups).map(|_| false)),
            region: region.map_err(|e| Error::os("address space for checksums", e))?,
            dirty: (0..groups).map(|_| AtomicBool::new(false)).collect(),
            squeezed: AtomicBool::new(false),
            gauge: memory("checksums", 0),
            _state: memory("state of checksums", groups * STATE_BYTES),
        })
    }

    fn page(&self, place: usize, group: usize) -> usize {
        (group * self.members + place) * SUMS_PAGE_BYTES
    }

    fn at(&self, place: usize, stripe: u64) -> usize {
        self.page(place, group_of(stripe)) + (stripe % GROUP_STRIPES) as usize * SUM_BYTES
    }

    fn sectors(stripe: u64) -> Range<u64> {
        stripe * STRIPE_SECTORS..(stripe + 1) * STRIPE_SECTORS
    }

    /// True if the sums of a stripe, whose word is the caller's, are in memory, and stay until the caller leaves the word.
    pub fn stay(&self, stripe: u64) -> bool {
        self.groups.may_write(&Sums::sectors(stripe))
    }

    /// The sum of a block as it should be, or [`crate::sums::UNKNOWN`]. For a caller for whom [`Sums::stay`] was true.
    pub fn get(&self, place: usize, stripe: u64) -> u32 {
        let word = self.region.atomic_u32(self.at(place, stripe));
        u32::from_le(word.load(Ordering::Relaxed))
    }

    /// A block gets a sum; as [`Sums::get`].
    pub fn set(&self, place: usize, stripe: u64, sum: u32) {
        let word = self.region.atomic_u32(self.at(place, stripe));
        word.store(sum.to_le(), Ordering::Relaxed);
        // After the sum: whoever finds the group dirty writes it.
        self.dirty[group_of(stripe)].store(true, Ordering::Release);
    }

    /// A look at the group of a stripe without its word; `None`: it isn't in memory. Sums that were read count if [`Sums::is_as_seen`] afterwards.
    pub fn peek(&self, stripe: u64) -> Option<SeenChunk> {
        self.groups.peek(group_of(stripe))
    }

    pub fn is_as_seen(&self, seen: &SeenChunk) -> bool {
        self.groups.is_as_seen(seen)
    }
}

/// For the background only.
impl Sums {
    /// True if a group is in memory.
    pub fn has(&self, group: usize) -> bool {
        !self.groups.is_clear(group)
    }

    /// A group comes into memory: a page for each place, in order.
    pub fn load<'a>(&self, group: usize, pages: impl Iterator<Item = &'a [u8]>) {
        debug_assert!(!self.has(group), "a group comes twice");
        for (place, page) in pages.enumerate() {
            self.region.write(self.page(place, group), page);
        }
        self.gauge.add(self.group_bytes());
        // Publishes the sums to batches that wait for them.
        let first = group as u64 * GROUP_STRIPES;
        self.groups.set(&Sums::sectors(first));
    }

    fn group_bytes(&self) -> u64 {
        (self.members * SUMS_PAGE_BYTES) as u64
    }

    /// Groups with sums that the members don't have.
    pub fn dirty(&self) -> Vec<usize> {
        let all = self.dirty.iter().enumerate();
        let dirty = all.filter(|(_, dirty)| dirty.load(Ordering::Relaxed));
        dirty.map(|(group, _)| group).collect()
    }

    /// The group is about to be written: true if it is dirty, and then its sums of now are read later. Those that come later make it dirty again.
    pub fn begin_writing(&self, group: usize) -> bool {
        self.dirty[group].swap(false, Ordering::AcqRel)
    }

    /// A group that was to be written isn't on all members.
    pub fn not_written(&self, group: usize) {
        self.dirty[group].store(true, Ordering::Release);
    }

    /// The sums of a place in a group, as they lie on disk.
    pub fn copy(&self, place: usize, group: usize) -> [u8; SUMS_PAGE_BYTES] {
        let mut page = [0; SUMS_PAGE_BYTES];
        self.region.read(self.page(place, group), &mut page);
        page
    }

    /// More are in memory than are to be.
    pub fn are_too_many(&self) -> bool {
        let live = self.gauge.live_bytes();
        let squeezed = self.squeezed.load(Ordering::Relaxed);
        let kept = KEPT_BYTES.max(KEPT_GROUPS as u64 * self.group_bytes());
        live > if squeezed { 0 } else { kept }
    }

    /// All that aren't used are to go at the next sweep.
    pub fn squeeze(&self) {
        self.squeezed.store(true, Ordering::Relaxed);
    }

    /// A sweep begins: groups that weren't used between two sweeps are to go, if there are too many. As for bits, batches of all owned words have
    /// to be done, and the groups' sums written, before [`Sums::drop_unused`].
    pub(super) fn sweep(&self) -> Marked {
        let go = self.are_too_many();
        self.groups.sweep(|_| go)
    }

    /// Groups that are still unused go.
    pub(super) fn drop_unused(&self, marked: Marked) {
        for group in self.groups.clear_each(marked) {
            debug_assert!(!self.dirty[group].load(Ordering::Acquire));
            let bytes = self.group_bytes();
            // Without it the memory stays, and is overwritten when the group comes again.
            if let Err(error) = self.region.release(self.page(0, group), bytes as usize) {
                tracing::debug!("raid5: memory of checksums: {error}");
            }
            self.gauge.sub(bytes);
        }
        self.squeezed.store(false, Ordering::Relaxed);
    }
}
