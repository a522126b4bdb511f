//! blkif messages as bytes, x86_64 layout (`x86_64-abi`; xen/include/public/io/blkif.h).
//!
//! The structs are plain bytes in native (little) endian, checked at compile time against the header's
//! offsets. A request on the ring is the union of three layouts that share their first byte. Fields named `pad` are zero.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of one ring entry in bytes: that of the largest request.
pub const ENTRY_SIZE: usize = 112;
/// Most segments in a request itself (`BLKIF_MAX_SEGMENTS_PER_REQUEST`).
pub const MAX_SEGMENTS: usize = 11;
/// Most indirect pages of one request (`BLKIF_MAX_INDIRECT_PAGES_PER_REQUEST`).
pub const MAX_INDIRECT_PAGES: usize = 8;
/// Segments on one indirect page.
pub const SEGMENTS_PER_INDIRECT_PAGE: usize = 512;
/// Most segments of an indirect request that our back end offers, as Linux's does: 256 pages, 1 MiB.
pub const MAX_INDIRECT_SEGMENTS: usize = 256;
/// Sectors of 512 bytes on a granted page.
pub const SECTORS_PER_PAGE: u8 = 8;

pub const OP_READ: u8 = 0;
pub const OP_WRITE: u8 = 1;
/// `BLKIF_OP_WRITE_BARRIER`: earlier writes complete before it, later ones after it. May have no segments.
pub const OP_WRITE_BARRIER: u8 = 2;
/// `BLKIF_OP_FLUSH_DISKCACHE`. May carry data to write after the flush.
pub const OP_FLUSH: u8 = 3;
pub const OP_DISCARD: u8 = 5;
/// `BLKIF_OP_INDIRECT`: a read or write whose segments are on pages of their own.
pub const OP_INDIRECT: u8 = 6;

pub const DISCARD_SECURE: u8 = 1;

pub const RSP_OKAY: i16 = 0;
pub const RSP_ERROR: i16 = -1;
pub const RSP_EOPNOTSUPP: i16 = -2;

/// One segment of data: sectors `first_sect..=last_sect` (512 B each, 0 to 7) of a granted page.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Segment {
    /// Grant reference of the page.
    pub gref: u32,
    /// First sector on the page.
    pub first_sect: u8,
    /// Last sector on the page, inclusive.
    pub last_sect: u8,
    pub pad: u16,
}

/// The first 24 bytes of a read, write, flush or barrier (`struct blkif_request`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RequestHeader {
    /// One of `OP_*`.
    pub operation: u8,
    /// Segments that follow, 0 to 11.
    pub nr_segments: u8,
    /// Virtual device number; unused.
    pub handle: u16,
    pub pad: u32,
    /// Echoed in the response.
    pub id: u64,
    /// First sector (512 B) on the disk.
    pub sector_number: u64,
}

/// A whole read, write, flush or barrier.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RwRequest {
    pub header: RequestHeader,
    pub segments: [Segment; MAX_SEGMENTS],
}

/// `struct blkif_request_discard`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DiscardRequest {
    /// Always [`OP_DISCARD`].
    pub operation: u8,
    /// [`DISCARD_SECURE`] or 0.
    pub flag: u8,
    /// Virtual device number; unused.
    pub handle: u16,
    pub pad: u32,
    /// Echoed in the response.
    pub id: u64,
    /// First sector (512 B).
    pub sector_number: u64,
    /// Length in sectors (512 B).
    pub nr_sectors: u64,
}

/// `struct blkif_request_indirect`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IndirectRequest {
    /// Always [`OP_INDIRECT`].
    pub operation: u8,
    /// [`OP_READ`] or [`OP_WRITE`].
    pub indirect_op: u8,
    /// Segments on the indirect pages.
    pub nr_segments: u16,
    pub pad: u32,
    /// Echoed in the response.
    pub id: u64,
    /// First sector (512 B).
    pub sector_number: u64,
    /// Virtual device number; unused.
    pub handle: u16,
    pub pad2: u16,
    /// Pages of segments, readable by the back end.
    pub indirect_grefs: [u32; MAX_INDIRECT_PAGES],
    pub pad3: u32,
}

/// `struct blkif_response`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Response {
    /// Copied from the request.
    pub id: u64,
    /// Copied from the request.
    pub operation: u8,
    /// Zero: the guest would otherwise read our stack in the padding (XSA-216).
    pub pad: u8,
    /// One of `RSP_*`.
    pub status: i16,
    /// Zero, for the same reason as `pad`.
    pub pad2: u32,
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Segment>() == 8 && offset_of!(Segment, first_sect) == 4);
    assert!(offset_of!(Segment, last_sect) == 5);
    assert!(size_of::<RequestHeader>() == 24);
    assert!(offset_of!(RequestHeader, nr_segments) == 1 && offset_of!(RequestHeader, handle) == 2);
    assert!(offset_of!(RequestHeader, id) == 8 && offset_of!(RequestHeader, sector_number) == 16);
    assert!(size_of::<RwRequest>() == ENTRY_SIZE && offset_of!(RwRequest, segments) == 24);
    assert!(size_of::<DiscardRequest>() == 32 && offset_of!(DiscardRequest, flag) == 1);
    assert!(offset_of!(DiscardRequest, id) == 8 && offset_of!(DiscardRequest, nr_sectors) == 24);
    assert!(size_of::<IndirectRequest>() == 64 && offset_of!(IndirectRequest, nr_segments) == 2);
    assert!(offset_of!(IndirectRequest, id) == 8 && offset_of!(IndirectRequest, handle) == 24);
    assert!(offset_of!(IndirectRequest, sector_number) == 16);
    assert!(offset_of!(IndirectRequest, indirect_grefs) == 28);
    assert!(size_of::<Response>() == 16 && offset_of!(Response, operation) == 8);
    assert!(offset_of!(Response, status) == 10);
};

/// A private, unchecked copy of one ring entry. It is made of words so that it has the alignment of the header's
/// union.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry([u64; ENTRY_SIZE / 8]);

impl Entry {
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_bytes()
    }

    /// One of `OP_*`, or any other value.
    #[inline]
    pub fn operation(&self) -> u8 {
        self.rw().header.operation
    }

    /// Interprets the entry as a read, write, flush or barrier.
    #[inline]
    pub fn rw(&self) -> &RwRequest {
        zerocopy::transmute_ref!(&self.0)
    }

    /// Interprets the entry as a discard.
    pub fn discard(&self) -> DiscardRequest {
        first(self.bytes())
    }

    /// Interprets the entry as an indirect read or write.
    pub fn indirect(&self) -> IndirectRequest {
        first(self.bytes())
    }

    /// The id, which has the same offset in all layouts.
    #[inline]
    pub fn id(&self) -> u64 {
        self.rw().header.id
    }
}

fn first<T: FromBytes>(bytes: &[u8]) -> T {
    match T::read_from_prefix(bytes) {
        Ok((value, _)) => value,
        Err(_) => unreachable!("the layouts are asserted to fit an entry"),
    }
}
