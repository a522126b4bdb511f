//! Contents of sectors. Every byte follows from the writer and the sector, and the XOR of such contents is
//! not such contents: torn, misplaced and wrongly computed sectors are found.

/// Bytes of a sector.
pub const SECTOR_BYTES: usize = 512;
/// Fills memory whose contents must be neither stored nor believed. No stamp has such bytes.
pub const POISON: u8 = pvblk_sys::POISON;

/// Contents of a sector.
pub type Bytes = [u8; SECTOR_BYTES];

/// The name of a sector of zeros.
pub const ZEROS: u64 = 0;
/// Set in the name of contents that no write explains; the other bits distinguish such contents.
pub const FOREIGN: u64 = 1 << 63;
const SECTOR_BITS: u32 = 24;
const VARIANT: u64 = 1 << SECTOR_BITS;
const ID_SHIFT: u32 = SECTOR_BITS + 1;
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A mixing function that is not linear, so that no XOR of stamps is a stamp.
fn mix(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// The contents that write number `id` (from 1) puts on `sector`; `variant` if its submitter changed them on
/// the way.
pub fn make(id: u64, sector: u64, variant: bool) -> Bytes {
    let first = id << ID_SHIFT | u64::from(variant) << SECTOR_BITS | sector;
    let mut bytes = [0; SECTOR_BYTES];
    for (i, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = word_of(first, i).to_le_bytes();
    }
    bytes
}

fn word_of(first: u64, index: usize) -> u64 {
    match index {
        0 => first,
        n => mix(first.wrapping_add((n as u64).wrapping_mul(STEP))),
    }
}

/// The first word, if all others follow from it.
fn whole(bytes: &Bytes) -> Option<u64> {
    let words = bytes.as_chunks::<8>().0;
    let first = u64::from_le_bytes(words[0]);
    let mut rest = words.iter().enumerate().skip(1);
    let right = rest.all(|(i, w)| u64::from_le_bytes(*w) == word_of(first, i));
    right.then_some(first)
}

/// The name of the contents of `sector`: the number of the write, [`ZEROS`], or a number with [`FOREIGN`].
pub fn name(bytes: &Bytes, sector: u64) -> u64 {
    if bytes.iter().all(|&b| b == 0) {
        return ZEROS;
    }
    match whole(bytes) {
        Some(first) if first & (VARIANT - 1) == sector && first >> ID_SHIFT > 0 => {
            first >> ID_SHIFT
        }
        _ => {
            let words = bytes.as_chunks::<8>().0.iter();
            words.fold(1, |sum, w| mix(sum ^ u64::from_le_bytes(*w))) | FOREIGN
        }
    }
}

/// The name of the contents in words.
pub fn describe(bytes: &Bytes, sector: u64) -> String {
    match name(bytes, sector) {
        ZEROS => "zeros".into(),
        n if n & FOREIGN == 0 => format!("write {n}"),
        n => match whole(bytes) {
            Some(first) => format!(
                "what write {} put on sector {}",
                first >> ID_SHIFT,
                first & (VARIANT - 1)
            ),
            None => format!("bytes that nobody wrote ({n:x})"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixture_is_no_stamp() {
        let [a, b, c] = [(1, 5), (2, 5), (3, 5)].map(|(id, sector)| make(id, sector, false));
        assert_eq!([name(&a, 5), name(&[0; 512], 5)], [1, ZEROS]);
        assert_eq!(name(&make(9, 5, true), 5), 9);
        let mut mixed = a;
        for (x, (y, z)) in mixed.iter_mut().zip(b.iter().zip(&c)) {
            *x ^= y ^ z;
        }
        let mut torn = a;
        torn[256..].copy_from_slice(&b[256..]);
        for wrong in [mixed, torn, make(1, 6, false)] {
            assert!(name(&wrong, 5) & FOREIGN != 0);
        }
        assert_eq!(
            describe(&make(1, 6, false), 5),
            "what write 1 put on sector 6"
        );
    }
}
