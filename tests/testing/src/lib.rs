//! Seeds, waiting and certificates, for the tests of every crate.

pub mod certs;

use std::time::{Duration, Instant};

/// The longest that [`wait`] waits.
const HANG: Duration = Duration::from_secs(60);

/// `PVBLK_SEED`, or a random seed; prints it, so that a run can be repeated.
pub fn seed() -> u64 {
    seed_or(fastrand::u64(..))
}

/// `PVBLK_SEED`, or `usual`; prints it, so that a run can be repeated.
pub fn seed_or(usual: u64) -> u64 {
    let seed = given_seed().unwrap_or(usual);
    println!("replay with PVBLK_SEED={seed}");
    seed
}

/// `count` seeds in a row, from `PVBLK_SEED` or from a random one on. Without `PVBLK_SEED` the first seed of all is `usual`.
pub fn seeds(usual: u64, count: u64) -> impl Iterator<Item = u64> {
    let fixed = given_seed().is_none().then_some(usual);
    let first = seed();
    let row = (0..count).map(move |n| first.wrapping_add(n));
    fixed.into_iter().chain(row).take(count as usize)
}

/// `PVBLK_SEED`, which must be a whole number if it is set.
pub fn given_seed() -> Option<u64> {
    let text = std::env::var("PVBLK_SEED").ok()?;
    Some(number(&text))
}

fn number(text: &str) -> u64 {
    let seed = text.parse();
    seed.unwrap_or_else(|_| panic!("PVBLK_SEED is {text:?}; set it to a whole number"))
}

/// A generator that starts at [`seed`].
pub fn random() -> fastrand::Rng {
    fastrand::Rng::with_seed(seed())
}

/// Waits until `f` is true. The limit of a minute is only a guard against a hang.
#[track_caller]
pub fn wait(what: &str, mut f: impl FnMut() -> bool) {
    let begin = Instant::now();
    // Most waits are short.
    let mut turns = 1000;
    while !f() {
        assert!(begin.elapsed() < HANG, "never happened: {what}");
        if turns > 0 {
            turns -= 1;
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_its_event() {
        let mut asked = 0;
        wait("the 1010th question", || {
            asked += 1;
            asked == 1010
        });
        assert_eq!(asked, 1010);
    }

    #[test]
    fn a_seed_is_a_whole_number() {
        assert_eq!(number("18446744073709551615"), u64::MAX);
        for wrong in ["", "-1", "1.5", "0x10", "seven"] {
            assert!(std::panic::catch_unwind(|| number(wrong)).is_err());
        }
    }
}
