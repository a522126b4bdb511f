use pvblk_cache::*;
use pvblk_lab::page_order::{Cell, Policy, disks::Cost, load};
fn main() {
    let args: Vec<u64> = std::env::args()
        .skip(1)
        .map(|a| a.parse().unwrap())
        .collect();
    let (pages, active) = (args[0], args[1]);
    let verbose = args.get(2).copied().unwrap_or(0);
    for random in [false, true] {
        for n in [1u32, 2, 4, 8, 12, 16, 32, 64] {
            if verbose > 0 && n as u64 != verbose {
                continue;
            }
            let mut all = vec![];
            for wait in [
                WaitPolicy::FullTimeout,
                WaitPolicy::IfCongested,
                WaitPolicy::Progress,
            ] {
                for active_share in [
                    ActiveShare::Percent(50),
                    ActiveShare::Percent(25),
                    ActiveShare::Percent(0),
                    ActiveShare::Refault,
                ] {
                    let cell = Cell {
                        processes: n,
                        random,
                        policy: Some(Policy {
                            order: FrameOrder::Kept,
                            wait,
                            active: active_share,
                        }),
                        pages,
                        active_pages: active,
                    };
                    let t = std::time::Instant::now();
                    let r = load::run(&cell, 1.0, false, Cost::PLAIN).unwrap();
                    if verbose > 0 {
                        let c = &r.counters;
                        println!(
                            "{wait:?} {active_share:?}: {:.0} KiB/s, {} stalls of {:?}, failed {}, direct {:?}, eff {:?}, ra acc {:?}, reqs {} kib/req {:.1}, refaults {}, active {} inactive {} misses {} hits {} allocstall {} [{:?}]",
                            r.kib_per_second,
                            c.stalls,
                            c.average_stall(),
                            c.failed_after_progress,
                            c.direct_share(),
                            c.effectiveness(),
                            c.readahead_accuracy(),
                            c.read_requests,
                            c.pgpgin as f64 / c.read_requests as f64,
                            c.workingset_refault_file,
                            c.nr_active_file,
                            c.nr_inactive_file,
                            c.misses,
                            c.hits,
                            c.allocstall,
                            t.elapsed()
                        );
                    }
                    all.push(r.kib_per_second);
                }
            }
            let best = all.iter().copied().fold(0.0, f64::max);
            let direct = load::run(
                &Cell {
                    processes: n,
                    random,
                    policy: None,
                    pages,
                    active_pages: active,
                },
                1.0,
                false,
                Cost::PLAIN,
            )
            .unwrap()
            .kib_per_second;
            let p: Vec<String> = all
                .iter()
                .map(|a| format!("{:+.0}", 100.0 * (a / best - 1.0)))
                .collect();
            println!(
                "{} {n:3}: best {best:.0} direct {direct:.0} full {:?} cong {:?} prog {:?}",
                if random { "rnd" } else { "seq" },
                &p[0..4],
                &p[4..8],
                &p[8..12]
            );
        }
    }
}
