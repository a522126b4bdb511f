//! `pvblk-lab queues`: compares one queue with several by the number of jobs, as the historical
//! measurement of multiple queues did (seed 001).
//!
//! Two processes take part, as in `pvblk-lab rings`. On `null` the CPUs are the limit: the cost of front end,
//! rings and back end. The volume leaves the buffers of reads as they are, as the null_blk of that
//! measurement does: filling them would measure the caches of the CPU, which many jobs' buffers don't fit.
//! The modelled device serves each queue one request at a time, so that more queues give more by themselves.

mod report;

use crate::bed::{Bed, Lane, Load, Pattern, Sample, Wishes, memory_bytes};
use crate::machine::Machine;
use anyhow::Result;
use serde::Serialize;
use std::path::Path;

#[derive(Clone, Debug)]
pub struct QueuesOptions {
    /// Queues to compare with one on `null`; 2 to 16.
    pub queues: u32,
    /// Factor by which the modelled device's clock runs slower.
    pub slower: f64,
    pub runs: usize,
    /// Seconds of each sample.
    pub seconds: f64,
    /// Measures only a few points of each table.
    pub quick: bool,
}

/// All samples of one load, in the order of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct QueuesPoint {
    pub load: Load,
    /// Samples on one queue.
    pub one_queue: Vec<Sample>,
    /// Samples on several queues.
    pub several: Vec<Sample>,
    /// Samples on several queues once more: the control.
    pub several_again: Vec<Sample>,
}

/// Samples by number of queues.
#[derive(Clone, Debug, Serialize)]
pub struct Scaling {
    pub queues: u32,
    /// Samples in the order of the rounds.
    pub samples: Vec<Sample>,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct QueuesResult {
    pub machine: Machine,
    /// Queues that were compared with one.
    pub queues: u32,
    /// On `null`: patterns by jobs.
    pub null: Vec<QueuesPoint>,
    /// On `null`: one thread with 64 requests, and 64 threads with one.
    pub shapes: Vec<QueuesPoint>,
    /// On `null`, 4 KiB random reads, one thread a queue.
    pub scaling: Vec<Scaling>,
    /// On the modelled device that serves each queue one request at a time.
    pub serial: Vec<Scaling>,
    /// Factor by which the modelled device's clock ran slower.
    pub slower: f64,
}

const JOBS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Requests in flight of each job, as fio's example of the IOmeter pattern has it.
const DEPTH: u32 = 64;
/// Queues of the modelled device.
const SERIAL: [u32; 4] = [1, 2, 4, 8];

impl QueuesOptions {
    fn load(&self, threads: u32, depth: u32, pattern: Pattern) -> Load {
        Load {
            threads,
            depth,
            block: 4096,
            pattern,
            batched: false,
            seconds: self.seconds,
        }
    }

    fn by_jobs(&self) -> Vec<Load> {
        let jobs: &[u32] = if self.quick { &[1, 4, 16, 64] } else { &JOBS };
        let mut patterns = vec![Pattern::Iometer, Pattern::RandomRead];
        if !self.quick {
            patterns.push(Pattern::RandomWrite);
        }
        let mut loads = Vec::new();
        for pattern in patterns {
            loads.extend(jobs.iter().map(|&j| self.load(j, DEPTH, pattern)));
        }
        loads
    }

    fn shapes(&self) -> Vec<Load> {
        let shape = |(threads, depth)| self.load(threads, depth, Pattern::RandomRead);
        [(1, DEPTH), (DEPTH, 1)].map(shape).into()
    }
}

struct Experiment<'a> {
    options: &'a QueuesOptions,
    bed: Bed,
    progress: &'a dyn Fn(&str),
}

impl Experiment<'_> {
    fn connect(&self, disk: &str, queues: u32, loads: &[Load]) -> Result<Lane> {
        let wishes = Wishes {
            queues,
            ring_pages: 8,
            memory_bytes: memory_bytes(loads, queues),
        };
        self.bed.connect(disk, &wishes)
    }

    fn tell(&self, run: usize, what: &str) {
        (self.progress)(&format!(
            "round {} of {}: {what}",
            run + 1,
            self.options.runs
        ));
    }

    fn points(&self, loads: &[Load]) -> Result<Vec<QueuesPoint>> {
        let one = self.connect("null", 1, loads)?;
        let several = self.connect("null", self.options.queues, loads)?;
        let again = self.connect("null", self.options.queues, loads)?;
        let mut points: Vec<QueuesPoint> = loads
            .iter()
            .map(|load| QueuesPoint {
                load: load.clone(),
                one_queue: Vec::new(),
                several: Vec::new(),
                several_again: Vec::new(),
            })
            .collect();
        for run in 0..self.options.runs {
            for p in &mut points {
                let load = &p.load;
                self.tell(
                    run,
                    &format!("{:?}, {} x {}", load.pattern, load.threads, load.depth),
                );
                for step in 0..3 {
                    match (run + step) % 3 {
                        0 => p.one_queue.push(one.measure(load)?),
                        1 => p.several.push(several.measure(load)?),
                        _ => p.several_again.push(again.measure(load)?),
                    }
                }
            }
        }
        Ok(points)
    }

    fn scaling(&self, disk: &str, counts: &[(u32, Load)]) -> Result<Vec<Scaling>> {
        let mut lanes = Vec::new();
        for (queues, load) in counts {
            lanes.push(self.connect(disk, *queues, std::slice::from_ref(load))?);
        }
        let mut all: Vec<Scaling> = counts
            .iter()
            .map(|&(queues, _)| Scaling {
                queues,
                samples: Vec::new(),
            })
            .collect();
        for run in 0..self.options.runs {
            for ((scaling, lane), (queues, load)) in all.iter_mut().zip(&lanes).zip(counts) {
                self.tell(run, &format!("{disk}, {queues} queues"));
                scaling.samples.push(lane.measure(load)?);
            }
        }
        Ok(all)
    }
}

/// Runs the experiment, with its socket in `dir`; `progress` is told what is being measured.
pub fn run(options: &QueuesOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<QueuesResult> {
    let machine = Machine::here();
    let us = 100.0 * options.slower;
    let disks = [
        ("null".to_owned(), "null:64G,notouch".to_owned()),
        (
            "serial".to_owned(),
            format!("delay:{us:.0}us,serial:null:64G"),
        ),
    ];
    let most = options.queues.max(SERIAL[SERIAL.len() - 1]);
    let experiment = Experiment {
        options,
        bed: Bed::start(dir, &disks, most)?,
        progress,
    };
    // A thread and a worker for each queue need as many CPUs: with more queues nothing can be
    // gained.
    let cpus = machine.cpus as u32;
    let counts = [1, 2, 4, 6, 8]
        .into_iter()
        .filter(|&n| n == 1 || 2 * n <= cpus);
    let null_counts: Vec<(u32, Load)> = counts
        .map(|n| (n, options.load(n, DEPTH, Pattern::RandomRead)))
        .collect();
    let serial_counts: Vec<(u32, Load)> = SERIAL
        .iter()
        .map(|&n| (n, options.load(8, 4, Pattern::RandomRead)))
        .collect();
    Ok(QueuesResult {
        machine,
        queues: options.queues,
        null: experiment.points(&options.by_jobs())?,
        shapes: experiment.points(&options.shapes())?,
        scaling: experiment.scaling("null", &null_counts)?,
        serial: experiment.scaling("serial", &serial_counts)?,
        slower: options.slower,
    })
}
