//! Sums of an array's blocks: one for each block of 4 KiB of a member, parity included, so that a block that isn't what was written is found.
//!
//! Those of a place lie on the member of the next place, before its private map: a device that loses all writes for a while then loses no block
//! together with its sum. docs/decisions/0052-checksums.md has the rules.

use super::blocking::{Blocking, Idle};
use super::geometry::{STRIPE_BYTES, STRIPE_SECTORS};
use super::head_pages::Block;
use super::superblock::{LogArea, Superblock};
use pvblk_block::Error;
use std::sync::LazyLock;

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
/// The sum of blocks that would have that one, and of others.
const INSTEAD: u32 = 1;

/// The sum of the block of a place in a stripe, never [`UNKNOWN`]. The same bytes have another sum elsewhere, so that a block in a wrong place is
/// found.
pub fn sum_of(block: &Block, place: usize, stripe: u64) -> u32 {
    at_place(crc32fast::hash(block), place, stripe)
}

/// The CRC of a block of zeros.
static ZEROS: LazyLock<u32> = LazyLock::new(|| crc32fast::hash(&[0; STRIPE_BYTES]));

/// [`sum_of`] a block of zeros.
pub fn sum_of_zeros(place: usize, stripe: u64) -> u32 {
    at_place(*ZEROS, place, stripe)
}

/// A CRC of data, made the sum at a place.
fn at_place(crc: u32, place: usize, stripe: u64) -> u32 {
    match crc ^ mixture(place, stripe) {
        UNKNOWN => INSTEAD,
        sum => sum,
    }
}

/// Bits that are others at every place, as by the end of SplitMix64.
fn mixture(place: usize, stripe: u64) -> u32 {
    let mut at = stripe << 6 | place as u64;
    at = (at ^ at >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    at = (at ^ at >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (at >> 32) as u32
}

/// The sum of a block that is the XOR of others of its stripe, from their sums, each with its place. `None`: they don't tell it.
pub fn sum_of_xor(
    of: impl Iterator<Item = (u32, usize)>,
    (place, stripe): (usize, u64),
) -> Option<u32> {
    // The CRC of a XOR is the XOR of an odd number of CRCs; that of zeros makes an even number odd.
    let (mut crc, mut count) = (0, 0);
    for (sum, of_place) in of {
        if [UNKNOWN, INSTEAD].contains(&sum) {
            return None;
        }
        crc ^= sum ^ mixture(of_place, stripe);
        count += 1;
    }
    if count % 2 == 0 {
        crc ^= *ZEROS;
    }
    Some(at_place(crc, place, stripe))
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

/// Makes all sums of an area unknown. They are on stable storage after the next flush.
pub fn erase_sums(disk: &mut Blocking, area: LogArea, idle: &mut Idle<'_>) -> Result<(), Error> {
    let zeros = vec![0; disk.window_bytes()];
    let mut sector = area.sector;
    let end = area.sector + area.sectors;
    while sector < end {
        let bytes = zeros.len().min((end - sector) as usize * 512);
        disk.write_cached(sector, &zeros[..bytes], idle)?;
        sector += bytes as u64 / 512;
    }
    Ok(())
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
    fn the_sum_of_a_xor_follows_from_sums() {
        let mut rng = fastrand::Rng::with_seed(5);
        for count in 1..6 {
            let (mut parity, mut sums) = ([0; STRIPE_BYTES], Vec::new());
            for place in 0..count {
                let mut block = [0; STRIPE_BYTES];
                rng.fill(&mut block);
                parity
                    .iter_mut()
                    .zip(block)
                    .for_each(|(to, byte)| *to ^= byte);
                sums.push((sum_of(&block, place, 77), place));
            }
            let found = sum_of_xor(sums.iter().copied(), (9, 77));
            assert_eq!(found, Some(sum_of(&parity, 9, 77)), "{count} blocks");
            sums[0].0 = UNKNOWN;
            assert_eq!(sum_of_xor(sums.into_iter(), (9, 77)), None);
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
