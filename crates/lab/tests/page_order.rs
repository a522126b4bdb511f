//! Cells of the page-order experiment that once failed, in virtual time, so the figures are the same
//! everywhere.

use pvblk_lab::page_order::disks::ServiceCost;
use pvblk_lab::page_order::policy::{ActiveShare, Policy, WaitPolicy};
use pvblk_lab::page_order::{PageOrderCell, load};

/// 64 processes read at random through 264 pages. The second parts of requests once waited behind the first
/// parts at disks that do one request at a time, and kept pages from disks that had nothing to do: the rate
/// was a third less than with waits for whole requests.
#[test]
fn many_random_readers_get_the_most_out_of_few_pages() {
    let rate = |policy| {
        let cell = PageOrderCell {
            processes: 64,
            random: true,
            policy: Some(policy),
            pages: 264,
            active_pages: 132,
        };
        load::run(&cell, 0.1, false, ServiceCost::PLAIN)
            .unwrap()
            .kib_per_second
    };
    let congested = Policy {
        wait: WaitPolicy::IfCongested,
        active: ActiveShare::Percent(0),
        ..Policy::DEFAULT
    };
    let (by_default, other) = (rate(Policy::DEFAULT), rate(congested));
    assert!(by_default > other, "{by_default} and {other}");
}

/// The table's other rows are made by the lab's own policy type: with the default decisions it has to give
/// the figures of the cache that is served.
#[test]
fn the_default_decisions_are_the_served_caches() {
    for random in [false, true] {
        let cell = PageOrderCell {
            processes: 12,
            random,
            policy: Some(Policy::DEFAULT),
            pages: if random { 264 } else { 720 },
            active_pages: if random { 132 } else { 360 },
        };
        let served = load::run(&cell, 0.1, false, ServiceCost::PLAIN).unwrap();
        let lab = load::run_with(cell.policy, &cell, 0.1, false, ServiceCost::PLAIN).unwrap();
        assert_eq!(served.kib_per_second, lab.kib_per_second);
        assert_eq!(served.counters.all(), lab.counters.all());
        assert!(served.counters.pgscan_kswapd + served.counters.pgscan_direct > 0);
    }
}
