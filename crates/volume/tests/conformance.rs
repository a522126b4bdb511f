//! One suite for every volume and decorator that stores data.

mod common;

use common::*;
use pvblk_block::{
    BlockDevice, Buffer, ExtentKind, Op, Region, Request, RequestFlags, SECTOR, Status,
};
use pvblk_volume::{FileSpec, FileVolume};
use std::path::Path;
use std::sync::Arc;

/// Capacity of each device: not a power of two, so that its end is an edge of its own.
const BYTES: u64 = 3 * 1024 * 1024 + 12 * 1024;

/// Specs; `@` stands for a fresh file of its own.
const SPECS: [&str; 20] = [
    "mem:3084k",
    "mem:3084k,sector=4096",
    "file:@,size=3084k,engine=sync",
    "file:@,size=3084k,engine=uring",
    "file:@,size=3084k,engine=uring,sector=4096",
    "file:@,direct,size=3084k,engine=uring",
    "file:@,direct,size=3084k,engine=sync",
    "file:@,direct,size=3084k,engine=uring,sector=4096",
    "delay:20us,iops=500k,bw=8G,channels=3:mem:3084k",
    "delay:10us,serial:file:@,size=3084k,engine=uring",
    "fault:seed=7,stall=0.02/1ms:mem:3084k",
    "fault:seed=8,stall=0.02/100us:delay:5us:file:@,size=3084k,engine=uring",
    "delay:5us:fault:seed=9,error=0:mem:3084k,sector=4096",
    "cache:64k:mem:3084k",
    "cache:512k:mem:3084k,sector=4096",
    "cache:8M:file:@,size=3084k,engine=uring",
    "cache:256k,mode=write-through:file:@,size=3084k,engine=uring",
    "cache:256k:delay:20us:file:@,size=3084k,engine=uring",
    "cache:128k,wait-time=1ms,readahead=64k:delay:20us,channels=2:mem:3084k",
    "cache:128k:fault:seed=7,stall=0.02/1ms:mem:3084k",
];

fn for_each_device(mut test: impl FnMut(&str, &Arc<dyn BlockDevice>)) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut tried = 0;
    for (i, spec) in SPECS.into_iter().enumerate() {
        let path = folder.path().join(format!("disk {i}:a,b.img"));
        let spec = spec.replace('@', path.to_str().expect("a path"));
        match pvblk_volume::open(&spec) {
            Ok(device) => test(&spec, &device),
            // Not every filesystem, nor each one with 512-byte sectors, can do O_DIRECT.
            Err(e) if spec.contains("direct") => println!("skipped: {e}"),
            Err(e) => panic!("{spec}: {e}"),
        }
        tried += 1;
    }
    let path = folder.path().join("backlog");
    let device = backlogged(&path, 2);
    test("file with a ring of 2 entries", &device);
    if Path::new("/dev/shm").is_dir() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let spec = format!("{}/disk,size=3084k", folder.path().display());
        test(&spec, &pvblk_volume::open(&spec).expect("a volume"));
        // Write-zeroes that keeps the space falls back to writing zeros here.
        let spec = format!("{}/disk2,size=3084k,engine=uring", folder.path().display());
        test(&spec, &pvblk_volume::open(&spec).expect("a volume"));
    }
    assert_eq!(tried, SPECS.len());
}

fn backlogged(path: &Path, entries: u32) -> Arc<dyn BlockDevice> {
    let spec = FileSpec {
        engine: Some(pvblk_volume::Engine::Uring),
        size_bytes: Some(BYTES),
        ..FileSpec::new(path)
    };
    let volume = FileVolume::open(&spec).expect("a volume");
    Arc::new(volume.with_ring_entries(entries))
}

#[test]
fn every_op_at_every_edge() {
    let mut rng = pvblk_testing::random();
    for_each_device(|name, device| {
        let mut q = queue(device, 8);
        let unit = q.limits().sectors_per_block();
        let capacity = device.capacity_sectors();
        assert_eq!(capacity, BYTES / SECTOR, "{name}");
        let mut oracle = Oracle::new(0, capacity);
        oracle.check(0, &read(&mut q, 0, capacity), name);
        let edges = [
            0,
            unit,
            8 - unit,
            8,
            capacity / 16 * 8,
            capacity - 24,
            capacity - unit,
        ];
        for start in edges {
            for sectors in [unit, 3 * unit, 16, 24 - unit] {
                if start + sectors > capacity {
                    continue;
                }
                let data = random_bytes(&mut rng, (sectors * SECTOR) as usize);
                assert_eq!(write(&mut q, start, &data), Status::Ok);
                oracle.store(start, &data);
                oracle.check(start, &read(&mut q, start, sectors), name);
                for flags in [
                    RequestFlags::empty(),
                    RequestFlags::NO_UNMAP,
                    RequestFlags::FUA,
                ] {
                    let status = plain(&mut q, Op::WriteZeroes, flags, start, unit);
                    assert_eq!(status, Status::Ok, "{name} {flags:?}");
                    oracle.store(start, &vec![0; (unit * SECTOR) as usize]);
                    oracle.check(start, &read(&mut q, start, sectors), name);
                }
                if q.limits().discard_granularity_bytes > 0 {
                    let end = start + sectors - unit;
                    let status = plain(&mut q, Op::Discard, RequestFlags::empty(), end, unit);
                    assert_eq!(status, Status::Ok, "{name}");
                    oracle.mark(end, unit, false);
                }
                assert_eq!(
                    plain(&mut q, Op::Flush, RequestFlags::empty(), 0, 0),
                    Status::Ok
                );
            }
        }
        oracle.check(0, &read(&mut q, 0, capacity), name);
        let status = plain(&mut q, Op::WriteZeroes, RequestFlags::empty(), 0, capacity);
        assert_eq!(status, Status::Ok);
        let all = read(&mut q, 0, capacity);
        assert!(all.iter().all(|&b| b == 0), "{name}: not all zeros");
    });
}

#[test]
fn outside_and_unaligned_is_invalid() {
    for_each_device(|name, device| {
        let mut q = queue(device, 8);
        let (unit, capacity) = (q.limits().sectors_per_block(), device.capacity_sectors());
        let data = vec![7; (unit * 2 * SECTOR) as usize];
        assert_eq!(
            write(&mut q, capacity - unit, &data),
            Status::Invalid,
            "{name}"
        );
        assert_eq!(
            write(&mut q, u64::MAX - 1, &data),
            Status::Invalid,
            "{name}"
        );
        for op in [Op::Discard, Op::WriteZeroes] {
            let none = RequestFlags::empty();
            assert_eq!(
                plain(&mut q, op, none, capacity, unit),
                Status::Invalid,
                "{name}"
            );
            assert_eq!(plain(&mut q, op, none, 0, 0), Status::Invalid, "{name}");
        }
        if unit > 1 {
            assert_eq!(write(&mut q, 1, &data), Status::Invalid, "{name}");
            assert_eq!(write(&mut q, 0, &data[..512]), Status::Invalid, "{name}");
        }
        assert!(
            read(&mut q, capacity - unit, unit).iter().all(|&b| b == 0),
            "{name}"
        );
    });
}

#[test]
fn random_requests_against_an_oracle() {
    let seed = pvblk_testing::seed();
    for_each_device(|name, device| {
        println!("{name}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut q = queue(device, 16);
        let mut oracle = Oracle::new(0, device.capacity_sectors());
        random_ops(&mut q, &mut oracle, &mut rng, 1500, 16);
        assert_eq!(q.in_flight(), 0);
        let all = read(&mut q, 0, oracle.sectors());
        oracle.check(0, &all, name);
        // Another queue sees the same.
        let all = read(&mut queue(device, 1), 0, oracle.sectors());
        oracle.check(0, &all, name);
    });
}

#[test]
fn two_queues_at_once() {
    let seed = pvblk_testing::seed();
    for_each_device(|name, device| {
        let half = device.capacity_sectors() / 16 * 8;
        let halves: Vec<Oracle> = std::thread::scope(|s| {
            let run = |base: u64| {
                s.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed ^ base);
                    let mut q = queue(device, 8);
                    let mut oracle = Oracle::new(base, half);
                    random_ops(&mut q, &mut oracle, &mut rng, 400, 8);
                    oracle
                })
            };
            let threads = [run(0), run(half)];
            threads.map(|t| t.join().expect("a queue's thread")).into()
        });
        let mut q = queue(device, 1);
        for oracle in halves {
            let all = read(&mut q, oracle.base, oracle.sectors());
            oracle.check(oracle.base, &all, name);
        }
    });
}

#[test]
fn many_segments_of_one_large_request() {
    let mut rng = pvblk_testing::random();
    for_each_device(|name, device| {
        let mut q = queue(device, 2);
        let segments = 1024.min(q.limits().max_segments as usize);
        let region = Arc::new(Region::anonymous(segments * 2048).expect("memory"));
        // Pieces of 1024 bytes at odd multiples of 512, last one first.
        let pieces = |n: usize| -> Vec<Buffer> {
            let at = |i: usize| Buffer::new(&region, i * 2048 + 512, 1024).expect("inside");
            (0..n).rev().map(at).collect()
        };
        let data = random_bytes(&mut rng, segments * 1024);
        let sector = 8;
        fill(&pieces(segments), &data);
        let request = Request::with_buffers(Op::Write, sector, pieces(segments), 1);
        assert_eq!(run(&mut q, request).status, Status::Ok, "{name}");
        assert!(read(&mut q, sector, segments as u64 * 2) == data, "{name}");
        fill(&pieces(segments), &vec![0; data.len()]);
        let request = Request::with_buffers(Op::Read, sector, pieces(segments), 1);
        let done = run(&mut q, request);
        assert_eq!(done.status, Status::Ok, "{name}");
        assert!(gather(&done.request.buffers) == data, "{name}");
        assert_eq!(done.request.buffers.len(), segments);
    });
}

#[test]
fn extents_cover_everything_and_holes_are_zeros() {
    for_each_device(|name, device| {
        let mut q = queue(device, 2);
        let capacity = device.capacity_sectors();
        assert_eq!(write(&mut q, 1024, &vec![5; 65536]), Status::Ok);
        assert_eq!(
            plain(&mut q, Op::Flush, RequestFlags::empty(), 0, 0),
            Status::Ok
        );
        for (sector, sectors) in [(0, capacity), (1032, 8), (1, 3), (capacity - 1, 1)] {
            let mut extents = Vec::new();
            device
                .extents(sector, sectors, &mut extents)
                .expect("extents");
            let mut at = sector;
            for extent in extents {
                assert_eq!(extent.sector, at, "{name}");
                assert!(extent.sectors > 0, "{name}");
                let written = extent.sector < 1024 + 128 && at + extent.sectors > 1024;
                assert!(
                    !written || extent.kind == ExtentKind::Data,
                    "{name}: lost data"
                );
                at += extent.sectors;
            }
            assert_eq!(at, sector + sectors, "{name}");
        }
    });
}

#[test]
fn memory_gives_discarded_pages_back() {
    let device = pvblk_volume::open("mem:4M").expect("a volume");
    let mut q = queue(&device, 2);
    assert_eq!(write(&mut q, 0, &vec![1; 4 << 20]), Status::Ok);
    let none = RequestFlags::empty();
    assert_eq!(plain(&mut q, Op::Discard, none, 1, 4096), Status::Ok);
    let mut extents = Vec::new();
    device.extents(0, 8192, &mut extents).expect("extents");
    let hole = extents
        .iter()
        .find(|e| e.kind == ExtentKind::Hole)
        .expect("a hole");
    assert_eq!((hole.sector, hole.sectors), (8, 4088));
    assert_eq!(read(&mut q, 0, 1), vec![1; 512]);
    assert_eq!(
        plain(&mut q, Op::Discard, RequestFlags::SECURE, 4100, 2),
        Status::Ok
    );
    assert_eq!(read(&mut q, 4100, 2), vec![0; 1024]);
    assert_eq!(read(&mut q, 4102, 1), vec![1; 512]);
    let bill = pvblk_block::memory::bill();
    let line = bill
        .iter()
        .find(|l| l.owner == "mem:4M")
        .expect("on the bill");
    assert_eq!((line.live_bytes, line.cap_bytes), (4 << 20, 4 << 20));
}

#[test]
fn null_reads_zeros_unless_told_not_to() {
    let mut q = queue(&pvblk_volume::open("null:1M").expect("a volume"), 4);
    assert_eq!(write(&mut q, 0, &[9; 4096]), Status::Ok);
    assert_eq!(read(&mut q, 2040, 8), vec![0; 4096]);
    assert_eq!(write(&mut q, 2041, &[9; 4096]), Status::Invalid);
    for op in [Op::Discard, Op::WriteZeroes] {
        assert_eq!(
            plain(&mut q, op, RequestFlags::empty(), 0, 2048),
            Status::Ok
        );
    }
    let mut q = queue(&pvblk_volume::open("null:notouch").expect("a volume"), 4);
    assert_eq!(read(&mut q, (1 << 31) - 1, 1), vec![0xd1; 512]);
}
