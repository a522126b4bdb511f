//! The offer of a disk to a guest: feature bits and the configuration space (VIRTIO 1.2, 5.2.3 and 5.2.4).

use crate::vhost_user::{F_PROTOCOL_FEATURES, MAX_CONFIG};
use pvblk_block::{Limits, SECTOR};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_ID_BYTES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// Most segments of a request. With head and status they fit into a queue of 128 entries, QEMU's smallest common one, also
/// without indirect descriptors.
pub const MAX_SEGMENTS: u32 = 126;
/// Most sectors (512 B) of one discard or write-zeroes: 2 GiB, so that one request doesn't keep the disk for long.
const MAX_RANGE_SECTORS: u32 = 1 << 22;

/// Bytes of a disk's name for GET_ID.
pub const ID: usize = VIRTIO_BLK_ID_BYTES as usize;

/// Features that a disk has whatever it can do.
pub const ALWAYS: [u32; 8] = [
    VIRTIO_F_VERSION_1,
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
    VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_BLK_SIZE,
    VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_MQ,
];

/// True if feature `bit` is in `features`.
pub fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

/// The part of an offer on which requests depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    pub discard: bool,
    pub write_zeroes: bool,
}

/// The part that depends on the device alone, fixed while it is open.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    limits: Limits,
    queues: u16,
}

impl Offer {
    /// The offer of a device with these limits, on up to `queues` queues.
    pub fn new(limits: Limits, queues: u16) -> Offer {
        Offer { limits, queues }
    }

    /// Queues that a front end may use.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    fn discard(&self) -> bool {
        !self.limits.read_only && self.limits.discard_granularity_bytes > 0
    }

    fn write_zeroes(&self) -> bool {
        !self.limits.read_only && self.limits.write_zeroes
    }

    /// Feature bits. A device whose completed writes are stable offers no flush: there is nothing to flush.
    pub fn features(&self) -> u64 {
        let mut features = F_PROTOCOL_FEATURES;
        for bit in ALWAYS {
            features |= 1 << bit;
        }
        let writable = !self.limits.read_only;
        for (bit, offered) in [
            (VIRTIO_BLK_F_RO, !writable),
            (VIRTIO_BLK_F_FLUSH, writable && self.limits.volatile_cache),
            (VIRTIO_BLK_F_DISCARD, self.discard()),
            (VIRTIO_BLK_F_WRITE_ZEROES, self.write_zeroes()),
        ] {
            features |= u64::from(offered) << bit;
        }
        features
    }

    /// The bounds of requests of a front end that took `features`.
    pub fn offered(&self, features: u64) -> Offered {
        Offered {
            discard: self.discard() && has(features, VIRTIO_BLK_F_DISCARD),
            write_zeroes: self.write_zeroes() && has(features, VIRTIO_BLK_F_WRITE_ZEROES),
        }
    }

    /// The configuration space of a device with `sectors` (512 B); bytes that have no meaning are zero.
    pub fn config(&self, sectors: u64) -> [u8; MAX_CONFIG as usize] {
        let limits = &self.limits;
        let logical = limits.logical_sector_bytes.max(SECTOR as u32);
        let segments = MAX_SEGMENTS.min(limits.max_segments).max(1);
        // Together the segments make no request that is too long.
        let bytes = u64::from(limits.max_sectors) * SECTOR / u64::from(segments);
        let size_max = (bytes - bytes % 4096).clamp(4096, 1 << 30) as u32;
        let exponent = (limits.physical_sector_bytes / logical).max(1).ilog2() as u8;
        let granularity = (limits.discard_granularity_bytes / SECTOR as u32).max(1);
        let mut space = [0; MAX_CONFIG as usize];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &sectors.to_le_bytes());
        put(8, &size_max.to_le_bytes());
        put(12, &segments.to_le_bytes());
        put(20, &logical.to_le_bytes());
        put(24, &[exponent, 0]);
        // In logical blocks: smallest and best size of a request.
        put(26, &1u16.to_le_bytes());
        put(28, &(limits.optimal_bytes / logical).to_le_bytes());
        put(34, &self.queues.to_le_bytes());
        if self.discard() {
            put(36, &MAX_RANGE_SECTORS.to_le_bytes());
            put(40, &1u32.to_le_bytes());
            put(44, &granularity.to_le_bytes());
        }
        if self.write_zeroes() {
            put(48, &MAX_RANGE_SECTORS.to_le_bytes());
            put(52, &1u32.to_le_bytes());
            put(56, &[u8::from(limits.discard_granularity_bytes > 0)]);
        }
        space
    }
}

/// The disk's name as GET_ID tells it: cut off or filled with zeros.
pub fn id(name: &str) -> [u8; ID] {
    let mut id = [0; ID];
    for (to, from) in id.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(space: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(space[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn only_what_is_there_is_offered() {
        let plain = Offer::new(Limits::default(), 4);
        assert!(has(plain.features(), VIRTIO_BLK_F_DISCARD));
        assert!(!has(plain.features(), VIRTIO_BLK_F_FLUSH));
        assert!(!has(plain.features(), VIRTIO_BLK_F_RO));
        let cached = Limits {
            volatile_cache: true,
            write_zeroes: false,
            ..Limits::default()
        };
        let cached = Offer::new(cached, 4);
        assert!(has(cached.features(), VIRTIO_BLK_F_FLUSH));
        assert!(!has(cached.features(), VIRTIO_BLK_F_WRITE_ZEROES));
        assert_eq!(u32_at(&cached.config(8), 48), 0);
        let read_only = Limits {
            read_only: true,
            volatile_cache: true,
            ..Limits::default()
        };
        let read_only = Offer::new(read_only, 4);
        assert!(has(read_only.features(), VIRTIO_BLK_F_RO));
        for bit in [
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_DISCARD,
            VIRTIO_BLK_F_WRITE_ZEROES,
        ] {
            assert!(!has(read_only.features(), bit), "{bit}");
        }
        // What wasn't taken isn't done.
        assert!(!plain.offered(0).discard && plain.offered(plain.features()).discard);
    }

    #[test]
    fn the_configuration_space_is_that_of_the_specification() {
        let limits = Limits {
            logical_sector_bytes: 4096,
            physical_sector_bytes: 16384,
            optimal_bytes: 65536,
            max_sectors: 2048,
            ..Limits::default()
        };
        let space = Offer::new(limits, 3).config(0x1_2345_6788);
        assert_eq!(space[..8], 0x1_2345_6788u64.to_le_bytes());
        assert_eq!((u32_at(&space, 8), u32_at(&space, 12)), (8192, 126));
        assert!(u64::from(u32_at(&space, 8)) * 126 <= 2048 * 512);
        assert_eq!(
            (u32_at(&space, 20), space[24], u32_at(&space, 28)),
            (4096, 2, 16)
        );
        assert_eq!(space[34..36], [3, 0]);
        assert_eq!(
            (u32_at(&space, 40), u32_at(&space, 44), u32_at(&space, 52)),
            (1, 8, 1)
        );
        assert_eq!(id("a"), *b"a\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(id("a disk with a very long name"), *b"a disk with a very l");
    }
}
