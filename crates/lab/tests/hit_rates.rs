//! Hit rates of the cache that is served, in virtual time, so the figures are the same everywhere.

use pvblk_lab::hit_rates::{HitRateOptions, run};

#[test]
fn the_served_cache_is_near_the_best_policy_for_each_shape() {
    let options = HitRateOptions {
        pages: 4096,
        threads: 2,
        seed: 1,
    };
    let checks = run(&options, &|_| {}).unwrap().checks();
    assert_eq!(checks.len(), 11);
    for check in checks {
        assert!(check.holds, "{}: {}", check.expected, check.figure);
    }
}
