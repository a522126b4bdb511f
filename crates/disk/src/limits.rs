//! Limits of a disk, as users see them.

use pvblk_block::SECTOR;

/// Limits and abilities of a disk, fixed while it is open; its size isn't among them, since it may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Smallest unit of requests: 512 or 4096 bytes. Offsets and lengths of requests are multiples of it.
    pub logical_sector_bytes: u32,
    /// Unit that is written without reading it first, in bytes: a multiple of the logical sector.
    pub physical_sector_bytes: u32,
    /// Length in bytes for which writes are cheapest when they begin and end at multiples of it, such as a stripe of an array; 0: there is none.
    pub optimal_bytes: u32,
    /// Longest read or write of a [`Queue`](crate::Queue), in bytes. The blocking calls of [`Disk`](crate::Disk) cut longer ones.
    pub max_request_bytes: u64,
    /// Unit of discard in bytes; 0: the disk can't discard.
    pub discard_granularity_bytes: u32,
    /// True if a queue may be given [`Request::write_zeroes`](crate::Request::write_zeroes). [`Disk::write_zeroes`](crate::Disk::write_zeroes) writes zeros
    /// otherwise.
    pub write_zeroes: bool,
    /// True if writes are refused.
    pub read_only: bool,
    /// True if completed writes may be lost until a flush.
    pub volatile_cache: bool,
}

impl Limits {
    pub(crate) fn of(limits: &pvblk_block::Limits) -> Limits {
        Limits {
            logical_sector_bytes: limits.logical_sector_bytes,
            physical_sector_bytes: limits.physical_sector_bytes,
            optimal_bytes: limits.optimal_bytes,
            max_request_bytes: u64::from(limits.max_sectors) * SECTOR,
            discard_granularity_bytes: limits.discard_granularity_bytes,
            write_zeroes: limits.write_zeroes,
            read_only: limits.read_only,
            volatile_cache: limits.volatile_cache,
        }
    }
}
