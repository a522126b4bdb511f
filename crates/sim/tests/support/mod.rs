//! What the tests of both simulations do alike.
#![allow(dead_code)] // No test uses all of it.

use pvblk_sim::Failure;
use std::fmt::Debug;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

/// How a seed ended.
pub type Outcome<R> = Result<R, Box<Failure>>;

/// The first seed: `PVBLK_SEED`, or `usual`.
pub fn base(usual: u64) -> u64 {
    let given = std::env::var("PVBLK_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    given.unwrap_or(usual)
}

/// Runs `seeds` seeds from `base` on, a quarter at least if they take longer than `longest`; fails with the first that does.
/// Returns the sum of the reports, and how many seeds it was.
pub fn campaign<R: AddAssign + Default + Debug>(
    base: u64,
    seeds: u64,
    longest: Duration,
    run: impl Fn(u64) -> Outcome<R>,
) -> (R, u64) {
    println!("replay with PVBLK_SEED={base}");
    let start = Instant::now();
    let (mut sum, mut done) = (R::default(), 0);
    while done < seeds && (done < seeds / 4 || start.elapsed() < longest) {
        match run(base.wrapping_add(done)) {
            Ok(report) => sum += report,
            Err(failure) => panic!("{failure}"),
        }
        done += 1;
    }
    println!("{done} seeds in {:?}: {sum:?}", start.elapsed());
    (sum, done)
}

/// A bug is found within a thousand seeds, and not by a panic; the seed that finds it is in order without the bug.
pub fn found<R>(name: &str, with: impl Fn(u64) -> Outcome<R>, without: impl Fn(u64) -> Outcome<R>) {
    let failure = (0..1000).find_map(|seed| with(seed).err());
    let failure = failure.unwrap_or_else(|| panic!("{name} isn't found"));
    println!("{name} is found at seed {}: {}", failure.seed, failure.what);
    assert!(!failure.what.starts_with("panic"), "{failure}");
    if let Err(failure) = without(failure.seed) {
        panic!("{failure}");
    }
}
