//! virtio-blk: what a disk offers ([`Offer`], VIRTIO 1.2, 5.2), and the driver's side of a split virtqueue ([`Driver`], 2.7). The
//! device's side, which trusts nothing of the driver's, is the vhost-user server's own.

mod config;
mod driver;

pub use config::{ALWAYS, ID, MAX_SEGMENTS, Offer, Offered, has, id};
pub use driver::{Driver, MOST_PIECES, flags};

use pvblk_sys::Region;
use std::sync::Arc;

/// Bytes of a descriptor.
pub const DESCRIPTOR: usize = 16;

/// Where a queue's parts are, each inside one region.
pub struct Place {
    /// Descriptor table: 16 bytes an entry, aligned to 16.
    pub table: (Arc<Region>, usize),
    /// Available ring: 6 bytes and 2 an entry, aligned to 2.
    pub available: (Arc<Region>, usize),
    /// Used ring: 6 bytes and 8 an entry, aligned to 4.
    pub used: (Arc<Region>, usize),
}

impl Place {
    /// Bytes of table, available and used ring.
    pub fn lengths(entries: u16) -> (u64, u64, u64) {
        let n = u64::from(entries);
        (n * DESCRIPTOR as u64, 6 + n * 2, 6 + n * 8)
    }
}
