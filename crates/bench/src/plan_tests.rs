use super::*;
use crate::{Amount, BlockSizes, sizes};
use pvblk_testing::seed;
use std::collections::HashSet;

fn random(mix: Mix) -> JobSpec {
    JobSpec {
        mix,
        random: true,
        ..JobSpec::new("t")
    }
}

fn plan(spec: &JobSpec, capacity: u64) -> Plan {
    Plan::new(spec, 0, seed(), capacity, &Limits::default()).unwrap()
}

fn all(mut p: Plan) -> Vec<Io> {
    std::iter::from_fn(|| p.next()).collect()
}

#[test]
fn a_random_job_covers_every_block_once_in_each_loop() {
    let spec = JobSpec {
        loops: 3,
        ..random(Mix::Both)
    };
    let ios = all(plan(&spec, 1000 * 4096));
    assert_eq!(ios.len(), 3000);
    for round in ios.chunks(1000) {
        let places: HashSet<u64> = round.iter().map(|io| io.offset).collect();
        assert_eq!(places.len(), 1000);
        assert!(
            round
                .iter()
                .all(|io| io.offset % 4096 == 0 && io.len == 4096)
        );
    }
    let reads = ios.iter().filter(|io| !io.write).count();
    assert!((1300..1700).contains(&reads), "{reads} of 3000 read");
}

#[test]
fn mixed_lengths_cover_every_unit_once() {
    let mut spec = random(Mix::Write);
    spec.sizes[1] = sizes::split("512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10").unwrap();
    let units = 20_000;
    let ios = all(plan(&spec, units * 512));
    let mut seen = vec![0u8; units as usize];
    for io in &ios {
        assert!(io.offset.is_multiple_of(512));
        for u in io.offset / 512..(io.offset + u64::from(io.len)) / 512 {
            seen[u as usize] += 1;
        }
    }
    assert!(seen.iter().all(|&n| n == 1));
}

#[test]
fn sequential_jobs_keep_a_place_for_each_direction_and_wrap() {
    let spec = JobSpec {
        mix: Mix::Both,
        loops: 4,
        offset: Amount::Bytes(8192),
        ..JobSpec::new("t")
    };
    let ios = all(plan(&spec, 8192 + 10 * 4096 + 512));
    assert_eq!(ios.len(), 40);
    for write in [false, true] {
        let places = ios
            .iter()
            .filter(|io| io.write == write)
            .map(|io| io.offset);
        assert!(
            places
                .enumerate()
                .all(|(i, at)| at == 8192 + i as u64 % 10 * 4096)
        );
    }
}

#[test]
fn without_a_map_blocks_repeat_but_stay_inside() {
    for distribution in [
        Distribution::Uniform,
        Distribution::Zipf(1.1),
        Distribution::Pareto(0.2),
    ] {
        let mut spec = JobSpec {
            random_map: false,
            distribution,
            loops: 2,
            ..random(Mix::Read)
        };
        spec.sizes[0] = BlockSizes::Range {
            min: 4096,
            max: 65536,
        };
        let capacity = 300 * 4096;
        let ios = all(plan(&spec, capacity));
        assert!(
            ios.iter()
                .all(|io| io.offset + u64::from(io.len) <= capacity)
        );
        assert!(ios.iter().all(|io| io.offset.is_multiple_of(4096)));
        let bytes: u64 = ios.iter().map(|io| u64::from(io.len)).sum();
        assert_eq!(bytes, 2 * capacity);
    }
}

#[test]
fn a_skewed_job_prefers_few_blocks() {
    let spec = JobSpec {
        distribution: Distribution::Pareto(0.2),
        number_ios: Some(20_000),
        loops: 100,
        ..random(Mix::Read)
    };
    let mut counts = vec![0u32; 1000];
    for io in all(plan(&spec, 1000 * 4096)) {
        counts[(io.offset / 4096) as usize] += 1;
    }
    counts.sort_unstable();
    let top: u32 = counts[800..].iter().sum();
    assert!((15_000..17_000).contains(&top), "{top} of 20000 on a fifth");
}

#[test]
fn limits_end_the_stream() {
    let mut spec = random(Mix::Read);
    spec.number_ios = Some(7);
    assert_eq!(all(plan(&spec, 1 << 20)).len(), 7);
    spec.number_ios = None;
    spec.io_size = Some(Amount::Percent(200));
    assert_eq!(all(plan(&spec, 1 << 20)).len(), 512);
    spec.io_size = None;
    spec.size = Some(Amount::Percent(50));
    assert_eq!(all(plan(&spec, 1 << 20)).len(), 128);
}

#[test]
fn what_does_not_fit_is_refused_in_one_line() {
    let refused = |spec: &JobSpec, limits: &Limits, want: &str| {
        let e = Plan::new(spec, 0, 1, 1 << 20, limits)
            .err()
            .unwrap()
            .to_string();
        assert!(e.contains(want) && !e.contains('\n'), "{e}");
    };
    let limits = Limits::default();
    let mut spec = random(Mix::Write);
    spec.size = Some(Amount::Bytes(2 << 20));
    refused(&spec, &limits, "does not fit");
    spec.size = Some(Amount::Bytes(512));
    refused(&spec, &limits, "less than one block");
    spec.size = None;
    let read_only = Limits {
        read_only: true,
        ..limits
    };
    refused(&spec, &read_only, "read-only");
    let short = Limits {
        max_sectors: 4,
        ..limits
    };
    refused(&spec, &short, "in one request");
    spec.sizes[1] = BlockSizes::Fixed(512);
    let coarse = Limits {
        logical_sector_bytes: 4096,
        ..limits
    };
    refused(&spec, &coarse, "multiples of that");
}

#[test]
fn the_same_seed_makes_the_same_stream() {
    let spec = random(Mix::Both);
    let seed = seed();
    let stream = |thread| {
        let seed = thread_seed(seed, thread);
        all(Plan::new(&spec, 0, seed, 1 << 20, &Limits::default()).unwrap())
    };
    assert_eq!(stream(0), stream(0));
    assert_ne!(stream(0), stream(1));
}
