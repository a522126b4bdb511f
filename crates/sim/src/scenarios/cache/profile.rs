//! The differences between seeds. A seed explores one corner: few kinds of requests and of faults, but often.

use crate::pick;
use crate::workload::{Load, Mix};
use fastrand::Rng;
use pvblk_cache::{CacheConfig, Mode};
use std::time::Duration;

/// The properties of one seed.
#[derive(Clone, Debug)]
pub struct CacheProfile {
    /// Configuration of the cache.
    pub config: CacheConfig,
    /// Requests of the users.
    pub load: Load,
    /// A background thread of its own does the background work, instead of the users that poll.
    pub kept: bool,
    /// Number of power cycles.
    pub cycles: u32,
    /// Most steps of a cycle.
    pub steps: u64,
    /// The disk fails for a while.
    pub fails: bool,
    /// The cache is squeezed again and again.
    pub squeezes: bool,
    /// Shares of users, disk and background thread in the steps.
    pub pace: [u32; 3],
}

impl CacheProfile {
    /// The properties of a seed.
    pub fn new(rng: &mut Rng) -> CacheProfile {
        let frames = pick(rng, &[16, 16, 24, 33, 64, 128]);
        let mut config = CacheConfig::new(frames * 4096);
        config.mode = match rng.u8(..8) {
            0 => Mode::WriteThrough,
            _ => Mode::WriteBack,
        };
        // The cache had a choice of policies once. These draws keep all other choices of old seeds
        // as they were.
        for choices in [2, 4, 5] {
            rng.usize(..choices);
        }
        config.readahead_bytes = pick(rng, &[Some(0), Some(16384), Some(131_072), None]);
        config.lists = pick(rng, &[1, 2, 3]);
        let dirty = [(10, 20), (1, 10), (50, 90), (1, 99)];
        (config.dirty_background_percent, config.dirty_percent) = pick(rng, &dirty);
        config.dirty_expire = Duration::from_millis(pick(rng, &[10, 30_000]));
        config.max_io_bytes = pick(rng, &[4096, 32768, 1 << 20]);
        let users = pick(rng, &[1, 1, 2, 2, 3]);
        let sectors = pick(rng, &[64, 256, 512, 1003]);
        let kept = rng.bool();
        let depths = (0..users).map(|_| pick(rng, &[1, 2, 4, 8, 16]));
        let depths = depths.collect();
        let (cycles, steps) = (rng.u32(2..=5), pick(rng, &[100, 400, 1500]));
        let mix = Mix {
            reads: pick(rng, &[0, 1, 4]),
            writes: pick(rng, &[2, 8, 8]),
            flushes: pick(rng, &[0, 1, 1, 4]),
            fua: pick(rng, &[0, 0, 1, 4]),
            discards: 0,
            zeroes: pick(rng, &[0, 0, 1, 2]),
        };
        CacheProfile {
            config,
            kept,
            cycles,
            steps,
            load: Load {
                depths,
                sectors,
                mix,
                longest: pick(rng, &[1, 8, 24, 64, 128]),
                most: 128,
                batch: 3,
                hot: pick(rng, &[0, 8, 32, 128]),
                sequential: pick(rng, &[0, 0, 4, 7]),
                aligned: pick(rng, &[0, 4, 8]),
                changing: pick(rng, &[0, 0, 1, 4]),
                stable: false,
                blank: 0,
                eager: true,
                foreign: None,
            },
            fails: rng.u8(..4) == 0,
            pace: [1, 2, 3].map(|_| pick(rng, &[1, 3, 9])),
            // This draws from a copy, so that seeds from before there were squeezes keep their
            // other choices.
            squeezes: rng.clone().u8(..6) == 3,
        }
    }
}
