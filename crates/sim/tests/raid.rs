//! Some seeds of the array's simulation. More: `cargo run --release -p pvblk-sim -- raid --seeds 100000`.

use pvblk_sim::raid::{Bug, Options, Report, run};
use std::time::{Duration, Instant};

const SEEDS: u64 = 400;
/// A slow machine runs fewer.
const LONGEST: Duration = Duration::from_secs(10);

fn base() -> u64 {
    let given = std::env::var("PVBLK_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    given.unwrap_or(2_000_000)
}

#[test]
fn nothing_is_lost_whenever_the_power_goes() {
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
    assert!(sum.cuts >= done && sum.lost > done && sum.losses >= done / 16);
}

#[test]
fn a_seed_is_all_there_is() {
    for seed in base()..base() + 10 {
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
        let failure = (0..1000).find_map(|seed| run(seed, &options).err());
        let failure = failure.unwrap_or_else(|| panic!("{name} isn't found"));
        println!("{name} is found at seed {}: {}", failure.seed, failure.what);
        assert!(!failure.what.starts_with("panic"), "{failure}");
        // The same seed without the bug is in order.
        run(failure.seed, &Options::default()).unwrap_or_else(|f| panic!("{f}"));
    }
}
