//! Orderly stops of disks in trouble.

mod support;

use pvblk_sim::stops::{Bug, Options, run};
use std::time::Duration;
use support::{base, campaign, found};

#[test]
fn every_disk_that_can_be_flushed_is_and_of_each_other_it_is_said() {
    let run = |seed| run(seed, &Options::default());
    let (sum, _) = campaign(base(1), 20_000, Duration::from_secs(10), run);
    assert!(sum.flushed > 0 && sum.failed > 0 && sum.stuck > 0);
}

#[test]
fn every_planted_bug_is_found() {
    for &(name, planted) in Bug::ALL {
        let options = Options {
            planted: Some(planted),
            ..Options::default()
        };
        let with = |seed| run(seed, &options);
        found(name, with, |seed| run(seed, &Options::default()));
    }
}
