//! The workload's process: writes, reads back, flushes, until it is killed or told to stop.

mod target;
mod worker;

use super::SECTORS;
use super::journal::Journal;
use super::stage::{Export, Volume};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use target::Target;
use worker::Worker;

#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Path of the server's socket.
    pub socket: PathBuf,
    /// Path of the journal.
    pub journal: PathBuf,
    /// Decides the requests.
    pub seed: u64,
    pub export: Export,
    pub volume: Volume,
    /// Number of rings to ask for.
    pub queues: u32,
    /// Pages of each ring.
    pub ring_pages: usize,
}

/// The longest time that a server may be away: longer than any restart, shorter than the referee's
/// patience.
const PATIENCE: Duration = Duration::from_secs(30);

/// Checks the whole disk against the journal, prints that it is ready, and works until SIGTERM.
pub fn run(options: &LoadOptions) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop))?;
    let journal = Arc::new(Journal::open(&options.journal, SECTORS)?);
    let target = Arc::new(Target::connect(options)?);
    // A guest is told of a loss once, on any of its queues. With one queue the flush that told it is known.
    let threads = match options.export {
        Export::VhostUser => 1,
        Export::Rings | Export::Nbd => 2,
    };
    let part = SECTORS / threads;
    let mut workers = Vec::new();
    for t in 0..threads {
        let rng = fastrand::Rng::with_seed(options.seed ^ t << 56);
        let keeps = options.volume.keeps();
        let worker = Worker::open(&target, Arc::clone(&journal), rng, t * part, part, keeps)?;
        workers.push(worker);
    }
    for worker in &mut workers {
        worker.check_all().context("after the restart")?;
    }
    eprintln!("pvblk: ready");
    let threads: Vec<_> = workers
        .into_iter()
        .map(|mut worker| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || worker.work(&stop))
        })
        .collect();
    for thread in threads {
        match thread.join() {
            Ok(result) => result?,
            Err(_) => bail!("a thread of the workload panicked"),
        }
    }
    match Arc::into_inner(target) {
        Some(target) => target.close(),
        None => Ok(()),
    }
}
