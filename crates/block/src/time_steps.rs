//! Buckets for distributions of times. Their width grows with the times, so that the relative error is the same everywhere:
//! an eighth, from 128 ns to 137 s.

/// Steps in each doubling of the time.
const STEPS: u64 = 8;
const STEPS_LOG2: u32 = STEPS.trailing_zeros();
/// Bucket 0 has all times below 2^7 ns (128 ns).
const FIRST: u32 = 7;
/// The last bucket has all times from 2^37 ns (137 s) on.
const LAST: u32 = 37;
/// Buckets: one below, the steps, one above.
pub const BUCKETS: usize = ((LAST - FIRST) as u64 * STEPS) as usize + 2;

/// The bucket of a time in nanoseconds.
#[inline]
pub fn bucket(ns: u64) -> usize {
    if ns < 1 << FIRST {
        return 0;
    }
    let doubling = ns.ilog2();
    if doubling >= LAST {
        return BUCKETS - 1;
    }
    let step = (ns >> (doubling - STEPS_LOG2)) & (STEPS - 1);
    ((doubling - FIRST) as u64 * STEPS + step) as usize + 1
}

/// The shortest time of a bucket, in nanoseconds: the first that is above those of the bucket before.
pub fn begin(bucket: usize) -> u64 {
    let Some(index) = (bucket as u64).checked_sub(1) else {
        return 0;
    };
    let doubling = FIRST + (index / STEPS) as u32;
    (STEPS + index % STEPS) << (doubling - STEPS_LOG2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_begins_where_the_one_before_ends() {
        for b in 1..BUCKETS {
            assert_eq!(bucket(begin(b)), b, "shortest time of {b}");
            assert_eq!(bucket(begin(b) - 1), b - 1, "longest time before {b}");
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BUCKETS - 1));
        assert_eq!(begin(BUCKETS - 1), 1 << LAST);
    }
}
