//! Queues, devices that fail and power cuts in random order: acknowledged writes stay, and every request ends.

use super::world::{Ways, World};
use pvblk_testing::seeds;

#[test]
fn acknowledged_writes_stay_and_every_request_ends() {
    let mut ways = Ways::default();
    for seed in seeds(48, 1500) {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.ways = ways;
        world.run(40);
        ways = world.ways;
    }
    println!("{ways:?}");
    if pvblk_testing::given_seed().is_none() {
        assert!(ways.least() > 25 && ways.runs_again > 0, "{ways:?}");
    }
}
