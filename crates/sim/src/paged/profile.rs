//! What differs from seed to seed. A seed explores one corner: few kinds of requests and of trouble, but often.

use crate::profile::pick;
use fastrand::Rng;
use pvblk_cache::{CacheConfig, Mode};
use std::time::Duration;

/// The mix of requests: shares, each relative to the sum.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Reads.
    pub reads: u32,
    /// Writes.
    pub writes: u32,
    /// Flushes.
    pub flushes: u32,
    /// FUA writes.
    pub fua: u32,
    /// Discards and write-zeroes.
    pub zeroes: u32,
}

/// What one seed is like.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The cache.
    pub config: CacheConfig,
    /// Sectors of the disk.
    pub sectors: u64,
    /// Background work is somebody's own, instead of whoever polls.
    pub kept: bool,
    /// Depth of each submitter, which has a queue of its own.
    pub depths: Vec<u32>,
    /// Power cycles.
    pub cycles: u32,
    /// Steps of a cycle, at most.
    pub steps: u64,
    /// Requests.
    pub mix: Mix,
    /// Longest request in sectors.
    pub longest: u64,
    /// Sectors on which requests concentrate; 0: none.
    pub hot: u64,
    /// Of 8 requests, so many follow the one before.
    pub sequential: u32,
    /// Of 8 requests, so many begin and end at pages.
    pub aligned: u32,
    /// Of 8 writes, so many change their data on the way.
    pub restless: u32,
    /// The disk fails for a while.
    pub fails: bool,
    /// Memory gets short again and again.
    pub squeezes: bool,
    /// Shares of submitters, disk and keeper in the steps.
    pub pace: [u32; 3],
}

impl Profile {
    /// The seed's.
    pub fn new(rng: &mut Rng) -> Profile {
        let frames = pick(rng, &[16, 16, 24, 33, 64, 128]);
        let mut config = CacheConfig::new(frames * 4096);
        config.mode = match rng.u8(..8) {
            0 => Mode::WriteThrough,
            _ => Mode::WriteBack,
        };
        config.readahead_bytes = Some(pick(rng, &[0, 16384, 131_072]));
        config.lists = pick(rng, &[1, 2, 3]);
        let dirty = [(10, 20), (1, 10), (50, 90), (1, 99)];
        (config.dirty_background_percent, config.dirty_percent) = pick(rng, &dirty);
        config.dirty_expire = Duration::from_millis(pick(rng, &[10, 30_000]));
        config.max_io_bytes = pick(rng, &[4096, 32768, 1 << 20]);
        let submitters = pick(rng, &[1, 1, 2, 2, 3]);
        Profile {
            config,
            sectors: pick(rng, &[64, 256, 512, 1003]),
            kept: rng.bool(),
            depths: (0..submitters)
                .map(|_| pick(rng, &[1, 2, 4, 8, 16]))
                .collect(),
            cycles: rng.u32(2..=5),
            steps: pick(rng, &[100, 400, 1500]),
            mix: Mix {
                reads: pick(rng, &[0, 1, 4]),
                writes: pick(rng, &[2, 8, 8]),
                flushes: pick(rng, &[0, 1, 1, 4]),
                fua: pick(rng, &[0, 0, 1, 4]),
                zeroes: pick(rng, &[0, 0, 1, 2]),
            },
            longest: pick(rng, &[1, 8, 24, 64, 128]),
            hot: pick(rng, &[0, 8, 32, 128]),
            sequential: pick(rng, &[0, 0, 4, 7]),
            aligned: pick(rng, &[0, 4, 8]),
            restless: pick(rng, &[0, 0, 1, 4]),
            fails: rng.u8(..4) == 0,
            pace: [1, 2, 3].map(|_| pick(rng, &[1, 3, 9])),
            // Of a copy: seeds that found something before there were squeezes stay what they were.
            squeezes: rng.clone().u8(..6) == 3,
        }
    }
}
