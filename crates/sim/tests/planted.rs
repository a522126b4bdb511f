//! Bugs on purpose: each is found within a thousand seeds. `--features planted` adds those of the front end.

use pvblk_sim::{Options, Planted, run};

#[test]
fn every_planted_bug_is_found() {
    for &(name, planted) in Planted::ALL {
        let options = Options {
            planted: Some(planted),
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
