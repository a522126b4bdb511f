//! [`Reload`]: the configuration is read again, and what it changes is carried out.

use super::Difference;
use super::plan::{Served, Step, plan};
use super::{DiskWanted, Listeners, WantedState};
use crate::cli::ServeArgs;
use crate::config::{File, ServeConfig};
use crate::opener::Opener;
use anyhow::Result;
use parking_lot::Mutex;
use pvblk_block::error_line;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most steps at the same time: a disk whose medium hangs holds up its own step.
const AT_ONCE: usize = 16;

/// A server that carries steps out while it serves.
pub trait Steps: Send + Sync {
    /// The disks and sockets that are served now.
    fn present(&self) -> Served;
    /// Forgets disks that could not be opened and aren't wanted any more.
    fn forget_failed(&self, wanted: &Served);
    /// Waits for its own disk only, and not for ever.
    fn carry_out(&self, step: &Step) -> Result<()>;
}

/// Reads the configuration of a running server again.
pub struct Reload {
    args: ServeArgs,
    opener: Arc<Opener>,
    state: Arc<WantedState>,
    /// The file that the server was started with. The lock keeps reloads apart.
    started: Mutex<File>,
    /// Reloads that a signal asked for and that haven't begun, and the one at work.
    asked: AtomicUsize,
}

impl Reload {
    pub fn new(
        args: &ServeArgs,
        opener: &Arc<Opener>,
        state: &Arc<WantedState>,
        started: &ServeConfig,
    ) -> Reload {
        Reload {
            args: args.clone(),
            opener: Arc::clone(opener),
            state: Arc::clone(state),
            started: Mutex::new(started.file().clone()),
            asked: AtomicUsize::new(0),
        }
    }

    /// For a signal: reads the configuration file again, if there is one, on a thread of its own, and logs what came of it.
    pub fn soon(self: &Arc<Reload>, server: &Arc<impl Steps + 'static>) {
        if self.args.config.is_none() || self.asked.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let (reload, server) = (Arc::clone(self), Arc::clone(server));
        let work = move || {
            loop {
                let seen = reload.asked.load(Ordering::Acquire);
                match reload.run(&*server, false) {
                    Ok(difference) => tracing::info!("reload: {}", difference.line()),
                    Err(e) => tracing::error!("reload: nothing is changed: {}", error_line(&*e)),
                }
                if reload.asked.fetch_sub(seen, Ordering::AcqRel) == seen {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("pvblk-reload".into());
        if let Err(e) = thread.spawn(work) {
            self.asked.store(0, Ordering::Release);
            tracing::error!("reload: starting a thread for it: {e}");
        }
    }

    /// Reads the configuration, and unless it is a `dry_run` changes what `server` serves. A mistake in the file changes nothing.
    pub fn run(&self, server: &dyn Steps, dry_run: bool) -> Result<Difference> {
        let started = self.started.lock();
        let config = ServeConfig::resolve(&self.args, &self.opener)?;
        let after = self.state.preview(&config.configured);
        let wanted = served(
            after.wanted(&config.configured),
            after.listeners(&config.configured).clone(),
        );
        config.check(&self.args, &after.wanted(&config.configured))?;
        let present = server.present();
        let mut difference = Difference::new(&present, &wanted, &self.state.held_back());
        difference.needs_restart = started.differences(config.file());
        if dry_run {
            return Ok(difference);
        }
        self.state.reload(config.configured)?;
        // Disks that were added or removed meanwhile are among them.
        let wanted = served(self.state.disks(), self.state.listeners());
        server.forget_failed(&wanted);
        let steps = plan(&server.present(), &wanted);
        for (step, why) in carry_out(server, &steps) {
            difference.add_failure(&step, why);
        }
        difference.applied = true;
        Ok(difference)
    }
}

fn served(disks: Vec<(String, DiskWanted)>, listeners: Listeners) -> Served {
    Served {
        disks: disks.into_iter().collect(),
        listeners,
    }
}

/// Carries out steps, those that may take what others free after them; returns those that failed. A disk of which a step failed is left as it is.
fn carry_out(server: &dyn Steps, steps: &[Step]) -> Vec<(Step, String)> {
    let mut failed: Vec<(Step, String)> = Vec::new();
    for turn in steps.chunk_by(|a, b| a.turn() == b.turn()) {
        let given_up: BTreeSet<String> = failed
            .iter()
            .filter_map(|(step, _)| step.disk().map(str::to_owned))
            .collect();
        let goes_on = |s: &&Step| s.disk().is_none_or(|d| !given_up.contains(d));
        let turn: Vec<&Step> = turn.iter().filter(goes_on).collect();
        let next = AtomicUsize::new(0);
        let failures = Mutex::new(Vec::new());
        let work = || {
            while let Some(step) = turn.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(e) = server.carry_out(step) {
                    failures.lock().push(((*step).clone(), error_line(&*e)));
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..turn.len().min(AT_ONCE) {
                // Without a thread this one does it all.
                let _ = std::thread::Builder::new()
                    .name("pvblk-reload".into())
                    .spawn_scoped(scope, work);
            }
            work();
        });
        failed.append(&mut failures.into_inner());
    }
    failed
}
