//! `pvblk-lab md`: our RAID-5 against the kernel's md in user-mode Linux, members in memory on both sides.
//!
//! Four members, chunks of 64 KiB, no log. Both arrays use the same CPU, in turns: the guest sleeps while
//! ours is measured. md gets its load from fio in the guest, ours from the lab's loop; both keep the same
//! number of writes in flight, over the same part of the array (96 MiB, or less so that it stays in the CPU's caches). Our array copies data into its stripe cache where md
//! does; with `skip_copy` md doesn't copy, nor does ours with stable buffers.

mod guest;
mod report;

use crate::machine::Machine;
use crate::stripe_queue::array::{Array, Way};
use crate::stripe_queue::load::{Job, for_so_long};
use crate::stripe_queue::members_in_memory;
use anyhow::{Result, ensure};
use guest::{Guest, SampleCost};
use pvblk_block::{Op, SECTOR};
use pvblk_raid5::Consistency;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// MiB of an array.
pub const ARRAY: u64 = 96;
/// fio's options that keep a depth in flight with the fewest system calls, which are dear in this
/// guest.
pub const FIO: &str = "--ioengine=io_uring --fixedbufs --registerfiles --iodepth=DEPTH --iodepth_batch_submit=DEPTH \
     --iodepth_batch_complete_min=1 --iodepth_batch_complete_max=DEPTH";

#[derive(Clone, Debug)]
pub struct MdOptions {
    pub runs: usize,
    /// Seconds of each sample.
    pub seconds: f64,
    /// Requests in flight.
    pub depths: Vec<usize>,
    /// Only cells whose name has this in it, such as `4 KiB random, 32 in`.
    pub cells: Option<String>,
    /// `tests/vm/uml.sh`.
    pub uml: PathBuf,
    /// fio's options in the guest; `DEPTH` stands for the requests in flight.
    pub fio: String,
    /// md's stripe heads.
    pub md_stripes: usize,
    /// Stripe heads of our array.
    pub stripes: usize,
    /// MiB of the array that are written: 1 to [`ARRAY`].
    pub span: u64,
}

impl MdOptions {
    fn sectors(&self) -> u64 {
        self.span << 11
    }
}

/// A kind of writes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Kind {
    /// Name in tables.
    pub name: &'static str,
    /// Bytes of a write.
    pub block: u64,
    /// Writes go to random places instead of in order.
    pub random: bool,
}

const fn kind(name: &'static str, block: u64, random: bool) -> Kind {
    Kind {
        name,
        block,
        random,
    }
}

const KINDS: [Kind; 4] = [
    kind("4 KiB sequential", 4 << 10, false),
    kind("4 KiB random", 4 << 10, true),
    kind("128 KiB", 128 << 10, false),
    kind("192 KiB", 192 << 10, false),
];

/// A writer that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// The kernel's md.
    Md,
    /// The kernel's md once more, as the control.
    MdAgain,
    /// The kernel's md with `skip_copy`, which doesn't copy whole pages.
    MdSkipCopy,
    /// A ram disk of the guest without an array: the cost of the guest itself.
    RamDisk,
    /// Our array with direct writes, as md has.
    Direct,
    /// Our array with the stripe queue.
    Queue,
    /// Our array with direct writes, without a copy.
    DirectStable,
    /// Our array with the stripe queue, without a copy.
    QueueStable,
}

/// Order of the writers in a round; neighbours make pairs.
const ROUND: [Who; 8] = [
    Who::Direct,
    Who::Md,
    Who::Queue,
    Who::MdAgain,
    Who::DirectStable,
    Who::MdSkipCopy,
    Who::QueueStable,
    Who::RamDisk,
];

/// One writer's samples, in the order of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct MdSamples {
    pub who: Who,
    /// Writes a second.
    pub rate: Vec<f64>,
    /// CPU time of each write in microseconds: of all processes of the guest, or of our thread.
    pub cpu_us: Vec<f64>,
    /// Bytes that our array has moved for each byte written, without what its members do.
    pub moved: Vec<f64>,
}

/// All samples of one kind and depth.
#[derive(Clone, Debug, Serialize)]
pub struct MdCell {
    pub kind: Kind,
    /// Requests in flight.
    pub depth: usize,
    /// One entry for each writer.
    pub samples: Vec<MdSamples>,
}

impl MdCell {
    fn name(kind: &Kind, depth: usize) -> String {
        format!("{}, {depth} in flight", kind.name)
    }

    fn of(&self, who: Who) -> Option<&MdSamples> {
        self.samples.iter().find(|s| s.who == who)
    }
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct MdResult {
    pub machine: Machine,
    /// The CPU that both take in turns.
    pub cpu: usize,
    /// The guest's description of its kernel, its array and its fio.
    pub guest: String,
    /// fio's options in the guest.
    pub fio: String,
    /// Stripe heads of md and of our array.
    pub stripes: [usize; 2],
    /// MiB that are written.
    pub span: u64,
    /// Sectors whose parity md's check found wrong at the end; they should be none.
    pub mismatches: u64,
    /// One entry for each kind and depth.
    pub cells: Vec<MdCell>,
}

struct Load {
    kind: Kind,
    depth: usize,
    seconds: f64,
}

struct Pair<'a> {
    options: &'a MdOptions,
    cpu: usize,
    guest: Guest,
    skips_copy: bool,
    array: Array,
}

impl Pair<'_> {
    /// Writes all blocks that are measured later at least once.
    fn fill(&mut self, who: Who) -> Result<()> {
        let rows = kind("192 KiB", 192 << 10, false);
        let mut seconds = 0.25;
        loop {
            let cost = self.sample(who, &rows, 32, seconds)?;
            if cost.rate * seconds * rows.block as f64
                > 1.1 * (self.options.sectors() * SECTOR) as f64
            {
                return Ok(());
            }
            seconds *= 2.0;
        }
    }

    fn sample(&mut self, who: Who, kind: &Kind, depth: usize, seconds: f64) -> Result<SampleCost> {
        let load = Load {
            kind: *kind,
            depth,
            seconds,
        };
        match who {
            Who::Md | Who::MdAgain => self.md("md0", false, &load),
            Who::MdSkipCopy => self.md("md0", true, &load),
            Who::RamDisk => self.md("ram4", false, &load),
            Who::Direct => self.ours(Way::Direct, false, &load),
            Who::Queue => self.ours(Way::Queue, false, &load),
            Who::DirectStable => self.ours(Way::Direct, true, &load),
            Who::QueueStable => self.ours(Way::Queue, true, &load),
        }
    }

    fn md(&mut self, device: &str, skip_copy: bool, load: &Load) -> Result<SampleCost> {
        if skip_copy != self.skips_copy {
            self.guest
                .set("skip_copy", if skip_copy { "1" } else { "0" })?;
            self.skips_copy = skip_copy;
        }
        let way = if load.kind.random {
            "randwrite"
        } else {
            "write"
        };
        let fio = self.options.fio.replace("DEPTH", &load.depth.to_string());
        let fio = format!("--rw={way} --size={}M {fio}", self.options.span);
        self.guest
            .sample(device, &fio, load.kind.block, load.seconds)
    }

    fn ours(&mut self, way: Way, stable: bool, load: &Load) -> Result<SampleCost> {
        self.array.begin(way, &[])?;
        let job = Job {
            file: 0..self.options.sectors(),
            op: Op::Write,
            random: load.kind.random,
            block: load.kind.block,
            depth: load.depth,
            requests: u64::MAX,
            stable,
        };
        let time = Duration::from_secs_f64(load.seconds);
        let before = self.array.moved_bytes();
        let (rates, cpus) = for_so_long(vec![(&self.array.device, job)], time, &[self.cpu])?;
        let after = self.array.moved_bytes();
        let moved = (after.1 - before.1) as f64 / (after.0 - before.0) as f64;
        Ok(SampleCost {
            rate: rates[0],
            cpus,
            moved: Some(moved),
        })
    }
}

fn array(stripes: usize) -> Result<Array> {
    let members = members_in_memory(ARRAY << 11)?;
    Ok(Array::new(
        members,
        Consistency::Resync,
        stripes,
        &mut || (),
    )?)
}

/// Runs the experiment, with files in `folder`, which must be empty; `progress` is told what is being measured.
pub fn run(options: &MdOptions, folder: &Path, progress: &dyn Fn(&str)) -> Result<MdResult> {
    let mut cells: Vec<MdCell> = Vec::new();
    for kind in KINDS {
        for &depth in &options.depths {
            let name = MdCell::name(&kind, depth);
            if options
                .cells
                .as_ref()
                .is_none_or(|only| name.contains(only))
            {
                let samples = |who| MdSamples {
                    who,
                    rate: Vec::new(),
                    cpu_us: Vec::new(),
                    moved: Vec::new(),
                };
                let samples = ROUND.map(samples).into();
                cells.push(MdCell {
                    kind,
                    depth,
                    samples,
                });
            }
        }
    }
    ensure!(!cells.is_empty(), "no cell has this in its name");
    ensure!(
        (1..=ARRAY).contains(&options.span),
        "--span is 1 to {ARRAY} MiB"
    );
    let cpus = pvblk_sys::cpu::allowed();
    let cpu = *cpus.last().unwrap_or(&0);
    progress("starting the guest");
    // A sample of md takes some seconds more than fio's writes.
    let samples = (options.runs * cells.len() * ROUND.len()) as f64;
    let limit = Duration::from_secs_f64(300.0 + samples * (options.seconds + 10.0));
    let mut pair = Pair {
        options,
        cpu,
        guest: Guest::start(&options.uml, cpu, folder, limit)?,
        skips_copy: false,
        array: array(options.stripes)?,
    };
    let heads = options.md_stripes.to_string();
    pair.guest.set("stripe_cache_size", &heads)?;
    // The first write to a block allocates its memory, and is not counted.
    for who in [Who::Direct, Who::Md, Who::RamDisk] {
        pair.fill(who)?;
    }
    for round in 0..options.runs {
        for cell in &mut cells {
            let name = MdCell::name(&cell.kind, cell.depth);
            progress(&format!("round {} of {}: {name}", round + 1, options.runs));
            // Every second round runs in reverse order.
            let mut order: Vec<usize> = (0..ROUND.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for i in order {
                let to = &mut cell.samples[i];
                let cost = pair.sample(to.who, &cell.kind, cell.depth, options.seconds)?;
                to.rate.push(cost.rate);
                to.cpu_us.push(cost.cpus * 1e6 / cost.rate);
                to.moved.extend(cost.moved);
            }
        }
    }
    let mismatches = pair.guest.check()?;
    Ok(MdResult {
        machine: Machine::here(),
        cpu,
        guest: pair.guest.quit()?,
        fio: options.fio.clone(),
        stripes: [options.md_stripes, options.stripes],
        span: options.span,
        mismatches,
        cells,
    })
}
