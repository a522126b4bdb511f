//! Lengths of requests: `bs`, `bsrange` and `bssplit`.

use super::units;

/// Lengths of one direction's requests, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockSizes {
    /// All requests have this length.
    Fixed(u32),
    /// Multiples of the least length, up to the greatest, all equally likely.
    Range {
        /// Least length in bytes.
        min: u32,
        /// Greatest length in bytes.
        max: u32,
    },
    /// Lengths in bytes with their shares in percent, which add up to 100.
    Split(Vec<(u32, u32)>),
}

/// Longest request that can be asked for, in bytes.
const LONGEST: u64 = 1 << 30;

impl BlockSizes {
    /// The shortest length in bytes.
    pub fn min(&self) -> u32 {
        match self {
            BlockSizes::Fixed(n) => *n,
            BlockSizes::Range { min, .. } => *min,
            BlockSizes::Split(parts) => parts.iter().map(|p| p.0).min().unwrap_or(0),
        }
    }

    /// The longest length in bytes.
    pub fn max(&self) -> u32 {
        match self {
            BlockSizes::Fixed(n) => *n,
            BlockSizes::Range { max, .. } => *max,
            BlockSizes::Split(parts) => parts.iter().map(|p| p.0).max().unwrap_or(0),
        }
    }

    /// True if all requests have the same length.
    pub fn is_fixed(&self) -> bool {
        self.min() == self.max()
    }

    /// Draws a length in bytes.
    #[inline]
    pub(super) fn pick(&self, rng: &mut fastrand::Rng) -> u32 {
        match self {
            BlockSizes::Fixed(n) => *n,
            BlockSizes::Range { min, max } => min * rng.u32(1..=max / min),
            BlockSizes::Split(parts) => {
                let mut at = rng.u32(0..100);
                for &(bytes, percent) in parts {
                    if at < percent {
                        return bytes;
                    }
                    at -= percent;
                }
                self.max() // not reached: the shares add up to 100
            }
        }
    }

    /// True if all possible lengths are multiples of `unit`.
    pub(super) fn multiple_of(&self, unit: u32) -> bool {
        match self {
            BlockSizes::Fixed(n) => n.is_multiple_of(unit),
            BlockSizes::Range { min, .. } => min.is_multiple_of(unit),
            BlockSizes::Split(parts) => parts.iter().all(|p| p.0.is_multiple_of(unit)),
        }
    }
}

fn bytes(text: &str) -> Result<u32, String> {
    match units::size(text)? {
        n if (512..=LONGEST).contains(&n) && n.is_multiple_of(512) => Ok(n as u32),
        _ => Err(format!(
            "{text:?}: a block is a multiple of 512 bytes, up to 1g"
        )),
    }
}

/// Reads one value for both directions, or `READ,WRITE` (a third one, for trims, is not used). A missing part
/// stays as it is.
pub(super) fn pair<T: Clone>(
    text: &str,
    both: &mut [T; 2],
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<(), String> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    match parts[..] {
        [one] => both.fill(parse(one)?),
        [_, _] | [_, _, _] => {
            for (slot, part) in both.iter_mut().zip(&parts) {
                if !part.is_empty() {
                    *slot = parse(part)?;
                }
            }
        }
        _ => return Err(format!("{text:?} has more than the parts READ,WRITE,TRIM")),
    }
    Ok(())
}

pub(super) fn fixed(text: &str) -> Result<BlockSizes, String> {
    bytes(text).map(BlockSizes::Fixed)
}

pub(super) fn range(text: &str) -> Result<BlockSizes, String> {
    let (min, max) = text
        .split_once('-')
        .ok_or_else(|| format!("{text:?} is not a range such as 4k-64k"))?;
    let (min, max) = (bytes(min)?, bytes(max)?);
    if min > max {
        return Err(format!("{text:?}: the least is more than the most"));
    }
    Ok(BlockSizes::Range { min, max })
}

/// Reads `SIZE/PERCENT:SIZE/PERCENT` and so on; sizes without a percentage share the rest.
pub(super) fn split(text: &str) -> Result<BlockSizes, String> {
    let mut parts: Vec<(u32, Option<u32>)> = Vec::new();
    for part in text.split(':') {
        let (size, share) = part.split_once('/').unwrap_or((part, ""));
        let share = match share.trim() {
            "" => None,
            s => Some(units::number(s, 0, 100)? as u32),
        };
        parts.push((bytes(size)?, share));
    }
    let given: u32 = parts.iter().filter_map(|p| p.1).sum();
    let missing = parts.iter().filter(|p| p.1.is_none()).count() as u32;
    if given > 100 || (given < 100 && missing == 0) {
        return Err(format!(
            "{text:?}: the shares add up to {given}%, not to 100%"
        ));
    }
    let mut left = 100 - given;
    let mut open = missing;
    let parts = parts
        .into_iter()
        .map(|(bytes, share)| {
            let share = share.unwrap_or_else(|| {
                let part = left / open; // the last one takes what is left
                left -= part;
                open -= 1;
                part
            });
            (bytes, share)
        })
        .collect();
    Ok(BlockSizes::Split(parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE_SERVER: &str = "512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10";

    #[test]
    fn a_split_keeps_its_shares() {
        let sizes = split(FILE_SERVER).unwrap();
        let BlockSizes::Split(parts) = &sizes else {
            panic!("not a split");
        };
        let mut rng = fastrand::Rng::with_seed(3);
        let draws = 200_000;
        let mut counts = vec![0u32; parts.len()];
        for _ in 0..draws {
            let n = sizes.pick(&mut rng);
            counts[parts.iter().position(|p| p.0 == n).unwrap()] += 1;
        }
        for (part, count) in parts.iter().zip(counts) {
            // The bound is five standard deviations of a binomial distribution.
            let p = f64::from(part.1) / 100.0;
            let sigma = (f64::from(draws) * p * (1.0 - p)).sqrt();
            let off = (f64::from(count) - f64::from(draws) * p).abs();
            assert!(off < 5.0 * sigma, "{part:?}: {count}");
        }
        assert_eq!((sizes.min(), sizes.max()), (512, 65536));
    }

    #[test]
    fn shares_may_be_left_open_but_must_make_sense() {
        assert_eq!(
            split("4k/50:8k:16k"),
            Ok(BlockSizes::Split(vec![(4096, 50), (8192, 25), (16384, 25)]))
        );
        for bad in ["4k/50", "4k/60:8k/50", "4k/x", "100/100", "4k/50:/50"] {
            assert!(split(bad).is_err(), "{bad}");
        }
        assert!(range("8k-4k").is_err() && range("4k").is_err());
        assert_eq!(
            range("4k-8k"),
            Ok(BlockSizes::Range {
                min: 4096,
                max: 8192
            })
        );
    }

    #[test]
    fn directions_may_differ() {
        let mut both = [BlockSizes::Fixed(4096), BlockSizes::Fixed(4096)];
        pair(",8k", &mut both, fixed).unwrap();
        assert_eq!(both, [BlockSizes::Fixed(4096), BlockSizes::Fixed(8192)]);
        pair("1k", &mut both, fixed).unwrap();
        assert_eq!(both, [BlockSizes::Fixed(1024), BlockSizes::Fixed(1024)]);
        assert!(pair("1k,2k,3k,4k", &mut both, fixed).is_err());
    }
}
