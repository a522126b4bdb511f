//! The partial parity log, which closes the write hole (`raid5-ppl.rst`; `struct ppl_header` in `md_p.h`).
//!
//! Before data and parity of a stripe are written, the parity *without* the blocks that change (the partial
//! parity) goes to a log on the stripe's parity member. After a crash, the parity of each logged stripe is
//! the XOR of the partial parity and the present contents of the changed blocks: that is right for every mix
//! of old and new blocks, so blocks that weren't written are never lost.
//!
//! A log is a page with up to 148 entries and then their partial parity, in order. An entry stands for stripes that follow
//! each other in one row and change the same data blocks, which must be neighbours: that is all that md's entries can say, so a
//! write to blocks 0 and 2 of a stripe has to be done in two steps. A write of a whole stripe needs no partial parity, only the entry.
//!
//! A log may be overwritten when all its data and parity are written, and the caches of the members that have them flushed.
//!
//! md takes turns in an area of 264 KiB or more and so may have several logs in it, of which the newest counts. We write at the
//! start of the area always, which md's recovery understands as well; but an area that md used must be zeroed first.

use super::geometry::{Geometry, STRIPE_BYTES};
use pvblk_block::{Error, ErrorKind};
use thiserror::Error as ThisError;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Length of the page with the entries.
pub const PPL_HEADER_BYTES: usize = 4096;
/// Entries that fit.
pub const PPL_MAX_ENTRIES: usize = 148;

const RESERVED_BYTES: usize = 512;
const CHECKSUM_AT: usize = 532;
const HEADER_SECTORS: u64 = PPL_HEADER_BYTES as u64 / 512;
/// Size that md reserves for the partial parity of one log of several (`PPL_SPACE_SIZE`).
const SPACE_BYTES: u64 = 128 << 10;

/// `struct ppl_header_entry`.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawEntry {
    data_sector: U64,
    pp_size: U32,
    data_size: U32,
    parity_disk: U32,
    checksum: U32,
}

/// `struct ppl_header`, and the bytes to the end of its page.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawPplHeader {
    reserved: [u8; RESERVED_BYTES],
    signature: U32,
    padding: U32,
    generation: U64,
    entries_count: U32,
    checksum: U32,
    entries: [RawEntry; PPL_MAX_ENTRIES],
    tail: [u8; 8],
}

const _: () = {
    assert!(size_of::<RawPplHeader>() == PPL_HEADER_BYTES);
    assert!(std::mem::offset_of!(RawPplHeader, checksum) == CHECKSUM_AT);
    assert!(std::mem::offset_of!(RawPplHeader, entries) == 536);
};

/// Why a log, or an entry of it, can't be used. Prints as one line.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[allow(missing_docs)] // The texts say it.
pub enum PplError {
    #[error("fewer bytes than the header of a partial parity log has")]
    Short,
    #[error("the header's checksum is {found:#010x} and should be {counted:#010x}")]
    Checksum { found: u32, counted: u32 },
    #[error("the log is of another array: its signature is {found:#010x}, ours {ours:#010x}")]
    Signature { found: u32, ours: u32 },
    #[error("{0} entries, more than a header holds")]
    Entries(u32),
    #[error("partial parity doesn't match its checksum")]
    PartialParity,
    #[error(
        "an entry of {data_bytes} bytes of data and {pp_bytes} of partial parity: no whole stripes of one row"
    )]
    Shape { data_bytes: u32, pp_bytes: u32 },
    #[error("an entry for array sector {0}, outside of the array or not on a block")]
    Range(u64),
    #[error(
        "an entry with parity on member {entry}, in the log of member {log}; it is on member {right}"
    )]
    Parity {
        entry: u32,
        log: usize,
        right: usize,
    },
}

impl From<PplError> for Error {
    fn from(e: PplError) -> Error {
        Error::caused(ErrorKind::Config, "", e)
    }
}

/// Stripes that change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PplEntry {
    /// First sector on the array that changes.
    pub data_sector: u64,
    /// Partial parity; none for whole stripes.
    pub pp_bytes: u32,
    /// Data that changes, in all blocks together.
    pub data_bytes: u32,
    /// Member with the parity, which has this log too.
    pub parity_member: u32,
    /// crc32c of the partial parity.
    pub checksum: u32,
}

/// The page that begins a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PplHeader {
    /// Says which array: [`ppl_signature`].
    pub signature: u32,
    /// Counts logs; the highest is the newest.
    pub generation: u64,
    /// At most [`PPL_MAX_ENTRIES`].
    pub entries: Vec<PplEntry>,
}

/// The signature in the headers of an array's logs: crc32c of its `set_uuid`.
pub fn ppl_signature(set_uuid: &[u8; 16]) -> u32 {
    crc32c::crc32c(set_uuid)
}

/// The least area for a single log: the header, and the larger of a chunk and 128 KiB (mdadm's choice).
pub fn single_log_sectors(chunk_sectors: u64) -> u64 {
    HEADER_SECTORS + chunk_sectors.max(SPACE_BYTES / 512)
}

/// True if md keeps several logs in an area of this size, in turn, and says so in the feature map.
pub fn tells_multiple(area_sectors: u64) -> bool {
    area_sectors * 512 >= 2 * (SPACE_BYTES + PPL_HEADER_BYTES as u64)
}

/// Partial parity that md puts into one log in an area of this size, in whole blocks.
pub fn log_space_bytes(area_sectors: u64) -> u64 {
    let bytes = match tells_multiple(area_sectors) {
        true => SPACE_BYTES,
        false => (area_sectors * 512).saturating_sub(PPL_HEADER_BYTES as u64),
    };
    bytes - bytes % STRIPE_BYTES as u64
}

impl PplHeader {
    /// A header without entries: the contents of an area, after zeros everywhere, when the array starts or
    /// stops.
    pub fn empty(signature: u32) -> PplHeader {
        PplHeader {
            signature,
            ..PplHeader::default()
        }
    }

    /// Reads one and checks it.
    pub fn parse(bytes: &[u8], signature: u32) -> Result<PplHeader, PplError> {
        let (raw, _) = RawPplHeader::read_from_prefix(bytes).map_err(|_| PplError::Short)?;
        let (found, counted) = (raw.checksum.get(), checksum(raw.as_bytes()));
        if found != counted {
            return Err(PplError::Checksum { found, counted });
        }
        let (found, ours) = (raw.signature.get(), signature);
        if found != ours {
            return Err(PplError::Signature { found, ours });
        }
        let count = raw.entries_count.get();
        let entries = raw.entries.get(..count as usize);
        let entries = entries.ok_or(PplError::Entries(count))?.iter();
        Ok(PplHeader {
            signature,
            generation: raw.generation.get(),
            entries: entries
                .map(|e| PplEntry {
                    data_sector: e.data_sector.get(),
                    pp_bytes: e.pp_size.get(),
                    data_bytes: e.data_size.get(),
                    parity_member: e.parity_disk.get(),
                    checksum: e.checksum.get(),
                })
                .collect(),
        })
    }

    /// The bytes, with their checksum.
    pub fn encode(&self) -> [u8; PPL_HEADER_BYTES] {
        let mut raw = RawPplHeader::new_zeroed();
        raw.reserved = [0xff; RESERVED_BYTES];
        raw.signature.set(self.signature);
        raw.generation.set(self.generation);
        raw.entries_count
            .set(self.entries.len().min(PPL_MAX_ENTRIES) as u32);
        for (to, entry) in raw.entries.iter_mut().zip(&self.entries) {
            to.data_sector.set(entry.data_sector);
            to.pp_size.set(entry.pp_bytes);
            to.data_size.set(entry.data_bytes);
            to.parity_disk.set(entry.parity_member);
            to.checksum.set(entry.checksum);
        }
        let sum = checksum(raw.as_bytes());
        raw.checksum.set(sum);
        zerocopy::transmute!(raw)
    }

    /// Each entry with its place in the partial parity behind the header: offset in bytes.
    pub fn entries_at(&self) -> impl Iterator<Item = (u64, &PplEntry)> {
        self.entries.iter().scan(0u64, |at, entry| {
            let start = *at;
            *at += u64::from(entry.pp_bytes);
            Some((start, entry))
        })
    }

    /// Header and partial parity.
    pub fn log_sectors(&self) -> u64 {
        let bytes = self.entries.iter().map(|e| u64::from(e.pp_bytes / 512));
        HEADER_SECTORS + bytes.sum::<u64>()
    }
}

/// crc32c of a header page with the checksum's own bytes taken for zero.
fn checksum(page: &[u8]) -> u32 {
    let sum = crc32c::crc32c(&page[..CHECKSUM_AT]);
    let sum = crc32c::crc32c_append(sum, &[0; 4]);
    crc32c::crc32c_append(sum, &page[CHECKSUM_AT + 4..])
}

/// The log that counts in an area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest {
    /// Where it begins in the area.
    pub offset_sectors: u64,
    /// Its header. The partial parity follows it in the area.
    pub header: PplHeader,
}

/// Finds the newest log in an area: logs follow each other without gaps, each newer than the one before, until one is older
/// or none. The error is that of the first header, if even that is no log.
pub fn find_newest(area: &[u8], signature: u32) -> Result<Newest, PplError> {
    let mut newest = Newest {
        offset_sectors: 0,
        header: PplHeader::parse(area, signature)?,
    };
    loop {
        let next = newest.offset_sectors + newest.header.log_sectors();
        let from = usize::try_from(next * 512).unwrap_or(usize::MAX);
        match area.get(from..).map(|a| PplHeader::parse(a, signature)) {
            Some(Ok(header)) if header.generation >= newest.header.generation => {
                newest = Newest {
                    offset_sectors: next,
                    header,
                };
            }
            _ => return Ok(newest),
        }
    }
}

/// No more stripes fit into this log: write it, and go on with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A log in the making: stripes of one parity member that are to be written together.
#[derive(Clone, Debug)]
pub struct Batch {
    geometry: Geometry,
    header: PplHeader,
    parity_member: usize,
    space_bytes: u64,
    pp_bytes: u64,
    /// The stripe that was last added, its first data block and their number.
    last: Option<(u64, usize, usize)>,
}

impl Batch {
    /// An empty one for the log of `parity_member`, with room for so much partial parity ([`log_space_bytes`]).
    pub fn new(
        geometry: Geometry,
        signature: u32,
        generation: u64,
        parity_member: usize,
        space_bytes: u64,
    ) -> Batch {
        Batch {
            geometry,
            header: PplHeader {
                signature,
                generation,
                entries: Vec::new(),
            },
            parity_member,
            space_bytes,
            pp_bytes: 0,
            last: None,
        }
    }

    /// Adds a stripe of which `blocks` data blocks from `first` change. `partial_parity` is the XOR of the others, or, which is
    /// the same, old parity XOR the old contents of those that change; `None` if all change. The caller keeps it, and writes
    /// it behind the header in the order of the calls.
    pub fn add(
        &mut self,
        stripe: u64,
        first: usize,
        blocks: usize,
        partial_parity: Option<&[u8; STRIPE_BYTES]>,
    ) -> Result<(), Full> {
        assert!(
            blocks > 0 && first + blocks <= self.geometry.data_members(),
            "no blocks of a stripe"
        );
        let whole = blocks == self.geometry.data_members();
        assert!(whole == partial_parity.is_none(), "a part needs the rest");
        assert_eq!(
            self.geometry.stripe_parity(stripe),
            self.parity_member,
            "a stripe of another member's log"
        );
        let pp_bytes = partial_parity.map_or(0, |p| p.len() as u64);
        let joins = self.joins(stripe, first, blocks);
        if self.pp_bytes + pp_bytes > self.space_bytes
            || (!joins && self.header.entries.len() == PPL_MAX_ENTRIES)
        {
            return Err(Full);
        }
        if !joins {
            self.header.entries.push(PplEntry {
                data_sector: self.geometry.stripe_array_sector(stripe, first),
                pp_bytes: 0,
                data_bytes: 0,
                parity_member: self.parity_member as u32,
                checksum: 0,
            });
        }
        if let Some(entry) = self.header.entries.last_mut() {
            entry.data_bytes += (blocks * STRIPE_BYTES) as u32;
            if let Some(parity) = partial_parity {
                entry.pp_bytes += STRIPE_BYTES as u32;
                entry.checksum = crc32c::crc32c_append(entry.checksum, parity);
            }
        }
        self.pp_bytes += pp_bytes;
        self.last = Some((stripe, first, blocks));
        Ok(())
    }

    /// An entry takes the next stripe of the same row if it changes the same blocks. The next stripe is of the same row, since
    /// the next row has its parity on another member.
    fn joins(&self, stripe: u64, first: usize, blocks: usize) -> bool {
        self.last
            .is_some_and(|(last, f, b)| stripe == last + 1 && (first, blocks) == (f, b))
    }

    /// True if there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.header.entries.is_empty()
    }

    /// Partial parity added so far.
    pub fn pp_bytes(&self) -> u64 {
        self.pp_bytes
    }

    /// The header as it stands.
    pub fn header(&self) -> &PplHeader {
        &self.header
    }
}

#[cfg(test)]
#[path = "ppl_tests.rs"]
mod tests;
