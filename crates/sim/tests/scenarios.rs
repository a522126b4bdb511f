//! Some seeds of each scenario, and every planted bug. More seeds: `cargo run --release -p pvblk-sim -- raid --seeds 100000`.
//! `--features planted` adds the bugs of arrays, page caches and front ends themselves.

use pvblk_sim::{Counts, Options, SCENARIOS, Scenario, campaign};
use std::time::{Duration, Instant};

/// Seeds within which each planted bug has to be found.
const BOUND: u64 = 1000;

/// Bugs whose search takes long, each with a seed that finds it. It is tried first: these four took nine tenths of the time of all.
const LATE: [(&str, u64); 4] = [
    ("array-sums-not-swept", 263),
    ("array-late-read-lands", 265),
    ("array-missed-not-marked", 189),
    ("array-kick-not-flushed", 124),
];

fn scenario(name: &str) -> &'static Scenario {
    Scenario::named(name).expect("a scenario")
}

/// Runs `seeds` seeds from `PVBLK_SEED`, or `first`, on, but at least a quarter if they take longer than `longest`, as on a
/// slow machine; fails with the first seed that fails. Returns the counts, and the number of seeds. Under AddressSanitizer
/// it takes a quarter of `longest`, since `make asan` runs thousands of seeds there.
fn many(name: &str, first: u64, seeds: u64, longest: Duration) -> (Counts, u64) {
    let (start, first) = (Instant::now(), pvblk_testing::seed_or(first));
    let longest = if cfg!(pvblk_asan) {
        longest / 4
    } else {
        longest
    };
    let goes_on = |done| done < seeds / 4 || start.elapsed() < longest;
    let options = Options::default();
    let (sum, failure) = campaign::run(scenario(name), &options, first, seeds, goes_on);
    if let Some(failure) = failure {
        panic!("{name}: {failure}");
    }
    println!("{name}: {sum}");
    (sum.counts, sum.seeds)
}

/// Checks that every kind of event happened more often than given.
fn happened(counts: &Counts, least: &[(&str, u64)]) {
    for &(kind, least) in least {
        let n = counts.get(kind);
        assert!(n > least, "{n} {kind}, of more than {least}: {counts}");
    }
}

/// Checks that each bug is found within the bound, and not by a panic, and that the seed that finds it passes
/// without the bug.
fn every_bug_of(name: &str) {
    let scenario = scenario(name);
    for bug in (scenario.bugs)() {
        let options = Options {
            bug: Some(bug),
            ..Options::default()
        };
        let late = LATE.iter().find(|(name, _)| *name == bug.name());
        let mut failure = None;
        if let Some(&(name, seed)) = late {
            failure = campaign::find(scenario, &options, seed..seed + 1);
            if failure.is_none() {
                println!("{name} isn't found at seed {seed} any more");
            }
        }
        let failure = failure.or_else(|| campaign::find(scenario, &options, 0..BOUND));
        let failure = failure.unwrap_or_else(|| panic!("{} isn't found", bug.name()));
        let (seed, what) = (failure.seed, &failure.what);
        println!("{} is found at seed {seed}: {what}", bug.name());
        assert!(!what.starts_with("panic"), "{}: {failure}", bug.name());
        if let Err(failure) = scenario.run(seed, &Options::default()) {
            panic!("without {}: {failure}", bug.name());
        }
    }
}

#[test]
fn rings_nothing_is_lost_whoever_dies() {
    let (counts, done) = many("rings", 1_000_000, 6000, Duration::from_secs(20));
    let least = [
        ("kills", done / 4),
        ("kills in the middle of a call", done / 8),
        ("lost caches", done / 8),
        ("reconnects", done / 4),
        ("servers refused", 0),
        ("orderly ends", 0),
        ("broken rings", 0),
        ("merged while they waited", done / 8),
    ];
    happened(&counts, &least);
}

#[test]
fn raid_nothing_is_lost_whenever_the_power_goes() {
    let (counts, done) = many("raid", 2_000_000, 400, Duration::from_secs(10));
    let least = [
        ("cuts", done),
        ("sectors in caches at cuts", done),
        ("members failed", done / 16),
        ("rebuilt", 0),
        ("sectors unknown", 0),
        ("pages given back", done),
        ("returned by the bitmap", 0),
    ];
    happened(&counts, &least);
}

/// Seeds that found bugs: superblocks whose writing is tried again ran ahead of a second member that failed, so that the array didn't start; a
/// log was made empty while an earlier try of that was still at the device. The fourth one's bug was the scenario's, which took a spare for
/// a device that was replaced. Then a queue that had stopped words claimed one for a run and left it, without end.
#[test]
fn raid_bugs_that_were_found_stay_fixed() {
    for seed in [169, 1068, 5_000_774, 70_009_195, 70_200_800] {
        if let Err(failure) = scenario("raid").run(seed, &Options::default()) {
            panic!("{failure}");
        }
    }
}

#[test]
fn cache_nothing_flushed_is_lost_whenever_the_power_goes() {
    let (counts, done) = many("cache", 3_000_000, 400, Duration::from_secs(10));
    let least = [
        ("cuts", done),
        ("sectors in the disk's cache at cuts", done),
        ("pages dirty at cuts", done),
        ("disk failures", done / 16),
        ("pages given back", done),
        ("pages reclaimed", done),
        ("pages read ahead", done),
        ("stalls", 0),
        ("throttled writers", 0),
    ];
    happened(&counts, &least);
}

/// Seeds that found bugs: a failed write-zeroes that dropped dirty pages; wake-ups taken by another thread
/// with the same descriptor (twice); a write that failed in the middle and was forgotten; writers that waited
/// for a write that never came; a frame reclaimed by one of the threads that waited for its page; a copy of data
/// that a failed write-through write left in the page's newer frame.
#[test]
fn cache_bugs_that_were_found_stay_fixed() {
    for seed in [328, 648, 15_425, 1709, 1915, 101_081, 50_491] {
        if let Err(failure) = scenario("cache").run(seed, &Options::default()) {
            panic!("{failure}");
        }
    }
}

#[test]
fn squeeze_no_page_in_flight_is_taken() {
    let (counts, done) = many("squeeze", 4_000_000, 300, Duration::from_secs(10));
    let least = [
        ("requests", 10 * done),
        ("squeezes", done),
        ("pages squeezed", done),
        ("broken connections", 0),
        ("stalls", 0),
    ];
    happened(&counts, &least);
}

#[test]
fn stop_every_disk_that_can_be_flushed_is_and_of_each_other_it_is_said() {
    let (counts, _) = many("stop", 1, 20_000, Duration::from_secs(10));
    happened(&counts, &[("flushed", 0), ("failed", 0), ("given up", 0)]);
}

#[test]
fn a_seed_is_all_there_is() {
    let first = pvblk_testing::seed_or(5_000_000);
    for scenario in SCENARIOS {
        for seed in first..first + 10 {
            let again = || scenario.run(seed, &Options::default());
            let (one, other) = (again(), again());
            assert!(one == other, "{}: {one:?} {other:?}", scenario.name);
        }
    }
}

#[test]
fn rings_every_planted_bug_is_found() {
    every_bug_of("rings");
}

#[test]
fn raid_every_planted_bug_is_found() {
    every_bug_of("raid");
}

#[test]
fn cache_every_planted_bug_is_found() {
    every_bug_of("cache");
}

#[test]
fn squeeze_every_planted_bug_is_found() {
    every_bug_of("squeeze");
}

#[test]
fn stop_every_planted_bug_is_found() {
    every_bug_of("stop");
}

/// The command line takes these names.
#[test]
fn no_two_bugs_of_a_scenario_have_one_name() {
    for scenario in SCENARIOS {
        let mut names: Vec<_> = (scenario.bugs)().iter().map(|b| b.name()).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert!(all == names.len() && all > 0, "{}", scenario.name);
    }
}

#[cfg(feature = "planted")]
#[test]
fn late_bugs_are_bugs() {
    let bugs = SCENARIOS.iter().flat_map(|scenario| (scenario.bugs)());
    let names: Vec<_> = bugs.map(|bug| bug.name()).collect();
    for (name, _) in LATE {
        assert!(names.contains(&name), "{name}");
    }
}
