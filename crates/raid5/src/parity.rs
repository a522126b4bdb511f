//! XOR of blocks.

pub use pvblk_sys::xor::{xor_into, xor_of};

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(rng: &mut fastrand::Rng, len: usize) -> Vec<u8> {
        std::iter::repeat_with(|| rng.u8(..)).take(len).collect()
    }

    fn by_hand(dst: &[u8], srcs: &[&[u8]]) -> Vec<u8> {
        (0..dst.len())
            .map(|i| srcs.iter().fold(dst[i], |x, s| x ^ s[i]))
            .collect()
    }

    #[test]
    fn any_number_of_any_length() {
        let seed = pvblk_testing::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for sources in 0..=13 {
            for len in [0, 1, 7, 31, 32, 33, 512, 4095, 4096, 4097, 12288, 70001] {
                let data: Vec<Vec<u8>> = (0..sources).map(|_| bytes(&mut rng, len)).collect();
                let srcs: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
                let before = bytes(&mut rng, len);
                let mut dst = before.clone();
                xor_into(&mut dst, &srcs);
                assert!(
                    dst == by_hand(&before, &srcs),
                    "{sources} of {len}, seed {seed}"
                );
                xor_of(&mut dst, &srcs);
                let zeros = vec![0; len];
                assert!(
                    dst == by_hand(&zeros, &srcs),
                    "{sources} of {len}, seed {seed}"
                );
            }
        }
    }

    #[test]
    fn a_lost_block_comes_back() {
        let mut rng = fastrand::Rng::with_seed(1);
        let data: Vec<Vec<u8>> = (0..5).map(|_| bytes(&mut rng, 4096)).collect();
        let all: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let mut parity = vec![0; 4096];
        xor_of(&mut parity, &all);
        for lost in 0..5 {
            let mut left = all.clone();
            left[lost] = &parity;
            let mut back = vec![0xee; 4096];
            xor_of(&mut back, &left);
            assert!(back == data[lost]);
        }
    }

    #[test]
    #[should_panic(expected = "different lengths")]
    fn lengths_must_agree() {
        xor_into(&mut [0; 8], &[&[0; 8], &[0; 7]]);
    }
}
