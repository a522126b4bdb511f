//! Limits of a device.

use std::sync::atomic::{AtomicU64, Ordering};

/// Limits and abilities of a device, fixed while it is open. Only its capacity may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Smallest unit of I/O in bytes: 512 or 4096. Sectors of a request are multiples of it.
    pub logical_sector_bytes: u32,
    /// Unit that is written without read-modify-write, in bytes: a multiple of the logical sector.
    pub physical_sector_bytes: u32,
    /// Length in bytes for which writes are cheapest when they begin and end at multiples of it, such as a
    /// stripe of an array; a multiple of the physical sector, or 0 if there is no such length.
    pub optimal_bytes: u32,
    /// Most sectors (512 B) of one read or write.
    pub max_sectors: u32,
    /// Most segments of one read or write.
    pub max_segments: u32,
    /// Unit of discard in bytes; 0: the device can't discard.
    pub discard_granularity_bytes: u32,
    /// Largest window of the system's read-ahead on the device in bytes, which grows with the device's
    /// latency times its speed (Linux: the queue's `read_ahead_kb`). 0: unknown.
    pub readahead_bytes: u32,
    /// True if the device keeps data that was read, so that a read whose data isn't used makes
    /// later ones faster.
    pub caches_reads: bool,
    /// True if WRITE_ZEROES is cheaper than writing zeros.
    pub write_zeroes: bool,
    /// True if writes are refused.
    pub read_only: bool,
    /// True if completed writes may be volatile until a FLUSH.
    pub volatile_cache: bool,
    /// True if the medium has no seek cost.
    pub non_rotational: bool,
    /// True if nobody else writes to the device while it is open, as far as it can tell: it has a lock, or is memory of
    /// the process. A device that doesn't know says false.
    pub exclusive: bool,
}

impl Default for Limits {
    /// A writable memory-like device with 512-byte sectors, 32 MiB requests of up to 8192 segments, and a 4 KiB discard unit.
    fn default() -> Limits {
        Limits {
            logical_sector_bytes: 512,
            physical_sector_bytes: 4096,
            optimal_bytes: 0,
            max_sectors: 65536,
            max_segments: 8192,
            discard_granularity_bytes: 4096,
            readahead_bytes: 0,
            caches_reads: false,
            write_zeroes: true,
            read_only: false,
            volatile_cache: false,
            non_rotational: true,
            exclusive: false,
        }
    }
}

impl Limits {
    /// Logical sector in units of 512 bytes: 1 or 8.
    pub fn sectors_per_block(&self) -> u64 {
        u64::from(self.logical_sector_bytes / 512)
    }
}

/// A device's size, which may change while it is open.
#[derive(Debug, Default)]
pub struct Capacity(AtomicU64);

impl Capacity {
    /// A capacity of `sectors` (512 B).
    pub fn new(sectors: u64) -> Capacity {
        Capacity(AtomicU64::new(sectors))
    }

    /// Current capacity in sectors (512 B).
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Changes the capacity; returns true if it was another one.
    pub fn set(&self, sectors: u64) -> bool {
        self.0.swap(sectors, Ordering::AcqRel) != sectors
    }
}
