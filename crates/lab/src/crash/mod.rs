//! `pvblk-lab crash`: kills the server, the front end, or both, in the middle of writes, again and again. It
//! checks that no write is lost that must not be, that no sector is torn, that no older write overwrites a
//! newer one, and that each error has a known cause.
//!
//! Three processes take part: a referee; a server with one disk; and a workload, which checks every sector
//! that it reads against a journal in shared memory, and reads the whole disk after a restart. All exports
//! are run with all volumes. The seed decides which process is killed when (counted in requests), the options
//! of the next server, the speed of the medium, and the requests of the workload; the scheduler decides the
//! rest.
//!
//! With a slow medium below the files some writes of a killed server are still on their way when the next one
//! starts. The numbers in the sectors tell when one of them overwrites a newer one, whether soon or when the
//! medium has settled.

mod journal;
pub mod load;
mod medium;
mod referee;
mod stage;
mod stamp;

pub use stage::{Export, Volume};

use crate::machine::Machine;
use anyhow::{Context, Result, bail};
use medium::Medium;
use parking_lot::Mutex;
use referee::Referee;
use serde::Serialize;
use stage::Stage;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Size of the disk in sectors (512 B): 8 MiB, so that it can be checked whole after each restart.
const SECTORS: u64 = 16384;

#[derive(Clone, Debug)]
pub struct CrashOptions {
    /// Kills and restarts, over all exports and volumes.
    pub cycles: u32,
    /// Decides which process is killed when, and all other random choices.
    pub seed: u64,
    /// Exports to test, each with each volume.
    pub exports: Vec<Export>,
    pub volumes: Vec<Volume>,
    /// Where a slow medium is mounted; without one the files are on an ordinary file system.
    pub medium: Option<PathBuf>,
    /// Pairs of export and volume at work at a time.
    pub jobs: usize,
}

/// Counts for one export of one volume, all of whose cycles passed.
#[derive(Clone, Debug, Serialize)]
pub struct CrashPart {
    pub export: Export,
    pub volume: Volume,
    /// Times that the server was killed.
    pub back: u32,
    /// Times that the front end was killed.
    pub front: u32,
    /// Times that both were killed.
    pub both: u32,
    /// Times that the server was stopped in order and started again.
    pub restarted: u32,
    /// Kills with writes held by the medium until the next server was being started.
    pub held: u32,
    /// Starts that were refused, mostly because I/O of the last server was still at work.
    pub refused: u32,
    /// Number of completed requests.
    pub operations: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct CrashResult {
    pub machine: Machine,
    /// The seed that replays the decisions.
    pub seed: u64,
    /// True if the files were on a slow medium.
    pub slow: bool,
    /// In the order of the options.
    pub parts: Vec<CrashPart>,
    /// Seconds in all.
    pub seconds: f64,
}

impl CrashResult {
    pub fn table(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        table.set_header([
            "export",
            "volume",
            "server killed",
            "front end killed",
            "both",
            "stopped",
            "writes held",
            "starts refused",
            "requests",
        ]);
        for p in &self.parts {
            let figures = [
                p.back,
                p.front,
                p.both,
                p.restarted,
                p.held,
                p.refused,
                p.operations,
            ];
            let names = [p.export.to_string(), p.volume.to_string()];
            table.add_row(names.into_iter().chain(figures.map(|n| n.to_string())));
        }
        let cycles: u32 = self
            .parts
            .iter()
            .map(|p| p.back + p.front + p.both + p.restarted)
            .sum();
        format!(
            "{table}\n\n{cycles} cycles in {:.0} s, seed {}{}: nothing flushed was lost, nothing overtaken, nothing torn, no error without a reason.",
            self.seconds,
            self.seed,
            if self.slow { ", slow medium" } else { "" },
        )
    }
}

/// Runs the experiment in `dir`, which is empty; `progress` is told how far it is.
pub fn run(
    options: &CrashOptions,
    dir: &Path,
    progress: &(dyn Fn(&str) + Sync),
) -> Result<CrashResult> {
    let begin = Instant::now();
    let pairs: Vec<(Export, Volume)> = options
        .exports
        .iter()
        .flat_map(|&e| options.volumes.iter().map(move |&v| (e, v)))
        .collect();
    if pairs.is_empty() {
        bail!("no export, or no volume");
    }
    let each = options.cycles.div_ceil(pairs.len() as u32);
    let work = Mutex::new(pairs.iter().copied().enumerate().collect::<VecDeque<_>>());
    let done: Mutex<Vec<(usize, Result<CrashPart>)>> = Mutex::default();
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let Some((index, (export, volume))) = work.lock().pop_front() else {
                        return;
                    };
                    let part = one(options, (export, volume), each, dir, progress, &failed)
                        .with_context(|| {
                            let seed = options.seed;
                            format!("--export {export} --volume {volume} --seed {seed}")
                        });
                    if part.is_err() {
                        failed.store(true, Ordering::Relaxed);
                    }
                    done.lock().push((index, part));
                    if failed.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
    });
    let mut done = done.into_inner();
    done.sort_by_key(|(index, _)| *index);
    // The first failure is reported; others may follow from how that one ended.
    let parts: Result<Vec<CrashPart>> = done.into_iter().map(|(_, part)| part).collect();
    Ok(CrashResult {
        machine: Machine::here(),
        seed: options.seed,
        slow: options.medium.is_some(),
        parts: parts?,
        seconds: begin.elapsed().as_secs_f64(),
    })
}

fn one(
    options: &CrashOptions,
    (export, volume): (Export, Volume),
    cycles: u32,
    dir: &Path,
    progress: &(dyn Fn(&str) + Sync),
    failed: &AtomicBool,
) -> Result<CrashPart> {
    let dir = dir.join(format!("{export}-{volume}"));
    std::fs::create_dir(&dir).with_context(|| format!("making {}", dir.display()))?;
    let files = options.medium.as_deref().unwrap_or(&dir);
    let stage = Stage::new(export, volume, &dir, files, SECTORS)?;
    let names = stage.files().into_iter().map(|(name, _)| name).collect();
    let medium = Medium::new(options.medium.as_deref(), names)?;
    // A pair's decisions don't depend on which other pairs run.
    let pair = export as u64 * 16 + volume as u64;
    let rng = fastrand::Rng::with_seed(options.seed ^ pair << 32);
    let mut referee = Referee::new(stage, medium, rng)?;
    let part = referee.run(cycles, progress, failed);
    // The medium is released after a failure, too: a server may wait for it.
    referee.heal()?;
    part
}
