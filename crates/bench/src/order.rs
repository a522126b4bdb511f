//! The order in which random requests reach blocks: each block once, or by a distribution.

/// A permutation of `0..count` that takes no memory: a Feistel network over the next power of four, walked
/// along its cycle until the number is inside.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    count: u64,
    half_bits: u32,
    keys: [u64; 4],
}

/// The finaliser of splitmix64.
#[inline]
pub(super) fn mix(n: u64) -> u64 {
    let z = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Permutation {
    pub(super) fn new(count: u64, rng: &mut fastrand::Rng) -> Permutation {
        let bits = 64 - count.saturating_sub(1).leading_zeros();
        Permutation {
            count,
            half_bits: bits.div_ceil(2).max(1),
            keys: std::array::from_fn(|_| rng.u64(..)),
        }
    }

    /// The place of number `i`, which is below the count.
    #[inline]
    pub(super) fn at(&self, i: u64) -> u64 {
        let mut n = i;
        loop {
            n = self.round_trip(n);
            if n < self.count {
                return n;
            }
        }
    }

    #[inline]
    fn round_trip(&self, n: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (n >> self.half_bits, n & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

/// A set of used numbers below a count that finds the next unused one in a few steps: a bit for each,
/// and above them a bit for each full word.
#[derive(Clone, Debug)]
pub(super) struct UsedMap {
    count: usize,
    free: usize,
    levels: Vec<Vec<u64>>,
}

impl UsedMap {
    pub(super) fn new(count: usize) -> UsedMap {
        let mut levels = Vec::new();
        let mut bits = count.max(1);
        loop {
            let words = bits.div_ceil(64);
            levels.push(vec![0; words]);
            if words == 1 {
                break;
            }
            bits = words;
        }
        let mut map = UsedMap {
            count,
            free: 0,
            levels,
        };
        map.clear();
        map
    }

    /// Makes all numbers unused.
    pub(super) fn clear(&mut self) {
        let mut bits = self.count;
        for level in &mut self.levels {
            level.fill(0);
            // Bits beyond the end count as used.
            if !bits.is_multiple_of(64)
                && let Some(last) = level.last_mut()
            {
                *last = u64::MAX << (bits % 64);
            }
            bits = bits.div_ceil(64);
        }
        self.free = self.count;
    }

    #[inline]
    pub(super) fn is_used(&self, i: usize) -> bool {
        self.levels[0][i / 64] >> (i % 64) & 1 != 0
    }

    /// Marks an unused number.
    pub(super) fn mark(&mut self, mut i: usize) {
        self.free -= 1;
        for level in &mut self.levels {
            let word = &mut level[i / 64];
            *word |= 1 << (i % 64);
            if *word != u64::MAX {
                return;
            }
            i /= 64;
        }
    }

    /// The first unused number from `from` on, or else from the beginning; `None` if all are used.
    pub(super) fn next_free(&self, from: usize) -> Option<usize> {
        if self.free == 0 {
            return None;
        }
        self.search(from).or_else(|| self.search(0))
    }

    fn search(&self, from: usize) -> Option<usize> {
        let mut i = from;
        for (level, words) in self.levels.iter().enumerate() {
            if let Some(word) = words.get(i / 64) {
                let masked = word | ((1u64 << (i % 64)) - 1);
                if masked != u64::MAX {
                    let mut at = i / 64 * 64 + masked.trailing_ones() as usize;
                    for below in self.levels[..level].iter().rev() {
                        at = at * 64 + below[at].trailing_ones() as usize;
                    }
                    return Some(at);
                }
            }
            i = i / 64 + 1;
        }
        None
    }
}

/// Numbers `0..count` with Zipf frequencies: rejection-inversion sampling (Hörmann and Derflinger 1996).
#[derive(Clone, Debug)]
pub struct Zipf {
    count: f64,
    exponent: f64,
    low: f64,
    high: f64,
    shortcut: f64,
}

impl Zipf {
    /// For `count` numbers, of which the n-th most frequent one is drawn as often as 1 / n^`exponent` says.
    pub fn new(count: u64, exponent: f64) -> Zipf {
        let mut z = Zipf {
            count: count as f64,
            exponent,
            low: 0.0,
            high: 0.0,
            shortcut: 0.0,
        };
        z.low = z.integral(1.5) - 1.0;
        z.high = z.integral(z.count + 0.5);
        z.shortcut = 2.0 - z.inverse(z.integral(2.5) - 2f64.powf(-exponent));
        z
    }

    fn integral(&self, x: f64) -> f64 {
        if (self.exponent - 1.0).abs() < 1e-9 {
            x.ln()
        } else {
            (x.powf(1.0 - self.exponent) - 1.0) / (1.0 - self.exponent)
        }
    }

    fn inverse(&self, y: f64) -> f64 {
        if (self.exponent - 1.0).abs() < 1e-9 {
            y.exp()
        } else {
            (1.0 + y * (1.0 - self.exponent)).powf(1.0 / (1.0 - self.exponent))
        }
    }

    /// Draws a number; the most frequent one is 0.
    pub fn pick(&self, rng: &mut fastrand::Rng) -> u64 {
        loop {
            let u = self.high + rng.f64() * (self.low - self.high);
            let x = self.inverse(u);
            let k = x.round().clamp(1.0, self.count);
            if k - x <= self.shortcut || u >= self.integral(k + 0.5) - k.powf(-self.exponent) {
                return k as u64 - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_reaches_each_number_once() {
        let mut rng = fastrand::Rng::with_seed(1);
        for count in [1u64, 2, 3, 63, 64, 65, 1000, 4096, 10_007] {
            let p = Permutation::new(count, &mut rng);
            let mut seen: Vec<u64> = (0..count).map(|i| p.at(i)).collect();
            assert!(count < 100 || !seen.is_sorted(), "not shuffled");
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..count), "{count}");
        }
        // The count is the greatest possible: the test checks only that the walk ends and stays
        // inside.
        let p = Permutation::new(1 << 53, &mut rng);
        assert!((0..1000).all(|i| p.at(i) < 1 << 53));
    }

    #[test]
    fn a_map_hands_out_each_number_once() {
        let mut rng = fastrand::Rng::with_seed(2);
        for count in [1usize, 63, 64, 65, 4095, 4096, 4097, 300_000] {
            let mut map = UsedMap::new(count);
            for _ in 0..2 {
                for _ in 0..count {
                    let i = map.next_free(rng.usize(0..count)).unwrap();
                    assert!(i < count && !map.is_used(i));
                    map.mark(i);
                }
                assert_eq!(map.next_free(0), None);
                map.clear();
            }
        }
    }

    #[test]
    fn zipf_has_its_frequencies() {
        for exponent in [0.5, 1.0, 1.2] {
            let (n, draws) = (1000u64, 200_000);
            let z = Zipf::new(n, exponent);
            let mut rng = fastrand::Rng::with_seed(9);
            let mut counts = vec![0u32; n as usize];
            (0..draws).for_each(|_| counts[z.pick(&mut rng) as usize] += 1);
            let total: f64 = (1..=n).map(|k| (k as f64).powf(-exponent)).sum();
            for k in [1usize, 2, 10, 100] {
                let p = (k as f64).powf(-exponent) / total;
                let sigma = (f64::from(draws) * p * (1.0 - p)).sqrt();
                let off = (f64::from(counts[k - 1]) - f64::from(draws) * p).abs();
                assert!(off < 5.0 * sigma + 1.0, "{exponent} {k}: {}", counts[k - 1]);
            }
        }
    }
}
