//! `pvblk-lab squeeze`: measures how much is swapped with and without giving memory back (the squeeze), how
//! soon the memory is back and at what cost, and shows that a server survives that would be killed otherwise.
//! The first two repeat a historical measurement (seed 003).

pub mod bystander;
mod disks;
mod group;
pub mod overhead;
pub mod reaction;
pub mod swap;

use crate::machine::Machine;
use crate::stats::{HEADER, Summary};
use crate::verdict::{self, Check, axis, charts};
use anyhow::{Context, Result};
use overhead::{Overhead, OverheadShape};
use pvblk_bench::plot::{Chart, Lines, Scale, Unit, band};
use reaction::Reaction;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use swap::{Sizes, SwapRun};

const MIB: u64 = 1 << 20;
/// Intervals of time in which all runs' pools become one figure.
const INTERVALS: usize = 60;

#[derive(Clone, Debug)]
pub struct SqueezeOptions {
    /// Number of runs of each part.
    pub runs: usize,
    /// Smaller and shorter runs.
    pub quick: bool,
    pub parts: Vec<Part>,
}

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Pages swapped in and out.
    Swap,
    /// Time until the memory is back.
    Reaction,
    /// Rates with a limit of 0 and of 1024 pages.
    Overhead,
    /// Survival of the server under a hard limit without swap.
    Survival,
}

/// One run under the limit of the swap experiment, without swap.
#[derive(Clone, Debug, Serialize)]
pub struct Survival {
    /// True if the server listened for pressure.
    pub squeezed: bool,
    /// True if the server was alive at the end.
    pub survived: bool,
    /// Processes of the group that were killed.
    pub kills: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct SqueezeResult {
    pub machine: Machine,
    /// Sizes of the swap experiment.
    pub sizes: Sizes,
    /// Runs of the swap experiment, in the order in which they were made.
    pub swap: Vec<SwapRun>,
    /// Reaction times by size.
    pub reaction: Vec<Reaction>,
    /// Rates with the two limits.
    pub overhead: Vec<Overhead>,
    /// Runs without and with the squeeze.
    pub survival: Vec<Survival>,
}

/// Runs the parts that were asked for.
pub fn run(options: &SqueezeOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<SqueezeResult> {
    let sizes = match options.quick {
        true => Sizes {
            disks: 64,
            pool_bytes: 4 * MIB,
            bystander_bytes: 224 * MIB,
            limit_bytes: 384 * MIB,
            seconds: 6.0,
        },
        false => Sizes {
            disks: 64,
            pool_bytes: 4 * MIB,
            bystander_bytes: 224 * MIB,
            limit_bytes: 384 * MIB,
            seconds: 12.0,
        },
    };
    let mut result = SqueezeResult {
        machine: Machine::here(),
        sizes,
        swap: Vec::new(),
        reaction: Vec::new(),
        overhead: Vec::new(),
        survival: Vec::new(),
    };
    let has = |part| options.parts.contains(&part);
    if has(Part::Swap) {
        for round in 0..options.runs as u64 {
            for (duration, ..) in swap::SEED {
                let what = duration.map_or("no squeeze".into(), |ms| format!("squeeze of {ms} ms"));
                progress(&format!(
                    "swap, run {} of {}: {what}",
                    round + 1,
                    options.runs
                ));
                let run = swap::run_until_one_survives(dir, &sizes, duration, round, progress);
                result.swap.push(run?);
            }
        }
    }
    if has(Part::Reaction) {
        for pool_bytes in [64 * MIB, 1024 * MIB] {
            progress(&format!("reaction with {} MiB", pool_bytes / MIB));
            let rounds = if options.quick { 5 } else { 20 };
            result
                .reaction
                .push(reaction::run(dir, 256, pool_bytes, rounds)?);
        }
    }
    if has(Part::Overhead) {
        progress("overhead");
        let floor = 64 * pvblk_sys::cpu::allowed().len();
        let shapes = [(1, floor), (1, 0), (32, floor), (32, 0)]
            .map(|(depth, floor_pages)| OverheadShape { depth, floor_pages });
        // Many short pairs are measured: other load of the machine changes within seconds.
        let (count, runs) = if options.quick {
            (16_384, 10)
        } else {
            (32_768, 40)
        };
        result.overhead = overhead::run(dir, &shapes, count, runs)?;
    }
    if has(Part::Survival) {
        for squeezed in [false, true] {
            progress(&format!("survival, squeezed: {squeezed}"));
            result.survival.push(survival(dir, &sizes, squeezed)?);
        }
    }
    Ok(result)
}

/// Runs the load of the swap experiment for some seconds, under the same limit and without swap.
fn survival(dir: &Path, sizes: &Sizes, squeezed: bool) -> Result<Survival> {
    let group = group::Group::new("survival")?;
    let flags: &[String] = match squeezed {
        true => &[],
        false => &["--no-pressure".to_owned()],
    };
    let pool_bytes = sizes.pool_bytes as usize;
    let mut disks = disks::Disks::start(dir, &group, sizes.disks, pool_bytes, flags)?;
    let mut bystander = bystander::Bystander::start(&group)?;
    // The kernel is made to choose the server; otherwise either process may be the greatest.
    std::fs::write(
        format!("/proc/{}/oom_score_adj", disks.server.pid()),
        "1000",
    )
    .context("making the server the one to be killed")?;
    disks.fill()?;
    group.limit(Some(sizes.limit_bytes))?;
    bystander.tell(&format!("grow {}", sizes.bystander_bytes / MIB))?;
    bystander.tell("cycle 3000")?;
    let start = std::time::Instant::now();
    let mut rng = fastrand::Rng::with_seed(1);
    let mut survived = true;
    while survived && start.elapsed().as_secs() < 4 {
        survived = disks.burst(rng.usize(0..disks.len())).is_ok();
    }
    let kills = group.kills();
    survived &= disks.server.is_running();
    drop(bystander);
    group.limit(None)?;
    if survived {
        disks.server.stop()?;
    } else {
        drop(disks);
    }
    Ok(Survival {
        squeezed,
        survived,
        kills,
    })
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let all: Vec<f64> = values.collect();
    all.iter().sum::<f64>() / all.len().max(1) as f64
}

impl SqueezeResult {
    fn runs(&self, duration: Option<u64>) -> impl Iterator<Item = &SwapRun> + Clone {
        self.swap.iter().filter(move |r| r.duration_ms == duration)
    }

    pub fn table(&self) -> Result<String> {
        let mut out = String::new();
        if !self.swap.is_empty() {
            let s = &self.sizes;
            writeln!(
                out,
                "{} disks (modelled: 5 ms) with {} MiB of pools, a bystander with {} MiB, limit {} MiB, {} s; means",
                s.disks,
                s.disks as u64 * s.pool_bytes / MIB,
                s.bystander_bytes / MIB,
                s.limit_bytes / MIB,
                s.seconds
            )?;
            let mut table = verdict::table(&[
                "squeeze",
                "pswpin",
                "pswpout",
                "seed: in",
                "out",
                "major faults",
                "bursts/s",
                "burst p99 ms",
                "bystander pages/s",
                "squeezes",
                "killed before",
            ]);
            for (duration, seed_in, seed_out) in swap::SEED {
                let of = |f: fn(&SwapRun) -> f64| mean(self.runs(duration).map(f));
                let name = duration.map_or("none".into(), |ms| format!("{ms} ms"));
                table.add_row([
                    name,
                    format!("{:.0}", of(|r| r.pswpin as f64)),
                    format!("{:.0}", of(|r| r.pswpout as f64)),
                    seed_in.to_string(),
                    seed_out.to_string(),
                    format!("{:.0}", of(|r| r.major_faults as f64)),
                    format!("{:.1}", of(|r| r.bursts_per_second)),
                    format!("{:.1}", of(|r| r.burst_p99_ms)),
                    format!("{:.0}", of(|r| r.bystander_pages as f64) / s.seconds),
                    format!("{:.0}", of(|r| r.squeezes as f64)),
                    self.runs(duration)
                        .map(|r| r.killed)
                        .sum::<u32>()
                        .to_string(),
                ]);
            }
            writeln!(out, "{table}")?;
        }
        for r in &self.reaction {
            let Some(s) = Summary::of(&r.ms) else {
                continue;
            };
            writeln!(
                out,
                "{} MiB of free pools on {} disks: 95 % back after {:.2} ms (median; {:.2} to {:.2}, {} rounds); at rest {:.2} % of a CPU, just above the margin {:.2} %",
                r.pool_bytes / MIB,
                r.disks,
                s.median,
                s.min,
                s.max,
                s.n,
                r.idle_percent[0],
                r.idle_percent[1]
            )?;
        }
        for o in &self.overhead {
            writeln!(
                out,
                "\n4 KiB writes in order and a flush, {} in flight, floor {} pages; MB/s (seed: {:.1} ± {:.1} and {:.1} ± {:.1})\n{HEADER}",
                o.shape.depth,
                o.shape.floor_pages,
                overhead::SEED[0].1,
                overhead::SEED[0].2,
                overhead::SEED[1].1,
                overhead::SEED[1].2,
            )?;
            for (symbol, name, samples, pages) in [
                ('x', "limit 1024", &o.full, o.full_pages),
                ('+', "limit 0", &o.none, o.none_pages),
            ] {
                if let Some(s) = Summary::of(samples) {
                    let (taken, allocated) = pages;
                    let row = s.row(symbol);
                    writeln!(
                        out,
                        "{row}   {name}: {taken} pages moved, {allocated} allocated"
                    )?;
                }
            }
            writeln!(
                out,
                "{}\nlimit 0 / limit 1024 by pairs: {}",
                o.compare()?,
                o.ratio()?
            )?;
        }
        for s in &self.survival {
            writeln!(
                out,
                "no swap, the same limit, {}: the server {}, {} killed in its group",
                if s.squeezed {
                    "squeezed"
                } else {
                    "not squeezed"
                },
                if s.survived { "survived" } else { "was killed" },
                s.kills
            )?;
        }
        Ok(out)
    }

    pub fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        let mut check = |expected: &str, figure: String, holds: bool| {
            let expected = expected.to_owned();
            checks.push(Check {
                expected,
                figure,
                holds,
            });
        };
        if !self.swap.is_empty() {
            let of = |d, f: fn(&SwapRun) -> u64| mean(self.runs(d).map(|r| f(r) as f64));
            let ins = of(None, |r| r.pswpin) / of(Some(10), |r| r.pswpin).max(1.0);
            let outs = of(None, |r| r.pswpout) / of(Some(10), |r| r.pswpout).max(1.0);
            check(
                "pswpin 100 times lower with 10 ms",
                format!("{ins:.0}"),
                ins >= 100.0,
            );
            check(
                "pswpout 50 times lower with 10 ms",
                format!("{outs:.0}"),
                outs >= 50.0,
            );
        }
        for (r, most) in self.reaction.iter().zip([10.0, 40.0]) {
            let median = Summary::of(&r.ms).map_or(f64::MAX, |s| s.median);
            let expected = format!("{} MiB back in less than {most} ms", r.pool_bytes / MIB);
            check(&expected, format!("{median:.2} ms"), median < most);
            let [rest, near] = r.idle_percent;
            check(
                "with all pools full and at rest, the sources take no more than 0.5 % of a CPU",
                format!("{rest:.2} %, just above the margin {near:.2} %"),
                // The bound is as precise as CPU time in ticks of 10 ms.
                rest.max(near) < 0.55,
            );
        }
        if let Some((Ok(c), Ok(r))) = self.overhead.first().map(|o| (o.compare(), o.ratio())) {
            let is_slower = c.proven && c.percent < 0.0;
            check(
                "limit 0 isn't proven slower than limit 1024, and the edge by pairs is within 3 %",
                format!("{:.2} ± {:.2} %, {r}", c.percent, c.percent_error),
                !is_slower && r.low >= 0.97,
            );
        }
        for o in self.overhead.iter().filter(|o| o.shape.floor_pages == 0) {
            let (taken, allocated) = o.none_pages;
            check(
                "without limit and floor, pages allocated are pages moved",
                format!("{allocated} and {taken}"),
                taken == allocated,
            );
        }
        for s in &self.survival {
            let expected = match s.squeezed {
                true => "the squeezed server survives",
                false => "the other is killed",
            };
            check(
                expected,
                format!("{} kills", s.kills),
                s.survived == s.squeezed,
            );
        }
        checks
    }

    /// Pools over time; those of all runs are one band, since each goes up and down many times.
    pub fn charts(&self) -> Vec<Chart> {
        let of = |(duration, ..): (Option<u64>, u64, u64)| {
            let bytes = |(seconds, mib): &(f64, f64)| (*seconds, mib * MIB as f64);
            let runs = self.runs(duration).map(|r| r.pools.iter().map(bytes));
            let runs: Vec<Vec<(f64, f64)>> = runs.map(Iterator::collect).collect();
            let runs: Vec<&[(f64, f64)]> = runs.iter().map(Vec::as_slice).collect();
            if runs.is_empty() {
                return None;
            }
            let name = match duration {
                None => "without squeezes".to_owned(),
                Some(ms) => format!("with squeezes of {ms} ms"),
            };
            Some(Lines {
                title: format!("Pools while somebody else needs memory, {name}"),
                subtitle: format!(
                    "median, least and greatest of {} runs; the bystander comes at 0",
                    runs.len()
                ),
                x: axis("time", Unit::Seconds, Scale::Linear),
                y: axis("memory of all pools", Unit::Bytes, Scale::Linear),
                series: vec![band(&name, &runs, INTERVALS)],
            })
        };
        charts(swap::SEED.into_iter().filter_map(of))
    }
}
