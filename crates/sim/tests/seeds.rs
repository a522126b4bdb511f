//! Some thousand seeds. More: `cargo run --release -p pvblk-sim -- --seeds 100000`.

use pvblk_sim::{Options, Report, run};
use std::time::{Duration, Instant};

const SEEDS: u64 = 6000;
/// A slow machine runs fewer.
const LONGEST: Duration = Duration::from_secs(20);

fn base() -> u64 {
    let given = std::env::var("PVBLK_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    given.unwrap_or(1_000_000)
}

#[test]
fn nothing_is_lost_whoever_dies() {
    let base = base();
    println!("replay with PVBLK_SEED={base}");
    let start = Instant::now();
    let (mut sum, mut done) = (Report::default(), 0);
    while done < SEEDS && start.elapsed() < LONGEST {
        match run(base.wrapping_add(done), &Options::default()) {
            Ok(report) => sum += report,
            Err(failure) => panic!("{failure}"),
        }
        done += 1;
    }
    println!("{done} seeds in {:?}: {sum:?}", start.elapsed());
    assert!(sum.kills >= done / 4 && sum.losses > 0 && sum.reconnects >= done / 4);
}

#[test]
fn a_seed_is_all_there_is() {
    for seed in base()..base() + 20 {
        let again = || run(seed, &Options::default()).map_err(|f| f.to_string());
        assert_eq!(again(), again());
    }
}
