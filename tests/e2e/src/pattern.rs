//! Files with a pattern by which a wrong block is found.

use crate::Stop;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

const CHUNK: usize = 64 << 10;

/// Writes `bytes` of pattern to `path`: random chunks, and every eighth one zeros, as images have.
pub fn write(path: &Path, bytes: u64, seed: u64) -> Result<(), Stop> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut chunk = vec![0; CHUNK];
    let mut left = bytes;
    while left > 0 {
        if random.u8(..8) == 0 {
            chunk.fill(0);
        } else {
            random.fill(&mut chunk);
        }
        let now = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
        file.write_all(&chunk[..now])?;
        left -= now as u64;
    }
    file.flush()?;
    Ok(())
}

/// Fills a block with a pattern that follows from where it is and from its number in the order of writes.
pub fn fill_block(block: &mut [u8], index: u64, sequence: u64) {
    fastrand::Rng::with_seed(index.rotate_left(32) ^ sequence).fill(&mut block[16..]);
    block[..8].copy_from_slice(&index.to_le_bytes());
    block[8..16].copy_from_slice(&sequence.to_le_bytes());
}

/// The number of the write that this block holds: 0 for zeros, `None` if it holds no whole write to `index`.
pub fn block_sequence(block: &[u8], index: u64) -> Option<u64> {
    if block.iter().all(|&b| b == 0) {
        return Some(0);
    }
    let sequence = u64::from_le_bytes(block[8..16].try_into().ok()?);
    let mut expected = vec![0; block.len()];
    fill_block(&mut expected, index, sequence);
    (expected == block).then_some(sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_knows_its_place_and_turn() {
        let mut block = vec![0; 4096];
        assert_eq!(block_sequence(&block, 7), Some(0));
        fill_block(&mut block, 7, 42);
        assert_eq!(block_sequence(&block, 7), Some(42));
        assert_eq!(block_sequence(&block, 8), None);
        block[4095] ^= 1;
        assert_eq!(block_sequence(&block, 7), None, "a torn block is found");
    }

    #[test]
    fn files_have_the_size_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        write(&path, 100_000, 1).unwrap();
        let text = std::fs::read(&path).unwrap();
        assert_eq!(text.len(), 100_000);
        assert!(text.iter().any(|&b| b != 0));
    }
}
