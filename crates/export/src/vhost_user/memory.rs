//! A guest's memory: regions, each checked and mapped, and what their addresses mean.
//!
//! Every queue maps all regions for itself. That costs address space only, and gives each queue reference counts of
//! its own: every buffer counts its region's users, and one counter for all queues would be the cache line that every CPU
//! writes to.

use super::proto::MemoryRegion;
use crate::local::{Budget, Share};
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Error, ErrorKind, Region};
use pvblk_sys::{PAGE_SIZE, guarded_file};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Most regions of one front end. QEMU has some for its RAM and one for each hot-plugged piece.
pub const MAX_REGIONS: usize = 128;

/// Most memory of one front end, in bytes: 1 TiB.
pub const MAX_BYTES: u64 = 1 << 40;

/// One region as the front end told it, with its file.
#[derive(Clone, Debug)]
struct Piece {
    told: MemoryRegion,
    file: Arc<OwnedFd>,
    /// Pages of the file; mappings begin and end at multiples of it.
    page_bytes: u64,
}

/// All of a front end's regions, checked but not mapped.
#[derive(Clone, Debug, Default)]
pub struct Regions(Vec<Piece>);

impl Regions {
    /// Adds one. Errors name the rule: too many, not whole pages, out of range, overlapping, no file that has it.
    pub fn add(&mut self, told: MemoryRegion, file: OwnedFd) -> Result<(), Error> {
        let at = told.guest_address;
        let refuse = |why: &str| Error::protocol(format!("memory region at {at:#x}: {why}"));
        if self.0.len() == MAX_REGIONS {
            return Err(refuse(&format!("more than {MAX_REGIONS} regions")));
        }
        let page = PAGE_SIZE as u64;
        let aligned = [
            told.guest_address,
            told.size,
            told.user_address,
            told.file_offset,
        ];
        if told.size == 0 || aligned.iter().any(|v| !v.is_multiple_of(page)) {
            return Err(refuse("it is not made of whole pages"));
        }
        let ends = [told.guest_address, told.user_address, told.file_offset];
        if ends.iter().any(|v| v.checked_add(told.size).is_none()) {
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
        let page_bytes = guarded_file(file.as_fd(), told.file_offset, told.size)
            .map_err(|e| refuse(&e.to_string()))?;
        self.0.push(Piece {
            told,
            file: Arc::new(file),
            page_bytes,
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

    /// Maps all regions for one queue, within a budget; `owner` is its line of the memory bill.
    pub fn map(&self, budget: &Arc<Budget>, owner: &str) -> Result<GuestMemory, Error> {
        let mut mapped = Vec::with_capacity(self.0.len());
        let mut shares = Vec::with_capacity(self.0.len());
        for Piece {
            told,
            file,
            page_bytes,
        } in &self.0
        {
            // Only files on huge pages have something to round.
            let first = told.file_offset - told.file_offset % page_bytes;
            let end = (told.file_offset + told.size).next_multiple_of(*page_bytes);
            let share = budget.take(end - first, 1).ok_or_else(|| {
                Error::new(
                    ErrorKind::Exhausted,
                    "all front ends together have mapped too much; ask for fewer queues or less memory",
                )
            })?;
            let region = Region::guarded(file.as_fd(), first, (end - first) as usize)
                .map_err(|e| Error::os("mapping the guest's memory", e))?;
            mapped.push(Mapped {
                guest: told.guest_address,
                user: told.user_address,
                size: told.size,
                skip: (told.file_offset - first) as usize,
                region: Arc::new(region),
            });
            shares.push(share);
        }
        Ok(GuestMemory {
            regions: mapped,
            _shares: shares,
            _gauge: Some(Gauge::fixed(owner, MemoryKind::Shared, self.bytes())),
        })
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
    _shares: Vec<Share>,
    _gauge: Option<Gauge>,
}

impl GuestMemory {
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
        GuestMemory {
            regions,
            ..GuestMemory::default()
        }
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
