//! `pvblk-lab protection`: the cost of a partial parity log, a private map and checksums, on one thread. Members are in memory, so that the array
//! itself is the limit.

use super::array::MEMBERS;
use super::load::for_so_long;
use super::speed::{SHAPES, Shape, job};
use super::{STRIPES, members_in_memory};
use crate::machine::Machine;
use crate::path::median;
use crate::verdict::{Check, axis, charts, median_ratio, ratio, series, table};
use anyhow::Result;
use pvblk_bench::plot::{Chart, Lines, Point, Scale, Unit};
use pvblk_block::BlockDevice;
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, Consistency, CreateOptions, Raid5, create, prepare, sleepy,
};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

/// Sectors of an array that are used.
const SPAN: u64 = 96 << 11;
const DEPTHS: [usize; 3] = [1, 32, 256];

pub struct ProtectionOptions {
    pub runs: usize,
    pub seconds: f64,
    /// Measures only shapes whose name has this in it.
    pub cells: Option<String>,
}

/// Means of an array; each has those before it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Means {
    None,
    Log,
    Map,
    Checksums,
}

/// In the order of a round, the first once more as the control.
const ROUND: [Means; 5] = [
    Means::None,
    Means::Log,
    Means::Map,
    Means::Checksums,
    Means::None,
];

/// Requests a second, in the order of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct ProtectionPoint {
    pub shape: Shape,
    /// Requests in flight.
    pub depth: usize,
    pub none: Vec<f64>,
    /// The same once more: the control.
    pub none_again: Vec<f64>,
    /// With a partial parity log.
    pub log: Vec<f64>,
    /// With a log and a private map, whose bits are set.
    pub map: Vec<f64>,
    /// With a log, a map and checksums, which are in memory.
    pub checksums: Vec<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct ProtectionResult {
    pub machine: Machine,
    pub points: Vec<ProtectionPoint>,
}

fn array(means: Means) -> Result<Arc<dyn BlockDevice>> {
    let members = members_in_memory(SPAN)?.into_iter().enumerate();
    let members: Vec<_> = members.map(|(n, m)| Some((format!("m{n}"), m))).collect();
    let options = CreateOptions {
        chunk_sectors: super::array::CHUNK_SECTORS as u32,
        consistency: match means {
            Means::None => Consistency::Resync,
            _ => Consistency::Ppl,
        },
        private_map: matches!(means, Means::Map | Means::Checksums),
        checksums: means == Means::Checksums,
        ..CreateOptions::new("lab:0")
    };
    let new = pvblk_raid5::NewMembers {
        members,
        spares: Vec::new(),
    };
    let mut assembly = create(new, &options, &mut sleepy())?;
    let how = AssembleOptions::default();
    prepare(&mut assembly, &how, &mut |_, _| {}, &mut sleepy())?;
    let stripes = ArrayOptions {
        stripes: STRIPES,
        ..ArrayOptions::default()
    };
    let array = Raid5::start(assembly, &stripes)?;
    array.keep()?;
    Ok(array)
}

/// Runs the experiment; `progress` is told what is being measured.
pub fn run(options: &ProtectionOptions, progress: &dyn Fn(&str)) -> Result<ProtectionResult> {
    let time = Duration::from_secs_f64(options.seconds);
    let cpus = pvblk_sys::cpu::allowed();
    let of = [Means::None, Means::Log, Means::Map, Means::Checksums];
    let arrays: Vec<_> = of.into_iter().map(array).collect::<Result<_>>()?;
    let rate = |means: Means, shape: &Shape, depth: usize| {
        let job = job(shape, depth, 0..SPAN);
        let jobs = vec![(&arrays[means as usize], job)];
        anyhow::Ok(for_so_long(jobs, time, &cpus[..1])?.0[0])
    };
    // All blocks get checksums, and all chunks bits.
    for means in of {
        rate(means, &SHAPES[2], 32)?;
    }
    let mut points = Vec::new();
    for shape in SHAPES {
        let only = options.cells.as_ref();
        if only.is_some_and(|only| !shape.name.contains(only)) {
            continue;
        }
        for depth in DEPTHS {
            progress(&format!("{}, {depth} in flight", shape.name));
            let mut point = ProtectionPoint {
                shape,
                depth,
                none: Vec::new(),
                none_again: Vec::new(),
                log: Vec::new(),
                map: Vec::new(),
                checksums: Vec::new(),
            };
            for run in 0..options.runs {
                for step in 0..ROUND.len() {
                    let at = (run + step) % ROUND.len();
                    let to = match (ROUND[at], at) {
                        (Means::None, 0) => &mut point.none,
                        (Means::None, _) => &mut point.none_again,
                        (Means::Log, _) => &mut point.log,
                        (Means::Map, _) => &mut point.map,
                        (Means::Checksums, _) => &mut point.checksums,
                    };
                    to.push(rate(ROUND[at], &shape, depth)?);
                }
            }
            points.push(point);
        }
    }
    for array in &arrays {
        array.close()?;
    }
    Ok(ProtectionResult {
        machine: Machine::here(),
        points,
    })
}

impl ProtectionResult {
    pub fn table(&self) -> String {
        let mut rates = table(&[
            "writes and reads",
            "in flight",
            "none, k/s",
            "log/none",
            "map/log",
            "checksums/map",
            "none/none",
        ]);
        for p in &self.points {
            let control = (&p.none_again[..], &p.none[..]);
            rates.add_row([
                p.shape.name.to_owned(),
                p.depth.to_string(),
                format!("{:.1}", median(&p.none) / 1e3),
                ratio(&p.log, &p.none, control),
                ratio(&p.map, &p.log, control),
                ratio(&p.checksums, &p.map, control),
                format!("{:.2}", median_ratio(&p.none_again, &p.none)),
            ]);
        }
        format!(
            "Arrays of {MEMBERS} members in memory, chunks of 64 KiB, one thread on one CPU, over 96 MiB: without anything, with a partial parity log, with a \
             private map too, with checksums too.\nThousands of requests a second, medians; ratios of pairs with their 95 % interval, n.p.: not proven beside the \
             control. The thread never sleeps, so the ratio is that of the CPU, too.\n\n{rates}\n"
        )
    }

    pub fn charts(&self) -> Vec<Chart> {
        let chart = |shape: &Shape| {
            let line = |name: &str, f: fn(&ProtectionPoint) -> &Vec<f64>| {
                let of = self.points.iter().filter(|p| p.shape.name == shape.name);
                series(name, of.filter_map(|p| Point::spread(p.depth as f64, f(p))))
            };
            Lines {
                title: format!("{}, by requests in flight", shape.name),
                subtitle: "RAID-5 of four members in memory, one thread".into(),
                x: axis("in flight", Unit::Count, Scale::Log2),
                y: axis("requests a second", Unit::Count, Scale::Log2),
                series: vec![
                    line("none", |p| &p.none),
                    line("log", |p| &p.log),
                    line("log, map", |p| &p.map),
                    line("log, map, checksums", |p| &p.checksums),
                ],
            }
        };
        charts(SHAPES.iter().map(chart))
    }

    /// Checksums take a quarter of a small write's CPU at most, and a tenth of a large one's.
    pub fn checks(&self) -> Vec<Check> {
        let writes = self.points.iter().filter(|p| !p.shape.read);
        writes
            .map(|p| {
                let least = match p.shape.block {
                    4096 => 0.8,
                    _ => 0.91,
                };
                let figure = median_ratio(&p.checksums, &p.map);
                Check {
                    expected: format!(
                        "{}, {} in flight: with checksums at least {least} of without",
                        p.shape.name, p.depth
                    ),
                    figure: format!("{figure:.2}"),
                    holds: figure >= least,
                }
            })
            .collect()
    }
}
