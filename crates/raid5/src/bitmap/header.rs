//! The first 256 bytes of a bitmap.

use super::super::geometry::Geometry;
use super::super::superblock::{Kept, Superblock};
use super::PAGE_BYTES;
use pvblk_block::{Error, ErrorKind};
use std::ops::Range;
use thiserror::Error as ThisError;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Length of the header; the bits follow.
pub const BITMAP_HEADER_BYTES: usize = 256;

/// `bitm`, little-endian.
const MAGIC: u32 = 0x6d74_6962;
/// Bits in the order of the bytes, on every machine.
const VERSION: u32 = 4;
/// Bit 1 of `state`, by the kernel's and mdadm's numbering alike: the bitmap missed writes.
const STATE_STALE: u32 = 2;

/// Begins the reserved bytes of a private map, which is laid out as md's bitmap is.
const PRIVATE: [u8; PRIVATE_BYTES] = *b"pvblk map 1\0\0\0\0\0";
const PRIVATE_BYTES: usize = 16;
/// The same, where the array has sums. A release that doesn't know of sums takes it for no map, and so writes superblocks that say so.
const PRIVATE_WITH_SUMS: [u8; PRIVATE_BYTES] = *b"pvblk map 2\0\0\0\0\0";
/// The id of the device that comes back by a private map, in its reserved bytes.
const GUIDED: Range<usize> = PRIVATE_BYTES..PRIVATE_BYTES + 16;
/// The number of the last write of a private map, in its reserved bytes. 0: an older release wrote it.
const WRITES: Range<usize> = GUIDED.end..GUIDED.end + 8;
/// A private map has one page, and so this many bits at most.
const PRIVATE_BITS: u64 = (PAGE_BYTES - BITMAP_HEADER_BYTES) as u64 * 8;
/// Sectors of the smallest chunk of a private map, as a power of two: 64 KiB.
const LEAST_SHIFT: u32 = 7;
/// Chunks grow up to this (64 MiB) to keep their number within [`PRIVATE_CHUNKS`], and beyond it only to fit the page.
const LARGE_SHIFT: u32 = 17;
/// Chunks that a private map has if they needn't be larger than 64 MiB: more bits are more writes of the page.
const PRIVATE_CHUNKS: u64 = 4096;

/// `bitmap_super_t` as it lies on disk.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawBitmapHeader {
    magic: U32,
    version: U32,
    uuid: [u8; 16],
    events: U64,
    events_cleared: U64,
    sync_size: U64,
    state: U32,
    chunksize: U32,
    daemon_sleep: U32,
    write_behind: U32,
    sectors_reserved: U32,
    nodes: U32,
    cluster_name: [u8; 64],
    pad: [u8; 120],
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<RawBitmapHeader>() == BITMAP_HEADER_BYTES);
    assert!(offset_of!(RawBitmapHeader, events) == 24);
    assert!(offset_of!(RawBitmapHeader, state) == 48);
    assert!(offset_of!(RawBitmapHeader, sectors_reserved) == 64);
    assert!(offset_of!(RawBitmapHeader, pad) == 136);
};

/// Why a bitmap can't be used. Prints as one line.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[allow(missing_docs)] // The texts say it.
pub enum BitmapError {
    #[error("fewer bytes than the bitmap has")]
    Short,
    #[error("no bitmap where the superblock says: {0:#010x} is not its magic")]
    Magic(u32),
    #[error("a bitmap of version {number} ({name}); only 4 is supported")]
    Version { number: u32, name: &'static str },
    #[error("bitmap chunks of {0} bytes; they are a power of two, 512 or more")]
    Chunk(u32),
    #[error("a bitmap for {0} sectors in chunks of {1} bytes: nothing, or too much")]
    Size(u64, u32),
    #[error("the bitmap belongs to another array")]
    Uuid,
    #[error("the bitmap is for {found} sectors on each member, the array has {array}")]
    OtherSize { found: u64, array: u64 },
    #[error("the bitmap takes {sectors} sectors, and {room} are free there")]
    NoRoom { sectors: u64, room: u64 },
}

fn version_name(version: u32) -> &'static str {
    match version {
        3 => "in the byte order of the machine that wrote it",
        5 => "clustered",
        6 => "lockless",
        _ => "unknown",
    }
}

impl From<BitmapError> for Error {
    fn from(e: BitmapError) -> Error {
        Error::caused(ErrorKind::Config, "", e)
    }
}

/// The fields, by their names in `bitmap.h` with units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapHeader {
    /// The array's `set_uuid`.
    pub uuid: [u8; 16],
    /// Written before the superblocks' counter.
    pub events: u64,
    /// The counter when a bit was last cleared: a member that left later missed nothing that isn't marked.
    pub events_cleared: u64,
    /// Sectors of a member that the bits stand for.
    pub sync_size_sectors: u64,
    /// Flags: see [`BitmapHeader::is_current`].
    pub state: u32,
    /// Bytes of a member that one bit stands for.
    pub chunk_bytes: u32,
    /// Seconds between sweeps.
    pub daemon_sleep_s: u32,
    /// For RAID-1; carried along.
    pub write_behind: u32,
    /// Space for the bitmap, if md noted it; carried along.
    pub sectors_reserved: u32,
    /// For clusters; carried along.
    pub nodes: u32,
    /// For clusters; carried along.
    pub cluster_name: [u8; 64],
    /// Carried along unchanged, and zero in md's. A private map has a tag and an id there.
    pub reserved: [u8; 120],
}

impl BitmapHeader {
    /// One of nothing, for the array with this id.
    pub fn new(uuid: [u8; 16]) -> BitmapHeader {
        BitmapHeader {
            uuid,
            events: 0,
            events_cleared: 0,
            sync_size_sectors: 0,
            state: 0,
            chunk_bytes: 64 << 20,
            daemon_sleep_s: 0,
            write_behind: 0,
            sectors_reserved: 0,
            nodes: 0,
            cluster_name: [0; 64],
            reserved: [0; 120],
        }
    }

    /// Makes the header of a private map for members with so many sectors of data. `None` if they have more than 60 TiB: chunks of 2 GiB, the
    /// largest that `chunk_bytes` holds, would need more bits than a page has.
    pub fn private(uuid: [u8; 16], sync_size_sectors: u64) -> Option<BitmapHeader> {
        let chunks = |shift: u32| sync_size_sectors.div_ceil(1 << shift);
        let mut shift = LEAST_SHIFT;
        while shift < LARGE_SHIFT && chunks(shift) > PRIVATE_CHUNKS {
            shift += 1;
        }
        while chunks(shift) > PRIVATE_BITS {
            shift += 1;
        }
        let chunk_bytes = 512u32.checked_shl(shift).filter(|bytes| *bytes > 0)?;
        let mut reserved = [0; 120];
        reserved[..PRIVATE.len()].copy_from_slice(&PRIVATE);
        Some(BitmapHeader {
            sync_size_sectors,
            chunk_bytes,
            daemon_sleep_s: 5,
            reserved,
            ..BitmapHeader::new(uuid)
        })
    }

    /// True if it is a private map's, else md's.
    pub fn is_private(&self) -> bool {
        self.reserved.starts_with(&PRIVATE) || self.has_sums()
    }

    /// True if it is the private map of an array with sums of its blocks ([`crate::sums`]).
    pub fn has_sums(&self) -> bool {
        self.reserved.starts_with(&PRIVATE_WITH_SUMS)
    }

    /// The private map and sums that superblocks beside it go with.
    pub(in super::super) fn kept(&self) -> Kept {
        match (self.is_private(), self.has_sums()) {
            (_, true) => Kept::MapAndSums,
            (true, false) => Kept::Map,
            (false, false) => Kept::Nothing,
        }
    }

    /// The same private map for an array with sums.
    pub fn with_sums(mut self) -> BitmapHeader {
        debug_assert!(self.is_private());
        self.reserved[..PRIVATE_BYTES].copy_from_slice(&PRIVATE_WITH_SUMS);
        self
    }

    /// True if the device with this superblock becomes a member, and lacks only marked chunks. With md's bitmap the superblock says so
    /// ([`Superblock::is_recovered_by_bitmap`]), and with a private map the map does, by the device's id.
    pub fn guides(&self, superblock: &Superblock) -> bool {
        let id = &superblock.device_uuid;
        let by_map = self.is_private() && self.reserved[GUIDED] == *id && *id != [0; 16];
        by_map || superblock.is_recovered_by_bitmap()
    }

    /// Sets the device that [`BitmapHeader::guides`] is true for, if it is a private map's.
    pub(super) fn set_guided(&mut self, device_uuid: Option<[u8; 16]>) {
        if self.is_private() {
            self.reserved[GUIDED].copy_from_slice(&device_uuid.unwrap_or_default());
        }
    }

    /// The number of the last write of a private map: of several, that with the greatest is the last. md's has none.
    pub(in super::super) fn writes(&self) -> u64 {
        let mut number = [0; 8];
        if self.is_private() {
            number.copy_from_slice(&self.reserved[WRITES]);
        }
        // No map is written so often.
        Some(u64::from_le_bytes(number))
            .filter(|number| number >> 56 == 0)
            .unwrap_or(0)
    }

    /// Sets the number of the last write, if it is a private map's.
    pub(super) fn set_writes(&mut self, number: u64) {
        if self.is_private() {
            self.reserved[WRITES].copy_from_slice(&number.to_le_bytes());
        }
    }

    /// Reads a header; later bytes aren't looked at.
    pub fn parse(bytes: &[u8]) -> Result<BitmapHeader, BitmapError> {
        let (raw, _) = RawBitmapHeader::read_from_prefix(bytes).map_err(|_| BitmapError::Short)?;
        if raw.magic.get() != MAGIC {
            return Err(BitmapError::Magic(raw.magic.get()));
        }
        let number = raw.version.get();
        if number != VERSION {
            let name = version_name(number);
            return Err(BitmapError::Version { number, name });
        }
        let header = BitmapHeader {
            uuid: raw.uuid,
            events: raw.events.get(),
            events_cleared: raw.events_cleared.get(),
            sync_size_sectors: raw.sync_size.get(),
            state: raw.state.get(),
            chunk_bytes: raw.chunksize.get(),
            daemon_sleep_s: raw.daemon_sleep.get(),
            write_behind: raw.write_behind.get(),
            sectors_reserved: raw.sectors_reserved.get(),
            nodes: raw.nodes.get(),
            cluster_name: raw.cluster_name,
            reserved: raw.pad,
        };
        let chunk = header.chunk_bytes;
        if !chunk.is_power_of_two() || chunk < 512 {
            return Err(BitmapError::Chunk(chunk));
        }
        // The room between superblock and data is counted in 31 bits of sectors; the bits in memory should be
        // far fewer.
        const MOST_BITS: u64 = 1 << 26;
        if !(1..=MOST_BITS).contains(&header.bits()) {
            return Err(BitmapError::Size(header.sync_size_sectors, chunk));
        }
        Ok(header)
    }

    /// The header's bytes as on disk.
    pub fn encode(&self) -> [u8; BITMAP_HEADER_BYTES] {
        let raw = RawBitmapHeader {
            magic: U32::new(MAGIC),
            version: U32::new(VERSION),
            uuid: self.uuid,
            events: U64::new(self.events),
            events_cleared: U64::new(self.events_cleared),
            sync_size: U64::new(self.sync_size_sectors),
            state: U32::new(self.state),
            chunksize: U32::new(self.chunk_bytes),
            daemon_sleep: U32::new(self.daemon_sleep_s),
            write_behind: U32::new(self.write_behind),
            sectors_reserved: U32::new(self.sectors_reserved),
            nodes: U32::new(self.nodes),
            cluster_name: self.cluster_name,
            pad: self.reserved,
        };
        zerocopy::transmute!(raw)
    }

    /// Number of bits; the last may stand for less than a chunk.
    pub fn bits(&self) -> u64 {
        let chunk_sectors = u64::from(self.chunk_bytes / 512);
        self.sync_size_sectors.div_ceil(chunk_sectors)
    }

    /// Header and bits, in whole pages.
    pub fn area_bytes(&self) -> usize {
        let bytes = BITMAP_HEADER_BYTES + self.bits().div_ceil(8) as usize;
        bytes.next_multiple_of(PAGE_BYTES)
    }

    /// Checks that the bitmap belongs to this array and fits into its room: `room_sectors` is
    /// [`Superblock::bitmap_room_sectors`](super::super::Superblock::bitmap_room_sectors).
    pub fn check(
        &self,
        set_uuid: &[u8; 16],
        geometry: &Geometry,
        room_sectors: u64,
    ) -> Result<(), BitmapError> {
        if self.uuid != *set_uuid {
            return Err(BitmapError::Uuid);
        }
        let (found, array) = (self.sync_size_sectors, geometry.member_sectors());
        if found != array {
            return Err(BitmapError::OtherSize { found, array });
        }
        let sectors = self.area_bytes() as u64 / 512;
        if sectors > room_sectors {
            return Err(BitmapError::NoRoom {
                sectors,
                room: room_sectors,
            });
        }
        Ok(())
    }

    /// True if its bits hold for superblocks of this event counter: it has the same, or is one ahead, since
    /// it is written first. A private map's hold only if the superblock [keeps one](super::super::Superblock::keeps_map) too.
    pub fn is_current(&self, superblock_events: u64) -> bool {
        let ahead = self.events.checked_sub(superblock_events);
        self.state & STATE_STALE == 0 && ahead.is_some_and(|n| n <= 1)
    }
}
