//! Some seeds of squeezed pools. More: `cargo run --release -p pvblk-sim -- squeeze --seeds 100000`.

mod support;

use pvblk_sim::squeezed::{Bug, Options, run};
use std::time::Duration;
use support::{base, campaign, found};

const SEEDS: u64 = 300;
/// A slow machine runs fewer.
const LONGEST: Duration = Duration::from_secs(10);
const FIRST: u64 = 4_000_000;

#[test]
fn no_page_in_flight_is_taken_whenever_a_squeeze_comes() {
    let run = |seed| run(seed, &Options::default());
    let (sum, done) = campaign(base(FIRST), SEEDS, LONGEST, run);
    assert!(sum.requests > 10 * done && sum.squeezes > done && sum.squeezed_pages > done);
    assert!(sum.broken > 0 && sum.stalls > 0);
}

#[test]
fn a_seed_is_all_there_is() {
    for seed in base(FIRST)..base(FIRST) + 10 {
        let again = || run(seed, &Options::default()).map_err(|f| f.to_string());
        assert_eq!(again(), again());
    }
}

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
