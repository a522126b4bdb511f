//! Watermarks and batch sizes by the rules of a kernel's zone, as numbers of frames.

/// Free frames at which something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermarks {
    /// At or below it a request reclaims for itself.
    pub min: usize,
    /// At or below it background reclaim is asked for.
    pub low: usize,
    /// Above it background reclaim ends.
    pub high: usize,
}

/// Smallest and largest reserve in KiB.
const RESERVE_KIB: std::ops::RangeInclusive<usize> = 128..=65536;
/// A small cache keeps at most one of so many frames free.
const LARGEST_SHARE: usize = 8;

impl Watermarks {
    /// Those of a zone of `frames` frames of 4 KiB: min is the square root of 16 times its KiB, as KiB; low and high are a quarter and
    /// a half above it.
    pub fn of(frames: usize) -> Watermarks {
        let kib = (16 * frames * 4).isqrt();
        let reserve = kib.clamp(*RESERVE_KIB.start(), *RESERVE_KIB.end()) / 4;
        let min = reserve.min(frames / LARGEST_SHARE);
        let low = (min + min / 4).max(min + 1);
        Watermarks {
            min,
            low,
            high: (min + min / 2).max(low + 1),
        }
    }
}

/// Number of frames that a CPU's list takes at once from a zone of `frames` frames of 4 KiB: about a quarter of a thousandth, at most 512 KiB, and one
/// less than a power of two; 0 for a small zone, where it takes one.
pub fn batch_of(frames: usize) -> usize {
    let quarter = ((frames / 1024).min(128) / 4).max(1);
    let rounded = quarter + quarter / 2;
    (1 << rounded.ilog2()) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 256;

    #[test]
    fn batches_are_those_of_zones() {
        let sizes = [64, 128, 256, 512, 4096].map(|mib| batch_of(mib * MIB));
        assert_eq!(sizes, [3, 7, 15, 31, 31]);
        assert_eq!(batch_of(16), 0);
    }

    #[test]
    fn watermarks_are_those_of_a_machine_with_248912_kib() {
        let marks = Watermarks::of(248_912 / 4);
        assert_eq!((marks.min, marks.low, marks.high), (498, 622, 747));
    }

    #[test]
    fn small_caches_have_marks_too() {
        for frames in 1..5000 {
            let m = Watermarks::of(frames);
            assert!(m.min < m.low && m.low < m.high && m.min <= frames / 8);
        }
    }
}
