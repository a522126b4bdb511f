//! A guest's memory: regions, each checked and mapped, and what their addresses mean.
//!
//! A region is mapped once, when the first queue needs it, and each queue has a reference count of its own for it: every buffer
//! counts its region's users, and one counter for all queues would be the cache line that every CPU writes to.

use super::shares::Seat;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Error, ErrorKind, Region};
use pvblk_protocol::vhost_user::MemoryRegion;
use pvblk_protocol::virtio::Driver;
use pvblk_sys::{PAGE_SIZE, PeerFd, guarded_file};
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

/// Most regions of one front end. QEMU has some for its RAM and one for each hot-plugged piece.
pub const MAX_REGIONS: usize = 128;

/// Most memory of one front end, in bytes: 1 TiB.
pub const MAX_BYTES: u64 = 1 << 40;

/// One region as the front end told it, with its file.
#[derive(Debug)]
struct Piece {
    told: MemoryRegion,
    file: PeerFd,
    /// Pages of the file; mappings begin and end at multiples of it.
    page_bytes: u64,
    mapped: OnceLock<Arc<Region>>,
}

/// All of a front end's regions, checked but not mapped.
#[derive(Debug, Default)]
pub struct Regions(Vec<Piece>);

impl Regions {
    /// Adds one. Errors name the rule: too many, not at a page, out of range, overlapping, no file that has it.
    pub fn add(&mut self, told: MemoryRegion, file: PeerFd) -> Result<(), Error> {
        let at = told.guest_address;
        let refuse = |why: &str| Error::protocol(format!("memory region at {at:#x}: {why}"));
        if self.0.len() == MAX_REGIONS {
            return Err(refuse(&format!("more than {MAX_REGIONS} regions")));
        }
        let page = PAGE_SIZE as u64;
        // It may end inside a page: what is behind its end isn't memory.
        let begins = [told.guest_address, told.user_address, told.file_offset];
        if begins.iter().any(|v| !v.is_multiple_of(page)) {
            return Err(refuse("it does not begin at a page"));
        }
        if told.size == 0 {
            return Err(refuse("it is empty"));
        }
        let whole = told.size.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        if begins.iter().any(|v| v.checked_add(whole).is_none()) {
            return Err(refuse("it ends beyond the last address"));
        }
        let total: u64 = self.0.iter().map(|p| p.told.size).sum();
        if told.size > MAX_BYTES || total + told.size > MAX_BYTES {
            return Err(refuse("the front end has more than 1 TiB"));
        }
        let apart = |a: u64, b: u64, b_size: u64| a >= b + b_size || b >= a + told.size;
        for other in self.0.iter().map(|p| &p.told) {
            if !apart(told.guest_address, other.guest_address, other.size)
                || !apart(told.user_address, other.user_address, other.size)
            {
                return Err(refuse("it overlaps another"));
            }
        }
        let seen = guarded_file(file.as_fd(), told.file_offset, told.size).map_err(|e| {
            Error::caused(ErrorKind::Protocol, format!("memory region at {at:#x}"), e)
        })?;
        self.0.push(Piece {
            told,
            file,
            page_bytes: seen.page_bytes,
            mapped: OnceLock::new(),
        });
        self.0.sort_by_key(|p| p.told.guest_address);
        Ok(())
    }

    /// Takes one away, named by its addresses and size.
    pub fn remove(&mut self, told: &MemoryRegion) -> Result<(), Error> {
        let same = |p: &Piece| {
            (p.told.guest_address, p.told.user_address, p.told.size)
                == (told.guest_address, told.user_address, told.size)
        };
        let index = self.0.iter().position(same).ok_or_else(|| {
            let at = told.guest_address;
            Error::protocol(format!("memory region at {at:#x}: it was not there"))
        })?;
        self.0.remove(index);
        Ok(())
    }

    /// Bytes of all regions.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|p| p.told.size).sum()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of the files behind the regions that nobody has allocated now, as far as regions can name them.
    pub fn unallocated(&self) -> u64 {
        let mut files: Vec<((u64, u64), u64, u64)> = Vec::new();
        for piece in &self.0 {
            let Ok(seen) = guarded_file(piece.file.as_fd(), 0, 0) else {
                continue;
            };
            match files.iter_mut().find(|(id, ..)| *id == seen.id) {
                Some((_, _, told)) => *told += piece.told.size,
                None => files.push((seen.id, seen.unallocated, piece.told.size)),
            }
        }
        files
            .iter()
            .map(|&(_, unallocated, told)| unallocated.min(told))
            .sum()
    }

    /// All regions for one queue; those that are not mapped yet are, as far as there is room. `owner` is their line of the memory bill.
    pub fn map(&self, seat: &Seat, owner: &str) -> Result<GuestMemory, Error> {
        let mut mapped = Vec::with_capacity(self.0.len());
        for piece in &self.0 {
            let region = match piece.mapped.get() {
                Some(region) => region,
                None => {
                    let region = Arc::new(piece.map(seat, owner)?);
                    piece.mapped.get_or_init(|| region)
                }
            };
            let told = &piece.told;
            mapped.push(Mapped {
                guest: told.guest_address,
                user: told.user_address,
                size: told.size,
                skip: (told.file_offset % piece.page_bytes) as usize,
                region: Arc::new(region.another()),
            });
        }
        Ok(GuestMemory { regions: mapped })
    }
}

impl Piece {
    fn map(&self, seat: &Seat, owner: &str) -> Result<Region, Error> {
        // Files on huge pages have more to round.
        let first = self.told.file_offset - self.told.file_offset % self.page_bytes;
        let end = (self.told.file_offset + self.told.size).next_multiple_of(self.page_bytes);
        let share = seat.take(end - first).ok_or_else(|| {
            Error::new(
                ErrorKind::Exhausted,
                "all front ends together have mapped too much, and this one has more than its part; give it less memory or fewer regions",
            )
        })?;
        let region = Region::guarded(self.file.as_fd(), first, (end - first) as usize)
            .map_err(|e| Error::os("mapping the guest's memory", e))?;
        // Until the last buffer of it is gone.
        let gauge = Gauge::fixed(owner, MemoryKind::Shared, end - first);
        Ok(region.keeping((share, gauge)))
    }
}

#[derive(Debug)]
struct Mapped {
    guest: u64,
    user: u64,
    size: u64,
    /// Bytes of the mapping before the region.
    skip: usize,
    region: Arc<Region>,
}

/// A guest's memory as one queue sees it. Regions are sorted by guest address and don't overlap.
#[derive(Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Mapped>,
}

impl GuestMemory {
    /// The memory of a driver that is ours: for tests.
    pub fn of_driver(driver: &Driver) -> GuestMemory {
        GuestMemory::of_regions(vec![(driver.guest(), Arc::clone(driver.region()))])
    }

    /// Memory of ours at these guest addresses (user addresses are the same), sorted and apart: for tests and fuzzing.
    pub fn of_regions(regions: Vec<(u64, Arc<Region>)>) -> GuestMemory {
        let regions = regions
            .into_iter()
            .map(|(at, region)| Mapped {
                guest: at,
                user: at,
                size: region.len() as u64,
                skip: 0,
                region,
            })
            .collect();
        GuestMemory { regions }
    }

    /// Region and offset of guest address `at`, and how many bytes there are from it on.
    #[inline]
    fn find(&self, at: u64) -> Option<(&Mapped, u64)> {
        let next = self.regions.partition_point(|r| r.guest <= at);
        let region = self.regions.get(next.checked_sub(1)?)?;
        let offset = at - region.guest;
        (offset < region.size).then_some((region, offset))
    }

    /// Adds the buffers of `len` bytes at guest address `at` to `out`; neighbours in one region become one. False, with a part
    /// of them added, if not all of it is memory.
    #[inline]
    pub fn buffers(&self, mut at: u64, len: u32, out: &mut Vec<Buffer>) -> bool {
        let mut left = u64::from(len);
        while left > 0 {
            let Some((region, offset)) = self.find(at) else {
                return false;
            };
            let part = left.min(region.size - offset);
            let place = region.skip + offset as usize;
            let Some(buffer) = Buffer::new(&region.region, place, part as usize) else {
                return false;
            };
            let joined = out.last_mut().is_some_and(|last| last.try_extend(&buffer));
            if !joined {
                out.push(buffer);
            }
            left -= part;
            // Can't overflow: regions end before the last address.
            at += part;
        }
        true
    }

    /// The byte at guest address `at`, if that is memory.
    #[inline]
    pub fn byte(&self, at: u64) -> Option<Buffer> {
        let (region, offset) = self.find(at)?;
        Buffer::new(&region.region, region.skip + offset as usize, 1)
    }

    /// Copies bytes at guest address `at` out. False if not all of it is memory.
    #[inline]
    pub fn read(&self, mut at: u64, mut dst: &mut [u8]) -> bool {
        while !dst.is_empty() {
            let Some((region, offset)) = self.find(at) else {
                return false;
            };
            let part = (dst.len() as u64).min(region.size - offset) as usize;
            let (now, rest) = std::mem::take(&mut dst).split_at_mut(part);
            region.region.read(region.skip + offset as usize, now);
            dst = rest;
            at += part as u64;
        }
        true
    }

    /// The place of `len` bytes at an address of the front end, inside one region.
    pub fn user(&self, at: u64, len: u64) -> Option<(Arc<Region>, usize)> {
        let region = self
            .regions
            .iter()
            .find(|r| at >= r.user && at - r.user < r.size)?;
        let offset = at - region.user;
        (len <= region.size - offset)
            .then(|| (Arc::clone(&region.region), region.skip + offset as usize))
    }

    /// True if the file behind a region became shorter than it was said to be.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|r| r.region.is_lost())
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
