//! Bugs on purpose: each is found within a thousand seeds. `--features planted` adds those of the front end.

mod support;

use pvblk_sim::{Options, Planted, run};
use support::found;

#[test]
fn every_planted_bug_is_found() {
    for &(name, planted) in Planted::ALL {
        let options = Options {
            planted: Some(planted),
            ..Options::default()
        };
        let with = |seed| run(seed, &options);
        found(name, with, |seed| run(seed, &Options::default()));
    }
}
