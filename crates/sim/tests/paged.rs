//! Some seeds of the page cache's simulation. More: `cargo run --release -p pvblk-sim -- cache --seeds 100000`.

mod support;

use pvblk_sim::paged::{Bug, Options, run};
use std::time::Duration;
use support::{base, campaign, found};

const SEEDS: u64 = 400;
/// A slow machine runs fewer.
const LONGEST: Duration = Duration::from_secs(10);
const FIRST: u64 = 3_000_000;

#[test]
fn nothing_flushed_is_lost_whenever_the_power_goes() {
    let run = |seed| run(seed, &Options::default());
    let (sum, done) = campaign(base(FIRST), SEEDS, LONGEST, run);
    assert!(sum.cuts >= done && sum.dirty > done && sum.failures > done / 16);
    assert!(sum.given_back > done);
    assert!(sum.reclaimed > done && sum.ahead > done && sum.stalls > 0 && sum.throttled > 0);
}

/// Seeds that found something: a failed write-zeroes that took dirty pages along; wake-ups taken by who shares a descriptor (twice); a write that
/// failed in the middle and was forgotten; writers that waited for what nobody wrote; a frame reclaimed by one of those who waited for its page.
#[test]
fn what_was_found_stays_mended() {
    for seed in [328, 648, 15_425, 1709, 1915, 101_081] {
        if let Err(failure) = run(seed, &Options::default()) {
            panic!("{failure}");
        }
    }
}

#[test]
fn a_seed_is_all_there_is() {
    for seed in base(FIRST)..base(FIRST) + 10 {
        let again = || run(seed, &Options::default()).map_err(|f| f.to_string());
        assert_eq!(again(), again());
    }
}

/// `--features planted` adds those of the cache itself.
#[test]
fn every_planted_bug_is_found() {
    for &(name, bug) in Bug::ALL {
        let options = Options {
            planted: Some(bug),
            ..Options::default()
        };
        let with = |seed| run(seed, &options);
        found(name, with, |seed| run(seed, &Options::default()));
    }
}
