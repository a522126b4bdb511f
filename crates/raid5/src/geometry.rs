//! Where a sector of the array lies.
//!
//! The array is cut into chunks; one chunk at the same place on every member is a row: data on all but one, parity on that
//! one. A stripe is thinner than a row: one 4 KiB block at the same place on every member, the unit of parity.

use pvblk_block::Error;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Sectors of a stripe on one member: md's unit of parity is a page.
pub const STRIPE_SECTORS: u64 = 8;
/// [`STRIPE_SECTORS`] in bytes.
pub const STRIPE_BYTES: usize = 4096;

/// The order in which members hold parity and data, with md's numbers (`md(4)`, "--layout" of `mdadm(8)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Layout {
    /// Parity starts on the last member and moves down; data fills the others in order.
    LeftAsymmetric = 0,
    /// Parity starts on the first member and moves up; data fills the others in order.
    RightAsymmetric = 1,
    /// Parity as in left-asymmetric; data starts after it and wraps, so that a long read touches every member. md's default.
    #[default]
    LeftSymmetric = 2,
    /// Parity as in right-asymmetric; data starts after it and wraps.
    RightSymmetric = 3,
}

/// Names of md's layout numbers, those that are refused included.
const LAYOUT_NAMES: [&str; 6] = [
    "left-asymmetric",
    "right-asymmetric",
    "left-symmetric",
    "right-symmetric",
    "parity-first",
    "parity-last",
];

impl Layout {
    /// All four layouts.
    pub const ALL: [Layout; 4] = [
        Layout::LeftAsymmetric,
        Layout::RightAsymmetric,
        Layout::LeftSymmetric,
        Layout::RightSymmetric,
    ];

    /// The layout with md's `number`, if it is one of the four.
    pub fn from_md(number: u32) -> Option<Layout> {
        Layout::ALL.into_iter().find(|l| l.md() == number)
    }

    /// The layout's number in md.
    pub fn md(self) -> u32 {
        self as u32
    }

    /// mdadm's name for a layout number, also for those that rotate nothing.
    pub fn md_name(number: u32) -> &'static str {
        let known = usize::try_from(number).ok();
        known
            .and_then(|n| LAYOUT_NAMES.get(n))
            .unwrap_or(&"unknown")
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Layout::md_name(self.md()))
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Layout, Error> {
        let known = Layout::ALL.into_iter().find(|l| l.to_string() == text);
        known.ok_or_else(|| {
            Error::config(match LAYOUT_NAMES.contains(&text) {
                true => format!("raid5 layout {text}: parity that doesn't rotate isn't supported; take left-symmetric"),
                false => format!("raid5 layout {text:?}: it is left-symmetric, left-asymmetric, right-symmetric or right-asymmetric"),
            })
        })
    }
}

/// Shape of an array. Every value is checked once, here; the maps then only calculate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    members: u32,
    chunk_shift: u32,
    layout: Layout,
    rows: u64,
}

/// Where one sector of the array is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlace {
    /// Row of chunks.
    pub row: u64,
    /// Index of the data chunk in the row, from 0.
    pub index: usize,
    /// Member with the chunk.
    pub member: usize,
    /// Where on that member, from the start of its data.
    pub member_sector: u64,
}

/// Where one sector of the array is, in terms of stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeBlock {
    /// Number of the stripe: [`Geometry::stripe_member_sector`] gives its place.
    pub stripe: u64,
    /// Index of the data block in the stripe, from 0.
    pub index: usize,
    /// Sector inside that block, 0 to 7.
    pub offset_sectors: u64,
}

/// A part of a range of the array that lies inside one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First sector on the array.
    pub array_sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// Where the first sector is; the others follow it on the same member.
    pub place: ChunkPlace,
}

impl Geometry {
    /// Members that an array may have. md's partial parity log ends at 64 (`raid5-ppl.rst`).
    pub const MEMBERS: std::ops::RangeInclusive<u32> = 3..=64;
    /// Chunk sizes that an array may have: 4 KiB to 4 MiB.
    pub const CHUNK_SECTORS: std::ops::RangeInclusive<u32> = 8..=8192;

    /// Checks the values. A rest of `member_sectors` beyond whole chunks isn't used, as in md.
    pub fn new(
        members: u32,
        chunk_sectors: u32,
        layout: Layout,
        member_sectors: u64,
    ) -> Result<Geometry, Error> {
        if !Geometry::MEMBERS.contains(&members) {
            return Err(Error::config(format!(
                "raid5 of {members} members: it takes 3 to 64"
            )));
        }
        if !chunk_sectors.is_power_of_two() || !Geometry::CHUNK_SECTORS.contains(&chunk_sectors) {
            return Err(Error::config(format!(
                "raid5 chunk of {} bytes: it is a power of two from 4 KiB to 4 MiB",
                u64::from(chunk_sectors) * 512
            )));
        }
        let chunk_shift = chunk_sectors.trailing_zeros();
        let rows = member_sectors >> chunk_shift;
        if rows == 0 {
            return Err(Error::config(format!(
                "raid5 member of {member_sectors} sectors: it holds no chunk of {chunk_sectors} sectors; take larger members or smaller chunks"
            )));
        }
        // Offsets of files are signed 64-bit numbers of bytes.
        let most = i64::MAX as u64 / 512;
        if (rows << chunk_shift) > most / u64::from(members - 1) {
            return Err(Error::config(format!(
                "raid5 of {members} members of {member_sectors} sectors: more bytes than 63 bits count"
            )));
        }
        Ok(Geometry {
            members,
            chunk_shift,
            layout,
            rows,
        })
    }

    /// Members, parity included.
    pub fn members(&self) -> usize {
        self.members as usize
    }

    /// Data chunks in a row: all members but one.
    pub fn data_members(&self) -> usize {
        self.members as usize - 1
    }

    /// Sectors of a chunk.
    pub fn chunk_sectors(&self) -> u64 {
        1 << self.chunk_shift
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Sectors used on each member.
    pub fn member_sectors(&self) -> u64 {
        self.rows << self.chunk_shift
    }

    /// Rows of chunks.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Data sectors of one row: a write that covers them needs no reads.
    pub fn row_sectors(&self) -> u64 {
        self.chunk_sectors() * self.data_members() as u64
    }

    /// Sectors of the array.
    pub fn capacity_sectors(&self) -> u64 {
        self.rows * self.row_sectors()
    }

    /// The member with the parity of `row`.
    pub fn parity_member(&self, row: u64) -> usize {
        let turn = (row % u64::from(self.members)) as usize;
        match self.layout {
            Layout::LeftAsymmetric | Layout::LeftSymmetric => self.members() - 1 - turn,
            Layout::RightAsymmetric | Layout::RightSymmetric => turn,
        }
    }

    /// The member with data chunk `index` of `row`.
    pub fn data_member(&self, row: u64, index: usize) -> usize {
        self.data_beside(self.parity_member(row), index)
    }

    /// The member with data chunk `index` of a row that has its parity on `parity`.
    fn data_beside(&self, parity: usize, index: usize) -> usize {
        debug_assert!(index < self.data_members());
        match self.layout {
            Layout::LeftAsymmetric | Layout::RightAsymmetric => {
                index + usize::from(index >= parity)
            }
            Layout::LeftSymmetric | Layout::RightSymmetric => self.wrapped(parity + 1 + index),
        }
    }

    /// Member `number`, where those behind the last one are the first ones again. Each plan asks for several: a division would take longer.
    fn wrapped(&self, number: usize) -> usize {
        debug_assert!(number < 2 * self.members());
        match number.checked_sub(self.members()) {
            Some(first) => first,
            None => number,
        }
    }

    /// Index of the data chunk of `row` that is on `member`; `None` if the member has the parity.
    pub fn data_index(&self, row: u64, member: usize) -> Option<usize> {
        debug_assert!(member < self.members());
        let parity = self.parity_member(row);
        if member == parity {
            return None;
        }
        Some(match self.layout {
            Layout::LeftAsymmetric | Layout::RightAsymmetric => {
                member - usize::from(member > parity)
            }
            Layout::LeftSymmetric | Layout::RightSymmetric => {
                self.wrapped(member + self.members() - parity - 1)
            }
        })
    }

    /// Where a sector of the array is. It must be below [`Geometry::capacity_sectors`].
    pub fn locate(&self, array_sector: u64) -> ChunkPlace {
        debug_assert!(array_sector < self.capacity_sectors());
        let chunk = array_sector >> self.chunk_shift;
        let inside = array_sector & (self.chunk_sectors() - 1);
        let data = self.data_members() as u64;
        let (row, index) = (chunk / data, (chunk % data) as usize);
        ChunkPlace {
            row,
            index,
            member: self.data_member(row, index),
            member_sector: (row << self.chunk_shift) | inside,
        }
    }

    /// The sector of the array at `member_sector` of `member`; `None` where parity is.
    pub fn array_sector(&self, member: usize, member_sector: u64) -> Option<u64> {
        debug_assert!(member_sector < self.member_sectors());
        let row = member_sector >> self.chunk_shift;
        let index = self.data_index(row, member)?;
        Some(self.array_sector_of(member_sector, index))
    }

    /// The sector of the array at `member_sector` of the member with data chunk `index` there.
    fn array_sector_of(&self, member_sector: u64, index: usize) -> u64 {
        let row = member_sector >> self.chunk_shift;
        let inside = member_sector & (self.chunk_sectors() - 1);
        ((row * self.data_members() as u64 + index as u64) << self.chunk_shift) | inside
    }

    /// Cuts a range of the array where chunks end. The range must lie inside the array.
    pub fn pieces(&self, array_sector: u64, sectors: u64) -> impl Iterator<Item = Piece> + use<> {
        let geometry = *self;
        let (mut at, end) = (array_sector, array_sector + sectors);
        debug_assert!(end <= self.capacity_sectors());
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let chunk_end = (at | (geometry.chunk_sectors() - 1)) + 1;
            let piece = Piece {
                array_sector: at,
                sectors: chunk_end.min(end) - at,
                place: geometry.locate(at),
            };
            at += piece.sectors;
            Some(piece)
        })
    }

    /// Stripes of the array.
    pub fn stripes(&self) -> u64 {
        self.member_sectors() / STRIPE_SECTORS
    }

    /// The stripe and block that hold a sector of the array.
    pub fn slot(&self, array_sector: u64) -> StripeBlock {
        let place = self.locate(array_sector);
        StripeBlock {
            stripe: place.member_sector / STRIPE_SECTORS,
            index: place.index,
            offset_sectors: place.member_sector % STRIPE_SECTORS,
        }
    }

    /// The stripe that holds a sector of the array.
    pub fn stripe_of(&self, array_sector: u64) -> u64 {
        self.slot(array_sector).stripe
    }

    /// Where a stripe is, on every member.
    pub fn stripe_member_sector(&self, stripe: u64) -> u64 {
        stripe * STRIPE_SECTORS
    }

    /// Stripes of these rows.
    fn row_stripes(&self, rows: Range<u64>) -> Range<u64> {
        let each = self.chunk_sectors() / STRIPE_SECTORS;
        rows.start * each..rows.end * each
    }

    /// The shortest range with all stripes of a range of the array that isn't empty: not all of a row's if the range lies in one chunk.
    pub fn range_stripes(&self, sectors: &Range<u64>) -> Range<u64> {
        let (first, last) = (sectors.start, sectors.end - 1);
        if first >> self.chunk_shift == last >> self.chunk_shift {
            return self.stripe_of(first)..self.stripe_of(last) + 1;
        }
        let row = self.row_sectors();
        self.row_stripes(first / row..last / row + 1)
    }

    /// The row that a stripe is part of.
    pub fn stripe_row(&self, stripe: u64) -> u64 {
        (stripe * STRIPE_SECTORS) >> self.chunk_shift
    }

    /// The member with the parity of a stripe.
    pub fn stripe_parity(&self, stripe: u64) -> usize {
        self.parity_member(self.stripe_row(stripe))
    }

    /// Members of these data blocks of a stripe, as masks both. Bits of blocks that it doesn't have are of no meaning.
    pub(crate) fn stripe_members(&self, stripe: u64, blocks: u64) -> u64 {
        let (parity, members) = (self.stripe_parity(stripe), self.members());
        let blocks = blocks & ((1 << self.data_members()) - 1);
        match self.layout {
            Layout::LeftAsymmetric | Layout::RightAsymmetric => {
                let before = blocks & ((1 << parity) - 1);
                before | (blocks ^ before) << 1
            }
            // They begin behind the parity, and those behind the last member are on the first ones again.
            Layout::LeftSymmetric | Layout::RightSymmetric => {
                let turned = u128::from(blocks) << (parity + 1);
                (turned | turned >> members) as u64 & (u64::MAX >> (64 - members))
            }
        }
    }

    /// Data blocks of a stripe in which a range of the array lies that isn't empty, as a mask.
    pub(crate) fn stripe_blocks(&self, stripe: u64, sectors: &Range<u64>) -> u64 {
        debug_assert!(!sectors.is_empty());
        // They are a chunk apart.
        let first = self.stripe_array_sector(stripe, 0);
        let from = match sectors.start.checked_sub(first + STRIPE_SECTORS) {
            Some(behind) => (behind >> self.chunk_shift) + 1,
            None => 0,
        };
        let end = sectors.end.saturating_sub(first) + self.chunk_sectors() - 1;
        let upto = (end >> self.chunk_shift).min(self.data_members() as u64);
        match from < upto {
            true => (1 << upto) - (1 << from),
            false => 0,
        }
    }

    /// Stripes at the begin of a range, all of one row, that a range of the array covers whole; none if it doesn't so with the first.
    pub(crate) fn whole_stripes(&self, stripes: &Range<u64>, sectors: &Range<u64>) -> Range<u64> {
        let first = stripes.start;
        let row_end = self.row_stripes(0..self.stripe_row(first) + 1).end;
        // The first block of each later stripe is behind that of the first stripe, and all other blocks lie before its last one.
        let last_block = self.stripe_array_sector(first, self.data_members() - 1);
        let count = match sectors.start <= self.stripe_array_sector(first, 0) {
            true => sectors.end.saturating_sub(last_block) / STRIPE_SECTORS,
            false => 0,
        };
        first..(first + count).min(row_end).min(stripes.end)
    }

    /// The least sectors of the array in which a whole stripe lies.
    pub(crate) fn least_whole_sectors(&self) -> u64 {
        self.row_sectors() - self.chunk_sectors() + STRIPE_SECTORS
    }

    /// All data blocks of a stripe, as a mask.
    pub(crate) fn all_blocks(&self) -> u64 {
        (1 << self.data_members()) - 1
    }

    /// As [`Geometry::stripe_blocks`], if the range covers them whole.
    pub(crate) fn whole_blocks(&self, stripe: u64, sectors: &Range<u64>) -> Option<u64> {
        let blocks = self.stripe_blocks(stripe, sectors);
        let last = blocks.checked_ilog2()? as usize;
        let first = self.stripe_array_sector(stripe, blocks.trailing_zeros() as usize);
        let end = self.stripe_array_sector(stripe, last) + STRIPE_SECTORS;
        (sectors.start <= first && end <= sectors.end).then_some(blocks)
    }

    /// The member with data block `index` of a stripe.
    pub fn stripe_data(&self, stripe: u64, index: usize) -> usize {
        self.data_member(self.stripe_row(stripe), index)
    }

    /// First sector of the array in data block `index` of a stripe.
    pub fn stripe_array_sector(&self, stripe: u64, index: usize) -> u64 {
        self.array_sector_of(stripe * STRIPE_SECTORS, index)
    }
}

#[cfg(test)]
#[path = "geometry_tests.rs"]
mod tests;
