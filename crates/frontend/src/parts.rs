//! What a handshake hands to the front end.

use pvblk_block::Region;
use pvblk_ring::{EventChannel, FrontRing};
use std::sync::Arc;

/// Lets the back end reach pages of our memory.
pub trait Granter: Send + Sync {
    /// The memory that frames are counted in.
    fn memory(&self) -> &Arc<Region>;
    /// First frame that the front end may use for data and indirect pages; those before it hold rings and the grant table.
    fn first_data_frame(&self) -> u32;
    /// Grants access to a frame (unit: pages of the memory); `None` if the table is full.
    fn grant(&self, frame: u32, read_only: bool) -> Option<u32>;
    /// Ends a grant that the back end no longer uses.
    fn end(&self, gref: u32);
}

/// One negotiated queue.
pub struct FrontQueueParts {
    /// The ring.
    pub ring: FrontRing,
    /// Its doorbell.
    pub channel: Box<dyn EventChannel>,
}

/// What the back end published about the disk when it went to Connected (blkif.h names in brackets).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskProperties {
    /// Capacity in 512-byte sectors (`sectors`).
    pub sectors: u64,
    /// Logical sector in bytes (`sector-size`).
    pub sector_size: u32,
    /// Physical sector in bytes (`physical-sector-size`).
    pub physical_sector_size: u32,
    /// Writes are refused (`info` bit 2, or mode `r`).
    pub read_only: bool,
    /// `feature-flush-cache`.
    pub flush: bool,
    /// `feature-barrier`.
    pub barrier: bool,
    /// `feature-discard`.
    pub discard: bool,
    /// `discard-secure`.
    pub discard_secure: bool,
    /// `discard-granularity`, bytes.
    pub discard_granularity: u32,
    /// `feature-persistent` on both sides: grants stay for the life of the connection.
    pub persistent: bool,
    /// `feature-max-indirect-segments`; 0: not offered.
    pub max_indirect_segments: u16,
    /// Another value: writes that were answered and not flushed may be lost (`x-pvblk-cache`; ours). `None`: not told.
    pub cache_mark: Option<u64>,
    /// Another value: all that the disk held is lost (`x-pvblk-contents`; ours). `None`: it isn't lost with the back end.
    pub contents_mark: Option<u64>,
}

/// A connected disk.
pub struct FrontParts {
    /// For people: where it is connected to.
    pub name: String,
    /// As published.
    pub properties: DiskProperties,
    /// All of one ring size.
    pub queues: Vec<FrontQueueParts>,
    /// Our memory.
    pub granter: Arc<dyn Granter>,
}
