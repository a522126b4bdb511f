//! Everything that a handshake gives to the front end.

use pvblk_block::Region;
use pvblk_protocol::blkif::{EventChannel, FrontRing};
use pvblk_protocol::xenbus::DiskProperties;
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
    pub ring: FrontRing,
    pub channel: Box<dyn EventChannel>,
}

/// A connected disk.
pub struct FrontParts {
    /// For people: where it is connected to.
    pub name: String,
    pub properties: DiskProperties,
    /// All of one ring size.
    pub queues: Vec<FrontQueueParts>,
    pub granter: Arc<dyn Granter>,
}
