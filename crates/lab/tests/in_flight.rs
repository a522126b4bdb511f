//! The limit in flight (docs/decisions/0051-limit-in-flight.md): a front end as it serves over the modelled SSD, in virtual time. With
//! `PVBLK_TABLE=1` and `--nocapture`, `the_whole_table` prints the table of that page.

use pvblk_block::Op;
use pvblk_client::rings::{InStream, MergePolicy};
use pvblk_lab::bed::modelled_ssd;
use pvblk_lab::rings::elevator::{InBatch, WhileWaiting};
use pvblk_lab::rings::virtual_time::{VirtualLoad, VirtualRun, VirtualSample};
use std::time::Duration;

const SHAPES: [(u32, u32); 2] = [(8, 32), (32, 8)];
const SIZES: [u32; 6] = [512, 1024, 2048, 4096, 8192, 16384];
/// Share of the best rate of the elevator that each cell has at least.
const LEAST: f64 = 0.95;

fn load(threads: u32, depth: u32, block: u32) -> VirtualLoad {
    VirtualLoad {
        threads,
        depth,
        block,
        op: Op::Read,
        random: 0,
        ring_pages: 8,
        device: modelled_ssd(1.0),
        late: 64,
        seed: 1,
    }
}

/// A sample of 25 ms, after as many.
fn sample<M: MergePolicy>(load: &VirtualLoad) -> VirtualSample {
    let mut run = VirtualRun::new::<M>(load).unwrap();
    run.pass(Duration::from_millis(25)).unwrap();
    run.pass(Duration::from_millis(25)).unwrap()
}

/// Rates of a cell, in MB/s, with 1 page and 8.
fn rates<M: MergePolicy>(load: &VirtualLoad) -> [f64; 2] {
    [1, 8].map(|ring_pages| {
        let load = VirtualLoad {
            ring_pages,
            ..load.clone()
        };
        sample::<M>(&load).mb_s
    })
}

/// The share of the elevator's best rate that the worse of both rings has.
fn share(now: [f64; 2], elevator: [f64; 2]) -> f64 {
    now[0].min(now[1]) / elevator[0].max(elevator[1])
}

/// Checks sequential cells of this operation.
fn cells(op: Op, late: u8, seed: u64, sizes: &[u32]) {
    for (threads, depth) in SHAPES {
        for &block in sizes {
            let load = VirtualLoad {
                op,
                late,
                seed,
                ..load(threads, depth, block)
            };
            let (now, elevator) = (rates::<InStream>(&load), rates::<WhileWaiting>(&load));
            let share = share(now, elevator);
            assert!(
                share >= LEAST,
                "{op:?} of {block} B, {threads} x {depth}, late {late}: {now:?} MB/s, {share:.3} of {elevator:?}"
            );
        }
    }
}

#[test]
fn sequential_reads_are_as_fast_as_by_the_elevator_with_either_ring() {
    cells(Op::Read, 64, 1, &SIZES);
}

#[test]
fn sequential_writes_are_as_fast_as_by_the_elevator_with_either_ring() {
    cells(Op::Write, 64, 2, &SIZES);
}

/// Threads in step with one another, and threads that are rarely or often late.
#[test]
fn it_does_not_depend_on_how_late_threads_are() {
    for (late, seed) in [(0, 3), (16, 4), (160, 5)] {
        cells(Op::Read, late, seed, &[512, 2048]);
    }
}

/// Requests, times and order are the same to the last bit as without the limit.
fn is_unchanged(load: &VirtualLoad) {
    let (before, now) = (sample::<InBatch>(load), sample::<InStream>(load));
    assert!(before == now, "{load:?}: {before:?} and {now:?}");
    assert!(now.requests > 0);
}

#[test]
fn random_requests_go_as_before() {
    for ring_pages in [1, 8] {
        for (threads, depth, op) in [
            (1, 4, Op::Read),
            (8, 4, Op::Write),
            (8, 32, Op::Read),
            (64, 4, Op::Read),
            (64, 4, Op::Write),
        ] {
            is_unchanged(&VirtualLoad {
                op,
                random: threads,
                ring_pages,
                ..load(threads, depth, 4096)
            });
        }
    }
}

/// Streams of one request at a time, however many, and few requests in flight.
#[test]
fn what_cannot_be_merged_and_low_loads_go_as_before() {
    for (threads, depth) in [(1, 1), (64, 1), (1, 32), (8, 4), (2, 16)] {
        for op in [Op::Read, Op::Write] {
            is_unchanged(&VirtualLoad {
                op,
                ..load(threads, depth, 4096)
            });
        }
    }
    // Long requests aren't held.
    is_unchanged(&load(8, 32, 32768));
}

/// Streams beside so many random requests that the ring is never below its limit: they wait for a turn or two of the device.
#[test]
fn no_request_waits_without_bound() {
    for seed in 1..4 {
        let mixed = VirtualLoad {
            random: 24,
            seed,
            ..load(32, 8, 4096)
        };
        let (before, now) = (sample::<InBatch>(&mixed), sample::<InStream>(&mixed));
        assert!(now.merged > 0);
        let times = now.longest.as_secs_f64() / before.longest.as_secs_f64();
        assert!(
            times < 2.0,
            "{:?} instead of {:?}",
            now.longest,
            before.longest
        );
        assert!(now.requests as f64 > 0.98 * before.requests as f64);
    }
}

/// Nothing is answered for a second, so after 100 ms nothing is held.
#[test]
fn a_device_that_does_not_answer_gets_all_after_a_while() {
    let mut run = VirtualRun::new::<InStream>(&VirtualLoad {
        device: "delay:1s:null:64G".into(),
        late: 0,
        ..load(1, 64, 4096)
    })
    .unwrap();
    let sample = run.pass(Duration::from_millis(1150)).unwrap();
    assert_eq!(sample.requests, 64);
    assert_eq!(sample.longest, Duration::from_millis(1100));
}

/// A device of 512 channels can use more than the limit is at first.
#[test]
fn the_limit_climbs_where_the_device_can_use_more() {
    let wide = VirtualLoad {
        device: "delay:210us,channels=512:null:64G".into(),
        late: 16,
        ..load(64, 4, 512)
    };
    let mut run = VirtualRun::new::<InStream>(&wide).unwrap();
    run.pass(Duration::from_millis(200)).unwrap();
    let now = run.pass(Duration::from_millis(50)).unwrap().mb_s;
    let small = sample::<InStream>(&VirtualLoad {
        ring_pages: 1,
        ..wide.clone()
    });
    assert!(now > 1.25 * small.mb_s, "{now} and {}", small.mb_s);
}

#[test]
fn the_whole_table() {
    if std::env::var_os("PVBLK_TABLE").is_none() {
        println!("skipped: it is printed with PVBLK_TABLE=1");
        return;
    }
    println!(
        "| shape | op | block | before, 1 page | 8 pages | now, 1 page | 8 pages | elevator, 1 page | 8 pages | share |"
    );
    for (threads, depth) in SHAPES {
        for op in [Op::Read, Op::Write] {
            for block in SIZES {
                let load = VirtualLoad {
                    op,
                    ..load(threads, depth, block)
                };
                let (before, now) = (rates::<InBatch>(&load), rates::<InStream>(&load));
                let elevator = rates::<WhileWaiting>(&load);
                let all = [before, now, elevator].concat();
                let all: Vec<String> = all.iter().map(|rate| format!("{rate:.0}")).collect();
                println!(
                    "| {threads} x {depth} | {op:?} | {block} | {} | {:.2} |",
                    all.join(" | "),
                    share(now, elevator)
                );
            }
        }
    }
}
