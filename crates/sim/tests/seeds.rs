//! Some thousand seeds. More: `cargo run --release -p pvblk-sim -- --seeds 100000`.

mod support;

use pvblk_sim::{Options, run};
use std::time::Duration;
use support::{base, campaign};

const SEEDS: u64 = 6000;
/// A slow machine runs fewer.
const LONGEST: Duration = Duration::from_secs(20);
const FIRST: u64 = 1_000_000;

#[test]
fn nothing_is_lost_whoever_dies() {
    let run = |seed| run(seed, &Options::default());
    let (sum, done) = campaign(base(FIRST), SEEDS, LONGEST, run);
    assert!(sum.kills >= done / 4 && sum.losses > 0 && sum.reconnects >= done / 4);
}

#[test]
fn a_seed_is_all_there_is() {
    for seed in base(FIRST)..base(FIRST) + 20 {
        let again = || run(seed, &Options::default()).map_err(|f| f.to_string());
        assert_eq!(again(), again());
    }
}
