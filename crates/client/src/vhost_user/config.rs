//! The offer of a server, as a device's limits (VIRTIO 1.2, 5.2.3 and 5.2.4).

use pvblk_block::{Error, Limits, SECTOR};
use pvblk_protocol::vhost_user::F_PROTOCOL_FEATURES;
use pvblk_protocol::virtio::MOST_PIECES;
use pvblk_protocol::virtio::{ALWAYS, has};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// Bytes of the configuration space that we ask for: up to the fields of write-zeroes, which all servers know.
pub(super) const CONFIG_BYTES: usize = 60;
/// Longest segment where the server names none.
const SEGMENT: u32 = 1 << 20;

/// The terms on which both sides agreed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub features: u64,
    /// Size in sectors (512 B).
    pub sectors: u64,
    pub limits: Limits,
    /// Most bytes of a segment.
    pub segment_bytes: u32,
    /// Most sectors (512 B) of a discard, and of a write-zeroes.
    pub range_sectors: [u32; 2],
}

/// The features that we use of those that are offered. Errors if one is missing that we can't do without.
pub(super) fn wanted(offered: u64) -> Result<u64, Error> {
    for (bit, name) in [
        (VIRTIO_F_VERSION_1, "virtio 1"),
        (VIRTIO_RING_F_INDIRECT_DESC, "indirect descriptors"),
    ] {
        if !has(offered, bit) {
            return Err(Error::protocol(format!("the server doesn't offer {name}")));
        }
    }
    if offered & F_PROTOCOL_FEATURES == 0 {
        return Err(Error::protocol(
            "the server doesn't offer features of the protocol",
        ));
    }
    let some = [
        VIRTIO_BLK_F_RO,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_DISCARD,
        VIRTIO_BLK_F_WRITE_ZEROES,
    ];
    let ours = ALWAYS.into_iter().chain(some);
    Ok(offered & ours.fold(F_PROTOCOL_FEATURES, |f, bit| f | 1 << bit))
}

/// The size of a configuration space in sectors (512 B).
pub(super) fn sectors(space: &[u8; CONFIG_BYTES]) -> u64 {
    let bytes = space.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(bytes)
}

impl Terms {
    /// Those of a configuration space, with the features that are used, on rings of so many entries.
    pub fn new(features: u64, space: &[u8; CONFIG_BYTES], entries: u16) -> Result<Terms, Error> {
        let u32_at = |at: usize| {
            u32::from_le_bytes([space[at], space[at + 1], space[at + 2], space[at + 3]])
        };
        let if_has = |bit, value, or| if has(features, bit) { value } else { or };
        let logical = if_has(VIRTIO_BLK_F_BLK_SIZE, u32_at(20), 512);
        if ![512, 4096].contains(&logical) {
            return Err(Error::protocol(format!(
                "the disk has sectors of {logical} bytes: 512 and 4096 are known here"
            )));
        }
        let exponent = if_has(VIRTIO_BLK_F_TOPOLOGY, u32::from(space[24]), 0).min(8);
        let optimal = if_has(VIRTIO_BLK_F_TOPOLOGY, u32_at(28), 0);
        let whole = |bytes: u32| bytes - bytes % logical;
        // A limit that isn't offered, or is 0, is none.
        let limit = |bit, at, most: u32| match if_has(bit, u32_at(at), 0) {
            0 => most,
            limit => limit.min(most),
        };
        let segment_bytes = whole(limit(VIRTIO_BLK_F_SIZE_MAX, 8, SEGMENT));
        if segment_bytes < 4096 {
            return Err(Error::protocol(format!(
                "the server takes segments of {} bytes at most: 4096 are needed here",
                u32_at(8)
            )));
        }
        // A chain is no longer than the ring, with head and status (VIRTIO 1.2, 2.7.5.3.1).
        let most = (MOST_PIECES as u32).min(u32::from(entries) - 2);
        let segments = limit(VIRTIO_BLK_F_SEG_MAX, 12, most).max(1);
        // Half of them for a request's own pieces, half for where one is too long.
        let pieces = (segments / 2).max(1);
        Ok(Terms {
            features,
            sectors: sectors(space),
            limits: Limits {
                logical_sector_bytes: logical,
                physical_sector_bytes: logical << exponent,
                optimal_bytes: optimal.saturating_mul(logical),
                max_sectors: pieces * (segment_bytes / 4096) * 8,
                max_segments: pieces,
                discard_granularity_bytes: if_has(
                    VIRTIO_BLK_F_DISCARD,
                    u32_at(44).clamp(1, 1 << 20) * SECTOR as u32,
                    0,
                ),
                readahead_bytes: 0,
                caches_reads: false,
                write_zeroes: has(features, VIRTIO_BLK_F_WRITE_ZEROES),
                read_only: has(features, VIRTIO_BLK_F_RO),
                volatile_cache: has(features, VIRTIO_BLK_F_FLUSH),
                non_rotational: true,
                exclusive: false,
            },
            segment_bytes,
            range_sectors: [u32_at(36), u32_at(48)].map(|n| {
                let unit = logical / SECTOR as u32;
                (n - n % unit).max(unit)
            }),
        })
    }

    /// True if each side says at which index it wants to be woken.
    pub fn has_event_index(&self) -> bool {
        has(self.features, VIRTIO_RING_F_EVENT_IDX)
    }
}
