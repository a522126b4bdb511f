//! The contents of sectors, which tell the write that they come from.

use pvblk_block::Buffer;

const SECTOR: usize = 512;

fn word(sector: u64, number: u32, index: usize) -> u64 {
    // The output function of splitmix64 mixes the sector, the number and the index of the word.
    let mut z = (sector << 32 | u64::from(number))
        .wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The bytes that write `number` puts into `sector`.
pub fn make(sector: u64, number: u32) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    bytes[..8].copy_from_slice(&u64::from(number).to_le_bytes());
    for (i, piece) in bytes.chunks_exact_mut(8).enumerate().skip(1) {
        piece.copy_from_slice(&word(sector, number, i).to_le_bytes());
    }
    bytes
}

/// The number of the write that `bytes` of `sector` come from, 0 if there was none; `None` if the bytes are
/// torn or another sector's.
pub fn read(sector: u64, bytes: &[u8; SECTOR]) -> Option<u32> {
    if bytes.iter().all(|&b| b == 0) {
        return Some(0);
    }
    let head: &[u8; 8] = bytes.first_chunk()?;
    let number = u32::try_from(u64::from_le_bytes(*head)).ok()?;
    (*bytes == make(sector, number)).then_some(number)
}

/// Fills `buffer` with the bytes of write `number` to the sectors from `sector` on.
pub fn fill(buffer: &Buffer, sector: u64, number: u32) {
    for i in 0..buffer.len() / SECTOR {
        buffer.write(i * SECTOR, &make(sector + i as u64, number));
    }
}

/// For each sector of `buffer`, the number of its write, as [`read`] returns it.
pub fn look(buffer: &Buffer, sector: u64) -> impl Iterator<Item = (u64, Option<u32>)> {
    (0..buffer.len() / SECTOR).map(move |i| {
        let mut bytes = [0; SECTOR];
        buffer.read(i * SECTOR, &mut bytes);
        let at = sector + i as u64;
        (at, read(at, &bytes))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_tells_its_write_and_a_torn_one_tells_nothing() {
        let whole = make(77, 5);
        assert_eq!(read(77, &whole), Some(5));
        assert_eq!(read(78, &whole), None, "another sector's");
        assert_eq!(read(77, &[0; SECTOR]), Some(0));
        for cut in [1, 8, 100, 511] {
            let mut torn = make(77, 6);
            torn[..cut].copy_from_slice(&whole[..cut]);
            assert_eq!(read(77, &torn), None, "torn at {cut}");
        }
    }
}
