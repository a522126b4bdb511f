//! `lab crash`: kills the server, the front end, or both, in the middle of writes, again and again, and checks
//! that nothing answered is lost, nothing is torn below a sector, and no error is seen.
//!
//! Three processes: this referee, a server with a `file` disk, and a workload on its rings, which checks every sector
//! that it reads against a journal in shared memory; after a restart it reads the whole disk. The seed decides who is
//! killed when (counted in requests), what the next server offers and what the workload does; the scheduler decides the rest.

mod journal;
pub mod load;
mod stamp;

use crate::child::Server;
use crate::machine::Machine;
use anyhow::{Context, Result, bail};
use journal::Journal;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Size of the disk in sectors (512 B): 8 MiB, so that it can be checked whole after each restart.
const SECTORS: u64 = 16384;
/// Nothing answered for so long is a hang.
const PATIENCE: Duration = Duration::from_secs(40);

/// How to run.
#[derive(Clone, Debug)]
pub struct CrashOptions {
    /// Kills and restarts.
    pub cycles: u32,
    /// What decides.
    pub seed: u64,
}

/// What was done, all of it without a loss.
#[derive(Clone, Debug, Serialize)]
pub struct CrashResult {
    /// Where.
    pub machine: Machine,
    /// For a replay of the decisions.
    pub seed: u64,
    /// Server killed.
    pub back: u32,
    /// Front end killed.
    pub front: u32,
    /// Both killed.
    pub both: u32,
    /// Server stopped in order and started again.
    pub restarted: u32,
    /// Requests answered in all.
    pub operations: u32,
    /// Seconds in all.
    pub seconds: f64,
}

impl CrashResult {
    /// For people.
    pub fn table(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        table.set_header(["killed", "cycles"]);
        for (name, n) in [
            ("server", self.back),
            ("front end", self.front),
            ("both", self.both),
            ("none: server stopped in order", self.restarted),
        ] {
            table.add_row([name.to_owned(), n.to_string()]);
        }
        format!(
            "{table}\n\n{} requests answered in {:.0} s, seed {}: nothing answered was lost, nothing torn, no error seen.",
            self.operations, self.seconds, self.seed
        )
    }
}

struct Referee {
    dir: PathBuf,
    rng: fastrand::Rng,
    journal: Journal,
}

impl Referee {
    fn path(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn server(&mut self) -> Result<Server> {
        // Every second server is slow, so that much is in flight when somebody is killed.
        let slow = if self.rng.bool() { "delay:2ms:" } else { "" };
        let file = self.path("disk.img");
        let disk = format!("a={slow}file:{file},size={}", SECTORS * 512);
        let queues = self.rng.u32(1..=4).to_string();
        let pages = (1 << self.rng.u32(..5)).to_string();
        let args = [
            "serve",
            "--disk",
            &disk,
            "--local",
            &format!("unix:{}", self.path("rings.sock")),
            "--max-queues",
            &queues,
            "--max-ring-pages",
            &pages,
        ];
        Server::start(&args.map(str::to_owned), None)
    }

    fn load(&mut self) -> Result<Server> {
        let args = [
            "lab",
            "crash-load",
            &self.path("rings.sock"),
            &self.path("journal"),
            &self.rng.u32(..).to_string(),
            &self.rng.u32(1..=4).to_string(),
            &(1 << self.rng.u32(..5)).to_string(),
        ];
        Server::start(&args.map(str::to_owned), None).context("the workload")
    }

    /// Lets the workload get `operations` further.
    fn watch(&self, load: &mut Server, operations: u32) -> Result<()> {
        let target = self.journal.operations().wrapping_add(operations);
        let end = Instant::now() + PATIENCE;
        while target.wrapping_sub(self.journal.operations()) as i32 > 0 {
            if !load.is_running() {
                bail!("the workload ended: {}", load.last_lines().join(" | "));
            }
            if Instant::now() > end {
                bail!("nothing was answered for {} s", PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(())
    }
}

/// Runs the experiment in `dir`, which is empty; `progress` is told how far it is.
pub fn run(options: &CrashOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<CrashResult> {
    let mut result = CrashResult {
        machine: Machine::here(),
        seed: options.seed,
        back: 0,
        front: 0,
        both: 0,
        restarted: 0,
        operations: 0,
        seconds: 0.0,
    };
    let begin = Instant::now();
    let mut referee = Referee {
        dir: dir.to_owned(),
        rng: fastrand::Rng::with_seed(options.seed),
        journal: Journal::create(&dir.join("journal"), SECTORS)?,
    };
    let mut server = referee.server()?;
    let mut load = referee.load()?;
    let mut told = Instant::now();
    for cycle in 0..options.cycles {
        let step = |what: &str| format!("seed {}, cycle {cycle}, {what}", options.seed);
        let operations = referee.rng.u32(1..2000);
        referee
            .watch(&mut load, operations)
            .with_context(|| step("before the kill"))?;
        let dice = referee.rng.u32(..10);
        match dice {
            0 => {
                result.restarted += 1;
                drop(server);
                server = referee.server().with_context(|| step("a restart"))?;
            }
            1..=4 => {
                result.back += 1;
                server.kill()?;
                // Now and then it stays away while requests pile up.
                std::thread::sleep(Duration::from_millis(referee.rng.u64(..20)));
                server = referee.server().with_context(|| step("back killed"))?;
            }
            5..=7 => {
                result.front += 1;
                load.kill()?;
                load = referee.load().with_context(|| step("front killed"))?;
            }
            _ => {
                result.both += 1;
                if referee.rng.bool() {
                    load.kill()?;
                    server.kill()?;
                } else {
                    server.kill()?;
                    load.kill()?;
                }
                server = referee.server().with_context(|| step("both killed"))?;
                load = referee.load().with_context(|| step("both killed"))?;
            }
        }
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            progress(&format!(
                "{cycle} of {} cycles, {} requests",
                options.cycles,
                referee.journal.operations()
            ));
        }
    }
    referee.watch(&mut load, 1000).context("at the end")?;
    load.stop().context("the workload's end")?;
    // Once more from a fresh process, which reads all and checks it.
    let last = referee.load().context("the last check")?;
    last.stop().context("the last check")?;
    server.stop()?;
    result.operations = referee.journal.operations();
    result.seconds = begin.elapsed().as_secs_f64();
    Ok(result)
}
