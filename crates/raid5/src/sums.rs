//! Sums of an array's blocks: one for each block of 4 KiB of a member, parity included, so that a block that isn't what was written is found.
//!
//! Those of a place lie on the member of the next place, before its private map: a device that loses all writes for a while then loses no block
//! together with its sum. docs/decisions/0052-checksums.md has the rules.

use super::blocking::{Blocking, Idle};
use super::geometry::{STRIPE_BYTES, STRIPE_SECTORS};
use super::head_pages::Block;
use super::superblock::{LogArea, Superblock};
use pvblk_block::Error;

/// A page of sums, as it lies on a member.
pub const SUMS_PAGE_BYTES: usize = 4096;
/// Bytes of one sum, little-endian.
pub const SUM_BYTES: usize = 4;
/// Stripes whose sums share a page: a *group*.
pub const GROUP_STRIPES: u64 = (SUMS_PAGE_BYTES / SUM_BYTES) as u64;
/// Sectors of a member that belong to a group: 4 MiB.
pub const GROUP_SECTORS: u64 = GROUP_STRIPES * STRIPE_SECTORS;
/// [`GROUP_SECTORS`] as a power of two.
pub const GROUP_SHIFT: u32 = GROUP_SECTORS.trailing_zeros();
/// Sectors of a page.
const PAGE_SECTORS: u64 = SUMS_PAGE_BYTES as u64 / 512;

/// Stands for a block whose sum isn't known: it fits any.
pub const UNKNOWN: u32 = 0;

/// The sum of the block of a place in a stripe, never [`UNKNOWN`]. The same bytes have another sum elsewhere, so that a block in a wrong place is
/// found.
pub fn sum_of(block: &Block, place: usize, stripe: u64) -> u32 {
    at_place(crc32fast::hash(block), place, stripe)
}

/// [`sum_of`] a block of zeros.
pub fn sum_of_zeros(place: usize, stripe: u64) -> u32 {
    static ZEROS: std::sync::LazyLock<u32> =
        std::sync::LazyLock::new(|| crc32fast::hash(&[0; STRIPE_BYTES]));
    at_place(*ZEROS, place, stripe)
}

/// A CRC of data, made the sum at a place. The CRC of place and stripe differs for any two of them that differ in 32 bits in a row.
fn at_place(crc: u32, place: usize, stripe: u64) -> u32 {
    let mut at = [0; 9];
    at[..8].copy_from_slice(&stripe.to_le_bytes());
    at[8] = place as u8;
    match crc ^ crc32fast::hash(&at) {
        UNKNOWN => 1,
        sum => sum,
    }
}

/// The group of a stripe.
pub fn group_of(stripe: u64) -> usize {
    (stripe / GROUP_STRIPES) as usize
}

/// The number of groups of members with so many sectors of data.
pub fn groups(member_sectors: u64) -> usize {
    member_sectors.div_ceil(GROUP_SECTORS) as usize
}

/// Sectors that the sums of members with so many sectors of data take on each of them.
pub fn sums_sectors(member_sectors: u64) -> u64 {
    groups(member_sectors) as u64 * PAGE_SECTORS
}

/// The place whose member has the sums of another one.
pub fn holder(place: usize, members: usize) -> usize {
    (place + 1) % members
}

/// The sector of a device, whose sums are in `area`, with the page of a group.
pub fn page_sector(area: LogArea, group: usize) -> u64 {
    area.sector + group as u64 * PAGE_SECTORS
}

impl Superblock {
    /// Where the sums of the place before this device's are, or would be: right before the private map. `None`: there is no room.
    pub fn sums_area(&self) -> Option<LogArea> {
        let sectors = sums_sectors(self.size_sectors);
        let map = self.private_map()?;
        let sector = map.sector.checked_sub(sectors)?;
        self.is_free(sector, sectors)
            .then_some(LogArea { sector, sectors })
    }
}

/// Makes all sums of an area unknown, on stable storage.
pub fn erase_sums(disk: &mut Blocking, area: LogArea, idle: &mut Idle<'_>) -> Result<(), Error> {
    let zeros = vec![0; disk.window_bytes()];
    let mut sector = area.sector;
    let end = area.sector + area.sectors;
    while sector < end {
        let bytes = zeros.len().min((end - sector) as usize * 512);
        disk.write_cached(sector, &zeros[..bytes], idle)?;
        sector += bytes as u64 / 512;
    }
    disk.flush(idle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_bytes_have_another_sum_at_another_place() {
        let block = [7; STRIPE_BYTES];
        let mut seen = std::collections::HashSet::new();
        for place in 0..8 {
            for stripe in (0..64).chain([1 << 32, 1 << 33]) {
                assert!(seen.insert(sum_of(&block, place, stripe)));
            }
        }
    }

    #[test]
    fn one_flipped_bit_changes_the_sum() {
        let mut block = [0; STRIPE_BYTES];
        let sum = sum_of(&block, 1, 2);
        assert_eq!(sum, sum_of_zeros(1, 2));
        for bit in [0, 1, 7, 4095 * 8, 4095 * 8 + 7, 20_000] {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(sum_of(&block, 1, 2), sum, "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_page_has_the_sums_of_4_mib() {
        assert_eq!(GROUP_SECTORS * 512, 4 << 20);
        assert_eq!(group_of(GROUP_STRIPES - 1), 0);
        assert_eq!(group_of(GROUP_STRIPES), 1);
        assert_eq!(sums_sectors(1), 8);
        assert_eq!(sums_sectors(GROUP_SECTORS), 8);
        assert_eq!(sums_sectors(GROUP_SECTORS + 1), 16);
    }
}
