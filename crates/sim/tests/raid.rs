//! Some seeds of the array's simulation. More: `cargo run --release -p pvblk-sim -- raid --seeds 100000`.

mod support;

use pvblk_sim::raid::{Bug, Options, run};
use std::time::Duration;
use support::{base, campaign, found};

const SEEDS: u64 = 400;
/// A slow machine runs fewer.
const LONGEST: Duration = Duration::from_secs(10);
const FIRST: u64 = 2_000_000;

#[test]
fn nothing_is_lost_whenever_the_power_goes() {
    let run = |seed| run(seed, &Options::default());
    let (sum, done) = campaign(base(FIRST), SEEDS, LONGEST, run);
    assert!(sum.given_back > done);
    assert!(sum.cuts >= done && sum.lost > done && sum.losses >= done / 16);
}

#[test]
fn a_seed_is_all_there_is() {
    for seed in base(FIRST)..base(FIRST) + 10 {
        let again = || run(seed, &Options::default()).map_err(|f| f.to_string());
        assert_eq!(again(), again());
    }
}

/// `--features planted` adds those of the array itself.
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
