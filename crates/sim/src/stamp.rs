//! Contents of sectors: a stamp says who wrote it and where it belongs; every word of the sector tells it.

use pvblk_block::Buffer;

/// Bytes of a sector.
pub const SECTOR_BYTES: usize = 512;
/// Contents of a sector that was never written, or discarded.
pub const ZEROS: u64 = 0;
const SECTOR_BITS: u32 = 16;
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// What write number `id` (from 1) puts on `sector`.
pub fn stamp(id: u64, sector: u64) -> u64 {
    id << SECTOR_BITS | sector
}

/// What memory holds that nobody may store or believe.
pub fn poison(sector: u64) -> u64 {
    stamp(u64::MAX >> SECTOR_BITS, sector)
}

/// True if the stamp may stand on `sector`.
pub fn belongs(stamp: u64, sector: u64) -> bool {
    stamp != poison(sector) && stamp & ((1 << SECTOR_BITS) - 1) == sector && stamp != ZEROS
}

fn place(buffers: &[Buffer], index: usize) -> (&Buffer, usize) {
    let mut at = index * SECTOR_BYTES;
    for b in buffers {
        if at < b.len() {
            return (b, at);
        }
        at -= b.len();
    }
    panic!("sector {index} is outside the request's buffers");
}

/// Fills the `index`-th sector of `buffers`.
pub fn put(buffers: &[Buffer], index: usize, stamp: u64) {
    let mut bytes = [0; SECTOR_BYTES];
    if stamp != ZEROS {
        for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(stamp ^ (i as u64).wrapping_mul(STEP)).to_ne_bytes());
        }
    }
    let (buffer, at) = place(buffers, index);
    buffer.write(at, &bytes);
}

/// Reads the `index`-th sector of `buffers`; `None` if it is torn.
pub fn get(buffers: &[Buffer], index: usize) -> Option<u64> {
    let mut bytes = [0; SECTOR_BYTES];
    let (buffer, at) = place(buffers, index);
    buffer.read(at, &mut bytes);
    let mut words = bytes
        .chunks_exact(8)
        .map(|w| u64::from_ne_bytes(w.try_into().unwrap_or_default()));
    let first = words.next()?;
    let expected = |i: usize| match first {
        ZEROS => ZEROS,
        _ => first ^ (i as u64 + 1).wrapping_mul(STEP),
    };
    let whole = words.enumerate().all(|(i, word)| word == expected(i));
    whole.then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_or_shifted_sector_is_seen() {
        let b = Buffer::anonymous(4096).unwrap();
        let buffers = [b.slice(8, 512).unwrap(), b.slice(1024, 1024).unwrap()];
        for (i, s) in [stamp(1, 5), ZEROS, stamp(7, 6)].into_iter().enumerate() {
            put(&buffers, i, s);
            assert_eq!(get(&buffers, i), Some(s));
        }
        assert!(belongs(stamp(1, 5), 5) && !belongs(stamp(1, 5), 6) && !belongs(poison(5), 5));
        assert_eq!(get(&[b.slice(16, 512).unwrap()], 0), None);
        b.write(300, &[1]);
        assert_eq!(get(&buffers, 0), None);
    }
}
