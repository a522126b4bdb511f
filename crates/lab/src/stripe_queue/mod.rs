//! `pvblk-lab stripe-queue`: compares RAID-5's direct write path, which is md's, with the stripe queue, as a
//! historical measurement did (seed 004).
//!
//! Members are modelled disks in virtual time (see [`disk`]), where the same figures come out each time
//! except CPU time, and files in real time. The cost of reads for parity (prereads) shows beside runs whose
//! prereads are free.

pub mod array;
pub mod disk;
pub mod load;
pub mod protection;
mod report;
pub mod speed;
pub mod submitters;

use crate::machine::Machine;
use anyhow::Result;
use array::{Array, MEMBERS, Way};
use disk::Disk;
use load::{Job, Phase, READ_WINDOW, StripeCell, StripeSample, WRITE_WINDOW, run_virtually};
use pvblk_block::{BlockDevice, Error, Op};
use pvblk_raid5::Consistency;
use pvblk_volume::ManualClock;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Stripe heads by default: as many as md's, and as in the historical measurement.
const STRIPES: usize = 256;
const BLOCKS: [u64; 2] = [4 << 10, 128 << 10];
const THREADS: [usize; 4] = [1, 2, 4, 8];
const SWEEP: [usize; 8] = [64, 128, 256, 512, 1024, 2048, 4096, 8192];
/// Modelled time of each mix of readers and a writer.
const MIX_TIME: Duration = Duration::from_secs(20);

#[derive(Clone, Debug)]
pub struct StripeQueueOptions {
    pub runs: usize,
    /// Bytes of all files together.
    pub bytes: u64,
    /// Seconds of each sample in memory.
    pub seconds: f64,
    /// The parts to run.
    pub parts: Vec<Part>,
    /// Runs only cells whose name has this in it, such as `random writes, 4 KiB` or, in memory, `two threads,
    /// 4 KiB`; neither mixes nor sizes of the cache.
    pub cells: Option<String>,
}

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Modelled disks: tables, reads beside a writer, sizes of the stripe cache.
    Modelled,
    /// Members that are files.
    Files,
    /// Members in memory.
    Memory,
}

/// All samples of a cell, in the order of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct StripePoint {
    pub cell: StripeCell,
    /// The array has a partial parity log.
    pub ppl: bool,
    /// Samples of direct writes, as md has.
    pub direct: Vec<StripeSample>,
    /// Samples of the stripe queue.
    pub queue: Vec<StripeSample>,
    /// Samples of direct writes once more: the control. Only for files.
    pub direct_again: Vec<StripeSample>,
    /// Samples of direct writes whose prereads are free. Only for modelled disks and writes.
    pub direct_free: Vec<StripeSample>,
    /// Samples of the stripe queue whose prereads are free.
    pub queue_free: Vec<StripeSample>,
}

/// Reads beside a writer.
#[derive(Clone, Debug, Serialize)]
pub struct Mix {
    /// The reader's access: a name in tables.
    pub reader: &'static str,
    /// The writer's access: a name in tables.
    pub writer: &'static str,
    /// MB/s of the reader and of the writer, with direct writes.
    pub direct: Vec<[f64; 2]>,
    /// MB/s of the reader and of the writer, with the stripe queue.
    pub queue: Vec<[f64; 2]>,
}

/// Samples of one size of the stripe cache.
#[derive(Clone, Debug, Serialize)]
pub struct Sweep {
    /// Number of stripe heads.
    pub stripes: usize,
    pub point: StripePoint,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct StripeQueueResult {
    pub machine: Machine,
    /// Bytes of all files together.
    pub bytes: u64,
    /// Points on modelled disks.
    pub modelled: Vec<StripePoint>,
    /// Reads beside a writer, on modelled disks.
    pub mixes: Vec<Mix>,
    /// Sizes of the stripe cache, on modelled disks.
    pub sweep: Vec<Sweep>,
    /// Points on files.
    pub files: Vec<StripePoint>,
    /// Members in memory.
    pub memory: Option<speed::Speeds>,
}

impl StripePoint {
    fn new(cell: StripeCell, ppl: bool) -> StripePoint {
        StripePoint {
            cell,
            ppl,
            direct: Vec::new(),
            queue: Vec::new(),
            direct_again: Vec::new(),
            direct_free: Vec::new(),
            queue_free: Vec::new(),
        }
    }

    fn samples(&mut self, way: Way) -> &mut Vec<StripeSample> {
        match way {
            Way::Direct => &mut self.direct,
            Way::Queue => &mut self.queue,
            Way::DirectFree => &mut self.direct_free,
            Way::QueueFree => &mut self.queue_free,
        }
    }
}

fn consistency(ppl: bool) -> Consistency {
    match ppl {
        true => Consistency::Ppl,
        false => Consistency::Resync,
    }
}

/// Members in memory for an array of `array_sectors` sectors.
pub(crate) fn members_in_memory(array_sectors: u64) -> Result<Vec<Arc<dyn BlockDevice>>, Error> {
    let bytes = member_sectors(array_sectors) * 512;
    let member = |_| pvblk_volume::open(&format!("mem:{bytes}"));
    (0..MEMBERS).map(member).collect()
}

/// Sectors of a member of an array of `array_sectors` sectors, with room for a log.
fn member_sectors(array_sectors: u64) -> u64 {
    (array_sectors / (MEMBERS as u64 - 1) + (8 << 11)).next_multiple_of(1 << 11)
}

/// An array of modelled disks.
struct Modelled {
    array: Array,
    disks: Vec<Arc<Disk>>,
    clock: Arc<ManualClock>,
}

impl Modelled {
    fn sample(&mut self, cell: &StripeCell, way: Way, seed: u64) -> Result<StripeSample> {
        self.disks.iter().for_each(|d| d.park());
        load::in_virtual_time(&mut self.array, &self.clock, cell, way, seed)
    }
}

struct Experiment<'a> {
    options: &'a StripeQueueOptions,
    progress: &'a dyn Fn(&str),
}

impl Experiment<'_> {
    fn cells(&self) -> Vec<StripeCell> {
        let mut cells = self.all_cells();
        if let Some(only) = &self.options.cells {
            cells.retain(|c| c.name().contains(only));
        }
        cells
    }

    fn all_cells(&self) -> Vec<StripeCell> {
        let mut cells = Vec::new();
        for phase in Phase::ALL {
            for block in BLOCKS {
                cells.extend(THREADS.map(|threads| StripeCell {
                    phase,
                    block,
                    threads,
                    bytes: self.options.bytes,
                }));
            }
        }
        cells
    }

    fn room(&self) -> u64 {
        self.all_cells()
            .iter()
            .map(StripeCell::room)
            .max()
            .unwrap_or(0)
    }

    fn on_disks(&self, ppl: bool, stripes: usize) -> Result<Modelled> {
        let clock = Arc::new(ManualClock::default());
        let size = member_sectors(self.room()) * 512;
        let disk = |_| {
            let memory = pvblk_volume::open(&format!("mem:{size}"))?;
            anyhow::Ok(Arc::new(Disk::new(memory, Arc::clone(&clock))))
        };
        let disks = (0..MEMBERS).map(disk).collect::<Result<Vec<_>>>()?;
        let members = disks.iter().map(|d| Arc::clone(d) as Arc<dyn BlockDevice>);
        Ok(Modelled {
            array: Array::new(members.collect(), consistency(ppl), stripes, &mut || {
                clock.advance(Duration::from_millis(1))
            })?,
            disks,
            clock,
        })
    }

    fn tell(&self, what: &str, cell: &StripeCell, ppl: bool) {
        let ppl = if ppl { ", PPL" } else { "" };
        (self.progress)(&format!("{what}: {}{ppl}", cell.name()));
    }

    fn modelled(&self) -> Result<Vec<StripePoint>> {
        let mut points = Vec::new();
        for ppl in [false, true] {
            let mut modelled = self.on_disks(ppl, STRIPES)?;
            for cell in self.cells() {
                if ppl && !cell.phase.writes() {
                    continue;
                }
                self.tell("modelled disks", &cell, ppl);
                let mut point = StripePoint::new(cell, ppl);
                let ways: &[Way] = match cell.phase.writes() && !ppl {
                    true => &[Way::Direct, Way::Queue, Way::DirectFree, Way::QueueFree],
                    false => &[Way::Direct, Way::Queue],
                };
                for run in 0..self.options.runs {
                    for step in 0..ways.len() {
                        let way = ways[(step + run) % ways.len()];
                        let s = modelled.sample(&cell, way, run as u64)?;
                        point.samples(way).push(s);
                    }
                }
                points.push(point);
            }
        }
        Ok(points)
    }

    fn sweep(&self) -> Result<Vec<Sweep>> {
        let mut all = Vec::new();
        for stripes in SWEEP {
            let mut modelled = self.on_disks(false, stripes)?;
            for threads in [1, 4, 8] {
                let cell = StripeCell {
                    phase: Phase::SequentialWrite,
                    block: BLOCKS[0],
                    threads,
                    bytes: self.options.bytes,
                };
                self.tell(&format!("{stripes} stripes"), &cell, false);
                let mut point = StripePoint::new(cell, false);
                for way in [Way::Direct, Way::Queue] {
                    for run in 0..self.options.runs.min(3) {
                        let s = modelled.sample(&cell, way, run as u64)?;
                        point.samples(way).push(s);
                    }
                }
                all.push(Sweep { stripes, point });
            }
        }
        Ok(all)
    }

    fn mixes(&self) -> Result<Vec<Mix>> {
        let Modelled {
            mut array,
            disks,
            clock,
        } = self.on_disks(false, STRIPES)?;
        let half = array.device.capacity_sectors() / 2 / 8 * 8;
        let job = |op, random, block: u64, window: u64| Job {
            file: match op {
                Op::Read => 0..half - 88,
                _ => half + 88..2 * half - 8,
            },
            op,
            random,
            block,
            depth: (window / block).max(1) as usize,
            requests: u64::MAX,
            stable: false,
        };
        let readers = [
            ("random 4 KiB", true, BLOCKS[0], 0),
            ("sequential 4 KiB", false, BLOCKS[0], READ_WINDOW),
            ("sequential 128 KiB", false, BLOCKS[1], READ_WINDOW),
        ];
        let writers = [
            ("sequential 4 KiB", false, BLOCKS[0]),
            ("sequential 128 KiB", false, BLOCKS[1]),
            ("random 4 KiB", true, BLOCKS[0]),
        ];
        let mut mixes = Vec::new();
        for (reader, reads_random, reads, window) in readers {
            for (writer, writes_random, writes) in writers {
                (self.progress)(&format!(
                    "modelled disks: {reader} reads beside {writer} writes"
                ));
                let mut mix = Mix {
                    reader,
                    writer,
                    direct: Vec::new(),
                    queue: Vec::new(),
                };
                for run in 0..self.options.runs {
                    for step in 0..2 {
                        let way = [Way::Direct, Way::Queue][(run + step) % 2];
                        array.begin(way, &[])?;
                        disks.iter().for_each(|d| d.park());
                        let jobs = vec![
                            job(Op::Read, reads_random, reads, window),
                            job(Op::Write, writes_random, writes, WRITE_WINDOW),
                        ];
                        let run = run_virtually(&array, &clock, jobs, Some(MIX_TIME), run as u64)?;
                        let rate = |i: usize, block: u64| {
                            (run.requests[i] * block) as f64 / 1e6 / MIX_TIME.as_secs_f64()
                        };
                        let rates = [rate(0, reads), rate(1, writes)];
                        match way {
                            Way::Direct => mix.direct.push(rates),
                            _ => mix.queue.push(rates),
                        }
                    }
                }
                mixes.push(mix);
            }
        }
        Ok(mixes)
    }

    fn files(&self, dir: &Path) -> Result<Vec<StripePoint>> {
        let mut points = Vec::new();
        for ppl in [false, true] {
            let bytes = member_sectors(self.room()) * 512;
            let member = |i| {
                let path = dir.join(format!("member{i}"));
                std::fs::File::create(&path)?.set_len(bytes)?;
                Ok(pvblk_volume::open(&format!("file:{}", path.display()))?)
            };
            let members = (0..MEMBERS).map(member).collect::<Result<_>>()?;
            let mut array = Array::new(members, consistency(ppl), STRIPES, &mut || ())?;
            for cell in self.cells() {
                if ppl && !cell.phase.writes() {
                    continue;
                }
                self.tell("files", &cell, ppl);
                let mut point = StripePoint::new(cell, ppl);
                // The first writes allocate blocks, and are not counted.
                load::in_real_time(&mut array, &cell, Way::Direct, 0)?;
                for run in 0..self.options.runs {
                    for step in 0..3 {
                        let seed = run as u64;
                        let mut one = |way| load::in_real_time(&mut array, &cell, way, seed);
                        match (run + step) % 3 {
                            0 => point.direct.push(one(Way::Direct)?),
                            1 => point.queue.push(one(Way::Queue)?),
                            _ => point.direct_again.push(one(Way::Direct)?),
                        }
                    }
                }
                points.push(point);
            }
        }
        Ok(points)
    }
}

/// Runs the experiment, with files in `dir`; `progress` is told what is being measured.
pub fn run(
    options: &StripeQueueOptions,
    dir: &Path,
    progress: &dyn Fn(&str),
) -> Result<StripeQueueResult> {
    let experiment = Experiment { options, progress };
    let has = |part| options.parts.contains(&part);
    let mut result = StripeQueueResult {
        machine: Machine::here(),
        bytes: options.bytes,
        modelled: Vec::new(),
        mixes: Vec::new(),
        sweep: Vec::new(),
        files: Vec::new(),
        memory: None,
    };
    if has(Part::Modelled) {
        result.modelled = experiment.modelled()?;
    }
    if has(Part::Modelled) && options.cells.is_none() {
        result.mixes = experiment.mixes()?;
        result.sweep = experiment.sweep()?;
    }
    if has(Part::Files) {
        result.files = experiment.files(dir)?;
    }
    if has(Part::Memory) {
        result.memory = Some(speed::run(options, progress)?);
    }
    Ok(result)
}
