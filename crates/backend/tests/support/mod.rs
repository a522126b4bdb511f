//! Parts that the tests of this folder share; each uses some.
#![allow(dead_code)]

pub mod device;
pub mod log;
pub mod peer;
pub mod source;

use std::time::{Duration, Instant};

/// `PVBLK_SEED`, or a random one; printed, so that a run can be repeated.
pub fn rng() -> fastrand::Rng {
    let seed = std::env::var("PVBLK_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..));
    println!("replay with PVBLK_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// Waits until `f` is true. The time is only a guard against a hang.
#[track_caller]
pub fn wait(what: &str, mut f: impl FnMut() -> bool) {
    let start = Instant::now();
    while !f() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "never happened: {what}"
        );
        std::thread::yield_now();
    }
}
