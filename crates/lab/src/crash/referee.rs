//! The process that kills the others, and decides when.

use super::journal::{CompletedWrite, Journal};
use super::medium::Medium;
use super::stage::{Export, Stage};
use super::{CrashPart, SECTORS};
use crate::child::Server;
use anyhow::{Context, Result, bail};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A server or workload that does nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest time that writes are held after a kill, in milliseconds.
const HELD: u64 = 400;

/// The referee of one disk.
pub(super) struct Referee {
    stage: Stage,
    medium: Medium,
    rng: fastrand::Rng,
    journal: Journal,
    /// Killed servers that may still wait for the medium.
    dying: Vec<Server>,
    releasing: Option<JoinHandle<Result<()>>>,
    part: CrashPart,
}

impl Referee {
    pub fn new(stage: Stage, medium: Medium, rng: fastrand::Rng) -> Result<Referee> {
        Ok(Referee {
            journal: Journal::create(&stage.dir.join("journal"), SECTORS)?,
            part: CrashPart {
                export: stage.export,
                volume: stage.volume,
                back: 0,
                front: 0,
                both: 0,
                restarted: 0,
                held: 0,
                refused: 0,
                operations: 0,
            },
            stage,
            medium,
            rng,
            dying: Vec::new(),
            releasing: None,
        })
    }

    /// Starts the next server, and waits until the fence lets it in.
    fn server(&mut self) -> Result<Server> {
        // Every second server is slow, so that much is in flight when a process is killed; a slow medium does
        // that better.
        let slow = self.rng.bool() && !self.medium.is_slow();
        let before = if slow { "delay:2ms:" } else { "" };
        let (queues, pages) = (self.rng.u32(1..=4), 1 << self.rng.u32(..5));
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.stage.serve(before, queues, pages) {
                Ok(server) => return Ok(server),
                Err(e) if Instant::now() > deadline => return Err(e),
                Err(_) => self.part.refused += 1,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn load(&mut self) -> Result<Server> {
        let args = [
            "crash-load",
            &self.stage.socket(),
            &self.stage.dir.join("journal").display().to_string(),
            &self.rng.u32(..).to_string(),
            &self.stage.export.to_string(),
            &self.stage.volume.to_string(),
            &self.rng.u32(1..=4).to_string(),
            &(1 << self.rng.u32(..5)).to_string(),
        ];
        Server::start_role(&args.map(str::to_owned), None).context("the workload")
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

    /// Kills the server, every second time with writes that the medium holds until the next one is being started.
    fn kill(&mut self, mut server: Server) -> Result<()> {
        let holds = self.medium.is_slow() && self.rng.bool();
        let (before, after) = (self.rng.u64(..20), self.rng.u64(..HELD));
        if holds {
            self.part.held += 1;
            self.medium.hold()?;
            std::thread::sleep(Duration::from_millis(before));
        }
        server.strike()?;
        self.journal.killed();
        if holds {
            // Requests from now on are the next server's, and it may be let in only when the held ones have
            // ended.
            self.medium.no_delays()?;
            let medium = self.medium.clone();
            self.releasing = Some(std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(after));
                medium.release()
            }));
        }
        self.dying.push(server);
        Ok(())
    }

    /// Waits until the killed servers are gone.
    fn reap(&mut self) -> Result<()> {
        if let Some(thread) = self.releasing.take() {
            match thread.join() {
                Ok(released) => released?,
                Err(_) => bail!("the thread that releases writes panicked"),
            }
        }
        for server in self.dying.drain(..) {
            server.kill()?;
        }
        Ok(())
    }

    /// Runs all cycles, until something fails here or elsewhere.
    pub fn run(
        &mut self,
        cycles: u32,
        progress: &(dyn Fn(&str) + Sync),
        failed: &AtomicBool,
    ) -> Result<CrashPart> {
        let mut server = self.server()?;
        let mut load = self.load()?;
        let mut told = Instant::now();
        for cycle in 0..cycles {
            if failed.load(Ordering::Relaxed) {
                break;
            }
            let next = self.cycle(server, load);
            (server, load) = next.with_context(|| format!("cycle {cycle}"))?;
            if told.elapsed() > Duration::from_secs(5) {
                told = Instant::now();
                let (export, volume) = (self.stage.export, self.stage.volume);
                progress(&format!(
                    "{export} {volume}: {cycle} of {cycles} cycles, {} requests",
                    self.journal.operations()
                ));
            }
        }
        self.medium.no_delays()?;
        self.watch(&mut load, 300).context("at the end")?;
        load.stop().context("the workload's end")?;
        // A fresh process reads all once more and checks it, when nothing can land any more.
        self.medium.settle()?;
        let last = self.load().context("the last check")?;
        last.stop().context("the last check")?;
        server.stop().context("the last stop")?;
        self.part.operations = self.journal.operations();
        Ok(self.part.clone())
    }

    fn cycle(&mut self, mut server: Server, mut load: Server) -> Result<(Server, Server)> {
        self.medium.some_delays(&mut self.rng)?;
        let most = if self.medium.is_slow() { 400 } else { 2000 };
        let operations = self.rng.u32(1..most);
        self.watch(&mut load, operations)
            .context("before the kill")?;
        match self.rng.u32(..10) {
            0 => {
                self.part.restarted += 1;
                self.stop(server).context("an orderly stop")?;
                server = self.server().context("a restart")?;
            }
            1..=4 => {
                self.part.back += 1;
                self.kill(server)?;
                // Now and then the server stays away while requests pile up.
                std::thread::sleep(Duration::from_millis(self.rng.u64(..20)));
                server = self.server().context("back killed")?;
                self.reap()?;
            }
            // NBD has no fence between two connections: a dead client's writes in flight may overwrite those
            // of the next client (decision 6). So its server is killed with it.
            5..=7 if self.stage.export != Export::Nbd => {
                self.part.front += 1;
                load.kill()?;
                load = self.load().context("front killed")?;
            }
            _ => {
                self.part.both += 1;
                if self.rng.bool() {
                    load.kill()?;
                    self.kill(server)?;
                } else {
                    self.kill(server)?;
                    load.kill()?;
                }
                server = self.server().context("both killed")?;
                self.reap()?;
                load = self.load().context("both killed")?;
            }
        }
        Ok((server, load))
    }

    /// Stops the server in order: completed writes are not lost then, not even those in a cache.
    fn stop(&mut self, server: Server) -> Result<()> {
        let floor = self.journal.floor();
        let completed: Vec<CompletedWrite> = (0..SECTORS)
            .map(|s| self.journal.completed_write(s))
            .collect();
        server.stop()?;
        for write in completed.iter().filter(|a| a.is_since(floor)) {
            self.journal.stable(write.sector, write.number);
        }
        self.journal.killed();
        Ok(())
    }

    /// Ends all delays, so that no request waits for the medium.
    pub fn heal(&mut self) -> Result<()> {
        self.medium.no_delays()?;
        self.medium.release()?;
        self.reap()
    }
}
