//! `pvblk-lab submitters`: RAID-5 with more and more threads, each with a queue and a CPU of its own. Members are in
//! memory, so that the array itself is the limit, or the machine: bare copies of the same bytes show that.

use super::array::{CHUNK_SECTORS, MEMBERS, ROW_SECTORS, assembly};
use super::load::for_so_long;
use super::speed::{SHAPES, Shape, job};
use super::{STRIPES, consistency, members_in_memory};
use crate::machine::Machine;
use crate::path::median;
use crate::threads::joined;
use crate::verdict::{Check, axis, charts, median_ratio, ratio, series, table};
use anyhow::Result;
use pvblk_bench::plot::{Chart, Lines, Point, Scale, Unit};
use pvblk_block::BlockDevice;
use pvblk_raid5::{ArrayOptions, Assembly, Raid5, xor_into};
use serde::Serialize;
use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Sectors of the array that each thread uses: 12 MiB, or 16 MiB on the members.
const PART: u64 = (12 << 11) / ROW_SECTORS * ROW_SECTORS;

pub struct SubmittersOptions {
    pub threads: Vec<usize>,
    pub runs: usize,
    pub seconds: f64,
    /// Requests in flight of each thread.
    pub depth: usize,
    /// Arrays have a partial parity log.
    pub ppl: bool,
    /// Measures only shapes whose name has this in it.
    pub cells: Option<String>,
}

/// Requests a second of all threads together, in the order of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct SubmittersPoint {
    pub shape: Shape,
    pub threads: usize,
    /// All threads on one array.
    pub shared: Vec<f64>,
    /// The same once more: the control.
    pub shared_again: Vec<f64>,
    /// An array for each thread.
    pub apart: Vec<f64>,
    /// Bare copies and sums of the same bytes.
    pub bare: Vec<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct SubmittersResult {
    pub machine: Machine,
    pub ppl: bool,
    pub depth: usize,
    pub points: Vec<SubmittersPoint>,
}

/// A measurement of a round.
#[derive(Clone, Copy)]
enum Way {
    Shared,
    SharedAgain,
    Apart,
    Bare,
}

const WAYS: [Way; 4] = [Way::Shared, Way::Apart, Way::SharedAgain, Way::Bare];

struct Arrays {
    shared: Arc<dyn BlockDevice>,
    apart: Vec<Arc<dyn BlockDevice>>,
}

fn stripes(threads: usize) -> ArrayOptions {
    ArrayOptions {
        stripes: STRIPES * threads,
        ..ArrayOptions::default()
    }
}

/// An array with room for so many threads.
fn array(threads: usize, ppl: bool) -> Result<Arc<dyn BlockDevice>> {
    let array = Raid5::start(assembled(threads, ppl)?, &stripes(threads))?;
    array.keep()?;
    Ok(array)
}

fn assembled(threads: usize, ppl: bool) -> Result<Assembly> {
    let members = members_in_memory(PART * threads as u64)?;
    Ok(assembly(members, consistency(ppl))?)
}

impl Arrays {
    fn new(threads: usize, ppl: bool) -> Result<Arrays> {
        Ok(Arrays {
            shared: array(threads, ppl)?,
            apart: (0..threads).map(|_| array(1, ppl)).collect::<Result<_>>()?,
        })
    }
}

fn part(thread: usize) -> Range<u64> {
    thread as u64 * PART..(thread as u64 + 1) * PART
}

/// Bytes of a block.
const BLOCK: usize = 4096;
/// Blocks of a chunk, and of a thread's part.
const CHUNK: usize = CHUNK_SECTORS as usize / 8;
const BLOCKS: usize = PART as usize / 8;
const DATA: usize = MEMBERS - 1;

/// The memory of one thread's bare copies, as large as its part on the members. The last member has parity.
struct Bare {
    members: Vec<Vec<u8>>,
    data: Vec<u8>,
    page: Vec<u8>,
    old: Vec<u8>,
}

impl Bare {
    fn new(shape: &Shape) -> Bare {
        Bare {
            members: vec![vec![1; BLOCKS / DATA * BLOCK]; MEMBERS],
            data: vec![2; shape.block as usize],
            page: vec![3; BLOCK],
            old: vec![4; BLOCK],
        }
    }

    /// The copies and sums that a request needs at least. Writes of one block of a stripe read the old block and the old parity, those of two read
    /// the third block; all are copied once, for a page of the array or a member's memory, and again to the member.
    fn request(&mut self, shape: &Shape, rng: &mut fastrand::Rng, count: u64) {
        let blocks = self.data.len() / BLOCK;
        let first = match shape.random {
            true => rng.usize(..BLOCKS / blocks),
            false => count as usize % (BLOCKS / blocks),
        } * blocks;
        if blocks == 1 {
            let chunk = first / CHUNK;
            let at = (chunk / DATA * CHUNK + first % CHUNK) * BLOCK;
            let at = at..at + BLOCK;
            let member = chunk % DATA;
            if shape.read {
                self.data.copy_from_slice(&self.members[member][at]);
                return;
            }
            self.old.copy_from_slice(&self.members[member][at.clone()]);
            self.page.copy_from_slice(&self.members[DATA][at.clone()]);
            xor_into(&mut self.page, &[&self.old, &self.data]);
            self.members[DATA][at.clone()].copy_from_slice(&self.page);
            self.old.copy_from_slice(&self.data);
            self.members[member][at].copy_from_slice(&self.old);
            return;
        }
        // Chunks of one row, from its first: their blocks at one offset are a stripe.
        let written = blocks / CHUNK;
        let row = first / blocks % (BLOCKS / DATA / CHUNK) * CHUNK;
        for stripe in 0..CHUNK {
            let at = (row + stripe) * BLOCK..(row + stripe + 1) * BLOCK;
            for member in 0..DATA {
                if member < written {
                    let from = (member * CHUNK + stripe) * BLOCK;
                    self.old.copy_from_slice(&self.data[from..from + BLOCK]);
                    self.members[member][at.clone()].copy_from_slice(&self.old);
                } else {
                    self.old.copy_from_slice(&self.members[member][at.clone()]);
                }
            }
            let [first, second, third] = [0, 1, 2].map(|m| &self.members[m][at.clone()]);
            self.page.copy_from_slice(first);
            xor_into(&mut self.page, &[second, third]);
            self.members[DATA][at].copy_from_slice(&self.page);
        }
    }
}

/// Requests a second of bare copies by so many threads.
fn bare(shape: &Shape, threads: usize, time: Duration, cpus: &[usize]) -> Result<f64> {
    let gate = Barrier::new(threads);
    std::thread::scope(|scope| {
        let thread = |n: usize| {
            let gate = &gate;
            let cpu = cpus[n];
            scope.spawn(move || {
                let pinned = pvblk_sys::cpu::pin(cpu);
                let mut bare = Bare::new(shape);
                let mut rng = fastrand::Rng::with_seed(n as u64 + 1);
                gate.wait();
                pinned?;
                let (begin, mut count) = (Instant::now(), 0);
                while begin.elapsed() < time {
                    for _ in 0..16 {
                        bare.request(shape, &mut rng, count);
                        count += 1;
                    }
                }
                std::hint::black_box(&bare.page);
                anyhow::Ok(count as f64 / begin.elapsed().as_secs_f64())
            })
        };
        let threads: Vec<_> = (0..threads).map(thread).collect();
        threads.into_iter().map(joined).sum()
    })
}

/// Runs the experiment; `progress` is told what is being measured.
pub fn run(options: &SubmittersOptions, progress: &dyn Fn(&str)) -> Result<SubmittersResult> {
    let time = Duration::from_secs_f64(options.seconds);
    let cpus = pvblk_sys::cpu::allowed();
    let mut points = Vec::new();
    for &threads in &options.threads {
        let arrays = Arrays::new(threads, options.ppl)?;
        for shape in SHAPES {
            let only = options.cells.as_ref();
            if only.is_some_and(|only| !shape.name.contains(only)) {
                continue;
            }
            progress(&format!("{threads} threads, {}", shape.name));
            let mut point = SubmittersPoint {
                shape,
                threads,
                shared: Vec::new(),
                shared_again: Vec::new(),
                apart: Vec::new(),
                bare: Vec::new(),
            };
            let job = |file| job(&shape, options.depth, file);
            let rate = |jobs| anyhow::Ok(for_so_long(jobs, time, &cpus)?.0.iter().sum::<f64>());
            let shared = |device| rate((0..threads).map(|n| (device, job(part(n)))).collect());
            let apart = || rate(arrays.apart.iter().map(|d| (d, job(part(0)))).collect());
            for run in 0..options.runs {
                for step in 0..WAYS.len() {
                    match WAYS[(run + step) % WAYS.len()] {
                        Way::Shared => point.shared.push(shared(&arrays.shared)?),
                        Way::SharedAgain => point.shared_again.push(shared(&arrays.shared)?),
                        Way::Apart => point.apart.push(apart()?),
                        Way::Bare => point.bare.push(bare(&shape, threads, time, &cpus)?),
                    }
                }
            }
            points.push(point);
        }
        for device in arrays.apart.iter().chain([&arrays.shared]) {
            device.close()?;
        }
    }
    Ok(SubmittersResult {
        machine: Machine::here(),
        ppl: options.ppl,
        depth: options.depth,
        points,
    })
}

impl SubmittersResult {
    /// The point of the same shape with one thread.
    fn one(&self, point: &SubmittersPoint) -> Option<&SubmittersPoint> {
        let same = |p: &&SubmittersPoint| p.threads == 1 && p.shape.name == point.shape.name;
        self.points.iter().find(same)
    }

    pub fn table(&self) -> String {
        let mut rates = table(&[
            "writes and reads",
            "threads",
            "one array, k/s",
            "arrays apart, k/s",
            "bare copies, k/s",
            "one/apart",
            "one array, of one thread",
            "bare, of one thread",
        ]);
        for p in &self.points {
            let of_one = |f: fn(&SubmittersPoint) -> &Vec<f64>| match self.one(p) {
                Some(one) => format!("{:.2}", median(f(p)) / median(f(one))),
                None => "-".into(),
            };
            let thousands = |samples: &[f64]| format!("{:.0}", median(samples) / 1e3);
            let control = (&p.shared_again[..], &p.shared[..]);
            rates.add_row([
                p.shape.name.to_owned(),
                p.threads.to_string(),
                thousands(&p.shared),
                thousands(&p.apart),
                thousands(&p.bare),
                ratio(&p.shared, &p.apart, control),
                of_one(|p| &p.shared),
                of_one(|p| &p.bare),
            ]);
        }
        let log = if self.ppl {
            "with a partial parity log"
        } else {
            "without a log"
        };
        format!(
            "Arrays of {MEMBERS} members in memory, chunks of 64 KiB, {log}; {} requests in flight of each thread, 12 MiB of the array for each.\n\
             Thousands of requests a second, medians; ratios of pairs with their 95 % interval, n.p.: not proven beside the control.\n\n{rates}\n",
            self.depth
        )
    }

    pub fn charts(&self) -> Vec<Chart> {
        let chart = |shape: &Shape| {
            let line = |name: &str, f: fn(&SubmittersPoint) -> &Vec<f64>| {
                let of = self.points.iter().filter(|p| p.shape.name == shape.name);
                series(
                    name,
                    of.filter_map(|p| Point::spread(p.threads as f64, f(p))),
                )
            };
            Lines {
                title: format!("{}, by the number of threads", shape.name),
                subtitle: "RAID-5 of four members in memory".into(),
                x: axis("threads", Unit::Count, Scale::Log2),
                y: axis("requests a second", Unit::Count, Scale::Log2),
                series: vec![
                    line("one array", |p| &p.shared),
                    line("arrays apart", |p| &p.apart),
                    line("bare copies", |p| &p.bare),
                ],
            }
        };
        charts(SHAPES.iter().map(chart))
    }

    pub fn checks(&self) -> Vec<Check> {
        let several = self.points.iter().filter(|p| p.threads > 1);
        several
            .map(|p| {
                let figure = median_ratio(&p.shared, &p.apart);
                Check {
                    expected: format!(
                        "{} threads, {}: one array at least 0.95 of arrays apart",
                        p.threads, p.shape.name
                    ),
                    figure: format!("{figure:.2}"),
                    holds: figure >= 0.95,
                }
            })
            .collect()
    }
}
